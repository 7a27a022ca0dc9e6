"""A cache with many pages on its disk, which a process has written that was killed with -9.

    python -m support.tiers.large_disk FOLDER PAGES DIRECT_IO

is that process, in the tests' folder. It uses each prompt twice, in a pool that evicts nothing, and then calls nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydix.actors import LocalPrefixCache
from raydix.actors.tiers.disk.disk_tier import DiskTier
from raydix.schemas import CacheConfig, DiskConfig, PoolConfig

PAGE, SLOT_BYTES = 16, 16
_SHARED, _OWN, _NUM_SHARED = 32, 93, 8  # pages of a prompt: of its beginning, and behind it; and the beginnings
_FILL_S = 300.0  # more than a busy machine needs

Prompt = NDArray[np.uint32]


def config_of(path: Path, num_pages: int, direct_io: str = "off") -> CacheConfig:
    """A pool of small records, half of which stay free, above a disk with a few to spare."""
    num_slots = (num_pages + num_pages // 16 + 1024) * PAGE
    disk = {"path": str(path), "num_slots": num_slots, "direct_io": direct_io, "load_timeout_s": 60}
    pool = PoolConfig(num_slots=2 * num_slots, format="opaque", slot_bytes=SLOT_BYTES, device="cpu")
    return CacheConfig(page_size=PAGE, pool=pool, disk=DiskConfig.model_validate(disk), fingerprint="m")


def prompts_of(num_pages: int) -> list[Prompt]:
    """Prompts of so many different pages in all: with one of a few beginnings each, and an end of their own."""
    rng = np.random.default_rng(0)
    shared = [rng.integers(0, 2**31, _SHARED * PAGE, np.uint32) for _ in range(_NUM_SHARED)]
    prompts, left = list[Prompt](), num_pages - _NUM_SHARED * _SHARED
    while left > 0 or len(prompts) < _NUM_SHARED:
        own = max(0, min(_OWN, left))
        left -= own
        prompts.append(
            np.concatenate([shared[len(prompts) % _NUM_SHARED], rng.integers(0, 2**31, own * PAGE, np.uint32)])
        )
    return prompts


def disk_of(cache: LocalPrefixCache) -> DiskTier:
    """The disk tier of a cache."""
    disk = cache.service.disk
    assert disk is not None
    return disk


def fill(path: Path, num_pages: int, direct_io: str = "off") -> dict[str, Any]:
    """Write pages to a disk in a process that is killed then; return its counts."""
    command = [sys.executable, "-m", "support.tiers.large_disk", str(path), str(num_pages), direct_io]
    tests = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=2 * _FILL_S, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    counts: dict[str, Any] = json.loads(done.stdout)
    return counts


async def _fill(path: Path, num_pages: int, direct_io: str) -> None:
    async with LocalPrefixCache(config_of(path, num_pages, direct_io)) as cache:
        await cache.stats()
        disk = disk_of(cache)
        for prompt in prompts_of(num_pages):
            for _ in range(2):
                lease = await cache.acquire(prompt)
                await lease.insert(prompt, release=True)
        async with asyncio.timeout(_FILL_S):
            while not disk.writes.is_idle:  # noqa: ASYNC110 -- there is no event for it
                await asyncio.sleep(0.05)
        counts = {"tokens_evicted": (await cache.stats()).tokens_evicted, "pages": disk.tier.cache.total_size() // PAGE}
        print(json.dumps(counts), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(_fill(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
