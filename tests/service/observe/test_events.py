"""KV events through the service: a router that replays them has the cache's contents, in process or on Ray.

Tokens are named by the page they fill, as in the contract tests; the cache has eight pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, cast

import pytest
from support.caches.cache_under_test import Access, CacheUnderTest, small_config
from support.reference.event_index import ReplayedIndex

from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.actors.client.connectors import LocalConnector
from raydix.actors.client.local_transport import LocalTransport
from raydix.actors.service import event_feed
from raydix.actors.service.cache_host import CacheHost, local_device
from raydix.actors.service.event_feed import EventFeed
from raydix.cache_core import hash_to_int64, hash_token_ids
from raydix.schemas import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    InvalidRequest,
    KVEventBatch,
    StaleEpoch,
    frame_namespace,
)

PAGE = 16


@pytest.fixture
async def cache(request: pytest.FixtureRequest, access: Access) -> AsyncIterator[CacheUnderTest]:
    """An empty cache that publishes events."""
    running_cache = request.getfixturevalue("running_cache") if access == "ray" else None
    config = small_config(PAGE).model_copy(update={"events": True})
    under_test = CacheUnderTest.reached(access, config, running_cache)
    yield under_test
    await under_test.close()


def chain(*pages: int) -> list[int]:
    """Return the hashes of consecutive pages in the default namespace."""
    digests: list[str] = []
    for page in pages:
        digests.append(hash_token_ids([page] * PAGE, digests[-1] if digests else None))
    return [hash_to_int64(digest) for digest in digests]


async def read(client: PrefixCacheClient, index: ReplayedIndex, until: Callable[[], bool]) -> list[KVEventBatch]:
    """Replay events into an index until it has the expected hashes."""
    batches: list[KVEventBatch] = []
    async with asyncio.timeout(60), aclosing(client.events(index.seq)) as events:
        while not until():
            batches.append(await anext(events))
            index.apply(batches[-1])
    return batches


async def the_next(client: PrefixCacheClient, after_seq: int | None) -> KVEventBatch:
    """Return a reader's first batch."""
    async with asyncio.timeout(60), aclosing(client.events(after_seq)) as events:
        return await anext(events)


def held_by(snapshot: Any) -> set[int]:
    return ReplayedIndex(snapshot).hashes


async def test_a_replayed_stream_has_the_cached_blocks(cache: CacheUnderTest) -> None:
    index = ReplayedIndex(await cache.client.event_snapshot())
    assert index.hashes == set()

    await cache.publish(1, 2, 3)
    await cache.publish(1, 2, 4)
    await cache.publish(1, 2, lora_id="adapter")
    await cache.client.evict(PAGE)  # evicts page 3
    await cache.publish(5)

    here = await cache.client.event_snapshot()
    await read(cache.another_client(), index, lambda: index.seq >= here.seq)
    assert index.hashes == held_by(here)
    assert index.hashes >= {*chain(1, 2, 4), *chain(5)}
    assert not index.hashes & {chain(1, 2, 3)[-1]}
    assert {block.namespace for block in index.blocks.values()} == {None, frame_namespace(None, "adapter", None)}


async def test_a_late_joiner_starts_from_a_snapshot(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3)
    await cache.publish(4)
    snapshot = await cache.client.event_snapshot()
    index = ReplayedIndex(snapshot)
    assert index.hashes == {*chain(1, 2, 3), *chain(4)}
    assert snapshot.epoch == (await cache.client.stats()).epoch

    await cache.publish(1, 2, 5)
    await cache.client.evict(3 * PAGE)

    here = await cache.client.event_snapshot()
    await read(cache.client, index, lambda: index.seq >= here.seq)
    assert index.hashes == held_by(here)


async def test_a_snapshot_has_the_same_clients_earlier_inserts(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1))
    inserting = asyncio.ensure_future(lease.insert(cache.tokens(1), release=True))
    await asyncio.sleep(0)

    snapshot = await cache.client.event_snapshot()

    assert held_by(snapshot) == set(chain(1))
    await inserting


async def test_an_event_has_hashes_tokens_parent_and_namespace(cache: CacheUnderTest) -> None:
    await cache.publish(1)
    seq = (await cache.client.event_snapshot()).seq
    await cache.publish(1, 2)
    await cache.publish(3, lora_id="adapter", cache_salt="s")

    index_events = []
    while len(index_events) < 2:
        batch = await the_next(cache.client, seq)
        assert (batch.seq, batch.gap) == (seq + len(batch.events), False)
        index_events += batch.events
        seq = batch.seq
    first, second = index_events

    assert isinstance(first, BlockStored)
    assert first.block_hashes.tolist() == chain(1, 2)[1:]
    assert first.parent_block_hash == chain(1)[0]
    assert first.token_ids.tolist() == [2] * PAGE
    assert (first.block_size, first.medium, first.lora_name, first.extra_keys) == (PAGE, "CPU", None, None)
    assert isinstance(second, BlockStored)
    assert second.lora_name == "adapter"
    assert second.extra_keys == [(frame_namespace(None, "adapter", "s"),)]
    assert second.block_hashes.tolist() != chain(3)


