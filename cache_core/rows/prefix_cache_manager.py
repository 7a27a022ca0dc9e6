"""`PrefixCacheManager`: a map from prefixes to the slots that hold their KV. A slot is a row: the KV of one sequence.

The record of a slot has its version, and the number of leading tokens that are still valid. A slot holds one sequence
at a time, so it has at most one record. A tree over the tokens finds the record:

    insert([1, 2, 3, 4], slot=0, slot_ver=1)      namespace None
    insert([1, 2, 5], slot=1, slot_ver=1)           [1 2] len=2 rows=[0 1] age=0
    find([1, 2, 3, 9]) == (3, 0, 1)                   [3] len=1 rows=[0] age=0
                                                        [4] len=1 rows=[0] age=2
                                                      [5] len=1 rows=[1] age=1

Every node on a row's path records the row, so any prefix of the row is found. The capacity counts the tokens of all
nodes: [1 2] above counts 2, the whole tree 5.

No method awaits. If one thread makes all calls, each operation is atomic, including the check and copy of `copy_kv`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from operator import index
from typing import Any, NamedTuple

from raydix.cache_core.errors import InvalidKeyError, LockError, SlotError, StaleNodeError
from raydix.cache_core.outline import Outline, OutlineLimits, head_of, outline
from raydix.cache_core.radix.format import format_tree, head_line, outline_node
from raydix.cache_core.rows.row_index import RowIndex
from raydix.cache_core.rows.row_tree import Row, prefix_of
from raydix.cache_core.rows.slot_allocator import SlotAllocator
from raydix.cache_core.tree.radix_key import RadixKey
from raydix.cache_core.tree.tree_node import TreeNode, Use

__all__ = ["FoundRow", "PrefixCacheManager", "SlotAllocator"]


class FoundRow(NamedTuple):
    """The longest valid prefix of a query, and the row that holds it; `(0, -1, 0)` is a miss."""

    prefix_len: int  # tokens, in positions [0, prefix_len) of the row
    slot: int
    slot_ver: int


MISS = FoundRow(0, -1, 0)


class PrefixCacheManager:
    """Records of slots by token sequence, with pins and LRU eviction of tokens or whole rows.

    Token ids are a `RadixKey` or any argument of one; its `extra_key` isolates namespaces. Keys are copied. The
    cache does not own slots or KV. Time is a logical clock: equal operations have equal outcomes.

    Args:
        max_capacity: the most tokens of all paths; a shared prefix is counted once.
        allocator: has the version of each slot; a record with another version is never found. Without an allocator,
            report the reuse of a slot by an `insert` with another version, `invalidate` or `forget`.

    Raises:
        ValueError: `max_capacity` is less than 1.
    """

    def __init__(self, max_capacity: int = 1000, allocator: SlotAllocator | None = None) -> None:
        max_capacity = index(max_capacity)
        if max_capacity < 1:
            raise ValueError(f"max_capacity must be at least 1, not {max_capacity}")
        self.max_capacity = max_capacity
        self.allocator = allocator
        self.reset()

    def reset(self) -> None:
        """Drop all records and pins."""
        self._index = RowIndex(self.max_capacity, self.allocator)

    # ---------------------------------------------------------------- lookup

    def find(self, token_ids: Any) -> FoundRow:
        """Return the longest prefix of `token_ids` that a row still holds, and that row.

        If several rows hold it, returns the row that was recorded last; `(0, -1, 0)` if none does. Takes no reference:
        the result is valid until the row is overwritten. The prefix and the row become the most recently used. A match
        that ends inside a node splits it. Costs a memcmp and a lookup per node, and a step per row with an old version.
        """
        found = self._locate(_as_key(token_ids))
        if found is None:
            return MISS
        node, end, row = found
        self._index.touch(node, end)
        row.last_used = self._index.clock
        return FoundRow(end, row.slot, row.version)

    def peek(self, token_ids: Any) -> FoundRow:
        """Return the result of `find`, but change nothing."""
        found = self._locate(_as_key(token_ids))
        return MISS if found is None else FoundRow(found[1], found[2].slot, found[2].version)

    def peek_slots(self, token_ids: Any, limit: int | None = None) -> tuple[int, list[int]]:
        """Return the length that `find` would return, and up to `limit` slots that hold that prefix.

        The slot that was recorded last is first. O(returned slots).
        """
        found = self._locate(_as_key(token_ids))
        if found is None:
            return 0, []
        node, end, _ = found
        return end, list(islice(filter(self.slot_is_findable, reversed(self._index.tree.rows[node])), limit))

    def _locate(self, key: RadixKey) -> tuple[TreeNode, int, Row] | None:
        """Return the deepest node with a current row on the path of `key`, how many tokens match there, and the row."""
        path, end = self._index.tree.walk(key)
        for node in reversed(path):
            for slot in reversed(self._index.tree.rows[node]):
                if self.slot_is_findable(slot):
                    return node, min(end, node.end), self._index.rows[slot]
        return None

    # ---------------------------------------------------------------- records

    def insert(self, token_ids: Any, slot: int, slot_ver: int) -> int:
        """Record that positions [0, n) of `slot` hold the KV of the n tokens; return how many are recorded.

        Takes no reference and no ownership. The overwritten record of the slot is dropped first: all of it if its
        version differs, else the tokens after the prefix that it shares with `token_ids`. If the record has all of
        `token_ids`, its later tokens stay recorded.

        If the capacity is exceeded, unpinned leaves of other paths are evicted, least recently used first. If that is
        not enough, only the first tokens are recorded. An old `slot_ver` records nothing and returns 0.

        Costs a memcmp and a lookup per node, and O(log n) per evicted node.

        Raises:
            SlotError: `slot` is out of range.
            InvalidKeyError: `token_ids` are not plain token ids.
        """
        key = _as_key(token_ids)
        slot, slot_ver = self._check_slot(slot), index(slot_ver)
        if not self._is_current(slot, slot_ver) or not key.num_tokens:
            return 0
        return self._index.write(key, slot, slot_ver)

    def invalidate(self, slot: int, valid_len: int) -> None:
        """Drop the record of the positions from `valid_len` on, which will be overwritten. Pins do not prevent it.

        No effect on a slot without a record. O(dropped nodes).

        Raises:
            SlotError: `slot` is out of range, or `valid_len` is negative; nothing changed.
        """
        slot, valid_len = self._check_slot(slot), index(valid_len)
        if valid_len < 0:
            raise SlotError(f"valid_len must not be negative: {valid_len}")
        row = self._index.rows.get(slot)
        if row is not None and valid_len < row.tail.end:
            self._index.shorten(row, valid_len)

    def forget(self, slot: int) -> None:
        """Drop the whole record of a slot."""
        self.invalidate(slot, 0)

    # ---------------------------------------------------------------- pins

    def pin(self, token_ids: Any) -> None:
        """Protect the nodes of a prefix from eviction until a `release`. A row must hold all of the prefix.

        A pin protects nodes, not KV. If the row is overwritten and invalidated, the prefix is no longer found, but the
        caller must still release it. O(depth in nodes).

        Raises:
            StaleNodeError: no row holds all of `token_ids`; nothing changed.
        """
        node, end, _ = self._locate_all(_as_key(token_ids))
        self._index.tree.pin(self._index.tree.split(node, end))

    def release(self, token_ids: Any) -> None:
        """Undo one `pin` of exactly this prefix. Without pins it can be evicted.

        O(depth in nodes, and the rows that hold the prefix).

        Raises:
            LockError: the prefix has no pin; nothing changed.
        """
        key = _as_key(token_ids)
        path, end = self._index.tree.walk(key)
        if not path or not end == path[-1].end == len(key) or not path[-1].own_locks:
            raise LockError(f"{key} is not pinned: release exactly the prefix of a pin, once")
        node = path[-1]
        self._index.tree.unpin(node)
        for slot in self._index.tree.rows.get(node, ()):
            self._index.released.requeue(self._index.rows[slot])

    def _locate_all(self, key: RadixKey) -> tuple[TreeNode, int, Row]:
        found = self._locate(key)
        if found is None or found[1] < len(key):
            raise StaleNodeError(f"no row holds all of {key}: call find again")
        return found

    # ---------------------------------------------------------------- eviction

    def evict(self, num_nodes: int) -> int:
        """Evict `num_nodes` tokens of unpinned leaves, least recently used first; return how many were evicted.

        A parent becomes a candidate when its last child is removed. Rows that end at a removed node are shortened. Of
        the last leaf, only as many of its last tokens are evicted as are needed. O(log n) per removed node, and a step
        per row that ends at it.
        """
        return self._index.evict(index(num_nodes), used_before=self._index.clock + 1)

    def evict_lru_slot(self) -> int | None:
        """Drop the record of the released row that was inserted or found longest ago; return its slot.

        A row is released if its slot is free in the allocator; without an allocator, all rows are. Rows with a pin on
        their path are skipped. Returns None if no other row is left. The allocator does not change. O(log n), and
        O(depth in nodes) for the row.
        """
        row = self._index.released.pop(self._index.rows)
        if row is None:
            return None
        self._index.shorten(row, 0)
        return row.slot

    # ---------------------------------------------------------------- copying

    def copy_kv(self, token_ids: Any, target_slot: int, kv_cache: tuple[Any, Any], n_layers: int) -> int:
        """Copy the KV of a prefix from its row into the first positions of another row; return the prefix's length.

        A row must hold all of the prefix. The check and the copy are one step, so no other call can overwrite the
        source in between. The target's record is shortened to the tokens that it shares with `token_ids`. The copy is
        not recorded: call `insert` when it may be found. If the target already holds the prefix, nothing is copied. The
        prefix and the source row become the most recently used. One assignment per tensor.

        Args:
            kv_cache: `(k_cache, v_cache)`, tensors or numpy arrays, each indexed [slot, position, layer, ...].
            n_layers: layers [0, n_layers) are copied.

        Raises:
            StaleNodeError: no row holds all of `token_ids` any more; nothing was copied or changed.
            SlotError: the tensors have too few slots, positions or layers; nothing was copied or changed.
        """
        key = _as_key(token_ids)
        target_slot, n_layers = self._check_slot(target_slot), index(n_layers)
        node, end, source = self._locate_all(key)
        if target_slot in self._index.tree.rows[node] and self.slot_is_findable(target_slot):
            source = self._index.rows[target_slot]
        for cache in kv_cache:
            if max(source.slot, target_slot) >= cache.shape[0] or end > cache.shape[1]:
                raise SlotError(f"slots {source.slot}, {target_slot} of {end} tokens exceed {tuple(cache.shape)}")
            if not 0 <= n_layers <= cache.shape[2]:
                raise SlotError(f"{n_layers} layers exceed {tuple(cache.shape)}")
        self._index.touch(node, end)
        source.last_used = self._index.clock
        self._index.drop_overwritten(target_slot, key)
        if source.slot != target_slot:
            for cache in kv_cache:
                cache[target_slot, :end, :n_layers] = cache[source.slot, :end, :n_layers]
        return end

    # ---------------------------------------------------------------- slots, sizes, debugging

    def slot_is_findable(self, slot: int) -> bool:
        """Return whether a `find` could return this slot. O(1)."""
        row = self._index.rows.get(slot)
        return row is not None and self._is_current(slot, row.version)

    def recorded_len(self, slot: int) -> int:
        """Return how many leading tokens of a slot are recorded, under any version. O(1)."""
        return self._index.rows[slot].tail.end if slot in self._index.rows else 0

    def recorded_key(self, slot: int) -> RadixKey | None:
        """Return the recorded tokens of a slot, under any version; None without a record. O(their number)."""
        return prefix_of(self._index.rows[slot].tail) if slot in self._index.rows else None

    def forget_namespaces(self, is_meant: Callable[[str | None], bool]) -> tuple[int, list[int]]:
        """Forget the slots of each namespace for which `is_meant(extra_key)` is True.

        Returns the number of forgotten namespaces, and their slots.
        """
        meant = [row for row in self._index.rows.values() if is_meant(row.tail.namespace.extra_key)]
        namespaces = {row.tail.namespace.extra_key for row in meant}
        for row in meant:
            self.forget(row.slot)
        return len(namespaces), [row.slot for row in meant]

    def lowest_empty_slot(self) -> int:
        """Return the lowest free slot without a record; -1 if there is none, or no allocator. O(slots / 1024)."""
        return self._index.released.lowest_empty_slot()

    @property
    def num_nodes(self) -> int:
        """Tokens of all paths, a shared prefix counted once; at most `max_capacity`. O(1)."""
        return self._index.tree.num_tokens

    @property
    def num_pins(self) -> int:
        """Pins without a release. O(1)."""
        return self._index.tree.num_pins

    @property
    def num_rows(self) -> int:
        """Slots with a record. O(1)."""
        return len(self._index.rows)

    def _is_current(self, slot: int, version: int) -> bool:
        return self.allocator is None or self.allocator.version(slot) == version

    def _check_slot(self, slot: int) -> int:
        """Return the slot as a plain int; raise SlotError if it is out of range."""
        if self.allocator is not None:
            return self.allocator.check_range(slot)
        slot = index(slot)
        if slot < 0:
            raise SlotError(f"slot must not be negative: {slot}")
        return slot

    def outline(self, limits: OutlineLimits) -> Outline:
        """Return the largest branches, old versions included. Bounded work."""
        return outline(self._index.tree.tops, outline_node, limits, self._index.clock)

    def pretty_format(self) -> str:
        """Return one line per node, indented by depth: tokens, length, rows, pins, and age in ticks of the clock."""
        return format_tree(self._index.tree.tops, self._line)

    def _line(self, node: TreeNode, use: Use) -> str:
        rows = head_of(list(self._index.tree.rows[node]))
        pins = f" pinned x{node.lock_ref}" if node.lock_ref else ""
        return f"{head_line(node)} rows={rows}{pins} age={self._index.clock - use.last_access_time}"

    def pretty_print(self) -> None:
        """Print `pretty_format()`."""
        print(self.pretty_format())

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of the index, of its tree or of eviction is broken. O(n)."""
        self._index.check()


def _as_key(token_ids: Any) -> RadixKey:
    key = token_ids if isinstance(token_ids, RadixKey) else RadixKey(token_ids)
    if key.arity:
        raise InvalidKeyError(f"token ids must be plain ids, one per position, not tuples of {key.arity}")
    return key
