"""What a tree holds and where, from a bounded number of its nodes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from raydix.cache_core.outline import SHOWN
from raydix.cache_core.radix.format import first_ids
from raydix.cache_core.tree.tree_node import TreeNode

_KEPT = 24  # boxes of one; the others are its `num_tokens` alone


@dataclass(slots=True)
class TreeBox:
    """A part of a tree: a run of tokens, and what hangs below it."""

    first: TreeNode  # of the run, the first node that holds tokens
    own_tokens: int  # of the run that all below share
    num_tokens: float  # with all below; an estimate if not every node was looked at
    num_nodes: float
    used_at: int  # ticks; the latest use seen in it
    num_locks: int
    num_hits: float  # matches that ended in it, or below
    is_whole: bool = True  # every node was looked at
    boxes: list[TreeBox] = field(default_factory=list)  # the largest of those below, largest first

    @property
    def extra_key(self) -> str | None:
        """The namespace."""
        return self.first.space.extra_key

    @property
    def tokens(self) -> list[int]:
        """The first few token ids of the run; none if all below it share nothing."""
        ids, node = first_ids(self.first), self.first
        while self.own_tokens > len(ids) < SHOWN:
            (node,) = node.children.values()
            ids += first_ids(node)
        return ids[:SHOWN]


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
    box = TreeBox(node, len(node), len(node), 1, node.own_access_time, node.lock_ref, node.own_hits)
    while len(node.children) == 1 and max_nodes > 1:
        (node,) = node.children.values()
        max_nodes -= 1
        box.first = box.first if box.own_tokens else node
        box.own_tokens += len(node)
        box.num_nodes += 1
        box.num_hits += node.own_hits
        box.used_at = max(box.used_at, node.own_access_time)
    box.num_tokens = box.own_tokens
    num_looked_at = min(len(node.children), max(1, max_nodes // 2))
    if num_looked_at and max_nodes > 1:
        share = max_nodes // num_looked_at
        boxes = [_sample(child, share) for child in node.children.first(num_looked_at)]
        _add(box, boxes, len(node.children) / num_looked_at)
    else:
        box.is_whole = not node.children
    return box


def _add(box: TreeBox, boxes: list[TreeBox], scale: float) -> None:
    """Put boxes into one; each of them stands for `scale` like it."""
    boxes.sort(key=_size, reverse=True)
    box.is_whole = scale == 1 and all(each.is_whole for each in boxes)
    box.num_tokens += scale * sum(map(_size, boxes))
    box.num_nodes += scale * sum(each.num_nodes for each in boxes)
    box.num_hits += scale * sum(each.num_hits for each in boxes)
    box.used_at = max(box.used_at, *(each.used_at for each in boxes))
    box.boxes = boxes[:_KEPT]


def _size(box: TreeBox) -> float:
    return box.num_tokens
