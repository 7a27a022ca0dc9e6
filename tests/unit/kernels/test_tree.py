"""Walks and changes of a tree, against the keys that were inserted; errors; the memory of nodes."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.faults.kernel_trees import Tree

from raydix.cache_core.kernels import (
    COMPILED,
    Key,
    Node,
    RankedQueue,
    Victims,
    add_leaf,
    detach_leaf,
    gather,
    is_on_path,
    last_use,
    namespace_root,
    pack_slots,
    rekey_children,
    split_node,
    walk,
    walk_and_split,
)

KEYS = st.lists(st.sampled_from([0, 1]), max_size=40).map(bytes)
FIRSTS_AND_STEPS = st.sampled_from([(0, 1), (2**31, 1), (2**31 - 20, 1), (0, 2), (-9, 1)])
LENGTHS = [1, 4, 63, 64, 65, 511, 512, 1023, 4095, 4096, 4097, 8191, 8704, 9_999, 10_000]
WRONG_TYPE = (TypeError, AttributeError)  # the former if compiled
AB, ABC, CDE = (Key.from_packed(data, 1) for data in (b"ab", b"abc", b"cde"))


# ---------------------------------------------------------------- walks


def num_shared(one: bytes, other: bytes) -> int:
    """Return the number of leading bytes that are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


