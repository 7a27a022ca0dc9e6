"""Measure how fast KV is written to the pool's memory and read from it, against a memcpy of the same size.

    python -m benchmarks.bench_data_plane [--quick]

in the tests' folder. The pool is a cache actor's, mapped into this process; the last lines copy through the actor. On a
GPU, if there is one, the same pool is in its memory and the memcpy is the device's.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import numpy as np
import torch
from benchmarks.figures import HEADING, Figure, median_ratio, times_in_turns
from benchmarks.local_ray import ray_started

from raydix.actors import PrefixCacheClient, shutdown_cache, start_cache
from raydix.actors.client.attached_pool import AttachedPool
from raydix.cache_core import MambaPool, PrefixCacheManager, RadixKey
from raydix.cache_core.pool.kv_pool import KVPool
from raydix.cache_core.pool.pool_layout import PoolLayout
from raydix.schemas import CacheConfig, LayerShape, PoolConfig

PAGE, NUM_HEADS, HEAD_DIM = 16, 8, 128
LAYER = LayerShape(num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM)
NUM_SLOTS = 2**16  # 128 MiB of K, and the same of V
LAYOUTS = ("contiguous", "pages of 16, scattered", "single slots, scattered")
GATES = {0.7: 0.5, 0.4: 0.25}  # gate by goal
GOALS = {
    f"{verb}, {layout}": goal for verb in ("write", "gather") for layout, goal in zip(LAYOUTS, (0.7, 0.4), strict=False)
}
LAUNCHES = 16  # of each work on a GPU before a synchronization: one launch takes as long as copying some megabytes
Works = dict[str, Callable[[], object]]


class Plane:
    """A mapped pool, KV of `num_tokens` to copy, and three layouts of their slots."""

    def __init__(self, pool: AttachedPool | KVPool, num_tokens: int) -> None:
        self.pool = pool
        self.k, self.v = (torch.ones_like(rows[:num_tokens]) for rows in (pool.k[0], pool.v[0]))
        self.out = torch.empty_like(self.k), torch.empty_like(self.v)
        self.num_bytes = self.k.nbytes + self.v.nbytes
        rng, device = np.random.default_rng(0), self.k.device
        num_slots = len(pool.k[0]) - PAGE
        pages = 1 + rng.permutation(num_slots // PAGE)[: num_tokens // PAGE]
        scattered = PAGE + rng.permutation(num_slots)[:num_tokens]
        rows = np.arange(PAGE, PAGE + num_tokens), (pages[:, None] * PAGE + np.arange(PAGE)).ravel(), scattered
        self.slots = {name: torch.from_numpy(row).to(device) for name, row in zip(LAYOUTS, rows, strict=True)}

    def works(self) -> Works:
        """Return the measured works: into the pool, out of it, and the memcpys to compare with."""
        works: Works = {"memcpy": self._memcpy, "clone": lambda: (self.k.clone(), self.v.clone())}
        for name, slots in self.slots.items():
            works[f"write, {name}"] = partial(self.pool.write, 0, slots, self.k, self.v)
            works[f"gather, {name}"] = partial(self.pool.gather, 0, slots, self.out)
        works["gather into new memory, contiguous"] = partial(self.pool.gather, 0, self.slots["contiguous"])
        return waiting(works, self.k.device)

    def check(self) -> None:
        """Raise AssertionError unless the gathered KV is the written KV."""
        for slots in self.slots.values():
            self.pool.write(0, slots, torch.rand_like(self.k), torch.rand_like(self.v))
            k, v = self.pool.gather(0, slots)
            assert k.equal(self.pool.k[0][slots]), "gathered K must equal the pool's K"
            assert v.equal(self.pool.v[0][slots]), "gathered V must equal the pool's V"

    def _memcpy(self) -> None:
        self.out[0].copy_(self.k)
        self.out[1].copy_(self.v)


def waiting(works: Works, device: torch.device) -> Works:
    """Return works that run `launches` times and wait for the device."""
    if device.type == "cpu":
        return works

    def done(work: Callable[[], object]) -> None:
        for _ in range(launches(device)):
            work()
        torch.cuda.synchronize()

    return {name: partial(done, work) for name, work in works.items()}


def launches(device: torch.device) -> int:
    """Return the number of launches before each synchronization."""
    return 1 if device.type == "cpu" else LAUNCHES


def plane_figures(plane: Plane, num_rounds: int, where: str, goals: bool = True) -> Iterator[Figure]:
    """Return the figures of copies into a mapped pool and out of it."""
    plane.check()
    times = times_in_turns(plane.works(), num_rounds)
    num_bytes = plane.num_bytes * launches(plane.k.device)
    for name in times:
        floor = "clone" if "new memory" in name else "memcpy"
        rate, ratio = num_bytes / median(times[name]) / 1e9, median_ratio(times, name, floor)
        if name not in ("memcpy", "clone"):
            least = GOALS.get(name) if goals else None
            gate = GATES.get(least) if least else None
            yield Figure("data plane", f"{name}, {where}", rate, "GB/s", ratio, floor, at_least=least, gate=gate)


# ---------------------------------------------------------------- rows and states


def copy_figures(num_rounds: int, device: torch.device, where: str, goal: float) -> Iterator[Figure]:
    """Return the figures of the cache's own copies: a prefix from row to row, and a state from slot to slot."""
    on_cpu = device.type == "cpu"
    length, num_layers, num_state_layers = (2_048, 4, 8) if on_cpu else (16_384, 4, 128)
    layout = PoolLayout(4 * length, PAGE, (LAYER,) * num_layers, torch.bfloat16, max_seq_len=length)
    pool, manager = KVPool(layout, device), PrefixCacheManager(max_capacity=length)
    prefix = RadixKey(np.arange(length, dtype=np.int32))
    manager.insert(prefix, 0, length)
    states = MambaPool(2, [[(48, 64, 128)]] * num_state_layers, device=device)
    row = pool.storage.nbytes // 4
    state = sum(tensor[1].nbytes for tensors in states.layers for tensor in tensors)
    pool.storage.fill_(1)  # pages never written are not backed by memory, so reads of them are too fast
    for tensors in states.layers:
        tensors[0].fill_(1)
    rows, plain = (torch.ones(num, size, dtype=torch.uint8, device=device) for num, size in ((4, row), (3, state)))
    works: Works = {
        "row": lambda: rows[1].copy_(rows[0]),
        "state": lambda: plain[2].copy_(plain[1]),
        "copy_kv": lambda: manager.copy_kv(prefix, 1, pool.by_sequence(), num_layers),
        "copy_states": lambda: states.copy_states(1, 2),
    }
    times = times_in_turns(waiting(works, device), num_rounds)
    for name, what, floor, size in (
        ("copy_kv", f"copy_kv, a row of {length:,} tokens in {num_layers} layers", "row", row),
        ("copy_states", f"copy_states, {num_state_layers} layers of 1.5 MiB", "state", state),
    ):
        rate, ratio = size * launches(device) / median(times[name]) / 1e9, median_ratio(times, name, floor)
        yield Figure("data plane", f"{what}{where}", rate, "GB/s", ratio, "memcpy", at_least=goal, gate=GATES.get(goal))


