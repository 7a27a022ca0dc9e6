"""`GroupEvents`: publishes full KV, window KV and states of a tree as groups of blocks, as vLLM does.

Group 0 is the full KV. Window KV is the next group, and states are the last one, as far as there are any. A page is
stored in the group of windows while its window KV is there, and in the group of states if a state follows its last
token. A group's events are independent of the other groups': a page that leaves the tree is removed from each group
that has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import cast

import numpy as np

from raydix.cache_core.components.component import Component
from raydix.cache_core.components.mamba_tree_node import MambaTreeNode
from raydix.cache_core.components.recurrent_state import RecurrentState
from raydix.cache_core.components.window_kv import WindowKV
from raydix.cache_core.tree.page_events import Hashes, KVEventPublisher, KVEventSink, PageRun, page_run, short_hashes
from raydix.cache_core.tree.page_hashes import chain_hashes
from raydix.cache_core.tree.tree_node import Namespace, TreeNode

_FULL = 0


class GroupEvents(KVEventPublisher):
    """Publishes the nodes of a tree, and their window KV and states, in groups.

    Args:
        sink: receives the events.
        page_size: tokens of a page.
        window: the window KV of the nodes; None: there is none.
        states: the states of the nodes; None: there are none.
    """

    def __init__(
        self, sink: KVEventSink, page_size: int, window: WindowKV | None, states: RecurrentState | None
    ) -> None:
        super().__init__(sink, page_size)
        self._window = window
        components: list[Component] = [component for component in (window, states) if component is not None]
        self._groups = {component: place for place, component in enumerate(components, _FULL + 1)}
        self._gone: list[tuple[Namespace, int, Hashes]] = []  # pages that left a group other than that of the full KV
        self._new: list[PageRun] = []  # pages that came to such a group
        for component in components:
            component.observer = self

    def runs(self, node: TreeNode) -> list[PageRun]:
        """Return the pages of a node once for each group that has them."""
        run = page_run(node, self.page_size)._replace(group=_FULL)
        return [run, *(self._run_of(component, run) for component in self._groups if self._has(component, node))]

    def _has(self, component: Component, node: TreeNode) -> bool:
        if component is self._window:
            return not node.swa_tombstone
        return cast(MambaTreeNode, node).mamba_value is not None

    def _run_of(self, component: Component, run: PageRun) -> PageRun:
        """Return the pages of a run that a component's data is at, in its group."""
        if component is not self._window and len(run.hashes) > 1:
            ids = run.token_ids[-self.page_size :]
            run = PageRun(run.hashes[-1:], int(run.hashes[-2]), ids, run.extra_key)
        return run._replace(group=self._groups[component])

    # ---------------------------------------------------------------- changes

    def gained(self, component: Component, node: TreeNode) -> None:
        """Note that a node has got window KV or a state."""
        if node.namespace.live:
            self._new.append(self._run_of(component, page_run(node, self.page_size)))

    def lost(self, component: Component, node: TreeNode) -> None:
        """Note that a node has lost window KV or its state."""
        if node.namespace.live:
            self._gone.append((node.namespace, self._groups[component], self._pages_of(component, node)))

    def _pages_of(self, component: Component, node: TreeNode) -> Hashes:
        """Return the pages of a node that a component's data is at, the last one first."""
        digests = chain_hashes(node, self.page_size)[::-1]
        return short_hashes(digests if component is self._window else digests[:1])

    def removed(self, nodes: Iterable[TreeNode]) -> None:
        """Publish the data that nodes have lost, and the nodes that have left the tree."""
        self.flush()
        super().removed(nodes)

    def remove(self, hashes: Hashes) -> None:
        """Publish that full KV is gone, from its group."""
        self.sink.removed(hashes, _FULL)

    def retired(self, nodes: Iterable[TreeNode]) -> None:
        """Publish that nodes cannot be matched any more, in every group; they are in the tree still."""
        nodes = list(nodes)
        for component, group in self._groups.items():
            for node in nodes:
                if self._has(component, node):
                    self._gone.append((node.namespace, group, self._pages_of(component, node)))
        self.removed(nodes)

    def cleared(self) -> None:
        """Publish that no namespace can be matched any more."""
        self._gone.clear()
        self._new.clear()
        super().cleared()

    def flush(self) -> None:
        """Publish the pages that came to a group and left it in an operation."""
        gone, self._gone = self._gone, []
        new, self._new = self._new, []
        for (_, group), rows in groupby(gone, key=lambda row: (id(row[0]), row[1])):
            self.sink.removed(np.concatenate([hashes for _, _, hashes in rows]), group)
        for run in new:
            self.sink.stored(run)
