"""The pages of a simulated cache: equal to their definition over random prompts, and to cases counted by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.fleet.instant import NaiveLeafLru, random_paths

from raydix.actors.replay.leaf_lru import LeafLru


class ForgetsParents(LeafLru):
    """A fault: only the last page of a path counts as used."""

    def insert(self, path: Sequence[int]) -> tuple[Sequence[int], list[int]]:
        return super().insert(path[-1:])


def differences(cache: LeafLru, capacity: int, seed: int) -> int:
    """The number of requests with other hits or evicted pages than by the definition."""
    naive, numbers, count = NaiveLeafLru(capacity), dict[tuple[int, ...], int](), 0
    for path in random_paths(seed, 300):
        pages = [numbers.setdefault(path[: n + 1], len(numbers)) for n in range(len(path))]
        hits = cache.match(pages), naive.match(path)
        (new, evicted), (naive_new, naive_evicted) = cache.insert(pages), naive.insert(path)
        same = hits[0] == hits[1] and list(new) == [numbers[each] for each in naive_new]
        count += not (same and evicted == [numbers[each] for each in naive_evicted])
        assert len(cache) == len(naive.used) or not same
    return count


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 8, 13, 40])
def test_hits_and_evicted_pages_equal_the_definition(capacity: int) -> None:
    assert [differences(LeafLru(capacity), capacity, seed) for seed in range(5)] == [0] * 5


def test_the_comparison_sees_a_fault() -> None:
    assert differences(ForgetsParents(8), 8, 0) > 0


def test_the_least_recently_used_leaf_goes_and_its_parent_stays() -> None:
    cache = LeafLru(4)

    assert cache.insert([0, 1]) == ([0, 1], [])
    assert cache.insert([0, 2]) == ([2], [])
    assert cache.insert([0, 3]) == ([3], [])
    assert (cache.match([0, 1, 9]), cache.match([0, 3]), cache.match([9, 8]), cache.match([])) == (2, 2, 0, 0)
    assert cache.insert([0, 4, 5]) == ([4, 5], [1, 2])
    assert (3 in cache, 1 in cache, len(cache)) == (True, False, 4)


def test_of_a_path_that_is_too_long_the_first_pages_stay() -> None:
    cache = LeafLru(2)
    cache.insert([7])

    assert cache.insert([0, 1, 2, 3]) == ([0, 1], [7])
    assert cache.match([0, 1, 2, 3]) == 2


def test_a_cache_has_at_least_one_page() -> None:
    with pytest.raises(ValueError, match="capacity must be at least 1 page, not 0"):
        LeafLru(0)
