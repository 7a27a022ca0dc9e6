"""`DuePrefixes`: the order and the bounds of the prefixes that wait to be written."""

from __future__ import annotations

import pytest

from raydix.actors.tiers.disk import due_prefixes
from raydix.actors.tiers.disk.due_prefixes import DuePrefixes
from raydix.cache_core import RadixKey


def key(*tokens: int, namespace: str | None = None) -> RadixKey:
    return RadixKey(list(tokens), namespace)


def taken(due: DuePrefixes) -> list[list[int]]:
    """All prefixes, in the order in which they are taken."""
    found = []
    while (hottest := due.hottest()) is not None:
        due.take(hottest)
        found.append(list(hottest.token_ids))
    return found


def test_the_prefix_used_last_is_the_first_one() -> None:
    due = DuePrefixes()
    for prefix in (key(1), key(2), key(3), key(1)):
        assert due.offer(prefix) == 0

    assert [list(prefix.token_ids) for prefix in due] == [[2], [3], [1]]
    assert len(due) == 3
    assert taken(due) == [[1], [3], [2]]
    assert len(due) == 0


def test_namespaces_are_apart_and_are_forgotten() -> None:
    due = DuePrefixes()
    due.offer(key(1, namespace="a"))
    due.offer(key(1, namespace="b"))

    found = due.hottest()
    assert found is not None and found.extra_key == "b"
    assert list(due.namespaces) == ["a", "b"]
    due.forget(lambda extra_key: extra_key == "b")
    assert [prefix.extra_key for prefix in due] == ["a"]
    assert list(due.namespaces) == ["a"]


def test_too_many_prefixes_or_tokens_drop_those_not_used_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due_prefixes, "_MOST", 3)
    monkeypatch.setattr(due_prefixes, "_MOST_BYTES", 7 * len(key(1).data))
    due = DuePrefixes()
    for token in range(4):
        dropped = due.offer(key(token))

    assert dropped == 1
    assert due.offer(key(10, 11, 12, 13, 14, 15)) == 2
    assert due.offer(key(10, 11, 12, 13, 14, 15)) == 0
    assert taken(due) == [[10, 11, 12, 13, 14, 15], [3]]
    assert due.offer(key(*range(8))) == 1, "it alone is too long"
