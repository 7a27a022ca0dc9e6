"""Sessions with an injected clock: silent sessions expire, and their slots are quarantined."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
from support.caches.clocked_sessions import GRACE_S, TTL_S, Life, Scene

from raydix.actors.sessions import session_table
from raydix.actors.sessions.session_table import SessionTable
from raydix.actors.transport.process_liveness import ProcessLiveness, own_liveness_path
from raydix.schemas import (
    CloseSession,
    InvalidRequest,
    LeaseConfig,
    LeaseExpired,
    MatchRequest,
    OpenSession,
    ReleaseRequest,
    SessionRef,
    WaitingResponse,
    WaitRequest,
)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    scene.open("s")
    yield scene
    await scene.service.close()
    scene.service.core.check_invariants()


async def test_a_session_silent_for_its_time_to_live_expires(scene: Scene) -> None:
    scene.acquire("s", "l")

    scene.wait(TTL_S - 0.1)
    assert scene.counts == (6, 2, 0)
    scene.wait(0.1)

    assert scene.counts == (6, 0, 2)
    stats = scene.service.stats()
    assert (stats.open_sessions, stats.open_leases, stats.expired_sessions, stats.dead_sessions) == (0, 0, 1, 0)
    with pytest.raises(LeaseExpired, match="was silent for 10 s"):
        scene.acquire("s", "m")
    assert scene.counts == (6, 0, 2)


async def test_a_session_is_silent_from_half_of_its_time_to_live_until_it_comes_back_or_is_gone(scene: Scene) -> None:
    scene.open("t")
    scene.acquire("s", "l")

    def num_silent(after_s: float) -> int:
        scene.wait(after_s)
        scene.service.session("t", "e")
        return scene.service.stats().silent_sessions

    assert num_silent(TTL_S / 2) == 0
    assert num_silent(0.1) == 1
    scene.service.session("s", "e")
    assert num_silent(0) == 0
    assert num_silent(TTL_S / 2 + 0.1) == 1
    assert num_silent(TTL_S / 2 - 0.1) == 1
    assert scene.service.stats().open_sessions == 1
    for _ in range(int(GRACE_S) - 1):
        assert num_silent(1) == 1
    assert num_silent(1) == 0


async def test_a_session_that_died_is_not_silent(scene: Scene) -> None:
    scene.acquire("s", "l")

    scene.service.reaper.owner_unavailable("s", is_dead=True)

    stats = scene.service.stats()
    assert (stats.dead_sessions, stats.silent_sessions) == (1, 0)


@pytest.mark.parametrize("beat", ["heartbeat", "batch", "open again"])
async def test_whatever_a_client_says_is_a_sign_of_life(scene: Scene, beat: str) -> None:
    for _ in range(3):
        scene.wait(TTL_S - 1)
        if beat == "heartbeat":
            scene.service.session("s", "e")
        elif beat == "batch":
            scene.execute("s", MatchRequest(tokens=[1]))
        else:
            scene.open("s")

    assert scene.service.stats().open_sessions == 1


async def test_who_waited_leaves_the_line_and_others_are_served(scene: Scene) -> None:
    scene.open("t")
    scene.acquire("s", "l", 8)
    ticket = scene.acquire("s", "m")
    assert isinstance(ticket, WaitingResponse)
    waiting = asyncio.create_task(scene.service.wait(WaitRequest(session_id="s", epoch="e", ticket=ticket.ticket)))
    await asyncio.sleep(0)
    other = scene.acquire("t", "n")
    scene.clock.now += TTL_S / 2
    scene.service.session("t", "e")

    scene.wait(TTL_S / 2)

    with pytest.raises(LeaseExpired, match="was silent"):
        await waiting
    assert scene.service.stats().waiters == 1  # the slots are withheld
    scene.service.close_session(CloseSession(session_id="s"))
    assert scene.counts == (6, 2, 0)
    granted = await scene.service.wait(WaitRequest(session_id="t", epoch="e", ticket=other.ticket))
    assert granted.lease_id == "n"


async def test_quarantine_ends_after_its_grace(scene: Scene) -> None:
    scene.acquire("s", "l")
    scene.wait(TTL_S)

    scene.wait(GRACE_S - 1)
    assert scene.counts == (6, 0, 2)
    scene.wait(1)

    assert scene.counts == (8, 0, 0)


async def test_quarantine_lasts_while_the_process_lives(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """It may go on in the middle of a copy."""
    scene.acquire("s", "l")
    life = scene.service.sessions.find("s").life = Life()  # type: ignore[union-attr, assignment]
    scene.wait(TTL_S)
    assert "Process 4242 lives" in caplog.text

    for _ in range(100):
        scene.wait(GRACE_S)
        assert scene.counts == (6, 0, 2)
    assert scene.service.stats().silent_sessions == 1
    life.ended = True
    scene.wait(0)

    assert scene.counts == (8, 0, 0)
    assert not scene.service.sessions.any_vanished


async def test_a_process_that_lives_and_holds_nothing_is_not_watched_after_the_grace(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.service.sessions.find("s").life = Life()  # type: ignore[union-attr, assignment]
    scene.execute("s", MatchRequest(tokens=[1]))
    scene.wait(TTL_S)
    assert "its leases have ended" in caplog.text and "Process" not in caplog.text

    scene.wait(GRACE_S - 1)
    assert scene.service.sessions.any_vanished
    scene.wait(1)

    assert not scene.service.sessions.any_vanished


async def test_a_session_with_slots_in_quarantine_has_expired_however_many_others_have(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_table, "_MAX_REMEMBERED", 2)
    scene.acquire("s", "l")
    scene.service.sessions.find("s").life = Life()  # type: ignore[union-attr, assignment]
    scene.wait(TTL_S)
    for number in range(3):
        scene.open(f"other {number}")
    scene.wait(TTL_S + GRACE_S)

    with pytest.raises(LeaseExpired):
        scene.acquire("s", "m")
    with pytest.raises(LeaseExpired):
        scene.open("s")
    scene.service.close_session(CloseSession(session_id="s"))

    assert scene.counts == (8, 0, 0)


@pytest.mark.parametrize("is_seen", [False, True], ids=["unseen", "seen"])
@pytest.mark.parametrize("how", ["closes", "opens another session"])
async def test_quarantine_ends_when_the_client_comes_back(scene: Scene, how: str, is_seen: bool) -> None:
    scene.acquire("s", "l")
    if is_seen:
        scene.service.sessions.find("s").life = Life()  # type: ignore[union-attr, assignment]
    scene.wait(TTL_S)

    if how == "closes":
        scene.service.close_session(CloseSession(session_id="s"))
    else:
        scene.open("s2", replaces="s")

    assert scene.counts == (8, 0, 0)
    with pytest.raises(LeaseExpired):
        scene.acquire("s", "m")


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("silent", "it was silent for 10 s"),
        ("process", "its process has ended"),
        ("owner", "the actor that owns it has ended"),
        ("unreachable", "the actor that owns it cannot be reached"),
    ],
)
async def test_the_errors_of_a_session_that_is_over_name_the_true_cause(scene: Scene, how: str, cause: str) -> None:
    if how == "silent":
        scene.wait(TTL_S)
    elif how == "process":
        scene.service.sessions.find("s").life = life = Life()  # type: ignore[union-attr, assignment]
        life.ended = True
        scene.tick()
    else:
        scene.service.reaper.owner_unavailable("s", is_dead=how == "owner")

    with pytest.raises(LeaseExpired) as raised:
        scene.acquire("s", "l")

    assert str(raised.value) == f"session 's' is over: {cause}"


async def test_an_expired_session_is_not_opened_again_by_its_id(scene: Scene) -> None:
    scene.acquire("s", "l")
    scene.wait(TTL_S)

    with pytest.raises(LeaseExpired):
        scene.open("s")

    assert scene.counts == (6, 0, 2)


async def test_a_session_that_nobody_opened_is_invalid(scene: Scene) -> None:
    with pytest.raises(InvalidRequest, match="is not open"):
        scene.acquire("never", "l")


async def test_a_late_release_has_no_effect_in_the_next_session(scene: Scene) -> None:
    scene.acquire("s", "l")
    scene.wait(TTL_S)
    scene.open("s2", replaces="s")
    scene.acquire("s2", "l2")

    scene.execute("s2", ReleaseRequest(lease_id="l"))

    assert scene.counts == (6, 2, 0)


# ---------------------------------------------------------------- death


async def test_a_process_known_to_have_ended_is_not_waited_for(scene: Scene) -> None:
    scene.acquire("s", "l")
    life = scene.service.sessions.find("s").life = Life()  # type: ignore[union-attr, assignment]

    scene.wait(TTL_S)
    assert scene.counts == (6, 0, 2)  # it lives, and may write
    life.ended = True
    scene.wait(0)

    assert scene.counts == (8, 0, 0)


async def test_a_session_whose_process_has_ended_ends_at_the_next_tick_and_holds_nothing(scene: Scene) -> None:
    scene.open("t")
    for session_id in ("s", "t"):
        scene.acquire(session_id, f"lease of {session_id}")
    life = scene.service.sessions.find("s").life = Life()  # type: ignore[union-attr, assignment]
    ticket = scene.acquire("s", "m", 8)
    waiting = asyncio.create_task(scene.service.wait(WaitRequest(session_id="s", epoch="e", ticket=ticket.ticket)))
    await asyncio.sleep(0)
    scene.tick()
    assert scene.counts == (4, 4, 0)

    life.ended = True
    scene.tick()

    assert scene.counts == (6, 2, 0)
    with pytest.raises(LeaseExpired, match="session 's' is over: its process has ended"):
        await waiting
    stats = scene.service.stats()
    assert (stats.open_sessions, stats.dead_sessions, stats.expired_sessions) == (1, 1, 0)
    assert scene.service.reaper.owner_unavailable("s", is_dead=True)  # as Ray says later
    assert scene.service.stats().dead_sessions == 1


async def test_the_processes_of_all_clients_are_looked_at_once_in_a_tick_though_one_is_about_to_end(
    scene: Scene,
) -> None:
    scene.open("t")
    lingering, living = Life(), Life()
    scene.service.sessions.find("s").life = lingering  # type: ignore[union-attr, assignment]
    scene.service.sessions.find("t").life = living  # type: ignore[union-attr, assignment]
    scene.tick()
    before = living.num_looks
    scene.service.reaper.owner_unavailable("s", is_dead=True)

    for _ in range(50):
        scene.tick(0.02)

    assert living.num_looks - before in (1, 2)


async def test_a_process_that_ended_while_the_cache_stood_still_died_and_was_not_silent(scene: Scene) -> None:
    scene.acquire("s", "l")
    scene.service.sessions.find("s").life = life = Life()  # type: ignore[union-attr, assignment]
    life.ended = True

    scene.tick(10 * TTL_S)

    assert scene.counts == (8, 0, 0)
    assert (scene.service.stats().dead_sessions, scene.service.stats().expired_sessions) == (1, 0)


async def test_when_its_owner_dies_a_session_ends_at_once(scene: Scene) -> None:
    scene.acquire("s", "l")

    assert scene.service.reaper.owner_unavailable("s", is_dead=True)

    assert scene.counts == (8, 0, 0)
    assert (scene.service.stats().dead_sessions, scene.service.stats().expired_sessions) == (1, 0)


async def test_slots_are_withheld_while_a_dead_owners_process_lingers(scene: Scene) -> None:
    scene.acquire("s", "l")
    life = scene.service.sessions.find("s").life = Life()  # type: ignore[union-attr, assignment]

    assert scene.service.reaper.owner_unavailable("s", is_dead=True)
    assert scene.counts == (6, 0, 2)
    assert scene.service.reaper._next_tick - scene.clock.now < 0.1  # it will not be long
    scene.wait(10 * GRACE_S)
    assert scene.counts == (6, 0, 2)
    life.ended = True
    async with asyncio.timeout(30):
        while scene.counts != (8, 0, 0):  # noqa: ASYNC110 -- the cache looks again by itself, soon
            await asyncio.sleep(0.005)


async def test_an_owner_out_of_reach_whose_process_lives_keeps_its_session(scene: Scene) -> None:
    scene.acquire("s", "l")
    life = scene.service.sessions.find("s").life = Life()  # type: ignore[union-attr, assignment]

    assert not scene.service.reaper.owner_unavailable("s", is_dead=False)
    assert scene.counts == (6, 2, 0)
    life.ended = True
    assert scene.service.reaper.owner_unavailable("s", is_dead=False)

    assert scene.counts == (8, 0, 0)
    assert scene.service.reaper.owner_unavailable("s", is_dead=False)  # it has ended


async def test_the_death_of_an_owner_frees_what_was_withheld_of_it(scene: Scene) -> None:
    scene.acquire("s", "l")
    scene.wait(TTL_S)

    scene.service.reaper.owner_unavailable("s", is_dead=True)

    assert scene.counts == (8, 0, 0)
    assert scene.service.stats().expired_sessions == 1


# ---------------------------------------------------------------- the cache's own clock


async def test_time_in_which_the_cache_itself_stood_still_counts_for_nobody(scene: Scene) -> None:
    scene.acquire("s", "l")

    scene.clock.now += 10 * TTL_S
    scene.service.reaper._tick()
    assert scene.counts == (6, 2, 0)

    for _ in range(20):
        scene.clock.now += 1
        scene.service.reaper._tick()
    assert scene.counts == (6, 0, 2)


async def test_the_cache_looks_at_the_clock_as_long_as_there_is_somebody(scene: Scene) -> None:
    timer = scene.service.reaper._timer
    assert timer.is_set

    timer.stop()
    assert scene.service.reaper._tick() is not None
    scene.service.close_session(CloseSession(session_id="s"))
    assert scene.service.reaper._tick() is None
    scene.open("t")
    assert timer.is_set


async def test_a_client_is_told_of_the_end_of_its_session(scene: Scene) -> None:
    who = SessionRef(session_id="s", epoch="e")
    await scene.service.heartbeat(who, 0.001)
    beats = [asyncio.create_task(scene.service.heartbeat(who, 60)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not beats[0].done()

    scene.wait(TTL_S)

    for beat in beats:
        with pytest.raises(LeaseExpired):
            await asyncio.wait_for(beat, 30)


# ---------------------------------------------------------------- the life of a process


def test_this_process_lives() -> None:
    path = own_liveness_path()
    assert path is not None and path == own_liveness_path()

    life = ProcessLiveness.find(path)

    assert life is not None and not life.has_ended()


def test_a_process_that_was_killed_has_ended() -> None:
    show = "from raydix.actors.transport import process_liveness as p; print(p.own_liveness_path(), flush=1); input()"
    process = subprocess.Popen([sys.executable, "-c", show], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    path = process.stdout.readline().strip()
    life = ProcessLiveness.find(path)
    assert life is not None and path != own_liveness_path()

    assert not life.has_ended()
    process.kill()
    process.wait()

    assert life.has_ended()
    assert ProcessLiveness.find(path) is None
    process.stdin.close()
    process.stdout.close()


def test_children_that_a_process_forked_neither_hide_its_end_nor_stand_for_it() -> None:
    show = (
        "import os, time; from raydix.actors.transport import process_liveness as p\n"
        "path, child = p.own_liveness_path(), os.fork()\n"
        "if not child: time.sleep(600)\n"
        "print(path, child, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", show], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    path, child = process.stdout.readline().split()
    of_child = path.replace(f"/{process.pid}/", f"/{child}/")  # the same memfd, inherited
    life, inherited = ProcessLiveness.find(path), ProcessLiveness.find(of_child)
    assert life is not None and inherited is not None
    assert not life.has_ended()

    process.kill()
    process.wait()

    assert life.has_ended() and not inherited.has_ended()
    assert ProcessLiveness.find(path) is None
    os.kill(int(child), signal.SIGKILL)
    process.stdout.close()


def test_a_stopped_process_lives_and_a_dead_one_that_its_parent_has_not_collected_does_not() -> None:
    show = "from raydix.actors.transport import process_liveness as p; print(p.own_liveness_path(), flush=1); input()"
    process = subprocess.Popen([sys.executable, "-c", show], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    path = process.stdout.readline().strip()
    life = ProcessLiveness.find(path)
    assert life is not None

    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert not life.has_ended()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert life.has_ended()
    assert ProcessLiveness.find(path) is None
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_look_at_a_thousand_processes_takes_little() -> None:
    path = own_liveness_path()
    assert path is not None
    table = SessionTable(LeaseConfig(), time.monotonic)
    for number in range(200):
        table.open(OpenSession(session_id=f"{number}", owner="test", liveness_path=path))
    looks = []
    for _ in range(50):
        started = time.process_time()
        assert table.ended() == []
        looks.append(time.process_time() - started)

    print(f"{1000 * 5 * min(looks):.2f} ms for 1,000 processes")
    assert 5 * min(looks) < 0.02  # it is below 0.002 on an idle machine


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "/proc/1/../../etc/passwd", "/proc/0/fd/0", "/proc/OWN/fd/0", "/proc/999999999/fd/0", "relative"],
)
def test_what_is_no_such_path_tells_nothing(path: str) -> None:
    path = path.replace("OWN", str(os.getpid()))

    assert ProcessLiveness.find(path) is None
    assert ProcessLiveness.find(f"{path}:{'0' * 32}") is None


def test_the_memfd_of_another_process_at_the_same_place_tells_nothing() -> None:
    """In another PID namespace, or on another node, the same numbers are those of another process."""
    path = own_liveness_path()
    assert path is not None
    where, _, life_id = path.partition(":")
    elsewhere = f"{where}:{uuid4().hex}"

    assert ProcessLiveness.find(path) is not None
    assert ProcessLiveness.find(elsewhere) is None
    assert ProcessLiveness.find(where) is None
    assert ProcessLiveness.find(f"{where}:{life_id[:31]}") is None
