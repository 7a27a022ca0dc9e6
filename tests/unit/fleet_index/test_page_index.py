"""`PageIndex`: columns, batches by number, snapshots, promises and lookups, on small cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raydix.cache_core import Applied, PageIndex

STORED, REMOVED, CLEARED, PENDING, NOT_PENDING, NOTE = range(6)


def pages(*hashes: int) -> Any:
    return np.array(hashes, np.int64)


def apply(index: PageIndex, column: int, epoch: str, seq: int, *events: tuple[int, list[int]]) -> Applied:
    """Apply a batch of (kind, pages)."""
    kinds = bytes([kind for kind, _ in events])
    counts = np.array([len(of) for _, of in events], np.int32)
    return index.apply(column, epoch, seq, kinds, counts, pages(*[page for _, of in events for page in of]))


@pytest.fixture
def index() -> PageIndex:
    return PageIndex()


def test_a_run_ends_at_the_first_page_that_a_cache_lacks(index: PageIndex) -> None:
    a, b, c = (index.add_column() for _ in range(3))
    index.apply_snapshot(a, "e", 0, pages(1, 2, 3, 5))
    index.apply_snapshot(b, "e", 0, pages(1, 3))
    index.apply_snapshot(c, "e", 0, pages(2, 3))

    assert sorted(index.prefix_runs(pages(1, 2, 3, 4, 5))) == [(a, 3, 3), (b, 1, 1)]
    assert index.prefix_runs(pages(9)) == index.prefix_runs(pages()) == []
    index.check_invariants()


def test_pending_and_promised_pages_lengthen_the_expected_run_alone(index: PageIndex) -> None:
    column = index.add_column()
    index.apply_snapshot(column, "e", 0, pages(1, 4), pages(2))
    index.promise(column, pages(3))

    assert index.prefix_runs(pages(1, 2, 3, 4, 5)) == [(column, 1, 4)]
    assert index.prefix_runs(pages(2, 3)) == [(column, 0, 2)]
    assert index.holders(2) == {column: {"pending"}}
    assert index.pages(column) == ({1, 4}, {2}, {3})
    index.check_invariants()


def test_the_longest_runs_come_first_and_the_offset_chooses_among_equals(index: PageIndex) -> None:
    columns = [index.add_column() for _ in range(6)]
    for column in columns:
        index.apply_snapshot(column, "e", 0, pages(1))
    index.apply_snapshot(columns[3], "e", 0, pages(1, 2, 3))
    index.apply_snapshot(columns[5], "e", 0, pages(1, 2))

    best = [index.longest_runs(pages(1, 2, 3), 3, offset) for offset in range(60)]

    assert all(runs[:2] == [(columns[3], 3, 3), (columns[5], 2, 2)] for runs in best)
    assert {runs[2] for runs in best} == {(column, 1, 1) for column in columns} - {
        (columns[3], 1, 1),
        (columns[5], 1, 1),
    }
    assert sorted(index.longest_runs(pages(1), 9)) == sorted(index.prefix_runs(pages(1)))
    assert index.longest_runs(pages(1), 0) == []
    index.check_invariants()


def test_batches_are_applied_once_and_in_order(index: PageIndex) -> None:
    column = index.add_column()

    assert apply(index, column, "e", 2, (STORED, [1, 2]), (PENDING, [3])) is Applied.DONE
    assert apply(index, column, "e", 2, (REMOVED, [1]), (NOT_PENDING, [3])) is Applied.OLD
    assert apply(index, column, "e", 4, (NOTE, [])) is Applied.NEEDS_SNAPSHOT
    assert apply(index, column, "f", 3, (REMOVED, [1])) is Applied.NEEDS_SNAPSHOT
    assert index.pages(column) == ({1, 2}, {3}, set())
    assert index.position(column) == ("e", 2)

    assert apply(index, column, "e", 4, (REMOVED, [2]), (NOTE, []), (STORED, [3]), (NOT_PENDING, [3])) is Applied.DONE
    assert index.pages(column) == ({1, 2, 3}, set(), set())
    index.check_invariants()


def test_an_empty_batch_changes_nothing(index: PageIndex) -> None:
    column = index.add_column()
    assert apply(index, column, "e", 1) is Applied.NEEDS_SNAPSHOT
    index.apply_snapshot(column, "e", 3, pages(1))

    assert apply(index, column, "e", 3) is Applied.OLD
    assert apply(index, column, "e", 4) is Applied.NEEDS_SNAPSHOT
    assert index.position(column) == ("e", 3)


def test_a_clear_removes_stored_and_pending_pages_and_keeps_promises(index: PageIndex) -> None:
    column, other = index.add_column(), index.add_column()
    index.apply_snapshot(column, "e", 0, pages(1, 2), pages(3))
    index.apply_snapshot(other, "e", 0, pages(1))
    index.promise(column, pages(4))

    assert apply(index, column, "e", 3, (STORED, [5]), (CLEARED, []), (STORED, [6])) is Applied.DONE

    assert index.pages(column) == ({6}, set(), {4})
    assert index.pages(other)[0] == {1}
    index.check_invariants()


def test_a_snapshot_replaces_a_column_unless_it_is_older(index: PageIndex) -> None:
    column = index.add_column()
    index.apply_snapshot(column, "e", 5, pages(1, 2), pages(3))
    index.promise(column, pages(8))

    assert not index.apply_snapshot(column, "e", 4, pages(7))
    assert index.apply_snapshot(column, "e", 5, pages(1, 4))
    assert index.pages(column) == ({1, 4}, set(), {8})
    assert index.apply_snapshot(column, "f", 1, pages(9))
    assert index.pages(column) == ({9}, set(), set())
    assert index.position(column) == ("f", 1)
    index.check_invariants()


def test_a_dropped_column_is_gone_and_its_number_is_given_again(index: PageIndex) -> None:
    a, b = index.add_column(), index.add_column()
    for column in (a, b):
        index.apply_snapshot(column, "e", 0, pages(1, 2))

    index.drop_column(a)

    assert index.prefix_runs(pages(1, 2)) == [(b, 2, 2)]
    assert (index.num_columns, index.num_pages(), index.num_pages(b)) == (1, 2, 2)
    with pytest.raises(ValueError, match="not dropped"):
        index.position(a)
    assert index.add_column() == a
    assert index.position(a) == (None, 0)
    assert index.num_pages(a) == 0
    index.check_invariants()


def test_promises_are_counted(index: PageIndex) -> None:
    column = index.add_column()
    index.promise(column, pages(1, 2))
    index.promise(column, pages(2))

    index.withdraw(column, pages(1, 2, 3))
    assert index.pages(column)[2] == {2}
    index.withdraw(column, pages(2, 2))
    assert index.num_pages() == 0
    index.check_invariants()


def test_dead_pages_are_removed_as_others_come(index: PageIndex) -> None:
    column = index.add_column()
    rng = np.random.default_rng(1)
    for seq in range(60):
        index.apply_snapshot(column, "e", seq, rng.integers(-(2**63), 2**63 - 1, 2000, np.int64))

    assert index.num_pages() == 2000
    assert index.num_bytes < 600_000  # 60 snapshots would take 60 * 36 KB and more
    index.check_invariants()


@pytest.mark.parametrize("page", [0, -1, 2**63 - 1, -(2**63)])
def test_any_integer_of_64_bits_names_a_page(index: PageIndex, page: int) -> None:
    a, b = index.add_column(), index.add_column()
    for column in (a, b):
        index.apply_snapshot(column, "e", 0, pages(page))

    assert sorted(index.prefix_runs(pages(page, page))) == [(a, 2, 2), (b, 2, 2)]
    assert apply(index, a, "e", 1, (REMOVED, [page])) is Applied.DONE
    assert index.prefix_runs(pages(page)) == [(b, 1, 1)]
    index.check_invariants()


@pytest.mark.parametrize(
    ("kinds", "counts", "hashes"),
    [
        (b"\0", [2], pages(1)),
        (b"\0", [0], pages(1)),
        (b"\0\0", [1], pages(1)),
        (b"\0\0", [2, -1], pages(1)),
        (b"\x08", [1], pages(1)),
        (b"\0", [1], np.array([1], np.int32)),
        (b"\0", [1], np.array([[1]], np.int64)),
        (b"\0", [1], [1]),
    ],
)
def test_a_batch_that_does_not_fit_together_changes_nothing(
    index: PageIndex, kinds: bytes, counts: list[int], hashes: Any
) -> None:
    column = index.add_column()
    index.apply_snapshot(column, "e", 0, pages(7))

    with pytest.raises(ValueError):
        index.apply(column, "e", len(kinds), kinds, np.array(counts, np.int32), hashes)

    assert index.position(column) == ("e", 0)
    assert index.pages(column)[0] == {7}
    index.check_invariants()


@pytest.mark.parametrize("wrong", [-1, 1, 100])
def test_a_column_that_is_none_is_refused(index: PageIndex, wrong: int) -> None:
    index.add_column()

    for call in (
        lambda: index.drop_column(wrong),
        lambda: index.apply_snapshot(wrong, "e", 0, pages(1)),
        lambda: index.promise(wrong, pages(1)),
        lambda: apply(index, wrong, "e", 1, (STORED, [1])),
    ):
        with pytest.raises(ValueError, match="number of a column"):
            call()
    index.check_invariants()


def test_a_page_has_its_memory_and_no_more(index: PageIndex) -> None:
    rng = np.random.default_rng(2)
    columns = [index.add_column() for _ in range(8)]
    for column in columns:
        index.apply_snapshot(column, "e", 0, rng.integers(-(2**63), 2**63 - 1, 8_000, np.int64))

    assert index.num_bytes / index.num_pages() <= 64
