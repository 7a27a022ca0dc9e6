"""What a tree holds and where, from a bounded number of its nodes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from raydix.cache_core.tree_node import TreeNode

_KEPT = 24  # boxes of one; the others are its `num_tokens` alone


@dataclass(slots=True)
class TreeBox:
    """A part of a tree: a run of tokens, and what hangs below it."""

    extra_key: str | None
    own_tokens: int  # of the run that all below share
    num_tokens: float  # with all below; an estimate if not every node was looked at
    num_nodes: float
    used_at: int  # ticks; the latest use seen in it
    num_locks: int
    boxes: list[TreeBox] = field(default_factory=list)  # the largest of those below, largest first


class TreeSample(NamedTuple):
    """What was seen of a tree."""

    boxes: list[TreeBox]  # of a namespace each, largest first
    num_namespaces: int  # that there are


def sample_tree(tops: Collection[TreeNode], max_nodes: int) -> TreeSample:
    """A box for each namespace, from `max_nodes` nodes and a few more.

    Where a node has more children than it may look at, its first ones stand for all of them. Each namespace takes two
    nodes at least: of more than half of `max_nodes`, every second, third and so on is looked at, and stands for itself.
    """
    step = -(-2 * len(tops) // max_nodes) or 1
    chosen = list(islice(tops, 0, None, step))
    share = max_nodes // max(1, len(chosen))
    return TreeSample(sorted((_sample(top, share) for top in chosen), key=_size, reverse=True), len(tops))


def _sample(node: TreeNode, max_nodes: int) -> TreeBox:
    """Depth of recursion: each branching at least halves `max_nodes`; chains are followed in the loop."""
    box = TreeBox(node.space.extra_key, len(node), len(node), 1, node.own_access_time, node.lock_ref)
    while len(node.children) == 1 and max_nodes > 1:
        (node,) = node.children.values()
        max_nodes -= 1
        box.own_tokens += len(node)
        box.num_nodes += 1
        box.used_at = max(box.used_at, node.own_access_time)
    box.num_tokens = box.own_tokens
    num_looked_at = min(len(node.children), max(1, max_nodes // 2))
    if num_looked_at and max_nodes > 1:
        share = max_nodes // num_looked_at
        boxes = [_sample(child, share) for child in node.children.first(num_looked_at)]
        _add(box, boxes, len(node.children) / num_looked_at)
    return box


def _add(box: TreeBox, boxes: list[TreeBox], scale: float) -> None:
    """Put boxes into one; each of them stands for `scale` like it."""
    boxes.sort(key=_size, reverse=True)
    box.num_tokens += scale * sum(map(_size, boxes))
    box.num_nodes += scale * sum(each.num_nodes for each in boxes)
    box.used_at = max(box.used_at, *(each.used_at for each in boxes))
    box.boxes = boxes[:_KEPT]


def _size(box: TreeBox) -> float:
    return box.num_tokens