async def test_a_waiting_reader_gets_an_event_immediately(cache: CacheUnderTest) -> None:
    seq = (await cache.client.event_snapshot()).seq
    waiting = [asyncio.ensure_future(the_next(client, seq)) for client in (cache.client, cache.another_client())]
    await asyncio.sleep(0.05)
    assert not any(each.done() for each in waiting)

    await cache.publish(1)

    for each in waiting:
        (event,) = (await each).events
        assert isinstance(event, BlockStored)
        assert event.block_hashes.tolist() == chain(1)


async def test_a_reset_clears_all_and_leased_blocks_are_not_removed_again(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1, 2))
    await lease.insert(cache.tokens(1, 2))
    seq = (await cache.client.event_snapshot()).seq

    await cache.client.reset()
    await lease.release()
    await cache.publish(3)

    events: list[Any] = []
    while len(events) < 2:
        batch = await the_next(cache.client, seq + len(events))
        events += batch.events
    assert events[0] == AllBlocksCleared()
    assert isinstance(events[1], BlockStored)
    assert events[1].block_hashes.tolist() == chain(3)
    assert held_by(await cache.client.event_snapshot()) == set(chain(3))


@pytest.mark.parametrize("ahead", [1000, 2**70], ids=["1000", "2**70"])
async def test_a_reader_of_events_that_do_not_exist_gets_a_gap(cache: CacheUnderTest, ahead: int) -> None:
    await cache.publish(1)
    snapshot = await cache.client.event_snapshot()

    batch = await the_next(cache.client, snapshot.seq + ahead)

    assert (batch.gap, batch.events, batch.seq) == (True, (), snapshot.seq)


@pytest.mark.parametrize("wrong", [-1, 1.5, "3", True])
async def test_a_number_that_is_none_is_refused(cache: CacheUnderTest, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="after_seq"):
        await the_next(cache.client, wrong)


async def test_a_reader_ends_when_its_client_is_closed(cache: CacheUnderTest) -> None:
    client = PrefixCacheClient(cache.cache)
    seq = (await client.event_snapshot()).seq

    async def read_on() -> list[KVEventBatch]:
        return [batch async for batch in client.events(seq)]

    reading = asyncio.ensure_future(read_on())
    await asyncio.sleep(0.05)
    await client.close()

    async with asyncio.timeout(30):
        assert await reading == []


async def test_a_reader_that_stops_leaves_nothing_behind(cache: CacheUnderTest) -> None:
    seq = (await cache.client.event_snapshot()).seq
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await anext(cache.client.events(seq))

    await cache.publish(1)

    assert len((await the_next(cache.client, seq)).events) == 1


# ---------------------------------------------------------------- tests on a cache that starts without events


@pytest.fixture
async def own_cache() -> AsyncIterator[CacheUnderTest]:
    """A cache in this process that publishes events, and has published none."""
    config = small_config(PAGE).model_copy(update={"events": True})
    under_test = CacheUnderTest.reached("local", config, None)
    await under_test.client.open()
    yield under_test
    await under_test.close()


async def test_an_empty_index_can_replay_from_the_beginning(own_cache: CacheUnderTest) -> None:
    index = ReplayedIndex()
    await own_cache.publish(1, 2)
    await own_cache.publish(3)

    async with aclosing(own_cache.client.events()) as events:
        index.apply(await anext(events))

    assert index.hashes == {*chain(1, 2), *chain(3)}


async def test_after_an_overflow_a_reader_takes_a_snapshot_and_goes_on_with_the_same_iterator(
    own_cache: CacheUnderTest,
) -> None:
    feed = own_cache.cache._host.service.feeds.feed("device")
    feed._max_events = 4
    index = ReplayedIndex()
    async with aclosing(own_cache.client.events()) as events:
        await own_cache.publish(1)
        index.apply(await anext(events))
        for page in (2, 3, 4, 5, 6):
            await own_cache.publish(page)

        batch = await anext(events)
        assert (batch.gap, batch.events, batch.seq) == (True, (), 6)
        index = ReplayedIndex(await own_cache.client.event_snapshot())
        assert index.hashes == {chain(page)[0] for page in (1, 2, 3, 4, 5, 6)}

        await own_cache.client.evict(2 * PAGE)
        index.apply(await anext(events))

    assert index.hashes == {chain(page)[0] for page in (3, 4, 5, 6)}


