"""A radix tree as text, for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from raydix.cache_core.components.mamba_tree_node import MambaTreeNode
from raydix.cache_core.outline import SHOWN, NodeFacts, head_of
from raydix.cache_core.tree.radix_key import RadixKey
from raydix.cache_core.tree.tree_node import TreeNode, Use, uses_in


def format_tree(tops: Iterable[TreeNode], now: int) -> Iterator[str]:
    """One line per node, indented by depth.

    Tokens, length, slots, locks (the windows among them), hits, age in ticks of the clock, what it has of its own, id.
    """
    for top in tops:
        yield f"namespace {top.space.extra_key!r}" + (f", tuples of {top.space.arity}" if top.space.arity else "")
        uses = uses_in(top)
        stack = [(child, 1) for child in reversed(top.children.values())]
        while stack:
            node, depth = stack.pop()
            yield "  " * depth + _line(node, uses[node], now)
            stack.extend((child, depth + 1) for child in reversed(node.children.values()))


def first_ids(node: TreeNode) -> list[int]:
    """The first few token ids of a node's run; of tuples, their first ids."""
    if not node.data:
        return []
    space = node.space
    first = RadixKey.from_packed(node.data[: SHOWN * space.unit], space.width, space.extra_key, space.arity)
    return [each[0] if isinstance(each, tuple) else each for each in first.token_ids]


def facts_of(node: TreeNode) -> NodeFacts:
    """What a node tells of itself in an outline."""
    return NodeFacts(first_ids(node), len(node), node.lock_ref, node.own_hits, node.own_access_time)


def _line(node: TreeNode, use: Use, now: int) -> str:
    tokens = node.key.token_ids if node.key is not None else []
    slots = node.value.tolist() if node.value is not None else []
    locks = f" locked x{node.lock_ref}" if node.lock_ref else ""
    window = f" window x{node.swa_lock_ref}" if node.swa_lock_ref else ""
    used = f"hits={use.hit_count} age={now - use.last_access_time}" + (f" priority={use.priority}" * bool(use.priority))
    head = f"{head_of(tokens)} len={len(node)} slots={head_of(slots)}{locks}{window} {used}"
    return f"{head}{''.join(_marks(node))} #{node.id}"


def _marks(node: TreeNode) -> Iterator[str]:
    if node.swa_tombstone:
        yield " tombstone"
    if isinstance(node, MambaTreeNode) and node.mamba_value is not None:
        yield f" state={node.mamba_value}"
