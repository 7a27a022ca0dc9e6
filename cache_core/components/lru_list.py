"""`LRUList`: an intrusive doubly-linked list of nodes, from the least to the most recently used."""

from __future__ import annotations

from collections.abc import Iterator

from raydix.cache_core.components.mamba_tree_node import MambaTreeNode, sentinel


class LRUList:
    """Nodes in order of use, linked through themselves: every operation but a search is O(1).

    A node stands in one full list (`prev`, `next`) and one Mamba list (`mamba_prev`, `mamba_next`) at most.

    Attributes:
        head: the sentinel on the most recently used side.
        tail: the sentinel on the least recently used side.
    """

    def __init__(self, mamba: bool = False) -> None:
        self._prev, self._next = ("mamba_prev", "mamba_next") if mamba else ("prev", "next")
        self._mamba = mamba
        self.head, self.tail = sentinel(), sentinel()
        self._members: dict[int, MambaTreeNode] = {}
        self._link(self.head, self.tail)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, node: object) -> bool:
        return isinstance(node, MambaTreeNode) and self._members.get(node.id) is node

    def __iter__(self) -> Iterator[MambaTreeNode]:
        """From the least to the most recently used."""
        node = getattr(self.tail, self._prev)
        while node is not self.head:
            yield node
            node = getattr(node, self._prev)

    def insert_mru(self, node: MambaTreeNode) -> None:
        """Add a node as the most recently used.

        Raises:
            ValueError: it stands in the list already.
        """
        if node in self:
            raise ValueError(f"{node} stands in the list already")
        self._members[node.id] = node
        first = getattr(self.head, self._next)
        self._link(self.head, node)
        self._link(node, first)

    def remove(self, node: MambaTreeNode) -> None:
        """Take a node out.

        Raises:
            ValueError: it does not stand in the list.
        """
        if node not in self:
            raise ValueError(f"{node} does not stand in the list")
        del self._members[node.id]
        self._link(getattr(node, self._prev), getattr(node, self._next))
        setattr(node, self._prev, None)
        setattr(node, self._next, None)

    def touch_mru(self, node: MambaTreeNode) -> None:
        """Make a node of the list the most recently used."""
        self.remove(node)
        self.insert_mru(node)

    def touch_node_and_parents_mru(self, node: MambaTreeNode, root: MambaTreeNode) -> None:
        """Make a node and its ancestors below `root` the most recently used, each child more so than its parent.

        Ancestors that do not stand in the list are passed over.
        """
        path: list[MambaTreeNode] = []
        while node is not root:
            path.append(node)
            assert isinstance(node.parent, MambaTreeNode), f"{root} is not above {path[0]}"
            node = node.parent
        for above in reversed(path):
            if above in self:
                self.touch_mru(above)

    def get_lru_leaf_unlocked(self) -> MambaTreeNode | None:
        """The least recently used node without children and locks; passes over the others. None if there is none."""
        return next((node for node in self if not node.children and not node.lock_ref), None)

    def get_lru_unlocked(self) -> MambaTreeNode | None:
        """The least recently used node without a lock of this list's kind; passes over locked ones."""
        if self._mamba:
            return next((node for node in self if not node.mamba_lock_ref), None)
        return next((node for node in self if not node.full_lock_ref), None)

    def _link(self, newer: MambaTreeNode, older: MambaTreeNode) -> None:
        setattr(newer, self._next, older)
        setattr(older, self._prev, newer)
