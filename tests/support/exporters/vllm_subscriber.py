"""`VllmSubscriber`: a consumer of vLLM's events, which refuses wrong batches and asks for those that it missed."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple, Self

import msgspec
import zmq
import zmq.asyncio
from support.exporters.event_structs import recorded, recorded_batch

from raydix.actors import PrefixCacheClient
from raydix.actors.exporters.vllm_events import VllmEventExporter
from raydix.schemas import KVEventSnapshot

UNSIGNED = 2**64 - 1
PATIENCE_S = 60  # to wait for a condition
MEDIA = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
END_OF_REPLAY = bytes.fromhex(recorded()["end_of_replay"])


class Block(NamedTuple):
    """A block that is there."""

    parent: int | None
    token_ids: tuple[int, ...]
    lora_name: str | None


class VllmSubscriber:
    """Follows an exporter from the beginning. Its task fails at a wrong batch.

    Args:
        endpoint: of the batches.
        replay_endpoint: None: batches that were missed are lost, and blocks count from the next snapshot on.
        batch_type: the struct of a batch; that of vLLM where it is installed.
        hwm: batches that wait to be read.
        bind: bind to the endpoint.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        batch_type: Any = None,
        hwm: int = 1000,
        bind: bool = False,
    ) -> None:
        self.by_medium: dict[str, dict[int, Block]] = {}
        self.number = -1  # of the last batch
        self.batches: list[Any] = []
        self.num_gaps = 0
        self.is_synced = False  # has all blocks
        self._is_asking = False  # reads a replay, which may begin before the payload that gives all blocks
        self._topic = topic.encode()
        self._decoder = msgspec.msgpack.Decoder(batch_type or recorded_batch())
        self._context = zmq.asyncio.Context()
        self._endpoint = endpoint
        self._hwm = hwm
        self._replay = self._context.socket(zmq.DEALER) if replay_endpoint else None
        if self._replay is not None:
            self._replay.connect(str(replay_endpoint))
        self._sub = self._subscribe(bind)
        self._task = asyncio.create_task(self._read())

    def _subscribe(self, bind: bool = False) -> Any:
        sub = self._context.socket(zmq.SUB)
        sub.set_hwm(self._hwm)
        sub.setsockopt(zmq.SUBSCRIBE, self._topic)
        if bind:
            sub.bind(self._endpoint)
        else:
            sub.connect(self._endpoint)
        return sub

    @property
    def blocks(self) -> dict[int, Block]:
        """Return the blocks that are there in any medium."""
        return {number: block for blocks in self.by_medium.values() for number, block in blocks.items()}

    @property
    def bound(self) -> str:
        """Return the endpoint that it has bound."""
        return str(self._sub.get_string(zmq.LAST_ENDPOINT))

    async def pause(self) -> None:
        """Stop to read; batches wait until there are too many."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._is_asking = False

    def go_on(self, reconnect: bool = False) -> None:
        """Read on; after a new connection, without the batches that wait."""
        if reconnect:
            self._sub.close(linger=0)
            self._sub = self._subscribe()
        self._task = asyncio.create_task(self._read())

    async def caught_up(self, exporter: VllmEventExporter, client: PrefixCacheClient) -> set[int]:
        """Wait until all events are here that the cache has published until now. Return the blocks of all its tiers."""
        return set().union(*(await self._blocks_of(exporter, client)).values())

    async def agrees(self, exporter: VllmEventExporter, client: PrefixCacheClient) -> set[int]:
        """Wait as `caught_up` does; the blocks must be those of the cache, in each tier. Return them."""
        expected = await self._blocks_of(exporter, client)
        if len(expected) > 1:
            there = {medium: set(blocks) for medium, blocks in self.by_medium.items() if blocks}
            media = MEDIA if "host" in expected else MEDIA | {"device": "CPU"}  # a disk lies below a pool on the CPU
            assert there == {media[tier]: blocks for tier, blocks in expected.items() if blocks}
        everything: set[int] = set().union(*expected.values())
        assert set(self.blocks) == everything
        return everything

    async def _blocks_of(self, exporter: VllmEventExporter, client: PrefixCacheClient) -> dict[str, set[int]]:
        """Wait as `caught_up` does; return the blocks of each tier that is exported."""
        await client.open()
        tiers = exporter._wanted or ("device", *client.config.tiers_below)
        snapshots = {tier: await client.event_snapshot(tier=tier) for tier in tiers}
        (epoch,) = {snapshot.epoch for snapshot in snapshots.values()}
        seqs = {tier: snapshot.seq for tier, snapshot in snapshots.items()}
        await self.until(lambda: (exporter._epoch, exporter._trouble) == (epoch, ""))
        await self.until(lambda: all(exporter._seqs.get(tier, -1) >= seq for tier, seq in seqs.items()))
        assert exporter._publisher is not None
        last = exporter._publisher.next_number - 1
        await self.until(lambda: self.number >= last and not self._is_asking)
        if self._replay is None:
            await self.until(lambda: self.is_synced)  # a snapshot is on its way
        assert self.is_synced, "batches are missing"
        if (exporter._epoch, exporter._seqs) != (epoch, seqs):  # the cache has gone on: it evicts
            return await self._blocks_of(exporter, client)
        found: dict[str, set[int]] = {}
        for tier, snapshot in snapshots.items():
            assert isinstance(snapshot, KVEventSnapshot)
            found[tier] = {number & UNSIGNED for event in snapshot.events for number in event.block_hashes}
        return found

    async def until(self, holds: Any) -> None:
        """Wait until a condition holds. Fails if the reading has failed."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                if self._task.done():
                    self._task.result()
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        """End the task and the sockets."""
        await self.pause()
        self._context.destroy(linger=0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---------------------------------------------------------------- reading

    async def _read(self) -> None:
        while True:
            topic, number, payload = await self._sub.recv_multipart()
            assert topic.startswith(self._topic) and len(number) == 8
            await self._take(int.from_bytes(number, "big"), payload)

    async def _take(self, number: int, payload: bytes) -> None:
        if number <= self.number:
            return  # a replay had it
        if number > self.number + 1:
            self.num_gaps += self.number >= 0
            if self._replay is not None:
                await self._ask_from(self.number + 1)
                if self.number < number:  # the end was that of a replay that `pause` has cut off
                    await self._ask_from(self.number + 1)
                assert self.number >= number, "a replay goes to the end"
                return
        self._apply(number, payload)

    async def _ask_from(self, first: int) -> None:
        assert self._replay is not None
        self._is_asking = True
        await self._replay.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            empty, topic, number, payload = await self._replay.recv_multipart()
            assert empty == b""
            if number == END_OF_REPLAY:
                assert (topic, payload) == (b"", b"")
                self._is_asking = False
                return
            assert topic == self._topic
            if int.from_bytes(number, "big") > self.number:  # else both replays have it
                self._apply(int.from_bytes(number, "big"), payload)

    def _apply(self, number: int, payload: bytes) -> None:
        assert number > self.number
        if number != self.number + 1:
            self.is_synced = False  # until a snapshot comes
        batch = self._decoder.decode(payload)
        self.batches.append(batch)
        for event in batch.events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.by_medium.clear()
                self.is_synced = True
            elif event.group_idx:
                pass  # `blocks` has the full KV alone
            elif self.is_synced and kind == "BlockStored":
                self._store(event)
            elif self.is_synced:
                self._remove(event)
        self.number = number

    def _store(self, event: Any) -> None:
        ids, size, parent = event.token_ids, event.block_size, event.parent_block_hash
        assert len(ids) == size * len(event.block_hashes) > 0
        assert event.extra_keys is None or len(event.extra_keys) == len(event.block_hashes)
        blocks = self.by_medium.setdefault(event.medium, {})
        assert parent is None or parent in blocks, f"{parent} is not there"
        for place, each in enumerate(event.block_hashes):
            assert 0 <= each <= UNSIGNED
            assert each not in blocks, f"{each} is stored twice"
            blocks[each] = Block(parent, tuple(ids[place * size : (place + 1) * size]), event.lora_name)
            parent = each

    def _remove(self, event: Any) -> None:
        for each in event.block_hashes:
            del self.by_medium[event.medium][each]
