"""Run routers and caches on a Ray cluster of three nodes, while parts of it fail.

    python tests/chaos/fleet_failures.py

Each node has four index-only caches, one for each GPU of Ray's bookkeeping. A router in this process gets its event
batches late, twice, in another order or not at all; another router is an actor. Both send requests all the time, and
compare the contents of each hit. After each failure the requests pause: then no slot may be lost, and the index of each
router must equal the caches' snapshots. Prints a JSON line for each failure, and exits with 1 at the first that ends
wrong.
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
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder of `support`
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # of Ray's workers
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
os.environ.setdefault("RAY_worker_niceness", "0")

import ray
from fleet_traffic import NUM_SLOTS, RouterActor, Traffic
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from support.fleet.faulty_feed import FaultyFeed
from support.fleet.running_fleet import STRIDE, check_index, prompt, slim
from support.fleet.slot_stamps import SlotStamps

from raydix.actors import Fleet, PrefixCacheClient, connect_fleet, shutdown_cache, start_cache_async
from raydix.actors.cluster import deploy
from raydix.schemas import CacheConfig, CacheStats, CacheUnavailable, LeaseConfig, StaleEpoch

NUM_NODES, NUM_GPUS = 3, 4  # GPUs of each node, with a cache each
NAMES = [f"chat-{number}" for number in range(NUM_NODES * NUM_GPUS)]
LEASES = LeaseConfig(quarantine_grace_s=3600)  # slots must come back for a better reason
PATIENCE_S = 300.0
NODE = {"num_cpus": 0, "num_gpus": NUM_GPUS, "object_store_memory": 80 * 2**20}
HEALTH = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}


def config_of(**fields: Any) -> CacheConfig:
    return slim(NUM_SLOTS, leases=LEASES, **fields)


async def until(holds: Callable[[], Any]) -> None:
    """Wait until a condition holds, which may be awaitable."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            held = holds()
            if isinstance(held, Awaitable):
                held = await held
            if held:
                return
            await asyncio.sleep(0.02)


