"""Rows of slots, packed into bytes as the nodes of a tree hold them. Compiled for the loops over slots.

A row has 8 bytes a slot or, where none is negative and all fit, 4 and then one byte more: its size says which. It
names the first slot of each page if all pages are runs of slots, else each token's slot.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import cython
import numpy as np
import torch
from numpy.typing import NDArray

Slots = NDArray[np.int64]

_INT64, _INT32 = np.dtype(np.int64), np.dtype(np.int32)
_TENSOR, _SLOT = torch.Tensor, torch.int64
_from_numpy, _empty, _frombuffer = torch.from_numpy, np.empty, np.frombuffer


def is_row(slots: Any, needed: cython.Py_ssize_t, /) -> TypeGuard[torch.Tensor]:
    """Return whether this is a row of slots as most callers have it: `needed` or more int64 in a tensor on the CPU."""
    if needed < 0:
        raise ValueError(f"needed must be at least 0, not {needed}")
    if type(slots) is not _TENSOR or slots.dtype is not _SLOT or slots.ndim != 1:
        return False
    count: cython.Py_ssize_t = slots.numel()
    return count >= needed and slots.is_cpu and slots.is_contiguous()


def pack_slots(
    slots: torch.Tensor, page_size: cython.Py_ssize_t, start: cython.Py_ssize_t, stop: cython.Py_ssize_t, /
) -> bytes:
    """Return a row of `slots[start:stop]`: the first of each page if pages are runs of slots, else all of them.

    Raises:
        TypeError: `slots` are not int64, in a row, on the CPU, and up to `stop`.
    """
    if page_size < 1 or not 0 <= start <= stop:
        raise ValueError(f"a page is at least 1, and a part ends after it starts, not {page_size}, {start} and {stop}")
    if not is_row(slots, stop):
        raise TypeError(f"slots must be {stop} or more int64, in a row, on the CPU")
    address: cython.size_t = slots.data_ptr()
    if not cython.compiled or address & 7:  # C reads integers at multiples of their size alone
        return _packed(slots.numpy()[start:stop], page_size)
    if start == stop:
        return b""
    return _pack_at(cython.cast(cython.p_longlong, address) + start, stop - start, page_size)


def _packed(slots: Slots, page_size: int) -> bytes:
    """`pack_slots` of an array."""
    if page_size > 1:
        jumps = slots[1:] != slots[:-1] + 1
        jumps[page_size - 1 :: page_size] = False  # A jump between two pages is allowed.
        slots = slots if jumps.any() else slots[::page_size]
    if slots.size and int(slots.min()) >= 0 and int(slots.max()) < 2**31:
        return slots.astype(_INT32).tobytes() + b"\0"
    return slots.tobytes()


@cython.cfunc
def _pack_at(slots: cython.p_longlong, count: cython.Py_ssize_t, page_size: cython.Py_ssize_t) -> bytes:
    """`pack_slots` of at least one slot in memory."""
    step: cython.Py_ssize_t = page_size if page_size > 1 and _in_runs(slots, count, page_size) else 1
    num_packed: cython.Py_ssize_t = (count - 1) // step + 1
    row: bytes = bytes(4 * num_packed + 1)  # written to before another owner sees it
    narrow: cython.p_int = cython.cast(cython.p_int, cython.cast(cython.p_char, row))
    i: cython.Py_ssize_t
    seen: cython.longlong = 0
    if step == 1:
        for i in range(num_packed):
            narrow[i] = cython.cast(cython.int, slots[i])
            seen |= slots[i]
    else:
        for i in range(num_packed):
            narrow[i] = cython.cast(cython.int, slots[i * step])
            seen |= slots[i * step]
    if seen >> 31 == 0:
        return row
    row = bytes(8 * num_packed)
    wide: cython.p_longlong = cython.cast(cython.p_longlong, cython.cast(cython.p_char, row))
    for i in range(num_packed):
        wide[i] = slots[i * step]
    return row


@cython.cfunc
def _in_runs(slots: cython.p_longlong, count: cython.Py_ssize_t, page_size: cython.Py_ssize_t) -> cython.bint:
    """Return whether each page, the last one may be shorter, is a run of consecutive slots."""
    block: cython.Py_ssize_t = page_size * max(1, 256 // page_size)  # allocators hand out longer runs, mostly
    start: cython.Py_ssize_t = 0
    stop: cython.Py_ssize_t
    while start < count:
        stop = min(start + block, count)
        if not _is_run(slots + start, stop - start):
            while start < stop:
                if not _is_run(slots + start, min(page_size, stop - start)):
                    return False
                start += page_size
        start = stop
    return True


@cython.cfunc
def _is_run(slots: cython.p_longlong, count: cython.Py_ssize_t) -> cython.bint:
    """Return whether the slots, at least one, are consecutive."""
    first: cython.ulonglong = cython.cast(cython.ulonglong, slots[0])
    i: cython.ulonglong
    jumps: cython.ulonglong = 0
    for i in range(cython.cast(cython.ulonglong, count)):
        jumps |= (cython.cast(cython.ulonglong, slots[i]) - first) ^ i
    return jumps == 0


@cython.ccall
def num_slots(row: bytes) -> cython.Py_ssize_t:
    """Return the number of slots of a row."""
    return len(row) >> 2 if len(row) & 1 else len(row) >> 3


def parted(row: bytes, count: cython.Py_ssize_t, /) -> tuple[bytes, bytes]:
    """Return the first `count` slots of a row, and the remaining ones, both packed as the row is."""
    if len(row) & 1:
        return row[: 4 * count] + b"\0", row[4 * count :]
    return row[: 8 * count], row[8 * count :]


def join(rows: list[Any], /) -> Slots:
    """Return the slots of rows, int64, one row after the other; a copy."""
    if not cython.compiled:
        return _said(rows)
    slots: bytearray = bytearray(8 * _num_slots_in(rows))
    _write(rows, 1, cython.cast(cython.p_longlong, cython.cast(cython.p_char, slots)))
    return _frombuffer(slots, _INT64)


def expand(rows: list[Any], num_tokens: cython.Py_ssize_t, page_size: cython.Py_ssize_t, /) -> torch.Tensor | None:
    """Return one slot per token, int64, one row after the other; a copy. None unless all rows name each slot, or all
    the first slot of each page."""
    size: cython.Py_ssize_t = _num_slots_in(rows)
    if size == num_tokens:
        page_size = 1
    elif page_size < 1 or num_tokens % page_size or size != num_tokens // page_size:
        return None
    if not cython.compiled:
        return _from_numpy((_said(rows)[:, None] + np.arange(page_size)).reshape(-1))
    slots = _from_numpy(_empty(num_tokens, _INT64))
    address: cython.size_t = slots.data_ptr()
    if _num_slots_in(rows) != size:
        raise RuntimeError("the rows changed while memory was allocated for their slots")
    _write(rows, page_size, cython.cast(cython.p_longlong, address))
    return slots


def _said(rows: list[Any]) -> Slots:
    """`join` in numpy."""
    parts = [np.frombuffer(row, _INT32 if len(row) & 1 else _INT64, num_slots(row)) for row in rows]
    return np.concatenate([np.empty(0, _INT64), *parts], dtype=_INT64)


@cython.cfunc
def _num_slots_in(rows: list[Any]) -> cython.Py_ssize_t:
    row: bytes
    size: cython.Py_ssize_t = 0
    for row in rows:
        size += num_slots(row)
    return size


@cython.cfunc
def _write(rows: list[Any], page_size: cython.Py_ssize_t, out: cython.p_longlong) -> Any:
    """Write the slots of rows, or of the pages that begin at them, where there is room for all of them."""
    row: bytes
    narrow: cython.p_int
    wide: cython.p_longlong
    i: cython.Py_ssize_t
    count: cython.Py_ssize_t
    for row in rows:
        count = num_slots(row)
        narrow = cython.cast(cython.p_int, cython.cast(cython.p_char, row))
        wide = cython.cast(cython.p_longlong, cython.cast(cython.p_char, row))
        if page_size > 1:
            _write_pages(narrow, wide, len(row) & 1 == 1, count, page_size, out)
        elif len(row) & 1:
            for i in range(count):
                out[i] = narrow[i]
        else:
            for i in range(count):
                out[i] = wide[i]
        out += count * page_size


@cython.cfunc
def _write_pages(
    narrow: cython.p_int,
    wide: cython.p_longlong,
    is_narrow: cython.bint,
    count: cython.Py_ssize_t,
    page_size: cython.Py_ssize_t,
    out: cython.p_longlong,
) -> Any:
    """Write the slots of pages, of neighbouring pages in one loop."""
    start: cython.longlong
    num_pages: cython.Py_ssize_t
    i: cython.Py_ssize_t = 0
    while i < count:
        start = narrow[i] if is_narrow else wide[i]
        num_pages = _neighbours(narrow + i, min(count - i, 64), page_size) if is_narrow else 1
        _write_run(start, num_pages * page_size, out)
        out += num_pages * page_size
        i += num_pages


@cython.cfunc
def _write_run(start: cython.longlong, count: cython.Py_ssize_t, out: cython.p_longlong) -> None:
    i: cython.Py_ssize_t
    for i in range(count):
        out[i] = start + i


@cython.cfunc
def _neighbours(starts: cython.p_int, count: cython.Py_ssize_t, page_size: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Return `count` if so many pages follow one another, else 1."""
    i: cython.Py_ssize_t
    jumps: cython.longlong = 0
    if count < 2 or cython.cast(cython.longlong, starts[1]) - starts[0] != page_size:
        return 1
    for i in range(2, count):
        jumps |= cython.cast(cython.longlong, starts[i]) - starts[i - 1] - page_size
    return 1 if jumps else count


def expand_each(rows: list[Any], sizes: list[Any], page_size: cython.Py_ssize_t, /) -> torch.Tensor:
    """`expand` rows over so many tokens each, whether a row names the slots of tokens or of pages."""
    slots = expand(rows, sum(sizes), page_size)
    if slots is not None:
        return slots
    parts = []
    for row, size in zip(rows, sizes, strict=True):
        slots = expand([row], size, page_size)
        if slots is None:
            raise ValueError(f"a row of {num_slots(row)} slots does not name the slots of {size} tokens")
        parts.append(slots)
    return torch.cat(parts)
