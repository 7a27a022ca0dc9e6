"""Engines that share a cache in this process: hits, saves, preemptions, aborts, full and silent caches, planted faults.

The toy engine checks, for each token that it computes, that the KV of all tokens before it is theirs.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines.toy_caches import ToyCaches
from support.engines.toy_engine import BLOCK, ToyEngine, prompts
from support.more import more
from support.tiers.demotion import ALL, demote
from support.tiers.faulty_files import FaultyFileCalls
from support.tiers.settled_disk import settled, tier_of
from support.waiting import wait_until

from raydix.actors.engines.block_copies import PoolTarget
from raydix.actors.engines.scheduler_side import SchedulerSide
from raydix.actors.engines.settings import EngineSettings
from raydix.actors.engines.worker_leases import WorkerLeases
from raydix.schemas import (
    AdoptRequest,
    CacheUnavailable,
    ConfigMismatch,
    ExtendRequest,
    InsertRequest,
    InvalidRequest,
    LockRequest,
    ReleaseRequest,
    TierStats,
)
from raydix.schemas.engine_namespace import CacheNamespace, namespace_of

MakeCaches = Callable[..., ToyCaches]


@pytest.fixture
def make_caches() -> Iterator[MakeCaches]:
    """Makes caches. After the test nothing is open in them, and all blocks of the engines are free."""
    made: list[ToyCaches] = []

    def make(*args: Any, **options: Any) -> ToyCaches:
        made.append(ToyCaches(*args, **options))
        return made[-1]

    yield make
    for caches in made:
        check_ends(caches)
        caches.close()


def check_ends(caches: ToyCaches) -> None:
    for engine in caches.engines:
        assert engine.num_wrong == 0
        assert len(engine.free) == len(set(engine.free)) == engine.kv[0][0].shape[0] - 1
    for rank, cache in enumerate(caches.caches):
        wait_until(lambda rank=rank: caches.stats(rank).open_leases == 0)  # type: ignore[misc]
        assert caches.stats(rank).private_slots == 0
        caches.loop.run(cache.check_invariants())


# -------------------------------------------------------------------- hits and saves


@pytest.mark.parametrize("page_size", [BLOCK, BLOCK // 4])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_another_engine_loads_what_one_has_computed(make_caches: MakeCaches, num_ranks: int, page_size: int) -> None:
    caches = make_caches(num_ranks, page_size=page_size)
    one, other = caches.make_engine(), caches.make_engine()
    (prompt,) = prompts(1, 200)

    computed = one.run(prompt, 20)
    loaded = other.run(prompt, 20)
    longer = one.run(prompt + computed.output + [7] * 30, 1)

    assert (computed.num_hit, loaded.num_hit) == (0, 192)
    assert loaded.output == computed.output
    assert loaded.num_recomputed == 220 - 192
    assert longer.num_hit == 208  # blocks of decoded tokens, too


def test_a_cache_that_only_engines_use_times_their_look_ups_and_saves(make_caches: MakeCaches) -> None:
    caches = make_caches()
    engine, (prompt,) = caches.make_engine(), prompts(1, 200)

    for _ in range(3):
        engine.run(prompt, 1)

    stats = caches.stats()
    assert (stats.acquire_latency.count, stats.lock_latency.count) == (0, 3)
    assert stats.insert_latency.count >= 1
    assert stats.lock_latency.sum > 0 < stats.insert_latency.sum


def test_the_last_token_of_a_whole_prompt_is_computed_again(make_caches: MakeCaches) -> None:
    caches = make_caches()
    one, other = caches.make_engine(), caches.make_engine()
    (prompt,) = prompts(1, 8 * BLOCK)

    one.run(prompt)
    request = other.run(prompt, 2)

    assert request.num_hit == 8 * BLOCK
    assert request.num_recomputed == 1 + 2


def test_ranks_promise_what_all_of_them_hold(make_caches: MakeCaches) -> None:
    caches = make_caches(2)
    one, other = caches.make_engine(), caches.make_engine()
    (prompt,) = prompts(1, 128)
    one.run(prompt)
    wait_until(lambda: caches.stats(1).open_leases == 0)
    caches.loop.run(caches.caches[1].evict(1))  # its pages were published in steps of 64 tokens

    request = other.run(prompt)

    assert 0 < request.num_hit < 128
    assert request.num_hit == 64
    assert other.run(prompt).num_hit == 128


@pytest.mark.parametrize("failing", [0, 1])
def test_a_look_up_that_fails_at_one_rank_leaves_no_lease_at_the_other(
    make_caches: MakeCaches, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    caches = make_caches(2)
    engine, (prompt,) = caches.make_engine(), prompts(1, 128)
    engine.run(prompt)
    other = 1 - failing
    wait_until(lambda: caches.stats(other).open_leases == 0)

    async def fail(*args: Any, **options: Any) -> Any:
        while not (await caches.caches[other].stats()).open_leases:  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0.001)
        raise CacheUnavailable("lost")

    monkeypatch.setattr(engine.links[failing].client, "lock", fail)

    assert engine.run(prompt).num_hit == 0
    wait_until(lambda: caches.stats(other).lock_latency.count == 2)  # `check_ends` sees that its lease ends


def test_namespaces_share_nothing(make_caches: MakeCaches) -> None:
    caches = make_caches()
    engine = caches.make_engine()
    (prompt,) = prompts(1, 64)
    namespaces = [
        CacheNamespace(),
        namespace_of(cache_salt="a"),
        namespace_of(cache_salt="b"),
        namespace_of("french", "/adapters/1"),
        namespace_of("french", "/adapters/2"),
        namespace_of(identifiers=[("image-1", 3)]),
        namespace_of(identifiers=[("image-2", 3)]),
        namespace_of(identifiers=[("image-1", 4)]),
    ]

    assert len(set(namespaces)) == len(namespaces)
    assert [engine.run(prompt, 1, each).num_hit for each in namespaces] == [0] * len(namespaces)
    assert [engine.run(prompt, 1, each).num_hit for each in namespaces] == [64] * len(namespaces)


def test_parts_of_a_namespace_do_not_run_together() -> None:
    assert namespace_of("a", "b") != namespace_of("a:b", None)
    assert namespace_of("x" * 5000, "p").lora_id != namespace_of("x" * 5001, "p").lora_id
    assert namespace_of(cache_salt="s" * 5000).cache_salt != namespace_of(cache_salt="s" * 5001).cache_salt
    assert namespace_of(None, None, None) == CacheNamespace(None, None, None)


def test_an_engine_that_must_not_read_sends_nothing(make_caches: MakeCaches) -> None:
    caches = make_caches()
    engine = caches.make_engine(reads=False)
    (prompt,) = prompts(1, 64)

    assert [engine.run(prompt).num_hit, engine.run(prompt).num_hit] == [0, 0]
    assert caches.stats().acquires == 0


def test_waiting_requests_hold_a_limited_number_of_leases(make_caches: MakeCaches) -> None:
    caches = make_caches()
    engine = caches.make_engine(max_waiting_leases=4)
    requests = [engine.add(each, 1) for each in prompts(12, 64)]
    wait_until(lambda: caches.stats().open_leases == 4)
    time.sleep(0.05)

    assert caches.stats().open_leases == 4
    engine.run_all()
    assert {each.state for each in requests} == {"finished"}
    again = [engine.run(each).num_hit for each in prompts(12, 64)]
    assert again == [64] * 12


def test_a_request_without_a_whole_block_sends_nothing(make_caches: MakeCaches) -> None:
    caches = make_caches()
    engine = caches.make_engine()
    before = caches.stats().requests

    engine.run([1, 2, 3], 5)

    assert caches.stats().requests == before + 1  # the call of `stats` itself


# -------------------------------------------------------------------- room


def test_preempted_requests_load_their_own_blocks_back(make_caches: MakeCaches) -> None:
    caches = make_caches()
    engine = caches.make_engine(num_blocks=14, chunk=32)

    requests = [engine.add(each, 40) for each in prompts(5, 50)]
    engine.run_all()

    assert all(len(each.output) == 40 for each in requests)
    assert sum(each.num_hit > 0 for each in requests) > 0


def test_a_full_cache_refuses_saves_and_the_engine_computes(make_caches: MakeCaches) -> None:
    caches = make_caches(num_tokens=64)
    engine = caches.make_engine()
    one, other, third = prompts(3, 96)

    requests = [engine.add(each, 8) for each in (one, other, third)]
    engine.run_all()

    assert [each.num_recomputed for each in requests] == [104, 104, 104]
    assert engine.counts.take()["saves_refused"] > 0


def test_an_aborted_request_ends_its_lease_at_any_time(make_caches: MakeCaches) -> None:
    caches = make_caches()
    engine = caches.make_engine()
    (prompt,) = prompts(1, 160)
    engine.run(prompt)
    for num_steps in range(8):
        requests = [engine.add(prompt + [number] * 40, 20) for number in range(3)]
        for _ in range(num_steps):
            engine.step()
        for request in requests:
            engine.abort(request)
        engine.run_all()

    wait_until(lambda: caches.stats().open_leases == 0)


@pytest.mark.parametrize("how", ["finish", "reset"])
def test_a_request_that_ends_before_its_load_is_planned_leaves_no_lease(make_caches: MakeCaches, how: str) -> None:
    caches = make_caches()
    engine, (prompt,) = caches.make_engine(), prompts(1, 96)
    engine.run(prompt)
    scheduler, request = engine.scheduler, engine.add(prompt)
    wait_until(lambda: scheduler.find_hit(request.request_id, len(prompt), 0) == 96)

    scheduler.allocate(request.request_id, 96, engine.free[:6])
    if how == "finish":
        assert not scheduler.finish_request(request.request_id)
        engine.waiting.remove(request)
    else:
        engine.reset()
    engine.run_all()

    wait_until(lambda: engine.counts.take().get("load_failures") == 1)
    assert request.num_hit == 0


# -------------------------------------------------------------------- tiers below the pool


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_look_up_brings_what_has_left_the_pool_for_the_host(make_caches: MakeCaches, num_ranks: int) -> None:
    caches = make_caches(num_ranks, host_tokens=4096)
    one, other = caches.make_engine(), caches.make_engine(load_timeout_ms=60_000)
    (prompt,) = prompts(1, 200)
    computed = one.run(prompt, 20)
    leave_pool(caches)
    open_gates(caches)

    loaded = other.run(prompt, 20)

    assert (loaded.num_hit, loaded.output) == (192, computed.output)
    assert loaded.num_recomputed == 220 - 192
    assert [host_of(caches, rank).tokens_loaded for rank in range(num_ranks)] == [192] * num_ranks
    counts = other.counts.take()
    assert (counts["lookups"], counts["tier_loads"], len(counts["tier_load_s"])) == (1, 1, 1)
    assert "lookup_s" not in counts


def test_a_request_waits_for_its_load_and_others_run(make_caches: MakeCaches) -> None:
    """It waits longer than for a look-up without a load."""
    caches = make_caches(host_tokens=4096)
    engine = caches.make_engine(load_timeout_ms=600_000)
    (prompt, other) = prompts(2, 200)
    computed = engine.run(prompt, 20)
    leave_pool(caches)

    waiting = engine.add(prompt, 20)
    step_until_loading(engine, waiting.request_id)
    known = engine.scheduler._requests[waiting.request_id]
    assert known.asked_at is not None
    known.asked_at -= 2 * engine.settings.lookup_timeout_ms / 1000
    running = engine.add(other, 60)
    step_until(engine, lambda: running.state == "finished")
    assert (waiting.state, waiting.blocks) == ("waiting", [])
    open_gates(caches)
    engine.run_all()

    assert (running.num_hit, waiting.num_hit, waiting.output) == (0, 192, computed.output)
    counts = engine.counts.take()
    assert "lookup_timeouts" not in counts and "tier_loads_late" not in counts


def test_steps_are_no_slower_while_many_requests_wait_for_loads(make_caches: MakeCaches) -> None:
    caches = make_caches(host_tokens=4096)
    engine = caches.make_engine(load_timeout_ms=60_000)
    *texts, last = prompts(21, 40)
    for text in (*texts, last):
        engine.run(text)
    leave_pool(caches)  # the last one, which is used least long ago, is dropped
    waits: list[float] = []
    requests = [engine.add(text) for text in texts]
    for request in requests:
        step_until_loading(engine, request.request_id)
        look_up = engine.scheduler._requests[request.request_id].look_up
        assert look_up is not None
        look_up.done.wait = waits.append  # type: ignore[assignment, method-assign]
    waits.clear()

    for _ in range(5):
        engine.step()
    num_waits = len(waits)
    open_gates(caches)
    engine.run_all()

    assert num_waits == 5 and max(waits) <= 0.001
    assert [request.num_hit for request in requests] == [32] * 20


def test_a_request_whose_load_is_late_computes_and_the_next_one_hits(make_caches: MakeCaches) -> None:
    caches = make_caches(host_tokens=4096)
    engine, patient = caches.make_engine(load_timeout_ms=100), caches.make_engine(load_timeout_ms=60_000)
    (prompt,) = prompts(1, 200)
    engine.run(prompt)
    leave_pool(caches)

    request = engine.run(prompt)
    assert (request.num_hit, request.num_recomputed) == (0, 201)
    counts = engine.counts.take()
    assert counts["tier_loads_late"] == 1
    assert "lookup_timeouts" not in counts
    open_gates(caches)
    (cache,) = caches.caches  # a load that was given up keeps its pages until its chunk has ended
    assert cache.service.host is not None
    wait_until(lambda: caches.stats().open_leases == 0 and not cache.service.host.loads.moves.in_flight)

    assert patient.run(prompt).num_hit == 192


def test_a_request_saves_what_it_computes_if_its_late_load_ends_before_it(make_caches: MakeCaches) -> None:
    caches = make_caches(host_tokens=4096)
    engine = caches.make_engine(load_timeout_ms=500)
    (prompt,) = prompts(1, 192)
    engine.run(prompt)
    leave_pool(caches)

    request = engine.add(prompt, 200)
    step_until(engine, lambda: request.num_computed >= 192)
    look_up = engine.scheduler._requests[request.request_id].look_up
    open_gates(caches)
    assert look_up is not None and look_up.done.wait(60)
    engine.run_all()

    assert request.num_hit == 0
    assert engine.counts.take()["tier_loads_late"] == 1
    assert caches.make_engine().run(request.tokens).num_hit == 384


@pytest.mark.parametrize("is_late", [False, True], ids=["while it waits", "while it computes"])
def test_a_request_that_is_aborted_during_its_load_leaves_nothing(make_caches: MakeCaches, is_late: bool) -> None:
    caches = make_caches(host_tokens=4096)
    engine = caches.make_engine(load_timeout_ms=200 if is_late else 60_000)
    (prompt,) = prompts(1, 200)
    engine.run(prompt)
    leave_pool(caches)

    gone = engine.add(prompt, 300)
    step_until_loading(engine, gone.request_id)
    if is_late:
        step_until(engine, lambda: gone.num_computed >= 200)
    engine.abort(gone)
    engine.run_all()
    assert caches.stats().open_leases == 1  # it is filled
    open_gates(caches)
    wait_until(lambda: caches.stats().open_leases == 0)

    assert engine.scheduler._num_waiting == 0
    assert caches.make_engine(load_timeout_ms=60_000).run(prompt).num_hit == 192


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_reset_during_a_load_costs_the_hit_alone(make_caches: MakeCaches, num_ranks: int) -> None:
    caches = make_caches(num_ranks, host_tokens=4096)
    engine = caches.make_engine(load_timeout_ms=60_000)
    (prompt,) = prompts(1, 200)
    engine.run(prompt)
    leave_pool(caches)

    request = engine.add(prompt)
    step_until_loading(engine, request.request_id)
    caches.loop.run(caches.caches[-1].reset())  # the lease ends, and its request starts again
    open_gates(caches)
    engine.run_all()

    assert (request.num_hit, request.num_recomputed) == (0, 201)


@pytest.mark.parametrize("page_size", [BLOCK, BLOCK // 4])
def test_engines_hit_on_the_disk_after_caches_and_engines_were_started_again(
    make_caches: MakeCaches, tmp_path: Path, page_size: int
) -> None:
    caches = make_caches(2, disk=tmp_path, page_size=page_size)
    (prompt,) = prompts(1, 200)
    computed = keep_on_disk(caches, prompt)
    for engine in caches.engines:
        engine.close()
    caches.engines.clear()
    for cache in caches.caches:
        caches.loop.run(cache.close())
    caches.caches.clear()

    again = make_caches(2, disk=tmp_path, page_size=page_size)
    engine = again.make_engine(load_timeout_ms=60_000)
    for cache in again.caches:
        again.loop.run(settled(cache))
    request = engine.run(prompt, 20)

    assert (request.num_hit, request.output) == (192, computed)
    assert engine.counts.take()["tier_loads"] == 1


@pytest.mark.parametrize("poorer", [0, 1])
def test_ranks_promise_what_the_disks_of_all_of_them_hold(make_caches: MakeCaches, tmp_path: Path, poorer: int) -> None:
    caches = make_caches(2, disk=tmp_path)
    (prompt,) = prompts(1, 208)
    keep_on_disk(caches, prompt[: 6 * BLOCK], 1)
    computed = keep_on_disk(caches, prompt, 1)
    for cache in caches.caches:
        caches.loop.run(cache.evict(ALL))
    caches.loop.run(caches.caches[poorer].evict(1, tier="disk"))  # the part behind the first 96 tokens
    lengths = [tier_of(cache).tier.cache.total_size() for cache in caches.caches]
    assert (lengths[poorer], lengths[1 - poorer]) == (96, 208)
    engine = caches.make_engine(load_timeout_ms=60_000)

    request = engine.run(prompt)

    assert (request.num_hit, request.output) == (96, computed)
    assert engine.run(prompt).num_hit == 208  # both pools have all


def test_a_disk_that_stands_still_costs_its_part_of_a_hit_alone(make_caches: MakeCaches, tmp_path: Path) -> None:
    """The load ends at the disk's own limit, and the request gets what the pool has; then nothing is loaded."""
    calls = FaultyFileCalls()
    caches = make_caches(disk=tmp_path, disk_load_s=0.3, calls=calls)
    (prompt,) = prompts(1, 208)
    keep_on_disk(caches, prompt, 1)
    caches.loop.run(caches.caches[0].evict(1))
    num_left = caches.stats().tree_slots
    assert 0 < num_left < 208
    go_on = calls.stall("preadv")
    engine = caches.make_engine(load_timeout_ms=60_000)

    requests = [engine.run([*prompt, token], 1) for token in (1, 2)]
    go_on()

    assert [request.num_hit for request in requests] == [num_left, 208]  # the first one has saved what it computed
    counts = engine.counts.take()
    assert (counts["lookups"], counts["tier_loads"]) == (2, 1)
    assert tier_of(caches.caches[0]).state == "stalled"


