"""A worker of a model with index keys answers alike with a mapped pool, with a copied one, and without a cache."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from support.models.model_variants import config_named
from support.models.tiny_llama import random_prompt

from raydix.actors import LocalPrefixCache
from raydix.actors.huggingface.worker import TransformersWorker, cache_config_for
from raydix.schemas import ConfigMismatch, EvictionConfig, InvalidRequest

DEEPSEEK = config_named("deepseek_v32")
SHARED = config_named("glm_moe_dsa, shared indexers")


async def test_a_worker_that_copies_index_keys_goes_on_from_those_of_one_that_maps_them() -> None:
    config = cache_config_for(
        deepcopy(DEEPSEEK), 256, page_size=4, device="cpu", eviction=EvictionConfig(high_watermark=1.0), validate=True
    )
    prompt = random_prompt(40)
    async with (
        LocalPrefixCache(config) as cache,
        TransformersWorker(cache, model=deepcopy(DEEPSEEK), device="cpu") as mapping,
        TransformersWorker(cache, model=deepcopy(DEEPSEEK), device="cpu", mapped=False) as copying,
    ):
        alone = await mapping.generate(prompt, 6, reuse=False, return_logits=True, eos_token_id=())
        await copying.generate(prompt[:20], 1, eos_token_id=())
        found = []
        for worker, num_cached in ((mapping, 20), (copying, 36), (mapping, 44), (copying, 44)):
            asked = prompt if num_cached < 44 else [*prompt, *alone.token_ids[:5]]
            found.append(await worker.generate(asked, 6, return_logits=True, eos_token_id=()))
            assert found[-1].prefix_len == num_cached
        await cache.check_invariants()

    assert alone.logits is not None
    for generation in found[:2]:
        assert generation.token_ids == alone.token_ids
        assert generation.logits is not None
        off = (generation.logits - alone.logits[generation.prefix_len :]).abs().max()
        assert off < 1e-3 * alone.logits.std()
    assert found[2].token_ids == found[3].token_ids
    assert found[2].logits is not None and found[3].logits is not None
    assert torch.equal(found[2].logits, found[3].logits)


@pytest.mark.more
async def test_layers_with_and_without_index_keys_need_a_mapped_pool() -> None:
    async with LocalPrefixCache(cache_config_for(deepcopy(SHARED), 64, page_size=4, device="cpu")) as cache:
        worker = TransformersWorker(cache, model=deepcopy(SHARED), device="cpu", mapped=False)
        with pytest.raises(InvalidRequest, match="layers differ in the shape of their KV or in index keys"):
            await worker.open()
        await worker.close()


@pytest.mark.more
async def test_a_pool_without_the_models_index_keys_is_refused_by_name() -> None:
    fitting = cache_config_for(deepcopy(DEEPSEEK), 64, page_size=4, device="cpu")
    layers = tuple(layer.model_copy(update={"index_head_dim": 0}) for layer in fitting.pool.layers)
    config = fitting.model_copy(update={"pool": fitting.pool.model_copy(update={"layers": layers})})
    async with LocalPrefixCache(config) as cache:
        worker = TransformersWorker(cache, model=deepcopy(DEEPSEEK), device="cpu")
        with pytest.raises(
            ConfigMismatch,
            match=r"with index keys of 16\) in float32, the cache's pool holds 2 layers \(full: .*16 \+ 8\)",
        ):
            await worker.open()
        await worker.close()
