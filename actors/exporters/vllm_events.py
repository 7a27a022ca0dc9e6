"""`VllmEventExporter`: a cache's KV events, published in vLLM's format for indexers and routers that read vLLM's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from raydix.actors.client.event_reader import until_one_ends
from raydix.actors.client.prefix_cache_client import PrefixCacheClient
from raydix.schemas import (
    AllBlocksCleared,
    CacheError,
    CacheUnavailable,
    InvalidRequest,
    KVEvent,
    KVEventBatch,
    KVEventSnapshot,
    SlimEventBatch,
    SlimEventSnapshot,
    StaleEpoch,
)
from raydix.schemas.requests import DEVICE
from raydix.schemas.shown import brief
from raydix.schemas.version import how_to_install

try:
    from raydix.actors.exporters.vllm_format import MAX_PAYLOAD_BYTES, VllmEncoder, in_batches
    from raydix.actors.exporters.zmq_publisher import ZmqPublisher
except ImportError as error:
    raise ImportError(f"exporting events needs msgspec and pyzmq ({error}); {how_to_install('zmq')}") from error

logger = logging.getLogger(__name__)

_RETRY_S = 0.25  # the pause after an error


class VllmEventExporter:
    """Publishes the events of one cache as vLLM's `ZmqEventPublisher` does: for Dynamo's indexer, llm-d and others.

        async with VllmEventExporter("kv-0", replay_endpoint="tcp://127.0.0.1:5558") as exporter:
            await exporter.run()

    It reads the events through a client of its own, and the cache does not wait for it. The first batch is
    `AllBlocksCleared` with the first blocks of a snapshot. The same follows after events were lost, and after the cache
    has restarted. While the cache does not answer, and after `close`, subscribers have got an `AllBlocksCleared`. So
    the blocks of a subscriber that missed no batch are the cache's blocks, late by the way of the events.

    All tiers of a cache go into the same batches, each event with its medium: "GPU" of the pool, "CPU" of the host
    tier, "STORAGE" of the disk. A pool in host memory above a disk alone is "CPU". A snapshot lists the blocks of all
    tiers, and `AllBlocksCleared` comes only before one, since it names no medium. So also when a single tier lost
    events or was cleared, the blocks of the others come again.

    A subscriber that missed batches asks the replay socket for them. If they are not kept any more, the exporter
    publishes a snapshot for all. Without a replay socket it does so when subscribers come. An idle exporter sends an
    empty batch from time to time, so that subscribers find that they missed the last one.

    Args:
        cache: the handle or the name of a cache, as `PrefixCacheClient` takes it; with `CacheConfig(events="full")`.
        endpoint: ZMQ address to bind; to port `*` any free one.
        replay_endpoint: address of the replay socket; None: there is none.
        topic: of every batch.
        data_parallel_rank: in every batch. It changes no port: give each exporter its own endpoints.
        medium: where consumers find the KV: "GPU" or "CPU"; None: where the cache's pool is. The pool of an index-only
            cache is on the CPU, while the KV is the engine's. Of several tiers each event has the medium of its tier.
        tiers: some of "device", "host" and "disk"; None: all tiers of the cache. A consumer that does not look at media
            needs one alone: else a block that leaves one tier would be gone for it.
        connect: connect to the endpoint, which the consumer has bound.
        buffer_batches, buffer_bytes: batches kept for replays.
        hwm: batches that wait for a slow subscriber, or fewer, so that they have at most 256 MB; beyond it, that one
            misses some, which is logged.
        heartbeat_s: seconds without a batch until an empty one is sent.

    Attributes:
        endpoint: where subscribers connect to, with the port that was chosen, once it is open.
        replay_endpoint: where they ask for missed batches, once it is open; None: nowhere.
        num_batches, num_events: published, snapshots included.
        num_snapshots: published.
    """

    def __init__(
        self,
        cache: Any,
        endpoint: str = "tcp://127.0.0.1:5557",
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        data_parallel_rank: int = 0,
        medium: str | None = None,
        tiers: Collection[str] | None = None,
        connect: bool = False,
        buffer_batches: int = 10_000,
        buffer_bytes: int = 256 * 2**20,
        hwm: int = 100_000,
        heartbeat_s: float = 5.0,
    ) -> None:
        if medium not in (None, "GPU", "CPU"):
            raise InvalidRequest(f'medium must be "GPU", "CPU" or None, not {brief(medium)}')
        if tiers is not None and (isinstance(tiers, str) or not isinstance(tiers, Collection) or not tiers):
            raise InvalidRequest(f"tiers must be a list of at least one tier's name or None, not {brief(tiers)}")
        if not isinstance(topic, str):
            raise InvalidRequest(f"topic must be a text, not {brief(topic)}")
        _check_count("data_parallel_rank", data_parallel_rank, 0)
        _check_count("buffer_batches", buffer_batches, 1)
        _check_count("buffer_bytes", buffer_bytes, 1, most=2**63 - 1)
        _check_count("hwm", hwm, 1)
        if type(heartbeat_s) not in (int, float) or not 0 < heartbeat_s < float("inf"):
            raise InvalidRequest(f"heartbeat_s must be a finite number above 0, not {brief(heartbeat_s)}")
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self.num_batches = self.num_events = self.num_snapshots = 0
        self._client = PrefixCacheClient(cache, owner="event exporter")
        self._encoder = VllmEncoder(data_parallel_rank, medium)
        self._medium = medium
        self._wanted = tiers
        self._sending = (topic, connect, buffer_batches, buffer_bytes, hwm)
        self._heartbeat_s = heartbeat_s
        self._publisher: ZmqPublisher | None = None
        self._lock = asyncio.Lock()  # held while a snapshot or a batch is published
        # The epoch of the events that were published last, and the number of each tier's last one.
        self._epoch = ""
        self._seqs: dict[str, int] = {}
        self._trouble = ""  # the reason why no events are published
        self._sent_at = 0.0  # loop time of the last batch
        self._beating: asyncio.Task[None] | None = None

    async def open(self) -> Self:
        """Open the client's session and the sockets; no effect if they are open.

        Raises:
            InvalidRequest: the cache publishes no full events, or has no such tier, or an endpoint cannot be used.
            CacheUnavailable: the cache does not answer.
        """
        if self._publisher is None:
            await self._client.open()
            self._tiers()
            self._publisher = ZmqPublisher(
                self.endpoint,
                self.replay_endpoint,
                *self._sending,
                max_payload_bytes=MAX_PAYLOAD_BYTES,
                on_demand=self._publish_snapshot,
            )
            self.endpoint, self.replay_endpoint = self._publisher.endpoint, self._publisher.replay_endpoint
            self._beating = asyncio.create_task(self._beat())
        return self

    async def run(self) -> None:
        """Publish until the exporter is closed. One call at a time.

        Raises:
            InvalidRequest: the cache has restarted, and publishes no full events any more, or has lost a tier.
        """
        await self.open()
        while not self._client.closed:
            pause_s = _RETRY_S
            try:
                await self._follow()
            except InvalidRequest:
                if not self._client.closed:
                    raise
            except CacheError as error:
                pause_s = 0.0 if isinstance(error, StaleEpoch) else _RETRY_S
                await self._publish_trouble(error)
            if not self._client.closed:
                await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Publish that no blocks are left, and close the sockets and the client's session. Idempotent."""
        publisher, self._publisher = self._publisher, None
        await self._client.close()
        if self._beating is not None and publisher is not None:
            self._beating.cancel()
            async with self._lock:
                for payload in self._encoder.encode((AllBlocksCleared(),)):
                    await publisher.publish(payload, is_base=True)
            await publisher.close()

    async def __aenter__(self) -> Self:
        try:
            return await self.open()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---------------------------------------------------------------- from events to batches

    async def _follow(self) -> None:
        """Publish a snapshot, and then the events, until the cache fails, or has restarted with other tiers."""
        await self._publish_snapshot()
        seqs = self._seqs
        try:
            await until_one_ends(self._follow_tier(tier, seq) for tier, seq in seqs.items())
        except InvalidRequest:
            if await self._has_tiers(tuple(seqs)):
                raise

    async def _follow_tier(self, tier: str, after_seq: int) -> None:
        """Publish the events of one tier."""
        async with aclosing(self._client.events(after_seq, tier=tier)) as batches:  # type: ignore[type-var]
            async for batch in batches:
                if not await self._publish_batch(tier, batch):
                    await self._publish_snapshot()

    async def _publish_batch(self, tier: str, batch: KVEventBatch | SlimEventBatch) -> bool:
        """Publish the events of a batch that were not published yet. Return False if a snapshot is needed in its place.

        Events are missing before it; or it clears one of several tiers, for which there is no event.
        """
        async with self._lock:
            if isinstance(batch, SlimEventBatch) or batch.epoch != self._epoch:
                return False  # a subscriber's demand may have changed the epoch since the batch was read
            num_known = self._seqs[tier] - batch.seq + len(batch.events)
            if batch.gap or num_known < 0:
                return num_known >= 0  # a snapshot may have what was lost
            events = batch.events[num_known:]
            if len(self._seqs) > 1 and any(isinstance(event, AllBlocksCleared) for event in events):
                return False
            if events:
                await self._send_parts(events)
                self._seqs[tier] = batch.seq
            return True

    async def _publish_snapshot(self) -> None:
        """Publish that all blocks are gone, and then all that are there, in each tier."""
        async with self._lock:
            await self._client.open()  # The cache may have other tiers after a restart.
            tiers = self._tiers()
            try:
                snapshots = await asyncio.gather(*[self._full_snapshot(tier) for tier in tiers])
            except InvalidRequest:
                if await self._has_tiers(tiers):
                    raise
                snapshots = []
            if not await self._has_tiers(tiers):
                raise CacheUnavailable("the cache has restarted with other tiers")
            epochs = [snapshot.epoch for snapshot in snapshots]
            if epochs[0] != epochs[-1]:
                raise StaleEpoch(epochs[0], epochs[-1])
            stored = [event for snapshot in snapshots for event in snapshot.events]
            await self._send_parts((AllBlocksCleared(), *stored), is_base=True)
            self._epoch = epochs[0]
            self._seqs = {tier: snapshot.seq for tier, snapshot in zip(tiers, snapshots, strict=True)}
            self.num_snapshots += 1
            self._trouble = ""

    async def _full_snapshot(self, tier: str) -> KVEventSnapshot:
        snapshot = await self._client.event_snapshot(tier=tier)
        if isinstance(snapshot, SlimEventSnapshot):
            self._tiers()
        assert isinstance(snapshot, KVEventSnapshot)
        return snapshot

    async def _publish_trouble(self, error: CacheError) -> None:
        """Publish that no block is known to be there, once."""
        async with self._lock:
            if not self._trouble:
                logger.warning("events are not exported, all blocks are cleared: %s", error)
                await self._send((AllBlocksCleared(),), is_base=True)
            self._trouble = str(error)

    async def _send_parts(self, events: Sequence[KVEvent], is_base: bool = False) -> None:
        """Send events in small batches; other tasks get their turn between them."""
        for place, part in enumerate(in_batches(events)):
            await self._send(part, is_base and place == 0)
            await asyncio.sleep(0)

    async def _send(self, events: Sequence[KVEvent], is_base: bool = False) -> None:
        if self._publisher is None:
            return
        for payload in self._encoder.encode(events):
            await self._publisher.publish(payload, is_base)
            is_base = False
            self.num_batches += 1
        self._sent_at = asyncio.get_running_loop().time()
        self.num_events += len(events)

    async def _beat(self) -> None:
        """Send an empty batch whenever there was none for a while."""
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        while True:
            await asyncio.sleep(self._sent_at + self._heartbeat_s - loop.time())
            async with self._lock:
                if loop.time() >= self._sent_at + self._heartbeat_s:
                    await self._send(())

    async def _has_tiers(self, tiers: tuple[str, ...]) -> bool:
        """Return whether the cache still has the tiers that a request named, and no others."""
        await self._client.open()
        return self._tiers() == tiers

    def _tiers(self) -> tuple[str, ...]:
        """Return the tiers to publish, as the cache has them now.

        Raises:
            InvalidRequest: the cache publishes no full events, has no such tier, or `medium` is for one tier alone.
        """
        config = self._client.config
        if config.events != "full":
            raise InvalidRequest(
                f"exporting events needs a cache with CacheConfig(events='full'), not {config.events!r}: "
                "start it with that"
            )
        present = (DEVICE, *config.tiers_below)
        wanted = present if self._wanted is None else self._wanted
        if unknown := [tier for tier in wanted if tier not in present]:
            raise InvalidRequest(f"tiers must be of {', '.join(map(repr, present))}, not {brief(unknown[0])}")
        tiers = tuple(tier for tier in present if tier in wanted)
        if self._medium is not None and len(tiers) > 1:
            raise InvalidRequest(
                f"medium must be None for several tiers ({', '.join(tiers)}), not {self._medium!r}: their events say "
                "where the KV is; or export one of the tiers"
            )
        return tiers


def _check_count(argument: str, value: Any, least: int, most: int = 2**31 - 1) -> None:
    """Raise InvalidRequest unless this is a whole number that ZMQ and a message can carry."""
    if type(value) is not int or not least <= value <= most:
        raise InvalidRequest(f"{argument} must be a whole number from {least} to {most}, not {brief(value)}")
