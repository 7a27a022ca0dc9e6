"""`CausalModel`: a transformers causal LM, and the one thread that runs it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedConfig

from raydix.actors.huggingface.copied_cache import CopiedCache
from raydix.actors.huggingface.errors import refusing
from raydix.actors.huggingface.forward_pass import ForwardPass, Positions, pad_token_id
from raydix.actors.huggingface.generation import GreedyDecoding, Step
from raydix.actors.huggingface.layer_mapping import ModelLayers, StateTensor
from raydix.actors.huggingface.measure import measure_run
from raydix.actors.huggingface.model_check import ModelTraits
from raydix.actors.huggingface.model_config import ModelSource, check_kind, load_config, named_dtype
from raydix.actors.huggingface.model_traits import traits_of
from raydix.actors.huggingface.pool_shape import PoolShape
from raydix.actors.huggingface.sequence_lengths import ModelLengths
from raydix.cache_core.pool.kv_pool import wait_for_device
from raydix.schemas import InvalidRequest
from raydix.schemas.shown import brief

P = ParamSpec("P")
T = TypeVar("T")


class CausalModel:
    """A causal LM and the thread it runs on, so that no forward pass holds an event loop.

    Passes run one at a time, in the order in which they were asked for; passes of several requests interleave.

    Args:
        source: a configuration or a dictionary of one: random weights; a name or path: the weights found there.
        seed: of random weights. Equal seeds and configurations give equal weights.
        dtype: of weights and KV. None: the one that the configuration names, else float32.
        device: "auto" is CUDA if this process has a GPU (in an actor: was given one), else the CPU.
        num_threads: of torch, for the passes. None: torch's own choice.

    Attributes:
        config: the model's.
        vocab_size: ids below this are tokens.
        lengths: the sequences that it takes; for RoBERTa and the like, known once `prepare` was awaited.
        end_tokens: the ids at which its own generation configuration stops.
        states: the tensors of a layer's recurrent state, known after `pool_shape`.

    Raises:
        ConfigMismatch: the model is not a causal LM, or transformers cannot make it.
        InvalidRequest: a dtype or device does not exist.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        seed: int = 0,
        dtype: str | torch.dtype | None = None,
        device: str = "auto",
        num_threads: int | None = None,
    ) -> None:
        self.config = load_config(source)
        check_kind(self.config)
        self.device = _pick_device(device)
        self._dtype = named_dtype(self.config, dtype)
        self.lengths = ModelLengths.of(self.config)
        model = _load(source, self.config, self._dtype, seed).to(self.device).eval()
        self.vocab_size: int = self.config.get_text_config(decoder=True).vocab_size
        self.end_tokens = _end_tokens(model)
        self._forward_pass = ForwardPass(model, pad_token_id(self.config))
        self._at_device = torch.empty(0, device=self.device)
        self._traits: ModelTraits | None = None
        self._layers: ModelLayers | None = None
        self.states: tuple[StateTensor, ...] = ()
        self._thread = ThreadPoolExecutor(1, "raydix-model", _set_num_threads, (num_threads,))

    @property
    def module(self) -> torch.nn.Module:
        """The model itself, for its own thread alone."""
        module: torch.nn.Module = self._forward_pass.model
        return module

    @property
    def traits(self) -> ModelTraits:
        """How it must be run, known once `prepare` was awaited."""
        assert self._traits is not None, "the model is not prepared"
        return self._traits

    @property
    def least_part(self) -> int:
        """Fewest tokens of a later part of a prefill: a single token would be run as in decoding."""
        return 1 if self.traits.decodes_alike else 2

    @property
    def layers(self) -> ModelLayers:
        """The mapping of its layers to a pool's layers, known after `pool_shape`."""
        assert self._layers is not None, "the model is not measured"
        return self._layers

    async def prepare(self) -> ModelTraits:
        """Determine how the model must be run. Idempotent.

        Raises:
            ConfigMismatch: its logits after a token depend on later ones, or it does not run in its dtype.
        """
        if self._traits is None:
            await self.run(self._find_traits)
        return self.traits

    async def advance(self, decoding: GreedyDecoding, cache: Cache | None, stop: int | None = None) -> None:
        """Run the known tokens of a request without KV, at most up to `stop`, and add the outcome to `decoding`.

        Args:
            decoding: the request.
            cache: has the KV of its computed tokens; the run adds the KV of the others. None runs all tokens.
            stop: end of the tokens to run; None: all known tokens.
        """
        step = await self.run(self._forward, decoding.known(stop), decoding.num_computed, cache, decoding.keep_logits)
        decoding.note(step, stop)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work` on the model's thread.

        A cancelled caller gets its CancelledError only after `work` has ended, or will never begin. So nothing writes
        to the caller's slots after that.
        """
        job = self._thread.submit(work, *args, **kwargs)
        done = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            job.cancel()
            while not done.done():
                with contextlib.suppress(asyncio.CancelledError):  # it is raised below
                    await asyncio.wait((done,))
            raise

    async def pool_shape(self) -> PoolShape:
        """Run one token to measure the shape of the pool that the model needs. This also warms the model up.

        Raises:
            ConfigMismatch: a pool cannot hold the KV or states of the model, or the model cannot continue from them.
        """
        return await self.run(self._measure)

    def own_cache(self) -> Cache | None:
        """Return the model's own cache, empty; None if each step must run all tokens."""
        return DynamicCache(config=self.config) if self.traits.has_own_cache else None

    def copied_cache(self, *prefix: torch.Tensor) -> CopiedCache:
        """Return a `CopiedCache` in this process's memory, empty or with the K, V and index keys of a prefix."""
        with torch.inference_mode():
            return CopiedCache(self.config, self.device, *prefix)

    def check_tokens(self, tokens: NDArray[Any], num_computed: int) -> None:
        """Check the tokens and the length of a request.

        Raises:
            InvalidRequest: a token is not in the vocabulary, or the model has fewer positions.
        """
        if (largest := int(tokens.max())) >= self.vocab_size:
            raise InvalidRequest(f"token {largest} is not in the model's vocabulary of {self.vocab_size}")
        self.lengths.check(num_computed)

    def close(self) -> None:
        """End the thread, and cancel passes that have not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _forward(self, tokens: NDArray[np.int64], num_cached: int, cache: Cache | None, keep_logits: bool) -> Step:
        num_kept = len(tokens) - num_cached if keep_logits else 1
        try:
            logits = self._forward_pass.logits(tokens, num_cached, cache, num_kept)
            return Step(int(logits[-1].argmax()), logits.cpu() if keep_logits else None)
        finally:  # also after an error: a GPU may still write to slots that another request gets
            wait_for_device(self._at_device)

    def _find_traits(self) -> None:
        if self._traits is None:
            traits = traits_of(self.config, self.device, self._dtype, self._forward_pass)
            assert traits is not None, "the model itself was checked"
            self._forward_pass.positions = traits.positions
            self._traits = traits
            pad, limit = self._forward_pass.pad_token_id, self.lengths.max_positions
            if traits.positions is Positions.BEYOND_PADS and pad is not None and limit is not None:
                self.lengths = replace(self.lengths, max_positions=limit - pad - 1)

    def _measure(self) -> PoolShape:
        self._find_traits()
        layers = ModelLayers.of(self.config)
        self.traits.check_can_share()
        one_token = partial(self._forward, np.zeros(1, np.int64), 0, keep_logits=False)
        shape, self.states = measure_run(one_token, self.config, layers)
        self._layers = layers
        return shape


def _load(source: ModelSource, config: PreTrainedConfig, dtype: torch.dtype, seed: int) -> Any:
    with refusing(f"transformers cannot make this {config.model_type} model"):
        if isinstance(source, str):
            return AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        with torch.random.fork_rng(devices=[]):  # keep the process's random state
            torch.default_generator.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]


def _end_tokens(model: Any) -> frozenset[int]:
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [named] if isinstance(named, int) else named or []
    return frozenset(ids)


def _pick_device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and _has_a_gpu() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidRequest(f"device must be 'auto' or a device of torch, not {brief(device)}") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest(f"device is {device!r}, but this process has no GPU")
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else chosen


def _has_a_gpu() -> bool:
    """Whether this process may use a visible GPU: Ray must have assigned one to an actor."""
    in_actor = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
    return not in_actor or bool(ray.get_gpu_ids())


def _set_num_threads(num_threads: int | None) -> None:
    if num_threads is not None:
        torch.set_num_threads(num_threads)
