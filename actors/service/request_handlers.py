"""`RequestHandlers`: the verbs of the cache, by the type of their request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from raydix.actors.service.stats import tree_response
from raydix.actors.service.tier_feeds import TierFeeds
from raydix.actors.sessions.admission import Admission, key_of
from raydix.actors.sessions.lease_offers import LeaseOffers
from raydix.actors.sessions.model_bindings import ModelBindings
from raydix.actors.sessions.wait_queue import WaitQueue
from raydix.actors.tiers.lower_tiers import LowerTiers
from raydix.actors.transport.validation import unknown_tier
from raydix.cache_core import KVCache, LeasedCache
from raydix.cache_core.outline import OutlineLimits
from raydix.schemas import (
    AbortRequest,
    Ack,
    AcquireRequest,
    AdoptRequest,
    AdoptResponse,
    BindModelRequest,
    BindModelResponse,
    CacheError,
    CacheStats,
    CheckInvariantsRequest,
    EventSnapshotRequest,
    EvictRequest,
    EvictResponse,
    ExplainRequest,
    ExplainResponse,
    ExtendRequest,
    GrantRequest,
    InsertRequest,
    InvalidRequest,
    LeaseResponse,
    LockRequest,
    MatchRequest,
    MatchResponse,
    Message,
    PrefetchRequest,
    PrefetchResponse,
    ReleaseRequest,
    ReleaseWindowRequest,
    ResetRequest,
    RetireRequest,
    RetireResponse,
    RevokeRequest,
    RevokeResponse,
    SetWeightsRequest,
    StaleEpoch,
    StatsRequest,
    TakeBackRequest,
    TokenIds,
    TreeRequest,
    TreeResponse,
    WeightsRequest,
    WeightsResponse,
    WindowResponse,
    WithdrawRequest,
    namespaces_of,
    unframe_namespace,
)

if TYPE_CHECKING:
    from raydix.actors.tiers.disk.disk_tier import DiskTier

Answer = Message | CacheError


class RequestHandlers:
    """One method per verb. Each runs without awaiting, so each is atomic on the cache's loop.

    Attributes:
        verbs: by type, the function that takes a session's id and its request, and returns the response. It may also
            return an error, which is then not counted, or raise one.

    Args:
        epoch: names this life of the cache.
        core: the cache.
        wait_queue: of the requests that find no room.
        admission: of leases that begin or grow.
        offers: leases that were granted and not adopted yet.
        bindings: of sessions to models.
        tiers: below the pool.
        disk: the last of them, if it is a disk; None: it is not.
        caches: of all tiers, by name.
        feeds: of the events of each tier.
        stats: returns all counts.
        unused_s: returns the seconds since a tick of the cache's clock, if it has one.
    """

    def __init__(
        self,
        epoch: str,
        core: LeasedCache,
        wait_queue: WaitQueue,
        admission: Admission,
        offers: LeaseOffers,
        bindings: ModelBindings,
        tiers: LowerTiers,
        disk: DiskTier | None,
        caches: Mapping[str, LeasedCache],
        feeds: TierFeeds,
        stats: Callable[[], CacheStats],
        unused_s: Callable[[int], float | None],
    ) -> None:
        self._epoch = epoch
        self._core = core
        self._wait_queue = wait_queue
        self._admission = admission
        self._offers = offers
        self._bindings = bindings
        self._tiers = tiers
        self._disk = disk
        self._caches = caches
        self._feeds = feeds
        self._unused_s = unused_s
        self.verbs: dict[type[Message], Callable[[str, Any], Answer]] = {
            MatchRequest: self._match,
            LockRequest: admission.lock,
            AcquireRequest: admission.acquire,
            InsertRequest: admission.insert,
            ExtendRequest: admission.extend,
            ReleaseWindowRequest: self._release_window,
            WithdrawRequest: self._withdraw,
            ReleaseRequest: self._release,
            AbortRequest: self._release,
            GrantRequest: self._grant,
            AdoptRequest: self._adopt,
            RevokeRequest: self._revoke,
            TakeBackRequest: self._take_back,
            BindModelRequest: self._bind_model,
            EvictRequest: self._evict,
            PrefetchRequest: self._prefetch,
            ResetRequest: self._reset,
            RetireRequest: self._retire,
            SetWeightsRequest: self._set_weights,
            WeightsRequest: lambda session_id, request: self._weights(),
            ExplainRequest: self._explain,
            TreeRequest: self._tree,
            StatsRequest: lambda session_id, request: stats(),
            EventSnapshotRequest: self._event_snapshot,
            CheckInvariantsRequest: self._check_invariants,
        }

    def _match(self, session_id: str, request: MatchRequest) -> MatchResponse:
        key = key_of(request.tokens, request.namespace)
        match = self._core.match(key)
        below = self._tiers.lengths_below(key, match.prefix_len)
        return MatchResponse(
            prefix_len=match.prefix_len,
            full_prefix_len=max(match.prefix_len, match.full_prefix_len),
            branching_len=match.mamba_branching_seqlen,
            host_len=below.get("host", 0),
            disk_len=below.get("disk", 0),
        )

    def _release_window(self, session_id: str, request: ReleaseWindowRequest) -> WindowResponse:
        lease = self._core.leases.get(request.lease_id, session_id)
        self._core.release_window(request.lease_id, session_id, request.up_to)
        return WindowResponse(swa_page_starts=self._admission.packed_window(lease))

    def _withdraw(self, session_id: str, request: WithdrawRequest) -> Ack:
        self._wait_queue.withdraw(session_id, request.lease_id)
        return Ack()

    def _release(self, session_id: str, request: ReleaseRequest | AbortRequest) -> Ack:
        self._wait_queue.withdraw(session_id, request.lease_id)
        self._core.release(request.lease_id, session_id)
        return Ack()

    def _grant(self, session_id: str, request: GrantRequest) -> LeaseResponse:
        return self._admission.lease_response(
            self._offers.offer(request.lease_id, session_id, request.offer_id, request.timeout_s)
        )

    def _revoke(self, session_id: str, request: RevokeRequest) -> RevokeResponse:
        return RevokeResponse(ended=self._offers.revoke(request.lease_id, session_id, request.offer_id))

    def _take_back(self, session_id: str, request: TakeBackRequest) -> Ack:
        self._core.take_back(request.lease_id, session_id, request.offer_id)
        return Ack()

    def _adopt(self, session_id: str, request: AdoptRequest) -> AdoptResponse | StaleEpoch:
        if request.granted_epoch != self._epoch:
            return StaleEpoch(request.granted_epoch, self._epoch)
        if session_id in self._bindings.sessions:
            offered = self._core.leases.get(request.lease_id, request.granter)
            self._bindings.check_adoption(session_id, offered)
        lease = self._offers.adopt(request.lease_id, request.granter, session_id, request.offer_id)
        return AdoptResponse(
            lease=self._admission.lease_response(lease),
            tokens=TokenIds(lease.key.data, lease.key.width),
            published_len=self._core.published_len(lease),
        )

    def _bind_model(self, session_id: str, request: BindModelRequest) -> Message:
        """Bind a model. The answer waits for the tree of its pages on the disk, so that the next request finds them."""
        response = BindModelResponse(generation=self._bindings.bind(session_id, request.lora_id, request.fingerprint))
        disk = self._disk
        if disk is None:
            return response
        disk.bindings.bind(request.lora_id)
        built = disk.bindings.built()
        if built is None:
            return response
        return self._admission.wait_for_disk(session_id, response, built, disk.config.load_timeout_s, response)

    def _evict(self, session_id: str, request: EvictRequest) -> EvictResponse:
        if request.tier not in self._caches:
            raise unknown_tier(request.tier, self._caches)
        return EvictResponse(num_evicted=self._caches[request.tier].evict(request.num_tokens))

    def _prefetch(self, session_id: str, request: PrefetchRequest) -> PrefetchResponse:
        key = key_of(request.tokens, request.namespace)
        return PrefetchResponse(num_tokens=self._tiers.prefetch(key))

    def _reset(self, session_id: str, request: ResetRequest) -> Message:
        self._bindings.end_all()
        self._core.reset()
        return self._after_commit(session_id, Ack())

    def _retire(self, session_id: str, request: RetireRequest) -> Message:
        wanted = (request.extra_key, request.lora_id, request.cache_salt)
        if wanted == (None, None, None):
            raise InvalidRequest("name at least one of extra_key, lora_id and cache_salt; reset() retires everything")
        if request.lora_id is not None and request.extra_key is request.cache_salt is None:
            self._bindings.end_generation(request.lora_id)
        response = RetireResponse(num_namespaces=self._core.retire(namespaces_of(*wanted)))
        return self._after_commit(session_id, response)

    def _set_weights(self, session_id: str, request: SetWeightsRequest) -> Message:
        if self._bindings.set_weights(request.label):
            self._core.reset()
        return self._after_commit(session_id, self._weights())

    def _after_commit(self, session_id: str, response: Message) -> Message:
        """Return a response, or a ticket for it if the disk has not committed all retirements yet."""
        disk = self._disk
        deletion = None if disk is None else disk.deletions.future()
        if disk is None or deletion is None:
            return response
        return self._admission.wait_for_commit(session_id, response, deletion, disk.state)

    def _weights(self) -> WeightsResponse:
        label, generation = self._bindings.weights
        return WeightsResponse(label=label, generation=generation)

    def _explain(self, session_id: str, request: ExplainRequest) -> ExplainResponse:
        key = key_of(request.tokens, request.namespace)
        found = self._core.explain(key)
        other, page, disk_left_s = found.elsewhere, self._core.page_size, None
        below = self._tiers.lengths_below(key, found.prefix_len)
        if isinstance(self._core, KVCache) and below:
            found.was_dropped &= max(below.values()) < len(self._core.tree_key(key)) // page * page
        if self._disk is not None:
            disk_left_s = self._disk.left_s(key, below["disk"])
        fields: tuple[str | None, str | None, str | None] = (None, None, None)
        if other is not None and other.extra_key is not None:
            fields = unframe_namespace(other.extra_key)
        return ExplainResponse(
            num_tokens=found.num_tokens,
            prefix_len=found.prefix_len,
            full_prefix_len=found.full_prefix_len,
            reason=found.reason,
            cause=found.cause,
            seconds_ago=found.seconds_ago,
            remembered_s=found.remembered_s,
            other_prefix_len=0 if other is None else other.prefix_len,
            other_extra_key=fields[0],
            other_lora_id=fields[1],
            other_cache_salt=fields[2],
            host_len=below.get("host", 0),
            was_dropped=found.was_dropped,
            disk_len=below.get("disk", 0),
            disk_left_s=disk_left_s,
        )

    def _tree(self, session_id: str, request: TreeRequest) -> TreeResponse:
        limits = OutlineLimits(request.max_nodes, request.max_depth, request.max_width)
        return tree_response(self._core.outline(limits), self._unused_s)

    def _event_snapshot(self, session_id: str, request: EventSnapshotRequest) -> Message:
        if not self._feeds.is_large(request.tier):
            return self._feeds.snapshot(request.tier)
        return self._wait_queue.answer_later(session_id, "snapshot", self._feeds.sliced_snapshot(request.tier))

    def _check_invariants(self, session_id: str, request: CheckInvariantsRequest) -> Ack:
        self._tiers.check_invariants()
        return Ack()
