"""`TransformersWorker`: serves a transformers causal LM with its KV in a shared cache.

    acquire ──> prefill the rest ──> publish the prompt ──> decode greedily ──> publish, release
    (prefix: locked; rest: private)  (later requests hit it)

It serves models with full attention, with sliding windows (Mistral, Gemma 3), with recurrent states (Falcon-H1,
Qwen3-Next) and with index keys of sparse attention (DeepSeek V3.2). `cache_config_for` returns the configuration of a
cache that serves a model.

The worker is a plain class with async methods, for a Ray actor or for direct use.

    worker = ray.remote(TransformersWorker).options(num_cpus=1).remote(cache, model={"model_type": "llama", ...})
    generation = await worker.generate.remote(tokens, 32)

Requests run concurrently, each with a batch size of 1. Their forward passes take turns on the worker's only thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from typing import TYPE_CHECKING, Any, Self

import torch

from raydix.schemas.version import how_to_install

try:
    from transformers import Cache
except ImportError as error:
    raise ImportError(f"the transformers worker needs an extra; {how_to_install('transformers')}") from error

from raydix.actors.client.prefix_cache_client import PrefixCacheClient
from raydix.actors.client.watched_actor import WatchedActor
from raydix.actors.huggingface.causal_model import CausalModel
from raydix.actors.huggingface.fingerprint import model_fingerprint
from raydix.actors.huggingface.generation import Generation, GreedyDecoding, end_tokens
from raydix.actors.huggingface.leased_request import LeasedRequest, parts, window_room
from raydix.actors.huggingface.model_config import ModelSource, cache_config_for, pool_config_for
from raydix.actors.huggingface.pool_shape import PoolShape
from raydix.actors.huggingface.running_requests import RunningRequests
from raydix.actors.huggingface.slot_wait import SlotWait
from raydix.actors.huggingface.worker_binding import Fingerprint, WorkerBinding, check_fingerprint
from raydix.actors.transport.error_map import has_failed
from raydix.actors.transport.validation import checked_count, checked_seconds
from raydix.schemas import ConfigMismatch, InvalidRequest, PoolExhausted, StaleEpoch
from raydix.schemas.engine_namespace import CacheNamespace

if TYPE_CHECKING:
    from raydix.actors.client.attached_pool import AttachedPool
    from raydix.actors.client.lease import Lease

__all__ = ["Generation", "TransformersWorker", "cache_config_for", "model_fingerprint", "pool_config_for"]


class TransformersWorker(WatchedActor):
    """A causal LM with a session at a cache and one thread for the forward passes.

    The constructor loads the model; the first request, or `open`, connects to the cache. A model with recurrent states
    needs a mapped pool on its device.

    Args:
        cache: the handle or name of a cache actor, or a `LocalPrefixCache`. None requires `use_cache=False`.
        model: a transformers configuration or a dictionary of one (with `model_type`), for random weights; or a
            model's name or path, for trained ones.
        seed: seed of random weights. Workers that share a `lora_id` on one cache need equal weights.
        dtype: dtype of weights and KV. None: the model configuration's, else float32.
        device: "auto" is CUDA if this process has a GPU (an actor: if Ray gave it one), else the CPU.
        mapped: how to reach the pool, as for `attach_pool`. A pool on another device than the model is copied.
        use_cache: False computes every request from scratch.
        num_threads: torch's threads for the passes. None: torch's default.
        owner: name of the worker in counts and logs.
        fingerprint: fingerprint of the model, to bind for each `lora_id` that it serves (see `bind_model`). "auto"
            computes it when the worker opens, and again if the cache requires a new binding. None binds nothing: this
            worker and the others on the cache must then have the same weights.
        prefill_chunk: the most tokens of a forward pass that goes on from a cache: bounds the memory of a long prompt,
            and lets the passes of other requests in between.

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
        prefill_chunk: int = 2048,
    ) -> None:
        check_fingerprint(fingerprint)
        self._prefill_chunk = checked_count(prefill_chunk, "prefill_chunk", least=2)
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

    # ---------------------------------------------------------------- open and close

    async def open(self) -> None:
        """Check the model, open the session, attach the pool, and check that the model fits it. Idempotent.

        Otherwise the first `generate` does this, and its times include it.

        Raises:
            ConfigMismatch: the pool has other shapes than the model's KV and states; the message names both. Or the
                model computes other results when it continues from cached KV and states, as Jamba does.
            InvalidRequest: the model has recurrent states, and the pool cannot be mapped.
            CacheUnavailable: the cache cannot be reached.
        """
        with self._running.one():
            await self._model.prepare()
            if self._client is not None:
                await self._attached(self._client)

    async def close(self) -> None:
        """End the requests that run, then the session and the thread. Idempotent.

        The callers of running requests get InvalidRequest. `close` waits for a running forward pass, so that no other
        request gets the slots that it writes. The worker closes even if the caller is cancelled.

        Raises:
            InvalidRequest: the worker is used on another event loop.
        """
        closing = self._closing
        if closing is None or has_failed(closing):
            closing = self._closing = asyncio.create_task(self._close())
        await asyncio.shield(closing)

    async def _close(self) -> None:
        await self._running.end()
        if self._attaching is not None:  # no request waits for it any more
            self._attaching.cancel()
            await asyncio.gather(self._attaching, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        self._model.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
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
        timeout_s: float | None = None,
    ) -> Generation:
        """Continue a prompt greedily, and compute only the tokens that the cache lacks.

        Afterwards the cache holds the prompt and the generated tokens, in whole pages, and the worker holds no lease.
        If this raises or is cancelled, the lease is aborted after a running forward pass has ended: published pages
        stay, and all other slots are free.

        Args:
            tokens: the prompt's ids: a list, numpy array or torch tensor.
            max_new_tokens: most tokens to generate; an end token ends the request earlier. The lease reserves slots for
                all of them at the start, unless they are more than the window slots of the pool: then it takes slots
                part by part, and gives them back and starts again where requests block each other. 0: compute and
                publish the prompt alone, in whole pages, to warm a prefix.
            extra_key, lora_id, cache_salt: the namespace; requests share prefixes within one.
            reuse: False computes all tokens in the model's `DynamicCache`, or, if that gives other logits, all tokens
                in each pass. The cache does not change.
            return_logits: return the logits of every computed token (much memory for a long prompt).
            eos_token_id: end tokens. None: from the model's generation configuration; `()`: none.
            timeout_s: seconds to wait for slots, all waits together; None: `LeaseConfig.acquire_timeout_s`; 0: do not
                wait.

        Raises:
            InvalidRequest: the arguments cannot be served, or the worker was closed; the message says why.
            PoolExhausted: too few slots became free in time, or the request can never fit.
            ConfigMismatch: the model does not fit the pool, or the cache has another model bound to the `lora_id`; the
                message names the differences.
            StaleEpoch: the cache has restarted during the request.
        """
        ends = self._model.end_tokens if eos_token_id is None else end_tokens(eos_token_id)
        decoding = GreedyDecoding(tokens, max_new_tokens, ends, return_logits)
        if not max_new_tokens and (self._client is None or not reuse):
            raise InvalidRequest("max_new_tokens must be at least 1 without a cache: there is no prefix to warm")
        timeout_s = None if timeout_s is None else checked_seconds(timeout_s)
        namespaces = {
            lengths: CacheNamespace(lengths.extra_key(extra_key), lora_id, cache_salt)
            for lengths in self._model.lengths.ranges
        }
        with self._running.one():
            await self._model.prepare()
            self._model.check_tokens(decoding.prompt, decoding.max_computed)
            wait: SlotWait | None = None
            while not decoding.complete:
                lengths = self._model.lengths.range_of(decoding.num_known)
                decoding.begin(lengths.longest)
                if self._client is None or not (reuse and lengths.reusable):
                    await self._decode_alone(decoding, self._model.own_cache() if lengths.reusable else None)
                    continue
                resumed = False
                while not decoding.done:  # each preemption begins another round
                    pool = await self._attached(self._client)
                    if wait is None:
                        default_s = self._client.config.leases.acquire_timeout_s
                        wait = SlotWait(default_s if timeout_s is None else timeout_s)
                    await self._decode_leased(self._client, pool, decoding, namespaces[lengths], wait, resumed)
                    resumed = True
                    if not decoding.done:
                        decoding.begin(lengths.longest)
        return decoding.result()

    async def _decode_leased(
        self,
        client: PrefixCacheClient,
        pool: AttachedPool,
        decoding: GreedyDecoding,
        namespace: CacheNamespace,
        wait: SlotWait,
        resumed: bool,
    ) -> None:
        model, page = self._model, client.config.page_size
        room = window_room(client.config, decoding.max_computed)
        in_parts = room is not None
        chunk = self._prefill_chunk if room is None else min(self._prefill_chunk, room)
        parts_of_name = namespace._asdict()
        found = await client.match(decoding.prompt, **parts_of_name) if in_parts or model.layers.has_states else None
        # compute at least the last token, for its logits
        max_prefix_len = max(0, decoding.num_prompt - model.least_part)
        num_slots = decoding.max_computed
        if in_parts:
            assert found is not None
            num_slots = min(num_slots, min(found.prefix_len, max_prefix_len) // page * page + chunk)
        crosses = decoding.max_computed // page > decoding.num_prompt // page

        def take() -> Awaitable[Lease]:
            return client.acquire(
                decoding.prompt[:num_slots],
                **parts_of_name,
                new_tokens=max(0, num_slots - decoding.num_prompt),
                max_prefix_len=max_prefix_len,
                resumed=resumed,
                boundary_state=model.layers.has_states and model.traits.decodes_alike and crosses,
                timeout_s=left_s,
            )

        try:
            with wait.waiting() as left_s:
                taken = await self._binding.lease(client, namespace.lora_id, take)
        except PoolExhausted as error:
            if not in_parts or error.can_ever_fit or num_slots <= chunk:
                raise
            # The matched window KV was evicted meanwhile. One part of the prompt always fits.
            num_slots = chunk
            with wait.waiting() as left_s:
                taken = await self._binding.lease(client, namespace.lora_id, take)
        async with taken as lease:
            if pool.lost:  # the cache has restarted
                pool = await self._attached(client)
            if pool.epoch != lease.epoch:  # it has restarted again: the slots belong to another pool
                raise StaleEpoch(lease.epoch, pool.epoch)
            branching_len = found.branching_len if found is not None and model.layers.has_states else None
            await LeasedRequest(model, pool, lease, decoding, chunk, branching_len, wait if in_parts else None).run()

    async def _decode_alone(self, decoding: GreedyDecoding, cache: Cache | None) -> None:
        """Decode in the model's cache, or with all tokens in each pass."""
        in_parts = cache is not None and self._model.traits.cannot_share is None
        while not decoding.done:
            start, end = decoding.num_computed, decoding.num_known
            for part in parts(start, end, self._prefill_chunk, self._model.least_part) if in_parts else [end]:
                await self._model.advance(decoding, cache, None if part == end else part)

    # ---------------------------------------------------------------- parts

    async def _attached(self, client: PrefixCacheClient) -> AttachedPool:
        """Return the pool after the check that the model fits it. Concurrent first requests share the work.

        The session is open then: a pool stays attached when a session expires.
        """
        attaching = self._attaching
        if attaching is None or has_failed(attaching) or (self._pool is not None and self._pool.lost):
            self._pool = None
            attaching = self._attaching = asyncio.create_task(self._attach(client))
        self._pool = await asyncio.shield(attaching)
        await client.open()
        return self._pool

    async def _attach(self, client: PrefixCacheClient) -> AttachedPool:
        needed = await self._model.pool_shape()
        await client.open()
        layers, config = self._model.layers, client.config
        held = PoolShape(config.pool.layers, config.pool.dtype)
        if needed != held:
            raise ConfigMismatch(
                f"the model's KV is {needed}, the cache's pool holds {held}: "
                "start the cache with the pool of pool_config_for"
            )
        if layers.window is not None and layers.window > (config.sliding_window_size or 0):
            raise ConfigMismatch(
                f"the model's window is {layers.window} tokens, the cache keeps {config.sliding_window_size}: "
                "start the cache with the configuration of cache_config_for"
            )
        pool = await client.attach_pool(self._mapped)
        if not (pool.mapped and pool.k[0].device == self._model.device):
            if layers.has_states:
                raise InvalidRequest(
                    "this model's recurrent states need a mapped pool on the model's device: it updates them in place"
                )
            if not needed.is_uniform:
                raise InvalidRequest(
                    "this model's layers differ in the shape of their KV or in index keys: they need a mapped pool on "
                    "the model's device"
                )
        await self._binding.prepare()
        return pool
