"""Many conversations, several model workers, one prefix cache: what sharing saves, and that it changes no answer.

    python examples/multi_request.py                # what `make demo` runs
    python examples/multi_request.py --conversations 48 --workers 4 --pool-tokens 16384

A Ray actor owns the cache and its KV, in shared memory. Each worker, an actor too, runs a Llama-like model of random
weights, the same in all of them. Conversations begin with one of a few system prompts, some far more popular than
others. Each turn goes to a worker drawn at random, so what is reused is mostly another worker's work. The pool is
smaller than what the conversations would like to keep, so the cache has to evict.

Then the same conversations run once more with every prompt computed from scratch. The two runs must give the same
answers, token by token. The time to first token counts from the moment a worker begins to serve a request: waiting for
a busy worker is left out, waiting for the cache is not.

Ends with a table, and with exit status 1 if the cache did not keep one of its promises (`broken_promises`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from raydix.actors import PrefixCacheClient, shutdown_cache, start_cache_async
from raydix.actors.transformers_worker import Generation, TransformersWorker, pool_config_for
from raydix.schemas import CacheConfig, CacheStats

PAGE_SIZE = 16
VOCABULARY = 4096
MODEL = {  # 15 million parameters: one core prefills 1,000 tokens in about half a second
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "initializer_range": 0.05,  # larger than usual, so that an answer depends on all of its prompt
}


@dataclass(frozen=True)
class Conversation:
    """What a user will say, and who will answer: drawn beforehand, so that every run is the same."""

    system_prompt: NDArray[np.int64]
    is_first: bool  # of those with this system prompt
    messages: NDArray[np.int64]  # [turns, message_len]
    workers: NDArray[np.int64]  # [turns], which one


def draw_conversations(args: argparse.Namespace) -> list[Conversation]:
    """The workload, the same for equal arguments."""
    rng = np.random.default_rng(args.seed)
    system_prompts = rng.integers(0, VOCABULARY, (args.system_prompts, args.system_prompt_len))
    popularity = 1 / np.arange(1, args.system_prompts + 1)  # Zipf's law
    chosen = rng.choice(args.system_prompts, args.conversations, p=popularity / popularity.sum())
    return [
        Conversation(
            system_prompt=system_prompts[which],
            is_first=which not in chosen[:index],
            messages=rng.integers(0, VOCABULARY, (args.turns, args.message_len)),
            workers=rng.integers(0, args.workers, args.turns),
        )
        for index, which in enumerate(chosen)
    ]


def wanted_slots(conversations: list[Conversation], answer_len: int) -> int:
    """Slots that would keep every conversation to its end, with each system prompt once."""
    shared = sum(len(each.system_prompt) for each in conversations if each.is_first)
    return shared + sum(each.messages.size + len(each.messages) * answer_len for each in conversations)


@dataclass
class Turn:
    """One request, as it was served."""

    prompt_len: int
    answer: Generation
    shares_prefix: bool  # with an earlier one: False for the very first use of a system prompt


@dataclass
class Run:
    """All conversations, served once."""

    turns: dict[tuple[int, int], Turn] = field(default_factory=dict)  # by conversation and turn
    seconds: float = 0.0
    peak_slots: int = 0  # most slots in use, as seen after each turn
    peak_waiters: int = 0  # most acquires that waited for room, likewise

    def prompt_tokens(self) -> int:
        """Tokens of all prompts so far."""
        return sum(turn.prompt_len for turn in self.turns.values())

    def reused_tokens(self) -> int:
        """Of those, the ones whose KV was in the cache."""
        return sum(turn.answer.prefix_len for turn in self.turns.values())

    def hit_rate(self) -> float:
        """Reused tokens as a share of the prompts'."""
        return self.reused_tokens() / self.prompt_tokens()

    def first_token_ms(self) -> NDArray[np.float64]:
        """Times to first token of the turns that share a prefix with an earlier one."""
        times = [turn.answer.time_to_first_token_s for turn in self.turns.values() if turn.shares_prefix]
        return 1000 * np.array(times)

    def note_pool(self, stats: CacheStats) -> None:
        """See how full the pool is."""
        self.peak_slots = max(self.peak_slots, stats.num_slots - stats.free_slots)
        self.peak_waiters = max(self.peak_waiters, stats.waiters)


