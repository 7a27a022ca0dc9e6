"""With prefix reuse on, a model's logits are the same as with it off: bit for bit where the arithmetic is the same.

One worker writes the first part of a prompt, another one continues from it. Its logits must have the same bits as those
of the model's own `DynamicCache` cut at the same place. From a prefill in one pass they may differ as far as sums in
another order do. The tests cover attention, sliding windows and recurrent states, in process and between processes on
Ray.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import ray
import torch
from support.models.tiny_llama import LLAMA
from support.models.tiny_models import FALCON_H1, MISTRAL, continuation, random_model, random_prompt
from transformers import PreTrainedConfig

from raydix.actors import LocalPrefixCache, PrefixCacheClient, shutdown_cache, start_cache
from raydix.actors.huggingface.worker import Generation, TransformersWorker, cache_config_for
from raydix.actors.sessions.admission import Admission
from raydix.cache_core import MambaPool
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.schemas import CacheConfig, EvictionConfig, InvalidRequest, LeaseResponse

PROMPT = random_prompt(24)
OTHER = [95 - PROMPT[-1]]  # differs from the prompt anywhere, so that a state is published at the fork
PAGE_SIZE = 4
POOLS: dict[str, dict[str, int]] = {"mistral": {"num_swa_slots": 512}, "falcon_h1": {"num_state_slots": 64}}
MODELS = {"llama": LLAMA, "mistral": MISTRAL, "falcon_h1": FALCON_H1}


def config_of(model: PreTrainedConfig, page_size: int, **options: Any) -> CacheConfig:
    return cache_config_for(
        deepcopy(model),
        1024,
        **POOLS.get(model.model_type, {}),
        device="cpu",
        page_size=page_size,
        eviction=EvictionConfig(high_watermark=1.0),  # evict only on demand
        **options,
    )


async def reuse_changes_no_bit(config: PreTrainedConfig, **options: Any) -> None:
    """Check the logits for a cut at every page boundary."""
    model = random_model(config)
    has_states = config is FALCON_H1
    last_cut = (len(PROMPT) - 1) // PAGE_SIZE * PAGE_SIZE if has_states else len(PROMPT)
    async with (
        LocalPrefixCache(config_of(config, PAGE_SIZE, **options)) as cache,
        TransformersWorker(cache, model=deepcopy(config), device="cpu") as writer,
        TransformersWorker(cache, model=deepcopy(config), device="cpu") as reader,
    ):
        alone = await reader.generate(PROMPT, 6, reuse=False, return_logits=True)
        in_one, generated = continuation(model, PROMPT, [], 6)
        assert alone.logits is not None and torch.equal(alone.logits, in_one)
        for cut in range(PAGE_SIZE, len(PROMPT), PAGE_SIZE):
            await writer.generate(PROMPT[:cut] + OTHER * has_states, 1, extra_key=f"{cut}")
            found = await reader.generate(PROMPT, 6, extra_key=f"{cut}", return_logits=True)

            expected, _ = continuation(model, PROMPT, [cut, last_cut], 6, cut)
            assert (found.prefix_len, list(found.token_ids)) == (cut, generated), "the continuation must be the same"
            assert found.logits is not None and torch.equal(found.logits, expected), (
                "the logits must have the same bits"
            )
            assert (found.logits - in_one[cut:]).abs().max() < 1e-4
        stats = await cache.stats()
        assert (stats.open_leases, stats.private_slots) == (0, 0)


@pytest.mark.parametrize("name", MODELS)
async def test_reused_kv_is_the_kv_that_would_have_been_computed(name: str) -> None:
    await reuse_changes_no_bit(MODELS[name], validate=True)


@pytest.mark.parametrize("name", MODELS)
async def test_a_prompt_without_hits_has_the_logits_of_one_pass(name: str) -> None:
    """Compare a run in parts, cut where a state is published, with one pass of the model."""
    in_one, generated = continuation(random_model(MODELS[name]), PROMPT, [], 6)
    async with (
        LocalPrefixCache(config_of(MODELS[name], PAGE_SIZE)) as cache,
        TransformersWorker(cache, model=deepcopy(MODELS[name]), device="cpu") as worker,
    ):
        found = await worker.generate(PROMPT, 6, return_logits=True)

    assert (found.prefix_len, list(found.token_ids)) == (0, generated)
    assert found.logits is not None and (found.logits - in_one).abs().max() < 1e-4


# ---------------------------------------------------------------- two workers on Ray


class Cluster:
    """A cache on Ray, and two workers there: one computes and publishes, the other reads."""

    def __init__(self) -> None:
        self.cache = start_cache(config_of(LLAMA, 16))
        make = ray.remote(TransformersWorker).options(num_cpus=1).remote
        self.writer, self.reader = (
            make(self.cache, model=deepcopy(LLAMA), mapped=True, num_threads=1) for _ in range(2)
        )
        ray.get([self.writer.open.remote(), self.reader.open.remote()])

    def stop(self) -> None:
        shutdown_cache(self.cache)
        ray.kill(self.writer)
        ray.kill(self.reader)


@pytest.fixture(scope="module")
def cluster(ray_cluster: None) -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.stop()


async def largest_differences(
    cluster: Cluster, read: Callable[..., Awaitable[Generation]], name: str
) -> tuple[float, float]:
    """Return the reader's largest difference over all cuts, from a `DynamicCache` cut there and from one prefill."""
    model, prompt = random_model(LLAMA), random_prompt(72)
    in_one, _ = continuation(model, prompt, [], num_new=4)
    differences = []
    for cut in range(16, len(prompt), 16):
        namespace = f"{name}-{cut}"
        written = await cluster.writer.generate.remote(prompt[:cut], 1, extra_key=namespace)
        found = await read(prompt, 4, extra_key=namespace, return_logits=True)

        expected, generated = continuation(model, prompt, [cut], num_new=4)
        assert (written.prefix_len, written.num_computed, found.prefix_len) == (0, cut, cut)
        assert found.logits is not None
        assert list(found.token_ids) == generated
        differences.append([(found.logits - logits).abs().max().item() for logits in (expected, in_one[cut:])])
    cut_there, at_once = zip(*differences, strict=True)
    print(f"{name}, {len(differences)} cuts: {max(cut_there)}, {max(at_once):.1e}")
    return max(cut_there), max(at_once)


