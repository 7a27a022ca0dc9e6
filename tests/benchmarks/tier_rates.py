"""Hit rates of a pool and its host tier on recorded traffic, against those of an independent simulation.

RAYDIX_TRACE names the conversation trace; those of agents and tools are looked for in its folder. The shipped service
replays them on index-only pools, where moves take no time. It evicts and writes the shortfall alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure
from support.models.sample_trace import beside_trace

from raydix.actors.observe.trace import BLOCK, read_trace
from raydix.actors.replay.trace_replay import index_config, replay
from raydix.schemas import HostConfig

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


def figures(quick: bool) -> list[Figure]:
    """Return the rate of each trace that is there, size of the host tier and policy."""
    return list(_figures(quick)) if os.environ.get("RAYDIX_TRACE") else []


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
            host = HostConfig.model_validate({"num_slots": blocks * BLOCK, "policy": policy})
            run = asyncio.run(replay(trace, index_config(DEVICE_BLOCKS * BLOCK, host=host)))
            rate = run.figures()["hit_rate_percent"]
            yield Figure(
                "tiers",
                f"{name}: hits of {DEVICE_BLOCKS:,} blocks, {blocks:,} on the host, {policy}",
                rate,
                "%",
                abs(rate - reference),
                f"points off {reference:.2f}",
                at_most=WITHIN[policy],
                gate=WITHIN[policy],
            )
