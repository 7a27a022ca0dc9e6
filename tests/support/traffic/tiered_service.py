"""Random requests to a whole `CacheService` with a host tier, of which copies end in any order, early, or never.

Every slot that a lease reads must have the stamp of its token: it depends on all tokens before it, on the namespace and
on the weights. After each operation both tiers are checked, and at the end no slot is lost in either.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from support.processes.shuffled_loop import ShuffledLoop
from support.tiers.faulty_copier import FaultyCopier
from support.tiers.tiered_service import TieredService, tiered_config
from support.traffic.radix import TrafficFailed

from raydix.actors.sessions.admission import _WRITES
from raydix.actors.tiers.job_threads import End
from raydix.cache_core import RadixKey
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tiers.look_up import LookUp
from raydix.cache_core.tiers.move import Move
from raydix.schemas import (
    AbortRequest,
    AcquireRequest,
    CacheConfig,
    CacheError,
    CloseSession,
    EvictRequest,
    ExtendRequest,
    ExtendResponse,
    InsertRequest,
    LeaseExpired,
    LeaseResponse,
    LockRequest,
    Message,
    PoolExhausted,
    PrefetchRequest,
    ReleaseRequest,
    ReleaseWindowRequest,
    ResetRequest,
    RetireRequest,
    SetWeightsRequest,
    TenantConfig,
    TokenIds,
    UnknownLease,
    WaitingResponse,
    WithdrawRequest,
    frame_namespace,
)

NAMESPACES = (None, "a")
NUM_SESSIONS = 3


@dataclass(frozen=True)
class Shape:
    """The sizes of the two tiers. A window or states make the kind.

    Attributes:
        has_tenants: two tenants share the pool; routers hear of it by slim events.
        has_thread: copies run in a thread, as they do for users.
    """

    page_size: int = 1
    device_pages: int = 24
    host_pages: int = 40
    window: int | None = None
    num_states: int = 0
    bigram: bool = False
    policy: str = "lru"
    has_tenants: bool = False
    has_thread: bool = False

    def __str__(self) -> str:
        kind = "states" if self.num_states else "bigram" if self.bigram else "radix"
        more = f", window of {self.window}" if self.window else ""
        more += ", tenants" * self.has_tenants + ", a thread" * self.has_thread
        return f"{kind}, pages of {self.page_size}{more}, {self.host_pages} on the host, {self.policy}"

    def config(self) -> CacheConfig:
        """The configuration of a cache of these sizes."""
        more: dict[str, Any] = {}
        if self.has_tenants:
            floor, cap = (share * self.device_pages // 8 * self.page_size for share in (2, 6))
            tenants = (TenantConfig(name="a", extra_key="a", floor_slots=floor, cap_slots=cap),)
            more = {"tenants": tenants, "events": "slim"}
        return tiered_config(
            page_size=self.page_size,
            device_pages=self.device_pages,
            host_pages=self.host_pages,
            window=self.window,
            num_states=self.num_states,
            bigram=self.bigram,
            host={"policy": self.policy, "reserve": 0.9},
            eviction={"high_watermark": 0.9, "low_watermark": 0.7, "policy": self.policy},
            leases={"session_ttl_s": 1000.0},
            **more,
        )


@dataclass(eq=False)
class Request:
    """A request for a lease, or an open lease with its tokens.

    Attributes:
        generation: of the weights, once the lease is handed out.
        is_known: whether its prefix must have the KV of those weights.
        waiting: the ticket of a request that waits, for the lease or for its growth.
    """

    session_id: str
    lease_id: str
    namespace: str | None
    tokens: tuple[int, ...]
    message: Message
    generation: int = 0
    is_known: bool = True
    waiting: WaitingResponse | None = None
    is_open: bool = False
    more: tuple[int, ...] = field(default=())  # tokens that it grows by


class ServiceTraffic:
    """Random operations on one service. `run` it on a loop of its own."""

    REFUSALS: tuple[type[CacheError], ...] = (PoolExhausted, UnknownLease, LeaseExpired)
    LATE_REFUSALS: tuple[type[CacheError], ...] = (PoolExhausted,)  # of requests that have waited

    def __init__(self, seed: int, shape: Shape) -> None:
        self.rng = Random(seed)
        self.shape, self.page = shape, shape.page_size
        self.seed = seed
        self.requests: dict[str, Request] = {}
        self.sessions: list[str] = []
        self.num_sessions = 0
        self.generations: Counter[str | None] = Counter()
        self.prompts: list[tuple[tuple[int, ...], str | None]] = []
        self.done: Counter[str] = Counter()
        # tokens that leases found in the pool, and the loads for leases that their sessions have not ended
        self.from_pool = 0
        self.given_up: set[Move] = set()  # loads in flight of which the session has ended the lease
        self.was_checked = False
        self.owned: dict[Move, tuple[str, int]] = {}  # load -> its lease's id, and the tokens that it found in the pool

    def run(self, num_operations: int) -> Counter[str]:
        """Do so many operations; return how often the rarer things happened.

        Raises:
            TrafficFailed: a check failed.
        """
        self.loop = ShuffledLoop(self.seed)
        try:
            self.loop.run_until_complete(self._run(num_operations))
            assert not self.loop.complaints, self.loop.complaints
        finally:
            self.loop.close()
        return self.done

    async def _run(self, num_operations: int) -> None:
        self.cache = self.make()
        self.start()
        operations = self.operations()
        choices = self.rng.choices(list(operations), list(operations.values()), k=num_operations)
        for number, operation in enumerate(choices):
            try:
                done = operation()
                if done is not None:
                    await done
                await self.collect()
                self.check()
            except Exception as error:
                raise TrafficFailed(f"operation {number}, {operation.__name__}: {error!r}") from error
        try:
            await self.end()
        except Exception as error:
            raise TrafficFailed(f"the end: {error!r}") from error

    def make(self) -> TieredService:
        """A new service."""
        return TieredService(self.shape.config(), self.shape.has_thread)

    def start(self) -> None:
        """Begin with a new service."""
        for writes in self.cache.all_writes:
            writes.batch_pages = 3
        for _ in range(NUM_SESSIONS):
            self.open_session()

    def operations(self) -> dict[Callable[[], Any], int]:
        """The operations, and how often each is done."""
        shape = self.shape
        operations: dict[Callable[[], Any], int] = {
            self.acquire: 26,
            self.lock: 4,
            self.retry: 3,
            self.extend: 5,
            self.insert: 28,
            self.release: 24,
            self.release_window: 3 if shape.window else 0,
            self.withdraw: 1,
            self.read: 4,
            self.use_a_fill: 1,
            self.evict: 7,
            self.prefetch: 3,
            self.retire: 1,
            self.end_session: 1,
            self.write_ahead: 14,
            self.turn: 8,
            self.time_passes: 2,
        }
        if shape.has_thread:
            operations[self.let_the_thread_copy] = 26
        else:
            operations |= {self.copy_some: 14, self.begin_a_page: 6, self.finish: 26, self.deliver: 6}
        return operations

    # ---------------------------------------------------------------- sessions and prompts

    def open_session(self) -> None:
        self.num_sessions += 1
        self.sessions.append(f"s{self.num_sessions}")
        self.cache.open(self.sessions[-1])

    def end_session(self) -> None:
        """A client closes its session, or vanishes; another one comes."""
        session_id = self.sessions.pop(self.rng.randrange(len(self.sessions)))
        service = self.cache.service
        self.done["session ended"] += 1
        if self.rng.random() < 0.5:
            service.close_session(CloseSession(session_id=session_id))
        else:
            assert service.reaper.owner_unavailable(session_id, is_dead=True)
        for lease_id in [name for name, request in self.requests.items() if request.session_id == session_id]:
            self.requests.pop(lease_id)
        self.open_session()

    def salt(self, namespace: str | None, generation: int) -> str:
        return f"{namespace}, {generation}"

    def framed(self, namespace: str | None) -> str | None:
        return frame_namespace(namespace, None, None)

    def prompt(self) -> tuple[tuple[int, ...], str | None]:
        """A prompt of which the host has more, or one that goes on where another ended, or shares its beginning."""
        rng, page, lower = self.rng, self.page, self.cache.lower
        below = [
            (tokens, namespace)
            for tokens, namespace in self.prompts[-12:]
            if lower.missing(LookUp(RadixKey(list(tokens), self.framed(namespace)))) > 0
        ]
        if below and rng.random() < 0.6:
            return rng.choice(below)
        if self.prompts and rng.random() < 0.6:
            tokens, namespace = rng.choice(self.prompts[-24:])
            tokens = tokens[: rng.choice((page, len(tokens), len(tokens)))]
            tokens += (rng.choice((1, 2, 3)),) * rng.choice((0, 0, 1, page))
        else:
            row: list[int] = []
            for _ in range(rng.randint(1, 4)):
                row += [rng.choice((1, 1, 2, 2, 3))] * rng.choice((page, 2 * page))
            tokens, namespace = tuple(row), rng.choice(NAMESPACES)
        tokens = tokens[: 10 * page]
        self.prompts.append((tokens, namespace))
        return tokens, namespace

    # ---------------------------------------------------------------- requests

    def ask(self, message: Message, session_id: str) -> Any:
        answer = self.cache.ask(message, session_id)
        self.was_checked = True  # by the service, as `CacheConfig.validate` is True
        if isinstance(answer, CacheError):
            assert isinstance(answer, self.REFUSALS), f"{answer!r} to {message}"
        return answer

    def acquire(self) -> None:
        rng, (tokens, namespace) = self.rng, self.prompt()
        message = AcquireRequest(
            self.cache.new_id(),
            TokenIds.pack(tokens),
            self.framed(namespace),
            new_tokens=rng.choice((0, 0, 1, 3)),
            max_prefix_len=rng.choice((None, None, None, None, rng.randrange(len(tokens) + 1))),
            timeout_s=rng.choice((0.0, 0.0, 5.0)),
            resumed=rng.random() < 0.2,
            load=rng.random() < 0.9,
            load_timeout_s=rng.choice((None, None, None, 0.0, 0.5)),
        )
        self.begin(message, tokens, namespace)

    def lock(self) -> None:
        rng, (tokens, namespace) = self.rng, self.prompt()
        message = LockRequest(
            lease_id=self.cache.new_id(),
            tokens=TokenIds.pack(tokens),
            namespace=self.framed(namespace),
            timeout_s=rng.choice((0.0, 5.0)),
        )
        self.begin(message, tokens, namespace)

    def begin(self, message: AcquireRequest | LockRequest, tokens: tuple[int, ...], namespace: str | None) -> None:
        session_id = self.rng.choice(self.sessions)
        request = Request(session_id, message.lease_id, namespace, tokens, message)
        self.settle(request, self.ask(message, session_id))

    def retry(self) -> None:
        """The answer to a request was lost, so its client asks again."""
        if not self.requests:
            return
        request = self.rng.choice(list(self.requests.values()))
        answer = self.ask(request.message, request.session_id)
        if request.is_open:
            assert isinstance(answer, LeaseResponse), answer
            record = self.record(request)
            assert (answer.prefix_len, answer.loaded_len) == (record.prefix_len, record.loaded_len)
        else:
            assert isinstance(answer, WaitingResponse) and request.waiting is not None, answer
            assert answer.ticket == request.waiting.ticket
            self.done["retry of a ticket"] += 1

    def settle(self, request: Request, answer: Any) -> None:
        """Take the answer to a request for a lease."""
        if isinstance(answer, WaitingResponse):
            request.waiting = answer
            self.requests[request.lease_id] = request
            self.done["waits for a load" if answer.loading_tokens else "waits"] += 1
        elif isinstance(answer, LeaseResponse):
            self.requests[request.lease_id] = request
            request.waiting, request.is_open = None, True
            request.generation = self.generations[request.namespace]
            record = self.record(request)
            assert record.filling_for is None and not record.retired
            assert (answer.prefix_len, answer.loaded_len) == (record.prefix_len, record.loaded_len)
            self.from_pool += answer.prefix_len - answer.loaded_len
            self.done["loaded"] += answer.loaded_len > 0
            request.is_known = self.knows(request.session_id)
            if request.is_known:
                self.cache.check_prefix(record, request.tokens, self.salt_of(request))
            if isinstance(request.message, LockRequest):
                assert not len(record.private_starts)
                request.tokens = request.tokens[: record.prefix_len]
            else:
                self.cache.compute(record, request.tokens, self.salt_of(request))
        else:
            self.done[type(answer).__name__] += 1
            self.requests.pop(request.lease_id, None)

    def record(self, request: Request) -> LeaseRecord:
        return self.cache.record(request.lease_id, request.session_id)

    def any_open(self) -> Request | None:
        """An open lease that does not grow."""
        found = [request for request in self.requests.values() if request.is_open and request.waiting is None]
        return self.rng.choice(found) if found else None

    def extend(self) -> None:
        request = self.any_open()
        if request is None or isinstance(request.message, LockRequest):
            return
        record = self.record(request)
        request.more = (self.rng.choice((1, 2, 3)),) * self.rng.randint(1, self.page + 1)
        message = ExtendRequest(
            lease_id=request.lease_id,
            num_slots=max(record.num_slots, len(request.tokens) + len(request.more)),
            known_pages=len(record.starts),
            timeout_s=self.rng.choice((0.0, 5.0)),
        )
        self.grow(request, self.ask(message, request.session_id))

    def grow(self, request: Request, answer: Any) -> None:
        """Take the answer to a growth, and compute the tokens that it is for."""
        request.waiting = None
        if isinstance(answer, WaitingResponse):
            request.waiting = answer
            self.done["growth waits"] += 1
        elif isinstance(answer, ExtendResponse):
            request.tokens += request.more
            self.cache.compute(self.record(request), request.tokens, self.salt_of(request))
        else:
            self.done["growth refused"] += 1

    def insert(self) -> None:
        """A worker publishes its prompt, or a part of it; a state follows the last whole page."""
        request = self.any_open()
        if request is None or isinstance(request.message, LockRequest):
            return
        num_tokens, publish_state, record = len(request.tokens), False, self.record(request)
        if self.shape.num_states:
            num_tokens = num_tokens // self.page * self.page
            publish_state = num_tokens > 0
        elif self.rng.random() < 0.2:
            num_tokens = self.rng.randint(1, num_tokens)
        if not num_tokens:
            return
        release = self.rng.random() < 0.5
        suffix = TokenIds.pack(request.tokens[min(len(record.key), num_tokens) : num_tokens])
        message = InsertRequest(request.lease_id, num_tokens, suffix, release, publish_state)
        answer = self.ask(message, request.session_id)
        if isinstance(answer, PoolExhausted):
            assert publish_state
            self.done["no state to publish"] += 1
        else:
            assert not isinstance(answer, CacheError), answer
            if release:
                self.requests.pop(request.lease_id)
            elif not record.retired:
                self.check_read(request, num_tokens)

    def salt_of(self, request: Request) -> str:
        return self.salt(request.namespace, request.generation)

    def knows(self, session_id: str) -> bool:
        """Return whether a session may find only the KV of the weights as they are."""
        return True

    def check_read(self, request: Request, num_tokens: int) -> None:
        if request.is_known:
            self.cache.check_read(self.record(request), request.tokens, num_tokens, self.salt_of(request))

    def release(self) -> None:
        """A client ends a lease, or gives up a request that waits."""
        if not self.requests:
            return
        request = self.requests.pop(self.rng.choice(list(self.requests)))
        self.done["given up"] += not request.is_open
        end = ReleaseRequest if self.rng.random() < 0.5 else AbortRequest
        assert not isinstance(answer := self.ask(end(lease_id=request.lease_id), request.session_id), CacheError), (
            answer
        )

    def withdraw(self) -> None:
        """A client withdraws a request that waits, and keeps its lease if it has one."""
        waiting = [request for request in self.requests.values() if request.waiting is not None]
        if not waiting:
            return
        request = self.rng.choice(waiting)
        self.done["withdrawn"] += 1
        self.ask(WithdrawRequest(lease_id=request.lease_id), request.session_id)
        request.waiting = None
        if not request.is_open:
            self.requests.pop(request.lease_id)

    def release_window(self) -> None:
        request = self.any_open()
        assert self.shape.window is not None
        if request is None or isinstance(request.message, LockRequest):
            return
        up_to = max(0, len(request.tokens) - self.shape.window + 1)
        self.ask(ReleaseWindowRequest(lease_id=request.lease_id, up_to=up_to), request.session_id)

    def read(self) -> None:
        request = self.any_open()
        if request is not None:
            self.check_read(request, len(request.tokens))

    def use_a_fill(self) -> None:
        """A client uses a lease that it has not got."""
        for request in self.requests.values():
            if not request.is_open:
                message = InsertRequest(request.lease_id, 1, TokenIds.pack([]))
                assert isinstance(self.ask(message, request.session_id), UnknownLease)

    # ---------------------------------------------------------------- administration

    def evict(self) -> None:
        num_tokens, places = self.rng.randint(1, 6 * self.page), self.cache.service._places
        tier = self.rng.choice(["device", *(place.tier.name for place in places)])
        message = EvictRequest(num_tokens=num_tokens, tier=tier)
        self.ask(message, self.rng.choice(self.sessions))

    def prefetch(self) -> None:
        tokens, namespace = self.prompt()
        message = PrefetchRequest(tokens=TokenIds.pack(tokens), namespace=self.framed(namespace))
        self.done["prefetch"] += self.ask(message, self.rng.choice(self.sessions)).num_tokens > 0

    def retire(self) -> None:
        """Other weights come, for one namespace or for all."""
        self.done["retirement"] += 1
        meant = self.rng.choice((*NAMESPACES, "all", "weights"))
        for namespace in NAMESPACES:
            self.generations[namespace] += meant in (namespace, "all", "weights")
        message: Message = ResetRequest()
        if meant == "weights":
            message = SetWeightsRequest(label=f"step {self.done['retirement']}")
        elif meant == "a":
            message = RetireRequest(extra_key="a")
        elif meant is None:
            self.cache.service.core.retire(lambda extra_key: extra_key is None)
            return
        assert not isinstance(answer := self.ask(message, self.rng.choice(self.sessions)), CacheError), answer

    # ---------------------------------------------------------------- copies and time

    def any_copier(self) -> FaultyCopier | None:
        copiers = self.cache.copiers
        busy = [copier for copier in copiers if copier.open]
        return self.rng.choice(busy or copiers) if copiers else None

    def copy_some(self) -> None:
        copier = self.any_copier()
        if copier is not None and copier.open:
            copier.advance(self.rng.choice(copier.open), self.rng.randint(1, 3))

    def begin_a_page(self) -> None:
        """The copier begins a page of a copy, or ends the one that it is in."""
        copier = self.any_copier()
        if copier is None:
            return
        if copier.current is not None:
            copier.pass_page()
        elif unfinished := [copy for copy in copier.open if copy.num_chunks < len(copy.chunks)]:
            copier.current = self.rng.choice(unfinished)

    def finish(self) -> None:
        """The copier ends a copy: whole most times, or early."""
        rng, copier = self.rng, self.any_copier()
        if copier is None or not copier.open:
            return
        copy = rng.choice(copier.open)
        ends: list[End] = ["whole", "whole", "whole", "failed"]
        if copy.is_load and copy.deadline is not None:
            ends.append("late")
        end = "cancelled" if copy.is_cancelled else rng.choice(ends)
        self.done[f"{'load' if copy.is_load else 'write'}, {end}"] += 1
        copier.finish(copy, end, None if end == "whole" else rng.randint(0, len(copy.plan)))

    def deliver(self) -> None:
        for copier in self.cache.copiers:
            copier.deliver()

    async def let_the_thread_copy(self) -> None:
        time.sleep(0.0003)  # noqa: ASYNC251 -- the loop has no time of its own
        await self.cache.turn(1)

    def write_ahead(self) -> None:
        self.cache.tiers.write_ahead()

    async def turn(self) -> None:
        """The loop runs what is ready, such as the eviction task."""
        self.loop.now += 0.1
        await self.cache.turn(self.rng.randint(1, 5))

    async def time_passes(self) -> None:
        """The time of all that wait runs out, for loads or for room, too."""
        self.loop.now += self.rng.choice((0.6, 3.0, 6.0))
        await self.cache.turn()

    # ---------------------------------------------------------------- checks

    async def collect(self) -> None:
        """Take the outcomes of the tickets that are settled, in the order of their requests."""
        for request in list(self.requests.values()):
            waiting = request.waiting
            if waiting is None or not self.cache.is_settled(waiting):
                continue
            outcome = await self.cache.outcome(waiting, request.session_id)
            if isinstance(outcome, CacheError):
                assert isinstance(outcome, self.LATE_REFUSALS), f"{outcome!r} for {request}"
            self.done["served late"] += 1
            if request.is_open:
                self.grow(request, outcome)
            else:
                self.settle(request, outcome)

    def check(self) -> None:
        cache = self.cache
        if not self.was_checked:
            cache.lower.check_invariants()
        self.was_checked = False
        in_flight = cache.in_flight
        for move in in_flight:
            if move.is_load and move.target.filling_for:
                # A lease that is loaded from two tiers in turn begins with the first one's tokens.
                self.owned[move] = move.target.lease_id, move.first - move.target.loaded_len
        for move in list(self.owned):
            lease, (lease_id, started) = move.target, self.owned[move]
            if lease.lease_id != lease_id:  # it was taken from its request, which begins again if it has not ended
                del self.owned[move]
                self.from_pool += started * (move in self.given_up)
                continue
            if lease.filling_for == "":
                self.given_up.add(move)
            if move in in_flight:
                continue
            del self.owned[move]
            # One that its session has ended, or withdrawn, counts as a request that was served.
            is_given_up = lease.filling_for == "" or (lease.filling_for is None and lease.lease_id not in self.requests)
            self.from_pool += started * is_given_up
        counters, loaded = cache.service.core.counters, sum(loads.counts.loaded for loads in cache.all_loads)
        reused = counters.tokens_reused + counters.tokens_reused_resumed
        started = sum(tokens for _, tokens in self.owned.values())
        assert reused == self.from_pool + started + loaded, f"{reused=} {self.from_pool=} {started=} {loaded=}"
        self.check_leases(in_flight)

    def check_leases(self, in_flight: list[Move]) -> None:
        """Each lease of a client is one that the client has, or is being filled; who waits for others has none."""
        service = self.cache.service
        known = {lease_id for lease_id, request in self.requests.items() if request.is_open}
        held = {lease.lease_id for _, lease in service.core.leases.of_clients() if lease.filling_for is None}
        assert held == known, f"leases that no client has, or that are gone: {held ^ known}"
        filling = {move.target.lease_id: move for move in in_flight if move.is_load}
        for request in self.requests.values():
            if request.waiting is None:
                continue
            waiter = service.wait_queue._by_ticket[request.waiting.ticket]
            load = waiter.waits_for
            if isinstance(load, Move):
                assert load in in_flight, f"{request} waits for a load that has ended"
                is_own = load.target.lease_id == request.lease_id
                assert is_own or request.lease_id not in filling
            elif load == _WRITES:
                assert self.cache.lower.locks_pool, f"{request} waits for writes that have ended"
            else:
                assert waiter.is_queued, f"{request} waits for nothing"

    async def end(self) -> None:
        """End all copies, tickets and leases; no slot is lost, and nobody waits."""
        cache = self.cache
        for _ in range(3_000 if self.shape.has_thread else 100):
            if not (self.requests or cache.in_flight):
                break
            if self.shape.has_thread:
                time.sleep(0.002)  # noqa: ASYNC251 -- as above
            else:
                self.end_copies()
            self.loop.now += 10
            await cache.turn()
            await self.collect()
            self.check()
            for lease_id in [name for name, request in self.requests.items() if request.waiting is None]:
                request = self.requests.pop(lease_id)
                cache.release(lease_id, request.session_id)
        assert not self.requests, f"waits for ever: {self.requests}"
        assert not len(cache.service.wait_queue) and not cache.service.wait_queue.num_loading
        assert not len(cache.service.core.pending_pages()), "routers still expect pages"
        await cache.close()

    def end_copies(self) -> None:
        """The copier ends all copies."""
        for copier in self.cache.copiers:
            for copy in list(copier.open):
                if copy in copier.open:
                    copier.finish(copy)
            copier.deliver()


def run_traffic(shape: Shape, seeds: range, num_operations: int) -> Counter[str]:
    """Run the traffic of each seed; return what happened in all."""
    return sum((ServiceTraffic(seed, shape).run(num_operations) for seed in seeds), Counter[str]())
