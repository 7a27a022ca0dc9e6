"""The radix tree's inner loops: `Key`, `Node`, walks and changes of a tree, queues and `LockAccounting`.

They are one module, as compiled code reads the fields of its own module's classes alone without a call. Such reads are
the loops over the nodes of a path, over their runs, over the ids of a key, and over evicted leaves. A number that a
caller gives is `Any`: compiled, an `int` that is given a float truncates it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import index
from typing import Any, NoReturn, Self

import cython
import numpy as np
import torch

from raydix.cache_core.errors import InvalidKeyError
from raydix.cache_core.kernels.packed_slots import expand, expand_each, num_slots, parted

FreeSlots = Callable[[torch.Tensor], object]

_ARRAY, _INT32 = np.ndarray, np.dtype(np.int32)
_SPARSE = cython.declare(cython.Py_ssize_t, 4)  # the ticks between two neighbours in a queue, at most, on average
_LONG = cython.declare(cython.Py_ssize_t, 4096)
_LEAST_SPARED = cython.declare(cython.Py_ssize_t, 1024)  # tokens


# ---------------------------------------------------------------- keys


@cython.cclass
class Key:
    """The base of `RadixKey`. Ids that `pack` cannot pack are packed by the method `_pack_slowly`.

    A key made of another key has its namespace, unless another one is given.

    Attributes:
        data: the ids, little-endian.
        width: bytes an id.
        arity: ids of a tuple; 0: plain ids.
        unit: bytes of one element.
        num_tokens: the number of elements.
        extra_key: the namespace.
    """

    data: bytes = cython.declare(bytes, visibility="public")
    width: int = cython.declare(cython.Py_ssize_t, visibility="public")
    arity: int = cython.declare(cython.Py_ssize_t, visibility="public")
    unit: int = cython.declare(cython.Py_ssize_t, visibility="public")
    num_tokens: int = cython.declare(cython.Py_ssize_t, visibility="public")
    extra_key: str | None = cython.declare(object, visibility="public")

    def __init__(self, token_ids: Any, extra_key: Any = None) -> None:
        data = pack(token_ids)
        if data is not None:
            self._fill(data, 4, 0, extra_key)
            return
        if extra_key is None and isinstance(token_ids, Key):
            extra_key = token_ids.extra_key
        data, width, arity = self._pack_slowly(token_ids)
        self._fill(data, width, arity, extra_key)

    @staticmethod
    def _pack_slowly(token_ids: Any) -> tuple[bytes, int, int]:
        """Return the packed ids, the bytes of an id, and the ids of a tuple (0: plain ids)."""
        raise NotImplementedError

    @cython.cfunc
    def _fill(self, data: bytes, width: cython.Py_ssize_t, arity: cython.Py_ssize_t, extra_key: Any) -> Any:
        if extra_key is not None and not isinstance(extra_key, str):
            raise InvalidKeyError(f"extra_key must be a str or None, not {type(extra_key).__name__}")
        if not 1 <= width <= 8 or not 0 <= arity < 2**20:
            raise ValueError(f"an id has 1 to 8 bytes, a tuple less than 2**20 ids, not {width} and {arity}")
        self.data = data
        self.width = width
        self.arity = arity
        self.unit = width * (arity or 1)
        self.num_tokens = len(data) // self.unit
        self.extra_key = extra_key

    @classmethod
    def from_packed(
        cls, data: bytes, width: cython.Py_ssize_t, extra_key: Any = None, arity: cython.Py_ssize_t = 0
    ) -> Self:
        """Return a key over packed ids: little-endian, `width` bytes each (8 only if an id needs it).

        `arity` is the number of ids in each tuple, 0 for plain ids. Nothing is copied, and no id is checked.
        """
        key = cls.__new__(cls)
        base: Key = key
        base._fill(data, width, arity, extra_key)
        return key


def pack(ids: Any, /) -> bytes | None:
    """Return the ids, packed in 4 bytes each, if they are a list of ints or an int32 array that all fit; else None."""
    if isinstance(ids, _ARRAY):
        if ids.dtype is not _INT32 or ids.ndim != 1:
            return None
        data: bytes = ids.tobytes()
        return data if _are_positive(data) else None
    if type(ids) is list and cython.compiled:
        return _pack_list(ids)
    return None


@cython.cfunc
def _are_positive(data: bytes) -> cython.bint:
    """Return whether no id, packed in 4 bytes, is negative."""
    if not cython.compiled:
        return not data or int(np.frombuffer(data, _INT32).min()) >= 0
    ids: cython.p_int = cython.cast(cython.p_int, cython.cast(cython.p_char, data))
    count: cython.Py_ssize_t = len(data) // 4
    quarter: cython.Py_ssize_t = count // 4
    seen: cython.int = 0
    i: cython.Py_ssize_t
    for i in range(quarter):  # four ids at a time, so that fewer steps wait for the one before
        seen |= ids[i] | ids[quarter + i] | ids[2 * quarter + i] | ids[3 * quarter + i]
    for i in range(4 * quarter, count):
        seen |= ids[i]
    return seen >= 0


@cython.cfunc
@cython.boundscheck(False)
@cython.wraparound(False)
def _pack_list(ids: list[Any]) -> bytes | None:
    """Return the ids, packed, if all are exact ints in [0, 2**32); else None. No code of others runs meanwhile."""
    count: cython.Py_ssize_t = len(ids)
    if not count:
        return b""
    data: bytes = bytes(4 * count)  # written to before another owner sees it
    out: cython.p_uint = cython.cast(cython.p_uint, cython.cast(cython.p_char, data))
    i: cython.Py_ssize_t
    value: cython.longlong
    try:
        for i in range(count):
            item = ids[i]
            if type(item) is not int:
                return None
            value = item
            if value >> 32:
                return None
            out[i] = cython.cast(cython.uint, value)
    except OverflowError:
        return None
    return data


# ---------------------------------------------------------------- nodes


@cython.trashcan(True)
@cython.cclass
class Node:
    """The base of `TreeNode`, which describes the fields.

    Attributes:
        children: the `Children`; leaves share one object.
    """

    # The fields are in the order of use: a lookup in a large tree waits for each line of memory
    data: bytes = cython.declare(bytes, visibility="public")
    code: cython.Py_hash_t  # hash of the first page of its run
    table: list[Any] | None  # hash table of its children; None: it is a leaf
    slots: Any = cython.declare(bytes, visibility="public")
    parent: Any = cython.declare(object, visibility="public")
    end: int = cython.declare(cython.Py_ssize_t, visibility="public")
    # `queue` marks the `RankedQueue` that the node stands in; the other three fields are its place there.
    before: Node | None
    after: Node | None
    tick: cython.Py_ssize_t
    queue: object
    own_access_time: int = cython.declare(cython.Py_ssize_t, visibility="public")
    own_hits: int = cython.declare(cython.Py_ssize_t, visibility="public")
    own_priority: int = cython.declare(object, visibility="public")
    lock_ref: int = cython.declare(cython.Py_ssize_t, visibility="public")
    own_locks: int = cython.declare(cython.Py_ssize_t, visibility="public")
    id: int = cython.declare(cython.Py_ssize_t, visibility="public")
    namespace: Any = cython.declare(object, visibility="public")
    creation_time: int = cython.declare(cython.Py_ssize_t, visibility="public")
    hash_values: list[str] | None = cython.declare(list, visibility="public")
    swa_tombstone: bool = cython.declare(cython.bint, visibility="public")
    swa_stop: bool = cython.declare(cython.bint, visibility="public")
    swa_lock_ref: int = cython.declare(cython.Py_ssize_t, visibility="public")
    swa_boundary_id: int | None = cython.declare(object, visibility="public")
    swa_access_time: int = cython.declare(cython.Py_ssize_t, visibility="public")
    is_protected: bool = cython.declare(cython.bint, visibility="public")
    prefix_sum: int = cython.declare(cython.ulonglong, visibility="public")
    rank: Any  # rank in the queue, unless its ranks are ticks
    children: Any = cython.declare(object, visibility="readonly")
    place: cython.Py_ssize_t  # index among its parent's children

    def __init__(
        self,
        node_id: cython.Py_ssize_t,
        parent: Any,
        namespace: Any,
        data: bytes,
        slots: bytes | None,
        end: cython.Py_ssize_t,
        now: cython.Py_ssize_t,
    ) -> None:
        self.id = node_id
        self.parent = parent
        self.namespace = namespace
        self.data = data
        self.slots = slots
        self.end = end
        self.children = _NO_CHILDREN
        self.table = None
        self.code = self.place = 0
        self.lock_ref = self.own_locks = 0
        self.own_access_time = self.creation_time = now
        self.own_hits = 0
        self.own_priority = 0
        self.swa_tombstone = self.swa_stop = False
        self.swa_lock_ref = 0
        self.swa_boundary_id = None
        self.swa_access_time = now
        self.is_protected = False
        self.prefix_sum = 0
        self.hash_values = None
        self.before = self.after = self.queue = self.rank = None
        self.tick = 0

    def __reduce__(self) -> NoReturn:
        """Raise TypeError: a node holds its whole tree."""
        raise TypeError(f"cannot pickle {type(self).__name__!r} object")

    def __len__(self) -> int:
        """Return the tokens of its run; 0 for the root."""
        if self.parent is None:
            return 0
        parent: Node = self.parent
        return self.end - parent.end


@cython.cclass
class Children:
    """The children of a node, in the order in which they came, and by the first page of their runs.

    A hash table with linear probing (Knuth, The Art of Computer Programming 3, section 6.4, algorithms L and R). A dict
    would hold the first page of each run again, and a lookup in a large tree waits for each line of memory.
    """

    _count: cython.Py_ssize_t
    _order: list[Any]  # children; None in the place of a child that was removed
    _table: list[Any]  # hash table, at least half of it None; `Node.table` of the parent is the same list

    def __init__(self) -> None:
        self._count = 0
        self._order = []
        self._table = [None] * 4

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for child in self._order:
            if child is not None:
                yield child

    def __reversed__(self) -> Iterator[Any]:
        for child in reversed(self._order):
            if child is not None:
                yield child

    def values(self) -> Children:
        """Return this object, which iterates over the children, as a dict of them would."""
        return self

    def get(self, page: bytes) -> Node | None:
        """Return the child with this first page; None if there is none."""
        return _child(self._table, page)

    @cython.cfunc
    def _add(self, child: Node, page: bytes) -> Any:
        """Add a child that begins with a page as no other does."""
        if 2 * (self._count + 1) > len(self._table):
            self._table = [None] * (2 * len(self._table))
            for other in self:
                self._seat(other)
        if len(self._order) > 2 * self._count + 8:
            self._order = list(self)
            for place, other in enumerate(self._order):
                cython.cast(Node, other).place = place
        child.code = hash(page)
        child.place = len(self._order)
        self._order.append(child)
        self._seat(child)
        self._count += 1

    @cython.cfunc
    def _seat(self, child: Node) -> Any:
        mask: cython.Py_ssize_t = len(self._table) - 1
        at: cython.Py_ssize_t = child.code & mask
        while self._table[at] is not None:
            at = (at + 1) & mask
        self._table[at] = child

    @cython.cfunc
    def _seat_of(self, child: Node) -> cython.Py_ssize_t:
        mask: cython.Py_ssize_t = len(self._table) - 1
        at: cython.Py_ssize_t = child.code & mask
        while self._table[at] is not child:
            if self._table[at] is None:
                raise AssertionError(f"{child} is not among the children of its parent")
            at = (at + 1) & mask
        return at

    @cython.cfunc
    def _replace(self, child: Node, other: Node) -> Any:
        """Put another node, which begins with the same page, in the place of a child."""
        self._table[self._seat_of(child)] = other
        other.code = child.code
        other.place = child.place
        self._order[child.place] = other

    @cython.cfunc
    def _remove(self, child: Node) -> Any:
        mask: cython.Py_ssize_t = len(self._table) - 1
        gap: cython.Py_ssize_t = self._seat_of(child)
        at: cython.Py_ssize_t = gap
        other: Node
        while True:
            self._table[gap] = None
            while True:  # The next child to move is one that the gap parts from its home.
                at = (at + 1) & mask
                other = self._table[at]
                if other is None:
                    self._order[child.place] = None
                    self._count -= 1
                    return
                if ((at - (other.code & mask)) & mask) >= ((at - gap) & mask):
                    break
            self._table[gap] = other
            gap = at


_NO_CHILDREN = cython.declare(Children, Children())  # the children of all leaves


@cython.cfunc
def _child(table: list[Any], page: bytes) -> Node | None:
    """Return the child in a table that begins with a page; None if there is none."""
    mask: cython.Py_ssize_t = len(table) - 1
    code: cython.Py_hash_t = hash(page)
    at: cython.Py_ssize_t = code & mask
    child: Node | None = cython.cast(Node, table[at])
    while child is not None:
        if child.code == code and child.data.startswith(page):
            return child
        at = (at + 1) & mask
        child = cython.cast(Node, table[at])
    return None


def rekey_children(node: Node, page_bytes: cython.Py_ssize_t, /) -> None:
    """Find the children of a node by the first bytes of their runs from now on, which have changed."""
    children: Children = Children()
    child: Node
    for child in node.children:
        children._add(child, child.data[:page_bytes])
    _give_children(node, children)


@cython.cfunc
def _give_children(node: Node, children: Children) -> Any:
    if len(children):
        node.children = children
        node.table = children._table
    else:
        node.children = _NO_CHILDREN
        node.table = None


def last_use(node: Any, /) -> Any:
    """Return when a match or an insert last ended at a node, or at one evicted from below it: the rank of LRU."""
    return node.own_access_time


# ---------------------------------------------------------------- lookups


def namespace_root(tops: dict[Any, Any], key: Key, /) -> Any:
    """Return the node of a key's namespace; None if there is none."""
    return tops.get((key.extra_key, key.arity))


