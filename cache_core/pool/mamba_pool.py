"""`MambaPool`: the tensors of recurrent states, and who has which slot of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.cache_core.errors import OutOfSlotsError, SlotError
from raydix.cache_core.pool.kv_pool import wait_for_device
from raydix.cache_core.pool.pool_layout import bytes_of_row, views_of_rows


class MambaPool:
    """State slots: row `slot` of every layer's state tensors. Row 0 is reserved.

    Those that it allocates are views of one, a row for each slot, so that a state is copied at once.

    Args:
        num_slots: states that can be held at once.
        state_shapes: for each state layer, the shapes of its tensors (a convolution's and a recurrence's, say).
        dtype: of all of them.
        device: where to allocate; ignored if `layers` is given.
        layers: the tensors to use, `[num_slots + 1, *shape]` each, zeroed: shared memory, say. None allocates them.
        rows: `[num_slots + 1, n]`, of which all of the given `layers` are views: a row is a slot's whole state. None:
            each of them is copied by itself.
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
        self.on_free: Callable[[NDArray[np.int64]], None] | None = None  # told of slots that have become free
        self._free = list(range(num_slots, 0, -1))
        self._used = bytearray(num_slots + 1)

    def available_size(self) -> int:
        """Free state slots. O(1)."""
        return len(self._free)

    def alloc_track_slot(self) -> int:
        """A state slot, the caller's until it frees it. What it held before is still in it.

        Raises:
            OutOfSlotsError: none is free.
        """
        if not self._free:
            raise OutOfSlotsError(1, 0, 0, self.num_slots, "states")
        slot = self._free.pop()
        self._used[slot] = 1
        return slot

    def is_used(self, slot: int) -> bool:
        """Whether a state slot is handed out."""
        return 1 <= slot <= self.num_slots and bool(self._used[slot])

    def free_track_slot(self, slot: int) -> None:
        """Take back a state slot.

        Raises:
            SlotError: it is out of range or free already.
        """
        slot = index(slot)
        if not self.is_used(slot):
            raise SlotError(f"state slot {slot} is out of range or free already")
        self._used[slot] = 0
        self._free.append(slot)
        if self.on_free is not None:
            self.on_free(np.array([slot]))

    def copy_states(self, src: int, dst: int) -> None:
        """Copy the state in slot `src` into slot `dst`, in every layer.

        Raises:
            SlotError: one of them is out of range; nothing was copied.
        """
        src, dst = self._checked(src), self._checked(dst)
        for part in self._parts:
            part[dst].copy_(part[src])
        self._wait()

    def clear_state(self, slot: int) -> None:
        """Make the state in a slot the initial one: zeros.

        Raises:
            SlotError: it is out of range.
        """
        slot = self._checked(slot)
        for part in self._parts:
            part[slot].zero_()
        self._wait()

    def _checked(self, slot: int) -> int:
        """The number of a row that states may be in: row 0 is none, and none is counted from the end."""
        slot = index(slot)
        if not 1 <= slot <= self.num_slots:
            raise SlotError(f"state slot {slot} is outside [1, {self.num_slots}]")
        return slot

    def _wait(self) -> None:
        if self._parts:
            wait_for_device(self._parts[0])

    def free_slots(self) -> list[int]:
        """The free slots, for checks of conservation. O(n)."""
        return list(self._free)

    def check_invariants(self) -> None:
        """Raise AssertionError unless each slot is free or used, once. O(n)."""
        assert len(set(self._free)) == len(self._free), "a state slot is free twice"
        assert sum(self._used) + len(self._free) == self.num_slots, "a state slot is neither free nor used"
        assert not any(self._used[slot] for slot in self._free), "a free state slot is marked as used"
