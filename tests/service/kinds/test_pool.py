"""Every worker reaches the pool's tensors, mapped where possible and copied elsewhere, with the same bits."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.caches.pool_layers import layer_shapes
from support.more import more
from support.processes.pool_workers import (
    K_DIM,
    NUM_HEADS,
    NUM_LAYERS,
    PAGE,
    PROMPT,
    V_DIM,
    Workers,
    attached,
    bits,
    config_of,
    random_kv,
    worker_class,
)

from raydix.actors import LocalPrefixCache, PrefixCacheClient, shutdown_cache, start_cache
from raydix.actors.client import attached_pool
from raydix.actors.client.local_transport import LocalTransport
from raydix.actors.transport.ray_transport import RayTransport
from raydix.schemas import CacheConfig, CacheUnavailable, PoolConfig

DTYPES = ["float32", "bfloat16", "float16"]


@pytest.fixture(scope="module")
def processes(ray_cluster: None) -> Iterator[Workers]:
    import ray

    make = ray.remote(worker_class()).options(num_cpus=0).remote
    workers = make(), make()
    yield workers
    for worker in workers:
        ray.kill(worker)


@pytest.fixture(params=["bfloat16", *more(*(name for name in DTYPES if name != "bfloat16"))])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def cache(dtype: str, running_cache: Callable[[CacheConfig], Any]) -> Any:
    return running_cache(config_of(dtype))


@pytest.fixture
async def workers(processes: Workers, cache: Any) -> AsyncIterator[Workers]:
    async with attached(processes, cache) as workers:
        yield workers


@pytest.mark.ray
@pytest.mark.parametrize("written", ["mapped", "copied"])
async def test_kv_written_by_one_worker_is_read_by_another_bit_for_bit(
    workers: Workers, dtype: str, written: str
) -> None:
    writer, reader = workers
    k, v = random_kv(len(PROMPT), dtype, seed=1)
    _, own = await writer.acquire.remote(PROMPT)
    await writer.write.remote(k, v, written == "mapped")
    assert await writer.publish.remote(PROMPT) == 8

    prefix_len, slots = await reader.acquire.remote(PROMPT)

    assert (prefix_len, slots[:8]) == (8, own[:8])
    assert set(slots[8:]).isdisjoint(own)
    assert await reader.read.remote(8, True) == bits(k[:, :8], v[:, :8])
    assert await reader.read.remote(8, False) == bits(k[:, :8], v[:, :8])


@pytest.mark.ray
async def test_workers_that_map_the_pool_map_the_caches_own_memory(workers: Workers, cache: Any) -> None:
    handle = await cache.pool_handle.remote()
    mappings = [await worker.mapping.remote(handle.epoch) for worker in workers]

    assert mappings[0] == mappings[1]
    inode, size = mappings[0]
    assert inode == os.stat(handle.path).st_ino  # the descriptor that the actor holds
    assert handle.num_bytes <= size < handle.num_bytes + 4096


@pytest.mark.ray
async def test_a_write_after_attaching_is_seen_by_all_mappings_of_the_pool(workers: Workers) -> None:
    writer, reader = workers
    _, slots = await writer.acquire.remote([7])

    await writer.poke.remote(slots[0], 5.0)
    assert await reader.peek.remote(slots[0]) == 5.0

    await reader.poke.remote(slots[0], 6.0)  # an error of a worker, but the memory is shared all the same
    assert await writer.peek.remote(slots[0]) == 6.0
    assert await writer.read.remote(1, True) == await writer.read.remote(1, False)  # the cache sees it, too


@pytest.mark.more
@pytest.mark.ray
async def test_a_killed_cache_leaves_no_file_behind_and_mapped_tensors_stay_readable(ray_cluster: None) -> None:
    cache = start_cache(config_of("float32"))
    client = PrefixCacheClient(cache)
    pool = await client.attach_pool(mapped=True)
    lease = await client.acquire([1])
    handle = await cache.pool_handle.remote()
    k = pool.k[0]
    k[lease.slots] = 3.0

    pid = int(handle.path.split("/")[2])
    files = shared_memory_files(pid)

    os.kill(pid, signal.SIGKILL)
    with pytest.raises(CacheUnavailable):
        await client.match([1])

    assert not any(map(os.path.exists, files))
    assert k[lease.slots].unique().tolist() == [3.0]  # through tensors that the caller keeps: the pool itself is closed
    with pytest.raises(FileNotFoundError):
        attached_pool.map_pool(handle)
    await lease.release()
    await client.close()


def shared_memory_files(pid: int) -> set[str]:
    """Return the files in /dev/shm that a process has open or mapped; Ray's own are deleted by then."""
    opened = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
    return {path for path in opened if path.startswith("/dev/shm/")} | set(
        re.findall(r"/dev/shm/[^\n]*", Path(f"/proc/{pid}/maps").read_text())
    )


