"""The reference for slots and the slot cache, for clarity with dictionaries and loops, no tree, no bits, no heap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Prefix(NamedTuple):
    """Tokens of a namespace: a sequence, or the node that a plain trie has at its end."""

    namespace: str | None
    tokens: tuple[int, ...]

    def head(self, length: int) -> Prefix:
        """The first `length` tokens."""
        return Prefix(self.namespace, self.tokens[:length])

    def heads(self) -> list[Prefix]:
        """Every prefix but the empty one, the shortest first."""
        return [self.head(length) for length in range(1, len(self.tokens) + 1)]

    def shared(self, other: Prefix) -> int:
        """How many leading tokens both have."""
        return sum(ours == theirs for ours, theirs in zip(self.heads(), other.heads(), strict=False))


class ReferenceSlots:
    """The allocator: a set of free slots, and a version for each."""

    def __init__(self, max_slots: int) -> None:
        self.free = set(range(max_slots))
        self.versions = dict.fromkeys(range(max_slots), 0)

    def alloc(self) -> int:
        """The lowest free slot, or -1."""
        if not self.free:
            return -1
        slot = min(self.free)
        self.alloc_at(slot)
        return slot

    def alloc_at(self, slot: int) -> None:
        """Take this slot, for new content."""
        self.free.remove(slot)
        self.versions[slot] += 1


@dataclass
class Record:
    """The record of a slot."""

    version: int
    held: Prefix
    recorded_at: int
    last_used: int


class ReferenceSlotCache:
    """The slot cache as one record per slot.

    The trie is implied: its nodes are the prefixes of recorded or pinned sequences. `current` returns whether a slot
        still
    has a version, `released` whether a slot is free.
    """

    def __init__(self, max_capacity: int, current: Callable[[int, int], bool], released: Callable[[int], bool]) -> None:
        self.max_capacity = max_capacity
        self.current = current
        self.released = released
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.rows: dict[int, Record] = {}
        self.pins: Counter[Prefix] = Counter()
        self.used: dict[Prefix, int] = {}  # node to tick
        self.clock = 0

    def nodes(self) -> set[Prefix]:
        """The nodes of a plain trie."""
        kept = [row.held for row in self.rows.values()] + list(self.pins)
        return {head for each in kept for head in each.heads()}

    # ---------------------------------------------------------------- lookup

    def peek(self, query: Prefix) -> tuple[int, int, int]:
        """The longest prefix that a current row holds; of several rows, the one recorded last."""
        shared = {slot: query.shared(row.held) for slot, row in self.rows.items() if self.findable(slot)}
        best = max(shared.values(), default=0)
        if not best:
            return 0, -1, 0
        slot = max((slot for slot in shared if shared[slot] == best), key=lambda slot: self.rows[slot].recorded_at)
        return best, slot, self.rows[slot].version

    def find(self, query: Prefix) -> tuple[int, int, int]:
        """Return `peek`, and make the found sequence the most recently used."""
        found = self.peek(query)
        if found[0]:
            self._use(query.head(found[0]).heads())
            self.rows[found[1]].last_used = self.clock
        return found

    def findable(self, slot: int) -> bool:
        """Whether a slot has a record that is not out of date."""
        return slot in self.rows and self.current(slot, self.rows[slot].version)

    def _use(self, nodes: Iterable[Prefix]) -> None:
        self.clock += 1
        self.used.update(dict.fromkeys(nodes, self.clock))

    # ---------------------------------------------------------------- what a slot holds

    def insert(self, written: Prefix, slot: int, version: int) -> int:
        """A slot now begins with these tokens."""
        if not written.tokens or not self.current(slot, version):
            return 0
        if slot in self.rows and self.rows[slot].version != version:
            del self.rows[slot]
        self.overwrite(slot, written)
        known = len(self.nodes() & set(written.heads()))
        self._use(written.heads()[:known])
        missing = len(written.tokens) - known
        self.evict(len(self.nodes()) + missing - self.max_capacity, used_before=self.clock)
        recorded = written.head(known + min(missing, self.max_capacity - len(self.nodes())))
        if not recorded.tokens:
            return 0
        self.used.update(dict.fromkeys(recorded.heads(), self.clock))
        row = self.rows.setdefault(slot, Record(version, recorded, 0, 0))
        if len(row.held.tokens) < len(recorded.tokens):
            row.held = recorded
        row.recorded_at = row.last_used = self.clock
        return len(recorded.tokens)

    def overwrite(self, slot: int, written: Prefix) -> None:
        """Cut a record to its common prefix with the written sequence, unless it only extends that sequence."""
        if slot in self.rows:
            shared = written.shared(self.rows[slot].held)
            if shared < len(written.tokens):
                self.invalidate(slot, shared)

    def invalidate(self, slot: int, valid_len: int) -> None:
        """Cut a record."""
        if slot in self.rows:
            held = self.rows[slot].held = self.rows[slot].held.head(valid_len)
            if not held.tokens:
                del self.rows[slot]

    def copy(self, prefix: Prefix, target: int) -> int | None:
        """The slot that the prefix is copied from; None if no row holds all of it."""
        length, source, _ = self.peek(prefix)
        if length < len(prefix.tokens) or not length:
            return None
        if self.findable(target) and prefix.shared(self.rows[target].held) == length:
            source = target
        self._use(prefix.heads())
        self.rows[source].last_used = self.clock
        self.overwrite(target, prefix)
        return source

    # ---------------------------------------------------------------- pins and eviction

    def can_pin(self, prefix: Prefix) -> bool:
        """Whether a row holds all of it."""
        return 0 < len(prefix.tokens) == self.peek(prefix)[0]

    def release(self, prefix: Prefix) -> None:
        """Undo one pin."""
        self.pins[prefix] -= 1
        self.pins += Counter()

    def _pinned(self) -> set[Prefix]:
        return {head for each in self.pins for head in each.heads()}

    def evict(self, num_nodes: int, used_before: int) -> int:
        """Remove an unpinned leaf, and again, until so many have gone or none is left."""
        freed = 0
        while freed < num_nodes:
            nodes = self.nodes()
            inner = {node.head(len(node.tokens) - 1) for node in nodes}
            leaves = [node for node in nodes - inner - self._pinned() if self.used[node] < used_before]
            if not leaves:
                break
            ticks = [self.used[leaf] for leaf in leaves]
            assert len(set(ticks)) == len(ticks), "two leaves were used by one operation"
            victim = leaves[ticks.index(min(ticks))]
            for slot in [slot for slot, row in self.rows.items() if row.held == victim]:
                self.invalidate(slot, len(victim.tokens) - 1)
            freed += 1
        return freed

    def evict_lru_slot(self) -> int | None:
        """Forget the row that was used longest ago, of those that are released and without a pin on them."""
        free = [
            slot
            for slot, row in self.rows.items()
            if self.released(slot) and not any(head in self.pins for head in row.held.heads())
        ]
        if not free:
            return None
        victim = min(free, key=lambda slot: self.rows[slot].last_used)
        del self.rows[victim]
        return victim
