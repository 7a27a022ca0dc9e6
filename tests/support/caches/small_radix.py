"""Helpers for tests of a small `RadixCache`: a pool that records, keys, and the tree as strings."""

from typing import Any

import torch

from raydix.cache_core import RadixCache, RadixKey, TreeNode


class FreedSlots:
    """A pool that remembers what it was given back, in order."""

    def __init__(self) -> None:
        self.slots: list[int] = []

    def free(self, indices: torch.Tensor) -> None:
        assert indices.dtype == torch.int64
        self.slots += indices.tolist()

    def take(self) -> list[int]:
        """Return the slots freed since the last call."""
        taken, self.slots = self.slots, []
        return taken


def key(*ids: Any, ns: str | None = None) -> RadixKey:
    return RadixKey(list(ids), ns)


def row(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def edges(cache: RadixCache, ns: str | None = None) -> set[str]:
    """Every node as the runs from the root to it: {"1 2", "1 2|3 4"}."""
    return {"|".join(runs(node)) for node in cache.parts.tree.nodes() if node.namespace.extra_key == ns}


def runs(node: TreeNode) -> list[str]:
    path: list[str] = []
    above: TreeNode | None = node
    while above is not None and above.key is not None:
        path.insert(0, " ".join(map(str, above.key)))
        above = above.parent
    return path


def found(cache: RadixCache, *ids: Any, ns: str | None = None) -> list[int]:
    """The slots that a lookup without effects finds."""
    result = cache.peek_prefix(key(*ids, ns=ns))
    assert result.prefix_len == len(result.indices)
    return result.indices.tolist()


def sizes(cache: RadixCache) -> tuple[int, int]:
    """Evictable and protected tokens."""
    assert cache.total_size() == cache.evictable_size() + cache.protected_size()
    return cache.evictable_size(), cache.protected_size()


def lock(cache: RadixCache, *ids: Any, ns: str | None = None) -> TreeNode:
    node: TreeNode = cache.match_prefix(key(*ids, ns=ns)).last_node
    cache.inc_lock_ref(node)
    return node
