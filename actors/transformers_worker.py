"""`TransformersWorker`: serves a transformers causal LM whose KV lies in a shared cache.

    acquire ──> prefill what is missing ──> publish the prompt ──> decode greedily ──> publish, release
    (prefix: locked; rest: private)         (others hit it now)

Models with full attention, with sliding windows (Mistral, Gemma 3) and with recurrent states (Falcon-H1, Qwen3-Next):
`cache_config_for` gives the cache that serves a model.

A plain class with async methods: make it a Ray actor, or use it as it is.

    worker = ray.remote(TransformersWorker).options(num_cpus=1).remote(cache, model={"model_type": "llama", ...})
    generation = await worker.generate.remote(tokens, 32)

Requests run concurrently, each with a batch size of 1: their forward passes take turns on the worker's one thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict

import torch

try:
    from transformers import Cache
except ImportError as error:
    raise ImportError("the transformers worker needs the extra: pip install raydix[transformers]") from error

from raydix.actors.client.prefix_cache_client import PrefixCacheClient
from raydix.actors.huggingface.causal_model import CausalModel
from raydix.actors.huggingface.fingerprint import model_fingerprint
from raydix.actors.huggingface.generation import Generation, GreedyDecoding, end_tokens
from raydix.actors.huggingface.leased_request import LeasedRequest
from raydix.actors.huggingface.model_config import ModelSource, cache_config_for, pool_config_for
from raydix.actors.huggingface.pool_shape import PoolShape
from raydix.actors.huggingface.running_requests import RunningRequests
from raydix.actors.huggingface.worker_binding import Fingerprint, WorkerBinding, check_fingerprint
from raydix.actors.sessions.watched_actor import WatchedActor
from raydix.actors.transport.error_map import has_failed
from raydix.schemas import ConfigMismatch, InvalidRequest, StaleEpoch

if TYPE_CHECKING:
    from raydix.actors.client.attached_pool import AttachedPool
    from raydix.actors.client.lease import Lease

__all__ = ["Generation", "TransformersWorker", "cache_config_for", "model_fingerprint", "pool_config_for"]


class Namespace(TypedDict):
    """What prefixes are shared within."""

    extra_key: str | None
    lora_id: str | None
    cache_salt: str | None


class TransformersWorker(WatchedActor):
    """A causal LM, its own session with a cache, and one thread for the forward passes.

    Making one loads the model; the first request, or `open`, reaches the cache. A model with recurrent states needs a
    pool that it can map, on its own device.

    Args:
        cache: the handle of a cache actor, the name of one, or a `LocalPrefixCache`. None needs `use_cache=False`.
        model: a transformers configuration or a dictionary of one (with `model_type`), for random weights; or a
            model's name or path, for real ones.
        seed: of random weights. Workers that share a `lora_id` on one cache need equal ones.
        dtype: of weights and KV. None: the one the model's configuration names, else float32.
        device: "auto" is CUDA if this process has a GPU (in an actor: was given one), else the CPU.
        mapped: how to reach the pool, as for `attach_pool`. A pool on another device than the model's is copied.
        use_cache: False computes every request from scratch.
        num_threads: torch's, for the passes. None: torch's own choice.
        owner: who this is, for people.
        fingerprint: of the model, which the worker binds for each `lora_id` that it serves, as `bind_model` says.
            "auto" computes it when the worker opens, and anew where the cache asks to bind again. None binds nothing:
            then this worker and others on the cache must have the same weights.

    Raises:
        ConfigMismatch: the model is not a causal LM, or transformers cannot make it.
        InvalidRequest: an argument is wrong; the message names it.
        ImportError: transformers is not installed.
    """

    def __init__(
        self,
        cache: Any,
        *,
        model: ModelSource,
        seed: int = 0,
        dtype: str | torch.dtype | None = None,
        device: str = "auto",
        mapped: bool | None = None,
        use_cache: bool = True,
        num_threads: int | None = None,
        owner: str | None = None,
        fingerprint: Fingerprint = "auto",
    ) -> None:
        check_fingerprint(fingerprint)
        if use_cache and cache is None:
            raise InvalidRequest("without a cache a worker needs use_cache=False")
        self._client = PrefixCacheClient(cache, owner=owner) if use_cache else None
        self._model = CausalModel(model, seed=seed, dtype=dtype, device=device, num_threads=num_threads)
        self._binding = WorkerBinding(self._model, fingerprint)
        self._mapped = mapped
        self._attaching: asyncio.Task[AttachedPool] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._pool: AttachedPool | None = None
        self._running = RunningRequests()

    # ---------------------------------------------------------------- life

    async def open(self) -> None:
        """Check the model, open the session, attach the pool, and check that the model fits it. Idempotent.

        The first `generate` does it, too, and then counts it in its times.

        Raises:
            ConfigMismatch: the pool has other shapes than the model's KV and states; the message names both. Or the
                model does not continue from cached KV and states as if it had just computed them, as Jamba.
            InvalidRequest: the model has recurrent states, and the pool cannot be mapped.
            CacheUnavailable: the cache cannot be reached.
        """
        with self._running.one():
            await self._model.prepare()
            if self._client is not None:
                await self._attached(self._client)

    async def close(self) -> None:
        """End the requests that run, then the session and the thread. Idempotent.

        Their callers get InvalidRequest. A forward pass that runs is waited for: until it has ended, nobody else gets
        the slots that it writes. It is closed even if the caller is cancelled.

        Raises:
            InvalidRequest: the worker is used on another event loop.
        """
        closing = self._closing
        if closing is None or has_failed(closing):
            closing = self._closing = asyncio.create_task(self._close())
        await asyncio.shield(closing)

    async def _close(self) -> None:
        await self._running.end()
        if self._attaching is not None:  # nobody waits for it any more
            self._attaching.cancel()
            await asyncio.gather(self._attaching, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        self._model.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---------------------------------------------------------------- serving

    async def generate(
        self,
        tokens: Any,
        max_new_tokens: int,
        *,
        extra_key: str | None = None,
        lora_id: str | None = None,
        cache_salt: str | None = None,
        reuse: bool = True,
        return_logits: bool = False,
        eos_token_id: int | Collection[int] | None = None,
    ) -> Generation:
        """Continue a prompt greedily, computing only what the cache does not hold.

        Afterwards the cache holds the prompt and what was generated, in whole pages, and the worker holds nothing. If
        this raises or is cancelled, the lease is aborted, after a forward pass that runs has ended: what was published
        stays, all other slots are free.

        Args:
            tokens: the prompt's ids: a list, numpy array or torch tensor.
            max_new_tokens: generate so many, or fewer if an end token comes. The lease reserves slots for all of them
                at the start.
            extra_key, lora_id, cache_salt: the namespace; prefixes are shared only within one.
            reuse: False computes everything in the model's own `DynamicCache`, or, where that gives other logits, with
                all tokens in each pass; the cache stays as it is.
            return_logits: keep the logits of every computed token (much memory for a long prompt).
            eos_token_id: end tokens. None: those of the model's own generation configuration; `()`: none.

        Raises:
            InvalidRequest: the arguments cannot be served, or the worker was closed; the message says why.
            PoolExhausted: no room came free in time, or there never can be.
            ConfigMismatch: the model does not fit the pool, or the cache has another model bound to the `lora_id`; the
                message names what differs.
            StaleEpoch: the cache has restarted meanwhile.
        """
        ends = self._model.end_tokens if eos_token_id is None else end_tokens(eos_token_id)
        decoding = GreedyDecoding(tokens, max_new_tokens, ends, return_logits)
        namespaces = {
            lengths: Namespace(extra_key=lengths.extra_key(extra_key), lora_id=lora_id, cache_salt=cache_salt)
            for lengths in self._model.lengths.ranges
        }
        with self._running.one():
            await self._model.prepare()
            self._model.check_tokens(decoding.prompt, decoding.max_computed)
            while not decoding.complete:
                lengths = self._model.lengths.range_of(decoding.num_known)
                decoding.begin(lengths.longest)
                if self._client is None or not (reuse and lengths.reusable):
                    await self._decode_alone(decoding, self._model.own_cache() if lengths.reusable else None)
                else:
                    await self._decode_leased(self._client, decoding, namespaces[lengths])
        return decoding.result()

    async def _decode_leased(self, client: PrefixCacheClient, decoding: GreedyDecoding, namespace: Namespace) -> None:
        pool = await self._attached(client)
        branching_len = None
        if self._model.layers.has_states:
            branching_len = (await client.match(decoding.prompt, **namespace)).branching_len

        def take() -> Awaitable[Lease]:
            return client.acquire(
                decoding.prompt,
                **namespace,
                new_tokens=decoding.max_computed - decoding.num_prompt,
                max_prefix_len=max(0, decoding.num_prompt - self._model.least_part),  # the last logits are needed
            )

        async with await self._binding.lease(client, namespace["lora_id"], take) as lease:
            if pool.lost:  # the cache has restarted
                pool = await self._attached(client)
            if pool.epoch != lease.epoch:  # and once more since: these slots are not this pool's
                raise StaleEpoch(lease.epoch, pool.epoch)
            await LeasedRequest(self._model, pool, lease, decoding, branching_len).run()

    async def _decode_alone(self, decoding: GreedyDecoding, cache: Cache | None) -> None:
        """Decode in a cache of the model's own, or with all tokens in each pass."""
        while not decoding.done:
            await self._model.advance(decoding, cache)

    # ---------------------------------------------------------------- parts

    async def _attached(self, client: PrefixCacheClient) -> AttachedPool:
        """The pool, once the model is known to fit it. Concurrent first requests share the work."""
        attaching = self._attaching
        if attaching is None or has_failed(attaching) or (self._pool is not None and self._pool.lost):
            self._pool = None
            attaching = self._attaching = asyncio.create_task(self._attach(client))
        self._pool = await asyncio.shield(attaching)
        return self._pool

    async def _attach(self, client: PrefixCacheClient) -> AttachedPool:
        needed = await self._model.pool_shape()
        await client.open()
        layers, config = self._model.layers, client.config
        held = PoolShape.of_pool(config.pool)
        if needed != held:
            raise ConfigMismatch(
                f"the model's KV is {needed}, the cache's pool holds {held}: "
                f"start the cache with the pool that pool_config_for gives, which has {needed.fields_unlike(held)}"
            )
        if layers.window is not None and layers.window > (config.sliding_window_size or 0):
            raise ConfigMismatch(
                f"the model's window is {layers.window} tokens, the cache keeps {config.sliding_window_size}: "
                "start the cache with the configuration that cache_config_for gives"
            )
        pool = await client.attach_pool(self._mapped)
        if not (pool.mapped and pool.k[0].device == self._model.device):
            if layers.has_states:
                raise InvalidRequest(
                    "this model's recurrent states need a mapped pool, on the model's device: they are updated in place"
                )
            if not needed.is_uniform:
                raise InvalidRequest(
                    "this model's layers differ in their KV: they need a mapped pool, on the model's device"
                )
        await self._binding.prepare()
        return pool
