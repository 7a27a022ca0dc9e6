"""`LockAccounting` and `Victims`: locks, uses and evictions of a tree's leaves."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.faults.kernel_trees import Tree

from raydix.cache_core.kernels import LockAccounting, Victims, pack_slots

KEYS = st.lists(st.sampled_from([0, 1]), max_size=12).map(bytes)


def tree_of(*keys: bytes) -> Tree:
    """Return a tree with these keys, at pages of 1."""
    tree = Tree()
    for key in keys:
        tree.insert(key)
    return tree


@given(st.data(), st.integers(1, 3))
def test_the_sums_agree_with_the_locks_after_random_operations(data: st.DataObject, page_size: int) -> None:
    tree = Tree(page_size)
    accounting = tree.accounting
    for now in range(data.draw(st.integers(0, 20))):
        known = [node for node in tree.nodes if node is tree.top or node.slots is not None]
        node = data.draw(st.sampled_from(known))
        match data.draw(st.sampled_from(["insert", "lock", "unlock", "use", "evict"])):
            case "insert":
                tree.insert(data.draw(KEYS), now)
            case "lock":
                accounting.lock(node)
            case "unlock":
                own_locks = node.own_locks
                assert accounting.unlock(node) is (own_locks > 0)
                assert node.own_locks == max(0, own_locks - 1)
            case "use":
                accounting.use(node, now, 1, 0)
                assert node.own_access_time == now
                assert accounting.queue.touched[-1:] == [node.id] or node.children or node is tree.top
            case "evict":
                num_tokens, unlocked = data.draw(st.integers(-1, 9)), accounting.evictable
                num_evicted, _ = tree.evict(num_tokens)
                assert min(num_tokens, unlocked) <= num_evicted == unlocked - accounting.evictable
        tree.check()


def test_a_use_is_noted_at_its_node_and_moves_a_leaf_in_the_queue() -> None:
    tree = tree_of(b"aa", b"aabb")

    tree.accounting.use(tree.nodes[1], 7, 1, 3)
    tree.accounting.use(tree.nodes[2], 8, 0, -1)

    uses = [(node.own_access_time, node.own_hits, node.own_priority) for node in tree.nodes[1:]]
    assert uses == [(7, 1, 3), (8, 0, 0)], "a priority never gets lower"
    assert tree.accounting.queue.touched == [2]


def test_only_a_lock_of_this_very_node_can_be_undone() -> None:
    tree = tree_of(b"aa", b"aabb")
    above, node = tree.nodes[1:]
    tree.accounting.lock(node)

    assert not tree.accounting.unlock(above)
    assert (tree.accounting.protected, above.lock_ref) == (4, 1)
    assert tree.accounting.unlock(node)
    assert not tree.accounting.unlock(node)
    assert (tree.accounting.protected, above.lock_ref) == (0, 0)


def test_a_lock_of_the_root_holds_no_token() -> None:
    tree = tree_of(b"aa")

    tree.accounting.lock(tree.root)
    assert (tree.accounting.protected, tree.root.own_locks, tree.nodes[1].lock_ref) == (0, 1, 0)
    assert tree.accounting.unlock(tree.root)
    assert not tree.accounting.unlock(tree.root)


# ---------------------------------------------------------------- evictions


def test_leaves_are_evicted_until_the_victims_hold_enough_tokens() -> None:
    tree = tree_of(b"aaa", b"bb", b"cccc", b"ccccdd")
    tree.accounting.lock(tree.nodes[1])

    assert (tree.accounting.evictable, tree.accounting.protected) == (8, 3)
    assert tree.evict(1) == (2, [2])
    assert tree.evict(3) == (6, [4, 3]), "a parent follows its last child"
    assert tree.evict(1) == (0, [])
    assert (tree.accounting.evictable, tree.accounting.protected, tree.accounting.childless) == (0, 3, [3])


def test_a_victim_is_split_only_if_enough_of_it_stays() -> None:
    tree, asked = tree_of(b"aaa", b"bbbbb", b"cccc"), list[tuple[int, int]]()
    tree.accounting.least_spared = 3
    tree.accounting._spare_head = lambda leaf, num_tokens: asked.append((leaf.id, num_tokens))  # type: ignore[method-assign]

    assert tree.evict(4) == (8, [1, 2]), "a leaf that was not split goes whole"
    assert tree.evict(2) == (4, [3])
    assert asked == [(2, 1)]


def test_the_slots_of_leaves_are_freed_in_one_call() -> None:
    tree, freed = tree_of(b"aaa", b"bb", b"cccc", b"ccccdd"), list[torch.Tensor]()

    assert tree.accounting.free_leaves(4, 1, freed.append, fail) == 5
    assert tree.accounting.free_leaves(0, 1, freed.append, fail) == 0
    assert [node.id for node in tree.nodes if node.slots is None] == [1, 2]
    assert [slots.tolist() for slots in freed] == [[0, 1, 2, 0, 1]]
    assert tree.accounting.evictable == 6


def fail(slots: Any) -> None:
    """Refuse to free slots."""
    raise ZeroDivisionError


def fail_a_check(slots: Any) -> None:
    """Find a fault in the pool itself."""
    raise AssertionError


def test_slots_that_one_function_refuses_are_freed_by_the_other() -> None:
    tree, freed = tree_of(b"aaa"), list[torch.Tensor]()

    assert tree.accounting.free_leaves(1, 1, fail, freed.append) == 3
    assert [slots.tolist() for slots in freed] == [[0, 1, 2]]


@pytest.mark.parametrize("raised", [ZeroDivisionError, AssertionError, KeyboardInterrupt, SystemExit])
def test_errors_of_freeing_are_raised(raised: type[BaseException]) -> None:
    tree, freed = tree_of(b"aaa"), list[torch.Tensor]()

    def stop(slots: Any) -> None:
        raise raised

    with pytest.raises(raised):
        tree.accounting.free_leaves(1, 1, stop, fail if raised is ZeroDivisionError else freed.append)
    assert (tree.accounting.evictable, len(tree.top.children), freed) == (0, 0, [])


@pytest.mark.parametrize("free", [None, fail], ids=["in one call", "one by one"])
def test_leaves_evicted_before_an_error_are_freed(free: Any) -> None:
    tree, freed = tree_of(b"aaa", b"bb", b"cccc"), list[torch.Tensor]()
    left = [tree.nodes[2], tree.nodes[1]]
    tree.accounting.queue.pop = left.pop  # type: ignore[method-assign]

    with pytest.raises(IndexError):
        tree.accounting.free_leaves(9, 1, free or freed.append, freed.append)

    assert [slots.tolist() for slots in freed] == [[0, 1, 2, 0, 1]]
    assert tree.accounting.evictable == 4
    with pytest.raises(IndexError):
        tree.accounting.free_leaves(9, 1, fail, fail)  # there are no victims


def test_of_two_errors_the_later_is_raised() -> None:
    tree = tree_of(b"aaa")

    def fail_too(node: Any) -> None:
        raise LookupError

    tree.accounting._on_last_child_removed = fail_too  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        tree.accounting.free_leaves(9, 1, fail, fail)


def test_a_queue_may_change_everything_meanwhile() -> None:
    tree = tree_of(b"abc")

    class Fickle:
        def pop(self) -> Any:
            del tree.accounting._queue
            gc.collect()
            return tree.nodes.pop()

    tree.accounting._queue = Fickle()  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        tree.evict(9)
    assert tree.accounting.evictable == 0


def test_the_base_leaves_three_methods_to_its_subclass() -> None:
    tree = tree_of(b"abc")
    base = LockAccounting(tree.accounting.queue)
    base.lock(tree.nodes[1])

    with pytest.raises(NotImplementedError):
        base.unlock(tree.nodes[1])
    base.add(tree.nodes[1])
    with pytest.raises(NotImplementedError):
        base.evict_leaves(1, Victims())
    other = tree_of(b"abc").nodes[1]
    base.add(other)
    base.least_spared = 2
    with pytest.raises(NotImplementedError):
        base.evict_leaves(1, Victims())
    assert other.slots is not None, "it was asked for a split first"
    with pytest.raises(TypeError):
        LockAccounting()  # type: ignore[call-arg]


# ---------------------------------------------------------------- victims


@pytest.mark.parametrize("num_victims", [0, 1, 4, 5, 100])
def test_victims_have_rows_of_tokens_and_of_pages(num_victims: int) -> None:
    victims, expected = Victims(), list[int]()
    for number in range(num_victims):
        step = 2 if number % 3 else 1
        slots = [2 * number * 16 + lane * step for lane in range(16)]
        victims.add(number, pack_slots(torch.tensor(slots), 16, 0, 16), 16)
        expected += slots

    assert victims.slots(16).tolist() == expected
    assert victims.nodes == list(range(num_victims))
    assert victims.num_tokens == len(expected)


def test_a_row_that_names_more_or_fewer_slots_raises() -> None:
    victims = Victims()
    victims.add("one", b"", 0)
    victims.add("two", bytes(24), 2)

    with pytest.raises(ValueError, match="does not name the slots of 2 tokens"):
        victims.slots(1)


def test_wrong_victims_are_not_added() -> None:
    victims = Victims()
    victims.add("one", b"slots", 3)
    victims.add("two", b"", 4)

    with pytest.raises(AssertionError, match="'three' had been evicted before"):
        victims.add("three", None, 1)
    with pytest.raises(ValueError, match="num_tokens must be at least 0, not -1"):
        victims.add("three", b"", -1)
    with pytest.raises(TypeError):
        victims.add("three", b"", "1")  # type: ignore[arg-type]
    assert (victims.nodes, victims.rows, victims.num_tokens) == (["one", "two"], [b"slots", b""], 7)


def test_victims_that_hold_each_other_are_collected() -> None:
    node: Any = type("Watched", (), {})()
    node.victims = Victims()
    for _ in range(9):
        node.victims.add(node, b"", 0)
    watched = weakref.ref(node)
    del node
    gc.collect()

    assert watched() is None


def test_no_victim_and_no_row_is_kept_alive() -> None:
    tree, node, row = tree_of(b"abc"), object(), bytes(range(24))
    watched = [node, row, tree.nodes[1], tree.nodes[1].slots]
    before = [sys.getrefcount(each) for each in watched]
    for _ in range(100):
        victims = Victims()
        victims.add(node, row, 3)
        victims.slots(1)
        tree.accounting.lock(tree.nodes[1])
        tree.accounting.unlock(tree.nodes[1])
    del victims

    assert [sys.getrefcount(each) for each in watched] == before
