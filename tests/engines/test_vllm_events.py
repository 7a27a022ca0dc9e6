"""vLLM's own decoder, and its own publisher, agree with the exporter on every byte."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from support.exporters.event_structs import read_from_vllm, recorded
from support.exporters.running_exporter import PAGE, exported, publish
from support.exporters.vllm_subscriber import VllmSubscriber


def test_the_recorded_format_is_that_of_the_installed_vllm() -> None:
    assert read_from_vllm() == recorded()


async def test_vllm_decodes_the_batches_and_encodes_the_same_bytes() -> None:
    from vllm.distributed.kv_events import KVEventBatch

    payloads: list[bytes] = []
    async with exported() as (cache, exporter, _):
        async with VllmSubscriber(exporter.endpoint, exporter.replay_endpoint, batch_type=KVEventBatch) as subscriber:
            decode = subscriber._decoder.decode

            class Remembering:
                def decode(self, payload: bytes) -> Any:
                    payloads.append(payload)
                    return decode(payload)

            subscriber._decoder = Remembering()  # type: ignore[assignment]
            await subscriber.caught_up(exporter, cache)  # so that these come as events
            await publish(cache, 1, 2, 3)
            await publish(cache, 1, 2, 4, lora_id="adapter")
            await cache.evict(PAGE)
            assert await subscriber.agrees(exporter, cache)
            await cache.reset()
            await publish(cache, 5)
            assert await subscriber.agrees(exporter, cache)

    kinds = {type(event).__name__ for batch in subscriber.batches for event in batch.events}
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert [msgspec.msgpack.encode(batch) for batch in subscriber.batches] == payloads


async def test_a_salt_is_decoded_by_vllm_and_skipped_where_it_has_no_field() -> None:
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

    async with exported() as (cache, exporter, _):
        async with VllmSubscriber(exporter.endpoint, exporter.replay_endpoint, batch_type=KVEventBatch) as subscriber:
            await publish(cache, 1, 2, cache_salt="s")
            assert await subscriber.agrees(exporter, cache)
    (stored,) = [event for batch in subscriber.batches for event in batch.events if isinstance(event, BlockStored)]
    assert stored.extra_keys == [("s",), None]


async def test_the_frames_are_those_of_vllms_publisher(tmp_path: Path) -> None:
    from vllm.distributed.kv_events import AllBlocksCleared, EventBatch, ZmqEventPublisher

    async with exported(topic="kv") as (cache, exporter, _):
        await publish(cache, 1, 2)
        ours: list[list[bytes]] = []
        while len(ours) < 2:  # a snapshot, and the end
            ours = await replayed(str(exporter.replay_endpoint))
    replay = f"ipc://{tmp_path}/replay"
    publisher = ZmqEventPublisher(0, f"ipc://{tmp_path}/events", replay, topic="kv")
    try:
        publisher.publish(EventBatch(ts=0.0, events=[AllBlocksCleared()]))
        theirs: list[list[bytes]] = []
        while len(theirs) < 2:  # its thread has published by then
            theirs = await replayed(replay)
    finally:
        await asyncio.to_thread(publisher.shutdown)

    assert ours[-1] == theirs[-1]
    assert [ours[0][0], ours[0][1], len(ours[0][2])] == [theirs[0][0], theirs[0][1], len(theirs[0][2])]
    assert [len(frames) for frames in ours] == [4] * len(ours)
    assert len(theirs[0]) == 4
    cleared = msgspec.msgpack.decode(theirs[0][3])
    assert cleared == [0.0, [{"type": "AllBlocksCleared"}], 0]
    assert msgspec.msgpack.decode(ours[0][3])[1][0] == cleared[1][0]


async def replayed(endpoint: str) -> list[list[bytes]]:
    """Return the frames of a replay from the beginning, as a DEALER gets them."""
    with zmq.asyncio.Context() as context:
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(endpoint)
            await dealer.send_multipart((b"", (0).to_bytes(8, "big")))
            frames: list[list[bytes]] = []
            async with asyncio.timeout(60):
                while not frames or frames[-1][3]:
                    frames.append(await dealer.recv_multipart())
            return frames
