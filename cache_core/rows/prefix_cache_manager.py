"""`PrefixCacheManager`: which slot holds the KV of which prefix, where a slot is a whole row of positions.

What is valid is a triple: a slot, its version, and how many leading tokens of what was recorded are still there. As a
row holds one sequence at a time, one such triple per slot is all there is to know; a tree over the tokens finds it:

    insert([1, 2, 3, 4], slot=0, slot_ver=1)      namespace None
    insert([1, 2, 5], slot=1, slot_ver=1)           [1 2] len=2 rows=[0 1] age=0
    find([1, 2, 3, 9]) == (3, 0, 1)                   [3] len=1 rows=[0] age=0
                                                        [4] len=1 rows=[0] age=2
                                                      [5] len=1 rows=[1] age=1

Every node along a path records the row, so any prefix of a row is found. A *node* in the sense of the capacity is one
token of such a path, as in a plain trie, whatever runs the tree packs them in: [1 2] above counts 2, the whole 5.

Nothing here awaits: whoever calls from one thread finds each operation atomic, `copy_kv` with its check included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from operator import index
from typing import Any, NamedTuple

from raydix.cache_core.errors import InvalidKeyError, LockError, SlotError, StaleNodeError
from raydix.cache_core.outline import Outline, OutlineLimits, head_of, outline
from raydix.cache_core.radix.format import format_tree, head_line, outline_node
from raydix.cache_core.rows.row_index import RowIndex
from raydix.cache_core.rows.row_tree import Row, RowNode
from raydix.cache_core.rows.slot_allocator import SlotAllocator
from raydix.cache_core.tree.radix_key import RadixKey
from raydix.cache_core.tree.tree_node import TreeNode, Use

__all__ = ["FoundRow", "PrefixCacheManager", "SlotAllocator"]


class FoundRow(NamedTuple):
    """Where the longest valid prefix of a query lies; `(0, -1, 0)` is a miss."""

    prefix_len: int  # positions [0, prefix_len) of the row hold it
    slot: int
    slot_ver: int


MISS = FoundRow(0, -1, 0)


class PrefixCacheManager:
    """Token sequences to slots, with pins and LRU eviction over nodes.

    Token ids are whatever a `RadixKey` takes, or a `RadixKey`, whose `extra_key` isolates namespaces; keys are copied.
    The cache owns no slot: it knows what they hold. Time is a logical clock: equal operations have equal outcomes.

    Args:
        max_capacity: nodes, that is tokens of all paths, a shared prefix counted once.
        allocator: tells the versions of slots: a record whose version is no longer its slot's is never found. Without
            one, who reuses a slot has to say so: by an `insert` with another version, `invalidate` or `forget`.

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
        """Forget everything, pins included."""
        self._index = RowIndex(self.max_capacity, self.allocator)

    # ---------------------------------------------------------------- lookup

    def find(self, token_ids: Any) -> FoundRow:
        """The longest prefix of `token_ids` that some row still holds, and that row: `(prefix_len, slot, slot_ver)`.

        Of several rows the one recorded last; `(0, -1, 0)` if there is none. Takes no reference: the answer is good
        until the row is written to. The prefix and the row become the most recently used; a match that ends inside a
        run splits it. Costs a memcmp and a lookup per run, and a step per row passed over because its version is old.
        """
        found = self._locate(_as_key(token_ids))
        if found is None:
            return MISS
        node, end, row = found
        self._index.touch(node, end)
        row.last_used = self._index.clock
        return FoundRow(end, row.slot, row.version)

    def peek(self, token_ids: Any) -> FoundRow:
        """As `find`, but nothing changes."""
        found = self._locate(_as_key(token_ids))
        return MISS if found is None else FoundRow(found[1], found[2].slot, found[2].version)

    def peek_slots(self, token_ids: Any, limit: int | None = None) -> tuple[int, list[int]]:
        """The length that `find` would return, and the slots that hold that prefix, recorded last first: all of them,
        or so many. O(slots told)."""
        found = self._locate(_as_key(token_ids))
        if found is None:
            return 0, []
        node, end, _ = found
        return end, list(islice(filter(self.slot_is_findable, reversed(node.rows)), limit))

    def _locate(self, key: RadixKey) -> tuple[RowNode, int, Row] | None:
        """Return the deepest node on the path of `key` with a current row, how many tokens match there, and the row."""
        path, end = self._index.tree.walk(key)
        for node in reversed(path):
            for slot in reversed(node.rows):
                if self.slot_is_findable(slot):
                    return node, min(end, node.end), self._index.rows[slot]
        return None

    # ---------------------------------------------------------------- what a slot holds

    def insert(self, token_ids: Any, slot: int, slot_ver: int) -> int:
        """Record that positions [0, n) of `slot` hold the KV of the n tokens; returns how many are recorded.

        Takes no reference and no ownership. What the slot held instead is overwritten, so it is dropped first: records
        of another version, and whatever goes on otherwise after a common prefix. What it holds beyond `token_ids` stays
        recorded. If nodes are short, unpinned leaves go, LRU first, but none of this path: if all others are pinned or
        gone, the leading tokens for which there is room are recorded. An old `slot_ver` records nothing (returns 0).

        Costs a memcmp and a lookup per run, and O(log n) per evicted run.

        Raises:
            SlotError: there is no such slot.
            InvalidKeyError: token ids that no key can hold.
        """
        key = _as_key(token_ids)
        slot, slot_ver = self._check_slot(slot), index(slot_ver)
        if not self._is_current(slot, slot_ver) or not key.num_tokens:
            return 0
        return self._index.write(key, slot, slot_ver)

    def invalidate(self, slot: int, valid_len: int) -> None:
        """Positions from `valid_len` on are about to be overwritten: drop what is recorded there, pinned or not.

        O(runs dropped). A slot without a record is left alone.

        Raises:
            SlotError: there is no such slot, or `valid_len` is negative; nothing changed.
        """
        slot, valid_len = self._check_slot(slot), index(valid_len)
        if valid_len < 0:
            raise SlotError(f"valid_len must not be negative: {valid_len}")
        row = self._index.rows.get(slot)
        if row is not None and valid_len < row.tail.end:
            self._index.shorten(row, valid_len)

    def forget(self, slot: int) -> None:
        """Drop all that is recorded of a slot: `invalidate` from 0 on."""
        self.invalidate(slot, 0)

    # ---------------------------------------------------------------- pins

    def pin(self, token_ids: Any) -> None:
        """Keep the nodes of a prefix, all of which must be findable, from eviction until a `release`.

        A pin keeps nodes, not KV: who overwrites the row says so, and then the prefix is not found any more; its
        release stays valid. O(depth in runs).

        Raises:
            StaleNodeError: no row holds all of `token_ids`; nothing changed.
        """
        node, end, _ = self._locate_all(_as_key(token_ids))
        self._index.tree.pin(self._index.tree.split(node, end))

    def release(self, token_ids: Any) -> None:
        """Undo one `pin` of this very prefix. At zero pins it stays recorded, as evictable as any other.

        O(depth in runs, and the rows that hold the prefix).

        Raises:
            LockError: it has no pin; nothing changed.
        """
        key = _as_key(token_ids)
        path, end = self._index.tree.walk(key)
        if not path or not end == path[-1].end == len(key) or not path[-1].own_locks:
            raise LockError(f"{key} is not pinned")
        node = path[-1]
        self._index.tree.unpin(node)
        for slot in node.rows:
            self._index.released.requeue(self._index.rows[slot])

    def _locate_all(self, key: RadixKey) -> tuple[RowNode, int, Row]:
        found = self._locate(key)
        if found is None or found[1] < len(key):
            raise StaleNodeError(f"no row holds all of {key}: find again")
        return found

    # ---------------------------------------------------------------- eviction

    def evict(self, num_nodes: int) -> int:
        """Give up unpinned leaves, least recently used first, until `num_nodes` nodes have gone; returns how many did.

        A parent becomes a candidate when its last child has gone; rows are shortened accordingly. Always ends: what is
        pinned is passed over. O(log n) per run, and a step per row that ends at it; of the last run only the tail goes.
        """
        return self._index.evict(index(num_nodes), used_before=self._index.clock + 1)

    def evict_lru_slot(self) -> int | None:
        """Give up all that is recorded on one released row: the one inserted or found longest ago; returns its slot.

        Released is what is free in the allocator, or any row without one. Rows with a pin on their path are passed
        over; None if no other is left. The slot stays as free as it was. O(log n), and O(depth in runs) for the row.
        """
        row = self._index.released.pop(self._index.rows)
        if row is None:
            return None
        self._index.shorten(row, 0)
        return row.slot

    # ---------------------------------------------------------------- copying

    def copy_kv(self, token_ids: Any, target_slot: int, kv_cache: tuple[Any, Any], n_layers: int) -> int:
        """Copy the KV of a whole findable prefix into the first positions of another row; returns its length.

        The check and the copy are one step: nothing can overwrite the source in between. What was recorded of the
        target beyond what it shares with `token_ids` is dropped; the copy is not recorded (`insert` does that, once the
        target is to be found). A target that holds the prefix already is left as it is. One assignment per tensor; the
        prefix and the row it came from become the most recently used.

        Args:
            kv_cache: `(k_cache, v_cache)`, tensors or numpy arrays, each indexed [slot, position, layer, ...].
            n_layers: layers [0, n_layers) are copied.

        Raises:
            StaleNodeError: no row holds all of `token_ids` any more; nothing was copied or changed.
            SlotError: the tensors lack a slot, position or layer; nothing was copied or changed.
        """
        key = _as_key(token_ids)
        target_slot, n_layers = self._check_slot(target_slot), index(n_layers)
        node, end, source = self._locate_all(key)
        if target_slot in node.rows and self.slot_is_findable(target_slot):
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

    # ---------------------------------------------------------------- slots, sizes, people

    def slot_is_findable(self, slot: int) -> bool:
        """Whether a `find` could return this slot. O(1)."""
        row = self._index.rows.get(slot)
        return row is not None and self._is_current(slot, row.version)

    def recorded_len(self, slot: int) -> int:
        """How many leading tokens of a slot are recorded, current or not; 0 for none. O(1)."""
        return self._index.rows[slot].tail.end if slot in self._index.rows else 0

    def recorded_key(self, slot: int) -> RadixKey | None:
        """The tokens recorded of a slot, current or not. O(their number)."""
        return self._index.rows[slot].tail.prefix() if slot in self._index.rows else None

    def forget_namespaces(self, is_meant: Callable[[str | None], bool]) -> tuple[int, list[int]]:
        """`forget` every slot that holds a sequence of one of these; how many namespaces those are, and the slots."""
        meant = [row for row in self._index.rows.values() if is_meant(row.tail.space.extra_key)]
        namespaces = {row.tail.space.extra_key for row in meant}
        for row in meant:
            self.forget(row.slot)
        return len(namespaces), [row.slot for row in meant]

    def lowest_empty_slot(self) -> int:
        """The lowest free slot of which nothing is recorded; -1 if there is none, or no allocator. O(slots / 1024)."""
        return self._index.released.lowest_empty_slot()

    @property
    def num_nodes(self) -> int:
        """Tokens of all paths, a shared prefix counted once: what `max_capacity` bounds. O(1)."""
        return self._index.tree.num_tokens

    @property
    def num_pins(self) -> int:
        """Pins taken and not given back. O(1)."""
        return self._index.tree.num_pins

    @property
    def num_rows(self) -> int:
        """Slots of which something is recorded. O(1)."""
        return len(self._index.rows)

    def _is_current(self, slot: int, version: int) -> bool:
        return self.allocator is None or self.allocator.version(slot) == version

    def _check_slot(self, slot: int) -> int:
        """The slot, as a plain int, if there is such a slot."""
        if self.allocator is not None:
            return self.allocator.check_range(slot)
        slot = index(slot)
        if slot < 0:
            raise SlotError(f"slot {slot} is negative")
        return slot

    def outline(self, limits: OutlineLimits) -> Outline:
        """The largest branches, stale versions included. Bounded work."""
        tops = self._index.tree.tops
        nodes = outline(((top.space.extra_key, top) for top in tops), outline_node, limits)
        return Outline(nodes, self._index.clock, len(tops))

    def pretty_format(self) -> str:
        """One line per run, indented by depth: tokens, length, rows, pins, and age in ticks of the clock."""
        return format_tree(self._index.tree.tops, partial(_row_line, now=self._index.clock))

    def pretty_print(self) -> None:
        """Print `pretty_format()`."""
        print(self.pretty_format())

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of the index, of its tree or of eviction is broken. O(n)."""
        self._index.check()


def _as_key(token_ids: Any) -> RadixKey:
    key = token_ids if isinstance(token_ids, RadixKey) else RadixKey(token_ids)
    if key.arity:
        raise InvalidKeyError("slots hold one position per token: plain ids only, no tuples")
    return key


def _row_line(node: TreeNode, use: Use, now: int) -> str:
    assert isinstance(node, RowNode)
    pins = f" pinned x{node.lock_ref}" if node.lock_ref else ""
    return f"{head_line(node)} rows={head_of(list(node.rows))}{pins} age={now - use.last_access_time}"
