"""The reference for the caches, written for clarity: dictionaries and loops, no tree, no counters, no heap."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Token = int | tuple[int, ...]
Tokens = tuple[Token, ...]


class Place(NamedTuple):
    """Where a page stands: its namespace, all tokens from the beginning to its end, and how often that was retired."""

    namespace: str | None
    prefix: Tokens
    generation: int = 0

    def above(self, num_tokens: int) -> Place:
        """The place that many tokens nearer to the beginning."""
        return self._replace(prefix=self.prefix[:-num_tokens])


class Handle(NamedTuple):
    """A holder's view of a node: the place where it ends, and the generation of its last page."""

    place: Place
    birth: int


ROOT = Handle(Place(None, ()), 0)


@dataclass
class Page:
    """A resident page. All pages of a node share `tick`, `locks` and `hits`."""

    slots: tuple[int, ...]
    tick: int  # the operation that used it last
    birth: int  # the insert that brought it; an evicted page that comes back has another
    locks: int = 0
    hits: int = 0
    ends_node: bool = False  # a node ends here; a mark that stays as long as the page does


class Found(NamedTuple):
    """The result of a lookup."""

    slots: list[int]
    handle: Handle  # the node where it ends


class Inserted(NamedTuple):
    """The result of an insert."""

    prefix_len: int
    handle: Handle
    duplicates: list[int]  # incoming slots that the caller has to free
    adopted: list[int]  # incoming slots that are the cache's now


class Node(NamedTuple):
    """A run of pages between two marks."""

    place: Place
    num_pages: int
    slots: tuple[int, ...]
    locks: int
    hits: int
    extra: tuple[int | None, ...] = ()  # values of other kinds of caches


