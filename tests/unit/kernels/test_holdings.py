"""Locked nodes and the next candidates of a tree: the compiled holdings agree with the plain ones."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.faults.kernel_trees import Branch, held_by

from raydix.cache_core import kernels
from raydix.cache_core.eviction.queue import EvictionQueue
from raydix.cache_core.kernels import plain_kernels

BYTES = st.lists(st.sampled_from([0, 1]), max_size=12).map(bytes)
compiled = pytest.mark.skipif(not kernels.COMPILED, reason="the kernels were not compiled: no compiler was at hand")
TWINS = [pytest.param(kernels, marks=compiled), plain_kernels]


class Tree(Branch):
    """A tree of one twin, and the locks on it."""

    def __init__(self, kernel: Any, page_size: int) -> None:
        super().__init__(kernel, page_size)
        self.held = held_by(kernel)

    def add(self, key: bytes) -> None:
        known = len(self.nodes)
        node = self.insert(key)
        if len(self.nodes) > known and not node.children:
            self.held.add(node)

    def lock(self, at: int) -> None:
        self.held.lock(self.nodes[at])

    def unlock(self, at: int) -> Any:
        return self.held.unlock(self.nodes[at])

    unlock_any = unlock

    def use(self, at: int, now: int, num_hits: int, priority: int) -> None:
        self.held.use(self.nodes[at], now, num_hits, priority)

    def fell(self, num_tokens: int) -> Any:
        victims = self.kernel.Victims()
        self.held.fell(num_tokens, self.page_size, victims)
        return victims.num_tokens, [node.id for node in victims.nodes], victims.rows

    def state(self) -> Any:
        held = self.held
        return held.evictable, held.protected, held.bare, held._queue.told, self.facts()


@compiled
@given(st.data(), st.integers(1, 3))
def test_both_twins_hold_the_same(data: st.DataObject, page_size: int) -> None:
    trees = [Tree(kernel, page_size) for kernel in (kernels, plain_kernels)]
    for now in range(data.draw(st.integers(0, 20))):
        nodes = trees[0].nodes
        there = st.sampled_from([at for at, node in enumerate(nodes) if node.slots is not None])
        locked = [at for at, node in enumerate(nodes) if node.own_locks]
        given: dict[str, Any] = {
            "add": st.tuples(BYTES),
            "lock": st.tuples(there),
            "unlock": st.tuples(st.sampled_from(locked) if locked else there),
            "unlock_any": st.tuples(there),  # locked or not
            "use": st.tuples(there, st.just(now), st.integers(0, 1), st.integers(-1, 2)),
            "fell": st.tuples(st.integers(-1, 9)),
        }
        what = data.draw(st.sampled_from(["add", "lock", "unlock", *given]))
        arguments = data.draw(given[what])
        results = [getattr(tree, what)(*arguments) for tree in trees]

        assert results[0] == results[1]
        assert trees[0].state() == trees[1].state()


@pytest.mark.parametrize("kernel", TWINS)
def test_a_use_is_noted_at_the_node_itself_and_told_of_a_leaf(kernel: Any) -> None:
    tree = Tree(kernel, 1)
    for key in (b"aa", b"aabb"):
        tree.add(key)
    tree.held._queue.told.clear()

    tree.use(1, 7, 1, 3)
    tree.use(2, 8, 0, -1)

    uses = [(node.own_access_time, node.own_hits, node.own_priority) for node in tree.nodes[1:]]
    assert uses == [(7, 1, 3), (8, 0, 0)]  # a priority is never lowered
    assert tree.held._queue.told == [("touch", 2)]


@pytest.mark.parametrize("kernel", TWINS)
def test_only_a_lock_of_the_very_node_can_be_undone(kernel: Any) -> None:
    tree = Tree(kernel, 1)
    for key in (b"aa", b"aabb"):
        tree.add(key)
    tree.lock(2)

    assert not tree.unlock(1)
    assert (tree.held.protected, tree.nodes[1].lock_ref) == (4, 1)
    assert tree.unlock(2)
    assert not tree.unlock(2)
    assert (tree.held.protected, tree.nodes[1].lock_ref) == (0, 0)


@pytest.mark.parametrize("kernel", TWINS)
def test_leaves_are_felled_until_they_hold_enough(kernel: Any) -> None:
    tree = Tree(kernel, 1)
    for key in (b"aaa", b"bb", b"cccc", b"ccccdd"):
        tree.add(key)
    tree.lock(1)

    assert (tree.held.evictable, tree.held.protected) == (8, 3)
    assert tree.fell(1)[:2] == (2, [2])
    assert tree.fell(3)[:2] == (6, [4, 3])  # the parent follows its last child
    assert tree.fell(1)[:2] == (0, [])
    assert (tree.held.evictable, tree.held.protected, tree.held.bare) == (0, 3, [3])


@pytest.mark.parametrize("kernel", TWINS)
def test_slots_of_leaves_are_freed_in_one_call(kernel: Any) -> None:
    tree, freed = Tree(kernel, 1), []
    for key in (b"aaa", b"bb", b"cccc", b"ccccdd"):
        tree.add(key)

    assert tree.held.free_leaves(4, 1, freed.append, fail) == 5
    assert tree.held.free_leaves(0, 1, freed.append, fail) == 0
    assert [node.id for node in tree.nodes if node.slots is None] == [1, 2]
    assert [slots.tolist() for slots in freed] == [[0, 1, 2, 0, 1]]
    assert tree.held.evictable == 6


@compiled
def test_no_leaf_is_too_odd_to_be_looked_ahead_at() -> None:
    tree, queue = Tree(kernels, 1), EvictionQueue(lambda node: node.id)
    tree.held._queue = queue
    for key in (b"aaa", b"bbbb"):
        tree.add(key)
    first, second = tree.nodes[1:]

    with pytest.raises(ValueError, match="page_size"):
        tree.held.fell(0, -1, kernels.Victims())
    for name, odd in {"end": -5, "data": None, "parent": first}.items():
        known = getattr(first, name)
        setattr(first, name, odd)
        for page_size in (0, 1, 2**62):
            tree.held.fell(0, page_size, kernels.Victims())
        setattr(first, name, known)
    del first.data, first.parent
    tree.held.fell(0, 1, kernels.Victims())

    queue.discard(first)
    assert tree.held.free_leaves(1, 1, id, fail) == 4
    assert second.slots is None


@compiled
def test_victims_are_not_listed_while_they_change() -> None:
    victims, thresholds = kernels.Victims(), gc.get_threshold()
    said: Any = None

    class Late:
        def __del__(self) -> None:
            victims.add("late", b"", 0)

    victims.add("first", b"", 0)
    gc.disable()
    cycle: Any = Late()
    cycle.itself = cycle
    del cycle
    spare: list[Any] = [[] for _ in range(1_000)]  # so that the next list has to be made, and the collector is called
    gc.set_threshold(1)
    gc.enable()
    try:
        said = victims.nodes
    except RuntimeError as error:
        said = str(error)
    finally:
        gc.set_threshold(*thresholds)

    assert len(spare) == 1_000
    assert said == "the victims have changed meanwhile"
    assert victims.nodes == ["first", "late"]


def fail(slots: Any) -> None:
    """A free function that does nothing."""
    raise ZeroDivisionError


@pytest.mark.parametrize("kernel", TWINS)
def test_whoever_frees_slots_may_fail(kernel: Any) -> None:
    """Another one is asked then; an assertion is no refusal."""
    tree, freed = Tree(kernel, 1), []

    def assert_false(slots: Any) -> None:
        raise AssertionError

    for free, each, raised in ((fail, fail, ZeroDivisionError), (assert_false, freed.append, AssertionError)):
        tree.add(b"aaa")
        with pytest.raises(raised):
            tree.held.free_leaves(1, 1, free, each)
        assert (tree.held.evictable, len(tree.top.children), freed) == (0, 0, [])

    tree.add(b"aaa")
    assert tree.held.free_leaves(1, 1, fail, freed.append) == 3
    assert [slots.tolist() for slots in freed] == [[0, 1, 2]]


@pytest.mark.parametrize("kernel", TWINS)
@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_who_stops_the_process_is_no_refusal(kernel: Any, raised: type[BaseException]) -> None:
    tree, freed = Tree(kernel, 1), []
    tree.add(b"aaa")

    def stop(slots: Any) -> None:
        raise raised

    with pytest.raises(raised):
        tree.held.free_leaves(1, 1, stop, freed.append)
    assert freed == []


@pytest.mark.parametrize("kernel", TWINS)
@pytest.mark.parametrize("free", [None, fail], ids=["at once", "one by one"])
def test_what_was_felled_before_an_error_is_handed_back(kernel: Any, free: Any) -> None:
    tree, freed, left = Tree(kernel, 1), list[torch.Tensor](), [2, 1]
    for key in (b"aaa", b"bb", b"cccc"):
        tree.add(key)

    class Failing:
        def pop(self) -> Any:
            if not left:
                raise LookupError
            return tree.nodes[left.pop()]

    tree.held._queue = Failing()
    with pytest.raises(LookupError):
        tree.held.free_leaves(9, 1, free or freed.append, freed.append)

    assert [slots.tolist() for slots in freed] == [[0, 1, 2, 0, 1]]
    assert tree.held.evictable == 4
    with pytest.raises(LookupError):
        tree.held.free_leaves(9, 1, fail, fail)  # there was nothing to hand back


@pytest.mark.parametrize("kernel", TWINS)
def test_of_two_errors_the_later_is_raised(kernel: Any) -> None:
    tree = Tree(kernel, 1)
    tree.add(b"aaa")

    def left_bare(node: Any) -> None:
        raise LookupError

    tree.held._left_bare = left_bare
    with pytest.raises(ZeroDivisionError):
        tree.held.free_leaves(9, 1, fail, fail)


@pytest.mark.parametrize("kernel", TWINS)
@pytest.mark.parametrize("num_victims", [0, 1, 4, 5, 100])
def test_victims_say_their_slots_each_in_its_way(kernel: Any, num_victims: int) -> None:
    victims, expected = kernel.Victims(), []
    for at in range(num_victims):
        in_pages = at % 3 == 0
        slots = [2 * at * 16 + lane * (1 if in_pages else 2) for lane in range(16)]
        victims.add(at, kernel.compact(torch.tensor(slots), 16, 0, 16), 16)
        expected += slots

    assert victims.slots(16).tolist() == expected
    assert victims.nodes == list(range(num_victims))
    assert victims.num_tokens == len(expected)


@pytest.mark.parametrize("kernel", TWINS)
def test_a_row_that_says_more_or_less_is_refused(kernel: Any) -> None:
    victims = kernel.Victims()
    victims.add("one", b"", 0)
    victims.add("two", bytes(24), 2)

    with pytest.raises(ValueError, match="does not say the slots of 2 tokens"):
        victims.slots(1)


@compiled
def test_victims_hold_no_more_tokens_than_can_be_counted() -> None:
    victims = kernels.Victims()
    victims.add("one", b"", sys.maxsize)

    with pytest.raises(OverflowError):
        victims.add("two", b"", 1)
    assert (victims.num_tokens, victims.nodes) == (sys.maxsize, ["one"])
    with pytest.raises(MemoryError):
        victims.slots(1)


@pytest.mark.parametrize("kernel", TWINS)
def test_victims_that_hold_each_other_are_collected(kernel: Any) -> None:
    class Watched:
        pass

    node: Any = Watched()
    node.victims = kernel.Victims()
    for _ in range(9):
        node.victims.add(node, b"", 0)
    watched = weakref.ref(node)
    del node
    gc.collect()

    assert watched() is None


@pytest.mark.parametrize("kernel", TWINS)
def test_victims_are_noted_with_what_they_held(kernel: Any) -> None:
    victims = kernel.Victims()
    victims.add("one", b"slots", 3)
    victims.add("two", b"", 4)

    assert (victims.nodes, victims.rows, victims.num_tokens) == (["one", "two"], [b"slots", b""], 7)
    with pytest.raises(AssertionError, match="'three' had been evicted before"):
        victims.add("three", None, 1)
    assert victims.num_tokens == 7


@compiled
def test_a_queue_may_let_go_of_everything_meanwhile() -> None:
    tree = Tree(kernels, 1)
    tree.add(b"abc")

    class Fickle:
        def discard(self, leaf: Any) -> None:
            leaf.parent = None

        def push(self, leaf: Any) -> None:
            tree.held._queue = None
            leaf.parent = None
            raise LookupError

        def pop(self) -> Any:
            tree.held._queue = None
            return tree.nodes.pop()

    tree.held._queue = Fickle()
    with pytest.raises(LookupError):
        tree.add(b"abcd")
    tree.held._queue = Fickle()

    with pytest.raises(TypeError, match="a node is needed, not NoneType"):
        tree.held.fell(9, 1, kernels.Victims())
