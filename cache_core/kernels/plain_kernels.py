"""The inner loops of the core in plain Python and numpy: the equivalents of `c/*.c`, and the reference for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self, TypeVar

import numpy as np

from raydix.cache_core.errors import InvalidKeyError
from raydix.cache_core.kernels.plain_children import NO_CHILDREN, Children
from raydix.cache_core.kernels.plain_holdings import Holdings, Victims, uproot
from raydix.cache_core.kernels.plain_ranking import Ranking
from raydix.cache_core.kernels.plain_rows import compact, expand, gather, is_row, join, num_slots, parted, take_back

__all__ = [
    "Children",
    "Holdings",
    "Key",
    "Node",
    "Ranking",
    "Victims",
    "compact",
    "cut",
    "expand",
    "gather",
    "grow",
    "is_row",
    "join",
    "last_use",
    "leads_to",
    "maker",
    "pack",
    "reach",
    "take_back",
    "top_of",
    "uproot",
    "use_huge_pages",
    "walk",
]

_T = TypeVar("_T")
_I4 = np.dtype("<i4")
_FIRST_CHUNK = 1024  # bytes: the first chunk to compare in a partly matched run


def pack(ids: Any, /) -> bytes | None:
    """Return ids of a common type, packed: little-endian, 4 bytes each. None for all others, which may be valid.

    Costs one pass. The compiled version packs lists of ints and 1-D arrays of 4 or 8 bytes an integer, this one int32.
    """
    if isinstance(ids, np.ndarray) and ids.dtype is _I4 and ids.ndim == 1:
        # `argmin` costs a fraction of `min`
        return ids.tobytes() if not ids.size or ids.item(ids.argmin()) >= 0 else None
    return None


def maker(made: type[_T], /) -> Callable[..., _T]:
    """Return a constructor of a dataclass with slots; it takes all fields by position.

    The compiled constructor fills the slots directly: no code of the class runs.
    """
    return made


def use_huge_pages() -> bool:
    """Allocate all small Python objects of this process in huge memory pages from now on; cannot be undone.

    Linux provides huge pages if `transparent_hugepage` is "madvise" or "always"; walks of a large tree then take less
    time. Return whether they were requested: only by the compiled version, on Linux.
    """
    return False


class Key:
    """The base of `RadixKey`: packed token ids and a namespace.

    The subclass packs by `_pack_slowly` the ids that `pack` rejects. A key of another key has its namespace by default.
    """

    __slots__ = ("arity", "data", "extra_key", "num_tokens", "unit", "width")

    def __init__(self, token_ids: Any, extra_key: str | None = None) -> None:
        data = pack(token_ids)
        if data is None:
            if extra_key is None and isinstance(token_ids, Key):
                extra_key = token_ids.extra_key
            self._fill(*self._pack_slowly(token_ids), extra_key)
        else:
            self._fill(data, 4, 0, extra_key)

    @staticmethod
    def _pack_slowly(token_ids: Any) -> tuple[bytes, int, int]:
        """Return the packed ids, the bytes of an id, and the ids of a tuple (0: plain ids)."""
        raise NotImplementedError

    def _fill(self, data: bytes, width: int, arity: int, extra_key: str | None) -> None:
        if extra_key is not None and not isinstance(extra_key, str):
            raise InvalidKeyError(f"extra_key must be a str or None, not {type(extra_key).__name__}")
        self.data = data  # little-endian ids
        self.width = width  # bytes of an id
        self.arity = arity  # ids of a tuple; 0: plain ids
        self.unit = width * (arity or 1)  # bytes of one element
        self.num_tokens = len(data) // self.unit
        self.extra_key = extra_key

    @classmethod
    def from_packed(cls, data: bytes, width: int, extra_key: str | None = None, arity: int = 0) -> Self:
        """Return a key over packed ids: little-endian, `width` bytes each (8 only if an id needs it).

        `arity` is the number of ids in each tuple, 0 for plain ids. The ids are neither copied nor checked.
        """
        key = cls.__new__(cls)
        key._fill(data, width, arity, extra_key)
        return key


def last_use(node: Any, /) -> int:
    """Return the tick when a match or insert last ended at a node, or at a node evicted below it: the rank of LRU."""
    return node.own_access_time  # type: ignore[no-any-return]


def leads_to(key: Key, node: Any, /) -> bool:
    """Return whether the runs from the root to `node` are the first tokens of a key, by a memcmp of each."""
    end: int = node.end * key.unit
    while node.parent is not None and node.data:
        if not key.data.startswith(node.data, end - len(node.data), end):
            return False
        end -= len(node.data)
        node = node.parent
    return end == 0


class Node:
    """The base of `TreeNode`, which documents the attributes."""

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
        self.children: Children = NO_CHILDREN
        self.lock_ref = self.own_locks = 0
        self.own_access_time = self.creation_time = now
        self.own_hits = self.own_priority = 0
        self.swa_tombstone = False
        self.swa_lock_ref = 0
        self.swa_boundary_id: int | None = None
        self.swa_access_time = now
        self.hash_values: list[str] | None = None

    def __reduce__(self) -> NoReturn:
        """Raise TypeError, as the compiled class does: a copy of a node would be a copy of its whole tree."""
        raise TypeError(f"cannot pickle {type(self).__name__!r} object")

    def __len__(self) -> int:
        """Return the number of tokens of this node's run; 0 for the root."""
        return self.end - self.parent.end if self.parent is not None else 0


