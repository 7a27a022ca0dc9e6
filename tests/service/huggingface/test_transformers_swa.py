"""A worker with a sliding-window model reads exactly the window's KV, however much of the rest was evicted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from copy import deepcopy
from itertools import count
from typing import Any

import pytest
import torch
from support.models.tiny_models import GEMMA_3, MISTRAL, WINDOW, continuation, random_model, random_prompt
from transformers import PreTrainedConfig

from raydix.actors import LocalPrefixCache
from raydix.actors.huggingface.worker import Generation, TransformersWorker, cache_config_for
from raydix.cache_core.components.window_kv import kept_tail
from raydix.schemas import CacheConfig, CacheStats, ConfigMismatch, EvictionConfig, PoolConfig, PoolExhausted

pytestmark = pytest.mark.figures

PROMPT = random_prompt(3 * WINDOW)
NUM_NEW = 12  # decoding moves past a window, too


def config_of(model: PreTrainedConfig, page_size: int, num_swa_slots: int = 512) -> CacheConfig:
    return cache_config_for(
        deepcopy(model),
        1024,
        num_swa_slots=num_swa_slots,
        device="cpu",
        page_size=page_size,
        eviction=EvictionConfig(high_watermark=1.0),  # evict only on demand
        validate=True,
    )


@pytest.fixture(scope="module", params=[MISTRAL, GEMMA_3], ids=["mistral", "gemma3"])
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


@pytest.fixture(params=[None, False], ids=["mapped", "copied"])
async def workers(request: pytest.FixtureRequest, cache: LocalPrefixCache, model: Any) -> AsyncIterator[list[Any]]:
    """Open a worker that writes and one that reads."""
    workers = [
        TransformersWorker(cache, model=deepcopy(model.config), device="cpu", mapped=request.param) for _ in range(2)
    ]
    yield workers
    for worker in workers:
        await worker.close()


def check_nothing_is_left(stats: CacheStats) -> None:
    assert stats.swa is not None
    assert (stats.open_leases, stats.private_slots, stats.swa.private_slots, stats.swa.protected_slots) == (0, 0, 0, 0)


def check_same(found: Generation, model: Any, prompt: list[int], cut: int) -> float:
    """Check the bits of the model's own continuation after `cut`; return how far it is from one prefill."""
    expected, generated = continuation(model, prompt, [cut], len(found.token_ids))
    in_one, in_one_ids = continuation(model, prompt, [], len(found.token_ids))
    assert found.prefix_len == cut
    assert found.logits is not None
    assert torch.equal(found.logits, expected)
    assert list(found.token_ids) == generated == in_one_ids
    return (found.logits - in_one[cut:]).abs().max().item()


async def make_room(cache: LocalPrefixCache, num_swa_slots: int) -> None:
    """Allocate this many window slots more than are free, which evicts the least recently used, and free them."""
    stats = await cache.stats()
    assert stats.swa is not None
    lease = await cache.acquire([7] * (stats.swa.free_slots + num_swa_slots), extra_key="pressure", timeout_s=0)
    await lease.release()


# ---------------------------------------------------------------- outputs


async def test_logits_after_every_page_boundary_are_those_of_a_dynamic_cache_cut_there(
    workers: list[TransformersWorker], model: Any, page_size: int
) -> None:
    writer, reader = workers
    differences = []
    for cut in range(page_size, len(PROMPT), page_size):
        await writer.generate(PROMPT[:cut], 1, extra_key=f"{cut}")
        found = await reader.generate(PROMPT, NUM_NEW, extra_key=f"{cut}", return_logits=True)
        differences.append(check_same(found, model, PROMPT, cut))

    print(f"{model.config.model_type}, pages of {page_size}: {max(differences):.1e} from a prefill in one")
    assert max(differences) < 1e-4


async def test_an_empty_cache_gives_the_models_own_outputs(workers: list[TransformersWorker], model: Any) -> None:
    scratch = await workers[0].generate(PROMPT, NUM_NEW, reuse=False, return_logits=True)
    first = await workers[0].generate(PROMPT, NUM_NEW, return_logits=True)

    assert check_same(scratch, model, PROMPT, 0) == check_same(first, model, PROMPT, 0) == 0


