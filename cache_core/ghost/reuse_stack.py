"""`ReuseStack`: reuse distances, that is how many other pages were used since each page's last use."""

from __future__ import annotations

from itertools import chain, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raydix.cache_core.ghost.prefix_hashes import Hashes

Depths = NDArray[np.int64]

_BLOCK = 256  # uses that are processed together, and compared with one another
_NONE: Depths = np.empty(0, np.int64)


class Group(NamedTuple):
    """The pages of one request, each of them once, the last one first.

    Pages in the stack move to the top; the other pages are added only if the group stores.
    """

    pages: list[int]
    looks_up: bool  # whether their depths are returned
    stores: bool


class ReuseStack:
    """At most `max_pages` pages by the time of their last use, the latest on top.

    If groups name the last page first, no page is above the pages before it in its prefix. That is the order in which
    a tree evicts leaves, least recently used first.

    A use costs a dictionary entry, and a share of the numpy calls of its block. About 200 bytes per page.
    """

    def __init__(self, max_pages: int) -> None:
        self._max_pages = max_pages
        self._last_use: dict[int, int] = {}  # hash of a page in the stack -> time
        self._times = np.empty(0, np.int64)  # the same, in order
        self._pages = np.empty(0, np.uint64)  # the page of each time
        self._now = 0

    def __len__(self) -> int:
        return len(self._times)

    def use(self, groups: list[Group]) -> list[Depths]:
        """Use groups of pages in order. Return for each page how many pages were above it before its group.

        -1: the page was not in the stack. Empty for groups that do not look up.
        """
        depths: list[Depths] = []
        block: list[Group] = []
        num_uses = 0
        for group in groups:
            if block and num_uses + len(group.pages) > _BLOCK:
                depths += self._use_block(block)
                block, num_uses = [], 0
            block.append(group)
            num_uses += len(group.pages)
        return depths + (self._use_block(block) if block else [])

    def _use_block(self, groups: list[Group]) -> list[Depths]:
        sizes = [len(group.pages) for group in groups]
        previous = self._set_times(groups)
        times = np.arange(self._now, self._now + len(previous))
        group = np.repeat(np.arange(len(groups)), sizes)
        found = previous >= 0
        on_top = found | np.repeat([group.stores for group in groups], sizes)
        came = _Uses(times[on_top], previous[on_top], group[on_top])
        asked = np.flatnonzero(found & np.repeat([group.looks_up for group in groups], sizes))
        depths = np.full(len(previous), -1, np.int64)
        depths[asked] = len(self._times) - np.searchsorted(self._times, previous[asked], side="right")
        if len(groups) > 1:  # A group alone needs no correction: in it, no page moves above another one.
            depths[asked] += came.count_above(previous[asked], group[asked])
        pages = np.fromiter(chain.from_iterable([group.pages for group in groups]), np.uint64, len(previous))
        self._renew(pages[on_top], came)
        self._now += len(previous)
        spans = zip(groups, np.cumsum(sizes).tolist(), sizes, strict=True)
        return [depths[end - size : end] if group.looks_up else _NONE for group, end, size in spans]

    def _set_times(self, groups: list[Group]) -> Depths:
        """Set the new times of use; return the old ones, -1 for pages that were not in the stack."""
        last_use, now = self._last_use, self._now
        previous: list[int] = []
        for group in groups:
            pages = group.pages
            before = list(map(last_use.get, pages, repeat(-1)))
            if group.stores:
                last_use.update(zip(pages, range(now, now + len(pages)), strict=True))
            elif max(before, default=-1) >= 0:
                found = zip(pages, before, range(now, now + len(pages)), strict=True)
                last_use.update([(page, time) for page, old, time in found if old >= 0])
            previous += before
            now += len(pages)
        return np.array(previous, np.int64)

    def _renew(self, pages: Hashes, uses: _Uses) -> None:
        """Move pages to the top, in the order of their last use."""
        start, previous = self._now, uses.previous
        keep = np.ones(len(self._times), bool)
        keep[np.searchsorted(self._times, previous[(previous >= 0) & (previous < start)])] = False
        last = ~np.isin(uses.times, previous[previous >= start])  # not used again within the block
        self._times = np.concatenate((self._times[keep], uses.times[last]))
        self._pages = np.concatenate((self._pages[keep], pages[last]))
        surplus = len(self._times) - self._max_pages
        if surplus > 0:
            for page in self._pages[:surplus].tolist():
                del self._last_use[page]
            self._times, self._pages = self._times[surplus:], self._pages[surplus:]


class _Uses(NamedTuple):
    """Uses that move a page to the top: their times, the times of the use before (-1: none), and their groups."""

    times: Depths
    previous: Depths
    group: Depths

    def count_above(self, previous: Depths, group: Depths) -> Depths:
        """Return for pages last used at `previous` how many pages moved above them since then, before their group."""
        since = self.times > previous[:, None]
        since &= self.previous < previous[:, None]
        since &= self.group < group[:, None]
        counts: Depths = np.count_nonzero(since, axis=1)
        return counts
