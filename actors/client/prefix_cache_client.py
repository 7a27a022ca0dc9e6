"""`PrefixCacheClient`: the verbs of schedulers and workers that use a cache; `SyncClient`: the same as plain calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import update_wrapper, wraps
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from raydix.actors.client.client_session import ClientSession
from raydix.actors.client.connectors import Connector, LocalConnector, RayConnector
from raydix.actors.client.event_reader import read_events
from raydix.actors.client.forwarding import forwarded_signature
from raydix.actors.client.lease import Lease, make_ownership_error, make_pending
from raydix.actors.client.loop_thread import LoopThread
from raydix.actors.client.sync_lease import SyncLease, SyncPool
from raydix.actors.sessions.bound_models import LAPSED
from raydix.actors.transport.error_map import may_have_taken_effect
from raydix.actors.transport.validation import (
    check_watchable,
    checked_namespace,
    checked_response,
    checked_tokens,
    make_request,
)
from raydix.schemas import (
    AbortRequest,
    Ack,
    AcquireRequest,
    AdoptRequest,
    AdoptResponse,
    BindModelRequest,
    BindModelResponse,
    CacheConfig,
    CacheError,
    CacheStats,
    CheckInvariantsRequest,
    EventSnapshotRequest,
    EvictRequest,
    EvictResponse,
    ExplainRequest,
    ExplainResponse,
    InvalidRequest,
    KVEventBatch,
    KVEventSnapshot,
    LeaseGrant,
    LeaseResponse,
    LockRequest,
    MatchRequest,
    MatchResponse,
    Message,
    ModelFingerprint,
    PackedEvents,
    PrefetchRequest,
    PrefetchResponse,
    ResetRequest,
    RetireRequest,
    RetireResponse,
    RevokeRequest,
    RevokeResponse,
    SetWeightsRequest,
    SlimEventBatch,
    SlimEventSnapshot,
    StatsRequest,
    TreeRequest,
    TreeResponse,
    UnknownLease,
    WaitingResponse,
    WeightsRequest,
    WeightsResponse,
)
from raydix.schemas.requests import DEVICE

if TYPE_CHECKING:
    from raydix.actors.client.attached_pool import AttachedPool

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
M = TypeVar("M", bound=Message)

_MAKING_SYNC = Lock()


def _make_lease_verb(
    verb: Callable[Concatenate[Lease, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[PrefixCacheClient, Lease, P], Coroutine[Any, Any, R]]:
    """Return a method of clients that runs a verb of one of its leases."""
    name = verb.__name__

    def call(self: PrefixCacheClient, lease: Lease, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, R]:
        now: Callable[..., Coroutine[Any, Any, R]] = getattr(Lease, name)  # tracing may have replaced it
        return self._run_verb(lease, now(lease, *args, **kwargs))

    returned = verb.__annotations__["return"]
    call.__signature__ = forwarded_signature(call, verb).replace(return_annotation=returned)  # type: ignore[attr-defined]
    method: Callable[..., Coroutine[Any, Any, R]] = update_wrapper(call, verb)
    return method


class PrefixCacheClient:
    """A client of one cache: one session there, the verbs, and the leases it takes.

    Making one does no I/O and needs no running loop. Its first verb, `await open()` or `async with` opens the session
    on the running loop, and the client stays on that loop. Requests of one tick of the loop travel in one message.

    Args:
        cache: the handle of a cache actor, the name of one (in the namespace of `start_cache`), or a
            `LocalPrefixCache`. By its name a client follows a cache that was shut down and started again, as it does
            one that restarts; a handle stays with one actor.
        owner: a name that logs show for this client; None: host and process. Or the handle of an actor with the mixin
            `WatchedActor`: when that actor dies, the leases of this client are freed immediately. Inside such an actor
            the default is the actor itself. The cache keeps the handle until this client closes. Inside another actor
            with a process that the cache does not see, opening a client logs once how long its slots stay held if the
            actor is killed.

    Attributes:
        session: the client's session, for the parts of this package.

    Raises:
        InvalidRequest: the owner is an actor that cannot be watched.
    """

    def __init__(self, cache: Any, *, owner: Any = None) -> None:
        watched = owner if owner is not None and not isinstance(owner, str) else None
        if watched is not None:
            check_watchable(watched)
        self._cache = cache  # a local cache lives as long as its clients
        self.session = ClientSession(_connector_to(cache, watched), None if watched is not None else owner)
        self._lease_numbers = count(1)
        self._sync: SyncClient | None = None

    @property
    def sync(self) -> SyncClient:
        """This client with plain calls that wait for their results, for notebooks and scripts.

        It runs on a loop in a thread of its own, so coroutines of another loop cannot use it at the same time. Close
        it.
        """
        if self._sync is None:
            with _MAKING_SYNC:  # all threads that share this client get the same one
                self._sync = self._sync or SyncClient(self)
        return self._sync

    # ---------------------------------------------------------------- session

    async def open(self) -> Self:
        """Open the session; no effect if it is open.

        Raises:
            CacheUnavailable: the cache cannot be reached.
            InvalidRequest: the session belongs to another event loop, or was closed, or its owner's name cannot be
                shown or is too long.
        """
        await self.session.open()
        return self

    async def close(self) -> None:
        """Close the session: every lease it still holds ends. Idempotent; no error if the cache is gone.

        It is closed even if the caller is cancelled.
        """
        await self.session.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def config(self) -> CacheConfig:
        """The cache's configuration, known once the session is open."""
        if not self.session.ready:
            raise InvalidRequest("the session is not open yet: await open() first")
        return self.session.config

    @property
    def closed(self) -> bool:
        """Whether `close` was called: all leases of this client have ended."""
        return self.session.closed

    def __reduce__(self) -> Any:
        raise InvalidRequest(
            "a client belongs to its process: it cannot be pickled or sent elsewhere; send the cache's name or handle, "
            "and make one there"
        )

    # ---------------------------------------------------------------- leases

    @make_pending
    async def lock(
        self,
        tokens: Any,
        *,
        extra_key: str | None = None,
        lora_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        offer_s: float | None = None,
        timeout_s: float | None = 0.0,
        load: bool = True,
        load_timeout_s: float | None = None,
        on_wait: Callable[[int], object] | None = None,
    ) -> Lease:
        """Lock the cached prefix of `tokens`, and allocate nothing; `extend` adds private slots behind it.

        If tiers below the pool have more of the prefix, it is loaded first. A load takes slots of the pool, which are
        the tree's when the lease is handed out.

        In kind "slots" it is an `acquire` of that prefix alone: it takes a whole row, even if nothing is cached.

        Args:
            offer_s: grant the lease to another client in the same round trip, for so many seconds by the cache's
                clock, which begin when the lease is handed out, after a load. `lease.offered` is the grant, and the
                lease itself has ended here, as after `lease.grant()`. If the caller is cancelled, both are undone.
                None: do not grant it.
            timeout_s: seconds to wait for the slots of a load; after that nothing is loaded. None:
                `LeaseConfig.acquire_timeout_s`; 0: do not wait.
            load: as in `acquire`, and so is `load_timeout_s`.
            on_wait: called once, on the client's loop, if the lock waits for a load or for slots, with the number of
                tokens that the load brings; 0: that is not known yet.

        Raises:
            PoolExhausted: kinds "slots" and "mamba" alone: the lease gets no row, or no state. Raised immediately.
            InvalidRequest: an argument is wrong; `offer_s` must be a positive, finite number.
        """
        offer_id = None if offer_s is None else self.session.make_offer_id()
        request = make_request(
            LockRequest,
            lease_id=f"{self.session.session_id}-{next(self._lease_numbers)}",
            tokens=tokens,
            namespace=checked_namespace(extra_key, lora_id, cache_salt),
            priority=priority,
            offer_id=offer_id,
            offer_s=offer_s,
            timeout_s=timeout_s,
            load=load,
            load_timeout_s=load_timeout_s,
        )
        lease = await self._request_lease(request, on_wait)
        if offer_id is not None:
            lease.mark_offered(offer_id)
        return lease

    @make_pending
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
        resumed: bool = False,
        boundary_state: bool = False,
        load: bool = True,
        load_timeout_s: float | None = None,
    ) -> Lease:
        """Lock the cached prefix of `tokens`, and allocate slots for the others and `new_tokens` more, in one step.

        If slots are short, the cache evicts. If that is not enough, the request waits in a FIFO queue.

        If tiers below the pool have more of the prefix, it is loaded into slots of the lease before the lease is
        handed out: `lease.loaded`. If another request loads the same pages, this one waits for that load.

        Args:
            tokens: the ids of the prompt, at least one: a list, `array.array`, 1-D integer numpy array or torch tensor,
                each id in 0..2**64-1. Copied.
            extra_key: part of the namespace, as are the next two: only requests with the same three share KV. For
                everything that changes the KV of the same ids, such as the hash of an image.
            lora_id: the adapter that computes the KV; None: the base model.
            cache_salt: a secret or a tenant's name that separates its prefixes from other tenants'.
            new_tokens: slots for this many more tokens behind the prompt, for decoding; `extend` adds more later.
            max_prefix_len: match at most this many tokens; `len(tokens) - 1` leaves one to compute for its logits.
                None: all.
            priority: under the policy "priority", pages that the lease uses and publishes stay longer the higher this
                is.
            timeout_s: seconds to wait for slots; None: `LeaseConfig.acquire_timeout_s`; 0: do not wait.
            resumed: the request had a lease before, which was preempted: `stats` counts it apart from other requests.
            boundary_state: for models with recurrent states: `boundary_slot` is a second state slot, for a copy of the
                state at the end of each page, as a request seldom knows where its answer ends. Where none is free or
                evictable, it is None.
            load: False takes only KV that is in the pool.
            load_timeout_s: seconds for the load, after the wait for slots; None: `load_timeout_s` of each
                tier; 0: do not load. If the load is late or fails, the lease has the prefix that is there.

        Returns:
            The lease, to be awaited or entered once. `lease.slots` has `len(tokens) + new_tokens` entries: the first
            `prefix_len` are locked in the tree, the others are private. End it with `async with`,
            `release` or `abort`.

        Raises:
            PoolExhausted: no slots came free in time. With `can_ever_fit=False` it is raised immediately: the request
                can never fit.
            CacheBusy: the queue is full; try again after `retry_after_s`.
            CacheUnavailable: the cache is dead, silent or shutting down.
            InvalidRequest: an argument is wrong; the message says which and why.
        """
        namespace = checked_namespace(extra_key, lora_id, cache_salt)
        lease_id = f"{self.session.session_id}-{next(self._lease_numbers)}"
        packed = checked_tokens(tokens)
        request = make_request(
            AcquireRequest,
            lease_id=lease_id,
            tokens=packed,
            namespace=namespace,
            new_tokens=new_tokens,
            max_prefix_len=max_prefix_len,
            priority=priority,
            timeout_s=timeout_s,
            resumed=resumed,
            boundary_state=boundary_state,
            load=load,
            load_timeout_s=load_timeout_s,
        )
        lease = await self._request_lease(request)
        lease.remember_packed(tokens)
        return lease

    async def _request_lease(
        self, request: AcquireRequest | LockRequest, on_wait: Callable[[int], object] | None = None
    ) -> Lease:
        session = self.session
        try:
            response, transport = await session.ask(request)
            if not isinstance(response, LeaseResponse):
                if isinstance(response, WaitingResponse):
                    if on_wait is not None:
                        on_wait(response.loading_tokens)
                    response = await session.wait(transport, response.ticket)
                response = checked_response(LeaseResponse, response)
        except (asyncio.CancelledError, CacheError) as error:
            session.undo_if_executed(error, AbortRequest, lease_id=request.lease_id)
            raise
        lease = Lease(self, response, request.tokens, transport, session.run_len)
        session.writers.add_lease(lease)
        return lease

    insert = _make_lease_verb(Lease.insert)
    insert_next = _make_lease_verb(Lease.insert_next)
    preempt = _make_lease_verb(Lease.preempt)
    extend = _make_lease_verb(Lease.extend)
    confirm_open = _make_lease_verb(Lease.confirm_open)
    release_window = _make_lease_verb(Lease.release_window)
    release = unlock = _make_lease_verb(Lease.release)
    abort = _make_lease_verb(Lease.abort)
    grant = _make_lease_verb(Lease.grant)

    async def _run_verb(self, lease: Lease, verb: Coroutine[Any, Any, R]) -> R:
        """Run the coroutine of a verb of `lease`, which must be this client's."""
        if getattr(lease, "client", None) is not self:
            verb.close()
            raise make_ownership_error(lease)
        return await verb

    def check_lease(self, lease: Lease) -> None:
        """Raise an error, as `Lease.check_open` does, unless this is an open lease of this client.

        Raises:
            InvalidRequest: it is no lease.
            UnknownLease: it is another client's lease.
        """
        if getattr(lease, "client", None) is not self:
            raise make_ownership_error(lease)
        lease.check_open()

    # ---------------------------------------------------------------- grants

    async def revoke(self, grant: LeaseGrant) -> bool:
        """End a lease that this client granted, if it has not been adopted.

        Returns:
            True if this call ended the lease; False if it was adopted, revoked or expired before.

        Raises:
            UnknownLease: another client granted it.
        """
        _check_grant(grant)
        if not self.session.has_used_id(grant.granter):
            raise UnknownLease(f"lease {grant.lease_id!r} was granted by another client: only its granter revokes it")
        request = make_request(RevokeRequest, lease_id=grant.lease_id, offer_id=grant.offer_id)
        return (await self._ask(request, RevokeResponse)).ended

    @make_pending
    async def adopt(self, grant: LeaseGrant) -> Lease:
        """Take over a lease that another client granted: from now on this client owns it, with all its slots.

        Raises:
            UnknownLease: the lease has ended, or was adopted or revoked already.
            LeaseExpired: the grant's time ran out, or its granter was silent for too long, or died.
            StaleEpoch: the cache has restarted since.
        """
        _check_grant(grant)
        request = make_request(
            AdoptRequest,
            lease_id=grant.lease_id,
            granter=grant.granter,
            granted_epoch=grant.epoch,
            offer_id=grant.offer_id,
        )
        session = self.session
        with session.undo_on_failure(AbortRequest, lease_id=grant.lease_id):
            response, transport = await session.ask(request)
        adopted = checked_response(AdoptResponse, response)
        lease = Lease(self, adopted.lease, adopted.tokens, transport, session.run_len)
        lease.published_len = adopted.published_len
        session.writers.add_lease(lease)
        return lease

    # ---------------------------------------------------------------- the pool's tensors

    async def attach_pool(self, mapped: bool | None = None, *, pin: bool | None = None) -> AttachedPool:
        """Return the pool's tensors, for reading and writing the slots of leases.

        Args:
            mapped: None maps the memory if this process can reach it, and copies through the cache otherwise; True
                insists on mapping; False declines it.
            pin: register mapped host memory with CUDA, for fast copies to and from this process's GPU. None: in the
                background, if this process has a GPU; True: before this returns; False: do not. CUDA refuses a transfer
                between a card and registered memory that crosses an address that 2**30 divides.

        Raises:
            CacheUnavailable: `mapped=True`, or the pool's layers differ in shape, but this process cannot map it; or
                `pin=True`, but it cannot register the memory. The message says why.
        """
        from raydix.actors.client.attached_pool import AttachedPool

        AttachedPool.check_arguments(mapped, pin)
        handle, transport = await self.session.ask_for_pool()
        pool = AttachedPool.attach(self, handle, transport.local_pool(), mapped)
        self.session.writers.pools.add(pool)
        await pool.pin(pin)
        return pool

    # ---------------------------------------------------------------- probes and administration

    async def match(
        self,
        tokens: Any,
        *,
        extra_key: str | None = None,
        lora_id: str | None = None,
        cache_salt: str | None = None,
    ) -> MatchResponse:
        """Return how many tokens of `tokens` are cached. A probe: it locks nothing and changes no recency.

        `host_len` of the result also counts tokens that an `acquire` or `lock` would load from the host tier, and
        `disk_len` those that it would load from the disk, too.
        """
        namespace = checked_namespace(extra_key, lora_id, cache_salt)
        return await self._ask(make_request(MatchRequest, tokens=tokens, namespace=namespace), MatchResponse)

    async def bind_model(self, fingerprint: ModelFingerprint, *, lora_id: str | None = None) -> int:
        """Bind this session to the model that computes the KV of a `lora_id`; None: of the base model.

        The first session sets the fingerprint of a generation, which outlives that session; sessions with an equal one
        join. `retire(lora_id=...)` begins the next generation, without a fingerprint; `reset()` and `set_weights` begin
        the next one of every `lora_id` and of the base. A session that is bound to an earlier generation gets
        ConfigMismatch from `acquire`, `lock` and `adopt` in that `lora_id` (of the base: everywhere) until it has bound
        again. So does a client that has lost its session: the next one is bound to nothing yet. Sessions that bind
        nothing are not checked.

        If weights are replaced under one `lora_id`: stop requests, push to every worker, retire, bind again.

        With a disk tier it returns when requests can find the pages that equal models have left there, or after
        `disk.load_timeout_s`.

        Args:
            fingerprint: of the weights as they are now.
            lora_id: the adapter, as in `acquire`.

        Returns:
            The generation's number, which is unique in the cache.

        Raises:
            ConfigMismatch: another model is bound; the message names the fields that differ, or "weights". Or the
                cache is configured for another base (`CacheConfig.fingerprint`).
            InvalidRequest: `fingerprint` is no ModelFingerprint, or `lora_id` no string.
        """
        if not isinstance(fingerprint, ModelFingerprint):
            raise InvalidRequest(f"fingerprint must be a ModelFingerprint, not {type(fingerprint).__name__}")
        checked_namespace(None, lora_id, None)
        request = make_request(BindModelRequest, fingerprint=fingerprint, lora_id=lora_id)
        try:
            generation = (await self._ask(request, BindModelResponse)).generation
        except (asyncio.CancelledError, CacheError) as error:
            if may_have_taken_effect(error):
                self.session.bound.add(lora_id, LAPSED)
            raise
        self.session.bound.add(lora_id, generation)
        return generation

    async def prefetch(
        self,
        tokens: Any,
        *,
        extra_key: str | None = None,
        lora_id: str | None = None,
        cache_salt: str | None = None,
    ) -> int:
        """Begin to load into the pool what the tiers below have of the prefix of `tokens`, for a later request.

        It holds no lease, and goes on if the caller is cancelled. A request for the same tokens waits for its end.

        Returns:
            The number of tokens that are being loaded: at most a quarter of the pool. 0: there is nothing to load, or
            no room for it.
        """
        namespace = checked_namespace(extra_key, lora_id, cache_salt)
        request = make_request(PrefetchRequest, tokens=tokens, namespace=namespace)
        return (await self._ask(request, PrefetchResponse)).num_tokens

    async def evict(self, num_tokens: int, tier: str = DEVICE) -> EvictResponse:
        """Free at least `num_tokens` slots of cached tokens, or all that no lease holds.

        Args:
            num_tokens: see above.
            tier: "device", the pool; "host", the tier in host memory; or "disk". Each evicts its own KV alone.

        Raises:
            InvalidRequest: the cache has no such tier; the message names its tiers.
        """
        return await self._ask(make_request(EvictRequest, num_tokens=num_tokens, tier=tier), EvictResponse)

    async def reset(self) -> None:
        """Make everything unmatchable and free it; running leases keep their slots, but can no longer publish.

        The label of the base's weights is forgotten. With a disk tier, `reset`, `retire` and `set_weights` return when
        the disk has committed them.

        Raises:
            CacheUnavailable: the disk has not done so within 5 s: only a restart before it does can bring the KV back.
                Call again to wait for it.
        """
        await self._ask(ResetRequest(), Ack)

    async def set_weights(self, label: str) -> int:
        """Name the base's new weights and `reset`, in one step. No effect if the base has this label already.

        For weights that are replaced in every worker: stop requests, push to every worker, `set_weights`, bind again.
        A session that binds the base next must have this label in `ModelFingerprint.weights`. Without `set_weights`
        the first session that binds the base sets the label.

        Args:
            label: 1 to 256 characters, such as the number of a training step. Use each label for one set of weights.

        Returns:
            The number of the base's generation, as `bind_model` returns it.

        Raises:
            ConfigMismatch: the cache is configured for one base (`CacheConfig.fingerprint`).
            InvalidRequest: `label` is empty, too long or no valid text.
        """
        request = make_request(SetWeightsRequest, label=label)
        return (await self._ask(request, WeightsResponse)).generation

    async def weights(self) -> WeightsResponse:
        """Return the label and the number of the base's generation: a probe."""
        return await self._ask(WeightsRequest(), WeightsResponse)

    async def retire(
        self, *, extra_key: str | None = None, lora_id: str | None = None, cache_salt: str | None = None
    ) -> RetireResponse:
        """Make every namespace that matches all given fields unmatchable immediately, and reclaim its slots.

        For an adapter that was deleted, or weights that were replaced. Running leases keep their slots to the end, but
        their `insert` publishes nothing (`retired=True`); new leases of the same namespace start from an empty one.
        Slots that no lease holds are freed in the background.

        Raises:
            InvalidRequest: no field is given: `reset()` retires everything.
        """
        checked_namespace(extra_key, lora_id, cache_salt)
        request = make_request(RetireRequest, extra_key=extra_key, lora_id=lora_id, cache_salt=cache_salt)
        return await self._ask(request, RetireResponse)

    async def explain(
        self,
        tokens: Any,
        *,
        extra_key: str | None = None,
        lora_id: str | None = None,
        cache_salt: str | None = None,
    ) -> ExplainResponse:
        """Return where a match of `tokens` ends, and why it goes no further: a probe. Printed, it is a sentence.

        The reasons: never stored, evicted (when, and for which request), retired, in another namespace, a missing
        window or state, or less than a page. If tiers below have more, it says how many tokens, and where; also when
        they left the disk. The cache remembers its latest 16,384 evictions for it.
        """
        namespace = checked_namespace(extra_key, lora_id, cache_salt)
        return await self._ask(make_request(ExplainRequest, tokens=tokens, namespace=namespace), ExplainResponse)

    async def tree(self, *, max_nodes: int = 200, max_depth: int = 64, max_width: int = 64) -> TreeResponse:
        """Return the largest branches of the cached tree, with sizes, locks, hits and ages: a probe.

        The cache looks at 4,096 nodes at most, a few milliseconds, and says which branches it saw in full.

        Args:
            max_nodes: branches returned.
            max_depth: levels below the namespaces.
            max_width: children returned of each branch.
        """
        request = make_request(TreeRequest, max_nodes=max_nodes, max_depth=max_depth, max_width=max_width)
        return await self._ask(request, TreeResponse)

    async def stats(self) -> CacheStats:
        """Return a snapshot of the cache's counts."""
        return await self._ask(StatsRequest(), CacheStats)

    async def check_invariants(self) -> None:
        """Have the cache verify every rule it keeps. O(everything); for tests and doubts.

        Raises:
            CacheError: a rule is broken; the message says which.
        """
        await self.session.ask(CheckInvariantsRequest())

    async def _ask(self, request: Message, model: type[M]) -> M:
        response, transport = await self.session.ask(request)
        if isinstance(response, WaitingResponse):  # a binding or a retirement, until the disk is ready for its answer
            response = await self.session.wait(transport, response.ticket)
        return checked_response(model, response)

    # ---------------------------------------------------------------- KV events

    def events(
        self, after_seq: int | None = None, *, tier: str = DEVICE
    ) -> AsyncIterator[KVEventBatch | SlimEventBatch]:
        """Yield stored and removed pages in batches, as it happens; end when this client is closed.

        Needs `CacheConfig(events="full")`, which yields `KVEventBatch`, or `"slim"`, which yields `SlimEventBatch`.
        Applied in order to an empty index, from the beginning, or to one made of `event_snapshot()`, the events give
        exactly the cached pages. Readers do not slow the cache down: it keeps its latest events for all readers (10,000
        of them, up to 64 MiB; of slim ones 16 MiB). A reader that falls behind gets a batch with `gap=True`, without
        events. Then replace the index by a new snapshot and go on with the same iterator. Batches up to the snapshot's
        `seq` need not be applied, but may be. A slim batch may begin before the number that was asked for: skip its
        first events, as `PageIndex.apply` does.

            following = True
            while following:
                try:
                    index = Index(await client.event_snapshot())
                    async for batch in client.events(index.seq):
                        if batch.gap or batch.epoch != index.epoch:
                            index = Index(await client.event_snapshot())
                        elif batch.seq > index.seq:
                            index.apply(batch)
                    following = False  # the client was closed
                except (StaleEpoch, CacheUnavailable):  # the cache has restarted, or is about to
                    await asyncio.sleep(1)

        Args:
            after_seq: go on after this event of the present epoch; None: from the beginning, with a gap if that is long
                ago. Each epoch numbers its events from 1: compare epochs before you use a number across a restart.
            tier: "device": the pool. "host": the tier in host memory, if there is one. "disk": that on a local disk.
                Each tier has numbers of its own, and a page may be in several.

        Raises:
            InvalidRequest: `after_seq` is not the number of an event, or the cache publishes no events, or has no such
                tier.
            StaleEpoch: the cache has restarted; its events begin again.
            CacheUnavailable: the cache does not answer, as while it restarts.

        After StaleEpoch or CacheUnavailable, a new snapshot and a new `events()` go on.
        """
        return read_events(self.session, after_seq, tier)

    async def event_snapshot(self, *, tier: str = DEVICE) -> KVEventSnapshot | SlimEventSnapshot:
        """Return all pages of a tier as events, and the number to go on after: `events(snapshot.seq, tier=tier)`.

        With `events="slim"` it is a `SlimEventSnapshot`: the hashes of the pages.

        It includes the results of this client's requests before. The cache does nothing else while it walks the tree of
        its pool: about 10 us a node, and 0.1 us a page. Large tiers below are walked 1 ms at a time.

        Args:
            tier: as in `events`.

        Raises:
            InvalidRequest: the cache publishes no events, or has no such tier.
        """
        response = await self._ask(make_request(EventSnapshotRequest, tier=tier), Message)
        if isinstance(response, SlimEventSnapshot):
            return response
        return checked_response(PackedEvents, response).snapshot()


