"""`CacheService`: sessions, verbs, waiting and background eviction around one `KVCache`.

Both the Ray actor and `LocalPrefixCache` drive it. All state lives on one event loop, and no operation awaits between
its first look at the cache and its last change of it: each is atomic.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydix.actors.error_map import to_cache_error
from raydix.actors.eviction_task import EvictionTask
from raydix.actors.waiting_line import Attempt, WaitingLine
from raydix.cache_core import (
    BasePrefixCache,
    ChunkCache,
    KVCache,
    OutOfSlotsError,
    RadixCache,
    RadixKey,
    TokenToKVPoolAllocator,
)
from raydix.cache_core.lease_table import LeaseRecord
from raydix.schemas import (
    AbortRequest,
    Ack,
    AcquireRequest,
    Batch,
    BatchResponse,
    CacheConfig,
    CacheError,
    CacheStats,
    CacheUnavailable,
    CheckInvariantsRequest,
    CloseSession,
    ConfigMismatch,
    EvictRequest,
    EvictResponse,
    ExtendRequest,
    ExtendResponse,
    InsertRequest,
    InsertResponse,
    InvalidRequest,
    LeaseResponse,
    LockRequest,
    MatchRequest,
    MatchResponse,
    Message,
    OpenSession,
    PoolExhausted,
    ReleaseRequest,
    ResetRequest,
    SessionResponse,
    StaleEpoch,
    StatsRequest,
    TokenIds,
    WaitingResponse,
    WaitRequest,
)


@dataclass(slots=True)
class Session:
    """One client: the owner of leases."""

    session_id: str
    owner: str  # for people


class CacheService:
    """A cache as its callers know it: requests in, responses or `CacheError`s out."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.epoch = uuid.uuid4().hex
        self.sessions: dict[str, Session] = {}
        self._closed = False
        self._batches = self._requests = self._exhausted = 0
        num_slots = config.pool.num_slots
        allocator = TokenToKVPoolAllocator(num_slots, config.page_size)
        self.eviction_task = EvictionTask(
            config.eviction,
            num_slots,
            allocator.available_size,
            lambda n: self.core.evict(n),
            self._serve_waiters,
        )
        self.core = KVCache(
            _make_tree(config, allocator),
            allocator,
            self.eviction_task.pressure_floor,
            self.eviction_task.wake,
        )
        self.line = WaitingLine(config.leases.max_waiters)
        self._verbs: dict[type[Message], Callable[[Session, Any], Message]] = {
            MatchRequest: self._match,
            LockRequest: self._lock,
            AcquireRequest: self._acquire,
            InsertRequest: self._insert,
            ExtendRequest: self._extend,
            ReleaseRequest: self._release,
            AbortRequest: self._release,
            EvictRequest: self._evict_request,
            ResetRequest: self._reset,
            StatsRequest: self._stats,
            CheckInvariantsRequest: self._check_invariants,
        }

    # ---------------------------------------------------------------- sessions

    def open_session(self, request: OpenSession) -> SessionResponse:
        """Begin a session (again, if it is open) and start the background task on the running loop."""
        if self._closed:
            raise CacheUnavailable("the cache has been shut down")
        if request.config_digest not in (None, self.config.digest()):
            raise ConfigMismatch(f"the cache runs with another configuration: {self.config!r}")
        self.eviction_task.start()
        self.sessions.setdefault(request.session_id, Session(request.session_id, request.owner))
        return SessionResponse(epoch=self.epoch, config=self.config)

    def close_session(self, request: CloseSession) -> None:
        """End a session with all its leases; no effect if it is not open."""
        if self.sessions.pop(request.session_id, None) is not None:
            self.line.withdraw(request.session_id)
            self.core.end_session(request.session_id)
            self._serve_waiters()

    def session(self, session_id: str, epoch: str) -> Session:
        """The open session that a message names.

        Raises:
            StaleEpoch: the message belongs to an earlier life of the cache.
            InvalidRequest: no such session is open.
        """
        if epoch != self.epoch:
            raise StaleEpoch(epoch, self.epoch)
        session = self.sessions.get(session_id)
        if session is None:
            raise InvalidRequest(f"session {session_id!r} is not open: open a client first")
        return session

    async def close(self) -> None:
        """Refuse new sessions, end the open ones, stop the background task."""
        self._closed = True
        for session_id in list(self.sessions):
            self.close_session(CloseSession(session_id=session_id))
        await self.eviction_task.stop()

    # ---------------------------------------------------------------- execution

    def execute(self, batch: Batch) -> BatchResponse:
        """Execute a batch in order; a request that fails leaves its error in its place."""
        session = self.session(batch.session_id, batch.epoch)
        self._batches += 1
        responses = tuple([self._execute_one(session, request) for request in batch.requests])
        if len(self.line):
            self._serve_waiters()
        if self.config.validate:
            self.core.check_invariants()
        return BatchResponse.model_construct(epoch=self.epoch, responses=responses)

    def _execute_one(self, session: Session, request: Message) -> Message | CacheError:
        self._requests += 1
        verb = self._verbs.get(type(request))
        if verb is None:
            return InvalidRequest(f"{type(request).__name__} is not a verb of this cache")
        try:
            return verb(session, request)
        except Exception as error:  # every failure becomes its caller's typed error
            return to_cache_error(error, self.core)

    async def wait(self, request: WaitRequest) -> Message:
        """The outcome of a request that was put in line."""
        session = self.session(request.session_id, request.epoch)
        return await self.line.outcome(session.session_id, request.ticket)

    def _serve_waiters(self) -> None:
        self.line.serve()

    # ---------------------------------------------------------------- verbs

    def _match(self, session: Session, request: MatchRequest) -> MatchResponse:
        prefix_len = self.core.match(_key(request.tokens, request.namespace)).prefix_len
        return MatchResponse.model_construct(prefix_len=prefix_len, full_prefix_len=prefix_len, branching_len=None)

    def _lock(self, session: Session, request: LockRequest) -> LeaseResponse:
        key = _key(request.tokens, request.namespace)
        return _granted(self.core.lock(request.lease_id, session.session_id, key))

    def _acquire(self, session: Session, request: AcquireRequest) -> Message:
        key = _key(request.tokens, request.namespace)

        def attempt() -> Message:
            lease = self.core.acquire(
                request.lease_id, session.session_id, key, request.new_tokens, request.max_prefix_len
            )
            return _granted(lease)

        needed = len(key) + request.new_tokens
        return self._admit(session, request.lease_id, needed, needed, attempt, request.timeout_s)

    def _extend(self, session: Session, request: ExtendRequest) -> Message:
        lease = self.core.leases.get(request.lease_id, session.session_id)
        missing = request.num_slots - lease.num_slots

        def attempt() -> Message:
            lease = self.core.leases.get(request.lease_id, session.session_id)
            if lease.num_slots < request.num_slots:
                self.core.extend(request.lease_id, session.session_id, request.num_slots - lease.num_slots)
            added = _packed(lease.starts[request.known_pages :])
            return ExtendResponse.model_construct(num_slots=lease.num_slots, page_starts=added)

        return self._admit(
            session, request.lease_id, missing, request.num_slots, attempt, request.timeout_s, urgent=True
        )

    def _admit(
        self,
        session: Session,
        lease_id: str,
        needed: int,
        total: int,
        attempt: Attempt,
        timeout_s: float | None,
        urgent: bool = False,
    ) -> Message:
        """Serve a request that needs room at once, or put it in line.

        New leases never overtake those in line. A lease that grows does: those in line wait for it to end.
        """
        if total > self.core.num_slots:
            raise self._refusal(total, can_ever_fit=False)
        if urgent or not len(self.line):
            try:
                return attempt()
            except OutOfSlotsError as error:
                needed = error.needed
        if timeout_s is None:
            timeout_s = self.config.leases.acquire_timeout_s
        if timeout_s == 0:
            raise self._refusal(needed)
        ticket, position = self.line.join(
            session.session_id, lease_id, attempt, timeout_s, lambda: self._refusal(needed), urgent
        )
        return WaitingResponse(ticket=ticket, position=position)

    def _refusal(self, needed: int, can_ever_fit: bool = True) -> PoolExhausted:
        self._exhausted += 1
        core = self.core
        return PoolExhausted(
            needed,
            core.free_slots,
            core.tree.evictable_size(),
            core.held_slots(),
            len(core.leases),
            can_ever_fit,
        )

    def _insert(self, session: Session, request: InsertRequest) -> InsertResponse:
        lease = self.core.leases.get(request.lease_id, session.session_id)
        suffix = _key(request.suffix, lease.key.extra_key)
        done = self.core.insert(request.lease_id, session.session_id, request.num_tokens, suffix)
        if request.release:
            self.core.release(request.lease_id, session.session_id)
        return InsertResponse.model_construct(
            prefix_len=done.prefix_len,
            num_inserted=done.num_inserted,
            num_duplicates=done.num_duplicates,
            retired=done.retired,
            repointed=_packed(done.repointed),
        )

    def _release(self, session: Session, request: ReleaseRequest | AbortRequest) -> Ack:
        self.line.withdraw(session.session_id, request.lease_id)
        self.core.release(request.lease_id, session.session_id)
        return Ack()

    def _evict_request(self, session: Session, request: EvictRequest) -> EvictResponse:
        return EvictResponse(num_evicted=self.core.evict(request.num_tokens))

    def _reset(self, session: Session, request: ResetRequest) -> Ack:
        self.core.reset()
        return Ack()

    def _check_invariants(self, session: Session, request: CheckInvariantsRequest) -> Ack:
        self.core.check_invariants()
        return Ack()

    def _stats(self, session: Session, request: StatsRequest) -> CacheStats:
        return self.stats()

    def stats(self) -> CacheStats:
        """A snapshot of every count."""
        core, counters = self.core, self.core.counters
        return CacheStats(
            epoch=self.epoch,
            num_slots=core.num_slots,
            free_slots=core.free_slots,
            private_slots=core.private_slots,
            tree_slots=core.tree.total_size(),
            quarantined_slots=0,
            evictable_slots=core.tree.evictable_size(),
            protected_slots=core.tree.protected_size(),
            open_leases=len(core.leases),
            open_sessions=len(self.sessions),
            waiters=len(self.line),
            acquires=counters.acquires,
            hits=counters.hits,
            tokens_requested=counters.tokens_requested,
            tokens_reused=counters.tokens_reused,
            tokens_inserted=counters.tokens_inserted,
            tokens_duplicate=counters.tokens_duplicate,
            tokens_evicted=counters.tokens_evicted,
            exhausted=self._exhausted,
            probes=counters.probes,
            batches=self._batches,
            requests=self._requests,
            eviction_task=self.eviction_task.stats(),
        )


def _make_tree(config: CacheConfig, allocator: TokenToKVPoolAllocator) -> BasePrefixCache:
    if config.kind == "chunk":
        return ChunkCache(config.page_size)
    return RadixCache(config.page_size, token_to_kv_pool_allocator=allocator)


def _key(tokens: TokenIds, namespace: str | None) -> RadixKey:
    return RadixKey.from_packed(tokens.data, tokens.width, namespace)


def _granted(lease: LeaseRecord) -> LeaseResponse:
    return LeaseResponse.model_construct(
        lease_id=lease.lease_id,
        prefix_len=lease.prefix_len,
        num_slots=lease.num_slots,
        page_starts=_packed(lease.starts),
    )


def _packed(starts: NDArray[np.int64]) -> bytes:
    return starts.astype("<i4").tobytes()
