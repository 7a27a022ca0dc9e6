"""`LeafLru`: which pages of recorded prompts a cache holds, without tokens, slots or leases."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence


class LeafLru:
    """The pages of one cache that evicts its least recently used leaves, one at a time.

    A page is a number that stands for the whole prefix up to it, so that equal numbers have equal parents. A path is
    the pages of a prompt, from the first one on. All pages of a path are used together, so a page is used no later than
    its parent. In the order of use, the deeper page of a path first, children therefore stand before their parents,
    and the first page of all is the leaf to evict.
    """

    def __init__(self, capacity: int) -> None:
        """Make an empty cache.

        Args:
            capacity: pages, at least 1.
        """
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 page, not {capacity}")
        self.capacity = capacity
        self._pages: OrderedDict[int, None] = OrderedDict()  # the least recently used page first

    def __len__(self) -> int:
        """Return the number of pages."""
        return len(self._pages)

    def __contains__(self, page: int) -> bool:
        """Return whether a page is held."""
        return page in self._pages

    def match(self, path: Sequence[int]) -> int:
        """Return the number of leading pages that the cache holds. They are not used by this. O(log(path))."""
        pages = self._pages
        return bisect_left(path, True, key=lambda page: page not in pages)  # a page is held only with its parents

    def insert(self, path: Sequence[int]) -> tuple[Sequence[int], list[int]]:
        """Use the pages of a path, and add the missing ones; return the new pages, and the pages evicted for them.

        A page of the path is never evicted for another one: of a path that is longer than the capacity, the first pages
        are kept.
        """
        pages = self._pages
        kept = path[: self.capacity]
        num_held = self.match(kept)
        new = kept[num_held:]
        for page in reversed(new):
            pages[page] = None
        for page in reversed(kept[:num_held]):
            pages.move_to_end(page)
        return new, [pages.popitem(last=False)[0] for _ in range(len(pages) - self.capacity)]
