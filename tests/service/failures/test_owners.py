"""No slot is lost when a client's process ends, is stopped, or hands its lease over.

`tests/promises` has the tests of killed processes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from support.caches.cache_under_test import small_config
from support.processes.client_processes import all_free, kill_while, start_client, until

from raydix.actors import PrefixCacheClient, WatchedActor
from raydix.actors.client import connectors
from raydix.schemas import CacheConfig, InvalidRequest, LeaseConfig, LeaseExpired

pytestmark = pytest.mark.ray

PATIENT = LeaseConfig(session_ttl_s=300, quarantine_grace_s=300)  # only a death frees slots
HASTY = LeaseConfig(session_ttl_s=2, quarantine_grace_s=300)  # a busy machine can delay a beat by a second
IMPATIENT = LeaseConfig(session_ttl_s=2, quarantine_grace_s=0.2)

Start = Callable[[LeaseConfig], Any]


def config_of(leases: LeaseConfig) -> CacheConfig:
    return small_config().model_copy(update={"leases": leases})


@pytest.fixture
def start(running_cache: Callable[[CacheConfig], Any]) -> Start:
    return lambda leases: running_cache(config_of(leases))


@pytest.fixture
async def patient(start: Start) -> AsyncIterator[tuple[Any, PrefixCacheClient]]:
    """A cache that frees slots only after a death, and a client that reads its statistics."""
    cache = start(PATIENT)
    async with PrefixCacheClient(cache) as client:
        yield cache, client
        await until(client, all_free)
        await client.reset()
        await client.check_invariants()


@pytest.fixture
async def hasty(start: Start) -> AsyncIterator[tuple[Any, PrefixCacheClient]]:
    """A cache with sessions that expire after 2 s, and a client that reads its statistics."""
    cache = start(HASTY)
    async with PrefixCacheClient(cache) as client:
        yield cache, client
        await until(client, all_free)
        await client.reset()
        await client.check_invariants()


# ---------------------------------------------------------------- watched actors


@pytest.mark.long
async def test_an_actor_that_ends_as_it_should_is_noticed_too(patient: tuple[Any, PrefixCacheClient]) -> None:
    cache, client = patient
    process = start_client(watched=True)
    await process.open.remote(cache)
    await process.acquire.remote([1] * 6)

    process.__ray_terminate__.remote()

    await until(client, all_free)


@pytest.mark.long
async def test_an_actor_of_which_nobody_holds_a_handle_ends_though_it_is_watched(
    patient: tuple[Any, PrefixCacheClient],
) -> None:
    cache, client = patient
    process = start_client(watched=True)
    await process.open.remote(cache)
    await process.acquire.remote([1] * 6)

    del process

    await until(client, all_free)


@pytest.mark.more
async def test_an_actor_that_its_driver_drops_logs_the_true_end_of_its_session(
    patient: tuple[Any, PrefixCacheClient], tmp_path: Path
) -> None:
    """The process of such an actor goes on for up to three seconds, in which it hears of the end."""
    cache, client = patient
    process, log = start_client(watched=True), tmp_path / "actor.log"
    await process.log_into.remote(str(log))
    pidfd, has_ended = os.pidfd_open(await process.open.remote(cache)), asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, has_ended.set)
    await process.acquire.remote([1] * 6)

    del process

    await until(client, all_free)
    await asyncio.wait_for(has_ended.wait(), 60)
    asyncio.get_running_loop().remove_reader(pidfd)
    os.close(pidfd)
    lines = [line for line in log.read_text().splitlines() if " is lost: " in line]
    assert [line for line in lines if not line.endswith(" is over: the actor that owns it has ended")] == []


@pytest.mark.more
async def test_a_client_that_names_its_owner_ends_with_it(patient: tuple[Any, PrefixCacheClient]) -> None:
    cache, client = patient
    owner, process = start_client(watched=True), start_client(watched=False)
    await process.open.remote(cache, owner=owner)
    await process.acquire.remote([1] * 6)

    ray.kill(owner)

    await until(client, all_free)
    assert await process.insert.remote([1]) == "LeaseExpired"
    assert await process.match.remote([1]) == 0  # in another session
    await process.close.remote()


@pytest.mark.more
async def test_the_death_of_one_actor_leaves_others_alone(patient: tuple[Any, PrefixCacheClient]) -> None:
    cache, client = patient
    dies, lives = start_client(watched=True), start_client(watched=True)
    await lives.open.remote(cache)
    await lives.acquire.remote([2, 2])

    await kill_while(cache, dies, "holding", client)

    stats = await until(client, lambda stats: stats.free_slots == 6)
    assert (stats.private_slots, stats.open_leases, stats.dead_sessions > 0) == (2, 1, True)
    assert await lives.insert.remote([2]) == "1"
    await lives.close.remote()


@pytest.mark.parametrize(
    ("watched", "named", "seen"),
    [
        (False, False, False),
        pytest.param(False, False, True, marks=pytest.mark.long),
        pytest.param(True, False, False, marks=pytest.mark.long),
        pytest.param(False, True, False, marks=pytest.mark.long),
    ],
)
async def test_a_client_in_an_actor_that_is_neither_watched_nor_seen_logs_how_long_its_slots_stay_held(
    patient: tuple[Any, PrefixCacheClient], watched: bool, named: bool, seen: bool
) -> None:
    class Logging:
        async def open_two(self, cache: Any, owner: Any) -> list[str]:
            lines: list[str] = []
            if not seen:  # as on another node
                connectors.own_liveness_path = lambda: None  # type: ignore[attr-defined]
            handler = logging.Handler()
            handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
            logging.getLogger("raydix.actors.client.watched_actor").addHandler(handler)
            for _ in range(2):
                async with PrefixCacheClient(cache, owner=owner):
                    pass
            return lines

    made: Any = type("WatchedLogging", (Logging, WatchedActor), {}) if watched else Logging
    process = ray.remote(made).options(num_cpus=0).remote()
    owner = start_client(watched=True) if named else None

    lines = await process.open_two.remote(patient[0], owner)

    assert len(lines) == (0 if watched or named or seen else 1)
    for line in lines:
        assert "session_ttl_s (300 s)" in line and "quarantine_grace_s (300 s)" in line and "WatchedActor" in line


async def test_only_actors_made_for_it_can_be_owners(patient: tuple[Any, PrefixCacheClient]) -> None:
    class Synchronous:
        def raydix_park(self) -> None:
            """Block the actor, as a synchronous method does."""

    bare, synchronous = start_client(watched=False), ray.remote(Synchronous).remote()

    for owner in (bare, synchronous, 7):
        with pytest.raises(InvalidRequest, match="the handle of an actor with the mixin WatchedActor"):
            PrefixCacheClient(patient[0], owner=owner)


def test_parking_cannot_be_made_synchronous() -> None:
    with pytest.raises(TypeError, match="must be a coroutine function"):
        type("Broken", (WatchedActor,), {"raydix_park": lambda self: None})


# ---------------------------------------------------------------- plain processes


@pytest.mark.parametrize(
    "forks", [pytest.param(False, marks=pytest.mark.long), True], ids=["alone", "with a child that lives on"]
)
async def test_a_plain_process_that_is_killed_holds_nothing_a_moment_later(start: Start, forks: bool) -> None:
    cache = start(LeaseConfig())
    async with PrefixCacheClient(cache) as client:
        before = await client.stats()
        process = start_client(watched=False)
        pid = await process.open.remote(cache)
        await process.acquire.remote([1] * 6)
        child = await process.fork.remote() if forks else None
        assert (await client.stats()).private_slots == 6

        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        after = await until(client, lambda stats: stats.free_slots == 8, timeout_s=30)
        print(f"free again after {time.monotonic() - killed_at:.2f} s")

        assert (after.dead_sessions - before.dead_sessions, after.expired_sessions) == (1, before.expired_sessions)
        if child is not None:
            os.kill(child, 0)  # it lives
            os.kill(child, signal.SIGKILL)


@pytest.mark.more
async def test_a_process_that_is_stopped_keeps_its_lease_within_its_time_to_live(
    patient: tuple[Any, PrefixCacheClient],
) -> None:
    cache, client = patient
    before = await client.stats()
    process = start_client(watched=False)
    pid = await process.open.remote(cache)
    await process.acquire.remote([1, 2])

    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(3)  # the cache looks at it every second
    stats = await client.stats()
    os.kill(pid, signal.SIGCONT)

    assert (stats.open_leases, stats.private_slots, stats.dead_sessions) == (1, 2, before.dead_sessions)
    assert await process.insert.remote([1, 2]) == "2"
    await process.close.remote()


@pytest.mark.more
async def test_a_process_that_stands_still_loses_its_lease_but_its_slots_are_withheld_until_it_is_back(
    hasty: tuple[Any, PrefixCacheClient],
) -> None:
    cache, client = hasty
    process = start_client(watched=False)
    pid = await process.open.remote(cache)
    await process.acquire.remote([1, 2, 3])
    await process.insert.remote([1])

    os.kill(pid, signal.SIGSTOP)
    stats = await until(client, lambda stats: stats.open_leases == 0)
    assert (stats.quarantined_slots, stats.evictable_slots, stats.free_slots) == (2, 1, 5)
    await client.check_invariants()
    os.kill(pid, signal.SIGCONT)

    assert await process.insert.remote([1, 2]) == "LeaseExpired"
    assert await process.match.remote([1, 2]) == 1  # opens another session
    stats = await client.stats()
    assert (stats.quarantined_slots, stats.free_slots) == (0, 7)
    assert len(await process.acquire.remote([1, 2])) == 2
    await process.close.remote()


async def standing_still(cache: Any, client: PrefixCacheClient) -> tuple[Any, int]:
    """Return a client's actor and process id, stopped until its two slots are in quarantine."""
    pid = await (process := start_client(watched=False)).open.remote(cache)
    await process.acquire.remote([1, 2])
    os.kill(pid, signal.SIGSTOP)
    await until(client, lambda stats: stats.quarantined_slots == 2)
    return process, pid


