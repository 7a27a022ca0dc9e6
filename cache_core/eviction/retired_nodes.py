"""`RetiredNodes`: what can no longer be matched, found bit by bit as it is freed."""

from __future__ import annotations

from collections.abc import Iterable

from raydix.cache_core.tree.tree_node import TreeNode


class RetiredNodes:
    """The nodes of retired namespaces.

    Retiring one notes its top and no more: the unlocked leaves below it are looked for when slots are wanted, each node
    once. What is locked then is offered again by whoever unlocks it. The order is no policy's.

    Attributes:
        pending: where there may be something to pop; empty: there is nothing.
    """

    def __init__(self) -> None:
        self.pending: list[TreeNode] = []  # leaves, or nodes below which nothing has been looked for yet

    def add(self, top: TreeNode) -> None:
        """A namespace was retired. O(1)."""
        self.pending.append(top)

    def offer(self, leaf: TreeNode) -> None:
        """A retired node became an unlocked leaf."""
        self.pending.append(leaf)

    def pop(self) -> TreeNode | None:
        """An unlocked leaf, and no longer here; None if there is none. A step per node, in all."""
        while self.pending:
            node = self.pending.pop()
            if node.children:
                self.pending.extend(node.children.values())
            elif node.slots is not None and node.data and not node.lock_ref:
                return node
        return None

    def clear(self) -> None:
        """Forget everything."""
        self.pending.clear()

    def known(self) -> Iterable[TreeNode]:
        """Every node that a `pop` may come upon, for checks. O(n)."""
        stack = [*self.pending]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
