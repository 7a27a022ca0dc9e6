"""Dynamo's KV indexer, fed by an exporter, finds the blocks that the cache matches."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from support.exporters.running_exporter import FREE_PORT, PAGE, exporting, full, host_of, publish, restart, tokens
from support.tiers.settled_tiers import NO_SPARE, quick_disk, tensors, tiers_settled, whole_host

from raydix.actors import LocalPrefixCache
from raydix.actors.exporters.vllm_events import VllmEventExporter
from raydix.cache_core import KVCache
from raydix.schemas import CacheConfig, frame_namespace

PINNED = "1.6.1"
pytestmark = pytest.mark.skipif(
    find_spec("dynamo") is None or find_spec("dynamo.indexer") is None,
    reason=f"needs Dynamo's indexer: pip install ai-dynamo-runtime=={PINNED}",
)

NAMESPACES: list[dict[str, str | None]] = [
    {},
    {"lora_id": "adapter"},
    {"cache_salt": "tenant"},
    {"lora_id": "adapter", "cache_salt": "tenant"},
    {"extra_key": "picture", "cache_salt": "tenant"},
]


class Indexer:
    """Dynamo's indexer in a process of its own."""

    def __init__(self) -> None:
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + 60
        while not self._listens():
            assert self._process.poll() is None and time.monotonic() < until
            time.sleep(0.05)

    def _listens(self) -> bool:
        try:
            return bool(urlopen(f"{self._url}/health", timeout=5).status == 200)
        except (URLError, OSError):
            return False

    async def post(self, path: str, **body: Any) -> Any:
        """Return the answer to a request."""
        request = Request(f"{self._url}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
        return await asyncio.to_thread(lambda: json.load(urlopen(request, timeout=30)))

    async def register(self, exporter: VllmEventExporter, instance: int, model: str) -> None:
        """Have it read the events of an exporter."""
        more = {} if exporter.replay_endpoint is None else {"replay_endpoint": exporter.replay_endpoint}
        await self.post(
            "/register", instance_id=instance, endpoint=exporter.endpoint, model_name=model, block_size=PAGE, **more
        )

    async def scores(self, model: str, ids: list[int], **namespace: str | None) -> dict[str, int]:
        """Return the matched tokens of each instance that has some."""
        instances = await self.instances(model, ids, **namespace)
        return {name: each["longest_matched"] for name, each in instances.items()}

    async def instances(self, model: str, ids: list[int], **namespace: str | None) -> dict[str, dict[str, int]]:
        """Return the matched tokens of each instance that has some, by where they are."""
        salt, extra_key = namespace.get("cache_salt"), namespace.get("extra_key")
        if extra_key is not None:
            salt = frame_namespace(extra_key, None, salt)
        named = {"lora_name": namespace.get("lora_id"), "cache_salt": salt}
        answer = await self.post("/query", token_ids=ids, model_name=model, **named)
        instances: dict[str, dict[str, int]] = answer["instances"]
        return instances

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def indexer() -> Iterator[Indexer]:
    """A running indexer."""
    assert version("ai-dynamo-runtime") == PINNED, "other releases were not tried"
    made = Indexer()
    yield made
    made.close()


async def matched(caches: dict[int, LocalPrefixCache], ids: list[int], namespace: dict[str, str | None]) -> Any:
    """Return the matched tokens of each cache that has some."""
    lengths = {str(name): (await cache.match(ids, **namespace)).prefix_len for name, cache in caches.items()}
    return {name: length for name, length in lengths.items() if length}


async def compare(indexer: Indexer, model: str, caches: dict[int, LocalPrefixCache], random: Random) -> int:
    """Wait until all scores of some prompts are the lengths that the caches match; return the sum of these.

    The caches evict, too, while nothing is asked of them.
    """
    total = 0
    for namespace in NAMESPACES:
        for _ in range(4):
            ids = [*tokens(*(random.randrange(3) for _ in range(6))), 7]
            until = time.monotonic() + 60
            while (found := await indexer.scores(model, ids, **namespace)) != await matched(caches, ids, namespace):
                assert time.monotonic() < until, (namespace, ids[::PAGE], found)
                await asyncio.sleep(0.05)
            total += sum(found.values())
    return total


@pytest.mark.parametrize(("medium", "instance"), [("GPU", 1), (None, 3)])
async def test_its_scores_are_the_lengths_that_the_caches_match(
    indexer: Indexer, medium: str | None, instance: int
) -> None:
    random, model, found = Random(7), f"model-{medium}", 0
    async with LocalPrefixCache(full(64)) as one, LocalPrefixCache(full(64)) as two:
        caches = {instance: one, instance + 1: two}
        for cache in caches.values():  # the indexer comes late
            await publish(cache, 0, 1)
        first = exporting(one, replay_endpoint=FREE_PORT, medium=medium)
        async with first as exporter, exporting(two, medium=medium) as without_replay:
            await indexer.register(exporter, instance, model)
            await indexer.register(without_replay, instance + 1, model)
            for number in range(160):
                cache = random.choice([one, two])
                if number % 16 == 15:
                    await cache.evict(random.randrange(1, 8) * PAGE)
                pages = [random.randrange(3) for _ in range(random.randrange(1, 6))]
                await publish(cache, *pages, **random.choice(NAMESPACES))
                if number % 40 == 39:
                    found += await compare(indexer, model, caches, random)
            assert found > 0

            await one.reset()
            await compare(indexer, model, caches, random)
            await publish(one, 0, 1, 2)
            await restart(one, exporter)
            await compare(indexer, model, {instance + 1: two}, random)  # the other one is empty
    async with asyncio.timeout(60):  # closed exporters leave no blocks
        while await indexer.scores(model, tokens(0, 1, 2)):  # noqa: ASYNC110 -- it must be asked
            await asyncio.sleep(0.05)


async def test_it_counts_the_group_of_the_full_kv_alone(indexer: Indexer) -> None:
    config = full(64).model_copy(update={"sliding_window_size": PAGE})
    ids, model = tokens(0, 1, 2, 1, 0, 2), "model-window"
    async with LocalPrefixCache(CacheConfig.model_validate(config.model_dump())) as cache:
        async with exporting(cache, replay_endpoint=FREE_PORT, medium="GPU") as exporter:
            await indexer.register(exporter, 7, model)
            await publish(cache, 0, 1, 2, 1, 0, 2)
            core = host_of(cache).service.core
            assert isinstance(core, KVCache)
            for num_gone in (0, 4 * PAGE, 2 * PAGE):  # the window KV of the upper part, and then of all
                core.evict_window(num_gone)
                wanted = (await cache.match(ids)).full_prefix_len
                until = time.monotonic() + 60
                while (found := await indexer.scores(model, ids)) != ({"7": wanted} if wanted else {}):
                    assert time.monotonic() < until, (found, wanted)
                    await asyncio.sleep(0.05)
                await asyncio.sleep(0.2)
                assert await indexer.scores(model, ids) == found


async def test_it_finds_in_each_tier_what_a_match_finds_there(indexer: Indexer, tmp_path: Path) -> None:
    tiers = {"host": whole_host(32 * PAGE), "disk": quick_disk(tmp_path, 64 * PAGE), "fingerprint": "m"}
    config = full(8, pool=tensors(8 * PAGE), eviction=NO_SPARE, **tiers)
    random, model, num_deeper, num_on_disk = Random(7), "model-tiers", 0, 0
    async with LocalPrefixCache(config) as cache, exporting(cache, replay_endpoint=FREE_PORT) as exporter:
        await indexer.register(exporter, 9, model)
        for number in range(60):
            await publish(cache, *[random.randrange(3) for _ in range(random.randrange(1, 6))])
            await tiers_settled(cache)
            if number % 6 == 5:
                await cache.evict(random.randrange(1, 8) * PAGE, random.choice(["device", "host"]))
            if number % 12 == 8:
                await cache.evict(40 * PAGE, "host")
            if number == 40:
                await cache.reset()
            if number % 10 == 9:
                ids = [*tokens(*(random.randrange(3) for _ in range(3))), 7]
                match = await cache.match(ids)
                wanted = {"gpu": match.prefix_len, "cpu": match.host_len, "disk": match.disk_len}
                until = time.monotonic() + 60
                nothing = dict.fromkeys(wanted, 0)
                while (found := (await indexer.instances(model, ids)).get("9", nothing)) | wanted != found:
                    assert time.monotonic() < until, (found, wanted)
                    await asyncio.sleep(0.05)
                num_deeper += match.host_len > match.prefix_len
                num_on_disk += match.disk_len > match.host_len
    assert num_deeper and num_on_disk
