"""A subscriber of vLLM's events has the blocks of the cache, whatever was evicted, restarted or missed."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from support.exporters.event_structs import EVENTS, described, recorded, recorded_batch
from support.exporters.running_exporter import FREE_PORT, PAGE, exported, exporting, full, host_of, publish, restart
from support.exporters.vllm_subscriber import UNSIGNED, VllmSubscriber
from support.fleet.running_fleet import until
from support.more import more

from raydix.actors import LocalPrefixCache
from raydix.actors.exporters import bounded_log, vllm_events, vllm_format, zmq_publisher
from raydix.actors.exporters.vllm_events import VllmEventExporter
from raydix.actors.exporters.vllm_format import VllmEncoder
from raydix.actors.exporters.zmq_publisher import ZmqPublisher
from raydix.cache_core import page_hashes
from raydix.schemas import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheConfig,
    InvalidRequest,
    PoolConfig,
    StaleEpoch,
    frame_namespace,
)
from raydix.schemas.engine_namespace import adapter_name, namespace_of

NAMESPACES: list[dict[str, str | None]] = [
    {},
    {"lora_id": "adapter"},
    {"cache_salt": "tenant"},
    {"extra_key": "picture", "lora_id": "adapter"},
]


async def nothing() -> None:
    """Do nothing on a subscriber's demand."""


# ---------------------------------------------------------------- the format


@pytest.mark.parametrize("name", [*EVENTS, "KVEventBatch"])
def test_the_structs_are_those_of_vllm_without_the_last_fields_and_with_a_salt(name: str) -> None:
    theirs = recorded()["structs"][name]
    ours = described(getattr(vllm_format, "VllmEventBatch" if name == "KVEventBatch" else f"Vllm{name}"))

    fields = [field for field in ours["fields"] if field != "cache_salt"]
    assert fields == list(theirs["fields"])[: len(fields)]
    for same in ("tag", "array_like", "omit_defaults", "num_required"):
        assert ours[same] == theirs[same]  # type: ignore[literal-required]
    assert list(ours["fields"]) == fields + (["cache_salt"] if name == "BlockStored" else [])


async def test_an_event_has_unsigned_hashes_tokens_parent_and_medium() -> None:
    async with exported(data_parallel_rank=3, medium="GPU") as (cache, exporter, subscriber):
        await subscriber.caught_up(exporter, cache)
        await publish(cache, 1, 2)
        await publish(cache, 1, 2, 3)
        await cache.evict(PAGE)
        await subscriber.caught_up(exporter, cache)

    hashes = (page_hashes([1] * PAGE + [2] * PAGE + [3] * PAGE, PAGE).astype("u8")).tolist()
    stored, more, removed = [event for batch in subscriber.batches for event in batch.events][1:4]
    assert (stored.block_hashes, stored.parent_block_hash, stored.block_size) == (hashes[:2], None, PAGE)
    assert stored.token_ids == [1] * PAGE + [2] * PAGE
    assert (stored.medium, stored.lora_id, stored.lora_name, stored.extra_keys) == ("GPU", None, None, None)
    assert (more.block_hashes, more.parent_block_hash) == (hashes[2:], hashes[1])
    assert (removed.block_hashes, removed.medium) == (hashes[2:], "GPU")
    assert {batch.data_parallel_rank for batch in subscriber.batches} == {3}
    times = [batch.ts for batch in subscriber.batches]
    assert times == sorted(times)