class Workers:
    """The model workers of one cache. Each serves one request at a time; the others stand in line for it."""

    def __init__(self, cache: Any, args: argparse.Namespace) -> None:
        start: Any = ray.remote(TransformersWorker).options(num_cpus=1)
        options = {"model": MODEL, "seed": args.seed, "dtype": "float32", "device": "cpu", "num_threads": 1}
        self.actors = [start.remote(cache, owner=f"worker {number}", **options) for number in range(args.workers)]
        self._lines = [asyncio.Semaphore(1) for _ in self.actors]
        self._answer_len = args.answer_len

    async def generate(self, worker: int, prompt: NDArray[np.int64], reuse: bool) -> Generation:
        """Have one of them continue a prompt."""
        async with self._lines[worker]:
            answer: Generation = await self.actors[worker].generate.remote(prompt, self._answer_len, reuse=reuse)
        return answer


async def serve(
    conversations: list[Conversation], workers: Workers, client: PrefixCacheClient, reuse: bool, progress: Progress
) -> Run:
    """Hold all conversations at once: in each, a turn follows when the one before is answered."""
    run = Run()
    bar = progress.add_task("", total=sum(len(each.messages) for each in conversations))

    async def hold(index: int, conversation: Conversation) -> None:
        history = conversation.system_prompt
        for number, (message, worker) in enumerate(zip(conversation.messages, conversation.workers, strict=True)):
            prompt = np.concatenate((history, message))
            answer = await workers.generate(worker, prompt, reuse)
            history = np.concatenate((prompt, answer.token_ids))
            run.turns[index, number] = Turn(len(prompt), answer, number > 0 or not conversation.is_first)
            run.note_pool(await client.stats())
            name = f"cache {'on' if reuse else 'off'}, hit rate {run.hit_rate():.0%}"
            progress.update(bar, description=name, completed=len(run.turns))

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for index, conversation in enumerate(conversations):
            group.create_task(hold(index, conversation))
    run.seconds = time.perf_counter() - started
    return run


