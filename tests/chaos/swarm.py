"""Clients that work on one cache on Ray while they are killed, cancelled and cut off: run it for as long as you like.

    python tests/chaos/swarm.py --operations 10000

It starts a Ray of its own, in which answers get lost if asked for (`--lost`), and prints what happened. Exits with 1 if
anything was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from random import Random
from typing import Any
from zlib import crc32

import ray

from raydix.actors import PrefixCacheClient, WatchedActor, start_cache_async
from raydix.schemas import CacheConfig, CacheStats, CacheUnavailable, EvictionConfig, LeaseConfig, PoolConfig

NUM_ACTORS, NUM_PLAIN = 8, 4
CONFIG = CacheConfig(
    page_size=4,
    pool=PoolConfig(num_slots=256, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", device="cpu"),
    eviction=EvictionConfig(high_watermark=0.9, low_watermark=0.7),
    leases=LeaseConfig(session_ttl_s=4, quarantine_grace_s=4, acquire_timeout_s=1),
)


def worker_class() -> Any:
    """A class of this function's own travels by value: Ray's processes cannot import this file."""

    class Worker:
        """A process with a client that computes, publishes and reads what others computed."""

        async def start(self, cache: Any) -> int:
            self._client = PrefixCacheClient(cache)
            return os.getpid()

        async def work(self, seed: int, num_operations: int) -> dict[str, int]:
            """So many requests, each refused, cancelled or served; what is hit is compared."""
            rng, counts = Random(seed), Counter[str]()
            await asyncio.gather(*[self._requests(rng, num_operations // 4, counts) for _ in range(4)])
            return dict(counts)

        async def _requests(self, rng: Random, num_requests: int, counts: Counter[str]) -> None:
            from raydix.schemas import CacheError

            for _ in range(num_requests):
                task = asyncio.ensure_future(self._request(rng, counts))
                if rng.random() < 0.1:
                    await asyncio.wait((task,), timeout=rng.random() * 0.02)
                    task.cancel()
                await asyncio.wait((task,))
                if task.cancelled():
                    counts["cancelled"] += 1
                elif isinstance(error := task.exception(), CacheError) and type(error) is not CacheError:
                    counts[type(error).__name__] += 1
                    await asyncio.sleep(0.05 * isinstance(error, CacheUnavailable))
                else:
                    task.result()
                    counts["served"] += 1

        async def _request(self, rng: Random, counts: Counter[str]) -> None:
            import torch

            group = [token for _ in range(rng.randint(1, 3)) for token in [rng.randint(1, 3)] * 4]
            tokens = group + [rng.randint(1, 9) for _ in range(rng.randint(1, 20))]
            stamps = [crc32(bytes(tokens[: i + 1])) % 2**20 for i in range(len(tokens))]
            right = torch.tensor(stamps, dtype=torch.float32).view(1, -1, 1, 1)
            async with await self._client.acquire(tokens) as lease:
                pool = await self._attached(lease)
                k, v = await pool.read_kv(lease, lease.slots[: lease.prefix_len])
                hit = right[:, : lease.prefix_len]
                if not (torch.equal(k, hit) and torch.equal(v, -hit)):
                    raise AssertionError(f"{tokens[: lease.prefix_len]} reads {k.flatten()}, not {hit.flatten()}")
                counts["tokens compared"] += lease.prefix_len
                rest = right[:, lease.prefix_len :]
                await pool.write_kv(lease, lease.slots[lease.prefix_len :], rest, -rest)
                await lease.insert(tokens)
                if rng.random() < 0.2:
                    lease = await self._client.adopt(await lease.grant())
                if rng.random() < 0.3:
                    await lease.extend(4)
                if rng.random() < 0.05:
                    await self._client.evict(16)
                await lease.release()

        async def _attached(self, lease: Any) -> Any:
            pool = getattr(self, "_pool", None)
            if pool is None or pool.epoch != lease.epoch:
                self._pool = pool = await self._client.attach_pool(mapped=False)
            return pool

        async def close(self) -> None:
            await self._client.close()

    return Worker


class Swarm:
    """The workers at one cache, and what kills them.

    Attributes:
        counts: what happened.
    """

    def __init__(self, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._rng = Random(seed)
        worker = worker_class()
        self._plain: Any = ray.remote(worker)
        self._watched: Any = ray.remote(type("WatchedWorker", (worker, WatchedActor), {}))
        self._cache: Any = None
        self._pids: dict[int, int] = {}

    async def run(self, num_operations: int, share: int, num_restarts: int) -> CacheStats:
        """Have so many operations done, `share` by a process at a time, and wait until nobody holds anything."""
        self._cache = await started_cache()
        self._left, self._restarts_left = num_operations, num_restarts
        places = [self._place(place, share) for place in range(NUM_ACTORS + NUM_PLAIN)]
        killers = [asyncio.create_task(self._kill_workers())]
        killers.append(asyncio.create_task(self._kill_cache()))
        try:
            await asyncio.gather(*places)
        finally:
            for killer in killers:
                killer.cancel()
            ended = await asyncio.gather(*killers, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) or end is None for end in ended), ended
        return await self._all_given_back()

    async def _place(self, place: int, share: int) -> None:
        """One process after another, each in place of one that ended or was killed."""
        while self._left > 0 or self._restarts_left:
            self._left -= share
            kind = self._watched if place < NUM_ACTORS else self._plain
            worker = kind.options(num_cpus=0).remote()
            try:
                self._pids[place] = await worker.start.remote(self._cache)
                self.counts += Counter(await worker.work.remote(self._rng.randrange(2**32), share))
                self.counts["survivors"] += 1
                self._pids.pop(place, None)
                await worker.close.remote()
            except ray.exceptions.RayActorError:
                self.counts["workers lost"] += 1
                self._left += share
            finally:
                self._pids.pop(place, None)
                ray.kill(worker)

    async def _kill_workers(self) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(2, 5))
            if self._pids:
                pid = self._pids.pop(self._rng.choice(list(self._pids)))
                os.kill(pid, signal.SIGKILL)
                self.counts["workers killed"] += 1

    async def _kill_cache(self) -> None:
        while self._restarts_left:
            await asyncio.sleep(self._rng.uniform(1, 3))
            if len(self._pids) < 4:
                continue  # so that some are at work
            ray.kill(self._cache, no_restart=False)
            self._restarts_left -= 1
            self.counts["caches killed"] += 1

    async def _all_given_back(self) -> CacheStats:
        """The statistics once nobody holds anything, which is within the time to live."""
        async with asyncio.timeout(90), PrefixCacheClient(self._cache) as client:
            while True:
                try:
                    stats = await client.stats()
                    await client.check_invariants()
                except CacheUnavailable:
                    continue
                given_back = stats.free_slots + stats.tree_slots == stats.num_slots
                if given_back and (stats.open_leases, stats.waiters, stats.open_sessions) == (0, 0, 1):
                    assert stats.quarantined_slots == 0, stats
                    return stats
                await asyncio.sleep(0.1)


async def started_cache() -> Any:
    """The cache; the answer that it is ready may be lost."""
    async with asyncio.timeout(120):
        while True:
            try:
                return await start_cache_async(CONFIG, name="swarm", num_gpus=0)
            except CacheUnavailable:
                await asyncio.sleep(0.1)


def main() -> int:
    """Run the swarm and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--share", type=int, default=200, help="operations of one process before it is replaced")
    parser.add_argument("--restarts", type=int, default=5, help="how often the cache is killed")
    parser.add_argument("--lost", type=int, default=0, help="percent of Ray's calls whose answer is lost; each stalls")
    parser.add_argument("--deadline-s", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    lossy = {"CoreWorkerService.grpc_client.PushTask": {"num_failures": -1, "resp_failure_prob": arguments.lost}}
    if arguments.lost:
        os.environ["RAY_testing_rpc_failure"] = json.dumps(lossy)
    ray.init(
        "local", num_cpus=4, num_gpus=0, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False
    )
    swarm = Swarm(arguments.seed)
    try:
        stats = asyncio.run(
            asyncio.wait_for(swarm.run(arguments.operations, arguments.share, arguments.restarts), arguments.deadline_s)
        )
    except BaseException as error:
        print(f"seed {arguments.seed}: {dict(swarm.counts)}", flush=True)
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    finally:
        ray.shutdown()
    print()
    print(json.dumps({"seed": arguments.seed, **swarm.counts}))
    print(f"free {stats.free_slots} + tree {stats.tree_slots} == {stats.num_slots}, nothing held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
