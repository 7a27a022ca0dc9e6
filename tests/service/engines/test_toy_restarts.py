"""Copies that are held back while the cache restarts: a page that was chosen in one life is never written in another.

The toy engine checks, for each token that it computes, that the KV of all tokens before it is theirs.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from support.engines.toy_caches import toy_config
from support.engines.toy_engine import BLOCK, ToyEngine, prompts
from support.more import more
from support.waiting import wait_until

from raydix.actors import PrefixCacheClient, start_cache
from raydix.actors.engines.block_copies import PoolTarget

pytestmark = pytest.mark.ray

PAGE_SIZES = [BLOCK, *more(BLOCK // 4)]
MakeEngine = Callable[[], ToyEngine]


@pytest.fixture
def cache(ray_cluster: None, request: pytest.FixtureRequest) -> Iterator[Any]:
    config = toy_config(check=False, page_size=request.param)
    cache = start_cache(config.model_copy(update={"validate": False}))  # the engine finds wrong KV, not the cache
    yield cache
    ray.kill(cache)


@pytest.fixture
def make_engine(cache: Any) -> Iterator[MakeEngine]:
    engines: list[ToyEngine] = []

    def make() -> ToyEngine:
        engines.append(
            ToyEngine([partial(PrefixCacheClient, cache)], check=False, load_timeout_ms=60_000, reconnect_s=0.05)
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


class Latch:
    """Holds back the copies of one engine."""

    def __init__(self, engine: ToyEngine, method: str, patch: pytest.MonkeyPatch) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        copy = getattr(PoolTarget, method)
        held = engine.kv[0][0].data_ptr()

        def hold_back(target: PoolTarget, *args: Any) -> None:
            if target.copies.rows[0].data_ptr() == held:
                self.entered.set()
                assert self.open.wait(300)
                target = self.target_of(target)
            copy(target, *args)

        patch.setattr(PoolTarget, method, hold_back)

    def target_of(self, target: PoolTarget) -> PoolTarget:
        """Return the pool to copy to."""
        return target


def epoch_of(engine: ToyEngine) -> str:
    """Return the life of the cache to which both sides are connected; empty: to none."""
    of_links = {
        link.seen.epoch if link.connected and link.seen else "" for link in (*engine.links, *engine.worker_links)
    }
    pool = engine.worker_links[0].pool
    return "" if pool is None or pool.lost or of_links != {pool.epoch} else pool.epoch


def restart(cache: Any, engine: ToyEngine) -> None:
    """Kill the cache; wait until the engine is connected to the next life.

    The engine stands still: it would wait for a copy before it gives the blocks of an ended request to others.
    """
    before = epoch_of(engine)
    ray.kill(cache, no_restart=False)
    wait_until(lambda: epoch_of(engine) not in ("", before), 300)


def step_until(engine: ToyEngine, is_true: Callable[[], bool]) -> None:
    def step() -> bool:
        engine.step()
        return is_true()

    wait_until(step, 300)


def write_over_a_restart(cache: Any, make_engine: MakeEngine, latch: Latch, one: ToyEngine) -> ToyEngine:
    """Hold back a save of one engine until it has the pool of the next life; return an engine that hits there."""
    old, new = prompts(2, 96)
    one.add(old, 400)  # it runs on, so that its blocks stay its own
    step_until(one, latch.entered.is_set)
    restart(cache, one)
    other = make_engine()
    other.run(new)
    known = one.scheduler._requests[one.add(new).request_id]
    wait_until(lambda: known.look_up is not None and known.look_up.done.is_set(), 300)
    for _ in range(3):  # no more, as the first request must not end
        one.step()
    leases = one.workers[0]._leases
    wait_until(lambda: leases._target is not None and leases._target.epoch == epoch_of(one), 300)

    latch.open.set()
    one.run_all()
    reader = make_engine()
    assert reader.run(new, 2).num_hit > 0
    return reader


@pytest.mark.parametrize("cache", PAGE_SIZES, indirect=True)
def test_a_save_that_is_held_back_over_a_restart_writes_into_the_old_pool(
    cache: Any, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make_engine()
    reader = write_over_a_restart(cache, make_engine, Latch(one, "save", monkeypatch), one)

    assert (reader.num_wrong, one.num_wrong) == (0, 0)


@pytest.mark.more
@pytest.mark.parametrize("cache", PAGE_SIZES, indirect=True)
def test_a_load_that_is_held_back_over_a_restart_gives_no_wrong_kv(
    cache: Any, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make_engine(), make_engine()
    old, new = prompts(2, 96)
    other.run(old)
    latch = Latch(one, "load", monkeypatch)
    request = one.add(old, 4)
    step_until(one, latch.entered.is_set)
    restart(cache, one)
    wait_until(lambda: epoch_of(other) == epoch_of(one), 300)
    other.run(new)

    latch.open.set()
    one.run_all()

    assert request.num_hit == 0  # it was loaded in vain, and computed
    assert (one.num_wrong, other.num_wrong) == (0, 0)


@pytest.mark.more
@pytest.mark.parametrize("cache", [BLOCK], indirect=True)
def test_a_save_into_the_pool_of_the_next_life_is_seen(
    cache: Any, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault planted: a save takes the pool when it runs."""
    one = make_engine()
    latch = Latch(one, "save", monkeypatch)
    latch.target_of = lambda target: one.workers[0]._leases._target or target  # type: ignore[method-assign]

    reader = write_over_a_restart(cache, make_engine, latch, one)

    assert reader.num_wrong > 0


def mapped_inodes(address: int | None = None) -> set[str]:
    """Return the inodes of this process's mappings, or that of the mapping at an address."""
    mappings = re.findall(r"^(\w+)-(\w+) \S+ \S+ \S+ (\d+)", Path("/proc/self/smaps").read_text(), re.MULTILINE)
    return {inode for start, end, inode in mappings if address is None or int(start, 16) <= address < int(end, 16)}


@pytest.mark.more
@pytest.mark.parametrize("cache", [BLOCK], indirect=True)
def test_an_idle_engine_does_not_keep_the_pool_of_a_dead_cache_mapped(cache: Any, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.run(prompts(1, 96)[0])
    link = engine.worker_links[0]
    assert link.pool is not None
    inode, pool = mapped_inodes(link.pool.pages.data_ptr()), link.pool
    assert inode and inode <= mapped_inodes()

    ray.kill(cache, no_restart=False)
    wait_until(lambda: pool.lost, 300)

    wait_until(lambda: not inode & mapped_inodes())
    wait_until(lambda: epoch_of(engine) not in ("", pool.epoch), 300)
    assert not inode & mapped_inodes()


@pytest.mark.more
@pytest.mark.parametrize("cache", [BLOCK], indirect=True)
def test_the_engines_warning_counts_the_restarts_by_cause(
    cache: Any, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    for _ in range(3):
        restart(cache, engine)

    wait_until(lambda: "ended by Ray, 2 times" in caplog.text)  # of the last outage; it may be seen before its restart
    line = next(each for each in caplog.text.splitlines() if "ended by Ray, 2 times" in each)
    assert "so the engine computes all KV itself: " in line and "Ray restarted the cache, empty in memory: " in line