def test_a_tier_whose_limit_is_0_loads_nothing_for_engines(make_caches: MakeCaches, tmp_path: Path) -> None:
    caches = make_caches(disk=tmp_path, disk_load_s=0)
    (prompt,) = prompts(1, 208)
    keep_on_disk(caches, prompt, 1)
    caches.loop.run(caches.caches[0].evict(ALL))
    assert tier_of(caches.caches[0]).tier.cache.total_size() == 208
    engine = caches.make_engine()

    assert engine.run(prompt).num_hit == 0
    assert "tier_loads" not in engine.counts.take()


def keep_on_disk(caches: ToyCaches, prompt: list[int], num_new: int = 20) -> list[int]:
    """Have a prompt used twice, so that the disks keep it; return the answer."""
    for cache in caches.caches:
        caches.loop.run(settled(cache))
    engine = caches.make_engine()
    answers = [engine.run(prompt, num_new).output for _ in range(2)]
    for rank, cache in enumerate(caches.caches):
        wait_until(lambda rank=rank: caches.stats(rank).open_leases == 0)  # type: ignore[misc]
        caches.loop.run(settled(cache))
    assert answers[0] == answers[1]
    return answers[0]


def open_gates(caches: ToyCaches) -> None:
    for gate in caches.gates:
        gate.pass_chunks()


