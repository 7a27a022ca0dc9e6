"""Workers bind their models: no answer ever uses KV of other weights, and a refusal gives the reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.models.tiny_llama import LLAMA, random_llama, random_prompt
from transformers import LlamaConfig, Qwen3Config

from raydix.actors import Lease, LocalPrefixCache
from raydix.actors.huggingface import worker_binding
from raydix.actors.huggingface.worker import TransformersWorker, model_fingerprint, pool_config_for
from raydix.schemas import CacheConfig, ConfigMismatch, InvalidRequest, ModelFingerprint

pytestmark = pytest.mark.figures

PROMPT = random_prompt(40)
CONFIG = CacheConfig(page_size=4, pool=pool_config_for(LLAMA, 1024, device="cpu"), validate=True)
OF_LLAMA = {name: value for name, value in LLAMA.to_dict().items() if name not in ("model_type", "architectures")}


def llama(**changed: Any) -> LlamaConfig:
    return LlamaConfig(**OF_LLAMA | changed)


class Scene:
    """A cache, and workers on it."""

    def __init__(self, cache: LocalPrefixCache, workers: AsyncExitStack) -> None:
        self.cache = cache
        self._workers = workers

    async def worker(self, seed: int = 0, model: Any = LLAMA, **options: Any) -> TransformersWorker:
        worker = TransformersWorker(self.cache, model=deepcopy(model), seed=seed, device="cpu", **options)
        return await self._workers.enter_async_context(worker)

    async def bindings(self) -> int:
        return (await self.cache.stats()).bindings


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with LocalPrefixCache(CONFIG) as cache:
        async with AsyncExitStack() as workers:
            yield Scene(cache, workers)
        stats = await cache.stats()
        assert (stats.open_leases, stats.private_slots) == (0, 0)
        await cache.check_invariants()


async def answer(worker: TransformersWorker, lora_id: str | None = None, prompt: list[int] = PROMPT) -> int:
    """Generate, compare with the same model without a cache, and return the number of reused tokens."""
    shared = await worker.generate(prompt, 6, lora_id=lora_id, return_logits=True, eos_token_id=())
    alone = await worker.generate(prompt, 6, reuse=False, return_logits=True, eos_token_id=())
    assert shared.token_ids == alone.token_ids
    assert shared.logits is not None and alone.logits is not None
    torch.testing.assert_close(shared.logits, alone.logits[shared.prefix_len :], rtol=0, atol=1e-3)
    return shared.prefix_len


# ---------------------------------------------------------------- several models on one cache

OTHERS: dict[str, tuple[Any, int, str]] = {
    "another seed": (LLAMA, 1, "the weights differ"),
    "another rope_theta": (
        llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        0,
        r"rope_parameters.rope_theta is 500000.0, not 10000.0; the weights are ",  # they include its frequencies
    ),
    "another rms_norm_eps": (llama(rms_norm_eps=1e-2), 0, r"rms_norm_eps is 0.01, not 1e-06\. "),
    "another family": (
        Qwen3Config(**OF_LLAMA | {"head_dim": 8, "layer_types": None}),
        0,
        "model_type is 'qwen3', not 'llama'",
    ),
}


@pytest.mark.parametrize(("model", "seed", "named"), OTHERS.values(), ids=OTHERS)
async def test_a_worker_of_another_model_is_refused_by_name_and_changes_nothing(
    scene: Scene, model: Any, seed: int, named: str
) -> None:
    first, other = await scene.worker(), await scene.worker(seed, model)
    assert await scene.bindings() == 0  # opening binds no model
    assert await answer(first) == 0
    before = await scene.cache.stats()

    for _ in range(2):
        with pytest.raises(ConfigMismatch, match=rf"the base model is bound to another model .*{named}"):
            await other.generate(PROMPT, 4)

    after = await scene.cache.stats()
    assert (after.tree_slots, after.acquires, after.bindings) == (before.tree_slots, before.acquires, 1)
    assert await answer(first) > 0
    assert await answer(other, "y") == 0  # another namespace works
    assert await answer(other, "y") > 0
    assert await answer(first, "x") == 0


async def test_a_worker_without_a_fingerprint_binds_nothing_and_is_not_checked(scene: Scene) -> None:
    first, other = await scene.worker(), await scene.worker(1, fingerprint=None)
    await other.generate(PROMPT, 4)
    assert await scene.bindings() == 0
    await first.generate(PROMPT, 4)

    assert (await other.generate(PROMPT, 4)).prefix_len > 0  # the check is off


async def test_a_worker_binds_the_fingerprint_that_it_is_given(scene: Scene) -> None:
    given = ModelFingerprint(fields={"model": "llama", "revision": 7}, weights="7")
    worker = await scene.worker(fingerprint=given)

    assert await answer(worker) == 0

    assert (await scene.cache.stats()).model_fingerprint == str(given)
    await scene.cache.reset()
    assert await answer(worker) == 0
    assert (await scene.cache.stats()).model_fingerprint == str(given)


@pytest.mark.parametrize("wrong", ["weights", "", 7, {"weights": "7"}, LLAMA, True], ids=lambda wrong: str(wrong)[:12])
def test_a_wrong_fingerprint_is_refused_before_a_model_is_made(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match='fingerprint must be "auto", a ModelFingerprint or None, not '):
        TransformersWorker(None, model={"model_type": "unheard of"}, use_cache=False, fingerprint=wrong)


async def test_a_worker_binds_its_models_fingerprint() -> None:
    expected = str(model_fingerprint(random_llama()))
    async with LocalPrefixCache(CONFIG.model_copy(update={"fingerprint": expected})) as cache:
        async with TransformersWorker(cache, model=LLAMA, device="cpu") as worker:
            assert await answer(worker) == 0
            assert (await cache.stats()).model_fingerprint == expected
        async with TransformersWorker(cache, model=LLAMA, seed=1, device="cpu") as other:
            await cache.reset()
            with pytest.raises(ConfigMismatch, match=rf"is configured for the base model '{expected}'"):
                await other.generate(PROMPT, 1)
            assert (await cache.stats()).bindings == 0


# ---------------------------------------------------------------- replaced weights


async def ended(scene: Scene, lora_id: str | None) -> None:
    await (scene.cache.reset() if lora_id is None else scene.cache.retire(lora_id=lora_id))


@pytest.mark.parametrize("lora_id", [None, "policy"])
@pytest.mark.parametrize("old_first", [True, False], ids=["old first", "new first"])
async def test_after_a_retirement_the_first_to_bind_wins_and_the_other_is_refused(
    scene: Scene, lora_id: str | None, old_first: bool
) -> None:
    old, new = await scene.worker(), await scene.worker(1)
    assert await answer(old, lora_id) == 0

    await ended(scene, lora_id)

    first, second = (old, new) if old_first else (new, old)
    assert [await answer(first, lora_id), await answer(first, lora_id) > 0] == [0, True]
    for _ in range(2):
        with pytest.raises(ConfigMismatch, match="the weights differ"):
            await second.generate(PROMPT, 1, lora_id=lora_id)
    assert await answer(first, lora_id) > 0
    await ended(scene, lora_id)
    assert [await answer(second, lora_id), await answer(second, lora_id) > 0] == [0, True]
    with pytest.raises(ConfigMismatch, match="the weights differ"):
        await first.generate(PROMPT, 1, lora_id=lora_id)


@pytest.mark.parametrize("how", ["load_state_dict", "data"])
@pytest.mark.parametrize("lora_id", [None, "policy"])
async def test_weights_pushed_in_place_are_those_that_are_bound_again(
    scene: Scene, lora_id: str | None, how: str
) -> None:
    workers, new = [await scene.worker(), await scene.worker()], random_llama(1)
    assert [await answer(workers[0], lora_id), await answer(workers[1], lora_id) > 0] == [0, True]

    for worker in workers:  # no request runs
        push(worker, new, how)
    await ended(scene, lora_id)

    assert [await answer(workers[0], lora_id), await answer(workers[1], lora_id) > 0] == [0, True]
    assert await scene.bindings() == 1
    late = await scene.worker(1)
    assert await answer(late, lora_id) > 0
    with pytest.raises(ConfigMismatch, match="the weights differ"):
        await (await scene.worker(0)).generate(PROMPT, 1, lora_id=lora_id)


def push(worker: TransformersWorker, model: torch.nn.Module, how: str) -> None:
    module = worker._model.module
    if how == "load_state_dict":
        module.load_state_dict(model.state_dict())
    else:
        for mine, its in zip(module.parameters(), model.parameters(), strict=True):
            mine.data.copy_(its.data)


async def test_a_worker_that_was_refused_joins_once_it_has_the_weights(scene: Scene) -> None:
    first, late = await scene.worker(1), await scene.worker(0)
    assert await answer(first) == 0
    with pytest.raises(ConfigMismatch, match="the weights differ"):
        await late.generate(PROMPT, 1)

    push(late, random_llama(1), "data")

    assert await answer(late) > 0


async def test_a_lora_id_that_is_new_is_bound_to_weights_that_were_loaded_since(scene: Scene) -> None:
    worker, other = await scene.worker(0), await scene.worker(1)
    await answer(worker, "x")

    push(worker, random_llama(1), "load_state_dict")
    await scene.cache.retire(lora_id="x")

    assert await answer(worker, "y") == 0
    assert await answer(other, "y") > 0


async def test_a_worker_that_bound_the_base_must_bind_it_again_to_serve_adapters(scene: Scene) -> None:
    worker, other = await scene.worker(0), await scene.worker(1)
    assert [await answer(worker), await answer(worker, "x")] == [0, 0]
    await scene.cache.reset()
    assert await answer(other) == 0

    with pytest.raises(ConfigMismatch, match="the base model is bound to another model"):
        await worker.generate(PROMPT, 1, lora_id="x")
    push(worker, random_llama(1), "data")

    assert [await answer(worker, "x"), await answer(worker) > 0] == [0, True]


async def test_requests_at_the_same_time_bind_again_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, computed = await scene.worker(), []
    original = worker_binding.model_fingerprint
    monkeypatch.setattr(worker_binding, "model_fingerprint", lambda m: computed.append(m) or original(m))
    await asyncio.gather(*(answer(worker, lora_id) for lora_id in (None, "x", "y", "x")))
    assert not computed  # it was computed when the worker opened

    for number in range(1, 4):
        await scene.cache.reset()
        await asyncio.gather(*(answer(worker, lora_id) for lora_id in (None, "x", "y", "x")))
        assert len(computed) == number
    assert await scene.bindings() == 3


async def test_a_refusal_that_comes_late_is_not_followed_by_another_fingerprint(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, computed, bound_again = await scene.worker(), [], asyncio.Event()
    original = worker_binding.model_fingerprint
    monkeypatch.setattr(worker_binding, "model_fingerprint", lambda m: computed.append(m) or original(m))
    await answer(worker)
    await scene.cache.reset()
    client = worker._client
    assert client is not None

    async def take() -> Lease:
        try:
            return await client.acquire(PROMPT)
        except ConfigMismatch:
            await bound_again.wait()  # the refusal is delayed on its way
            raise

    late = asyncio.ensure_future(worker._binding.lease(client, None, take))
    await asyncio.sleep(0)
    await answer(worker)
    bound_again.set()
    await (await late).release()

    assert len(computed) == 1


async def test_a_worker_with_a_lost_session_binds_again(scene: Scene) -> None:
    worker, other = await scene.worker(0), await scene.worker(1)
    assert [await answer(worker), await answer(worker, "x")] == [0, 0]
    assert worker._client is not None
    reaper = scene.cache._host.service.reaper
    reaper.owner_unavailable(worker._client.session.session_id, is_dead=True)

    assert await answer(worker) > 0

    reaper.owner_unavailable(worker._client.session.session_id, is_dead=True)
    await scene.cache.reset()
    assert await answer(other, "x") == 0
    with pytest.raises(ConfigMismatch, match="the weights differ"):
        await worker.generate(PROMPT, 1, lora_id="x")
    assert await answer(worker) == 0
