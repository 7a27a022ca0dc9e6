"""A tree in outline, for people: its largest branches, found in bounded work however large the tree is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

_MAX_SEEN = 4096  # nodes: a few milliseconds
_MAX_CHILDREN_SEEN = 256  # of one node, the latest: the rest of the work is for what is below them
SHOWN = 8  # tokens told of a node


def head_of(items: Sequence[object]) -> str:
    """The first few of a row, for people."""
    shown = " ".join(map(str, items[:SHOWN]))
    return f"[{shown}{' ...' if len(items) > SHOWN else ''}]"


class OutlineLimits(NamedTuple):
    """How much of a tree is told."""

    max_nodes: int
    max_depth: int  # below the namespaces, which are at depth 0
    max_width: int  # children of a node, and namespaces


class Outline(NamedTuple):
    """The largest branches of a tree."""

    nodes: list[OutlineNode]  # parents before children, the largest first
    now: int  # tick
    num_namespaces: int


class NodeFacts(NamedTuple):
    """What one node tells of itself."""

    tokens: list[int]  # the first few
    num_tokens: int
    num_locks: int
    num_hits: int | None  # None: this kind of tree counts none
    last_used: int  # tick


@dataclass(slots=True, eq=False)
class OutlineNode:
    """A node, and what is known of all below it. `is_whole`: everything below it was looked at."""

    node: Any
    facts: NodeFacts
    extra_key: str | None  # its namespace
    parent: OutlineNode | None  # None: this is a namespace
    num_children: int
    is_whole: bool = True
    num_nodes: int = 1  # this one and those below
    tokens_below: int = 0  # its own included
    hits: int = 0
    last_used: int = 0
    children: list[OutlineNode] = field(default_factory=list)  # the largest first, once told


def outline(
    tops: Iterable[tuple[str | None, Any]], look: Callable[[Any], NodeFacts], limits: OutlineLimits
) -> list[OutlineNode]:
    """The namespaces, then their nodes, level by level. Nothing is changed, and at most 4,096 nodes are looked at.

    Args:
        tops: each namespace's `extra_key`, and the node, with `children`, below which its nodes stand.
        look: tells of a node.
    """
    seen = [
        OutlineNode(top, look(top), extra_key, None, len(top.children)) for extra_key, top in islice(tops, _MAX_SEEN)
    ]
    roots = list(seen)
    for above in seen:  # grows as it goes
        room = min(_MAX_CHILDREN_SEEN, _MAX_SEEN - len(seen))
        for child in _newest(above.node.children, max(0, room)):
            seen.append(OutlineNode(child, look(child), above.extra_key, above, len(child.children)))
            above.children.append(seen[-1])
    for each in reversed(seen):  # children before parents
        _sum_up(each)
    return _told(roots, limits)


def _newest(children: Any, limit: int) -> Iterable[Any]:
    """Up to so many children, those that came last before the others. O(limit)."""
    return islice(reversed(children.values()), limit) if isinstance(children, dict) else children.last(limit)


def _sum_up(each: OutlineNode) -> None:
    below, facts = each.children, each.facts
    each.is_whole = len(below) == each.num_children and all(child.is_whole for child in below)
    each.num_nodes = 1 + sum(child.num_nodes for child in below)
    each.tokens_below = facts.num_tokens + sum(child.tokens_below for child in below)
    each.hits = (facts.num_hits or 0) + sum(child.hits for child in below)
    each.last_used = max(facts.last_used, *(child.last_used for child in below), facts.last_used)
    below.sort(key=lambda child: child.tokens_below, reverse=True)


def _told(roots: list[OutlineNode], limits: OutlineLimits) -> list[OutlineNode]:
    """The largest at each place, as the limits have it."""
    roots.sort(key=lambda each: each.tokens_below, reverse=True)
    told: list[OutlineNode] = []
    level = roots[: limits.max_width]
    for _ in range(limits.max_depth + 1):
        level = level[: limits.max_nodes - len(told)]
        told += level
        level = [child for each in level for child in each.children[: limits.max_width]]
    return told
