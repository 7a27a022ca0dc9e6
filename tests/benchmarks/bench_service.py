"""Measure how fast a cache actor serves whole requests, against Ray's fastest operation: a call that does nothing.

    python -m benchmarks.bench_service [--quick] [--json FILE]

in the tests' folder prints, for prompts of 1,024 new tokens: the rates by the number of coroutines that share one
client, and of several processes; the latency of an acquire, alone, among others and under pressure; and how long
eviction and retirement of a large tree block the cache's loop. `raydix` must be installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import service_latency, service_stalls
from benchmarks.service_rates import by_concurrency, by_processes

from raydix.actors import shutdown_cache, start_cache
from raydix.schemas import CacheConfig, PoolConfig

CONFIG = CacheConfig(page_size=16, pool=PoolConfig(num_slots=2**19, device="cpu"))  # under pressure after 460 prompts
NEXT_PAGE_OF = (1_008, 100_000)  # tokens of the prompts; whole pages


@dataclass(frozen=True)
class Scale:
    """The size of the measurements."""

    concurrencies: tuple[int, ...] = (1, 8, 64, 256)
    processes: tuple[int, ...] = (1, 2, 4)
    rounds: int = 7
    cycles: int = 1500  # of a round
    each: int = 4000  # cycles of each process in a round
    samples: int = 500  # of a latency
    nodes: int = 1_000_000  # to evict
    tokens: int = 1_000_000  # to retire


QUICK = Scale(rounds=3, cycles=600, each=1500, samples=200, nodes=100_000, tokens=200_000)
TINY = Scale((1, 8), (1, 2), 1, 16, 128, 10, 2_000, 20_480)


def figures(scale: Scale) -> dict[str, Any]:
    """Return all figures as plain numbers. Ray must run; the caches started here are stopped."""
    actor = start_cache(CONFIG)
    calm = start_cache(CONFIG.model_copy(update={"pool": _large_enough(scale.cycles)}))
    rounds = scale.rounds
    try:
        return {
            "throughput": asyncio.run(by_concurrency(actor, scale.concurrencies, rounds, scale.cycles)),
            "processes": by_processes(actor, scale.processes, rounds, scale.each),
            "latency": [asyncio.run(service_latency.among(actor, others, scale.samples)) for others in (0, 16)],
            "next_page": asyncio.run(service_latency.next_pages(actor, NEXT_PAGE_OF, scale.samples)),
            "pressure": asyncio.run(service_latency.under_pressure(calm, actor, rounds, 16, scale.cycles)),
            "stalls": {
                "eviction": asyncio.run(service_stalls.of_eviction(scale.nodes)),
                "retirement": asyncio.run(service_stalls.of_retirement(scale.tokens)),
            },
        }
    finally:
        shutdown_cache(actor)
        shutdown_cache(calm)


def _large_enough(num_prompts: int) -> PoolConfig:
    """Return a pool that this many prompts do not bring under pressure."""
    return PoolConfig(num_slots=2 * 1024 * num_prompts, device="cpu")


def lines(measured: dict[str, Any]) -> list[str]:
    """Return the figures as tables."""
    text = ["a second, in brackets in the time of one no-op call; prompts of 1,024 fresh tokens"]
    text.append(f"{'coroutines':>10} {'no-op calls':>12} {'whole requests':>20} {'release apart':>20} {'a batch':>8}")
    for row in measured["throughput"]:
        whole = f"{row['cycles']:,.0f} ({row['cycles_per_noop']:.2f})"
        apart = f"{row['apart']:,.0f} ({row['apart_per_noop']:.2f})"
        text.append(f"{row['coroutines']:>10} {row['noops']:>12,.0f} {whole:>20} {apart:>20} {row['batch']:>8.1f}")
    text += [
        f"{row['processes']} client processes: {row['cycles']:,.0f} ({row['per_one']:.2f} of one)"
        for row in measured["processes"]
    ]
    for row in measured["latency"]:
        acquire, noop = row["acquire"], row["noop"]
        text.append(
            f"acquire among {row['others']} others: p50 {acquire['p50_ms']:.2f}, p99 {acquire['p99_ms']:.2f} ms; "
            f"no-op call {noop['p50_ms']:.2f}, {noop['p99_ms']:.2f} ms; p50 in no-ops {row['p50_per_noop']:.2f}"
        )
    published = measured["next_page"]
    short, long = published["lengths"]
    text.append(
        f"one more page of a prompt of {long:,} tokens: p50 {published['long']['p50_ms']:.3f} ms; of one of {short:,} "
        f"{published['short']['p50_ms']:.3f} ms: {published['ratio']:.2f} times"
    )
    pressure = measured["pressure"]
    text.append(
        f"p99 of acquire while evicting {pressure['pressed_p99_ms']:.2f} ms, without {pressure['calm_p99_ms']:.2f} ms: "
        f"{pressure['ratio']:.2f} times"
    )
    for name, held in measured["stalls"].items():
        what = f"{held['nodes']:,} nodes evicted" if name == "eviction" else f"{held['tokens']:,} tokens retired"
        text.append(
            f"{what} in {held['seconds']:.2f} s: loop held p50 {held['p50_ms']:.2f}, p99 {held['p99_ms']:.2f}, "
            f"at most {held['max_ms']:.2f} ms (by the wall {held['wall_p99_ms']:.2f}, {held['wall_max_ms']:.2f})"
        )
    return text


def main() -> None:
    """Measure on a cluster of this machine."""
    import ray

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    arguments = parser.parse_args()
    ray.init(
        "local", num_cpus=2, num_gpus=0, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False
    )
    measured = figures(QUICK if arguments.quick else Scale())
    ray.shutdown()
    print("\n".join(lines(measured)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
