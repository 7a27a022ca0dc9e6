"""`EvictionQueue` and `LateNodes`, against sorted lists."""

from __future__ import annotations

import gc
import sys
import weakref
from random import Random
from typing import Any

import pytest

from raydix.cache_core import TreeNode, kernels
from raydix.cache_core.eviction import queue as queues
from raydix.cache_core.eviction.queue import EvictionQueue, LateNodes
from raydix.cache_core.kernels import last_use
from raydix.cache_core.tree.tree_node import Namespace

SPACE = Namespace(None, 0, 4, 4)


def node(number: int, stamp: int = 0) -> TreeNode:
    return TreeNode(number, None, SPACE, b"1234", None, 1, stamp)


def queue_of(*nodes: TreeNode, rank: Any = lambda each: each.own_access_time) -> EvictionQueue:
    queue = EvictionQueue(rank)
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


@pytest.mark.parametrize("rank", [last_use, lambda each: each.own_access_time], ids=["ticks", "objects"])
@pytest.mark.parametrize("reach", [0, 3, 64])
@pytest.mark.parametrize("seed", range(4))
def test_random_operations_keep_the_order(seed: int, reach: int, rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "_LONGEST", 4)  # so that runs are cut
    rng = Random(seed)
    queue, inside = queue_of(rank=rank), dict[int, TreeNode]()
    queue.search_limit = reach
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


@pytest.mark.parametrize("rank", [last_use, lambda each: each.own_access_time], ids=["ticks", "objects"])
def test_what_comes_a_few_places_late_stands_in_the_ranking(rank: Any) -> None:
    queue = queue_of(*(node(number, number) for number in range(10, 80)), rank=rank)

    queue.search_limit = 64
    queue.push(node(90, 15))
    assert queue.num_late == 0
    queue.push(node(2, 15))
    assert queue.num_late == 1, "more than 64 places from the end"
    queue.search_limit = 100
    queue.push(node(3, 9))
    queue.search_limit = 16
    queue.push(node(4, 11))
    assert queue.num_late == 2, "too far in time to be close"
    queue.push(node(5, 0))
    queue.push(node(1, 9))
    assert queue.num_late == 3, "the one that goes first has its place"

    assert [node.id for _, _, node in queue.ranked()][:10] == [5, 3, 10, 11, 12, 13, 14, 15, 90, 16]
    assert drain(queue)[:12] == [5, 1, 3, 10, 4, 11, 12, 13, 14, 2, 15, 90]


def test_ranks_that_are_no_plain_integers_are_not_compared_on_the_way() -> None:
    queue = EvictionQueue(lambda each: (each.own_access_time, 0))
    for each in (node(1, 1), node(2, 3), node(3, 2)):
        queue.push(each)

    assert (queue.num_late, drain(queue)) == (1, [1, 3, 2])


def test_a_queue_keeps_its_nodes_alive_and_lets_go_of_them() -> None:
    nodes = [node(number, number) for number in (3, 1, 2)]
    before = [sys.getrefcount(each) for each in nodes]
    queue = queue_of(*nodes)
    assert all(sys.getrefcount(each) > count for each, count in zip(nodes, before, strict=True))

    queue.discard(nodes[0])
    queue.touch(nodes[1])
    assert queue.pop() is nodes[1]
    queue.clear()
    assert [sys.getrefcount(each) for each in nodes] == before
    for number in range(3):
        queue.push(nodes[number])
    del queue

    assert [sys.getrefcount(each) for each in nodes] == before


def test_a_queue_that_its_nodes_lead_back_to_is_collected() -> None:
    first = node(1)
    queue = queue_of(first, node(2))
    first.hash_values = [queue]  # type: ignore[list-item]
    gone = weakref.ref(queue)

    del queue, first
    gc.collect()

    assert gone() is None


def test_a_node_stands_in_a_queue_once() -> None:
    first, late = node(5, 5), node(2, 2)
    queue = queue_of(first, late)

    for each in (first, late):
        with pytest.raises(AssertionError, match="stands in a queue"):
            queue.push(each)

    queue.check({first, late})


def test_a_node_stands_in_one_queue_alone() -> None:
    first = node(1)
    queue, another = queue_of(first), queue_of()
    another.discard(first)
    another.touch(first)
    assert first not in another

    with pytest.raises(AssertionError, match="stands in a queue"):
        another.push(first)

    queue.check({first})
    another.check(set())


class Unordered:
    """A rank that cannot be compared."""

    def __gt__(self, other: object) -> bool:
        raise TypeError("not to be compared")

    __eq__ = __lt__ = __gt__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def test_a_rank_that_fails_changes_nothing() -> None:
    ranks: dict[int, Any] = {1: 1, 2: 2, 3: Unordered()}
    queue = EvictionQueue(lambda each: ranks[each.id])
    nodes = [node(number) for number in (1, 2)]
    for each in nodes:
        queue.push(each)

    with pytest.raises(TypeError, match="not to be compared"):
        queue.push(node(3))
    with pytest.raises(KeyError):
        queue.push(node(4))
    ranks[1] = ranks[3]
    with pytest.raises(TypeError, match="not to be compared"):
        queue.touch(nodes[0])
    ranks[1] = 1

    queue.check(set(nodes))


@pytest.mark.parametrize("method", ["push", "discard", "touch", "is_ranked"])
@pytest.mark.parametrize("what", [None, 7, object()])
@pytest.mark.skipif(not kernels.COMPILED, reason="interpreted, annotations are not checked")
def test_what_is_no_node_is_refused(method: str, what: object) -> None:
    with pytest.raises(TypeError, match=r"incorrect type|must not be None"):
        getattr(EvictionQueue(id), method)(what)


def test_a_long_run_is_cut_and_an_empty_one_goes() -> None:
    late = LateNodes()
    entries = [(number * 7919 % 10_007, number, node(number)) for number in range(10_007)]
    for rank, _, each in entries:
        late.add(each, rank)

    assert list(late) == sorted(entries)
    assert max(map(len, late._runs)) <= queues._LONGEST
    for _, _, each in entries[::2]:
        late.remove(each)
    assert list(late) == sorted(entries[1::2])
    for entry in sorted(entries[1::2]):
        assert late.first() == entry
        late.remove(entry[2])
    assert (late.first(), late._runs, late._lasts, late.ranks) == (None, [], [], {})
