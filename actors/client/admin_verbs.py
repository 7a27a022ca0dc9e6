"""`UpkeepVerbs`: looking at a cache, and clearing it."""

from __future__ import annotations

import asyncio
from typing import Any

from raydix.actors.client.event_verbs import EventVerbs
from raydix.actors.sessions.bound_models import LAPSED
from raydix.actors.transport.error_map import may_have_taken_effect
from raydix.actors.transport.validation import checked_namespace, checked_response, make_request
from raydix.schemas import (
    BindModelRequest,
    BindModelResponse,
    CacheError,
    CacheStats,
    CheckInvariantsRequest,
    EvictRequest,
    EvictResponse,
    ExplainRequest,
    ExplainResponse,
    InvalidRequest,
    MatchRequest,
    MatchResponse,
    ModelFingerprint,
    ResetRequest,
    RetireRequest,
    RetireResponse,
    StatsRequest,
    TreeRequest,
    TreeResponse,
)


class UpkeepVerbs(EventVerbs):
    """The verbs that take no lease."""

    async def match(
        self,
        tokens: Any,
        *,
        extra_key: str | None = None,
        lora_id: str | None = None,
        cache_salt: str | None = None,
    ) -> MatchResponse:
        """How much of `tokens` is cached. A probe: nothing is held, and no recency changes."""
        namespace = checked_namespace(extra_key, lora_id, cache_salt)
        response = await self._call(make_request(MatchRequest, tokens=tokens, namespace=namespace))
        return checked_response(MatchResponse, response)

    async def bind_model(self, fingerprint: ModelFingerprint, *, lora_id: str | None = None) -> int:
        """Bind this session to the model that computes the KV of a `lora_id`; None: of the base model.

        The first session sets the fingerprint of a generation, which outlives that session; sessions with an equal one
        join. `retire(lora_id=...)` begins the next generation, without a fingerprint, and `reset()` that of every
        `lora_id` and of the base. A session that is bound to one before is refused `acquire`, `lock` and `adopt` in
        that `lora_id` (of the base: everywhere) with ConfigMismatch, until it has bound again. So is one of a client
        whose session was lost: it is bound to nothing yet. Sessions that bind nothing are not checked.

        Where weights are replaced under one `lora_id`: stop requests, push to every worker, retire, bind again.

        Args:
            fingerprint: of the weights as they are now.
            lora_id: the adapter, as in `acquire`.

        Returns:
            The generation's number, which the cache gives to no other.

        Raises:
            ConfigMismatch: another model is bound; the message names the fields that differ, or "weights". Or the
                cache is configured for another base (`CacheConfig.fingerprint`).
            InvalidRequest: `fingerprint` is none, or `lora_id` no string.
        """
        if not isinstance(fingerprint, ModelFingerprint):
            raise InvalidRequest(f"fingerprint must be a ModelFingerprint, not {type(fingerprint).__name__}")
        checked_namespace(None, lora_id, None)
        request = make_request(BindModelRequest, fingerprint=fingerprint, lora_id=lora_id)
        try:
            generation = checked_response(BindModelResponse, await self._call(request)).generation
        except (asyncio.CancelledError, CacheError) as error:
            if may_have_taken_effect(error):
                self._bound.note(lora_id, LAPSED)
            raise
        self._bound.note(lora_id, generation)
        return generation

    async def evict(self, num_tokens: int) -> EvictResponse:
        """Free at least `num_tokens` slots of what is cached, or all that nobody holds."""
        return checked_response(EvictResponse, await self._call(make_request(EvictRequest, num_tokens=num_tokens)))

    async def reset(self) -> None:
        """Make everything unmatchable and free it; running leases keep their slots, but publish no more."""
        await self._call(ResetRequest())

    async def retire(
        self, *, extra_key: str | None = None, lora_id: str | None = None, cache_salt: str | None = None
    ) -> RetireResponse:
        """Make every namespace that matches all fields given unmatchable at once, and reclaim what it holds.

        For an adapter that was deleted, or weights that were replaced. Running leases keep their slots to the end, but
        their `insert` publishes nothing (`retired=True`); new ones of the same namespace begin anew. What nobody holds
        is freed in the background.

        Raises:
            InvalidRequest: no field is given: `reset()` retires everything.
        """
        checked_namespace(extra_key, lora_id, cache_salt)
        request = make_request(RetireRequest, extra_key=extra_key, lora_id=lora_id, cache_salt=cache_salt)
        return checked_response(RetireResponse, await self._call(request))

    async def explain(
        self,
        tokens: Any,
        *,
        extra_key: str | None = None,
        lora_id: str | None = None,
        cache_salt: str | None = None,
    ) -> ExplainResponse:
        """Where a match of `tokens` ends, and why it goes no further: a probe. Printed, it is a sentence.

        Never stored, evicted (when, and for what), retired, in another namespace, a window or a state that is missing,
        or less than a page. The cache remembers its latest 16,384 evictions for it.
        """
        namespace = checked_namespace(extra_key, lora_id, cache_salt)
        response = await self._call(make_request(ExplainRequest, tokens=tokens, namespace=namespace))
        return checked_response(ExplainResponse, response)

    async def tree(self, *, max_nodes: int = 200, max_depth: int = 64, max_width: int = 64) -> TreeResponse:
        """The largest branches of what is cached, with sizes, locks, hits and ages: a probe.

        The cache looks at 4,096 nodes at most, a few milliseconds, and says of which branches it saw all.

        Args:
            max_nodes: branches told.
            max_depth: levels below the namespaces.
            max_width: children told of each.
        """
        request = make_request(TreeRequest, max_nodes=max_nodes, max_depth=max_depth, max_width=max_width)
        return checked_response(TreeResponse, await self._call(request))

    async def stats(self) -> CacheStats:
        """A snapshot of the cache's counts."""
        return checked_response(CacheStats, await self._call(StatsRequest()))

    async def check_invariants(self) -> None:
        """Have the cache verify every rule it keeps. O(everything); for tests and doubts.

        Raises:
            CacheError: a rule is broken; the message says which.
        """
        await self._call(CheckInvariantsRequest())