class FailingFleet:
    """The cluster, the caches and the routers, and the failures, each a method.

    Args:
        folder: for the contents of slots.
        num_requests: that each router must serve after a failure.

    Attributes:
        is_last_round: parts that have failed need not come back.
    """

    def __init__(self, folder: str, seed: int, num_requests: int) -> None:
        self._folder = folder
        self._seed = seed
        self._num_requests = num_requests
        self._faults = FaultyFeed(Random(seed))
        PrefixCacheClient.events = self._faults.around(PrefixCacheClient.events)  # type: ignore[method-assign]
        head = {"include_dashboard": False, "_system_config": HEALTH}
        self._cluster = Cluster(initialize_head=True, head_node_args=NODE | head)
        self._nodes = [self._cluster.head_node, *(self._cluster.add_node(**NODE) for _ in range(NUM_NODES - 1))]
        ray.init(address=self._cluster.address, log_to_driver=False, configure_logging=False)
        self._clients = {name: PrefixCacheClient(name, owner="test") for name in NAMES}
        self._fleet: Fleet
        self._traffic: Traffic
        self._other: Any = None  # the other router's actor, while it is alive
        self._other_pid = 0
        self.is_last_round = True

    async def start(self) -> None:
        """Start caches and routers, and send requests."""
        place = NodeAffinitySchedulingStrategy(self._nodes[1].node_id, soft=False)
        start: Any = ray.remote(RouterActor).options(num_cpus=0, scheduling_strategy=place)
        self._other = start.remote()
        await asyncio.gather(*(self._start_cache(name) for name in NAMES))
        self._fleet = await connect_fleet("chat-*")
        self._traffic = Traffic(self._fleet, SlotStamps(self._folder, 2 * NUM_SLOTS), self._seed)
        self._traffic.resume()
        self._other_pid = await self._other.start.remote("chat-*", self._folder, self._seed + 1)
        await until(lambda: len(self._fleet.columns()) == len(NAMES))

    def end(self) -> None:
        """Kill the cluster. Ray's own shutdown would wait for a control service that is gone."""
        for node in self._nodes:
            for started in node.all_processes.values():
                for each in started:
                    each.process.kill()

    async def _start_cache(self, name: str, **fields: Any) -> None:
        options: dict[str, Any] = {"num_gpus": 1, "lifetime": "detached", "timeout_s": PATIENCE_S}
        await start_cache_async(config_of(**fields), name=name, **options)

    async def _place(self, name: str) -> tuple[int, str]:
        """Return the process id and the node of a cache."""
        handle = ray.get_actor(name, namespace=deploy.NAMESPACE)
        found: tuple[int, str] = await handle.__ray_call__.remote(
            lambda _: (os.getpid(), ray.get_runtime_context().get_node_id())
        )
        return found

    # ---------------------------------------------------------------- checks

    async def _go_on(self) -> None:
        """Wait until each router has served more requests."""
        served = self._traffic.served + self._num_requests
        await until(lambda: self._traffic.served >= served)
        if self._other is not None:
            before = (await self._other.outcomes.remote())["served"]
            await until(lambda: self._other_served(before + self._num_requests))

    async def _other_served(self, number: int) -> bool:
        return bool((await self._other.outcomes.remote())["served"] >= number)

    async def check(self) -> dict[str, Any]:
        """Pause the requests, and compare slots and indexes; return counts."""
        await self._go_on()
        await self._traffic.pause()
        if self._other is not None:
            await self._other.pause.remote()
        for name in self._clients:
            await until(lambda name=name: self._nothing_is_held(name))  # type: ignore[misc]
        await check_index(self._fleet, dict(self._clients))
        if self._other is not None:
            await until(self._other_is_equal)
            await self._other.resume.remote()
        self._traffic.resume()
        return dict(self._traffic.outcomes)

    async def _nothing_is_held(self, name: str) -> bool:
        """Return whether every slot of a cache is free or cached."""
        try:
            stats: CacheStats = await self._clients[name].stats()
            held = (stats.open_leases, stats.waiters, stats.quarantined_slots, stats.private_slots)
            if any(held):
                return False
            await self._clients[name].check_invariants()
        except (CacheUnavailable, StaleEpoch):
            return False
        assert stats.free_slots + stats.tree_slots == stats.num_slots, stats
        return True

    async def _other_is_equal(self) -> bool:
        """Return whether the other router has exactly the pages of all snapshots. The caches may evict meanwhile."""
        pages = await self._other.pages.remote()
        if set(pages) != set(self._clients):
            return False
        for name, client in self._clients.items():
            snapshot: Any = await client.event_snapshot()
            position, stored, pending = pages[name]
            if position != (snapshot.epoch, snapshot.seq):
                return False
            assert stored == set(snapshot.stored_hashes.tolist()), name
            assert pending == set(snapshot.pending_hashes.tolist()), name
        return True

    # ---------------------------------------------------------------- failures

    async def disturbed_batches(self) -> None:
        """Lose, delay, repeat and reorder batches, and answer gaps with snapshots."""
        done = self._faults.done
        await until(lambda: all(done[fault] >= 5 for fault in ("late", "lost", "repeated", "reordered", "gap")))
        taken = sum(each.snapshots for each in self._fleet.stats().caches)
        assert taken > len(NAMES), "each loss or gap is answered by another snapshot"

    async def client_that_never_publishes(self) -> None:
        """Hold leases of prompts that are never computed, and routes that nothing ends."""
        tokens = prompt(900, 4)
        routes = [await self._fleet.route(tokens) for _ in range(3)]
        async with PrefixCacheClient(routes[0].cache, owner="idle") as client:
            leases = [await client.acquire(tokens) for _ in range(2)]
            await until(lambda: self._fleet.explain(tokens).candidates[0].promised_len == 4 * STRIDE)
            await self._go_on()
            for lease in leases:
                await lease.release()
        again = await self._fleet.route(tokens)
        assert again.prefix_len == 0
        for route in (*routes, again):
            route.cancel()

    async def killed_cache(self) -> None:
        """Kill a cache's process; Ray starts it again."""
        pid, _ = await self._place("chat-0")
        epoch = self._epoch("chat-0")
        os.kill(pid, signal.SIGKILL)
        await until(lambda: self._epoch("chat-0") not in ("", epoch))

    async def other_configuration(self) -> None:
        """Replace a cache by one of other pages, and that by one that fits, if there are further rounds."""
        await self._replace("chat-1", page_size=8)
        await until(lambda: "not page_size=8" in self._fleet.stats().left_out.get("chat-1", ""))
        if self.is_last_round:
            await self._clients.pop("chat-1").close()
        else:
            await self._go_on()
            await self._replace("chat-1")
            await until(lambda: self._epoch("chat-1"))

    async def _replace(self, name: str, **fields: Any) -> None:
        await asyncio.to_thread(shutdown_cache, ray.get_actor(name, namespace=deploy.NAMESPACE))
        await self._start_cache(name, **fields)

    async def failing_directory(self) -> None:
        """Let the listing of caches fail, then let Ray's control service stand still."""
        listing = deploy.find_caches
        failed = 0

        def fail(*_: Any) -> Any:
            nonlocal failed
            failed += 1
            raise RuntimeError("no listing")

        deploy.find_caches = fail
        await until(lambda: failed >= 2)
        await self._go_on()
        deploy.find_caches = listing
        control = self._control()
        os.kill(control, signal.SIGSTOP)
        try:
            await asyncio.sleep(2)  # at least one listing waits for an answer
            await self._go_on()
        finally:
            os.kill(control, signal.SIGCONT)
        assert set(self._fleet.columns()) == set(self._clients)

    async def killed_router(self) -> None:
        """Kill a router's process, with its open leases."""
        self._other = None
        os.kill(self._other_pid, signal.SIGKILL)

    async def killed_node(self) -> None:
        """Kill the processes of a node. Its caches come back on another one, if there are further rounds."""
        node = self._nodes.pop()
        places = {name: await self._place(name) for name in NAMES}
        epochs = {name: self._epoch(name) for name, (_, node_id) in places.items() if node_id == node.node_id}
        assert len(epochs) == NUM_GPUS
        await asyncio.to_thread(self._cluster.remove_node, node, allow_graceful=False)
        await until(lambda: not any(map(self._epoch, epochs)))
        await self._go_on()
        if self.is_last_round:
            for name in epochs.keys() & self._clients.keys():
                await self._clients.pop(name).close()
            return
        self._nodes.append(await asyncio.to_thread(self._cluster.add_node, **NODE))
        for name, epoch in epochs.items():
            await until(lambda name=name, epoch=epoch: self._epoch(name) not in ("", epoch))  # type: ignore[misc]

    async def killed_directory(self) -> None:
        """Kill Ray's control service. Nothing starts any more, and all that runs goes on."""
        os.kill(self._control(), signal.SIGKILL)
        await asyncio.sleep(1.5)  # at least one listing fails

    def _control(self) -> int:
        """Return the process id of Ray's control service."""
        return int(self._cluster.head_node.all_processes["gcs_server"][0].process.pid)

    def _epoch(self, name: str) -> str:
        """Return the epoch of a cache, as the router knows it; empty: it gets no requests."""
        return next((each.epoch for each in self._fleet.stats().caches if each.cache == name), "")


