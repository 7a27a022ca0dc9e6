"""The choice of a cache: the least cost, equal ones at random, and few candidates in a large fleet."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from raydix.actors.fleet.cost import Candidate, TierColumns, choose, compared, cost
from raydix.cache_core import PageIndex


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


PAGES = np.arange(1, 10)


def index_of(num_caches: int, stored: dict[int, int], promised: dict[int, int] | None = None) -> PageIndex:
    """An index of caches with so many leading pages of `PAGES`."""
    index = PageIndex()
    for column in range(num_caches):
        assert index.add_column() == column
        index.apply_snapshot(column, "e", 0, PAGES[: stored.get(column, 0)])
    for column, count in (promised or {}).items():
        index.promise(column, PAGES[:count])
    return index


def test_all_caches_of_a_small_fleet_are_compared() -> None:
    index = index_of(20, {3: 7, 18: 9}, {3: 8, 5: 1})

    runs = compared(index, PAGES, range(16), 2, Random(0))

    assert runs == dict.fromkeys(range(16), (0, 0)) | {3: (7, 8), 5: (0, 1)}


def test_of_a_large_fleet_the_two_longest_and_random_ones_are_compared() -> None:
    rng, held = Random(0), {4: 9, 7: 3, 9: 3, 11: 2}
    index = index_of(100, held)

    found = [compared(index, PAGES, range(100), 2, rng) for _ in range(400)]

    longest = [[column for column, (stored, _) in runs.items() if stored >= 3] for runs in found]
    assert all(each[0] == 4 and 2 <= len(each) <= 4 for each in longest)
    assert {each[1] for each in longest} == {7, 9}
    assert all(runs[column] == (held.get(column, 0),) * 2 for runs in found for column in runs)
    assert Counter(map(len, found)).most_common(1)[0][0] == 4 == max(map(len, found))
    assert set().union(*found) == set(range(100))


def test_promised_pages_make_a_prefix_long() -> None:
    index = index_of(100, {4: 2, 7: 3, 9: 1}, {9: 5})

    assert compared(index, PAGES, range(100), 0, Random(0)) == {9: (1, 5), 7: (3, 3)}


def test_caches_that_are_left_out_are_never_compared() -> None:
    index, columns = index_of(40, {4: 9, 7: 8, 9: 3, 11: 2}), [each for each in range(40) if each not in (4, 7)]

    found = [compared(index, PAGES, columns, 2, Random(seed)) for seed in range(100)]

    assert all(list(runs)[:2] == [9, 11] for runs in found)
    assert set().union(*found) == set(columns)


def test_without_a_prefix_and_without_random_ones_some_cache_is_compared() -> None:
    index = index_of(100, {})

    assert [len(compared(index, PAGES, range(100), count, Random(0))) for count in (0, 1, 3, 200)] == [1, 1, 3, 100]
    assert compared(index_of(100, {5: 1}), PAGES, range(100), 0, Random(0)) == {5: (1, 1)}


# ---------------------------------------------------------------- tiers

WANTED = 24  # caches to compare; the others' runs are in the index, too


def random_index(rng: Random, num_caches: int) -> tuple[PageIndex, dict[int, int]]:
    """Return an index of caches with and without a tier below, and the columns of these tiers by cache."""
    index, below = PageIndex(), {}
    for cache in range(num_caches):
        assert index.add_column() == cache
        index.apply_snapshot(cache, "e", 0, PAGES[: rng.choice((0, 0, 0, rng.randrange(10)))])
        if rng.random() < 0.1:
            index.promise(cache, PAGES[: rng.randrange(1, 10)])
    for cache in range(num_caches):
        if rng.random() < 0.7:
            below[cache] = index.add_column()
            index.apply_snapshot(below[cache], "e", 0, PAGES[: rng.choice((0, 0, rng.randrange(10)))])
    return index, below


@pytest.mark.parametrize("num_caches", [WANTED - 10, WANTED, WANTED + 10])
@pytest.mark.parametrize("seed", range(30))
def test_with_tiers_the_longest_are_those_of_either_column(seed: int, num_caches: int) -> None:
    rng = Random(seed)
    index, below = random_index(rng, num_caches)
    columns = rng.sample(range(num_caches), min(WANTED, num_caches))
    tiers = TierColumns({cache: below[cache] for cache in columns if cache in below})

    runs = compared(index, PAGES, columns, 2, rng, tiers=tiers)

    held = dict.fromkeys(range(index.num_columns), (0, 0))
    held |= {column: (stored, expected) for column, stored, expected in index.prefix_runs(PAGES)}
    chosen = [column for column in runs if column in columns]
    assert set(runs) == {*chosen, *(below[cache] for cache in chosen if cache in below)}
    assert all(run == held[column] for column, run in runs.items())
    reach = {cache: max(held[cache][1], held[below[cache]][1] if cache in below else 0) for cache in columns}
    if len(columns) <= 16:
        assert sorted(chosen) == sorted(columns)
        return
    assert 1 <= len(chosen) <= 4
    best = sorted(filter(None, reach.values()), reverse=True)[:2]
    assert sorted((reach[cache] for cache in chosen), reverse=True)[: len(best)] == best


def test_without_any_prefix_in_a_tier_some_cache_is_compared() -> None:
    index = index_of(100, {})
    tiers = TierColumns({cache: index.add_column() for cache in range(100)})

    sizes = [len(compared(index, PAGES, range(100), count, Random(0), tiers=tiers)) for count in (0, 1, 3, 200)]

    assert sizes == [2, 2, 6, 200]
