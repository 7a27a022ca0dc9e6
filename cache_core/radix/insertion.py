"""`TreeInsert`: how the radix caches take in new prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import torch

from raydix.cache_core.base_prefix_cache import NO_SLOTS, InsertResult, PageInsert, Starts, insert_result
from raydix.cache_core.errors import InvalidKeyError, StaleNodeError
from raydix.cache_core.kernels import Victims, compact, gather, is_row, leads_to, walk
from raydix.cache_core.radix.lookup import TreeMatch
from raydix.cache_core.radix.page_events import KVEventPublisher
from raydix.cache_core.tree.packed_slots import Row, as_slots, join_slots
from raydix.cache_core.tree.radix_key import RadixKey, check_key
from raydix.cache_core.tree.tree_node import TreeNode, check_node, packed_slots_of

# The tree's own row of incoming slots, from and up to a token: what they come in, the page size, and the two.
Take = Callable[[Any, int, int, int], Row]
# What an insert found and made: the leading tokens that were in the tree before, the nodes that hold them below the one
# it resumed at, and where the key ends.
Inserted = tuple[int, list[TreeNode], TreeNode]


class TreeInsert(TreeMatch):
    """A radix tree with the full KV on its nodes, and what `aux` components add to them: the half that adds to it."""

    _events: KVEventPublisher | None = None
    _replaced: Victims | None = None  # what tombstones had that an insert has healed, until it ends

    def _insert_slots(
        self,
        key: RadixKey,
        value: torch.Tensor | None,
        prev_prefix_len: int,
        fresh_from: int,
        from_node: TreeNode | None,
        priority: int,
    ) -> InsertResult:
        """`insert` with one slot per token in `value`."""
        page = self.page_size
        if prev_prefix_len != 0:  # None, too: `_insert` would take it for the caller's word
            prev_prefix_len = index(prev_prefix_len)
        try:
            aligned = key.num_tokens - key.num_tokens % page
        except AttributeError:
            check_key(key)
            raise
        slots = value if is_row(value, aligned) else as_slots(key, value, aligned)
        if not aligned:
            if prev_prefix_len:
                raise _beyond(prev_prefix_len, 0)
            if from_node is not None and from_node is not self.root:
                self._resumed(key, from_node, False)
            return InsertResult(0, self.root)

        prefix_len, found, last_node = self._insert(
            key, from_node, slots, compact, prev_prefix_len, fresh_from, priority
        )
        if found and prefix_len > prev_prefix_len:
            duplicates = self._duplicates(slots, prev_prefix_len, prefix_len, found)
            return insert_result(prefix_len, last_node, False, duplicates)
        return insert_result(prefix_len, last_node, False, NO_SLOTS)

    def insert_pages(
        self, key: RadixKey, starts: Starts, from_node: TreeNode, swa_evicted_seqlen: int = 0, priority: int = 0
    ) -> PageInsert:
        """`insert` in pages: `starts` are those of the key's whole pages beyond `from_node`, adopted as they are.

        The caller answers for `from_node` lying on the key's path. The tree copies what it adopts; those of `starts`
        that differ from `existing`, page by page, stay the caller's to free.
        """
        if key.num_tokens < self.page_size:
            return PageInsert(0, 0, self.root, starts[:0])
        fresh_from = self._aligned(swa_evicted_seqlen)
        try:
            pages = starts, from_node.end
            prefix_len, path, last_node = self._insert(key, from_node, pages, _take_pages, None, fresh_from, priority)
            return PageInsert(prefix_len, last_node.end, last_node, join_slots(packed_slots_of(path)))
        except AttributeError:
            check_node(from_node)
            raise
        finally:
            if self._replaced is not None:
                self._give_back_replaced()

    def _aligned(self, num_tokens: int) -> int:
        return -(-index(num_tokens) // self.page_size) * self.page_size

    def _insert(
        self,
        key: RadixKey,
        from_node: TreeNode | None,
        incoming: Any,
        take: Take,
        prev_prefix_len: int | None,
        fresh_from: int,
        priority: int,
    ) -> Inserted:
        """Insert the whole pages of `key`, of which there is at least one.

        Args:
            incoming: what the slots come in.
            take: how the tree has a row of its own of them.
            prev_prefix_len: leading tokens whose slots are the tree's own, checked; None: those before `from_node`,
                for which the caller answers.
            fresh_from: incoming slots before this token bring full KV only.
        """
        tree, node = self._tree, from_node
        if priority:
            priority = index(priority)
        if node is None or node is self.root:
            node, key = tree.ensure_namespace(key, self._clock)
        else:
            key = self._resumed(key, node, prev_prefix_len is None)
        path, end, rest = walk(node, key, self.page_size, key.num_tokens)
        if prev_prefix_len and not 0 <= prev_prefix_len <= end:
            raise _beyond(prev_prefix_len, end)
        num_tokens = key.num_tokens - key.num_tokens % self.page_size
        last_node = path[-1] if path else node
        if rest:
            last_node = path[-1] = self._split(last_node, end)
        self._clock += 1
        if self._aux:
            path = self._absorb(path, max(self._aligned(prev_prefix_len or 0), node.end, fresh_from), incoming, take)
        if end == num_tokens:
            self._full.use(last_node, self._clock, 0, priority)
            if self._aux:
                self._touch(last_node)
        elif self._aux:
            last_node = self._add_cut(last_node, key, self._cuts(end, num_tokens, fresh_from), incoming, take, priority)
        else:
            last_node = self._add(last_node, key, num_tokens, take(incoming, self.page_size, end, num_tokens), priority)
        return end, path, last_node

    def _add(self, parent: TreeNode, key: RadixKey, stop: int, row: Row, priority: int, live: bool = True) -> TreeNode:
        """Hang the tokens of `key` up to `stop` below `parent`: a new, unlocked leaf, used now."""
        leaf = self._tree.add_leaf(parent, key, stop, row, self._clock, priority)
        self._full.add(leaf)
        if self._aux:
            for component in self._aux:
                component.add(leaf, live)
        if self._events is not None:
            self._events.stored(leaf)
        return leaf

    def _add_cut(
        self,
        node: TreeNode,
        key: RadixKey,
        cuts: Sequence[tuple[int, int, bool]],
        incoming: Any,
        take: Take,
        priority: int,
    ) -> TreeNode:
        """`_add` in several nodes, one below the other; returns the last."""
        for start, stop, live in cuts:
            node = self._add(node, key, stop, take(incoming, self.page_size, start, stop), priority, live)
        self._touch(node)
        return node

    def _absorb(self, path: list[TreeNode], fresh_from: int, incoming: Any, take: Take) -> list[TreeNode]:
        """Let nodes that lack something take it from the incoming slots; returns the path as it is then."""
        return path

    def _give_back_replaced(self) -> None:
        """Hand to the pool what nodes had in place of what they took: the last that an insert does, and does in any
        case, as the pool may have somebody evict or insert meanwhile."""

    def _cuts(self, start: int, stop: int, fresh_from: int) -> Sequence[tuple[int, int, bool]]:
        """The new nodes over [start, stop), which is not empty: from, to, and whether they have all their KV."""
        return ((start, stop, True),)

    def _check_live(self, node: TreeNode) -> None:
        if node.slots is None or node.space.tree is not self._tree:
            raise StaleNodeError(f"{node} is no longer in the tree: match again")

    def _resumed(self, key: RadixKey, node: TreeNode, is_trusted: bool) -> RadixKey:
        """The key at the width of the namespace that it goes on in from `node`, which must lie on its path; what is
        trusted is not compared."""
        try:
            space = node.space
        except AttributeError:
            check_node(node)
            raise
        if node.slots is None or space.tree is not self._tree:  # a call more would cost as much as the check
            self._check_live(node)
        if space.extra_key != key.extra_key or space.arity != key.arity:
            raise _off_path(key, node)
        there = key if key.width == space.width else key[: key.num_narrow()].with_width(space.width)
        if node.end > there.num_tokens if is_trusted else not leads_to(there, node):
            raise _off_path(key, node)
        return key if there is key else self._tree.ensure_namespace(key, self._clock)[1]

    def _duplicates(self, slots: torch.Tensor, start: int, stop: int, found: list[TreeNode]) -> torch.Tensor:
        """The incoming slots in [start, stop) that are not those of the tree at the same place, of nodes up to `stop`;
        before these the slots are the tree's own."""
        held = gather(found, self.page_size).numpy()
        start = max(start, stop - held.size)
        incoming = slots[start:stop].numpy()
        return torch.from_numpy(incoming[incoming != held[start - stop :]])


def _beyond(prev_prefix_len: int, end: int) -> InvalidKeyError:
    """Slots are said to be the tree's own that cannot be."""
    return InvalidKeyError(f"prev_prefix_len is {prev_prefix_len}, but {end} tokens are in the tree")


def _off_path(key: RadixKey, node: TreeNode) -> InvalidKeyError:
    """`node` does not lie on the path of `key`."""
    space = repr(node.space.extra_key)
    return InvalidKeyError(f"{node} of namespace {space} does not end a prefix of {key}: match it first")


def _take_pages(pages: tuple[Starts, int], page_size: int, start: int, stop: int) -> Row:
    """Of the first slots of pages, the first of them at a token, those from one to another."""
    starts, first = pages
    return starts[(start - first) // page_size : (stop - first) // page_size].tobytes()
