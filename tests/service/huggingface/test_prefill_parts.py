"""A worker prefills in parts, takes the slots of prompts beyond the window slots part by part, and warms prefixes."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.models.tiny_llama import LLAMA
from support.models.tiny_models import FALCON_H1, MISTRAL, WINDOW, continuation, random_model, random_prompt

from raydix.actors import LocalPrefixCache
from raydix.actors.huggingface.leased_request import parts
from raydix.actors.huggingface.worker import Generation, TransformersWorker, cache_config_for
from raydix.schemas import CacheConfig, EvictionConfig, InvalidRequest, PoolExhausted

PAGE, NUM_NEW = 4, 12


def config_of(model: Any, num_slots: int = 1024, **counts: int) -> CacheConfig:
    return cache_config_for(
        deepcopy(model.config),
        num_slots,
        device="cpu",
        page_size=PAGE,
        eviction=EvictionConfig(high_watermark=1.0),
        validate=True,
        **counts,
    )


def worker_of(cache: LocalPrefixCache, model: Any, **options: Any) -> TransformersWorker:
    return TransformersWorker(cache, model=deepcopy(model.config), device="cpu", **options)


def check_close(found: Generation, model: Any, prompt: list[int]) -> None:
    in_one, ids = continuation(model, prompt, [], len(found.token_ids))
    assert list(found.token_ids) == ids
    assert found.logits is not None
    torch.testing.assert_close(found.logits, in_one[found.prefix_len :], atol=1e-4, rtol=0)


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("part_len", [2, 3, 8])
def test_no_part_is_below_the_least_and_all_tokens_are_in_one(part_len: int, least: int) -> None:
    for start in range(4):
        for end in range(start + least, 30):
            ends = list(parts(start, end, part_len, least))
            lengths = [stop - begin for begin, stop in zip([start, *ends], ends, strict=False)]

            assert sum(lengths) == end - start
            assert min(lengths) >= least
            assert max(lengths) < part_len + least


@pytest.mark.parametrize("named", [LLAMA, MISTRAL, FALCON_H1], ids=["llama", "mistral", "falcon_h1"])
@pytest.mark.parametrize("reuse", [True, False])
async def test_a_prompt_is_computed_in_parts(named: Any, reuse: bool) -> None:
    model, prompt, sizes = random_model(named), random_prompt(40), list[int]()
    counts = {"num_state_slots": 32} if named is FALCON_H1 else {}
    async with (
        LocalPrefixCache(config_of(model, **counts)) as cache,
        worker_of(cache, model, prefill_chunk=7) as worker,
    ):
        forward = worker._model._forward

        def counted(tokens: Any, num_cached: int, *rest: Any) -> Any:
            sizes.append(len(tokens) - num_cached)
            return forward(tokens, num_cached, *rest)

        worker._model._forward = counted  # type: ignore[method-assign]
        found = await worker.generate(prompt, NUM_NEW, reuse=reuse, return_logits=True)

        check_close(found, model, prompt)
        assert max(sizes) <= 7
        assert sum(sizes) == 40 + NUM_NEW - 1
        assert (await cache.match(prompt)).prefix_len == (36 if reuse and named is FALCON_H1 else 40 if reuse else 0)


async def test_a_prompt_beyond_the_window_slots_takes_them_part_by_part() -> None:
    model = random_model(MISTRAL)
    prompt = random_prompt(20 * WINDOW)
    async with LocalPrefixCache(config_of(model, num_swa_slots=6 * WINDOW)) as cache:
        with pytest.raises(PoolExhausted) as caught:
            await cache.acquire(prompt)
        assert not caught.value.can_ever_fit
        async with worker_of(cache, model) as worker, worker_of(cache, model) as other:
            first = await worker.generate(prompt, 10 * WINDOW, return_logits=True)
            turn = [*prompt, *first.token_ids, *random_prompt(3, seed=5)]
            second = await other.generate(turn, NUM_NEW, return_logits=True)

        assert first.prefix_len == 0
        assert second.prefix_len == (30 * WINDOW - 1) // PAGE * PAGE
        check_close(first, model, prompt)
        check_close(second, model, turn)
        stats = await cache.stats()
        assert (stats.open_leases, stats.private_slots) == (0, 0)


async def test_prompts_that_block_each_other_all_end() -> None:
    model = random_model(MISTRAL)
    async with LocalPrefixCache(config_of(model, num_swa_slots=8 * WINDOW)) as cache:
        workers = [worker_of(cache, model, prefill_chunk=16) for _ in range(4)]
        for number in range(20):
            prompts = [random_prompt(12 * WINDOW, seed=4 * number + place) for place in range(4)]
            found = await asyncio.gather(
                *(
                    worker.generate(prompt, NUM_NEW, return_logits=True, timeout_s=600)
                    for worker, prompt in zip(workers, prompts, strict=True)
                )
            )
            for generation, prompt in zip(found, prompts, strict=True):
                check_close(generation, model, prompt)
            if (await cache.stats()).resumed_acquires:  # on a busy machine they may run one after the other
                break
        for worker in workers:
            await worker.close()
        stats = await cache.stats()
        assert (stats.open_leases, stats.private_slots) == (0, 0)
        assert stats.resumed_acquires > 0  # some gave their slots back
        await cache.check_invariants()


async def test_a_prefix_that_is_evicted_after_its_match_is_computed_part_by_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, prompt = random_model(MISTRAL), random_prompt(12 * WINDOW)
    async with LocalPrefixCache(config_of(model, num_swa_slots=8 * WINDOW)) as cache:
        async with worker_of(cache, model, prefill_chunk=16) as worker:
            await worker.generate(prompt, 0)
            client = worker._client
            match = client.match

            async def match_of_evicted_pages(*args: Any, **options: Any) -> Any:
                found = await match(*args, **options)
                assert found.prefix_len > 8 * WINDOW
                await cache.evict(2**20)
                return found

            monkeypatch.setattr(client, "match", match_of_evicted_pages)

            found = await worker.generate(prompt, NUM_NEW, return_logits=True)

            assert found.prefix_len == 0
            check_close(found, model, prompt)


async def test_slots_are_waited_for_as_long_as_the_caller_says() -> None:
    model = random_model(MISTRAL)
    async with (
        LocalPrefixCache(config_of(model, num_swa_slots=6 * WINDOW)) as cache,
        worker_of(cache, model) as worker,
        cache.acquire([1] * 6 * WINDOW),
    ):
        for timeout_s in (0, 0.05):
            with pytest.raises(PoolExhausted):
                await worker.generate(random_prompt(20 * WINDOW), 2, timeout_s=timeout_s)
        with pytest.raises(InvalidRequest, match="seconds"):
            await worker.generate([1], 1, timeout_s=-1)


@pytest.mark.parametrize("named", [LLAMA, MISTRAL, FALCON_H1], ids=["llama", "mistral", "falcon_h1"])
async def test_no_new_tokens_warm_the_prefix(named: Any) -> None:
    model, prompt = random_model(named), random_prompt(42)
    counts = {"num_state_slots": 32} if named is FALCON_H1 else {}
    async with LocalPrefixCache(config_of(model, **counts)) as cache, worker_of(cache, model) as worker:
        warmed = await worker.generate(prompt, 0)

        found = await worker.generate([*prompt[:40], 1, 2, 3], NUM_NEW, return_logits=True)

        assert (warmed.token_ids, warmed.prefix_len, warmed.num_computed) == ((), 0, 42)
        assert found.prefix_len == 40
        check_close(found, model, [*prompt[:40], 1, 2, 3])
        with pytest.raises(InvalidRequest, match="no prefix to warm"):
            await worker.generate(prompt, 0, reuse=False)


@pytest.mark.parametrize("chunk", [0, 1, True, 2.5, "many"])
async def test_a_part_has_at_least_two_tokens(chunk: Any) -> None:
    model = random_model(LLAMA)

    with pytest.raises(InvalidRequest, match="prefill_chunk must be an integer of at least 2"):
        TransformersWorker(None, model=deepcopy(model.config), use_cache=False, prefill_chunk=chunk)
