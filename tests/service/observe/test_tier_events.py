"""Events of a cache with a host tier or a disk: each tier has a stream of its own, in process or on Ray.

Tokens are named by the page they fill; the pool has eight pages, the host tier 32, and the disk 64.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from support.caches.cache_under_test import Access, CacheUnderTest
from support.reference.event_index import ReplayedIndex
from support.tiers.settled_tiers import NO_SPARE, quick_disk, service_of, tensors, tiers_settled, whole_host

from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.actors.service import sliced_snapshot, tier_feeds
from raydix.schemas import (
    CacheConfig,
    CacheUnavailable,
    CloseSession,
    EventSnapshotRequest,
    EvictionConfig,
    HostConfig,
    InvalidRequest,
    KVEventBatch,
    NextEvents,
    OpenSession,
    WaitingResponse,
)

PAGE = 16


def tiered(**fields: Any) -> CacheConfig:
    """Return the configuration of a cache with a host tier."""
    given: dict[str, Any] = {"page_size": PAGE, "pool": tensors(8 * PAGE), "events": "full"}
    given |= {"host": whole_host(32 * PAGE), "eviction": NO_SPARE}
    return CacheConfig(**given | fields)


@pytest.fixture
async def cache(request: pytest.FixtureRequest, access: Access) -> AsyncIterator[CacheUnderTest]:
    """An empty cache with a host tier."""
    running_cache = request.getfixturevalue("running_cache") if access == "ray" else None
    under_test = CacheUnderTest.reached(access, tiered(), running_cache)
    yield under_test
    await under_test.close()


async def evict(client: PrefixCacheClient, num_pages: int, tier: str) -> None:
    await client.evict(num_pages * PAGE, tier)


async def until_on_host(client: PrefixCacheClient, *pages: int) -> None:
    """Wait until the host tier has a prompt of whole pages."""
    ids = [page for page in pages for _ in range(PAGE)]
    async with asyncio.timeout(60):
        while (await client.match(ids)).host_len < len(ids):  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0.002)


async def the_next(client: PrefixCacheClient, after_seq: int | None, tier: str) -> KVEventBatch:
    """Return a reader's first batch."""
    async with asyncio.timeout(60), aclosing(client.events(after_seq, tier=tier)) as events:
        batch = await anext(events)
        assert isinstance(batch, KVEventBatch)
        return batch


async def read_up_to(client: PrefixCacheClient, index: ReplayedIndex, tier: str, seq: int) -> set[str]:
    """Replay a tier's events into an index up to a number at least; return the media that they name."""
    media: set[str] = set()
    async with asyncio.timeout(60), aclosing(client.events(index.seq, tier=tier)) as events:
        while index.seq < seq:
            batch: Any = await anext(events)
            index.apply(batch)
            media |= {event.medium for event in batch.events if hasattr(event, "medium")}
    return media


async def test_readers_follow_both_tiers_from_their_snapshots(cache: CacheUnderTest) -> None:
    start = {tier: await cache.client.event_snapshot(tier=tier) for tier in ("device", "host")}
    indexes = {tier: ReplayedIndex(snapshot) for tier, snapshot in start.items()}  # type: ignore[arg-type]
    for page in range(1, 15):
        await cache.publish(page, 99)  # evicts earlier pages
        await until_on_host(cache.client, page, 99)
    await cache.publish(1, 99, 100)  # loads two pages
    await until_on_host(cache.client, 1, 99, 100)
    await cache.client.retire(lora_id="none")
    await evict(cache.client, 3, "host")

    for tier, medium in (("device", "GPU"), ("host", "CPU")):
        index = indexes[tier]
        while True:  # pages that were evicted from the host are written again
            here: Any = await cache.client.event_snapshot(tier=tier)
            assert await read_up_to(cache.another_client(), index, tier, here.seq) <= {medium}
            if index.seq == here.seq:
                break
        assert index.blocks == ReplayedIndex(here).blocks
        assert {event.medium for event in here.events} == {medium}
    assert len(indexes["device"].hashes) <= 8 < len(indexes["host"].hashes)
    assert indexes["device"].seq != indexes["host"].seq
    assert start["device"].epoch == start["host"].epoch

    await cache.client.reset()
    for tier in ("device", "host"):
        assert not ReplayedIndex(await cache.client.event_snapshot(tier=tier)).blocks  # type: ignore[arg-type]


