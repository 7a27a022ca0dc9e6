"""Eviction's benchmark finds its victims in every kind of tree. `make bench` judges the times."""

from __future__ import annotations

import pytest
from benchmarks.bench_eviction import KINDS, SLICE, heading, line, measure_sizes

SIZES = (1_000, 4_000)
NUM_CALLS = 2


@pytest.mark.long
@pytest.mark.benchmark
@pytest.mark.parametrize("kind", KINDS)
def test_every_call_evicts_a_whole_slice(kind: str) -> None:
    measured = measure_sizes(kind, SIZES, NUM_CALLS)

    print(f"\n{heading(SIZES)}\n{line(kind, measured, len(SIZES))}")
    assert [each.num_nodes for each in measured] == list(SIZES)
    for each in measured:
        assert each.victims == (SLICE,) * (1 + NUM_CALLS)
