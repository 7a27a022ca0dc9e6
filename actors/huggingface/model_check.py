"""`ModelCheck`: compares a model that continues from a cache with one pass over the whole sequence.

Not every model gives the same logits. Some read a recurrent state for a single token only, some drop their window when
it is full, some count positions in another way. So the check runs a sequence in parts, and compares the logits:

    one pass   |──────────────────────────── all tokens ─────────────────────────────|   without a cache
    cut        |── 12 ──|──────── over the window ────────|──── the rest ────|···|····|   prompts that share a prefix
    decoding   |── 12 ──|────|·|·|·|·|·|·|·|·|·|·|·|·|·|·|·|·|·|·|·|·|·|── the rest ──|   then another turn

Each part has a new `PooledCache` over the same slots, like each request of a worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import Cache, DynamicCache, PreTrainedConfig

from raydix.actors.huggingface.errors import refusing
from raydix.actors.huggingface.forward_pass import ForwardPass, Positions
from raydix.actors.huggingface.layer_mapping import ModelLayers, StateTensor
from raydix.actors.huggingface.measure import measure_run
from raydix.actors.huggingface.pool_shape import PoolShape
from raydix.actors.huggingface.pooled_cache import PooledCache
from raydix.actors.huggingface.sequence_lengths import ModelLengths
from raydix.actors.memory.pool_shapes import layers_of
from raydix.cache_core import KVPool
from raydix.schemas import CacheConfig, ConfigMismatch, PoolConfig

_FIRST, _REST = 12, 9  # tokens of the first part and of the last
_FEWEST = 12  # tokens that can be cut
_BEFORE, _AFTER = 20, 40  # tokens decoded one by one, before and after a window is full
_SPAN, _LONGEST_SPAN = 64, 512  # tokens that stand for a missing window, and limit of windows that are filled

# Differences in standard deviations of the logits. In float64 the twins of all causal LMs of transformers 5.23 form two
# groups: right ones are at most 2.9e-13 off, and the smallest difference of a wrong one is 3.7e-3 (Nemotron-H, whose
# decoding clamps other steps than its prefill).
TWIN_BOUND = 1e-8
# The least and the largest bound of a model that is checked itself, by its dtype. GPUs may round float32 to 10 bits in
# products.
_BOUNDS = {
    torch.float64: (1e-8, 1e-6),
    torch.float32: (1e-3, 1e-2),
    torch.float16: (0.05, 0.05),
    torch.bfloat16: (0.3, 0.3),
}
_FACTOR = 10  # the bound, over the rounding of two sequences


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """The way to run a model so that its logits equal one pass without a cache.

    Attributes:
        positions: the position ids for the model with a cache.
        cannot_share: the reason why its KV and states cannot be reused from a pool; None: they can.
        has_own_cache: whether a request without a pool can use the model's own cache; else each step runs all tokens.
        decodes_alike: whether decoding computes the same KV and states as a prefill.
    """

    positions: Positions = Positions.OWN
    cannot_share: str | None = None
    has_own_cache: bool = False
    decodes_alike: bool = True

    def check_can_share(self) -> None:
        """Check that KV and states can be reused from a pool.

        Raises:
            ConfigMismatch: they cannot.
        """
        if self.cannot_share is not None:
            raise ConfigMismatch(f"{self.cannot_share} (serve it with use_cache=False)")


class ModelFails(Exception):
    """One pass without a cache raises an error."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence and its logits in one pass without a cache, `[n, vocabulary]`."""

    tokens: NDArray[np.int64]
    logits: torch.Tensor

    def off(self, logits: torch.Tensor) -> float:
        """Return the largest difference of other logits, in standard deviations; NaN counts as infinite."""
        spread = self.logits.double().std().clamp_min(torch.finfo(torch.float64).tiny)
        off = float((logits.double() - self.logits[: len(logits)].double()).abs().max() / spread)
        return math.inf if math.isnan(off) else off