@given(st.lists(KEYS, max_size=12), KEYS, st.data(), st.integers(1, 3), st.integers(1, 3), FIRSTS_AND_STEPS)
def test_a_walk_ends_at_the_last_page_that_a_key_shares_with_any_other(
    keys: list[bytes], rest: bytes, data: st.DataObject, page_size: int, unit: int, slots: tuple[int, int]
) -> None:
    tree = Tree(page_size, unit, *slots)
    page = page_size * unit
    for inserted in keys:
        assert tree.prefix(tree.insert(inserted)) == inserted[: len(inserted) // page * page]
    tree.check()
    start = data.draw(st.sampled_from(tree.nodes))
    probe = tree.prefix(start) + rest
    limit = data.draw(st.integers(0, len(probe) // unit))

    path, end, num_beyond = walk(start, Key.from_packed(probe, unit), page_size, limit)

    shared = (num_shared(each[: len(each) // page * page], probe[: limit * unit]) for each in keys)
    assert end == max(shared, default=0) // page * page_size
    assert [node.parent for node in path] == [start, *path][: len(path)]
    assert all(node.parent.end < end for node in path)
    assert num_beyond == (path[-1].end - end if path else 0)
    assert not path or tree.prefix(path[-1])[: end * unit] == probe[: end * unit]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("shared", LENGTHS)
def test_a_walk_ends_where_a_long_run_and_a_key_part(page_size: int, shared: int) -> None:
    tree, run = Tree(page_size), np.random.default_rng(shared).bytes(10_000)
    node = tree.insert(run)
    others = bytes(byte ^ 255 for byte in run[shared:]) or b"longer"
    for probe in (run[:shared], run[:shared] + others[:6], run[:shared] + others):
        path, end, num_beyond = walk(tree.top, Key.from_packed(probe, 1), page_size, len(probe))

        assert end == shared // page_size * page_size
        assert (path, num_beyond) == (([node], node.end - end) if end else ([], 0))


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"abcdefgh", True), (b"abcdefxx", True), (b"abcdexgh", False), (b"xbcdefgh", False), (b"abcd", False)],
)
def test_a_node_is_on_the_path_of_a_key_that_begins_with_its_prefix(data: bytes, expected: bool) -> None:
    tree = Tree(2)
    nodes = [tree.insert(b"abcdef"[:stop]) for stop in (2, 4, 6)]

    assert is_on_path(Key.from_packed(data, 1), nodes[-1]) is expected
    assert is_on_path(Key.from_packed(data, 1), tree.top) is True


def test_a_namespace_is_found_by_its_name_and_arity() -> None:
    tree = Tree()
    tops = {("a", 0): tree.top, (None, 2): tree.root}

    assert namespace_root(tops, Key.from_packed(b"ab", 1, "a")) is tree.top
    assert namespace_root(tops, Key.from_packed(b"ab", 1, None, 2)) is tree.root
    assert namespace_root(tops, Key.from_packed(b"ab", 1)) is None


# ---------------------------------------------------------------- changes


@pytest.mark.parametrize("page_size", [1, 2])
def test_a_split_copies_locks_age_and_priority_and_shares_out_the_rest(page_size: int) -> None:
    tree = Tree(page_size)
    node = tree.insert(b"abcdef", now=20)
    node.own_access_time, node.own_priority, node.own_hits = 30, 5, 4
    tree.accounting.lock(node)

    above = split_node(Node, tree.ids, page_size, node, 2)

    assert (above.data, node.data, above.end, node.end) == (b"ab", b"cdef", 2, 6)
    assert (above.parent, node.parent, [*above.children]) == (tree.top, above, [node])
    assert (above.lock_ref, above.own_locks, node.lock_ref, node.own_locks) == (1, 0, 1, 1)
    assert (above.own_access_time, above.creation_time, above.own_priority, above.own_hits) == (30, 20, 5, 0)
    assert (node.own_access_time, node.creation_time, node.own_priority, node.own_hits) == (30, 20, 5, 4)
    tree.nodes.append(above)
    tree.check()


@given(st.sampled_from([2**31, 2**40]), st.data())
def test_the_slots_of_a_node_that_is_split_several_times_stay_as_they_were(limit: int, data: st.DataObject) -> None:
    slots = data.draw(st.lists(st.integers(0, limit - 1), min_size=2, max_size=60))
    tree, length = Tree(), len(slots)
    key, row = Key.from_packed(bytes(length), 1), pack_slots(torch.tensor(slots), 1, 0, length)
    node = add_leaf(Node, tree.ids, 1, tree.top, key, length, row, 0)
    ends = data.draw(st.lists(st.integers(1, len(slots) - 1), max_size=3, unique=True).map(sorted))

    above = [split_node(Node, tree.ids, 1, node, end) for end in ends]

    assert [len(each) for each in (*above, node)] == np.diff([0, *ends, length]).tolist()
    assert gather([*above, node], 1).tolist() == slots


def test_a_detached_leaf_leaves_its_uses_to_its_parent() -> None:
    tree = Tree(2)
    parent, first, second = (tree.insert(data) for data in (b"ab", b"abcd", b"abef"))
    uses = {parent: (5, 10, 1), first: (3, 20, 0), second: (1, 5, 4)}
    for node, (hits, time, priority) in uses.items():
        node.own_hits, node.own_access_time, node.own_priority = hits, time, priority

    rows = [detach_leaf(leaf) for leaf in (first, second)]

    assert (parent.own_hits, parent.own_access_time, parent.own_priority) == (9, 20, 4)
    assert (rows, first.slots, second.slots) == ([np.array(2, np.int32).tobytes() + b"\0"] * 2, None, None)
    assert not parent.children


def chain_of(rows: list[bytes], sizes: list[int]) -> list[Any]:
    """Return nodes, one below the other, with these rows over so many tokens each."""
    nodes = [Node(0, None, SimpleNamespace(unit=1), b"", b"", 0, 0)]
    for row, size in zip(rows, sizes, strict=True):
        nodes.append(Node(0, nodes[-1], nodes[-1].namespace, b"", row, nodes[-1].end + size, 0))
    return nodes[1:]


def test_slots_are_gathered_from_rows_of_tokens_and_of_pages() -> None:
    rows = [np.arange(4).tobytes(), np.array([8, 16], np.int32).tobytes() + b"\0", np.array([2**40]).tobytes()]
    nodes = chain_of(rows, [4, 4, 2])

    gathered = gather(nodes, 2)
    gathered += 1

    assert gathered.tolist() == [1, 2, 3, 4, 9, 10, 17, 18, 2**40 + 1, 2**40 + 2]
    assert [node.slots for node in nodes] == rows, "a copy is returned"
    assert gather([], 1).tolist() == []


def test_a_row_that_does_not_name_the_slots_of_its_node_raises() -> None:
    nodes = chain_of([np.arange(4).tobytes(), np.arange(3).tobytes()], [4, 4])

    with pytest.raises(ValueError, match="does not name the slots of 4 tokens"):
        gather(nodes, 2)


def test_nodes_are_made_by_the_constructor_of_their_type() -> None:
    class Marked(Node):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.mark = args[3]

    tree = Tree(2, node_type=Marked)
    leaf = tree.insert(b"abcd")
    above = tree.insert(b"abxy").parent

    assert (leaf.mark, above.mark) == (b"abcd", b"ab")
    tree.check()


@given(st.data(), st.integers(1, 2), st.sampled_from([3, 20, 255]))
def test_children_are_found_by_their_first_page_in_the_order_in_which_they_came(
    data: st.DataObject, page_size: int, most: int
) -> None:
    tree, model = Tree(page_size), dict[bytes, Any]()
    for number in data.draw(st.lists(st.integers(0, most), max_size=300)):
        page = bytes([number] * page_size)
        if page not in model:
            model[page] = tree.insert(page + bytes(2))
            if number % 4 == 0:
                model[page] = split_node(Node, tree.ids, page_size, model[page], page_size)
        elif not model[page].children:
            detach_leaf(model.pop(page))
        children = tree.top.children

        assert list(children) == list(children.values()) == list(model.values())
        assert list(reversed(children)) == [*model.values()][::-1]
        assert (len(children), bool(children)) == (len(model), bool(model))
    for number in range(most):
        page = bytes([number] * page_size)
        assert tree.top.children.get(page) is model.get(page)


def test_children_are_found_by_other_pages_after_their_runs_changed() -> None:
    tree = Tree(2)
    nodes = [tree.insert(data) for data in (b"ab", b"cd", b"ef")]
    for node in nodes:
        node.data *= 2

    rekey_children(tree.top, 4)

    assert [tree.top.children.get(page) for page in (b"abab", b"cdcd", b"ab")] == [nodes[0], nodes[1], None]
    assert list(tree.top.children) == nodes
    rekey_children(nodes[0], 4)
    assert not nodes[0].children


def test_all_leaves_share_their_empty_children() -> None:
    tree = Tree(2)
    shared = tree.insert(b"ab").children
    for data in (b"abcd", b"abcdef", b"xy"):
        tree.insert(data)
    tree.evict(99)

    assert tree.top.children is shared
    assert tree.insert(b"cd").children is shared
    assert (len(shared), list(shared)) == (0, [])


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_node_is_neither_copied_nor_pickled(make_copy: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="cannot pickle '"):
        make_copy(Tree(2).insert(b"abcd"))


MISTAKES: list[tuple[Callable[[Tree], Any], Any]] = [
    (lambda tree: walk(tree.top, AB, 1, 3), ValueError),
    (lambda tree: walk(tree.top, AB, 1, -1), ValueError),
    (lambda tree: walk(tree.top, AB, 0, 1), ValueError),
    (lambda tree: walk(tree.top, b"ab", 1, 1), WRONG_TYPE),  # type: ignore[arg-type]
    (lambda tree: walk(tree.top, None, 1, 1), WRONG_TYPE),  # type: ignore[arg-type]
    (lambda tree: walk(None, AB, 1, 1), WRONG_TYPE),  # type: ignore[arg-type]
    (lambda tree: walk(7, AB, 1, 1), WRONG_TYPE),  # type: ignore[arg-type]
    (lambda tree: walk(tree.top, AB, 1, "1"), TypeError),  # type: ignore[arg-type]
    (lambda tree: walk_and_split(Node, tree.ids, None, AB, 2, 2), WRONG_TYPE),  # type: ignore[arg-type]
    (lambda tree: walk_and_split(Node, tree.ids, tree.top, ABC, 0, 3), ValueError),
    (lambda tree: walk_and_split(Node, tree.ids, tree.top, ABC, 2, 4), ValueError),
    (lambda tree: walk_and_split(int, tree.ids, tree.top, AB, 2, 2), TypeError),
    (lambda tree: walk_and_split(Node, None, tree.top, AB, 2, 2), TypeError),  # type: ignore[arg-type]
    (lambda tree: namespace_root([], AB), WRONG_TYPE),  # type: ignore[arg-type]
    (lambda tree: namespace_root({}, 7), WRONG_TYPE),  # type: ignore[arg-type]
    (lambda tree: is_on_path(AB, 7), WRONG_TYPE),  # type: ignore[arg-type]
    (lambda tree: is_on_path(AB, None), WRONG_TYPE),  # type: ignore[arg-type]
    (lambda tree: is_on_path(7, tree.top), WRONG_TYPE),  # type: ignore[arg-type]
    (lambda tree: last_use(7), WRONG_TYPE),  # type: ignore[arg-type]
    (lambda tree: gather([b""], 1), WRONG_TYPE),
    (lambda tree: gather([None], 1), WRONG_TYPE),
    (lambda tree: gather([tree.root], 1), WRONG_TYPE),
    (lambda tree: gather(7, 1), TypeError),  # type: ignore[arg-type]
    (lambda tree: add_leaf(int, tree.ids, 2, tree.top, CDE, 2, b"", 0), TypeError),
    (lambda tree: add_leaf(7, tree.ids, 2, tree.top, CDE, 2, b"", 0), TypeError),
    (lambda tree: add_leaf(Node, 1, 2, tree.top, CDE, 2, b"", 0), TypeError),  # type: ignore[arg-type]
    (lambda tree: add_leaf(Node, tree.ids, 2, None, CDE, 2, b"", 0), WRONG_TYPE),  # type: ignore[arg-type]
    (lambda tree: add_leaf(Node, tree.ids, 2, tree.top, b"cd", 2, b"", 0), WRONG_TYPE),  # type: ignore[arg-type]
    (lambda tree: add_leaf(Node, tree.ids, 2, tree.top, CDE, 4, b"", 0), ValueError),
    (lambda tree: add_leaf(Node, tree.ids, 2, tree.nodes[1], ABC, 2, b"", 0), ValueError),
    (lambda tree: add_leaf(Node, tree.ids, 2, tree.top, CDE, 0, b"", 0), ValueError),
    (lambda tree: add_leaf(Node, tree.ids, 0, tree.top, CDE, 2, b"", 0), ValueError),
    (lambda tree: add_leaf(Node, tree.ids, 2, tree.top, ABC, 2, b"", 0), ValueError),
    (lambda tree: split_node(Node, tree.ids, 2, tree.nodes[1], 3), AssertionError),
    (lambda tree: split_node(Node, tree.ids, 2, tree.nodes[1], 4), AssertionError),
    (lambda tree: split_node(Node, tree.ids, 2, tree.nodes[1], 0), AssertionError),
    (lambda tree: split_node(Node, tree.ids, 0, tree.nodes[1], 2), AssertionError),
    (lambda tree: split_node(Node, tree.ids, 2, tree.root, 2), WRONG_TYPE),
    (lambda tree: split_node(Node, tree.ids, 2, 7, 2), WRONG_TYPE),  # type: ignore[arg-type]
    (lambda tree: split_node(Node, None, 2, tree.nodes[1], 2), TypeError),  # type: ignore[arg-type]
    (lambda tree: split_node(7, tree.ids, 2, tree.nodes[1], 2), TypeError),
    (lambda tree: detach_leaf(tree.nodes[1]), AssertionError),
    (lambda tree: detach_leaf(tree.root), WRONG_TYPE),
    (lambda tree: detach_leaf(Node(9, tree.top, None, b"ab", b"", 2, 0)), AssertionError),
    (lambda tree: detach_leaf(7), WRONG_TYPE),  # type: ignore[arg-type]
    (lambda tree: rekey_children(7, 2), WRONG_TYPE),  # type: ignore[arg-type]
    (lambda tree: Node(1), TypeError),  # type: ignore[call-arg]
    (lambda tree: tree.accounting.lock(None), WRONG_TYPE),
    (lambda tree: tree.accounting.lock(7), WRONG_TYPE),
    (lambda tree: tree.accounting.unlock(None), WRONG_TYPE),
    (lambda tree: tree.accounting.unlock(7), WRONG_TYPE),
    (lambda tree: tree.accounting.add(None), WRONG_TYPE),
    (lambda tree: tree.accounting.add(tree.root), WRONG_TYPE),
    (lambda tree: tree.accounting.use(7, 9, 1, 0), WRONG_TYPE),
    (lambda tree: tree.accounting.use(tree.nodes[2], 9, 1), TypeError),  # type: ignore[call-arg]
    (lambda tree: tree.accounting.use(tree.nodes[2], 9, -1, 0), ValueError),
    (lambda tree: tree.accounting.use(tree.nodes[2], 9, 1, "high"), TypeError),  # type: ignore[arg-type]
    (lambda tree: tree.accounting.evict_leaves("1", Victims()), TypeError),  # type: ignore[arg-type]
    (lambda tree: tree.accounting.evict_leaves(1.0, Victims()), TypeError),
    (lambda tree: tree.accounting.evict_leaves(1, []), WRONG_TYPE),  # type: ignore[arg-type]
    (lambda tree: tree.accounting.evict_leaves(1, None), WRONG_TYPE),  # type: ignore[arg-type]
    (lambda tree: tree.accounting.free_leaves(1, 0, print, print), ValueError),
    (lambda tree: tree.accounting.free_leaves(1, 2, print), TypeError),  # type: ignore[call-arg]
]
# of the types of arguments, which only compiled code checks
COMPILED_MISTAKES: list[tuple[Callable[[Tree], Any], Any]] = [
    (lambda tree: walk(tree.top, Key.__new__(Key), 1, 0), ValueError),
    (lambda tree: tree.top.children.get(7), TypeError),
    (lambda tree: tree.top.children.get(None), TypeError),
    (lambda tree: gather((tree.nodes[2],), 1), TypeError),  # type: ignore[arg-type]
    (lambda tree: add_leaf(lambda *_: 7, tree.ids, 2, tree.top, CDE, 2, b"", 0), TypeError),
    (lambda tree: add_leaf(Node, iter("1"), 2, tree.top, CDE, 2, b"", 0), TypeError),  # type: ignore[arg-type]
    (lambda tree: add_leaf(Node, tree.ids, 2, tree.top, CDE, 2, [], 0), TypeError),  # type: ignore[arg-type]
    (lambda tree: add_leaf(Node, tree.ids, 2, tree.top, CDE, 2, b"", 2**63), OverflowError),
    (lambda tree: split_node(lambda *_: 7, tree.ids, 2, tree.nodes[1], 2), TypeError),
    (lambda tree: tree.accounting.use(tree.nodes[2], 2**63, 1, 0), OverflowError),
    (lambda tree: setattr(tree.nodes[1], "end", "4"), TypeError),
    (lambda tree: setattr(tree.nodes[1], "end", 2**63), OverflowError),
    (lambda tree: setattr(tree.nodes[1], "children", []), AttributeError),
    (lambda tree: setattr(tree.nodes[1], "hash_values", ()), TypeError),
    (lambda tree: Victims().add(tree.nodes[2], [], 1), TypeError),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(
    ("mistake", "error"), MISTAKES + COMPILED_MISTAKES * COMPILED, ids=lambda each: getattr(each, "__name__", None)
)
def test_a_mistake_raises_and_changes_nothing(mistake: Callable[[Tree], Any], error: Any) -> None:
    tree = Tree(2)
    tree.insert(b"abcd")
    tree.insert(b"abcdef")
    before = tree.facts()

    with pytest.raises(error):
        mistake(tree)

    assert tree.facts() == before
    tree.check()


# ---------------------------------------------------------------- memory


def test_no_object_is_kept_alive() -> None:
    tree = Tree(2)
    first, second = tree.insert(b"abcd"), tree.insert(b"abcdefgh")
    key, other = Key.from_packed(b"abcdefghijkl", 1), Key.from_packed(b"abcdxxyy", 1, "".join(("na", "me")))
    slots, now, high, name = np.arange(4).tobytes(), 2**40, 2**70, "".join(("ha", "sh"))
    watched = [
        tree.root, tree.top, tree.namespace, first, first.data, first.slots, first.children, second, second.data,
        key, key.data, other, other.data, other.extra_key, slots, now, high, name,
    ]  # fmt: skip

    def use_all() -> None:
        walk(tree.top, key, 2, 12)
        gather([first, second], 2)
        is_on_path(key, second)
        namespace_root({(None, 0): tree.top}, key)
        tree.accounting.lock(second)
        tree.accounting.unlock(second)
        tree.accounting.use(second, now, 1, high)
        second.own_priority = 0
        leaf = add_leaf(Node, count(9), 2, first, other, 8, slots, now)
        leaf.hash_values = [name, name]
        walk_and_split(Node, count(10), tree.top, other, 2, 6)
        tree.accounting.add(leaf)
        tree.accounting.leaves.reverse()
        tree.evict(1)
        split_off = walk(tree.top, other, 2, 8)[0][-1]
        tree.accounting.leaves.remove(split_off)
        detach_leaf(split_off)
        with pytest.raises(AssertionError):
            split_node(Node, count(9), 2, first, 3)

    use_all()  # makes what lasts
    gc.collect()
    before = [sys.getrefcount(each) for each in watched], num_nodes()
    for _ in range(1_000):
        use_all()
    gc.collect()

    assert ([sys.getrefcount(each) for each in watched], num_nodes()) == before


def num_nodes() -> int:
    """Return the number of nodes in this process."""
    return sum(isinstance(each, Node) for each in gc.get_objects())


class Watched(Node):
    """A node to which there may be weak references."""


def test_nodes_that_hold_each_other_are_collected() -> None:
    tree = Tree(node_type=Watched)
    leaf = tree.insert(b"abc")
    leaf.namespace = SimpleNamespace(tree=leaf)
    watched = [weakref.ref(leaf), weakref.ref(tree.top)]
    del tree, leaf

    gc.collect()

    assert [each() for each in watched] == [None, None]


def test_a_path_of_a_hundred_thousand_nodes_is_freed() -> None:
    before, length = num_nodes(), 100_000
    tree, key, queue = Tree(), Key.from_packed(bytes(length), 1), RankedQueue(last_use)
    node = tree.top
    for stop in range(1, length + 1):
        node = add_leaf(Node, tree.ids, 1, node, key, stop, b"", stop)
        queue.push(node)
    tree.accounting.lock(node)
    assert (tree.accounting.protected, queue.num_ranked) == (length, length)

    del queue
    detach_leaf(node)
    del node, tree
    gc.collect()

    assert num_nodes() == before
