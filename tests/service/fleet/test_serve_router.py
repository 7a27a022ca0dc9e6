"""`RaydixRequestRouter` in Ray Serve: three replicas on two caches; prefixes, full replicas, streams and deaths."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
import ray
from packaging.version import Version
from support.fleet.running_fleet import STRIDE, prompt, slim

from raydix.actors import shutdown_cache, start_cache
from raydix.schemas import FleetStats, InvalidRequest, ReplicaRouterStats, RouteExplanation

serve = pytest.importorskip(
    "ray.serve",
    reason="needs Ray Serve: .venv/bin/pip install -c constraints.txt -e '.[serve]'",
    exc_type=ImportError,
)
pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(Version(ray.__version__) < Version("2.60"), reason="needs Ray 2.60: make venv"),
]
LONG_S = 120
NUM_CONVERSATIONS, NUM_TURNS = 4, 4


class Routed(NamedTuple):
    """A deployment behind the router, and behind Serve's default."""

    handle: Any
    default: Any
    router: Any
    caches: dict[str, Any]
    deployment: str
    namespace: str  # of the caches


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def routed(ray_cluster: None) -> Iterator[Routed]:
    from ray.serve.config import ProxyLocation
    from support.fleet import served_replicas

    from raydix.actors.serve.router import RaydixRequestRouter, request_router_config, running_routers

    ray.cloudpickle.register_pickle_by_value(served_replicas)  # replicas cannot import it
    RaydixRequestRouter.queue_len_response_deadline_s = LONG_S  # the machine may be busy
    namespace = f"serve-{uuid4().hex[:8]}"
    names = ["chat-0", "chat-1", "plain-0", "plain-1"]
    caches = {name: start_cache(slim(), name=name, namespace=namespace) for name in names}
    config = request_router_config(
        "chat-*",
        "support.fleet.served_replicas:tokens_of",
        namespace=namespace,
        tokens_of_timeout_s=LONG_S,
        route={"promise_ttl_s": 3600},
    )
    serve.start(proxy_location=ProxyLocation.Disabled)
    made: Any = served_replicas.Replica
    ours = made.options(name="Ours", num_replicas=3, request_router_config=config)
    plain = made.options(name="Plain", num_replicas=2)
    try:
        handle = serve.run(ours.bind(names[:2], namespace), name="ours", route_prefix=None)
        default = serve.run(plain.bind(names[2:], namespace), name="plain", route_prefix=None)
        generate(handle, [1])  # makes the router
        (router,) = running_routers()
        until(lambda: sum(router.stats().replicas.values()) == 3 and len(router.stats().replicas) == 2)
        yield Routed(handle, default, router, caches, "ours:Ours", namespace)
    finally:
        serve.shutdown()
        until(lambda: all(each.stats().fleet is None for each in running_routers()))  # else it calls Ray after its end
        for cache in caches.values():
            shutdown_cache(cache)


def generate(handle: Any, tokens: list[int], **options: Any) -> Any:
    return handle.generate.remote(tokens, **options).result(timeout_s=LONG_S)


def stats(routed: Routed) -> ReplicaRouterStats:
    found: ReplicaRouterStats = routed.router.stats()
    return found


def fleet_of(routed: Routed) -> FleetStats:
    found = stats(routed).fleet
    assert found is not None
    return found


def is_known(routed: Routed, tokens: list[int]) -> bool:
    """Return whether the router knows a cache that has stored a whole prompt. A promise does not count."""
    fleet = routed.router._fleet

    async def explain() -> RouteExplanation:
        return fleet.explain([*tokens, 0])

    explained = asyncio.run_coroutine_threadsafe(explain(), fleet.members.loop).result(LONG_S)
    return any(candidate.prefix_len == len(tokens) for candidate in explained.candidates)


def converse(handle: Any, first: int, after_each: Callable[[list[int]], None]) -> list[list[Any]]:
    """Have conversations, one turn of each after the other; return the answers of each turn."""
    answers = []
    for turn in range(1, NUM_TURNS + 1):
        prompts = [prompt(first + number, turn) for number in range(NUM_CONVERSATIONS)]
        answers.append([generate(handle, tokens) for tokens in prompts])
        for tokens in prompts:
            after_each(tokens)
    return answers


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no caches": ({"tokens_of": "m:f"}, "caches"),
    "another name": ({"cache": "chat-*", "tokens_of": "m:f"}, "'cache'"),
    "an empty pattern": ({"caches": "", "tokens_of": "m:f"}, "caches must be a string"),
    "a path": ({"caches": "c", "tokens_of": "m.f"}, "tokens_of must be"),
    "a weight": ({"caches": "c", "tokens_of": "m:f", "route": {"weight": -1}}, "route: weight: "),
    "a field": ({"caches": "c", "tokens_of": "m:f", "route": {"heft": 1}}, "route: heft: "),
    "no dict": ({"caches": "c", "tokens_of": "m:f", "route": 3}, "route must be a dict"),
    "a time": ({"caches": "c", "tokens_of": "m:f", "tokens_of_timeout_s": -1}, "seconds"),
    "no namespace": ({"caches": "c", "tokens_of": "m:f", "namespace": None}, "namespace must be a string"),
    "a fingerprint": ({"caches": "c", "tokens_of": "m:f", "fingerprint": 3}, "fingerprint must be"),
}


