"""`LeaseSlots`: updates of a lease's slots, in any order."""

from __future__ import annotations

import numpy as np
import pytest

from raydix.actors.client.lease_slots import LeaseSlots


def packed(*starts: int) -> bytes:
    return np.array(starts, "<i4").tobytes()


@pytest.fixture
def slots() -> LeaseSlots:
    """Three pages of two, the last of which is covered in half."""
    return LeaseSlots(packed(2, 4, 6), packed(12, 14, 16), num_slots=5, run_len=2)


def test_each_token_has_its_slots(slots: LeaseSlots) -> None:
    assert slots.all_slots().tolist() == [2, 3, 4, 5, 6]
    assert slots.window_slots().tolist() == [12, 13, 14, 15, 16]


def test_pages_are_repointed_where_they_are_told_to_be(slots: LeaseSlots) -> None:
    slots.all_slots()

    slots.repoint(2, packed(20))

    assert slots.all_slots().tolist() == [2, 3, 20, 21, 6]


def test_what_is_told_twice_or_late_changes_nothing(slots: LeaseSlots) -> None:
    slots.repoint(0, packed(20, 22))
    slots.repoint(0, packed(20))

    assert slots.all_slots().tolist() == [20, 21, 22, 23, 6]


def test_growth_adds_to_what_was_known_when_it_was_asked_for(slots: LeaseSlots) -> None:
    slots.add_runs(1, 3, packed(8), packed(12, 14, 16, 18), num_slots=8)

    assert slots.all_slots().tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert slots.window_slots().tolist() == [12, 13, 14, 15, 16, 17, 18, 19]


def test_growth_again_after_one_that_was_given_up_takes_its_pages(slots: LeaseSlots) -> None:
    slots.add_runs(1, 3, packed(8, 10), packed(12, 14, 16, 18, 20), num_slots=7)

    assert slots.num_slots == 7
    assert slots.all_slots().tolist() == [2, 3, 4, 5, 6, 7, 8]


def test_a_window_given_up_while_the_lease_stood_in_line_stays_given_up(slots: LeaseSlots) -> None:
    slots.set_window(2, packed(0, 0, 16))

    slots.add_runs(1, 3, packed(8), packed(12, 14, 16, 18), num_slots=8)

    assert slots.window_slots().tolist() == [0, 0, 0, 0, 16, 17, 18, 19]


def test_a_window_of_before_the_lease_grew_leaves_what_came_later(slots: LeaseSlots) -> None:
    slots.add_runs(1, 3, packed(8), packed(12, 14, 16, 18), num_slots=8)

    slots.set_window(2, packed(0, 0, 16))

    assert slots.window_slots().tolist() == [0, 0, 0, 0, 16, 17, 18, 19]


def test_a_window_told_late_does_not_come_back(slots: LeaseSlots) -> None:
    slots.set_window(2, packed(0, 0, 16))

    slots.set_window(1, packed(0, 14, 16))

    assert slots.window_slots().tolist() == [0, 0, 0, 0, 16]


def test_growth_tells_anew_of_pages_that_are_in_doubt(slots: LeaseSlots) -> None:
    slots.add_runs(1, slots.count_runs(2), packed(20, 6, 8), packed(12, 24, 16, 18), num_slots=8)

    assert slots.all_slots().tolist() == [2, 3, 20, 21, 6, 7, 8, 9]
    assert slots.window_slots().tolist() == [12, 13, 24, 25, 16, 17, 18, 19]


def test_pages_repointed_while_the_lease_stood_in_line_stay_so(slots: LeaseSlots) -> None:
    slots.repoint(0, packed(20, 22))
    slots.add_runs(1, 1, packed(4, 6, 8), packed(12, 14, 16, 18), num_slots=8)
    assert slots.all_slots().tolist() == [20, 21, 22, 23, 6, 7, 8, 9]


def test_the_last_tokens_are_told_alone(slots: LeaseSlots) -> None:
    assert [slots.last_slots(number).tolist() for number in (1, 2, 3, 5)] == [[6], [5, 6], [4, 5, 6], [2, 3, 4, 5, 6]]


def test_a_lease_that_grows_by_pages_is_not_copied_for_each(slots: LeaseSlots) -> None:
    copies = 0
    for page in range(3, 1000):
        before = slots.starts
        slots.add_runs(page, page, packed(2 + 2 * page), b"", num_slots=2 * page + 2)
        copies += not np.shares_memory(before, slots.starts)

    assert copies < 40
    assert slots.all_slots().tolist() == list(range(2, 2002))
