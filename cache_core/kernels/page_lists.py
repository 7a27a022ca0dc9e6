"""The pages that an allocator takes back. Compiled for the loops over pages."""

from __future__ import annotations

import cython
import numpy as np
from numpy.typing import NDArray


def free_pages(
    starts: NDArray[np.int64],
    marks: NDArray[np.int32],
    stack: NDArray[np.int64],
    num_free: cython.Py_ssize_t,
    page_size: cython.Py_ssize_t,
    /,
) -> str | None:
    """Mark pages as free, and put them on the stack of `num_free` free ones, the first on top.

    Args:
        starts: the first slots of the pages.
        marks: by page number, 0 of pages that are handed out, negative of all others.

    Returns:
        None, or why nothing was done: the first page at fault is "outside" (so is a slot that is no page's first), was
        "free" before, or is named "twice". "outside" also if the stack has too little room.
    """
    if page_size < 1 or num_free < 0:
        raise ValueError(f"a page is at least 1, the free pages at least 0, not {page_size} and {num_free}")
    count: cython.Py_ssize_t = len(starts)
    flags = starts.flags
    if not flags.c_contiguous or not flags.aligned:  # C reads integers at multiples of their size alone
        starts = starts.copy()
    rest: cython.slonglong[::1] = stack[num_free:]
    good: cython.Py_ssize_t = _mark(starts, marks, page_size)
    if good == count and count <= len(rest):
        _push(starts, rest)
        return None
    marks[starts[:good] // page_size] = 0
    if good == count:
        return "outside"
    page, beyond = divmod(starts.item(good), page_size)
    if beyond or not 1 <= page < len(marks):
        return "outside"
    return "free" if marks.item(page) < 0 else "twice"


@cython.cfunc
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.cdivision(True)
def _mark(
    starts: cython.const_slonglong[::1], marks: cython.sint[::1], page_size: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    """Mark pages as free up to the first that was not handed out; return its place."""
    count: cython.Py_ssize_t = len(starts)
    num_pages: cython.longlong = len(marks)
    page: cython.longlong
    i: cython.Py_ssize_t
    if page_size == 1:
        for i in range(count):
            page = starts[i]
            if page < 1 or page >= num_pages or marks[page] < 0:
                return i
            marks[page] = -1
        return count
    for i in range(count):
        page = starts[i] // page_size
        if page < 1 or page >= num_pages or page * page_size != starts[i] or marks[page] < 0:
            return i
        marks[page] = -1
    return count


@cython.cfunc
@cython.boundscheck(False)
@cython.wraparound(False)
def _push(starts: cython.const_slonglong[::1], stack: cython.slonglong[::1]) -> None:
    """Put pages on a stack, the first on top."""
    i: cython.Py_ssize_t
    count: cython.Py_ssize_t = len(starts)
    for i in range(count):
        stack[count - 1 - i] = starts[i]
