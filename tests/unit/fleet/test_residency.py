"""The index of a simulated fleet equals the sets of pages that it was given, over random events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from support.fleet.instant import random_paths

from raydix.actors.fleet.residency import BitsetIndex


class NaiveIndex:
    """Sets of pages by cache, and counts of promises."""

    def __init__(self, num_caches: int) -> None:
        self.stored: list[set[int]] = [set() for _ in range(num_caches)]
        self.promised: list[Counter[int]] = [Counter() for _ in range(num_caches)]

    def runs(self, pages: Sequence[int]) -> dict[int, int]:
        found = {}
        for cache, stored in enumerate(self.stored):
            either = stored | (+self.promised[cache]).keys()
            if run := leading(pages, either):
                found[cache] = run
        return found


def leading(pages: Sequence[int], held: set[int]) -> int:
    return next((place for place, page in enumerate(pages) if page not in held), len(pages))


def differences(index: BitsetIndex, num_caches: int) -> int:
    """The number of lookups that differ, while random paths are stored, removed, promised and withdrawn."""
    rng, naive, count = Random(5), NaiveIndex(num_caches), 0
    numbers: dict[tuple[int, ...], int] = {}
    open_promises: list[tuple[int, list[int]]] = []
    for path in random_paths(3, 1500):
        pages = [numbers.setdefault(path[: n + 1], len(numbers)) for n in range(len(path))]
        cache = rng.randrange(num_caches)
        match rng.randrange(4):
            case 0:
                index.store(cache, pages)
                naive.stored[cache].update(pages)
            case 1:
                index.remove(cache, pages[2:])
                naive.stored[cache].difference_update(pages[2:])
            case 2:
                index.promise(cache, pages)
                naive.promised[cache].update(pages)
                open_promises.append((cache, pages))
            case _ if open_promises:
                cache, pages = open_promises.pop(rng.randrange(len(open_promises)))
                index.withdraw(cache, pages)
                naive.promised[cache].subtract(pages)
        count += index.runs(pages) != naive.runs(pages)
    return count


def test_runs_equal_those_of_sets() -> None:
    assert [differences(BitsetIndex(num_caches), num_caches) for num_caches in (1, 3, 70)] == [0, 0, 0]


def test_the_comparison_sees_a_fault() -> None:
    class ForgetsCounts(BitsetIndex):
        def promise(self, cache: int, pages: Sequence[int]) -> None:
            self.withdraw(cache, pages)
            super().promise(cache, pages)

    assert differences(ForgetsCounts(3), 3) > 0


def test_a_page_of_two_caches_counts_once_and_ends_with_the_last() -> None:
    index = BitsetIndex(2)
    index.store(0, [4, 5])
    index.store(1, [4])

    assert (len(index), index.runs([4, 5, 6])) == (2, {0: 2, 1: 1})

    index.remove(0, [4, 5])
    index.remove(0, [4, 9])
    assert (len(index), index.runs([4, 5]), index.runs([])) == (1, {1: 1}, {})
