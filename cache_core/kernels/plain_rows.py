"""Rows of slots, and the pages they are of, in plain Python and numpy: a part of `plain_kernels`."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.cache_core.kernels.plain_runs import as_runs, expanded_runs, is_runs, num_in_runs, parted_runs

_SLOT_BYTES, _NARROW_BYTES = 8, 4
_NARROW_LIMIT = 2**31
_FEW = 2  # slots, that take less room one by one than as a run
_MIN_LANES = 4096
_lanes: dict[int, NDArray[np.int64]] = {}  # by page size: 0, 1, ..., page_size - 1, over and over


def expand(rows: list[bytes], num_tokens: int, page_size: int, /) -> torch.Tensor | None:
    """One slot per token, int64, of rows that all name the first slot of each page, or all each slot; None of others.

    A copy, in which the rows stand one after the other.
    """
    slots = np.frombuffer(join(rows), np.int64)
    if slots.size != num_tokens:
        if slots.size * page_size != num_tokens:
            return None
        slots = slots.repeat(page_size)
        slots += _lanes_of(page_size, num_tokens)
    return torch.from_numpy(slots)


def join(rows: list[bytes], /) -> bytearray:
    """What rows say, int64, one after the other; a copy."""
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
    """The first slots of a row, so many of those it says, and the rest of them, both packed as it is."""
    if is_runs(row):
        return parted_runs(row, count)
    if len(row) % 2:
        return row[: count * _NARROW_BYTES] + b"\0", row[count * _NARROW_BYTES :]
    return row[: count * _SLOT_BYTES], row[count * _SLOT_BYTES :]


def num_slots(row: bytes) -> int:
    """How many slots a row says."""
    if is_runs(row):
        return num_in_runs(row)
    return len(row) // (_NARROW_BYTES if len(row) % 2 else _SLOT_BYTES)


def gather(nodes: list[Any], page_size: int, /) -> torch.Tensor:
    """One slot per token, int64, of nodes in a tree; a copy, in which they stand one after the other."""
    return expand_each([node.slots for node in nodes], [node.end - node.parent.end for node in nodes], page_size)


def expand_each(rows: list[bytes], sizes: list[int], page_size: int) -> torch.Tensor:
    """`expand` of rows over so many tokens each, whether a row says the slots of tokens or those of pages."""
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
    """The place of each token in its page."""
    known = _lanes.get(page_size)
    if known is None or known.size < num_tokens:
        num_pages = max(2 * num_tokens, _MIN_LANES) // page_size + 1
        known = _lanes[page_size] = np.tile(np.arange(page_size), num_pages)
    return known[:num_tokens]


def is_row(slots: Any, needed: int, /) -> TypeGuard[torch.Tensor]:
    """Whether it is a row of slots as most callers have them: at least so many int64 in a tensor on the CPU."""
    if needed < 0:
        raise ValueError("needed must not be negative")
    if type(slots) is not torch.Tensor:
        return False
    fits = slots.dim() == 1 and slots.numel() >= needed
    return fits and slots.dtype is torch.int64 and slots.is_cpu and slots.is_contiguous()


def compact(slots: torch.Tensor, page_size: int, start: int, stop: int, /) -> bytes:
    """A row of its own of `slots[start:stop]`: the first of each page if pages are runs of slots, else all of them.

    `slots` are int64, in a row, on the CPU: the caller has seen to that. In the row they take 8 bytes each or, where
    none is negative and all fit, 4, and then one byte more. If they are runs, and not too short ones, the row says of
    each its first slot and up to how many slots it goes, and then two bytes more: so its size tells how it is packed.
    """
    part: NDArray[np.int64] = slots.numpy()[start:stop]
    if page_size == 1 and part.size > _FEW and (row := as_runs(part)) is not None:
        return row
    if page_size > 1 and part.size:
        jumps = part[1:] != part[:-1] + 1
        jumps[page_size - 1 :: page_size] = False  # from page to page there may be one
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
    """Mark pages as free, and put them on the stack of `num_free` free ones, the first on top.

    Args:
        starts: the first slots of the pages.
        marks: by page number, 0 of pages that are handed out, negative of all others.

    Returns why nothing was done, if so: the first page at fault is "outside" (so is a slot that is none's first), was
    "free" before, or is named "twice". So is what there is no room for on the stack: "outside".
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
    order = np.arange(-num_pages, 0, dtype=np.int32)  # of a page named twice only the last can be read back
    marks[pages] = order
    if marks.take(pages).tobytes() != order.tobytes() or num_pages > len(stack) - num_free:
        marks[pages] = 0
        return _first_fault(starts, marks, page_size)
    stack[num_free : num_free + num_pages] = starts[::-1]
    return None


def _first_fault(starts: NDArray[np.int64], marks: NDArray[np.int32], page_size: int) -> str:
    """Why pages cannot be taken back."""
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
