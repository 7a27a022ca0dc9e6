"""A radix tree as text, for debugging; and the description of its nodes in an outline."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from raydix.cache_core.components.mamba_tree_node import MambaTreeNode
from raydix.cache_core.outline import SHOWN, OutlineNode, head_of, num_alike, walk_down
from raydix.cache_core.tree.radix_key import RadixKey
from raydix.cache_core.tree.tree_node import TreeNode, Use, uses_in


def format_tree(tops: Iterable[TreeNode], line: Callable[[TreeNode, Use], str]) -> str:
    """Return a line per namespace and a line per node, indented by depth.

    Args:
        tops: the node of each namespace.
        line: describes a node; see `node_line`.
    """
    lines: list[str] = []
    for top in tops:
        namespace = top.namespace
        lines.append(
            f"namespace {namespace.extra_key!r}" + (f", tuples of {namespace.arity}" if namespace.arity else "")
        )
        uses = uses_in(top)
        lines += ["  " * depth + line(node, uses[node]) for depth, node in walk_down(top)]
    return "\n".join(lines)


def head_line(node: TreeNode) -> str:
    """Return the first tokens of a node, and its length."""
    tokens = node.key.token_ids if node.key is not None else []
    return f"{head_of(tokens)} len={len(node)}"


def node_line(node: TreeNode, use: Use, now: int) -> str:
    """Return a node of a radix cache as text.

    Tokens, length, slots, locks (the windows among them), hits, age in ticks of the clock, tombstone, state, id.
    """
    slots = node.value.tolist() if node.value is not None else []
    locks = f" locked x{node.lock_ref}" if node.lock_ref else ""
    window = f" window x{node.swa_lock_ref}" if node.swa_lock_ref else ""
    used = f"hits={use.hit_count} age={now - use.last_access_time}" + (f" priority={use.priority}" * bool(use.priority))
    marks = " tombstone" if node.swa_tombstone else ""
    if isinstance(node, MambaTreeNode) and node.mamba_value is not None:
        marks += f" state={node.mamba_value}"
    return f"{head_line(node)} slots={head_of(slots)}{locks}{window} {used}{marks} #{node.id}"


def first_ids(node: TreeNode, num_skipped: int) -> list[int]:
    """Return the next few token ids of a node after `num_skipped` tokens; of tuples, their first ids."""
    namespace = node.namespace
    start = num_skipped * namespace.unit
    data = (node.data or b"")[start : start + SHOWN * namespace.unit]
    if not data:
        return []
    first = RadixKey.from_packed(data, namespace.width, namespace.extra_key, namespace.arity)
    return [token[0] if isinstance(token, tuple) else token for token in first.token_ids]


def num_alike_tokens(nodes: list[TreeNode]) -> int:
    """Return how many first tokens siblings share; less than a page, or they would be one node."""
    return num_alike([node.data for node in nodes]) // (nodes[0].namespace.unit if nodes else 1)


def outline_node(node: TreeNode) -> OutlineNode:
    """Describe a node in an outline."""
    used_at, extra_key = node.own_access_time, node.namespace.extra_key
    return OutlineNode(node, len(node), node.lock_ref, node.own_hits, used_at, extra_key, first_ids, num_alike_tokens)