def _make_plain(
    verb: Callable[Concatenate[PrefixCacheClient, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[SyncClient, P], R]:
    return _make_wrapping(verb, lambda client, result: result)


def _make_wrapping(
    verb: Callable[Concatenate[PrefixCacheClient, P], Coroutine[Any, Any, R]],
    wrapper: Callable[[SyncClient, R], S],
    undo: Callable[[R], Coroutine[Any, Any, Any]] | None = None,
) -> Callable[Concatenate[SyncClient, P], S]:
    name = verb.__name__

    @wraps(verb)
    def call(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> S:
        now: Callable[P, Coroutine[Any, Any, R]] = getattr(self.client, name)  # tracing may have replaced it
        return wrapper(self, self.run(now(*args, **kwargs), undo))

    return call


async def _undo_lease(lease: Lease) -> None:
    """End a lease after its caller was interrupted, also one that is granted already."""
    if lease.offered is not None:
        await lease.client.revoke(lease.offered)
    else:
        await lease.abort()


class SyncClient:
    """A client with verbs that wait for their results, also if a loop runs already, as in a notebook; see `sync`.

        with PrefixCacheClient("kv-0").sync as cache:
            print(cache.match(tokens))
            with cache.acquire(tokens) as lease:
                lease.insert(tokens)

    The client runs on a loop in a thread of its own. There it sends its heartbeats, and ends the leases of interrupted
    calls (Ctrl-C). Calls may come from several threads. Close it: the thread ends with it.

    Attributes:
        client: the asynchronous client; its coroutines belong to the other thread's loop.
        thread: the thread of that loop.
        closed: whether `close` has ended all its leases.
    """

    def __init__(self, client: PrefixCacheClient) -> None:
        self.client = client
        self.thread = LoopThread("raydix-sync")
        self.closed = False

    def run(self, coroutine: Coroutine[Any, Any, R], undo: Callable[[R], Coroutine[Any, Any, Any]] | None = None) -> R:
        """Run a coroutine on the thread's loop, as `LoopThread.run` does.

        Raises:
            InvalidRequest: the client was closed.
        """
        if self.closed:
            coroutine.close()
            raise InvalidRequest("this client was closed: make a new one")
        return self.thread.run(coroutine, undo)

    match = _make_plain(PrefixCacheClient.match)
    acquire = _make_wrapping(PrefixCacheClient.acquire, SyncLease, _undo_lease)
    lock = _make_wrapping(PrefixCacheClient.lock, SyncLease, _undo_lease)
    adopt = _make_wrapping(PrefixCacheClient.adopt, SyncLease, _undo_lease)
    revoke = _make_plain(PrefixCacheClient.revoke)
    bind_model = _make_plain(PrefixCacheClient.bind_model)
    prefetch = _make_plain(PrefixCacheClient.prefetch)
    evict = _make_plain(PrefixCacheClient.evict)
    reset = _make_plain(PrefixCacheClient.reset)
    retire = _make_plain(PrefixCacheClient.retire)
    set_weights = _make_plain(PrefixCacheClient.set_weights)
    weights = _make_plain(PrefixCacheClient.weights)
    explain = _make_plain(PrefixCacheClient.explain)
    stats = _make_plain(PrefixCacheClient.stats)
    tree = _make_plain(PrefixCacheClient.tree)
    check_invariants = _make_plain(PrefixCacheClient.check_invariants)
    event_snapshot = _make_plain(PrefixCacheClient.event_snapshot)
    attach_pool = _make_wrapping(PrefixCacheClient.attach_pool, SyncPool)

    def events(self, after_seq: int | None = None, *, tier: str = DEVICE) -> Iterator[KVEventBatch | SlimEventBatch]:
        """`PrefixCacheClient.events`, as an iterator that waits for each batch."""
        batches = self.client.events(after_seq, tier=tier)

        async def read_next() -> KVEventBatch | SlimEventBatch | None:
            return await anext(batches, None)

        while (batch := self.run(read_next())) is not None:
            yield batch

    @property
    def config(self) -> CacheConfig:
        """The cache's configuration, known once the session is open."""
        return self.client.config

    def open(self) -> Self:
        """Open the session, as the first verb also does."""
        self.run(self.client.open())
        return self

    def close(self) -> None:
        """Close the session, which ends its leases, and the thread. Idempotent."""
        if self.closed:
            return
        try:
            self.run(self.client.close())
            self.closed = True
        finally:
            self.thread.stop()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *error: object) -> None:
        self.close()


def _connector_to(cache: Any, owner: Any) -> Connector:
    if isinstance(cache, PrefixCacheClient):
        return cache.session.connector
    return cache if isinstance(cache, LocalConnector) else RayConnector(cache, owner)


def _check_grant(grant: Any) -> None:
    """Raise InvalidRequest unless this is a grant."""
    if not isinstance(grant, LeaseGrant):
        raise InvalidRequest(f"grant must be a LeaseGrant, as `await lease.grant()` gives, not {type(grant).__name__}")
    if not isinstance(grant.granter, str):
        raise InvalidRequest(f"the granter of a grant must be a str, not {type(grant.granter).__name__}")
