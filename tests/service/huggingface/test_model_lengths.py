"""Models with KV that depends on the length of the whole sequence are served with the logits of one pass."""

from __future__ import annotations

from collections.abc import AsyncIterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.models.tiny_models import COMMON, check_same, random_model, random_prompt
from support.more import more
from transformers import DogeConfig, LlamaConfig, MptConfig, Phi3Config, PreTrainedConfig

from raydix.actors import LocalPrefixCache
from raydix.actors.huggingface.sequence_lengths import LONG_KEY, LengthRange, ModelLengths
from raydix.actors.huggingface.worker import TransformersWorker, cache_config_for
from raydix.schemas import EvictionConfig, InvalidRequest

LONGEST = 32  # tokens in the first range of each model here

SIZES = COMMON | {"num_hidden_layers": 2, "pad_token_id": None}
LONGROPE = Phi3Config(
    **(SIZES | {"max_position_embeddings": 128}),
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0, 1.2, 1.5, 2.0],
        "long_factor": [2.0, 4.0, 8.0, 16.0],
        "original_max_position_embeddings": LONGEST,
    },
    original_max_position_embeddings=LONGEST,
)
DYNAMIC = LlamaConfig(
    **(SIZES | {"max_position_embeddings": LONGEST}),
    rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
)
YARN = LlamaConfig(
    **(SIZES | {"max_position_embeddings": LONGEST}),
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": LONGEST,
    },
)
LINEAR = LlamaConfig(
    **(SIZES | {"max_position_embeddings": LONGEST}),
    rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
)
LINEAR_OF_16 = LlamaConfig(
    **(SIZES | {"max_position_embeddings": LONGEST}),
    rope_parameters={**LINEAR.rope_parameters, "original_max_position_embeddings": 16},
)
DOGE = DogeConfig(**SIZES, keep_window_size=LONGEST)


@pytest.fixture(
    scope="module",
    params=[LONGROPE, DYNAMIC, YARN, DOGE, *more(LINEAR)],
    ids=["longrope", "dynamic", "yarn", "doge", "linear"],
)
def model(request: pytest.FixtureRequest) -> Any:
    return random_model(request.param)


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.long), 4], ids=["page1", "page4"])
async def cache(model: Any, request: pytest.FixtureRequest) -> AsyncIterator[LocalPrefixCache]:
    config = cache_config_for(
        deepcopy(model.config),
        2048,
        device="cpu",
        page_size=request.param,
        eviction=EvictionConfig(high_watermark=1.0),
        validate=True,
    )
    async with LocalPrefixCache(config) as cache:
        yield cache
        stats = await cache.stats()
        assert (stats.open_leases, stats.private_slots) == (0, 0)
        await cache.check_invariants()


@pytest.fixture
async def workers(cache: LocalPrefixCache, model: Any) -> AsyncIterator[list[TransformersWorker]]:
    workers = [TransformersWorker(cache, model=deepcopy(model.config), device="cpu") for _ in range(2)]
    yield workers
    for worker in workers:
        await worker.close()


@torch.inference_mode()
def stepwise(config: PreTrainedConfig, prompt: list[int], num_new: int) -> tuple[torch.Tensor, list[int]]:
    """Generate with one pass of a new model over all tokens for each token.

    Returns the logits after the prompt's tokens, and after each generated token but the last; and the ids.
    """
    tokens, logits = list(prompt), []
    for _ in range(num_new):
        rows = random_model(config)(torch.tensor([tokens]), use_cache=False).logits[0]
        logits += [rows] if not logits else [rows[-1:]]
        tokens.append(int(rows[-1].argmax()))
    return torch.cat(logits), tokens[len(prompt) :]


SOME_LENGTHS = [20, LONGEST + 1, *more(LONGEST - 6, LONGEST)]
MORE_LENGTHS = [pytest.param(num_tokens, marks=pytest.mark.long) for num_tokens in (LONGEST - 1, 50)]


