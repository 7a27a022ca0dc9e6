"""`MambaPool`: the tensors of recurrent states, and the allocator of their slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.cache_core.errors import OutOfSlotsError, SlotError
from raydix.cache_core.pool.kv_pool import wait_for_device
from raydix.cache_core.pool.page_allocator import PageKeeper
from raydix.cache_core.pool.pool_layout import bytes_of_row, views_of_rows


class MambaPool:
    """A pool of state slots. A slot is an index into every layer's state tensors; slot 0 is reserved.

    Tensors that the pool allocates are views of one tensor with a row per slot, so that one copy moves a whole state.

    Args:
        num_slots: the number of states that the pool can hold.
        state_shapes: for each state layer, the shapes of its tensors, such as a convolution's and a recurrence's.
        dtype: the dtype of all tensors.
        device: the device of new tensors; ignored if `layers` is given.
        layers: the tensors to use, zeroed, `[num_slots + 1, *shape]` each, such as shared memory. None allocates them.
        rows: `[num_slots + 1, n]`, of which all `layers` are views; a row is the whole state of a slot. None: each
            tensor of `layers` is copied on its own.

    Attributes:
        keeper: takes over some of the slots that are freed, which are neither free nor a caller's then; None: all are
            free.

    Raises:
        ValueError: `num_slots` is less than 1.
    """

    def __init__(
        self,
        num_slots: int,
        state_shapes: Sequence[Sequence[Sequence[int]]] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        layers: Sequence[tuple[torch.Tensor, ...]] | None = None,
        rows: torch.Tensor | None = None,
    ) -> None:
        num_slots = index(num_slots)
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, not {num_slots}")
        if layers is None:
            size = bytes_of_row(state_shapes, dtype)
            rows = torch.zeros(num_slots + 1, size, dtype=torch.uint8, device=device)
            layers = views_of_rows(rows, state_shapes, dtype)
        self.num_slots = num_slots
        self.layers = list(layers)
        self._parts = [tensor for tensors in layers for tensor in tensors] if rows is None else [rows]
        self.on_free: Callable[[NDArray[np.int64]], None] | None = None  # called with each freed slot
        self.keeper: PageKeeper | None = None
        self._free = list(range(num_slots, 0, -1))
        self._used = bytearray(num_slots + 1)

    def available_size(self) -> int:
        """Return the number of free state slots. O(1)."""
        return len(self._free)

    def alloc_track_slot(self) -> int:
        """Allocate a state slot. Its old content is not cleared.

        Raises:
            OutOfSlotsError: no state slot is free.
        """
        if not self._free:
            raise OutOfSlotsError(1, 0, 0, self.num_slots, "states")
        slot = self._free.pop()
        self._used[slot] = 1
        return slot

    def is_used(self, slot: int) -> bool:
        """Return whether a state slot is allocated."""
        return 1 <= slot <= self.num_slots and bool(self._used[slot])

    def free_track_slot(self, slot: int) -> None:
        """Free a state slot.

        Raises:
            SlotError: the slot is out of range or free already.
        """
        slot = index(slot)
        if not self.is_used(slot):
            raise SlotError(f"state slot {slot} is out of range or free already")
        if self.keeper is not None and not len(self.keeper.keep(np.array([slot]))):
            return
        self._used[slot] = 0
        self._free.append(slot)
        if self.on_free is not None:
            self.on_free(np.array([slot]))

    def take_all(self) -> None:
        """Take all slots, before the first allocation: for a keeper that has them from the start."""
        self._free.clear()
        self._used[1:] = bytes([1]) * self.num_slots

    def kept_slots(self) -> list[int]:
        """Return the slots that the keeper has, for invariant checks. O(n)."""
        return [] if self.keeper is None else self.keeper.kept_starts().tolist()

    def copy_states(self, src: int, dst: int) -> None:
        """Copy the state in slot `src` into slot `dst`, in every layer.

        Raises:
            SlotError: a slot is out of range; nothing was copied.
        """
        src, dst = self._checked(src), self._checked(dst)
        for part in self._parts:
            part[dst].copy_(part[src])
        self._wait()

    def clear_state(self, slot: int) -> None:
        """Set the state in a slot to zeros, the initial state.

        Raises:
            SlotError: the slot is out of range.
        """
        slot = self._checked(slot)
        for part in self._parts:
            part[slot].zero_()
        self._wait()

    def _checked(self, slot: int) -> int:
        """Return a slot as a plain int; raise SlotError if it is out of range."""
        slot = index(slot)
        if not 1 <= slot <= self.num_slots:
            raise SlotError(f"state slot {slot} is outside [1, {self.num_slots}]")
        return slot

    def _wait(self) -> None:
        if self._parts:
            wait_for_device(self._parts[0])

    def free_slots(self) -> list[int]:
        """Return the free slots, for invariant checks. O(n)."""
        return list(self._free)

    def check_invariants(self) -> None:
        """Raise AssertionError unless each slot is either free or used. O(n)."""
        assert len(set(self._free)) == len(self._free), "a state slot is free twice"
        assert sum(self._used) + len(self._free) == self.num_slots, "a state slot is neither free nor used"
        assert not any(self._used[slot] for slot in self._free), "a free state slot is marked as used"