@pytest.mark.ray
async def test_logits_over_a_prefix_that_another_worker_wrote_are_those_of_a_dynamic_cache(cluster: Cluster) -> None:
    cut_there, in_one = await largest_differences(cluster, cluster.reader.generate.remote, "mapped")

    assert cut_there == 0
    assert in_one < 1e-4


@pytest.mark.ray
async def test_a_worker_that_declines_to_map_reads_the_same_bits(cluster: Cluster) -> None:
    async with TransformersWorker(
        cluster.cache, model=deepcopy(LLAMA), device="cpu", mapped=False, num_threads=1
    ) as worker:
        cut_there, in_one = await largest_differences(cluster, worker.generate, "copied")

    assert cut_there == 0
    assert in_one < 1e-4


@pytest.mark.ray
async def test_errors_cross_ray_and_nothing_is_left_behind(cluster: Cluster) -> None:
    with pytest.raises(InvalidRequest, match="vocabulary"):
        await cluster.reader.generate.remote([1000], 1)
    async with PrefixCacheClient(cluster.cache) as client:
        stats = await client.stats()
        await client.check_invariants()

    assert (stats.open_leases, stats.private_slots) == (0, 0)


@pytest.mark.ray
async def test_a_request_cancelled_on_ray_leaves_no_lease(cluster: Cluster) -> None:
    async with PrefixCacheClient(cluster.cache) as client:
        request = cluster.reader.generate.remote(random_prompt(16, seed=9), 240)  # takes a second or so
        while not (await client.stats()).open_leases:
            pass

        ray.cancel(request)
        with pytest.raises(ray.exceptions.TaskCancelledError):
            await request
        while (await client.stats()).open_leases:  # Ray may answer before the request has ended
            pass

        assert (await client.stats()).private_slots == 0
        await client.check_invariants()


# ---------------------------------------------------------------- planted faults


async def test_a_page_of_another_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    granted = Admission.lease_response

    def misplaced(admission: Admission, lease: LeaseRecord) -> LeaseResponse:
        response = granted(admission, lease)
        if lease.prefix_len < 2 * PAGE_SIZE:
            return response
        return replace(response, page_starts=response.page_starts[4:8] + response.page_starts[4:])

    monkeypatch.setattr(Admission, "lease_response", misplaced)

    with pytest.raises(AssertionError, match=r"the continuation must be the same|the same bits"):
        await reuse_changes_no_bit(LLAMA)


async def test_a_state_of_another_prefix_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MambaPool, "copy_states", lambda states, src, dst: None)

    with pytest.raises(AssertionError, match=r"the continuation must be the same|the same bits"):
        await reuse_changes_no_bit(FALCON_H1)
