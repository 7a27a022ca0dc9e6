"""`Admission`: leases that begin or grow are granted immediately, wait for a load or for room, or are refused."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from raydix.actors.sessions.lease_offers import LeaseOffers
from raydix.actors.sessions.model_bindings import ModelBindings
from raydix.actors.sessions.refusals import Refusals
from raydix.actors.sessions.wait_queue import COMMIT, Position, Waiter, WaitQueue
from raydix.actors.tiers.lower_tiers import LowerTiers
from raydix.cache_core import LeasedCache, OutOfSlotsError, RadixKey
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tiers.loads import Filled
from raydix.cache_core.tiers.look_up import LookUp
from raydix.cache_core.tiers.move import Move
from raydix.schemas import (
    AcquireRequest,
    CacheUnavailable,
    ExtendRequest,
    ExtendResponse,
    InsertRequest,
    InsertResponse,
    LeaseConfig,
    LeaseResponse,
    LockRequest,
    Message,
    TokenIds,
    WaitingResponse,
)

_INT32 = np.dtype("<i4")
_COMMIT = "\0commit"  # lease id of the tickets that wait for the disk
_NOT_COMMITTED = (
    "the memory of the cache is clean, but the disk has not confirmed it: a restart before it does may bring the pages "
    "back for sessions that bind equal fingerprints. "
)
_GOES_ON = "The disk goes on trying; a repeated call waits for it again"
_COMMIT_TIMEOUT_S = 5.0  # for which a retirement waits for the disk
_WRITES = "writes"  # `Waiter.waits_for` of a request that waits for the end of writes


@dataclass(slots=True, eq=False)
class _Asked:
    """A request for a lease that begins or grows.

    Attributes:
        session_id: its session.
        request: the request.
        key: the lease's key.
        num_tokens: size of the lease; 0 for a lock.
        loads_until: the time at which its loads end, if the request has a limit of its own.
    """

    session_id: str
    request: AcquireRequest | ExtendRequest | LockRequest
    key: RadixKey
    num_tokens: int
    loads_until: float | None = None

    @property
    def limit(self) -> int | None:
        """The longest prefix that the lease may reuse; None: all."""
        return self.request.max_prefix_len if isinstance(self.request, AcquireRequest) else None


class Admission:
    """Grants leases and lets them grow. New leases never overtake queued requests that wait for the same.

    If the tier has more of a request's prompt, the lease is filled before it is handed out; meanwhile the request has a
    ticket. A request for pages of a load in flight waits for that load, with a ticket and without slots. Then it is
    tried again, and may wait for room.

    Attributes:
        num_acquires: `acquire` requests that were granted or refused without waiting.
        num_locks: `lock` requests that were granted or refused without waiting.
        num_inserts: `insert` requests so far, published or refused.

    Args:
        core: the cache.
        wait_queue: the requests that find no room.
        refusals: makes and counts the errors.
        bindings: the models of sessions.
        offers: the offers of leases; a `lock` may ask for one.
        tiers: load prefixes.
        config: has the time limit of requests that name none.
    """

    def __init__(
        self,
        core: LeasedCache,
        wait_queue: WaitQueue,
        refusals: Refusals,
        bindings: ModelBindings,
        offers: LeaseOffers,
        tiers: LowerTiers,
        config: LeaseConfig,
    ) -> None:
        self.num_acquires = self.num_locks = self.num_inserts = 0
        self._core = core
        self._wait_queue = wait_queue
        self._refusals = refusals
        self._bindings = bindings
        self._offers = offers
        self._tiers = tiers
        self._has_tiers = bool(tiers)
        self._acquire_timeout_s = config.acquire_timeout_s

    # ---------------------------------------------------------------- requests

    def acquire(self, session_id: str, request: AcquireRequest) -> Message:
        """Return a lease, or the ticket of the waiting request.

        A request may overtake the queue if it stays within its tenant's floor, which others must make room for.

        Raises:
            PoolExhausted, CacheBusy, ConfigMismatch, CoreError: the request is refused.
        """
        may_wait = self._has_tiers or bool(self._wait_queue.waiting)
        if may_wait and (ticket := self._ticket_of(session_id, request.lease_id)) is not None:
            return ticket
        key = key_of(request.tokens, request.namespace)
        asked = _Asked(session_id, request, key, len(key) + request.new_tokens)
        self.num_acquires += 1
        try:
            answer = self._try(asked, None) if self._wait_queue.waiting else self._open(asked, None)
        except OutOfSlotsError as error:
            answer = self._make_room(asked, None, error.with_traceback(None))
        assert answer is not None
        self.num_acquires -= type(answer) is WaitingResponse
        return answer

    def extend(self, session_id: str, request: ExtendRequest) -> Message:
        """Return what a lease has grown by, or the ticket of the queued request. It goes before all new leases.

        Raises:
            PoolExhausted, CacheBusy, CoreError: the request is refused.
        """
        lease = self._core.leases.get(request.lease_id, session_id)
        self._wait_queue.withdraw(session_id, request.lease_id)  # an earlier growth that its caller gave up
        answer = self._admit(_Asked(session_id, request, lease.key, request.num_slots), None)
        assert answer is not None
        return answer

    def insert(self, session_id: str, request: InsertRequest) -> InsertResponse:
        """Publish tokens of a lease, and return what has changed behind the tokens that the client knows of.

        Raises:
            CoreError: nothing was published.
        """
        self.num_inserts += 1
        core = self._core
        lease = core.leases.get(request.lease_id, session_id)
        if self._bindings.disk is not None and not self._bindings.may_publish(session_id, lease.key.extra_key):
            lease.retired = True  # Its slots have KV of a model that is not known: no session may publish it.
        suffix, before = key_of(request.suffix, lease.key.extra_key), core.published_len(lease)
        flags = request.publish_state, request.boundary_len
        insert = partial(core.insert, request.lease_id, session_id, request.num_tokens, suffix, *flags)
        try:
            done = insert()
        except OutOfSlotsError:
            if not self._tiers.locks_pool:
                raise
            self._tiers.cancel_writes()  # they lock states, one of which may be evicted for the lease's
            done = insert()
        # If the client knows of other tokens, an answer before was lost, or is on its way.
        changed = done.repointed if request.known_len == before else core.starts_behind(lease, request.known_len)
        repointed, window = packed(changed) if len(changed) else b"", self.packed_window(lease)
        counts = done.prefix_len, done.num_inserted, done.num_duplicates, done.retired
        response = InsertResponse(*counts, repointed, window, core.published_len(lease))
        if request.release:
            if self._has_tiers or self._wait_queue.waiting:
                self._wait_queue.withdraw(session_id, request.lease_id)  # it does not grow any more
            core.release(request.lease_id, session_id)
        return response

    def takes_slots(self, session_id: str, request: Message) -> bool:
        """Return False for an `extend` to a size that its lease has: it only asks whether the lease is open.

        Raises:
            CoreError: the lease has ended.
        """
        if not isinstance(request, ExtendRequest):
            return True
        return self._core.leases.get(request.lease_id, session_id).num_slots < request.num_slots

    def lock(self, session_id: str, request: LockRequest) -> Message:
        """Return a lease of the cached prefix, or the ticket of a request that waits for its load.

        Raises:
            CacheBusy, OutOfSlotsError, ConfigMismatch, CoreError: the request is refused.
        """
        if (ticket := self._ticket_of(session_id, request.lease_id)) is not None:
            return ticket
        self.num_locks += 1
        self._check_binding(session_id, request)
        key = key_of(request.tokens, request.namespace)
        if self._wait_queue.waiting:
            self._wait_queue.serve()  # queued requests come first, if earlier ones of the batch have made room
        answer = self._admit(_Asked(session_id, request, key, 0), None)
        assert answer is not None
        self.num_locks -= type(answer) is WaitingResponse
        return answer

    def lease_response(self, lease: LeaseRecord) -> LeaseResponse:
        """Return the response that describes a lease."""
        starts, window = packed(lease.starts), self.packed_window(lease)
        own = lease.state_slot, lease.boundary_slot, lease.loaded_len, lease.disk_loaded_len
        return LeaseResponse(lease.lease_id, lease.prefix_len, lease.num_slots, starts, window, *own)

    def packed_window(self, lease: LeaseRecord) -> bytes:
        """Return the first slots of a lease's window pages, packed; nothing without a sliding window."""
        starts = self._core.swa_starts(lease)
        return packed(starts) if len(starts) else b""

    # ---------------------------------------------------------------- attempts

    def _admit(self, asked: _Asked, waiter: Waiter | None) -> Message | None:
        """Return a request's answer. None: it has a ticket already, and goes on waiting.

        Raises:
            CacheError, CoreError: the request is refused.
        """
        try:
            return self._try(asked, waiter)
        except OutOfSlotsError as error:
            return self._make_room(asked, waiter, error.with_traceback(None))

    def _make_room(self, asked: _Asked, waiter: Waiter | None, shortage: OutOfSlotsError) -> Message | None:
        """Go on with a request that found no room: end writes, which lock pages, and try again; else queue it."""
        if self._tiers.locks_pool and shortage.can_ever_fit:
            if not self._tiers.cancel_writes():
                return self._wait_for_writes(asked, waiter)
            try:
                return self._try(asked, waiter)
            except OutOfSlotsError as error:
                shortage = error.with_traceback(None)
        return self._join_queue(asked, waiter, shortage)

    def _try(self, asked: _Asked, waiter: Waiter | None) -> Message | None:
        """Answer a request as `_admit` does. Raise OutOfSlotsError if there is no room, or others wait for room."""
        request, queue = asked.request, self._wait_queue
        if type(request) is ExtendRequest:
            return self._grow(asked)
        if type(request) is LockRequest:
            return self._open(asked, waiter)
        if not queue.waiting:
            return self._open(asked, waiter)
        assert type(request) is AcquireRequest
        self._check_binding(asked.session_id, request)  # it may have to wait before its first attempt
        if (open_lease := self._core.leases.find_unended(request.lease_id, asked.session_id)) is not None:
            return self._hand_out(asked, open_lease)  # it is a retry, so it waits for no room
        if request.timeout_s == 0:
            queue.serve()  # earlier requests of the batch may have made room for all
        if not queue.waiting or self._may_overtake(asked.key, asked.num_tokens):
            return self._open(asked, waiter)
        self._core.check_len(asked.num_tokens, asked.key)
        raise self._queued_error(asked.num_tokens)

    def _queued_error(self, num_tokens: int) -> OutOfSlotsError:
        core = self._core
        return OutOfSlotsError(num_tokens, core.free_slots, core.evictable_size(), core.num_slots)

    def _open(self, asked: _Asked, waiter: Waiter | None) -> Message | None:
        """Open a lease, and load the part of its prefix that the tier below has.

        Returns:
            The lease's response, or a new ticket. None: the request has a ticket, and now waits for a load.

        Raises:
            OutOfSlotsError: there is no room, for the lease or for the load of a lock.
        """
        request, tiers, core = asked.request, self._tiers, self._core
        assert not isinstance(request, ExtendRequest)
        if asked.session_id in self._bindings.sessions:
            self._bindings.check(asked.session_id, request.namespace, request.lease_id)
        if not self._has_tiers:
            lease = self._begin(asked)
            return self.lease_response(lease) if type(request) is AcquireRequest else self._hand_out(asked, lease)
        timeout_s = request.load_timeout_s
        if (waiter is not None and not waiter.may_load) or not (request.load and tiers.may_load(timeout_s)):
            return self._hand_out(asked, self._begin(asked))
        if (open_lease := core.leases.find_unended(request.lease_id, asked.session_id)) is not None:
            return self._hand_out(asked, open_lease)
        look_up = LookUp(asked.key, asked.limit)
        if (running := tiers.running_load(look_up)) is not None:
            return self._wait_behind(asked, waiter, running, timeout_s)
        is_in_turn = not self._wait_queue.waiting or (waiter is not None and waiter.is_queued)
        if type(request) is LockRequest and not is_in_turn and tiers.missing(look_up) > 0:
            raise self._queued_error(0)  # its load would take the slots that others wait for
        if type(request) is LockRequest:
            tiers.check_room(look_up)  # Each look at the queue would open the lease, and end it.
        lease = self._begin(asked)
        load = tiers.load(lease, look_up, timeout_s)
        if load is None:
            return self._hand_out(asked, lease)
        own = self._give_ticket(asked) if waiter is None else waiter
        if timeout_s is not None:
            asked.loads_until = monotonic() + timeout_s
        tiers.loads_of(load).when_loaded(load, partial(self._end_load, asked, own, load))
        return self._wait_for(own, load, is_new=waiter is None)

    def _begin(self, asked: _Asked) -> LeaseRecord:
        """Open a lease with the prefix that the pool has."""
        request, key = asked.request, asked.key
        if type(request) is LockRequest:
            return self._core.lock(request.lease_id, asked.session_id, key, request.priority)
        assert type(request) is AcquireRequest
        limits = request.new_tokens, request.max_prefix_len, request.priority
        return self._core.acquire(
            request.lease_id, asked.session_id, key, *limits, request.resumed, request.boundary_state
        )

    def _hand_out(self, asked: _Asked, lease: LeaseRecord) -> LeaseResponse:
        """Hand out a lease: make the offer that a `lock` asks for, and return the response."""
        request = asked.request
        if type(request) is LockRequest and request.offer_id is not None:
            self._offers.offer(request.lease_id, asked.session_id, request.offer_id, request.offer_s)
        return self.lease_response(lease)

    def _grow(self, asked: _Asked) -> ExtendResponse:
        request = asked.request
        assert type(request) is ExtendRequest
        lease = self._core.leases.get(request.lease_id, asked.session_id)
        if lease.num_slots < request.num_slots:
            self._core.extend(request.lease_id, asked.session_id, request.num_slots - lease.num_slots)
        added = packed(lease.starts[request.known_pages :])
        return ExtendResponse(num_slots=lease.num_slots, page_starts=added, swa_page_starts=self.packed_window(lease))

    def _check_binding(self, session_id: str, request: AcquireRequest | LockRequest) -> None:
        if session_id in self._bindings.sessions:
            self._bindings.check(session_id, request.namespace, request.lease_id)

    def _may_overtake(self, key: RadixKey, num_tokens: int) -> bool:
        """Return whether a new lease may be tried before the queued requests."""
        tenant = self._core.tenant_of(key.extra_key)
        if self._wait_queue.is_waiting(tenant):
            return False
        return self._wait_queue.only_tenant_caps_block() or self._core.is_within_floor(key, num_tokens)

    # ---------------------------------------------------------------- waits for loads and writes

    def _give_ticket(self, asked: _Asked) -> Waiter:
        request, key, num_tokens, queue = asked.request, asked.key, asked.num_tokens, self._wait_queue
        grows = type(request) is ExtendRequest
        num_new = num_tokens
        if grows:
            num_new -= self._core.leases.get(request.lease_id, asked.session_id).num_slots
        is_within_floor = partial(self._core.is_within_floor, key, num_tokens)
        position = Position(self._core.tenant_of(key.extra_key), grows, is_within_floor, num_new)
        latency = queue.lock_latency if type(request) is LockRequest else queue.acquire_latency
        return queue.give_ticket(asked.session_id, request.lease_id, position, None if grows else latency)

    def _ticket_of(self, session_id: str, lease_id: str) -> WaitingResponse | None:
        """Return the ticket of the waiting request of which this is a retry; None: it is new."""
        waiter = self._wait_queue.find(session_id, lease_id)
        return None if waiter is None else self._ticket(waiter)

    def _ticket(self, waiter: Waiter) -> WaitingResponse:
        """Return the response with a ticket."""
        load = waiter.waits_for
        num_loading = load.num_tokens if isinstance(load, Move) else 0
        position = self._wait_queue.position_of(waiter)
        return WaitingResponse(ticket=waiter.ticket, position=position, loading_tokens=num_loading)

    def _wait_for(self, waiter: Waiter, waits_for: object, *, is_new: bool) -> WaitingResponse | None:
        """Let a request wait for a load, or for writes; return its ticket if that is new."""
        self._wait_queue.leave(waiter)
        waiter.waits_for = waits_for
        return self._ticket(waiter) if is_new else None

    def _wait_behind(
        self, asked: _Asked, waiter: Waiter | None, load: Move, timeout_s: float | None
    ) -> WaitingResponse | None:
        """Let a request wait, without slots, for the load of another one."""
        loads = self._tiers.loads_of(load)
        own = self._give_ticket(asked) if waiter is None else waiter
        ticket = self._wait_for(own, load, is_new=waiter is None)
        resume = partial(self._resume, asked, own, load)
        wait_s = loads.timeout_s if timeout_s is None else timeout_s
        own.timer = asyncio.get_running_loop().call_later(wait_s, resume, False)
        loads.hurry(load)
        loads.wait_for(load, resume)
        return ticket

    def _wait_for_writes(self, asked: _Asked, waiter: Waiter | None) -> WaitingResponse | None:
        """Let a request wait until the cancelled writes have ended, one chunk at most."""
        own = self._give_ticket(asked) if waiter is None else waiter
        ticket = self._wait_for(own, _WRITES, is_new=waiter is None)
        self._tiers.after_writes(partial(self._resume, asked, own, _WRITES))
        return ticket

    def _resume(self, asked: _Asked, waiter: Waiter, waited_for: object, may_load: bool = True) -> None:
        """Go on with a request after a wait.

        Args:
            may_load: False: the load failed or was late, so the request goes on without it.
        """
        if waiter.outcome.done() or waiter.waits_for is not waited_for:
            return  # it was given up, or its time ran out before
        self._wait_queue.leave(waiter)
        waiter.waits_for = None
        waiter.may_load = waiter.may_load and may_load
        try:
            answer: Message | Exception | None = self._admit(asked, waiter)
        except Exception as error:  # every failure becomes its caller's typed error
            answer = self._refusals.error_of(error)
        if answer is not None:
            self._wait_queue.settle(waiter, answer)

    def _end_load(self, asked: _Asked, waiter: Waiter, load: Move, filled: Filled) -> None:
        """Go on with the next load of a request, answer it, or try it again."""
        lease = filled.lease
        if filled.must_restart:
            self._resume(asked, waiter, waiter.waits_for)
        elif lease is not None and waiter.outcome.done():
            self._core.release(lease.lease_id, asked.session_id)  # it was refused meanwhile
        elif lease is not None and not self._load_on(asked, waiter, load, lease):
            self._wait_queue.settle(waiter, self._hand_out(asked, lease))

    def _load_on(self, asked: _Asked, waiter: Waiter, before: Move, lease: LeaseRecord) -> bool:
        """Begin the next load of a lease that was loaded from one tier; return False if there is none."""
        left_s = None
        if asked.loads_until is not None:
            left_s = max(0.0, asked.loads_until - monotonic())
        try:
            load = self._tiers.load(lease, LookUp(asked.key, asked.limit), left_s, after=before)
        except OutOfSlotsError:  # a lock: it keeps the first load
            return False
        if load is None:
            return False
        self._tiers.loads_of(load).when_loaded(load, partial(self._end_load, asked, waiter, load))
        self._wait_for(waiter, load, is_new=False)
        return True

    def wait_for_commit(
        self, session_id: str, response: Message, deletion: asyncio.Future[None], state: str
    ) -> WaitingResponse:
        """Return a ticket for a response that waits until the disk has committed a retirement.

        After 5 s the ticket ends with CacheUnavailable. The disk goes on trying.

        Args:
            deletion: ends with the commit.
            state: of the disk.
        """
        end = _GOES_ON
        if state.startswith("failed"):
            end = f"The disk has {state}; mend it, or clear it with `raydix disk clear` before the cache starts again"
        late = CacheUnavailable(_NOT_COMMITTED + end)
        return self.wait_for_disk(session_id, response, deletion, _COMMIT_TIMEOUT_S, late)

    def wait_for_disk(
        self,
        session_id: str,
        response: Message,
        done: asyncio.Future[None],
        timeout_s: float,
        late: Message | CacheUnavailable,
    ) -> WaitingResponse:
        """Return a ticket for a response that waits for the disk.

        Args:
            done: ends the wait.
            late: the outcome if that takes more than `timeout_s`.
        """
        queue = self._wait_queue
        waiter = queue.give_ticket(session_id, _COMMIT, Position(None, False, lambda: False))
        waiter.waits_for = COMMIT

        def settle(answer: Message | Exception) -> None:
            if not waiter.outcome.done():
                queue.settle(waiter, answer)

        def end(_: object) -> None:
            settle(response)

        # A disk that does not work for days may not keep each request that has waited for it.
        waiter.outcome.add_done_callback(lambda _: done.remove_done_callback(end))
        done.add_done_callback(end)
        waiter.timer = asyncio.get_running_loop().call_later(timeout_s, settle, late)
        return self._ticket(waiter)

    # ---------------------------------------------------------------- waits for room

    def _join_queue(self, asked: _Asked, waiter: Waiter | None, shortage: OutOfSlotsError) -> Message | None:
        """Queue a request for room, or give it up if it may not wait."""
        timeout_s, queue = asked.request.timeout_s, self._wait_queue
        if timeout_s is None:
            timeout_s = self._acquire_timeout_s
        if timeout_s == 0 or not shortage.can_ever_fit or not queue.max_waiters:
            return self._give_up(asked, shortage)
        if waiter is None:
            queue.check_room_for(self._core.tenant_of(asked.key.extra_key))
        own = self._give_ticket(asked) if waiter is None else waiter
        queue.join(own, partial(self._attempt_late, asked), timeout_s, partial(self._expire, asked), shortage)
        return self._ticket(own) if waiter is None else None

    def _give_up(self, asked: _Asked, shortage: OutOfSlotsError, *, waited: bool = False) -> Message:
        """Answer a `lock` with the pool's prefix alone; refuse any other request.

        Raises:
            PoolExhausted: the request is refused.
            ConfigMismatch, CoreError: the lock is refused.
        """
        if type(asked.request) is LockRequest:
            self._check_binding(asked.session_id, asked.request)  # other weights may have come while it waited
            return self._hand_out(asked, self._begin(asked))
        num_tokens = asked.num_tokens if type(asked.request) is AcquireRequest else None
        raise self._refusals.exhausted(asked.key, shortage, num_tokens=num_tokens, waited=waited)

    def _expire(self, asked: _Asked, shortage: OutOfSlotsError) -> Message | Exception:
        """Return the outcome of a queued request that may wait no longer."""
        try:
            return self._give_up(asked, shortage, waited=True)
        except Exception as error:  # every failure becomes its caller's typed error
            return self._refusals.error_of(error)

    def _attempt_late(self, asked: _Asked, waiter: Waiter) -> Message | None:
        """Try a queued request; raise OutOfSlotsError if it has to go on waiting.

        A request that can never fit is refused: requests behind it would wait in vain.
        """
        try:
            return self._grow(asked) if type(asked.request) is ExtendRequest else self._open(asked, waiter)
        except OutOfSlotsError as error:
            if error.can_ever_fit:
                raise
            outcome = self._expire(asked, error)
            if isinstance(outcome, Exception):
                raise outcome from None
            return outcome
        except Exception as error:  # every failure becomes its caller's typed error
            raise self._refusals.error_of(error) from error


def key_of(tokens: TokenIds, namespace: str | None) -> RadixKey:
    """Return the tree's key of a request's tokens, without a copy."""
    return RadixKey.from_packed(tokens.data, tokens.width, namespace)


def packed(starts: NDArray[np.int64]) -> bytes:
    """Return first slots of pages as messages carry them: int32, little-endian."""
    return starts.astype(_INT32).tobytes()
