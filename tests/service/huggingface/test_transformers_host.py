"""A worker whose prefix is loaded from the host tier gives the same bits as one whose prefix is in the pool."""

from __future__ import annotations

from collections.abc import AsyncIterator
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from support.models.tiny_llama import LLAMA
from support.models.tiny_models import FALCON_H1, GEMMA_3, MISTRAL, QWEN3_NEXT, random_prompt
from support.more import more
from support.tiers.demotion import ALL, demote
from transformers import PreTrainedConfig

from raydix.actors import LocalPrefixCache
from raydix.actors.huggingface.worker import Generation, TransformersWorker, cache_config_for
from raydix.schemas import CacheConfig, EvictionConfig, HostConfig

pytestmark = pytest.mark.figures

MESSAGES = [random_prompt(length, seed=length) for length in (99, 41, 18)]
NUM_NEW = 6
PAGE = 4
MODELS = {"llama": LLAMA, "mistral": MISTRAL, "gemma3": GEMMA_3, "falcon_h1": FALCON_H1, "qwen3_next": QWEN3_NEXT}
# A window alone, and another hybrid, need the same code.
IDS = ["llama", *more("mistral"), "gemma3", "falcon_h1", *more("qwen3_next")]


class Served(NamedTuple):
    """A cache with a host tier, and a worker on it."""

    cache: LocalPrefixCache
    worker: TransformersWorker

    async def converse(self, extra_key: str, num_demoted: int = 0) -> list[Generation]:
        """Return the answers of a conversation; between two turns the KV of so many tokens leaves the pool."""
        answers: list[Generation] = []
        history: list[int] = []
        for message in MESSAGES:
            if num_demoted and answers:
                await demote(self.cache, num_demoted)
                probe = await self.cache.match(history, extra_key=extra_key)
                assert probe.host_len > max(probe.prefix_len, len(history) - 2 * PAGE)
            history += message
            answers.append(await self.worker.generate(history, NUM_NEW, extra_key=extra_key, return_logits=True))
            history += answers[-1].token_ids
        return answers


def config_of(model: PreTrainedConfig, dtype: str) -> CacheConfig:
    sizes: dict[str, int] = {"num_state_slots": 64} if model in (FALCON_H1, QWEN3_NEXT) else {}
    return cache_config_for(
        deepcopy(model),
        1024,
        dtype=dtype,
        device="cpu",
        page_size=PAGE,
        host=HostConfig(num_slots=2048, reserve=0.99),  # all of the pool is written
        eviction=EvictionConfig(high_watermark=0.99, low_watermark=0.98),
        validate=True,
        **sizes,
    )


@pytest.fixture(params=["float32", *more("bfloat16")])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=IDS)
async def served(request: pytest.FixtureRequest, dtype: str) -> AsyncIterator[Served]:
    model: Any = MODELS[request.param]
    async with LocalPrefixCache(config_of(model, dtype)) as cache:
        async with TransformersWorker(cache, model=deepcopy(model), dtype=dtype, device="cpu") as worker:
            yield Served(cache, worker)
        await demote(cache)
        stats = await cache.stats()
        assert (stats.open_leases, stats.private_slots, stats.tree_slots) == (0, 0, 0)
        await cache.check_invariants()


@pytest.mark.parametrize("num_demoted", [ALL, *more(40)], ids=["all", "a part"])
async def test_logits_after_loads_are_those_after_hits_in_the_pool(served: Served, num_demoted: int) -> None:
    hits = await served.converse("stays in the pool")
    await demote(served.cache)
    loaded = await served.converse("leaves the pool", num_demoted)

    for found, expected in zip(loaded, hits, strict=True):
        assert found.token_ids == expected.token_ids
        assert found.prefix_len == expected.prefix_len
        assert found.logits is not None
        assert expected.logits is not None
        assert torch.equal(found.logits, expected.logits)
    assert [answer.loaded_len for answer in hits] == [0, 0, 0]
    assert loaded[0].loaded_len == 0
    for answer in loaded[1:]:
        assert 0 < answer.loaded_len <= answer.prefix_len
        assert num_demoted != ALL or answer.loaded_len == answer.prefix_len
    stats = await served.cache.stats()
    assert stats.host is not None
    assert stats.host.tokens_loaded == sum(answer.loaded_len for answer in loaded)


async def test_pages_that_are_computed_again_differ_in_both_tiers_and_break_no_rule(served: Served) -> None:
    prompt = MESSAGES[0]
    await served.worker.generate(prompt, NUM_NEW)  # Its last page has a part of the prompt and a part of the answer.
    await demote(served.cache)

    again = await served.worker.generate(prompt, NUM_NEW)
    await served.cache.check_invariants()
    scratch = await served.worker.generate(prompt, NUM_NEW, reuse=False)

    assert again.token_ids == scratch.token_ids
