"""The survey: how a causal LM of transformers is served, and how far its logits are from those without a cache."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from support.models.survey_cases import LONG, Prompts, ServedModel, Tally, config_of, counted
from support.models.survey_references import Passes, make_model, run_own_cache
from support.models.tiny_llama import LLAMA
from transformers import PreTrainedConfig

from raydix.actors import LocalPrefixCache
from raydix.actors.huggingface.worker import TransformersWorker, cache_config_for
from raydix.schemas import ConfigMismatch

__all__ = ["Outcome", "survey", "survey_refused"]


@dataclass
class Outcome:
    """The result of the survey for a model.

    Attributes:
        verdict: "served", "served without a cache" or "refused".
        kind: of the cache, such as "radix + window".
        reason: why there is none.
        decodes_alike: whether decoding leaves the KV and states that a prefill leaves.
        tally: the comparisons.
    """

    verdict: str
    kind: str = ""
    reason: str = ""
    decodes_alike: bool = True
    tally: Tally = field(default_factory=Tally)


async def survey(
    config: PreTrainedConfig, page_size: int, dtype: torch.dtype = torch.float32, cuts: Collection[int] | None = None
) -> Outcome:
    """Find out how a model is served.

    Args:
        config: a tiny one.
        page_size: of the cache.
        dtype: float32, compared with passes without a cache; bfloat16, compared with the model's own cache.
        cuts: lengths of prefixes to be reused, of those at page boundaries, for a quick look. None: all.
    """
    tally = Tally()
    try:
        served = ServedModel(config, page_size, dtype, tally, cuts)
    except ConfigMismatch as error:
        return await _survey_without_cache(config, dtype, str(error))
    await served.open()
    if dtype is not torch.float32:
        await served.compare_bits()
    else:
        await served.ask_at_cuts()
        await served.decode_over_the_window()
        await served.repeat_tokens()
        await served.ask_with_pads()
        if cuts is None:
            await served.take_turns()
        await served.ask_alone()
        await served.ask_under_pressure()
    tally.check("nothing was reused", tally.num_hits > 0)
    cache = served.cache_config
    await served.close()
    kind = cache.kind + (" + window" if cache.sliding_window_size else "")
    return Outcome("served", kind, decodes_alike=served.traits.decodes_alike, tally=tally)


async def survey_refused(source: PreTrainedConfig | Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Outcome:
    """Find out why a model has no cache, and whether workers are refused before their first request.

    Args:
        source: the model, as a worker takes it.
        dtype: of the model.

    Returns:
        "refused", or "served without a cache" if a worker without one opens.
    """
    outcome = Outcome("refused")
    try:
        cache_config_for(deepcopy(source), 64, dtype=dtype, device="cpu")
    except ConfigMismatch as error:
        outcome.reason = str(error)
    outcome.tally.check("cache_config_for serves it", outcome.reason != "")
    async with LocalPrefixCache(config_of(LLAMA, 4, torch.float32)) as cache:
        before = counted(await cache.stats())
        why = await _why_closed(cache, source, dtype)
        outcome.tally.check(f"the pool's shape is the reason: {why}", why is not None and "the cache's pool" not in why)
        outcome.tally.check("a refused worker changes the cache", counted(await cache.stats()) == before)
        await cache.check_invariants()
    if await _why_closed(None, source, dtype) is None:
        outcome.verdict = "served without a cache"
    return outcome


async def _why_closed(
    cache: LocalPrefixCache | None, source: PreTrainedConfig | Mapping[str, Any], dtype: torch.dtype
) -> str | None:
    """Return why a worker is refused when it is made or opened; None: it is not."""
    try:
        async with TransformersWorker(
            cache, model=deepcopy(source), dtype=dtype, device="cpu", use_cache=cache is not None
        ):
            return None
    except ConfigMismatch as error:
        return str(error)


async def _survey_without_cache(config: PreTrainedConfig, dtype: torch.dtype, reason: str) -> Outcome:
    outcome = await survey_refused(config, dtype)
    outcome.tally.check(f"another reason: {outcome.reason}", outcome.reason == reason)
    if outcome.verdict == "refused":
        return outcome
    prompts = Prompts(config)
    asked = {"long": prompts.random(LONG), "decoding": prompts.random(5, seed=1), "repeats": prompts.repeating()}
    if prompts.may_pad:
        asked["pads"] = prompts.padded()
    async with TransformersWorker(None, model=deepcopy(config), dtype=dtype, device="cpu", use_cache=False) as worker:
        for case, prompt in asked.items():
            found = await worker.generate(prompt, 20, return_logits=True, eos_token_id=())
            expected = _expected_alone(worker, config, dtype, [*prompt, *found.token_ids[:-1]], len(prompt))
            outcome.tally.compare(case, found, expected, len(prompt))
    return outcome


def _expected_alone(
    worker: TransformersWorker, config: PreTrainedConfig, dtype: torch.dtype, tokens: list[int], num_prompt: int
) -> torch.Tensor:
    """The logits of one pass; in bfloat16, of the passes that the worker needs, as sums in another order differ."""
    traits = worker._model.traits
    if dtype is torch.float32:
        return Passes(config).logits(tokens, num_prompt)
    if traits.has_own_cache:
        ends = list(range(num_prompt, len(tokens)))
        return run_own_cache(make_model(config, dtype), tokens, ends, traits.positions)
    return Passes(config, dtype, by_step=True).logits(tokens, num_prompt)
