"""The turns of a cache's loop while the spaces of many salts are read from a disk, bound, built and retired.

Each space has one row. Turns are in CPU time of the loop's thread, without garbage collections, which are named apart.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from benchmarks.disk_speed import folder, ready
from benchmarks.figures import Figure

from raydix.actors import LocalPrefixCache
from raydix.actors.tiers.disk.disk_index import Space
from raydix.actors.tiers.disk.disk_store import DiskStore
from raydix.cache_core.tiers.index_row import IndexRow
from raydix.cache_core.tree.hashing import hash_page, namespace_seed
from raydix.schemas import CacheConfig, DiskConfig, ModelFingerprint, PoolConfig, frame_namespace

PAGE = 16
MODEL = ModelFingerprint(fields={"name": "model"}, weights="1")
MAX_TURN_MS, MAX_LONGEST_MS, GATE = 5.0, 20.0, 2.0  # the gate is a multiple, as the machine may be busy
_PART = 1000  # spaces of one commit


@dataclass
class Turns:
    """The turns of a loop, in ms of CPU time, and the collections in them."""

    turns_ms: list[float] = field(default_factory=list)
    collections_ms: list[float] = field(default_factory=list)

    def figures(self, what: str) -> list[Figure]:
        """Return the figures: 99.9 % of the turns, the longest one, and the longest collection."""
        long_ms = float(np.quantile(self.turns_ms, 0.999))
        limits = {"99.9 % of the turns": (long_ms, MAX_TURN_MS), "longest turn": (max(self.turns_ms), MAX_LONGEST_MS)}
        return [
            *(
                Figure("disk", f"{name} {what}", found, "ms", at_most=limit, gate=GATE * limit)
                for name, (found, limit) in limits.items()
            ),
            Figure("disk", f"longest garbage collection {what}", max(self.collections_ms, default=0.0), "ms"),
        ]

    @contextmanager
    def noting_collections(self) -> Iterator[list[float]]:
        """Note collections; yield a list with their CPU time so far."""
        spent, began = [0.0], [0.0]

        def note(phase: str, _: object) -> None:
            if phase == "start":
                began[0] = time.thread_time()
            else:
                spent[0] += time.thread_time() - began[0]
                self.collections_ms.append(1e3 * (time.thread_time() - began[0]))

        gc.callbacks.append(note)
        try:
            yield spent
        finally:
            gc.callbacks.remove(note)

    async def during(self, work: Awaitable[object]) -> None:
        """Measure the turns until work has ended."""
        task = asyncio.ensure_future(work)
        with self.noting_collections() as spent:
            before = time.thread_time() - spent[0]
            while not task.done():
                await asyncio.sleep(0)
                now = time.thread_time() - spent[0]
                self.turns_ms.append(1e3 * (now - before))
                before = now
        await task


def figures(num_spaces: int) -> list[Figure]:
    """Return the figures of a disk with so many spaces."""
    with folder() as path:
        asyncio.run(fill(path, num_spaces))
        return asyncio.run(measure(path, num_spaces))


def config_of(path: Path, num_spaces: int) -> CacheConfig:
    """Return the configuration of a small pool above a disk with a page for each space."""
    disk = DiskConfig(path=str(path), num_slots=(num_spaces + 1024) * PAGE, direct_io="off", load_timeout_s=600)
    pool = PoolConfig(num_slots=1024 * PAGE, format="opaque", slot_bytes=16, device="cpu")
    return CacheConfig(page_size=PAGE, pool=pool, disk=disk)


async def fill(path: Path, num_spaces: int) -> None:
    """Write the rows of so many spaces, of salts of their own."""
    async with LocalPrefixCache(config_of(path, num_spaces)) as cache:
        disk = await ready(cache)
        for first in range(1, num_spaces + 1, _PART):
            await disk.files.do(partial(add_part, numbers=range(first, min(first + _PART, num_spaces + 1))))


def add_part(store: DiskStore, *, numbers: range) -> None:
    """Add spaces with a row each, of the record of the same number."""
    tokens = np.arange(PAGE, dtype="<u4").tobytes()
    names = {number: frame_namespace(None, None, f"salt {number}") for number in numbers}
    store.index.add_spaces(
        [Space(number, name, str(MODEL), None, MODEL.weights, 0, 0.0) for number, name in names.items()]
    )
    digests = {number: hash_page(tokens, 4, 0, namespace_seed(name)) for number, name in names.items()}
    store.index.commit(
        [IndexRow("full", number, number, 1, digest, bytes(16), None, tokens) for number, digest in digests.items()]
    )


async def measure(path: Path, num_spaces: int) -> list[Figure]:
    """Measure the turns until the disk is read, until a model is bound and built, and until all is retired."""
    starts, binds, retires = Turns(), Turns(), Turns()
    async with LocalPrefixCache(config_of(path, num_spaces)) as cache:
        await starts.during(ready(cache))
        disk = await ready(cache)
        assert len(disk.spaces) == num_spaces
        started = time.perf_counter()
        await binds.during(cache.bind_model(MODEL))
        took_s = time.perf_counter() - started
        assert disk.tier.cache.total_size() == num_spaces * PAGE, "not all pages were found"
        await retires.during(cache.retire(cache_salt="salt 7"))
    of_spaces = f"while {num_spaces:,} spaces are"
    return [
        *starts.figures(f"{of_spaces} read"),
        *binds.figures(f"{of_spaces} bound and built"),
        Figure("disk", f"{num_spaces:,} spaces are bound and built", took_s, "s"),
        Figure("disk", f"longest turn while one of {num_spaces:,} spaces is retired", max(retires.turns_ms), "ms"),
    ]
