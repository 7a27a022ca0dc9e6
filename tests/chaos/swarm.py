"""Run processes on one cache on Ray, while they and the cache are killed, stopped, cancelled and cut off.

    python tests/chaos/swarm.py --operations 10000

There are eight actors with watched deaths and four drivers; every third driver loses one answer in a hundred. Prints
the events and how soon all slots were released. Exits with 1 if any slot or answer was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from itertools import count, cycle
from pathlib import Path
from random import Random
from typing import Any

import ray
from shared_counters import IDLE, NUM_ACTORS, NUM_PLACES, PID, WAITING, WRITING, Board, Mailbox
from swarm_client import CACHE, NUM_LAYERS, SwarmActor, compare

from raydix.actors import PrefixCacheClient, start_cache_async
from raydix.actors.transport.unix_socket import SWITCH
from raydix.schemas import (
    CacheConfig,
    CacheStats,
    EvictionConfig,
    LeaseConfig,
    LeaseExpired,
    PoolConfig,
    StaleEpoch,
    UnknownLease,
)

CONFIG = CacheConfig(
    page_size=4,
    pool=PoolConfig.uniform(
        num_slots=256, num_layers=NUM_LAYERS, num_kv_heads=1, head_dim=1, dtype="float32", device="cpu"
    ),
    eviction=EvictionConfig(high_watermark=0.9, low_watermark=0.7),
    # the grace is longer than any run: quarantined slots must be released for a better reason
    leases=LeaseConfig(session_ttl_s=4, quarantine_grace_s=3600, acquire_timeout_s=1),
    events=True,
    validate=True,
)
LOSSY = json.dumps({"CoreWorkerService.grpc_client.PushTask": {"num_failures": -1, "resp_failure_prob": 1}})
CUT_OFF = {"RAY_testing_rpc_failure": LOSSY, SWITCH: "0"}  # of a driver that loses answers to its calls
MIN_LOST = 3
ANYTHING = "anything"
STOPPED_S = 1.5 * CONFIG.leases.session_ttl_s


class Swarm:
    """The processes at one cache, and the disturbances they suffer.

    Args:
        seed: of the random choices; their timing depends on the machine.
        folder: for the data that the processes share.

    Attributes:
        done: counts of the disturbances. The board has the counts of the processes' own operations.
    """

    def __init__(self, seed: int, folder: str) -> None:
        self.board = Board(folder)
        self.done: Counter[str] = Counter()
        self._folder = folder
        self._rng = Random(seed)
        self._seeds = count(seed)
        self._spared: set[int] = set()  # places with another disturbance under way
        self._killed: set[int] = set()  # processes
        self._working = set(range(NUM_PLACES))  # places that are still in use
        self._cache: Any = None

    async def run(self, num_operations: int, num_kills: int, num_restarts: int) -> CacheStats:
        """Run until this many requests are served and all disturbances are done; then check that all slots are
        released."""
        self._cache = await start_cache_async(CONFIG, name=CACHE, num_gpus=0, timeout_s=300)
        async with asyncio.TaskGroup() as group:
            for place in range(NUM_PLACES):
                group.create_task(self._occupy(place))
            await self._until(lambda: all(self.board[place, "served"] for place in range(NUM_PLACES)))
            killers = [
                asyncio.create_task(self._kill_processes(num_kills)),
                asyncio.create_task(self._stop_processes(-(-num_kills // 8))),
                asyncio.create_task(self._kill_cache(num_operations, num_restarts)),
            ]
            await asyncio.gather(*killers)
            await self._until(lambda: self.board.sums()["served"] >= num_operations)
            await self._until(lambda: self.board.sums()["answers lost"] >= MIN_LOST)
            async with PrefixCacheClient(self._cache) as client:
                await self._stop(client)
                await self._given_back(client, "working", max_sessions=1 + len(self._working))
                self.board.close()
        async with PrefixCacheClient(self._cache) as client:
            stats = await self._given_back(client, "closing", max_sessions=1)
            await self._read_everything(client)
            return stats

    # ---------------------------------------------------------------- processes

    async def _occupy(self, place: int) -> None:
        """Run one process after another at a place, each replacing a killed one, until one works to the end."""
        work = self._actor if place < NUM_ACTORS else self._driver
        while not await work(place, CUT_OFF if place % 3 == 2 else {}):
            assert self.board[place, PID] in self._killed, f"the process at place {place} ended without being killed"
            self.board.vacate(place)
            if self.board.stopped:
                return self._working.discard(place)
        self.done["survivors"] += 1
        return None

    async def _actor(self, place: int, environment: dict[str, str]) -> bool:
        """Run an actor; return False if it died."""
        options = {"num_cpus": 0, "runtime_env": {"env_vars": environment}}
        actor = ray.remote(SwarmActor).options(**options).remote()
        try:
            await actor.work.remote(self._folder, place, next(self._seeds))
        except ray.exceptions.ActorDiedError:
            return False
        return True

    async def _driver(self, place: int, environment: dict[str, str]) -> bool:
        """Run a driver; return False if it was killed."""
        address = ray.get_runtime_context().gcs_address
        arguments = [address, self._folder, str(place), str(next(self._seeds))]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("swarm_client.py")),
            *arguments,
            env=os.environ | environment,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, said = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode in (0, -signal.SIGKILL), said.decode()
        return process.returncode == 0

    # ---------------------------------------------------------------- what happens to them

    async def _kill_processes(self, num_kills: int) -> None:
        """Kill this many actors and drivers: while one writes, while one waits for slots, and at any time."""
        for _, doing in zip(range(num_kills), cycle((WRITING, WAITING, ANYTHING)), strict=False):
            await asyncio.sleep(self._rng.uniform(0.5, 2))
            place, pid = await self._stopped(doing)
            self._killed.add(pid)
            os.kill(pid, signal.SIGKILL)
            await self._until(lambda at=place: self.board[at, PID] == 0)
            self._spared.discard(place)
            self.done[f"killed while {doing}"] += 1

    async def _stop_processes(self, num_stops: int) -> None:
        """Stop a writing process for longer than its time to live, then continue it."""
        for _ in range(num_stops):
            await asyncio.sleep(self._rng.uniform(0.5, 2))
            place, pid = await self._stopped(WRITING)
            await asyncio.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            self._spared.discard(place)
            self.done["stopped while writing"] += 1

    async def _stopped(self, doing: str, places: range = range(NUM_PLACES)) -> tuple[int, int]:
        """Stop a process in a certain state, check the state once it has stopped, and return its place and id."""
        while True:
            place = self._rng.choice([place for place in places if place not in self._spared])
            pid = self.board[place, PID]
            if pid and (doing == ANYTHING or self.board[place, doing]):
                os.kill(pid, signal.SIGSTOP)
                if doing == ANYTHING or self.board[place, doing]:
                    self._spared.add(place)
                    return place, pid
                os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.002)

    async def _kill_cache(self, num_operations: int, num_restarts: int) -> None:
        """Kill the cache repeatedly, in turn by the kernel and by Ray, at equal intervals of served requests."""
        for number in range(num_restarts):
            due = (number + 1) * num_operations // (num_restarts + 1)
            await self._until(lambda due=due: self.board.sums()["served"] >= due)
            epoch = (await self._cache.stats.remote()).epoch
            self.board.note_restart()
            if number % 2:
                ray.kill(self._cache, no_restart=False)
            else:
                os.kill(int((await self._cache.pool_handle.remote()).path.split("/")[2]), signal.SIGKILL)
            while await self._epoch() in ("", epoch):  # noqa: ASYNC110 -- there is no event for it
                await asyncio.sleep(0.05)
            self.board.note_restart()
            self.done["caches killed"] += 1

    async def _epoch(self) -> str:
        """Return the epoch of the cache, or None while it restarts."""
        try:
            return str((await self._cache.stats.remote()).epoch)
        except ray.exceptions.RayActorError:
            return ""

    # ---------------------------------------------------------------- the end

    async def _stop(self, client: PrefixCacheClient) -> None:
        """Kill an actor and a driver for good, and stop the requests of the others; they keep their sessions."""
        ends = [
            (await self._stopped(WRITING, places))[1] for places in (range(NUM_ACTORS), range(NUM_ACTORS, NUM_PLACES))
        ]
        self.board.stop()
        self._killed.update(ends)
        for pid in ends:
            os.kill(pid, signal.SIGKILL)
        self.done["killed at the end"] = len(ends)
        await self._until(lambda: len(self._working) == NUM_PLACES - len(ends))
        await self._until(lambda: all(self.board[place, IDLE] for place in self._working))
        mailbox = Mailbox(self._folder)
        while (letter := mailbox.leftover()) is not None:
            with suppress(UnknownLease, LeaseExpired, StaleEpoch):  # its granter is gone, or it was adopted
                await (await client.adopt(letter[1])).release()

    async def _given_back(self, client: PrefixCacheClient, after: str, max_sessions: int) -> CacheStats:
        """Return the statistics once no slot is held. A client without requests does not open a lost session again."""
        ended = time.monotonic()
        async with asyncio.timeout(300):
            while not (nothing_is_held(stats := await client.stats()) and stats.open_sessions <= max_sessions):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        self.done[f"seconds from {after} to nothing held"] = round(time.monotonic() - ended, 2)
        await client.check_invariants()
        return stats

    async def _read_everything(self, client: PrefixCacheClient) -> None:
        """Compare the KV of every block that the cache reports."""
        pool = await client.attach_pool(mapped=False)
        prompts: dict[int | None, list[int]] = {None: []}
        for event in (await client.event_snapshot()).events:
            prompt, size = prompts[event.parent_block_hash], event.block_size
            for number, block_hash in enumerate(event.block_hashes):
                prompt = prompt + event.token_ids.tolist()[number * size : (number + 1) * size]
                prompts[block_hash] = prompt
        for prompt in prompts.values():
            if prompt:
                async with await client.lock(prompt) as lease:
                    assert lease.prefix_len == len(prompt), f"the cache reports {prompt} but does not match it"
                    compare(prompt, *await pool.read_kv(lease, lease.slots))
        self.done["blocks read at the end"] = len(prompts) - 1

    async def _until(self, true: Any) -> None:
        while not true():  # noqa: ASYNC110 -- other processes make it true
            await asyncio.sleep(0.02)


def nothing_is_held(stats: CacheStats) -> bool:
    """Return whether every slot is free or cached, and no request waits."""
    total = stats.free_slots + stats.tree_slots
    held = (stats.open_leases, stats.waiters, stats.quarantined_slots, stats.private_slots, stats.protected_slots)
    return total == stats.num_slots and not any(held)


def main() -> int:
    """Run the swarm and print the events."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=10_000, help="that are served, at least")
    parser.add_argument("--kills", type=int, default=60, help="of processes")
    parser.add_argument("--restarts", type=int, default=5, help="how often the cache is killed")
    parser.add_argument("--deadline-s", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    ray.init(
        "local", num_cpus=4, num_gpus=0, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False
    )
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(arguments.seed, folder)
        running = swarm.run(arguments.operations, arguments.kills, arguments.restarts)
        started, error, stats = time.monotonic(), None, None
        try:
            stats = asyncio.run(asyncio.wait_for(running, arguments.deadline_s))
        except (Exception, KeyboardInterrupt) as failed:
            error = failed
        finally:
            ray.shutdown()
        took = {"seed": arguments.seed, "seconds": round(time.monotonic() - started)}
        print("\n" + json.dumps(took | swarm.board.sums() | swarm.done), flush=True)
        states = [swarm.board.states(place) for place in range(NUM_PLACES)]
    if error is not None:
        print("\n".join(map(str, states)), flush=True)
        raise error
    assert stats is not None
    print(f"free {stats.free_slots} + tree {stats.tree_slots} == {stats.num_slots}, nothing held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
