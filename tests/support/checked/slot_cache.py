"""A `PrefixCacheManager` and its model, side by side, over rows that hold real numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from support.reference.slot_cache import Prefix, ReferenceSlotCache, ReferenceSlots

from raydix.cache_core import CoreError, PrefixCacheManager, RadixKey, SlotAllocator
from raydix.cache_core.errors import LockError, SlotError, StaleNodeError

NUM_SLOTS = 6
MAX_LEN = 14  # positions of a row
NUM_LAYERS = 3
COPIED_LAYERS = 2  # the last layer is another's: never to be touched by a copy


class CheckedSlotCache:
    """Every operation is done on the cache and on the model, and all there is to compare is compared after it.

    Each position of each row holds a number that stands for all tokens up to there, as KV does. Whatever the cache
    claims a row to hold is compared with these numbers: it is never allowed to be wrong about them.
    """

    def __init__(self, max_capacity: int, *, with_allocator: bool) -> None:
        self.slots = SlotAllocator(NUM_SLOTS)
        self.model_slots = ReferenceSlots(NUM_SLOTS)
        self.with_allocator = with_allocator
        self.cache = PrefixCacheManager(max_capacity, self.slots if with_allocator else None)
        self.model = ReferenceSlotCache(
            max_capacity,
            current=lambda slot, version: not with_allocator or self.model_slots.versions[slot] == version,
            released=lambda slot: not with_allocator or slot in self.model_slots.free,
        )
        shape = (NUM_SLOTS, MAX_LEN, NUM_LAYERS)
        self.k: NDArray[np.int64] = np.zeros(shape, np.int64)
        self.v: NDArray[np.int64] = np.zeros(shape, np.int64)

    # ---------------------------------------------------------------- slots

    def alloc(self) -> int:
        slot = self.slots.alloc()
        assert slot == self.model_slots.alloc(), "another slot was allocated"
        return self._given_out(slot)

    def alloc_at(self, slot: int) -> int:
        self.slots.alloc_at(slot)
        self.model_slots.alloc_at(slot)
        return self._given_out(slot)

    def _given_out(self, slot: int) -> int:
        if not self.with_allocator and slot >= 0:  # no allocator notifies the cache
            self.cache.forget(slot)
            self.model.invalidate(slot, 0)
        self.compare()
        return slot

    def occupy(self, slot: int) -> None:
        self.slots.occupy(slot)
        self.model_slots.free.remove(slot)
        self.compare()

    def free(self, slot: int) -> None:
        self.slots.free(slot)
        self.model_slots.free.add(slot)
        self.compare()

    def mistake_slots(self, slot: int) -> None:
        """Whatever is wrong to do with this slot now is refused."""
        outside = not 0 <= slot < NUM_SLOTS
        if outside or slot in self.model_slots.free:
            self._refused(SlotError, lambda: self.slots.free(slot))
        if outside or slot not in self.model_slots.free:
            self._refused(SlotError, lambda: self.slots.occupy(slot))
            self._refused(SlotError, lambda: self.slots.alloc_at(slot))

    # ---------------------------------------------------------------- lookup and content

    def find(self, query: Prefix) -> tuple[int, int, int]:
        found = self.cache.find(_key(query))
        assert found == self.model.find(query), "find"
        self.compare()
        return found

    def peek(self, query: Prefix) -> None:
        assert self.cache.peek(_key(query)) == self.model.peek(query), "peek"
        self.compare()

    def write(self, slot: int, start: int, written: Prefix) -> None:
        """Write the KV of `written` from position `start` on, without telling the cache. The caller has to."""
        numbers = _numbers(written)[start:, None] + np.arange(NUM_LAYERS)
        self.k[slot, start : len(written.tokens)] = numbers
        self.v[slot, start : len(written.tokens)] = -numbers

    def insert(self, written: Prefix, slot: int) -> int:
        version = self.slots.version(slot)
        recorded = self.cache.insert(_key(written), slot, version)
        assert recorded == self.model.insert(written, slot, version), "insert"
        self.compare()
        return recorded

    def insert_stale(self, written: Prefix, slot: int) -> None:
        """An insert that comes too late records nothing."""
        if self.with_allocator:
            assert self.cache.insert(_key(written), slot, self.slots.version(slot) - 1) == 0, "a stale insert"
            self.compare()

    def invalidate(self, slot: int, valid_len: int) -> None:
        self.cache.invalidate(slot, valid_len)
        self.model.invalidate(slot, valid_len)
        self.compare()

    def copy(self, prefix: Prefix, target: int) -> bool:
        """Copy a prefix to a row; whether there was one to copy."""
        k, v = self.k.copy(), self.v.copy()
        source = self.model.copy(prefix, target)
        if source is None:
            self._refused(StaleNodeError, lambda: self._copy(prefix, target))
            assert np.array_equal(k, self.k) and np.array_equal(v, self.v), "a refused copy copied"
            return False
        n = len(prefix.tokens)
        assert self._copy(prefix, target) == n, "copy_kv"
        k[target, :n, :COPIED_LAYERS] = k[source, :n, :COPIED_LAYERS]
        v[target, :n, :COPIED_LAYERS] = v[source, :n, :COPIED_LAYERS]
        assert np.array_equal(k, self.k) and np.array_equal(v, self.v), "not exactly the prefix was copied"
        self.compare()
        return True

    def _copy(self, prefix: Prefix, target: int) -> int:
        return self.cache.copy_kv(_key(prefix), target, (self.k, self.v), COPIED_LAYERS)

    # ---------------------------------------------------------------- pins and eviction

    def pin(self, prefix: Prefix) -> bool:
        """Pin if it can be; whether it was."""
        if not self.model.can_pin(prefix):
            self._refused(StaleNodeError, lambda: self.cache.pin(_key(prefix)))
            return False
        self.cache.pin(_key(prefix))
        self.model.pins[prefix] += 1
        self.compare()
        return True

    def release(self, prefix: Prefix) -> None:
        if prefix not in self.model.pins:
            self._refused(LockError, lambda: self.cache.release(_key(prefix)))
            return
        try:
            self.cache.release(_key(prefix))
        except LockError as error:
            raise AssertionError("a pinned prefix could not be released") from error
        self.model.release(prefix)
        self.compare()

    def evict(self, num_nodes: int) -> None:
        assert self.cache.evict(num_nodes) == self.model.evict(num_nodes, self.model.clock + 1), "evict"
        self.compare()

    def evict_lru_slot(self) -> int | None:
        victim = self.cache.evict_lru_slot()
        assert victim == self.model.evict_lru_slot(), "another row was evicted"
        self.compare()
        return victim

    def reset(self) -> None:
        self.cache.reset()
        self.model.reset()
        self.compare()

    # ---------------------------------------------------------------- comparison

    def _refused(self, error: type[CoreError], act: Callable[[], object]) -> None:
        """A mistake raises, and changes nothing."""
        before = self.cache.pretty_format(), self.slots.free_count, list(self.slots._versions)
        try:
            act()
        except error:
            after = self.cache.pretty_format(), self.slots.free_count, list(self.slots._versions)
            assert before == after, "a refused operation changed something"
            self.compare()
        else:
            raise AssertionError(f"no {error.__name__} was raised")

    def compare(self) -> None:
        """Raise AssertionError if cache and model differ, an invariant is broken, or a row does not hold its KV."""
        self.cache.check_invariants()
        self.slots.check_invariants()
        free = {slot for slot in range(NUM_SLOTS) if self.slots.is_free(slot)}
        assert free == self.model_slots.free, f"{free=}, not {self.model_slots.free}"
        assert self.slots.free_count == len(free), f"{self.slots.free_count=}, but {free} are free"
        versions = {slot: self.slots.version(slot) for slot in range(NUM_SLOTS)}
        assert versions == self.model_slots.versions, f"{versions=}, not {self.model_slots.versions}"
        assert self.cache.num_nodes == len(self.model.nodes()), "num_nodes"
        assert self.cache.num_rows == len(self.model.rows), "num_rows"
        assert self.cache.num_pins == sum(self.model.pins.values()), "num_pins"
        for slot in range(NUM_SLOTS):
            self._compare_row(slot)

    def _compare_row(self, slot: int) -> None:
        row = self.model.rows.get(slot)
        key = self.cache.recorded_key(slot)
        held = Prefix(key.extra_key, tuple(key.ids.tolist())) if key is not None else None
        assert held == (row.held if row is not None else None), f"slot {slot} is recorded to hold {held}, not {row}"
        assert self.cache.recorded_len(slot) == (len(held.tokens) if held is not None else 0), f"length of {slot}"
        assert self.cache.slot_is_findable(slot) == self.model.findable(slot), f"findable: {slot}"
        if held is not None and self.cache.slot_is_findable(slot):
            n = len(held.tokens)
            numbers = _numbers(held)[:, None] + np.arange(COPIED_LAYERS)
            assert np.array_equal(self.k[slot, :n, :COPIED_LAYERS], numbers), f"slot {slot} does not hold {held}"
            assert np.array_equal(self.v[slot, :n, :COPIED_LAYERS], -numbers), f"slot {slot} does not hold {held}"


def _key(prefix: Prefix) -> RadixKey:
    return RadixKey(prefix.tokens, prefix.namespace)


def _numbers(prefix: Prefix) -> NDArray[np.int64]:
    """Return the stamp of each position's KV, of every token up to it and the namespace."""
    seed = 0 if prefix.namespace is None else 1 + len(prefix.namespace)
    return np.array([hash((seed, head.tokens)) >> 2 for head in prefix.heads()], np.int64)
