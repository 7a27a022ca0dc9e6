"""Slots packed as runs of consecutive slots, in numpy: the equivalent of `c/_runs.c`.

A packed run is two int64: its first slot, and the number of slots from the start of the row to the end of the run. Two
zero bytes follow the runs, so that the length of a row shows that it has runs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SLOT_BYTES, _RUN_BYTES, _TAIL = 8, 16, b"\0\0"
_WORTH = 16  # least slots per run, on average: shorter runs take longer to expand than single slots
_SLACK = 512  # slots that may be in shorter runs before `as_runs` gives up
_MOST_RUNS = 256

Slots = NDArray[np.int64]


def as_runs(slots: Slots) -> bytes | None:
    """Return at least one slot packed as runs; None if the runs are too short or too many."""
    ends = np.append((slots[1:] - slots[:-1] != 1).nonzero()[0] + 1, slots.size)
    worth = np.arange(1, ends.size + 1) * _WORTH
    if ends.size > 1 and (ends.size > _MOST_RUNS or worth[-1] > slots.size or (worth[:-1] > ends[:-1] + _SLACK).any()):
        return None
    return _row_of(slots[np.append(0, ends[:-1])], ends)


def is_runs(row: bytes) -> bool:
    """Return whether a row is packed as runs."""
    return len(row) % _RUN_BYTES == len(_TAIL)


def num_in_runs(row: bytes) -> int:
    """Return the number of slots of a row that is packed as runs."""
    return int(_runs_in(row)[1][-1])


def expanded_runs(row: bytes) -> Slots:
    """Return the slots of a row that is packed as runs."""
    firsts, ends = _runs_in(row)
    counts = np.diff(ends, prepend=0)
    return (firsts - ends + counts).repeat(counts) + np.arange(ends[-1])


def parted_runs(row: bytes, count: int) -> tuple[bytes, bytes]:
    """Split a row that is packed as runs: return its first `count` slots and the rest, both as runs."""
    firsts, ends = _runs_in(row)
    cut = int(ends.searchsorted(count, "right"))  # the run that is split, or that begins at the split
    start = int(ends[cut - 1]) if cut else 0
    num_before = cut + (start < count)
    rest = firsts[cut:].copy()
    rest[0] += count - start
    return _row_of(firsts[:num_before], ends[:num_before].clip(max=count)), _row_of(rest, ends[cut:] - count)


def _row_of(firsts: Slots, ends: Slots) -> bytes:
    return np.stack((firsts, ends), 1).tobytes() + _TAIL


def _runs_in(row: bytes) -> tuple[Slots, Slots]:
    runs = np.frombuffer(row, np.int64, len(row) // _SLOT_BYTES).reshape(-1, 2)
    return runs[:, 0], runs[:, 1]
