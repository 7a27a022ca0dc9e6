"""`SchedulerSide`: the half of a connector in an engine's scheduler: look-ups, promises, plans of steps, weights."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from raydix.actors.client.lease import Lease
from raydix.actors.client.loop_thread import LoopThread
from raydix.actors.client.prefix_cache_client import PrefixCacheClient
from raydix.actors.client.rank_leases import lease_ranks, revoke_grants
from raydix.actors.engines.block_copies import make_stamps
from raydix.actors.engines.cache_link import CacheLink
from raydix.actors.engines.prefill_rate import PrefillRate
from raydix.actors.engines.settings import EngineSettings
from raydix.actors.engines.step_messages import LoadPlan, SavePlan, StepPlan, StepReport
from raydix.actors.engines.transfer_counts import TransferCounts
from raydix.actors.engines.weights_state import WeightsState
from raydix.schemas import CacheConfig, CacheError, LeaseGrant
from raydix.schemas.engine_namespace import CacheNamespace

logger = logging.getLogger(__name__)

_GRANT_S = 600.0  # life of a waiting request's grant; an expired grant is a miss
_WORTH = 0.1  # share of the time that a hit can save, for which its answer is waited for
_IDLE_WAIT_S = 0.001  # wait for the answer of a look-up, once a step, while the engine computes nothing
_LOAD_SHARE = 0.8  # share of `load_timeout_ms` for a load from a tier; the rest is for its last chunk and the answer


class ScheduledRequest(NamedTuple):
    """A request in a step of the engine.

    Attributes:
        num_computed: tokens with known ids and with KV in its blocks once the step has ended.
        block_ids: returns its blocks; called only if the step completes one.
    """

    request_id: str
    num_computed: int
    block_ids: Callable[[], Sequence[int]]


class _LookUp:
    """A look-up on its way, or its answer: the hit and a grant of each rank. It belongs to two threads.

    Attributes:
        is_loading: the cache of a rank has answered that it loads pages from a tier below its pool first.
    """

    def __init__(self) -> None:
        self.hit = 0
        self.is_loading = False
        self.grants: list[LeaseGrant] | None = None  # None: no answer yet, or a miss without a lease
        self.done = threading.Event()
        self._lock = threading.Lock()
        self._abandoned = False

    def settle(self, hit: int, grants: list[LeaseGrant] | None) -> bool:
        """Store the answer; return False if the engine waits for it no more."""
        with self._lock:
            if self._abandoned:
                return False
            self.hit, self.grants = hit, grants
            self.done.set()
            return True

    def abandon(self) -> list[LeaseGrant]:
        """Wait for the answer no more; return the grants to revoke."""
        with self._lock:
            self._abandoned = True
            grants, self.grants = self.grants or [], None
            return grants


class _State(Enum):
    """The state of a request.

    new, skipped ── _begin_look_up ──> asked, late ── _take_answer ──> leased ── _hand_over ──> in workers <──> loading
         ^                                  │                            │                           │             │
         │                               _give_up                     _give_up                     _lose         _lose
         │                                  v                            v                           v             v
         └───────────── reset ──────────────┴──────── given up ──────────┘                           └─── lost ────┘
    """

    NEW = auto()
    SKIPPED = auto()  # Its weights kept it from the cache, which is counted once; it may still be looked up.
    ASKED = auto()
    LATE = auto()  # Its look-up loads, and it waits for that no more; it may still save.
    LEASED = auto()
    IN_WORKERS = auto()  # The workers have its grants.
    LOADING = auto()  # The workers have its grants, and load into its blocks.
    LOST = auto()  # The workers have its grants, but it neither loads nor saves from now on.
    GIVEN_UP = auto()  # It has no lease, and runs without the cache.


_UNASKED = _State.NEW, _State.SKIPPED
_UNANSWERED = _State.ASKED, _State.LATE
_HANDED_OVER = _State.IN_WORKERS, _State.LOADING, _State.LOST


@dataclass(eq=False, slots=True)
class _Request:
    """A request of the engine, from its arrival to its end."""

    number: int  # No other request has this number, though ids may come again.
    request_id: str
    read_tokens: Callable[[int, int | None], Sequence[int]]
    namespace: CacheNamespace
    state: _State = _State.NEW
    look_up: _LookUp | None = None  # the latest one, unless it was given up
    asked_at: float | None = None  # time at which the engine first asked for the hit and there was no answer
    num_local: int = 0  # tokens that the engine's own cache had when it asked last
    available: int = 0  # tokens that its leases hold in the tree, in whole blocks
    planned: int = 0  # tokens that are saved, or will be by the steps planned so far
    sent: int = 0  # tokens with ids that the cache knows by the look-up, or the workers
    saved: dict[int, int] = field(default_factory=dict)  # rank -> saved tokens, as reported


class SchedulerSide:
    """The leases and plans of an engine's requests. All methods are called by the engine's scheduler thread.

    The engine promises itself only tokens that a lease holds. The look-up is a `lock`, which first loads what tiers
    below the pool have; its lease is granted to the workers, which adopt it, so the process that writes owns it.

    Args:
        settings: of the connector.
        links: to the cache of each rank; they run on `loop`.
        block_size: tokens of a block of the engine.
        reads: False: loaded KV would give wrong answers in this engine, so it neither loads nor saves any.
        counts: where to count.
    """

    def __init__(
        self,
        settings: EngineSettings,
        links: Sequence[CacheLink],
        loop: LoopThread,
        block_size: int,
        *,
        reads: bool,
        counts: TransferCounts,
    ) -> None:
        self.counts = counts
        self._settings = settings
        self._links = list(links)
        self._loop = loop
        self._block_size = block_size
        self._reads = reads
        self._requests: dict[str, _Request] = {}  # id -> request that has not ended
        self._by_number: dict[int, _Request] = {}  # number -> request that has not ended
        self._loading: dict[str, _Request] = {}  # id -> request with the last load under this id
        self._numbers = count(1)
        self._num_waiting = 0  # requests with a look-up, and with grants that the workers do not have
        self._plan = StepPlan()  # the next step's plan
        self._may_wait = True  # for a look-up, once: the engine computes nothing
        self._prefill_rate = PrefillRate()
        self._weights = WeightsState(links, loop, settings.weights, settings.reconnect_s, counts)

    # ---------------------------------------------------------------- requests

    def add_request(
        self, request_id: str, read_tokens: Callable[[int, int | None], Sequence[int]], namespace: CacheNamespace
    ) -> None:
        """Begin the look-up of a request that has arrived.

        Args:
            read_tokens: returns the ids of a range of the request's tokens; an end of None: all from the start on.
            namespace: from `namespace_of`.
        """
        if not self._reads:
            return
        self.finish_request(request_id)  # The engine may not have ended an earlier request with this id.
        request = _Request(next(self._numbers), request_id, read_tokens, namespace)
        self._requests[request_id] = self._by_number[request.number] = request
        if self._num_waiting < self._settings.max_waiting_leases:
            self._begin_look_up(request)

    def find_hit(self, request_id: str, num_tokens: int, num_local: int) -> int | None:
        """Return how many tokens the request can load behind its first `num_local`; None: ask again.

        Args:
            num_tokens: of the request, outputs included.
            num_local: tokens that the engine's own cache holds, whole blocks.
        """
        request = self._requests.get(request_id)
        if request is None:
            return 0
        request.num_local = num_local
        if self._must_wait(request, num_tokens - num_local):
            return None
        most = min(request.available, num_tokens - num_tokens % self._block_size)
        return max(0, most - num_local)

    def _must_wait(self, request: _Request, num_lacking: int) -> bool:
        """Return whether the answer of the look-up may still come in time. If not, give the look-up up.

        Args:
            num_lacking: tokens that the engine would compute without the cache.
        """
        if request.state in _UNASKED:
            self._begin_look_up(request)
        if request.state in _UNASKED:  # It is not connected, or weights are being changed.
            if self._weights.is_changing and self._has_time(request, num_lacking):
                return True
            if request.state is _State.NEW:
                request.state = _State.SKIPPED
                self._weights.count_request()
            return False
        look_up = request.look_up
        if look_up is None or request.state not in _UNANSWERED:
            return False
        if not look_up.done.is_set() and self._may_wait:
            self._may_wait = False
            look_up.done.wait(_IDLE_WAIT_S)
        if self._take_answer(request, look_up):
            return False
        if self._has_time(request, num_lacking):
            return True
        if not look_up.is_loading:
            self.counts.add("lookup_timeouts")
            self._give_up(request)
        elif request.state is _State.ASKED:
            self.counts.add("tier_loads_late")
            request.state = _State.LATE
        return False

    def _has_time(self, request: _Request, num_lacking: int) -> bool:
        """Return whether the request has waited less than `lookup_timeout_ms`, or than its wait is worth.

        That is a tenth of the time in which the engine would compute the lacking tokens; `load_timeout_ms` at most.
        While the look-up loads, it is `load_timeout_ms`.
        """
        now = time.monotonic()
        if request.asked_at is None:
            request.asked_at = now
        most_s = self._settings.load_timeout_ms / 1000
        if request.look_up is not None and request.look_up.is_loading:
            return now - request.asked_at < most_s
        rate = self._prefill_rate.tokens_per_s
        worth_s = 0.0 if rate is None else _WORTH * num_lacking / rate
        return now - request.asked_at < max(self._settings.lookup_timeout_ms / 1000, min(worth_s, most_s))

    def allocate(self, request_id: str, num_loaded: int, block_ids: Sequence[int]) -> None:
        """Load `num_loaded` tokens in the next step, behind the local ones of the latest `find_hit`.

        Args:
            block_ids: of the request, the blocks of the local tokens first.
        """
        request = self._requests.get(request_id)
        if request is None or not num_loaded:
            return
        assert request.state in (_State.LEASED, _State.IN_WORKERS), "only a leased hit is promised"
        num_local = request.num_local
        assert num_local % self._block_size == 0, num_local
        first, last = num_local // self._block_size, -(-(num_local + num_loaded) // self._block_size)
        stamps = None
        if self._settings.check:
            stamps = self._stamps(request, first * self._block_size, last * self._block_size)
        blocks = list(block_ids[first:last])
        self._hand_over(request)
        self._plan.loads.append(LoadPlan(request.number, request_id, num_local, blocks, stamps))
        request.state, self._loading[request_id] = _State.LOADING, request
        self.counts.add("hit_tokens", num_loaded)

    def finish_request(self, request_id: str) -> bool:
        """End a request; return whether the engine must hold its blocks until the workers report its saves.

        It is never True while a load is in flight.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        del self._by_number[request.number]
        if request.state not in _HANDED_OVER:
            self._give_up(request)
            return False
        holds = request.state is _State.IN_WORKERS and request.available < request.planned
        self._plan.ended.add(request.number)
        if holds:
            self._plan.held[request.number] = request_id
        return holds

    # ---------------------------------------------------------------- look-ups

    def _begin_look_up(self, request: _Request) -> None:
        if not self._weights.is_usable:
            return
        tokens = request.read_tokens(0, None)
        if len(tokens) < self._block_size:
            self._give_up(request)
            return
        request.state, request.look_up, request.sent = _State.ASKED, _LookUp(), len(tokens)
        self._num_waiting += 1
        self._loop.spawn(self._look_up(request.look_up, tokens, request.namespace))

    async def _look_up(self, look_up: _LookUp, tokens: Sequence[int], namespace: CacheNamespace) -> None:
        """Lock the prefix in the cache of each rank, and grant it, in one round trip; at all caches, or at none."""
        started = time.perf_counter()
        # The ids are converted here, so that the engine's thread does not wait for it.
        ids, parts = np.asarray(tokens, dtype=np.int64), namespace._asdict()

        def note_load(_: int) -> None:
            look_up.is_loading = True

        def lock(client: PrefixCacheClient) -> Coroutine[Any, Any, Lease]:
            load_s = _load_s(client.session.config, self._settings)
            return client.lock(ids, **parts, offer_s=_GRANT_S, load_timeout_s=load_s, on_wait=note_load)

        try:
            clients = self._clients()
            leases = await lease_ranks(clients, lock)
        except CacheError as error:
            logger.debug("a look-up has failed: %s", error)
            for link in self._links:
                link.on_error(error)
            look_up.settle(0, None)
            return
        self.counts.observe("tier_load_s" if look_up.is_loading else "lookup_s", time.perf_counter() - started)
        self.counts.add("lookups")
        if look_up.is_loading:
            self.counts.add("tier_loads")
        grants = [lease.offered for lease in leases if lease.offered is not None]
        assert len(grants) == len(leases), "each lock asked for an offer"
        if not look_up.settle(min(grant.prefix_len for grant in grants), grants):
            await revoke_grants(clients, grants)

    def _clients(self) -> list[PrefixCacheClient]:
        """Return the client of each rank; CacheUnavailable if one cache was not reached yet."""
        return [link.client for link in self._links]

    def _take_answer(self, request: _Request, look_up: _LookUp) -> bool:
        """Return whether the look-up has been answered. If so, the request is leased from now on, or given up."""
        if not look_up.done.is_set():
            return False
        if look_up.grants is None:
            self._give_up(request)
        else:
            request.state = _State.LEASED
            request.available = max(request.available, look_up.hit - look_up.hit % self._block_size)
            request.planned = max(request.planned, request.available)
        return True

    def _give_up(self, request: _Request) -> None:
        """End a lease that the workers do not have; a look-up on its way ends its lease itself."""
        if request.look_up is not None:
            self._num_waiting -= 1
            if grants := request.look_up.abandon():
                self._loop.spawn(revoke_grants(self._clients(), grants))
        request.state, request.look_up, request.available = _State.GIVEN_UP, None, 0

    def _hand_over(self, request: _Request) -> None:
        """Give the workers the grants, once."""
        if request.state is _State.LEASED:
            assert request.look_up is not None and request.look_up.grants is not None, "a lease has grants"
            self._plan.grants[request.number] = request.look_up.grants
            request.state = _State.IN_WORKERS
            self._num_waiting -= 1

    def _lose(self, request: _Request) -> None:
        """Load and save nothing more of a request that the workers have."""
        assert request.state in _HANDED_OVER, request.state
        request.state, request.available = _State.LOST, 0

    # ---------------------------------------------------------------- steps

    def plan_step(
        self, scheduled: Sequence[ScheduledRequest], preempted: set[str], *, is_idle: bool, num_prompt_tokens: int
    ) -> StepPlan:
        """Return what the workers have to do in this step.

        Args:
            is_idle: the step computes nothing.
            num_prompt_tokens: of all requests, that the step computes.
        """
        self._prefill_rate.begin_step(num_prompt_tokens, time.monotonic())
        self._may_wait = is_idle
        lost = [request for request_id in preempted if (request := self._requests.get(request_id)) is not None]
        self._plan.preempted = {request.number for request in lost}
        self._plan.weights = self._weights.order
        for request in lost:
            request.planned = request.available
        for scheduled_request in scheduled:
            self._plan_save(scheduled_request)
        plan, self._plan = self._plan, StepPlan()
        return plan

    def _plan_save(self, scheduled: ScheduledRequest) -> None:
        request = self._requests.get(scheduled.request_id)
        if request is None:
            return
        if request.look_up is not None and request.state in _UNANSWERED:
            self._take_answer(request, request.look_up)
        end = scheduled.num_computed - scheduled.num_computed % self._block_size
        if end <= request.planned or request.state not in (_State.LEASED, _State.IN_WORKERS):
            return
        start = request.planned
        first, tokens = request.sent, list(request.read_tokens(request.sent, max(request.sent, end)))
        blocks = list(scheduled.block_ids()[start // self._block_size : end // self._block_size])
        stamps = self._stamps(request, start, end) if self._settings.check else None
        self._hand_over(request)
        self._plan.saves.append(SavePlan(request.number, start, blocks, first, tokens, stamps))
        request.planned, request.sent = end, first + len(tokens)

    def _stamps(self, request: _Request, start: int, end: int) -> list[bytes]:
        tokens = np.asarray(request.read_tokens(0, end), dtype=np.int64)
        return make_stamps(tokens, repr(request.namespace), self._links[0].client.config.page_size, start, end)

    def read_report(self, report: StepReport) -> None:
        """Note the workers' saves and the failed loads. The engine calls it when a step has ended."""
        self._prefill_rate.end_step(time.monotonic())
        self._weights.read_report(report.bound)
        for rank, of_rank in report.saved.items():
            for number, saved in of_rank.items():
                request = self._by_number.get(number)
                if request is None or request.state is _State.LOST:
                    continue
                request.saved[rank] = saved
                if len(request.saved) == len(self._links):
                    request.available = max(request.available, min(request.saved.values()))
        for number in report.refused:
            if (request := self._by_number.get(number)) is not None:
                request.planned = max(request.available, min(request.saved.values(), default=0))
        for number in report.failed:
            if (request := self._by_number.get(number)) is not None:
                self._lose(request)

    def finish_loads(self, request_ids: set[str]) -> None:
        """Note the loads that the workers of all ranks have reported, finished or failed."""
        for request_id in request_ids:
            request = self._loading.pop(request_id, None)
            if request is not None and request.state is _State.LOADING:
                request.state = _State.IN_WORKERS

    # ---------------------------------------------------------------- weights and the end

    def reset(self) -> None:
        """Note that the engine's weights may have changed: all leases end, and nothing is promised until it is settled.

        See `WeightsState`.
        """
        for request in self._requests.values():
            if request.state in _HANDED_OVER:
                self._plan.ended.add(request.number)
                self._lose(request)
            elif request.state is not _State.SKIPPED:
                self._give_up(request)
                request.state = _State.NEW  # It may look up again with the next weights.
            request.asked_at, request.planned = None, 0
        self._weights.reset()

    def close(self) -> None:
        """Close the clients, which ends the leases that no worker has."""
        self._weights.close()


def _load_s(config: CacheConfig, settings: EngineSettings) -> float | None:
    """Return the time limit of a look-up's load, so that its answer comes within `load_timeout_ms`.

    It is the limit of a tier at most, so that a tier with 0 loads nothing. None: there is no tier.
    """
    limits = [tier.load_timeout_s for tier in (config.host, config.disk) if tier is not None]
    return min(max(limits), _LOAD_SHARE * settings.load_timeout_ms / 1000) if limits else None
