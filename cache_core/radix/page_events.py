"""What a tree tells of its pages: stored, removed, all cleared.

A page is named by the first 64 bits, signed, of its chained hash: it stands for every token up to the page's end, and
for the namespace. Nodes are hashed as they are inserted. Their parents have been hashed by then, so that costs SHA-256
of the new pages alone. A split moves pages from one node to another, so there is nothing to tell of it; nor is there
of window KV and states, for it is the full KV of a page that counts.

Whoever applies the stream to an empty set of hashes, or to that of `PrefixCache.resident_pages` from there on, has
exactly the pages that can be matched.
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
    """Is told in the midst of a tree's operations: it returns at once and leaves the tree alone."""

    def stored(self, run: PageRun) -> None:
        """These pages can be matched from now on."""

    def removed(self, hashes: Hashes) -> None:
        """These pages of one namespace, children before parents, are gone."""

    def cleared(self) -> None:
        """Every page of every namespace is gone."""


class KVEventPublisher:
    """Tells a sink of a tree's nodes, in pages."""

    def __init__(self, sink: KVEventSink, page_size: int) -> None:
        self._sink = sink
        self._page_size = page_size

    def stored(self, leaf: TreeNode) -> None:
        """A new node. Costs SHA-256 of its pages."""
        self._sink.stored(page_run(leaf, self._page_size))

    def removed(self, nodes: Iterable[TreeNode]) -> None:
        """Nodes have left the tree. Those of retired namespaces had been told of when that happened."""
        for space, group in groupby(nodes, key=lambda node: node.space):
            if space.live:
                rows = [short_hashes(chain_hashes(node, self._page_size)[::-1]) for node in group]
                self._sink.removed(np.concatenate(rows))

    def cleared(self) -> None:
        """Every namespace was made unmatchable."""
        self._sink.cleared()


def page_run(node: TreeNode, page_size: int) -> PageRun:
    """The pages of a node; its hashes, and those of its ancestors, are computed if they are not there yet."""
    hashes = short_hashes(chain_hashes(node, page_size))
    parent, space = node.parent, node.space
    assert parent is not None
    parent_hash = int(short_hashes(chain_hashes(parent, page_size)[-1:])[0]) if parent.data else None
    ids = np.frombuffer(node.data, f"<u{space.width}")
    return PageRun(hashes, parent_hash, ids[:: space.arity or 1], space.extra_key)


def short_hashes(digests: list[str]) -> Hashes:
    """`hash_to_int64` of each hex digest, in one go."""
    return np.frombuffer(bytes.fromhex("".join([digest[:16] for digest in digests])), ">i8").astype(np.int64)
