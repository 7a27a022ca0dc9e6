"""An engine's KV caches on a GPU, and a pool in host memory: copies in vLLM's layouts, streams, engines that share."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.engines.block_layouts import BLOCK, DTYPES, LAYOUTS, NUM_BLOCKS, Make, check_random_copies, make_pool
from support.engines.toy_caches import ToyCaches
from support.engines.toy_engine import prompts
from support.waiting import wait_until

from raydix.actors import LocalPrefixCache
from raydix.actors.engines.block_copies import BlockCopies
from raydix.schemas import CacheConfig, CacheUnavailable, PoolConfig

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("page_size", [BLOCK, BLOCK // 2, 1])
@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_copies_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, make: Make, page_size: int
) -> None:
    check_random_copies(monkeypatch, make, dtype, page_size, torch.device("cuda"))


@pytest.mark.parametrize("make", LAYOUTS)
def test_blocks_are_copied_to_a_pool_on_the_card_and_back(make: Make) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        layers = make(torch.bfloat16)
    copies = BlockCopies(layers, BLOCK)
    target = copies.attach(make_pool(copies, BLOCK // 2).cuda(), BLOCK // 2)
    assert target.copies.staging is None
    before = [layer.clone() for layer in layers]
    torch.cuda.synchronize()  # copies run on a stream of their own
    for blocks in (np.arange(NUM_BLOCKS), np.random.default_rng(0).permutation(NUM_BLOCKS)):
        pages = np.arange(2 * NUM_BLOCKS)[::-1].copy()
        target.save(blocks, pages)
        target.load(pages, blocks[::-1].copy())
        moved = torch.from_numpy(blocks).cuda()
        for layer, was in zip(layers, before, strict=True):
            assert torch.equal(layer[moved.flip(0)].view(torch.int16), was[moved].view(torch.int16))
        target.load(pages, blocks)


async def test_mapped_host_memory_is_registered_until_the_pool_is_dropped() -> None:
    config = CacheConfig(page_size=4, pool=PoolConfig(num_slots=4096, format="opaque", slot_bytes=64, device="cpu"))
    async with LocalPrefixCache(config) as cache:
        pool = await cache.attach_pool(pin=True)
        pages = pool.pages
        assert pool.pinned and pages.is_pinned()

        pool.drop(CacheUnavailable("dropped"))

        wait_until(lambda: not pages.is_pinned())
        again = await cache.attach_pool()
        wait_until(lambda: again.pinned)


_LONG = 400_000_000  # cycles of a GPU: a fifth of a second


def values(tensors: list[torch.Tensor]) -> set[float]:
    return {value for tensor in tensors for value in tensor.unique().tolist()}


def test_a_save_waits_for_the_forward_pass_before_it() -> None:
    layers = [torch.zeros(NUM_BLOCKS, 2, BLOCK, 64, device="cuda") for _ in range(4)]
    copies = BlockCopies(layers, BLOCK)
    pool = make_pool(copies, BLOCK)
    target = copies.attach(pool, BLOCK)
    blocks = np.arange(NUM_BLOCKS)

    def saved(*, waits: bool) -> set[float]:
        for layer in layers:
            layer.zero_()
        torch.cuda.synchronize()
        torch.cuda._sleep(_LONG)
        for layer in layers:
            layer.fill_(7)
        event = torch.cuda.Event()
        event.record()
        target.save(blocks, blocks, after=event if waits else None)
        return {
            value
            for each in target.copies.segments
            for value in each[:NUM_BLOCKS].view(torch.float32).unique().tolist()
        }

    assert saved(waits=True) == {7.0}
    assert saved(waits=False) == {0.0}, "the test would not have seen a save that does not wait"


def test_a_load_waits_for_the_forward_pass_before_it_and_one_behind_it_sees_the_load() -> None:
    layers = [torch.full((NUM_BLOCKS, 2, BLOCK, 64), 3.0, device="cuda") for _ in range(4)]
    copies = BlockCopies(layers, BLOCK)
    pool = make_pool(copies, BLOCK)
    target = copies.attach(pool, BLOCK)
    for each in target.copies.segments:
        each.view(torch.float32).fill_(5)
    blocks = np.arange(NUM_BLOCKS)

    def read_before(*, waits: bool) -> tuple[set[float], set[float]]:
        for layer in layers:
            layer.fill_(3)
        torch.cuda.synchronize()
        torch.cuda._sleep(_LONG)
        before = [layer.clone() for layer in layers]
        event = torch.cuda.Event()
        event.record()
        target.load(blocks, blocks, after=event if waits else None)
        after = [layer.clone() for layer in layers]
        return values(before), values(after)

    assert read_before(waits=True) == ({3.0}, {5.0})
    assert read_before(waits=False) == ({5.0}, {5.0}), "the test would not have seen a load that does not wait"


@pytest.fixture
def caches() -> Iterator[ToyCaches]:
    made = ToyCaches(page_size=4)
    yield made
    made.close()


def test_engines_share_what_they_compute(caches: ToyCaches) -> None:
    engines = [caches.make_engine(device="cuda", num_blocks=48, chunk=40, seed=0) for _ in range(2)]
    rng = random.Random(4)
    heads = prompts(3, 100)
    for _ in range(40):
        tokens = rng.choice(heads)[: rng.randrange(30, 101)] + prompts(1, 40, seed=rng.randrange(6))[0]
        rng.choice(engines).add(tokens, rng.randrange(1, 20))
        for engine in engines:
            for _ in range(rng.randrange(8)):
                engine.step()
    for engine in engines:
        engine.run_all()

    repeated = [engine.run(heads[0] + [1] * 20) for engine in engines]

    assert max(request.num_hit for request in repeated) > 0
    assert [engine.num_wrong for engine in engines] == [0, 0]
    assert engines[0].kv[0][0].is_cuda
    wait_until(lambda: caches.stats().open_leases == 0)
    caches.loop.run(caches.caches[0].check_invariants())