def grow(
    node_type: Any,
    ids: Iterator[int],
    page_size: int,
    parent: Any,
    key: Key,
    stop: int,
    slots: bytes,
    now: int,
    /,
) -> Any:
    """Add a leaf below `parent` with the tokens of a key from `parent.end` to `stop`; return the leaf.

    Args:
        ids: the next id is the leaf's.
        slots: the packed slots of the leaf, which keeps them.

    Raises:
        ValueError: `parent` has a child with the same first page.
    """
    run, node_id = key.data[parent.end * key.unit : stop * key.unit], next(ids)
    if run[: page_size * key.unit] in parent.children:
        raise ValueError("there is a child that begins so")
    leaf = node_type(node_id, parent, parent.space, run, slots, stop, now)
    _hang(parent, run[: page_size * key.unit], leaf)
    return leaf


def cut(node_type: Any, ids: Iterator[int], page_size: int, node: Any, end: int, /) -> Any:
    """Split `node` at `end`, tokens from the root; return the new node above it, which takes over the prefix.

    The new node gets the next id, the locks, ticks and priority of `node`, and the hashes of its pages, but no hits.
    If the prefix is most of the node, the compiled version keeps it in place and copies only the rest, unless the data
    has other readers.
    """
    node_id, parent, row, unit = next(ids), node.parent, node.slots, node.space.unit
    length, num_tokens = end - parent.end, node.end - parent.end
    assert 0 < length < num_tokens and length % page_size == 0, f"cannot split {node} at {end}"
    at, page = length * unit, page_size * unit
    prefix, rest = parted(row, num_slots(row) * length // num_tokens)
    above = node_type(node_id, parent, node.space, node.data[:at], prefix, end, node.own_access_time)
    above.lock_ref, above.creation_time, above.own_priority = node.lock_ref, node.creation_time, node.own_priority
    _hang(parent, node.data[:page], above)
    node.data, node.slots, node.parent = node.data[at:], rest, above
    _hang(above, node.data[:page], node)
    if node.hash_values is not None:
        num_pages = length // page_size
        above.hash_values, node.hash_values = node.hash_values[:num_pages], node.hash_values[num_pages:]
    return above


def _hang(parent: Any, page: bytes, child: Any) -> None:
    if parent.children is NO_CHILDREN:
        parent.children = Children()
    parent.children[page] = child


def top_of(tops: dict[tuple[str | None, int], Any], key: Key, page_size: int, /) -> Any:
    """Return the topmost node of a key's namespace; None if there is none.

    The compiled version also prefetches the entry of the child for the key's first page.
    """
    return tops.get((key.extra_key, key.arity))


def walk(node: Any, key: Key, page_size: int, num_tokens: int, /) -> tuple[list[Any], int, int]:
    """Follow the first `num_tokens` of a key, in whole pages, from `node`, which must end a prefix of the key.

    Returns the nodes below `node`, the matched tokens from the root, and the tokens of the last node beyond these: it
    may match in part, by whole pages. Costs a memcmp and a lookup per node.
    """
    data, unit = key.data, key.unit
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
    end = min(pos, stop) // unit  # the last run may match beyond `stop`
    return path, end, path[-1].end - end if path else 0


def reach(
    node_type: Any, ids: Iterator[int], node: Any, key: Key, page_size: int, num_tokens: int, /
) -> tuple[list[Any], int, int]:
    """Do `walk`, then split the last node at the end of the match, so that it matches wholly."""
    path, end, rest = walk(node, key, page_size, num_tokens)
    if rest:
        path[-1] = cut(node_type, ids, page_size, path[-1], end)
    return path, end, 0


def common_bytes(data: bytes, pos: int, stop: int, run: bytes) -> int:
    """Return the number of leading bytes that `data[pos:stop]` and `run` share; compares in growing chunks."""
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