@pytest.mark.long
async def test_a_process_that_stood_still_gives_its_slots_back_even_if_it_asks_for_nothing_more(
    hasty: tuple[Any, PrefixCacheClient],
) -> None:
    cache, client = hasty
    process, pid = await standing_still(cache, client)

    os.kill(pid, signal.SIGCONT)

    await until(client, lambda stats: stats.free_slots == 8)
    await process.close.remote()


@pytest.mark.long
async def test_a_process_that_dies_while_its_slots_are_withheld_gives_them_back(
    hasty: tuple[Any, PrefixCacheClient],
) -> None:
    _process, pid = await standing_still(*hasty)  # without a handle Ray would end it

    os.kill(pid, signal.SIGKILL)

    await until(hasty[1], lambda stats: stats.free_slots == 8)


@pytest.mark.more
async def test_slots_of_a_stopped_process_are_withheld_after_the_grace_until_it_ends(start: Start) -> None:
    cache = start(IMPATIENT)
    async with PrefixCacheClient(cache) as client:
        _process, pid = await standing_still(cache, client)  # without a handle Ray would end it

        await asyncio.sleep(4 * IMPATIENT.quarantine_grace_s + 1)  # the cache looks every half second
        stats = await client.stats()
        assert (stats.quarantined_slots, stats.free_slots) == (2, 6)
        os.kill(pid, signal.SIGKILL)

        await until(client, lambda stats: stats.free_slots == 8)