def is_on_path(key: Key, node: Node, /) -> bool:
    """Return whether the runs from the root down to `node` are the first tokens of a key."""
    data: bytes = key.data
    unit: cython.Py_ssize_t = key.unit
    end: cython.Py_ssize_t = node.end * unit
    run: bytes
    while node.parent is not None and node.data:
        run = node.data
        if end < len(run) or not data.startswith(run, end - len(run), end):
            return False
        end -= len(run)
        node = node.parent
    return end == 0


def walk(
    node: Node, key: Key, page_size: cython.Py_ssize_t, num_tokens: cython.Py_ssize_t, /
) -> tuple[list[Any], int, int]:
    """Follow whole pages of the first `num_tokens` of a key from `node`, which it matches up to `node.end`.

    Returns:
        The nodes it goes through; the token up to which it goes; and the tokens that the last node holds beyond that:
        the last node may be matched in part, by whole pages of it.
    """
    path: list[Any] = []
    end: cython.Py_ssize_t = _walk(path, node, key, page_size, num_tokens)
    last: Node
    if not path:
        return path, end, 0
    last = path[-1]
    return path, end, last.end - end


def walk_and_split(
    node_type: Any,
    ids: Iterator[int],
    node: Node,
    key: Key,
    page_size: cython.Py_ssize_t,
    num_tokens: cython.Py_ssize_t,
    /,
) -> tuple[list[Any], int, int]:
    """`walk`, and `split_node` the last of the nodes where the walk ends, so that nothing lies beyond."""
    path: list[Any] = []
    end: cython.Py_ssize_t = _walk(path, node, key, page_size, num_tokens)
    last: Node
    if path:
        last = path[-1]
        if last.end > end:
            path[-1] = _cut(node_type, ids, page_size, last, end)
    return path, end, 0


