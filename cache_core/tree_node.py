"""`TreeNode`: one edge of the radix tree with its slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raydix.cache_core.radix_key import RadixKey
from raydix.cache_core.slot_rows import Slots, expand_slots


@dataclass(slots=True, eq=False)
class Namespace:
    """What all nodes of one namespace share."""

    extra_key: str | None
    arity: int  # ids of one tuple; 0: plain ids
    width: int  # bytes an id; rises from 4 to 8 when the first wide id is inserted
    unit: int  # bytes of one token of a key: `width` times the ids of a tuple
    live: bool = True  # False once reset or retired: its nodes can no longer be matched


class TreeNode:
    """A run of tokens below its parent, whole pages of them, and the slots of their KV.

    `slots` names the first slot of each page if every page's slots are consecutive, else each token's slot; readers
    use `value`. An evicted node has neither.
    """

    __slots__ = (
        "children",
        "creation_time",
        "data",
        "end",
        "hash_values",
        "hit_count",
        "id",
        "last_access_time",
        "lock_ref",
        "own_locks",
        "parent",
        "priority",
        "slots",
        "space",
        "swa_access_time",
        "swa_boundary_id",
        "swa_lock_ref",
        "swa_tombstone",
    )

    def __init__(
        self,
        node_id: int,
        parent: TreeNode | None,
        space: Namespace,
        data: bytes,
        slots: Slots | None,
        end: int,
        last_access_time: int,
    ) -> None:
        self.id = node_id
        self.parent = parent
        self.space = space
        self.data = data  # packed ids of this run
        self.slots = slots
        self.end = end  # tokens from the root to the end of this run
        self.children: dict[bytes, TreeNode] = {}  # by the packed ids of their first page
        self.lock_ref = 0  # locks on this node and below
        self.own_locks = 0  # of those, the ones taken on this very node
        self.last_access_time = last_access_time  # ticks of the cache's own clock
        self.hit_count = 0  # matches that went through this node
        self.creation_time = last_access_time  # ticks
        self.priority = 0  # the highest of the requests that went through this node
        self.swa_tombstone = False  # its sliding-window KV is gone (or never was there)
        self.swa_lock_ref = 0  # locks whose window reaches over this node
        self.swa_boundary_id: int | None = None  # of the last lock whose window begins in this node
        self.swa_access_time = last_access_time  # when a match last had this node in its window
        self.hash_values: list[str] | None = None  # chained, one per page; None until asked for

    @property
    def key(self) -> RadixKey | None:
        """The tokens of this run; None for a root."""
        if not self.data:
            return None
        return RadixKey.from_packed(self.data, self.space.width, self.space.extra_key, self.space.arity)[:]

    @property
    def value(self) -> torch.Tensor | None:
        """The slots of this run, int64, one per token; None once evicted."""
        if self.slots is None:
            return None
        return torch.from_numpy(expand_slots(self.slots, len(self)))

    @property
    def evicted(self) -> bool:
        """Whether the KV of this node is gone."""
        return self.slots is None

    def __len__(self) -> int:
        return len(self.data) // self.space.unit

    def __lt__(self, other: TreeNode) -> bool:
        return (self.last_access_time, self.end) < (other.last_access_time, other.end)

    def __repr__(self) -> str:
        return f"TreeNode(id={self.id}, len={len(self)}, end={self.end}, lock_ref={self.lock_ref})"
