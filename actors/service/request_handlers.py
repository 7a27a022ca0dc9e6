"""What the cache does for each request: the verbs, as seen from the cache's side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydix.actors.service.model_bindings import ModelBindings
from raydix.actors.service.tree_answer import tree_answer
from raydix.actors.sessions.admission import Admission
from raydix.actors.sessions.lease_offers import LeaseOffers
from raydix.actors.sessions.refusals import Refusals
from raydix.actors.sessions.wait_queue import WaitQueue
from raydix.actors.transport.error_map import to_cache_error
from raydix.cache_core import LeasedCache, OutOfSlotsError, RadixKey
from raydix.cache_core.leases.lease_table import LeaseRecord
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
    CacheUnavailable,
    CheckInvariantsRequest,
    EvictRequest,
    EvictResponse,
    ExplainRequest,
    ExplainResponse,
    ExtendRequest,
    ExtendResponse,
    GrantRequest,
    InsertRequest,
    InsertResponse,
    InvalidRequest,
    LeaseResponse,
    LockRequest,
    MatchRequest,
    MatchResponse,
    Message,
    ReleaseRequest,
    ReleaseWindowRequest,
    ResetRequest,
    RetireRequest,
    RetireResponse,
    RevokeRequest,
    RevokeResponse,
    TakeBackRequest,
    TokenIds,
    TreeRequest,
    TreeResponse,
    WaitingResponse,
    WindowResponse,
    WithdrawRequest,
    namespaces_of,
    unframe_namespace,
)
from raydix.schemas.message import Malformed

DRAINING = "the cache is draining: it is shutting down, so leases may end but not begin or grow"
_INT32 = np.dtype("<i4")
_TAKING = (AcquireRequest, LockRequest, ExtendRequest)


class RequestHandlers:
    """One method per verb. Each runs without awaiting, so each is atomic on the cache's loop.

    Attributes:
        draining: nothing more is taken: leases are published and ended, no more.
        admission: of leases that begin or grow.
        num_acquires: `acquire` requests that were answered, granted or refused, without waiting.

    Args:
        core: the cache.
        line: where those wait who find no room.
        refusals: what those are told who find none.
        offers: leases that were granted and not adopted yet.
        bindings: of sessions to models.
        acquire_timeout_s: how long they wait unless they say otherwise.
        unused_s: returns the seconds since a tick of the cache's clock, if it has one.
    """

    def __init__(
        self,
        core: LeasedCache,
        line: WaitQueue,
        refusals: Refusals,
        offers: LeaseOffers,
        bindings: ModelBindings,
        acquire_timeout_s: float,
        unused_s: Callable[[int], float | None],
    ) -> None:
        self.core = core
        self.line = line
        self.draining = False
        self.num_acquires = 0
        self.admission = Admission(core, line, refusals, acquire_timeout_s)
        self._offers = offers
        self._bindings = bindings
        self._unused_s = unused_s
        self._verbs: dict[type[Message], Callable[[str, Any], Message]] = {
            MatchRequest: self._match,
            LockRequest: self._lock,
            AcquireRequest: self._acquire,
            InsertRequest: self._insert,
            ExtendRequest: self._extend,
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
            ResetRequest: self._reset,
            RetireRequest: self._retire,
            ExplainRequest: self._explain,
            TreeRequest: self._tree,
            CheckInvariantsRequest: self._check_invariants,
        }

    def handle(self, session_id: str, request: Message) -> Message | CacheError:
        """The response to one request of a session, or the error that it failed with."""
        verb = self._verbs.get(type(request))
        if verb is None:
            is_torn = isinstance(request, Malformed)
            text = str(request) if is_torn else f"{type(request).__name__} is not a verb of this cache"
            return self.admission.counted(InvalidRequest(text))
        if self.draining and isinstance(request, _TAKING):
            return self.admission.counted(CacheUnavailable(DRAINING))
        try:
            return verb(session_id, request)
        except OutOfSlotsError as error:
            return self.admission.refusal(None, error)
        except Exception as error:  # every failure becomes its caller's typed error
            return self.admission.counted(to_cache_error(error))

    def _match(self, session_id: str, request: MatchRequest) -> MatchResponse:
        match = self.core.match(_key(request.tokens, request.namespace))
        return MatchResponse(
            prefix_len=match.prefix_len,
            full_prefix_len=max(match.prefix_len, match.full_prefix_len),
            branching_len=match.mamba_branching_seqlen,
        )

    def _lock(self, session_id: str, request: LockRequest) -> LeaseResponse:
        if session_id in self._bindings.sessions:
            self._bindings.check(session_id, request.namespace, request.lease_id)
        key = _key(request.tokens, request.namespace)
        if self.line.waiting:
            self.line.serve()  # those in line come first, if what came before in the batch has made room
        return self._granted(self.core.lock(request.lease_id, session_id, key, request.priority))

    def _acquire(self, session_id: str, request: AcquireRequest) -> Message:
        self.num_acquires += 1
        if self.line.waiting and session_id in self._bindings.sessions:  # it may have to wait before the attempt
            self._bindings.check(session_id, request.namespace, request.lease_id)
        key = _key(request.tokens, request.namespace)
        attempt = partial(self._attempt_acquire, session_id, request, key)
        num_tokens = len(key) + request.new_tokens
        answer = self.admission.admit(session_id, request.lease_id, key, num_tokens, attempt, request.timeout_s)
        if type(answer) is WaitingResponse:
            self.num_acquires -= 1
        return answer

    def _attempt_acquire(self, session_id: str, request: AcquireRequest, key: RadixKey) -> LeaseResponse:
        if session_id in self._bindings.sessions:
            self._bindings.check(session_id, request.namespace, request.lease_id)
        lease = self.core.acquire(
            request.lease_id, session_id, key, request.new_tokens, request.max_prefix_len, request.priority
        )
        return self._granted(lease)

    def _extend(self, session_id: str, request: ExtendRequest) -> Message:
        lease = self.core.leases.get(request.lease_id, session_id)
        self.line.withdraw(session_id, request.lease_id)  # an earlier growth whose caller is gone

        def attempt() -> Message:
            lease = self.core.leases.get(request.lease_id, session_id)
            if lease.num_slots < request.num_slots:
                self.core.extend(request.lease_id, session_id, request.num_slots - lease.num_slots)
            added = _packed(lease.starts[request.known_pages :])
            return ExtendResponse(num_slots=lease.num_slots, page_starts=added, swa_page_starts=self._window(lease))

        return self.admission.admit(
            session_id, request.lease_id, lease.key, request.num_slots, attempt, request.timeout_s, grows=True
        )

    def _insert(self, session_id: str, request: InsertRequest) -> InsertResponse:
        lease = self.core.leases.get(request.lease_id, session_id)
        suffix = _key(request.suffix, lease.key.extra_key)
        before, known_len = self.core.published_len(lease), request.known_len
        done = self.core.insert(request.lease_id, session_id, request.num_tokens, suffix, request.publish_state)
        window, after = self._window(lease), self.core.published_len(lease)
        changed = done.repointed
        if known_len != before:  # an answer before was lost, or is on its way
            changed = lease.starts[known_len // self.core.page_size : after // self.core.page_size]
        if request.release:
            if self.line.waiting:
                self.line.withdraw(session_id, request.lease_id)  # it does not grow any more
            self.core.release(request.lease_id, session_id)
        repointed = _packed(changed) if len(changed) else b""
        return InsertResponse.of(
            done.prefix_len, done.num_inserted, done.num_duplicates, done.retired, repointed, window, after
        )

    def _release_window(self, session_id: str, request: ReleaseWindowRequest) -> WindowResponse:
        lease = self.core.leases.get(request.lease_id, session_id)
        self.core.release_window(request.lease_id, session_id, request.up_to)
        return WindowResponse(swa_page_starts=self._window(lease))

    def _granted(self, lease: LeaseRecord) -> LeaseResponse:
        starts, window = _packed(lease.starts), self._window(lease)
        return LeaseResponse.of(lease.lease_id, lease.prefix_len, lease.num_slots, starts, window, lease.state_slot)

    def _window(self, lease: LeaseRecord) -> bytes:
        """The lease's window pages, packed; nothing without a sliding window."""
        starts = self.core.swa_starts(lease)
        return _packed(starts) if len(starts) else b""

    def _withdraw(self, session_id: str, request: WithdrawRequest) -> Ack:
        self.line.withdraw(session_id, request.lease_id)
        return Ack()

    def _release(self, session_id: str, request: ReleaseRequest | AbortRequest) -> Ack:
        self.line.withdraw(session_id, request.lease_id)
        self.core.release(request.lease_id, session_id)
        return Ack()

    def _grant(self, session_id: str, request: GrantRequest) -> LeaseResponse:
        return self._granted(self._offers.offer(request.lease_id, session_id, request.offer_id, request.timeout_s))

    def _revoke(self, session_id: str, request: RevokeRequest) -> RevokeResponse:
        return RevokeResponse(ended=self._offers.revoke(request.lease_id, session_id, request.offer_id))

    def _take_back(self, session_id: str, request: TakeBackRequest) -> Ack:
        self.core.take_back(request.lease_id, session_id, request.offer_id)
        return Ack()

    def _adopt(self, session_id: str, request: AdoptRequest) -> AdoptResponse:
        if session_id in self._bindings.sessions:
            offered = self.core.leases.get(request.lease_id, request.granter)
            self._bindings.check_adoption(session_id, offered)
        lease = self._offers.adopt(request.lease_id, request.granter, session_id, request.offer_id)
        return AdoptResponse(
            lease=self._granted(lease),
            tokens=TokenIds(lease.key.data, lease.key.width),
            published_len=self.core.published_len(lease),
        )

    def _bind_model(self, session_id: str, request: BindModelRequest) -> BindModelResponse:
        return BindModelResponse(generation=self._bindings.bind(session_id, request.lora_id, request.fingerprint))

    def _evict(self, session_id: str, request: EvictRequest) -> EvictResponse:
        return EvictResponse(num_evicted=self.core.evict(request.num_tokens))

    def _reset(self, session_id: str, request: ResetRequest) -> Ack:
        self._bindings.end_all()
        self.core.reset()
        return Ack()

    def _retire(self, session_id: str, request: RetireRequest) -> RetireResponse:
        wanted = (request.extra_key, request.lora_id, request.cache_salt)
        if wanted == (None, None, None):
            raise InvalidRequest("name at least one of extra_key, lora_id and cache_salt; reset() retires everything")
        if request.lora_id is not None and request.extra_key is request.cache_salt is None:
            self._bindings.end_generation(request.lora_id)
        return RetireResponse(num_namespaces=self.core.retire(namespaces_of(*wanted)))

    def _explain(self, session_id: str, request: ExplainRequest) -> ExplainResponse:
        found = self.core.explain(_key(request.tokens, request.namespace))
        other = found.elsewhere
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
        )

    def _tree(self, session_id: str, request: TreeRequest) -> TreeResponse:
        limits = OutlineLimits(request.max_nodes, request.max_depth, request.max_width)
        return tree_answer(self.core.outline(limits), self._unused_s)

    def _check_invariants(self, session_id: str, request: CheckInvariantsRequest) -> Ack:
        self.core.check_invariants()
        return Ack()


def _key(tokens: TokenIds, namespace: str | None) -> RadixKey:
    return RadixKey.from_packed(tokens.data, tokens.width, namespace)


def _packed(starts: NDArray[np.int64]) -> bytes:
    return starts.astype(_INT32).tobytes()
