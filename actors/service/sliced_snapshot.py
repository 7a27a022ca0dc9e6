"""`sliced_snapshot`: a reader's starting point in a tier with many pages, made in slices while the tier changes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np

from raydix.actors.service.event_feed import Event, EventFeed
from raydix.cache_core import LeasedCache
from raydix.cache_core.tree.page_events import Hashes, PageRun
from raydix.schemas import PackedEvents, SlimEventSnapshot

SLICE_S = 0.001


class _Part(NamedTuple):
    """The pages that one slice has met."""

    runs: list[PageRun]
    num_events: int  # events since the start of the snapshot


class _Changes:
    """The pages that events name, each with the last of its events.

    Pages of several groups are told apart by their group.

    Args:
        events: that follow one another; none of them clears the tier.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self._hashes: dict[int, Hashes] = {}  # group -> rising
        self._last: dict[int, Hashes] = {}  # group -> place of the last event of each of these hashes
        named: dict[int, list[tuple[Hashes, int]]] = {}
        for place, (_, hashes, run, group) in enumerate(events):
            if run is not None or len(hashes):
                named.setdefault(group or 0, []).append((hashes, place))
        for group, rows in named.items():
            hashes = np.concatenate([row for row, _ in rows])
            places = np.repeat([place for _, place in rows], [len(row) for row, _ in rows])
            found, first = np.unique(hashes[::-1], return_index=True)
            self._hashes[group], self._last[group] = found, places[::-1][first]

    def last_events(self, run: PageRun) -> Hashes:
        """Return the place of the last event of each page of a run; -1: no event names it."""
        known = self._hashes.get(run.group or 0)
        if known is None or not len(known):
            return np.full(len(run.hashes), -1)
        at = np.minimum(np.searchsorted(known, run.hashes), len(known) - 1)
        return np.where(known[at] == run.hashes, self._last[run.group or 0][at], -1)


async def sliced_snapshot(feed: EventFeed, cache: LeasedCache) -> PackedEvents | SlimEventSnapshot:
    """Return the pages of a tier as `EventFeed.snapshot` does, after about 1 ms of work at a time.

    Events between the slices are taken into account: the snapshot has exactly the pages after its number.

    Args:
        feed: of the tier's events.
        cache: the tier's, without leases of clients: no page is pending.
    """
    parts: list[_Part] = []
    with feed.recording() as events:
        runs: list[PageRun] = []
        until = perf_counter() + SLICE_S
        for found in cache.walk_pages():
            runs += found
            if perf_counter() >= until:
                parts.append(_Part(runs, len(events)))
                runs = []
                await asyncio.sleep(0)
                until = perf_counter() + SLICE_S
        parts.append(_Part(runs, len(events)))
        seq, ends = feed.seq, cache.usable_ends()
    num_cleared = max((place + 1 for place, event in enumerate(events) if feed.clears(event)), default=0)
    changes = _Changes(events[num_cleared:])
    packed = [feed.snapshot((), ends=ends, seq=seq)]
    for part in parts:
        if part.num_events >= num_cleared:
            packed.append(feed.snapshot(_unchanged(part.runs, changes, feed.page_size), seq=seq))
            await asyncio.sleep(0)
    for place, (_, _, run, _) in enumerate(events[num_cleared:]):
        if run is not None:
            kept = _some_pages(run, changes.last_events(run) == place, feed.page_size)
            packed.append(feed.snapshot(kept, seq=seq))
            if not place % 64:
                await asyncio.sleep(0)
    return feed.joined(packed)


def _unchanged(runs: Iterable[PageRun], changes: _Changes, page_size: int) -> Iterator[PageRun]:
    """Yield the pages of runs that no event names."""
    for run in runs:
        yield from _some_pages(run, changes.last_events(run) < 0, page_size)


def _some_pages(run: PageRun, is_wanted: np.ndarray, page_size: int) -> Iterator[PageRun]:
    """Yield the pages of a run that are wanted, as runs of pages that follow one another."""
    if is_wanted.all():
        yield run
        return
    has_ids = bool(len(run.token_ids))
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_wanted, [False])).astype(np.int8)))
    for first, stop in edges.reshape(-1, 2).tolist():
        parent = run.parent_hash if first == 0 or not has_ids else int(run.hashes[first - 1])
        ids = run.token_ids[first * page_size : stop * page_size]
        yield run._replace(hashes=run.hashes[first:stop], parent_hash=parent, token_ids=ids)
