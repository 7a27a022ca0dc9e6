"""`SmallDisk`: a pool, its cache, and a disk below it, put together of the parts of a disk tier."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.tiers.two_tiers import Moves

from raydix.actors.tiers.copier import Copier
from raydix.actors.tiers.disk.disk_copies import DiskCopies
from raydix.actors.tiers.disk.disk_index import IndexLayout
from raydix.actors.tiers.disk.disk_store import DiskStore
from raydix.actors.tiers.disk.disk_writer import DiskWriter, Records
from raydix.actors.tiers.disk.file_calls import FileCalls
from raydix.actors.tiers.job_threads import Ended
from raydix.actors.tiers.move_batch import MoveBatch
from raydix.cache_core import KVCache, RadixCache, RadixKey, RecordLayout, RecordPool, TokenToKVPoolAllocator
from raydix.cache_core.tiers.disk_spaces import DiskSpace, DiskSpaces
from raydix.cache_core.tiers.index_row import FIRST, IndexRow, RowPlace
from raydix.cache_core.tiers.record_keeper import RecordKeeper
from raydix.cache_core.tiers.row_runs import RowRuns
from raydix.cache_core.tiers.tier import Tier
from raydix.cache_core.tree.page_hashes import chain_hashes

PAGE = 4
SLOT_BYTES = 100
_SLICE = 3  # rows and pages


async def result_of(writer: DiskWriter, task: Callable[[DiskStore], Any]) -> Any:
    """Do work in a writer's thread; return its result, or raise its error."""
    done: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
    writer.submit(task, done.set_result)
    async with asyncio.timeout(60):
        ended = await done
    if ended.error is not None:
        raise ended.error
    return ended.result


