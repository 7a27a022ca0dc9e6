"""`TreeNode`: one edge of the radix tree with its slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import torch

from raydix.cache_core.kernels import Children, Node, join
from raydix.cache_core.tree.packed_slots import Row, Slots, expand_slots
from raydix.cache_core.tree.radix_key import RadixKey


@dataclass(slots=True, eq=False)
class Namespace:
    """The data that all nodes of one namespace share."""

    extra_key: str | None
    arity: int  # ids of one tuple; 0: plain ids
    width: int  # bytes an id; rises from 4 to 8 when the first wide id is inserted
    unit: int  # bytes of one token of a key: `width` times the ids of a tuple
    tree: object | None = None  # the tree in which its nodes can be matched; None once reset or retired
    evictable: int = 0  # tokens of its nodes without locks; counted in a tree that is divided among tenants
    seed: int | None = None  # the seed of its pages' hashes in `TwoQueues`; None until asked for
    home: object | None = field(init=False)  # the tree of its nodes, also when they cannot be matched any more

    def __post_init__(self) -> None:
        self.home = self.tree

    @property
    def live(self) -> bool:
        """Whether its nodes can be matched."""
        return self.tree is not None


class TreeNode(Node):
    """A run of tokens below its parent, whole pages of them, and the slots of their KV.

    `slots` packs the first slot of each page if every page's slots are consecutive, else each token's slot; readers
    use `value`. An evicted node has neither.

    A use is counted where it ends and nowhere above, so that it costs the same at every depth. `own_access_time`,
    `own_hits` and `own_priority` count matches and inserts that ended at this node, or below it at nodes evicted since.
    All uses of a leaf end at it. `last_access_time`, `hit_count` and `priority` include the nodes below: O(n).
    """

    __slots__ = ()

    id: int
    parent: TreeNode | None
    namespace: Namespace
    data: bytes  # packed ids of this run
    slots: Row | None
    end: int  # tokens from the root to the end of this run
    children: Children  # leaves share one object
    lock_ref: int  # locks on this node and below
    own_locks: int  # locks taken on this very node
    own_access_time: int  # ticks of the cache's own clock
    creation_time: int
    own_hits: int  # matches
    own_priority: int  # the highest of the requests
    swa_tombstone: bool  # its sliding-window KV is gone (or never was there)
    swa_stop: bool  # a match or a request has ended here, or the pages of another request go on here
    swa_lock_ref: int  # locks with a window over this node
    swa_boundary_id: int | None  # id of the last lock with a window that begins in this node
    is_protected: bool  # its pages came back while they were remembered; always False in a tree with one queue
    prefix_sum: int  # the sum of `TwoQueues` up to the end of this run; 0 until asked for
    swa_access_time: int  # tick of the last use with this node in its tail; negative: none
    hash_values: list[str] | None  # chained, one per page; None until asked for

    @property
    def key(self) -> RadixKey | None:
        """The tokens of this run; None for a root."""
        if not self.data:
            return None
        return RadixKey.from_packed(self.data, self.namespace.width, self.namespace.extra_key, self.namespace.arity)[:]

    @property
    def value(self) -> torch.Tensor | None:
        """The slots of this run, int64, one per token; None once evicted."""
        return None if self.slots is None else expand_slots(self.slots, len(self))

    @property
    def evicted(self) -> bool:
        """Whether the KV of this node is gone."""
        return self.slots is None

    @property
    def last_access_time(self) -> int:
        """When a match or an insert last went through this node, in ticks of the cache's own clock."""
        return uses_in(self)[self].last_access_time

    @property
    def hit_count(self) -> int:
        """The matches that went through this node."""
        return uses_in(self)[self].hit_count

    @property
    def priority(self) -> int:
        """The highest of the requests that went through this node."""
        return uses_in(self)[self].priority

    def subtree(self) -> Iterator[TreeNode]:
        """This node and all below it, parents before children."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def __lt__(self, other: TreeNode) -> bool:
        return (self.last_access_time, self.end) < (other.last_access_time, other.end)

    def __repr__(self) -> str:
        return f"TreeNode(id={self.id}, len={len(self)}, end={self.end}, lock_ref={self.lock_ref})"


def check_node(node: object) -> None:
    """Raise TypeError unless it is a node of a tree."""
    if not isinstance(node, TreeNode):
        raise TypeError(f"a node is needed, not {type(node).__name__}") from None


_slots_of: Callable[[TreeNode], Row] = attrgetter("slots")


def join_slots_of(nodes: Iterable[TreeNode]) -> Slots:
    """Return the slots of nodes in the tree, one node's after the other's, as a copy."""
    return join(list(map(_slots_of, nodes)))


class NodePath(NamedTuple):
    """The path from the root to a node."""

    key: RadixKey
    starts: Slots  # first slots of its pages; if its pages are not runs of slots, all slots


def nodes_to(node: TreeNode) -> list[TreeNode]:
    """Return the nodes from below the root to `node`, which is the last one."""
    nodes: list[TreeNode] = []
    above: TreeNode | None = node
    while above is not None and above.data:
        nodes.append(above)
        above = above.parent
    nodes.reverse()
    return nodes


class Use(NamedTuple):
    """The uses of a node: matches and inserts that went through it."""

    last_access_time: int
    hit_count: int
    priority: int


def uses_in(top: TreeNode) -> dict[TreeNode, Use]:
    """Return the uses of each node of a subtree. O(n)."""
    uses: dict[TreeNode, Use] = {}
    for node in reversed(list(top.subtree())):  # children before parents
        own = Use(node.own_access_time, node.own_hits, node.own_priority)
        below = [uses[child] for child in node.children.values()]
        times, hits, priorities = zip(own, *below, strict=True)
        uses[node] = Use(max(times), sum(hits), max(priorities))
    return uses
