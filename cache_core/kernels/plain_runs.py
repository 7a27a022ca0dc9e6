"""Rows of slots as runs, each from a first slot on, in numpy: the twin of `_runs.c`.

Such a row says of each run its first slot, and how many slots of the row there are up to its end; it is known by two
bytes more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SLOT_BYTES, _RUN_BYTES, _TAIL = 8, 16, b"\0\0"
_WORTH = 16  # slots of a run on average, at least: shorter ones take longer to write out than slots one by one
_SLACK = 512  # slots that may come in shorter ones before they are given up
_MOST_RUNS = 256

Slots = NDArray[np.int64]


def as_runs(slots: Slots) -> bytes | None:
    """A row of at least one slot as runs; None if that is not worth it."""
    ends = np.append((slots[1:] - slots[:-1] != 1).nonzero()[0] + 1, slots.size)
    worth = np.arange(1, ends.size + 1) * _WORTH
    if ends.size > 1 and (ends.size > _MOST_RUNS or worth[-1] > slots.size or (worth[:-1] > ends[:-1] + _SLACK).any()):
        return None
    return _row_of(slots[np.append(0, ends[:-1])], ends)


def is_runs(row: bytes) -> bool:
    """Whether a row says runs."""
    return len(row) % _RUN_BYTES == len(_TAIL)


def num_in_runs(row: bytes) -> int:
    """How many slots they say."""
    return int(_runs_in(row)[1][-1])


def expanded_runs(row: bytes) -> Slots:
    """Their slots, one by one."""
    firsts, ends = _runs_in(row)
    counts = np.diff(ends, prepend=0)
    return (firsts - ends + counts).repeat(counts) + np.arange(ends[-1])


def parted_runs(row: bytes, count: int) -> tuple[bytes, bytes]:
    """The first slots of them, so many, and the rest."""
    firsts, ends = _runs_in(row)
    cut = int(ends.searchsorted(count, "right"))  # the run that is cut, or that begins where the cut is
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
