"""`RetiredNodes`: what can no longer be matched, found bit by bit as it is freed."""

from __future__ import annotations

from collections.abc import Iterable

from raydix.cache_core.tree_node import TreeNode


class RetiredNodes:
    """The nodes of retired namespaces.

    Retiring one notes its top and no more: the unlocked leaves below it are looked for when slots are wanted, each node
    once. What is locked then is offered again by whoever unlocks it. The order is no policy's.
    """

    def __init__(self) -> None:
        self._unseen: list[TreeNode] = []  # nodes below which nothing has been looked for yet
        self._leaves: list[TreeNode] = []

    def add(self, top: TreeNode) -> None:
        """A namespace was retired. O(1)."""
        self._unseen.append(top)

    def offer(self, leaf: TreeNode) -> None:
        """A retired node became an unlocked leaf."""
        self._leaves.append(leaf)

    def pop(self) -> TreeNode | None:
        """An unlocked leaf, and no longer here; None if there is none. A step per node, in all."""
        while self._leaves or self._unseen:
            node = self._leaves.pop() if self._leaves else self._unseen.pop()
            if node.children:
                self._unseen.extend(node.children.values())
            elif node.slots is not None and node.data and not node.lock_ref:
                return node
        return None

    def __bool__(self) -> bool:
        """Whether there may be something to pop."""
        return bool(self._leaves or self._unseen)

    def clear(self) -> None:
        """Forget everything."""
        self._unseen.clear()
        self._leaves.clear()

    def known(self) -> Iterable[TreeNode]:
        """Every node that a `pop` may come upon, for checks. O(n)."""
        stack = [*self._unseen, *self._leaves]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
