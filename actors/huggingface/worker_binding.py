"""`WorkerBinding`: binds a worker's session to its model, before its leases and again when the cache requires it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from raydix.actors.huggingface.fingerprint import model_fingerprint, weights_version
from raydix.actors.sessions.bound_models import BoundModels
from raydix.schemas import ConfigMismatch, InvalidRequest, ModelFingerprint
from raydix.schemas.shown import brief

if TYPE_CHECKING:
    from raydix.actors.client.lease import Lease
    from raydix.actors.client.prefix_cache_client import PrefixCacheClient
    from raydix.actors.huggingface.causal_model import CausalModel

Fingerprint: TypeAlias = ModelFingerprint | Literal["auto"] | None
Take: TypeAlias = "Callable[[], Awaitable[Lease]]"

_MOST_TRIES = 16  # attempts for one lease; a retirement may come between binding and acquire


def check_fingerprint(given: Any) -> None:
    """Check the argument `fingerprint` of a worker.

    Raises:
        InvalidRequest: it is neither "auto" nor a ModelFingerprint nor None.
    """
    if not (given is None or isinstance(given, ModelFingerprint) or (isinstance(given, str) and given == "auto")):
        raise InvalidRequest(f'fingerprint must be "auto", a ModelFingerprint or None, not {brief(given)}')


class WorkerBinding:
    """The fingerprint of a worker's model, and the `lora_id`s that it has bound.

    The cache refuses a session with an outdated binding, after `retire` and `reset`, and a session that follows a lost
    one. The worker then computes its fingerprint again and binds again.

    Args:
        model: the model of the worker.
        given: its fingerprint; "auto" computes it; None binds nothing.
    """

    def __init__(self, model: CausalModel, given: Fingerprint) -> None:
        self._model = model
        self._given = given
        self._computed: ModelFingerprint | None = None
        self._version = 0  # version of the weights of the computed fingerprint
        self._bound = BoundModels()  # counts refusals by the cache
        self._binds_base = False  # it has bound the base before
        self._busy = asyncio.Lock()

    async def prepare(self) -> ModelFingerprint | None:
        """Return the fingerprint to bind. "auto" computes it again if a weight has changed.

        torch counts changes in place, such as by `load_state_dict`, but not through `.data`.
        """
        if self._given != "auto":
            return self._given
        version = await self._model.run(weights_version, self._model.module)
        if self._computed is None or version != self._version:
            self._computed, self._version = await self._model.run(model_fingerprint, self._model.module), version
        return self._computed

    async def lease(self, client: PrefixCacheClient, lora_id: str | None, take: Take) -> Lease:
        """Bind the session to the model for a `lora_id`, and return the lease of `take`.

        Raises:
            ConfigMismatch: another model is bound; the message names the difference.
        """
        if self._given is None:
            return await take()
        for tries_left in reversed(range(_MOST_TRIES)):
            bound = self._bound
            if self._binds_base or lora_id not in bound.generations:
                async with self._busy:
                    await self._bind(client, lora_id)
                bound = self._bound
            try:
                return await take()
            except ConfigMismatch:
                if not tries_left:
                    raise
                if bound is self._bound:  # no other request has handled this refusal
                    self._start_again()
        raise AssertionError("the last try returns or raises")

    async def _bind(self, client: PrefixCacheClient, lora_id: str | None) -> None:
        """Bind the `lora_id`, and the base if it was bound before: requests for every `lora_id` require that."""
        bound = self._bound
        try:
            for adapter in (None, lora_id) if self._binds_base else (lora_id,):
                if adapter not in bound.generations:
                    fingerprint = await self.prepare()
                    assert fingerprint is not None, "a worker without a fingerprint binds nothing"
                    bound.add(adapter, await client.bind_model(fingerprint, lora_id=adapter))
        except ConfigMismatch:
            self._computed = None  # the weights may be others by the next request
            raise
        if bound is self._bound:
            self._binds_base = False

    def _start_again(self) -> None:
        """Forget all bindings; the weights may have been replaced."""
        self._binds_base = self._binds_base or None in self._bound.generations
        self._bound, self._computed = BoundModels(), None
