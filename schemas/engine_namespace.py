"""`namespace_of`: the namespace of an engine's request, for connectors and for routers; and the way back to a name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

from raydix.schemas.namespace import MAX_FIELD_LENGTH


class CacheNamespace(NamedTuple):
    """The three parts of a namespace, as the verbs of a client take them: `client.match(tokens, **ns._asdict())`."""

    extra_key: str | None = None
    lora_id: str | None = None
    cache_salt: str | None = None


def namespace_of(
    lora_name: str | None = None,
    lora_path: str | None = None,
    cache_salt: str | None = None,
    identifiers: Sequence[tuple[str, int]] = (),
) -> CacheNamespace:
    """Return the namespace in which an engine caches a request.

    Adapters share KV only if both name and path are equal. If the file at a path is replaced, call
    `client.retire(lora_id=namespace_of(name, path).lora_id)`.

    Args:
        lora_name: the adapter's name; None: the base model.
        lora_path: the adapter's path.
        cache_salt: of the request.
        identifiers: the content hash of each image or other input that is no text, and the place of its first token in
            the prompt, in order. Requests share KV only if all of them are equal.
    """
    lora_id = None if lora_name is None else _short(json.dumps([lora_name, lora_path]))
    extra_key = None
    if identifiers:
        extra_key = "inputs:" + _digest(json.dumps([[str(name), int(place)] for name, place in identifiers]))
    salt = None if cache_salt is None else _short(cache_salt)
    return CacheNamespace(extra_key, lora_id, salt)


def adapter_name(lora_id: str) -> str:
    """Return the name of the adapter in a `lora_id` that `namespace_of` made; any other `lora_id` is a name itself."""
    try:
        parts = json.loads(lora_id)
        if isinstance(parts, list) and len(parts) == 2 and isinstance(parts[0], str):
            parts[0].encode()
            return parts[0]
    except (ValueError, RecursionError):  # no JSON, or no valid Unicode
        return lora_id
    return lora_id


def _short(text: str) -> str:
    return text if len(text) <= MAX_FIELD_LENGTH else "sha256:" + _digest(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
