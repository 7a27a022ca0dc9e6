"""Count the functions that a request calls: load on the machine does not change it, so a test can hold it."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks import core_runs
from benchmarks.core_runs import CoreRun
from benchmarks.core_workloads import Workload

import raydix.cache_core
from raydix.actors import LocalPrefixCache
from raydix.cache_core.pool import page_allocator
from raydix.schemas import CacheConfig, PoolConfig

PACKAGES = Path(raydix.cache_core.__file__).parents[1]
OURS = tuple(
    f"{PACKAGES / name}/" for name in ("actors", "cache_core", "schemas")
)  # only these packages of the repository
CORE, ALLOCATOR = OURS[1], str(page_allocator.__file__)
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
