"""One string for the three things that separate namespaces, framed so that different triples differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

MAX_FIELD_LENGTH = 4096  # characters


def frame_namespace(extra_key: str | None, lora_id: str | None, cache_salt: str | None) -> str | None:
    """Return the core's namespace key for three parts; None for the default namespace (all three absent).

    Each part is its presence, length and text ("-" if absent, else "length:text"), so that ("bc", "a") and
    ("c", "ab") differ, and the empty string differs from None.

    Raises:
        ValueError: a part is not a string, is too long, or cannot be encoded as UTF-8.
    """
    if extra_key is None and lora_id is None and cache_salt is None:
        return None
    return "".join((_frame("extra_key", extra_key), _frame("lora_id", lora_id), _frame("cache_salt", cache_salt)))


def _frame(name: str, part: str | None) -> str:
    if part is None:
        return "-"
    if not isinstance(part, str):
        raise ValueError(f"{name} must be a string or None, not {type(part).__name__}")
    if len(part) > MAX_FIELD_LENGTH:
        raise ValueError(f"{name} has {len(part)} characters, more than {MAX_FIELD_LENGTH}: pass a digest of it")
    try:
        part.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode text: {error}") from None
    return _text_of(part)


def _text_of(part: str) -> str:
    return f"{len(part)}:{part}"


@lru_cache(maxsize=1024)
def unframe_namespace(namespace: str) -> tuple[str | None, str | None, str | None]:
    """Return the `extra_key`, `lora_id` and `cache_salt` of a key that `frame_namespace` returned.

    Raises:
        ValueError: `namespace` is not such a key.
    """
    parts: list[str | None] = []
    at = 0
    for _ in range(3):
        if namespace[at : at + 1] == "-":
            parts.append(None)
            at += 1
            continue
        length, _, _ = namespace[at:].partition(":")
        start = at + len(length) + 1
        at = start + int(length)
        parts.append(namespace[start:at])
    if frame_namespace(*parts) != namespace:
        raise ValueError(f"not a framed namespace: {namespace!r}")
    extra_key, lora_id, cache_salt = parts
    return extra_key, lora_id, cache_salt


def namespaces_of(extra_key: str | None, lora_id: str | None, cache_salt: str | None) -> Callable[[str | None], bool]:
    """Return a function: whether a namespace key has the given parts. None matches any part.

    For most keys that do not match, the function takes one search for a text.
    """
    wanted = (extra_key, lora_id, cache_salt)
    texts = [_text_of(part) for part in wanted if part is not None]

    def is_meant(namespace: str | None) -> bool:
        for text in texts:
            if namespace is None or text not in namespace:
                return False
        parts = (None, None, None) if namespace is None else unframe_namespace(namespace)
        return all(want in (None, part) for want, part in zip(wanted, parts, strict=True))

    return is_meant