def step_until(engine: ToyEngine, is_so: Callable[[], bool]) -> None:
    def step() -> bool:
        engine.step()
        return is_so()

    wait_until(step)


def step_until_loading(engine: ToyEngine, request_id: str) -> None:
    """Step until the engine knows that a request waits for a load."""

    def is_loading() -> bool:
        request = engine.scheduler._requests[request_id]
        return request.look_up is not None and request.look_up.is_loading

    step_until(engine, is_loading)


def leave_pool(caches: ToyCaches) -> None:
    """Have all KV written to the host tier, and evicted from the pool."""
    for rank, cache in enumerate(caches.caches):
        wait_until(lambda rank=rank: caches.stats(rank).open_leases == 0)  # type: ignore[misc]
        caches.loop.run(demote(cache))
        assert caches.stats(rank).tree_slots == 0


def host_of(caches: ToyCaches, rank: int = 0) -> TierStats:
    host = caches.stats(rank).host
    assert host is not None
    return host


# -------------------------------------------------------------------- silence


def test_no_call_of_the_engine_waits_for_a_silent_cache(make_caches: MakeCaches) -> None:
    caches = make_caches()
    engine = caches.make_engine(lookup_timeout_ms=50, load_timeout_ms=300)
    hit, miss = prompts(2, 160)
    engine.run(hit)
    wait_until(lambda: caches.stats().open_leases == 0)
    release = threading.Event()
    caches.loop.call(release.wait, 30)  # the loop of the cache and of all clients stands still

    started = time.monotonic()
    requests = [engine.add(hit, 4), engine.add(miss, 4)]
    slowest = 0.0
    while any(each.state != "finished" for each in requests):
        before = time.monotonic()
        engine.step()
        slowest = max(slowest, time.monotonic() - before)
    release.set()

    assert slowest < 1
    assert time.monotonic() - started < 25  # else the loop has gone on by itself
    assert [each.num_hit for each in requests] == [0, 0]
    engine.run_all()


