"""Why Ray restarted a cache, in one line of words."""

from __future__ import annotations

import logging

import pytest

from raydix.actors.service import past_lives
from raydix.actors.service.cache_service import Restarts
from raydix.actors.service.past_lives import cause_of_exit, cause_of_node_death


@pytest.mark.parametrize(
    ("exit_type", "detail", "cause"),
    [
        ("NODE_OUT_OF_MEMORY", "Task was killed:\n  15 of 16 GB", "out of memory: Task was killed: 15 of 16 GB"),
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
    pytest.importorskip("ray")
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


def test_where_the_tables_of_ray_cannot_be_read_the_cache_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def moved() -> Restarts:
        raise AttributeError("_connect_and_get_accessor")

    monkeypatch.setattr(past_lives, "_restarts", moved)

    with caplog.at_level(logging.WARNING, "raydix.actors.service.past_lives"):
        assert past_lives.restarts_of_this_actor() == Restarts(0, "")

    assert "Ray does not say how often this cache was restarted" in caplog.text
