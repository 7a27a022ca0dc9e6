"""Recorded requests on a virtual clock: pages, times and copies."""

from __future__ import annotations

import numpy as np
import pytest

from raydix.actors.observe.trace import TracedRequest
from raydix.actors.replay.arrivals import Arrivals


def traced(time_ms: float, length: int, ids: list[int]) -> TracedRequest:
    return TracedRequest(timestamp=time_ms, input_length=length, output_length=1, hash_ids=ids)


TRACE = [traced(0, 1100, [0, 1, 2]), traced(0, 1024, [0, 3]), traced(3000, 1030, [5, 1, 8]), traced(6000, 100, [4])]


def test_equal_prefixes_are_equal_pages_and_partial_blocks_are_none() -> None:
    arrivals = Arrivals(TRACE)

    each = list(arrivals.each(arrivals.times_s(0)))
    pages = [arrival.pages for arrival in each]

    assert [arrival.hashes.tolist() for arrival in each] == pages
    assert pages == [[0, 1], [0, 2], [3, 4], []]  # block 1 after block 5 is another page than after block 0
    assert (arrivals.tokens, len(arrivals), arrivals.page_size) == (1100 + 1024 + 1030 + 100, 4, 512)


def test_times_are_spread_over_the_rounding_step_in_order() -> None:
    arrivals = Arrivals(TRACE)

    (times,), (others,) = arrivals.times_s(0), arrivals.times_s(1)

    assert arrivals.rounding_s == 3
    for start, time in zip((0, 0, 3, 6), times, strict=True):
        assert start <= time < start + 3
    assert (np.diff(times) >= 0).all() and times.tolist() != others.tolist()
    assert times.tolist() == arrivals.times_s(0)[0].tolist()


def test_copies_have_pages_of_their_own_and_come_at_the_same_time() -> None:
    arrivals = Arrivals(TRACE, copies=3)

    each = list(arrivals.each(arrivals.times_s(4)))

    assert [arrival.number for arrival in each] == list(range(12)) == list(range(len(arrivals)))
    assert [arrival.time_s for arrival in each] == sorted(arrival.time_s for arrival in each)
    firsts = sorted(arrival.pages[0] for arrival in each if arrival.tokens == 1100)
    assert firsts == [0, 5, 10]
    assert arrivals.tokens == 3 * Arrivals(TRACE).tokens


def test_a_trace_of_one_request_and_an_empty_one() -> None:
    alone = Arrivals(TRACE[:1])

    assert [each.pages for each in alone.each(alone.times_s(0))] == [[0, 1]]
    with pytest.raises(ValueError, match="a trace of at least 1 request"):
        Arrivals([])
