"""A restarted cache is empty; its clients detect the restart and go on with it.

`tests/promises/test_4_the_past_has_no_effect.py` tests that earlier leases and messages have no effect.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from html import escape
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import ray
import torch
from support.caches.cache_under_test import small_config
from support.processes.command_line import run, run_json

from raydix.actors import AttachedPool, Lease, LocalPrefixCache, PrefixCacheClient, shutdown_cache, start_cache
from raydix.schemas import CacheUnavailable, ConfigMismatch, LeaseConfig, ModelFingerprint, StaleEpoch

pytestmark = pytest.mark.ray

COMMANDS = {"list": (), "stats": ("kv-0",)}
LONG = small_config().model_copy(update={"leases": LeaseConfig(session_ttl_s=300)})


@pytest.fixture
def cache(ray_cluster: None) -> Any:
    cache = start_cache(LONG)
    yield cache
    ray.kill(cache)


async def restart(cache: Any) -> None:
    """Kill the cache's process. Ray starts it again."""
    ray.kill(cache, no_restart=False)


async def when_available(verb: Callable[[], Awaitable[Any]]) -> Any:
    """Retry a verb until the cache has restarted, and return its result."""
    async with asyncio.timeout(300):
        while True:
            try:
                return await verb()
            except CacheUnavailable:
                await asyncio.sleep(0.02)


async def when(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not true():  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0.01)


@asynccontextmanager
async def held(cache: Any) -> AsyncIterator[tuple[PrefixCacheClient, Lease, AttachedPool]]:
    """Yield a client, its lease with one published token, and its mapped pool."""
    async with PrefixCacheClient(cache) as client:
        lease = await client.acquire([1, 2, 3])
        await lease.insert([1])
        yield client, lease, await client.attach_pool(mapped=True)


@pytest.mark.more
async def test_after_its_process_was_killed_clients_go_on_with_an_empty_cache_and_a_new_pool(cache: Any) -> None:
    async with held(cache) as (client, lease, pool):
        path = (await cache.pool_handle.remote()).path

        os.kill(int(path.split("/")[2]), signal.SIGKILL)  # like the kernel's out-of-memory killer

        await when_available(lambda: fresh(client, lease.epoch))
        with pytest.raises(StaleEpoch) as caught:
            await lease.insert([1, 2])
        assert (caught.value.request_epoch, caught.value.cache_epoch) == (lease.epoch, (await client.stats()).epoch)
        assert (await client.match([1, 2, 3])).prefix_len == 0
        assert pool.lost and not pool.mapped
        again, new = await client.acquire([1, 2, 3]), await client.attach_pool(mapped=True)
        new.write(0, again.slots, torch.ones(3, 1, 2), torch.ones(3, 1, 1))
        k, _ = await new.read_kv(again, again.slots)
        assert k[0].tolist() == [[[1.0, 1.0]]] * 3
        assert new.epoch == again.epoch != pool.epoch
        with pytest.raises(StaleEpoch):
            pool.gather(0, again.slots)
        assert (await again.insert([1, 2, 3])).num_inserted == 3
        stats = await client.stats()
        assert (stats.open_sessions, stats.open_leases, stats.epoch != lease.epoch) == (1, 1, True)
        await client.check_invariants()


@pytest.mark.long
async def test_a_client_that_bound_a_model_before_a_restart_must_bind_it_again(cache: Any) -> None:
    old, new = (ModelFingerprint(fields={"model_type": "llama"}, weights=each) for each in ("old", "new"))
    async with PrefixCacheClient(cache) as worker, PrefixCacheClient(cache) as other:
        await worker.bind_model(old, lora_id="x")
        before = (await worker.stats()).epoch
        await restart(cache)
        await when_available(lambda: fresh(other, before))

        await other.bind_model(new, lora_id="x")
        async with other.acquire([1, 2, 3], lora_id="x") as lease:
            await lease.insert([1, 2, 3])

        with pytest.raises(ConfigMismatch, match="Bind again"):  # its first call since then opens another session
            await when_available(lambda: worker.acquire([1, 2, 3], lora_id="x"))
        with pytest.raises(ConfigMismatch, match="the weights differ"):
            await worker.bind_model(old, lora_id="x")
        await worker.bind_model(new, lora_id="x")
        async with worker.acquire([1, 2, 3], lora_id="x") as lease:
            assert lease.prefix_len == 3