# ---------------------------------------------------------------- a pool that cannot be mapped


@pytest.fixture
async def far_client(
    running_cache: Callable[[CacheConfig], Any], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[PrefixCacheClient]:
    """Return a client that takes the cache to be on another node."""
    pool_handle = RayTransport.pool_handle

    async def moved(transport: RayTransport) -> Any:
        return (await pool_handle(transport)).model_copy(update={"node_id": "elsewhere"})

    monkeypatch.setattr(RayTransport, "pool_handle", moved)
    async with PrefixCacheClient(running_cache(config_of("bfloat16"))) as client:
        yield client
        await client.reset()


@pytest.mark.ray
async def test_a_client_that_insists_on_mapping_a_remote_pool_gets_the_reason_why_it_cannot(
    far_client: PrefixCacheClient,
) -> None:
    with pytest.raises(CacheUnavailable, match="cannot be mapped from here: it lies on node elsewhere, this is node"):
        await far_client.attach_pool(mapped=True)


@pytest.mark.ray
async def test_a_client_that_does_not_insist_copies_and_logs_it(
    far_client: PrefixCacheClient, caplog: pytest.LogCaptureFixture
) -> None:
    k, v = random_kv(10, "bfloat16", seed=2)

    with caplog.at_level(logging.WARNING, "raydix.actors.client.attached_pool"):
        pool = await far_client.attach_pool()
    async with await far_client.acquire(PROMPT) as lease:
        await pool.write_kv(lease, lease.slots, k, v)
        copied = await pool.read_kv(lease, lease.slots)

    assert not pool.mapped
    (line,) = [record.message for record in caplog.records if record.name.startswith("raydix")]
    assert "it lies on node elsewhere" in line
    assert "KV is copied through the cache" in line
    assert bits(*copied) == bits(k, v)


@pytest.mark.ray
async def test_a_pool_of_another_life_of_the_cache_is_not_mapped(
    running_cache: Callable[[CacheConfig], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await running_cache(config_of("bfloat16")).pool_handle.remote()

    with pytest.raises(OSError, match="no longer the pool of epoch older"):
        attached_pool.map_pool(handle.model_copy(update={"epoch": "older"}))
    with pytest.raises(OSError):
        attached_pool.map_pool(handle.model_copy(update={"path": "/proc/1/fd/999"}))


# ---------------------------------------------------------------- in process


@pytest.fixture
async def local(dtype: str) -> AsyncIterator[LocalPrefixCache]:
    async with LocalPrefixCache(config_of(dtype)) as cache:
        yield cache


@pytest.mark.parametrize("mapped", [None, True])
async def test_in_process_the_pool_is_the_tensors_themselves(local: LocalPrefixCache, mapped: bool | None) -> None:
    pool = await local.attach_pool(mapped=mapped)

    assert pool.mapped
    assert pool.k[1].data_ptr() == local._host.exported.pool.k[1].data_ptr()
    assert tuple(pool.k[2].shape) == (64 + PAGE, NUM_HEADS, K_DIM)
    assert tuple(pool.v[0].shape) == (64 + PAGE, NUM_HEADS, V_DIM)


async def test_plain_calls_and_copies_see_the_same_bits(local: LocalPrefixCache, dtype: str) -> None:
    k, v = random_kv(10, dtype, seed=3)
    mapped, copying = await local.attach_pool(), await local.attach_pool(mapped=False)
    first, second = await local.acquire(PROMPT), await local.acquire([9] * 10)

    for layer in range(NUM_LAYERS):
        mapped.write(layer, first.slots, k[layer], v[layer])
    await copying.write_kv(second, second.slots, k, v)

    for lease in (first, second):
        layers = [mapped.gather(layer, lease.slots) for layer in range(NUM_LAYERS)]
        assert bits(*(row for kv in layers for row in kv)) == bits(
            *(row for kv in zip(k, v, strict=True) for row in kv)
        )
        assert bits(*await copying.read_kv(lease, lease.slots)) == bits(k, v)
        assert bits(*await mapped.read_kv(lease, lease.slots)) == bits(k, v)


@pytest.mark.parametrize("mapped", [True, False])
async def test_values_of_another_dtype_are_cast_to_that_of_the_pool(
    local: LocalPrefixCache, dtype: str, mapped: bool
) -> None:
    pool, lease = await local.attach_pool(mapped=mapped), await local.acquire(PROMPT)
    k, v = (values.double() for values in random_kv(10, dtype, seed=6))
    to = pool.layout.dtype

    if mapped:
        for layer in range(NUM_LAYERS):
            pool.write(layer, lease.slots, k[layer], v[layer])
    else:
        await pool.write_kv(lease, lease.slots, k, v)

    assert bits(*await pool.read_kv(lease, lease.slots)) == bits(k.to(to), v.to(to))


async def test_a_write_goes_to_its_slots_and_to_no_others(local: LocalPrefixCache, dtype: str) -> None:
    pool = await local.attach_pool()
    lease = await local.acquire(PROMPT)
    k, v = random_kv(3, dtype, seed=4)
    written = lease.slots[[9, 0, 5]]
    untouched = torch.ones(64 + PAGE, dtype=torch.bool)
    untouched[written] = False
    before = [bits(pool.k[layer][untouched], pool.v[layer][untouched]) for layer in range(NUM_LAYERS)]

    await pool.write_kv(lease, written, k, v)

    for layer in range(NUM_LAYERS):
        assert bits(pool.k[layer][written], pool.v[layer][written]) == bits(k[layer], v[layer])
        assert bits(pool.k[layer][untouched], pool.v[layer][untouched]) == before[layer]


async def test_slots_are_read_in_the_order_asked_for_as_often_as_asked_for(local: LocalPrefixCache, dtype: str) -> None:
    pool = await local.attach_pool(mapped=False)
    lease = await local.acquire(PROMPT)
    k, v = random_kv(10, dtype, seed=5)
    await pool.write_kv(lease, lease.slots, k, v)
    order = [7, 0, 0, 9]

    copied = await pool.read_kv(lease, lease.slots[order])

    assert bits(*copied) == bits(k[:, order], v[:, order])


async def test_no_slots_are_nothing_to_copy(local: LocalPrefixCache, dtype: str) -> None:
    pool = await local.attach_pool(mapped=False)
    lease = await local.acquire([1])

    await pool.write_kv(lease, lease.slots[:0], *random_kv(0, dtype, seed=6))
    k, v = await pool.read_kv(lease, lease.slots[:0])

    assert (tuple(k.shape), tuple(v.shape)) == ((NUM_LAYERS, 0, NUM_HEADS, K_DIM), (NUM_LAYERS, 0, NUM_HEADS, V_DIM))


async def test_a_large_copy_goes_in_pieces_and_comes_out_whole(
    local: LocalPrefixCache, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = NUM_LAYERS * NUM_HEADS * (K_DIM + V_DIM) * getattr(torch, dtype).itemsize
    monkeypatch.setattr(attached_pool, "_CHUNK_BYTES", 4 * row + row // 2)
    sizes: dict[str, list[int]] = {"read_kv": [], "write_kv": []}

    def counted(verb: str) -> Callable[[LocalTransport, Any], Any]:
        original = getattr(LocalTransport, verb)

        async def call(transport: LocalTransport, request: Any) -> Any:
            sizes[verb].append(len(request.slots))
            return await original(transport, request)

        return call

    for verb in sizes:
        monkeypatch.setattr(LocalTransport, verb, counted(verb))
    pool = await local.attach_pool(mapped=False)
    lease = await local.acquire(PROMPT)
    k, v = random_kv(10, dtype, seed=7)

    await pool.write_kv(lease, lease.slots, k, v)
    copied = await pool.read_kv(lease, lease.slots)

    assert sizes == {"read_kv": [4, 4, 2], "write_kv": [4, 4, 2]}
    assert bits(*copied) == bits(k, v)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("mapped", [None, False])
async def test_a_pool_without_v_is_written_and_read(page_size: int, mapped: bool | None) -> None:
    """Such as pools of engines that keep one latent row per token."""
    pool_config = PoolConfig.uniform(num_slots=64, num_layers=2, num_kv_heads=1, head_dim=6, v_head_dim=0, device="cpu")
    k, v = torch.rand(2, 10, 1, 6).bfloat16(), torch.empty(2, 10, 1, 0)
    async with LocalPrefixCache(CacheConfig(page_size=page_size, pool=pool_config)) as cache:
        pool, lease = await cache.attach_pool(mapped=mapped), await cache.acquire(PROMPT)

        await pool.write_kv(lease, lease.slots, k, v)

        found_k, found_v = await pool.read_kv(lease, lease.slots)
        assert torch.equal(found_k, k)
        assert found_v.shape == v.shape


async def test_an_index_only_cache_has_a_pool_of_no_layers() -> None:
    async with LocalPrefixCache(CacheConfig(pool=PoolConfig(num_slots=8))) as cache:
        pool = await cache.attach_pool()

        assert (pool.mapped, pool.k, pool.v) == (True, [], [])


@pytest.mark.parametrize(
    "pool",
    [
        {},  # an index alone
        {"layers": layer_shapes(("full", "full"))},  # layers without states
        {"layers": layer_shapes(("state",), state_shapes=((), (3,)))},  # a scalar is a state, too
    ],
)
@pytest.mark.parametrize("validate", [False, True])
async def test_states_are_counted_whatever_there_is_of_them(pool: dict[str, Any], validate: bool) -> None:
    config = CacheConfig(
        kind="mamba", validate=validate, pool=PoolConfig(num_slots=64, num_state_slots=4, device="cpu", **pool)
    )
    async with LocalPrefixCache(config) as cache:
        lease = await cache.acquire([1, 2, 3])
        await lease.insert([1, 2, 3], release=True, publish_state=True)

        again = await cache.acquire([1, 2, 3, 4])

        assert (again.prefix_len, again.state_slot is None) == (3, False)


@pytest.mark.more
@pytest.mark.ray
async def test_a_copy_of_many_megabytes_through_an_actor_is_whole(ray_cluster: None) -> None:
    config = CacheConfig(
        page_size=64,
        pool=PoolConfig.uniform(
            num_slots=2048, num_layers=2, num_kv_heads=4, head_dim=256, dtype="float32", device="cpu"
        ),
    )
    cache = start_cache(config)
    async with PrefixCacheClient(cache) as client:
        pool = await client.attach_pool(mapped=False)
        mapped = await client.attach_pool(mapped=True)
        lease = await client.acquire(list(range(1500)))
        k, v = torch.rand(2, 1500, 4, 256), torch.rand(2, 1500, 4, 256)  # 24 MB

        await pool.write_kv(lease, lease.slots, k, v)
        copied = await pool.read_kv(lease, lease.slots)

        assert torch.equal(copied[0], k)
        assert torch.equal(copied[1], v)
        assert torch.equal(mapped.k[1][lease.slots], k[1])
    shutdown_cache(cache)