def test_a_load_that_does_not_begin_in_time_fails_once(make_caches: MakeCaches, monkeypatch: Any) -> None:
    caches = make_caches()
    engine = caches.make_engine(load_timeout_ms=100)
    (prompt,) = prompts(1, 96)
    engine.run(prompt)
    adopt = WorkerLeases._adopt

    async def adopt_late(self: WorkerLeases, request: Any) -> Any:
        lease = await adopt(self, request)
        await asyncio.sleep(0.5)
        return lease

    monkeypatch.setattr(WorkerLeases, "_adopt", adopt_late)
    request = engine.run(prompt, 3)
    monkeypatch.undo()

    assert request.num_hit == 0
    assert request.num_recomputed == 99
    assert engine.counts.take()["load_failures"] == 1


def test_a_lease_whose_worker_is_not_connected_ends_once_it_is(make_caches: MakeCaches) -> None:
    """The scheduler has connected to a restarted cache before the worker."""
    caches = make_caches()
    engine = caches.make_engine()
    (prompt,) = prompts(1, 96)
    engine.run(prompt)
    wait_until(lambda: caches.stats(0).open_leases == 0)
    engine.worker_links[0].connected = False  # it connects again in `reconnect_s`

    engine.run(prompt, 3)

    wait_until(lambda: caches.stats(0).open_leases == 0)


