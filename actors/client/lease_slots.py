"""`LeaseSlots`: the slots that a lease covers, from the responses that its client has received."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raydix.cache_core.leases.lease_table import append_in_place

if TYPE_CHECKING:
    import torch

_INT32 = np.dtype("<i4")


class LeaseSlots:
    """The slots of a lease's tokens, and the slots of their window KV, in runs of consecutive slots.

    Responses may come late, or never: each names the run that it begins at, and replaces the runs from there on.
    Requests are numbered in their order, in which they are executed.

    Args:
        starts: the first slot of each run, int32.
        window_starts: the same in the window pool, 0 if the lease does not hold the window KV; empty: no window.
        num_slots: tokens that the lease covers; the last run may have more slots.
        run_len: slots of each run.

    Attributes:
        num_slots: tokens that the lease covers now.
        window_number: the number of the latest request that has set the window.
    """

    __slots__ = (
        "_buffer",
        "_expanded",
        "_known",
        "_run_len",
        "_settled",
        "_starts",
        "_window",
        "_window_expanded",
        "num_slots",
        "window_number",
    )

    def __init__(self, starts: bytes, window_starts: bytes, num_slots: int, run_len: int) -> None:
        self.num_slots = num_slots
        self._run_len = run_len
        self._known = starts  # runs as granted, unpacked into `_starts` when they are first read or changed
        self._starts: NDArray[np.int64] | None = None
        self._buffer: NDArray[np.int64] | None = None  # begins with `_starts`, once runs were added
        self._window = window_starts
        self._settled = 0  # leading runs that no response may change: they were repointed to the tree's
        self.window_number = 0
        self._expanded: torch.Tensor | None = None
        self._window_expanded: torch.Tensor | None = None

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first slot of each run."""
        if self._starts is None:
            self._starts = _unpack(self._known)
        return self._starts

    @property
    def has_window(self) -> bool:
        """Whether the cache keeps window KV; True also if the lease covers no tokens."""
        return bool(self._window) or not self.num_slots

    def all_slots(self) -> torch.Tensor:
        """Return the slot of each token, int64 on the CPU. Callers must not change the tensor."""
        if self._expanded is None:
            self._expanded = self._expand(self.starts, self.num_slots)
        return self._expanded

    def pages(self, page_size: int) -> torch.Tensor:
        """Return the page of each `page_size` tokens, int64 on the CPU; runs are whole pages."""
        import torch

        num_pages = -(-self.num_slots // page_size)
        firsts = self.starts[:, None] // page_size + np.arange(self._run_len // page_size)
        return torch.from_numpy(firsts.reshape(-1)[:num_pages])

    def last_slots(self, num_tokens: int) -> torch.Tensor:
        """Return the slots of the last tokens alone, in O(num_tokens)."""
        run, offset = divmod(self.num_slots - num_tokens, self._run_len)
        return self._expand(self.starts[run:], offset + num_tokens)[offset:]

    def window_slots(self) -> torch.Tensor:
        """Return the window slot of each token, int64 on the CPU; 0: not held."""
        if self._window_expanded is None:
            import torch

            starts = _unpack(self._window)
            held = np.repeat(starts > 0, self._run_len)[: self.num_slots]
            self._window_expanded = self._expand(starts, self.num_slots) * torch.from_numpy(held)
        return self._window_expanded

    def repoint(self, known_len: int, starts: bytes) -> None:
        """Replace the runs from token `known_len` on by the new ones; runs behind them stay."""
        first, changed = self.count_runs(known_len), np.frombuffer(starts, _INT32)
        last = first + len(changed)
        self.starts[first:last] = changed
        if last > self._settled:
            self._settled = last
        self._expanded = None

    def count_runs(self, num_tokens: int) -> int:
        """Return the number of whole runs in `num_tokens` tokens."""
        return num_tokens // self._run_len

    def add_runs(self, number: int, known_runs: int, starts: bytes, window_starts: bytes, num_slots: int) -> None:
        """Replace the runs from `known_runs` on by new ones, which cover `num_slots` tokens.

        There may be more runs than that, after an extend that was cancelled. If the request waited in the queue, runs
        that were repointed and a window that was set meanwhile are newer, and stay.

        Args:
            number: of the request.
        """
        kept = max(known_runs, self._settled)
        more = _unpack(starts)[kept - known_runs :]
        self._starts, self._buffer = append_in_place(self.starts, self._buffer, kept, more)
        known = self._window if self.window_number > number else b""
        self._window = known + window_starts[len(known) :]
        self.window_number = max(self.window_number, number)
        self.num_slots = num_slots
        self._expanded = self._window_expanded = None

    def set_window(self, number: int, window_starts: bytes) -> None:
        """Replace the leading window runs, unless a later request than `number` has set them already."""
        if number > self.window_number:
            self.window_number = number
            self._window = window_starts + self._window[len(window_starts) :]
            self._window_expanded = None

    def _expand(self, starts: NDArray[np.int64], num_tokens: int) -> torch.Tensor:
        import torch

        runs = starts[:, None] + np.arange(self._run_len)
        return torch.from_numpy(runs.reshape(-1)[:num_tokens])


def _unpack(starts: bytes) -> NDArray[np.int64]:
    return np.frombuffer(starts, _INT32).astype(np.int64)
