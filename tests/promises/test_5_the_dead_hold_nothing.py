"""A dead client's slots are free again within two seconds if it is a watched actor or ran on the cache's node, and
after its TTL and `quarantine_grace_s` at the latest elsewhere.

A fake clock shows the times. Then real processes are killed: the cache's own timeouts are minutes, so that only the
death of a process frees its slots. `make bench` measures the seconds.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from typing import Any

import pytest
import ray
from support.caches.cache_under_test import small_config
from support.caches.clocked_sessions import GRACE_S, TTL_S, Scene
from support.more import more
from support.processes.client_processes import Doing, all_free, kill_while, start_client, until

from raydix.actors import PrefixCacheClient
from raydix.actors.sessions.session_reaper import SessionReaper
from raydix.actors.sessions.session_table import SessionTable
from raydix.actors.transport.process_liveness import ProcessLiveness
from raydix.schemas import CacheConfig, LeaseConfig

Patch = pytest.MonkeyPatch
TICK_S = 1.0  # between two looks at the clock and at the clients' processes
FREE, HELD, WITHHELD = (8, 0, 0), (6, 2, 0), (6, 0, 2)  # free, private and quarantined slots

# ---------------------------------------------------------------- by the clock


def pass_time(scene: Scene, seconds: float) -> None:
    """Advance the clock in ticks, with a look at the sessions after each."""
    for _ in range(round(seconds / TICK_S)):
        scene.tick(TICK_S)


async def watched_actor_dies(scene: Scene) -> None:
    scene.open("s")
    scene.acquire("s", "l")

    scene.service.reaper.owner_unavailable("s", is_dead=True)  # the notification of `DeathWatch`

    assert scene.counts == FREE, "a dead actor's slots must be free"


async def process_on_the_caches_node_dies(scene: Scene) -> None:
    show = "from raydix.actors.transport import process_liveness as p; print(p.own_liveness_path(), flush=1); input()"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", show, stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    scene.open("s", liveness_path=(await process.stdout.readline()).decode().strip())
    scene.acquire("s", "l")
    pass_time(scene, TTL_S / 2)
    assert scene.counts == HELD, "the slots must be held while the process lives"
    process.kill()
    await process.wait()
    pass_time(scene, TICK_S)

    assert scene.counts == FREE, "a dead process's slots must be free"
    assert scene.service.stats().dead_sessions == 1


async def process_elsewhere_dies(scene: Scene) -> None:
    scene.open("s")
    scene.acquire("s", "l")

    pass_time(scene, TTL_S + TICK_S)
    assert scene.counts == WITHHELD, "slots that it may still write must be quarantined"
    pass_time(scene, GRACE_S + TICK_S)

    assert scene.counts == FREE, "the quarantine must end"


STORIES = [watched_actor_dies, process_on_the_caches_node_dies, process_elsewhere_dies]
by_name = {"ids": lambda story: story.__name__}


@pytest.mark.parametrize("story", STORIES, **by_name)
async def test_in_time(story: Callable[[Scene], Any]) -> None:
    scene = Scene()
    await story(scene)
    await scene.service.close()


FAULTS: list[tuple[Callable[[Scene], Any], Any, str, Any]] = [
    (watched_actor_dies, SessionReaper, "owner_unavailable", lambda keeper, session_id, is_dead: True),
    (process_on_the_caches_node_dies, ProcessLiveness, "has_ended", lambda life: False),
    (process_on_the_caches_node_dies, SessionTable, "ended", lambda table: []),
    (process_elsewhere_dies, SessionTable, "overdue", lambda table: []),
    (process_elsewhere_dies, SessionTable, "gone", lambda table: []),
    (process_elsewhere_dies, SessionTable, "gone", lambda table: list(table._vanished)),  # though it may still write
]


@pytest.mark.parametrize(
    ("story", "owner", "name", "fault"), FAULTS, ids=lambda value: getattr(value, "__name__", None)
)
async def test_a_fault_in_noticing_is_seen(
    story: Callable[[Scene], Any], owner: Any, name: str, fault: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(owner, name, fault)
    scene = Scene()

    with pytest.raises(AssertionError, match=r"must be free|must be quarantined|must end"):
        await story(scene)
    await scene.service.close()


# ---------------------------------------------------------------- on Ray

PATIENT = LeaseConfig(session_ttl_s=300, quarantine_grace_s=300)  # longer than the test, so that only deaths free slots


@pytest.mark.ray
@pytest.mark.parametrize(
    ("doing", "watched", "max_restarts"),
    [
        pytest.param("holding", True, 0, marks=pytest.mark.long),
        ("waiting", True, 0),
        ("writing", True, 0),
        *more(("writing", True, 1)),
        pytest.param("waiting", False, 0, marks=pytest.mark.long),
        *more(("writing", False, 0)),
    ],
)
async def test_slots_of_a_killed_process_are_free_whatever_it_was_doing(
    running_cache: Callable[[CacheConfig], Any], doing: Doing, watched: bool, max_restarts: int
) -> None:
    cache = running_cache(small_config().model_copy(update={"leases": PATIENT}))
    async with PrefixCacheClient(cache) as client:
        process = start_client(watched=watched, max_restarts=max_restarts)

        await kill_while(cache, process, doing, client)

        stats = await until(client, all_free)  # each call checks that every slot is counted once
        assert stats.free_slots == 8
        await client.check_invariants()
        ray.kill(process)
