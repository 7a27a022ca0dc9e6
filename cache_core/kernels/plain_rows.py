"""Packed rows of slots, and an allocator's free pages, in plain Python and numpy: a part of `plain_kernels`."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.cache_core.kernels.plain_runs import as_runs, expanded_runs, is_runs, num_in_runs, parted_runs

_SLOT_BYTES, _NARROW_BYTES = 8, 4
_NARROW_LIMIT = 2**31
_FEW = 2  # slots: packed singly they take fewer bytes than as a run
_MIN_LANES = 4096
_lanes: dict[int, NDArray[np.int64]] = {}  # by page size: 0, 1, ..., page_size - 1, repeated


def expand(rows: list[bytes], num_tokens: int, page_size: int, /) -> torch.Tensor | None:
    """Return one slot per token, int64, in a copy; None if some rows pack pages and others single slots."""
    slots = np.frombuffer(join(rows), np.int64)
    if slots.size != num_tokens:
        if slots.size * page_size != num_tokens:
            return None
        slots = slots.repeat(page_size)
        slots += _lanes_of(page_size, num_tokens)
    return torch.from_numpy(slots)


def join(rows: list[bytes], /) -> bytearray:
    """Return the slots of rows as packed, per token or per page, joined in a copy, int64."""
    if any(len(row) % _SLOT_BYTES for row in rows):
        rows = [_unpacked(row).tobytes() for row in rows]
    return bytearray().join(rows)


def _unpacked(row: bytes) -> NDArray[np.int64]:
    if is_runs(row):
        return expanded_runs(row)
    if len(row) % 2:
        return np.frombuffer(row, np.int32, len(row) // _NARROW_BYTES).astype(np.int64)
    return np.frombuffer(row, np.int64)


def parted(row: bytes, count: int) -> tuple[bytes, bytes]:
    """Split a row after the first `count` of its packed slots; return both parts, packed in the same way."""
    if is_runs(row):
        return parted_runs(row, count)
    if len(row) % 2:
        return row[: count * _NARROW_BYTES] + b"\0", row[count * _NARROW_BYTES :]
    return row[: count * _SLOT_BYTES], row[count * _SLOT_BYTES :]


def num_slots(row: bytes) -> int:
    """Return the number of slots in a row, as packed: per token or per page."""
    if is_runs(row):
        return num_in_runs(row)
    return len(row) // (_NARROW_BYTES if len(row) % 2 else _SLOT_BYTES)


def gather(nodes: list[Any], page_size: int, /) -> torch.Tensor:
    """Return one slot per token of nodes in a tree, joined in a copy, int64."""
    return expand_each([node.slots for node in nodes], [node.end - node.parent.end for node in nodes], page_size)


def expand_each(rows: list[bytes], sizes: list[int], page_size: int) -> torch.Tensor:
    """Expand rows with `sizes` tokens, where some rows may pack pages and others single slots."""
    slots = expand(rows, sum(sizes), page_size)
    if slots is None:
        slots = torch.cat([_said(row, size, page_size) for row, size in zip(rows, sizes, strict=True)])
    return slots


def _said(row: bytes, num_tokens: int, page_size: int) -> torch.Tensor:
    slots = expand([row], num_tokens, page_size)
    if slots is None:
        raise ValueError(f"a row does not say the slots of {num_tokens} tokens")
    return slots


def _lanes_of(page_size: int, num_tokens: int) -> NDArray[np.int64]:
    """Return the index of each token in its page."""
    known = _lanes.get(page_size)
    if known is None or known.size < num_tokens:
        num_pages = max(2 * num_tokens, _MIN_LANES) // page_size + 1
        known = _lanes[page_size] = np.tile(np.arange(page_size), num_pages)
    return known[:num_tokens]


def is_row(slots: Any, needed: int, /) -> TypeGuard[torch.Tensor]:
    """Return whether `slots` is a 1-D contiguous int64 CPU tensor with at least `needed` items: the common case."""
    if needed < 0:
        raise ValueError("needed must not be negative")
    if type(slots) is not torch.Tensor:
        return False
    fits = slots.dim() == 1 and slots.numel() >= needed
    return fits and slots.dtype is torch.int64 and slots.is_cpu and slots.is_contiguous()


def compact(slots: torch.Tensor, page_size: int, start: int, stop: int, /) -> bytes:
    """Pack `slots[start:stop]` into a row: the first slot of each page if pages are consecutive slots, else every slot.

    `slots` must be a contiguous int64 tensor on the CPU; it is copied. The size of the row shows how it is packed: 8
    bytes a slot; 4 bytes a slot and one more byte, if every slot is in [0, 2**31); or 16 bytes a run and two more bytes
    (see `plain_runs`), if pages have one slot and the runs are long enough.
    """
    part: NDArray[np.int64] = slots.numpy()[start:stop]
    if page_size == 1 and part.size > _FEW and (row := as_runs(part)) is not None:
        return row
    if page_size > 1 and part.size:
        jumps = part[1:] != part[:-1] + 1
        jumps[page_size - 1 :: page_size] = False  # pages need not follow one another
        if b"\1" not in jumps.tobytes():
            part = part[::page_size]
    if part.size and part.item(part.argmin()) >= 0 and part.item(part.argmax()) < _NARROW_LIMIT:
        return part.astype(np.int32).tobytes() + b"\0"
    return part.tobytes()


def take_back(
    starts: NDArray[np.int64],
    marks: NDArray[np.int32],
    stack: NDArray[np.int64],
    num_free: int,
    page_size: int,
    /,
) -> str | None:
    """Mark pages as free, and push them onto the stack of `num_free` free pages, the first of `starts` on top.

    Args:
        starts: the first slots of the pages.
        marks: by page number: 0 for an allocated page, negative for all others.

    Returns None, or the fault of the first bad page, and changes nothing: "outside" (no first slot of a page of the
    pool), "free" (already free) or "twice" (repeated in `starts`). A full stack is "outside", too.
    """
    pages = starts if page_size == 1 else starts // page_size
    if page_size > 1 and (pages * page_size != starts).any():
        return _first_fault(starts, marks, page_size)
    try:
        known = marks.take(pages)
    except IndexError:
        return _first_fault(starts, marks, page_size)
    if pages.item(pages.argmin()) < 1 or known.item(known.argmin()) < 0:
        return _first_fault(starts, marks, page_size)
    num_pages = len(starts)
    order = np.arange(-num_pages, 0, dtype=np.int32)  # of a page given twice, only the last mark can be read back
    marks[pages] = order
    if marks.take(pages).tobytes() != order.tobytes() or num_pages > len(stack) - num_free:
        marks[pages] = 0
        return _first_fault(starts, marks, page_size)
    stack[num_free : num_free + num_pages] = starts[::-1]
    return None


def _first_fault(starts: NDArray[np.int64], marks: NDArray[np.int32], page_size: int) -> str:
    """Return the fault of the first page that cannot be freed."""
    seen: set[int] = set()
    for start in starts.tolist():
        page = start // page_size
        if start % page_size or not 1 <= page < len(marks):
            return "outside"
        if page in seen:
            return "twice"
        if marks[page] < 0:
            return "free"
        seen.add(page)
    return "outside"
