"""The choice of a cache for a request: which caches are considered, and which of them costs least.

Pure functions: a router of running caches and the simulation call the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple

MAX_ALL = 16  # caches; of more, a few are considered
NUM_LONGEST = 2  # of these, with the longest prefix


class Candidate(NamedTuple):
    """A cache that a request may go to."""

    cache: int
    pending: float  # tokens that wait there, or are computed
    uncached: float  # tokens of the request that the cache would have to compute


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
    for each in candidates:
        price = each.pending + weight * each.uncached  # `cost`, without a call for each
        if price < least or not best:
            least, best = price, [each]
        elif price == least:
            best.append(each)
    if not best:
        raise ValueError("candidates must have at least one entry, not 0")
    return best[0] if rng is None or len(best) == 1 else rng.choice(best)


def considered(lengths: Mapping[int, int], caches: Sequence[int], num_random: int, rng: Random) -> list[int]:
    """Return the caches to compare for a request: all up to 16; of more, a few, so that a route stays cheap.

    These few are the two with the longest prefix, equal ones chosen at random, and `num_random` random ones.

    Args:
        lengths: the prefix that each cache holds, in any unit; a cache without one may be missing.
        caches: all caches, by number.
    """
    if len(caches) <= MAX_ALL:
        return list(caches)
    chosen = _longest(lengths, rng)
    chosen += [each for each in rng.sample(caches, min(num_random, len(caches))) if each not in chosen]
    return chosen or [rng.choice(caches)]


def _longest(lengths: Mapping[int, int], rng: Random) -> list[int]:
    """Return the caches with the longest prefixes, `NUM_LONGEST` at most."""
    rest, chosen = dict(lengths), list[int]()
    while rest and len(chosen) < NUM_LONGEST:
        most = max(rest.values())
        equal = [each for each, length in rest.items() if length == most]
        new = rng.sample(equal, min(NUM_LONGEST - len(chosen), len(equal)))
        chosen += new
        for each in new:
            del rest[each]
    return chosen
