"""A worker's outputs do not depend on the source of the prefix, and no request leaves a lease, however it ends."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.tiny_llama import LLAMA, continuation, random_llama, random_prompt
from support.models.tiny_models import FALCON_H1, GEMMA_3, JAMBA, MOSHI, QWEN3_NEXT
from support.more import more
from transformers import (
    DeepseekV3Config,
    FalconConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
)

from raydix.actors import LocalPrefixCache
from raydix.actors.client.attached_pool import AttachedPool
from raydix.actors.huggingface.causal_model import CausalModel
from raydix.actors.huggingface.forward_pass import ForwardPass
from raydix.actors.huggingface.sequence_lengths import LengthRange, ModelLengths
from raydix.actors.huggingface.worker import TransformersWorker, cache_config_for, pool_config_for
from raydix.schemas import (
    CacheConfig,
    ConfigMismatch,
    EvictionConfig,
    InvalidRequest,
    PoolConfig,
    PoolExhausted,
    StaleEpoch,
)

pytestmark = pytest.mark.figures

NUM_SLOTS = 1024


def config_of(page_size: int) -> CacheConfig:
    return CacheConfig(
        page_size=page_size,
        pool=pool_config_for(LLAMA, NUM_SLOTS, device="cpu"),
        eviction=EvictionConfig(high_watermark=1.0),  # evict only on demand
        validate=True,
    )


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return random_llama()


@pytest.fixture
async def cache() -> AsyncIterator[LocalPrefixCache]:
    cache = LocalPrefixCache(config_of(16))
    yield cache
    stats = await cache.stats()
    assert (stats.open_leases, stats.private_slots) == (0, 0)
    await cache.check_invariants()
    await cache.close()


@pytest.fixture(params=[None, False], ids=["mapped", "copied"])
async def worker(request: pytest.FixtureRequest, cache: LocalPrefixCache) -> AsyncIterator[TransformersWorker]:
    async with TransformersWorker(cache, model=LLAMA, device="cpu", mapped=request.param) as worker:
        yield worker


@pytest.fixture
async def mapped_worker(cache: LocalPrefixCache) -> AsyncIterator[TransformersWorker]:
    async with TransformersWorker(cache, model=LLAMA, device="cpu") as worker:
        yield worker


class Gate:
    """Blocks a worker's forward passes from the `after`-th on until it is opened, or makes one of them fail."""

    def __init__(self, worker: TransformersWorker, after: int = 0, error: Exception | None = None) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.passes = 0
        self._after, self._error = after, error
        self._forward = worker._model._forward
        worker._model._forward = self._gated  # type: ignore[method-assign]

    def _gated(self, *args: Any, **options: Any) -> Any:
        self.passes += 1
        if self.passes > self._after:
            self.reached.set()
            self.opened.wait(20)
            if self._error is not None:
                raise self._error
        return self._forward(*args, **options)

    async def wait_until_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 20)


# ---------------------------------------------------------------- outputs


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 48, 50])
async def test_a_repeated_request_computes_only_the_last_partial_page(
    worker: TransformersWorker, num_tokens: int
) -> None:
    prompt = random_prompt(num_tokens)
    reusable = (num_tokens - 1) // 16 * 16

    scratch = await worker.generate(prompt, 8, reuse=False)
    first = await worker.generate(prompt, 8)
    second = await worker.generate(prompt, 8)

    assert (scratch.prefix_len, scratch.num_computed) == (0, num_tokens + 7)
    assert (first.prefix_len, first.num_computed) == (0, num_tokens + 7)
    assert (second.prefix_len, second.num_computed) == (reusable, num_tokens - reusable + 7)
    assert scratch.token_ids == first.token_ids == second.token_ids
    assert len(scratch.token_ids) == 8


async def test_a_conversation_reuses_generated_tokens(worker: TransformersWorker, model: LlamaForCausalLM) -> None:
    prompt = random_prompt(20)
    first = await worker.generate(prompt, 13)  # 32 computed: the last generated token was not run
    turn = [*prompt, *first.token_ids, *random_prompt(9, seed=5)]

    second = await worker.generate(turn, 6)

    assert second.prefix_len == 32
    assert list(second.token_ids) == continuation(model, turn, 0, 6)[1]