async def test_events_of_a_cache_with_a_window_and_states_name_their_groups() -> None:
    fields: dict[str, Any] = {"kind": "mamba", "sliding_window_size": PAGE, "page_size": PAGE, "events": "full"}
    pool = PoolConfig(num_slots=64 * PAGE, num_swa_slots=64 * PAGE, num_state_slots=8)
    ids = [1] * PAGE + [2] * PAGE
    async with exported(CacheConfig(pool=pool, **fields), medium="GPU") as (cache, exporter, subscriber):
        await subscriber.caught_up(exporter, cache)
        lease = await cache.acquire(ids)
        await lease.insert(ids, publish_state=True, release=True)
        await cache.evict(2 * PAGE)
        await subscriber.caught_up(exporter, cache)

    one, two = page_hashes(ids, PAGE).astype("u8").tolist()
    _, *stored, state_gone, window_gone, gone = [event for batch in subscriber.batches for event in batch.events]
    assert [(event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) for event in stored] == [
        (0, "full_attention", None),
        (1, "sliding_window", PAGE),
        (2, "mamba", None),
    ]
    assert [event.block_hashes for event in stored] == [[one, two], [one, two], [two]]
    assert [event.parent_block_hash for event in stored] == [None, None, one]
    assert [event.token_ids for event in stored] == [ids, ids, ids[PAGE:]]
    removed = sorted([event.group_idx, event.block_hashes] for event in (state_gone, window_gone, gone))
    assert removed == [[0, [two, one]], [1, [two, one]], [2, [two]]]


NAME_AND_PATH = namespace_of("adapter", "/models/adapter")


@pytest.mark.parametrize(
    ("namespace", "lora_name", "first", "later", "salt"),
    [
        (("k", None, None), None, ("k",), None, frame_namespace("k", None, None)),
        ((None, "a", None), "a", ("a",), ("a",), None),
        (NAME_AND_PATH, "adapter", ("adapter",), ("adapter",), None),
        ((None, None, "s"), None, ("s",), None, "s"),
        ((None, None, "dynamo-cache-salt:s"), None, ("dynamo-cache-salt:s",), None, "s"),
        (("k", "a", "s"), "a", ("a", "k", "s"), ("a",), frame_namespace("k", None, "s")),
    ],
)
async def test_a_namespace_is_in_the_fields_that_vllm_has(
    namespace: tuple[Any, Any, Any], lora_name: str | None, first: Any, later: Any, salt: str | None
) -> None:
    extra_key, lora_id, cache_salt = namespace
    made = vllm_format.vllm_namespace(frame_namespace(extra_key, lora_id, cache_salt))
    assert made == (lora_name, first, later, salt)

    async with exported() as (cache, exporter, subscriber):
        parts = {"extra_key": extra_key, "lora_id": lora_id, "cache_salt": cache_salt}
        await publish(cache, 1, 2, **parts)
        await publish(cache, 1, 2, 3, 4, **parts)
        await subscriber.caught_up(exporter, cache)
    events = [event for batch in subscriber.batches for event in batch.events if hasattr(event, "token_ids")]
    keys = [each for event in events for each in event.extra_keys or [None] * len(event.block_hashes)]
    assert keys == [first, later, later, later]
    assert {event.lora_name for event in events} == {lora_name}


@pytest.mark.parametrize(
    "lora_id", ["", "a", "[1, 2]", '["a"]', "[" * 4000, '["\\ud800", null]', '{"a": 1}', '["a", null, 1]']
)
def test_a_lora_id_of_another_form_is_a_name(lora_id: str) -> None:
    assert adapter_name(lora_id) == lora_id


def test_an_adapter_without_a_path_has_its_name() -> None:
    assert adapter_name(str(namespace_of("a b").lora_id)) == "a b"


# ---------------------------------------------------------------- blocks


async def act(random: Random, cache: LocalPrefixCache, exporter: VllmEventExporter, subscriber: VllmSubscriber) -> None:
    """Do one random thing to the cache or the subscriber."""
    match random.choices(("publish", "evict", "reset", "restart", "miss"), (70, 12, 2, 2, 6))[0]:
        case "publish":
            pages = [random.randrange(3) for _ in range(random.randrange(1, 6))]
            await publish(cache, *pages, **random.choice(NAMESPACES))
        case "evict":
            await cache.evict(random.randrange(1, 6) * PAGE)
        case "reset":
            await cache.reset()
        case "restart":
            await restart(cache, exporter)
        case "miss":
            await subscriber.pause()
            for page in range(5, 9):
                await publish(cache, page)
            subscriber.go_on(reconnect=True)


