"""The reference for a cache with a sliding window: pages that are live or not, searched one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from support.reference.models import ROOT, Found, Handle, Inserted, Node, Page, Place, ReferenceRadixCache, Tokens


@dataclass
class SwaPage(Page):
    """A page with or without its window half. All pages of a node share `live`, `swa_tick` and `swa_locks`."""

    live: bool = True
    swa_tick: int = 0  # the operation that last had its node in its tail
    swa_locks: int = 0  # windows of locks that hold it


@dataclass
class Window:
    """The part of a lock besides the full KV."""

    handle: Handle
    pages: list[SwaPage] = field(default_factory=list)
    released: bool = False  # given up before the lock itself
    used: bool = False  # the lock was given back


class ReferenceSwaCache(ReferenceRadixCache):
    """A prefix cache for sliding windows: each page also has a bit that says whether its window half is there.

    A prefix can be used if the last `min(window, its length)` tokens are all live. A lock holds the nodes that its tail
    lies in, whole, live or not: the last window in whole pages, and the pages of two tokens more. Window halves are
    evicted node by node, the one first that was longest in no tail of a match or an insert.

    Attributes:
        moved: window halves that the last insert moved under locks: the slots that lost one, and those that got it.
        replaced: slots of the cache that the last insert freed for incoming ones.
        tombstoned: slots that lost only their window half in the last eviction.
        swa_freed: tokens that lost their window half in the last eviction, in any way.
    """

    def __init__(self, page_size: int, window: int, *, heals_under_locks: bool = True) -> None:
        super().__init__(page_size)
        self.window = window
        self.tail = page_size * (-(-window // page_size) + -(-2 // page_size))
        self.heals_under_locks = heals_under_locks
        self.moved: list[tuple[int, int]] = []
        self.replaced: list[int] = []
        self.tombstoned: list[int] = []
        self.swa_freed = 0

    def page(self, place: Place) -> SwaPage:
        """The page at a place."""
        return cast(SwaPage, self.pages[place])

    def is_live(self, place: Place) -> bool:
        """Whether the window half of a page is there."""
        return self.page(place).live

    # ---------------------------------------------------------------- match

    def peek(self, tokens: Tokens, namespace: str | None) -> Found:
        path = self._usable_path(tokens, namespace)
        marks = [place for place in path if self.pages[place].ends_node]
        return Found(self._slots_of(path), self._handle(marks[-1] if marks else None))

    def match(self, tokens: Tokens, namespace: str | None) -> Found:
        path = self._usable_path(tokens, namespace)
        self._use(path)
        for place in path:
            self.pages[place].hits += 1
        self._use_window(path)
        return Found(self._slots_of(path), self._handle(path[-1] if path else None))

    def full_prefix_len(self, tokens: Tokens, namespace: str | None) -> int:
        """Return the number of leading tokens with full KV."""
        return len(self._resident_path(tokens, namespace)) * self.page_size

    def _usable_path(self, tokens: Tokens, namespace: str | None) -> list[Place]:
        """Return the longest prefix with a live last window, or all tokens live. Tries every length."""
        path = self._resident_path(tokens, namespace)
        live = [self.is_live(place) for place in path for _ in range(self.page_size)]  # token by token
        for num_pages in range(len(path), 0, -1):
            end = num_pages * self.page_size
            if all(live[end - min(self.window, end) : end]):
                return path[:num_pages]
        return []

    def _use_window(self, path: list[Place]) -> None:
        for place in self._window_of(path):
            self.page(place).swa_tick = self._clock

    def _window_of(self, path: list[Place]) -> list[Place]:
        """The pages of the nodes that the last tokens of a path lie in, as many as a tail has."""
        end = len(path) * self.page_size
        nodes = [node for node in self._nodes_of(path) if len(node[-1].prefix) > end - self.tail]
        return [place for node in nodes for place in node]

    def _nodes_of(self, path: list[Place]) -> list[list[Place]]:
        """A path that ends where a node ends, cut at the marks."""
        nodes: list[list[Place]] = [[]]
        for place in path:
            nodes[-1].append(place)
            if self.pages[place].ends_node:
                nodes.append([])
        assert not nodes[-1], "the path ends within a node"
        return nodes[:-1]

    # ---------------------------------------------------------------- insert

    def insert(
        self,
        tokens: Tokens,
        namespace: str | None,
        slots: Sequence[int],
        prev_prefix_len: int = 0,
        from_handle: Handle = ROOT,
        swa_evicted_seqlen: int = 0,
    ) -> Inserted:
        """As for full attention; and tombstones heal by incoming slots with window halves.

        Those before `swa_evicted_seqlen` have none. New pages without are tombstones; the tail of the new pages with
        them is a separate node, one tail long at most.
        """
        self.moved, self.replaced = [], []
        path = self._resident_path(tokens, namespace)
        prefix_len = len(path) * self.page_size
        known = max(prev_prefix_len, len(from_handle.place.prefix))
        self._use(path)
        adopted = self._heal_path(path, slots, self._round_up(max(known, swa_evicted_seqlen)))
        held = self._slots_of(path)
        duplicates = [slots[at] for at in range(known, len(held)) if slots[at] != held[at]]
        stop = len(tokens) - len(tokens) % self.page_size
        live_from = max(prefix_len, min(self._round_up(swa_evicted_seqlen), stop))
        for place in self._places(tokens, namespace)[len(path) :]:
            end = len(place.prefix)
            its_slots = tuple(slots[end - self.page_size : end])
            page = SwaPage(its_slots, self._clock, self._clock, live=end > live_from, swa_tick=self._clock - 2**62)
            page.ends_node = end in (live_from, max(live_from, stop - self.tail), stop)
            self.pages[place] = page
            adopted += its_slots
            path.append(place)
        self._use_window(path)
        return Inserted(prefix_len, self._handle(path[-1] if path else None), duplicates, adopted)

    def _heal_path(self, path: list[Place], slots: Sequence[int], fresh_from: int) -> list[int]:
        """Give tombstones what is incoming from `fresh_from` on; returns what the tree adopted."""
        adopted: list[int] = []
        for node in self._nodes_of(path):
            fresh = [place for place in node if len(place.prefix) > fresh_from]
            if not fresh or self.is_live(node[0]):
                continue
            if len(fresh) < len(node):
                self.pages[node[-len(fresh) - 1]].ends_node = True
            start, stop = len(fresh[0].prefix) - self.page_size, len(fresh[-1].prefix)
            incoming, old = slots[start:stop], self._slots_of(fresh)
            locked = self.pages[fresh[0]].locks > 0
            if set(incoming) & set(old) or (locked and not self.heals_under_locks):
                continue
            for place in fresh:
                self.page(place).live = True
            if locked:
                self.moved += zip(incoming, old, strict=True)
                continue
            for place in fresh:
                end = len(place.prefix)
                self.pages[place].slots = tuple(slots[end - self.page_size : end])
            self.replaced += old
            adopted += incoming
        return adopted

    def _round_up(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size

    # ---------------------------------------------------------------- locks

    def lock_window(self, handle: Handle) -> Window:
        """`lock`, and hold the tail: it must stay as it is or get better."""
        self.lock(handle)
        window = Window(handle, [self.page(place) for place in self._window_of(self._path_to(handle.place))])
        for page in window.pages:
            page.swa_locks += 1
        return window

    def release_window(self, window: Window) -> None:
        """Give the window up; once."""
        if not window.released:
            window.released = True
            for page in window.pages:
                page.swa_locks -= 1

    def unlock_window(self, window: Window) -> None:
        """Undo one `lock_window`."""
        self.release_window(window)
        self.unlock(window.handle)
        window.used = True

    def _path_to(self, place: Place) -> list[Place]:
        ends = range(self.page_size, len(place.prefix) + 1, self.page_size)
        return [place._replace(prefix=place.prefix[:end]) for end in ends]

    def swa_evictable_size(self) -> int:
        """Live tokens that no window holds."""
        return self._count_live(locked=False)

    def swa_protected_size(self) -> int:
        """Live tokens that one does."""
        return self._count_live(locked=True)

    def _count_live(self, *, locked: bool) -> int:
        pages = [self.page(place) for place in self.pages]
        return sum(len(page.slots) for page in pages if page.live and (page.swa_locks > 0) == locked)

    # ---------------------------------------------------------------- eviction

    def evict_both(self, num_tokens: int, swa_num_tokens: int) -> list[Node]:
        """Full leaves first, then window halves, of one tail the upper node first; returns what went whole."""
        before = self.swa_evictable_size()
        self.tombstoned = []
        victims = self.evict(num_tokens)
        while before - self.swa_evictable_size() < swa_num_tokens:
            ends = [place for place, page in self.pages.items() if page.ends_node and self._may_lose_window(place)]
            if not ends:
                break
            end = min(ends, key=lambda place: (self.page(place).swa_tick, len(place.prefix)))
            if end in self._unlocked_leaves():
                victims.append(self._remove_node(end))
            else:
                self._lose_window(end)
        self.swa_freed = before - self.swa_evictable_size()
        return victims

    def _lose_window(self, end: Place) -> None:
        for place in self._pages_of_node(end):
            self.page(place).live = False
            self.tombstoned += self.pages[place].slots

    def _may_lose_window(self, place: Place) -> bool:
        return self.is_live(place) and not self.page(place).swa_locks

    # ---------------------------------------------------------------- nodes

    def _node_at(self, place: Place) -> Node:
        page = self.page(place)
        return super()._node_at(place)._replace(extra=(page.live, page.swa_locks))
