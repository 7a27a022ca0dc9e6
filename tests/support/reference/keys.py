"""The framing of namespaces and the hashes of pages, restated from their definition, without the cache's code."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from itertools import pairwise

Triple = tuple[str | None, str | None, str | None]  # extra_key, lora_id, cache_salt
Token = int | tuple[int, ...]

DEFAULT: Triple = (None, None, None)


def framed(triple: Triple) -> str | None:
    """The namespace of a triple: for each part its length in characters, a colon and itself, or a dash for none."""
    if triple == DEFAULT:
        return None
    return "".join("-" if part is None else f"{len(part)}:{part}" for part in triple)


def seed_of(namespace: str | None) -> bytes:
    """Return the seed before the first page: empty, or the digest of a padded name of odd length."""
    if namespace is None:
        return b""
    name = b"namespace:" + namespace.encode("utf-8", "surrogatepass")
    return hashlib.sha256(name + (b"\0" if len(name) % 2 == 0 else b"\1\1")).digest()


def page_bytes(page: Sequence[Token]) -> bytes:
    """The ids, 4 bytes each, or 8 if one of them needs that; tuples and long ids end in a tag that says so."""
    arity = len(page[0]) if isinstance(page[0], tuple) else 0
    ids = [id_ for token in page for id_ in (token if isinstance(token, tuple) else (token,))]
    wide = max(ids) >= 1 << 32
    packed = b"".join(id_.to_bytes(8 if wide else 4, "little") for id_ in ids)
    return packed + (bytes([8 if wide else 4, arity]) if wide or arity else b"")


def page_hashes(tokens: Sequence[Token], page_size: int, triple: Triple = DEFAULT) -> list[str]:
    """The hex digest of each whole page, each seeded by the one before it."""
    digest, digests = seed_of(framed(triple)), []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        digest = hashlib.sha256(digest + page_bytes(tokens[start : start + page_size])).digest()
        digests.append(digest.hex())
    return digests


def event_hashes(tokens: Sequence[Token], page_size: int, triple: Triple = DEFAULT) -> list[int]:
    """The same as events carry them: the first 8 bytes, big-endian, as a signed integer."""
    return [struct.unpack(">q", bytes.fromhex(digest[:16]))[0] for digest in page_hashes(tokens, page_size, triple)]


def image_id(image: bytes) -> int:
    """The id of an image: the first 8 bytes of its SHA-256, big-endian, unsigned."""
    return int(struct.unpack(">Q", hashlib.sha256(image).digest()[:8])[0])


def pairs(tokens: Sequence[int]) -> list[Token]:
    """Neighbouring tokens: n make n - 1."""
    return list(pairwise(tokens))
