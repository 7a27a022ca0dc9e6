"""The core's benchmark runs whole, and what a token takes in memory. `make bench` judges the times."""

from __future__ import annotations

import pytest
from benchmarks.bench_core import KINDS, rows_of
from benchmarks.core_figures import GATES
from benchmarks.core_runs import measure_memory
from benchmarks.core_workloads import WORKLOADS


@pytest.mark.benchmark
@pytest.mark.parametrize("name", GATES)
def test_a_workload_is_measured_in_every_form(name: str) -> None:
    rows = list(rows_of(name, 0.02, 1))

    assert [(row.page_size, row.form) for row in rows] == list(KINDS)
    assert all(row.hit_tokens > 0 and row.total > 0 for row in rows)
    assert rows[0].hit_tokens == rows[1].hit_tokens, "what hits does not depend on the form"


@pytest.mark.parametrize(("page_size", "most"), [(1, 16), (16, 8)])
def test_a_token_takes_a_few_bytes(page_size: int, most: int) -> None:
    held, num_tokens, num_nodes = measure_memory(WORKLOADS["chat"](0.05), page_size)

    print(f"\npages of {page_size}: {held / num_tokens:.1f} bytes a token, {held / num_nodes:,.0f} a node")
    assert held <= most * num_tokens