async def test_a_tier_that_is_not_there_is_refused_with_the_names_of_those_that_are(cache: CacheUnderTest) -> None:
    with pytest.raises(InvalidRequest, match="tier must be one of 'device', 'host', not 'disk'"):
        await cache.client.event_snapshot(tier="disk")
    with pytest.raises(InvalidRequest, match="tier must be one of 'device', 'host', not 'disk'"):
        await the_next(cache.client, None, "disk")


async def test_a_pool_of_tensors_on_the_cpu_has_the_medium_gpu_too_and_copies_publish_on_the_host() -> None:
    host = HostConfig(num_slots=32 * PAGE, reserve=0.5)
    async with LocalPrefixCache(tiered(eviction=EvictionConfig(), host=host)) as cache:
        index = ReplayedIndex()
        for page in range(6):
            lease = await cache.acquire([page] * PAGE)
            await lease.insert([page] * PAGE, release=True)
        assert await read_up_to(cache, index, "host", 1) == {"CPU"}
        snapshots: list[Any] = [await cache.event_snapshot(tier=tier) for tier in ("device", "host")]

        assert {event.medium for event in snapshots[0].events} == {"GPU"}
        assert index.hashes <= ReplayedIndex(snapshots[1]).hashes


# ---------------------------------------------------------------- tests on a cache in this process


@pytest.fixture
async def own_cache() -> AsyncIterator[CacheUnderTest]:
    """A cache in this process that has published nothing."""
    under_test = CacheUnderTest.reached("local", tiered(), None)
    await under_test.client.open()
    yield under_test
    await under_test.close()


async def test_events_of_one_tier_do_not_wake_the_readers_of_the_other() -> None:
    host = HostConfig(num_slots=32 * PAGE, reserve=0.3)
    async with LocalPrefixCache(tiered(host=host, eviction=EvictionConfig())) as cache:
        waiting = asyncio.ensure_future(the_next(cache, 0, "host"))
        await publish(cache, 1)
        assert (await the_next(cache, 0, "device")).seq == 1
        await asyncio.sleep(0.01)
        assert not waiting.done()

        for page in range(2, 9):  # the coldest are written
            await publish(cache, page)

        assert (await waiting).seq == 1


async def test_one_client_reads_both_tiers_and_its_end_ends_both(own_cache: CacheUnderTest) -> None:
    async def read_on(client: PrefixCacheClient, tier: str) -> list[Any]:
        return [batch async for batch in client.events(tier=tier)]

    client = own_cache.another_client()
    reading = [asyncio.ensure_future(read_on(client, tier)) for tier in ("device", "host")]
    await asyncio.sleep(0.01)
    await client.close()

    async with asyncio.timeout(30):
        assert await asyncio.gather(*reading) == [[], []]


async def test_a_shutdown_ends_the_readers_of_both_tiers() -> None:
    cache = LocalPrefixCache(tiered())
    readers = [PrefixCacheClient(cache) for _ in range(2)]
    reading = [
        asyncio.ensure_future(the_next(reader, 0, tier))
        for reader, tier in zip(readers, ("device", "host"), strict=True)
    ]
    await asyncio.sleep(0.05)
    await cache._host.service.close()

    async with asyncio.timeout(30):
        outcomes = await asyncio.gather(*reading, return_exceptions=True)
    assert all(isinstance(outcome, CacheUnavailable) for outcome in outcomes), outcomes
    for client in (*readers, cache):
        await client.close()


