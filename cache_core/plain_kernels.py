"""The inner loops of the core in plain Python and numpy: the twins of `_kernels.c`, and what both of them mean."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Any, Self, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

_I4 = np.dtype("<i4")
_FIRST_CHUNK = 1024  # bytes compared first where a run is matched in part
_SLOT_BYTES, _NARROW_BYTES = 8, 4
_NARROW_LIMIT = 2**31
_RUN = struct.Struct("=qqxx")  # the first slot, and how many there are
_RUN_BYTES = _RUN.size
_MIN_LANES = 4096
_lanes: dict[int, NDArray[np.int64]] = {}  # by page size: 0, 1, ..., page_size - 1, over and over


def pack(ids: Any, /) -> bytes | None:
    """The most usual ids, packed: little-endian, 4 bytes each. None for what takes a closer look, or is no row of ids.

    Costs one pass. Compiled, it takes lists of ints and rows of 4 or 8 bytes an integer; plain, rows of int32.
    """
    if isinstance(ids, np.ndarray) and ids.dtype is _I4 and ids.ndim == 1 and ids.size:
        return ids.tobytes() if ids.item(ids.argmin()) >= 0 else None  # `argmin` costs a fraction of `min`
    return None


class Key:
    """What a key is made of: see `RadixKey`. What `pack` does not take is packed by the method `_pack_slowly`."""

    __slots__ = ("arity", "data", "extra_key", "num_tokens", "unit", "width")

    def __init__(self, token_ids: Any, extra_key: str | None = None) -> None:
        data = pack(token_ids)
        if data is None:
            self._fill(*self._pack_slowly(token_ids), extra_key)
        else:
            self._fill(data, 4, 0, extra_key)

    @staticmethod
    def _pack_slowly(token_ids: Any) -> tuple[bytes, int, int]:
        """Packed ids, the bytes of an id, and the ids of a tuple (0: plain ids)."""
        raise NotImplementedError

    def _fill(self, data: bytes, width: int, arity: int, extra_key: str | None) -> None:
        self.data = data  # little-endian ids
        self.width = width  # bytes an id
        self.arity = arity  # ids of a tuple; 0: plain ids
        self.unit = width * (arity or 1)  # bytes of one element
        self.num_tokens = len(data) // self.unit
        self.extra_key = extra_key

    @classmethod
    def from_packed(cls, data: bytes, width: int, extra_key: str | None = None, arity: int = 0) -> Self:
        """A key over ids packed already: little-endian, `width` bytes each (8 only if some id needs it).

        `arity` is the number of ids in each tuple, 0 for plain ids. Nothing is copied, and no id is checked.
        """
        key = cls.__new__(cls)
        key._fill(data, width, arity, extra_key)
        return key


def begins_alike(key: Key, other: Key, num_tokens: int, /) -> bool:
    """Whether two keys of one namespace, arity and width have the same first tokens. A memcmp."""
    end = num_tokens * key.unit
    return (
        (key.unit, key.arity) == (other.unit, other.arity)
        and end <= len(key.data)
        and end <= len(other.data)
        and key.data[:end] == other.data[:end]
        and key.extra_key == other.extra_key
    )


class Children(dict[bytes, Any]):
    """The children of a node, by the first page of their data, in the order in which they came.

    Compiled, it is no dict, and has these methods alone besides `len`, `get`, `values` and its subscripts; what the
    page of a child is, its data say. Leaves share one, which cannot be changed.
    """

    def first(self, limit: int, /) -> list[Any]:
        """Up to so many, those that came first. O(limit)."""
        return list(islice(self.values(), limit))

    def last(self, limit: int, /) -> list[Any]:
        """Up to so many, those that came last before the others. O(limit)."""
        return list(islice(reversed(self.values()), limit))


class _NoChildren(Children):
    def __setitem__(self, page: bytes, child: Any) -> None:
        raise TypeError("the children of a leaf cannot be changed: hang a node below it")


_NO_CHILDREN = _NoChildren()


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
        self.children: Children = _NO_CHILDREN
        self.lock_ref = self.own_locks = 0
        self.own_access_time = self.creation_time = now
        self.own_hits = self.own_priority = 0
        self.swa_tombstone = False
        self.swa_lock_ref = 0
        self.swa_boundary_id: int | None = None
        self.swa_access_time = now
        self.hash_values: list[str] | None = None


def grow(
    node_type: Any,
    node_id: int,
    parent: Any,
    data: bytes,
    unit: int,
    page_size: int,
    stop: int,
    slots: bytes,
    now: int,
    /,
) -> Any:
    """Hang a new leaf below `parent`: the tokens of a key from where that ends up to `stop`, `unit` bytes each.

    Args:
        slots: of the leaf, which keeps them.
    """
    run = data[parent.end * unit : stop * unit]
    leaf = node_type(node_id, parent, parent.space, run, slots, stop, now)
    _hang(parent, run[: page_size * unit], leaf)
    return leaf


def cut(node_type: Any, node_id: int, node: Any, length: int, page_size: int, /) -> Any:
    """Cut `node` after `length` tokens; returns the new node above it, which takes over the prefix.

    Locks, age and priority are copied to the prefix; uses and hashes are not.
    """
    parent, row, unit = node.parent, node.slots, node.space.unit
    num_tokens = node.end - parent.end
    assert 0 < length < num_tokens and length % page_size == 0, f"cannot split {node} at {length}"
    at, page = length * unit, page_size * unit
    prefix, rest = _parted(row, num_slots(row) * length // num_tokens)
    above = node_type(node_id, parent, node.space, node.data[:at], prefix, parent.end + length, node.own_access_time)
    above.lock_ref, above.creation_time, above.own_priority = node.lock_ref, node.creation_time, node.own_priority
    _hang(parent, node.data[:page], above)
    node.data, node.slots, node.parent = node.data[at:], rest, above
    _hang(above, node.data[:page], node)
    return above


def _hang(parent: Any, page: bytes, child: Any) -> None:
    if parent.children is _NO_CHILDREN:
        parent.children = Children()
    parent.children[page] = child


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


class Row:
    """Nodes in the order of their ranks, and of their ids where those are equal: what `EvictionQueue` is made of.

    Compiled, a node stands in one row at most: its neighbours are named in it. What is put and goes before the last
    node is not the row's: its heir keeps it, by the methods `_push_late`, `_discard_late`, `_touch_late`, `_pop_late`.
    """

    def __init__(self, rank: Callable[[Any], Any]) -> None:
        self.rank = rank
        self.num_late = 0  # for its heir to count
        self._row: OrderedDict[Any, Any] = OrderedDict()  # ranks by node, ascending

    def push(self, node: Any) -> None:
        """A node, which stands in no row, has its place here."""
        assert node not in self._row, f"{node} stands in a queue"
        self._put(node, self.rank(node))

    def discard(self, node: Any) -> None:
        """A node has no place here (now), if it had one."""
        if node in self._row:
            del self._row[node]
        elif self.num_late:
            self._discard_late(node)

    def touch(self, node: Any) -> None:
        """The rank of a node may have changed, if it has a place here."""
        if node not in self._row:
            if self.num_late:
                self._touch_late(node)
        elif (rank := self.rank(node)) != self._row[node]:
            del self._row[node]
            self._put(node, rank)

    def pop(self) -> Any:
        """Take out the node that goes first; None if there is none."""
        if self.num_late:
            return self._pop_late()
        return self._row.popitem(last=False)[0] if self._row else None

    def _put(self, node: Any, rank: Any) -> None:
        if self._row:
            last = next(reversed(self._row))
            if not (rank > self._row[last] or (rank == self._row[last] and node.id >= last.id)):
                self._push_late(node, rank)
                return
        self._row[node] = rank

    def row_head(self) -> tuple[Any, int, Any] | None:
        """Rank, id and node of the first in the row; None if it is empty."""
        if not self._row:
            return None
        node, rank = next(iter(self._row.items()))
        return rank, node.id, node

    def row_entries(self) -> list[tuple[Any, int, Any]]:
        """Rank, id and node of all in the row."""
        return [(rank, node.id, node) for node, rank in self._row.items()]

    def row_holds(self, node: Any) -> bool:
        """Whether a node stands in the row."""
        return node in self._row

    def row_clear(self) -> None:
        """Empty the row."""
        self._row.clear()

    @property
    def row_length(self) -> int:
        """How many stand in the row."""
        return len(self._row)

    def _push_late(self, node: Any, rank: Any) -> None:
        raise NotImplementedError

    def _discard_late(self, node: Any) -> None:
        raise NotImplementedError

    def _touch_late(self, node: Any) -> None:
        raise NotImplementedError

    def _pop_late(self) -> Any:
        raise NotImplementedError


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
    packed = join(rows)
    num_said = len(packed) // _SLOT_BYTES
    if num_said == num_tokens:
        return packed
    if num_said * page_size != num_tokens:
        return None
    slots = np.frombuffer(packed, np.int64).repeat(page_size)
    slots += _lanes_of(page_size, num_tokens)
    return bytearray(slots.data)


def join(rows: list[bytes], /) -> bytearray:
    """What rows say, int64, one after the other; a copy."""
    if any(len(row) % _SLOT_BYTES for row in rows):
        rows = [_unpacked(row).tobytes() for row in rows]
    return bytearray().join(rows)


def _unpacked(row: bytes) -> NDArray[np.int64]:
    if len(row) == _RUN_BYTES:
        first, count = _RUN.unpack_from(row)
        return np.arange(first, first + count)
    if len(row) % 2:
        return np.frombuffer(row, np.int32, len(row) // _NARROW_BYTES).astype(np.int64)
    return np.frombuffer(row, np.int64)


def _parted(row: bytes, count: int) -> tuple[bytes, bytes]:
    """The first slots of a row, so many of those it says, and the rest of them, both packed as it is."""
    if len(row) == _RUN_BYTES:
        first, size = _RUN.unpack_from(row)
        return _RUN.pack(first, count), _RUN.pack(first + count, size - count)
    if len(row) % 2:
        return row[: count * _NARROW_BYTES] + b"\0", row[count * _NARROW_BYTES :]
    return row[: count * _SLOT_BYTES], row[count * _SLOT_BYTES :]


def num_slots(row: bytes, /) -> int:
    """How many slots a row says."""
    if len(row) == _RUN_BYTES:
        count: int = _RUN.unpack_from(row)[1]
        return count
    return len(row) // (_NARROW_BYTES if len(row) % 2 else _SLOT_BYTES)


def gather(nodes: list[Any], num_tokens: int, page_size: int, /) -> torch.Tensor | None:
    """`expand` of the slots of nodes, as a tensor."""
    slots = expand([node.slots for node in nodes], num_tokens, page_size)
    if slots is None:
        return None
    return torch.frombuffer(slots, dtype=torch.int64) if slots else torch.empty(0, dtype=torch.int64)


def _lanes_of(page_size: int, num_tokens: int) -> NDArray[np.int64]:
    """The place of each token in its page."""
    known = _lanes.get(page_size)
    if known is None or known.size < num_tokens:
        num_pages = max(2 * num_tokens, _MIN_LANES) // page_size + 1
        known = _lanes[page_size] = np.tile(np.arange(page_size), num_pages)
    return known[:num_tokens]


def is_row(slots: Any, needed: int, /) -> TypeGuard[torch.Tensor]:
    """Whether it is a row of slots as most callers have them: at least so many int64 in a tensor on the CPU."""
    if type(slots) is not torch.Tensor:
        return False
    fits = slots.dim() == 1 and slots.numel() >= needed
    return fits and slots.dtype is torch.int64 and slots.is_cpu and slots.is_contiguous()


def compact(slots: torch.Tensor, page_size: int, start: int, stop: int, /) -> bytes:
    """A row of its own of `slots[start:stop]`: the first of each page if pages are runs of slots, else all of them.

    `slots` are int64, in a row, on the CPU: the caller has seen to that. In the row they take 8 bytes each or, where
    none is negative and all fit, 4, and then one byte more. If all are one run, the row says the first and how many
    there are, and then two bytes more: so its size tells how it is packed.
    """
    part: NDArray[np.int64] = slots.numpy()[start:stop]
    if page_size == 1 and part.size > 2 and not (part[1:] - part[:-1] - 1).any():
        return _RUN.pack(part[0], part.size)
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
