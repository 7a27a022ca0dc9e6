"""`stats().owners` and `PoolExhausted` name the owners of the leases that hold the pool."""

from __future__ import annotations

import os
from typing import Any

import pytest
from support.caches.cache_under_test import CacheUnderTest, small_config

from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.actors.sessions.lease_owners import LeaseOwners
from raydix.schemas import CacheConfig, InvalidRequest, PoolConfig, PoolExhausted


def named_client(cache: CacheUnderTest, owner: str) -> PrefixCacheClient:
    client = PrefixCacheClient(cache.cache, owner=owner)
    cache._clients.append(client)
    return client


async def test_owners_are_told_with_their_leases_the_largest_first(cache1: CacheUnderTest) -> None:
    trainer, again = named_client(cache1, "trainer"), named_client(cache1, "trainer")
    server = named_client(cache1, "server")
    await trainer.acquire([1])
    await again.acquire([2])
    await server.acquire([3, 3, 3])

    owners = (await cache1.client.stats()).owners

    assert [(each.owner, each.leases, each.slots) for each in owners] == [("server", 1, 3), ("trainer", 2, 2)]
    assert all(each.oldest_s >= 0 for each in owners)


async def test_what_was_told_before_is_told_anew_once_a_lease_has_changed(cache1: CacheUnderTest) -> None:
    async def told() -> list[tuple[str, int, int]]:
        return [(each.owner, each.leases, each.slots) for each in (await cache1.client.stats()).owners]

    trainer, server = named_client(cache1, "trainer"), named_client(cache1, "server")
    first, second = await trainer.acquire([1]), await server.acquire([3, 3])
    assert await told() == [("server", 1, 2), ("trainer", 1, 1)]

    await first.extend(3)
    assert await told() == [("trainer", 1, 4), ("server", 1, 2)]

    await server.adopt(await first.grant())
    assert await told() == [("server", 2, 6)]

    await second.release()
    assert await told() == [("server", 1, 4)]


async def test_slots_that_leases_share_are_counted_once_for_the_oldest_lease(cache1: CacheUnderTest) -> None:
    await cache1.publish(1, 2)
    for name in ("first", "second", "second"):
        await named_client(cache1, name).lock([1, 2])
    await named_client(cache1, "third").acquire([1, 2, 3], new_tokens=1)

    stats = await cache1.client.stats()

    assert [(each.owner, each.leases, each.slots) for each in stats.owners] == [
        ("first", 1, 2),
        ("third", 1, 2),
        ("second", 2, 0),
    ]
    assert sum(each.slots for each in stats.owners) == stats.private_slots + stats.protected_slots


@pytest.mark.parametrize("kind", ["radix", "trie", "chunk", "slots"])
async def test_the_slots_of_all_owners_are_those_that_leases_hold(kind: str) -> None:
    config = small_config().model_copy(update={"kind": kind, "max_seq_len": 4 if kind == "slots" else None})
    async with LocalPrefixCache(config) as cache:
        for number in range(3):
            lease = await cache.acquire([1, 2])
            await lease.insert([1, 2], release=not number)

        stats = await cache.stats()

    assert sum(each.slots for each in stats.owners) == stats.private_slots + stats.protected_slots > 0


async def test_who_finds_no_room_is_told_who_has_it(cache1: CacheUnderTest) -> None:
    for number in range(4):
        await named_client(cache1, f"worker-{number}").acquire([number] * (number + 1 if number < 3 else 1))
    await cache1.client.acquire([9])

    for timeout_s in (0, 0.01):  # without and with a wait in the queue
        with pytest.raises(
            PoolExhausted, match="held by 5 leases, shared prefixes counted once: worker-2 3 slots by 1 lease, up to"
        ) as caught:
            await cache1.client.acquire([5], timeout_s=timeout_s)

        assert [(each.owner, each.slots) for each in caught.value.owners[:2]] == [("worker-2", 3), ("worker-1", 2)]
        assert len(caught.value.owners) == 3  # only the largest owners


async def test_an_owner_without_a_name_is_its_process(cache1: CacheUnderTest) -> None:
    await cache1.another_client().acquire([1])

    (owner,) = (await cache1.client.stats()).owners

    assert owner.owner.endswith(f":{os.getpid()}")


async def test_leases_are_their_owners_that_hold_them_now(cache1: CacheUnderTest) -> None:
    scheduler, worker = named_client(cache1, "scheduler"), named_client(cache1, "worker")
    lease = await scheduler.acquire([1, 2])
    adopted = await worker.adopt(await lease.grant())
    assert [each.owner for each in (await cache1.client.stats()).owners] == ["worker"]

    await adopted.release()

    assert (await cache1.client.stats()).owners == ()


async def test_refusals_while_many_leases_come_and_go_seldom_count_them(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = 0

    def count(owners: LeaseOwners, tenant: str | None) -> Any:
        nonlocal counts
        counts += 1
        return uncounted(owners, tenant)

    uncounted = LeaseOwners._count
    monkeypatch.setattr(LeaseOwners, "_count", count)
    pool = PoolConfig(num_slots=2048)
    async with LocalPrefixCache(CacheConfig(pool=pool)) as cache:
        leases = [await cache.acquire([number]) for number in range(2048)]
        for lease in leases[:20]:
            await lease.release()
            with pytest.raises(PoolExhausted, match=r"held by 2,0\d\d leases, .* once: local 2,0"):
                await cache.acquire([1, 2] * 20, timeout_s=0)

    assert counts <= 10


async def test_the_age_is_that_of_the_oldest_lease() -> None:
    async with LocalPrefixCache(small_config()) as cache:
        for number in range(2):
            await cache.acquire([number])
        first, second = cache._host.service.core.leases
        first.since -= 100
        second.since -= 5000

        (owner,) = (await cache.stats()).owners

        assert 5000 <= owner.oldest_s < 5100


async def test_the_oldest_lease_is_the_first_that_has_not_ended() -> None:
    async with LocalPrefixCache(small_config()) as cache:
        assert (await cache.stats()).oldest_lease_s == 0
        leases = [await cache.acquire([number]) for number in range(3)]
        for record, age_s in zip(cache._host.service.core.leases, (5000, 300, 20), strict=True):
            record.since -= age_s

        assert 5000 <= (await cache.stats()).oldest_lease_s < 5100
        await leases[0].release()
        assert 300 <= (await cache.stats()).oldest_lease_s < 400
        for lease in leases[1:]:
            await lease.release()
        assert (await cache.stats()).oldest_lease_s == 0


@pytest.mark.parametrize("owner", ["job-\udc80", "x" * 257])
async def test_a_name_that_cannot_be_shown_is_refused(owner: str) -> None:
    async with LocalPrefixCache(small_config()) as cache:
        with pytest.raises(InvalidRequest, match="owner"):
            await PrefixCacheClient(cache, owner=owner).open()


@pytest.mark.parametrize("name", ["host-\udc80", "x" * 255])
async def test_the_name_by_default_can_be_shown_whatever_the_host_is_called(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: name)
    async with LocalPrefixCache(small_config()) as cache, PrefixCacheClient(cache) as client, await client.acquire([1]):
        assert (await client.stats()).model_dump_json()