async def test_logits_come_one_row_per_computed_token(worker: TransformersWorker, model: LlamaForCausalLM) -> None:
    prompt = random_prompt(40)
    await worker.generate(prompt[:32], 1)
    expected, generated = continuation(model, prompt, 32, num_new=5)

    generation = await worker.generate(prompt, 5, return_logits=True)

    assert generation.logits is not None
    assert generation.logits.shape == (generation.num_computed, LLAMA.vocab_size) == (12, 96)
    assert torch.equal(generation.logits, expected)
    assert list(generation.token_ids) == generated
    assert (await worker.generate(prompt, 5)).logits is None


async def test_generation_stops_after_an_end_token(worker: TransformersWorker) -> None:
    prompt = random_prompt(20)
    full = await worker.generate(prompt, 12, reuse=False)
    end = full.token_ids[4]
    expected = full.token_ids[: full.token_ids.index(end) + 1]

    assert (await worker.generate(prompt, 12, eos_token_id=end)).token_ids == expected
    assert (await worker.generate(prompt, 12, eos_token_id=[1000, end])).token_ids == expected


@pytest.mark.parametrize(
    "form", [np.int64, torch.tensor, lambda end: torch.tensor([end]), lambda end: np.array([0, end])]
)
async def test_whatever_stands_for_an_integer_is_taken_as_it(
    mapped_worker: TransformersWorker, form: Callable[[int], Any]
) -> None:
    full = await mapped_worker.generate(random_prompt(20), np.int64(12))
    end = full.token_ids[0]

    assert (await mapped_worker.generate(random_prompt(20), 12, eos_token_id=form(end))).token_ids == (end,)


@pytest.mark.parametrize("end", ["5", 5.0, True, [5.0], ["5"], torch.tensor(5.0), b"5", object()])
async def test_end_tokens_that_are_no_ids_are_refused(mapped_worker: TransformersWorker, end: Any) -> None:
    with pytest.raises(InvalidRequest, match="eos_token_id"):
        await mapped_worker.generate([1, 2], 4, eos_token_id=end)


async def test_a_model_without_a_limit_is_asked_for_more_than_any_pool_holds(mapped_worker: TransformersWorker) -> None:
    mapped_worker._model.lengths = ModelLengths((LengthRange(None),), None)

    for num_new in (10**9, 10**13, 10**30):
        with pytest.raises((PoolExhausted, InvalidRequest)):
            await mapped_worker.generate([1, 2], num_new)


async def test_requests_run_concurrently_and_get_the_same_outputs_as_alone(worker: TransformersWorker) -> None:
    shared = random_prompt(32)
    prompts = [[*shared, *random_prompt(5 + i, seed=i)] for i in range(6)]
    alone = [await worker.generate(prompt, 6, reuse=False) for prompt in prompts]

    together = await asyncio.gather(*(worker.generate(prompt, 6) for prompt in prompts))
    again = await asyncio.gather(*(worker.generate(prompt, 6) for prompt in prompts))

    assert [g.token_ids for g in together] == [g.token_ids for g in alone]
    assert [g.token_ids for g in again] == [g.token_ids for g in alone]
    assert [g.prefix_len for g in again] == [32] * 6


async def test_the_prompt_is_found_by_others_while_its_first_request_still_decodes(
    cache: LocalPrefixCache, mapped_worker: TransformersWorker
) -> None:
    prompt = random_prompt(40)
    gate = Gate(mapped_worker, after=2)
    decoding = asyncio.create_task(mapped_worker.generate(prompt, 8))
    await gate.wait_until_reached()

    assert (await cache.match(prompt)).prefix_len == 32
    gate.opened.set()
    await decoding


