"""`TwoQueues`: the candidates of policy "2q": nodes on probation, and protected nodes.

    new ──> probation ── evicted ──> remembered, by a hash: the last pages, 4 times the pool's
                                          │ inserted again: forgotten
                 protected <──────────────┘  with all pages above it
                     └── evicted ──> not remembered

All new pages of an insert are looked up. The last one that is remembered is protected with all above it; those behind
it are on probation. A load from a lower tier inserts pages, and so does a write to one.

Each queue is in the order of last use; a hit moves no node from one to the other. While more than half of the pool is
on probation, the coldest leaf on probation goes next, else the coldest protected leaf. If a queue is empty, the other
one gives the victim. Slots of leases count as on probation, as their pages are published there, and free slots too, as
leases take them: so the protected nodes keep up to half of the pool.

Rules, checked by `check_nodes`:

1. The node above a protected node is protected.
2. `num_protected` is the tokens of all protected nodes, locked and retired ones included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from zlib import crc32

from raydix.cache_core.eviction.queue import EvictionQueue, Rank
from raydix.cache_core.kernels import PageMemory, TwoRankedQueues
from raydix.cache_core.tree.hashing import namespace_seed
from raydix.cache_core.tree.tree_node import Namespace, TreeNode

_MEMORY = 4  # remembered pages, as a multiple of the pool's
_NUM_GENERATIONS = 1024  # counters of retirements; namespaces share them, so that they stay few

# The first token of a new node, the one behind its last, and whether it has window KV.
Span = tuple[int, int, bool]


class TwoQueues(TwoRankedQueues):
    """The candidates for eviction of a tree in two queues, and the memory of the pages evicted from probation.

    `push`, `discard`, `touch`, `pop`, `recall`, `protect` and `removed` are inherited.

    Args:
        rank: the order of each queue.
        page_size: tokens of a page.
        num_slots: of the pool.
    """

    probation: EvictionQueue
    protected: EvictionQueue
    memory: PageMemory

    def __init__(self, rank: Callable[[TreeNode], Rank], page_size: int, num_slots: int) -> None:
        memory = PageMemory(page_size, max(1, _MEMORY * num_slots // page_size))
        super().__init__(EvictionQueue(rank), EvictionQueue(rank), memory, page_size, num_slots)
        self._generations = [0] * _NUM_GENERATIONS

    def cut(self, spans: Sequence[Span], protected_until: int) -> list[Span]:
        """Return the spans of new nodes, cut behind the last page that is protected."""
        parts = []
        for start, stop, live in spans:
            edge = min(max(start, protected_until), stop)
            parts += [part for part in ((start, edge, live), (edge, stop, live)) if part[0] < part[1]]
        return parts

    def retire(self, extra_key: str | None) -> None:
        """Forget the pages of a namespace."""
        self._generations[_place_of(extra_key)] += 1

    def clear(self) -> None:
        """Forget every candidate and every page."""
        self.probation.clear()
        self.protected.clear()
        self.num_protected = 0
        self.memory.clear()

    def _seed_of(self, namespace: Namespace) -> int:
        generation = self._generations[_place_of(namespace.extra_key)]
        digest = namespace_seed(f"{namespace.extra_key!r} {namespace.arity} {generation}")
        assert digest is not None
        namespace.seed = int.from_bytes(digest[:8], "little")
        return namespace.seed

    def __contains__(self, node: TreeNode) -> bool:
        return node in (self.protected if node.is_protected else self.probation)

    # ---------------------------------------------------------------- checks

    def check(self, candidates: set[TreeNode]) -> None:
        """Raise AssertionError unless exactly `candidates` are queued, each in its queue. O(n log n)."""
        self.probation.check({node for node in candidates if not node.is_protected})
        self.protected.check({node for node in candidates if node.is_protected})

    def check_nodes(self, nodes: Iterable[TreeNode]) -> None:
        """Raise AssertionError if a rule of the module docstring is broken. O(n)."""
        num_protected = 0
        for node in nodes:
            parent = node.parent
            assert parent is not None
            assert not node.is_protected or parent.is_protected or not parent.data, f"rule 1 at {node}"
            num_protected += len(node) if node.is_protected else 0
        assert num_protected == self.num_protected, f"rule 2: {num_protected=}, but {self.num_protected=}"


def _place_of(extra_key: str | None) -> int:
    return crc32(repr(extra_key).encode()) % _NUM_GENERATIONS
