"""Hit rates of a pool and the tiers below it on recorded traffic, against those of an independent simulation.

RAYDIX_TRACE names the conversation trace; those of agents and tools are looked for in its folder. The shipped service
replays them on index-only pools, where moves take no time. It evicts and writes the shortfall alone. The simulation's
memory of uses is endless; a disk tier remembers 4 times the pages of all tiers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure
from support.models.sample_trace import beside_trace

from raydix.actors.observe.trace import BLOCK, TracedRequest, read_trace
from raydix.actors.replay.instant_tiers import TierConfigs
from raydix.actors.replay.trace_replay import Replay, index_config, index_disk, replay
from raydix.schemas import DiskConfig, HostConfig

DEVICE_BLOCKS = 1_000
HOST_BLOCKS = (2_000, 4_000, 8_000, 16_000)
RATES = {  # (trace, the host tier's policy) -> percent of the prompt tokens, by HOST_BLOCKS
    ("conversation", "lru"): (6.75, 11.80, 20.11, 27.84),
    ("conversation", "2q"): (9.17, 13.70, 21.70, 28.66),
    ("toolmix", "lru"): (32.34, 35.46, 41.26, 46.61),
    ("toolmix", "2q"): (34.04, 37.10, 42.32, 47.31),
    ("agentsyn", "lru"): (58.31, 76.82, 90.12, 94.79),
    ("agentsyn", "2q"): (58.55, 76.60, 89.90, 94.72),
}
WITHIN = {"lru": 0.3, "2q": 0.5}  # points
DISK_BLOCKS, ABOVE_DISK = 32_000, 8_000
DISK_RATES = {"second_use": (28.71, 3.67), "all": (35.85, 14.0)}  # `admit` -> percent, and blocks written a request
DISK_WITHIN = {"second_use": 0.5, "all": 0.3}  # points
WRITTEN_WITHIN = 0.5  # blocks a request


def figures(quick: bool) -> list[Figure]:
    """Return the rate of each trace that is there, size of the host tier and policy; then those with a disk."""
    return [*_figures(quick), *_disk_figures(quick)] if os.environ.get("RAYDIX_TRACE") else []


def _figures(quick: bool) -> Iterator[Figure]:
    """Yield the figures; a quick run replays the conversation trace at one size."""
    for (name, policy), rates in RATES.items():
        path = Path(os.environ["RAYDIX_TRACE"]) if name == "conversation" else beside_trace(name)
        if path is None or (quick and name != "conversation"):
            continue
        trace = read_trace(path)
        for blocks, reference in zip(HOST_BLOCKS, rates, strict=True):
            if quick and blocks != 4_000:
                continue
            rate = _replayed(trace, blocks, policy).figures()["hit_rate_percent"]
            what = f"{name}: hits of {DEVICE_BLOCKS:,} blocks, {blocks:,} on the host, {policy}"
            yield _figure(what, rate, "%", "points", reference, WITHIN[policy])


def _disk_figures(quick: bool) -> Iterator[Figure]:
    """Yield the figures of a disk below the host tier, with the conversation trace; a quick run has one rule."""
    trace = read_trace(Path(os.environ["RAYDIX_TRACE"]))
    for admit, (rate, written) in DISK_RATES.items():
        if quick and admit != "second_use":
            continue
        found = _replayed(trace, ABOVE_DISK, "lru", index_disk(DISK_BLOCKS * BLOCK, admit)).figures()
        what = f"{ABOVE_DISK:,} blocks on the host, {DISK_BLOCKS:,} on the disk, {admit}"
        yield _figure(f"hits: {what}", found["hit_rate_percent"], "%", "points", rate, DISK_WITHIN[admit])
        pages = found["disk"]["written_pages_per_request"]
        yield _figure(f"written: {what}", pages, "a request", "blocks", written, WRITTEN_WITHIN)


def _replayed(trace: list[TracedRequest], host_blocks: int, host_policy: str, disk: DiskConfig | None = None) -> Replay:
    host = HostConfig.model_validate({"num_slots": host_blocks * BLOCK, "policy": host_policy})
    return asyncio.run(replay(trace, index_config(DEVICE_BLOCKS * BLOCK), TierConfigs(host, disk)))


def _figure(what: str, value: float, unit: str, noun: str, reference: float, within: float) -> Figure:
    """Return a figure that must lie within a distance of its reference."""
    to = f"{noun} off {reference:.2f}"
    return Figure("tiers", what, value, unit, abs(value - reference), to, at_most=within, gate=within)
