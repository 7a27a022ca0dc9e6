"""`page_hashes`: the hashes of a prompt are those that a tree publishes for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raydix.cache_core import RadixCache, RadixKey, hash_to_int64, hash_token_ids, page_hashes
from raydix.cache_core.tree.page_events import PageRun

PROMPTS: dict[str, Any] = {
    "list": list(range(37)),
    "array": np.arange(37, dtype=np.int32),
    "wide": [1, 2**32, 3, 4, *range(33)],
    "tuples": [(each, each + 1) for each in range(37)],
    "key": RadixKey(list(range(37)), "own"),
}


class Published:
    """A sink that collects stored pages in their order."""

    def __init__(self) -> None:
        self.hashes: list[int] = []

    def stored(self, run: PageRun) -> None:
        self.hashes += run.hashes.tolist()

    def removed(self, hashes: Any) -> None:
        pass

    def cleared(self) -> None:
        pass


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("namespace", [None, "", "1:a--"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_they_are_those_of_the_events(prompt: str, namespace: str | None, page_size: int) -> None:
    tree, sink = RadixCache(page_size), Published()
    tree.publish_events_to(sink)
    tree.insert(RadixKey(PROMPTS[prompt], namespace))

    hashes = page_hashes(PROMPTS[prompt], page_size, namespace=namespace)

    assert hashes.dtype == np.int64
    assert hashes.tolist() == sink.hashes
    for pages in (1, 2, 3, 50):
        strided = page_hashes(PROMPTS[prompt], page_size, pages * page_size, namespace)
        assert strided.tolist() == sink.hashes[pages - 1 :: pages]


def test_they_follow_from_the_definition() -> None:
    first = hash_token_ids([1, 2])
    second = hash_token_ids([3, 4], first)

    assert page_hashes([1, 2, 3, 4, 5], 2).tolist() == [hash_to_int64(first), hash_to_int64(second)]
    assert page_hashes([1, 2, 3, 4, 5], 2, 4).tolist() == [hash_to_int64(second)]
    assert page_hashes([1, 2, 3], 2, 4).tolist() == page_hashes([], 2).tolist() == []


def test_pairs_of_neighbours_have_the_hashes_of_a_bigram_cache() -> None:
    tree, sink = RadixCache(2), Published()
    tree.publish_events_to(sink)
    tree.insert(RadixKey([1, 2, 3, 4, 5, 6]).bigrams())

    assert page_hashes([1, 2, 3, 4, 5, 6], 2, bigram=True).tolist() == sink.hashes


@pytest.mark.parametrize(("page_size", "stride"), [(0, 1), (4, 6), (4, 2), (4, 0), (4, -4), (-1, 1)])
def test_a_stride_is_whole_pages(page_size: int, stride: int) -> None:
    with pytest.raises(ValueError, match="stride_tokens must be a multiple of page_size"):
        page_hashes([1, 2, 3, 4], page_size, stride)
