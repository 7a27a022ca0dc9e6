"""`LeaseSlots`: which slots a lease covers, as far as its client has been told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raydix.cache_core.leases.growing_row import append_in_place

if TYPE_CHECKING:
    import torch

_INT32 = np.dtype("<i4")


class LeaseSlots:
    """The slots of a lease's tokens, and those of their window KV: runs of slots that lie in a row.

    Answers may come late, or never: each names where what it tells begins, and none is added to what another told.
    Requests are numbered in their order, in which they are executed.

    Args:
        starts: the first slot of each run, int32.
        window_starts: the same in the window pool, 0 where the lease does not hold its window KV; empty: no window.
        num_slots: tokens that the lease covers, in the last run perhaps fewer than it has slots.
        run_len: slots that each of the starts stands for.

    Attributes:
        num_slots: the same, as it grows.
        window_told: the number of the last request whose answer told of the window.
    """

    __slots__ = (
        "_expanded",
        "_known",
        "_room",
        "_run_len",
        "_settled",
        "_starts",
        "_window",
        "_window_expanded",
        "num_slots",
        "window_told",
    )

    def __init__(self, starts: bytes, window_starts: bytes, num_slots: int, run_len: int) -> None:
        self.num_slots = num_slots
        self._run_len = run_len
        self._known = starts  # as granted; once they are looked at or change, `_starts`
        self._starts: NDArray[np.int64] | None = None
        self._room: NDArray[np.int64] | None = None  # what `_starts` is the beginning of, once it has grown
        self._window = window_starts
        self._settled = 0  # runs that are as they will be: what was repointed is the tree's
        self.window_told = 0
        self._expanded: torch.Tensor | None = None
        self._window_expanded: torch.Tensor | None = None

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first slot of each run."""
        if self._starts is None:
            self._starts = _unpacked(self._known)
        return self._starts

    @property
    def has_window(self) -> bool:
        """Whether the cache keeps window KV, as far as this lease can tell."""
        return bool(self._window) or not self.num_slots

    def all(self) -> torch.Tensor:
        """The slot of each token, int64 on the CPU. Kept: callers must not change it."""
        if self._expanded is None:
            self._expanded = self._expand(self.starts, self.num_slots)
        return self._expanded

    def pages(self, page_size: int) -> torch.Tensor:
        """The page of each `page_size` tokens, int64 on the CPU; runs are whole pages."""
        import torch

        num_pages = -(-self.num_slots // page_size)
        firsts = self.starts[:, None] // page_size + np.arange(self._run_len // page_size)
        return torch.from_numpy(firsts.reshape(-1)[:num_pages])

    def last(self, num_tokens: int) -> torch.Tensor:
        """The slots of the last tokens alone, in O(num_tokens)."""
        run, offset = divmod(self.num_slots - num_tokens, self._run_len)
        return self._expand(self.starts[run:], offset + num_tokens)[offset:]

    def of_window(self) -> torch.Tensor:
        """The window slot of each token, int64 on the CPU; 0: not held."""
        if self._window_expanded is None:
            import torch

            starts = _unpacked(self._window)
            held = np.repeat(starts > 0, self._run_len)[: self.num_slots]
            self._window_expanded = self._expand(starts, self.num_slots) * torch.from_numpy(held)
        return self._window_expanded

    def repoint(self, known_len: int, starts: bytes) -> None:
        """From a token on, the runs are these, as many as there are."""
        first, changed = self.runs_of(known_len), np.frombuffer(starts, _INT32)
        last = first + len(changed)
        self.starts[first:last] = changed
        if last > self._settled:
            self._settled = last
        self._expanded = None

    def runs_of(self, num_tokens: int) -> int:
        """How many whole runs so many tokens take."""
        return num_tokens // self._run_len

    def grow(self, asked: int, known_runs: int, starts: bytes, window_starts: bytes, num_slots: int) -> None:
        """The lease covers so many tokens now, and its runs beyond some are these. They may go further, after an extend
        that was cancelled.

        The answer has stood in line, perhaps: what was told meanwhile is newer.
        """
        kept = max(known_runs, self._settled)
        more = _unpacked(starts)[kept - known_runs :]
        self._starts, self._room = append_in_place(self.starts, self._room, kept, more)
        known = self._window if self.window_told > asked else b""
        self._window = known + window_starts[len(known) :]
        self.window_told = max(self.window_told, asked)
        self.num_slots = num_slots
        self._expanded = self._window_expanded = None

    def note_window(self, asked: int, window_starts: bytes) -> None:
        """The window KV has changed, unless a later request was answered before; runs beyond are as they were."""
        if asked > self.window_told:
            self.window_told = asked
            self._window = window_starts + self._window[len(window_starts) :]
            self._window_expanded = None

    def _expand(self, starts: NDArray[np.int64], num_tokens: int) -> torch.Tensor:
        import torch

        rows = starts[:, None] + np.arange(self._run_len)
        return torch.from_numpy(rows.reshape(-1)[:num_tokens])


def _unpacked(starts: bytes) -> NDArray[np.int64]:
    return np.frombuffer(starts, _INT32).astype(np.int64)
