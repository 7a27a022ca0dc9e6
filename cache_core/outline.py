"""Outlines of a tree, for the CLI and the report: its largest branches, from a bounded number of nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

_MAX_SEEN = 4096  # nodes: a few milliseconds
# The latest children of one node. The limit leaves some of `_MAX_SEEN` for the nodes below them.
_MAX_CHILDREN_SEEN = 256
SHOWN = 8  # token ids per node


def head_of(items: Sequence[object]) -> str:
    """Return the first few items as text."""
    shown = " ".join(map(str, items[:SHOWN]))
    return f"[{shown}{' ...' if len(items) > SHOWN else ''}]"


def num_alike(runs: Sequence[Any]) -> int:
    """Return how many first items several runs share, bytes or ids; 0 if one run begins another."""
    if len(runs) < 2:
        return 0
    low, high = min(runs), max(runs)  # the others lie between them
    pairs = enumerate(zip(low, high, strict=False))
    return next((place for place, (one, other) in pairs if one != other), 0)


def walk_down(top: Any) -> Iterator[tuple[int, Any]]:
    """Yield every node below `top` with its depth, from 1: parents before children, siblings in order of arrival."""
    stack = [(1, child) for child in reversed(top.children.values())]
    while stack:
        depth, node = stack.pop()
        yield depth, node
        stack.extend((depth + 1, child) for child in reversed(node.children.values()))


class OutlineLimits(NamedTuple):
    """The most that `outline` returns."""

    max_nodes: int
    max_depth: int  # namespaces are at depth 0
    max_width: int  # children of a node, and namespaces


class Outline(NamedTuple):
    """The largest branches of a tree."""

    nodes: list[OutlineNode]  # parents before children, the largest first; of a sample, the namespaces only
    now: int  # tick
    num_namespaces: int  # all namespaces in the tree


@dataclass(slots=True, eq=False)
class OutlineNode:
    """A node, and the totals of it and all nodes below it."""

    node: Any  # the tree's node, which has `children`
    own_tokens: int  # tokens in this very node
    num_locks: int
    hits: int  # matches that ended at it or below
    last_used: int  # tick; the latest use of it or a node below
    extra_key: str | None  # its namespace
    first_ids: Callable[[Any, int], list[int]]  # returns `SHOWN` token ids of a node, after so many of its tokens
    num_alike: Callable[[list[Any]], int]  # returns the number of first tokens that sibling nodes share
    parent: OutlineNode | None = None  # None: this is a namespace
    num_children: int = field(init=False)
    children: list[OutlineNode] = field(default_factory=list)  # the children that were visited, the largest first
    is_whole: bool = True  # every node below it was visited
    num_nodes: int = 1
    tokens_below: int = 0  # including its own
    _num_alike_below: int | None = field(default=None, init=False)  # first tokens that its visited children share

    def __post_init__(self) -> None:
        self.num_children = len(self.node.children)

    @property
    def first_tokens(self) -> list[int]:
        """The first few token ids, read from the tree."""
        return self._ids_after(0)

    @property
    def tokens(self) -> list[int]:
        """The first few token ids after the ids that it shares with its siblings, which may begin a page alike."""
        return self._ids_after(0 if self.parent is None else self.parent._alike_below())

    def _ids_after(self, num_skipped: int) -> list[int]:
        ids, node = self.first_ids(self.node, num_skipped), self.node
        while self.own_tokens - num_skipped > len(ids) < SHOWN:  # a chain of nodes
            (node,) = node.children.values()
            ids += self.first_ids(node, 0)
        return ids[:SHOWN]

    def _alike_below(self) -> int:
        if self._num_alike_below is None:
            self._num_alike_below = self.num_alike([child.node for child in self.children])
        return self._num_alike_below


Describe = Callable[[Any], OutlineNode]  # returns a node's own numbers
Choose = Callable[[OutlineNode, int], Iterable[Any]]  # returns the children to visit, given the number of nodes visited


def outline(tops: Collection[Any], describe: Describe, limits: OutlineLimits, now: int) -> Outline:
    """Return the largest namespaces, then their largest nodes, level by level. Visits at most 4,096 nodes.

    Args:
        tops: the topmost node of each namespace.
        describe: returns the `OutlineNode` of a node, with its own numbers only.
        now: the current tick.
    """

    def newest(above: OutlineNode, num_seen: int) -> Iterable[Any]:
        children, limit = above.node.children, max(0, min(_MAX_CHILDREN_SEEN, _MAX_SEEN - num_seen))
        return islice(reversed(children.values()), limit)

    level = _visit(islice(tops, _MAX_SEEN), describe, newest)[: limits.max_width]
    nodes: list[OutlineNode] = []
    for _ in range(limits.max_depth + 1):
        level = level[: limits.max_nodes - len(nodes)]
        nodes += level
        level = [child for node in level for child in node.children[: limits.max_width]]
    return Outline(nodes, now, len(tops))


def sample(tops: Collection[Any], describe: Describe, max_nodes: int, now: int) -> Outline:
    """Estimate how large the branches of a tree are, from about `max_nodes` nodes; a chain of nodes becomes one node.

    If a node has more children than may be visited, its first children stand for all of them. Visits at least two
    nodes per namespace. If that exceeds `max_nodes`, only every k-th namespace is sampled; the others are left out.
    """
    step = -(-2 * len(tops) // max_nodes) or 1
    chosen = list(islice(tops, 0, None, step))
    shares: dict[OutlineNode | None, int] = {None: max_nodes // max(1, len(chosen))}  # nodes for each child of a node

    def oldest(above: OutlineNode, num_seen: int) -> Iterable[Any]:
        share, num_children = shares[above.parent], above.num_children
        count = min(num_children, share // 2)
        shares[above] = share - 1 if num_children == 1 else share // max(1, count)
        return islice(above.node.children.values(), count)

    namespaces = _visit(chosen, describe, oldest, estimate=True)
    _merge_chains(namespaces)
    return Outline(namespaces, now, len(tops))


def _visit(tops: Iterable[Any], describe: Describe, choose: Choose, estimate: bool = False) -> list[OutlineNode]:
    """Describe the namespaces and the chosen nodes, level by level; return the namespaces, the largest first."""
    namespaces = list(map(describe, tops))
    seen = list(namespaces)
    for above in seen:  # the loop appends to it
        for node in choose(above, len(seen)):
            child = describe(node)
            child.parent = above
            above.children.append(child)
            seen.append(child)
    for node in reversed(seen):  # children before parents
        _sum_up(node, estimate)
    return sorted(namespaces, key=_size, reverse=True)


def _sum_up(node: OutlineNode, estimate: bool) -> None:
    """Add the totals of the visited children; in an estimate, the visited ones stand for all children."""
    children = node.children
    factor = node.num_children / len(children) if estimate and children else 1
    node.is_whole = len(children) == node.num_children and all(child.is_whole for child in children)
    node.num_nodes = 1 + round(factor * sum(child.num_nodes for child in children))
    node.tokens_below = node.own_tokens + round(factor * sum(map(_size, children)))
    node.hits += round(factor * sum(child.hits for child in children))
    node.last_used = max([node.last_used, *(child.last_used for child in children)])
    children.sort(key=_size, reverse=True)


def _merge_chains(nodes: list[OutlineNode]) -> None:
    """Merge each node that has one child with that child."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        while node.num_children == 1 and node.children:
            (below,) = node.children
            if not node.own_tokens:
                node.node = below.node
            node.own_tokens += below.own_tokens
            node.num_children, node.children = below.num_children, below.children
        for child in node.children:
            child.parent = node
        stack += node.children


def _size(node: OutlineNode) -> int:
    return node.tokens_below