# -------------------------------------------------------------------- configuration


def test_a_cache_that_does_not_fit_is_refused_with_the_fields_that_differ(make_caches: MakeCaches) -> None:
    with pytest.raises(ConfigMismatch, match="page_size is 12, not 16 or a divisor of it"):
        make_caches(page_size=12, num_tokens=1200).make_engine()
    with pytest.raises(ConfigMismatch, match=r"segment 2 of a record is missing, not stamps"):
        make_caches(check=False).make_engine(check=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "'cache'"),
        ({"cache": "kv", "chunk": 3}, "unknown setting 'chunk'"),
        ({"cache": ""}, "'cache'"),
        ({"cache": "kv", "lookup_timeout_ms": -1}, "lookup_timeout_ms"),
        ({"cache": "kv", "check": "yes"}, "check"),
    ],
)
def test_wrong_settings_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        EngineSettings.of(given)


# -------------------------------------------------------------------- random operations


def test_a_request_id_that_comes_again_hits_and_leaves_no_lease(make_caches: MakeCaches) -> None:
    """The grants of a request come with the end of the one that had its id before."""
    caches = make_caches()
    engine = caches.make_engine()
    (prompt,) = prompts(1, 96)
    engine.run(prompt)
    hits = []
    for _ in range(60):
        request = engine.add(prompt, 2, request_id="again")
        known = engine.scheduler._requests["again"]
        wait_until(lambda known=known: known.look_up is not None and known.look_up.done.is_set())  # type: ignore[misc]
        while request.state != "finished" or "again" in engine.held:
            engine.step()
        hits.append(request.num_hit)
    engine.run_all()

    assert hits == [96] * 60


