"""Clients in processes of their own, to be stopped and killed."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from typing import Any, Literal

import ray

from raydix.actors import PrefixCacheClient, WatchedActor
from raydix.schemas import CacheStats

Doing = Literal["holding", "waiting", "writing"]


def client_class() -> Any:
    """A class of this function's own travels by value: Ray's processes cannot import this file."""

    class Client:
        """A process with a client, which reports errors by name."""

        async def open(self, cache: Any, owner: Any = None) -> int:
            self._client = PrefixCacheClient(cache, owner=owner)
            await self._client.open()
            return os.getpid()

        async def log_into(self, path: str) -> None:
            """Append the log of this process to a file."""
            logging.getLogger().addHandler(logging.FileHandler(path))

        async def acquire(self, tokens: list[int]) -> list[int]:
            self._lease = await self._client.acquire(tokens)
            return self._lease.slots.tolist()

        async def begin(self, doing: str) -> None:
            """Go on with something for ever."""
            if doing == "waiting":
                self._task = asyncio.create_task(self._client.acquire([99] * 8))
            if doing == "writing":
                self._pool = await self._client.attach_pool(mapped=False)
                self._task = asyncio.create_task(self._write())

        async def _write(self) -> None:
            import torch

            shapes = self._pool.layout.copy_shapes(len(self._lease))
            while True:
                k, v = map(torch.ones, shapes)
                await self._pool.write_kv(self._lease, self._lease.slots, k, v)

        async def grant(self) -> Any:
            return await self._lease.grant()

        async def adopt(self, grant: Any) -> tuple[int, int, list[int]]:
            self._lease = await self._client.adopt(grant)
            return self._lease.prefix_len, self._lease.published_len, self._lease.slots.tolist()

        async def insert(self, tokens: list[int]) -> str:
            try:
                return str((await self._lease.insert(tokens)).num_inserted)
            except Exception as error:
                return type(error).__name__

        async def match(self, tokens: list[int]) -> int:
            return (await self._client.match(tokens)).prefix_len

        async def release(self) -> None:
            await self._lease.release()

        async def fork(self) -> int:
            """Fork a child that sleeps, with all that this process has open; return its process id."""
            child = os.fork()
            if child == 0:
                signal.pause()
                os._exit(0)
            return child

        async def close(self) -> None:
            await self._client.close()

    return Client


def start_client(watched: bool, **options: Any) -> Any:
    """A client's process; `watched` makes it a watched actor."""
    client = client_class()
    made: Any = type("WatchedClient", (client, WatchedActor), {}) if watched else client
    remote: Any = ray.remote(made)
    return remote.options(num_cpus=0, **options).remote()


async def kill_while(cache: Any, process: Any, doing: Doing, watcher: PrefixCacheClient) -> float:
    """Have a client hold six of eight slots, do something, and be killed; when that was."""
    pid = await process.open.remote(cache)
    await process.acquire.remote([1] * 6)
    await process.begin.remote(doing)
    if doing == "waiting":
        await until(watcher, lambda stats: stats.waiters == 1)
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


async def until(client: PrefixCacheClient, reached: Any, timeout_s: float = 300) -> CacheStats:
    """The first statistics of which something is true."""
    async with asyncio.timeout(timeout_s):
        while not reached(stats := await client.stats()):
            assert stats.free_slots + stats.private_slots + stats.tree_slots + stats.quarantined_slots == 8
            await asyncio.sleep(0.005)
    return stats


def all_free(stats: CacheStats) -> bool:
    """Whether all eight slots are free or cached, without leases or waiting requests."""
    return (stats.free_slots + stats.evictable_slots, stats.open_leases, stats.waiters) == (8, 0, 0)
