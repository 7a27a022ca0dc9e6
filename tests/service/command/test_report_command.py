"""`raydix report` writes the page of a running cache, and of one that replays a trace."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest
from support.models.sample_trace import EVICTED, PROMPT_TOKENS, PROMPTS, REUSED, write_trace
from support.processes.command_line import run, run_json

from raydix.actors import PrefixCacheClient, shutdown_cache, start_cache_async
from raydix.schemas import CacheConfig, GhostConfig, PoolConfig
from raydix.schemas.shown import short_count


@pytest.fixture(scope="module")
async def busy(ray_cluster: None) -> AsyncIterator[list[str]]:
    """Return the options that name a cache with 16 of its 64 slots in use."""
    namespace = f"report-{uuid4().hex[:8]}"
    config = CacheConfig(page_size=8, pool=PoolConfig(num_slots=64, device="cpu"), ghost=GhostConfig())
    cache = await start_cache_async(config, name="kv-0", namespace=namespace)
    async with PrefixCacheClient(cache) as client, await client.acquire([1] * 16, lora_id="a") as lease:
        await lease.insert([1] * 16)
    yield ["kv-0", "--namespace", namespace]
    await asyncio.to_thread(shutdown_cache, cache)


@pytest.mark.ray
def test_the_page_of_a_running_cache(busy: list[str], tmp_path: Path) -> None:
    out = tmp_path / "kv-0.html"

    told = run_json("report", *busy, "-o", out)

    html = out.read_text(encoding="utf-8")
    assert told["path"] == str(out)
    assert told["report"]["stats"]["tree_slots"] == 16
    assert [part["num_tokens"] for part in told["report"]["tree"]] == [16]
    assert told["report"]["history"][-1]["evictable_slots"] == 16
    for text in ("<h1>kv-0</h1>", "lora_id=a", "cached, evictable: 16", "Twice the pool would give about +0.0 points"):
        assert text in html


def test_the_page_of_a_trace(tmp_path: Path) -> None:
    trace, out = write_trace(tmp_path), tmp_path / "trace.html"

    told = run_json("report", trace, "-o", out, "--capacity", 4 * 512)["report"]

    too_large = PROMPTS[-1][0]
    assert (told["stats"]["tokens_requested"], told["stats"]["tokens_refused"]) == (PROMPT_TOKENS, too_large)
    assert told["stats"]["too_large"] == {"requests": 1, "tokens": too_large, "largest_slots": 2560}
    assert (told["stats"]["tokens_reused"], told["stats"]["tokens_evicted"]) == (REUSED, EVICTED)
    assert [point["at_s"] for point in told["history"]] == [*range(len(PROMPTS)), len(PROMPTS) - 1]
    ages = {age["below_s"]: age["num_tokens"] for age in told["eviction_ages"] if age["num_tokens"]}
    assert ages == {3: 512, 10: 1024}  # page 3 after 1 s; pages 1 and 9 after 4 and 3 s
    assert (told["stats"]["exhausted"], told["stats"]["refusals"]) == (1, {"never_fits": 1})
    assert sum(each["tokens_requested"] for each in told["namespaces"]) == PROMPT_TOKENS
    html = out.read_text(encoding="utf-8")
    assert "Refused for lack of slots, and in no hit rate: 1 request." in html
    assert "7 requests" not in html
    assert "<h1>trace.jsonl</h1>" in html


def test_requests_that_can_never_fit_come_before_all_figures(tmp_path: Path) -> None:
    out = tmp_path / "trace.html"

    lines = run("report", write_trace(tmp_path), "-o", out, "--capacity", 2048).stdout.splitlines()

    share = 100 * PROMPTS[-1][0] / (PROMPT_TOKENS + PROMPTS[-1][0])
    sentence = (
        f"1 request, {share:.1f} % of the prompt tokens, can never fit in 2,048 slots and is in no hit rate; the "
        "largest needs a capacity of 2,560"
    )
    assert lines == [
        sentence,
        f"hit rate {100 * REUSED / PROMPT_TOKENS:.2f} % of {short_count(PROMPT_TOKENS)} prompt tokens",
        f"{out}: open it in a browser",
    ]
    html = out.read_text(encoding="utf-8")
    assert 0 < html.index(sentence) < html.index("<dt>")


def rates(trace: Path, folder: Path, capacity: int) -> list[str]:
    """Return the hit rates at a capacity: printed by `replay`, printed by `report`, and twice on its page."""
    replayed = run("replay", trace, "--capacity", capacity).stdout
    reported = run("report", trace, "--capacity", capacity, "-o", folder / "page.html").stdout
    html = (folder / "page.html").read_text(encoding="utf-8")
    patterns = (
        (rf"(?m)^ *{capacity:,} +lru +\d+ +(\S+ %)", replayed),
        (r"(?m)^hit rate (\S+ %)", reported),
        (r"<dt>hit rate</dt><dd>(\S+ %)<", html),
        (rf">{capacity:,}</td><td[^>]*>(\S+ %)</td><td[^>]*>counted<", html),
    )
    found = [re.search(pattern, text) for pattern, text in patterns]
    return [each[1] if each is not None else "not there" for each in found]


@pytest.mark.parametrize("capacity", [512 * pages for pages in (1, 2, 3, 4, 5, 8, 64)])
def test_a_report_states_the_hit_rate_of_the_replay(tmp_path: Path, capacity: int) -> None:
    trace = write_trace(tmp_path, [*PROMPTS, *PROMPTS[:3], PROMPTS[-1], *PROMPTS[3:], PROMPTS[-1]])

    (rate, *others) = rates(trace, tmp_path, capacity)

    assert re.fullmatch(r"\d+\.\d\d %", rate)
    assert others == [rate] * 3


@pytest.mark.timeout(900)
@pytest.mark.trace
@pytest.mark.parametrize(
    "capacity", [2_048, 16_384, 131_072, 512_000, 1_024_000, 2_048_000, 4_096_000, 8_192_000, 16_384_000]
)
def test_a_report_of_the_conversation_trace_states_the_hit_rate_of_the_replay(tmp_path: Path, capacity: int) -> None:
    (rate, *others) = rates(Path(os.environ["RAYDIX_TRACE"]), tmp_path, capacity)

    assert re.fullmatch(r"\d+\.\d\d %", rate)
    assert others == [rate] * 3


def test_replay_and_report_have_the_same_defaults(tmp_path: Path) -> None:
    trace = write_trace(tmp_path)

    first, *_ = run_json("replay", trace)
    told = run_json("report", trace, "-o", tmp_path / "page.html")

    assert (first["capacity"], first["hit_rate_percent"]) == (
        told["report"]["stats"]["num_slots"],
        told["hit_rate_percent"],
    )
    line = {"timestamp": 0, "input_length": 30, "output_length": 0, "hash_ids": [1, 2], "block_size": 16}
    trace.write_text(f"{json.dumps(line)}\n" * 2)
    (row,) = run_json("replay", trace, "--capacity", 64)
    told = run_json("report", trace, "--capacity", 64, "-o", tmp_path / "page.html")
    assert row["page_size"] == 16
    assert row["reused_tokens"] == told["report"]["stats"]["tokens_reused"] == 16
    assert "in pages of 16" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_where_the_page_cannot_be_written_the_command_says_so(tmp_path: Path) -> None:
    out = tmp_path / "no" / "x.html"

    result = run("report", write_trace(tmp_path), "-o", out, "--capacity", 2048, exit_code=2)

    assert f"error: --out {out}: there is no folder {out.parent}\n  try: mkdir -p {out.parent}" in result.stderr


@pytest.mark.ray
def test_a_source_that_is_neither_a_cache_nor_a_file_is_named(busy: list[str]) -> None:
    result = run("report", "kv-9", *busy[1:], exit_code=3)

    assert "no cache named 'kv-9'" in result.stderr
    assert "there: kv-0" in result.stderr


@pytest.mark.parametrize("source", ["missing.jsonl", "no/trace"])
def test_a_file_that_is_not_there_is_no_name_of_a_cache(source: str) -> None:
    assert f"error: {source}: no such file" in run("report", source, exit_code=2).stderr
