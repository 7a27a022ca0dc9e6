"""A wrong disk is an error of `raydix start`. A cache that Ray restarts serves without such a disk."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
from support.processes.command_line import run_json
from support.waiting import wait_until

from raydix.actors import PrefixCacheClient, shutdown_cache, start_cache
from raydix.schemas import CacheConfig, DiskConfig, PoolConfig

pytestmark = pytest.mark.ray

PROMPT = list(range(1, 33))


def config_of(path: Path) -> CacheConfig:
    """A small pool above a disk."""
    return CacheConfig(
        page_size=4,
        pool=PoolConfig.uniform(num_slots=64, num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32", device="cpu"),
        disk=DiskConfig(path=str(path), num_slots=1024, direct_io="off"),
        fingerprint="m",
        validate=True,
    )


def until_state(cache: Any, state: str) -> None:
    """Wait for a state of the disk."""

    def is_there() -> bool:
        # A function of this module could not be read in the cache's process.
        return ray.get(cache.__ray_call__.remote(lambda actor: actor._host.service.disk.state)).startswith(state)  # type: ignore[no-any-return]

    wait_until(is_there)


async def use(cache: Any) -> int:
    """Publish a prompt, and return the prefix that is found then."""
    async with PrefixCacheClient(cache) as client:
        async with client.acquire(PROMPT) as lease:
            await lease.insert(PROMPT)
        return (await client.match(PROMPT)).prefix_len


def test_a_wrong_disk_is_an_error_of_the_start_and_a_state_after_a_restart(ray_cluster: None, tmp_path: Path) -> None:
    name, folder = f"disk-start-{os.getpid()}", tmp_path / "disk"
    settings = ("pool.layers=[{num_kv_heads: 1, head_dim: 2}]", "pool.num_slots=64", "pool.device=cpu")
    options = [word for setting in settings for word in ("--set", setting)]
    refused = run_json("start", "--disk", f"{folder}:1MiB", "--name", name, *options, exit_code=1)["error"]
    assert refused["message"].startswith(f"{name}-0: the disk cannot be used at '{folder}': it must be a folder")

    folder.mkdir()
    cache = start_cache(config_of(folder), name=name)
    try:
        until_state(cache, "ready")  # before the first session
        folder.rename(tmp_path / "unmounted")
        os.kill(ray.get(cache.__ray_call__.remote(lambda actor: __import__("os").getpid())), signal.SIGKILL)

        assert start_cache(config_of(folder), name=name) == cache, "Ray restarts it"
        assert asyncio.run(use(cache)) == len(PROMPT)
        until_state(cache, "failed: the disk cannot be used")
        (found,) = [text for text in ray.get(cache.stats.remote()).findings if "disk" in text]
        assert found.startswith(f"the cache serves without its disk: the disk cannot be used at '{folder}': it must be")
    finally:
        shutdown_cache(cache)


@pytest.mark.more
def test_the_end_of_a_cache_waits_for_what_it_writes_to_its_disk(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("raydix.actors.cluster.deploy.SHUTDOWN_S", 0.2)
    cache = start_cache(config_of(tmp_path), name=f"disk-end-{os.getpid()}")
    until_state(cache, "ready")
    # A flush takes a second and a half.
    slowed = """
async def flush(timeout_s, real=disk.flush):
    await __import__("asyncio").sleep(1.5)
    return await real(timeout_s)
disk.flush = flush
"""
    ray.get(cache.__ray_call__.remote(lambda actor: exec(slowed, {"disk": actor._host.service.disk})))

    shutdown_cache(cache)

    assert "killed" not in caplog.text
