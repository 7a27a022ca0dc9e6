"""`SlotAllocator`: the free slots, and the version of each slot. A slot is a row: the KV of one sequence."""

from __future__ import annotations

from collections.abc import Callable
from operator import index

from raydix.cache_core.errors import SlotError

_WORD = 1024  # bits


class SlotMask:
    """A set of slots as bits, in words of 1,024, with a summary of one bit for each word that is not zero.

    Up to a million slots, all integers have at most 1,024 bits, so `add`, `discard` and `lowest` are O(1).
    """

    __slots__ = ("_summary", "_words", "count")

    def __init__(self, num_slots: int, *, full: bool = False) -> None:
        num_words = -(-num_slots // _WORD)
        self.count = num_slots if full else 0
        self._words = [(1 << min(_WORD, num_slots - at * _WORD)) - 1 if full else 0 for at in range(num_words)]
        self._summary = (1 << num_words) - 1 if full else 0

    def __contains__(self, slot: int) -> bool:
        return bool(self._words[slot // _WORD] >> slot % _WORD & 1)

    def add(self, slot: int) -> None:
        """Add a slot, which may be in the set already."""
        self.count += slot not in self
        self._words[slot // _WORD] |= 1 << slot % _WORD
        self._summary |= 1 << slot // _WORD

    def discard(self, slot: int) -> None:
        """Remove a slot, which must be in the set."""
        self.count -= 1
        at = slot // _WORD
        self._words[at] &= ~(1 << slot % _WORD)
        if not self._words[at]:
            self._summary &= ~(1 << at)

    def lowest(self) -> int:
        """Return the lowest slot; -1 if the set is empty."""
        if not self._summary:
            return -1
        at = _lowest_bit(self._summary)
        return at * _WORD + _lowest_bit(self._words[at])

    def check_invariants(self) -> None:
        """Raise AssertionError unless count and summary agree with the words. O(words)."""
        count = sum(word.bit_count() for word in self._words)
        assert self.count == count, f"{self.count=}, but {count} bits are set"
        summary = sum(1 << at for at, word in enumerate(self._words) if word)
        assert self._summary == summary, f"the summary is {self._summary:b}, but the words need {summary:b}"


class SlotAllocator:
    """Slots 0 ... max_slots - 1, each free or taken, and the version of each: how often `alloc` returned it.

    A caller that records a slot's version with its content can detect later that the slot was allocated again.
    `occupy` takes a free slot to reuse its content, and leaves its version unchanged. Each call is O(1).

    Attributes:
        on_free: functions that `free` calls with the slot.

    Raises:
        ValueError: `max_slots` is less than 1.
    """

    def __init__(self, max_slots: int) -> None:
        max_slots = index(max_slots)
        if max_slots < 1:
            raise ValueError(f"max_slots must be at least 1, not {max_slots}")
        self.max_slots = max_slots
        self.on_free: list[Callable[[int], None]] = []
        self._free = SlotMask(max_slots, full=True)
        self._versions = [0] * max_slots

    @property
    def free_count(self) -> int:
        """The number of free slots."""
        return self._free.count

    def alloc(self) -> int:
        """Take the lowest free slot and increment its version; return -1 if none is free. The caller must `free` it."""
        slot = self._free.lowest()
        if slot >= 0:
            self.alloc_at(slot)
        return slot

    def alloc_at(self, idx: int) -> None:
        """Take a given free slot for new content, and increment its version.

        Raises:
            SlotError: the slot is out of range or not free; nothing changed.
        """
        self.occupy(idx)
        self._versions[index(idx)] += 1

    def occupy(self, idx: int) -> None:
        """Take a given free slot to reuse its content. Its version does not change.

        Raises:
            SlotError: the slot is out of range or not free; nothing changed.
        """
        idx = self.check_range(idx)
        if idx not in self._free:
            raise SlotError(f"slot {idx} is not free")
        self._free.discard(idx)

    def free(self, idx: int) -> None:
        """Free a slot. Its content stays valid until the slot is allocated again.

        Raises:
            SlotError: the slot is out of range or free already; nothing changed.
        """
        idx = self.check_range(idx)
        if idx in self._free:
            raise SlotError(f"slot {idx} is free already")
        self._free.add(idx)
        for notify in self.on_free:
            notify(idx)

    def is_free(self, idx: int) -> bool:
        """Return whether a slot is free.

        Raises:
            SlotError: the slot is out of range.
        """
        return self.check_range(idx) in self._free

    def version(self, idx: int) -> int:
        """Return how often a slot was allocated.

        Raises:
            SlotError: the slot is out of range.
        """
        return self._versions[self.check_range(idx)]

    def check_range(self, idx: int) -> int:
        """Return the slot as a plain int; raise SlotError if it is out of range."""
        idx = index(idx)
        if not 0 <= idx < self.max_slots:
            raise SlotError(f"slot {idx} is outside [0, {self.max_slots})")
        return idx

    def check_invariants(self) -> None:
        """Raise AssertionError unless the count of free slots is right and all are in range. O(max_slots)."""
        self._free.check_invariants()
        free = [slot for slot in range(self.max_slots) if slot in self._free]
        assert len(free) == self.free_count, f"{self.free_count=}, but {free} are free"


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
