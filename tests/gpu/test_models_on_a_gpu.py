"""A transformers model in bfloat16 on a GPU gives the same tokens without the cache, with it, and by another's KV."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from typing import Any

import pytest

pytest.importorskip("transformers", "5.23", reason="needs transformers 5.23")
from support.models.model_zoo import tiny_config
from support.models.tiny_llama import random_prompt
from support.models.tiny_models import BAMBA, FALCON_H1, GEMMA_3, QWEN3_NEXT
from support.waiting import wait_until
from transformers import LlamaConfig, PreTrainedConfig

from raydix.actors import LocalPrefixCache, shutdown_cache
from raydix.actors.cluster.placement import beside, remove_placement, start_on_own_gpu
from raydix.actors.huggingface.worker import TransformersWorker, cache_config_for

pytestmark = pytest.mark.gpu

MODEL = LlamaConfig(
    vocab_size=96,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    initializer_range=0.15,  # far from uniform, so that a wrong KV shows, and rounding does not
    dtype="bfloat16",
    eos_token_id=None,
)


def tokens_of(results: list[Any]) -> list[list[int]]:
    return [list(each.token_ids) for each in results]


async def test_answers_do_not_depend_on_the_cache() -> None:
    async with (
        LocalPrefixCache(cache_config_for(MODEL, 8192, device="cuda", page_size=16)) as cache,
        TransformersWorker(cache, model=MODEL, device="cuda") as worker,
    ):
        prompts = [random_prompt(300) + random_prompt(40, seed=seed) for seed in range(1, 6)]
        alone = [await worker.generate(prompt, 24, reuse=False) for prompt in prompts]
        first = [await worker.generate(prompt, 24) for prompt in prompts]
        again = [await worker.generate(prompt, 24) for prompt in prompts]

        assert (await cache.attach_pool()).k[0].is_cuda
    assert [each.prefix_len for each in first] == [0, 288, 288, 288, 288]
    assert [each.prefix_len for each in again] == [336] * 5
    assert tokens_of(alone) == tokens_of(first) == tokens_of(again)
    assert len({tuple(each) for each in tokens_of(alone)}) > 1


DEEPSEEK = tiny_config("deepseek_v32")


@pytest.mark.parametrize(
    "config", [GEMMA_3, FALCON_H1, BAMBA, QWEN3_NEXT, DEEPSEEK], ids=lambda config: config.model_type
)
async def test_windows_states_and_index_keys_are_kept_on_the_card(config: PreTrainedConfig) -> None:
    states = {} if config in (GEMMA_3, DEEPSEEK) else {"num_state_slots": 64}
    pool = cache_config_for(deepcopy(config), 1024, device="cuda", page_size=4, **states)
    async with (
        LocalPrefixCache(pool) as cache,
        TransformersWorker(cache, model=deepcopy(config), device="cuda") as worker,
    ):
        prompt = random_prompt(60)
        alone = await worker.generate(prompt, 12, reuse=False)
        first = await worker.generate(prompt, 12)
        again = await worker.generate(prompt, 12)
        longer = [*prompt, *again.token_ids, *random_prompt(7, seed=2)]
        turn = await worker.generate(longer, 12)
        turn_alone = await worker.generate(longer, 12, reuse=False)
        await cache.check_invariants()

    assert (first.prefix_len, again.prefix_len) == (0, 56)
    assert turn.prefix_len > 56
    assert tokens_of([first, again]) == tokens_of([alone]) * 2
    assert turn.token_ids == turn_alone.token_ids


@pytest.mark.ray
async def test_a_worker_on_the_caches_card_answers_from_the_kv_of_another_process(gpu_cluster: None) -> None:
    import ray

    name = "gpu-models"
    cache = await asyncio.to_thread(
        start_on_own_gpu, cache_config_for(MODEL, 8192, device="cuda", page_size=16), name, timeout_s=300
    )
    assert (await cache.pool_handle.remote()).device_type == "cuda"
    place = await asyncio.to_thread(beside, name)
    make = ray.remote(TransformersWorker).options(num_cpus=0, num_gpus=0.45, scheduling_strategy=place).remote
    workers = [make(name, model=MODEL, device="cuda") for _ in range(2)]
    prompt = random_prompt(300)

    alone = await workers[0].generate.remote(prompt, 24, reuse=False)
    first = await workers[0].generate.remote(prompt, 24)
    other = await workers[1].generate.remote(prompt, 24)

    assert (first.prefix_len, other.prefix_len) == (0, 288)
    assert tokens_of([alone, first, other]) == tokens_of([alone]) * 3
    for worker in workers:
        await worker.close.remote()
        ray.kill(worker)
    await asyncio.to_thread(shutdown_cache, cache)
    await asyncio.to_thread(remove_placement, name)
    wait_until(lambda: ray.available_resources().get("GPU") == 1)