@pytest.mark.long
async def test_a_client_that_only_waits_beats(hasty: tuple[Any, PrefixCacheClient]) -> None:
    cache, client = hasty
    process = start_client(watched=False)
    await process.open.remote(cache)
    await process.acquire.remote([1, 2])
    silent = start_client(watched=False)
    pid = await silent.open.remote(cache)
    before = (await client.stats()).expired_sessions
    os.kill(pid, signal.SIGSTOP)

    await until(client, lambda stats: stats.expired_sessions > before)  # it has only sent heartbeats since

    assert await process.insert.remote([1, 2]) == "2"
    await process.close.remote()
    os.kill(pid, signal.SIGKILL)


# ---------------------------------------------------------------- handing over


async def test_a_lease_is_handed_from_process_to_process(patient: tuple[Any, PrefixCacheClient]) -> None:
    cache, client = patient
    scheduler, worker = start_client(watched=True), start_client(watched=True)
    await scheduler.open.remote(cache)
    await worker.open.remote(cache)
    slots = await scheduler.acquire.remote([1, 2, 3, 4])
    await scheduler.insert.remote([1, 2])

    adopted = await worker.adopt.remote(await scheduler.grant.remote())

    assert adopted == (0, 2, slots)
    assert await scheduler.insert.remote([1, 2, 3]) == "UnknownLease"
    await scheduler.release.remote()  # has no effect
    ray.kill(scheduler)
    assert await worker.insert.remote([1, 2, 3]) == "1"
    assert (await client.stats()).open_leases == 1
    ray.kill(worker)  # the death of the adopter ends the lease


@pytest.mark.more
async def test_a_lease_nobody_adopts_ends_with_its_granter(patient: tuple[Any, PrefixCacheClient]) -> None:
    cache, client = patient
    scheduler = start_client(watched=True)
    await scheduler.open.remote(cache)
    await scheduler.acquire.remote([1, 2])
    grant = await scheduler.grant.remote()
    assert (await client.stats()).private_slots == 2

    ray.kill(scheduler)

    await until(client, all_free)
    with pytest.raises(LeaseExpired):
        await client.adopt(grant)
