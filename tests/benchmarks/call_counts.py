"""Count the functions that a request calls: load on the machine does not change it, so a test can hold it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from benchmarks import core_runs
from benchmarks.core_runs import CoreRun
from benchmarks.core_workloads import Workload
from support.tiers.settled_disk import settled

import raydix.cache_core
from raydix.actors import LocalPrefixCache
from raydix.actors.tiers.disk.disk_work import DiskWork
from raydix.cache_core.pool import page_allocator
from raydix.cache_core.tiers.tier import Tier
from raydix.schemas import CacheConfig, DiskConfig, PoolConfig

PACKAGES = Path(raydix.cache_core.__file__).parents[1]
OURS = tuple(
    f"{PACKAGES / name}/" for name in ("actors", "cache_core", "schemas")
)  # only these packages of the repository
CORE, ALLOCATOR = OURS[1], str(page_allocator.__file__)
LAG = ("/loop_timer.py", "/loop_lag.py")
PROMPT_LEN = 256


def of_core(workload: Workload, page_size: int) -> dict[str, float]:
    """Return the mean number of calls per request by verb, in the cache but not in the allocator behind it."""
    run = CoreRun(workload, page_size, "numpy")
    counts: Counter[str] = Counter()
    verb = ""

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal verb
        code = frame.f_code
        if event in ("call", "c_call") and code.co_filename.startswith(CORE) and code.co_filename != ALLOCATOR:
            if event == "call" and frame.f_back is not None and frame.f_back.f_code.co_filename == core_runs.__file__:
                verb = code.co_name
            counts[verb] += 1

    _profiled(count, run.run)
    run.check()
    return {verb: calls / len(workload.prompts) for verb, calls in counts.items()}


async def of_service(num_cycles: int) -> dict[str, float]:
    """Return the mean number of calls of this project's functions by verb, resumed coroutines included.

    Requests run in process, one after the other, with prompts that share their first half.
    """
    config = CacheConfig(page_size=16, pool=PoolConfig(num_slots=2**17, device="cpu"))
    rng = np.random.default_rng(0)
    half = rng.integers(0, 2**31 - 1, PROMPT_LEN // 2, np.int32)
    counts: Counter[str] = Counter()
    verb = ""

    def count(frame: Any, event: str, _: Any) -> None:
        counts[verb] += event == "call" and frame.f_code.co_filename.startswith(OURS)

    async with LocalPrefixCache(config) as cache:

        async def cycle() -> None:
            nonlocal verb
            prompt = np.concatenate((half, rng.integers(0, 2**31 - 1, PROMPT_LEN // 2, np.int32)))
            verb = "acquire"
            lease = await cache.acquire(prompt)
            verb = "insert"
            await lease.insert(prompt)
            verb = "release"
            await lease.release()

        await cycle()
        counts.clear()
        sys.setprofile(count)
        try:
            for _ in range(num_cycles):
                await cycle()
        finally:
            sys.setprofile(None)
        await asyncio.sleep(0)
    return {verb: calls / num_cycles for verb, calls in counts.items()}


def _profiled(count: Callable[[Any, str, Any], None], work: Callable[[], object]) -> None:
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)


@dataclass
class DiskLoad:
    """What the loop's thread does for a load from the disk, from the acquire to the hand-out.

    The timer that measures the loop's lag is left out.
    """

    calls: int = 0  # of this project's functions, resumed coroutines included
    files: set[str] = field(default_factory=set)
    look_ups: Counter[str] = field(default_factory=Counter)  # by tier
    slices: int = 0  # of the disk's own work


async def of_disk_load(path: Path) -> DiskLoad:
    """Count a load of 64 tokens, in pages of 4, by an idle cache in this process."""
    pool = PoolConfig.uniform(
        num_slots=4096, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", device="cpu"
    )  # fmt: skip
    disk = DiskConfig(path=str(path), num_slots=8192, direct_io="off", write_mib_s=None)
    config = CacheConfig(page_size=4, pool=pool, disk=disk, fingerprint="m")
    found, prompts = DiskLoad(), [list(range(100 * number, 100 * number + 64)) for number in range(2)]

    def count(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(OURS) or code.co_filename.endswith(LAG):
            return
        found.calls += 1
        found.files.add(str(Path(code.co_filename).relative_to(PACKAGES)))
        if code is Tier.longest_prefix.__code__:
            found.look_ups[frame.f_locals["self"].name] += 1
        found.slices += code is DiskWork.run_slice.__code__

    async with LocalPrefixCache(config) as cache:
        for prompt in prompts * 2:
            await (await cache.acquire(prompt)).insert(prompt, release=True)
        await settled(cache)
        await cache.evict(4096)
        for prompt in prompts:  # the second one is counted
            await asyncio.sleep(0.1)
            found = DiskLoad()
            sys.setprofile(count)
            try:
                lease = await cache.acquire(prompt)
            finally:
                sys.setprofile(None)
            assert lease.loaded.disk == 64
            await lease.release()
    return found


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        load = asyncio.run(of_disk_load(Path(folder)))
    print(json.dumps({**vars(load), "files": sorted(load.files)}))