class ModelCheck:
    """Run a model in several ways over random sequences.

    Args:
        forward: the forward pass of the model; the check sets its `positions`.
        config: its configuration.
        bound: the largest difference that counts as rounding, in standard deviations of the logits. None: it is derived
            from the model, for a model that is checked itself. That stays a judgement: ten times the difference that
            the model's own cache makes in two sequences, cut at the same places, but 0.001 to 0.01 in float32, 0.05 in
            float16 and 0.3 in bfloat16.
    """

    def __init__(self, forward: ForwardPass, config: PreTrainedConfig, bound: float | None = None) -> None:
        text = config.get_text_config(decoder=True)
        self._forward = forward
        self._config = config
        self._model = f"this {config.model_type} model, in transformers {transformers.__version__},"
        self._vocab_size: int = text.vocab_size
        self._pad = forward.pad_token_id
        self._lengths = ModelLengths.of(config)
        self._layers: ModelLayers | None = None
        self._states: tuple[StateTensor, ...] = ()
        self._pool: KVPool | None = None
        self._span = _SPAN
        self._bound = bound

    def traits(self) -> ModelTraits:
        """Return the way to run the model.

        Raises:
            ModelFails: transformers cannot run it.
            ConfigMismatch: later tokens change the logits of a token.
        """
        try:
            self._make_pool()
            cannot_share = None
        except ConfigMismatch as error:
            cannot_share = str(error)
        num_tokens = self._num_tokens()
        if num_tokens < _FEWEST:
            return ModelTraits(cannot_share=f"{self._model} takes {num_tokens} tokens: there is nothing to reuse")
        if self._bound is None:
            self._bound = self._derived_bound(num_tokens)
        plain = self._sequence(num_tokens)
        traits = self._find_positions(plain, cannot_share)
        if traits.cannot_share is None:
            traits = self._check_decoding(plain, traits)
        if traits.cannot_share is None:
            traits = self._check_long(traits)
        return replace(traits, has_own_cache=not traits.decodes_alike or self._decodes_alone(plain))

    # ---------------------------------------------------------------- sequences

    def _num_tokens(self) -> int:
        """Return a length that fills a window twice, limited by the model's positions."""
        num_tokens, limit = self._lengths.first(2 * self._span + _AFTER), self._lengths.max_positions
        if limit is None or self._pad is None:
            return num_tokens
        return min(num_tokens, max(limit - self._pad - 1, min(limit, _FEWEST)))  # positions may begin after the pad id

    def _sequence(self, num_tokens: int, *, longer_than: int = 0, pads: bool = False) -> _Sequence:
        """Return a random sequence with repeated tokens, and its logits in one pass.

        Raises:
            ModelFails: the pass raises an error.
            ConfigMismatch: later tokens than `longer_than` change the logits of a token.
        """
        generator = np.random.default_rng(num_tokens)
        tokens = generator.integers(0, self._vocab_size, num_tokens)
        tokens[tokens == self._pad] = (0 if self._pad is None else self._pad + 1) % self._vocab_size
        tokens[5:8] = tokens[4:5]
        if pads and self._pad is not None:
            tokens[[3, num_tokens // 2, num_tokens // 2 + 1]] = self._pad
        with refusing(f"{self._model} cannot be run", ModelFails):
            whole = self._forward.logits(tokens, 0, None, num_tokens)
            for end in {longer_than + (num_tokens - longer_than) // 2, num_tokens - 3}:
                off = _Sequence(tokens, whole).off(self._forward.logits(tokens[:end], 0, None, end))
                if not self._is_rounding(off):
                    raise ConfigMismatch(f"{self._model} is not causal: later tokens change the logits of a token")
        return _Sequence(tokens, whole)

    def _cuts(self, num_tokens: int, start: int = 0) -> list[int]:
        """Return the ends of the parts of a prompt, the first of them longer than `start`; 0 comes first.

        No part is a single token, which would be run as in decoding.
        """
        middle = (start + num_tokens) // 2
        ends = [start]
        for end in sorted({min(start + _FIRST, middle), start + self._span + _BEFORE, num_tokens - _REST}):
            if ends[-1] + 2 <= end <= num_tokens - 2:
                ends.append(end)
        return [0, *ends[1:], num_tokens]

    def _decoding_cuts(self, num_tokens: int) -> list[int]:
        """Return the ends of the parts for decoding past a window, one token at a time."""
        first = min(_FIRST, num_tokens // 2)
        steps = range(max(first, self._span - _BEFORE), min(num_tokens - 2, self._span + _AFTER))
        return [0, first, *(step for step in steps if step > first), num_tokens]

    # ---------------------------------------------------------------- comparisons

    def _find_positions(self, plain: _Sequence, cannot_share: str | None) -> ModelTraits:
        """Find the position ids with which the model continues from its cache; None: no ids work."""
        ways = [Positions.COUNTED, Positions.OWN] if self._forward.takes_positions else [Positions.OWN]
        padded = None
        if self._pad is not None:
            padded = self._sequence(len(plain.tokens), pads=True)
            ways += [Positions.BEYOND_PADS] if self._forward.takes_positions else []
        sequences = [plain] if padded is None else [plain, padded]
        reasons = []
        for way in ways:
            self._forward.positions = way
            if cannot_share is None:
                reason = next((why for sequence in sequences if (why := self._why_not_cut(sequence)) is not None), None)
            elif self._decodes_alone(plain) and (padded is None or self._decodes_alone(padded)):
                reason = None
            else:
                reason = cannot_share
            if reason is None:
                return ModelTraits(way, cannot_share)
            reasons.append(reason)
        if cannot_share is None:
            return self._find_positions(plain, f"{self._model} cannot continue from cached KV or states: {reasons[0]}")
        self._forward.positions = Positions.OWN
        return ModelTraits(Positions.OWN, cannot_share)

    def _why_not_cut(self, sequence: _Sequence, start: int = 0) -> str | None:
        """Return the reason if a prompt in parts has other logits than in one pass; None: the same."""
        try:
            with refusing("a part of a prompt cannot be run"):
                logits = self._run_parts(sequence.tokens, self._cuts(len(sequence.tokens), start))
        except ConfigMismatch as error:
            return str(error)
        return self._why_off(sequence, logits)

    def _why_off(self, sequence: _Sequence, logits: torch.Tensor) -> str | None:
        off = sequence.off(logits)
        if self._is_rounding(off):
            return None
        return f"logits after a prompt in parts are {off:.2g} standard deviations off from those after it in one"

    def _check_decoding(self, plain: _Sequence, traits: ModelTraits) -> ModelTraits:
        """Compare decoding, and a prompt after it, with one pass."""
        cuts = self._decoding_cuts(len(plain.tokens))
        try:
            with refusing("a token cannot be run"):
                logits = self._run_parts(plain.tokens, cuts)
                why = self._why_off(plain, logits)
                if why is None:
                    return traits
                assert self._layers is not None, "there are no layers to share"
                own = self._run_own(plain.tokens, cuts)
                if self._layers.has_states and self._is_rounding(_Sequence(plain.tokens, own).off(logits)):
                    return replace(traits, decodes_alike=False)
        except ConfigMismatch as error:
            why = str(error)
        return replace(traits, cannot_share=f"{self._model} does not decode from cached KV or states: {why}")

    def _check_long(self, traits: ModelTraits) -> ModelTraits:
        """Compare sequences of the second range of lengths, if the model has one."""
        longest = self._lengths.ranges[0].longest
        if longest is None or not self._lengths.ranges[-1].reusable:
            return traits
        num_tokens = longest + self._span + _BEFORE + 2 * _REST
        if self._lengths.max_positions is not None and num_tokens > self._lengths.max_positions:
            return traits
        self._make_pool(num_tokens)
        why = self._why_not_cut(self._sequence(num_tokens, longer_than=longest), longest)
        if why is None:
            return traits
        return replace(traits, cannot_share=f"{self._model} cannot continue a sequence beyond {longest} tokens: {why}")

    def _decodes_alone(self, plain: _Sequence) -> bool:
        """Return whether decoding a lone request in the model's own cache gives the logits of one pass."""
        num_tokens = len(plain.tokens)
        try:
            with refusing("a token cannot be run"):
                first = min(max(1, self._span - _BEFORE), num_tokens // 2)
                logits = self._run_own(plain.tokens, [0, *range(first, num_tokens + 1)])
        except ConfigMismatch:
            return False
        return self._why_off(plain, logits) is None

    def _is_rounding(self, off: float) -> bool:
        assert self._bound is not None, "`traits` sets the bound first"
        return off <= self._bound

    def _derived_bound(self, num_tokens: int) -> float:
        """Return the bound for this model; see the class.

        Raises:
            ModelFails: a pass without a cache raises an error.
        """
        rounding = 0.0
        for seed in range(2):
            tokens = np.random.default_rng(seed).integers(0, self._vocab_size, num_tokens)
            with refusing(f"{self._model} cannot be run", ModelFails):
                whole = _Sequence(tokens, self._forward.logits(tokens, 0, None, num_tokens))
            with suppress(ConfigMismatch), refusing("it does not run in its own cache"):
                rounding = max(rounding, whole.off(self._run_own(tokens, self._cuts(num_tokens))))
        least, most = _BOUNDS[whole.logits.dtype]
        return min(max(least, _FACTOR * rounding), most)

    # ---------------------------------------------------------------- ways to run

    def _make_pool(self, num_tokens: int | None = None) -> None:
        """Make a pool for one sequence.

        Raises:
            ConfigMismatch: the model keeps something that a pool has no place for.
        """
        layers = self._layers = ModelLayers.of(self._config)
        self._span = min(layers.window or _SPAN, _LONGEST_SPAN)
        with refusing(f"{self._model} does not run with a cache"):
            shape, self._states = measure_run(self._run_two, self._config, layers)
        config = _cache_config(shape, layers, num_tokens or self._num_tokens())
        self._pool = KVPool(layers_of(config), self._forward.device)

    def _run_two(self, cache: Cache) -> None:
        self._forward.logits(np.ones(2, np.int64), 0, cache, 1)

    def _run_parts(self, tokens: NDArray[np.int64], ends: Sequence[int]) -> torch.Tensor:
        """Return the logits of a sequence run in parts, which end there, through the pool."""
        assert self._pool is not None and self._layers is not None, "there is no pool"
        slots = torch.from_numpy(np.random.default_rng(1).permutation(len(tokens)) + 1)
        logits = []
        for start, end in pairwise(ends):
            cache = PooledCache(
                self._pool,
                slots,
                start,
                swa_slots=None if self._layers.window is None else slots.flip(0),
                state_slot=1 if self._layers.has_states else None,
                layers=self._layers,
                states=self._states,
            )
            logits.append(self._forward.logits(tokens[:end], start, cache, end - start))
        return torch.cat(logits)

    def _run_own(self, tokens: NDArray[np.int64], ends: Sequence[int]) -> torch.Tensor:
        """Return the logits of a sequence run in parts in the model's own cache."""
        cache: Cache = DynamicCache(config=self._config)
        parts = pairwise(ends)
        return torch.cat([self._forward.logits(tokens[:end], start, cache, end - start) for start, end in parts])


def _cache_config(shape: PoolShape, layers: ModelLayers, num_tokens: int) -> CacheConfig:
    return CacheConfig(
        kind="mamba" if layers.has_states else "radix",
        sliding_window_size=layers.window,
        page_size=1,
        pool=PoolConfig(num_slots=num_tokens, num_state_slots=1 if layers.has_states else 0, **shape._asdict()),
    )
