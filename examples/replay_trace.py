"""How much prefill would a cache of this size have saved? Replays real traffic against an index-only cache.

    python examples/replay_trace.py trace.jsonl --capacity 1024000 4096000 16384000 --plot hits.png

The trace is in the Mooncake format: one JSON object a line, with `timestamp` (ms), `input_length`, `output_length` and
`hash_ids`, one id for each block of 512 prompt tokens. Real ones, of an hour of chat each, are in the folder
FAST25-release/traces of https://github.com/kvcache-ai/Mooncake. The text was never published, so each id is expanded
to 512 token ids of its own; equal prefixes stay equal.

The cache is a Ray actor without tensors (`num_layers=0`), reached by `PrefixCacheClient` as a scheduler would reach it;
`--local` takes the same cache in this process, without Ray. Requests run one at a time, in the order of the file, and
outputs are not cached. A prompt larger than the whole cache counts as computed in full.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from matplotlib.figure import Figure
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError, model_validator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from raydix.actors import Lease, LocalPrefixCache, PrefixCacheClient, shutdown_cache, start_cache_async
from raydix.schemas import CacheConfig, CacheStats, EvictionConfig, PoolConfig, PoolExhausted

BLOCK = 512  # tokens a hash id stands for
DEFAULT_CAPACITIES = (1_024_000, 4_096_000, 16_384_000)


class TracedRequest(BaseModel):
    """One line of a trace."""

    timestamp: float = Field(ge=0, description="ms since the trace began")
    input_length: int = Field(gt=0, description="prompt tokens")
    output_length: int = Field(ge=0)
    hash_ids: list[int] = Field(description="one for each block of the prompt; equal ones stand for equal blocks")

    @model_validator(mode="after")
    def _blocks_cover_the_prompt(self) -> TracedRequest:
        needed = -(-self.input_length // BLOCK)
        if len(self.hash_ids) != needed:
            raise ValueError(f"{self.input_length} tokens need {needed} hash ids, not {len(self.hash_ids)}")
        if min(self.hash_ids) < 0:
            raise ValueError("hash ids must not be negative")
        return self

    def tokens(self) -> NDArray[np.uint32]:
        """The prompt: each hash id, as the seed of a SplitMix64 generator, gives the 512 tokens of its block."""
        seeds = np.array(self.hash_ids, np.uint64)[:, None] * np.uint64(BLOCK)
        mixed: NDArray[Any] = (seeds + np.arange(BLOCK, dtype=np.uint64)).reshape(-1)[: self.input_length]
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (mixed >> np.uint64(32)).astype(np.uint32)


def read_trace(path: Path, limit: int | None = None) -> list[TracedRequest]:
    """The first `limit` requests of a trace, or all.

    Raises:
        ValueError: a line is not in the format; the message names it and says what is wrong.
    """
    trace: list[TracedRequest] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if len(trace) == limit:
                break
            if line.strip():
                trace.append(_parse(line, f"{path}, line {number}"))
    if not trace:
        raise ValueError(f"{path}: no requests in it")
    return trace


def _parse(line: str, where: str) -> TracedRequest:
    try:
        return TracedRequest.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {field + ': ' if field else ''}{first['msg']}") from None


@dataclass
class Replay:
    """What one cache made of the trace."""

    capacity: int  # tokens
    reused: NDArray[np.int64]  # prompt tokens found in the cache, per request
    num_too_large: int  # prompts that no such cache can hold
    evicted: int  # tokens
    seconds: float


async def replay(client: PrefixCacheClient, trace: Sequence[TracedRequest], advance: Callable[[], Any]) -> Replay:
    """Send one prompt after the other through the cache.

    What ends a request is sent in one message with what begins the next, and the cache executes it first.
    """
    reused = np.zeros(len(trace), np.int64)
    num_too_large = 0
    publish: list[Coroutine[Any, Any, Any]] = []  # what is left to do for the request before
    started = time.perf_counter()
    for index, request in enumerate(trace):
        tokens = request.tokens()
        *_, lease = await asyncio.gather(*publish, acquire(client, tokens))
        if lease is None:
            num_too_large += 1
            publish = []
        else:
            reused[index] = lease.prefix_len
            publish = [lease.insert(tokens, release=True)]  # here a model would have computed the rest
        advance()
    await asyncio.gather(*publish)
    seconds = time.perf_counter() - started
    stats: CacheStats = await client.stats()
    return Replay(stats.num_slots, reused, num_too_large, stats.tokens_evicted, seconds)


async def acquire(client: PrefixCacheClient, tokens: NDArray[np.uint32]) -> Lease | None:
    """A lease for a prompt; None if it is larger than the whole cache."""
    try:
        return await client.acquire(tokens)
    except PoolExhausted as error:
        if error.can_ever_fit:
            raise
        return None


@asynccontextmanager
async def running_cache(config: CacheConfig, local: bool) -> AsyncIterator[PrefixCacheClient]:
    """A client of a fresh cache, which ends with it."""
    if local:
        async with LocalPrefixCache(config) as cache, PrefixCacheClient(cache) as client:
            yield client
    else:
        actor = await start_cache_async(config)
        async with PrefixCacheClient(actor, owner="replay_trace") as client:
            yield client
        await asyncio.to_thread(shutdown_cache, actor)


async def replay_all(
    trace: Sequence[TracedRequest], configs: Sequence[CacheConfig], local: bool, console: Console
) -> list[Replay]:
    """Replay the trace against one cache after the other."""
    columns = (TextColumn("{task.description:>20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    replays = []
    with Progress(*columns, console=console) as progress:
        for config in configs:
            task = progress.add_task(f"{config.pool.num_slots:,} tokens", total=len(trace))
            async with running_cache(config, local) as client:
                replays.append(await replay(client, trace, partial(progress.advance, task)))
    return replays


def config_of(capacity: int, args: argparse.Namespace) -> CacheConfig:
    """An index-only cache of so many tokens."""
    high = args.high_watermark
    eviction = EvictionConfig(high_watermark=high, low_watermark=min(0.8, high * 0.9))
    return CacheConfig(
        page_size=args.page_size, pool=PoolConfig(num_slots=capacity, num_layers=0, device="cpu"), eviction=eviction
    )


def summary(result: Replay, trace: Sequence[TracedRequest]) -> dict[str, float]:
    """The figures of one replay."""
    prompt_tokens = sum(request.input_length for request in trace)
    reused_tokens = int(result.reused.sum())
    return {
        "capacity": result.capacity,
        "requests": len(trace),
        "too_large": result.num_too_large,
        "prompt_tokens": prompt_tokens,
        "reused_tokens": reused_tokens,
        "hit_rate_percent": 100 * reused_tokens / prompt_tokens,
        "evicted_tokens": result.evicted,
        "seconds": result.seconds,
        "requests_per_s": len(trace) / result.seconds,
    }


def table_of(rows: Sequence[dict[str, float]]) -> Table:
    """The closing table: a column for each capacity."""
    table = Table(title="hit rate = reused prompt tokens / prompt tokens", show_header=False)
    table.add_column(style="bold")
    for name in rows[0]:
        values = (row[name] for row in rows)
        label = name.replace("_percent", ", %").replace("_per_s", " / s").replace("_", " ")
        table.add_row(label, *(f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" for value in values))
    return table


def plot(path: Path, replays: Sequence[Replay], trace: Sequence[TracedRequest]) -> None:
    """Draw the hit rate against capacity, and over the time of the trace."""
    prompt = np.array([request.input_length for request in trace], np.float64)
    minutes = np.array([request.timestamp for request in trace]) / 60_000
    window = np.minimum((minutes / max(minutes.max(), 1e-9) * 60).astype(np.int64), 59)  # 60 equal ones
    present = np.unique(window)
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    by_capacity, over_time = figure.subplots(1, 2)
    ordered = sorted(replays, key=lambda each: each.capacity)
    rates = [100 * each.reused.sum() / prompt.sum() for each in ordered]
    by_capacity.semilogx([each.capacity for each in ordered], rates, marker="o")
    by_capacity.set(xlabel="capacity, tokens", ylabel="hit rate, %", title="Hit rate against capacity", ylim=0)
    for each in ordered:
        reused = np.bincount(window, weights=each.reused)[present]
        rate = 100 * reused / np.bincount(window, weights=prompt)[present]
        over_time.plot((present + 0.5) / 60 * minutes.max(), rate, label=f"{each.capacity:,} tokens")
    over_time.set(xlabel="time in the trace, minutes", ylabel="hit rate, %", title="Hit rate over time", ylim=0)
    over_time.legend()
    for axes in (by_capacity, over_time):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?", default=os.environ.get("RAYDIX_TRACE"), help="or RAYDIX_TRACE")
    parser.add_argument("--capacity", type=int, nargs="+", default=DEFAULT_CAPACITIES, metavar="TOKENS")
    parser.add_argument("--page-size", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--high-watermark", type=float, default=1.0, help="of background eviction; 1.0: off (default)")
    parser.add_argument("--limit", type=int, metavar="N", help="replay the first N requests only")
    parser.add_argument("--local", action="store_true", help="without Ray")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table's figures there, too")
    args = parser.parse_args()
    if args.trace is None:
        parser.error("give the path of a trace, or set RAYDIX_TRACE")
    return args


def main() -> None:
    """Replay, then say what came out."""
    args = arguments()
    try:
        trace = read_trace(Path(args.trace), args.limit)
        configs = [config_of(capacity, args) for capacity in args.capacity]
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    console = Console()
    if not args.local:
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    replays = asyncio.run(replay_all(trace, configs, args.local, console))
    rows = [summary(each, trace) for each in replays]
    console.print(table_of(rows))
    if args.plot:
        plot(args.plot, replays, trace)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
