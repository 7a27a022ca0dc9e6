"""A router of cache actors: routes without actor calls, a killed cache, caches that come and go, and the commands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import ray
from ray.actor import ActorMethod
from support.fleet.running_fleet import STRIDE, caught_up, prompt, publish, slim, until
from typer.testing import CliRunner

from raydix.actors import connect_fleet, shutdown_cache, start_cache
from raydix.actors.cli.app import app
from raydix.schemas import CacheConfig, PoolConfig

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def namespace(ray_cluster: None) -> Iterator[str]:
    """A Ray namespace with the caches chat-0 and chat-1, and one without events."""
    name = f"fleet-{uuid4().hex[:8]}"
    silent = CacheConfig(page_size=16, pool=PoolConfig(num_slots=64))
    configs = {"chat-0": slim(), "chat-1": slim(), "chat-silent": silent}
    handles = [start_cache(config, name=each, namespace=name) for each, config in configs.items()]
    yield name
    for handle in handles:
        shutdown_cache(handle)


def caches_of(namespace: str) -> dict[str, Any]:
    return {name: ray.get_actor(name, namespace=namespace) for name in ("chat-0", "chat-1")}


async def test_routes_follow_prefixes_and_call_no_actor(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await connect_fleet("chat-*", namespace=namespace) as fleet:
        assert set(fleet.columns()) == {"chat-0", "chat-1"}
        assert set(fleet.stats().left_out) == {"chat-silent"}
        for turn in range(1, 5):  # three conversations
            for first in range(3):
                tokens = prompt(first, turn)
                async with fleet.acquire(tokens) as lease:
                    assert lease.prefix_len == (turn - 1) * STRIDE, "each turn goes to the cache of the one before"
                    await lease.insert(tokens)
        await caught_up(fleet, caches_of(namespace))
        assert fleet.index.num_pages() == 3 * 4

        calls: list[str] = []
        remote = ActorMethod._remote

        def count(method: Any, *args: Any, **options: Any) -> Any:
            calls.append(method._method_name)
            return remote(method, *args, **options)

        monkeypatch.setattr(ActorMethod, "_remote", count)
        for _ in range(100):
            for first in range(3):
                async with await fleet.route(prompt(first, 5)) as route:
                    assert route.prefix_len == 4 * STRIDE
        assert calls == []
        caches_of(namespace)["chat-0"].noop.remote()
        assert calls == ["noop"], "such calls are counted"


@pytest.mark.more
async def test_a_killed_cache_is_replaced_by_the_next_best_and_comes_back_empty(namespace: str) -> None:
    tokens = prompt(11, 4)
    caches = caches_of(namespace)
    await publish(caches["chat-1"], tokens)
    async with await connect_fleet("chat-[01]", namespace=namespace) as fleet:
        await caught_up(fleet, caches)
        assert (await fleet.route(tokens)).cache == "chat-1"
        epochs = {each.cache: each.epoch for each in fleet.stats().caches}

        ray.kill(caches["chat-1"], no_restart=False)  # SIGKILL; Ray starts it again

        await until(lambda: {each.cache: each.epoch for each in fleet.stats().caches} != epochs)  # it is dropped
        async with fleet.acquire(tokens) as lease:
            assert lease.prefix_len == 0
            await lease.insert(tokens)
        await until(lambda: len(fleet.columns()) == 2)
        await caught_up(fleet, caches)
        new = {each.cache: each.epoch for each in fleet.stats().caches}
        assert new["chat-0"] == epochs["chat-0"] and new["chat-1"] != epochs["chat-1"]
        assert (await fleet.route(tokens)).prefix_len == 4 * STRIDE
        fleet.index.check_invariants()


@pytest.mark.more
async def test_caches_come_and_go(namespace: str) -> None:
    async with await connect_fleet("*-0", namespace=namespace) as fleet:
        added = start_cache(slim(), name="new-0", namespace=namespace)
        await until(lambda: "new-0" in fleet.columns())
        await publish(added, prompt(31, 2))
        await until(lambda: fleet.explain(prompt(31, 2)).candidates[0].prefix_len == 2 * STRIDE)

        shutdown_cache(added)

        await until(lambda: "new-0" not in fleet.columns())
        assert (await fleet.route(prompt(31, 2))).cache == "chat-0"
        await until(lambda: "new-0" not in fleet.stats().left_out)


def test_the_commands_show_the_fleet(namespace: str, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(prompt(21, 2)))
    asyncio.run(publish(ray.get_actor("chat-0", namespace=namespace), prompt(21, 2)))

    def run(*arguments: str) -> Any:
        answer = CliRunner().invoke(app, ["fleet", *arguments, "--namespace", namespace, "--json"])
        assert answer.exit_code == 0, answer.output
        return json.loads(answer.stdout)

    silent = run("explain", "chat-silent", "--tokens", str(tokens))
    assert (silent["candidates"], list(silent["left_out"])) == ([], ["chat-silent"])
    assert {row["cache"]: row["state"] for row in run("list", "chat-*")} == {
        "chat-0": "in",
        "chat-1": "in",
        "chat-silent": "left out",
    }
    assert [each["cache"] for each in run("stats")["caches"]] == ["chat-0", "chat-1"]
    best = run("explain", "chat-?", "--tokens", str(tokens))["candidates"][0]
    assert (best["cache"], best["prefix_len"]) == ("chat-0", 2 * STRIDE)
    for command in (["list"], ["stats"], ["explain", "--tokens", str(tokens)]):
        answer = CliRunner().invoke(app, ["fleet", *command, "--namespace", namespace])
        assert answer.exit_code == 0 and "chat-0" in answer.output
    for command in (["list"], ["stats"], ["explain", "--tokens", str(tokens)]):  # the usual first mistake
        answer = CliRunner().invoke(app, ["fleet", *command, "chat-silent", "--namespace", namespace])
        assert (answer.exit_code, answer.stderr) == (0, "")
        assert "chat-silent" in answer.output and 'its CacheConfig.events must be "slim", not' in answer.output
        assert "raydix start --set events=slim" in answer.output
    missing = CliRunner().invoke(app, ["fleet", "list", "none-*", "--namespace", namespace, "--timeout", "0.2"])
    assert missing.exit_code != 0 and "none was found" in missing.output
