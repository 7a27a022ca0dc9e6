"""`PrefixCacheManager`: a map from prefixes to the slots that hold their KV. A slot is a row: the KV of one sequence.

The record of a slot has its version, and the number of leading tokens that are still valid. A slot holds one sequence
at a time, so it has at most one record. A tree over the tokens finds the record:

    insert([1, 2, 3, 4], slot=0, slot_ver=1)      namespace None
    insert([1, 2, 5], slot=1, slot_ver=1)           [1 2] len=2 rows=[0 1] age=0
    find([1, 2, 3, 9]) == (3, 0, 1)                   [3] len=1 rows=[0] age=0
                                                        [4] len=1 rows=[0] age=2
                                                      [5] len=1 rows=[1] age=1

The capacity counts the tokens of all nodes: [1 2] above counts 2, the whole tree 5.

No method awaits. If one thread makes all calls, each operation is atomic, including the check and copy of `copy_kv`.

Rules, checked by `check_invariants` besides `RadixTree`'s rules:

1. A slot has at most one record, under its own number, never of length 0.
2. A row is recorded exactly at its tail and at all nodes above it, so every prefix of it can be found.
3. A node without rows is locked. A namespace without nodes is removed.
4. A node's `lock_ref` counts its own pins and the `lock_ref`s of its children; `num_pins` counts all pins.
5. `num_nodes` counts the tokens of all nodes; at most `max_capacity`.
6. Every leaf without locks is in the queue of leaves.
7. Every row is in the queue of rows, or its slot is taken in the allocator, or a pin is on its path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from operator import attrgetter, index
from typing import Any, NamedTuple

from raydix.cache_core.errors import InvalidKeyError, LockError, SlotError, StaleNodeError
from raydix.cache_core.eviction.recency_queue import RecencyQueue
from raydix.cache_core.kernels import last_use, walk
from raydix.cache_core.outline import Outline, OutlineLimits, head_of, outline
from raydix.cache_core.radix.format import format_tree, head_line, outline_node
from raydix.cache_core.rows.slot_allocator import SlotAllocator as SlotAllocator
from raydix.cache_core.tree.radix_key import RadixKey
from raydix.cache_core.tree.radix_tree import RadixTree
from raydix.cache_core.tree.tree_node import TreeNode, Use


class FoundRow(NamedTuple):
    """The longest valid prefix of a query, and the row that holds it; `(0, -1, 0)` is a miss."""

    prefix_len: int  # tokens, in positions [0, prefix_len) of the row
    slot: int
    slot_ver: int


MISS = FoundRow(0, -1, 0)


class Row:
    """The record of a slot: its version, and the node at which its valid prefix ends."""

    __slots__ = ("last_used", "slot", "tail", "version")

    def __init__(self, slot: int, version: int, tail: TreeNode, now: int) -> None:
        self.slot = slot
        self.version = version
        self.tail = tail
        self.last_used = now  # tick of the last insert, or of the last find that returned this row

    @property
    def is_pinned(self) -> bool:
        """Whether a node of its path has a pin."""
        node: TreeNode | None = self.tail  # a loop, as `path_up` would cost 0.5 us more per evicted row
        while node is not None and not node.own_locks:
            node = node.parent
        return node is not None

    def __repr__(self) -> str:
        return f"Row(slot={self.slot}, version={self.version}, len={self.tail.end})"


def path_up(node: TreeNode | None) -> Iterator[TreeNode]:
    """Yield a node and the nodes above it, except the namespace's."""
    while node is not None and node.end:
        yield node
        node = node.parent


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
        if allocator is not None:
            allocator.on_free.append(self._on_free)
        self.reset()

    def reset(self) -> None:
        """Drop all records and pins."""
        self._tree = RadixTree(1, holds_slots=False)
        self._rows: dict[int, Row] = {}  # slot -> row
        # node -> the slots of the rows that hold all tokens up to its end, in the order in which they were recorded
        self._slots_at: dict[TreeNode, dict[int, None]] = {}
        self._leaves: RecencyQueue[TreeNode] = RecencyQueue(last_use)
        self._released: RecencyQueue[Row] = RecencyQueue(attrgetter("last_used"))
        self._clock = 0  # ticks at each use
        self._num_tokens = self._num_pins = 0

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
        self._touch(node, end)
        row.last_used = self._clock
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
        return end, list(islice(filter(self.slot_is_findable, reversed(self._slots_at[node])), limit))

    def _locate(self, key: RadixKey) -> tuple[TreeNode, int, Row] | None:
        """Return the deepest node with a current row on the path of `key`, how many tokens match there, and the row."""
        path, end = self._walk(key)
        for node in reversed(path):
            for slot in reversed(self._slots_at[node]):
                if self.slot_is_findable(slot):
                    return node, min(end, node.end), self._rows[slot]
        return None

    def _locate_all(self, key: RadixKey) -> tuple[TreeNode, int, Row]:
        found = self._locate(key)
        if found is None or found[1] < len(key):
            raise StaleNodeError(f"no row holds all of {key}: call find again")
        return found

    def _walk(self, key: RadixKey) -> tuple[list[TreeNode], int]:
        """Return the nodes that share tokens with `key`, and how many tokens they share with it in total.

        The last node may share only its first tokens. Costs a memcmp and a lookup per node.
        """
        top, key = self._tree.find_namespace(key)
        if top is None:
            return [], 0
        path, end, _ = walk(top, key, 1, key.num_tokens)
        return path, end

    def _touch(self, node: TreeNode, end: int) -> TreeNode:
        """Make the first `end` tokens of a path the most recently used prefix; return the node that ends there.

        The prefix must end in `node`, which is split if it is longer.
        """
        node = self._split(node, end)
        self._clock += 1
        node.own_access_time = self._clock
        self._offer(node)
        return node

    def _split(self, node: TreeNode, end: int) -> TreeNode:
        """Return the node that ends after `end` tokens from the root: `node`, or a new node above it."""
        if end == node.end:
            return node
        above = self._tree.split(node, end)
        self._slots_at[above] = dict(self._slots_at[node])
        return above

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
        row = self._rows.get(slot)
        if row is not None and row.version != slot_ver:
            self._shorten(row, 0)
        self._drop_overwritten(slot, key)
        path, end = self._walk(key)
        if path:
            node = self._grow(self._touch(path[-1], end), key)
        else:
            self._clock += 1
            node = self._grow(None, key)
        if node is None:
            return 0
        self._record(slot, slot_ver, node)
        return node.end

    def _grow(self, node: TreeNode | None, key: RadixKey) -> TreeNode | None:
        """Add the tokens of `key` beyond `node`, as many as the capacity allows; return the last node."""
        start = 0 if node is None else node.end
        missing = len(key) - start
        self._evict(self._num_tokens + missing - self.max_capacity, used_before=self._clock)
        assert node is None or node in self._slots_at, f"{node} was evicted for its own path"
        length = min(missing, self.max_capacity - self._num_tokens)
        if not length:
            return node
        top, key = self._tree.ensure_namespace(key, self._clock)
        leaf = self._tree.add_leaf(top if node is None else node, key, start + length, b"", self._clock, 0)
        self._slots_at[leaf] = {}
        self._num_tokens += length
        return leaf

    def _record(self, slot: int, slot_ver: int, node: TreeNode) -> None:
        """Record that `slot` holds all tokens up to the end of `node`, as the last row on its path."""
        row = self._rows.get(slot)
        if row is None:
            row = self._rows[slot] = Row(slot, slot_ver, node, self._clock)
            self._released.push(row)
        elif row.tail.end < node.end:
            row.tail = node
        row.last_used = self._clock
        for above in path_up(row.tail):
            slots = self._slots_at[above]
            slots.pop(slot, None)
            slots[slot] = None
        self._offer(node)

    def _drop_overwritten(self, slot: int, key: RadixKey) -> None:
        """Shorten the record of a slot to the tokens that it shares with `key`, unless it holds all of `key`."""
        row = self._rows.get(slot)
        if row is None:
            return
        path, end = self._walk(key)
        held = next((node.end for node in reversed(path) if slot in self._slots_at[node]), 0)
        if min(end, held) < len(key):
            self._shorten(row, min(end, held))

    def invalidate(self, slot: int, valid_len: int) -> None:
        """Drop the record of the positions from `valid_len` on, which will be overwritten. Pins do not prevent it.

        No effect on a slot without a record. O(dropped nodes).

        Raises:
            SlotError: `slot` is out of range, or `valid_len` is negative; nothing changed.
        """
        slot, valid_len = self._check_slot(slot), index(valid_len)
        if valid_len < 0:
            raise SlotError(f"valid_len must not be negative: {valid_len}")
        row = self._rows.get(slot)
        if row is not None and valid_len < row.tail.end:
            self._shorten(row, valid_len)

    def forget(self, slot: int) -> None:
        """Drop the whole record of a slot."""
        self.invalidate(slot, 0)

    def _shorten(self, row: Row, length: int) -> None:
        """Remove a row from all nodes beyond `length`, and the nodes that are no longer needed."""
        node = row.tail
        while node.end > length:
            if node.end - len(node) < length:
                self._split(node, length)
            parent = node.parent
            assert parent is not None
            del self._slots_at[node][row.slot]
            self._prune(node)
            node = parent
        self._move_tail(row, node)

    def _move_tail(self, row: Row, node: TreeNode) -> None:
        """End a row at `node`, after it was removed from the nodes below. Forget it if no token is left."""
        row.tail = node
        if node.end:
            self._released.push(row)  # the pins of its path may have been beyond `node`
        else:
            del self._rows[row.slot]
            self._released.discard(row)

    # ---------------------------------------------------------------- pins

    def pin(self, token_ids: Any) -> None:
        """Protect the nodes of a prefix from eviction until a `release`. A row must hold all of the prefix.

        A pin protects nodes, not KV. If the row is overwritten and invalidated, the prefix is no longer found, but the
        caller must still release it. O(depth in nodes).

        Raises:
            StaleNodeError: no row holds all of `token_ids`; nothing changed.
        """
        node, end, _ = self._locate_all(_as_key(token_ids))
        node = self._split(node, end)
        self._num_pins += 1
        node.own_locks += 1
        for above in path_up(node):
            above.lock_ref += 1

    def release(self, token_ids: Any) -> None:
        """Undo one `pin` of exactly this prefix. Without pins it can be evicted.

        O(depth in nodes, and the rows that hold the prefix).

        Raises:
            LockError: the prefix has no pin; nothing changed.
        """
        key = _as_key(token_ids)
        path, end = self._walk(key)
        if not path or not end == path[-1].end == len(key) or not path[-1].own_locks:
            raise LockError(f"{key} is not pinned: release exactly the prefix of a pin, once")
        node = path[-1]
        self._num_pins -= 1
        node.own_locks -= 1
        for above in path:
            above.lock_ref -= 1
        for above in reversed(path):
            self._prune(above)
        if node in self._slots_at:
            self._offer(node)
            for slot in self._slots_at[node]:
                self._released.push(self._rows[slot])

    # ---------------------------------------------------------------- eviction

    def evict(self, num_nodes: int) -> int:
        """Evict `num_nodes` tokens of unpinned leaves, least recently used first; return how many were evicted.

        A parent becomes a candidate when its last child is removed. Rows that end at a removed node are shortened. Of
        the last leaf, only as many of its last tokens are evicted as are needed. O(log n) per removed node, and a step
        per row that ends at it.
        """
        return self._evict(index(num_nodes), used_before=self._clock + 1)

    def _evict(self, num_tokens: int, used_before: int) -> int:
        """Do `evict`, but only of leaves that were last used before a tick."""
        evicted = 0
        while evicted < num_tokens and (leaf := self._leaves.pop(_may_go)) is not None:
            if leaf.own_access_time >= used_before:
                self._leaves.push(leaf)
                break
            if len(leaf) > num_tokens - evicted:
                self._split(leaf, leaf.end - (num_tokens - evicted))
            evicted += len(leaf)
            parent, slots = leaf.parent, self._slots_at[leaf]
            assert parent is not None
            self._remove_leaf(leaf)
            for slot in slots:
                self._move_tail(self._rows[slot], parent)
        return evicted

    def _offer(self, node: TreeNode) -> None:
        """Queue a node if it may be evicted."""
        if self._slots_at[node] and _may_go(node):
            self._leaves.push(node)

    def _prune(self, node: TreeNode) -> None:
        """Remove a node that has no row and is not locked."""
        if not self._slots_at[node] and not node.lock_ref:
            self._leaves.discard(node)
            self._remove_leaf(node)

    def _remove_leaf(self, leaf: TreeNode) -> None:
        parent = leaf.parent
        assert parent is not None
        self._tree.remove_leaf(leaf)
        del self._slots_at[leaf]
        self._num_tokens -= len(leaf)
        if parent.end:
            self._offer(parent)
        elif not parent.children:
            self._tree.remove_top(parent)

    def evict_lru_slot(self) -> int | None:
        """Drop the record of the released row that was inserted or found longest ago; return its slot.

        A row is released if its slot is free in the allocator; without an allocator, all rows are. Rows with a pin on
        their path are skipped. Returns None if no other row is left. The allocator does not change. O(log n), and
        O(depth in nodes) for the row.
        """
        row = self._released.pop(self._may_drop)
        if row is None:
            return None
        self._shorten(row, 0)
        return row.slot

    def _may_drop(self, row: Row) -> bool:
        return (self.allocator is None or self.allocator.is_free(row.slot)) and not row.is_pinned

    def _on_free(self, slot: int) -> None:
        """Queue the row of a slot that the allocator has just freed."""
        if slot in self._rows:
            self._released.push(self._rows[slot])

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
        if target_slot in self._slots_at[node] and self.slot_is_findable(target_slot):
            source = self._rows[target_slot]
        for cache in kv_cache:
            if max(source.slot, target_slot) >= cache.shape[0] or end > cache.shape[1]:
                raise SlotError(f"slots {source.slot}, {target_slot} of {end} tokens exceed {tuple(cache.shape)}")
            if not 0 <= n_layers <= cache.shape[2]:
                raise SlotError(f"{n_layers} layers exceed {tuple(cache.shape)}")
        self._touch(node, end)
        source.last_used = self._clock
        self._drop_overwritten(target_slot, key)
        if source.slot != target_slot:
            for cache in kv_cache:
                cache[target_slot, :end, :n_layers] = cache[source.slot, :end, :n_layers]
        return end

    # ---------------------------------------------------------------- slots, sizes, debugging

    def slot_is_findable(self, slot: int) -> bool:
        """Return whether a `find` could return this slot. O(1)."""
        row = self._rows.get(slot)
        return row is not None and self._is_current(slot, row.version)

    def recorded_len(self, slot: int) -> int:
        """Return how many leading tokens of a slot are recorded, under any version. O(1)."""
        return self._rows[slot].tail.end if slot in self._rows else 0

    def recorded_key(self, slot: int) -> RadixKey | None:
        """Return the recorded tokens of a slot, under any version; None without a record. O(their number)."""
        if slot not in self._rows:
            return None
        tail = self._rows[slot].tail
        data = b"".join(reversed([node.data for node in path_up(tail)]))
        return RadixKey.from_packed(data, tail.namespace.width, tail.namespace.extra_key)[:]

    def forget_namespaces(self, is_meant: Callable[[str | None], bool]) -> tuple[int, list[int]]:
        """Forget the slots of each namespace for which `is_meant(extra_key)` is True.

        Returns the number of forgotten namespaces, and their slots.
        """
        meant = [row for row in self._rows.values() if is_meant(row.tail.namespace.extra_key)]
        namespaces = {row.tail.namespace.extra_key for row in meant}
        for row in meant:
            self.forget(row.slot)
        return len(namespaces), [row.slot for row in meant]

    @property
    def num_nodes(self) -> int:
        """Tokens of all paths, a shared prefix counted once; at most `max_capacity`. O(1)."""
        return self._num_tokens

    @property
    def num_pins(self) -> int:
        """Pins without a release. O(1)."""
        return self._num_pins

    @property
    def num_rows(self) -> int:
        """Slots with a record. O(1)."""
        return len(self._rows)

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
        return outline(self._tree.tops.values(), outline_node, limits, self._clock)

    def pretty_format(self) -> str:
        """Return one line per node, indented by depth: tokens, length, rows, pins, and age in ticks of the clock."""
        return format_tree(self._tree.tops.values(), self._line)

    def _line(self, node: TreeNode, use: Use) -> str:
        rows = head_of(list(self._slots_at[node]))
        pins = f" pinned x{node.lock_ref}" if node.lock_ref else ""
        return f"{head_line(node)} rows={rows}{pins} age={self._clock - use.last_access_time}"

    def pretty_print(self) -> None:
        """Print `pretty_format()`."""
        print(self.pretty_format())

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of the module docstring is broken. O(nodes, and the rows at each)."""
        at: dict[TreeNode, set[int]] = {}
        for slot, row in self._rows.items():
            assert row.slot == slot and row.tail.end, f"rule 1: {row} under {slot}"
            for node in path_up(row.tail):
                at.setdefault(node, set()).add(slot)
            waits = self.allocator is not None and not self.allocator.is_free(slot)
            assert row in self._released or waits or row.is_pinned, f"rule 7 at {row}"
        for top in self._tree.tops.values():
            self._tree.check_structure(top)
        nodes = list(self._tree.nodes())
        assert self._slots_at.keys() == set(nodes), "rule 2: nodes have rows, but are not in the tree, or have no entry"
        assert at.keys() <= set(nodes), "rule 2: a row is recorded at a node that is not in the tree"
        for node in nodes:
            assert self._slots_at[node].keys() == at.get(node, set()), f"rule 2 at {node}"
            assert self._slots_at[node] or node.lock_ref, f"rule 3 at {node}"
            below = sum(child.lock_ref for child in node.children.values())
            assert node.own_locks >= 0 and node.lock_ref == node.own_locks + below, f"rule 4 at {node}"
            assert node in self._leaves or not _may_go(node), f"rule 6 at {node}"
        num_pins, num_tokens = sum(node.own_locks for node in nodes), sum(map(len, nodes))
        assert num_pins == self._num_pins, f"rule 4: {num_pins=}, but {self._num_pins=}"
        assert num_tokens == self._num_tokens <= self.max_capacity, f"rule 5: {num_tokens=}, {self._num_tokens=}"
        num_queued = sum(row in self._released for row in self._rows.values())
        assert len(self._released) == num_queued, f"rule 7: {len(self._released)} are queued, but {num_queued} rows"
        self._leaves.check_invariants()
        self._released.check_invariants()


def _may_go(node: TreeNode) -> bool:
    return not node.children and not node.lock_ref


def _as_key(token_ids: Any) -> RadixKey:
    key = token_ids if isinstance(token_ids, RadixKey) else RadixKey(token_ids)
    if key.arity:
        raise InvalidKeyError(f"token ids must be plain ids, one per position, not tuples of {key.arity}")
    return key
