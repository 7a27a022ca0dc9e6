"""Position-aware SHA-256 hashes of pages of token ids.

A page's digest is ``SHA256(prior digest || ids)``, each id a little-endian 32-bit integer, so that equal pages at
different places differ. Pages of tuples, or with an id of 2**32 and more, end in a two-byte tag: bytes an id, ids a
tuple. The hashed bytes are unambiguous: their length modulo 4 shows whether there is a tag, the tag how long the ids
are, the other bytes whether a digest is before them. So pages of one size are hashed alike only if ids, encoding and
prior digest are the same. The seed of a namespace is the digest of an odd number of bytes, so that no page can forge
it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raydix.cache_core.tree.radix_key import NARROW_LIMIT, RadixKey


def hash_token_ids(token_ids: Sequence[int | tuple[int, ...]], prior_hash: str | None = None) -> str:
    """The hex SHA-256 of one page of ids (or of tuples of ids), seeded by the digest of the page before it.

    Raises:
        InvalidKeyError: an id is negative, fractional, or 2**64 and more.
        ValueError: `prior_hash` is not hexadecimal.
    """
    key = RadixKey(token_ids)
    prior = None if prior_hash is None else bytes.fromhex(prior_hash)
    return hash_page(key.data, key.width, key.arity, prior).hex()


def hash_page(ids: bytes, width: int, arity: int, prior: bytes | None) -> bytes:
    """The digest of one page of packed ids: `width` bytes an id, `arity` ids a tuple (0: no tuples)."""
    if width == 8 and (wide := np.frombuffer(ids, "<u8")).max(initial=0) < NARROW_LIMIT:
        ids, width = wide.astype("<u4").tobytes(), 4  # a narrow page of a wide key
    if width == 8 or arity:
        ids += bytes((width, arity))  # last: in front, the digest before could spell it
    return hashlib.sha256(prior + ids if prior else ids).digest()


def hash_pages(
    ids: bytes, page_bytes: int, width: int, arity: int, prior: bytes | None, *, skipped: int, stride: int
) -> NDArray[np.int64]:
    """The first 64 bits, signed, of the digests of whole pages in packed ids: `hash_to_int64` of each.

    Each page is chained to the one before, the first to `prior`. Of the pages behind the first `skipped` ones, every
    `stride`-th is returned.
    """
    digests: list[bytes] = []
    for at in range(0, len(ids), page_bytes):
        prior = hash_page(ids[at : at + page_bytes], width, arity, prior)
        digests.append(prior)
    return int64s(digests[skipped::stride])


def namespace_seed(extra_key: str | None) -> bytes | None:
    """Return the digest that the first page of a namespace is chained to; None for the default namespace."""
    if extra_key is None:
        return None
    framed = b"namespace:" + extra_key.encode("utf-8", "surrogatepass")
    framed += b"\1\1" if len(framed) % 2 else b"\0"  # an odd length, and no two names alike
    return hashlib.sha256(framed).digest()


def hash_to_int64(hex_str: str) -> int:
    """The first 16 hex characters as a signed 64-bit integer, as KV events carry them."""
    return int.from_bytes(bytes.fromhex(hex_str[:16]), "big", signed=True)


def int64s(digests: list[bytes]) -> NDArray[np.int64]:
    """The first 64 bits, signed, of each digest: `hash_to_int64` of them all."""
    return np.frombuffer(b"".join([digest[:8] for digest in digests]), ">i8").astype(np.int64)


def hash_bytes(data: bytes) -> int:
    """An unsigned 64-bit id for arbitrary bytes (a multimodal embedding, say), from their SHA-256."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
