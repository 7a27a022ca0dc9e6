"""Random traffic on two tiers with a copier that copies stamps page by page, checked against `ReferenceTiers`.

Each page, window page and state slot of each tier holds a stamp: the tokens up to its end, their namespace and the
generation of the weights. After each operation every page of both trees must hold the stamp of its prefix.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from support.reference.tiers import Place, ReferenceTier, ReferenceTiers
from support.tiers.two_tiers import Moves
from support.traffic.radix import TrafficFailed

from raydix.cache_core import (
    ExpiredLeaseError,
    KVCache,
    MambaPool,
    MambaRadixCache,
    OutOfSlotsError,
    RadixCache,
    RadixKey,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
    UnknownLeaseError,
)
from raydix.cache_core.leases.lease_table import TIERS, LeaseRecord
from raydix.cache_core.tiers.loads import Filled
from raydix.cache_core.tiers.move import Move
from raydix.cache_core.tiers.tier import Tier
from raydix.cache_core.tree.tree_node import TreeNode, nodes_to

NAMESPACES = (None, "a")
SESSIONS = ("s0", "s1", "s2")


@dataclass(frozen=True)
class Shape:
    """The sizes of the two tiers. A window or states make the kind."""

    page_size: int = 1
    device_pages: int = 24
    host_pages: int = 40
    window: int | None = None
    states: int = 0
    policy: str = "lru"


class StampedTier:
    """One tier with the stamps in its slots."""

    def __init__(self, name: str, shape: Shape, num_pages: int, page: int) -> None:
        slots, num_states = num_pages * page, shape.states if name == "device" else 2 * shape.states
        self.states: MambaPool | None = None
        if shape.window is None:
            allocator: TokenToKVPoolAllocator = TokenToKVPoolAllocator(slots, page)
        else:
            allocator = SWATokenToKVPoolAllocator(slots, slots, page)
        if num_states:
            self.state_stamps = torch.zeros(num_states + 1, 1, dtype=torch.int64)
            self.states = MambaPool(num_states, layers=[(self.state_stamps,)])
            tree = MambaRadixCache(
                page, allocator, self.states, sliding_window_size=shape.window, eviction_policy=shape.policy
            )
        else:
            tree = RadixCache(page, shape.window, allocator, eviction_policy=shape.policy)  # type: ignore[assignment]
        self.cache = KVCache(tree, allocator, states=self.states)
        self.tier = Tier(name, "GPU" if name == "device" else "CPU", self.cache)
        self.pages = np.zeros(num_pages + 1, np.int64)
        self.windows = np.zeros(num_pages + 1, np.int64)


class Request:
    """An open lease of a session, with the state of its computation."""

    def __init__(self, lease: LeaseRecord, tokens: tuple[int, ...], namespace: str | None, generation: int) -> None:
        self.lease = lease
        self.tokens = tokens
        self.namespace = namespace
        self.generation = generation


class TiersTraffic:
    """Random operations on two tiers."""

    def __init__(self, seed: int, shape: Shape) -> None:
        self.rng = Random(seed)
        self.shape, self.page = shape, shape.page_size
        self.device = StampedTier("device", shape, shape.device_pages, self.page)
        self.host = StampedTier("host", shape, shape.host_pages, self.page)
        self.moves = Moves(self.device.tier, self.host.tier)
        self.model = ReferenceTiers(self.page)
        self.copied: dict[Move, int] = {}
        self.filling: dict[Move, Request] = {}
        self.requests: dict[str, Request] = {}
        self.stamps: dict[tuple[str | None, int, tuple[int, ...]], int] = {}
        self.num_leases = 0
        self.ends: set[Place] = set()  # where a match or a request has ended
        self.next_pages: dict[Place, set[tuple[int, ...]]] = defaultdict(set)  # published behind a place
        self.done: Counter[str] = Counter()
        self.device.cache.watch_victims(self.moves.writes.count_dropped)

    # ---------------------------------------------------------------- stamps

    def stamp(self, namespace: str | None, generation: int, tokens: tuple[int, ...]) -> int:
        return self.stamps.setdefault((namespace, generation, tokens), len(self.stamps) + 1)

    def compute(self, request: Request) -> None:
        """Write the KV of a lease's own pages, and its state."""
        lease, tier = request.lease, self.device
        if lease.only_locks:
            return
        for index in range(lease.num_published_pages, len(request.tokens) // self.page):
            start = lease.starts[index]
            stamp = self.stamp(request.namespace, request.generation, request.tokens[: (index + 1) * self.page])
            tier.pages[start // self.page] = stamp
            if self.shape.window is not None:
                half = int(tier.cache.allocator.swa_starts(lease.starts[index : index + 1])[0])
                if half:
                    tier.windows[half // self.page] = stamp
        if lease.state_slot is not None:
            end = len(request.tokens) // self.page * self.page
            tier.state_stamps[lease.state_slot] = self.stamp(
                request.namespace, request.generation, request.tokens[:end]
            )

    def copy(self, move: Move, num_pages: int) -> None:
        """Copy the next pages of a move, and with the last one its window KV and state."""
        ends = {id(stamped.tier): stamped for stamped in (self.device, self.host)}
        source, target = ends[id(move.source_tier)], ends[id(move.target_tier)]
        done = self.copied[move]
        stop = min(done + num_pages, move.num_pages)
        for read, written in zip(move.source_starts[done:stop], move.target_starts[done:stop], strict=True):
            target.pages[written // self.page] = source.pages[read // self.page]
        self.copied[move] = stop
        if stop == move.num_pages:
            for read, written in zip(move.source_windows, move.target_windows, strict=True):
                assert read and written, "a window half is missing"
                target.windows[written // self.page] = source.windows[read // self.page]
            for slot in move.target_states:
                assert move.source_state is not None
                target.state_stamps[slot] = source.state_stamps[move.source_state]

    # ---------------------------------------------------------------- stops

    def note_end(self, request: Request, num_tokens: int) -> None:
        """Note that a match or a request has ended behind so many tokens."""
        self.ends.add((request.namespace, request.tokens[:num_tokens]))

    def note_pages(self, request: Request, num_tokens: int) -> None:
        """Note the pages that a request publishes."""
        for start in range(0, num_tokens // self.page * self.page, self.page):
            page = request.tokens[start : start + self.page]
            self.next_pages[request.namespace, request.tokens[:start]].add(page)

    def check_stop(self, move: Move) -> None:
        """Window KV is written before a place where a match or a request has ended, or where others branched off."""
        place = move.key.extra_key, tuple(move.key.token_ids)
        is_stop = place in self.ends or len(self.next_pages[place]) > 1  # type: ignore[index]
        assert is_stop or not len(move.source_windows) or self.shape.states, f"no request needs the window at {place}"
        self.done["window at a branch"] += len(move.source_windows) > 0 and place not in self.ends

    # ---------------------------------------------------------------- operations

    def prompt(self) -> tuple[tuple[int, ...], str | None]:
        """A prompt that shares its beginning with others, or goes on where the host has pages; and its namespace."""
        rng, page = self.rng, self.page
        below = [place for place in self.model.host.pages if place not in self.model.device.pages]
        if below and rng.random() < 0.5:
            namespace, known = rng.choice(below)
            return known + (rng.choice((1, 2, 3)),) * rng.choice((0, 1, page)), namespace
        tokens: list[int] = []
        for _ in range(rng.randint(1, 4)):
            tokens += [rng.choice((1, 1, 2, 2, 3))] * rng.choice((page, 2 * page, 2 * page))
        return tuple(tokens + [4] * rng.choice((0, 0, 1))), rng.choice(NAMESPACES)

    def acquire(self) -> None:
        rng, model = self.rng, self.model
        (tokens, namespace), session = self.prompt(), rng.choice(SESSIONS)
        key = RadixKey(list(tokens), namespace)
        limit = rng.choice((None, None, None, rng.randrange(len(tokens) + 1)))
        running = self.moves.running(key, limit)
        if running is not None:
            assert running.is_load and running.key[: self.page] == key[: self.page]
            self.done["waits for another load"] += 1
            return
        self.num_leases += 1
        lease_id, only_locks = f"l{self.num_leases}", rng.random() < 0.15 and limit is None
        here, below = (tier.longest(namespace, tokens, limit) for tier in (model.device, model.host))
        self.ends.add((namespace, tokens[: self.device.cache.radix.cached_lens(key[:limit])[0]]))
        try:
            if only_locks:
                lease = self.device.cache.lock(lease_id, session, key)
            else:
                lease = self.device.cache.acquire(lease_id, session, key, rng.choice((0, 0, 1, 3)), limit)
        except OutOfSlotsError:
            self.done["no room"] += 1
            return
        found = lease.prefix_len
        assert found == here if self.is_plain else found <= here, f"{found=}, but the model has {here}"
        request = Request(lease, tokens, namespace, model.generation(namespace))
        try:
            move = self.moves.prepare_load(lease, limit)
        except OutOfSlotsError:
            assert only_locks, "only a lease without pages needs more for a load"
            move = None
        else:
            assert not self.is_plain or (move is not None) == (below > here), f"{below=} {here=} {move}"
        if move is None:
            model.reused += found
            self.hand_out(request)
            return
        assert move.stop <= below and (not self.is_plain or move.stop == below)
        self.done["load"] += 1
        model.reused += found
        self.copied[move], self.filling[move] = 0, request

    def hand_out(self, request: Request) -> None:
        lease = request.lease
        assert lease.session_id != TIERS and lease.filling_for is None
        self.requests[lease.lease_id] = request
        self.note_end(request, lease.prefix_len)
        self.check_read(request)
        self.compute(request)

    def check_read(self, request: Request) -> None:
        """Read the prefix of a lease: its pages, the window KV before its end, and its state."""
        lease, tier, page = request.lease, self.device, self.page
        halves = tier.cache.swa_starts(lease)
        for index in range(lease.prefix_len // page):
            stamp = self.stamp(request.namespace, request.generation, request.tokens[: (index + 1) * page])
            assert tier.pages[lease.starts[index] // page] == stamp, f"page {index} of {lease.lease_id} has other KV"
            if self.shape.window is not None and (index + 1) * page > lease.prefix_len - self.shape.window:
                assert halves[index], f"window page {index} of {lease.lease_id} is missing"
                assert tier.windows[halves[index] // page] == stamp, f"window page {index} has other KV"
        if lease.state_slot is not None:
            prefix = request.tokens[: lease.prefix_len]
            stamp = self.stamp(request.namespace, request.generation, prefix) if prefix else 0
            assert int(tier.state_stamps[lease.state_slot]) == stamp, f"the state of {lease.lease_id} is another one"

    def insert(self) -> None:
        """A worker publishes its prompt, or a part of it; a state only follows the last whole page."""
        request = self.any_request()
        if request is None or request.lease.only_locks:
            return
        lease, page, num_tokens = request.lease, self.page, len(request.tokens)
        whole = num_tokens // page * page
        publish_state = self.shape.states > 0 and whole > 0
        if publish_state:
            num_tokens = whole
        elif self.rng.random() < 0.2:
            num_tokens = self.rng.randint(0, num_tokens)
        known = RadixKey(list(request.tokens[:num_tokens]), request.namespace)
        try:
            done = self.device.cache.insert(lease.lease_id, lease.session_id, num_tokens, known, publish_state)
        except OutOfSlotsError:
            return
        if not done.retired:
            self.note_pages(request, num_tokens)
            self.model.device.publish(request.namespace, request.tokens[:num_tokens], request.generation)

    def any_request(self) -> Request | None:
        return self.rng.choice(list(self.requests.values())) if self.requests else None

    def release(self) -> None:
        request = self.any_request()
        if request is not None and (request.lease.num_published_pages or self.rng.random() < 0.2):
            del self.requests[request.lease.lease_id]
            self.note_end(request, request.lease.num_published_pages * self.page)
            assert self.device.cache.release(request.lease.lease_id, request.lease.session_id)

    def give_up_a_fill(self) -> None:
        """A client gives its request up, or dies, while its lease is filled."""
        fills = [(move, request) for move, request in self.filling.items() if request.lease.filling_for]
        if not fills:
            return
        _, request = self.rng.choice(fills)
        session = request.lease.filling_for
        assert session is not None
        self.done["given up"] += 1
        if self.rng.random() < 0.5:
            assert self.device.cache.release(request.lease.lease_id, session)
        else:
            self.end_session(session)

    def use_a_fill(self) -> None:
        """A client uses a lease that it has not got."""
        for request in self.filling.values():
            lease = request.lease
            for session in (lease.filling_for or SESSIONS[0],):
                for use in (self.device.cache.extend, self.device.cache.release_window):
                    try:
                        use(lease.lease_id, session, 1)
                    except (UnknownLeaseError, ExpiredLeaseError):
                        continue
                    raise AssertionError("a lease that is being filled was used")

    def end_session(self, session: str | None = None) -> None:
        session = session or self.rng.choice(SESSIONS)
        if self.rng.random() < 0.5:
            self.device.cache.end_session(session)
        else:
            self.device.cache.quarantine_session(session)
            self.device.cache.free_withheld(session)
        for lease_id, request in list(self.requests.items()):
            if request.lease.session_id == session:
                self.note_end(request, request.lease.num_published_pages * self.page)
                del self.requests[lease_id]

    def evict(self) -> None:
        tier = self.rng.choice((self.device, self.host))
        tier.cache.evict(self.rng.randint(1, 6 * self.page))

    def demote(self) -> None:
        self.moves.writes.batch_pages = self.rng.choice((1, 3, 8))
        reserve = self.rng.choice((12, self.shape.device_pages, self.shape.device_pages)) * self.page
        plan = self.moves.writes.prepare(reserve).moves
        plan += self.moves.writes.prepare_states(self.rng.randrange(self.shape.states + 1)).moves
        plan += self.moves.writes.prepare_windows(reserve).moves
        for move in plan:
            self.check_stop(move)
            self.done["write"] += 1
            self.copied[move] = 0

    def prefetch(self) -> None:
        tokens, namespace = self.prompt()
        move = self.moves.prefetch(RadixKey(list(tokens), namespace), self.rng.choice((None, 3 * self.page)))
        if move is not None:
            self.done["prefetch"] += 1
            self.copied[move] = 0
            self.filling[move] = Request(move.target, tokens, namespace, self.model.generation(namespace))

    def copy_some(self) -> None:
        if self.copied:
            self.copy(self.rng.choice(list(self.copied)), self.rng.randint(1, 3))

    def finish(self) -> None:
        """A copier ends a move: whole most times, early if it was cancelled or failed."""
        if not self.copied:
            return
        rng = self.rng
        move = rng.choice(list(self.copied))
        fails = rng.random() < 0.32
        if not fails or rng.random() < 0.5:
            self.copy(move, move.num_pages)
        num_pages, generation = self.copied.pop(move), self.model.generation(move.key.extra_key)
        is_whole = None if num_pages == move.num_pages and not fails else False
        is_retired = move.is_retired
        finished = self.moves.complete(move, num_pages, is_whole)
        self.done["partial" if 0 < num_pages < move.num_pages else "whole" if num_pages else "none"] += 1
        if move.is_load:
            self.finish_load(self.filling.pop(move), move, finished, is_retired, num_pages, is_whole)
        elif not is_retired and (is_whole is None or not move.is_indivisible):
            tokens = tuple(move.key.token_ids)[: move.first + num_pages * self.page]
            self.model.host.publish(move.key.extra_key, tokens, generation)  # type: ignore[arg-type]

    def finish_load(
        self,
        request: Request,
        move: Move,
        finished: Filled,
        is_retired: bool,
        num_pages: int,
        is_whole: bool | None,
    ) -> None:
        if move.is_indivisible and is_whole is not None:
            num_pages = 0
        if is_retired:
            assert finished.lease is None and finished.num_tokens == 0
            self.done["retired"] += 1
            if finished.must_restart:
                self.model.reused -= move.first
            return
        prefix = request.tokens[: move.first + num_pages * self.page]
        self.note_end(request, len(prefix))
        self.model.device.publish(request.namespace, prefix, request.generation)
        if finished.lease is not None:
            assert finished.lease is request.lease and request.lease.prefix_len == len(prefix)
            self.model.loaded += len(prefix) - move.first
            self.hand_out(request)

    def retire(self) -> None:
        meant = self.rng.choice(NAMESPACES)
        self.done["retirement"] += 1
        is_meant: Callable[[str | None], bool] = lambda namespace: namespace == meant  # noqa: E731
        if self.rng.random() < 0.2:
            is_meant = lambda namespace: True  # noqa: E731
            self.device.cache.reset()
        else:
            self.device.cache.retire(is_meant)
        self.model.retire(is_meant, NAMESPACES)

    # ---------------------------------------------------------------- checks

    @property
    def is_plain(self) -> bool:
        """Whether a match ends where its full KV does."""
        return self.shape.window is None and not self.shape.states

    def resident(self, stamped: StampedTier) -> set[Place]:
        """The pages that can be matched, after a check of all stamps."""
        found: set[Place] = set()
        for node in stamped.cache.radix.parts.tree.nodes():
            found |= self.check_node(stamped, node)
        return found

    def check_node(self, stamped: StampedTier, node: TreeNode) -> set[Place]:
        page, cache = self.page, stamped.cache
        tokens: tuple[int, ...] = sum((tuple(above.key.token_ids) for above in nodes_to(node)), ())  # type: ignore[union-attr, misc]
        namespace = node.namespace.extra_key
        assert node.value is not None
        starts, begin = node.value.numpy()[::page], node.end - len(node)
        places: set[Place] = set()
        for index, start in enumerate(starts):
            end = begin + (index + 1) * page
            stamp = self.stamp(namespace, self.model.generation(namespace), tokens[:end])
            assert stamped.pages[start // page] == stamp, f"{stamped.tier.name} has other KV at {tokens[:end]}"
            if self.shape.window is not None and not node.swa_tombstone:
                half = int(cache.allocator.swa_starts(starts[index : index + 1])[0])
                assert stamped.windows[half // page] == stamp, f"{stamped.tier.name}: window at {tokens[:end]}"
            places.add((namespace, tokens[:end]))
        slot = cache.tree.state_at(node) if self.shape.states else None
        if slot is not None:
            stamp = self.stamp(namespace, self.model.generation(namespace), tokens)
            assert int(stamped.state_stamps[slot]) == stamp, f"{stamped.tier.name} has another state at {tokens}"
        return places

    def locked(self, stamped: StampedTier) -> set[Place]:
        places: set[Place] = set()
        for lease in stamped.cache.leases:
            if lease.node is not None and not lease.retired:
                tokens = tuple(lease.key.token_ids)
                for end in range(self.page, lease.num_published_pages * self.page + 1, self.page):
                    places.add((lease.key.extra_key, tokens[:end]))  # type: ignore[arg-type]
        return places

    def check(self, name: str) -> None:
        self.moves.check_invariants()
        pairs: list[tuple[StampedTier, ReferenceTier]] = [
            (self.device, self.model.device),
            (self.host, self.model.host),
        ]
        for stamped, reference in pairs:
            resident = self.resident(stamped)
            assert resident <= reference.pages.keys(), f"{stamped.tier.name} has pages that nothing has published"
            gone = reference.pages.keys() - resident
            assert not gone & self.locked(stamped), f"{stamped.tier.name} has evicted locked pages"
            may_evict = name in ("acquire", "evict", "insert", "demote", "prefetch")
            assert may_evict or not gone, f"{name} has lost pages of {stamped.tier.name}"
            reference.forget(gone)
        reused = self.device.cache.counters.tokens_reused
        assert reused == self.model.reused + self.model.loaded, f"{reused=} {self.model.reused=} {self.model.loaded=}"
        assert self.moves.loads.counts.loaded == self.model.loaded
        for request in self.requests.values():
            if not request.lease.retired:
                assert request.lease.filling_for is None

    def run(self, num_operations: int) -> Counter[str]:
        """Do so many operations; return how often the rarer things happened.

        Raises:
            TrafficFailed: a check failed.
        """
        operations: dict[Callable[[], None], int] = {
            self.acquire: 24,
            self.insert: 26,
            self.release: 32,
            self.demote: 12,
            self.copy_some: 12,
            self.finish: 24,
            self.evict: 6,
            self.give_up_a_fill: 2,
            self.use_a_fill: 2,
            self.prefetch: 3,
            self.end_session: 1,
            self.retire: 1,
        }
        choices = self.rng.choices(list(operations), list(operations.values()), k=num_operations)
        for number, operation in enumerate(choices):
            try:
                operation()
                self.check(operation.__name__)
            except Exception as error:
                raise TrafficFailed(f"operation {number}, {operation.__name__}: {error}") from error
        while self.copied:
            self.finish()
        self.check("finish")
        assert not self.moves.in_flight
        for cache in (self.device.cache, self.host.cache):
            assert not cache.leases.of_session(TIERS), "a lease of a move is left"
        return self.done
