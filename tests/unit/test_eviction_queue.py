"""`EvictionQueue` and `SortedRuns` against sorted lists."""

from __future__ import annotations

from random import Random

import pytest

from raydix.cache_core import TreeNode, sorted_runs
from raydix.cache_core.eviction_queue import EvictionQueue
from raydix.cache_core.sorted_runs import SortedRuns
from raydix.cache_core.tree_node import Namespace

SPACE = Namespace(None, 0, 4, 4)


def node(number: int, stamp: int = 0) -> TreeNode:
    return TreeNode(number, None, SPACE, b"1234", None, 1, stamp)


def queue_of(*nodes: TreeNode) -> EvictionQueue:
    queue = EvictionQueue(lambda each: each.own_access_time)
    for each in nodes:
        queue.push(each)
    return queue


def drain(queue: EvictionQueue) -> list[int]:
    ids = []
    while (first := queue.pop()) is not None:
        ids.append(first.id)
    return ids


def test_the_lowest_rank_goes_first_and_of_equals_the_older_node() -> None:
    assert drain(queue_of(node(1, 5), node(2, 3), node(4, 5), node(3, 5))) == [2, 1, 3, 4]


def test_an_empty_queue_has_nothing_to_pop() -> None:
    queue = queue_of()
    assert queue.pop() is None
    queue.discard(node(1))
    queue.touch(node(1))
    assert len(queue) == 0


def test_a_touch_moves_a_node_to_where_it_belongs_now() -> None:
    first, second, third = node(1, 1), node(2, 2), node(3, 3)
    queue = queue_of(first, second, third)
    first.own_access_time = 4
    queue.touch(first)
    third.own_access_time = 0
    queue.touch(third)

    queue.check({first, second, third})
    assert drain(queue) == [3, 2, 1]


def test_what_was_discarded_can_come_again() -> None:
    first, second = node(1, 1), node(2, 2)
    queue = queue_of(first, second)
    queue.discard(first)
    assert first not in queue
    queue.push(first)

    assert drain(queue) == [1, 2]


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_keep_the_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_runs, "_LONGEST", 4)  # so that runs are cut
    rng = Random(seed)
    queue, inside = queue_of(), dict[int, TreeNode]()
    for number in range(1500):
        match rng.choice(["push", "push", "late", "touch", "touch", "fall", "discard", "pop"]):
            case "push" | "late" as way:
                inside[number] = node(number, number if way == "push" else rng.randint(0, number))
                queue.push(inside[number])
            case "touch" | "fall" as way if inside:
                each = rng.choice(list(inside.values()))
                each.own_access_time = number if way == "touch" else rng.randint(0, number)
                queue.touch(each)
            case "discard" if inside:
                queue.discard(inside.pop(rng.choice(list(inside))))
            case "pop":
                first = queue.pop()
                expected = min(inside.values(), key=lambda each: (each.own_access_time, each.id), default=None)
                assert first is expected
                if first is not None:
                    del inside[first.id]
        queue.check(set(inside.values()))

    ordered = sorted(inside.values(), key=lambda each: (each.own_access_time, each.id))
    assert drain(queue) == [each.id for each in ordered]


def test_a_long_run_is_cut_and_an_empty_one_goes() -> None:
    runs = SortedRuns()
    entries = [(number * 7919 % 10_007, number) for number in range(10_007)]
    for entry in entries:
        runs.add(entry)

    assert list(runs) == sorted(entries)
    assert max(map(len, runs._runs)) <= sorted_runs._LONGEST
    for entry in entries[::2]:
        runs.remove(entry)
    assert list(runs) == sorted(entries[1::2])
    assert [runs.pop_first() for _ in entries[1::2]] == sorted(entries[1::2])
    assert (runs.first(), runs._runs, runs._lasts) == (None, [], [])
