"""`Admission`: leases that begin or grow are granted immediately, queued until there is room, or refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from raydix.actors.sessions.lease_owners import LeaseOwners
from raydix.actors.sessions.model_bindings import ModelBindings
from raydix.actors.sessions.wait_queue import Attempt, Position, WaitQueue
from raydix.actors.transport.error_map import to_cache_error
from raydix.cache_core import CoreError, LeasedCache, OutOfSlotsError, RadixKey
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.schemas import (
    AcquireRequest,
    CacheBusy,
    CacheError,
    CacheUnavailable,
    ConfigMismatch,
    ExtendRequest,
    ExtendResponse,
    InvalidRequest,
    LeaseExpired,
    LeaseResponse,
    LockRequest,
    Message,
    PoolExhausted,
    TokenIds,
    UnknownLease,
    WaitingResponse,
)

EXHAUSTED = ("deadlocked", "never_fits", "tenant_cap", "no_wait", "waited_too_long")  # the causes of a PoolExhausted
_CAUSES: dict[type[CacheError], str] = {
    CacheBusy: "queue_full",
    CacheUnavailable: "draining",
    ConfigMismatch: "model_mismatch",
    InvalidRequest: "invalid_request",
    LeaseExpired: "lease_expired",
    UnknownLease: "unknown_lease",
}
_NUM_OWNERS = 3  # owners that a refusal names
_INT32 = np.dtype("<i4")


class Admission:
    """Grants leases and lets them grow. New leases never overtake queued requests that wait for the same.

    Attributes:
        refusals: refused requests, by cause; see `CacheStats.refusals`.
        num_acquires: `acquire` requests that were granted or refused without waiting.

    Args:
        core: the cache.
        wait_queue: of the requests that find no room.
        owners: of the leases, for refusals.
        bindings: of sessions to models.
        acquire_timeout_s: how long a request waits if it names no time.
    """

    def __init__(
        self,
        core: LeasedCache,
        wait_queue: WaitQueue,
        owners: LeaseOwners,
        bindings: ModelBindings,
        acquire_timeout_s: float,
    ) -> None:
        self.refusals: Counter[str] = Counter()
        self.num_acquires = 0
        self._core = core
        self._wait_queue = wait_queue
        self._owners = owners
        self._bindings = bindings
        self._acquire_timeout_s = acquire_timeout_s

    # ---------------------------------------------------------------- requests

    def acquire(self, session_id: str, request: AcquireRequest) -> Message:
        """Return a lease, or the ticket of the queued request.

        A request may overtake the queue if it stays within its tenant's floor, which others must make room for.

        Raises:
            PoolExhausted, CacheBusy, ConfigMismatch, CoreError: the request is refused.
        """
        self.num_acquires += 1
        key, queue = key_of(request.tokens, request.namespace), self._wait_queue
        num_tokens = len(key) + request.new_tokens
        if queue.waiting:
            self._check_binding(session_id, request)  # it may have to wait before its first attempt
            if request.timeout_s == 0:
                queue.serve()  # earlier requests of the batch may have made room for all
        try:
            if not queue.waiting or self._may_overtake(key, num_tokens):
                return self._open_lease(session_id, request, key)
            self._core.check_len(num_tokens, key)
            shortage = OutOfSlotsError(
                num_tokens, self._core.free_slots, self._core.evictable_size(), self._core.num_slots
            )
        except OutOfSlotsError as error:
            shortage = error.with_traceback(None)
        attempt = partial(self._open_lease, session_id, request, key)
        waiting = self._join_queue(session_id, request, key, num_tokens, attempt, shortage)
        self.num_acquires -= 1
        return waiting

    def extend(self, session_id: str, request: ExtendRequest) -> Message:
        """Return what a lease has grown by, or the ticket of the queued request. It goes before all new leases.

        Raises:
            PoolExhausted, CacheBusy, CoreError: the request is refused.
        """
        lease = self._core.leases.get(request.lease_id, session_id)
        self._wait_queue.withdraw(session_id, request.lease_id)  # an earlier growth that its caller gave up
        attempt = partial(self._grow, session_id, request)
        try:
            return attempt()
        except OutOfSlotsError as error:
            shortage = error.with_traceback(None)
        return self._join_queue(session_id, request, lease.key, request.num_slots, attempt, shortage)

    def lock(self, session_id: str, request: LockRequest) -> LeaseResponse:
        """Return a lease of the cached prefix.

        Raises:
            OutOfSlotsError, ConfigMismatch, CoreError: the request is refused; it never waits.
        """
        self._check_binding(session_id, request)
        key = key_of(request.tokens, request.namespace)
        if self._wait_queue.waiting:
            self._wait_queue.serve()  # queued requests come first, if earlier ones of the batch have made room
        return self.lease_response(self._core.lock(request.lease_id, session_id, key, request.priority))

    def lease_response(self, lease: LeaseRecord) -> LeaseResponse:
        """Return the response that describes a lease."""
        starts, window = packed(lease.starts), self.packed_window(lease)
        slots = lease.state_slot, lease.boundary_slot
        return LeaseResponse(lease.lease_id, lease.prefix_len, lease.num_slots, starts, window, *slots)

    def packed_window(self, lease: LeaseRecord) -> bytes:
        """Return the first slots of a lease's window pages, packed; nothing without a sliding window."""
        starts = self._core.swa_starts(lease)
        return packed(starts) if len(starts) else b""

    # ---------------------------------------------------------------- attempts

    def _open_lease(self, session_id: str, request: AcquireRequest, key: RadixKey) -> LeaseResponse:
        self._check_binding(session_id, request)
        limits = request.new_tokens, request.max_prefix_len, request.priority
        flags = request.resumed, request.boundary_state
        lease = self._core.acquire(request.lease_id, session_id, key, *limits, *flags)
        return self.lease_response(lease)

    def _grow(self, session_id: str, request: ExtendRequest) -> ExtendResponse:
        lease = self._core.leases.get(request.lease_id, session_id)
        if lease.num_slots < request.num_slots:
            self._core.extend(request.lease_id, session_id, request.num_slots - lease.num_slots)
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

    def _join_queue(
        self,
        session_id: str,
        request: AcquireRequest | ExtendRequest,
        key: RadixKey,
        num_tokens: int,
        attempt: Attempt,
        shortage: OutOfSlotsError,
    ) -> WaitingResponse:
        grows = type(request) is ExtendRequest
        refusal = partial(self.refusal, key, num_tokens=None if grows else num_tokens)
        timeout_s = self._acquire_timeout_s if request.timeout_s is None else request.timeout_s
        if timeout_s == 0 or not shortage.can_ever_fit or not self._wait_queue.max_waiters:
            raise refusal(shortage)
        num_new = num_tokens - self._core.leases.get(request.lease_id, session_id).num_slots if grows else num_tokens
        position = Position(
            self._core.tenant_of(key.extra_key), grows, partial(self._core.is_within_floor, key, num_tokens), num_new
        )
        ticket, num_ahead = self._wait_queue.join(
            session_id,
            request.lease_id,
            position,
            partial(self._attempt_late, refusal, attempt),
            timeout_s,
            partial(refusal, waited=True),
            shortage,
        )
        return WaitingResponse(ticket=ticket, position=num_ahead)

    def _attempt_late(self, refusal: Callable[[OutOfSlotsError], PoolExhausted], attempt: Attempt) -> Message:
        """Try a queued request; raise OutOfSlotsError if it has to go on waiting.

        If there never can be room, which may show only now, it is refused: others would wait behind it in vain.
        """
        try:
            return attempt()
        except OutOfSlotsError as error:
            if error.can_ever_fit:
                raise
            raise refusal(error) from None
        except ConfigMismatch as error:
            raise self.count_refusal(error) from None
        except CoreError as error:
            raise self.count_refusal(to_cache_error(error)) from error

    # ---------------------------------------------------------------- refusals

    @property
    def num_exhausted(self) -> int:
        """Return the number of requests refused for want of room."""
        return sum(self.refusals[cause] for cause in EXHAUSTED)

    def refusal(
        self,
        key: RadixKey | None,
        shortage: OutOfSlotsError,
        *,
        num_tokens: int | None = None,
        waited: bool = False,
        deadlocked: bool = False,
    ) -> PoolExhausted:
        """Count and return the refusal of a request of that key's namespace that finds no room.

        O(owners), and at times O(leases), if a lease has come, gone or grown since the last refusal.

        Args:
            num_tokens: of the lease that was to begin; None: a lease was to grow.
            waited: the request was queued until its time ran out.
        """
        if deadlocked:
            cause = "deadlocked"
        elif not shortage.can_ever_fit:
            cause = "never_fits"
        elif shortage.tenant is not None:
            cause = "tenant_cap"
        else:
            cause = "waited_too_long" if waited else "no_wait"
        self.refusals[cause] += 1
        if key is not None and num_tokens is not None:
            self._core.count_refusal(key, num_tokens, shortage.can_ever_fit)
        return self._exhausted(shortage, None if key is None else key.extra_key, deadlocked)

    def _exhausted(self, shortage: OutOfSlotsError, extra_key: str | None, deadlocked: bool) -> PoolExhausted:
        core, tenant = self._core, shortage.tenant
        sizes = core.sizes_of(shortage.pool, extra_key) if tenant is None else core.share_of(tenant)
        return PoolExhausted(
            shortage.needed,
            sizes.free,
            sizes.evictable,
            sizes.num_slots - sizes.free - sizes.evictable - sizes.kept,
            self._owners.num_leases(tenant),
            shortage.can_ever_fit,
            shortage.pool,
            self._owners.largest(_NUM_OWNERS, tenant),
            tenant,
            sizes.kept,
            deadlocked,
        )

    def count_refusal(self, error: CacheError) -> CacheError:
        """Count a request that failed, unless `refusal` has counted it, and return its error."""
        if not isinstance(error, PoolExhausted):
            self.refusals[_CAUSES.get(type(error), "internal_error")] += 1
        return error


def key_of(tokens: TokenIds, namespace: str | None) -> RadixKey:
    """Return the tree's key of a request's tokens, without a copy."""
    return RadixKey.from_packed(tokens.data, tokens.width, namespace)


def packed(starts: NDArray[np.int64]) -> bytes:
    """Return first slots of pages as messages carry them: int32, little-endian."""
    return starts.astype(_INT32).tobytes()
