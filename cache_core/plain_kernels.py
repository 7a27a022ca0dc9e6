"""The inner loops of the core in plain Python and numpy: the twins of `_kernels.c`, and what both of them mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_I4 = np.dtype("<i4")
_FIRST_CHUNK = 1024  # bytes compared first where a run is matched in part
_SLOT_BYTES = 8
_MIN_LANES = 4096
_lanes: dict[int, NDArray[np.int64]] = {}  # by page size: 0, 1, ..., page_size - 1, over and over


def pack(ids: Any, /) -> bytes | None:
    """The most usual ids, packed: little-endian, 4 bytes each. None for what takes a closer look, or is no row of ids.

    Costs one pass. Compiled, it takes lists of ints and rows of 4 or 8 bytes an integer; plain, rows of int32.
    """
    if isinstance(ids, np.ndarray) and ids.dtype is _I4 and ids.ndim == 1 and ids.size:
        return ids.tobytes() if ids.item(ids.argmin()) >= 0 else None  # `argmin` costs a fraction of `min`
    return None


class Node:
    """What a node of a tree is made of: see `TreeNode`."""

    __slots__ = (
        "children",
        "creation_time",
        "data",
        "end",
        "hash_values",
        "id",
        "lock_ref",
        "own_access_time",
        "own_hits",
        "own_locks",
        "own_priority",
        "parent",
        "slots",
        "space",
        "swa_access_time",
        "swa_boundary_id",
        "swa_lock_ref",
        "swa_tombstone",
    )

    def __init__(
        self, node_id: int, parent: Any, space: Any, data: bytes, slots: bytes | None, end: int, now: int
    ) -> None:
        self.id = node_id
        self.parent = parent
        self.space = space
        self.data = data
        self.slots = slots
        self.end = end
        self.children: dict[bytes, Any] = {}
        self.lock_ref = self.own_locks = 0
        self.own_access_time = self.creation_time = now
        self.own_hits = self.own_priority = 0
        self.swa_tombstone = False
        self.swa_lock_ref = 0
        self.swa_boundary_id: int | None = None
        self.swa_access_time = now
        self.hash_values: list[str] | None = None


def grow(
    node_type: Any, node_id: int, parent: Any, data: bytes, unit: int, page_size: int, stop: int, slots: bytes, now: int, /
) -> Any:
    """Hang a new leaf below `parent`: the tokens of a key from where that ends up to `stop`, `unit` bytes each.

    Args:
        slots: of the leaf, which keeps them.
    """
    run = data[parent.end * unit : stop * unit]
    leaf = node_type(node_id, parent, parent.space, run, slots, stop, now)
    parent.children[run[: page_size * unit]] = leaf
    return leaf


def lock_path(node: Any, /) -> int:
    """Lock a node, and so all above it; returns how many tokens became locked that were not. O(depth in nodes)."""
    node.own_locks += 1
    end, parent = node.end, node.parent
    while parent is not None and not node.lock_ref:
        node.lock_ref = 1
        node, parent = parent, parent.parent
    moved: int = end - node.end
    while parent is not None:
        node.lock_ref += 1
        node, parent = parent, parent.parent
    return moved


def unlock_path(node: Any, /) -> int:
    """Undo one `lock_path`; returns how many tokens are no longer locked. O(depth in nodes)."""
    assert node.own_locks > 0, f"unlock of {node}"
    node.own_locks -= 1
    end, parent = node.end, node.parent
    while parent is not None and node.lock_ref == 1:
        node.lock_ref = 0
        node, parent = parent, parent.parent
    moved: int = end - node.end
    while parent is not None:
        node.lock_ref -= 1
        node, parent = parent, parent.parent
    return moved


def walk(node: Any, data: bytes, unit: int, page_size: int, num_tokens: int, /) -> tuple[list[Any], int]:
    """Follow whole pages of the first `num_tokens` of a key from `node`, which it matches up to `node.end`.

    Args:
        data: the key's tokens, `unit` bytes each.

    Returns the nodes it goes through, and up to which token. The last of them may be matched in part, by whole
    pages of it: then it ends beyond that token. Costs a memcmp and a lookup per node.
    """
    page = page_size * unit
    pos, stop = node.end * unit, (num_tokens - num_tokens % page_size) * unit
    children = node.children
    path = []
    while pos < stop:
        child = children.get(data[pos : pos + page])
        if child is None:
            break
        path.append(child)
        run = child.data
        if not data.startswith(run, pos):
            pos += common_bytes(data, pos, stop, run) // page * page
            break
        pos += len(run)
        children = child.children
    return path, min(pos, stop) // unit  # the last run may match beyond where the walk stops


def common_bytes(data: bytes, pos: int, stop: int, run: bytes) -> int:
    """Leading bytes that `data[pos:stop]` and `run` share, looked for in chunks that grow."""
    limit = min(stop - pos, len(run))
    done, chunk = 0, _FIRST_CHUNK
    while done < limit:
        size = min(chunk, limit - done)
        theirs = run[done : done + size]
        if not data.startswith(theirs, pos + done):
            ours = np.frombuffer(data, np.uint8, size, pos + done)
            return done + int((ours != np.frombuffer(theirs, np.uint8)).argmax())
        done += size
        chunk *= 4
    return limit


def expand(rows: list[bytes], num_tokens: int, page_size: int, /) -> bytearray | None:
    """One slot per token, int64, of rows that all name the first slot of each page, or all each slot; None of others.

    A copy, in which the rows stand one after the other.
    """
    packed = bytearray().join(rows)
    num_slots = len(packed) // _SLOT_BYTES
    if num_slots == num_tokens:
        return packed
    if num_slots * page_size != num_tokens:
        return None
    slots = np.frombuffer(packed, np.int64).repeat(page_size)
    slots += _lanes_of(page_size, num_tokens)
    return bytearray(slots.data)


def _lanes_of(page_size: int, num_tokens: int) -> NDArray[np.int64]:
    """The place of each token in its page."""
    known = _lanes.get(page_size)
    if known is None or known.size < num_tokens:
        num_pages = max(2 * num_tokens, _MIN_LANES) // page_size + 1
        known = _lanes[page_size] = np.tile(np.arange(page_size), num_pages)
    return known[:num_tokens]


def compact(slots: torch.Tensor, start: int, stop: int, page_size: int, /) -> bytes:
    """A row of its own of `slots[start:stop]`: the first of each page if pages are runs of slots, else all of them.

    `slots` are int64, in a row, on the CPU: the caller has seen to that.
    """
    part: NDArray[np.int64] = slots.numpy()[start:stop]
    if page_size > 1 and part.size:
        jumps = part[1:] != part[:-1] + 1
        jumps[page_size - 1 :: page_size] = False  # from page to page there may be one
        if b"\1" not in jumps.tobytes():
            return part[::page_size].tobytes()
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

    Returns why nothing was done, if so: a page is "outside", was "free" before, or is named "twice".
    """
    pages = starts if page_size == 1 else starts // page_size
    try:
        known = marks.take(pages)
    except IndexError:
        return "outside"
    if pages.item(pages.argmin()) < 1:
        return "outside"
    if known.item(known.argmin()) < 0:
        return "free"
    num_pages = len(starts)
    order = np.arange(-num_pages, 0, dtype=np.int32)  # of a page named twice only the last can be read back
    marks[pages] = order
    if marks.take(pages).tobytes() != order.tobytes():
        marks[pages] = 0
        return "twice"
    stack[num_free : num_free + num_pages] = starts[::-1]
    return None
