"""`CacheVerbs`: the verbs, the same for a client of a cache actor and for a cache in this process."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from raydix.actors.client.handover_verbs import HandoverVerbs
from raydix.actors.client.lease import Lease, not_mine
from raydix.actors.client.pending_lease import pending
from raydix.actors.transport.error_map import may_have_taken_effect
from raydix.actors.transport.validation import (
    checked_count,
    checked_namespace,
    checked_response,
    checked_token_ids,
    checked_tokens,
    make_checked,
    make_request,
)
from raydix.schemas import (
    AbortRequest,
    AcquireRequest,
    CacheError,
    CacheUnavailable,
    ExtendRequest,
    ExtendResponse,
    InsertRequest,
    InsertResponse,
    InvalidRequest,
    LeaseExpired,
    LeaseResponse,
    LockRequest,
    Message,
    ReleaseRequest,
    ReleaseWindowRequest,
    StaleEpoch,
    WindowResponse,
    WithdrawRequest,
)

if TYPE_CHECKING:
    import torch

    from raydix.actors.client.attached_pool import AttachedPool
    from raydix.actors.client.sync_client import SyncClient
    from raydix.actors.transport.transport import Note, Outcome

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

_MAKING_SYNC = Lock()


class CacheVerbs(HandoverVerbs):
    """The verbs of one session."""

    def __init__(self, owner: str | None = None) -> None:
        super().__init__(owner)
        self._lease_numbers = count(1)
        self._sync: SyncClient | None = None

    @property
    def sync(self) -> SyncClient:
        """This client with plain calls that wait for their answers, for notebooks and scripts.

        It runs on a loop in a thread of its own, so that it cannot be used by coroutines of another as well. Close it.
        """
        if self._sync is None:
            from raydix.actors.client.sync_client import SyncClient

            with _MAKING_SYNC:  # threads may share it: it is one
                self._sync = self._sync or SyncClient(self)
        return self._sync

    @pending
    async def lock(
        self,
        tokens: Any,
        *,
        extra_key: str | None = None,
        lora_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> Lease:
        """Lock what is cached of `tokens`, and allocate nothing; `extend` adds private slots to the prefix's.

        In kind "slots" it is an `acquire` of that prefix alone: it takes a whole row, even if nothing is cached.

        Raises:
            PoolExhausted: kinds "slots" and "mamba" alone: there is no row, or no state, for the lease; at once.
        """
        request = make_request(
            LockRequest,
            lease_id=self._new_lease_id(),
            tokens=tokens,
            namespace=checked_namespace(extra_key, lora_id, cache_salt),
            priority=priority,
        )
        return await self._lease(request)

    @pending
    async def acquire(
        self,
        tokens: Any,
        *,
        extra_key: str | None = None,
        lora_id: str | None = None,
        cache_salt: str | None = None,
        new_tokens: int = 0,
        max_prefix_len: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Lease:
        """Lock what is cached of `tokens` and allocate slots for the rest and `new_tokens` more, in one step.

        Evicts what is missing. If that is not enough, the request waits in line for room.

        Args:
            tokens: the ids of the prompt, at least one: a list, `array.array`, 1-D integer numpy array or torch tensor,
                each id in 0..2**64-1. Copied.
            extra_key: part of the namespace, as are the next two: only requests with the same three share KV. For
                everything that changes the KV of the same ids, such as the hash of an image.
            lora_id: the adapter that computes the KV; None: the base model.
            cache_salt: a secret or a tenant's name that keeps the prefixes of others out of reach.
            new_tokens: slots for so many more tokens behind the prompt, for decoding; `extend` adds more later.
            max_prefix_len: match at most so many tokens; `len(tokens) - 1` leaves one to compute for its logits. None:
                all.
            priority: under the policy "priority", what the lease uses and publishes stays longer the higher this is.
            timeout_s: seconds to wait for room; None: `LeaseConfig.acquire_timeout_s`; 0: do not wait.

        Returns:
            The lease, to be awaited or entered once. `lease.slots` has `len(tokens) + new_tokens` entries: those of
            the first `prefix_len` tokens are locked in the tree, the others are private. End it with `async with`,
            `release` or `abort`.

        Raises:
            PoolExhausted: no room came free in time, or (`can_ever_fit=False`, at once) there never can be.
            CacheBusy: the line is full; try again after `retry_after_s`.
            CacheUnavailable: the cache is dead, silent or shutting down.
            InvalidRequest: an argument is wrong; the message says which and why.
        """
        namespace = checked_namespace(extra_key, lora_id, cache_salt)
        lease_id = f"{self._session_id}-{next(self._lease_numbers)}"
        packed = checked_tokens(tokens)
        request = make_checked(
            AcquireRequest.of, lease_id, packed, namespace, new_tokens, max_prefix_len, priority, timeout_s
        )
        lease = await self._lease(request)
        lease.note_packed(tokens)
        return lease

    async def insert(
        self, lease: Lease, tokens: Any, *, release: bool = False, publish_state: bool = False
    ) -> InsertResponse:
        """`Lease.insert`. If the caller is cancelled, the insert still takes effect, and the lease knows of it."""
        await self._check_mine(lease)
        packed = lease.packed(tokens) or checked_tokens(tokens)
        unseen, asked = lease.unseen(packed), lease.ask()
        request = make_checked(InsertRequest.of, lease.lease_id, len(packed), unseen, release, publish_state, asked[0])
        return await self._noted(request, InsertResponse, partial(lease.note_inserted, packed, request.release, asked))

    async def preempt(self, lease: Lease, tokens: Any, *, publish_state: bool = False) -> None:
        """`Lease.preempt`."""
        if len(packed := checked_token_ids(tokens)):
            await self.insert(lease, packed, release=True, publish_state=publish_state)
        else:
            await self._check_mine(lease)
            await self.release(lease)

    async def extend(self, lease: Lease, num_tokens: int, *, timeout_s: float | None = None) -> torch.Tensor:
        """`Lease.extend`."""
        await self._check_mine(lease)
        if type(num_tokens) is not int or num_tokens < 1:
            num_tokens = checked_count(num_tokens)
        with lease.extending() as (covered, known_pages, number):
            request = make_request(
                ExtendRequest,
                lease_id=lease.lease_id,
                num_slots=covered + num_tokens,
                known_pages=known_pages,
                timeout_s=timeout_s,
            )
            try:
                response = checked_response(ExtendResponse, await self._call_of_lease(request))
            except (asyncio.CancelledError, CacheError) as error:
                if may_have_taken_effect(error):
                    self._compensate(WithdrawRequest(lease_id=lease.lease_id))
                raise
            return lease.note_extended(response, known_pages, number, request.num_slots, num_tokens)

    async def release_window(self, lease: Lease, up_to: int) -> None:
        """`Lease.release_window`. If the caller is cancelled, it still takes effect, and the lease knows of it."""
        await self._check_mine(lease)
        request = make_request(ReleaseWindowRequest, lease_id=lease.lease_id, up_to=up_to)
        await self._noted(request, WindowResponse, partial(lease.note_released_window, lease.ask()))

    async def release(self, lease: Lease) -> None:
        """`Lease.release`."""
        await self._end(lease, ReleaseRequest)

    async def unlock(self, lease: Lease) -> None:
        """`Lease.release`, for what `lock` gave."""
        await self.release(lease)

    async def abort(self, lease: Lease) -> None:
        """`Lease.abort`."""
        await self._end(lease, AbortRequest)

    async def attach_pool(self, mapped: bool | None = None) -> AttachedPool:
        """The pool's tensors, for reading and writing the slots of leases.

        Args:
            mapped: None maps the memory if it can be reached from here and copies through the cache otherwise, True
                insists on mapping, False declines it.

        Raises:
            CacheUnavailable: `mapped=True`, or the pool's layers differ in shape, but this process cannot map it; the
                message says why.
        """
        from raydix.actors.client.attached_pool import AttachedPool

        pool, _ = await self._ask_anew(lambda transport: AttachedPool.attach(self, transport, mapped))
        self._writers.pools.add(pool)
        return pool

    def __reduce__(self) -> Any:
        raise InvalidRequest(
            "a client belongs to its process: it cannot be pickled or sent elsewhere; send the cache's name or handle, "
            "and make one there"
        )

    # ---------------------------------------------------------------- parts

    async def _lease(self, request: AcquireRequest | LockRequest) -> Lease:
        try:
            response, transport = await self._call_anew(request)
            if not isinstance(response, LeaseResponse):
                response = await self._admitted(response, transport)
                response = checked_response(LeaseResponse, response)
        except (asyncio.CancelledError, CacheError) as error:
            if may_have_taken_effect(error):
                self._compensate(AbortRequest(lease_id=request.lease_id))
            raise
        return Lease(self, response, request.tokens, transport, self._config.run_len)

    async def _noted(self, request: Message, model: type[M], note: Note) -> M:
        """The response to a request on a lease, noted even if the caller is cancelled meanwhile."""
        transport = self._transport
        try:
            return checked_response(model, await transport.submit(request, note))
        except (StaleEpoch, LeaseExpired):
            self._note_loss(transport)
            raise

    async def _end(self, lease: Lease, how: type[ReleaseRequest | AbortRequest]) -> None:
        if getattr(lease, "client", None) is not self:
            raise not_mine(lease)
        if self._closed:
            lease.end()
        elif self._loop is not asyncio.get_running_loop():
            await self.open()
        if not lease.end() or self._closed:
            return
        request = how(lease_id=lease.lease_id)
        try:
            await self._transport.submit(request, partial(self._note_ended, request))
        except CacheUnavailable as error:
            about = {"lease": lease.lease_id, "epoch": lease.epoch}
            logger.info("lease %r ended with its cache, or will soon: %s", lease.lease_id, error, extra=about)
        except (StaleEpoch, LeaseExpired) as error:
            about = {"lease": lease.lease_id, "epoch": lease.epoch}
            logger.info("lease %r ended with its session: %s", lease.lease_id, error, extra=about)
            self._note_loss(self._transport)

    def _note_ended(self, request: ReleaseRequest | AbortRequest, outcome: Outcome) -> None:
        if isinstance(outcome, CacheError) and may_have_taken_effect(outcome):  # it may be lost on its way
            self._queue_undo(request)

    def _new_lease_id(self) -> str:
        return f"{self._session_id}-{next(self._lease_numbers)}"