ALL = (
    FailingFleet.disturbed_batches,
    FailingFleet.client_that_never_publishes,
    FailingFleet.killed_cache,
    FailingFleet.other_configuration,
    FailingFleet.failing_directory,
    FailingFleet.killed_node,
    FailingFleet.killed_router,
    FailingFleet.killed_directory,  # the last: Ray cannot do without it for long
)
AGAIN = ALL[:-2]  # in the rounds before the last


async def fail(fleet: FailingFleet, rounds: int) -> bool:
    """Let each part fail, and check; return whether all went well."""
    started = time.monotonic()
    steps = [FailingFleet.start, *(AGAIN * (rounds - 1)), *ALL]
    for number, step in enumerate(steps):
        fleet.is_last_round = len(steps) - number <= len(ALL)
        line: dict[str, Any] = {"failure": step.__name__, "error": None}
        try:
            async with asyncio.timeout(PATIENCE_S):
                await step(fleet)
                line |= await fleet.check()
        except Exception:
            line["error"] = traceback.format_exc()
        print(json.dumps(line | {"seconds": round(time.monotonic() - started, 1)}), flush=True)
        if line["error"]:
            return False
    return True


def main() -> None:
    """Run the failures, and end this process without Ray's handlers, which would wait, too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=60, help="that each router serves after a failure")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fleet = FailingFleet(folder, arguments.seed, arguments.requests)
        print(json.dumps({"seed": arguments.seed}), flush=True)
        is_well = asyncio.new_event_loop().run_until_complete(fail(fleet, arguments.rounds))
        fleet.end()
    os._exit(not is_well)


if __name__ == "__main__":
    main()