@pytest.mark.long
async def test_what_ray_restarted_is_shown_as_such_with_the_cause(ray_cluster: None, tmp_path: Path) -> None:
    where = ["--namespace", f"restart-{uuid4().hex[:8]}"]
    cache = start_cache(LONG, name="kv-0", namespace=where[1])
    async with PrefixCacheClient(cache) as client:
        first = await client.stats()
        assert (first.restarts, first.last_restart_cause) == (0, "")
        path = (await cache.pool_handle.remote()).path

        os.kill(int(path.split("/")[2]), signal.SIGKILL)

        await when_available(lambda: fresh(client, first.epoch))
        second = await client.stats()
        assert (second.restarts, second.last_restart_cause.partition(":")[0]) == (1, "killed or crashed")

        await restart(cache)

        await when_available(lambda: fresh(client, second.epoch))
        third = await client.stats()
        assert third.restarts == 2
        assert third.last_restart_cause.startswith("ended by Ray: Worker exits because the actor is killed.")
        assert 0 < third.uptime_s < (await client.stats()).uptime_s

    out = tmp_path / "kv-0.html"
    (row,) = await asyncio.to_thread(run_json, "list", *where)
    shown = {name: (await asyncio.to_thread(run, name, *more, *where)).stdout for name, more in COMMANDS.items()}
    await asyncio.to_thread(run, "report", "kv-0", "-o", out, *where)
    assert (row["restarts"], row["last_restart_cause"]) == (2, third.last_restart_cause)
    assert row["uptime_s"] > third.uptime_s
    assert row["restart_causes"] == {"killed or crashed": 1, "ended by Ray": 1}
    (finding,) = row["findings"]
    assert finding == "Ray restarted the cache, empty in memory: killed or crashed, 1 time; ended by Ray, 1 time"
    assert finding in " ".join(shown["list"].split())
    assert f"warning: {finding}" in " ".join(shown["stats"].split())
    assert f"restarts: 2, the last one: {third.last_restart_cause}" in " ".join(shown["stats"].split())
    assert f"The last restart: {escape(third.last_restart_cause)}" in out.read_text(encoding="utf-8")
    await asyncio.to_thread(shutdown_cache, cache)


async def test_a_cache_in_this_process_was_never_restarted() -> None:
    async with LocalPrefixCache(LONG) as cache:
        stats = await cache.stats()

        assert (stats.restarts, stats.last_restart_cause) == (0, "")
        assert 0 <= stats.uptime_s < (await cache.stats()).uptime_s


async def fresh(client: PrefixCacheClient, old_epoch: str) -> None:
    """Raise CacheUnavailable while the cache still has the old epoch: `ray.kill` returns before the process ends."""
    if (await client.stats()).epoch == old_epoch:
        raise CacheUnavailable("it still runs")


USES: dict[str, Callable[[Lease], Awaitable[Any]]] = {
    "insert": lambda lease: lease.insert([1, 2]),
    "extend": lambda lease: lease.extend(1),
    "grant": lambda lease: lease.grant(),
}


@pytest.mark.long
async def test_using_a_lease_is_enough_to_notice(cache: Any) -> None:
    async with held(cache) as first, held(cache) as second, held(cache) as third, PrefixCacheClient(cache) as other:
        await other.open()
        await restart(cache)
        await when_available(lambda: fresh(other, first[1].epoch))

        for (client, lease, _), use in zip((first, second, third), USES.values(), strict=True):
            with pytest.raises(StaleEpoch):
                await use(lease)
            assert (await client.match([1])).prefix_len == 0


@pytest.mark.long
async def test_a_client_that_asks_nothing_notices_too_and_lets_go_of_the_pool(cache: Any) -> None:
    async with held(cache) as (client, lease, pool):
        epoch = lease.epoch
        assert mapped(epoch)

        await restart(cache)

        await when(lambda: pool.lost)
        assert not mapped(epoch)  # the cache's process, which has also mapped it, is gone
        with pytest.raises((StaleEpoch, CacheUnavailable)):
            pool.write(0, lease.slots, torch.zeros(3, 1, 2), torch.zeros(3, 1, 1))
        await when(lambda: not client.session.ready)


def mapped(epoch: str) -> bool:
    """Return whether this process maps the pool of an epoch."""
    with open("/proc/self/maps") as maps:
        return any(f"raydix-{epoch}" in line for line in maps)


@pytest.mark.more
async def test_who_waits_for_room_while_the_cache_dies_is_told_so_and_no_lease_is_left(cache: Any) -> None:
    async with held(cache) as (client, lease, _):
        waiting = asyncio.create_task(client.acquire([9] * 6))
        while not (await client.stats()).waiters:  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0.001)

        await restart(cache)

        with pytest.raises((CacheUnavailable, StaleEpoch)):
            await waiting
        await when_available(lambda: fresh(client, lease.epoch))
        stats = await client.stats()
        assert (stats.open_leases, stats.waiters) == (0, 0)


@pytest.mark.more
async def test_a_cache_may_be_started_so_that_it_does_not_restart(ray_cluster: None) -> None:
    cache = start_cache(LONG, max_restarts=0)
    async with PrefixCacheClient(cache) as client:
        pool = await client.attach_pool(mapped=True)
        ray.kill(cache, no_restart=False)

        async with asyncio.timeout(300):
            with pytest.raises(CacheUnavailable, match="dead"):
                while True:
                    await client.match([1])
        await when(lambda: pool.lost)  # the client then drops its mapping
        assert not mapped(pool.epoch)
    with pytest.raises(CacheUnavailable):
        await PrefixCacheClient(cache).match([1])


@pytest.mark.long
async def test_a_restart_is_no_end_to_a_client_that_was_made_of_the_name(ray_cluster: None) -> None:
    """The client must keep the actor that it found first, and not look up the name again."""
    name = f"kv-{uuid4().hex[:8]}"
    cache = start_cache(LONG, name=name)
    async with PrefixCacheClient(name) as client:
        lease = await client.acquire([1])

        await restart(cache)

        await when_available(lambda: fresh(client, lease.epoch))
        with pytest.raises(StaleEpoch) as caught:
            await lease.insert([1])
        assert caught.value.cache_epoch == (await client.stats()).epoch
    ray.kill(cache)
