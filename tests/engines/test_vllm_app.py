"""`examples/vllm_app.py`: two replicas of Ray Serve LLM share a cache; what one has computed, the other loads."""

from __future__ import annotations

import io
import json
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
from support.documents import ROOT, blocks
from support.processes.command_line import run

from raydix.actors import connect, shutdown_cache, start_cache
from raydix.actors.engines.engine_kv import EngineKV
from raydix.schemas import CacheConfig, CacheStats

pytestmark = pytest.mark.timeout(1800)  # four engines start, on a machine that others use, too
GUIDE = ROOT / "examples/engines.md"
BLOCK, LAYERS, HIDDEN = 32, 8, 512
KV_HEADS, HEAD_DIM, FLOAT32 = HIDDEN // 64, 32, 4
CACHE, MODEL = "kv-0", "small-chat"
NUM_CONVERSATIONS, NUM_NEW, NUM_WARM_UPS = 8, 8, 8
ENGINE = {
    "block_size": BLOCK,
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "num_gpu_blocks_override": 500,  # more than all conversations need: a replica evicts nothing
    "enable_prompt_tokens_details": True,
}
QUESTIONS = ("What is a page?", "And what does a lease hold?", "Who frees the slots of a client that has died?")


class Turn(NamedTuple):
    """An answer, as the client has seen it."""

    text: str
    num_prompt: int
    num_cached: int
    first_s: float


class Served(NamedTuple):
    """A running application, and where its metrics are."""

    url: str
    metrics_url: str
    printed: list[str]


class Seen(NamedTuple):
    """An application that has ended: the turns of each conversation, and the counts before its end."""

    turns: list[list[Turn]]
    printed: list[str]
    stats: CacheStats | None = None
    followed: str = ""  # the output of the guide's commands
    hits: dict[str, float] | None = None  # by replica: tokens loaded from the cache


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / MODEL
    program = [sys.executable, str(ROOT / "examples/small_chat_model.py"), str(folder)]
    subprocess.run([*program, "--hidden-size", str(HIDDEN), "--layers", str(LAYERS)], check=True)
    return folder


@pytest.fixture(scope="module")
def cluster(ray_address: str) -> Iterator[str]:
    """The address of a cluster with a cache that fits the model."""
    kv = EngineKV(BLOCK, (KV_HEADS * 2 * HEAD_DIM * FLOAT32,) * LAYERS, {})
    pool = kv.pool_config(16_384, device="cpu")
    start_cache(CacheConfig(page_size=BLOCK, pool=pool), name=CACHE, lifetime="detached", timeout_s=300)
    yield ray_address
    shutdown_cache(connect(CACHE))


