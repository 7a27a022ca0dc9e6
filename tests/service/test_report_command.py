"""`raydix report` writes the page of a running cache, and of one that a trace is replayed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest
from command_line import run, run_json
from traces import EVICTED, PROMPT_TOKENS, PROMPTS, REUSED, write_trace

from raydix.actors import PrefixCacheClient, shutdown_cache, start_cache_async
from raydix.schemas import CacheConfig, GhostConfig, PoolConfig


@pytest.fixture(scope="module")
async def busy(ray_cluster: None) -> AsyncIterator[list[str]]:
    """How the command names a cache with 16 of its 64 slots in use."""
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
    for text in ("<h1>kv-0</h1>", "lora_id=a", "cached, evictable: 16", "Twice the pool would give +0.0 points"):
        assert text in html


def test_the_page_of_a_trace(tmp_path: Path) -> None:
    trace, out = write_trace(tmp_path), tmp_path / "trace.html"

    told = run_json("report", trace, "-o", out, "--capacity", 4 * 512)["report"]

    too_large = PROMPTS[-1][0]
    assert told["stats"]["tokens_requested"] == PROMPT_TOKENS - too_large
    assert (told["stats"]["tokens_reused"], told["stats"]["tokens_evicted"]) == (REUSED, EVICTED)
    assert [point["at_s"] for point in told["history"]] == [*range(len(PROMPTS)), len(PROMPTS) - 1]
    ages = {age["below_s"]: age["num_tokens"] for age in told["eviction_ages"] if age["num_tokens"]}
    assert ages == {3: 512, 10: 1024}  # page 3 after 1 s; pages 1 and 9 after 4 and 3 s
    assert (told["stats"]["exhausted"], told["stats"]["refusals"]) == (1, {"never_fits": 1})
    assert "Rates leave out what was refused for want of room: 1." in out.read_text(encoding="utf-8")
    assert "7 requests" not in out.read_text(encoding="utf-8")
    assert "<h1>trace.jsonl</h1>" in out.read_text(encoding="utf-8")


def test_where_the_page_cannot_be_written_the_command_says_so(tmp_path: Path) -> None:
    result = run("report", write_trace(tmp_path), "-o", tmp_path / "no" / "x.html", "--capacity", 2048, exit_code=2)

    assert "No such file" in result.stderr


@pytest.mark.ray
def test_what_is_neither_a_cache_nor_a_file_is_named(busy: list[str]) -> None:
    result = run("report", "kv-9", *busy[1:], exit_code=3)

    assert "no cache named 'kv-9'" in result.stderr
    assert "there: kv-0" in result.stderr


@pytest.mark.parametrize("source", ["missing.jsonl", "no/trace"])
def test_a_file_that_is_not_there_is_no_name_of_a_cache(source: str) -> None:
    assert f"error: {source}: no such file" in run("report", source, exit_code=2).stderr
