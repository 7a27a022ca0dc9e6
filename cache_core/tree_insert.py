"""`TreeInsert`: how the radix caches take in new prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from raydix.cache_core.base_prefix_cache import NO_SLOTS, InsertResult, PageInsert, Starts, insert_result
from raydix.cache_core.errors import InvalidKeyError, StaleNodeError
from raydix.cache_core.kernels import compact, is_row, leads_to, walk
from raydix.cache_core.kv_events import KVEventTeller
from raydix.cache_core.radix_key import RadixKey
from raydix.cache_core.radix_tree import check_same_space
from raydix.cache_core.slot_rows import Row, as_slots, join_rows
from raydix.cache_core.tree_match import TreeMatch
from raydix.cache_core.tree_node import TreeNode, rows_of, slots_on

# The tree's own row of incoming slots, from and up to a token: what they come in, the page size, and the two.
Take = Callable[[Any, int, int, int], Row]
# What an insert found and made: the leading tokens that were in the tree before, those before the node it resumed at,
# the nodes in between, and where the key ends.
Inserted = tuple[int, int, list[TreeNode], TreeNode]


class TreeInsert(TreeMatch):
    """A radix tree with the full KV on its nodes, and what `aux` components add to them: the half that adds to it."""

    _events: KVEventTeller | None = None

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
        aligned = key.num_tokens - key.num_tokens % page
        slots = value if is_row(value, aligned) else as_slots(key, value, aligned)
        if not aligned:
            if from_node is not None and from_node is not self.root:
                self._check_live(from_node)
                check_same_space(key, from_node)
            return InsertResult(0, self.root)

        done = self._insert(key, from_node, slots, compact, prev_prefix_len, fresh_from, priority)
        prefix_len, resumed_at, _, last_node = done
        if prefix_len > resumed_at and prefix_len > prev_prefix_len:
            return insert_result(prefix_len, last_node, False, self._duplicates(slots, prev_prefix_len, done))
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
        fresh_from, pages = self._aligned(swa_evicted_seqlen), (starts, from_node.end)
        prefix_len, _, path, last_node = self._insert(key, from_node, pages, _take_pages, None, fresh_from, priority)
        return PageInsert(prefix_len, last_node.end, last_node, join_rows(rows_of(path)))

    def _aligned(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size

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
        if node is None or node is self.root:
            node, key = tree.make_space(key, self._clock)
        else:
            key = self._resumed(key, node, prev_prefix_len is None)
        path, end = walk(node, key, self.page_size, key.num_tokens)
        if prev_prefix_len and not 0 <= prev_prefix_len <= end:
            raise InvalidKeyError(f"prev_prefix_len is {prev_prefix_len}, but {end} tokens are in the tree")
        resumed_at, num_tokens = node.end, key.num_tokens - key.num_tokens % self.page_size
        last_node = path[-1] if path else node
        if last_node.end > end:
            last_node = path[-1] = self._split(last_node, end)
        self._clock += 1
        if self._aux:
            path = self._absorb(path, max(self._aligned(prev_prefix_len or 0), resumed_at, fresh_from), incoming, take)
        if end == num_tokens:
            self._use(last_node, priority)
        elif self._aux:
            last_node = self._add_cut(last_node, key, self._cuts(end, num_tokens, fresh_from), incoming, take, priority)
        else:
            last_node = self._add(last_node, key, num_tokens, take(incoming, self.page_size, end, num_tokens), priority)
        return end, resumed_at, path, last_node

    def _add(self, parent: TreeNode, key: RadixKey, stop: int, row: Row, priority: int, live: bool = True) -> TreeNode:
        """Hang the tokens of `key` up to `stop` below `parent`: a new, unlocked leaf, used now."""
        leaf = self._tree.add_leaf(parent, key, stop, row, self._clock, priority)
        self._full.add(leaf)
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

    def _cuts(self, start: int, stop: int, fresh_from: int) -> Sequence[tuple[int, int, bool]]:
        """The new nodes over [start, stop), which is not empty: from, to, and whether they have all their KV."""
        return ((start, stop, True),)

    def _check_live(self, node: TreeNode) -> None:
        if node.slots is None or node.space.tree is not self._tree:
            raise StaleNodeError(f"{node} is no longer in the tree: match again")

    def _resumed(self, key: RadixKey, node: TreeNode, is_trusted: bool) -> RadixKey:
        """The key at the width of the namespace that it goes on in from `node`, which must lie on its path, as far as
        it is not trusted to.
        """
        if node.slots is None or node.space.tree is not self._tree:  # a call more would cost as much as the check
            self._check_live(node)
        check_same_space(key, node)
        if key.width != node.space.width:
            key = self._tree.make_space(key, self._clock)[1]
        if not is_trusted and not leads_to(key, node):
            raise InvalidKeyError(f"{node} holds other tokens than the key has there: match the key first")
        return key

    def _duplicates(self, slots: torch.Tensor, start: int, inserted: Inserted) -> torch.Tensor:
        """The incoming slots from `start` on that are not those of the tree at the same place."""
        prefix_len, resumed_at, path, _ = inserted
        start = max(start, resumed_at)
        incoming = slots[start:prefix_len].numpy()
        held = slots_on(path, prefix_len - resumed_at, self.page_size).numpy()
        return torch.from_numpy(incoming[incoming != held[start - resumed_at :]])


def _take_pages(pages: tuple[Starts, int], page_size: int, start: int, stop: int) -> Row:
    """Of the first slots of pages, the first of them at a token, those from one to another."""
    starts, first = pages
    return starts[(start - first) // page_size : (stop - first) // page_size].tobytes()
