"""How a prefix cache takes in new prefixes: `insert_slots`, with one slot per token, and `insert_pages`.

The caller frees what tombstones held before they healed, by `WindowKV.release_replaced`, as the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from typing import Any

import torch

from raydix.cache_core.base_prefix_cache import NO_SLOTS, InsertResult, PageInsert, Starts
from raydix.cache_core.errors import InvalidKeyError
from raydix.cache_core.kernels import gather, is_on_path, is_row, pack_slots, walk
from raydix.cache_core.radix.tree_parts import TreeParts
from raydix.cache_core.tree.packed_slots import Row, as_slots
from raydix.cache_core.tree.radix_key import RadixKey, check_key
from raydix.cache_core.tree.tree_node import TreeNode, check_node, join_slots_of

# Packs incoming slots from one token to another into a row of the tree's own. Takes the incoming slots, the page size,
# and the two tokens.
Take = Callable[[Any, int, int, int], Row]


def insert_slots(
    parts: TreeParts,
    key: RadixKey,
    value: torch.Tensor | None,
    prev_prefix_len: int,
    swa_evicted_seqlen: int,
    from_node: TreeNode | None,
    priority: int,
) -> InsertResult:
    """Insert the whole pages of a key, with one slot per token in `value`: see `RadixCache.insert`."""
    page = parts.page_size
    fresh_from = _padded(swa_evicted_seqlen, page) if swa_evicted_seqlen else 0
    if prev_prefix_len != 0:  # None, too: `_insert` would take it for the caller's word
        prev_prefix_len = index(prev_prefix_len)
    try:
        aligned = key.num_tokens - key.num_tokens % page
    except AttributeError:
        check_key(key)
        raise
    slots = value if is_row(value, aligned) else as_slots(key, value, aligned)
    root = parts.tree.root
    if not aligned:
        if prev_prefix_len:
            raise _beyond(prev_prefix_len, 0)
        if from_node is not None and from_node is not root:
            resumed_key(parts, key, from_node, False)
        return InsertResult(0, root)

    prefix_len, found, last_node = _insert(
        parts, key, from_node, slots, pack_slots, prev_prefix_len, fresh_from, priority
    )
    if parts.window is not None:
        parts.window.touch(last_node, parts.clock)
        if parts.events is not None:
            parts.events.note_end(last_node, prefix_len)
    if found and prefix_len > prev_prefix_len:
        return InsertResult(prefix_len, last_node, False, duplicates(parts, slots, prev_prefix_len, prefix_len, found))
    return InsertResult(prefix_len, last_node, False, NO_SLOTS)


def insert_pages(
    parts: TreeParts, key: RadixKey, starts: Starts, from_node: TreeNode, swa_evicted_seqlen: int, priority: int
) -> PageInsert:
    """Insert the whole pages of a key, resumed at `from_node`: see `PrefixCache.insert_pages`."""
    if key.num_tokens < parts.page_size:
        return PageInsert(0, 0, parts.tree.root, starts[:0])
    fresh_from = _padded(swa_evicted_seqlen, parts.page_size)
    try:
        pages = starts, from_node.end
        prefix_len, path, last_node = _insert(parts, key, from_node, pages, _take_pages, None, fresh_from, priority)
        return PageInsert(prefix_len, last_node.end, last_node, join_slots_of(path))
    except AttributeError:
        check_node(from_node)
        raise


def _insert(
    parts: TreeParts,
    key: RadixKey,
    from_node: TreeNode | None,
    incoming: Any,
    take: Take,
    prev_prefix_len: int | None,
    fresh_from: int,
    priority: int,
) -> tuple[int, list[TreeNode], TreeNode]:
    """Insert the whole pages of `key`, of which there is at least one.

    Args:
        incoming: the incoming slots, as `take` takes them.
        take: packs incoming slots into a row of the tree's own.
        prev_prefix_len: leading tokens with slots that are the tree's own, checked; None: the tokens before
            `from_node`, not checked.
        fresh_from: incoming slots before this token have full KV only.

    Returns:
        The leading tokens that were in the tree before, the nodes that hold them below `from_node`, and the last node.
    """
    tree, node = parts.tree, from_node
    if priority:
        priority = index(priority)
    if node is None or node is tree.root:
        node, key = tree.ensure_namespace(key, parts.clock)
    else:
        key = resumed_key(parts, key, node, prev_prefix_len is None)
    path, end, rest = walk(node, key, parts.page_size, key.num_tokens)
    if prev_prefix_len and not 0 <= prev_prefix_len <= end:
        raise _beyond(prev_prefix_len, end)
    num_tokens = key.num_tokens - key.num_tokens % parts.page_size
    last_node = path[-1] if path else node
    if rest:
        last_node = path[-1] = parts.split(last_node, end)
    parts.clock += 1
    if parts.window is not None:
        fresh = max(_padded(prev_prefix_len or 0, parts.page_size), node.end, fresh_from)
        path = parts.window.absorb(path, fresh, partial(take, incoming, parts.page_size), parts.split)
    if end == num_tokens:
        parts.full.use(last_node, parts.clock, 0, priority)
    else:
        spans: Sequence[tuple[int, int, bool]] = ((end, num_tokens, True),)
        if parts.window is not None:
            spans = parts.window.split_spans(end, num_tokens, fresh_from)
        protected_until = 0
        if parts.two_queues is not None:
            protected_until = parts.two_queues.recall(last_node, key, num_tokens)
            if protected_until > end:
                spans = parts.two_queues.cut(spans, protected_until)
        for start, stop, live in spans:
            row = take(incoming, parts.page_size, start, stop)
            last_node = _add_leaf(parts, last_node, key, stop, row, priority, live, stop <= protected_until)
    if parts.states is not None:
        parts.states.touch(last_node, parts.clock)
    return end, path, last_node


def _add_leaf(
    parts: TreeParts,
    parent: TreeNode,
    key: RadixKey,
    stop: int,
    row: Row,
    priority: int,
    live: bool,
    is_protected: bool,
) -> TreeNode:
    """Add the tokens of `key` up to `stop` below `parent`: a new, unlocked leaf, used now."""
    leaf = parts.tree.add_leaf(parent, key, stop, row, parts.clock, priority)
    if is_protected:
        assert parts.two_queues is not None, "there is one queue"
        parts.two_queues.protect(leaf)
    parts.full.add(leaf)
    for component in parts.components:
        component.add(leaf, live)
    if parts.events is not None:
        parts.events.stored(leaf)
    return leaf


def resumed_key(parts: TreeParts, key: RadixKey, node: TreeNode, is_trusted: bool) -> RadixKey:
    """Return the key at the width of the namespace of `node`, which must lie on its path; compared unless trusted.

    Raises:
        InvalidKeyError: the node does not end a prefix of the key.
        StaleNodeError: the node cannot be matched any more.
    """
    try:
        namespace = node.namespace
    except AttributeError:
        check_node(node)
        raise
    if node.slots is None or namespace.tree is not parts.tree:  # a call more would cost as much as the check
        parts.check_live(node)
    if namespace.extra_key != key.extra_key or namespace.arity != key.arity:
        raise _off_path(key, node)
    there = key if key.width == namespace.width else key[: key.num_narrow()].with_width(namespace.width)
    if node.end > there.num_tokens if is_trusted else not is_on_path(there, node):
        raise _off_path(key, node)
    return key if there is key else parts.tree.ensure_namespace(key, parts.clock)[1]


def duplicates(parts: TreeParts, slots: torch.Tensor, start: int, stop: int, found: list[TreeNode]) -> torch.Tensor:
    """Return the incoming slots in [start, stop) that differ from the tree's at the same place.

    Args:
        found: the nodes up to `stop`; the slots before them are the tree's own.
    """
    held = gather(found, parts.page_size).numpy()
    start = max(start, stop - held.size)
    incoming = slots[start:stop].numpy()
    return torch.from_numpy(incoming[incoming != held[start - stop :]])


def _padded(num_tokens: int, page_size: int) -> int:
    return -(-index(num_tokens) // page_size) * page_size


def _beyond(prev_prefix_len: int, end: int) -> InvalidKeyError:
    return InvalidKeyError(f"prev_prefix_len is {prev_prefix_len}, but {end} tokens are in the tree")


def _off_path(key: RadixKey, node: TreeNode) -> InvalidKeyError:
    namespace = repr(node.namespace.extra_key)
    return InvalidKeyError(f"{node} of namespace {namespace} does not end a prefix of {key}: match it first")


def _take_pages(pages: tuple[Starts, int], page_size: int, start: int, stop: int) -> Row:
    """Pack the first slots of pages, given with the token of the first page, from one token to another."""
    starts, first = pages
    return starts[(start - first) // page_size : (stop - first) // page_size].tobytes()