@contextmanager
def served(model: Path, cluster: str, log: Path, *options: str) -> Iterator[Served]:
    """Run the example until its end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [sys.executable, str(ROOT / "examples/vllm_app.py"), str(model), "--address", cluster]
    more = ["--port", str(port), "--engine", json.dumps(ENGINE), *options]
    with log.open("w") as stderr:
        process = subprocess.Popen([*program, *more], stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert process.stdout is not None
    (node,) = ray.nodes()
    printed: list[str] = []
    try:
        for line in process.stdout:
            printed.append(line)
            if found := re.search(r"serve (http://\S+)", line):
                metrics = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
                yield Served(found.group(1), metrics, printed)
                break
        else:
            raise AssertionError(f"it has ended: {log.read_text()[-4000:]}")
    finally:
        process.send_signal(signal.SIGINT)
        printed.append(process.communicate(timeout=100)[0])
    assert process.returncode == 0, log.read_text()[-4000:]


def converse(app: Served, between_turns: Callable[[], None]) -> list[list[Turn]]:
    """Have all conversations, one turn of each after the other; return the turns of each."""
    import openai

    client = openai.OpenAI(base_url=app.url, api_key="none", timeout=200)
    text = (ROOT / "examples/failures.md").read_text()[:2500]
    talks: list[list[dict[str, str]]] = [
        [{"role": "system", "content": f"Conversation {number}. {text}"}] for number in range(NUM_CONVERSATIONS)
    ]
    warm_up(client)
    answers: list[list[Turn]] = [[] for _ in talks]
    for question in QUESTIONS:
        for talk, turns in zip(talks, answers, strict=True):
            talk.append({"role": "user", "content": question})
            turns.append(ask(client, talk))
            talk.append({"role": "assistant", "content": turns[-1].text})
            between_turns()
    return answers


def warm_up(client: Any) -> None:
    """Have each replica compute and load: its first answers wait for compilers."""
    for number in range(NUM_WARM_UPS):
        ask(client, [{"role": "user", "content": f"{number // 4} warms the replicas up. " * 20}])


def ask(client: Any, messages: list[dict[str, str]]) -> Turn:
    began, first_s, text, usage = time.monotonic(), 0.0, "", None
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=NUM_NEW,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        if chunk.choices and (piece := chunk.choices[0].delta.content):
            first_s = first_s or time.monotonic() - began
            text += piece
        usage = chunk.usage or usage
    assert usage is not None
    assert usage.completion_tokens == NUM_NEW
    details = usage.prompt_tokens_details
    return Turn(text, usage.prompt_tokens, (details.cached_tokens or 0) if details else 0, first_s)


def until_published() -> None:
    """Wait until no engine has a lease: it has saved what it has computed."""
    deadline = time.monotonic() + 100
    while cache_stats().open_leases:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def cache_stats() -> CacheStats:
    stats: CacheStats = ray.get(connect(CACHE).stats.remote())
    return stats


def until_exported(app: Served) -> dict[str, float]:
    """Wait until Ray has exported the tokens that each replica has loaded, and the last look-up."""
    wanted = len(QUESTIONS) * NUM_CONVERSATIONS + NUM_WARM_UPS
    deadline = time.monotonic() + 100
    while sum(by_replica(app, "raydix_lookups").values()) < wanted:
        assert time.monotonic() < deadline
        time.sleep(1)
    return by_replica(app, "raydix_hit_tokens")


def by_replica(app: Served, name: str) -> dict[str, float]:
    """The values of a metric of vLLM, as Ray exports it: within seconds."""
    values: dict[str, float] = defaultdict(float)
    with urllib.request.urlopen(app.metrics_url, timeout=60) as response:
        for line in response.read().decode().splitlines():
            if found := re.fullmatch(rf'ray_vllm_{name}_total\{{.*ReplicaId="(\w+)".*\}} (\S+)', line):
                values[found.group(1)] += float(found.group(2))
    return dict(values)


def follow_guide(app: Served, model: Path, folder: Path) -> str:
    """Run the programs and commands of the guide that need the running application; return what they print."""
    (folder / MODEL).symlink_to(model)
    printed = io.StringIO()
    with chdir(folder), redirect_stdout(printed):
        for block in blocks(GUIDE):
            if block.language == "python":
                program = block.text.replace("http://127.0.0.1:8000/v1", app.url)
                exec(compile(program, "guide", "exec"), {"__name__": "__main__"})
                until_published()
            for line in block.text.splitlines() if block.language == "sh" else ():
                match shlex.split(line, comments=True):
                    case ["raydix", verb, *arguments] if verb != "start":
                        print(run(verb, *arguments).stdout)
    return printed.getvalue()


@pytest.fixture(scope="module")
def with_cache(model: Path, cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    log = tmp_path_factory.mktemp("logs") / "with.log"
    settings = json.dumps({"lookup_timeout_ms": 20_000})  # the machine may be busy
    with served(model, cluster, log, "--cache", CACHE, "--settings", settings) as app:
        turns = converse(app, until_published)
        stats = cache_stats()
        hits = until_exported(app)
        followed = follow_guide(app, model, tmp_path_factory.mktemp("guide"))
    return Seen(turns, app.printed, stats, followed, hits)


@pytest.fixture(scope="module")
def without_cache(with_cache: Seen, model: Path, cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    log = tmp_path_factory.mktemp("logs") / "without.log"
    with served(model, cluster, log) as app:
        turns = converse(app, lambda: None)
    return Seen(turns, app.printed)


@pytest.mark.figures
def test_a_replica_hits_what_the_other_has_computed(with_cache: Seen) -> None:
    """Serve sends a turn to any replica, so about half of the turns come to another than the turn before."""
    for turns in with_cache.turns:
        for before, turn in pairwise(turns):
            assert turn.num_cached >= before.num_prompt // BLOCK * BLOCK  # by the replica's own cache or by Raydix
    assert with_cache.hits, "no replica has loaded a prompt that it had not computed"
    print(f"tokens that the replicas have loaded: {sorted(with_cache.hits.values())}")


def test_the_cache_counts_the_hits_and_its_sessions(with_cache: Seen) -> None:
    stats = with_cache.stats

    assert stats is not None
    assert stats.open_sessions == 4  # a scheduler and a worker of each replica
    assert stats.tokens_reused >= sum(turn.num_cached for turns in with_cache.turns for turn in turns[1:])
    assert (stats.open_leases, stats.private_slots, stats.refusals) == (0, 0, {})


def test_the_example_prints_its_address_and_the_counts(with_cache: Seen) -> None:
    printed = "".join(with_cache.printed)

    assert f"2 replicas of {MODEL} serve http://127.0.0.1:" in printed
    assert re.search(r"^sessions +4 open", printed, re.MULTILINE), printed


def test_every_command_of_the_guide_runs(with_cache: Seen) -> None:
    assert re.search(r"\b[1-9]\d* of \d+ tokens", with_cache.followed), with_cache.followed
    assert f"{CACHE}: weights 'step-200', generation 2" in with_cache.followed


@pytest.mark.figures
def test_answers_are_those_without_the_cache(with_cache: Seen, without_cache: Seen) -> None:
    texts = [[turn.text for turn in turns] for turns in with_cache.turns]

    assert texts == [[turn.text for turn in turns] for turns in without_cache.turns]
    assert len({text for each in texts for text in each}) > NUM_CONVERSATIONS  # the prompts matter
    for name, seen in (("with", with_cache), ("without", without_cache)):
        first = [turns[0].first_s for turns in seen.turns]
        later = [turn for turns in seen.turns for turn in turns[1:]]
        times = [turn.first_s for turn in later]
        print(
            f"{name} the cache: first token of first turns, p50 {statistics.median(first):.2f} s; "
            f"of {len(later)} later ones, p50 {statistics.median(times):.2f} s, "
            f"p90 {statistics.quantiles(times, n=10)[-1]:.2f} s, mean {statistics.mean(times):.2f} s; "
            f"{sum(turn.num_cached for turn in later) / sum(turn.num_prompt for turn in later):.0%} of their tokens hit"
        )