async def run_random_traffic(seed: int, num_actions: int = 200) -> VllmSubscriber:
    """Compare a subscriber's blocks with the cache's from time to time; return the subscriber."""
    random = Random(seed)
    async with exported() as (cache, exporter, subscriber):
        for number in range(num_actions):
            with suppress(StaleEpoch):  # of the first verb after a restart
                await act(random, cache, exporter, subscriber)
            if number % 10 == 9 or number == num_actions - 1:
                await subscriber.agrees(exporter, cache)
    assert subscriber.number > 0
    return subscriber


@pytest.mark.parametrize("seed", range(6))
async def test_after_random_traffic_the_blocks_are_those_of_the_cache(seed: int) -> None:
    await run_random_traffic(seed)


def drop_removals(patch: pytest.MonkeyPatch) -> None:
    encode = VllmEncoder.encode

    def encode_others(self: Any, events: Any) -> bytes:
        return encode(self, [each for each in events if not isinstance(each, BlockRemoved)])

    patch.setattr(VllmEncoder, "encode", encode_others)


def keep_blocks_of_earlier_lives(patch: pytest.MonkeyPatch) -> None:
    encode = VllmEncoder.encode

    def encode_others(self: Any, events: Any) -> bytes:
        return encode(self, [each for each in events if hasattr(each, "block_hashes")])

    patch.setattr(VllmEncoder, "encode", encode_others)


def replay_one_too_few(patch: pytest.MonkeyPatch) -> None:
    replay = ZmqPublisher._replay
    patch.setattr(ZmqPublisher, "_replay", lambda self, subscriber, first: replay(self, subscriber, first + 1))


def apply_no_snapshot_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    publish_snapshot = VllmEventExporter._publish_snapshot

    async def publish_the_first(self: Any) -> None:
        if self.num_snapshots:
            self._epoch = host_of(self._client).service.epoch
            self._seqs, self._trouble = {"device": 0}, ""
            return
        await publish_snapshot(self)

    patch.setattr(VllmEventExporter, "_publish_snapshot", publish_the_first)
    patch.setattr(VllmEventExporter, "_publish_trouble", publish_nothing)


async def publish_nothing(self: Any, error: Any) -> None:
    """In place of an AllBlocksCleared."""


def give_all_pages_the_first_hash(patch: pytest.MonkeyPatch) -> None:
    unsigned = vllm_format._unsigned
    patch.setattr(vllm_format, "_unsigned", lambda hashes: [each & ~1 for each in unsigned(hashes)])


@pytest.mark.parametrize(
    "plant",
    [
        drop_removals,
        keep_blocks_of_earlier_lives,
        replay_one_too_few,
        apply_no_snapshot_after_a_restart,
        give_all_pages_the_first_hash,
    ],
    ids=lambda plant: plant.__name__,
)
async def test_random_traffic_finds_a_fault(plant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, TimeoutError)):
        for seed in range(6):
            await run_random_traffic(seed)


async def test_a_slow_subscriber_misses_batches_and_asks_for_them(tmp_path: Path) -> None:
    config = full(num_pages=2**15)
    async with exported(config, endpoint=f"ipc://{tmp_path}/events", hwm=1) as (cache, exporter, _):
        async with VllmSubscriber(exporter.endpoint, exporter.replay_endpoint, hwm=1) as slow:
            await slow.caught_up(exporter, cache)
            await slow.pause()
            for number in range(80):  # 20 KB each: more than the socket's buffers hold
                before = exporter.num_events
                ids = [100_000 + number] * 4096
                await (await cache.acquire(ids)).insert(ids, release=True)
                async with asyncio.timeout(60):
                    while exporter.num_events == before:  # noqa: ASYNC110 -- there is no event for it
                        await asyncio.sleep(0.001)
            slow.go_on()

            await slow.agrees(exporter, cache)
            assert slow.num_gaps > 0


