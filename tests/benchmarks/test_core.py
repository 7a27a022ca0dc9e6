"""The core's benchmark runs whole, and the memory of a token is bounded. `make bench` judges the times."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.bench_core import KINDS, rows_of
from benchmarks.core_figures import GATES
from benchmarks.core_runs import MATCH, PHASES, CoreRun, Rounds, measure_memory
from benchmarks.core_workloads import WORKLOADS


@pytest.mark.benchmark
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks={"traced": [pytest.mark.trace], "short": []}.get(name, [pytest.mark.more]))
        for name in GATES
    ],
)
def test_a_workload_is_measured_in_every_form(name: str) -> None:
    rows = list(rows_of(name, 0.02, 1))

    assert [(row.page_size, row.form) for row in rows] == list(KINDS)
    assert all(row.hit_tokens > 0 and row.total > 0 for row in rows)
    assert rows[0].hit_tokens == rows[1].hit_tokens, "hits must not depend on the form"


def test_windows_are_measured_with_less_room_than_they_want() -> None:
    run = CoreRun(WORKLOADS["chat"](0.1), 16, "numpy", window=256, window_share=2)

    run.run()

    run.check()
    assert run.cache.swa_evictable_size() < run.cache.evictable_size(), "windows must be evicted"
    assert sum(run.hits) > 0


@pytest.mark.parametrize(("page_size", "most"), [(1, 16), (16, 8)])
def test_a_token_takes_a_few_bytes(page_size: int, most: int) -> None:
    held, num_tokens, num_nodes = measure_memory(WORKLOADS["chat"](0.05), page_size)

    print(f"\npages of {page_size}: {held / num_tokens:.1f} bytes a token, {held / num_nodes:,.0f} a node")
    assert held <= most * num_tokens


def test_occasional_work_of_a_cache_counts_whichever_requests_it_hits() -> None:
    rounds = Rounds()
    for at in range(3):
        times = np.full((100, len(PHASES)), 1_000)
        times[10 * at : 10 * at + 2, MATCH] = 1_000_000  # ns: a stall of two requests in a hundred
        rounds.add(times, [])

    assert rounds.percentile(99, MATCH) > 900
    assert rounds.mean(MATCH) == pytest.approx(0.98 * 1 + 0.02 * 1_000)


def test_a_disturbance_of_one_round_does_not_count() -> None:
    rounds = Rounds()
    for ns in (1_000, 1_000_000, 1_000):
        rounds.add(np.full((100, len(PHASES)), ns), [])

    assert rounds.percentile(99, MATCH) == rounds.mean(MATCH) == 1
    assert rounds.mean() == len(PHASES)
