"""The reference for `RadixTrie`, written for clarity: a dictionary of page-prefixes, no tree, no counters, no heap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

Prefix = tuple[Any, ...]  # tokens from the beginning: a place in the trie
SeqId = Any


class End(NamedTuple):
    """A holder's view of a node: the end of a prefix, and the generation of its last page."""

    prefix: Prefix
    birth: int


START = End((), 0)


@dataclass
class Page:
    """A resident page."""

    block: Any
    tick: int  # the operation that used it last
    birth: int  # the insert that brought it; an evicted page that comes back has another
    ends_node: bool = False  # a mark that stays as long as the page does


class Found(NamedTuple):
    """Where a match ends, and the blocks beyond the node where it began."""

    end: End
    blocks: list[Any]


class Inserted(NamedTuple):
    """Where an insert ends, and the blocks that have no place."""

    end: End
    displaced: list[Any]


class Node(NamedTuple):
    """A run of pages between two marks."""

    prefix: Prefix
    blocks: tuple[Any, ...]
    users: frozenset[SeqId]


class ReferenceTrie:
    """A page's children are the pages with a prefix one page longer; a node is a run of pages up to a mark.

    A sequence holds prefixes; it uses a page if it holds a prefix through it. Recency stamps every page of a path.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[Prefix, Page] = {}
        self.held: dict[SeqId, set[Prefix]] = {}
        self._clock = 0

    # ---------------------------------------------------------------- match and insert

    def peek(self, tokens: Prefix, start: End = START) -> list[Any]:
        """The blocks of the longest known prefix beyond `start`."""
        return [self.pages[prefix].block for prefix in self._known(start.prefix + tokens, start)]

    def match(self, tokens: Prefix, start: End = START) -> Found:
        """As `peek`; a node ends where it ends."""
        known = self._known(start.prefix + tokens, start)
        if not known:
            return Found(start, [])
        self.pages[known[-1]].ends_node = True
        return Found(self._end(known[-1]), [self.pages[prefix].block for prefix in known])

    def insert(self, tokens: Prefix, blocks: list[Any], start: End = START) -> Inserted:
        """Keep existing blocks that are in use or equal, and replace the others."""
        self._clock += 1
        whole = start.prefix + tokens
        known = self._known(whole, start)
        if known:
            self.pages[known[-1]].ends_node = True
        displaced = []
        for prefix, block in zip(self._prefixes(whole, start), blocks, strict=True):
            page = self.pages.get(prefix)
            if page is None:
                self.pages[prefix] = Page(block, self._clock, birth=self._clock)
            elif page.block != block:
                displaced.append(block if self.users(prefix) else page.block)
                page.block = page.block if self.users(prefix) else block
        self.pages[whole].ends_node = True
        self._use(whole)
        return Inserted(self._end(whole), displaced)

    def _use(self, whole: Prefix) -> None:
        for prefix in self._prefixes(whole):
            self.pages[prefix].tick = self._clock

    def _known(self, whole: Prefix, start: End) -> list[Prefix]:
        known = []
        for prefix in self._prefixes(whole, start):
            if prefix not in self.pages:
                break
            known.append(prefix)
        return known

    def _prefixes(self, whole: Prefix, start: End = START) -> list[Prefix]:
        first = len(start.prefix) + self.page_size
        return [whole[:stop] for stop in range(first, len(whole) + 1, self.page_size)]

    def _end(self, prefix: Prefix) -> End:
        return End(prefix, self.pages[prefix].birth)

    # ---------------------------------------------------------------- use

    def is_stale(self, end: End) -> bool:
        """Whether the page that this end means is gone."""
        page = self.pages.get(end.prefix)
        return end != START and (page is None or page.birth != end.birth)

    def users(self, prefix: Prefix) -> frozenset[SeqId]:
        """The sequences that use this page."""
        return frozenset(
            seq_id for seq_id, held in self.held.items() if any(longer[: len(prefix)] == prefix for longer in held)
        )

    def is_deepest(self, end: End, seq_id: SeqId) -> bool:
        """Whether the sequence uses this page and none that goes on from it."""
        through = [held for held in self.held.get(seq_id, ()) if held[: len(end.prefix)] == end.prefix]
        return through == [end.prefix]

    def mark(self, end: End, seq_id: SeqId) -> None:
        """Hold a prefix."""
        if end != START:
            self.held.setdefault(seq_id, set()).add(end.prefix)

    def release(self, end: End, seq_id: SeqId) -> None:
        """Hold a prefix no longer, nor those that it goes on from."""
        if end != START:
            self._clock += 1
            self._use(end.prefix)
            self.held[seq_id] = {held for held in self.held[seq_id] if end.prefix[: len(held)] != held}

    # ---------------------------------------------------------------- eviction

    def evict(self, num_blocks: int) -> list[Any]:
        """Remove the least recently used of the unused pages that nothing goes on from, and again."""
        evicted: list[Any] = []
        while len(evicted) < num_blocks:
            parents = {prefix[: -self.page_size] for prefix in self.pages}
            leaves = [prefix for prefix in self.pages if prefix not in parents and not self.users(prefix)]
            if not leaves:
                break
            assert len({self.pages[leaf].tick for leaf in leaves}) == len(leaves), "two leaves of one operation"
            victim = min(leaves, key=lambda leaf: self.pages[leaf].tick)
            evicted.append(self.pages.pop(victim).block)
            above = victim[: -self.page_size]
            if above in self.pages:
                self.pages[above].ends_node = True
        return evicted

    # ---------------------------------------------------------------- the tree that the pages and marks imply

    def num_evictable(self) -> int:
        """Return the unused pages."""
        return sum(not self.users(prefix) for prefix in self.pages)

    def nodes(self) -> set[Node]:
        """Every run of pages between two marks."""
        return {self._node(prefix) for prefix, page in self.pages.items() if page.ends_node}

    def _node(self, prefix: Prefix) -> Node:
        blocks = [self.pages[prefix].block]
        above = prefix[: -self.page_size]
        while above and not self.pages[above].ends_node:
            blocks.insert(0, self.pages[above].block)
            above = above[: -self.page_size]
        return Node(prefix, tuple(blocks), self.users(prefix))
