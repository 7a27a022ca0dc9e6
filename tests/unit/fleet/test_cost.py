"""The choice of a cache: the least cost, equal ones at random, and few candidates in a large fleet."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from raydix.actors.fleet.cost import Candidate, choose, considered, cost


def test_the_least_cost_wins_and_the_weight_decides() -> None:
    busy, idle = Candidate(0, pending=2000, uncached=100), Candidate(1, pending=0, uncached=1000)

    assert [cost(each, 3) for each in (busy, idle)] == [2300, 3000]
    assert (choose([busy, idle], 3), choose([idle, busy], 1)) == (busy, idle)


def test_equal_ones_are_chosen_at_random_or_the_first_one() -> None:
    candidates = [Candidate(0, 9, 9), *(Candidate(cache, 6, 1) for cache in (1, 2, 3))]
    rng = Random(1)

    counts = Counter(choose(candidates, 3, rng).cache for _ in range(600))

    assert sorted(counts) == [1, 2, 3]
    assert min(counts.values()) > 150
    assert choose(candidates, 3).cache == 1


def test_without_candidates_there_is_no_choice() -> None:
    with pytest.raises(ValueError, match="candidates must have at least one entry"):
        choose([], 3)


def test_all_caches_of_a_small_fleet_are_candidates() -> None:
    assert considered({3: 7}, range(16), 2, Random(0)) == list(range(16))


def test_a_large_fleet_has_its_two_longest_and_random_ones() -> None:
    rng = Random(0)
    found = [considered({4: 9, 7: 3, 9: 3, 11: 2}, range(100), 2, rng) for _ in range(400)]

    assert all(each[0] == 4 and each[1] in (7, 9) and len(set(each)) == len(each) for each in found)
    assert {each[1] for each in found} == {7, 9}
    assert Counter(len(each) for each in found).most_common(1)[0][0] == 4
    assert len({cache for each in found for cache in each[2:]}) > 90


def test_without_a_prefix_and_without_random_ones_some_cache_is_a_candidate() -> None:
    assert len(considered({}, range(100), 0, Random(0))) == 1
    assert len(considered({}, range(100), 3, Random(0))) == 3
    assert considered({5: 1}, range(100), 0, Random(0)) == [5]