async def test_events_between_the_gap_and_the_snapshot_may_be_applied_again(own_cache: CacheUnderTest) -> None:
    feed = own_cache.cache._host.service.feeds.feed("device")
    feed._max_events = 4
    async with aclosing(own_cache.client.events()) as events:
        for page in (1, 2, 3, 4, 5):
            await own_cache.publish(page)
        assert (await anext(events)).gap
        await own_cache.publish(6)
        await own_cache.client.evict(PAGE)  # evicts page 1
        snapshot = await own_cache.client.event_snapshot()
        await own_cache.publish(7)
        batch = await anext(events)

    assert batch.seq > snapshot.seq > batch.seq - len(batch.events)  # the snapshot has the batch's first events
    hashes = held_by(snapshot)
    for event in batch.events:
        if isinstance(event, BlockStored):
            hashes.update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            hashes.difference_update(event.block_hashes)
    assert hashes == held_by(await own_cache.client.event_snapshot())


async def test_no_slow_reader_stops_the_cache(own_cache: CacheUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "MAX_BATCH_EVENTS", 2)
    feed = own_cache.cache._host.service.feeds.feed("device")
    async with aclosing(own_cache.client.events()) as events:
        await own_cache.publish(1)
        await anext(events)  # then the reader stops reading
        feed._max_events = 3
        for page in range(2, 40):
            await own_cache.publish(page)

        assert feed.seq - feed._first_seq <= 3 + 2
        assert (await anext(events)).gap


def test_a_cache_that_moves_to_another_loop_notifies_its_readers_there() -> None:
    cache = LocalPrefixCache(small_config(PAGE).model_copy(update={"events": True}))
    left: list[asyncio.Future[KVEventBatch]] = []

    async def published(page: int) -> KVEventBatch:
        client = PrefixCacheClient(cache)
        waiting = asyncio.ensure_future(the_next(client, (await client.event_snapshot()).seq))
        await asyncio.sleep(0.05)
        for each in (page, page + 1):
            await (await client.acquire([each] * PAGE)).insert([each] * PAGE, release=True)
        batch = await waiting
        left.append(asyncio.ensure_future(the_next(client, batch.seq)))  # a reader that waits as the loop ends
        await asyncio.sleep(0.05)
        return batch

    asyncio.run(published(1))
    batch = asyncio.run(published(3))

    assert [event.block_hashes.tolist() for event in batch.events if isinstance(event, BlockStored)] == [
        chain(3), chain(4),
    ]  # fmt: skip
    cache._host.service.core.check_invariants()


def test_events_after_the_loop_of_a_reader_was_closed_go_to_no_reader() -> None:
    feed, loop = EventFeed("epoch", PAGE, "CPU"), asyncio.new_event_loop()
    reading = loop.create_task(feed.next_batch(0, 10))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()

    feed.cleared()

    assert not reading.done()
    assert [batch.seq for batch in asyncio.run(feed.next_batch(0, 10)).unpack()] == [1]


async def test_a_reader_learns_of_a_restart_that_another_user_of_its_client_saw_first() -> None:
    config = small_config(PAGE).model_copy(update={"events": True})
    cache = LocalPrefixCache(config)
    async with aclosing(cache.events()) as events:
        for page in (1, 2):
            await (await cache.acquire([page] * PAGE)).insert([page] * PAGE, release=True)
        before = await anext(events)
        await cache._host.service.eviction_task.stop()
        host = CacheHost(config, local_device(config), "", False)
        cast("LocalTransport", cache.session.transport)._host = host
        cast("LocalConnector", cache.session.connector).host = host
        for page in (3, 4, 5):  # the first of them opens another session
            await (await cache.acquire([page] * PAGE)).insert([page] * PAGE, release=True)

        with pytest.raises(StaleEpoch) as caught:
            await anext(events)

    assert (caught.value.request_epoch, caught.value.cache_epoch) == (before.epoch, (await cache.stats()).epoch)
    assert (await the_next(cache, None)).seq == 3
    await cache.close()


async def test_a_shutdown_ends_the_readers(own_cache: CacheUnderTest) -> None:
    async def read_on(client: PrefixCacheClient) -> list[KVEventBatch]:
        return [batch async for batch in client.events()]

    reading = asyncio.ensure_future(read_on(own_cache.client))
    await asyncio.sleep(0)
    await own_cache.client.close()

    async with asyncio.timeout(30):
        assert await reading == []


@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_a_tier_that_is_not_there_is_refused_with_the_names_of_those_that_are(
    own_cache: CacheUnderTest, tier: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"tier must be one of 'device', not '{tier}'"):
        await own_cache.client.event_snapshot(tier=tier)
    with pytest.raises(InvalidRequest, match=f"tier must be one of 'device', not '{tier}'"):
        await anext(own_cache.client.events(tier=tier))


async def test_a_cache_without_events_says_how_to_have_them() -> None:
    cache = CacheUnderTest.reached("local", small_config(PAGE), None)

    with pytest.raises(InvalidRequest, match="events='full'"):
        await cache.client.event_snapshot()
    with pytest.raises(InvalidRequest, match="events='full'"):
        await the_next(cache.client, None)

    await cache.close()
