"""Events of a tree's pages: stored, removed, all cleared.

A page is named by the first 64 bits, signed, of its chained hash: it stands for every token up to the page's end, and
for the namespace. Nodes are hashed as they are inserted. Their parents have hashes by then, so an insert costs SHA-256
of the new pages alone. Splits publish nothing, as the pages stay the same, and neither do window KV and states: the
full KV of a page counts.

A reader that applies the events to an empty set of hashes, or from then on to those of `PrefixCache.resident_pages`,
has exactly the pages that can be matched.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from raydix.cache_core.tree.page_hashes import chain_hashes
from raydix.cache_core.tree.tree_node import TreeNode

Hashes = NDArray[np.int64]


class PageRun(NamedTuple):
    """Pages of one namespace that follow one another."""

    hashes: Hashes
    parent_hash: int | None  # of the page before the first of these; None: none is before it
    token_ids: NDArray[Any]  # uint32 or uint64, one per token: of tuples the first id
    extra_key: str | None  # the namespace


class KVEventSink(Protocol):
    """A receiver of events. The tree calls it within its operations: it must return soon, and must not use the tree."""

    def stored(self, run: PageRun) -> None:
        """These pages can be matched from now on."""

    def removed(self, hashes: Hashes) -> None:
        """These pages of one namespace, children before parents, are gone."""

    def cleared(self) -> None:
        """Every page of every namespace is gone."""


class KVEventPublisher:
    """Publishes the nodes of a tree to a sink, in pages."""

    def __init__(self, sink: KVEventSink, page_size: int) -> None:
        self._sink = sink
        self._page_size = page_size

    def stored(self, leaf: TreeNode) -> None:
        """Publish a new node. Costs SHA-256 of its pages."""
        self._sink.stored(page_run(leaf, self._page_size))

    def removed(self, nodes: Iterable[TreeNode]) -> None:
        """Publish that nodes have left the tree, but for those of retired namespaces: these are published already."""
        for namespace, group in groupby(nodes, key=lambda node: node.namespace):
            if namespace.live:
                rows = [short_hashes(chain_hashes(node, self._page_size)[::-1]) for node in group]
                self._sink.removed(np.concatenate(rows))

    def cleared(self) -> None:
        """Publish that no namespace can be matched any more."""
        self._sink.cleared()


def page_run(node: TreeNode, page_size: int) -> PageRun:
    """Return the pages of a node. Computes its hashes, and those of its ancestors, if they are missing."""
    hashes = short_hashes(chain_hashes(node, page_size))
    parent, namespace = node.parent, node.namespace
    assert parent is not None
    parent_hash = int(short_hashes(chain_hashes(parent, page_size)[-1:])[0]) if parent.data else None
    ids = np.frombuffer(node.data, f"<u{namespace.width}")
    return PageRun(hashes, parent_hash, ids[:: namespace.arity or 1], namespace.extra_key)


def short_hashes(digests: list[str]) -> Hashes:
    """Return `hash_to_int64` of each hex digest."""
    return np.frombuffer(bytes.fromhex("".join([digest[:16] for digest in digests])), ">i8").astype(np.int64)