async def test_pages_that_another_worker_published_first_are_shared_and_read_from_there(
    cache: LocalPrefixCache, mapped_worker: TransformersWorker, model: LlamaForCausalLM
) -> None:
    prompt = random_prompt(40)
    expected, generated = continuation(model, prompt, 0, num_new=8)
    async with TransformersWorker(cache, model=LLAMA, device="cpu") as late:
        prefill, decode = Gate(late), Gate(late, after=1)
        request = asyncio.create_task(late.generate(prompt, 8, return_logits=True))
        await prefill.wait_until_reached()  # it missed
        await mapped_worker.generate(prompt, 8)
        prefill.opened.set()
        await decode.wait_until_reached()  # its own pages are free by now
        for seed in range(1, 5):  # and are overwritten
            await mapped_worker.generate(random_prompt(240, seed=seed), 1, extra_key="others")
        decode.opened.set()
        generation = await request

    assert generation.prefix_len == 0
    assert list(generation.token_ids) == generated
    assert generation.logits is not None
    assert torch.equal(generation.logits, expected)
    assert (await cache.stats()).tokens_duplicate == 32


async def test_a_namespace_sees_nothing_of_another(worker: TransformersWorker) -> None:
    prompt = random_prompt(40)
    await worker.generate(prompt, 4, extra_key="a")

    assert (await worker.generate(prompt, 4, extra_key="b")).prefix_len == 0
    assert (await worker.generate(prompt, 4, lora_id="a")).prefix_len == 0
    assert (await worker.generate(prompt, 4, extra_key="a")).prefix_len == 32


async def test_a_worker_that_may_not_use_the_cache_leaves_it_alone(cache: LocalPrefixCache) -> None:
    prompt = random_prompt(40)
    async with (
        TransformersWorker(cache, model=LLAMA, device="cpu") as sharing,
        TransformersWorker(None, model=LLAMA, device="cpu", use_cache=False) as alone,
    ):
        before = await cache.stats()
        scratch = [await sharing.generate(prompt, 4, reuse=False), await alone.generate(prompt, 4)]

        assert (await cache.stats()).acquires == before.acquires == 0
        assert scratch[0].token_ids == scratch[1].token_ids


async def test_weights_found_at_a_path_are_loaded(cache: LocalPrefixCache, tmp_path: Path) -> None:
    random_llama(seed=7).save_pretrained(tmp_path)
    prompt = random_prompt(20)

    async with (
        TransformersWorker(cache, model=str(tmp_path), device="cpu") as loaded,
        TransformersWorker(cache, model=LLAMA.to_dict(), device="cpu", seed=7) as seeded,
    ):
        ours = await loaded.generate(prompt, 8, reuse=False)
        theirs = await seeded.generate(prompt, 8, reuse=False)
        assert ours.token_ids == theirs.token_ids


# ---------------------------------------------------------------- failures


async def test_a_cancelled_request_waits_for_its_forward_pass_and_then_holds_nothing(
    cache: LocalPrefixCache, mapped_worker: TransformersWorker
) -> None:
    gate = Gate(mapped_worker, after=3)
    request = asyncio.create_task(mapped_worker.generate(random_prompt(40), 8))
    await gate.wait_until_reached()

    request.cancel()
    await asyncio.sleep(0.05)
    request.cancel()  # a second cancellation waits as well
    await asyncio.sleep(0.05)
    during = await cache.stats()
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await request

    assert (during.open_leases, during.private_slots) == (1, 16)  # the pass may still write to the slots
    after = await cache.stats()
    assert (after.open_leases, after.private_slots, after.tree_slots) == (0, 0, 32)


async def test_a_request_cancelled_before_its_turn_never_runs(mapped_worker: TransformersWorker) -> None:
    await mapped_worker.open()
    gate = Gate(mapped_worker)
    running = asyncio.create_task(mapped_worker.generate(random_prompt(20), 1))
    await gate.wait_until_reached()
    queued = asyncio.create_task(mapped_worker.generate(random_prompt(20, seed=3), 1))
    await asyncio.sleep(0.05)

    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    gate.opened.set()
    await running

    assert gate.passes == 1