class SmallDisk:
    """A cache of 64 pages above a disk of some records. All calls are made on the event loop.

    The KV of a page is made of its hash, so that each process knows it.
    """

    def __init__(self, path: Path, num_records: int = 40, model: str = "m", calls: FileCalls | None = None) -> None:
        self.model = model
        self.pool = RecordPool(RecordLayout(64 * PAGE, PAGE, SLOT_BYTES))
        self.cache = self._cache(64)
        self.disk = self._cache(num_records)
        self.keeper = RecordKeeper.of_pages(self.disk.allocator)
        self.spaces = DiskSpaces(self.disk, {"full": self.keeper})
        self.moves = Moves(Tier("device", "CPU", self.cache), Tier("disk", "STORAGE", self.disk))
        self._opened: asyncio.Future[DiskStore | Exception] = asyncio.get_running_loop().create_future()
        layout = RecordLayout(num_records * PAGE, PAGE, SLOT_BYTES)

        def open_store() -> DiskStore:
            index = IndexLayout("abc", PAGE, "{}")
            return DiskStore(str(path), "kv-0", layout, index, direct_io="off", wait_s=30, calls=calls)

        self.writer = DiskWriter(open_store, self._opened.set_result, self.pool)

    def _cache(self, num_pages: int) -> KVCache:
        allocator = TokenToKVPoolAllocator(num_pages * PAGE, PAGE)
        return KVCache(RadixCache(PAGE, None, allocator), allocator)

    async def open(self) -> None:
        """Read the index, bind the model, and build the tree of its space."""
        found = await self._opened
        if isinstance(found, Exception):
            raise found
        self.store = found
        self.copier = Copier(DiskCopies(self.pool, found, self.writer.threads.help), threads=self.writer.threads)
        for space in await self.work(lambda store: store.index.spaces()):
            self.spaces.add(space.number, space.namespace, (space.base, space.adapter, space.label), space.arity)
        place: RowPlace | None = FIRST
        while place is not None:
            at = place
            spaces, kinds, records, place = await self.work(lambda store, at=at: store.index.records(at, _SLICE))
            if refused := self.spaces.read(spaces, kinds, records):
                await self.work(lambda store, rows=refused: store.index.commit(removed=rows))
        self.spaces.end_reading()
        models = (self.model, None, "v1")
        if (bound := self.spaces.bind(None, models)) is not None:
            await self._build(bound)
            return
        added = await self.work(lambda store: store.index.add_space(None, *models))
        self.spaces.begin(self.spaces.add(added.number, None, models))

    async def _build(self, space: DiskSpace) -> None:
        runs = RowRuns(PAGE, None)
        place: RowPlace | None = FIRST
        while place is not None:
            at = place

            def read(store: DiskStore, at: RowPlace = at) -> Any:
                rows, after = store.index.rows(space.number, at, _SLICE)
                store.note(rows)
                return runs.add(rows) + ([] if after else runs.end()), after

            done, place = await self.work(read)
            self.spaces.give(space, done, runs.left_out, is_last=place is None)
            runs.left_out = []
            while self.spaces.may_build:
                self.spaces.build(_SLICE)
                self.check()

    async def close(self) -> None:
        self.writer.close()
        if hasattr(self, "copier"):
            self.copier.close()

    async def work(self, task: Callable[[DiskStore], Any]) -> Any:
        """Do work in the writer's thread; return its result, or raise its error."""
        return await result_of(self.writer, task)

    # ---------------------------------------------------------------- pages

    def compute(self, tokens: list[int]) -> None:
        """Compute the KV of a prompt, and publish it."""
        key = RadixKey(tokens)
        self.cache.acquire("computing", "s", key)
        self.cache.insert("computing", "s", len(tokens), key)
        node, starts = self.cache.radix.locate(key, len(tokens))
        for start, kv in zip(starts.tolist(), self.kv_of(node), strict=True):
            self.pool.pages[start // PAGE] = torch.frombuffer(bytearray(kv), dtype=torch.uint8)
        self.cache.release("computing", "s")

    def kv_of(self, node: Any) -> list[bytes]:
        """The KV of the pages on the path to a node."""
        hashes: list[str] = []
        while node is not None and node.data:
            hashes = chain_hashes(node, PAGE) + hashes
            node = node.parent
        return [hashlib.shake_256(bytes.fromhex(name)).digest(PAGE * SLOT_BYTES) for name in hashes]

    async def write(self, tokens: list[int]) -> Ended | None:
        """Write the pages of a cached prompt to the disk; None: they are there, or there is no room."""
        key, space = RadixKey(tokens), self.spaces.current(None)
        node, _ = self.cache.radix.locate(key, len(tokens))
        move = self.moves.writes.prepare_prefix(node, 16)
        if move is None or space is None:
            return None
        hashes = [bytes.fromhex(name) for above in self._path(node) for name in chain_hashes(above, PAGE)]
        rows = []
        for place, start in enumerate(move.target_starts.tolist(), start=move.first // PAGE):
            ids = move.key[place * PAGE : (place + 1) * PAGE].data
            parent = hashes[place - 1] if place else None
            rows.append(IndexRow("full", start // PAGE, space.number, place + 1, hashes[place], b"", parent, ids))
        numbers = np.array([row.record for row in rows])
        self.keeper.add_rows(numbers, space.number)
        written: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        records = {"full": Records(move.source_starts, rows)}
        self.writer.write(records, lambda: self.moves.writes.release_source(move), written.set_result)  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            result = await written
        if len(result.result) < len(rows):
            self.keeper.rows_refused(numbers)
        self.moves.complete(move, len(result.result) if len(result.result) == len(rows) else 0)
        self.check()
        return result

    def _path(self, node: Any) -> list[Any]:
        nodes: list[Any] = []
        while node is not None and node.data:
            nodes.insert(0, node)
            node = node.parent
        return nodes

    async def load(self, tokens: list[int]) -> tuple[int, Ended | None]:
        """Load a prompt from the disk for a lease; return the length of its prefix, of which the KV is right."""
        key = RadixKey(tokens)
        lease = self.cache.acquire("loading", "s", key)
        move, copied = self.moves.prepare_load(lease), None
        if move is not None:
            done: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
            batch = MoveBatch((move,))
            self.copier.load(batch.plan, done.set_result)
            async with asyncio.timeout(60):
                copied = await done
            ((_, num_pages, is_whole),) = batch.results(copied)
            self.moves.complete(move, num_pages, is_whole)
            for _, number in self.store.take_damaged():
                place = int(np.flatnonzero(move.source_starts // PAGE == number)[0])
                self.disk.drop_page(move.key, move.first + place * PAGE)
        found = lease.prefix_len
        for start, kv in zip(lease.starts[: found // PAGE].tolist(), self.kv_of(lease.node), strict=True):
            assert bytes(self.pool.pages[start // PAGE].tolist()) == kv, "a lease has wrong KV"
        self.cache.release("loading", "s")
        self.check()
        return found, copied

    async def evict(self, num_pages: int) -> None:
        """Evict pages of the disk, dormant ones first, and wait until their rows are deleted."""
        left = num_pages - self.spaces.drop_dormant(num_pages)
        self.disk.evict(left * PAGE)
        numbers = self.keeper.take_leaving()
        await self.work(lambda store: store.index.commit(removed=[("full", number) for number in numbers.tolist()]))
        self.keeper.rows_deleted(numbers)

    async def retire(self) -> None:
        """Retire the namespace in both tiers and on the disk."""
        numbers = self.spaces.retire(lambda name: True)
        self.cache.reset()
        await self.work(lambda store: store.index.delete_spaces(numbers))
        self.spaces.deleted(numbers)

    def check(self) -> None:
        """Check the rules of both caches and of the records."""
        self.moves.check_invariants()
        self.keeper.check_invariants()
