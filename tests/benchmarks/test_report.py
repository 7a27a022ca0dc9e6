"""A report of a cache of a million nodes takes no longer than one of an empty cache."""

from __future__ import annotations

import os
import time

import pytest

from raydix.actors.report.page import render
from raydix.actors.service.cache_service import CacheService
from raydix.cache_core import RadixKey
from raydix.schemas import CacheConfig, PoolConfig

GATED = "RAYDIX_BENCH_GATE" in os.environ  # set by `make bench`: elsewhere the figures are printed, not judged
NUM_NODES = 1_000_000 if GATED else 10_000
MAX_S = 3.0
_FAN_OUT = 1_000


@pytest.mark.benchmark
@pytest.mark.parametrize("num_nodes", [0, NUM_NODES])
def test_a_report_is_made_soon(num_nodes: int) -> None:
    config = CacheConfig(pool=PoolConfig(num_slots=4 * NUM_NODES, device="cpu"))
    service = CacheService(config, "epoch")
    for number in range(num_nodes):
        key = RadixKey([number // _FAN_OUT, number % _FAN_OUT, 0])
        service.core.acquire(f"{number}", "session", key)
        service.core.insert(f"{number}", "session", 3, key[:0])
        service.core.release(f"{number}", "session")

    started = time.perf_counter()
    report = service.report()
    gathered_s = time.perf_counter() - started
    html = render(report, config, "kv-0")
    seconds = time.perf_counter() - started

    print(
        f"\n{num_nodes:,} nodes: gathered in {1000 * gathered_s:.1f} ms, drawn in {seconds:.2f} s, {len(html):,} bytes"
    )
    assert len(html) < 1_000_000
    assert seconds < MAX_S or not GATED