async def test_a_window_with_evicted_inner_nodes_gives_the_same_bits(
    cache: LocalPrefixCache, workers: list[TransformersWorker], model: Any, page_size: int
) -> None:
    writer, reader = workers
    tail = kept_tail(WINDOW, page_size)
    for cut in (2 * WINDOW, 2 * WINDOW + 4):
        await cache.reset()
        await writer.generate(PROMPT[:cut], 1)
        await make_room(cache, cut - tail)

        stats = await cache.stats()
        assert stats.swa is not None
        assert (stats.tree_slots, stats.swa.tree_slots) == (cut, tail)
        check_same(await reader.generate(PROMPT, NUM_NEW, return_logits=True), model, PROMPT, cut)


async def test_a_window_that_was_evicted_is_computed_again_and_heals(
    cache: LocalPrefixCache, workers: list[TransformersWorker], model: Any
) -> None:
    writer, reader = workers
    await writer.generate(PROMPT[:16], 1)
    await writer.generate([*PROMPT[:16], *random_prompt(8, seed=9)], 1)  # an unlocked leaf would be removed whole
    await make_room(cache, 24)
    probe = await cache.match(PROMPT)
    again = await reader.generate(PROMPT, NUM_NEW, return_logits=True)
    healed = await writer.generate(PROMPT, 1)

    assert probe.prefix_len == 0
    check_same(again, model, PROMPT, 0)
    assert healed.prefix_len >= 20


async def test_the_window_left_behind_by_decoding_is_freed_while_it_runs(cache: LocalPrefixCache, model: Any) -> None:
    most_private = []
    async with TransformersWorker(cache, model=deepcopy(model.config), device="cpu") as worker:
        forward = worker._model._forward
        loop = asyncio.get_running_loop()

        def watched(*args: Any) -> Any:
            stats = asyncio.run_coroutine_threadsafe(cache.stats(), loop).result(20)
            most_private.append(stats.swa.private_slots if stats.swa else 0)
            return forward(*args)

        worker._model._forward = watched  # type: ignore[method-assign]
        found = await worker.generate(PROMPT, 8 * WINDOW, return_logits=True)

    check_same(found, model, PROMPT, 0)
    assert most_private[0] >= 11 * WINDOW - 1
    assert most_private[-1] <= WINDOW + 2 * cache.config.page_size + WINDOW // 4 + 1


async def test_a_conversation_continues_in_the_window_of_generated_tokens(
    workers: list[TransformersWorker], model: Any
) -> None:
    first = await workers[0].generate(PROMPT, 3 * WINDOW + 1)
    turn = [*PROMPT, *first.token_ids, *random_prompt(5, seed=5)]

    second = await workers[1].generate(turn, 6)

    assert second.prefix_len == 6 * WINDOW
    assert list(second.token_ids) == continuation(model, turn, [], 6)[1]


async def test_windows_that_another_published_first_are_read_from_there(
    cache: LocalPrefixCache, workers: list[TransformersWorker], model: Any
) -> None:
    first, late = workers
    await late.open()
    forward, loop, passes = late._model._forward, asyncio.get_running_loop(), count()

    def run(request: Coroutine[Any, Any, Generation]) -> None:
        asyncio.run_coroutine_threadsafe(request, loop).result(20)

    def interrupted(*args: Any) -> Any:
        num_passes = next(passes)
        if num_passes == 0:  # it missed
            run(first.generate(PROMPT, 1))
        if num_passes == 1:  # its own pages are free by now, and are overwritten
            for seed in range(1, 6):
                run(first.generate(random_prompt(120, seed=seed), 1, extra_key="others"))
        return forward(*args)

    late._model._forward = interrupted  # type: ignore[method-assign]
    found = await late.generate(PROMPT, NUM_NEW, return_logits=True)

    check_same(found, model, PROMPT, 0)
    assert (await cache.stats()).tokens_duplicate == 3 * WINDOW


