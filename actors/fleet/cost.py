"""The choice of a cache for a request: which caches are compared, and which of them costs least.

A router of running caches and the simulation call the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the names of the routers are known without the core
    from raydix.cache_core import PageIndex
    from raydix.cache_core.fleet_index.page_hashes import Hashes

MAX_ALL = 16  # Up to so many caches are all compared; of more caches, only a few.
NUM_LONGEST = 2  # number of caches with the longest prefix among the few that are compared


class Candidate(NamedTuple):
    """A cache that a request may go to."""

    cache: int
    pending: float  # tokens that wait there, or are computed
    uncached: float  # tokens of the request that the cache would have to compute; of one to load, its share


class TierColumns:
    """The columns of the tiers below pools, in an index with the columns of the pools.

    Attributes:
        below: column of a pool -> column of the tier below it.
        pool: column of such a tier -> column of the pool above it.
    """

    __slots__ = ("below", "pool")

    def __init__(self, below: Mapping[int, int]) -> None:
        self.below = below
        self.pool = {column: pool for pool, column in below.items()}


def cost(candidate: Candidate, weight: float) -> float:
    """Return what a route to a cache costs, in tokens.

    The request waits for the pending tokens. Its own uncached tokens also delay later requests, and their pages evict
    others, so they weigh more.
    """
    return candidate.pending + weight * candidate.uncached


def choose(candidates: Iterable[Candidate], weight: float, rng: Random | None = None) -> Candidate:
    """Return the candidate with the least cost. Among equals, `rng` chooses; without it, the first one wins.

    Raises:
        ValueError: there are no candidates.
    """
    best: list[Candidate] = []
    least = float("inf")
    for candidate in candidates:
        price = candidate.pending + weight * candidate.uncached  # `cost`, without a call for each
        if price < least or not best:
            least, best = price, [candidate]
        elif price == least:
            best.append(candidate)
    if not best:
        raise ValueError("candidates must have at least one entry, not 0")
    return best[0] if rng is None or len(best) == 1 else rng.choice(best)


def compared(
    index: PageIndex,
    hashes: Hashes,
    columns: Sequence[int],
    num_random: int,
    rng: Random,
    pages: Hashes | None = None,
    stride: int = 1,
    tiers: TierColumns | None = None,
) -> dict[int, tuple[int, int]]:
    """Return the caches to compare for a request: all up to 16; of more, a few, so that a route stays cheap.

    The few are the two with the longest expected prefix, equal ones chosen at random, and `num_random` random ones.

    Args:
        index: the pages of the caches, and perhaps of others.
        hashes: the pages of the prompt, as `PageIndex.prefix_runs` takes them.
        columns: of the caches, in the index; at least one.
        pages, stride: as `PageIndex.prefix_runs` takes them; None: the index has no column with ends.
        tiers: below these caches; None: there are none. A prefix that is longer there counts as the cache's.

    Returns:
        By column, the leading pages that are stored there, and the leading pages that are stored, pending or promised,
        as `PageIndex.prefix_runs` returns them. The columns of tiers below the compared caches are among them.
    """
    all_pages = () if pages is None else (pages, stride)
    if tiers is not None:
        return _compared_tiers(index, hashes, columns, num_random, rng, all_pages, tiers)
    if len(columns) <= MAX_ALL:
        runs = dict.fromkeys(columns, (0, 0))
        found = index.longest_runs(hashes, 0, 0, columns, *all_pages)
        runs.update([(column, (stored, expected)) for column, stored, expected in found])
        return runs
    drawn = rng.sample(columns, min(num_random, len(columns)))
    num_others = index.num_columns - len(columns)  # their runs may be among the longest
    found = index.longest_runs(hashes, NUM_LONGEST + num_others, rng.getrandbits(20), drawn, *all_pages)
    if num_others:
        wanted = set(columns)
        found = [run for run in found if run[0] in wanted]
    runs = {}
    for place, (column, stored, expected) in enumerate(found):
        if place < NUM_LONGEST or column in drawn:
            runs[column] = stored, expected
    for column in drawn:
        runs.setdefault(column, (0, 0))
    return runs or {rng.choice(columns): (0, 0)}


def _compared_tiers(
    index: PageIndex,
    hashes: Hashes,
    columns: Sequence[int],
    num_random: int,
    rng: Random,
    all_pages: tuple[Hashes, int] | tuple[()],
    tiers: TierColumns,
) -> dict[int, tuple[int, int]]:
    """Return what `compared` does, of caches with tiers."""
    chosen, found = columns, []
    if len(columns) > MAX_ALL:
        drawn = rng.sample(columns, min(num_random, len(columns)))
        num_others = index.num_columns - len(columns) - len(tiers.below)  # their runs may be among the longest
        limit = 2 * NUM_LONGEST + num_others  # A cache has two columns at most.
        found = index.longest_runs(hashes, limit, rng.getrandbits(20), (), *all_pages)
        wanted = set(columns) if num_others else None
        best = dict.fromkeys(tiers.pool.get(column, column) for column, _, _ in found)
        longest = [column for column in best if wanted is None or column in wanted][:NUM_LONGEST]
        chosen = list(dict.fromkeys((*longest, *drawn))) or [rng.choice(columns)]
    both = [*chosen, *(tiers.below[column] for column in chosen if column in tiers.below)]
    runs = dict.fromkeys(both, (0, 0))
    runs.update([(column, (stored, held)) for column, stored, held in found if column in runs])
    unknown = [column for column in both if runs[column] == (0, 0)]
    asked = index.longest_runs(hashes, 0, 0, unknown, *all_pages)
    runs.update([(column, (stored, held)) for column, stored, held in asked])
    return runs