@pytest.mark.parametrize("sizes", [[20_000, 100], [100, 2**15]])
async def test_what_waits_for_a_subscriber_that_never_reads_is_bounded_in_bytes(
    sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zmq_publisher, "_MAX_WAITING_BYTES", 4 * 2**20)
    publisher = ZmqPublisher(f"ipc://{tmp_path}/events", None, "", False, 10, 2**20, 100_000, 2**15, nothing)
    context = zmq.asyncio.Context()
    stuck = context.socket(zmq.SUB)
    try:
        stuck.setsockopt(zmq.SUBSCRIBE, b"")
        stuck.set_hwm(1)
        stuck.connect(publisher.endpoint)
        await publisher.publish(b"first")
        while not await stuck.poll(10):  # it is connected
            await publisher.publish(b"first")
        for size in sizes:
            for _ in range(12 * 2**20 // max(size, 1_000)):
                await publisher.publish(bytes(size))
        assert "reads too slowly, and misses batches" in caplog.text
        assert caplog.text.count("too slowly") == 1

        num_bytes = 0
        while await stuck.poll(500):
            num_bytes += len((await stuck.recv_multipart())[2])
        assert num_bytes <= (4 + 3) * 2**20  # with those in the buffers of the system, and of the subscriber
        await publisher.publish(b"last")  # it reads again
        assert await stuck.poll(60_000)
        assert (await stuck.recv_multipart())[2] == b"last"
    finally:
        await publisher.close()
        context.destroy(linger=0)


async def test_subscribers_that_come_together_get_one_snapshot() -> None:
    async with exported(replay_endpoint=None) as (cache, exporter, early):
        await publish(cache, 1, 2)
        await early.caught_up(exporter, cache)
        before = exporter.num_snapshots
        async with AsyncExitStack() as stack:
            late = [await stack.enter_async_context(VllmSubscriber(exporter.endpoint)) for _ in range(30)]
            for each in late:
                assert await each.agrees(exporter, cache)
        assert exporter.num_snapshots - before <= 5  # one, unless the machine is busy


async def test_a_subscriber_that_does_not_read_its_replay_delays_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zmq_publisher, "_MAX_WAITING_BYTES", 1)
    monkeypatch.setattr(zmq_publisher, "_STUCK_S", 10.0)
    publisher = ZmqPublisher(FREE_PORT, FREE_PORT, "", False, 200, 2**28, 1, 2**15, nothing)
    context = zmq.asyncio.Context()
    try:
        first = publisher.next_number
        for _ in range(200):
            await publisher.publish(bytes(100_000))
        stuck, reader = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        for each in (stuck, reader):
            each.set_hwm(1)
            each.connect(str(publisher.replay_endpoint))
        await stuck.send_multipart((b"", first.to_bytes(8, "big")))
        await until(lambda: len(publisher._replays) == 1)
        await reader.send_multipart((b"", first.to_bytes(8, "big")))
        numbers = [int.from_bytes((await reader.recv_multipart())[2], "big", signed=True) for _ in range(201)]
        assert numbers == [*range(first, first + 200), -1]
        await until(lambda: not publisher._replays)  # ten seconds later
        assert caplog.text.count("does not read its replay") == 1
    finally:
        await publisher.close()
        context.destroy(linger=0)


async def test_a_late_subscriber_asks_for_all_from_the_beginning() -> None:
    async with exported() as (cache, exporter, early):
        await publish(cache, 1, 2)
        await publish(cache, 3)
        await cache.evict(PAGE)
        await early.caught_up(exporter, cache)

        async with VllmSubscriber(exporter.endpoint, exporter.replay_endpoint) as late:
            assert await late.agrees(exporter, cache)
        assert exporter.num_snapshots == 1


async def test_batches_that_are_not_kept_any_more_are_replaced_by_a_snapshot_for_all() -> None:
    async with exported(buffer_batches=3) as (cache, exporter, early):
        for page in range(1, 9):
            await publish(cache, page, page)
            await early.caught_up(exporter, cache)

        async with VllmSubscriber(exporter.endpoint, exporter.replay_endpoint) as late:
            assert await late.agrees(exporter, cache)
        assert exporter.num_snapshots >= 2
        await early.agrees(exporter, cache)


