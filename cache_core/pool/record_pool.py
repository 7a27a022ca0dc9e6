"""`RecordPool`: a pool of opaque records, one for each page; `RecordLayout` has their places in one allocation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raydix.cache_core.pool.pool_layout import aligned, memory_for


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """The places of the records in the pool's memory: those of pages, then of window halves, then of states.

    A record of a page has `page_size * slot_bytes` bytes, and that of a window half `page_size * swa_slot_bytes`. The
    first record of each kind is reserved for padding, so that `slot // page_size` is the number of a page's record.
    """

    num_slots: int
    page_size: int
    slot_bytes: int
    num_swa_slots: int = 0
    swa_slot_bytes: int = 0
    num_state_slots: int = 0
    state_bytes: int = 0

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """The records of pages, window halves and states, `(number, bytes)` each; `(0, 0)` if there are none."""
        pages = self.num_slots // self.page_size + 1, self.page_size * self.slot_bytes
        windows = self.num_swa_slots // self.page_size + 1, self.page_size * self.swa_slot_bytes
        states = self.num_state_slots + 1, self.state_bytes
        return pages, windows if windows[1] else (0, 0), states if states[1] else (0, 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return sum(aligned(number * num_bytes) for number, num_bytes in self.shapes)


class RecordPool:
    """The records of an opaque pool.

    Attributes:
        pages: the records of pages, `[num_slots / page_size + 1, bytes]` uint8.
        windows: the same, of window halves, by window slots; empty without a window.
        states: the same, of states, `[num_state_slots + 1, bytes]`; empty without states.

    Args:
        layout: the numbers of records and their bytes.
        device: the device of new memory; ignored if `storage` is given.
        storage: the memory of the pool, such as shared memory: 1-D uint8 of at least `layout.num_bytes`. None allocates
            zeroed memory.

    Raises:
        ValueError: `storage` is too small.
    """

    def __init__(
        self, layout: RecordLayout, device: torch.device | str = "cpu", storage: torch.Tensor | None = None
    ) -> None:
        storage = self.storage = memory_for(layout.num_bytes, device, storage)
        self.layout = layout
        kinds, at = [], 0
        for number, num_bytes in layout.shapes:
            kinds.append(storage[at : at + number * num_bytes].view(number, num_bytes))
            at += aligned(number * num_bytes)
        self.pages, self.windows, self.states = kinds

    def state_tensors(self) -> list[tuple[torch.Tensor, ...]]:
        """Return the tensors of states that a cache copies and clears: the records."""
        return [(self.states,)] if self.states.numel() else []

    def state_rows(self) -> torch.Tensor:
        """Return the states, a row for each state slot."""
        return self.states

    def checked_tensors(self, kind: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a kind ("full", "swa" or "state") by their names in errors, `[slots, ...]` each."""
        layout = self.layout
        records, rows = {
            "full": (self.pages, layout.slot_bytes),
            "swa": (self.windows, layout.swa_slot_bytes),
            "state": (self.states, layout.state_bytes),
        }[kind]
        return {"its record": records.view(-1, rows)} if records.numel() else {}