@pytest.mark.parametrize("num_tokens", SOME_LENGTHS + MORE_LENGTHS)
async def test_sequences_of_each_length_get_the_logits_of_one_pass(
    workers: list[TransformersWorker], model: Any, num_tokens: int
) -> None:
    """Some sequences grow past the first range during decoding; another worker asks again each time."""
    prompt = random_prompt(num_tokens)
    expected = stepwise(model.config, prompt, 8)
    first = await workers[0].generate(prompt, 8, return_logits=True)
    second = await workers[1].generate(prompt, 8, return_logits=True)
    alone = await workers[1].generate(prompt, 8, return_logits=True, reuse=False)

    for found in (first, second, alone):
        check_same(found, *expected)
    reusable = ModelLengths.of(model.config).range_of(num_tokens).reusable
    assert (first.prefix_len, second.prefix_len > 0, alone.prefix_len) == (0, reusable, 0)


async def test_a_conversation_crosses_the_range_and_comes_back(workers: list[TransformersWorker], model: Any) -> None:
    """A short sequence must not read KV that an earlier long one left behind."""
    long, short = random_prompt(60), random_prompt(LONGEST - 2)
    for i, prompt in enumerate((long, short, long, long[: LONGEST - 8], [*short, 7, 8, 9, 10])):
        found = await workers[i % 2].generate(prompt, 4, return_logits=True)
        check_same(found, *stepwise(model.config, prompt, 4))


async def test_kv_of_a_short_sequence_is_not_reused_for_a_long_one() -> None:
    prompt = random_prompt(40)
    async with (
        LocalPrefixCache(cache_config_for(deepcopy(LONGROPE), 256, device="cpu", page_size=4)) as cache,
        TransformersWorker(cache, model=deepcopy(LONGROPE), device="cpu") as worker,
    ):
        await worker.generate(prompt[:24], 1)
        first = await worker.generate(prompt, 1)
        second = await worker.generate(prompt, 1)

        assert (first.prefix_len, second.prefix_len) == (0, 36)
        assert (await cache.match(prompt)).prefix_len == 24
        assert (await cache.match(prompt, extra_key=LONG_KEY)).prefix_len == 40


@pytest.mark.parametrize("extra_key", [LONG_KEY, f"{LONG_KEY}=chat"])
async def test_a_callers_namespace_cannot_be_that_of_long_sequences(extra_key: str) -> None:
    async with (
        LocalPrefixCache(cache_config_for(deepcopy(LONGROPE), 64, device="cpu")) as cache,
        TransformersWorker(cache, model=deepcopy(LONGROPE), device="cpu") as worker,
    ):
        with pytest.raises(InvalidRequest, match="extra_key must not begin with 'raydix:long:'"):
            await worker.generate([1, 2, 3], 1, extra_key=extra_key)
        assert (await cache.stats()).acquires == 0


def test_namespaces_of_long_sequences_are_as_different_as_those_of_callers() -> None:
    long = ModelLengths.of(LONGROPE).range_of(LONGEST + 1)

    assert len({long.extra_key(given) for given in (None, "", "=", "chat")}) == 4


@pytest.mark.parametrize(
    ("config", "ranges", "max_positions"),
    [
        (LONGROPE, (LengthRange(LONGEST), LengthRange(None, is_first=False)), 128),
        (DYNAMIC, (LengthRange(LONGEST), LengthRange(None, is_first=False, reusable=False)), 4 * LONGEST),
        (YARN, (LengthRange(None),), 4 * LONGEST),
        (LINEAR, (LengthRange(None),), 4 * LONGEST),
        (LINEAR_OF_16, (LengthRange(None),), 4 * 16),
        (DOGE, (LengthRange(LONGEST), LengthRange(None, is_first=False, reusable=False)), 256),
        (MptConfig(max_seq_len=64), (LengthRange(None),), 64),
    ],
    ids=["longrope", "dynamic", "yarn", "linear", "linear_of_16", "doge", "mpt"],
)
def test_ranges_and_limits_come_from_the_configuration(
    config: PreTrainedConfig, ranges: tuple[LengthRange, ...], max_positions: int
) -> None:
    lengths = ModelLengths.of(config)

    assert (lengths.ranges, lengths.max_positions) == (ranges, max_positions)
    lengths.check(max_positions)
    with pytest.raises(InvalidRequest, match=f"{max_positions + 1} tokens to compute"):
        lengths.check(max_positions + 1)