async def test_kept_batches_are_few_and_small() -> None:
    async with exported(buffer_batches=7, buffer_bytes=2_000, heartbeat_s=60.0) as (cache, exporter, subscriber):
        await subscriber.until(lambda: exporter.num_snapshots)
        for page in range(20):
            await publish(cache, page)
            await asyncio.sleep(0)
        await publish(cache, *range(100, 130))  # one batch of more than all bytes
        await subscriber.until(lambda: exporter.num_events > 20)
        publisher: Any = exporter._publisher
        assert 1 <= len(publisher._kept) <= 7
        assert publisher._num_bytes == sum(len(payload) for _, payload in publisher._kept)
        assert publisher._num_bytes <= 2_000 or len(publisher._kept) == 1


async def test_without_a_replay_socket_a_new_subscriber_gets_a_snapshot() -> None:
    async with exported(replay_endpoint=None) as (cache, exporter, early):
        assert exporter.replay_endpoint is None
        await publish(cache, 1, 2)
        await early.caught_up(exporter, cache)

        async with VllmSubscriber(exporter.endpoint) as late:
            assert await late.agrees(exporter, cache)
            await publish(cache, 4)
            for each in (early, late):
                await each.agrees(exporter, cache)


async def test_a_consumer_that_binds_is_connected_to() -> None:
    consumer = VllmSubscriber(FREE_PORT, topic="kv@", bind=True)
    async with consumer, LocalPrefixCache(full()) as cache:
        await publish(cache, 1, 2)
        async with exporting(cache, consumer.bound, topic="kv@kv-0@model", connect=True) as exporter:
            assert exporter.endpoint == consumer.bound
            assert await consumer.agrees(exporter, cache)


async def test_another_topic_is_not_received() -> None:
    async with exported(topic="b") as (cache, exporter, _):
        async with VllmSubscriber(exporter.endpoint, topic="a") as other:
            async with VllmSubscriber(exporter.endpoint, exporter.replay_endpoint, topic="b") as subscriber:
                await publish(cache, 1)
                assert await subscriber.agrees(exporter, cache)
            assert other.batches == []


async def test_lost_events_are_replaced_by_a_snapshot() -> None:
    async with exported() as (cache, exporter, subscriber):
        await subscriber.caught_up(exporter, cache)
        feed: Any = host_of(cache).service.feeds.feed("device")
        feed._max_events = 2
        async with exporter._lock:  # the exporter is held up
            for page in range(1, 12):
                await publish(cache, page)
                await asyncio.sleep(0)

        await subscriber.agrees(exporter, cache)
        assert exporter.num_snapshots > 1


async def test_a_large_snapshot_comes_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_format, "MAX_PAYLOAD_BYTES", 2**20)
    async with LocalPrefixCache(full(num_pages=4096)) as cache:
        for page in range(1, 2_101):
            await publish(cache, page)
        async with exporting(cache, replay_endpoint=FREE_PORT) as exporter:
            async with VllmSubscriber(exporter.endpoint, exporter.replay_endpoint) as subscriber:
                await subscriber.agrees(exporter, cache)
                assert [len(batch.events) for batch in subscriber.batches if batch.events] == [1000, 1000, 101]


async def test_blocks_are_split_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_format, "MAX_BATCH_TOKENS", 4 * PAGE)
    async with LocalPrefixCache(full()) as cache:
        for page in (1, 2, 3):
            await publish(cache, page, page, page)
        async with exporting(cache, replay_endpoint=FREE_PORT) as exporter:
            async with VllmSubscriber(exporter.endpoint, exporter.replay_endpoint) as subscriber:
                await subscriber.agrees(exporter, cache)
                assert [len(batch.events) for batch in subscriber.batches if batch.events] == [3, 1]


def blocks_of(payloads: list[bytes]) -> list[Any]:
    """Return what happens to each block, in order."""
    found: list[Any] = []
    for payload in payloads:
        for event in msgspec.msgpack.decode(payload, type=recorded_batch()).events:
            if not hasattr(event, "token_ids"):
                found += getattr(event, "block_hashes", None) or ["cleared"]
                continue
            size, parent = event.block_size, event.parent_block_hash
            assert len(event.token_ids) == size * len(event.block_hashes)
            for place, block in enumerate(event.block_hashes):
                keys = event.extra_keys and event.extra_keys[place]
                found.append((block, parent, event.token_ids[place * size :][:size], keys, event.lora_name))
                parent = block
    return found


