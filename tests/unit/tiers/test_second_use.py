"""`SecondUse` remembers used pages, forgets the oldest ones, and errs as rarely as its filters should."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest
from numpy.typing import NDArray

from raydix.cache_core.tiers.second_use import BITS_PER_PAGE, NUM_PROBES, SecondUse


def hashes(number: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(-(2**63), 2**63, number)


def test_a_page_is_known_from_its_second_use_on() -> None:
    uses, pages = SecondUse(100), hashes(40)

    assert not uses.count(pages).any()
    assert uses.count(pages).all()
    assert uses.count(np.concatenate((hashes(3, seed=1), pages[:3]))).tolist() == [False] * 3 + [True] * 3


def test_a_page_that_is_given_twice_in_a_call_was_not_used_before() -> None:
    uses, page = SecondUse(100), hashes(1)

    assert uses.count(np.repeat(page, 5)).tolist() == [False] * 5
    assert uses.count(page).all()


def test_a_request_without_pages_counts_nothing() -> None:
    uses = SecondUse(1)

    assert uses.count(np.empty(0, np.int64)).shape == (0,)
    assert not uses.count(hashes(1)).any()


def test_uses_under_other_weights_do_not_count() -> None:
    uses, pages = SecondUse(1000), hashes(400)
    uses.count(pages, salt=1)

    assert uses.count(pages, salt=2).mean() < 0.02
    assert uses.count(pages, salt=2**64 + 3).mean() < 0.02
    assert uses.count(pages, salt=1).all()


def test_the_oldest_pages_are_forgotten_and_later_ones_are_not() -> None:
    uses = SecondUse(3_000)
    kept = uses.filter_pages
    pages = hashes(4 * kept)
    for request in np.split(pages, 4 * kept // 100):
        uses.count(request)

    assert uses.count(pages[-kept:]).all(), "a page is remembered for the next `filter_pages` pages"
    uses = SecondUse(3_000)
    for request in np.split(pages, 4 * kept // 100):
        uses.count(request)
    assert uses.count(pages[: kept // 2]).mean() < 0.02, "a page is forgotten after twice as many"


def test_pages_that_stay_in_use_are_never_forgotten() -> None:
    uses, hot = SecondUse(1_000), hashes(50, seed=1)
    uses.count(hot)

    for request in np.split(hashes(60_000), 60):
        assert uses.count(hot).all()
        uses.count(request)


def test_it_remembers_four_times_its_pages_on_average() -> None:
    uses = SecondUse(1_500)

    # With a full older filter, the newer one is half full on average.
    assert 1.5 * uses.filter_pages == pytest.approx(4 * 1_500, rel=0.01)
    assert uses.num_bytes == pytest.approx(2 * uses.filter_pages * BITS_PER_PAGE / 8, rel=0.01)


def test_a_call_with_more_pages_than_a_filter_takes_fills_no_filter_twice() -> None:
    uses, pages = SecondUse(300), hashes(10_000)
    uses.count(pages)

    assert uses.count(pages[-uses.filter_pages :]).all()
    uses = SecondUse(300)
    uses.count(pages)
    assert uses.count(hashes(20_000, seed=1)).mean() < 0.01


@pytest.mark.parametrize("seed", range(2))
def test_unknown_pages_are_taken_for_known_as_rarely_as_theory_says(seed: int) -> None:
    uses = SecondUse(30_000)
    uses.count(hashes(uses.filter_pages - 1, seed))  # one filter, nearly full

    assert uses.count(hashes(100, seed)).all()
    filled = 1 - exp(-NUM_PROBES / BITS_PER_PAGE)
    expected = filled**NUM_PROBES
    asked = 200_000
    found = np.count_nonzero(uses.count(hashes(asked, seed + 100)))  # all are compared with the filter before the call

    assert expected < 0.0011
    assert found == pytest.approx(asked * expected, abs=5 * (asked * expected) ** 0.5)


def test_close_numbers_are_as_good_as_digests() -> None:
    """Hashes of a client may be small numbers."""
    uses = SecondUse(10_000)
    uses.count(np.arange(10_000))

    assert uses.count(np.arange(20_000, 30_000)).mean() < 0.01


def test_clear_forgets_all() -> None:
    uses, pages = SecondUse(10), hashes(100)
    uses.count(pages)
    uses.clear()

    assert not uses.count(pages[-10:]).any()


def test_it_needs_pages() -> None:
    with pytest.raises(ValueError, match="num_pages must be at least 1, not 0"):
        SecondUse(0)
