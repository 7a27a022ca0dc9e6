"""Events of a tree's pages: stored, removed, all cleared.

A page is named by the first 64 bits, signed, of its chained hash: it stands for every token up to the page's end, and
for the namespace. Nodes are hashed as they are inserted. Their parents have hashes by then, so an insert costs SHA-256
of the new pages alone. Splits publish nothing, as the pages stay the same.

With a stride s, only every s-th page of a path is published, without token ids: its end is at a multiple of s pages.

These events are about full KV. For a cache with windows or states, `radix.group_events` also publishes their places,
and `radix.usable_ends` publishes, with a stride, where a match may end.

A reader that applies the events to an empty set of hashes has exactly the pages that can be matched. So has a reader
that begins with the pages of `PrefixCache.resident_pages` and applies all later events.
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
NO_IDS = np.empty(0, np.uint32)


class PageRun(NamedTuple):
    """Pages of one namespace that follow one another."""

    hashes: Hashes
    parent_hash: int | None  # hash of the page before the first one; None: none is before it, or with a stride
    token_ids: NDArray[Any]  # uint32 or uint64, one per token: of tuples the first id; none with a stride
    extra_key: str | None  # the namespace
    group: int | None = None  # the kind of data, of a cache with several; None: full KV, and there is no other kind


class KVEventSink(Protocol):
    """A receiver of events. The tree calls it within its operations: it must return soon, and must not use the tree."""

    def stored(self, run: PageRun) -> None:
        """The pages of the run can be matched from now on."""

    def removed(self, hashes: Hashes, group: int | None = None) -> None:
        """Pages of one namespace are gone, of full KV children before parents. `group` is as in `PageRun`."""

    def cleared(self) -> None:
        """Every page of every namespace is gone."""


class EndEventSink(KVEventSink, Protocol):
    """A receiver of the ends of matches. An end goes with its page: `removed` removes both."""

    def stored_as_ends(self, run: PageRun) -> None:
        """The pages of the run are stored, and a match may end at each."""

    def ends_stored(self, hashes: Hashes) -> None:
        """A match may end at these pages from now on."""

    def ends_removed(self, hashes: Hashes) -> None:
        """No match may end at these pages any more."""


class SlimEventSink(EndEventSink, Protocol):
    """A receiver of slim events."""

    def pending(self, hashes: Hashes) -> None:
        """A lease began that will publish the pages, unless it ends first."""

    def not_pending(self, hashes: Hashes) -> None:
        """No open lease will publish the pages any more."""


class KVEventPublisher:
    """Publishes the nodes of a tree to a sink, in pages.

    Args:
        sink: receives the events.
        page_size: tokens of a page.
        stride: publish every `stride`-th page alone, without token ids; None: all pages, with theirs.

    Attributes:
        sink, page_size, stride: as given.
    """

    def __init__(self, sink: KVEventSink, page_size: int, stride: int | None = None) -> None:
        self.sink = sink
        self.page_size = page_size
        self.stride = stride

    def stored(self, leaf: TreeNode) -> None:
        """Publish a new node. Costs SHA-256 of its pages."""
        for run in self.runs(leaf):
            self.sink.stored(run)

    def runs(self, node: TreeNode) -> list[PageRun]:
        """Return the runs of a node's pages that are published."""
        run = self.run(node)
        return [] if run is None else [run]

    def run(self, node: TreeNode) -> PageRun | None:
        """Return the pages of a node that are published; None if there are none."""
        if self.stride is None:
            return page_run(node, self.page_size)
        run = strided_run(node, self.page_size, self.stride)
        return run if len(run.hashes) else None

    def removed(self, nodes: Iterable[TreeNode]) -> None:
        """Publish that nodes have left the tree, unless their namespace is retired: that was published already."""
        for namespace, group in groupby(nodes, key=lambda node: node.namespace):
            if namespace.live:
                rows = [self._hashes(node) for node in group]
                if self.stride is None or any(map(len, rows)):
                    self.remove(np.concatenate(rows))

    def remove(self, hashes: Hashes) -> None:
        """Publish that full KV is gone."""
        self.sink.removed(hashes)

    def _hashes(self, node: TreeNode) -> Hashes:
        """Return the hashes of a node's published pages, the last one first."""
        if self.stride is None:
            return short_hashes(chain_hashes(node, self.page_size)[::-1])
        return strided_run(node, self.page_size, self.stride).hashes[::-1]

    def retired(self, nodes: Iterable[TreeNode]) -> None:
        """Publish that nodes cannot be matched any more, children before parents; they are in the tree still."""
        self.removed(nodes)

    def cleared(self) -> None:
        """Publish that no namespace can be matched any more."""
        self.sink.cleared()

    def note_end(self, node: TreeNode, since: int) -> None:
        """Note that a request's prompt or answer ends at a node. Nodes up to token `since` were noted before."""

    def flush(self) -> None:
        """Publish the changes by one operation that are not published yet."""

    def ends(self) -> Hashes | None:
        """Return the pages that are published as ends, each once; None: this publisher publishes no ends."""
        return None


def page_run(node: TreeNode, page_size: int) -> PageRun:
    """Return the pages of a node. Computes its hashes, and its ancestors' hashes, if they are missing."""
    hashes = short_hashes(chain_hashes(node, page_size))
    parent, namespace = node.parent, node.namespace
    assert parent is not None
    parent_hash = int(short_hashes(chain_hashes(parent, page_size)[-1:])[0]) if parent.data else None
    ids = np.frombuffer(node.data, f"<u{namespace.width}")
    return PageRun(hashes, parent_hash, ids[:: namespace.arity or 1], namespace.extra_key)


def strided_run(node: TreeNode, page_size: int, stride: int) -> PageRun:
    """Return the pages of a node that end at multiples of `stride` pages, without token ids."""
    digests = chain_hashes(node, page_size)
    num_before = node.end // page_size - len(digests)
    return PageRun(short_hashes(digests[-(num_before + 1) % stride :: stride]), None, NO_IDS, node.namespace.extra_key)


def short_hashes(digests: list[str]) -> Hashes:
    """Return `hash_to_int64` of each hex digest."""
    return np.frombuffer(bytes.fromhex("".join([digest[:16] for digest in digests])), ">i8").astype(np.int64)