@pytest.mark.parametrize(("kwargs", "named"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named_where_they_are_given(kwargs: dict[str, Any], named: str) -> None:
    from raydix.actors.serve.router import _checked_options

    with pytest.raises(InvalidRequest, match=re.escape(named)):
        _checked_options(kwargs)


def test_wrong_arguments_are_named_when_a_deployment_is_described() -> None:
    from raydix.actors.serve.router import request_router_config

    with pytest.raises(InvalidRequest, match="route: weight: "):
        request_router_config("chat-*", "m:f", route={"weight": -1})


@pytest.mark.more
def test_with_wrong_arguments_each_request_fails_with_their_fault(
    routed: Routed, caplog: pytest.LogCaptureFixture
) -> None:
    from ray.serve.config import RequestRouterConfig
    from support.fleet import served_replicas

    kwargs = {"caches": "chat-*", "tokens_of": "m:f", "route": {"weight": -1}}
    router = "raydix.actors.serve.router.RaydixRequestRouter"
    config = RequestRouterConfig(request_router_class=router, request_router_kwargs=kwargs)  # type: ignore[arg-type]
    made: Any = served_replicas.Replica
    wrong = made.options(name="Wrong", num_replicas=1, request_router_config=config)
    handle = serve.run(wrong.bind(["chat-0"], routed.namespace), name="wrong", route_prefix=None)

    for _ in range(3):
        with pytest.raises(InvalidRequest, match="route: weight: "):
            generate(handle, [1, 2])

    assert len([record for record in caplog.records if "every request of" in record.message]) == 1
    serve.delete("wrong")


@pytest.mark.more
def test_turns_follow_their_prefix_with_the_answers_of_the_default_router(routed: Routed) -> None:
    before = stats(routed)

    ours = converse(routed.handle, 100, lambda tokens: until(lambda: is_known(routed, tokens)))
    plain = converse(routed.default, 100, lambda tokens: None)

    assert [[each["prefix_len"] for each in turn] for turn in ours] == [
        [turn * STRIDE] * NUM_CONVERSATIONS for turn in range(NUM_TURNS)
    ]
    assert [[each["sum"] for each in turn] for turn in ours] == [[each["sum"] for each in turn] for turn in plain]
    reused = [sum(each["prefix_len"] for turn in turns for each in turn) for turns in (ours, plain)]
    assert reused[1] <= reused[0]  # by chance, the default router also sends each turn to its prefix
    after = stats(routed)
    assert after.deployment == routed.deployment
    assert after.routes - before.routes == NUM_CONVERSATIONS * NUM_TURNS
    assert after.prefix_tokens - before.prefix_tokens == reused[0]
    assert after.least_loaded.keys() <= {"loading", "no cache"}, "of the requests that made the router"
    until(lambda: fleet_of(routed).open_routes == 0)
    print(f"tokens reused: {reused[0]} routed, {reused[1]} with the default router")


def test_requests_without_tokens_are_counted_and_answered(routed: Routed, monkeypatch: pytest.MonkeyPatch) -> None:
    before = stats(routed).least_loaded

    for how in ("none", "raise", "raise"):
        assert generate(routed.handle, [1, 2], how=how)["sum"] == 3
    monkeypatch.setattr(routed.router.reader, "timeout_s", 0.05)
    assert generate(routed.handle, [1, 2], how="wait")["sum"] == 3

    after = stats(routed).least_loaded
    rise = {cause: after[cause] - before.get(cause, 0) for cause in after}
    assert {cause: number for cause, number in rise.items() if number} == {"no tokens": 1, "failed": 2, "late": 1}


def test_a_route_ends_with_the_first_item_of_a_stream(routed: Routed, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    stream = routed.handle.options(stream=True).stream.remote(prompt(200, 2), gate=str(gate))
    items = iter(stream)

    assert next(items) == 2 * STRIDE
    until(lambda: fleet_of(routed).open_routes == 0)
    gate.touch()
    assert list(items) == [2 * STRIDE]


def test_a_full_replica_passes_the_request_to_the_next_best_cache(routed: Routed, tmp_path: Path) -> None:
    (single,) = [name for name, number in stats(routed).replicas.items() if number == 1]
    tokens = next(
        prompt(first, 1) for first in range(300, 400) if generate(routed.handle, prompt(first, 1))["cache"] == single
    )
    until(lambda: fleet_of(routed).open_routes == 0)
    before, gate = stats(routed), tmp_path / "gate"
    held = [routed.handle.generate.remote(tokens, gate=str(gate)) for _ in range(2)]
    until(lambda: fleet_of(routed).open_routes == 2)

    other = routed.handle.generate.remote(tokens, gate=str(gate))

    until(lambda: fleet_of(routed).open_routes == 3)
    until(lambda: {each.cache: each.open_routes for each in fleet_of(routed).caches}[single] == 2)
    assert stats(routed).moved == before.moved + 1
    assert stats(routed).routes == before.routes + 3  # though the third request was ranked again and again
    assert stats(routed).prompt_tokens == before.prompt_tokens + 3 * len(tokens)
    assert fleet_of(routed).routes == before.fleet.routes + 3
    gate.touch()
    assert {each.result(timeout_s=LONG_S)["cache"] for each in held} == {single}
    assert other.result(timeout_s=LONG_S)["cache"] != single
    until(lambda: fleet_of(routed).open_routes == 0)
    assert sum(each.open_routes for each in fleet_of(routed).caches) == 0


def answer_slowly(rank: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `rank` that holds the router's loop after it has opened a route, so that a cancellation waits there."""

    async def rank_slowly(*arguments: Any) -> Any:
        ranked = await rank(*arguments)
        time.sleep(0.5)  # noqa: ASYNC251 -- Serve gives the request its replica in the same step of the loop
        return ranked

    return rank_slowly


@pytest.mark.parametrize(
    "when", ["as it gets its replica", "while its replica is called", "while its replica computes"]
)
def test_a_cancelled_request_ends_its_route(
    routed: Routed, tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, called = tmp_path / "gate", tmp_path / "gate.called"
    if when == "as it gets its replica":
        monkeypatch.setattr(routed.router, "rank", answer_slowly(routed.router.rank))
    gc.disable()  # Serve keeps a cancelled request in a cycle: its collection must not be what ends the route
    try:
        response = routed.handle.generate.remote(prompt(500, 1), gate=str(gate))
        until(lambda: fleet_of(routed).open_routes == 1)
        if when == "while its replica computes":
            until(called.exists)

        response.cancel()

        until(lambda: fleet_of(routed).open_routes == 0)
    finally:
        gc.enable()
        gate.touch()


def test_a_killed_replica_ends_its_routes_and_the_others_go_on(routed: Routed, tmp_path: Path) -> None:
    tokens = prompt(600, 2)
    pid = generate(routed.handle, tokens)["pid"]
    until(lambda: fleet_of(routed).open_routes == 0)
    gate = tmp_path / "gate"
    held = [routed.handle.generate.remote(tokens, gate=str(gate)) for _ in range(2)]
    until(lambda: fleet_of(routed).open_routes == 2)

    os.kill(pid, signal.SIGKILL)

    gate.touch()
    for response in held:  # those on the killed replica fail, as with the default router
        try:
            assert response.result(timeout_s=LONG_S)["sum"] == sum(tokens)
        except ray.exceptions.RayActorError:
            continue
    until(lambda: fleet_of(routed).open_routes == 0)
    for first in range(601, 607):
        assert generate(routed.handle, prompt(first, 1))["pid"] != pid
    until(lambda: sum(stats(routed).replicas.values()) == 3)


@pytest.mark.more
def test_a_killed_cache_gets_no_requests_and_the_others_go_on(routed: Routed) -> None:
    ray.kill(routed.caches["chat-1"])  # for ever

    until(lambda: stats(routed).replicas.keys() == {"chat-0"})
    for turn in range(1, 4):
        answer = generate(routed.handle, prompt(700, turn))
        assert (answer["cache"], answer["prefix_len"]) == ("chat-0", (turn - 1) * STRIDE)

    ray.kill(routed.caches["chat-0"], no_restart=False)  # the last one restarts, and is empty

    answers = [generate(routed.handle, prompt(701, turn)) for turn in range(1, 4)]
    assert [each["sum"] for each in answers] == [sum(prompt(701, turn)) for turn in range(1, 4)]
    until(lambda: stats(routed).replicas.keys() == {"chat-0"})
    until(lambda: generate(routed.handle, prompt(702, 1))["prefix_len"] >= STRIDE // 2)
