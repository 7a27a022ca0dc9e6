"""`CausalModel`: a transformers causal LM, and the one thread that runs it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedConfig

from raydix.actors.pooled_copy import CopiedCache
from raydix.actors.transformers_config import ModelSource, PoolShape, dtype_name, load_config
from raydix.actors.transformers_continuation import Parts, check_continuation
from raydix.actors.transformers_layers import ModelLayers, StateTensor
from raydix.cache_core.memory_pool import wait_for_device
from raydix.schemas import ConfigMismatch, InvalidRequest

P = ParamSpec("P")
T = TypeVar("T")


class Step(NamedTuple):
    """The outcome of one forward pass."""

    next_token: int  # the likeliest one
    logits: torch.Tensor | None  # [tokens fed, vocabulary], on the CPU, if asked for


class CausalModel:
    """A causal LM and the thread it runs on, so that no forward pass holds an event loop.

    Passes run one at a time, in the order they were asked for; those of several requests interleave.

    Args:
        source: a configuration or a dictionary of one: random weights; a name or path: the weights found there.
        seed: of random weights. Equal seeds and configurations give equal weights.
        dtype: of weights and KV. None: the one the configuration names, else float32.
        device: "auto" is CUDA if this process has a GPU (in an actor: was given one), else the CPU.
        num_threads: of torch, for the passes. None: torch's own choice.

    Attributes:
        layers: which of a pool's layers its layers use.
        states: the tensors of a layer's recurrent state, known once `pool_shape` was awaited.
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
        self.layers = ModelLayers.of(self.config)
        self.states: tuple[StateTensor, ...] = ()
        text = self.config.get_text_config(decoder=True)
        self.vocab_size: int = text.vocab_size
        self.max_positions: int | None = getattr(text, "max_position_embeddings", None)
        self.device = _pick_device(device)
        torch_dtype = getattr(torch, dtype_name(self.config, dtype))
        self._model = _load(source, self.config, torch_dtype, seed).to(self.device).eval()
        self._thread = ThreadPoolExecutor(1, "raydix-model", _set_num_threads, (num_threads,))

    async def step(self, tokens: NDArray[np.int64], cache: Cache, *, keep_logits: bool) -> Step:
        """Run `tokens`, which follow those in `cache`; their KV is in the cache afterwards."""
        return await self.run(self._forward, tokens, cache, keep_logits)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work` on the model's thread.

        A caller that is cancelled gets its CancelledError only when `work` has ended, or will never begin: nothing
        is written to the caller's slots after that.
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
        """What a pool must hold, by what running a token really leaves behind. It warms the model up, too.

        Raises:
            ConfigMismatch: the layers differ among themselves, or the model does not go on from its cache as if it had
                never stopped.
        """
        return await self.run(self._measure)

    def own_cache(self) -> Cache:
        """The model's own cache, empty."""
        return DynamicCache(config=self.config)

    def copied_cache(self, k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> CopiedCache:
        """A cache in this process's memory, of the prefix given or empty; see `CopiedCache`."""
        with torch.inference_mode():
            return CopiedCache(self.config, self.device, k, v)

    def check_tokens(self, tokens: NDArray[Any], num_computed: int) -> None:
        """Raise InvalidRequest if the model knows no such token, or has not so many positions."""
        if (largest := int(tokens.max())) >= self.vocab_size:
            raise InvalidRequest(f"token {largest} is not in the model's vocabulary of {self.vocab_size}")
        if self.max_positions is not None and num_computed > self.max_positions:
            raise InvalidRequest(
                f"{num_computed} tokens to compute, but the model has {self.max_positions} positions: "
                "shorten the prompt or lower max_new_tokens"
            )

    def close(self) -> None:
        """Let the thread end. Passes that have not begun are cancelled."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @torch.inference_mode()
    def _forward(self, tokens: NDArray[np.int64], cache: Cache, keep_logits: bool) -> Step:
        input_ids = self._row_of(tokens)
        try:
            logits = self._logits(input_ids, cache, 0 if keep_logits else 1)
            return Step(int(logits[-1].argmax()), logits.cpu() if keep_logits else None)
        finally:  # however it ends: what a GPU was asked to write goes to slots that may be another's soon
            wait_for_device(input_ids)

    def _row_of(self, tokens: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(tokens).to(self.device).unsqueeze(0)

    def _logits(self, input_ids: torch.Tensor, cache: Cache, num_kept: int) -> torch.Tensor:
        """After each of the last tokens, or after all of them for 0."""
        output = self._model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=num_kept)
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def _run_parts(self, parts: Parts, num_kept: int) -> torch.Tensor:
        cache = self.own_cache()
        logits = [self._logits(self._row_of(part), cache, num_kept) for part in parts]
        return logits[-1][-num_kept:]

    def _measure(self) -> PoolShape:
        cache = self.own_cache()
        self._forward(np.zeros(1, np.int64), cache, keep_logits=False)
        kv, dtypes = self.layers.kv_in(cache), self.layers.dtypes_in(cache)
        if kv is None or len(dtypes) > 1:
            raise ConfigMismatch(f"the layers of this {self.config.model_type} model keep KV of {dtypes}")
        dtype = dtypes.pop()
        check_continuation(
            self._run_parts,
            self.layers,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            dtype=dtype,
            device=self.device,
            model_type=self.config.model_type,
        )
        self.states = self.layers.states_in(cache)
        state_shapes = tuple(state.pool_shape(dtype) for state in self.states)
        return PoolShape(self.layers.kinds, *kv, dtype_name(self.config, dtype), state_shapes)


def _load(source: ModelSource, config: PreTrainedConfig, dtype: torch.dtype, seed: int) -> torch.nn.Module:
    if isinstance(source, str):
        loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        return loaded
    with torch.random.fork_rng(devices=[]):  # the process's own random numbers are not disturbed
        torch.default_generator.manual_seed(seed)
        made: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    return made


def _pick_device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and _has_a_gpu() else "cpu"
    chosen = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else chosen


def _has_a_gpu() -> bool:
    """Whether the cards that are visible are this process's: an actor may see some that were not given to it."""
    in_actor = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
    return not in_actor or bool(ray.get_gpu_ids())


def _set_num_threads(num_threads: int | None) -> None:
    if num_threads is not None:
        torch.set_num_threads(num_threads)
