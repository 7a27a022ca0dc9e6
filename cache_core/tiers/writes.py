"""`Writes`: the writes of a tier's pages to the one below, before they are evicted or as they are due."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raydix.cache_core.components.component import Component
from raydix.cache_core.components.window_kv import WindowKV
from raydix.cache_core.errors import OutOfSlotsError
from raydix.cache_core.eviction.queue_walk import VictimWalk
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tiers.move import Move, new_move
from raydix.cache_core.tiers.tier import Source, Tier
from raydix.cache_core.tree.packed_slots import NO_STARTS
from raydix.cache_core.tree.radix_key import RadixKey
from raydix.cache_core.tree.tree_node import NodePath, TreeNode

BATCH_BYTES = 32 * 2**20  # the most that one plan writes
_BATCHES_OF_POOL = 16  # A plan locks at most one of so many parts of the pool.
_STEPS = 64  # nodes that one plan looks at: 2 ms if all are written
_MOST_PUT_OFF = 64  # nodes to be looked at again
_MOST_CLIMBED = 1024  # nodes of a chain that are passed in one step: about 1 ms


@dataclass(slots=True)
class WriteCounts:
    """Counts of writes since the start. Tokens, unless they say otherwise."""

    written: int = 0  # tokens that the lower tier did not have
    dropped: int = 0  # lost, as they, or window KV or states that they need, left the upper tier unwritten
    writes_refused: int = 0  # writes: the lower tier had no room
    failed: int = 0  # tokens that were to be copied and were not


class Plan(NamedTuple):
    """Writes to do now."""

    moves: list[Move]
    is_ahead: bool  # Enough is free or in the lower tier: nothing more is to be planned until the pool changes.


class Missing(NamedTuple):
    """The part of a node's path that the lower tier lacks."""

    node: TreeNode
    path: NodePath
    first: int  # token
    live_from: int  # token
    stop: int  # the token where a match may end, with the window KV before it: the node's end, or a branch above it


