"""The frames that an engine's requests cost: a real cache counts the batches that it receives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import ray
from support.engines.toy_caches import toy_config
from support.engines.toy_engine import BLOCK, ToyEngine, prompts

from raydix.actors import PrefixCacheClient
from raydix.actors.engines.worker_leases import WorkerLeases
from raydix.schemas import CacheStats

pytestmark = pytest.mark.ray

STEP = 4 * BLOCK  # tokens that the engine computes of each request in a step
LOOK_UP, ADOPT, SAVE, RELEASE = 2, 1, 2, 1  # frames, at most


class Counted:
    """An engine on a cache of its own, and the frames that the cache has received."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        client = partial(PrefixCacheClient, cache)
        self.engine = ToyEngine([client], chunk=STEP, num_blocks=256, lookup_timeout_ms=60_000)

    def stats(self) -> CacheStats:
        stats: CacheStats = ray.get(self.cache.stats.remote())  # no batch
        return stats

    def settle(self) -> None:
        """Wait until the worker has sent and received everything, as in a step that takes long."""
        (worker,) = self.engine.workers
        (link,) = self.engine.worker_links
        link._loop.run(asyncio.sleep(0))
        while worker._leases._tasks:
            time.sleep(0.001)

    def frames_of(self, tokens: list[list[int]], num_new: int = 1) -> int:
        """Run requests that arrive together; return the frames until no lease of them is open."""
        before = self.stats().batches
        requests = [self.engine.add(each, num_new) for each in tokens]
        while any(each.state != "finished" for each in requests):
            self.engine.step()
            self.settle()
        self.engine.run_all()
        deadline = time.monotonic() + 60
        while self.stats().open_leases:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert self.stats().tree_slots >= sum(len(each) // BLOCK * BLOCK for each in tokens), "all blocks were saved"
        return self.stats().batches - before


@pytest.fixture
def counted(running_cache: Callable[[Any], Any]) -> Iterator[Counted]:
    made = Counted(running_cache(toy_config(1024 * BLOCK, check=False)))
    yield made
    made.engine.close()


def test_a_miss_costs_two_frames_for_its_look_up_and_two_for_each_step_that_saves(counted: Counted) -> None:
    (prompt,) = prompts(1, 3 * STEP, seed=1)

    assert counted.frames_of([prompt]) <= LOOK_UP + ADOPT + 3 * SAVE + RELEASE


def test_the_requests_of_a_step_are_saved_by_the_same_frames(counted: Counted) -> None:
    given = prompts(6, 2 * STEP, seed=2)

    assert counted.frames_of(given) <= len(given) * LOOK_UP + ADOPT + 2 * SAVE + RELEASE


def test_a_decoded_token_that_fills_no_block_costs_no_frame(counted: Counted) -> None:
    one, other = prompts(2, 2 * BLOCK + 1, seed=3)

    assert counted.frames_of([one], 1) == counted.frames_of([other], BLOCK - 2)


def test_a_frame_more_for_each_save_is_seen(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = WorkerLeases._publish

    async def publish_and_ask(self: WorkerLeases, copy: Any) -> None:
        await publish(self, copy)
        await self._link.read_weights()

    monkeypatch.setattr(WorkerLeases, "_publish", publish_and_ask)
    (prompt,) = prompts(1, 3 * STEP, seed=4)

    assert counted.frames_of([prompt]) > LOOK_UP + ADOPT + 3 * SAVE + RELEASE