@pytest.mark.parametrize("namespace", [None, frame_namespace("picture", "adapter", "tenant")])
def test_large_batches_are_split_without_a_change_of_their_blocks(
    namespace: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(0)

    def stored(num_blocks: int, parent: int | None) -> BlockStored:
        hashes, ids = page_hashes(list(range(num_blocks * 4)), 4), [random.randrange(2**20)] * (4 * num_blocks)
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=ids,
            block_size=4,
            medium="CPU",
            namespace=namespace,
        )

    removed = BlockRemoved(block_hashes=page_hashes(list(range(4000)), 4), medium="CPU")
    events = [stored(777, None), AllBlocksCleared(), stored(1, -5), stored(2, None), removed]
    encoder = VllmEncoder(0, None)
    monkeypatch.setattr(vllm_format, "MAX_PAYLOAD_BYTES", 2**30)
    (whole,) = encoder.encode(events)
    for limit in (1, 1_000, 5_000):
        monkeypatch.setattr(vllm_format, "MAX_PAYLOAD_BYTES", limit)
        parts = encoder.encode(events)
        assert blocks_of(parts) == blocks_of([whole])
        assert limit == 1 or max(map(len, parts)) <= limit
        assert limit == 1 or len(parts) <= 4 * (len(whole) // limit + 1)


# ---------------------------------------------------------------- ends and restarts


async def test_a_closed_exporter_leaves_no_blocks_and_the_next_one_goes_on() -> None:
    async with LocalPrefixCache(full()) as cache:
        await publish(cache, 1, 2)
        async with exporting(cache, replay_endpoint=FREE_PORT) as first:
            endpoints = first.endpoint, first.replay_endpoint
            subscriber = VllmSubscriber(*endpoints)
            assert await subscriber.agrees(first, cache)
        async with subscriber:
            await subscriber.until(lambda: not subscriber.blocks)

            async with exporting(cache, endpoints[0], replay_endpoint=endpoints[1]) as second:
                assert await subscriber.agrees(second, cache)


async def test_a_cache_that_restarts_without_full_events_ends_the_export() -> None:
    async with LocalPrefixCache(full()) as cache:
        async with VllmEventExporter(cache, FREE_PORT, replay_endpoint=FREE_PORT, heartbeat_s=0.1) as exporter:
            async with VllmSubscriber(exporter.endpoint, exporter.replay_endpoint) as subscriber:
                running = asyncio.create_task(exporter.run())
                await publish(cache, 1)
                assert await subscriber.agrees(exporter, cache)

                await restart(cache, exporter, full(events="slim", events_stride_tokens=PAGE))

                with pytest.raises(InvalidRequest, match="events='full'"):
                    async with asyncio.timeout(60):
                        await running
                await subscriber.until(lambda: not subscriber.blocks)


async def test_a_closed_exporter_ends_its_run_and_closes_again() -> None:
    async with LocalPrefixCache(full()) as cache:
        exporter = VllmEventExporter(cache, FREE_PORT)
        await exporter.close()
        async with VllmEventExporter(cache, FREE_PORT) as exporter:
            assert await exporter.open() is exporter
            running = asyncio.create_task(exporter.run())
            await asyncio.sleep(0.05)
            await exporter.close()
            async with asyncio.timeout(60):
                assert await running is None
        assert (await cache.stats()).open_sessions == 1


async def test_a_close_ends_though_zmq_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with LocalPrefixCache(full()) as cache:
        exporter = await VllmEventExporter(cache, FREE_PORT).open()
        publisher: Any = exporter._publisher
        may_end = threading.Event()
        term = publisher._context.term
        monkeypatch.setattr(zmq_publisher, "_TERM_S", 0.0)
        monkeypatch.setattr(publisher._context, "term", lambda: (may_end.wait(), term()))

        try:
            async with asyncio.timeout(60):
                await exporter.close()
        finally:
            may_end.set()  # else a failure would keep the loop from its end

        assert "ZMQ has not closed tcp://127.0.0.1:" in caplog.text


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("events", ["slim", False])
async def test_a_cache_without_full_events_is_refused(events: Any) -> None:
    async with LocalPrefixCache(full(events=events)) as cache:
        with pytest.raises(InvalidRequest, match=r"CacheConfig\(events='full'\)"):
            async with VllmEventExporter(cache, FREE_PORT):
                pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "127.0.0.1:5557"}, "endpoint must be a free ZMQ address"),
        ({"endpoint": 5557}, "endpoint must be a free ZMQ address"),
        ({"endpoint": FREE_PORT, "replay_endpoint": "tcp://"}, "replay_endpoint must be a free ZMQ address"),
        ({"medium": "DISK"}, "medium"),
        ({"data_parallel_rank": -1}, "data_parallel_rank"),
        ({"buffer_batches": 0}, "buffer_batches"),
        ({"buffer_bytes": "1"}, "buffer_bytes"),
        ({"heartbeat_s": 0}, "heartbeat_s"),
        ({"heartbeat_s": float("nan")}, "heartbeat_s"),
        ({"topic": b"kv"}, "topic must be a text"),
        ({"hwm": 0}, "hwm"),
        ({"hwm": 2**31}, "hwm"),
        ({"data_parallel_rank": True}, "data_parallel_rank"),
        ({"data_parallel_rank": "0"}, "data_parallel_rank"),
        ({"endpoint": "tcp://127.0.0.1:99999"}, "the port must be at most 65535"),
        ({"endpoint": FREE_PORT, "replay_endpoint": "tcp://127.0.0.1:99999"}, "replay_endpoint.* at most 65535"),
    ],
)
async def test_a_wrong_argument_is_refused(options: dict[str, Any], message: str) -> None:
    async with LocalPrefixCache(full()) as cache:
        with pytest.raises(InvalidRequest, match=message):
            async with VllmEventExporter(cache, **{"endpoint": FREE_PORT} | options):
                pass


