"""Reaching a cluster that asks for a token, and completing the names of its caches in the shell."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import ray
import typer
from support.processes.ray_head import ray_head

from raydix.actors import shutdown_cache, start_cache
from raydix.actors.cli import cluster
from raydix.actors.cli.app import app
from raydix.actors.cli.cluster import complete_names
from raydix.schemas import CacheConfig, PoolConfig

TOKEN, ANOTHER = "0123456789abcdef" * 4, "fedcba9876543210" * 4
START_S = 120.0


@pytest.fixture(scope="module")
def asking() -> Iterator[str]:
    """Return the address of a cluster that asks for a token."""
    with ray_head(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as address:
        yield address


def list_of(address: str, home: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `raydix list` in a process that finds no token by itself."""
    return subprocess.run(
        [sys.executable, "-m", "raydix.actors.cli", "list", "--address", address],
        env={**os.environ, "HOME": str(home), **environ},
        capture_output=True,
        text=True,
    )


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.parametrize(
    "shown",
    [
        {},
        {"RAY_AUTH_MODE": "token"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": ANOTHER},
    ],
    ids=["none", "none that is found", "another"],
)
def test_a_cluster_that_asks_for_a_token_is_said_to_in_the_first_line(
    asking: str, tmp_path: Path, shown: dict[str, str]
) -> None:
    done = list_of(asking, tmp_path, **shown)

    assert (done.returncode, done.stdout) == (3, "")
    first, second = done.stderr.splitlines()
    assert first == f"error: the Ray cluster at {asking} requires a token, and got none or another one"
    assert "export RAY_AUTH_MODE=token" in second


@pytest.mark.more
@pytest.mark.ray
def test_a_cluster_that_is_shown_its_token_answers(asking: str, tmp_path: Path) -> None:
    done = list_of(asking, tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN)

    assert done.stdout.startswith("no cache runs in namespace"), done.stderr


# ---------------------------------------------------------------- completion


def context(**params: Any) -> typer.Context:
    """Return the context of a command with the words before the completed one."""
    context = typer.Context(typer.main.get_command(app))
    context.params = params
    return context


@pytest.mark.long
@pytest.mark.ray
def test_names_of_caches_are_completed(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_COMPLETE_S", START_S)
    namespace, config = f"complete-{uuid4().hex[:8]}", CacheConfig(pool=PoolConfig(num_slots=8, device="cpu"))
    caches = [start_cache(config, name=name, namespace=namespace) for name in ("kv-0", "kv-1", "other")]
    here = context(address=ray.get_runtime_context().gcs_address, namespace=namespace)

    assert complete_names(here, "kv") == ["kv-0", "kv-1"]
    assert complete_names(here, "") == ["kv-0", "kv-1", "other"]

    for cache in caches:
        shutdown_cache(cache)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_where_no_cluster_answers_nothing_is_completed_and_nothing_is_said(
    address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert complete_names(context(address=address), "") == []
    assert capfd.readouterr() == ("", "")


def test_a_cluster_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_COMPLETE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and never answers
        assert complete_names(context(address=f"127.0.0.1:{silent.getsockname()[1]}"), "") == []


def test_every_argument_that_takes_the_name_of_a_cache_completes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess([], 0, b'["kv-0", "a\\u001bb"]')
    monkeypatch.setattr("raydix.actors.cli.cluster.subprocess.run", lambda *asked, **how: answer)
    completed = {}

    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for param in command.params:
            if param.param_type_name == "argument" and param.name != "label":  # of weights
                completed[name] = [each.value for each in param.shell_complete(typer.Context(command), "k")]

    del completed["replay"], completed["start"]  # a file, and the model of an engine
    assert {"stats", "tree", "explain", "check", "stop", "record", "report"} <= set(completed)
    assert set(map(tuple, completed.values())) == {("kv-0",)}