async def demonstrate(args: argparse.Namespace) -> dict[str, Any]:
    """Serve the conversations with the cache, then without; returns the figures."""
    conversations = draw_conversations(args)
    pool = pool_config_for(MODEL, args.pool_tokens, dtype="float32", device="cpu")
    cache = await start_cache_async(CacheConfig(page_size=PAGE_SIZE, pool=pool))
    workers = Workers(cache, args)
    columns = (TextColumn("{task.description:23}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        loading = progress.add_task("workers load the model", total=None)
        await asyncio.gather(*(actor.open.remote() for actor in workers.actors))
        progress.remove_task(loading)
        async with PrefixCacheClient(cache) as client:
            on = await serve(conversations, workers, client, True, progress)
            await client.check_invariants()
            stats = await client.stats()
            off = await serve(conversations, workers, client, False, progress)
    await asyncio.to_thread(shutdown_cache, cache)
    return summary(on, off, stats) | {"wanted_slots": wanted_slots(conversations, args.answer_len)}


def summary(on: Run, off: Run, stats: CacheStats) -> dict[str, Any]:
    """The figures. Times to first token are those of the turns that share a prefix with an earlier one."""
    ms_on, ms_off = on.first_token_ms(), off.first_token_ms()
    return {
        "turns": len(on.turns),
        "identical_turns": sum(on.turns[key].answer.token_ids == off.turns[key].answer.token_ids for key in on.turns),
        "shared_prefix_turns": len(ms_on),
        "hit_rate": on.hit_rate(),
        "prompt_tokens": on.prompt_tokens(),
        "reused_tokens": on.reused_tokens(),
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


def _spread(values: NDArray[np.float64]) -> dict[str, float]:
    p50, p95 = np.percentile(values, (50, 95))
    return {"mean": float(values.mean()), "p50": float(p50), "p95": float(p95)}


def broken_promises(figures: dict[str, Any]) -> list[str]:
    """What the cache should have done and did not."""
    promises = {
        "hit rate above 60 %": figures["hit_rate"] > 0.6,
        "first token at least 3x sooner": figures["first_token_speedup"] >= 3,
        "greedy answers identical with and without the cache": figures["identical_turns"] == figures["turns"],
    }
    return [promise for promise, kept in promises.items() if not kept]


def table_of(f: dict[str, Any]) -> Table:
    """The closing table."""
    table = Table("", "cache on", "cache off", title=f"{f['turns']} turns, served twice")
    table.add_row("hit rate", f"{f['hit_rate']:.1%}", "0.0%")
    table.add_row("prompt tokens requested", f"{f['prompt_tokens']:,}", f"{f['prompt_tokens']:,}")
    table.add_row("prompt tokens reused", f"{f['reused_tokens']:,}", "0")
    table.add_row("prompt tokens computed", f"{f['computed_tokens']:,}", f"{f['prompt_tokens']:,}")
    for name, on_ms in f["first_token_ms_on"].items():
        table.add_row(f"time to first token, {name} *", f"{on_ms:,.0f} ms", f"{f['first_token_ms_off'][name]:,.0f} ms")
    table.add_row("... sooner by (mean)", f"{f['first_token_speedup']:.1f}x", "")
    table.add_row("all turns took", f"{f['seconds_on']:.1f} s", f"{f['seconds_off']:.1f} s")
    identical = "yes" if f["identical_turns"] == f["turns"] else "NO"
    table.add_row("greedy answers identical", f"{identical}, {f['identical_turns']} of {f['turns']}", end_section=True)
    table.add_row("tokens evicted (by the task)", f"{f['evicted_tokens']:,} ({f['evicted_by_task']:,})")
    table.add_row("pool (wanted by the load)", f"{f['pool_slots']:,} ({f['wanted_slots']:,}) slots")
    table.add_row("pool in use, at most **", f"{f['peak_slots'] / f['pool_slots']:.0%}")
    table.add_row("acquires that waited at once **", f"{f['peak_waiters']:,} of {f['acquires']:,}")
    table.add_row("acquires refused", f"{f['acquires_refused']:,}")
    shared = f"* the {f['shared_prefix_turns']} turns that share a prefix with an earlier one"
    table.caption = f"{shared}\n** seen after each turn"
    return table


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=28)
    parser.add_argument("--turns", type=int, default=4, help="of each conversation")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--system-prompts", type=int, default=3)
    parser.add_argument("--system-prompt-len", type=int, default=1000, metavar="TOKENS")
    parser.add_argument("--message-len", type=int, default=48, metavar="TOKENS", help="of what a user says in a turn")
    parser.add_argument("--answer-len", type=int, default=16, metavar="TOKENS")
    parser.add_argument("--pool-tokens", type=int, default=7168, help=f"size of the pool, a multiple of {PAGE_SIZE}")
    # With seed 0 no token is chosen by less than 1e-4. Rounding, which depends on what was reused, is below 1e-5.
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    longest = args.system_prompt_len + args.turns * (args.message_len + args.answer_len)
    if args.pool_tokens % PAGE_SIZE or args.pool_tokens < longest:
        parser.error(f"--pool-tokens must be a multiple of {PAGE_SIZE}, and at least {longest} for one conversation")
    return args


def main() -> None:
    """Serve, then say what came out."""
    args = arguments()
    ray.init("local", num_cpus=args.workers, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    figures = asyncio.run(demonstrate(args))
    Console().print(table_of(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))
    if broken := broken_promises(figures):
        sys.exit(f"not kept: {'; '.join(broken)}")


if __name__ == "__main__":
    main()
