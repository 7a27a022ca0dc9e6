"""Kind "slots": a lease owns one row of the pool; a prefix is reused in place, or copied. In process and on Ray.

The cache has three rows of 8 slots, in pages of 2.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from support.caches.pool_layers import layer_shapes
from support.models.tiny_llama import LLAMA, continuation, random_llama, random_prompt
from support.more import more

from raydix.actors import Lease, LocalPrefixCache, PrefixCacheClient
from raydix.actors.huggingface.worker import TransformersWorker, pool_config_for
from raydix.schemas import CacheConfig, CacheStats, EvictionConfig, InvalidRequest, PoolConfig, PoolExhausted

NUM_ROWS, ROW, NUM_LAYERS, NUM_HEADS, K_DIM, V_DIM = 3, 8, 3, 2, 4, 3
DTYPES = ["float32", "bfloat16", "float8_e4m3fn"]


def config_of(dtype: str = "float32", device: str = "cpu", **options: Any) -> CacheConfig:
    options = {"eviction": EvictionConfig(high_watermark=1.0), **options}
    layers = layer_shapes(("full",) * NUM_LAYERS, NUM_HEADS, K_DIM, V_DIM)
    pool = PoolConfig(num_slots=NUM_ROWS * ROW, dtype=dtype, device=device, layers=layers)
    return CacheConfig(kind="slots", max_seq_len=ROW, page_size=2, pool=pool, validate=True, **options)


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def start(request: pytest.FixtureRequest) -> Callable[[CacheConfig], Any]:
    """Return a function that makes a cache of a configuration, or finds the one of that configuration on Ray."""
    return LocalPrefixCache if request.param == "local" else request.getfixturevalue("running_cache")


@asynccontextmanager
async def opened(cache: Any) -> AsyncIterator[PrefixCacheClient]:
    """Open a session; afterwards check that it left nothing behind."""
    async with PrefixCacheClient(cache) as client:
        yield client
    async with PrefixCacheClient(cache) as auditor:
        await auditor.check_invariants()
        assert (await auditor.stats()).private_slots == 0
        await auditor.reset()
        assert (await auditor.stats()).free_slots == NUM_ROWS * ROW
    if isinstance(cache, LocalPrefixCache):
        await cache.close()


@pytest.fixture
async def client(start: Callable[[CacheConfig], Any]) -> AsyncIterator[PrefixCacheClient]:
    async with opened(start(config_of())) as client:
        yield client


@pytest.fixture(params=["bfloat16", *more(*(name for name in DTYPES if name != "bfloat16"))])
async def typed_client(
    start: Callable[[CacheConfig], Any], request: pytest.FixtureRequest
) -> AsyncIterator[PrefixCacheClient]:
    async with opened(start(config_of(request.param))) as client:
        yield client


def random_kv(num_slots: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random bits, NaN and infinity included."""
    generator = np.random.default_rng(seed)

    def rows(dim: int) -> torch.Tensor:
        shape = (NUM_LAYERS, num_slots, NUM_HEADS, dim)
        data = generator.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
        return torch.from_numpy(data).view(dtype).view(shape)

    return rows(K_DIM), rows(V_DIM)


