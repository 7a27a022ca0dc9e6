"""`CacheService`: sessions, requests, the wait queue and background eviction around one cache.

Both the Ray actor and `LocalPrefixCache` drive it. All state lives on one event loop, and no operation awaits between
its first look at the cache and its last change of it: each is atomic.

How a request runs: one `acquire` of a cached prompt over the Unix socket, from the client's call to the node and back.

    client  actors/client/lease.py                  makes `acquire` awaitable and usable with `async with`
            actors/client/prefix_cache_client.py    `acquire`: the arguments as a request
            actors/transport/validation.py          checks the arguments
            schemas/tokens.py                       packs the token ids: copy 1
            schemas/requests.py                     `AcquireRequest`: checks itself, here and where it arrives
            actors/client/client_session.py         opens a session if none is open
            actors/transport/ray_transport.py       queues the request; the requests of one tick become one batch
            actors/transport/unix_socket.py         sends the batch, and later receives its answer
            actors/transport/batch_codec.py         packs the batch as rows of plain values: copy 2
    cache   actors/service/unix_socket_server.py    unpacks the batch in the tick in which it arrives
            actors/service/cache_service.py         `execute`: finds the session once, dispatches each request in order
            actors/sessions/session_table.py        moves the session's deadline
            actors/metrics/distribution.py          counts the size of the batch
            actors/sessions/admission.py            `acquire`: now, after a wait, or not at all
    core    cache_core/tree/radix_key.py            the token ids as the tree's key, without a copy
            cache_core/leases/leased_cache.py       `acquire`: checks the arguments, counts the hit
            cache_core/leases/lease_table.py        returns the open lease if the request is a retry
            cache_core/leases/kv_cache.py           matches, locks and allocates the other slots in one step
            cache_core/leases/lease_allocator.py    checks that so many slots can ever fit
            cache_core/radix/prefix_cache.py        `match_pages`, then `inc_lock_ref` on the node
            cache_core/radix/lookup.py              the longest cached prefix
            cache_core/tree/radix_tree.py           the namespace; from it the compiled walk goes down to the node
            cache_core/tree/tree_node.py            joins the slots of the path
            actors/observe/namespace_hits.py        counts the hit for its namespace
    back    actors/client/lease_slots.py            the answer, sent as above, becomes the lease and its slots
            actors/client/expired_writers.py        remembers the lease until it ends
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from raydix.actors.loop.loop_turns import LoopTurns
from raydix.actors.metrics.distribution import ACQUIRE_S, BATCH_SIZES, Distribution
from raydix.actors.observe.ghost import Ghost
from raydix.actors.observe.insight import Insight
from raydix.actors.observe.loop_lag import LoopLag
from raydix.actors.observe.recordings import Recordings
from raydix.actors.service.core_factory import build_core, build_disk_cache, build_host_cache, host_gauge
from raydix.actors.service.eviction_task import EvictionTask, PoolGauge
from raydix.actors.service.findings import NEVER_RESTARTED, Restarts, disk_finding
from raydix.actors.service.request_handlers import Answer, RequestHandlers
from raydix.actors.service.stats import core_stats, host_stats
from raydix.actors.service.tier_feeds import TierFeeds
from raydix.actors.sessions.admission import Admission
from raydix.actors.sessions.deadlocks import Deadlocks
from raydix.actors.sessions.lease_offers import LeaseOffers
from raydix.actors.sessions.lease_owners import LeaseOwners
from raydix.actors.sessions.model_bindings import ModelBindings
from raydix.actors.sessions.refusals import Refusals
from raydix.actors.sessions.session_reaper import SessionReaper
from raydix.actors.sessions.session_table import Session
from raydix.actors.sessions.wait_queue import WaitQueue
from raydix.actors.tiers.host.host_tier import HostTier
from raydix.actors.tiers.lower_tiers import LowerTiers
from raydix.actors.transport import batch_codec
from raydix.actors.transport.error_map import to_cache_error
from raydix.actors.transport.validation import checked_message, checked_seconds
from raydix.cache_core import KVCache, KVPool, LeasedCache, OutOfSlotsError, RecordPool
from raydix.cache_core.leases.lease_table import TIERS
from raydix.cache_core.tiers.tier import Tier
from raydix.schemas import (
    Batch,
    BatchResponse,
    CacheConfig,
    CacheLoad,
    CacheReport,
    CacheStats,
    CacheUnavailable,
    CloseSession,
    ConfigMismatch,
    DiskTierStats,
    InvalidRequest,
    Message,
    NextEvents,
    OpenSession,
    PackedEvents,
    SessionRef,
    SessionResponse,
    StaleEpoch,
    WaitRequest,
)
from raydix.schemas.message import Malformed
from raydix.schemas.requests import DEVICE

if TYPE_CHECKING:
    from raydix.actors.tiers.disk.disk_errors import FolderInUse
    from raydix.actors.tiers.disk.disk_store import DiskStore
    from raydix.actors.tiers.disk.disk_tier import DiskTier

logger = logging.getLogger(__name__)

_DRAINING = "the cache is draining: it is shutting down, so leases may end but not begin or grow"
_SHUT_DOWN = "the cache has been shut down"
_DRAIN_POLL_S = 0.05
_NUM_OWNERS = 32  # owners that the statistics name
_DISK_CLOSE_S = 5.0  # for which the end of a cache waits for a disk that does not answer
_TURN_TIMEOUT_S = 5.0  # a batch waits so long for the one before it


class CacheService:
    """The requests, sessions and background tasks of one cache.

    Attributes:
        clock: of sessions and latencies, in seconds.
        findings: faults of the cache's node, for the statistics.
        niceness: that Ray has added to the cache's process, for the statistics.
        turns: the turns of the loop that requests of this process take; None: the cache has no tensors, so none.

    Args:
        config: of the cache.
        epoch: names this life of the cache.
        pool: the tensors, of which the cache copies states and rows; None: there are none.
        medium: where the KV is, for events: "GPU" or "CPU"; with a host tier it is always "GPU".
        clock: seconds, of any origin; by it sessions expire.
        restarts: of this cache, before this life of it.
        name: of the cache: of its folder on the disk.
        disk: its files, as `open_disk` returned them; None: the disk is opened when the first session begins.
    """

    def __init__(
        self,
        config: CacheConfig,
        epoch: str,
        pool: KVPool | RecordPool | None = None,
        medium: str = "CPU",
        clock: Callable[[], float] = time.monotonic,
        restarts: Restarts = NEVER_RESTARTED,
        name: str = "local",
        disk: DiskStore | FolderInUse | None = None,
    ) -> None:
        self.config = config
        self._restarts = restarts
        self.findings: tuple[str, ...] = ()
        self.niceness = 0
        self.epoch = epoch
        self._closed = self._draining = False
        self.clock = clock
        self._batch_size = Distribution(BATCH_SIZES)
        self._insert_latency = Distribution(ACQUIRE_S)
        self.wait_queue = WaitQueue(config.leases.max_waiters, clock)
        self.core, gauges = build_core(config, pool, self._on_pressure)
        self.bindings = ModelBindings(self.core, config.fingerprint)
        self.host: HostTier | None = None
        self.disk: DiskTier | None = None
        if config.host is not None or config.disk is not None:
            assert pool is not None and isinstance(self.core, KVCache), "the configuration refuses other caches"
            device = Tier(DEVICE, medium if config.host is None else "GPU", self.core)
            self.host = self._make_host(device, pool, gauges)
            self.disk = self._make_disk(device, pool, name, disk)
        self._places = [place for place in (self.host, self.disk) if place is not None]
        self.tiers = LowerTiers(self.core, self._places)
        self.reaper = SessionReaper(config.leases, self.core, self.wait_queue, self._after_session, clock)
        self.sessions = self.reaper.sessions
        write_ahead = None if self.host is None else self.host.write_ahead
        self.eviction_task = EvictionTask(config.eviction, gauges, self._reclaim, self._serve_queue, write_ahead)
        self.offers = LeaseOffers(self.core, config.leases.grant_timeout_s, self._serve_queue, clock)
        self._owners = LeaseOwners(self.core, self.sessions)
        self.lag = LoopLag()
        self._refusals = Refusals(self.core, self._owners)
        self._admission = Admission(
            self.core, self.wait_queue, self._refusals, self.bindings, self.offers, self.tiers, config.leases
        )
        self._deadlocks = Deadlocks(self.core, self.wait_queue, self._refusals)
        self.feeds = TierFeeds(config, epoch, self._load, clock)
        self.feeds.add(DEVICE, medium if self.host is None else "GPU", self.core)
        caches: dict[str, LeasedCache] = {DEVICE: self.core}
        for place in self._places:
            self.feeds.add(place.tier.name, place.tier.medium, place.tier.cache)
            caches[place.tier.name] = place.tier.cache
        self._time_evictions(clock)
        self.insight = Insight(self.core, clock)
        self._handlers = RequestHandlers(
            epoch,
            self.core,
            self.wait_queue,
            self._admission,
            self.offers,
            self.bindings,
            self.tiers,
            self.disk,
            caches,
            self.feeds,
            self.stats,
            self.insight.unused_s,
        )
        self._verbs = self._handlers.verbs
        self.turns = LoopTurns(self._has_work, self._needs_threads) if config.pool.has_tensors else None
        self.recordings = Recordings(self.core.observers, clock, config.page_size)
        self.ghost = Ghost(config, config.ghost) if config.ghost is not None else None
        if self.ghost is not None:
            self.core.observers.append(self.ghost.curve)

    def _make_host(self, device: Tier, pool: KVPool | RecordPool, gauges: list[PoolGauge]) -> HostTier | None:
        """Return the host tier, and add its gauge; None without one."""
        host = self.config.host
        if host is None:
            return None
        cache = build_host_cache(self.config, self._on_pressure)
        if host.high_watermark < 1.0:
            gauges.append(host_gauge(host, cache))
        may_begin = lambda: not (self._draining or self.wait_queue.waiting)  # noqa: E731
        return HostTier(self.config, device, cache, pool, self.epoch, self._after_writes, self._after_load, may_begin)

    def _make_disk(
        self, device: Tier, pool: KVPool | RecordPool, name: str, opened: DiskStore | FolderInUse | None
    ) -> DiskTier | None:
        """Return the disk tier; None without one.

        Raises:
            CacheUnavailable: its size has no room for a page.
        """
        if self.config.disk is None:
            return None
        # This imports xxhash.
        from raydix.actors.tiers.disk.disk_layout import disk_sizes
        from raydix.actors.tiers.disk.disk_tier import DiskTier
        from raydix.actors.tiers.disk.disk_writes import Source

        try:
            cache = build_disk_cache(self.config, disk_sizes(self.config))
        except ValueError as error:
            raise CacheUnavailable(f"the disk tier cannot be made: {error}") from error
        sources = [Source(device, lambda: pool)]
        if (host := self.host) is not None:
            sources.append(Source(host.tier, lambda: host.memory.pool))
        disk = DiskTier(
            self.config,
            name,
            sources,
            cache,
            self.bindings.models_of,
            self._after_writes,
            self._after_load,
            opened=opened,
            clock=self.clock,
        )
        self.bindings.disk = cache
        disk.may_begin = lambda: not self.wait_queue.waiting
        return disk

    def _on_pressure(self) -> None:
        self.eviction_task.note_pressure()

    def _after_writes(self) -> None:
        """Serve the queue after writes to a tier have ended, and have more written."""
        if self.turns is not None:
            self.turns.note_progress()
        if not self._closed:
            self.eviction_task.wake()
            self._serve_queue()

    def _after_load(self) -> None:
        """Serve the queue after a load has ended. It frees slots, or lets them be evicted, if it was given up."""
        if self.turns is not None:
            self.turns.note_progress()
        if not self._closed:
            self.eviction_task.wake_if_pressed()
            if self.wait_queue.waiting:
                self._serve_queue()

    def _has_work(self) -> bool:
        """Return whether work waits for turns of the loop: evictions, or moves between tiers. Cheap."""
        return self.eviction_task.is_due or any(place.has_work for place in self._places)

    def _needs_threads(self) -> bool:
        """Return whether threads are at work for the tiers."""
        return any(place.needs_threads for place in self._places)

    def _reclaim(self, max_tokens: int) -> int:
        """Free about so many slots of retired namespaces, in all tiers; return their number."""
        freed, cache = self.core.reclaim(max_tokens), self.core.below
        while not freed and cache is not None:
            freed, cache = cache.reclaim(max_tokens), cache.below
        return freed

    # ---------------------------------------------------------------- sessions

    def open_session(self, request: OpenSession) -> SessionResponse:
        """Begin a session, or go on with it if it is open; start the background tasks on the running loop."""
        self.check_taking()
        checked_message(OpenSession, request)
        if request.session_id == TIERS:
            raise InvalidRequest(f"session_id must not be {TIERS!r}: moves between tiers have it. Choose another id")
        if request.config_digest not in (None, self.config.digest()):
            raise ConfigMismatch(
                f"the cache runs with configuration {self.config.digest()}, not {request.config_digest!r:.80}: "
                "`raydix describe` prints it"
            )
        has_come_back = bool(request.bound) and request.session_id not in self.sessions
        session = self.reaper.open(request)
        if has_come_back:
            self.bindings.lapse(request.session_id, request.bound, request.bound_more)
        for place in self._places:
            place.start()
        self.eviction_task.start()
        self.lag.start()
        self.insight.start()
        self.offers.start()
        return SessionResponse(epoch=self.epoch, config=self.config, sees_process=session.life is not None)

    def change_loop(self) -> None:
        """Stop the tasks of a loop that was closed: they start with the next session, on another loop."""
        self.reaper.stop()
        self.offers.stop()
        self.lag.stop()
        self.insight.stop()
        self.wait_queue.change_loop()
        # First the disk: the ends of copies would wake it on the loop that was closed.
        if self.disk is not None:
            logger.warning("the cache serves without its disk from now on, as its event loop was closed")
            self.disk.close(_DISK_CLOSE_S)
        if self.host is not None:
            self.host.stop_copies()
        if self.turns is not None:
            self.turns.change_loop()
        self.recordings.change_loop()
        self.feeds.change_loop()
        self.eviction_task.change_loop()

    def close_session(self, request: CloseSession) -> None:
        """End a session with all its leases; no effect if it is not open."""
        self.reaper.close(checked_message(CloseSession, request).session_id)

    async def heartbeat(self, request: SessionRef, stay_s: float) -> None:
        """Note that a client lives. Takes `stay_s`.

        Raises:
            CacheError: its session is over, or ends meanwhile.
        """
        checked_message(SessionRef, request)
        if await self.reaper.ends_within(self.session(request.session_id, request.epoch), checked_seconds(stay_s)):
            self.session(request.session_id, request.epoch)

    def _after_session(self, session_id: str) -> None:
        """Wake the readers of events of a session that has ended, and serve the queue."""
        self.bindings.forget(session_id)
        self.feeds.end_session(session_id)
        self._serve_queue()

    def _serve_queue(self) -> None:
        """Serve queued requests: slots may have become free. Resolve deadlocks of the others."""
        self.wait_queue.serve()
        self._deadlocks.resolve()
        if self.disk is not None:
            self.disk.wake()

    def session(self, session_id: str, epoch: str) -> Session:
        """Return the open session that a message names, and move its deadline.

        Raises:
            CacheUnavailable: the cache has been shut down.
            StaleEpoch: the message belongs to an earlier life of the cache.
            LeaseExpired: the session was silent for too long.
            InvalidRequest: no such session is open.
        """
        if self._closed:
            raise CacheUnavailable(_SHUT_DOWN)
        if epoch != self.epoch:
            raise StaleEpoch(epoch, self.epoch)
        return self.sessions.heard_of(session_id)

    def check_taking(self) -> None:
        """Check that sessions may begin.

        Raises:
            CacheUnavailable: the cache drains, or was shut down.
        """
        if self._closed:
            raise CacheUnavailable(_SHUT_DOWN)
        if self._draining:
            raise CacheUnavailable(_DRAINING)

    async def drain(self, drain_s: float) -> int:
        """Refuse new sessions, new and growing leases, and queued requests, for good.

        Open leases can be read, published and ended. Retirements that wait for the disk go on waiting. Return when no
        lease is left, or after `drain_s` the number left.
        """
        deadline = time.monotonic() + checked_seconds(drain_s)
        self._draining = True
        self.wait_queue.refuse_all(CacheUnavailable(_DRAINING))
        leases = self.core.leases
        while leases.num_of_clients and time.monotonic() < deadline:  # noqa: ASYNC110 -- once in a life
            await asyncio.sleep(_DRAIN_POLL_S)
        return leases.num_of_clients

    async def close(self) -> None:
        """Refuse new sessions, end the open ones, stop the background task.

        Retirements that wait for the disk's commit are answered first.
        """
        self._closed = True
        await self.wait_queue.end_commits()
        self.reaper.close_all(CacheUnavailable(_SHUT_DOWN))
        self.feeds.close()
        self.offers.stop()
        self.lag.stop()
        self.insight.stop()
        if self.recordings.status() is not None:
            await self.recordings.stop()
        await self.eviction_task.stop()
        if self.disk is not None:
            await self.disk.flush(self.disk.config.flush_s)
            self.disk.close(_DISK_CLOSE_S)
        if self.host is not None:
            self.host.close()

    # ---------------------------------------------------------------- execution

    async def execute_packed(self, *parts: bytes) -> bytes:
        """Execute a numbered batch that a Ray call brought; return a packed `BatchResponse`."""
        arrived_at = self.clock()
        batch = checked_message(Batch, batch_codec.unpack(*parts))
        return batch_codec.pack(await self.execute_in_turn(batch, arrived_at))

    async def execute_in_turn(self, batch: Batch, arrived_at: float | None = None) -> BatchResponse:
        """Execute a numbered batch after the one that it names: Ray starts the calls of a client in any order.

        Args:
            arrived_at: when the batch arrived, by the clock; None: now.

        Raises:
            CacheError: the session is over; or a later batch was executed before: this one was taken for lost.
        """
        if arrived_at is None:
            arrived_at = self.clock()
        session = self.session(batch.session_id, batch.epoch)
        if batch.after > session.executed_seq:
            turn = session.batch_order.setdefault(batch.after, asyncio.get_running_loop().create_future())
            await asyncio.wait((turn,), timeout=_TURN_TIMEOUT_S)  # the batch before it may be lost on the way
            session.batch_order.pop(batch.after, None)
            session = self.session(batch.session_id, batch.epoch)  # it may have ended meanwhile
        try:
            # A batch with number 0 has no place in the order.
            if 0 < batch.seq < session.executed_seq:
                raise CacheUnavailable("the batch came too late, after later ones of its client: ask again")
            return self._execute(session, batch.requests, arrived_at)
        finally:
            session.executed_seq = max(session.executed_seq, batch.seq)
            if (turn_of_next := session.batch_order.pop(batch.seq, None)) is not None:
                turn_of_next.set_result(None)

    def execute(
        self, session_id: str, epoch: str, requests: Sequence[Message], arrived_at: float | None = None
    ) -> BatchResponse:
        """Execute requests in order; one that fails leaves its error in its place.

        Args:
            arrived_at: when the requests arrived, by the clock; None: now.

        Raises:
            CacheError: the session is over; or with `CacheConfig.validate` a rule of the cache is broken afterwards.
        """
        return self._execute(self.session(session_id, epoch), requests, arrived_at)

    def _execute(self, session: Session, requests: Sequence[Message], arrived_at: float | None) -> BatchResponse:
        if arrived_at is None:
            arrived_at = self.clock()
        self._batch_size.add(len(requests))
        admission, dispatch = self._admission, self._dispatch
        num_acquires, num_locks, num_inserts = admission.num_acquires, admission.num_locks, admission.num_inserts
        responses = tuple([dispatch(session.session_id, request) for request in requests])
        if self.wait_queue.waiting:
            self._serve_queue()
        if self.config.events:
            self.feeds.note_load()
        num_acquires = admission.num_acquires - num_acquires
        num_locks, num_inserts = admission.num_locks - num_locks, admission.num_inserts - num_inserts
        if num_acquires or num_locks or num_inserts:
            took_s = self.clock() - arrived_at
            if num_acquires:
                self.wait_queue.acquire_latency.add(took_s, num_acquires)
            if num_locks:
                self.wait_queue.lock_latency.add(took_s, num_locks)
            if num_inserts:
                self._insert_latency.add(took_s, num_inserts)
        if self.config.validate:
            try:
                self.tiers.check_invariants()
            except AssertionError as error:
                raise to_cache_error(error) from error
        return BatchResponse(self.epoch, responses)

    def _dispatch(self, session_id: str, request: Message) -> Answer:
        """Return the response to one request of a session, or the error that it failed with."""
        verb = self._verbs.get(type(request))
        if verb is None:
            is_torn = isinstance(request, Malformed)
            text = str(request) if is_torn else f"{type(request).__name__} is not a verb of this cache"
            return self._refusals.count(InvalidRequest(text))
        try:
            if self._draining and request.takes_slots and self._admission.takes_slots(session_id, request):
                raise CacheUnavailable(_DRAINING)
            return verb(session_id, request)
        except OutOfSlotsError as error:
            return self._refusals.exhausted(None, error)
        except Exception as error:  # every failure becomes its caller's typed error
            return self._refusals.count(to_cache_error(error))

    async def wait(self, request: WaitRequest) -> Message:
        """Return the outcome of a queued request."""
        session = self.session(checked_message(WaitRequest, request).session_id, request.epoch)
        return await self.wait_queue.outcome(session.session_id, request.ticket)

    def _load(self) -> CacheLoad:
        """Return the load for slim events. O(leases, waiting requests and moves)."""
        leased = unpublished = 0
        for _, lease in self.core.leases.of_clients():
            leased += lease.num_slots
            if not lease.only_locks:
                unpublished += max(0, len(lease.key) - max(lease.prefix_len, self.core.published_len(lease)))
        loads = [load for place in self._places for load in place.loads.moves.in_flight if load.target.filling_for]
        loading = sum(load.num_tokens for load in loads if not load.target.only_locks)
        return CacheLoad(self.wait_queue.num_tokens(), leased, unpublished, self.core.private_slots, loading)

    async def next_events(self, request: NextEvents) -> PackedEvents:
        """Return the events of a tier that a client has not seen, or none after its timeout.

        Raises:
            InvalidRequest: this cache publishes no events, or has no such tier.
        """
        self.session(checked_message(NextEvents, request).session_id, request.epoch)
        return await self.feeds.next_events(request)

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Time evictions and the history by this clock, in seconds, such as a trace's; call it before any request."""
        self._time_evictions(clock)
        self.insight.use_clock(clock)

    def _time_evictions(self, clock: Callable[[], float]) -> None:
        self.core.use_clock(clock)
        if self.disk is not None:
            self.disk.tier.cache.use_clock(clock)

    def report(self) -> CacheReport:
        """Return the report of `raydix report`. O(1): a few ms."""
        return self.insight.report(self.stats())

    def _findings(self, disk: DiskTierStats | None) -> tuple[str, ...]:
        """Return the fault of the disk now, and those of the node: commands show the first one."""
        found = disk_finding(disk)
        return (found, *self.findings) if found else self.findings

    def stats(self) -> CacheStats:
        """Return a snapshot of every count."""
        batch_size = self._batch_size.histogram()
        disk = None if self.disk is None else self.disk.stats()
        stats = CacheStats(
            epoch=self.epoch,
            uptime_s=self.insight.history.now_s,
            restarts=self._restarts.times,
            last_restart_cause=self._restarts.last_cause,
            restart_causes=dict(self._restarts.causes),
            findings=self._findings(disk),
            niceness=self.niceness,
            owners=self._owners.largest(_NUM_OWNERS),
            open_sessions=len(self.sessions),
            silent_sessions=self.sessions.num_silent(),
            bindings=len(self.bindings),
            model_fingerprint=self.bindings.base_name,
            weights=self.bindings.weights.label,
            waiters=len(self.wait_queue),
            oldest_waiter_s=self.wait_queue.oldest_s,
            stale_readers=self.feeds.num_stale(),
            expired_sessions=self.reaper.num_expired,
            dead_sessions=self.reaper.num_dead,
            exhausted=self._refusals.num_exhausted,
            deadlocks=self._deadlocks.num_broken,
            grants_expired=self.offers.num_expired,
            refusals=dict(self._refusals.by_cause),
            waited=self.wait_queue.num_waited,
            wait_time=self.wait_queue.wait_time.histogram(),
            acquire_latency=self.wait_queue.acquire_latency.histogram(),
            lock_latency=self.wait_queue.lock_latency.histogram(),
            insert_latency=self._insert_latency.histogram(),
            batch_size=batch_size,
            batches=batch_size.count,
            requests=int(batch_size.sum),
            loop_lag_ms=self.lag.longest_ms,
            eviction_task=self.eviction_task.stats(),
            host=None if self.host is None else host_stats(self.host, self.wait_queue.num_loading),
            disk=disk,
            **core_stats(self.core),
        )
        return stats if self.ghost is None else stats.model_copy(update={"ghost": self.ghost.stats(stats.hit_rate)})
