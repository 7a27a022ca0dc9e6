"""`Admission`: who is given room at once, who waits for it in line, and who is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from raydix.actors.sessions.refusals import Refusals
from raydix.actors.sessions.wait_queue import Attempt, Place, WaitQueue
from raydix.actors.transport.error_map import to_cache_error
from raydix.cache_core import CoreError, LeasedCache, OutOfSlotsError, RadixKey
from raydix.schemas import (
    CacheBusy,
    CacheError,
    CacheUnavailable,
    ConfigMismatch,
    InvalidRequest,
    LeaseExpired,
    Message,
    PoolExhausted,
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


class Admission:
    """Room for leases that begin or grow.

    Attributes:
        refusals: refused requests, by cause; see `CacheStats.refusals`.

    Args:
        core: the cache.
        line: where those wait who find no room.
        refusals: what those are told who find none.
        acquire_timeout_s: how long they wait unless they say otherwise.
    """

    def __init__(self, core: LeasedCache, line: WaitQueue, refusals: Refusals, acquire_timeout_s: float) -> None:
        self.refusals: Counter[str] = Counter()
        self._core = core
        self._line = line
        self._refusals = refusals
        self._acquire_timeout_s = acquire_timeout_s

    def admit(
        self,
        session_id: str,
        lease_id: str,
        key: RadixKey,
        num_tokens: int,
        attempt: Attempt,
        timeout_s: float | None,
        grows: bool = False,
    ) -> Message:
        """Serve a request for a lease over so many tokens at once, or put it in line.

        New leases never overtake those in line who wait for the same. A lease that grows does: those in line wait for
        it to end. So does one that stays within its tenant's floor, which others must make room for.
        """
        if timeout_s == 0 and not grows and self._line.waiting:
            self._line.serve()  # what came before in the batch may have made room for all of them
        refusal = partial(self.refusal, key, num_tokens=None if grows else num_tokens)
        try:
            if grows or not self._line.waiting or self._may_overtake(key, num_tokens):
                return attempt()
            self._core.check_len(num_tokens, key)
            shortage = OutOfSlotsError(
                num_tokens, self._core.free_slots, self._core.evictable_size(), self._core.num_slots
            )
        except OutOfSlotsError as error:
            shortage = error.with_traceback(None)
        if timeout_s is None:
            timeout_s = self._acquire_timeout_s
        if timeout_s == 0 or not shortage.can_ever_fit or not self._line.max_waiters:
            raise refusal(shortage)
        place = Place(self._core.tenant_of(key.extra_key), grows, partial(self._core.is_within_floor, key, num_tokens))
        ticket, position = self._line.join(
            session_id,
            lease_id,
            place,
            partial(self._attempt_late, refusal, attempt),
            timeout_s,
            partial(refusal, waited=True),
            shortage,
        )
        return WaitingResponse(ticket=ticket, position=position)

    def _may_overtake(self, key: RadixKey, num_tokens: int) -> bool:
        """Whether a new lease may be tried though others wait."""
        tenant = self._core.tenant_of(key.extra_key)
        if self._line.is_waiting(tenant):
            return False
        return self._line.only_tenant_caps_block() or self._core.is_within_floor(key, num_tokens)

    def _attempt_late(self, refusal: Callable[[OutOfSlotsError], PoolExhausted], attempt: Attempt) -> Message:
        """An attempt from the line: what else it may fail with than want of room is its caller's to hear.

        So is that there never can be room, which may show only now: others would wait behind it in vain.
        """
        try:
            return attempt()
        except OutOfSlotsError as error:
            if error.can_ever_fit:
                raise
            raise refusal(error) from None
        except ConfigMismatch as error:
            raise self.counted(error) from None
        except CoreError as error:
            raise self.counted(to_cache_error(error)) from error

    @property
    def num_exhausted(self) -> int:
        """Requests refused for want of room."""
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
        """Count and return the refusal of a request of that key's namespace that found, or still finds, no room.

        Args:
            num_tokens: of the lease that was to begin; None: a lease was to grow.
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
        return self._refusals.of(shortage, None if key is None else key.extra_key, deadlocked)

    def counted(self, error: CacheError) -> CacheError:
        """Count a request that failed, unless `refusal` has counted it, and return its error."""
        if not isinstance(error, PoolExhausted):
            self.refusals[_CAUSES.get(type(error), "internal_error")] += 1
        return error
