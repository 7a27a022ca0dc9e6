"""`examples/vllm_app.py`: two replicas of Ray Serve LLM share a cache; what one has computed, the other loads."""

from __future__ import annotations

import io
import json
import re
import shlex
import statistics
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from support.documents import ROOT, blocks
from support.engines.vllm_chats import (
    BLOCK,
    MODEL,
    NUM_CONVERSATIONS,
    Served,
    Turn,
    cache_config,
    cache_stats,
    converse,
    make_model,
    served,
    until_exported,
    until_published,
)
from support.processes.command_line import run

from raydix.actors import connect, shutdown_cache, start_cache
from raydix.schemas import CacheStats

pytestmark = pytest.mark.timeout(1800)  # four engines start, on a machine that others use, too
GUIDE = ROOT / "examples/engines.md"
CACHE = "kv-0"


class Seen(NamedTuple):
    """An application that has ended: the turns of each conversation, and the counts before its end."""

    turns: list[list[Turn]]
    printed: list[str]
    stats: CacheStats | None = None
    followed: str = ""  # the output of the guide's commands
    hits: dict[str, float] | None = None  # by replica: tokens loaded from the cache


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def cluster(ray_address: str) -> Iterator[str]:
    """The address of a cluster with a cache that fits the model."""
    start_cache(cache_config(), name=CACHE, lifetime="detached", timeout_s=300)
    yield ray_address
    shutdown_cache(connect(CACHE))


def follow_guide(app: Served, model: Path, folder: Path) -> str:
    """Run the programs and commands of the guide that need the running application; return what they print."""
    (folder / MODEL).symlink_to(model)
    printed = io.StringIO()
    with chdir(folder), redirect_stdout(printed):
        for block in blocks(GUIDE):
            if block.language == "python":
                program = block.text.replace("http://127.0.0.1:8000/v1", app.url)
                for _ in range(2 if "chat.completions" in program else 1):
                    exec(compile(program, "guide", "exec"), {"__name__": "__main__"})
                    until_published(CACHE)
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
        turns = converse(app, lambda: until_published(CACHE))
        stats = cache_stats(CACHE)
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
    assert re.search(r"^lock +\w.*\ninsert +\w", with_cache.followed, re.MULTILINE), with_cache.followed


def test_the_example_prints_its_address_and_the_counts(with_cache: Seen) -> None:
    printed = "".join(with_cache.printed)

    assert f"2 replicas of {MODEL} serve http://127.0.0.1:" in printed
    assert re.search(r"^sessions +4 open", printed, re.MULTILINE), printed


def test_every_command_of_the_guide_runs(with_cache: Seen) -> None:
    assert re.search(r"\b[1-9]\d* of \d+ tokens", with_cache.followed), with_cache.followed
    assert f"{CACHE}: weights 'step-200', generation 2" in with_cache.followed


def test_the_guides_chat_has_the_same_answer_twice_and_hits_the_second_time(with_cache: Seen) -> None:
    (_, first, of_first), (_, second, of_second) = re.findall(
        r"(?:^|\n)(([^\n]+)\n(\d+) of \d+ prompt tokens were cached)", with_cache.followed
    )

    assert first == second
    assert int(of_first) < int(of_second) >= BLOCK


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