@pytest.mark.parametrize("keeps_blocks", [True, False])
@pytest.mark.parametrize("seed", [0, *more(1, 2)])
def test_random_operations_on_two_engines(make_caches: MakeCaches, seed: int, keeps_blocks: bool) -> None:
    rng = random.Random(seed)
    caches = make_caches(1 + seed % 2, num_tokens=640, page_size=BLOCK // (1 + seed % 2))
    engines = [caches.make_engine(num_blocks=24, chunk=48, keeps_blocks=keeps_blocks) for _ in range(2)]
    known = prompts(6, 150, shared=70, seed=seed)
    open_requests: list[tuple[ToyEngine, Any]] = []
    for _ in range(250):
        engine = rng.choice(engines)
        match rng.randrange(10):
            case 0 | 1 | 2:
                tokens = rng.choice(known)[: rng.randrange(1, 151)]
                salt = rng.choice([None, None, "a"])
                request = engine.add(tokens, rng.randrange(1, 40), namespace_of(cache_salt=salt))
                open_requests.append((engine, request))
            case 3 if open_requests:
                owner, request = open_requests.pop(rng.randrange(len(open_requests)))
                owner.abort(request)
            case 4 if engine.running:
                request = rng.choice(engine.running)
                known.append(request.tokens[:200])
            case 5:
                caches.loop.run(caches.caches[0].evict(rng.randrange(1, 100)))
            case _:
                engine.step()
    for engine in engines:
        engine.run_all()

    assert sum(engine.num_wrong for engine in engines) == 0


# -------------------------------------------------------------------- planted faults


def test_a_load_of_another_prompts_page_is_seen(make_caches: MakeCaches, monkeypatch: Any) -> None:
    caches = make_caches(check=False)
    engine = caches.make_engine()
    one, other = prompts(2, 96)
    engine.run(one)
    engine.run(other)
    load = PoolTarget.load

    def load_others(self: PoolTarget, pages: Any, *args: Any) -> None:
        load(self, np.roll(pages, 1), *args)

    monkeypatch.setattr(PoolTarget, "load", load_others)
    engine.run(one, 2)

    assert engine.num_wrong > 0
    engine.num_wrong = 0


def test_with_check_a_wrong_page_is_refused_and_recomputed(make_caches: MakeCaches, monkeypatch: Any) -> None:
    caches = make_caches(check=True)
    engine = caches.make_engine()
    (prompt,) = prompts(1, 96)
    engine.run(prompt)
    load = PoolTarget.load
    monkeypatch.setattr(PoolTarget, "load", lambda self, pages, *args: load(self, np.roll(pages, 1), *args))

    request = engine.run(prompt, 2)

    assert request.num_hit == 0
    assert engine.counts.take()["load_failures"] == 1


def test_a_load_that_leaves_out_the_last_block_is_seen(make_caches: MakeCaches, monkeypatch: Any) -> None:
    caches = make_caches(check=False)
    one, other = caches.make_engine(), caches.make_engine()
    (prompt,) = prompts(1, 96)
    one.run(prompt)
    load = PoolTarget.load

    def load_less(self: PoolTarget, pages: Any, blocks: Any, stamps: Any = None, after: Any = None) -> None:
        load(self, pages[:-1], blocks[:-1], stamps, after)

    monkeypatch.setattr(PoolTarget, "load", load_less)
    other.run(prompt, 2)

    assert other.num_wrong > 0
    other.num_wrong = 0


def test_an_ignored_salt_is_seen(make_caches: MakeCaches, monkeypatch: Any) -> None:
    caches = make_caches()
    engine = caches.make_engine()
    (prompt,) = prompts(1, 96)
    add_request = SchedulerSide.add_request
    monkeypatch.setattr(
        SchedulerSide, "add_request", lambda self, name, read, _: add_request(self, name, read, CacheNamespace())
    )
    engine.run(prompt, 1, namespace_of(cache_salt="a"))

    assert engine.run(prompt, 1, namespace_of(cache_salt="b")).num_hit == 96


def test_a_lease_that_is_not_released_on_abort_is_seen(make_caches: MakeCaches, monkeypatch: Any) -> None:
    caches = make_caches()
    engine = caches.make_engine()
    monkeypatch.setattr(SchedulerSide, "_give_up", lambda self, request: None)

    engine.abort(engine.add(prompts(1, 96)[0]))
    time.sleep(0.1)

    assert caches.stats().open_leases == 1
    engine.close()  # ends it


def test_a_look_up_awaited_by_the_scheduler_is_seen(make_caches: MakeCaches, monkeypatch: Any) -> None:
    caches = make_caches()
    engine = caches.make_engine(lookup_timeout_ms=50)
    must_wait = SchedulerSide._must_wait

    def wait_for_it(self: SchedulerSide, request: Any, num_lacking: int) -> bool:
        request.look_up.done.wait(3)
        return must_wait(self, request, num_lacking)

    monkeypatch.setattr(SchedulerSide, "_must_wait", wait_for_it)
    release = threading.Event()
    caches.loop.call(release.wait, 2)
    engine.add(prompts(1, 96)[0])
    before = time.monotonic()
    engine.step()
    release.set()

    assert time.monotonic() - before > 1
    engine.run_all()


# -------------------------------------------------------------------- what a look-up and a save cost


def test_a_look_up_is_one_request_and_so_is_each_save(make_caches: MakeCaches) -> None:
    caches = make_caches()
    one, other = caches.make_engine(), caches.make_engine()
    (prompt,) = prompts(1, 200)
    one.run(prompt, 1)
    sent = record_requests(other)

    loaded = other.run(prompt, 30)

    assert loaded.num_hit == 192
    of_scheduler, of_worker = sent
    assert of_scheduler == [LockRequest]
    assert of_worker[0] is AdoptRequest  # then, for each block that is full, slots and an insert
    assert set(of_worker[1:]) <= {ExtendRequest, InsertRequest, ReleaseRequest}


def record_requests(engine: ToyEngine) -> tuple[list[type], list[type]]:
    """Record the requests of the scheduler's client and of the first worker's, without heartbeats."""

    def record(client: Any) -> list[type]:
        sent: list[type] = []
        ask = client.session.ask

        async def ask_and_record(request: Any, *args: Any) -> Any:
            sent.append(type(request))
            return await ask(request, *args)

        client.session.ask = ask_and_record
        return sent

    return record(engine.links[0].client), record(engine.worker_links[0].client)


def test_the_wait_for_a_look_up_is_worth_what_it_can_save(
    make_caches: MakeCaches, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = make_caches()
    (long,) = prompts(1, 640)
    caches.make_engine().run(long)
    engine = caches.make_engine(lookup_timeout_ms=50, load_timeout_ms=600_000)
    may_answer = threading.Event()
    scheduler, client = engine.scheduler, engine.links[0].client
    lock_at_once = client.lock

    async def lock_later(*args: Any, **options: Any) -> Any:
        await asyncio.to_thread(may_answer.wait)
        return await lock_at_once(*args, **options)

    monkeypatch.setattr(client, "lock", lock_later)
    scheduler._prefill_rate.begin_step(256, 0.0)
    scheduler._prefill_rate.end_step(256.0)  # a token a second
    for name, prompt in (("long", long), ("late", long)):
        scheduler.add_request(name, lambda start, end, prompt=prompt: prompt[start:end], CacheNamespace())  # type: ignore[misc]

    assert scheduler.find_hit("long", len(long), 0) is None
    assert scheduler.find_hit("late", len(long), len(long) - 1) is None  # worth 0.1 s
    wait_until(lambda: scheduler.find_hit("late", len(long), len(long) - 1) == 0)
    assert scheduler.find_hit("long", len(long), 0) is None
    may_answer.set()
    wait_until(lambda: scheduler.find_hit("long", len(long), 0) is not None)

    assert scheduler.find_hit("long", len(long), 0) == 640
    assert scheduler.counts.take()["lookup_timeouts"] == 1
    for name in ("long", "late"):
        scheduler.finish_request(name)