@cython.cfunc
def _walk(
    path: list[Any], node: Node, key: Key, page_size: cython.Py_ssize_t, num_tokens: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    """Append the nodes of a walk to `path`; return the token up to which it goes."""
    data: bytes = key.data
    unit: cython.Py_ssize_t = key.unit
    page: cython.Py_ssize_t = page_size * unit
    if page < 1 or not 0 <= num_tokens <= key.num_tokens:
        raise ValueError(f"a unit and a page are at least 1, and {num_tokens=} lie within the key")
    pos: cython.Py_ssize_t = node.end * unit
    stop: cython.Py_ssize_t = (num_tokens - num_tokens % page_size) * unit
    run: bytes
    while pos < stop and node.table is not None:
        child = _child(node.table, data[pos : pos + page])
        if child is None:
            break
        path.append(child)
        node = child
        run = node.data
        if not data.startswith(run, pos):
            pos += _common_bytes(data, pos, stop, run) // page * page
            break
        pos += len(run)
    return min(pos, stop) // unit  # the last run may match beyond the stop


@cython.cfunc
def _common_bytes(data: bytes, pos: cython.Py_ssize_t, stop: cython.Py_ssize_t, run: bytes) -> cython.Py_ssize_t:
    """Return the number of leading bytes that `data[pos:stop]` and `run` share."""
    limit: cython.Py_ssize_t = min(stop - pos, len(run))
    done: cython.Py_ssize_t = 0
    step: cython.Py_ssize_t = _LONG
    while step > 64:
        while done < limit and data.startswith(run[done : min(done + step, limit)], pos + done):
            done = min(done + step, limit)
        step //= 8
    while done < limit and data[pos + done] == run[done]:
        done += 1
    return done


# ---------------------------------------------------------------- changes


def add_leaf(
    node_type: Any,
    ids: Iterator[int],
    page_size: cython.Py_ssize_t,
    parent: Node,
    key: Key,
    stop: cython.Py_ssize_t,
    slots: bytes,
    now: cython.Py_ssize_t,
    /,
) -> Any:
    """Add a leaf below `parent`: the tokens of a key from the end of `parent` to `stop`. Return it.

    Args:
        ids: the next one is the leaf's.
        slots: the slots of the leaf, which keeps them.

    Raises:
        ValueError: there is a child that begins so.
    """
    data: bytes = key.data
    unit: cython.Py_ssize_t = key.unit
    if page_size < 1 or not 0 <= parent.end < stop <= len(data) // unit:
        raise ValueError(f"a page is at least 1, and a leaf lies within the key, not {page_size} and {stop}")
    run: bytes = data[parent.end * unit : stop * unit]
    page: bytes = run[: page_size * unit]
    if parent.table is not None and _child(parent.table, page) is not None:
        raise ValueError("there is a child that begins so")
    leaf = node_type(next(ids), parent, parent.namespace, run, slots, stop, now)
    add_child(parent, page, leaf)
    return leaf


def split_node(
    node_type: Any, ids: Iterator[int], page_size: cython.Py_ssize_t, node: Node, end: cython.Py_ssize_t, /
) -> Any:
    """Split `node` at `end`, tokens from the root; return the new node above it, which takes over the prefix.

    The next id is the new node's. Locks, age, priority and queue are copied to it, uses are not, hashes are shared out.
    """
    return _cut(node_type, ids, page_size, node, end)


@cython.cfunc
def _cut(node_type: Any, ids: Iterator[int], page_size: cython.Py_ssize_t, node: Node, end: cython.Py_ssize_t) -> Any:
    parent: Node = node.parent
    length: cython.Py_ssize_t = end - parent.end
    num_tokens: cython.Py_ssize_t = node.end - parent.end
    if page_size < 1 or not 0 < length < num_tokens or length % page_size:
        raise AssertionError(f"cannot split {node} at {end}")
    unit: cython.Py_ssize_t = len(node.data) // num_tokens
    page: cython.Py_ssize_t = page_size * unit
    row: bytes = node.slots
    prefix, rest = parted(row, num_slots(row) * length // num_tokens)
    above: Node = node_type(
        next(ids), parent, node.namespace, node.data[: length * unit], prefix, end, node.own_access_time
    )
    above.lock_ref = node.lock_ref
    above.creation_time = node.creation_time
    above.own_priority = node.own_priority
    above.is_protected = node.is_protected
    if node.hash_values is not None:
        above.hash_values = node.hash_values[: length // page_size]
        node.hash_values = node.hash_values[length // page_size :]
    cython.cast(Children, parent.children)._replace(node, above)
    node.data = node.data[length * unit :]
    node.slots = rest
    node.parent = above
    add_child(above, node.data[:page], node)
    return above


@cython.ccall
def add_child(parent: Node, page: bytes, child: Node) -> Any:
    """Add a child to a node: it begins with a page as no other child does."""
    children: Children = Children() if parent.table is None else parent.children
    children._add(child, page)
    _give_children(parent, children)


@cython.ccall
def detach_leaf(leaf: Node) -> bytes:
    """Take a leaf out of its parent's children; return its slots, which it no longer has.

    Its uses went through its parent as well: the parent's fields include them from now on.
    """
    parent: Node = leaf.parent
    slots: bytes = leaf.slots
    if slots is None or leaf.table is not None:
        raise AssertionError(f"not a leaf: {leaf}")
    children: Children = parent.children
    children._remove(leaf)
    _give_children(parent, children)
    leaf.slots = None
    parent.own_hits += leaf.own_hits
    parent.own_access_time = max(parent.own_access_time, leaf.own_access_time)
    if leaf.own_priority > parent.own_priority:
        parent.own_priority = leaf.own_priority
    return slots


@cython.ccall
def note_use(node: Node, now: cython.Py_ssize_t, num_hits: cython.Py_ssize_t, priority: Any, /) -> cython.bint:
    """Count a use that ends at a node; return whether the node is a leaf."""
    if num_hits < 0:
        raise ValueError(f"num_hits must be at least 0, not {num_hits}")
    if node.own_priority < priority:
        node.own_priority = priority
    node.own_access_time = now
    node.own_hits += num_hits
    return node.table is None


# ---------------------------------------------------------------- locks


@cython.ccall
def lock_path(node: Node, /) -> cython.Py_ssize_t:
    """Count a lock on a node and on all above it; return the tokens that became locked."""
    node.own_locks += 1
    end: cython.Py_ssize_t = node.end
    while node.parent is not None and not node.lock_ref:
        node.lock_ref = 1
        node = node.parent
    moved: cython.Py_ssize_t = end - node.end
    while node.parent is not None:
        node.lock_ref += 1
        node = node.parent
    return moved


@cython.ccall
def unlock_path(node: Node, /) -> cython.Py_ssize_t:
    """Undo one `lock_path`; return the tokens that are no longer locked."""
    node.own_locks -= 1
    end: cython.Py_ssize_t = node.end
    while node.parent is not None and node.lock_ref == 1:
        node.lock_ref = 0
        node = node.parent
    moved: cython.Py_ssize_t = end - node.end
    while node.parent is not None:
        node.lock_ref -= 1
        node = node.parent
    return moved


# ---------------------------------------------------------------- slots


def gather(nodes: list[Any], page_size: cython.Py_ssize_t, /) -> torch.Tensor:
    """Return one slot per token, int64, of nodes in a tree, one node after the other; a copy."""
    rows: list[Any] = []
    num_tokens: cython.Py_ssize_t = 0
    node: Node
    parent: Node
    for node in nodes:
        parent = node.parent
        rows.append(node.slots)
        num_tokens += node.end - parent.end
    slots = expand(rows, num_tokens, page_size)
    return expand_each(rows, [len(node) for node in nodes], page_size) if slots is None else slots


# ---------------------------------------------------------------- queues


@cython.cclass
class RankedQueue:
    """The base of `EvictionQueue`: nodes in the order of their ranks, nodes of equal ranks in the order of their ids.

    A node stands in one queue at most: its fields name the queue and its neighbours in it. A node that comes with a
    lower rank than the last one is put first, if it goes before all others, or among the last few, if ranks are
    integers and its place is there. The subclass keeps all other late nodes, by `_push_late`, `_discard_late`,
    `_touch_late` and `_pop_late`.

    Attributes:
        rank: the rank of a node.
        num_late: the nodes that the subclass keeps; it counts them.
        num_ranked: the nodes that stand in the queue itself.
        search_limit: the number of last nodes among which a late node's place is looked for.
    """

    rank: Callable[[Any], Any] = cython.declare(object, visibility="public")
    num_late: int = cython.declare(cython.Py_ssize_t, visibility="public")
    num_ranked: int = cython.declare(cython.Py_ssize_t, visibility="readonly")
    search_limit: int = cython.declare(cython.Py_ssize_t, visibility="public")
    _by_use: cython.bint  # ranks are ticks, which nodes keep as C integers
    _mark: object  # `Node.queue` of its nodes: it does not keep the queue alive
    _head: Node | None
    _tail: Node | None

    def __init__(self, rank: Callable[[Any], Any]) -> None:
        self.rank = rank
        self.num_late = 0
        self.num_ranked = 0
        self.search_limit = 256  # more than most caches have leases open that could end before an older one
        self._by_use = rank is last_use
        self._mark = object()
        self._head = self._tail = None

    def __del__(self) -> None:
        self.clear_ranked()

    def push(self, node: Node) -> None:
        """Add a node, which stands in no queue."""
        if node.queue is not None:
            raise AssertionError(f"{node} stands in a queue")
        self._put(node)

    def discard(self, node: Node) -> None:
        """Take a node out, if it is here."""
        if node.queue is self._mark:
            self._unlink(node)
        elif self.num_late:
            self._discard_late(node)

    def touch(self, node: Node) -> None:
        """Move a node to the place of its rank now, if it is here."""
        if node.queue is not self._mark:
            if self.num_late:
                self._touch_late(node)
        elif node.tick != node.own_access_time if self._by_use else node.rank != self.rank(node):
            self._unlink(node)
            self._put(node)

    def pop(self) -> Any:
        """Take out the node that goes first; None if there is none."""
        if self.num_late:
            return self._pop_late()
        if self._head is None:
            return None
        node: Node = self._head
        self._unlink(node)
        return node

    @cython.cfunc
    def _put(self, node: Node) -> Any:
        if self._by_use:
            node.tick = node.own_access_time
        else:
            node.rank = self.rank(node)
        before: Node | None = self._tail
        if before is not None and not self._goes_after(node, before):
            steps: cython.Py_ssize_t = 0 if self._is_near(node, before) else self.search_limit
            if self._head is None or not self._goes_after(node, self._head):
                before = None  # the usual place of a victim's rest, and of the node above a victim
            while before is not None and not self._goes_after(node, before):
                steps += 1
                before = before.before
                if steps > self.search_limit:
                    rank = self._rank_of(node)
                    node.rank = None
                    self._push_late(node, rank)
                    return
        node.queue = self._mark
        node.before = before
        if before is None:
            node.after = self._head
            self._head = node
        else:
            node.after = before.after
            before.after = node
        if node.after is None:
            self._tail = node
        else:
            node.after.before = node
        self.num_ranked += 1

    @cython.cfunc
    def _goes_after(self, node: Node, other: Node) -> cython.bint:
        if self._by_use:
            return node.tick > other.tick or (node.tick == other.tick and node.id >= other.id)
        return node.rank > other.rank or (node.rank == other.rank and node.id >= other.id)

    @cython.cfunc
    def _is_near(self, node: Node, last: Node) -> cython.bint:
        """Return whether the place of a late node may be among the last few: ranks are times, most of them."""
        if self._by_use:
            return (last.tick - node.tick) // _SPARSE <= self.search_limit
        if type(node.rank) is not int or type(last.rank) is not int:
            return False
        return (last.rank - node.rank) // _SPARSE <= self.search_limit

    @cython.cfunc
    def _rank_of(self, node: Node) -> Any:
        return node.tick if self._by_use else node.rank

    @cython.cfunc
    def _unlink(self, node: Node) -> Any:
        if node.before is None:
            self._head = node.after
        else:
            node.before.after = node.after
        if node.after is None:
            self._tail = node.before
        else:
            node.after.before = node.before
        node.before = node.after = node.queue = node.rank = None
        self.num_ranked -= 1

    def first_ranked(self) -> tuple[Any, int, Any] | None:
        """Return the rank, the id and the node of the first node in the queue; None if there is none."""
        head: Node | None = self._head
        return None if head is None else (self._rank_of(head), head.id, head)

    def ranked_after(self, node: Node | None) -> Any:
        """Return the node that goes after a node of this queue, or the first one; None: there is none. O(1)."""
        return self._head if node is None else node.after

    def ranked(self) -> list[tuple[Any, int, Any]]:
        """Return the rank, the id and the node of each node in the queue, in order."""
        found: list[Any] = []
        node: Node | None = self._head
        while node is not None:
            found.append((self._rank_of(node), node.id, node))
            node = node.after
        return found

    def is_ranked(self, node: Node) -> bool:
        """Return whether a node stands in this queue."""
        return node.queue is self._mark

    def clear_ranked(self) -> None:
        """Take all nodes out."""
        while self._head is not None:
            self._unlink(self._head)

    def _push_late(self, node: Any, rank: Any) -> None:
        raise NotImplementedError

    def _discard_late(self, node: Any) -> None:
        raise NotImplementedError

    def _touch_late(self, node: Any) -> None:
        raise NotImplementedError

    def _pop_late(self) -> Any:
        raise NotImplementedError


@cython.cclass
class TwoRankedQueues:
    """The base of `TwoQueues`: two queues, of which a node's `is_protected` names its own, and a memory of pages.

    The subclass computes the seed of a namespace, by `_seed_of`, and keeps it as `seed` of the namespace.

    Attributes:
        probation, protected: the queues, both of class `RankedQueue`.
        memory: the `PageMemory` of the pages that were evicted from probation and have not come back.
        page_size: tokens of a page.
        num_slots: of the pool.
        num_protected: the tokens of the protected nodes.
    """

    probation: Any = cython.declare(object, visibility="public")
    protected: Any = cython.declare(object, visibility="public")
    memory: Any = cython.declare(object, visibility="public")
    page_size: int = cython.declare(cython.Py_ssize_t, visibility="public")
    num_slots: int = cython.declare(cython.Py_ssize_t, visibility="public")
    num_protected: int = cython.declare(cython.Py_ssize_t, visibility="public")

    def __init__(self, probation: Any, protected: Any, memory: Any, page_size: Any, num_slots: Any) -> None:
        self.probation = probation
        self.protected = protected
        self.memory = memory
        self.page_size = page_size
        self.num_slots = num_slots
        self.num_protected = 0

    def push(self, node: Node) -> None:
        """Add a candidate."""
        if node.is_protected:
            self.protected.push(node)
        else:
            self.probation.push(node)

    def discard(self, node: Node) -> None:
        """Take a node out, if it is a candidate."""
        if node.is_protected:
            self.protected.discard(node)
        else:
            self.probation.discard(node)

    def touch(self, node: Node) -> None:
        """Move a node to its place, as its rank may have changed, if it is a candidate."""
        if node.is_protected:
            self.protected.touch(node)
        else:
            self.probation.touch(node)

    def pop(self) -> Any:
        """Take out the candidate that goes next; None if there is none."""
        first, other = self.probation, self.protected
        if self.num_protected >= self.num_slots - self.num_protected:
            first, other = other, first
        node = first.pop()
        return other.pop() if node is None else node

    def recall(self, parent: Node, key: Key, num_tokens: cython.Py_ssize_t) -> int:
        """Forget the pages of a key below `parent` that are remembered; return the token at which the last one ends.

        That is the end of `parent` if none is remembered. O(tokens).
        """
        if not self.memory.num_pages:
            return parent.end
        unit: cython.Py_ssize_t = key.unit
        found: cython.Py_ssize_t = self.memory.recall(
            key.data,
            key.width,
            unit,
            parent.end // self.page_size,
            self._seed(parent),
            self.sum_of(parent),
            parent.end * unit,
            num_tokens * unit,
        )
        return parent.end + found * self.page_size

    def protect(self, leaf: Node) -> None:
        """Protect a new leaf that is in no queue yet, and all nodes above it. O(nodes that become protected)."""
        self.discard(leaf.parent)  # It may have been a leaf. The nodes above it were none, so they are in no queue.
        node: Node = leaf
        parent: Node
        while node.parent is not None and node.data and not node.is_protected:
            parent = node.parent
            node.is_protected = True
            self.num_protected += node.end - parent.end
            node = parent

    def removed(self, leaf: Node) -> None:
        """Note that a leaf leaves the tree: its pages are remembered if it was on probation and not retired."""
        parent: Node = leaf.parent
        if leaf.is_protected:
            self.num_protected -= leaf.end - parent.end
            return
        namespace = leaf.namespace
        if namespace.tree is not None:
            first: cython.Py_ssize_t = parent.end // self.page_size
            self.memory.remember(
                leaf.data, namespace.width, namespace.unit, first, self._seed(leaf), self.sum_of(parent)
            )

    @cython.ccall
    def sum_of(self, node: Node) -> cython.ulonglong:
        """Return the sum up to the end of a node, for hashes of the pages below it; kept on the node. O(its path)."""
        if not node.data or node.prefix_sum:
            return node.prefix_sum
        path: list[Any] = []
        parent: Node
        while node.data and not node.prefix_sum:
            path.append(node)
            node = node.parent
        for below in reversed(path):
            node = below
            parent = node.parent
            namespace = node.namespace
            node.prefix_sum = self.memory.sum_of(
                node.data,
                namespace.width,
                namespace.unit,
                parent.end // self.page_size,
                self._seed(node),
                parent.prefix_sum,
            )
        return node.prefix_sum

    @cython.cfunc
    def _seed(self, node: Node) -> Any:
        seed = node.namespace.seed
        return self._seed_of(node.namespace) if seed is None else seed

    def _seed_of(self, namespace: Any) -> int:
        raise NotImplementedError


# ---------------------------------------------------------------- accounting


@cython.cclass
class Victims:
    """Nodes that left the tree, with the slots they held.

    Attributes:
        nodes: the nodes.
        rows: the slots of each, packed.
        num_tokens: the tokens of all of them.
    """

    nodes: list[Any] = cython.declare(list, visibility="readonly")
    rows: list[Any] = cython.declare(list, visibility="readonly")
    num_tokens: int = cython.declare(cython.Py_ssize_t, visibility="readonly")
    _sizes: list[Any]

    def __init__(self) -> None:
        self.nodes = []
        self.rows = []
        self._sizes = []
        self.num_tokens = 0

    def add(self, node: Any, row: bytes | None, num_tokens: cython.Py_ssize_t, /) -> None:
        """Add a node, the slots it held, and their number of tokens."""
        if row is None:
            raise AssertionError(f"{node!r} had been evicted before")
        self._add(node, row, num_tokens)

    @cython.cfunc
    def _add(self, node: Any, row: bytes, num_tokens: cython.Py_ssize_t) -> Any:
        if num_tokens < 0:
            raise ValueError(f"num_tokens must be at least 0, not {num_tokens}")
        self.nodes.append(node)
        self.rows.append(row)
        self._sizes.append(num_tokens)
        self.num_tokens += num_tokens

    def slots(self, page_size: cython.Py_ssize_t, /) -> torch.Tensor:
        """Return one slot per token, whether rows name the slots of tokens or of pages; a copy."""
        return expand_each(self.rows, self._sizes, page_size)


@cython.cclass
class LockAccounting:
    """The base of `FullKV`: the tokens with locks and without, and the queue of the unlocked leaves.

    The subclass handles a leaf that lost its last lock, by `_add_candidate`, and a node that lost its last child, by
    `_on_last_child_removed`. It splits a victim that is much longer than needed, by `_spare_head`.

    Attributes:
        evictable: the tokens of nodes without locks.
        protected: the tokens of nodes with locks.
        two_queues: hears of each node that leaves, by `removed`; None if there is one queue.
        least_spared: a victim is split only if at least so many tokens of it stay.
    """

    _queue: Any = cython.declare(object, visibility="public")
    two_queues: Any = cython.declare(object, visibility="public")
    evictable: int = cython.declare(cython.Py_ssize_t, visibility="public")
    protected: int = cython.declare(cython.Py_ssize_t, visibility="public")
    least_spared: int = cython.declare(cython.Py_ssize_t, visibility="public")

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.two_queues = None
        self.least_spared = _LEAST_SPARED
        self.evictable = 0
        self.protected = 0

    def add(self, leaf: Node, /) -> None:
        """Add a new, unlocked leaf."""
        parent: Node = leaf.parent
        self.evictable += leaf.end - parent.end
        if len(parent.children) == 1:  # it was a leaf until now
            self._queue.discard(parent)
        self._queue.push(leaf)

    def use(self, end: Node, now: Any, num_hits: Any, priority: Any, /) -> None:
        """Note that a lookup or an insert ends at a node now, as so many matches by a request of that priority."""
        if note_use(end, now, num_hits, priority):  # no other node of the path can be a leaf
            self._queue.touch(end)

    def lock(self, node: Node, /) -> None:
        """Lock a node and its ancestors. O(depth in nodes)."""
        moved: cython.Py_ssize_t = lock_path(node)
        self.evictable -= moved
        self.protected += moved
        if moved and node.table is None:
            self._queue.discard(node)

    def unlock(self, node: Node, /) -> bool:
        """Undo one lock of this very node; a leaf without locks may then be evicted. O(depth in nodes).

        Returns whether it had any.
        """
        if node.own_locks < 1:
            return False
        moved: cython.Py_ssize_t = unlock_path(node)
        self.evictable += moved
        self.protected -= moved
        if moved and node.table is None:
            self._add_candidate(node)
        return True

    def evict_leaves(self, num_tokens: Any, victims: Victims, /) -> None:
        """Remove the leaves that go next until the victims hold so many tokens, or there is no leaf.

        Of a last leaf that is much longer than needed, the tail alone goes.
        """
        wanted: cython.Py_ssize_t = index(num_tokens)
        size: cython.Py_ssize_t
        leaf: Node | None
        parent: Node
        while victims.num_tokens < wanted:
            leaf = self._queue.pop()
            if leaf is None:
                break
            parent = leaf.parent
            size = leaf.end - parent.end
            if size - (wanted - victims.num_tokens) >= self.least_spared:
                self._spare_head(leaf, wanted - victims.num_tokens)
                parent = leaf.parent
                size = leaf.end - parent.end
            if self.two_queues is not None:
                self.two_queues.removed(leaf)
            victims._add(leaf, detach_leaf(leaf), size)
            self.evictable -= size
            if parent.table is None:
                self._on_last_child_removed(parent)

    def free_leaves(self, num_tokens: Any, page_size: Any, free: FreeSlots, free_each: FreeSlots, /) -> int:
        """`evict_leaves`, and pass the slots of all victims to `free`, in one call; to `free_each` if it refuses them.

        Slots of victims before an error are freed, too. Returns the tokens freed.
        """
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        victims = Victims()
        try:
            self.evict_leaves(num_tokens, victims)
        finally:
            if victims.num_tokens:
                _give_back(victims.slots(page_size), free, free_each)
        return victims.num_tokens

    def _add_candidate(self, leaf: Any) -> None:
        raise NotImplementedError

    def _on_last_child_removed(self, node: Any) -> None:
        raise NotImplementedError

    def _spare_head(self, leaf: Any, num_tokens: int) -> None:
        raise NotImplementedError


def _give_back(slots: torch.Tensor, free: FreeSlots, free_each: FreeSlots) -> None:
    try:
        free(slots)
    except AssertionError:
        raise
    except Exception:
        free_each(slots)