async def test_a_worker_that_closes_lets_the_pass_that_runs_end_before_its_slots_are_free(
    cache: LocalPrefixCache, mapped_worker: TransformersWorker
) -> None:
    await mapped_worker.open()
    gate = Gate(mapped_worker)
    running = asyncio.create_task(mapped_worker.generate(random_prompt(20), 4))
    await gate.wait_until_reached()
    queued = asyncio.create_task(mapped_worker.generate(random_prompt(8, seed=2), 4))
    await asyncio.sleep(0.05)

    closing = [asyncio.create_task(mapped_worker.close()) for _ in range(2)]
    await asyncio.sleep(0.05)
    closing[0].cancel()  # it closes nevertheless
    with pytest.raises(InvalidRequest, match="the worker was closed"):
        await mapped_worker.generate(random_prompt(8), 4)
    with pytest.raises(InvalidRequest, match="the worker was closed"):
        await queued
    during = await cache.stats()
    assert (during.open_leases, running.done(), closing[1].done()) == (1, False, False)
    gate.opened.set()
    await closing[1]

    assert gate.passes == 1
    assert (await cache.stats()).open_leases == 0
    with pytest.raises(InvalidRequest, match="the worker was closed"):
        await running
    await mapped_worker.close()


async def test_a_caller_cancelled_while_the_worker_closes_gets_the_cancellation(
    mapped_worker: TransformersWorker,
) -> None:
    await mapped_worker.open()
    gate = Gate(mapped_worker)
    request = asyncio.create_task(mapped_worker.generate(random_prompt(20), 4))
    await gate.wait_until_reached()

    closing = asyncio.create_task(mapped_worker.close())
    await asyncio.sleep(0.05)
    request.cancel()
    gate.opened.set()
    await closing

    with pytest.raises(asyncio.CancelledError):
        await request


async def test_a_request_that_the_worker_closed_on_leaves_its_task_as_it_was(mapped_worker: TransformersWorker) -> None:
    await mapped_worker.open()
    gate = Gate(mapped_worker)

    async def patient() -> str:
        with pytest.raises(InvalidRequest, match="the worker was closed"):
            await mapped_worker.generate(random_prompt(20), 4)
        async with asyncio.timeout(20):
            await asyncio.sleep(0.01)
        return "went on"

    request = asyncio.create_task(patient())
    await gate.wait_until_reached()
    closing = asyncio.create_task(mapped_worker.close())
    await asyncio.sleep(0.05)
    gate.opened.set()
    await closing

    assert (await request, request.cancelling()) == ("went on", 0)


