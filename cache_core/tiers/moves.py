"""`Moves`: the moves of pages between two neighbouring tiers, and the leases of every move.

    device pool                                    host pool
      a node, locked        ── write ──────────>     private pages, then published
      a lease being filled  <──────────── load ──    a prefix, locked

A write (a demotion) copies down what eviction would drop next, and evicts nothing itself. A load fills the private
pages of a lease before its session gets the lease. The leases of a move stand under the session `TIERS` of both
caches, so each pool's accounting holds as it is; a lease that is being filled names its session in `filling_for`.

Three tiers have three `Moves`: between the neighbours, and between the first tier and the third. Each lease of a move
belongs to the `Moves` that has opened it.

Rules, checked by `check_invariants`, and by `check_all` for all `Moves` of a cache together:

1. Each tier's own rules hold.
2. The leases under `TIERS` are exactly the ends of the moves in flight. Without a move there are none.
3. No two moves into one tier copy the same page of a prefix, unless one is of a retired namespace.
4. The source of a move is locked until `finish` or `let_go`, and its target private until `finish`.
5. A lease that is being filled was not handed out: no session has it. For a prefetch, none will.
6. Every reused token is counted once: at most `tokens_reused` were loaded.

`finish` publishes a prefix of the move, of pages that the copier has confirmed, and nothing of a retired namespace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from raydix.cache_core.components.component import Component
from raydix.cache_core.components.window_kv import WindowKV
from raydix.cache_core.errors import OutOfSlotsError
from raydix.cache_core.eviction.queue_walk import VictimWalk
from raydix.cache_core.leases.lease_table import TIERS, LeaseRecord
from raydix.cache_core.tiers.move import Move
from raydix.cache_core.tiers.tier import Tier
from raydix.cache_core.tree.packed_slots import NO_STARTS
from raydix.cache_core.tree.radix_key import RadixKey
from raydix.cache_core.tree.tree_node import NodePath, TreeNode

BATCH_BYTES = 32 * 2**20  # the most that one plan writes
_BATCHES_OF_POOL = 16  # A plan locks at most one of so many parts of the pool.
_STEPS = 64  # nodes that one plan looks at: 2 ms if all are written
_MOST_PUT_OFF = 64  # nodes to be looked at again
_MOST_CLIMBED = 1024  # nodes of a chain that are passed in one step: about 1 ms


@dataclass(slots=True)
class MoveCounts:
    """Counts of moves since the start. Tokens, unless they say otherwise."""

    written: int = 0  # tokens that the lower tier did not have
    loaded: int = 0  # tokens of prefixes that were handed out
    loaded_unused: int = 0  # loaded for no lease, or for one that had ended
    dropped: int = 0  # lost, as they, or window KV or states that they need, left the upper tier unwritten
    writes_refused: int = 0  # moves: the lower tier had no room
    failed: int = 0  # tokens that were to be copied and were not
    states_not_published: int = 0  # loaded states without a second slot


class Plan(NamedTuple):
    """Writes to do now."""

    moves: list[Move]
    is_ahead: bool  # Enough is free or in the lower tier: nothing more is to be planned until the pool changes.


class Finished(NamedTuple):
    """The result of a move."""

    num_tokens: int  # tokens published
    lease: LeaseRecord | None = None  # the lease of a load, handed out; None: it was a write, or the lease has ended
    must_restart: bool = False  # the namespace was retired during a load: the request must begin again


class _Missing(NamedTuple):
    """The part of a node's path that the lower tier lacks."""

    node: TreeNode
    path: NodePath
    first: int  # token
    live_from: int  # token
    stop: int  # the token where a match may end, with the window KV before it: the node's end, or a branch above it


