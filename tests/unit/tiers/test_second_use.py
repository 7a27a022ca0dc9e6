"""`SecondUse` remembers used pages, and forgets those that were not used for the longest time."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from raydix.cache_core.tiers.second_use import SecondUse


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

    assert not uses.count(pages, salt=2).any()
    assert not uses.count(pages, salt=2**64 - 1).any()
    assert not uses.count(pages + 1, salt=0).any()
    assert uses.count(pages, salt=1).all()
    assert uses.count(pages, salt=2**64 + 2).all(), "a salt counts modulo 2**64"


def test_the_last_pages_are_known_four_times_as_many_as_the_tiers_hold() -> None:
    uses, pages = SecondUse(300), hashes(4_000)
    for request in np.split(pages, 40):
        uses.count(request)

    assert uses.count(pages[2_800:2_801]).all()
    assert not uses.count(pages[2_799:2_800]).any()


def test_pages_that_stay_in_use_are_never_forgotten() -> None:
    uses, hot = SecondUse(1_000), hashes(50, seed=1)
    uses.count(hot)

    for request in np.split(hashes(60_000), 20):
        assert uses.count(hot).all()
        uses.count(request)


def test_of_a_request_the_pages_that_others_are_below_are_known_longest() -> None:
    uses, pages = SecondUse(25), hashes(130)
    uses.count(pages)

    assert uses.count(pages).tolist() == [True] * 100 + [False] * 30


def test_an_array_may_be_a_part_of_another_one() -> None:
    uses, table = SecondUse(100), np.arange(40, dtype=np.int64).reshape(10, 4)
    column = table[:, 1]
    column.flags.writeable = False

    assert not uses.count(column).any()
    assert uses.count(np.arange(1, 40, 4)).all()


@pytest.mark.parametrize("num_pages", [50, 1_000])
def test_a_use_takes_at_most_16_bytes(num_pages: int) -> None:
    assert SecondUse(num_pages)._memory.num_bytes <= 4 * num_pages * 16


def test_it_needs_pages() -> None:
    with pytest.raises(ValueError, match="num_pages must be at least 1, not 0"):
        SecondUse(0)