async def test_a_used_address_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with exported() as (cache, exporter, _):
        for options in ({"endpoint": exporter.endpoint}, {"replay_endpoint": exporter.replay_endpoint}):
            with pytest.raises(InvalidRequest, match="in use"):
                async with VllmEventExporter(cache, **{"endpoint": FREE_PORT} | options):
                    pass
    gc.collect()
    assert "Traceback" not in caplog.text  # of a task


async def test_wrong_requests_for_a_replay_are_ignored_and_logged_at_a_bounded_rate(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with exported() as (cache, exporter, subscriber):
        replay: Any = subscriber._replay
        for _ in range(100):
            await replay.send_multipart((b"", b"7"))
            await replay.send_multipart((b"x", b"\0" * 8))
        await publish(cache, 1)
        assert await subscriber.agrees(exporter, cache)
        await subscriber.until(lambda: exporter._publisher._refused._num_left_out == 199)  # type: ignore[union-attr]
        assert caplog.text.count("wrong form") == 1

        monkeypatch.setattr(bounded_log, "_EVERY_S", 0.0)
        exporter._publisher._refused._next_at = 0.0  # type: ignore[union-attr]
        await replay.send_multipart((b"", b"7"))
        await subscriber.until(lambda: caplog.text.count("wrong form") == 2)
    assert "(199 warnings more since the last one)" in caplog.text


@pytest.mark.parametrize("missing", [*more("msgspec"), "zmq"])
def test_without_the_extra_the_error_names_it(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; import {vllm_events.__name__}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "in the clone: pip install '.[zmq]'" in done.stderr.splitlines()[-1]


def test_hashes_are_those_of_the_cache_modulo_2_to_the_64() -> None:
    hashes = page_hashes(list(range(64)), PAGE)
    assert vllm_format._unsigned(hashes.astype("<i8").tobytes()) == [each & UNSIGNED for each in hashes.tolist()]
    assert not PoolConfig(num_slots=64).layers, "these tests have caches without KV"
