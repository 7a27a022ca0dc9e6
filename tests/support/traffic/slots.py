"""Random traffic over a few rows, chosen so that prefixes branch, rows run out and are reused in every way there is."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random

from support.checked.slot_cache import MAX_LEN, NUM_SLOTS, CheckedSlotCache
from support.reference.slot_cache import Prefix

NAMESPACES = (None, None, None, "a")
WIDE_ID = 2**40 + 1
MAX_PINS = 4


class SlotTrafficFailed(AssertionError):
    """The cache and its model parted, or the cache raised what it should not."""


@dataclass
class Lease:
    """A row that a request has taken, and the tokens written to it."""

    slot: int
    written: Prefix


def run_slot_traffic(seed: int, with_allocator: bool, num_operations: int) -> CheckedSlotCache:
    """Do random operations on a cache and its model, and compare all there is to compare after each.

    Raises:
        SlotTrafficFailed: with the number and name of the operation; its cause says what differed.
    """
    traffic = SlotTraffic(seed, with_allocator)
    for number in range(num_operations):
        name = traffic.choose()
        try:
            getattr(traffic, name)()
        except Exception as error:
            where = f"operation {number} ({name}) of {seed=}, {with_allocator=}"
            raise SlotTrafficFailed(f"{where}: {type(error).__name__}: {error}") from error
    return traffic.pair


class SlotTraffic:
    """Requests that take rows, write, publish and leave; callers that look up and pin sequences; and mistakes."""

    OPERATIONS = (
        ("start", 16),
        ("publish", 14),
        ("extend", 6),
        ("rewind", 3),
        ("rewrite", 4),
        ("reuse", 3),
        ("copy_over", 3),
        ("finish", 12),
        ("find", 10),
        ("peek", 4),
        ("pin", 6),
        ("release", 6),
        ("release_what_is_not_pinned", 1),
        ("invalidate", 2),
        ("evict", 3),
        ("evict_lru_slot", 3),
        ("insert_stale", 1),
        ("mistake_slots", 1),
        ("reset", 0.2),
    )

    def __init__(self, seed: int, with_allocator: bool) -> None:
        self.rng = Random(f"{seed}/{with_allocator}")
        self.pair = CheckedSlotCache(self.rng.choice([12, 25, 40, 1000]), with_allocator=with_allocator)
        self.keys: deque[Prefix] = deque([Prefix(None, (1, 2, 3))], maxlen=10)
        self.leases: dict[int, Lease] = {}
        self.pins: list[Prefix] = []

    def choose(self) -> str:
        """The name of the next operation."""
        names, weights = zip(*self.OPERATIONS, strict=True)
        name: str = self.rng.choices(names, weights)[0]
        return name

    # ---------------------------------------------------------------- requests

    def start(self) -> None:
        """A request finds its prefix, in place or by a copy, and computes the rest."""
        query = self._new_key()
        length, slot, _ = self.pair.find(query)
        if length and slot not in self.leases and self.rng.random() < 0.5:
            self.pair.occupy(slot)
            self.pair.invalidate(slot, length)
        else:
            slot = self._take_row()
            if slot < 0:
                return
            prefix = query.head(length)
            if not self.pair.copy(prefix, slot):  # its row may have been the one taken
                length = 0
        self.pair.write(slot, length, query)
        self.leases[slot] = Lease(slot, query)

    def _take_row(self) -> int:
        """A row for new content, by one of three ways."""
        way = self.rng.randrange(3)
        if way == 0:
            return self.pair.alloc()
        if way == 1:
            empty = min(self.pair.model_slots.free - self.pair.model.rows.keys(), default=-1)
            return self.pair.alloc_at(empty) if empty >= 0 and self.pair.with_allocator else -1
        victim = self.pair.evict_lru_slot()
        if victim is None or victim in self.leases:
            return -1
        self.pair.occupy(victim)
        return victim

    def publish(self) -> None:
        if lease := self._lease():
            length = self.rng.choice([len(lease.written.tokens), self.rng.randint(0, len(lease.written.tokens))])
            self.pair.insert(lease.written.head(length), lease.slot)

    def extend(self) -> None:
        if lease := self._lease():
            start = len(lease.written.tokens)
            self.pair.invalidate(lease.slot, start)  # more may be recorded, after `rewrite` or `copy_over`
            lease.written = self._longer(lease.written)
            self.pair.write(lease.slot, start, lease.written)

    def rewind(self) -> None:
        """Go back and write something else, as announced."""
        if lease := self._lease():
            start = self.rng.randint(0, len(lease.written.tokens))
            self.pair.invalidate(lease.slot, start)
            lease.written = self._longer(lease.written.head(start))
            self.pair.write(lease.slot, start, lease.written)

    def rewrite(self) -> None:
        """Go back, write something else and publish it without a word in between."""
        if lease := self._lease():
            start = self.rng.randint(0, len(lease.written.tokens))
            lease.written = self._longer(lease.written.head(start))
            if lease.written.tokens:
                self.pair.write(lease.slot, start, lease.written)
                self.pair.insert(lease.written, lease.slot)

    def reuse(self) -> None:
        """Take a row for new content and publish it under the new version, without a word in between."""
        free = sorted(self.pair.model_slots.free)
        if free:
            slot = self.rng.choice(free)
            self.pair.slots.alloc_at(slot)
            self.pair.model_slots.alloc_at(slot)
            written = self._longer(self._new_key())
            if not written.tokens:
                written = written._replace(tokens=(1,))
            self.pair.write(slot, 0, written)
            self.pair.insert(written, slot)
            self.leases[slot] = Lease(slot, written)

    def copy_over(self) -> None:
        """Copy some prefix over a row, also where that row's own content is published."""
        if lease := self._lease():
            prefix = self._key()
            if self.pair.copy(prefix, lease.slot):
                lease.written = prefix

    def finish(self) -> None:
        if lease := self._lease():
            del self.leases[lease.slot]
            self.pair.free(lease.slot)

    # ---------------------------------------------------------------- others

    def find(self) -> None:
        self.pair.find(self._key())

    def peek(self) -> None:
        self.pair.peek(self._key())

    def pin(self) -> None:
        prefix = self._key()
        if self.rng.random() < 0.7:
            prefix = prefix.head(self.pair.model.peek(prefix)[0])
        if len(self.pins) < MAX_PINS and self.pair.pin(prefix):
            self.pins.append(prefix)

    def release(self) -> None:
        if self.pins:
            self.pair.release(self.pins.pop(self.rng.randrange(len(self.pins))))

    def release_what_is_not_pinned(self) -> None:
        prefix = self._key()
        if prefix not in self.pins:
            self.pair.release(prefix)

    def invalidate(self) -> None:
        self.pair.invalidate(self.rng.randrange(NUM_SLOTS), self.rng.randint(0, MAX_LEN))

    def evict(self) -> None:
        self.pair.evict(self.rng.choice([1, 2, self.rng.randint(0, 12), 1000]))

    def evict_lru_slot(self) -> None:
        self.pair.evict_lru_slot()

    def insert_stale(self) -> None:
        self.pair.insert_stale(self._key(), self.rng.randrange(NUM_SLOTS))

    def mistake_slots(self) -> None:
        self.pair.mistake_slots(self.rng.randint(-1, NUM_SLOTS))

    def reset(self) -> None:
        self.pair.reset()
        self.pins.clear()

    # ---------------------------------------------------------------- what the operations are made of

    def _lease(self) -> Lease | None:
        return self.rng.choice(list(self.leases.values())) if self.leases else None

    def _new_key(self) -> Prefix:
        self.keys.append(self._key())
        return self.keys[-1]

    def _key(self) -> Prefix:
        """Mostly a known key: whole, cut short, gone on with, or in another namespace."""
        key = self.rng.choice(self.keys)
        if self.rng.random() < 0.15:
            key = Prefix(self.rng.choice(NAMESPACES), key.tokens)
        if self.rng.random() < 0.3:
            return key
        return self._longer(key.head(self.rng.randint(0, len(key.tokens))))

    def _longer(self, key: Prefix) -> Prefix:
        more = [self.rng.choice([1, 2, 3]) for _ in range(self.rng.randint(0, 5))]
        if more and self.rng.random() < 0.05:
            more[-1] = WIDE_ID
        return key._replace(tokens=(key.tokens + tuple(more))[:MAX_LEN])
