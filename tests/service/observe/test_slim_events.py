"""Slim KV events through the service: a `PageIndex` that applies them has the strided pages, stored and pending."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from support.caches.cache_under_test import Access, CacheUnderTest, small_config
from support.reference.event_index import Block, ReplayedIndex

from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.actors.service import event_feed
from raydix.actors.service.event_feed import EventFeed
from raydix.cache_core import Applied, PageIndex, page_hashes
from raydix.cache_core.kernels import END
from raydix.schemas import CacheConfig, CacheLoad, PoolConfig, SlimEventBatch, frame_namespace

PAGE, STRIDE = 16, 32


@pytest.fixture
async def cache(request: pytest.FixtureRequest, access: Access) -> AsyncIterator[CacheUnderTest]:
    """An empty cache that publishes slim events."""
    running_cache = request.getfixturevalue("running_cache") if access == "ray" else None
    config = small_config(PAGE).model_copy(update={"events": "slim", "events_stride_tokens": STRIDE})
    under_test = CacheUnderTest.reached(access, config, running_cache)
    yield under_test
    await under_test.close()


class Router:
    """An index with one column, and the reader that fills it."""

    def __init__(self, client: PrefixCacheClient) -> None:
        self.index = PageIndex()
        self.column = self.index.add_column()
        self.client = client
        self.load = CacheLoad()

    async def join(self) -> Router:
        """Take a snapshot."""
        snapshot = await self.client.event_snapshot()
        self.index.apply_snapshot(
            self.column,
            snapshot.epoch,
            snapshot.seq,
            snapshot.stored_hashes,
            snapshot.pending_hashes,
            snapshot.end_hashes,
        )
        self.load = snapshot.load
        return self

    def apply(self, batch: SlimEventBatch) -> Applied:
        """Apply a batch."""
        self.load = batch.load
        return self.index.apply(self.column, batch.epoch, batch.seq, batch.kinds, batch.page_counts, batch.page_hashes)

    async def read(self, until: Callable[[], bool]) -> list[SlimEventBatch]:
        """Apply batches until a condition holds."""
        batches: list[SlimEventBatch] = []
        after_seq = self.index.position(self.column)[1]
        async with asyncio.timeout(60), aclosing(self.client.events(after_seq)) as events:
            while not until():
                batches.append(await anext(events))
                assert self.apply(batches[-1]) is Applied.DONE
        return batches

    @property
    def stored(self) -> set[int]:
        return self.index.pages(self.column)[0]

    @property
    def pending(self) -> set[int]:
        return self.index.pages(self.column)[1]


def chain(cache: CacheUnderTest, *pages: int, **namespace: str | None) -> set[int]:
    """Return the strided hashes of consecutive pages."""
    fields = {"extra_key": None, "lora_id": None, "cache_salt": None} | namespace
    return set(page_hashes(cache.tokens(*pages), PAGE, STRIDE, frame_namespace(**fields)).tolist())


async def test_an_index_has_the_strided_pages(cache: CacheUnderTest) -> None:
    router = await Router(cache.another_client()).join()

    await cache.publish(1, 2, 3)
    await cache.publish(1, 2, 3, 4, 5)  # of two nodes, the second begins in the middle of a stride
    await cache.publish(1, 7, lora_id="adapter")
    wanted = chain(cache, 1, 2, 3, 4, 5) | chain(cache, 1, 7, lora_id="adapter")
    await router.read(lambda: router.stored >= wanted)

    assert router.stored == wanted
    assert len(wanted) == 3
    runs = router.index.prefix_runs(page_hashes(cache.tokens(1, 2, 3, 4, 9), PAGE, STRIDE))
    assert runs == [(router.column, 2, 2)]

    await cache.client.evict(8 * PAGE)
    await router.read(lambda: not router.stored)
    late = await Router(cache.client).join()
    assert late.stored == late.pending == set()


async def test_the_pages_of_a_lease_are_pending_until_they_are_published_or_it_ends(cache: CacheUnderTest) -> None:
    router = await Router(cache.another_client()).join()
    lease = await cache.client.acquire(cache.tokens(1, 2, 3, 4, 5))
    await router.read(lambda: bool(router.pending))
    assert (router.stored, router.pending) == (set(), chain(cache, 1, 2, 3, 4))
    assert (await Router(cache.client).join()).pending == chain(cache, 1, 2, 3, 4)

    twin = await cache.client.acquire(cache.tokens(1, 2))
    await lease.insert(cache.tokens(1, 2, 3))
    await router.read(lambda: bool(router.stored))
    assert (router.stored, router.pending) == (chain(cache, 1, 2), chain(cache, 1, 2, 3, 4))  # the twin has 1 and 2
    await twin.release()
    await router.read(lambda: len(router.pending) < 2)
    assert router.pending == chain(cache, 1, 2, 3, 4) - chain(cache, 1, 2)

    await lease.release()
    await router.read(lambda: not router.pending)
    assert router.stored == chain(cache, 1, 2)


async def test_a_lease_that_locks_or_finds_everything_promises_nothing(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3, 4)
    async with cache.client.lock(cache.tokens(1, 2, 3, 4, 5, 6)), cache.client.acquire(cache.tokens(1, 2, 3, 4, 5)):
        router = await Router(cache.client).join()
        assert router.pending == set()
        assert router.load.leased_tokens == 9 * PAGE


async def test_a_reset_ends_stored_and_pending_pages(cache: CacheUnderTest) -> None:
    router = await Router(cache.another_client()).join()
    await cache.publish(1, 2)
    lease = await cache.client.acquire(cache.tokens(3, 4))
    await router.read(lambda: bool(router.pending & chain(cache, 3, 4)))

    await cache.client.reset()
    await router.read(lambda: not router.stored)

    assert router.pending == set()
    await lease.insert(cache.tokens(3, 4), release=True)  # publishes nothing
    await cache.publish(5, 6)
    await router.read(lambda: bool(router.stored))
    assert (router.stored, router.pending) == (chain(cache, 5, 6), set())


async def test_a_retired_namespace_has_no_pending_pages(cache: CacheUnderTest) -> None:
    kept = await cache.client.acquire(cache.tokens(1, 2))
    lease = await cache.client.acquire(cache.tokens(1, 2), lora_id="old")
    await cache.client.retire(lora_id="old")

    assert (await Router(cache.client).join()).pending == chain(cache, 1, 2)
    await lease.release()
    await kept.release()


async def test_batches_carry_the_load(cache: CacheUnderTest) -> None:
    router = await Router(cache.another_client()).join()
    assert router.load == CacheLoad()

    lease = await cache.client.acquire(cache.tokens(1, 2, 3), new_tokens=5)
    await router.read(lambda: router.load != CacheLoad())
    assert router.load == CacheLoad(0, 3 * PAGE + 5, 3 * PAGE, 4 * PAGE)

    waiting = asyncio.ensure_future(_acquired(cache.client, cache.tokens(*range(10, 17))))
    await router.read(lambda: router.load.waiting_tokens > 0)
    assert router.load.waiting_tokens == 7 * PAGE
    await lease.insert(cache.tokens(1, 2, 3), release=True)
    await (await waiting).release()
    await router.read(lambda: router.load == CacheLoad())


async def _acquired(client: PrefixCacheClient, tokens: list[int]) -> Any:
    return await client.acquire(tokens)


# ---------------------------------------------------------------- tests on a cache in this process


@pytest.fixture
async def own_cache() -> AsyncIterator[CacheUnderTest]:
    """A cache in this process that has published nothing."""
    config = small_config(PAGE).model_copy(update={"events": "slim", "events_stride_tokens": STRIDE})
    under_test = CacheUnderTest.reached("local", config, None)
    await under_test.client.open()
    yield under_test
    await under_test.close()


def feed_of(cache: CacheUnderTest) -> EventFeed:
    feed: EventFeed = cache.cache._host.service.feeds.feed("device")
    return feed


async def test_a_batch_is_packed_once_for_all_readers(
    own_cache: CacheUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[SlimEventBatch] = []
    original = event_feed.pack_batch
    monkeypatch.setattr(event_feed, "pack_batch", lambda batch: packed.append(batch) or original(batch))
    routers = [await Router(own_cache.another_client()).join() for _ in range(5)]
    late: list[Router] = []
    for page in range(1, 13, 2):
        await own_cache.publish(page, page + 1)
        late.append(await Router(own_cache.another_client()).join())
        if page % 4 == 1:
            wanted = chain(own_cache, page, page + 1)
            await routers[0].read(lambda wanted=wanted: routers[0].stored >= wanted)

    seq = feed_of(own_cache).seq
    wanted = routers[0].stored | chain(own_cache, 11, 12)
    readers = [*routers, *late]
    await asyncio.gather(*(each.read(lambda each=each: each.index.position(each.column)[1] >= seq) for each in readers))

    assert all((each.stored, each.pending) == (routers[0].stored, set()) for each in readers)
    assert len(packed) <= 6
    ranges = [range(batch.seq - len(batch.kinds), batch.seq) for batch in packed]
    assert [number for each in ranges for number in each] == list(range(packed[-1].seq))  # each event in one batch


async def test_a_reader_that_falls_behind_gets_a_gap(own_cache: CacheUnderTest) -> None:
    router = await Router(own_cache.another_client()).join()
    feed_of(own_cache)._max_bytes = 1
    await own_cache.publish(1, 2)
    await Router(own_cache.client).read(lambda: True)
    feed_of(own_cache).batches_after(0)
    await own_cache.publish(3, 4)

    async with asyncio.timeout(60), aclosing(router.client.events(0)) as events:
        batch = await anext(events)
        assert isinstance(batch, SlimEventBatch)
        assert (batch.gap, batch.kinds) == (True, b"")
        assert router.apply(batch) is Applied.NEEDS_SNAPSHOT
        await router.join()
        feed_of(own_cache)._max_bytes = 10_000
        await own_cache.publish(5, 6)
        while not router.stored >= chain(own_cache, 5, 6):
            router.apply(await anext(events))

    assert router.stored == (await Router(own_cache.client).join()).stored


def depth_of(blocks: dict[int, Block], block: int) -> int:
    """Return the pages of the path that ends with a block."""
    depth = 0
    at: int | None = block
    while at is not None:
        at = blocks[at].parent
        depth += 1
    return depth


async def test_slim_events_name_every_second_page_of_the_full_ones() -> None:
    config = small_config(PAGE)
    caches = [
        CacheUnderTest.reached("local", CacheConfig.model_validate(config.model_dump() | fields), None)
        for fields in ({"events": "full"}, {"events": "slim", "events_stride_tokens": STRIDE})
    ]
    for each in caches:
        await each.publish(1, 2, 3)
        await each.publish(1, 2, 3, 4)
        await each.publish(1, 2, 5, 6, lora_id="a")
        await each.publish(1, 9, cache_salt="b")
        await each.client.evict(PAGE)
    full, slim = caches
    blocks = ReplayedIndex(await full.client.event_snapshot()).blocks

    router = await Router(slim.client).join()

    assert router.stored == {block for block in blocks if depth_of(blocks, block) % (STRIDE // PAGE) == 0} != set()
    for each in caches:
        await each.close()


@pytest.mark.parametrize("stride", [1, 4, 16])
async def test_a_stride_below_a_page_is_a_page(stride: int) -> None:
    config = CacheConfig(page_size=16, events="slim", events_stride_tokens=stride, pool=PoolConfig(num_slots=256))
    async with LocalPrefixCache(config) as cache:
        async with cache.acquire(list(range(40))) as lease:
            await lease.insert(list(range(40)))
        router = await Router(cache).join()
        snapshot = await cache.event_snapshot()

        assert (snapshot.stride_tokens, snapshot.page_size) == (config.stride_tokens, 16) == (16, 16)
        assert router.stored == set(page_hashes(list(range(40)), 16, 16).tolist())


@pytest.mark.parametrize("kind", ["bigram", "mamba", "chunk", "swa"])
async def test_every_kind_with_pages_publishes_them(kind: str) -> None:
    fields: dict[str, Any] = {
        "bigram": {"bigram": True, "pool": {"num_slots": 64}},
        "mamba": {"kind": "mamba", "pool": {"num_slots": 64, "num_state_slots": 4}},
        "chunk": {"kind": "chunk", "pool": {"num_slots": 64}},
        "swa": {"sliding_window_size": 4, "pool": {"num_slots": 64, "num_swa_slots": 64}},
    }[kind]
    config = CacheConfig.model_validate({"page_size": 2, "events": "slim", "events_stride_tokens": 4, **fields})
    prompt = list(range(13))
    hashes = set(page_hashes(prompt, 2, 4, bigram=kind == "bigram").tolist()) if kind != "chunk" else set()
    async with LocalPrefixCache(config) as cache:
        lease = await cache.acquire(prompt)
        router = await Router(cache).join()
        assert router.pending == hashes
        await lease.insert(prompt, release=True)
        await router.join()
        # Both name the end of the prompt's last whole page, but no state was published.
        ends = set(page_hashes(prompt, 2).tolist()[-1:]) | hashes if kind == "swa" else set()
        assert (router.stored, router.pending) == (hashes | {page ^ END for page in ends}, set())
        assert router.index.has_ends == (kind in ("mamba", "swa"))


@pytest.mark.parametrize("kind", ["mamba", "swa"])
async def test_of_an_answer_one_end_is_sent_when_its_lease_ends(kind: str) -> None:
    fields: dict[str, Any] = {
        "mamba": {"kind": "mamba", "pool": {"num_slots": 64, "num_state_slots": 8}},
        "swa": {"sliding_window_size": 4, "pool": {"num_slots": 64, "num_swa_slots": 64}},
    }[kind]
    config = CacheConfig.model_validate({"page_size": 2, "events": "slim", "events_stride_tokens": 16, **fields})
    tokens = list(range(30))
    has_states = kind == "mamba"
    async with LocalPrefixCache(config) as cache:
        router = await Router(cache).join()

        def promised(prompt: list[int]) -> int:
            pages = page_hashes(prompt, 2)
            runs = router.index.prefix_runs(np.ascontiguousarray(pages[7::8]), pages, 8)
            return max([0, *[2 * stored for _, stored, _ in runs]])

        async with cache.acquire(tokens[:10], new_tokens=20) as lease:
            await lease.insert(tokens[:10], publish_state=has_states)
            await router.read(lambda: promised(tokens) > 0)
            assert promised(tokens) == 10
            for stop in range(12, 28, 2):
                await lease.insert(tokens[:stop])
            await router.read(lambda: bool(router.stored - {page ^ END for page in page_hashes(tokens, 2).tolist()}))
            assert promised(tokens) == 10, "the answer has no end yet"
            await lease.insert(tokens[:28], publish_state=has_states)
        await router.read(lambda: promised(tokens) == 28)

        match = await cache.match(tokens)
        assert match.prefix_len == promised(tokens) == 28
        assert promised([*tokens[:10], 99, 99, 99]) == 10
        late = await Router(cache).join()
        assert late.stored == router.stored


async def test_a_shutdown_ends_slim_readers(own_cache: CacheUnderTest) -> None:
    async def read_on() -> list[Any]:
        return [batch async for batch in own_cache.client.events()]

    reading = asyncio.ensure_future(read_on())
    await asyncio.sleep(0)
    await own_cache.client.close()

    async with asyncio.timeout(30):
        assert await reading == []
