"""Why Ray restarted a cache, in one line of words."""

from __future__ import annotations

import logging
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import ray

from raydix.actors.service import past_lives
from raydix.actors.service.findings import (
    NEVER_RESTARTED,
    OUT_OF_MEMORY,
    Restarts,
    restarts_finding,
)
from raydix.actors.service.past_lives import cause_of_exit, cause_of_node_death


@pytest.mark.parametrize(
    ("exit_type", "detail", "cause"),
    [
        (
            "NODE_OUT_OF_MEMORY",
            "Task was killed:\n  15 of 16 GB",
            "killed by Ray's memory monitor: Task was killed: 15 of 16 GB",
        ),
        ("INTENDED_SYSTEM_EXIT", "killed by `ray.kill`.", "ended by Ray: killed by `ray.kill`."),
        ("INTENDED_USER_EXIT", "", "ended itself"),
        ("USER_ERROR", "its constructor raised", "failed: its constructor raised"),
        ("SYSTEM_ERROR", "End of file. Some common causes include: ...", past_lives._KILLED),
        ("NEWER_THAN_THIS", "x" * 1000, "newer_than_this: " + "x" * 280 + "..."),
    ],
)
def test_each_way_in_which_a_process_ends_is_one_short_line(exit_type: str, detail: str, cause: str) -> None:
    assert cause_of_exit(exit_type, detail) == cause
    assert len(cause) <= 300


def test_every_way_that_ray_knows_has_words() -> None:
    from ray.core.generated import common_pb2

    kinds = set(common_pb2.WorkerExitType.keys())

    assert kinds == {*past_lives._EXITS, "SYSTEM_ERROR"}


@pytest.mark.parametrize(
    ("node", "cause"),
    [
        ({"Alive": False, "DeathReasonMessage": "missed heartbeats"}, "its node died: missed heartbeats"),
        ({"Alive": False}, "its node died"),
    ],
)
def test_the_death_of_a_node_is_a_cause(node: dict[str, object], cause: str) -> None:
    assert cause_of_node_death(node) == cause


class Tables:
    """The records of an actor's lives, in place of Ray's."""

    def __init__(self, exits: list[str | None], times: int) -> None:
        from ray.core.generated import common_pb2, gcs_pb2

        ids = [bytes([number]) * 28 for number in range(len(exits))]
        self._kinds, self._workers = common_pb2.WorkerExitType, dict(zip(ids, exits, strict=True))
        self._worker_table = gcs_pb2.WorkerTableData
        self.actor = gcs_pb2.ActorTableData(num_restarts=times)
        if not hasattr(self.actor, "previous_incarnations"):
            pytest.skip("needs Ray 2.60, which lists an actor's earlier processes: make venv")
        for each in ids:
            self.actor.previous_incarnations.add(worker_id=each)

    def get_worker_info(self, worker_id: Any) -> bytes | None:
        kind = self._workers[worker_id.binary()]
        if kind is None:
            return None
        return bytes(self._worker_table(exit_type=self._kinds.Value(kind), exit_detail="why").SerializeToString())


@pytest.mark.parametrize(
    ("exits", "times", "causes", "last"),
    [
        ([], 0, {}, ""),
        ([], 3, {"cause unknown": 3}, past_lives._UNKNOWN),
        (["NODE_OUT_OF_MEMORY"] * 12, 12, {OUT_OF_MEMORY: 12}, f"{OUT_OF_MEMORY}: why"),
        (["SYSTEM_ERROR", None, "NODE_OUT_OF_MEMORY", "NODE_OUT_OF_MEMORY"], 6, None, f"{OUT_OF_MEMORY}: why"),
        (["INTENDED_SYSTEM_EXIT", None], 2, {"ended by Ray": 1, "cause unknown": 1}, past_lives._UNKNOWN),
    ],
)
def test_the_causes_of_all_lives_are_counted(
    exits: list[str | None], times: int, causes: dict[str, int] | None, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = Tables(exits, times)
    monkeypatch.setattr(past_lives, "_tables", lambda: tables)
    monkeypatch.setattr(past_lives, "_record", lambda actor_id: tables.actor)
    monkeypatch.setattr(past_lives, "ray", Namespace(WorkerID=ray.WorkerID, nodes=list))

    found = past_lives._read_restarts("00", 0.0)

    if causes is None:
        causes = {OUT_OF_MEMORY: 2, "killed or crashed": 1, "cause unknown": 3}
    assert (found.times, found.last_cause, dict(found.causes)) == (times, last, causes)
    assert sum(causes.values()) == times


def test_findings_name_the_count_of_each_cause_and_the_remedy() -> None:
    killed = Restarts(13, "", ((OUT_OF_MEMORY, 12), ("cause unknown", 1)))

    text = restarts_finding(killed)

    assert f"{OUT_OF_MEMORY}, 12 times; cause unknown, 1 time: give the pool or the host tier fewer slots" in text
    assert restarts_finding(Restarts(2, "", (("ended by Ray", 2),))) == (
        "Ray restarted the cache, empty in memory: ended by Ray, 2 times"
    )
    assert restarts_finding(NEVER_RESTARTED) == ""


def test_where_the_tables_of_ray_cannot_be_read_the_cache_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def moved(actor_id: str, wait_s: float) -> Restarts:
        raise AttributeError("_connect_and_get_accessor")

    monkeypatch.setattr(past_lives, "_restarts", moved)

    with caplog.at_level(logging.WARNING, "raydix.actors.service.past_lives"):
        assert past_lives._read_restarts("00", 0.0) == Restarts(0, "", ())

    assert "Ray does not say how often this cache was restarted" in caplog.text