def bits(*tensors: torch.Tensor) -> list[bytes]:
    return [tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


async def publish(client: PrefixCacheClient, *tokens: int) -> int:
    """Publish these tokens in a released row; return the row."""
    async with await client.acquire(list(tokens)) as lease:
        await lease.insert(list(tokens))
        return row_of(lease)


def row_of(lease: Lease) -> int:
    """Return the row that begins with the lease's slots."""
    row, first = divmod(int(lease.slots[0]), ROW)
    assert first == 0
    assert lease.slots.tolist() == list(range(row * ROW, row * ROW + len(lease)))
    return row


async def rows(client: PrefixCacheClient) -> tuple[int, int, int]:
    """Return the numbers of free, private and cached rows."""
    return rows_of(await client.stats())


async def until(client: PrefixCacheClient, reached: Callable[[CacheStats], bool]) -> CacheStats:
    """Wait until the statistics match. Asks again after each answer, as there is no event to wait for."""
    async with asyncio.timeout(60):
        while not reached(stats := await client.stats()):  # noqa: ASYNC110 -- a cache has no event to wait for
            await asyncio.sleep(0.001)
    return stats


def rows_of(stats: CacheStats) -> tuple[int, int, int]:
    assert stats.free_slots + stats.private_slots + stats.tree_slots == stats.num_slots == NUM_ROWS * ROW
    assert (stats.evictable_slots, stats.protected_slots, stats.quarantined_slots) == (stats.tree_slots, 0, 0)
    return stats.free_slots // ROW, stats.private_slots // ROW, stats.tree_slots // ROW


# ---------------------------------------------------------------- the data


@pytest.mark.parametrize("mapped", [None, False], ids=["mapped", "copied"])
async def test_the_prefix_of_a_leased_row_is_copied_to_the_bit(
    typed_client: PrefixCacheClient, mapped: bool | None
) -> None:
    client = typed_client
    pool = await client.attach_pool(mapped)
    dtype = pool.layout.dtype
    first, second = random_kv(7, dtype, 0), random_kv(3, dtype, 1)
    untouched = bits(*(tensor[2] for tensor in pool.by_sequence())) if pool.mapped else None
    writer = await client.acquire(list(range(7)))
    await pool.write_kv(writer, writer.slots, *first)
    await writer.insert(list(range(7)))

    reader = await client.acquire([0, 1, 2, 3, 90, 91, 92])
    await pool.write_kv(reader, reader.slots[4:], *second)

    assert (row_of(writer), row_of(reader), reader.prefix_len) == (0, 1, 4)
    assert bits(*await pool.read_kv(writer, writer.slots)) == bits(*first)
    expected = [torch.cat((ours[:, :4], own), 1) for ours, own in zip(first, second, strict=True)]
    assert bits(*await pool.read_kv(reader, reader.slots)) == bits(*expected)
    if pool.mapped:
        layers = [pool.gather(layer, reader.slots) for layer in range(NUM_LAYERS)]
        assert bits(*map(torch.stack, zip(*layers, strict=True))) == bits(*expected)
        k_cache, v_cache = pool.by_sequence()
        assert bits(k_cache[1, :7].transpose(0, 1), v_cache[1, :7].transpose(0, 1)) == bits(*expected)
        assert bits(k_cache[2], v_cache[2]) == untouched
        k_cache.zero_()
        v_cache.zero_()  # for the next test of this actor
    else:
        await wipe(client)
    await asyncio.gather(writer.release(), reader.release())


async def wipe(client: PrefixCacheClient) -> None:
    pool = await client.attach_pool()
    for tensor in pool.by_sequence():
        tensor.zero_()


async def test_a_released_row_is_reused_in_place(client: PrefixCacheClient) -> None:
    pool = await client.attach_pool(mapped=False)
    kv = random_kv(6, torch.float32, 0)
    async with await client.acquire([1, 2, 3, 4, 5, 6]) as lease:
        await pool.write_kv(lease, lease.slots, *kv)
        await lease.insert([1, 2, 3, 4, 5, 6])
        row = row_of(lease)
    assert await rows(client) == (2, 0, 1)

    async with await client.acquire([1, 2, 3, 4, 8, 8]) as lease:
        assert (row_of(lease), lease.prefix_len, lease.published_len) == (row, 4, 4)
        assert await rows(client) == (2, 1, 0)
        assert bits(*await pool.read_kv(lease, lease.slots[:4])) == bits(*(each[:, :4] for each in kv))

    assert (await client.match([1, 2, 3, 4, 5, 6])).prefix_len == 4
    await wipe(client)


async def test_neither_published_slots_nor_slots_beyond_the_lease_can_be_written(
    client: PrefixCacheClient,
) -> None:
    pool = await client.attach_pool(mapped=False)
    async with await client.acquire([1, 2, 3], new_tokens=2) as lease, await client.acquire([9]) as other:
        await lease.insert([1, 2, 3])
        await pool.write_kv(lease, lease.slots[2:], *random_kv(3, torch.float32, 0))
        for slots in (lease.slots[1:3], lease.slots[-1:] + 1, other.slots):
            with pytest.raises(InvalidRequest, match="privately"):
                await pool.write_kv(lease, slots, *random_kv(len(slots), torch.float32, 0))
        for slots in (lease.slots[-1:] + 1, other.slots, torch.tensor([-1])):
            with pytest.raises(InvalidRequest, match="cover"):
                await pool.read_kv(lease, slots)
        await pool.read_kv(lease, lease.slots)
    await wipe(client)


async def test_only_this_kind_has_its_pool_by_sequence() -> None:
    async with LocalPrefixCache(CacheConfig(pool=PoolConfig(num_slots=8, device="cpu"))) as cache:
        pool = await cache.attach_pool()

        with pytest.raises(InvalidRequest, match="slots"):
            pool.by_sequence()
    await cache.close()


async def test_a_cache_without_tensors_keeps_the_same_books() -> None:
    config = config_of().model_copy(update={"pool": PoolConfig(num_slots=NUM_ROWS * ROW, device="cpu")})
    async with opened(LocalPrefixCache(config)) as client:
        async with await client.acquire([1, 2]) as writer:
            await writer.insert([1, 2])
            async with await client.acquire([1, 2, 3]) as reader:
                assert (row_of(reader), reader.prefix_len) == (1, 2)
            assert (await client.attach_pool()).by_sequence()[0].shape[:3] == (NUM_ROWS, ROW, 0)


# ---------------------------------------------------------------- accounting


async def test_a_lease_is_a_row_and_grows_within_it(client: PrefixCacheClient) -> None:
    async with await client.acquire([1, 2, 3], new_tokens=1) as lease:
        assert (row_of(lease), len(lease), lease.prefix_len) == (0, 4, 0)
        assert (await lease.extend(3)).tolist() == [4, 5, 6]
        assert row_of(lease) == 0
        done = await lease.insert([1, 2, 3, 4, 5, 6, 7])
        assert (done.prefix_len, done.num_inserted, done.num_duplicates) == (0, 6, 0)
        assert lease.published_len == 6
        assert await rows(client) == (2, 1, 0)
    assert await rows(client) == (2, 0, 1)
    assert (await client.match([1, 2, 3, 4, 5, 6, 7])).prefix_len == 6


async def test_a_lock_takes_a_row(client: PrefixCacheClient) -> None:
    row = await publish(client, 1, 2, 3, 4)

    async with await client.lock([1, 2, 3, 4, 5]) as hit, await client.lock([7]) as miss:
        assert (row_of(hit), hit.prefix_len, len(hit)) == (row, 4, 4)
        assert (miss.prefix_len, len(miss)) == (0, 0)
        assert await rows(client) == (1, 2, 0)
        assert (await miss.extend(1)).tolist() == [row_of(miss) * ROW]
        async with await client.acquire([8]):
            with pytest.raises(PoolExhausted):
                await client.lock([1, 2])


async def test_a_prompt_too_long_for_a_row_is_refused_immediately_however_full_the_cache(
    client: PrefixCacheClient,
) -> None:
    exhausted = (await client.stats()).exhausted  # by other tests of the same cache
    held = [await client.acquire([number]) for number in range(NUM_ROWS)]
    waiting = asyncio.ensure_future(client.acquire([9]))
    await until(client, lambda stats: stats.waiters == 1)

    for tokens, new_tokens in (([1] * (ROW + 1), 0), ([1], ROW), ([1] * (NUM_ROWS * ROW + 1), 0)):
        with pytest.raises(InvalidRequest, match="max_seq_len is 8"):
            await client.acquire(tokens, new_tokens=new_tokens)
    with pytest.raises(InvalidRequest, match="max_seq_len is 8"):
        await held[0].extend(ROW)

    stats = await client.stats()
    assert (rows_of(stats), stats.open_leases, stats.waiters) == ((0, 3, 0), 3, 1)
    assert stats.exhausted == exhausted
    assert len(held[0]) == 1
    await asyncio.gather(*(lease.release() for lease in held))
    await (await waiting).release()


async def test_a_request_that_finds_every_row_leased_waits_for_one(client: PrefixCacheClient) -> None:
    held = [await client.acquire([number, number]) for number in range(NUM_ROWS)]
    await held[1].insert([1, 1])
    with pytest.raises(PoolExhausted) as caught:
        await client.acquire([9], timeout_s=0)
    error = caught.value
    assert (error.needed, error.free, error.evictable, error.held_slots, error.open_leases) == (ROW, 0, 0, 3 * ROW, 3)
    assert error.can_ever_fit

    waiting = [asyncio.ensure_future(client.acquire(tokens)) for tokens in ([1, 1, 5], [9])]
    await until(client, lambda stats: stats.waiters == 2)
    await held[1].release()
    first = await waiting[0]

    assert (row_of(first), first.prefix_len) == (1, 2)
    assert not waiting[1].done()
    await held[0].release()
    assert row_of(await waiting[1]) == 0
    await asyncio.gather(*(lease.release() for lease in (held[2], first, waiting[1].result())))


async def test_a_full_cache_gives_up_the_row_used_longest_ago(client: PrefixCacheClient) -> None:
    for token in (1, 2, 3):
        await publish(client, token, token)
    await (await client.acquire([1, 1])).release()  # a use

    async with await client.acquire([4, 4]) as lease:
        assert row_of(lease) == 1

    assert [(await client.match([token, token])).prefix_len for token in (1, 2, 3)] == [2, 0, 2]
    assert (await client.evict(1)).num_evicted == ROW
    assert (await client.stats()).tokens_evicted >= 2 * ROW


async def test_a_reset_makes_everything_unmatchable_and_leaves_leases_their_rows(client: PrefixCacheClient) -> None:
    await publish(client, 1, 2)
    async with await client.acquire([3, 4], new_tokens=2) as lease:
        await lease.insert([3, 4])

        await client.reset()

        assert await rows(client) == (2, 1, 0)
        assert [(await client.match(tokens)).prefix_len for tokens in ([1, 2], [3, 4])] == [0, 0]
        done = await lease.insert([3, 4, 5, 6])
        assert (done.retired, done.num_inserted, lease.published_len) == (True, 0, 2)
        assert row_of(lease) == 1
    assert await rows(client) == (3, 0, 0)


async def test_namespaces_never_meet(client: PrefixCacheClient) -> None:
    async with await client.acquire([1, 2], lora_id="a") as lease:
        await lease.insert([1, 2])

    assert (await client.match([1, 2], extra_key="a")).prefix_len == 0
    assert (await client.match([1, 2])).prefix_len == 0
    assert (await client.match([1, 2], lora_id="a")).prefix_len == 2


async def test_closing_a_client_frees_its_rows_and_keeps_its_published_prefixes(client: PrefixCacheClient) -> None:
    cache = client._cache
    async with PrefixCacheClient(cache) as other:
        lease = await other.acquire([1, 2])
        await lease.insert([1, 2])
        await other.acquire([3])
        assert await rows(client) == (1, 2, 0)

    assert await rows(client) == (2, 0, 1)


async def test_above_the_high_watermark_the_task_empties_rows(start: Callable[[CacheConfig], Any]) -> None:
    eviction = EvictionConfig(high_watermark=0.9, low_watermark=0.4)
    async with opened(start(config_of(eviction=eviction))) as client:
        rounds = (await client.stats()).eviction_task.rounds
        for token in (1, 2, 3):
            await publish(client, token, token)

        stats = await until(client, lambda stats: stats.eviction_task.rounds > rounds)

        assert rows_of(stats) == (2, 0, 1)
        assert stats.eviction_task.failures == 0
        assert [(await client.match([token, token])).prefix_len for token in (1, 2, 3)] == [0, 0, 2]


# ---------------------------------------------------------------- a model on it


@pytest.mark.parametrize("mapped", [None, False], ids=["mapped", "copied"])
async def test_a_model_computes_the_same_from_a_reused_and_from_a_copied_row(mapped: bool | None) -> None:
    pool = pool_config_for(LLAMA, 4 * 64, device="cpu")
    cache = LocalPrefixCache(CacheConfig(kind="slots", max_seq_len=64, page_size=16, pool=pool, validate=True))
    model, prompt = random_llama(), random_prompt(40)
    async with TransformersWorker(cache, model=LLAMA, device="cpu", mapped=mapped) as worker:
        await worker.generate(prompt[:32], 1)
        expected, generated = continuation(model, prompt, 32, num_new=5)

        in_place = await worker.generate(prompt, 5, return_logits=True)
        async with await cache.acquire(prompt[:32]):  # now the row is leased
            copied = await worker.generate(prompt, 5, return_logits=True)

    for generation in (in_place, copied):
        assert generation.prefix_len == 32
        assert list(generation.token_ids) == generated
        assert generation.logits is not None
        assert torch.equal(generation.logits, expected)
    await cache.close()
