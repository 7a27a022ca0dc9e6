"""`LeaseTable`: a session sees its own leases, and no others."""

import numpy as np
import pytest

from raydix.cache_core import RadixKey, UnknownLeaseError
from raydix.cache_core.leases.lease_table import LeaseRecord, LeaseTable


def lease(lease_id: str, session_id: str) -> LeaseRecord:
    starts = np.array([10, 12, 14])
    return LeaseRecord(lease_id, session_id, RadixKey([1, 2, 3]), None, None, 2, starts, 1, 5)


@pytest.fixture
def table() -> LeaseTable:
    """Leases l1 and l2 of session a, l3 of session b."""
    table = LeaseTable()
    for lease_id, session_id in (("l1", "a"), ("l2", "a"), ("l3", "b")):
        table.add(lease(lease_id, session_id))
    return table


def test_the_pages_after_the_published_ones_are_private() -> None:
    record = lease("l1", "a")
    assert record.private_starts.tolist() == [12, 14]

    record.num_published_pages = 3

    assert record.private_starts.tolist() == []


def test_a_lease_that_grows_by_pages_is_not_copied_for_each() -> None:
    record, copies = lease("l1", "a"), 0
    for start in range(16, 2000, 2):
        before = record.starts
        record.add_pages(np.array([start]))
        copies += not np.shares_memory(before, record.starts)

    assert copies < 40
    assert record.starts.tolist() == list(range(10, 2000, 2))


def test_a_lease_keeps_the_prompt_it_was_granted_for() -> None:
    ids = np.array([1, 2, 3], np.int32)
    record = LeaseRecord("l1", "a", RadixKey(ids), None, None, 2, np.array([10, 12]), 1, 5)

    ids[:] = 9

    assert record.key.token_ids == [1, 2, 3]


def test_an_open_lease_is_found_by_its_session(table: LeaseTable) -> None:
    assert table.get("l1", "a").lease_id == "l1"
    assert table.find("l3", "b") is table.get("l3", "b")


def test_a_lease_that_was_never_made_is_unknown(table: LeaseTable) -> None:
    assert table.find("l9", "a") is None
    with pytest.raises(UnknownLeaseError, match="never granted"):
        table.get("l9", "a")


@pytest.mark.parametrize("session_id", ["b", "c", ""])
def test_another_sessions_lease_is_refused(table: LeaseTable, session_id: str) -> None:
    for look_up in (table.find, table.get):
        with pytest.raises(UnknownLeaseError, match="another session"):
            look_up("l1", session_id)


def test_leases_are_counted_and_listed_in_the_order_of_their_opening(table: LeaseTable) -> None:
    assert len(table) == 3
    assert [each.lease_id for each in table] == ["l1", "l2", "l3"]
    assert [each.lease_id for each in table.of_session("a")] == ["l1", "l2"]
    assert table.of_session("c") == []


def test_a_closed_lease_is_unknown(table: LeaseTable) -> None:
    table.remove(table.get("l1", "a"))

    assert table.find("l1", "a") is None
    assert [each.lease_id for each in table.of_session("a")] == ["l2"]
    assert len(table) == 2


def test_an_id_can_be_used_again_by_anyone_once_its_lease_has_closed(table: LeaseTable) -> None:
    table.remove(table.get("l1", "a"))

    table.add(lease("l1", "b"))

    assert table.get("l1", "b").session_id == "b"


def test_an_open_id_cannot_be_opened_again(table: LeaseTable) -> None:
    with pytest.raises(AssertionError, match="open already"):
        table.add(lease("l1", "b"))

    assert table.get("l1", "a").session_id == "a"
    assert table.of_session("b") == [table.get("l3", "b")]


def test_a_session_without_leases_leaves_nothing_behind(table: LeaseTable) -> None:
    for record in list(table):
        table.remove(record)

    assert len(table) == 0
    assert table._by_session == {}