async def test_concurrent_requests_get_the_same_outputs_as_alone(workers: list[TransformersWorker], model: Any) -> None:
    prompts = [[*PROMPT, *random_prompt(3 + i, seed=i)] for i in range(4)]
    for _ in range(2):
        together = await asyncio.gather(*(workers[i % 2].generate(prompts[i], 20) for i in range(4)))
        assert [list(each.token_ids) for each in together] == [continuation(model, p, [], 20)[1] for p in prompts]


async def test_pressure_on_the_window_pool_does_not_change_the_outputs(model: Any) -> None:
    async with LocalPrefixCache(config_of(model.config, 4, num_swa_slots=64)) as cache:
        worker = TransformersWorker(cache, model=deepcopy(model.config), device="cpu")
        prompts = [[*PROMPT[: 8 * (1 + i % 3)], *random_prompt(6, seed=i)] for i in range(5)]
        expected = [continuation(model, prompt, [], 10)[1] for prompt in prompts]
        for _ in range(4):
            for prompt, ids in zip(prompts, expected, strict=True):
                assert list((await worker.generate(prompt, 10)).token_ids) == ids

        stats = await cache.stats()
        assert stats.tokens_reused > 0
        check_nothing_is_left(stats)
        await cache.check_invariants()
        await worker.close()


# ---------------------------------------------------------------- refused models


async def test_a_window_pool_that_holds_no_window_refuses_at_once() -> None:
    async with (
        LocalPrefixCache(config_of(MISTRAL, 4, num_swa_slots=WINDOW)) as cache,
        TransformersWorker(cache, model=deepcopy(MISTRAL), device="cpu") as worker,
    ):
        with pytest.raises(PoolExhausted) as caught:
            await worker.generate(PROMPT, 10)
        assert not caught.value.can_ever_fit


@pytest.mark.parametrize(
    ("window", "kinds", "message"),
    [
        (7, ("swa", "swa"), "window is 8 tokens, the cache keeps 7"),
        (8, ("swa", "full"), r"2 layers \(swa: .*, the cache's pool holds 1 layer \(swa: .*\) \+ 1 layer \(full: "),
    ],
)
async def test_a_cache_that_keeps_too_little_is_refused(window: int, kinds: tuple[str, ...], message: str) -> None:
    fitting = config_of(MISTRAL, 4)
    layers = zip(fitting.pool.layers, kinds, strict=True)
    changed = {"layers": [layer.model_dump() | {"kind": kind} for layer, kind in layers]}
    pool = PoolConfig.model_validate(fitting.pool.model_dump() | changed)
    cache = LocalPrefixCache(fitting.model_copy(update={"pool": pool, "sliding_window_size": window}))
    worker = TransformersWorker(cache, model=deepcopy(MISTRAL), device="cpu")

    with pytest.raises(ConfigMismatch, match=message):
        await worker.open()
    await worker.close()
    await cache.close()


# ---------------------------------------------------------------- two workers on Ray


@pytest.mark.long
@pytest.mark.ray
async def test_two_workers_on_ray_share_windows(ray_cluster: None) -> None:
    import ray

    from raydix.actors import PrefixCacheClient, shutdown_cache, start_cache

    model = random_model(GEMMA_3)
    cache = start_cache(config_of(GEMMA_3, 4))
    make = ray.remote(TransformersWorker).options(num_cpus=1).remote
    writer, reader = (make(cache, model=deepcopy(GEMMA_3), mapped=True, num_threads=1) for _ in range(2))
    for cut in range(4, len(PROMPT), 4):
        await writer.generate.remote(PROMPT[:cut], 1, extra_key=f"{cut}")
        found = await reader.generate.remote(PROMPT, NUM_NEW, extra_key=f"{cut}", return_logits=True)
        check_same(found, model, PROMPT, cut)
    async with PrefixCacheClient(cache) as client:
        check_nothing_is_left(await client.stats())
        await client.check_invariants()
    shutdown_cache(cache)
    ray.kill(writer)
    ray.kill(reader)
