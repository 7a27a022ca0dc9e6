"""`examples/vllm_app.py` as a program, and chats of an OpenAI client with it."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
from support.documents import ROOT

from raydix.actors import connect
from raydix.schemas import CacheConfig, CacheStats, PoolConfig

BLOCK, LAYERS, HIDDEN = 32, 8, 512
KV_HEADS, HEAD_DIM, FLOAT32 = HIDDEN // 64, 32, 4
MODEL = "small-chat"
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


def make_model(parent: Path) -> Path:
    """Make the model's folder in another."""
    folder = parent / MODEL
    program = [sys.executable, str(ROOT / "examples/small_chat_model.py"), str(folder)]
    subprocess.run([*program, "--hidden-size", str(HIDDEN), "--layers", str(LAYERS)], check=True)
    return folder


def cache_config(**fields: Any) -> CacheConfig:
    """Return the configuration of a cache that fits the model."""
    slot_bytes = KV_HEADS * 2 * HEAD_DIM * FLOAT32 * LAYERS
    pool = PoolConfig(num_slots=16_384, format="opaque", slot_bytes=slot_bytes, device="cpu")
    return CacheConfig(page_size=BLOCK, pool=pool, **fields)


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


def converse(
    app: Served,
    between_turns: Callable[[], None],
    questions: Sequence[str] = QUESTIONS,
    before_question: Callable[[int], None] = lambda number: None,
) -> list[list[Turn]]:
    """Have all conversations, one turn of each after the other; return the turns of each."""
    import openai

    client = openai.OpenAI(base_url=app.url, api_key="none", timeout=200)
    text = (ROOT / "examples/failures.md").read_text()[:2500]
    talks: list[list[dict[str, str]]] = [
        [{"role": "system", "content": f"Conversation {number}. {text}"}] for number in range(NUM_CONVERSATIONS)
    ]
    warm_up(client)
    answers: list[list[Turn]] = [[] for _ in talks]
    for number, question in enumerate(questions):
        before_question(number)
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


def until_published(*caches: str) -> None:
    """Wait until no engine has a lease: it has saved what it has computed."""
    deadline = time.monotonic() + 100
    while any(cache_stats(cache).open_leases for cache in caches):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def cache_stats(cache: str) -> CacheStats:
    """Return the counts of a cache."""
    stats: CacheStats = ray.get(connect(cache).stats.remote())
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
