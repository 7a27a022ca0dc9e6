"""On an hour of real traffic, the ghost of one run gives the hit rates of larger pools."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from raydix.actors.observe.ghost import Ghost
from raydix.actors.observe.trace import read_trace
from raydix.actors.service.core_factory import build_core
from raydix.cache_core import RadixKey
from raydix.schemas import CacheConfig, EvictionConfig, GhostConfig, PoolConfig

NUM_SLOTS = 1_024_000
FACTORS = (2, 4)


def config_of(num_slots: int) -> CacheConfig:
    pool = PoolConfig(num_slots=num_slots, device="cpu")
    return CacheConfig(page_size=512, pool=pool, eviction=EvictionConfig(high_watermark=1.0))


def hit_rate(num_slots: int, prompts: Sequence[RadixKey], ghost: Ghost | None = None) -> float:
    core, _ = build_core(config_of(num_slots), None, lambda: None)
    if ghost is not None:
        core.observers.append(ghost.curve)
    for place, key in enumerate(prompts):
        core.acquire(str(place), "session", key)
        core.insert(str(place), "session", len(key), key[:0])
        core.release(str(place), "session")
    return core.counters.tokens_reused / core.counters.tokens_requested


@pytest.mark.trace
def test_a_run_with_a_million_tokens_gives_the_hit_rates_with_two_and_four() -> None:
    prompts = [RadixKey(each.tokens()) for each in read_trace(Path(os.environ["RAYDIX_TRACE"]))]
    ghost = Ghost(config_of(NUM_SLOTS), GhostConfig())

    now = hit_rate(NUM_SLOTS, prompts, ghost)

    assert ghost.curve.hit_rates([NUM_SLOTS]) == pytest.approx([now], abs=0.01)
    told = ghost.stats(now)
    for factor in FACTORS:
        assert told.hit_rate_at(factor * NUM_SLOTS) == pytest.approx(hit_rate(factor * NUM_SLOTS, prompts), abs=0.01)