def test_the_readers_of_both_tiers_follow_the_cache_to_another_loop() -> None:
    cache = LocalPrefixCache(tiered())
    left: list[asyncio.Future[Any]] = []

    async def published(page: int) -> bool:
        client = PrefixCacheClient(cache)
        seqs = [(await client.event_snapshot(tier=tier)).seq for tier in ("device", "host")]
        waiting = [
            asyncio.ensure_future(the_next(client, seq, tier))
            for seq, tier in zip(seqs, ("device", "host"), strict=True)
        ]
        await asyncio.sleep(0.05)
        await publish(client, page)
        batches = await asyncio.gather(*waiting)
        left.append(asyncio.ensure_future(the_next(client, batches[1].seq, "host")))  # it waits as the loop ends
        await asyncio.sleep(0.05)
        return all(batch.seq > seq and batch.events for batch, seq in zip(batches, seqs, strict=True))

    assert asyncio.run(published(1))
    assert asyncio.run(published(2))


# ---------------------------------------------------------------- a disk, and snapshots in slices


@pytest.fixture
async def with_disk(tmp_path: Path) -> AsyncIterator[LocalPrefixCache]:
    """A cache with all tiers; its disk has 50 pages."""
    async with LocalPrefixCache(tiered(disk=quick_disk(tmp_path, 64 * PAGE), fingerprint="m")) as cache:
        for page in (*range(100, 150), *range(100, 150)):
            await publish(cache, page)
            await tiers_settled(cache)
        yield cache


async def publish(cache: PrefixCacheClient, *pages: int) -> None:
    ids = [page for page in pages for _ in range(PAGE)]
    await (await cache.acquire(ids)).insert(ids, release=True)


def have_a_slice_for_each_node(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sliced_snapshot, "SLICE_S", 0.0)
    patch.setattr(tier_feeds, "MOST_PAGES", 4)


async def test_readers_follow_the_disk_from_a_snapshot_that_is_made_in_slices(
    with_disk: LocalPrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_a_slice_for_each_node(monkeypatch)
    reader = PrefixCacheClient(with_disk)
    asking = asyncio.ensure_future(reader.event_snapshot(tier="disk"))
    while not with_disk.service.wait_queue._by_ticket:  # noqa: ASYNC110 -- the request is on its way
        await asyncio.sleep(0)
    assert not asking.done()
    for page in (*range(1, 6), *range(1, 6)):
        await publish(with_disk, page, page, 7)
        await tiers_settled(with_disk)
        await with_disk.evict(2 * PAGE, tier="disk")
    snapshot: Any = await asking
    index = ReplayedIndex(snapshot)
    for page in (*range(11, 16), *range(11, 16)):
        await publish(with_disk, page, page)
        await tiers_settled(with_disk)

    later: Any = await reader.event_snapshot(tier="disk")
    assert await read_up_to(reader, index, "disk", later.seq) == {"STORAGE"}
    assert index.blocks == ReplayedIndex(later).blocks and len(index.blocks) > 30
    assert {event.medium for event in later.events} == {"STORAGE"}
    await reader.close()


async def test_a_session_that_ends_gives_its_snapshot_up(
    with_disk: LocalPrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_a_slice_for_each_node(monkeypatch)
    service = with_disk.service
    service.open_session(OpenSession(session_id="router", owner="router"))
    (ticket,) = service.execute("router", service.epoch, [EventSnapshotRequest(tier="disk")]).responses
    assert isinstance(ticket, WaitingResponse) and (await with_disk.stats()).waiters == 0
    (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "raydix-snapshot"]
    await asyncio.sleep(0)

    service.close_session(CloseSession(session_id="router"))

    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not service.feeds.feed("disk")._recordings


class Clock:
    """Seconds that the test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_a_session_may_be_late_in_one_tier_alone() -> None:
    clock = Clock()
    service = service_of(tiered(), clock=clock)
    service.open_session(OpenSession(session_id="router", owner="router"))

    async def ask(tier: str, after_seq: int) -> None:
        question = NextEvents(session_id="router", epoch="e", after_seq=after_seq, tier=tier, timeout_s=0)
        await service.next_events(question)

    for tier in ("device", "host"):
        await ask(tier, 0)
    for tier in ("device", "host"):
        service.feeds.feed(tier).cleared()
    clock.now += 9
    await ask("device", 1)
    clock.now += 9

    assert service.stats().stale_readers == 1  # the reader of the host
    await ask("host", 1)
    assert service.stats().stale_readers == 0
    await service.close()
