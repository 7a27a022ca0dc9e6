"""`examples/vllm_app.py --caches`: two replicas on two caches, behind `RaydixRequestRouter` and Serve's default router.

A cache and a replica are killed between turns; the others go on, and all answers stay the same.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from support.engines.vllm_chats import (
    BLOCK,
    QUESTIONS,
    Turn,
    cache_config,
    cache_stats,
    converse,
    make_model,
    served,
    until_published,
)

from raydix.actors import connect, shutdown_cache, start_cache

pytestmark = pytest.mark.timeout(2400)  # five engines start, on a machine that others use, too
KINDS = ("routed", "default")
MORE_QUESTIONS = ("What happens to a full pool?", "When is a page evicted?")
BUSY_S = 30  # the machine may be busy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def cluster(ray_address: str) -> Iterator[str]:
    """The address of a cluster with two caches for each kind of router."""
    names = [f"{kind}-{number}" for kind in KINDS for number in range(2)]
    for name in names:
        start_cache(
            cache_config(events="slim", events_stride_tokens=BLOCK), name=name, lifetime="detached", timeout_s=300
        )
    yield ray_address
    for name in names:
        shutdown_cache(connect(name))


def kill_a_cache() -> None:
    """Kill the process of a cache; Ray starts it again, empty."""
    epoch = cache_stats("routed-1").epoch
    ray.kill(connect("routed-1"), no_restart=False)
    deadline = time.monotonic() + 200
    while True:
        try:
            if cache_stats("routed-1").epoch != epoch:
                return
        except ray.exceptions.RayActorError:
            assert time.monotonic() < deadline
        time.sleep(0.1)


def kill_a_replica() -> None:
    """Kill the process of a replica, with its engine."""
    replicas = [
        each for each in psutil.process_iter(["cmdline"]) if "NearServer:" in " ".join(each.info["cmdline"] or [])
    ]
    mine = [each for each in replicas if os.getpid() in {parent.pid for parent in each.parents()}]
    assert len(mine) == 2, mine
    children = mine[0].children(recursive=True)
    mine[0].send_signal(signal.SIGKILL)
    for child in children:
        if child.is_running():
            child.send_signal(signal.SIGKILL)


def conversations(kind: str, model: Path, cluster: str, log: Path) -> list[list[Turn]]:
    caches = [f"{kind}-0", f"{kind}-1"]
    settings = json.dumps({"lookup_timeout_ms": 1000 * BUSY_S})
    router = json.dumps({"tokens_of_timeout_s": BUSY_S} if kind == "routed" else None)

    def fail(number: int) -> None:
        until_published(*caches)
        if kind == "routed" and number == len(QUESTIONS):
            kill_a_cache()
        if kind == "routed" and number == len(QUESTIONS) + 1:
            kill_a_replica()

    with served(model, cluster, log, "--caches", f"{kind}-*", "--settings", settings, "--router", router) as app:
        return converse(app, lambda: until_published(*caches), (*QUESTIONS, *MORE_QUESTIONS), fail)


@pytest.fixture(scope="module")
def turns(model: Path, cluster: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Turn]]]:
    """The turns of each conversation, by the kind of the router."""
    logs = tmp_path_factory.mktemp("logs")
    return {kind: conversations(kind, model, cluster, logs / f"{kind}.log") for kind in KINDS}


@pytest.mark.figures
def test_turns_follow_their_prefix(turns: dict[str, Any]) -> None:
    for talk in turns["routed"]:
        for before, turn in pairwise(talk[: len(QUESTIONS)]):
            assert turn.num_cached >= before.num_prompt // BLOCK * BLOCK
    computed = {}
    for kind in KINDS:
        later = [turn for talk in turns[kind] for turn in talk[1 : len(QUESTIONS)]]
        computed[kind] = sum(turn.num_prompt - turn.num_cached for turn in later)
        hit = sum(turn.num_cached for turn in later)
        print(f"{kind} router: later turns hit {hit} tokens and computed {computed[kind]}")
    assert computed["routed"] < computed["default"]


def test_answers_are_those_of_the_default_router_also_after_deaths(turns: dict[str, Any]) -> None:
    texts = {kind: [[turn.text for turn in talk] for talk in turns[kind]] for kind in KINDS}

    assert texts["routed"] == texts["default"]
    assert {len(talk) for talk in texts["routed"]} == {len(QUESTIONS) + len(MORE_QUESTIONS)}
