"""`WindowKV`: sliding-window KV on the nodes of a tree, by tombstones.

A node's sliding-window KV is live, or gone: then the node is a tombstone, and keeps its full KV. A match may end where
the last `window` tokens are all live, or all tokens up to the root. For a window of 4:

    [t4 | l4]        a query of all 8 hits 8: the last four are live
    [t4 | l3]        0: only three are, and the path has a hole
    [l2]             2: no hole up to the root
    [l4 | t2 | l2]   4: the run after the hole is too short

A request ends its match at least one token before its end, so the same prompt again needs the window that ends a page
earlier. So the tail of a prefix is one window in whole pages and one page more; of pages of one token, two more: see
`kept_tail`. A lock holds the tail up to its node, and nothing above. Eviction makes tombstones of nodes that no lock
holds so: first of nodes that were in no tail, then of nodes in the tail that was used least recently. Fresh KV for a
tombstone's tokens heals it.

A node is a *stop* once a match or a request has ended there, or the pages of another request go on there. Requests come
back to stops, so a tier below needs the window KV before these alone.

Rules, checked by `check`:

1. `evictable` is the tokens of live nodes without a window lock, `protected` of live nodes with one.
2. `swa_lock_ref` of a node is at most its `lock_ref`.
3. The live nodes are in the queue, held or not. A held node that an eviction pops moves to the waiting nodes until its
   last window lock is released.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from raydix.cache_core.components.component import Component, assert_queued
from raydix.cache_core.eviction.recency_queue import RecencyQueue
from raydix.cache_core.explanation import Reason
from raydix.cache_core.kernels import Victims
from raydix.cache_core.pool.release import call_pool, page_variant, release_victims
from raydix.cache_core.tree.packed_slots import Row, expand_slots, meet
from raydix.cache_core.tree.tree_node import TreeNode

_BITS_OF_A_DEPTH = 40  # A depth is counted in tokens.
_NEVER = 2**62  # ticks; nodes that were in no tail yet come before all others, the oldest first


def kept_tail(window: int, page_size: int) -> int:
    """Return how many tokens at the end of a prefix keep their window KV: whole pages.

    They are the window, padded to whole pages, and as many pages as hold two tokens. So a match may end there that is
    cut one or two tokens before the end of the prefix.
    """
    return -(-window // page_size) * page_size + max(page_size, 2)


class WindowReceipt:
    """The receipt of a window lock, good for one unlock: where the locked tail begins, in tokens from the root.

    Splits move nodes, not tokens, so a position stays right whatever happens to the nodes.
    """

    __slots__ = ("node", "released", "start", "used")

    def __init__(self, node: TreeNode, start: int) -> None:
        self.node = node  # the locked node
        self.start = start  # tokens above it are not held
        self.released = False  # the window was released early
        self.used = False


class WindowKV(Component):
    """Window locks, tombstones and how they heal, and the eviction order of sliding-window KV. Its unit is a token.

    Attributes:
        window: tokens that a layer attends to. A match needs so many live ones.
        tail: tokens at the end of a prefix that a lock holds and a use refreshes, as `kept_tail` returns them.
        transfer_swa: the pool's `transfer_swa(src, dst)`; None if it has none.

    Args:
        pool: frees slots by `free`, and their window halves by `free_swa`; None drops both.
    """

    reason: Reason = "window"

    def __init__(self, window: int, page_size: int, pool: Any = None) -> None:
        self.window = window
        self.tail = kept_tail(window, page_size)
        self.transfer_swa = getattr(pool, "transfer_swa", None)
        self._page_size = page_size
        self._pool = pool
        self._free_pages = page_variant(pool, "free")
        self._free_swa_pages = page_variant(pool, "free_swa")
        self._dropped = Victims()  # new tombstones: their window halves are not freed yet
        self._replaced = Victims()  # the old slots of healed tombstones, not freed yet
        self._queue = RecencyQueue(_rank)
        self._waiting: set[TreeNode] = set()  # held nodes that an eviction has popped
        self._next_boundary_id = count(1)

    def usable(self, path: Sequence[TreeNode], end: int, count: int) -> int:
        """Look back until a window is full; start again above each hole."""
        live, stop = 0, min(path[count - 1].end, end) if count else 0
        for place in range(count - 1, -1, -1):
            start = path[place - 1].end if place else 0
            if path[place].swa_tombstone:
                count, live = place, 0
            else:
                live += stop - start
                if live >= self.window:
                    break
            stop = start
        return count

    def add(self, leaf: TreeNode, live: bool) -> None:
        """Add a new, unlocked leaf that no tail has had: live, or a tombstone."""
        leaf.swa_tombstone = not live
        leaf.swa_access_time -= _NEVER
        parent = leaf.parent
        assert parent is not None
        if len(parent.children) > 1:
            parent.swa_stop = True
        if live:
            self.evictable += len(leaf)
            self._queue.push(leaf)

    # ---------------------------------------------------------------- inserts

    def split_spans(self, start: int, stop: int, fresh_from: int) -> Sequence[tuple[int, int, bool]]:
        """Return the new nodes over [start, stop), which is not empty: from, to, and whether they are live.

        Tokens without window KV make a tombstone. The tail is a node of its own, so that a lock holds no more.
        """
        if fresh_from <= start and stop - start <= self.tail:
            return ((start, stop, True),)
        edge = min(max(start, fresh_from), stop)
        tail = max(edge, stop - self.tail)
        spans = [(start, edge, False), (edge, tail, True), (tail, stop, True)]
        return [span for span in spans if span[0] < span[1]]

    def absorb(
        self,
        path: list[TreeNode],
        fresh_from: int,
        incoming: Callable[[int, int], Row],
        split: Callable[[TreeNode, int], TreeNode],
    ) -> list[TreeNode]:
        """Heal the tombstones of a path from incoming slots; return the path's nodes after that.

        Args:
            fresh_from: the incoming slots before this token have no window KV.
            incoming: the incoming slots from one token to another.
            split: splits a node at a token, and returns the new node above it.
        """
        healed: list[TreeNode] = []
        for node in path:
            start = max(node.end - len(node), fresh_from)
            if node.swa_tombstone and start < node.end:
                if start > node.end - len(node):
                    healed.append(split(node, start))
                self.heal(node, incoming(start, node.end))
            healed.append(node)
        return healed

    def heal(self, node: TreeNode, fresh: Row) -> None:
        """Give a tombstone the window KV of incoming slots: with the slots, or alone if a lock keeps the node's own.

        Raises:
            SlotError: the pool refused to move the window KV; the node is a tombstone still.
        """
        num_tokens, held = len(node), node.slots
        assert held is not None
        if meet(fresh, held, num_tokens):
            return  # some are the tree's own slots, which have no fresh KV
        if not node.lock_ref:
            self._replaced.add(node, held, num_tokens)
            node.slots = fresh
        elif self.transfer_swa is not None:
            own = expand_slots(held, num_tokens)
            refused = "to move window halves to slots that are in the tree"
            call_pool(self.transfer_swa, expand_slots(fresh, num_tokens), own, refused=refused)
        elif self._pool is not None:
            return
        self.revive(node)

    def release_replaced(self) -> None:
        """Free the old slots of healed tombstones, in one call.

        It is the last step of an insert, as the pool may call back to evict or insert.

        Raises:
            SlotError: the pool refused them; the tree has the fresh slots.
        """
        if not self._replaced.num_tokens:
            return
        replaced, self._replaced = self._replaced, Victims()
        if self._pool is not None:
            release_victims(replaced, self._pool.free, self._free_pages, self._page_size)

    def revive(self, node: TreeNode) -> None:
        """Count a healed tombstone as live. Under a window lock it is held from now on."""
        assert node.swa_tombstone, f"{node} is live"
        node.swa_tombstone = False
        if node.swa_lock_ref:
            self.protected += len(node)
        else:
            self.evictable += len(node)
        self._queue.push(node)
        if self.observer is not None:
            self.observer.gained(self, node)

    def drop(self, node: TreeNode) -> None:
        """Make a tombstone of a live node that no window lock holds."""
        if node.swa_tombstone or node.swa_lock_ref:
            return
        num_tokens = len(node)
        self._queue.discard(node)
        node.swa_tombstone = True
        self.evictable -= num_tokens
        self.num_freed += num_tokens
        self._dropped.add(node, node.slots, num_tokens)
        if self.observer is not None:
            self.observer.lost(self, node)

    def release_dropped(self) -> None:
        """Free the window halves of new tombstones, in one call."""
        if not self._dropped.num_tokens:
            return
        dropped, self._dropped = self._dropped, Victims()
        if self._pool is not None:
            refused = "window halves that were in the tree"
            release_victims(dropped, self._pool.free_swa, self._free_swa_pages, self._page_size, refused)

    # ---------------------------------------------------------------- uses and locks

    def touch(self, end: TreeNode, now: int) -> None:
        """Note the use of the tail up to `end`, which is a stop from now on; nodes above it are not used."""
        end.swa_stop = True
        stop = end.end
        start, node, used, queue = max(0, stop - self.tail), end, list[TreeNode](), self._queue
        while stop > start:
            node.swa_access_time = now
            if node in queue:
                used.append(node)
            parent = node.parent
            assert parent is not None
            node, stop = parent, parent.end
        while used:  # the upper nodes first, in the order of their ranks
            queue.push(used.pop())

    def on_split(self, above: TreeNode, node: TreeNode) -> None:
        """Copy the state of the node to its prefix; the boundary marks the older edge, so it moves up."""
        above.swa_tombstone, above.swa_lock_ref = node.swa_tombstone, node.swa_lock_ref
        above.swa_access_time = node.swa_access_time
        above.swa_boundary_id, node.swa_boundary_id = node.swa_boundary_id, None
        if node in self._waiting:
            self._waiting.add(above)
        elif not above.swa_tombstone:
            self._queue.push(above)

    def on_remove(self, leaf: TreeNode) -> None:
        """Drop the window KV of the leaf."""
        assert not leaf.swa_lock_ref, f"{leaf} is held by a window"
        if not leaf.swa_tombstone:
            self._queue.discard(leaf)
            self.evictable -= len(leaf)
            self.num_freed += len(leaf)
            leaf.swa_tombstone = True
            if self.observer is not None:
                self.observer.lost(self, leaf)

    def lock(self, node: TreeNode) -> WindowReceipt:
        """Lock the tail up to `node`, tombstones counted by position."""
        stop, end, boundary, held = node.end, node, node, 0
        start = max(0, stop - self.tail)
        while stop > start:
            parent, num_locks = node.parent, node.swa_lock_ref
            assert parent is not None
            boundary, node.swa_lock_ref = node, num_locks + 1
            above = parent.end
            if not num_locks and not node.swa_tombstone:
                held += stop - above
            node, stop = parent, above
        self.evictable -= held
        self.protected += held
        if stop:  # the tail begins below the root
            boundary.swa_boundary_id = next(self._next_boundary_id)
        return WindowReceipt(end, stop)

    def hold_from(self, receipt: WindowReceipt, start: int) -> None:
        """Have a lock hold all window KV from token `start` on, if it holds less."""
        node = receipt.node
        while node.end > receipt.start:
            assert node.parent is not None
            node = node.parent
        while node.end > start:
            parent = node.parent
            assert parent is not None
            if not node.swa_lock_ref and not node.swa_tombstone:
                self.evictable -= len(node)
                self.protected += len(node)
            node.swa_lock_ref += 1
            node = parent
        receipt.start = node.end

    def unlock(self, node: TreeNode, receipt: WindowReceipt) -> None:
        """Undo one `lock`; its receipt is used up."""
        receipt.used = True
        self.release(node, receipt)

    @staticmethod
    def is_receipt_of(receipt: Any, node: TreeNode) -> bool:
        """Return whether this is the unused receipt of a lock that was taken on a node."""
        return isinstance(receipt, WindowReceipt) and not receipt.used and receipt.node is node

    def release(self, node: TreeNode, receipt: WindowReceipt) -> None:
        """Release the window of a lock; no effect if that was done early."""
        if receipt.released:
            return
        receipt.released = True
        stop, start, freed, waiting = node.end, receipt.start, 0, self._waiting
        while stop > start:
            parent, num_locks = node.parent, node.swa_lock_ref - 1
            assert parent is not None and num_locks >= 0, f"window unlock of {node}"
            node.swa_lock_ref = num_locks
            above = parent.end
            if not num_locks and not node.swa_tombstone:
                freed += stop - above
                if node in waiting:
                    waiting.remove(node)
                    self._queue.push(node)
            node, stop = parent, above
        self.evictable += freed
        self.protected -= freed

    def pop_victim(self) -> TreeNode | None:
        """Take out the live node without a window lock that was longest in no tail; None if there is none.

        Of the nodes of one tail the upper goes first: a match that ends in the tail needs the lower ones. Held
        nodes that come before it move to the waiting nodes: one step for each, once per time that it is held.
        """
        while (node := self._queue.pop()) is not None and node.swa_lock_ref:
            self._waiting.add(node)
        return node

    def coldest(self, num_tokens: int) -> list[TreeNode]:
        """Return the nodes with the window KV that is dropped next, in order, for so many tokens; changes nothing."""
        found: list[TreeNode] = []
        for node in self._queue.in_order():
            if num_tokens <= 0:
                break
            if not node.swa_lock_ref:
                found.append(node)
                num_tokens -= len(node)
        return found

    def tails_over(
        self, node: TreeNode, beyond: Sequence[TreeNode] | None = None
    ) -> tuple[list[TreeNode], list[TreeNode]]:
        """Find the tails that a live node is in. O(1) for each node that is returned.

        Args:
            beyond: the second result for the parent of the node, which has no other child: then the first result leaves
                out the nodes that it had for the parent. None: it has all.

        Returns:
            The live nodes with such tails at their ends, those above first; and the live nodes that follow them, or
            that are the last of their paths.
        """
        inside: list[TreeNode] = []
        behind: list[TreeNode] = []
        waiting = [node] if beyond is None else list(beyond)
        while waiting:
            found = waiting.pop()
            if found.swa_tombstone:
                continue
            is_inside = found.end - self.tail < node.end
            if is_inside:
                inside.append(found)
                waiting += found.children.values()
            if not is_inside or not found.children:
                behind.append(found)
        return inside, behind

    def needs(self, end: TreeNode, node: TreeNode) -> bool:
        """Return whether a match at the end of a node needs the window KV of a node on its path."""
        return end.end - self.window < node.end

    def clear(self) -> None:
        """Forget everything."""
        self._queue.clear()
        self._waiting.clear()
        self.evictable = self.protected = 0

    def check(self, nodes: Iterable[TreeNode]) -> None:
        """Raise AssertionError if a rule of the module docstring is broken. O(n)."""
        evictable = protected = 0
        nodes = list(nodes)
        live = {node for node in nodes if not node.swa_tombstone}
        assert_queued(self._queue, live - self._waiting)
        is_held = [node in live and node.swa_lock_ref > 0 for node in self._waiting]
        assert all(is_held), "rule 3: a waiting node has no window lock"
        for node in nodes:
            assert 0 <= node.swa_lock_ref <= node.lock_ref, f"rule 2 at {node}: {node.swa_lock_ref=}"
            if not node.swa_tombstone:
                evictable += 0 if node.swa_lock_ref else len(node)
                protected += len(node) if node.swa_lock_ref else 0
        assert evictable == self.evictable, f"rule 1: {evictable=}, but {self.evictable=}"
        assert protected == self.protected, f"rule 1: {protected=}, but {self.protected=}"

    def check_locks(self, nodes: Iterable[TreeNode], receipts: Iterable[WindowReceipt]) -> None:
        """Raise AssertionError unless the receipts' locks hold their tails, and no other locks do. O(n)."""
        locks: Counter[TreeNode] = Counter()
        for receipt in receipts:
            node, start = receipt.node, max(0, receipt.node.end - self.tail)
            assert receipt.start <= start, f"the lock of {node} holds from token {receipt.start}, not {start}"
            while not receipt.released and node.end > receipt.start:
                assert node.parent is not None
                locks[node], node = locks[node] + 1, node.parent
        for node in nodes:
            assert node.swa_lock_ref == locks[node], f"{locks[node]} locks hold the window of {node}"


def _rank(node: TreeNode) -> int:
    """Return when a node was last in the tail of a use; of one tail the upper node is the earlier one."""
    return node.swa_access_time << _BITS_OF_A_DEPTH | node.end