async def test_a_worker_closed_while_it_attaches_lets_the_measuring_pass_end(cache: LocalPrefixCache) -> None:
    worker = TransformersWorker(cache, model=LLAMA, device="cpu")
    gate = Gate(worker)
    opening = asyncio.create_task(worker.open())
    await gate.wait_until_reached()

    closing = asyncio.create_task(worker.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    gate.opened.set()
    await closing

    with pytest.raises(InvalidRequest, match="the worker was closed"):
        await opening


async def test_an_attempt_to_attach_that_failed_without_waiters_is_repeated(
    cache: LocalPrefixCache,
) -> None:
    worker = TransformersWorker(cache, model=LLAMA, device="cpu")
    gate = Gate(worker, error=RuntimeError("out of memory"))
    first = asyncio.create_task(worker.generate(random_prompt(20), 4))
    await gate.wait_until_reached()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    attaching = worker._attaching
    assert attaching is not None
    gate.opened.set()
    await asyncio.wait((attaching,))
    gate._error = None

    assert len((await worker.generate(random_prompt(20), 4)).token_ids) == 4
    await worker.close()


async def test_a_lease_is_not_written_into_the_pool_of_another_life(
    cache: LocalPrefixCache, mapped_worker: TransformersWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache restarts, and again between an acquire and the next attaching."""
    client = mapped_worker._client
    assert client is not None and mapped_worker._pool is not None
    async with LocalPrefixCache(config_of(16)) as later:
        pool, acquire, attached = await later.attach_pool(), client.acquire, mapped_worker._pool
        before = [k.view(torch.uint8).clone() for k in pool.k]

        async def acquire_late(*args: Any, **options: Any) -> Any:
            lease = await acquire(*args, **options)
            attached.drop(StaleEpoch("before", lease.epoch))
            return lease

        async def attach_later(mapped: bool | None) -> AttachedPool:
            return pool

        monkeypatch.setattr(client, "acquire", acquire_late)
        monkeypatch.setattr(client, "attach_pool", attach_later)
        with pytest.raises(StaleEpoch):
            await mapped_worker.generate(random_prompt(20), 4)

        assert all(map(torch.equal, before, [k.view(torch.uint8) for k in pool.k]))


@pytest.mark.parametrize("after", [0, 2])
async def test_an_error_in_the_model_reaches_the_caller_and_aborts_the_lease(
    cache: LocalPrefixCache, worker: TransformersWorker, after: int
) -> None:
    gate = Gate(worker, after=after, error=RuntimeError("out of memory"))
    gate.opened.set()

    with pytest.raises(RuntimeError, match="out of memory"):
        await worker.generate(random_prompt(40), 8)

    stats = await cache.stats()
    assert (stats.open_leases, stats.private_slots, stats.tree_slots) == (0, 0, 32 if after else 0)


SHAPE = {"count": 3, "num_kv_heads": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("changed", "held"),
    [
        ({"layers": [SHAPE | {"count": 2}]}, "2 layers (full: 2 KV heads of 8) in float32"),
        ({"layers": []}, "no layers in float32"),
        ({"layers": [SHAPE | {"num_kv_heads": 4}]}, "3 layers (full: 4 KV heads of 8) in float32"),
        ({"layers": [SHAPE | {"head_dim": 16}]}, "3 layers (full: 2 KV heads of 16) in float32"),
        ({"layers": [SHAPE | {"v_head_dim": 4}]}, "3 layers (full: 2 KV heads of 8 + 4) in float32"),
        ({"dtype": "bfloat16"}, "3 layers (full: 2 KV heads of 8) in bfloat16"),
    ],
)
async def test_a_model_that_does_not_fit_the_pool_is_refused_naming_both(changed: dict[str, Any], held: str) -> None:
    fitting = pool_config_for(LLAMA, 64, device="cpu")
    cache = LocalPrefixCache(CacheConfig(pool=PoolConfig(**(fitting.model_dump() | changed))))
    worker = TransformersWorker(cache, model=LLAMA, device="cpu")
    needed = "3 layers (full: 2 KV heads of 8) in float32"
    fault = re.escape(f"{needed}, the cache's pool holds {held}: start the cache with the pool of pool_config_for")

    with pytest.raises(ConfigMismatch, match=fault):
        await worker.generate([1, 2, 3], 1)
    with pytest.raises(ConfigMismatch, match=fault):
        await worker.open()

    assert (await cache.stats()).acquires == 0
    await worker.close()
    await cache.close()


@pytest.mark.parametrize(
    ("tokens", "max_new_tokens", "message"),
    [
        ([], 4, "at least one token"),
        ([1, -2], 4, "negative"),
        ([1, 96], 4, "token 96 is not in the model's vocabulary of 96"),
        ([1, 2**40], 4, "vocabulary"),
        ([1, 2], -1, "max_new_tokens"),
        ([1, 2], 1.5, "max_new_tokens"),
        ([1, 2], True, "max_new_tokens"),
        ([1, 2], 10**13, "positions"),
        ([1, 2], 10**30, "positions"),
        ([1] * 250, 8, "257 tokens to compute, but the model has 256 positions"),
    ],
)
async def test_a_request_that_cannot_be_served_says_why(
    mapped_worker: TransformersWorker, tokens: list[int], max_new_tokens: Any, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await mapped_worker.generate(tokens, max_new_tokens)


SMALL: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
MULTI_QUERY = FalconConfig(**SMALL)
LATENT = DeepseekV3Config(
    **SMALL | {"num_key_value_heads": 4, "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 4},
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    first_k_dense_replace=1,
)


@pytest.mark.parametrize("config", [MULTI_QUERY, LATENT], ids=lambda config: config.model_type)
async def test_a_model_gets_the_pool_it_needs_however_its_configuration_names_it(config: PreTrainedConfig) -> None:
    async with (
        LocalPrefixCache(cache_config_for(config, 64, device="cpu", page_size=4)) as cache,
        TransformersWorker(cache, model=config, device="cpu") as worker,
    ):
        found = [await worker.generate(random_prompt(20), 4, reuse=reuse) for reuse in (False, True, True)]

    assert [each.prefix_len for each in found] == [0, 0, 16]
    assert len({each.token_ids for each in found}) == 1


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_a_model_that_cannot_run_without_weights_gets_the_pool_that_its_configuration_names(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise error("not on meta")

    measured = pool_config_for(LLAMA, 64)
    monkeypatch.setattr(LlamaForCausalLM, "forward", fails)

    assert pool_config_for(LLAMA, 64) == measured


def test_a_model_that_transformers_cannot_make_is_a_mismatch() -> None:
    with pytest.raises(ConfigMismatch, match="transformers cannot make this llama model"):
        pool_config_for(LlamaConfig(**SMALL, hidden_act="no such thing"), 64)


async def test_a_request_larger_than_the_pool_is_refused_at_once() -> None:
    pool = pool_config_for(LLAMA, 64, device="cpu")
    async with (
        LocalPrefixCache(CacheConfig(page_size=16, pool=pool)) as cache,
        TransformersWorker(cache, model=LLAMA, device="cpu") as worker,
    ):
        with pytest.raises(PoolExhausted) as caught:
            await worker.generate(random_prompt(60), 6)
        assert not caught.value.can_ever_fit

        assert len((await worker.generate(random_prompt(60), 5)).token_ids) == 5  # 64 slots suffice for 65


def test_without_a_cache_use_cache_must_be_off() -> None:
    with pytest.raises(InvalidRequest, match="use_cache=False"):
        TransformersWorker(None, model=LLAMA, device="cpu")


@pytest.mark.parametrize("config", [JAMBA, MOSHI], ids=lambda config: config.model_type)
@pytest.mark.parametrize("dtype", ["float32", *more("bfloat16")])
async def test_a_model_that_cannot_continue_from_its_cache_is_refused(config: PreTrainedConfig, dtype: str) -> None:
    """Jamba starts again when a prompt comes in parts, Moshi forgets the tokens before its window."""
    with pytest.raises(ConfigMismatch, match=rf"this {config.model_type} model.* cannot continue .*use_cache=False"):
        cache_config_for(deepcopy(config), 64, device="cpu", dtype=dtype)
    cache = LocalPrefixCache(CacheConfig(pool=PoolConfig(num_slots=64)))
    worker = TransformersWorker(cache, model=deepcopy(config), device="cpu", dtype=dtype)

    with pytest.raises(ConfigMismatch, match=f"this {config.model_type} model.* cannot continue from cached KV"):
        await worker.open()

    await worker.close()
    await cache.close()


@pytest.mark.parametrize(
    ("error", "raised", "eps"),  # no other test has models of this eps, so their traits are not known yet
    [
        (RuntimeError("size of tensor a"), ConfigMismatch, 1e-4),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError, 2e-4),
    ],
    ids=["fails", "memory"],
)
async def test_a_model_that_fails_to_continue_is_refused_but_not_one_that_has_no_memory(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception], eps: float
) -> None:
    logits = ForwardPass.logits

    def fails_to_continue(self: ForwardPass, tokens: Any, start: int, *others: Any) -> torch.Tensor:
        if start:
            raise error
        return logits(self, tokens, start, *others)

    monkeypatch.setattr(ForwardPass, "logits", fails_to_continue)
    config = deepcopy(LLAMA)
    config.rms_norm_eps = eps
    model = CausalModel(config, device="cpu")
    with pytest.raises(raised, match=str(error)):
        await model.pool_shape()

    model.close()


@pytest.mark.parametrize("config", [LLAMA, GEMMA_3, *more(FALCON_H1, QWEN3_NEXT)], ids=lambda config: config.model_type)
@pytest.mark.parametrize("dtype", [*more("float32", "float16"), "bfloat16"])
@pytest.mark.parametrize("max_positions", [24, 256])
async def test_rounding_does_not_refuse_a_model(config: PreTrainedConfig, dtype: str, max_positions: int) -> None:
    config = deepcopy(config)
    config.max_position_embeddings = max_positions
    model = CausalModel(config, dtype=dtype, device="cpu")

    assert (await model.pool_shape()).dtype == dtype

    model.close()