class Writes:
    """Prepares the writes between two tiers, and ends them.

    Args:
        upper, lower: the tiers; both caches have the same page size, window and kind.
        bytes_per_page: of a page at both ends, for the size of a batch; 0: an index without KV.
        are_neighbours: the lower cache is reset and retired with the upper one. False: it is with a tier between them.

    Attributes:
        counts: of writes since the start.
        batch_pages: pages of one plan, at most. A window is moved whole: it alone may be larger.
        is_kept: returns whether pages of a namespace may be written to the lower tier.
    """

    def __init__(self, upper: Tier, lower: Tier, bytes_per_page: int = 0, *, are_neighbours: bool = True) -> None:
        self.upper = upper
        self.lower = lower
        self.counts = WriteCounts()
        self.is_kept: Callable[[str | None], bool] = lambda extra_key: True
        cache = upper.cache
        if are_neighbours:
            cache.below = lower.cache
        most = cache.num_slots // cache.page_size // _BATCHES_OF_POOL
        self.batch_pages = max(1, min(most, BATCH_BYTES // bytes_per_page) if bytes_per_page else most)
        self._page_size = cache.page_size
        self._in_flight: dict[Move, LeaseRecord] = {}  # with the lock at the source
        self._reading: set[int] = set()  # first slots of the upper tier's pages that writes read
        # The walk of the present round, the tokens that it has passed, and the nodes to look at again.
        self._walk: VictimWalk | None = None
        self._num_passed = 0
        self._put_off: deque[TreeNode] = deque()
        self._of_round: set[Move] = set()  # writes in flight that the present round has begun
        self._num_below: dict[int, int] = {}  # id of a node: its children that the round has passed
        # name of a node that the lower tier has: its mark at that time; of two rounds
        self._covered: dict[int, int] = {}
        self._covered_before: dict[int, int] = {}
        # name of a node that the lower tier has refused: its mark; emptied when `Tier.num_unlocks` has changed
        self._refused: dict[int, int] = {}
        self._num_unlocks = lower.num_unlocks

    @property
    def in_flight(self) -> list[Move]:
        """The writes in flight, the oldest first."""
        return list(self._in_flight)

    # ---------------------------------------------------------------- writes

    def prepare(self, reserve: int) -> Plan:
        """Begin to write the coldest nodes of the upper tier that the lower tier lacks. Nothing leaves the upper tier.

        Call it again when moves have ended, or soon if there are none, until the plan is ahead: then `reserve` slots
        are free, written, or held by leases. It goes on where it stopped. The lower tier is asked about a node once
        after each use of the node. If it has refused the node, it is asked again in the next round after the end of a
        move that held pages of the lower tier.
        """
        if self._walk is None:
            self._forget_refusals()
        plan, budget = list[Move](), self.batch_pages
        again = len(self._put_off)
        for _ in range(_STEPS):
            if again:
                again -= 1
                node = self._put_off.popleft()
            elif len(self._put_off) >= _MOST_PUT_OFF:
                break
            elif self._has_enough(reserve) or (next_node := self._next_leaf()) is None:
                if self._put_off:
                    break
                self._end_round()
                return Plan(plan, True)
            else:
                node = next_node
            budget -= self._cover(node, plan, budget)
            if budget <= 0:
                break
        return Plan(plan, False)

    def prepare_windows(self, reserve: int) -> Plan:
        """Do `prepare` for the window KV that the upper tier would drop next, until `reserve` window slots are.

        Window slots may run short before slots do. A node is written with the stops that need its window KV; window KV
        that no stop needs is not written. O(nodes with the reserve and their tails).
        """
        cache = self.upper.cache
        window, pool = cache.radix.parts.window, cache.allocator.swa
        if window is None or pool is None:
            return Plan([], True)
        nodes = window.coldest(reserve - pool.available_size())
        return self._prepare_nodes(self._asks(window, [node for node in nodes if node.namespace.live]))

    def prepare_states(self, reserve: int) -> Plan:
        """Do `prepare` for the states that the upper tier would drop next, until `reserve` state slots are.

        States may run short before slots do. O(reserve).
        """
        cache = self.upper.cache
        states, pool = cache.radix.parts.states, cache.pools.states
        if states is None or pool is None:
            return Plan([], True)
        return self._prepare_nodes((node, False) for node in states.coldest(max(0, reserve - pool.available_size())))

    def _asks(self, window: WindowKV, nodes: Iterable[TreeNode]) -> Iterator[tuple[TreeNode, bool]]:
        """Yield the nodes of which the lower tier needs something that goes with the window KV of some nodes.

        With each goes whether this is a branch alone: the end of the node does not need that window KV. The last nodes
        of a path come first: what they need may be enough for those above.
        """
        has_branches = self.upper.cache.radix.parts.states is None
        beyond: dict[TreeNode, list[TreeNode]] = {}
        for node in nodes:
            above = _parent_of(node)
            inside, beyond[node] = window.tails_over(node, beyond.get(above) if len(above.children) == 1 else None)
            if has_branches:
                yield from ((found, True) for found in beyond[node])
            yield from ((found, False) for found in reversed(inside) if self._has_end(found))

    def _prepare_nodes(self, asks: Iterable[tuple[TreeNode, bool]]) -> Plan:
        """Begin to write nodes as one batch.

        Args:
            asks: the nodes, and whether only a branch on the path of the node is written.
        """
        self._forget_refusals()
        plan, budget, num_asked, is_ahead = list[Move](), self.batch_pages, 0, True
        for node, has_branch_alone in asks:
            if not node.namespace.live:
                continue
            name, mark = self._name(node, has_branch_alone)
            if self._is_noted(name, mark) or self._is_refused(name, mark):
                continue
            num_asked += 1
            if num_asked > _STEPS:
                return Plan(plan, False)
            found = self._missing_branch(node) if has_branch_alone else self.missing(node)
            if found is not None and self._is_being_read(found):
                is_ahead = False
                continue
            if found is None:
                self._covered[name] = mark
                continue
            stop = self.stop_within(found, budget)
            move = self._begin(found, stop)
            if move is None:
                self._refused[name] = mark
                continue
            plan.append(move)
            if stop < found.node.end:
                is_ahead = False
            else:
                self._covered[name] = mark
            budget -= max(1, (stop - found.first) // self._page_size)
            if budget <= 0:
                return Plan(plan, False)
        return Plan(plan, is_ahead)

    def _has_enough(self, reserve: int) -> bool:
        """Return whether so many slots are free, were passed in this round, or are being written."""
        found = self.upper.cache.free_slots + self._num_passed + sum(len(node) for node in self._put_off)
        # The walk does not meet nodes that writes of earlier rounds lock.
        before = (move for move in self._in_flight if move not in self._of_round)
        locked = {move.node for move in before if not move.is_released}
        return found + sum(len(node) for node in locked if node is not None) >= reserve

    def _next_leaf(self) -> TreeNode | None:
        """Return the leaf that would be evicted next after the leaves of this round; None at the end."""
        if self._walk is None or self._walk.is_stale:
            self._begin_walk()
        assert self._walk is not None
        leaf = self._walk.take()
        if leaf is None and self._walk.is_stale:
            self._begin_walk()
            leaf = self._walk.take()
        return leaf

    def _begin_walk(self) -> None:
        self._walk, self._num_passed = self.upper.cache.radix.walk(), 0
        self._num_below.clear()
        self._of_round.clear()

    def restart_round(self) -> None:
        """Ask the lower tier about all nodes again: it takes pages of more namespaces now."""
        self._covered.clear()
        self._covered_before.clear()
        self._refused.clear()
        self._end_round()

    def _end_round(self) -> None:
        """Let the next plan begin with the coldest leaf again."""
        self._walk, self._num_passed = None, 0
        self._num_below.clear()
        self._of_round.clear()
        self._covered_before, self._covered = self._covered, {}

    def _cover(self, node: TreeNode, plan: list[Move], budget: int) -> int:
        """Begin to write a node, and pass it and the nodes above it that would be evicted after it.

        Returns:
            The pages of the move; all of `budget` if the plan is to end here.
        """
        found: Missing | None = None
        is_first, num_pages, num_spent, asked, num_climbed = True, 0, 0, node, 0
        while node.data and node.slots is not None and node.namespace.live:
            if node.lock_ref:
                # A write in flight may be the one that locks it.
                if is_first and self._in_flight:
                    self._put_off.append(node)
                break
            name, mark = self._name(node)
            if not self._is_noted(name, mark) and not self._is_refused(name, mark):
                if is_first or self._has_end(node):
                    if found is not None:  # It needs the pages of the write that begins below it.
                        self._put_off.append(node)
                        break
                    found, asked = self.missing(node), node
                    if found is not None and self._is_being_read(found):
                        self._put_off.append(node)
                        return 0
                    if found is not None:
                        num_pages = (self.stop_within(found, budget) - found.first) // self._page_size
                        if found.first + num_pages * self._page_size < found.node.end:
                            break
                self._covered[name] = mark
            self._num_passed += len(node)
            parent, is_first = node.parent, False
            assert parent is not None
            node = parent
            self._num_below[node.id] = self._num_below.get(node.id, 0) + 1
            if self._num_below[node.id] < len(node.children):
                break
            if self._walk is not None and node.data:
                self._walk.note_above(node)
            num_climbed += 1
            if num_climbed == _MOST_CLIMBED:
                self._put_off.append(node)
                num_spent = budget  # The next plan goes on here, before it takes another leaf.
                break
        if found is None:
            return num_spent
        move = self._begin(found, found.first + num_pages * self._page_size)
        if move is None:
            name, mark = self._name(asked)
            self._covered.pop(name, None)
            self._refused[name] = mark
        else:
            plan.append(move)
            self._of_round.add(move)
            if move.stop < found.node.end:
                self._put_off.append(asked)
        return max(1, num_pages, num_spent)  # A move of a state alone has no pages.

    def _name(self, node: TreeNode, has_branch_alone: bool = False) -> tuple[int, int]:
        """Return the name of a node, or of the branches on its path; and its mark.

        The mark changes when the node is used, and when its end is to be written from now on.
        """
        name, mark = node.id, node.own_access_time << 1 | self._has_end(node)
        return (~name if has_branch_alone else name), mark

    def _is_noted(self, name: int, mark: int) -> bool:
        """Return whether the lower tier was asked about a node since its last use, and lacked nothing of it."""
        noted = self._covered.get(name)
        if noted is None and (noted := self._covered_before.get(name)) is not None:
            self._covered[name] = noted
        return noted == mark

    def _is_refused(self, name: int, mark: int) -> bool:
        """Return whether the lower tier has refused a node since its last use, and is not to be asked again yet."""
        return self._refused.get(name) == mark

    def _forget_refusals(self) -> None:
        """Ask again about refused nodes, if a move has ended that held pages of the lower tier."""
        if self._num_unlocks != self.lower.num_unlocks:
            self._num_unlocks = self.lower.num_unlocks
            self._refused.clear()

    def _has_end(self, node: TreeNode) -> bool:
        """Return whether the end of an inner node is to be written, besides the ends of the nodes below it."""
        parts = self.upper.cache.radix.parts
        return bool(parts.components) and parts.is_stop(node) and not (parts.window is not None and node.swa_tombstone)

    def missing(self, node: TreeNode) -> Missing | None:
        """Return the part of a node's path that the lower tier needs, so that a match ends at its last stop."""
        return self._missing_at(self.upper.cache.radix.last_stop(node), has_branch=True)

    def _missing_at(self, end: TreeNode, *, has_branch: bool = False) -> Missing | None:
        """Return the part of a path that the lower tier needs, so that a match ends at its end as it does here.

        Args:
            has_branch: if the pages of the lower tier branch off above the end, it gets the window KV there first.
        """
        if not end.data or not self.is_kept(end.namespace.extra_key):
            return None
        radix = self.upper.cache.radix
        path = radix.path_to(end)
        usable, full = self.lower.cache.radix.cached_lens(path.key)
        if usable >= end.end:
            return None
        if has_branch and (branch := self._branch(end, path, usable, full)) is not None:
            return branch
        live_from = radix.live_from(end)
        return Missing(end, path, min(full, live_from), live_from, end.end)

    def _missing_branch(self, node: TreeNode) -> Missing | None:
        """Return the window KV that the lower tier needs where its pages branch off from a node's path."""
        if not self.is_kept(node.namespace.extra_key):
            return None
        path = self.upper.cache.radix.path_to(node)
        return self._branch(node, path, *self.lower.cache.radix.cached_lens(path.key))

    def _branch(self, node: TreeNode, path: NodePath, usable: int, full: int) -> Missing | None:
        """Return the window KV of a path up to where the pages of the lower tier branch off.

        Requests of two tiers have the same beginning: no node of this tier shows it, but others may have it, too.

        Args:
            usable, full: tokens of the path that a match finds in the lower tier, and those with full KV there.
        """
        radix = self.upper.cache.radix
        window = radix.parts.window
        if window is None or radix.parts.states is not None or not usable < full < node.end:
            return None
        live_from = radix.live_from(node, full)
        if 0 < live_from > full - window.window or not self.lower.cache.radix.goes_on_at(path.key, full):
            return None
        return Missing(node, path, live_from, live_from, full)

    def _is_being_read(self, missing: Missing) -> bool:
        """Return whether a write in flight copies some of the pages, or moves the state.

        Pages that a write has let go may have been computed again.
        """
        if any(move.is_released for move in self._in_flight) and self._is_being_written(missing, missing.stop):
            return True
        pages = missing.path.starts[missing.first // self._page_size : missing.stop // self._page_size].tolist()
        if not pages:
            return any(move.node is missing.node for move in self._in_flight)
        return not self._reading.isdisjoint(pages)

    def stop_within(self, missing: Missing, num_pages: int) -> int:
        """Return the token at which a move of about so many pages ends: the whole window goes with the last one."""
        stop = missing.first + max(1, num_pages) * self._page_size
        return stop if stop < missing.live_from else missing.stop

    def _begin(self, missing: Missing, stop: int) -> Move | None:
        """Open the leases of a write up to a token; None if the lower tier has no room."""
        upper, lower, page = self.upper.cache, self.lower.cache, self._page_size
        node, path, first, live_from = missing.node, missing.path, missing.first, missing.live_from
        state = upper.tree.state_at(node) if stop == node.end else None
        lease = upper.lock_node(node, path)
        upper.hold_window(lease, live_from)
        try:
            target = lower.open_target(path.key[:stop], first, state is not None, live_from)
        except OutOfSlotsError:
            upper.end_quietly(lease)
            self.counts.writes_refused += 1
            return None
        windows = NO_STARTS
        if upper.allocator.swa is not None and live_from < stop:
            windows = upper.allocator.swa_starts(lease.starts[live_from // page : stop // page])
        source = Source(lease, stop, lease.starts, live_from, windows, state)
        move = new_move(self.upper, self.lower, source, target, path.key[:stop], first, node)
        self._in_flight[move] = lease
        if state is not None:
            assert target.state_slot is not None
            move.target_states = (target.state_slot,)
        self._reading.update(path.starts[first // page : stop // page].tolist())
        return move

    def prepare_prefix(self, node: TreeNode, num_pages: int, others: Iterable[Writes] = ()) -> Move | None:
        """Begin to write a node, and the nodes above it that the lower tier lacks, up to about so many pages.

        Args:
            others: other writes to the lower tier.

        Returns:
            None: the lower tier has all of it or no room, or another write copies a part of it.
        """
        end = self.upper.cache.radix.usable_above(node)
        if not node.namespace.live or (found := self._missing_at(end)) is None or self._is_being_read(found):
            return None
        stop = self.stop_within(found, num_pages)
        if any(writes._is_being_written(found, stop) for writes in (self, *others)):
            return None
        return self._begin(found, stop)

    def _is_being_written(self, missing: Missing, stop: int) -> bool:
        """Return whether a write in flight copies a page of a path up to a token.

        A page that a write has let go may have been computed again, and may lie in another tier, too.
        """
        return any(move.moves_page_of(missing.path.key, missing.first, stop) for move in self._in_flight)

    # ---------------------------------------------------------------- ends

    def release_source(self, move: Move) -> None:
        """Unlock the source of a write: all of it is in a buffer. `complete` ends the move."""
        assert move in self._in_flight and not move.is_released
        move.is_released = True
        self.upper.num_unlocks += 1
        self._reading.difference_update(move.source_starts.tolist())
        self.upper.cache.end_quietly(self._in_flight[move])

    def complete(self, move: Move, num_pages: int, is_whole: bool | None = None) -> int:
        """End a write: publish the copied pages; return the tokens that were new. The copier no longer uses its slots.

        Nothing of a retired namespace is published. A part of a write with window KV or a state is of no use, so
        nothing of it is published either.

        Args:
            num_pages, is_whole: as in `Move.usable`.
        """
        assert move in self._in_flight, "the write has ended"
        lease = self._in_flight.pop(move)
        self.lower.num_unlocks += 1
        self._of_round.discard(move)
        num_pages, is_whole = move.usable(num_pages, is_whole)
        self.counts.failed += (move.num_pages - num_pages) * self._page_size
        if not is_whole:
            self._covered.pop(lease.node.id, None)
            self._covered_before.pop(lease.node.id, None)
        key = move.key[: move.first + num_pages * self._page_size]
        try:
            if move.is_retired:
                key, is_whole = key[: move.first], False
            return self.publish(move.target, key, move.live_from, is_whole)
        finally:
            if not move.is_released:
                self.upper.num_unlocks += 1
                self._reading.difference_update(move.source_starts.tolist())
                self.upper.cache.end_quietly(lease)

    def publish(self, target: LeaseRecord, key: RadixKey, live_from: int, is_whole: bool) -> int:
        """Publish the written pages of a key, and end their lease; return the tokens that were new."""
        lower, state_slot = self.lower.cache, target.state_slot if is_whole else None
        num_new = 0
        try:
            if len(key) > target.num_published_pages * self._page_size or state_slot is not None:
                num_new = lower.publish_copy(target, key, live_from, state_slot)
            if state_slot is not None:
                target.state_slot = None
        finally:
            lower.end_quietly(target, is_use=live_from < len(key))
        self.counts.written += num_new
        return num_new

    # ---------------------------------------------------------------- evictions

    def count_dropped(self, node: TreeNode, component: Component | None = None) -> None:
        """Count and record the tokens that are lost with a node that is about to be evicted: the lower tier lacks them.

        Pass it to `KVCache.watch_victims` of the upper tier.
        """
        ends = self.ends_of(node, component)
        self.count_lost(node, [end for end in ends if not self._is_noted(*self._name(end))])

    def ends_of(self, node: TreeNode, component: Component | None) -> list[TreeNode]:
        """Return the stops at which no match can end once a node is evicted, those above first.

        Args:
            component: of which the node loses its data alone; None: the node leaves the tree.
        """
        parts = self.upper.cache.radix.parts
        window = parts.window
        if window is None or (component is not None and component is not window):
            return [node] if parts.is_stop(node) else []
        return [end for end in window.tails_over(node)[0] if window.needs(end, node) and parts.is_stop(end)]

    def count_lost(self, node: TreeNode, ends: Sequence[TreeNode]) -> None:
        """Count the tokens behind the last end that stays usable, as far as the lower tier lacks them, for each end.

        Args:
            ends: at which no match can end once `node` is evicted.
        """
        radix, lost = self.upper.cache.radix, set[TreeNode]()
        for end in ends:
            if not self.is_kept(end.namespace.extra_key) or radix.last_stop(end) is not end:
                continue
            usable = self.lower.cache.radix.cached_lens(radix.path_to(end).key)[0]
            if usable >= end.end:
                continue
            above = end
            while above is not node and (above := _parent_of(above)) not in lost:
                pass
            stays = above.end if above in lost else radix.last_stop(_parent_of(node)).end
            self.counts.dropped += end.end - max(stays, usable)
            lost.add(end)
        if node in lost:
            self.upper.cache.pools.history.note_dropped(node)


def _parent_of(node: TreeNode) -> TreeNode:
    assert node.parent is not None
    return node.parent
