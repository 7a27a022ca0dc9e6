"""`page_hashes`: the hashes of a prompt's pages, as the caches' events name them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydix.cache_core.tree.hashing import hash_pages, namespace_seed
from raydix.cache_core.tree.radix_key import RadixKey

Hashes = NDArray[np.int64]


def page_hashes(
    tokens: Any, page_size: int, stride_tokens: int | None = None, namespace: str | None = None, bigram: bool = False
) -> Hashes:
    """Return the hash of every page of a prompt that ends at a multiple of `stride_tokens`.

    Each stands for all tokens up to its page's end, and for the namespace. The tokens behind the last whole page do not
    count. Costs SHA-256 of every page, as each is chained to the one before.

    Args:
        tokens: the prompt's token ids, as `RadixKey` takes them, or a `RadixKey`.
        page_size: tokens of a page of the caches.
        stride_tokens: of their events; a multiple of `page_size`. None: every page.
        namespace: as `frame_namespace` gives it; None: the key's if `tokens` is a key, else the default one.
        bigram: the caches' keys are pairs of neighbouring tokens.

    Returns:
        int64, one for each page; owned by the caller.

    Raises:
        InvalidKeyError: the token ids are not integers in [0, 2**64). It is a ValueError.
        ValueError: a size is out of range.
    """
    stride = pages_of_stride(page_size, page_size if stride_tokens is None else stride_tokens)
    key = RadixKey(tokens, namespace)
    if bigram:
        key = key.bigrams()
    num_pages = len(key) // (page_size * stride) * stride
    size = page_size * key.unit
    ids, seed = key.data[: num_pages * size], namespace_seed(key.extra_key)
    return hash_pages(ids, size, key.width, key.arity, seed, skipped=stride - 1, stride=stride)


def pages_of_stride(page_size: int, stride_tokens: int) -> int:
    """Return the number of pages in a stride.

    Raises:
        ValueError: a size is below 1, or the stride is not whole pages.
    """
    if page_size < 1 or stride_tokens < 1 or stride_tokens % page_size:
        raise ValueError(f"stride_tokens must be a multiple of page_size ({page_size}), not {stride_tokens}")
    return stride_tokens // page_size