class Moves:
    """Plans the moves between two tiers, and ends them.

    Args:
        upper, lower: the tiers; both caches have the same page size, window and kind.
        bytes_per_page: of a page at both ends, for the size of a batch; 0: an index without KV.
        are_neighbours: the lower cache is reset and retired with the upper one. False: it is with a tier between them.

    Attributes:
        counts: of moves since the start.
        batch_pages: pages of one plan of writes, at most. A window is moved whole: it alone may be larger.
        is_kept: returns whether pages of a namespace may be written to the lower tier.
        others: the other moves into the upper tier, from other tiers.
    """

    def __init__(self, upper: Tier, lower: Tier, bytes_per_page: int = 0, *, are_neighbours: bool = True) -> None:
        self.upper = upper
        self.lower = lower
        self.counts = MoveCounts()
        self.is_kept: Callable[[str | None], bool] = lambda extra_key: True
        self.others: Sequence[Moves] = ()
        cache = upper.cache
        if are_neighbours:
            cache.below = lower.cache
        most = cache.num_slots // cache.page_size // _BATCHES_OF_POOL
        self.batch_pages = max(1, min(most, BATCH_BYTES // bytes_per_page) if bytes_per_page else most)
        self._page_size = cache.page_size
        self._in_flight: dict[Move, None] = {}
        self._num_loads = 0  # loads in flight
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
        """The moves in flight, the oldest first."""
        return list(self._in_flight)

    # ---------------------------------------------------------------- writes

    def plan_demotion(self, reserve: int) -> Plan:
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

    def plan_windows(self, reserve: int) -> Plan:
        """Do `plan_demotion` for the window KV that the upper tier would drop next, until `reserve` window slots are.

        Window slots may run short before slots do. A node is written with the stops that need its window KV; window KV
        that no stop needs is not written. O(nodes with the reserve and their tails).
        """
        cache = self.upper.cache
        window, pool = cache.radix.parts.window, cache.allocator.swa
        if window is None or pool is None:
            return Plan([], True)
        nodes = window.coldest(reserve - pool.available_size())
        return self._plan_nodes(self._asks(window, [node for node in nodes if node.namespace.live]))

    def plan_states(self, reserve: int) -> Plan:
        """Do `plan_demotion` for the states that the upper tier would drop next, until `reserve` state slots are.

        States may run short before slots do. O(reserve).
        """
        cache = self.upper.cache
        states, pool = cache.radix.parts.states, cache.pools.states
        if states is None or pool is None:
            return Plan([], True)
        return self._plan_nodes((node, False) for node in states.coldest(max(0, reserve - pool.available_size())))

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

    def _plan_nodes(self, asks: Iterable[tuple[TreeNode, bool]]) -> Plan:
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
            found = self._missing_branch(node) if has_branch_alone else self._missing(node)
            if found is not None and self._is_being_read(found):
                is_ahead = False
                continue
            if found is None:
                self._covered[name] = mark
                continue
            stop = self._stop_within(found, budget)
            move = self._begin_write(found, stop)
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
        locked = {move.source.node for move in before if not (move.is_load or move.has_let_go)}
        return found + sum(map(len, locked)) >= reserve

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

    def ask_again(self) -> None:
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
        found: _Missing | None = None
        is_first, num_pages, num_spent, asked, num_climbed = True, 0, 0, node, 0
        while node.data and node.slots is not None and node.namespace.live:
            if node.lock_ref:
                # A write in flight may be the one that locks it.
                if is_first and any(not move.is_load for move in self._in_flight):
                    self._put_off.append(node)
                break
            name, mark = self._name(node)
            if not self._is_noted(name, mark) and not self._is_refused(name, mark):
                if is_first or self._has_end(node):
                    if found is not None:  # It needs the pages of the write that begins below it.
                        self._put_off.append(node)
                        break
                    found, asked = self._missing(node), node
                    if found is not None and self._is_being_read(found):
                        self._put_off.append(node)
                        return 0
                    if found is not None:
                        num_pages = (self._stop_within(found, budget) - found.first) // self._page_size
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
        move = self._begin_write(found, found.first + num_pages * self._page_size)
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

    def _missing(self, node: TreeNode) -> _Missing | None:
        """Return the part of a node's path that the lower tier needs, so that a match ends at its last stop."""
        return self._missing_at(self.upper.cache.radix.last_stop(node), has_branch=True)

    def _missing_at(self, end: TreeNode, *, has_branch: bool = False) -> _Missing | None:
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
        return _Missing(end, path, min(full, live_from), live_from, end.end)

    def _missing_branch(self, node: TreeNode) -> _Missing | None:
        """Return the window KV that the lower tier needs where its pages branch off from a node's path."""
        if not self.is_kept(node.namespace.extra_key):
            return None
        path = self.upper.cache.radix.path_to(node)
        return self._branch(node, path, *self.lower.cache.radix.cached_lens(path.key))

    def _branch(self, node: TreeNode, path: NodePath, usable: int, full: int) -> _Missing | None:
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
        return _Missing(node, path, live_from, live_from, full)

    def _is_being_read(self, missing: _Missing) -> bool:
        """Return whether a write in flight copies some of the pages, or moves the state.

        Pages that a write has let go may have been computed again.
        """
        if any(move.has_let_go for move in self._in_flight) and self._is_being_written(missing, missing.stop):
            return True
        pages = missing.path.starts[missing.first // self._page_size : missing.stop // self._page_size].tolist()
        if not pages:
            return any(move.source.node is missing.node for move in self._in_flight)
        return not self._reading.isdisjoint(pages)

    def _stop_within(self, missing: _Missing, num_pages: int) -> int:
        """Return the token at which a move of about so many pages ends: the whole window goes with the last one."""
        stop = missing.first + max(1, num_pages) * self._page_size
        return stop if stop < missing.live_from else missing.stop

    def _begin_write(self, missing: _Missing, stop: int) -> Move | None:
        """Open the leases of a write up to a token; None if the lower tier has no room."""
        upper, lower, page = self.upper.cache, self.lower.cache, self._page_size
        node, path, first = missing.node, missing.path, missing.first
        state = upper.tree.state_at(node) if stop == node.end else None
        source = upper.lock_node(node, path)
        upper.hold_window(source, missing.live_from)
        try:
            target = lower.open_target(path.key[:stop], first, state is not None, missing.live_from)
        except OutOfSlotsError:
            upper.end_quietly(source)
            self.counts.writes_refused += 1
            return None
        move = self._add(False, source, target, path.key[:stop], first, missing.live_from, state)
        if state is not None:
            assert target.state_slot is not None
            move.target_states = (target.state_slot,)
        self._reading.update(path.starts[first // page : stop // page].tolist())
        return move

    def _add(
        self,
        is_load: bool,
        source: LeaseRecord,
        target: LeaseRecord,
        key: RadixKey,
        first: int,
        live_from: int,
        state: int | None,
    ) -> Move:
        """Return a new move from token `first` to the end of a key."""
        ends = (self.lower, self.upper) if is_load else (self.upper, self.lower)
        live_from = min(max(live_from, first), len(key))
        pages, live = (slice(token // self._page_size, len(key) // self._page_size) for token in (first, live_from))
        windows = [
            NO_STARTS if tier.cache.allocator.swa is None else tier.cache.allocator.swa_starts(lease.starts[live])
            for tier, lease in zip(ends, (source, target), strict=True)
        ]
        starts = source.starts[pages].copy(), target.starts[pages].copy()
        move = Move(is_load, *ends, source, target, key, first, *starts, live_from, windows[0], windows[1], state)
        self._in_flight[move] = None
        self._num_loads += is_load
        return move

    def plan_write(self, node: TreeNode, num_pages: int, others: Iterable[Moves] = ()) -> Move | None:
        """Begin to write a node, and the nodes above it that the lower tier lacks, up to about so many pages.

        Args:
            others: other moves into the lower tier.

        Returns:
            None: the lower tier has all of it or no room, or another write copies a part of it.
        """
        end = self.upper.cache.radix.usable_above(node)
        if not node.namespace.live or (found := self._missing_at(end)) is None or self._is_being_read(found):
            return None
        stop = self._stop_within(found, num_pages)
        if any(moves._is_being_written(found, stop) for moves in (self, *others)):
            return None
        return self._begin_write(found, stop)

    def _is_being_written(self, missing: _Missing, stop: int) -> bool:
        """Return whether a write in flight copies a page of a path up to a token.

        A page that a write has let go may have been computed again, and may lie in another tier, too.
        """
        first = missing.first + self._page_size
        for move in self._in_flight:
            is_near = not move.is_load and not move.is_retired and move.first < stop and missing.first < move.stop
            shared = max(first, move.first + self._page_size)
            if is_near and move.key[:shared] == missing.path.key[:shared]:
                return True
        return False

    def let_go(self, move: Move) -> None:
        """Unlock the source of a write: all of it is in a buffer. `finish` ends the move."""
        assert move in self._in_flight and not move.is_load and not move.has_let_go
        move.has_let_go = True
        move.source_tier.num_unlocks += 1
        self._reading.difference_update(move.source_starts.tolist())
        self.upper.cache.end_quietly(move.source)

    # ---------------------------------------------------------------- evictions

    def write_before_eviction(self, node: TreeNode, component: Component | None = None) -> None:
        """Write a node that is about to be evicted: for tiers without KV, where a copy takes no time.

        Pass it to `KVCache.watch_victims` of the upper tier.
        """
        ends = self._ends_of(node, component)
        self._count_lost(node, [end for end in ends if not self._write_whole(end)])

    def _write_whole(self, end: TreeNode) -> bool:
        """Write what the lower tier lacks of a path; return False if that has no room."""
        found = self._missing(end)
        while found is not None:
            stop = self._stop_within(found, self.batch_pages)
            if not self._write_now(found, stop):
                return False
            found = None if stop == found.node.end else self._missing(end)
        return True

    def _write_now(self, missing: _Missing, stop: int) -> bool:
        """Publish a path in the lower tier up to a token; return False if that has no room."""
        lower, is_whole = self.lower.cache, stop == missing.node.end
        state = self.upper.cache.tree.state_at(missing.node) if is_whole else None
        key = missing.path.key[:stop]
        try:
            target = lower.open_target(key, missing.first, state is not None, missing.live_from)
        except OutOfSlotsError:
            self.counts.writes_refused += 1
            return False
        self._publish_write(target, key, missing.live_from, is_whole)
        return True

    def count_dropped(self, node: TreeNode, component: Component | None = None) -> None:
        """Count and record the tokens that are lost with a node that is about to be evicted: the lower tier lacks them.

        Pass it to `KVCache.watch_victims` of the upper tier, where copies take time.
        """
        ends = self._ends_of(node, component)
        self._count_lost(node, [end for end in ends if not self._is_noted(*self._name(end))])

    def _ends_of(self, node: TreeNode, component: Component | None) -> list[TreeNode]:
        """Return the stops at which no match can end once a node is evicted, those above first.

        Args:
            component: of which the node loses its data alone; None: the node leaves the tree.
        """
        parts = self.upper.cache.radix.parts
        window = parts.window
        if window is None or (component is not None and component is not window):
            return [node] if parts.is_stop(node) else []
        return [end for end in window.tails_over(node)[0] if window.needs(end, node) and parts.is_stop(end)]

    def _count_lost(self, node: TreeNode, ends: Sequence[TreeNode]) -> None:
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

    # ---------------------------------------------------------------- loads

    def running_load(self, key: RadixKey, limit: int | None = None) -> Move | None:
        """Return the load that brings the next page of a request's key; None if there is none.

        Such a request waits for the load, without slots. O(loads in flight), each with a compare of the prefix.

        Args:
            limit: the request reuses at most so many tokens.
        """
        if not self._num_loads:
            return None
        loads = [move for move in self._in_flight if move.is_load and not move.is_retired]
        cache = self.upper.cache
        tree_key = cache.tree_key(key)[:limit]
        wanted = cache.radix.cached_lens(tree_key)[0] + self._page_size
        if wanted > len(tree_key):
            return None
        prefix = tree_key[:wanted]
        return next((load for load in loads if load.stop >= wanted and load.key[:wanted] == prefix), None)

    def _any_runs(self, key: RadixKey, limit: int | None) -> bool:
        """Return whether a load in flight, from any tier, brings the next page of a request's key."""
        return any(moves.running_load(key, limit) is not None for moves in (self, *self.others))

    @contextmanager
    def holding(self, key: RadixKey, limit: int | None = None) -> Iterator[None]:
        """Keep the prefix that the lower tier has of a request's key, while the request's lease is opened.

        The lease may evict nodes of the upper tier. Where these are written first, the lower tier evicts, too: the
        prefix that is about to be loaded may be its oldest. No use is noted.
        """
        lower = self.lower.cache
        tree_key = lower.tree_key(key)
        stop = lower.radix.cached_lens(tree_key[:limit])[0]
        if not stop:
            yield
            return
        held = lower.open_target(tree_key[:stop], stop)
        try:
            yield
        finally:
            lower.end_quietly(held)

    def plan_load(self, lease: LeaseRecord, limit: int | None = None) -> Move | None:
        """Begin to load the prefix of an open lease that the lower tier has beyond it; None if it has none.

        The lease must be new: its session has not got it yet. `finish` hands it out. A lease that only locks gets pages
        for the load.

        Args:
            limit: the lease reuses at most so many tokens.

        Raises:
            OutOfSlotsError: a lease that only locks finds no room; nothing has changed.
        """
        upper, lower = self.upper.cache, self.lower.cache
        if lease.retired or self._any_runs(lease.key, limit):
            return None
        key = upper.tree_key(lease.key)
        prefix = key if limit is None or limit >= len(key) else key[:limit]
        stop = lower.radix.cached_lens(prefix)[0]
        if stop <= lease.prefix_len:
            return None
        upper.begin_fill(lease, stop)
        source = lower.find_source(key, stop)
        first, stop = lease.prefix_len, source.prefix_len
        if stop <= first:
            lower.end_quietly(source, is_use=True)
            upper.hand_out(lease, first)
            return None
        state = lower.tree.state_at(source.node)
        move = self._add(True, source, lease, key[:stop], first, lower.radix.live_from(source.node), state)
        if state is not None:
            assert lease.state_slot is not None
            move.target_states = (lease.state_slot,)
            self._add_spare(move)
        return move

    def give_back(self, lease: LeaseRecord) -> None:
        """End a new lease for which `plan_load` found no room. Its session may open another one of the same id.

        Nothing has changed, so pressure is not notified: its observer would try the request again and again.
        """
        upper = self.upper.cache
        upper.leases.begin_fill(lease)
        upper.take_back_fill(lease, notify=False)

    def plan_prefetch(self, key: RadixKey, limit: int | None = None) -> Move | None:
        """Begin to load the prefix of a key for no lease; None if there is nothing to load, or no room.

        It may evict what no lease locks.

        Args:
            limit: load a prefix of at most so many tokens.
        """
        upper, lower = self.upper.cache, self.lower.cache
        if self._any_runs(key, limit):
            return None
        tree_key = upper.tree_key(key)
        usable, full = upper.radix.cached_lens(tree_key[:limit])
        with self.holding(key, limit):
            stop = lower.radix.cached_lens(tree_key[:limit])[0]
            if stop <= usable:
                return None
            node, _ = lower.radix.locate(tree_key, stop)
            live_from = lower.radix.live_from(node)
            first = min(full, live_from)
            if any(moves._is_loading(tree_key[:stop], first) for moves in (self, *self.others)):
                return None  # It begins before the usable prefix, as window KV is to be loaded there.
            try:
                target = upper.open_target(tree_key[:stop], first, live_from=live_from)
            except OutOfSlotsError:
                return None
            source = lower.find_source(tree_key, stop)
        target.filling_for = ""
        first = target.num_published_pages * self._page_size
        state = lower.tree.state_at(source.node)
        move = self._add(True, source, target, tree_key[:stop], first, live_from, state)
        if state is not None:
            self._add_spare(move)
        return move

    def _is_loading(self, key: RadixKey, first: int) -> bool:
        """Return whether a load in flight brings a page of a tree's key behind token `first`."""
        for load in self._in_flight:
            at = max(first, load.first)
            if load.is_load and not load.is_retired and at < min(len(key), load.stop):
                shared = at + self._page_size
                if load.key[:shared] == key[:shared]:
                    return True
        return False

    def _add_spare(self, move: Move) -> None:
        """Take a second state slot for a load, which the tree gets; without one its state is not published."""
        try:
            move.spare = self.upper.cache.open_target(move.key[:0], 0, with_state=True)
        except OutOfSlotsError:
            self.counts.states_not_published += 1
            return
        assert move.spare.state_slot is not None
        move.target_states += (move.spare.state_slot,)

    # ---------------------------------------------------------------- ends

    def cancel(self, move: Move) -> None:
        """Let the copier stop at its next chunk. It calls `finish` as usual, with the pages that it has copied."""
        move.is_cancelled = True

    def give_up(self, move: Move) -> None:
        """Take the lease that a load fills from its request, which begins again. The load goes on for no request."""
        assert move in self._in_flight and move.is_load
        _take_back_loads(move.target)
        self.upper.cache.give_up_fill(move.target)

    def finish(self, move: Move, num_pages: int, is_whole: bool | None = None) -> Finished:
        """End a move: publish the copied pages, and end its leases. The copier no longer reads or writes its slots.

        Nothing of a retired namespace is published. A part of a move with window KV or a state is of no use, so nothing
        of it is published either.

        Args:
            num_pages: the leading pages that were copied.
            is_whole: whether window KV and states were copied, too; None: if all pages were.
        """
        assert move in self._in_flight, "the move has ended"
        del self._in_flight[move]
        for tier in (move.target_tier,) if move.has_let_go else (move.source_tier, move.target_tier):
            tier.num_unlocks += 1
        self._of_round.discard(move)
        self._num_loads -= move.is_load
        is_whole = (is_whole is not False) and num_pages >= move.num_pages
        num_pages = min(num_pages, move.num_pages)
        if move.is_indivisible and not is_whole:
            num_pages = 0
        self.counts.failed += (move.num_pages - num_pages) * self._page_size
        key = move.key[: move.first + num_pages * self._page_size]
        if move.is_load:
            return self._finish_load(move, key, is_whole)
        if not move.has_let_go:
            self._reading.difference_update(move.source_starts.tolist())
        if not is_whole:
            self._covered.pop(move.source.node.id, None)
            self._covered_before.pop(move.source.node.id, None)
        try:
            if move.is_retired:
                key, is_whole = key[: move.first], False
            return Finished(self._publish_write(move.target, key, move.live_from, is_whole))
        finally:
            if not move.has_let_go:
                self.upper.cache.end_quietly(move.source)

    def _publish_write(self, target: LeaseRecord, key: RadixKey, live_from: int, is_whole: bool) -> int:
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

    def _finish_load(self, move: Move, key: RadixKey, is_whole: bool) -> Finished:
        upper, lease, spare = self.upper.cache, move.target, move.spare
        is_wanted = bool(lease.filling_for)
        try:
            if move.is_retired:
                _take_back_loads(lease)
                upper.take_back_fill(lease)
                return Finished(0, None, is_wanted)
            slot = spare.state_slot if spare is not None and is_whole else None
            upper.publish_copy(lease, key, move.live_from, slot)
            if spare is not None and slot is not None:
                spare.state_slot = None
            if move.source_state is not None and not is_whole:
                upper.reload_state(lease)
            num_loaded = len(key) - move.first
            if not is_wanted:
                self.counts.loaded_unused += num_loaded
                upper.end_quietly(lease, is_use=True)
                return Finished(num_loaded)
            self.counts.loaded += num_loaded
            lease.loads += ((self.counts, num_loaded),)
            if self.lower.medium == "STORAGE":
                lease.disk_loaded_len += num_loaded
            upper.hand_out(lease, len(key))
            return Finished(num_loaded, lease)
        finally:
            if spare is not None:
                upper.end_quietly(spare)
            self.lower.cache.end_quietly(move.source, is_use=True)

    # ---------------------------------------------------------------- checks

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of this module is broken. O(n)."""
        check_all((self,))

    def check_own(self) -> None:
        """Raise AssertionError if a rule of single moves is broken. O(n)."""
        moves = list(self._in_flight)
        assert self._num_loads == sum(move.is_load for move in moves), "loads in flight are counted"
        for move in moves:
            self._check_ends(move)

    def _check_ends(self, move: Move) -> None:
        page = self._page_size
        read = move.source.starts[: move.source.num_published_pages][move.first // page : move.stop // page]
        written = move.target.private_starts[: move.num_pages]
        is_locked = read.tolist() == move.source_starts.tolist()
        if len(move.source_windows):
            windows = move.source_tier.cache.allocator.swa_starts(move.source_starts[-len(move.source_windows) :])
            is_locked = is_locked and windows.tolist() == move.source_windows.tolist()
        assert is_locked or move.has_let_go, f"rule 4: the source of {move.key} is not locked"
        assert written.tolist() == move.target_starts.tolist(), f"rule 4: the target of {move.key} is not private"
        assert (move.target.filling_for is not None) == move.is_load, "rule 5: only a load fills a lease of a session"


def _parent_of(node: TreeNode) -> TreeNode:
    assert node.parent is not None
    return node.parent


def _take_back_loads(lease: LeaseRecord) -> None:
    """Count earlier loads of a lease as unused, if its request begins again."""
    if lease.filling_for:
        for counts, num_loaded in lease.loads:
            counts.loaded -= num_loaded
            counts.loaded_unused += num_loaded


def _ends_of(move: Move) -> Iterator[tuple[Tier, LeaseRecord]]:
    if not move.has_let_go:
        yield move.source_tier, move.source
    yield move.target_tier, move.target
    if move.spare is not None:
        yield move.target_tier, move.spare


def check_all(all_moves: Sequence[Moves]) -> None:
    """Raise AssertionError if a rule of this module is broken. O(n).

    Args:
        all_moves: all `Moves` of the tiers.
    """
    moves = [move for some in all_moves for move in some.in_flight]
    for tier in dict.fromkeys(tier for some in all_moves for tier in (some.upper, some.lower)):
        tier.cache.check_invariants()
        ends = {lease.lease_id for move in moves for place, lease in _ends_of(move) if place is tier}
        open_leases = {lease.lease_id for lease in tier.cache.leases.of_session(TIERS)}
        assert open_leases == ends, f"rule 2 at tier {tier.name}: {open_leases ^ ends}"
        loaded = sum(some.counts.loaded for some in all_moves if some.upper is tier)
        reused = tier.cache.counters
        assert loaded <= reused.tokens_reused + reused.tokens_reused_resumed, f"rule 6 at tier {tier.name}: {loaded=}"
    for move, other in combinations([move for move in moves if not move.is_retired], 2):
        stop = min(move.stop, other.stop)
        at = max(move.first, other.first)
        is_same = move.target_tier is other.target_tier and at < stop
        shared = at + move.source_tier.cache.page_size
        assert not is_same or move.key[:shared] != other.key[:shared], f"rule 3: both moves copy token {at}"
    for some in all_moves:
        some.check_own()
