"""`raydix export-events` on a real cluster: a subscriber has the blocks of a cache actor that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import ray
from support.exporters.running_exporter import full, publish
from support.exporters.vllm_subscriber import UNSIGNED, VllmSubscriber
from support.processes.command_line import run, run_json

from raydix.actors import PrefixCacheClient, shutdown_cache, start_cache
from raydix.schemas import CacheUnavailable, KVEventSnapshot, StaleEpoch

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def namespace(ray_cluster: None) -> Iterator[str]:
    """A Ray namespace with the cache kv-0, which publishes full events, and slim-0."""
    name = f"export-{uuid4().hex[:8]}"
    slim = full(events="slim", events_stride_tokens=16)
    configs = {"kv-0": full(), "slim-0": slim}
    handles = [start_cache(config, name=each, namespace=name) for each, config in configs.items()]
    yield name
    for handle in handles:
        shutdown_cache(handle)


async def blocks_of(cache: Any) -> set[int]:
    """Return the hashes of the blocks of a cache, as soon as it answers."""
    async with asyncio.timeout(300):
        while True:
            try:
                async with PrefixCacheClient(cache) as client:
                    snapshot = await client.event_snapshot()
            except (CacheUnavailable, StaleEpoch):
                await asyncio.sleep(0.05)
                continue
            assert isinstance(snapshot, KVEventSnapshot)
            return {each & UNSIGNED for event in snapshot.events for each in event.block_hashes}


@pytest.mark.more
async def test_a_subscriber_follows_a_cache_that_is_killed_until_the_command_is_stopped(namespace: str) -> None:
    cache = ray.get_actor("kv-0", namespace=namespace)
    async with PrefixCacheClient(cache) as client:
        await publish(client, 1, 2)
    address = ray.get_runtime_context().gcs_address
    options = ["--endpoint", "tcp://127.0.0.1:*", "--replay-endpoint", "tcp://127.0.0.1:*", "--json"]
    exporting = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "raydix.actors.cli", "export-events", "kv-0", "--namespace", namespace, *options),
        env=os.environ | {"RAY_ADDRESS": address},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert exporting.stdout is not None and exporting.stderr is not None
    try:
        async with asyncio.timeout(300):
            line = (await exporting.stderr.readline()).decode()
        endpoint, replay_endpoint = re.findall(r"tcp://[\d.:]+", line)

        async with VllmSubscriber(endpoint, replay_endpoint) as subscriber:
            expected = await blocks_of(cache)
            assert len(expected) == 2
            await subscriber.until(lambda: set(subscriber.blocks) == expected)

            ray.kill(cache, no_restart=False)  # SIGKILL; Ray starts it again

            await subscriber.until(lambda: not subscriber.blocks)
            assert await blocks_of(cache) == set()
            async with PrefixCacheClient(cache) as client:
                await publish(client, 3, 4, 5)
            expected = await blocks_of(cache)
            await subscriber.until(lambda: set(subscriber.blocks) == expected)
            assert subscriber.num_gaps == 0

            exporting.send_signal(signal.SIGINT)
            async with asyncio.timeout(60):
                document = json.loads(await exporting.stdout.read())
                assert await exporting.wait() == 0
            await subscriber.until(lambda: not subscriber.blocks)
        assert (document["endpoint"], document["replay_endpoint"]) == (endpoint, replay_endpoint)
        assert document["snapshots"] == 2
    finally:
        if exporting.returncode is None:
            exporting.kill()
            await exporting.wait()


def test_it_ends_after_its_time(namespace: str) -> None:
    options = ("--namespace", namespace, "--endpoint", "tcp://127.0.0.1:*", "--seconds", "0.2")

    assert run_json("export-events", "kv-0", *options)["snapshots"] == 1
    assert "1 snapshot" in run("export-events", "kv-0", *options, "--tier", "device").stdout


def test_it_refuses_with_advice(namespace: str) -> None:
    slim = run("export-events", "slim-0", "--namespace", namespace, exit_code=1)
    assert "CacheConfig(events='full')" in slim.stderr
    tiers = run("export-events", "kv-0", "--namespace", namespace, "--tier", "host", exit_code=1)
    assert "tiers must be of 'device', not 'host'" in tiers.stderr
    wrong = run("export-events", "kv-0", "--namespace", namespace, "--endpoint", "nowhere", exit_code=1)
    assert "endpoint must be" in wrong.stderr
    run("export-events", "no-such", "--namespace", namespace, exit_code=3)


def test_without_the_extra_it_names_it(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "raydix.actors.exporters.vllm_events", None)

    refused = run("export-events", "kv-0", "--namespace", namespace, exit_code=2)

    assert "in the clone: pip install '.[zmq]'; or the wheel's file: pip install 'FILE.whl[zmq]'" in refused.stderr
