"""A warm `acquire` over the Unix socket calls the files that the `CacheService` module docstring names, in order."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
from support.caches.cache_in_process import HandleInProcess

import raydix.actors
from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.actors.loop.loop_timer import LoopTimer
from raydix.actors.service import cache_service
from raydix.actors.service.unix_socket_server import UnixSocketServer
from raydix.cache_core.kernels import COMPILED
from raydix.schemas import CacheConfig, PoolConfig

PACKAGES = Path(raydix.actors.__file__).parents[1]
OURS = tuple(f"{PACKAGES / name}/" for name in ("actors", "cache_core", "schemas"))
CONFIG = CacheConfig(page_size=16, pool=PoolConfig(num_slots=1024, device="cpu"))
PROMPT = list(range(64))
MAX_FILES = 26


@pytest.mark.figures
@pytest.mark.skipif(not COMPILED, reason="interpreted kernels add files of their own")
@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets exist only on Linux")
async def test_an_acquire_runs_through_the_files_that_the_service_names() -> None:
    files = await files_of_an_acquire()

    print(f"\none acquire over the socket, {len(files)} files:", *files, sep="\n  ")
    assert files == named_files()
    assert len(files) <= MAX_FILES


async def files_of_an_acquire() -> list[str]:
    """Return the project files that a warm `acquire` calls into, in the order of their first calls.

    Timers run on the same event loop, those of other tests too: their calls are not the request's.
    """
    files: dict[str, None] = {}

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS) and not runs_in_a_timer(frame):
            files.setdefault(str(Path(frame.f_code.co_filename).relative_to(PACKAGES)))

    async with LocalPrefixCache(CONFIG) as cache:
        server = UnixSocketServer(cache._host.service)
        async with PrefixCacheClient(HandleInProcess(cache, Random(0), socket_server=server)) as client:
            for _ in range(2):
                async with await client.acquire(PROMPT) as lease:
                    await lease.insert(PROMPT)
            LoopTimer(Dropped().tick).schedule(0)  # runs during the request
            sys.setprofile(profile)
            try:
                lease = await client.acquire(PROMPT)
            finally:
                sys.setprofile(None)
            assert lease.prefix_len == len(PROMPT)
            await lease.release()
        server.close()
    return list(files)


class Dropped:
    """An object that is gone before its timer runs."""

    def tick(self) -> None:
        raise AssertionError("must not be called")


def runs_in_a_timer(frame: FrameType | None) -> bool:
    """Return whether a `LoopTimer` called this frame, directly or not."""
    while frame is not None and frame.f_code is not LoopTimer._run.__code__:
        frame = frame.f_back
    return frame is not None


def named_files() -> list[str]:
    """Return the files that the module docstring names, in order."""
    return re.findall(r"[a-z_]+(?:/[a-z_]+)+\.py", cache_service.__doc__ or "")
