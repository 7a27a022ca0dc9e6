"""How a prefix cache finds the longest usable prefix of a key: `match`, and `peek` without any effect."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from raydix.cache_core.components.component import Component
from raydix.cache_core.explanation import Reason
from raydix.cache_core.kernels import walk, walk_and_split
from raydix.cache_core.radix.tree_parts import TreeParts
from raydix.cache_core.tree.radix_key import RadixKey
from raydix.cache_core.tree.tree_node import TreeNode


def match(
    parts: TreeParts, key: RadixKey, limit: int | None, priority: int
) -> tuple[TreeNode, list[TreeNode], int, int]:
    """Match the first `limit` tokens of a key, and note the use. A match that ends inside a node splits it.

    Returns:
        The node that the usable match ends at (the root on a miss), the nodes of the match, its tokens, and the tokens
        that the full KV alone would match.
    """
    tree = parts.tree
    if priority:
        priority = index(priority)
    top, key = tree.find_namespace(key)
    if top is None:
        return tree.root, [], 0, 0
    num_tokens = key.num_tokens if limit is None else min(index(limit), key.num_tokens)
    if parts.components:
        path, full_end, _ = walk(top, key, parts.page_size, num_tokens)
        path, end = usable(parts, path, full_end)
        if path and path[-1].end > end:
            path[-1] = parts.split(path[-1], end)
    else:
        path, end, _ = walk_and_split(tree.node_type, tree.ids, top, key, parts.page_size, num_tokens)
        full_end = end
    if not path:
        return tree.root, path, 0, full_end
    node = path[-1]
    parts.clock += 1
    parts.full.use(node, parts.clock, 1, priority)
    if parts.components:
        parts.touch(node)
    return node, path, end, full_end


def locate(parts: TreeParts, key: RadixKey, limit: int) -> tuple[TreeNode, list[TreeNode]]:
    """Find the full KV of the first `limit` tokens of a key, usable or not. No use is noted.

    A node that is found in part is split.

    Returns:
        The node at the end (the root if nothing is found), and the nodes up to there.
    """
    top, key = parts.tree.find_namespace(key)
    if top is None:
        return parts.tree.root, []
    path, end, beyond = walk(top, key, parts.page_size, min(limit, key.num_tokens))
    if beyond:
        path[-1] = parts.split(path[-1], end)
    return path[-1] if path else parts.tree.root, path


def peek(parts: TreeParts, key: RadixKey) -> tuple[list[TreeNode], int, int]:
    """Look a key up; nothing changes.

    Returns:
        The nodes of the usable match, the last one matched in part at times; its tokens; and the tokens that the full
        KV alone would match.
    """
    top, key = parts.tree.find_namespace(key)
    if top is None:
        return [], 0, 0
    path, full_end, _ = walk(top, key, parts.page_size, key.num_tokens)
    return *(usable(parts, path, full_end) if parts.components else (path, full_end)), full_end


def goes_on_at(parts: TreeParts, key: RadixKey, stop: int) -> bool:
    """Return whether there is full KV of the first `stop` tokens of a key, and of pages behind. Changes nothing."""
    top, key = parts.tree.find_namespace(key)
    if top is None:
        return False
    path, end, beyond = walk(top, key, parts.page_size, stop)
    return end == stop and bool(path) and (beyond > 0 or len(path[-1].children) > 0)


def usable(
    parts: TreeParts, path: list[TreeNode], end: int, components: Sequence[Component] | None = None
) -> tuple[list[TreeNode], int]:
    """Return a walk's nodes up to where every component, or each of `components`, lets a match end; and that end."""
    asked = parts.components if components is None else components
    count = _num_usable(asked, path, end, len(path))
    return path[:count], min(path[count - 1].end, end) if count else 0


def _num_usable(asked: Sequence[Component], path: list[TreeNode], end: int, count: int) -> int:
    """Return how many of the first `count` nodes of a walk a match may use, and end there."""
    before = -1
    while count != before:  # A match may not be usable in one component at an end that another one accepts.
        before = count
        for component in asked:
            count = component.usable(path, end, count)
    return count


def last_stop(parts: TreeParts, path: list[TreeNode]) -> int:
    """Return how many nodes of a path lie above the end of its last stop at which a match may end. O(its nodes)."""
    count = len(path)
    while count:
        if not parts.is_stop(path[count - 1]):
            count -= 1
        elif (num_usable := _num_usable(parts.components, path, path[-1].end, count)) < count:
            count = num_usable
        else:
            break
    return count


def obstacle(parts: TreeParts, key: RadixKey) -> Reason:
    """Return the reason of the component that alone keeps a match furthest from the end of the full KV."""
    top, key = parts.tree.find_namespace(key)
    assert top is not None, f"nothing of {key} is there"
    path, end, _ = walk(top, key, parts.page_size, key.num_tokens)
    return min(
        (usable(parts, path, end, [component])[1], place, component.reason)
        for place, component in enumerate(parts.components)
    )[2]