class ReferenceRadixCache:
    """A prefix cache for full attention as a dictionary of page-prefixes.

    The tree is implied: a page's children are the pages with a prefix one page longer, and a node is a run of pages
    up to a mark. Marks arise where a match or an insert ends, and where an insert leaves the known path.
    Recency is a clock that ticks at each match and insert and stamps every page of the path. Retiring a namespace opens
    a new generation of it: pages of an older one never match again, and are evicted first.

    Attributes:
        least_spared: a victim is cut only if at least so many tokens of it stay; None: it goes whole.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.least_spared: int | None = None
        self.pages: dict[Place, Page] = {}
        self._generations: Counter[str | None] = Counter()
        self._resets = 0  # generations of all namespaces together
        self._own_locks: Counter[Handle] = Counter()
        self._clock = 0

    # ---------------------------------------------------------------- match and insert

    def peek(self, tokens: Tokens, namespace: str | None) -> Found:
        """The longest cached prefix, and the deepest node that lies wholly within it."""
        path = self._resident_path(tokens, namespace)
        marks = [place for place in path if self.pages[place].ends_node]
        return Found(self._slots_of(path), self._handle(marks[-1] if marks else None))

    def match(self, tokens: Tokens, namespace: str | None) -> Found:
        """The longest cached prefix; it becomes the most recently used, and a node ends where it ends."""
        path = self._resident_path(tokens, namespace)
        self._use(path)
        for place in path:
            self.pages[place].hits += 1
        return Found(self._slots_of(path), self._handle(path[-1] if path else None))

    def insert(
        self,
        tokens: Tokens,
        namespace: str | None,
        slots: Sequence[int],
        prev_prefix_len: int = 0,
        from_handle: Handle = ROOT,
    ) -> Inserted:
        """Adopt the slots of the whole pages that are not there yet; name those that the caller brought in vain."""
        path = self._resident_path(tokens, namespace)
        held = self._slots_of(path)
        known = max(prev_prefix_len, len(from_handle.place.prefix))
        duplicates = [slots[at] for at in range(known, len(held)) if slots[at] != held[at]]
        self._use(path)
        adopted: list[int] = []
        for place in self._places(tokens, namespace)[len(path) :]:
            end = len(place.prefix)
            page = Page(tuple(slots[end - self.page_size : end]), self._clock, birth=self._clock)
            self.pages[place] = page
            adopted += page.slots
            path.append(place)
        if path:
            self.pages[path[-1]].ends_node = True
        return Inserted(len(held), self._handle(path[-1] if path else None), duplicates, adopted)

    def _use(self, path: list[Place]) -> None:
        self._clock += 1
        for place in path:
            self.pages[place].tick = self._clock
        if path:
            self.pages[path[-1]].ends_node = True

    def _resident_path(self, tokens: Tokens, namespace: str | None) -> list[Place]:
        path: list[Place] = []
        for place in self._places(tokens, namespace):
            if place not in self.pages:
                break
            path.append(place)
        return path

    def _places(self, tokens: Tokens, namespace: str | None) -> list[Place]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [Place(namespace, tokens[:end], self.generation(namespace)) for end in ends]

    def _slots_of(self, path: Iterable[Place]) -> list[int]:
        return [slot for place in path for slot in self.pages[place].slots]

    def _handle(self, place: Place | None) -> Handle:
        return ROOT if place is None else Handle(place, self.pages[place].birth)

    # ---------------------------------------------------------------- locks

    def is_gone(self, handle: Handle) -> bool:
        """Whether the pages of this node were evicted."""
        if handle == ROOT:
            return False
        return handle.place not in self.pages or self.pages[handle.place].birth != handle.birth

    def is_stale(self, handle: Handle) -> bool:
        """Whether the node of this handle can no longer be matched: it is gone or retired."""
        return self.is_gone(handle) or (handle != ROOT and not self.is_current(handle.place))

    def num_locks(self, handle: Handle) -> int:
        """Locks on this very node, not on those below it."""
        return self._own_locks[handle]

    def lock(self, handle: Handle) -> None:
        """Keep a node and all above it."""
        self._own_locks[handle] += 1
        for page in self._pages_up_to(handle):
            page.locks += 1

    def unlock(self, handle: Handle) -> None:
        """Undo one `lock`."""
        self._own_locks[handle] -= 1
        for page in self._pages_up_to(handle):
            page.locks -= 1

    def _pages_up_to(self, handle: Handle) -> list[Page]:
        prefix, size = handle.place.prefix, self.page_size
        return [self.pages[handle.place._replace(prefix=prefix[:end])] for end in range(size, len(prefix) + 1, size)]

    def evictable_size(self) -> int:
        """Tokens without a lock."""
        return sum(len(page.slots) for page in self.pages.values() if not page.locks)

    def protected_size(self) -> int:
        """Tokens with one."""
        return sum(len(page.slots) for page in self.pages.values() if page.locks)

    # ---------------------------------------------------------------- eviction

    def evict(self, num_tokens: int) -> list[Node]:
        """Remove an unlocked leaf, and again, until `num_tokens` are free or none is left.

        Retired ones go first, in any order, then those of the lowest rank.
        """
        victims: list[Node] = []
        while (missing := num_tokens - sum(len(victim.slots) for victim in victims)) > 0:
            leaves = self._unlocked_leaves()
            if not leaves:
                break
            order = [(self.is_current(leaf), self._rank(leaf)) for leaf in leaves]
            assert len(set(order)) == len(order), "two leaves were used by one operation"
            leaf = leaves[order.index(min(order))]
            if self.least_spared is not None and self.is_current(leaf):
                self._spare_head(leaf, missing, self.least_spared)
            victims.append(self._remove_node(leaf))
        return victims

    def _spare_head(self, leaf: Place, num_tokens: int, least_spared: int) -> None:
        """End a node where a leaf's tail begins that is enough, and an eighth of the leaf."""
        places = self._pages_of_node(leaf)
        enough = [
            head
            for head in range(1, len(places))
            if (len(places) - head) * self.page_size >= max(num_tokens, len(places) * self.page_size // 8)
        ]
        if enough and enough[-1] * self.page_size >= least_spared:
            self.pages[places[enough[-1] - 1]].ends_node = True

    def _rank(self, leaf: Place) -> tuple[int, ...]:
        """The least recently used goes first."""
        return (self.pages[leaf].tick,)

    def retire_all(self) -> None:
        """Make all there is unmatchable."""
        self._resets += 1

    def retire(self, namespaces: Iterable[str | None]) -> int:
        """Make what is in these namespaces unmatchable; returns in how many of them there was anything."""
        there = {place.namespace for place in self.pages if self.is_current(place)}.intersection(namespaces)
        self._generations.update(there)
        return len(there)

    def generation(self, namespace: str | None) -> int:
        """The one of a namespace that can be matched now."""
        return self._generations[namespace] + self._resets

    def is_current(self, place: Place) -> bool:
        """Whether a place is of a generation that can be matched."""
        return place.generation == self.generation(place.namespace)

    def reclaimable_size(self) -> int:
        """Tokens that are retired and without a lock."""
        retired = [page for place, page in self.pages.items() if not self.is_current(place)]
        return sum(len(page.slots) for page in retired if not page.locks)

    def reset(self) -> list[int]:
        """Forget everything; returns the slots."""
        slots = self._slots_of(self.pages)
        self.pages.clear()
        self._own_locks.clear()
        return slots

    def _unlocked_leaves(self) -> list[Place]:
        parents = {place.above(self.page_size) for place in self.pages}
        return [place for place, page in self.pages.items() if place not in parents and not page.locks]

    def _remove_node(self, end: Place) -> Node:
        node = self._node_at(end)
        for place in self._pages_of_node(end):
            del self.pages[place]
        return node

    # ---------------------------------------------------------------- nodes and hashes

    def nodes(self) -> set[Node]:
        """The tree that the pages and marks imply."""
        return {self._node_at(place) for place, page in self.pages.items() if page.ends_node}

    def hashes(self, handle: Handle) -> list[str]:
        """The page hashes of the node at `handle`, for plain 32-bit ids of the default namespace."""
        node = self._node_at(handle.place)
        return reference_hashes(node.place.prefix, self.page_size)[-node.num_pages :]

    def pages_of_node(self, handle: Handle) -> list[Place]:
        """The places of the pages of the node at `handle`, in token order."""
        return self._pages_of_node(handle.place)

    def _node_at(self, place: Place) -> Node:
        places = self._pages_of_node(place)
        page = self.pages[place]
        return Node(place, len(places), tuple(self._slots_of(places)), page.locks, page.hits)

    def _pages_of_node(self, end: Place) -> list[Place]:
        places = [end]
        while True:
            above = places[0].above(self.page_size)
            if above not in self.pages or self.pages[above].ends_node:
                return places
            places.insert(0, above)


def reference_hashes(tokens: Iterable[Token], page_size: int) -> list[str]:
    """SHA-256 of each whole page of 32-bit ids, seeded by the digest of the page before it."""
    ids = list(tokens)
    hashes: list[str] = []
    prior = b""
    for end in range(page_size, len(ids) + 1, page_size):
        page = b"".join(struct.pack("<I", token) for token in ids[end - page_size : end])
        prior = hashlib.sha256(prior + page).digest()
        hashes.append(prior.hex())
    return hashes