# ---------------------------------------------------------------- through the actor


async def actor_figures(client: PrefixCacheClient, plane: Plane, num_rounds: int) -> list[Figure]:
    """Return the figures of copies through the cache actor, for workers that cannot map its pool."""
    pool = await client.attach_pool(mapped=False)
    num_tokens = len(plane.k)
    floor = median(times_in_turns({"memcpy": plane.works()["memcpy"]}, num_rounds)["memcpy"])
    lease = await client.acquire(np.arange(num_tokens, dtype=np.int32))
    writes, reads = [], []
    loop = asyncio.get_running_loop()
    async with lease:
        for _ in range(num_rounds):
            started = loop.time()
            await pool.write_kv(lease, lease.slots, plane.k[None], plane.v[None])
            written = loop.time()
            k, v = await pool.read_kv(lease, lease.slots)
            reads.append(loop.time() - written)
            writes.append(written - started)
            assert k[0].equal(plane.k), "read K must equal written K"
            assert v[0].equal(plane.v), "read V must equal written V"
    return [
        Figure(
            "data plane",
            f"{name} through the actor, {num_tokens:,} tokens",
            plane.num_bytes / median(times) / 1e9,
            "GB/s",
            floor / median(times),
            "memcpy",
        )
        for name, times in (("write_kv", writes), ("read_kv", reads))
    ]


def figures(quick: bool) -> list[Figure]:
    """Return all figures, on a cluster of this machine."""
    with ray_started():
        return asyncio.run(_figures(quick))


async def _figures(quick: bool) -> list[Figure]:
    num_tokens, num_rounds = (4_096, 5) if quick else (16_384, 15)
    config = CacheConfig(
        page_size=PAGE,
        pool=PoolConfig.uniform(
            num_slots=NUM_SLOTS, num_layers=1, num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM, dtype="bfloat16", device="cpu"
        ),
    )
    actor = start_cache(config)
    found: list[Figure] = []
    num_threads = torch.get_num_threads()
    try:
        async with PrefixCacheClient(actor) as client:
            plane = Plane(await client.attach_pool(mapped=True), num_tokens)
            for count in sorted({1, num_threads}):
                torch.set_num_threads(count)
                where = f"{count} thread{'s' * (count > 1)}"
                found += plane_figures(plane, num_rounds, where, goals=count == 1)
            torch.set_num_threads(1)
            found += copy_figures(num_rounds, torch.device("cpu"), "", 0.7)
            found += await actor_figures(client, plane, max(3, num_rounds // 3))
    finally:
        torch.set_num_threads(num_threads)
        shutdown_cache(actor)
    return found + gpu_figures(num_rounds)


def gpu_figures(num_rounds: int) -> list[Figure]:
    """Return the figures of a pool on the GPU, with more launches before each wait; empty without a GPU."""
    if not torch.cuda.is_available():
        return []
    num_tokens = NUM_SLOTS * 3 // 4
    layout = PoolLayout(NUM_SLOTS, PAGE, (LAYER,), torch.bfloat16)
    plane = Plane(KVPool(layout, "cuda"), num_tokens)
    name, device = torch.cuda.get_device_name(), torch.device("cuda")
    return [
        Figure(each.group, each.what, each.value, each.unit, each.ratio, each.to, at_least=0.8)
        for each in plane_figures(plane, num_rounds, name)
    ] + list(copy_figures(num_rounds, device, f", {name}", 0.8))


def main() -> None:
    """Print the table."""
    print(HEADING)
    for figure in figures("--quick" in sys.argv):
        print(figure.line())


if __name__ == "__main__":
    main()
