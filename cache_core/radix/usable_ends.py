"""`UsableEnds`: publishes where a match may end in a cache with windows or states, and the pages at strides.

An *end* is a page at which every component lets a match end, whatever the stride. Which of these pages are ends:

1. With states: the pages that hold one. With a window as well: those of them at which the window lets a match end.
2. With a window alone every page of a live run would do, from one window behind the run's beginning on, or from the
   root. So the ends are those among them that

   - end a stride,
   - or are the last pages of a live run: the node has no child, or one without window KV,
   - or are a *stop*: a published prompt or answer ends there, or another request's pages go on there.

    [t8 | l8]         window 4, pages of 2, strides of 4: ends at 12 (a stride) and 16
    [t8 | l2]         none: two live tokens behind a hole are no window
    [l6 | l4, t2]     4 and 8 (strides), 6 (a run ends before the second child), 10

All KV before an end is there. A prompt that continues a published prompt or answer ends its match at an end, or has no
match. The new nodes of a lease are *held*: they get their ends when its whole prompt is published, and when the lease
ends. So pages that are published while a request decodes cost one end, besides those at strides.

The changes of an operation are collected, and `flush` publishes the difference. It costs the changed nodes, the nodes
one window below those that gained or lost window KV, and for each the nodes one window above.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import cast

import numpy as np

from raydix.cache_core.components.component import Component
from raydix.cache_core.components.mamba_tree_node import MambaTreeNode
from raydix.cache_core.components.recurrent_state import RecurrentState
from raydix.cache_core.components.window_kv import WindowKV
from raydix.cache_core.tree.hashing import hash_to_int64
from raydix.cache_core.tree.page_events import NO_IDS, EndEventSink, Hashes, KVEventPublisher, PageRun
from raydix.cache_core.tree.page_hashes import chain_hashes
from raydix.cache_core.tree.tree_node import TreeNode

_end_of = attrgetter("end")
_TO_ROOT = 2**62  # live tokens before a node, if the run begins at the root: more than any window


class UsableEnds(KVEventPublisher):
    """Publishes the pages of a tree at strides, and its ends. A `DataObserver` of the components.

    Args:
        sink: receives the events.
        page_size: tokens of a page.
        stride: pages of a stride.
        window: the window KV of the nodes; None: there is none.
        states: the states of the nodes; None: there are none.
    """

    def __init__(
        self, sink: EndEventSink, page_size: int, stride: int, window: WindowKV | None, states: RecurrentState | None
    ) -> None:
        super().__init__(sink, page_size, stride)
        self._end_sink = sink
        self._stride_pages = stride
        self._window = window
        self._has_states = states is not None
        self._ends: set[int] = set()  # published
        self._stops: set[int] = set()  # pages in the tree; empty in a tree with states
        self._held: set[TreeNode] = set()  # empty without a window
        # The changes of an operation:
        self._leaves: list[TreeNode] = []  # new ones
        self._changed: dict[TreeNode, None] = {}
        self._moved: dict[TreeNode, None] = {}  # nodes that gained or lost window KV
        for component in (window, states):
            if component is not None:
                component.observer = self

    # ---------------------------------------------------------------- changes

    def stored(self, leaf: TreeNode) -> None:
        """Note a new node. Costs SHA-256 of its pages."""
        chain_hashes(leaf, self.page_size)
        self._leaves.append(leaf)
        parent = leaf.parent
        assert parent is not None
        if self._window is None:
            return
        self._held.add(leaf)
        if not parent.data:
            return
        last = self._last_page(parent)
        if parent not in self._held or len(parent.children) > 1:
            self._changed[parent] = None
            if not self._has_states:
                self._stops.add(last)
        elif last in self._ends:  # The live run goes on now.
            self._changed[parent] = None

    def gained(self, component: Component, node: TreeNode) -> None:
        """Note that a node has got or lost window KV or a state."""
        if node.namespace.live:
            (self._moved if component is self._window else self._changed)[node] = None

    lost = gained

    def note_end(self, node: TreeNode, since: int) -> None:
        """Note that a request's prompt or answer ends at a node. Nodes up to token `since` were noted before."""
        if not node.data:
            return
        self._changed[node] = None
        if not self._has_states:
            self._stops.add(self._last_page(node))
        while node.data and node.end > since:
            self._changed[node] = None
            self._held.discard(node)
            assert node.parent is not None
            node = node.parent

    def removed(self, nodes: Iterable[TreeNode]) -> None:
        """Publish that nodes have left the tree, with their ends, unless their namespace is retired."""
        nodes = [node for node in nodes if node.namespace.live]
        gone: list[int] = []
        for node in nodes:
            strides, last = self._pages(node)
            # The reader of an event that a page is gone removes the page's end, too.
            self._ends.difference_update(strides)
            if last in self._ends:
                self._ends.remove(last)
                gone.append(last)
            self._stops.discard(last)
            self._held.discard(node)
            if (parent := node.parent) is not None and parent.data:
                self._changed[parent] = None
        if gone:
            self._end_sink.ends_removed(np.array(gone, np.int64))
        super().removed(nodes)

    def cleared(self) -> None:
        """Publish that no namespace can be matched any more."""
        self._ends.clear()
        self._stops.clear()
        self._held.clear()
        super().cleared()

    # ---------------------------------------------------------------- publishing

    def flush(self) -> None:
        """Publish the new pages of an operation, and the ends that came and went."""
        leaves, self._leaves = self._leaves, []
        changed, self._changed = self._changed, {}
        moved, self._moved = self._moved, {}
        if not (leaves or changed or moved):
            return
        for node in moved:
            changed.update(dict.fromkeys(self._affected_by(node)))
        new = [page for leaf in leaves for page in self._pages(leaf)[0]]
        added, gone = self._difference(changed)
        if gone:
            self._end_sink.ends_removed(np.array(gone, np.int64))
        if new:
            run = PageRun(np.array(new, np.int64), None, NO_IDS, leaves[0].namespace.extra_key)
            if all(page in added for page in new):
                self._end_sink.stored_as_ends(run)
                for page in new:
                    del added[page]
            else:
                self._end_sink.stored(run)
        if added:
            self._end_sink.ends_stored(np.array(list(added), np.int64))

    def _difference(self, changed: Iterable[TreeNode]) -> tuple[dict[int, None], list[int]]:
        """Return the ends of nodes that are not published yet, and the published pages that are ends no more."""
        added: dict[int, None] = {}
        gone: list[int] = []
        runs: dict[TreeNode, int] = {}
        for node in sorted(changed, key=_end_of):  # A node asks for the run of its parent.
            if node.slots is None or not node.namespace.live or not node.data:
                continue
            strides, last = self._pages(node)
            now = self._ends_of(node, strides, last, runs)
            before = self._ends.intersection((*strides, last))
            gone += before.difference(now)
            added.update(dict.fromkeys([page for page in now if page not in before]))
        self._ends.difference_update(gone)
        self._ends.update(added)
        return added, gone

    def ends(self) -> Hashes:
        """Return the pages that are published as ends, each once."""
        return np.fromiter(self._ends, np.int64, len(self._ends))

    # ---------------------------------------------------------------- where a match may end

    def _affected_by(self, node: TreeNode) -> Iterator[TreeNode]:
        """Yield the nodes with ends that may depend on the window KV of a node: it, its parent, and a window below."""
        assert self._window is not None
        if node.slots is None or not node.namespace.live:
            return
        if node.parent is not None:
            yield node.parent
        stop = node.end + self._window.window
        below = [node]
        while below:
            other = below.pop()
            yield other
            if other.end < stop:
                below += [child for child in other.children.values() if not child.swa_tombstone]

    def _ends_of(self, node: TreeNode, strides: list[int], last: int, runs: dict[TreeNode, int]) -> list[int]:
        """Return the ends among the pages of a node.

        Args:
            strides, last: as `_pages` returns them.
            runs: node -> live tokens up to its end, for the nodes that were asked for before.
        """
        has_state = self._has_states and cast(MambaTreeNode, node).mamba_value is not None
        if self._window is None:
            return [last] if has_state else []
        if node.swa_tombstone or (self._has_states and not has_state):
            return []
        assert node.parent is not None
        start, window = node.parent.end, self._window.window
        before = self._live_up_to(node.parent, runs)
        # The last page of the node counts as soon as its end does.
        is_usable = before + node.end - start >= window
        if self._has_states:
            return [last] if is_usable else []
        stride = self._stride_pages * self.page_size
        first = start - start % stride + stride
        num_short = max(0, -(-(start + window - before - first) // stride))
        found = strides[num_short:]
        if is_usable and node.end % stride and self._is_named(node, last):
            found.append(last)
        return found

    def _is_named(self, node: TreeNode, last: int) -> bool:
        """Return whether the last page of a live node is one of a live run, or a stop."""
        children = node.children
        return not children or last in self._stops or any(child.swa_tombstone for child in children.values())

    def _live_up_to(self, node: TreeNode, runs: dict[TreeNode, int]) -> int:
        """Return the length of the live run that ends with a node, or a length of at least a window."""
        assert self._window is not None
        path: list[TreeNode] = []
        window = self._window.window
        while node.data and not node.swa_tombstone and node not in runs:
            path.append(node)
            assert node.parent is not None
            node = node.parent
            if (length := path[0].end - node.end) >= window:
                runs[path[0]] = length  # The runs of the nodes above it may be longer than what was seen of them.
                return length
        live = runs.get(node, 0) if node.data else _TO_ROOT
        for below in reversed(path):
            live = runs[below] = live + len(below)
        return live

    def _last_page(self, node: TreeNode) -> int:
        return hash_to_int64(chain_hashes(node, self.page_size)[-1])

    def _pages(self, node: TreeNode) -> tuple[list[int], int]:
        """Return the pages of a node that end strides, and its last page."""
        digests = chain_hashes(node, self.page_size)
        stride = self._stride_pages
        first = -(node.end // self.page_size - len(digests) + 1) % stride
        return [hash_to_int64(digest) for digest in digests[first::stride]], hash_to_int64(digests[-1])
