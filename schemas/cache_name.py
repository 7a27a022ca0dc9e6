"""The rule for names of caches."""

from __future__ import annotations

from raydix.schemas.shown import brief

MAX_NAME = 128  # characters


def check_cache_name(name: object) -> str:
    """Return a cache's name as it is.

    A name has 1 to 128 printable characters, without "/" and without a space at its ends, and is neither "." nor "..".
    So it can be shown as it is, and be part of a path or an address.

    Raises:
        ValueError: the name breaks the rule. The message continues a sentence that begins with the thing named.
    """
    if not isinstance(name, str):
        raise ValueError(f"must be a text, not {brief(name)}")
    if not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"must have 1 to {MAX_NAME} characters, not {len(name)}")
    if not name.isprintable() or name != name.strip() or "/" in name or name in (".", ".."):
        raise ValueError(
            f"must be of printable characters other than '/', without a space at its ends, and not '.' or '..': "
            f"it is {brief(name)}"
        )
    return name
