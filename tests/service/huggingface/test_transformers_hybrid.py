"""A worker with a hybrid model continues from the matched state, and publishes states where later prompts need them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.models.tiny_models import FALCON_H1, QWEN3_NEXT, continuation, random_model, random_prompt
from support.more import more
from transformers import PreTrainedConfig

from raydix.actors import LocalPrefixCache
from raydix.actors.huggingface.worker import Generation, TransformersWorker, cache_config_for
from raydix.schemas import CacheConfig, CacheStats, EvictionConfig, InvalidRequest

pytestmark = pytest.mark.figures

PROMPT = random_prompt(24)
NUM_NEW = 6
OTHER = [95 - PROMPT[-1]]  # a token that differs from the prompt anywhere


def config_of(model: PreTrainedConfig, page_size: int, num_state_slots: int = 128) -> CacheConfig:
    return cache_config_for(
        deepcopy(model),
        1024,
        num_state_slots=num_state_slots,
        device="cpu",
        page_size=page_size,
        eviction=EvictionConfig(high_watermark=1.0),  # evict only on demand
        validate=True,
    )


@pytest.fixture(scope="module", params=[FALCON_H1, QWEN3_NEXT], ids=["falcon_h1", "qwen3_next"])
def model(request: pytest.FixtureRequest) -> Any:
    return random_model(request.param)


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.long), 4], ids=["page1", "page4"])
def page_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
async def cache(model: Any, page_size: int) -> AsyncIterator[LocalPrefixCache]:
    cache = LocalPrefixCache(config_of(model.config, page_size))
    yield cache
    check_nothing_is_left(await cache.stats())
    await cache.check_invariants()
    await cache.close()


@pytest.fixture
async def workers(cache: LocalPrefixCache, model: Any) -> AsyncIterator[list[TransformersWorker]]:
    """Open a worker that writes and one that reads."""
    workers = [TransformersWorker(cache, model=deepcopy(model.config), device="cpu") for _ in range(2)]
    yield workers
    for worker in workers:
        await worker.close()


def check_nothing_is_left(stats: CacheStats) -> None:
    assert stats.state is not None
    assert (stats.open_leases, stats.private_slots) == (0, 0)
    assert (stats.state.private_slots, stats.state.protected_slots) == (0, 0)


def last_stop(prompt: list[int], page_size: int) -> int:
    """Return the last page boundary that leaves a token to compute: the prefill is cut there, for its state."""
    return (len(prompt) - 1) // page_size * page_size


def check_same(
    found: Generation, model: Any, prompt: list[int], page_size: int, start: int, cuts: tuple[int, ...] = ()
) -> float:
    """Check the bits of the model's own continuation after `start`, cut where the worker was; return how far it is from
    one prefill.

    `cuts` are the other cuts, besides the start and the last published state.
    """
    where = [start, *cuts, last_stop(prompt, page_size)]
    expected, generated = continuation(model, prompt, where, len(found.token_ids), start)
    in_one, in_one_ids = continuation(model, prompt, [], len(found.token_ids))
    assert found.prefix_len == start
    assert found.logits is not None
    assert torch.equal(found.logits, expected)
    assert list(found.token_ids) == generated == in_one_ids
    return (found.logits - in_one[start:]).abs().max().item()


async def evict_states(cache: LocalPrefixCache, num_states: int) -> None:
    """Allocate this many states more than are free, which evicts the least recently used, and free them."""
    stats = await cache.stats()
    assert stats.state is not None
    num_leases = stats.state.free_slots + num_states
    leases = [await cache.acquire([i + 1], extra_key="pressure", timeout_s=0) for i in range(num_leases)]
    for lease in leases:
        await lease.release()


# ---------------------------------------------------------------- outputs


async def test_logits_after_every_page_boundary_are_those_of_a_dynamic_cache_cut_there(
    workers: list[TransformersWorker], model: Any, page_size: int
) -> None:
    writer, reader = workers
    differences = []
    for cut in range(page_size, len(PROMPT), page_size):
        await writer.generate(PROMPT[:cut] + OTHER, 1, extra_key=f"{cut}")
        found = await reader.generate(PROMPT, NUM_NEW, extra_key=f"{cut}", return_logits=True)
        differences.append(check_same(found, model, PROMPT, page_size, cut))

    print(f"{model.config.model_type}, pages of {page_size}: {max(differences):.1e} from a prefill in one")
    assert max(differences) < 1e-4


async def test_an_empty_cache_gives_the_models_own_outputs(
    workers: list[TransformersWorker], model: Any, page_size: int
) -> None:
    scratch = await workers[0].generate(PROMPT, NUM_NEW, reuse=False, return_logits=True)
    first = await workers[0].generate(PROMPT, NUM_NEW, return_logits=True)

    in_one, ids = continuation(model, PROMPT, [], NUM_NEW)
    assert scratch.logits is not None
    assert torch.equal(scratch.logits, in_one)
    assert list(scratch.token_ids) == ids
    check_same(first, model, PROMPT, page_size, 0)


async def test_a_repeated_request_computes_only_the_tokens_after_the_last_state(
    workers: list[TransformersWorker], model: Any, page_size: int
) -> None:
    for prompt in (PROMPT[:1], PROMPT[:4], PROMPT[:5], PROMPT):
        namespace = f"{len(prompt)}"
        first = await workers[0].generate(prompt, NUM_NEW, extra_key=namespace)
        second = await workers[1].generate(prompt, NUM_NEW, extra_key=namespace, return_logits=True)

        check_same(second, model, prompt, page_size, last_stop(prompt, page_size))
        assert second.token_ids == first.token_ids


async def test_a_conversation_goes_on_from_the_last_page_that_was_generated(
    workers: list[TransformersWorker], model: Any, page_size: int
) -> None:
    for num_new in (9, 11):  # the computed tokens end at a boundary of a page of four, or not
        first = await workers[0].generate(PROMPT, num_new, extra_key=f"{num_new}")
        turn = [*PROMPT, *first.token_ids, *random_prompt(7, seed=5)]
        computed = len(PROMPT) + num_new - 1

        second = await workers[1].generate(turn, 6, extra_key=f"{num_new}")

        assert second.prefix_len == computed // page_size * page_size
        assert list(second.token_ids) == continuation(model, turn, [], 6)[1]


SEEDS = {"falcon_h1": 7, "qwen3_next": 3}  # of prompts of 100 tokens with an answer that has its 120th token once


async def test_an_answer_that_ends_by_an_end_token_is_continued_from_its_last_whole_page(model: Any) -> None:
    prompt = random_prompt(100, seed=SEEDS[model.config.model_type])
    answer = continuation(model, prompt, [], 120)[1]
    assert answer.index(answer[-1]) == 119
    async with LocalPrefixCache(config_of(model.config, 16)) as cache:
        async with TransformersWorker(cache, model=deepcopy(model.config), device="cpu") as worker:
            first = await worker.generate(prompt, 150, eos_token_id=answer[-1])
            turn = [*prompt, *answer, *random_prompt(10, seed=5)]

            second = await worker.generate(turn, 6)
            samples = [await worker.generate(prompt, 2) for _ in range(4)]

        assert list(first.token_ids) == answer
        assert (len(turn), second.prefix_len) == (230, 208)
        assert list(second.token_ids) == continuation(model, turn, [], 6)[1]
        assert [each.prefix_len for each in samples] == [96] * 4
        check_nothing_is_left(await cache.stats())


async def test_generation_that_stops_early_at_a_page_end_leaves_its_state(
    cache: LocalPrefixCache, workers: list[TransformersWorker]
) -> None:
    full = await workers[0].generate(PROMPT, 9, reuse=False)
    first = await workers[0].generate(PROMPT, 40, eos_token_id=full.token_ids[4])

    computed = [*PROMPT, *first.token_ids[:-1]]
    if len(computed) % 4 == 0:  # unless the end token came earlier
        assert (await cache.match([*computed, 1, 2])).prefix_len == len(computed)


async def test_where_prompts_were_seen_to_part_a_state_is_published(
    cache: LocalPrefixCache, workers: list[TransformersWorker], model: Any, page_size: int
) -> None:
    shared = PROMPT[:16]
    asked = [[*shared, *random_prompt(7, seed=seed)] for seed in (1, 2, 3)]
    found = []
    for i, prompt in enumerate(asked):
        probe = await cache.match(prompt)
        found.append((probe, await workers[i % 2].generate(prompt, NUM_NEW, return_logits=True)))

    assert [(probe.prefix_len, probe.branching_len) for probe, _ in found] == [(0, None), (0, 16), (16, None)]
    assert [generation.prefix_len for _, generation in found] == [0, 0, 16]
    for (_, generation), prompt in zip(found, asked, strict=True):
        in_one, ids = continuation(model, prompt, [], NUM_NEW)
        assert list(generation.token_ids) == ids
        assert generation.logits is not None  # the KV up to 16 is the first request's, which was cut elsewhere
        torch.testing.assert_close(generation.logits, in_one[generation.prefix_len :], atol=1e-4, rtol=0)


async def test_after_states_were_evicted_a_request_goes_on_from_an_earlier_one_or_from_none(
    cache: LocalPrefixCache, workers: list[TransformersWorker], model: Any, page_size: int
) -> None:
    writer, reader = workers
    await writer.generate(PROMPT[:9], 1)  # states at 8, and at 9 for pages of one
    held = last_stop(PROMPT[:9], page_size) + (page_size == 1)
    await writer.generate(PROMPT[:17], 1)
    await writer.generate(PROMPT, 1)
    before = await cache.match(PROMPT)
    await cache.match(PROMPT[:9])

    lease = await cache.lock(PROMPT[:held])  # this state is used now, so the others are evicted first
    stats = await cache.stats()
    assert stats.state is not None
    await evict_states(cache, stats.state.tree_slots - 1)
    await lease.release()
    earlier = await cache.match(PROMPT)
    from_earlier = await reader.generate(PROMPT, NUM_NEW)
    stats = await cache.stats()
    assert stats.state is not None
    await evict_states(cache, stats.state.tree_slots)
    none = await cache.match(PROMPT)
    from_none = await reader.generate(PROMPT, NUM_NEW)

    assert (before.prefix_len, earlier.prefix_len, none.prefix_len) == (24, held, 0)
    assert (from_earlier.prefix_len, from_none.prefix_len) == (held, 0)
    expected = continuation(model, PROMPT, [], NUM_NEW)[1]
    assert list(from_earlier.token_ids) == list(from_none.token_ids) == expected


async def test_the_bits_after_states_were_evicted_are_those_of_the_model(
    cache: LocalPrefixCache, workers: list[TransformersWorker], model: Any, page_size: int
) -> None:
    writer, reader = workers
    for cut in range(8, len(PROMPT), 4):
        await writer.generate([*PROMPT[:4], *OTHER], 1, extra_key=f"{cut}")  # a state at 4
        await writer.generate([*PROMPT[:cut], *OTHER], 1, extra_key=f"{cut}")  # and at the cut,
        await writer.generate([*PROMPT[:cut], *OTHER, *PROMPT[:page_size]], 1, extra_key=f"{cut}")  # which has children
        lease = await cache.lock([*PROMPT[:4], 1, 2, 3], extra_key=f"{cut}")
        while (probe := await cache.match(PROMPT, extra_key=f"{cut}")).prefix_len > 4:
            await evict_states(cache, 1)
        await lease.release()

        found = await reader.generate(PROMPT, NUM_NEW, extra_key=f"{cut}", return_logits=True)

        assert (probe.prefix_len, probe.full_prefix_len, probe.branching_len) == (4, cut, cut)
        check_same(found, model, PROMPT, page_size, 4, cuts=(cut,))


async def test_concurrent_requests_get_the_same_outputs_as_alone(workers: list[TransformersWorker], model: Any) -> None:
    prompts = [[*PROMPT, *random_prompt(3 + i, seed=i)] for i in range(4)]
    for _ in range(2):
        together = await asyncio.gather(*(workers[i % 2].generate(prompts[i], 8) for i in range(4)))
        assert [list(each.token_ids) for each in together] == [continuation(model, p, [], 8)[1] for p in prompts]


@pytest.mark.parametrize("num_state_slots", [*more(1), 2, *more(5)])
async def test_few_states_cost_reuse_but_no_request(model: Any, num_state_slots: int) -> None:
    async with LocalPrefixCache(config_of(model.config, 4, num_state_slots)) as cache:
        worker = TransformersWorker(cache, model=deepcopy(model.config), device="cpu")
        prompts = [[*PROMPT[: 8 * (1 + i % 3)], *random_prompt(6, seed=i)] for i in range(4)]
        expected = [continuation(model, prompt, [], 6)[1] for prompt in prompts]
        for _ in range(3):
            for prompt, ids in zip(prompts, expected, strict=True):
                assert list((await worker.generate(prompt, 6)).token_ids) == ids

        stats = await cache.stats()
        assert num_state_slots == 2 or (stats.tokens_reused > 0) == (num_state_slots > 2)
        check_nothing_is_left(stats)
        await cache.check_invariants()
        await worker.close()


async def test_an_error_in_the_model_gives_the_state_back(
    cache: LocalPrefixCache, workers: list[TransformersWorker], page_size: int
) -> None:
    await workers[0].generate(PROMPT, 2)
    await workers[1].open()
    workers[1]._model._forward = fail_after(workers[1]._model._forward, 4)  # type: ignore[method-assign]

    with pytest.raises(RuntimeError, match="out of memory"):
        await workers[1].generate([*PROMPT, *random_prompt(9, seed=3)], 30)
    assert (await cache.match([*PROMPT, *random_prompt(9, seed=3)])).prefix_len == (33 - 1) // page_size * page_size


def fail_after(forward: Any, num_passes: int) -> Any:
    passes = iter(range(num_passes))

    def failing(*args: Any) -> Any:
        if next(passes, None) is None:
            raise RuntimeError("out of memory")
        return forward(*args)

    return failing


# ---------------------------------------------------------------- refused models


async def test_states_need_a_mapped_pool() -> None:
    async with LocalPrefixCache(config_of(FALCON_H1, 4)) as cache:
        worker = TransformersWorker(cache, model=deepcopy(FALCON_H1), device="cpu", mapped=False)
        with pytest.raises(InvalidRequest, match="recurrent states need a mapped pool"):
            await worker.generate(PROMPT, 2)
        assert (await cache.stats()).acquires == 0
        await worker.close()


# ---------------------------------------------------------------- two workers on Ray


@pytest.mark.long
@pytest.mark.ray
async def test_two_workers_on_ray_share_states(ray_cluster: None) -> None:
    import ray

    from raydix.actors import PrefixCacheClient, shutdown_cache, start_cache

    model = random_model(FALCON_H1)  # states are copied between processes in the same way for the other model
    config = model.config
    cache = start_cache(config_of(config, 4))
    make = ray.remote(TransformersWorker).options(num_cpus=1).remote
    writer, reader = (make(cache, model=deepcopy(config), mapped=True, num_threads=1) for _ in range(2))
    for cut in range(4, len(PROMPT), 4):
        await writer.generate.remote(PROMPT[:cut] + OTHER, 1, extra_key=f"{cut}")
        found = await reader.generate.remote(PROMPT, NUM_NEW, extra_key=f"{cut}", return_logits=True)
        check_same(found, model, PROMPT, 4, cut)
    async with PrefixCacheClient(cache) as client:
        check_nothing_is_left(await client.stats())
        await client.check_invariants()
    shutdown_cache(cache)
    ray.kill(writer)
    ray.kill(reader)
