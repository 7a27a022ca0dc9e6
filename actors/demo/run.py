"""The demo: many conversations and workers on one prefix cache; the savings, and a check of every answer.

A Ray actor owns the cache and its KV, in shared memory. Each worker is an actor with the same random Llama-like model.
Conversations begin with one of a few system prompts, and some prompts are far more popular than others. Each
turn goes to a worker drawn at random, so most reused KV comes from another worker. The pool is smaller than all
all conversations together, so the cache must evict. With a tier in host memory, evicted KV is loaded from there. With a
tier on a disk, a second run with the same folder begins with the KV of the first.

Then the same conversations run again, with every prompt computed from scratch. The two runs must give the same answers,
token by token. The time to first token starts when a worker begins to serve a request. It includes the wait for the
cache, and leaves out the wait for a busy worker.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from raydix.actors.client.prefix_cache_client import PrefixCacheClient
from raydix.actors.cluster.deploy import shutdown_cache, start_cache_async
from raydix.actors.demo.earlier_run import CACHE, EarlierRun
from raydix.actors.demo.workload import (
    LONG_LOAD,
    MAX_POSITIONS,
    PAGE_SIZE,
    VOCABULARY,
    Conversation,
    Workload,
    draw_conversations,
    wanted_slots,
)
from raydix.actors.huggingface.worker import Generation, TransformersWorker, pool_config_for
from raydix.schemas import CacheConfig, CacheStats, CacheUnavailable, HostConfig
from raydix.schemas.shown import percent

MODEL = {  # 15 million parameters: one core prefills 1,000 tokens in about half a second
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.05,  # larger than usual, so that an answer depends on all of its prompt
    "eos_token_id": None,  # random weights would generate it by chance
}
WARM_SHARE = 0.8  # of the last hit rate before a restart, which the first one after it must reach
_POLL_S = 0.05
_EDGE = 4  # the first and the last hit rate are those of a quarter of the turns


@dataclass
class Turn:
    """A served request."""

    prompt_len: int
    answer: Generation
    shares_prefix: bool  # an earlier request begins alike; False for the first use of a system prompt


@dataclass
class Run:
    """The results of all conversations, served once."""

    turns: dict[tuple[int, int], Turn] = field(default_factory=dict)  # (conversation, turn) -> result
    seconds: float = 0.0
    peak_slots: int = 0  # most slots in use after any turn
    peak_waiters: int = 0  # most waiting acquires after any turn

    def prompt_tokens(self) -> int:
        """Return the tokens of all prompts so far."""
        return sum(turn.prompt_len for turn in self.turns.values())

    def reused_tokens(self) -> int:
        """Return the prompt tokens with cached KV so far."""
        return sum(turn.answer.prefix_len for turn in self.turns.values())

    def loaded_tokens(self) -> int:
        """Return the reused tokens so far that were loaded from host memory or a disk."""
        return sum(turn.answer.loaded_len for turn in self.turns.values())

    def hit_rate(self) -> float:
        """Return the share of reused tokens."""
        return _hit_rate(self.turns.values())

    def edges(self) -> tuple[int, float, float]:
        """Return a number of turns, and the hit rates of so many that ended first, and last."""
        turns, number = list(self.turns.values()), max(1, len(self.turns) // _EDGE)
        return number, _hit_rate(turns[:number]), _hit_rate(turns[-number:])

    def digest(self) -> str:
        """Return a digest of all answers."""
        answers = [(key, self.turns[key].answer.token_ids) for key in sorted(self.turns)]
        return hashlib.sha256(repr(answers).encode()).hexdigest()

    def first_token_ms(self) -> NDArray[np.float64]:
        """Return the times to first token of the turns that share a prefix with an earlier one."""
        times = [turn.answer.time_to_first_token_s for turn in self.turns.values() if turn.shares_prefix]
        return 1000 * np.array(times)

    def first_token_ms_of(self, keys: Sequence[tuple[int, int]]) -> float:
        """Return the median time to first token of these turns."""
        return 1000 * float(np.median([self.turns[key].answer.time_to_first_token_s for key in keys]))

    def note_pool(self, stats: CacheStats) -> None:
        """Update the peaks."""
        self.peak_slots = max(self.peak_slots, stats.num_slots - stats.free_slots)
        self.peak_waiters = max(self.peak_waiters, stats.waiters)


def _hit_rate(turns: Iterable[Turn]) -> float:
    """Return the share of reused prompt tokens."""
    reused, asked = np.sum([(turn.answer.prefix_len, turn.prompt_len) for turn in turns], axis=0)
    return float(reused / asked)


class Workers:
    """The model workers of one cache. Each serves one request at a time; other requests wait in its queue."""

    def __init__(self, cache: Any, load: Workload) -> None:
        start: Any = ray.remote(TransformersWorker).options(num_cpus=1)
        options = {"model": MODEL, "seed": load.seed, "dtype": "float32", "device": "cpu", "num_threads": 1}
        self.actors = [start.remote(cache, owner=f"worker {number}", **options) for number in range(load.workers)]
        self._lines = [asyncio.Semaphore(1) for _ in self.actors]
        self._answer_len = load.answer_len

    async def generate(self, worker: int, prompt: NDArray[np.int64], reuse: bool) -> Generation:
        """Continue a prompt on a worker."""
        async with self._lines[worker]:
            answer: Generation = await self.actors[worker].generate.remote(prompt, self._answer_len, reuse=reuse)
        return answer


async def serve(
    conversations: Sequence[Conversation],
    generate: Callable[[int, NDArray[np.int64]], Awaitable[Generation]],
    note: Callable[[Run], Awaitable[None]],
    progress: Progress,
    name: str,
) -> Run:
    """Serve all conversations concurrently; each sends its next turn after the last answer.

    Args:
        generate: continues a prompt, on the worker of that number.
        note: called after each turn.
        progress: shows `name`, the turns and the hit rate.
    """
    run = Run()
    bar = progress.add_task("", total=sum(len(conversation.messages) for conversation in conversations))

    async def hold(index: int, conversation: Conversation) -> None:
        history = conversation.system_prompt
        for number, (message, worker) in enumerate(zip(conversation.messages, conversation.workers, strict=True)):
            prompt = np.concatenate((history, message))
            answer = await generate(worker, prompt)
            history = np.concatenate((prompt, answer.token_ids))
            run.turns[index, number] = Turn(len(prompt), answer, number > 0 or not conversation.is_first)
            await note(run)
            progress.update(bar, description=f"{name}, hit rate {percent(run.hit_rate(), 0)}", completed=len(run.turns))

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for index, conversation in enumerate(conversations):
            group.create_task(hold(index, conversation))
    run.seconds = time.perf_counter() - started
    return run


def progress_on(console: Console) -> Progress:
    """Return a progress display for `serve`."""
    columns = (TextColumn("{task.description:25}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


async def demonstrate(load: Workload, console: Console) -> dict[str, Any]:
    """Serve the conversations with the cache, then without, and return the figures. The console shows progress."""
    conversations = draw_conversations(load)
    pool = pool_config_for(MODEL, load.pool_tokens, dtype="float32", device="cpu")
    host = HostConfig(num_slots=load.host_tokens) if load.host_tokens else None
    config = CacheConfig(page_size=PAGE_SIZE, pool=pool, host=host, disk=load.disk)
    before = EarlierRun.of(load)
    cache = await start_cache_async(config, name=CACHE if load.disk else None)
    workers = Workers(cache, load)
    with progress_on(console) as progress:
        loading = progress.add_task("workers load the model", total=None)
        await asyncio.gather(*(actor.open.remote() for actor in workers.actors))
        progress.remove_task(loading)
        async with PrefixCacheClient(cache) as client:
            if load.disk is not None:
                await _until_disk_is_open(client)

            async def note(run: Run) -> None:
                run.note_pool(await client.stats())

            on = await serve(conversations, partial(workers.generate, reuse=True), note, progress, "cache on")
            await client.check_invariants()
            stats = await client.stats()
            off = await serve(conversations, partial(workers.generate, reuse=False), note, progress, "cache off")
    await asyncio.to_thread(shutdown_cache, cache)
    figures = summary(on, off, stats) | {"wanted_slots": wanted_slots(conversations, load.answer_len)}
    return figures if load.disk is None else figures | _restart(on, load, before)


async def _until_disk_is_open(client: PrefixCacheClient) -> None:
    """Wait for the tier on the disk.

    Raises:
        CacheUnavailable: it cannot be used, or another process uses it.
    """
    while (disk := (await client.stats()).disk) is not None and disk.state != "ready":
        if disk.state not in ("opening", "reading"):
            raise CacheUnavailable(f"the demo's disk is not ready: {disk.state}")
        await asyncio.sleep(_POLL_S)


def _restart(on: Run, load: Workload, before: EarlierRun | None) -> dict[str, Any]:
    """Return the figures of the first turns, and of the last before the restart. Keep those of this run."""
    number, first, last = on.edges()
    run = EarlierRun(last, on.digest())
    run.keep(load)
    figures = {"edge_turns": number, "first_hit_rate": first, "last_hit_rate": last}
    if before is None:
        return figures
    return figures | {"hit_rate_before": before.last_hit_rate, "same_as_before": run.answers == before.answers}


def summary(on: Run, off: Run, stats: CacheStats) -> dict[str, Any]:
    """Return the figures. Times to first token are of the turns that share a prefix with an earlier turn."""
    ms_on, ms_off = on.first_token_ms(), off.first_token_ms()
    figures = {
        "turns": len(on.turns),
        "identical_turns": sum(on.turns[key].answer.token_ids == off.turns[key].answer.token_ids for key in on.turns),
        "shared_prefix_turns": len(ms_on),
        "hit_rate": on.hit_rate(),
        "prompt_tokens": on.prompt_tokens(),
        "reused_tokens": on.reused_tokens(),
        "loaded_tokens": on.loaded_tokens(),
        "computed_tokens": on.prompt_tokens() - on.reused_tokens(),
        "first_token_ms_on": _spread(ms_on),
        "first_token_ms_off": _spread(ms_off),
        "first_token_speedup": float(ms_off.mean() / ms_on.mean()),
        "seconds_on": on.seconds,
        "seconds_off": off.seconds,
        "evicted_tokens": stats.tokens_evicted,
        "evicted_by_task": stats.eviction_task.tokens_evicted,
        "pool_slots": stats.num_slots,
        "peak_slots": on.peak_slots,
        "acquires": stats.acquires,
        "peak_waiters": on.peak_waiters,
        "acquires_refused": stats.exhausted,
    }
    if (host := stats.host) is not None:
        figures |= {
            "host_slots": host.slots.num_slots,
            "host_tokens_written": host.tokens_written,
            "host_tokens_dropped": host.tokens_dropped,
        }
    if (disk := stats.disk) is not None:
        figures |= {
            "disk_slots": disk.slots.num_slots,
            "disk_tokens_written": disk.tokens_written,
            "disk_tokens_loaded": disk.tokens_loaded,
        }
    return figures if host is None and disk is None else figures | _long_loads(on, off)


def _long_loads(on: Run, off: Run) -> dict[str, Any]:
    """Return the figures of the turns that loaded `LONG_LOAD` tokens or more."""
    long = [key for key, turn in on.turns.items() if turn.answer.loaded_len >= LONG_LOAD]
    return {
        "long_loads": len(long),
        "long_load_ms_on": on.first_token_ms_of(long) if long else None,
        "long_load_ms_off": off.first_token_ms_of(long) if long else None,
    }


def _spread(values: NDArray[np.float64]) -> dict[str, float]:
    p50, p95 = np.percentile(values, (50, 95))
    return {"mean": float(values.mean()), "p50": float(p50), "p95": float(p95)}


def broken_promises(figures: dict[str, Any], load: Workload) -> list[str]:
    """Return the broken promises. The minimum savings without loads apply to the default load alone."""
    promises = {"greedy answers identical with and without the cache": figures["identical_turns"] == figures["turns"]}
    if figures.get("long_loads"):
        half = figures["long_load_ms_on"] <= figures["long_load_ms_off"] / 2
        promises[f"first token of turns that load {LONG_LOAD} tokens or more at least 2x sooner"] = half
    if "hit_rate_before" in figures:
        is_warm = figures["first_hit_rate"] >= WARM_SHARE * figures["hit_rate_before"]
        promises |= {
            f"first hit rate after the restart at least {percent(WARM_SHARE, 0)} of the last before it": is_warm,
            "answers identical before and after the restart": figures["same_as_before"],
        }
    if load.is_default():
        promises |= {
            "hit rate above 60 %": figures["hit_rate"] > 0.6,
            "first token at least 3x sooner": figures["first_token_speedup"] >= 3,
        }
    return [promise for promise, kept in promises.items() if not kept]
