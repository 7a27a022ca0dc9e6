"""The compiled nodes and keys behave as the plain ones do, are freed as they are, and refuse what is no node or key."""

from __future__ import annotations

import array
import copy
import gc
import pickle
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.faults.kernel_trees import Branch, held_by

from raydix.cache_core import RadixKey, kernels
from raydix.cache_core.kernels import plain_kernels

compiled = pytest.mark.skipif(not kernels.COMPILED, reason="the kernels were not compiled: no compiler was at hand")
TWINS = [pytest.param(kernels, marks=compiled), plain_kernels]
RUNS = st.builds(lambda first, count: [*range(first, first + count)], st.integers(0, 2**40), st.integers(3, 60))
MANY_RUNS = st.lists(RUNS, min_size=1, max_size=5).map(lambda runs: [slot for run in runs for slot in run])
SLOTS = st.one_of(
    RUNS, MANY_RUNS, st.lists(st.one_of(st.integers(0, 2**31 - 1), st.integers(-(2**63), 2**63 - 17)), max_size=5)
)
BYTES = st.lists(st.sampled_from([0, 1]), max_size=40).map(bytes)


# ---------------------------------------------------------------- the same as the plain ones


@compiled
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.sampled_from([0, 2**31]), st.sampled_from([1, 2]))
def test_a_tree_grows_as_with_the_plain_kernels(
    data: st.DataObject, page_size: int, unit: int, first: int, step: int
) -> None:
    ours, theirs = (Branch(kernel, page_size, unit, first, step) for kernel in (kernels, plain_kernels))
    for _ in range(data.draw(st.integers(0, 12))):
        key = data.draw(BYTES)
        assert ours.insert(key).id == theirs.insert(key).id

        assert ours.facts() == theirs.facts()


@pytest.mark.parametrize("kernel", TWINS)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    "shared", [1, 4, 7, 8, 63, 64, 65, 511, 512, 1023, 4095, 4096, 4097, 8191, 8704, 9_999, 10_000]
)
def test_a_walk_ends_where_a_long_run_and_a_key_part(kernel: Any, page_size: int, shared: int) -> None:
    tree, run = Branch(kernel, page_size), np.random.default_rng(shared).bytes(10_000)
    tree.insert(run)
    parting = bytes(byte ^ 255 for byte in run[shared:]) or b"longer"
    for other in (run[:shared], run[:shared] + parting[:6], run[:shared] + parting):
        num_tokens = len(other) // page_size * page_size

        path, end, rest = kernel.walk(tree.top, kernel.Key.from_packed(other, 1), page_size, num_tokens)

        assert end == shared // page_size * page_size
        assert rest == (path[0].end - end if path else 0)
        assert [node.id for node in path] == ([1] if end else [])


@compiled
@given(st.lists(BYTES, min_size=1, max_size=8), st.data(), st.integers(1, 3))
def test_leaves_are_uprooted_as_by_the_plain_kernel(keys: list[bytes], data: st.DataObject, page_size: int) -> None:
    ours, theirs = (Branch(kernel, page_size) for kernel in (kernels, plain_kernels))
    for key in keys:
        uses = data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(-2, 2)))
        for branch in (ours, theirs):
            node = branch.insert(key)
            node.own_hits, node.own_access_time, node.own_priority = uses
    while leaves := [at for at, node in enumerate(ours.nodes) if at and not node.children and node.slots is not None]:
        at = data.draw(st.sampled_from(leaves))
        rows = [branch.kernel.uproot(branch.nodes[at], page_size) for branch in (ours, theirs)]

        assert rows[0] == rows[1]
        assert ours.facts() == theirs.facts()


@compiled
@given(st.lists(BYTES, max_size=8), BYTES, st.data(), st.integers(1, 3), st.integers(1, 4))
def test_a_walk_is_that_of_the_plain_kernel(
    keys: list[bytes], key: bytes, data: st.DataObject, page_size: int, unit: int
) -> None:
    tree = Branch(kernels, page_size, unit)
    for each in keys:
        tree.insert(each)
    limit = data.draw(st.integers(0, len(key) // unit))
    node = data.draw(st.sampled_from(tree.nodes))

    packed = RadixKey.from_packed(key, unit)

    assert kernels.walk(node, packed, page_size, limit) == plain_kernels.walk(node, packed, page_size, limit)


@compiled
@given(st.integers(1, 5_000), st.integers(0, 5_000), st.integers(1, 16))
def test_a_long_run_is_compared_to_the_byte(length: int, differs_at: int, page_size: int) -> None:
    run = bytearray(np.arange(length, dtype=np.uint16).astype(np.uint8).tobytes())
    tree = Branch(kernels, page_size)
    tree.insert(bytes(run))
    if page_size <= differs_at < length:
        run[differs_at] ^= 1

    key = RadixKey.from_packed(bytes(run), 1)

    assert kernels.walk(tree.top, key, page_size, length) == plain_kernels.walk(tree.top, key, page_size, length)


def one_below_the_other(kernel: Any, rows: list[bytes], sizes: list[int]) -> list[Any]:
    """Nodes that hold these rows, over so many tokens each."""
    nodes = [kernel.Node(0, None, None, b"", b"", 0, 0)]
    for row, size in zip(rows, sizes, strict=True):
        nodes.append(kernel.Node(0, nodes[-1], None, b"", row, nodes[-1].end + size, 0))
    return nodes[1:]


@compiled
@given(st.lists(st.tuples(SLOTS, st.booleans()), max_size=5), st.integers(1, 4))
def test_slots_are_gathered_as_by_the_plain_kernel(runs: list[tuple[list[int], bool]], page_size: int) -> None:
    runs = [(slots, in_pages or len(slots) % page_size > 0) for slots, in_pages in runs]  # whole pages, either way
    rows = [plain_kernels.compact(torch.tensor(slots, dtype=torch.int64), 1, 0, len(slots)) for slots, _ in runs]
    sizes = [len(slots) * (page_size if in_pages else 1) for slots, in_pages in runs]

    ours, theirs = (
        kernel.gather(one_below_the_other(kernel, rows, sizes), page_size) for kernel in (kernels, plain_kernels)
    )

    assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist()
    expected = [
        slot + lane for slots, in_pages in runs for slot in slots for lane in range(page_size if in_pages else 1)
    ]
    assert ours.tolist() == expected


@pytest.mark.parametrize("kernel", TWINS)
def test_a_row_that_does_not_say_the_slots_of_a_node_is_not_gathered(kernel: Any) -> None:
    nodes = one_below_the_other(kernel, [np.arange(4).tobytes(), np.arange(3).tobytes()], [4, 4])

    with pytest.raises(ValueError, match="does not say the slots of 4 tokens"):
        kernel.gather(nodes, 2)


@compiled
@given(MANY_RUNS, st.data())
def test_slots_are_cut_as_by_the_plain_kernel(slots: list[int], data: st.DataObject) -> None:
    row = plain_kernels.compact(torch.tensor(slots), 1, 0, len(slots))
    places = range(1, len(slots))
    edges = [at for at in places if slots[at] != slots[at - 1] + 1]  # where a run begins
    cut = st.sampled_from(places) | st.sampled_from(edges or places)
    cuts = data.draw(st.lists(cut, max_size=3, unique=True).map(sorted))
    parts = []
    for kernel in (kernels, plain_kernels):
        space = SimpleNamespace(unit=1)
        node = kernel.Node(0, kernel.Node(1, None, space, b"", b"", 0, 0), space, bytes(len(slots)), row, len(slots), 0)
        above = [kernel.cut(kernel.Node, count(2), 1, node, at) for at in cuts]
        parts.append([each.slots for each in (*above, node)])

        assert kernel.gather([*above, node], 1).tolist() == slots

    assert parts[0] == parts[1]


def tree_of_one_run(kernel: Any, size: int) -> Any:
    """The only node of a tree, with random bytes and a few slots; no other object has its data."""
    key = kernel.Key.from_packed(b"above" + np.random.default_rng(size).bytes(size), 1)
    space = SimpleNamespace(unit=1)
    top = kernel.Node(0, None, space, b"", b"", 5, 0)
    return kernel.grow(kernel.Node, count(1), 1, top, key, 5 + size, bytes(8 * 16), 0)


@pytest.mark.parametrize("kernel", TWINS)
@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("size", [2, 40, 600, 200_000])
def test_data_are_cut_whoever_reads_them(kernel: Any, size: int, is_read: bool) -> None:
    for length in sorted({1, size // 2, -(-size // 2), size - 1}):
        node = tree_of_one_run(kernel, size)
        run = bytes(memoryview(node.data))  # a copy
        hash(node.data)  # is noted in the object
        reader = node.data if is_read else None

        above = kernel.cut(kernel.Node, count(2), 1, node, node.parent.end + length)

        assert (above.data, node.data) == (run[:length], run[length:])
        assert hash(above.data) == hash(run[:length]) and {above.data: 1}[run[:length]] == 1
        assert above.children[node.data[:1]] is node and above.parent.children[run[:1]] is above
        assert reader in (None, run)


@compiled
def test_a_cut_copies_only_the_rest_of_what_is_mostly_prefix() -> None:
    size, rest = 2**24, 2**10
    tracemalloc.start()
    try:
        node = tree_of_one_run(kernels, size)
        tracemalloc.reset_peak()
        above = kernels.cut(kernels.Node, count(2), 1, node, node.end - rest)
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (len(above.data), len(node.data)) == (size - rest, rest)
    assert max(held, most) < size + 2**16


@compiled
@pytest.mark.parametrize("size", [40, 400, 479])
def test_a_cut_for_which_there_is_no_memory_leaves_all_data_where_they_are(size: int) -> None:
    testcapi = pytest.importorskip("_testcapi")
    run, above = bytes(memoryview(tree_of_one_run(kernels, size).data)), None
    for attempt in count():
        node, ids = tree_of_one_run(kernels, size), count(2)
        end, top = node.parent.end + size * 3 // 5, node.parent
        testcapi.set_nomemory(attempt, attempt + 1)
        try:
            above = kernels.cut(kernels.Node, ids, 1, node, end)
        except MemoryError:
            pass
        finally:
            testcapi.remove_mem_hooks()

        first = top.children[run[:1]]
        assert first.data + b"".join(rest.data for rest in first.children.values()) == run
        if above is not None:
            return


@pytest.mark.parametrize("kernel", TWINS)
@pytest.mark.parametrize("page_size", [1, 2])
def test_hashes_are_shared_out_by_pages(kernel: Any, page_size: int) -> None:
    node = tree_of_one_run(kernel, 8)
    node.hash_values = [str(page) for page in range(8 // page_size)]

    above = kernel.cut(kernel.Node, count(2), page_size, node, node.end - 6)

    assert above.hash_values == ["0", "1"][: 2 // page_size]
    assert node.hash_values == [str(page) for page in range(2 // page_size, 8 // page_size)]


@compiled
def test_who_takes_a_node_away_while_it_is_cut_finds_no_freed_memory() -> None:
    tree = Branch(kernels, 1)
    leaf = tree.insert(b"abcdefgh")
    tree.nodes.clear()
    seen: list[Any] = [leaf]
    del leaf

    class Ids:
        def __iter__(self) -> Ids:
            return self

        def __next__(self) -> int:
            kernels.uproot(seen.pop(), 1)
            for each in gc.get_objects():
                if type(each) is list and len(each) == 1 and type(each[0]) is kernels.Node:
                    each.clear()
            gc.collect()
            return 9

    with pytest.raises(TypeError, match="slots must be bytes"):
        kernels.reach(kernels.Node, Ids(), tree.top, RadixKey.from_packed(b"abcd", 1), 1, 4)


@pytest.mark.parametrize("kernel", TWINS)
def test_a_constructor_is_given_what_the_prefix_holds(kernel: Any) -> None:
    seen = []

    class Told(kernel.Node):  # type: ignore[misc]
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            seen.append(self.data)

    node = tree_of_one_run(kernel, 1_000)
    kernel.cut(Told, count(2), 1, node, node.end - 100)

    assert list(map(len, seen)) == [900]


@pytest.mark.parametrize("kernel", TWINS)
def test_what_is_gathered_is_a_copy_that_can_be_written_to(kernel: Any) -> None:
    (node,) = one_below_the_other(kernel, [np.arange(1_000).tobytes()], [1_000])
    gathered = kernel.gather([node], 1)
    assert gathered.is_contiguous() and gathered.is_cpu
    gathered += 1

    assert gathered.tolist() == list(range(1, 1_001))
    assert node.slots == np.arange(1_000).tobytes()
    assert kernel.gather([], 1).tolist() == []


@pytest.mark.parametrize("kernel", TWINS)
@pytest.mark.parametrize(
    ("ids", "width", "arity"),
    [([1, 2**31], 4, 0), (np.array([1, 2**31]), 4, 0), ([1, 2**32], 8, 0), ([(1, 2), (3, 4)], 4, 2), ([], 4, 0)],
)
def test_a_key_is_the_same_by_either(kernel: Any, ids: Any, width: int, arity: int) -> None:
    made = type("MadeKey", (kernel.Key,), {"__slots__": (), "_pack_slowly": staticmethod(RadixKey._pack_slowly)})
    known = RadixKey(ids, "space")
    for key in (made(ids, "space"), made(ids, extra_key="space"), made.from_packed(known.data, width, "space", arity)):
        for name in plain_kernels.Key.__slots__:
            assert getattr(key, name) == getattr(known, name)

    assert (known.width, known.arity, made(ids).extra_key) == (width, arity, None)


@pytest.mark.parametrize("kernel", TWINS)
@pytest.mark.parametrize(
    ("data", "leads"),
    [(b"abcdefgh", True), (b"abcdefxx", True), (b"abcdexgh", False), (b"xbcdefgh", False), (b"abcd", False)],
)
def test_whether_a_key_leads_to_a_node_is_told(kernel: Any, data: bytes, leads: bool) -> None:
    tree = Branch(kernel, 2)
    tree.insert(b"ab")
    tree.insert(b"abcd")
    node = tree.insert(b"abcdef")

    assert kernel.leads_to(kernel.Key.from_packed(data, 1), node) is leads
    assert kernel.leads_to(kernel.Key.from_packed(data, 1), tree.top) is True


@pytest.mark.parametrize("kernel", TWINS)
def test_the_top_of_a_namespace_is_found(kernel: Any) -> None:
    tree = Branch(kernel, 2)
    for number in range(20):
        tree.insert(bytes((number, 1)))
    tops = {("a", 0): tree.top, (None, 2): tree.root}
    for data in (b"", b"a", b"abcdef"):
        assert kernel.top_of(tops, kernel.Key.from_packed(data, 1, "a"), 2) is tree.top
        assert kernel.top_of(tops, kernel.Key.from_packed(data, 1), 2) is None
        assert kernel.top_of(tops, kernel.Key.from_packed(data, 1, None, 2), 2) is tree.root


def test_a_key_of_an_array_reads_it_until_it_has_a_copy_of_its_own() -> None:
    ids = np.arange(1, 7, dtype=np.int32)
    tree = Branch(kernels, 1, unit=4)
    tree.insert(ids.tobytes())
    key, kept = RadixKey(ids), RadixKey(ids).kept()
    ids[3] = 9

    assert kernels.walk(tree.top, kept, 1, 6)[1] == 6
    assert kernels.walk(tree.top, key, 1, 6)[1] == (3 if kernels.COMPILED else 6)
    assert key.token_ids == ([1, 2, 3, 9, 5, 6] if kernels.COMPILED else [1, 2, 3, 4, 5, 6])
    ids[4] = 9
    assert key.token_ids[4] == 5
    assert kernels.walk(tree.top, key, 1, 6)[1] == (3 if kernels.COMPILED else 6)


@compiled
def test_an_array_is_let_go_with_the_key_or_for_its_copy() -> None:
    ids = np.arange(100, dtype=np.int32)
    before = sys.getrefcount(ids)
    key, other, third = RadixKey(ids), RadixKey(ids), RadixKey(ids)

    assert sys.getrefcount(ids) == before + 3
    key.kept()
    assert sys.getrefcount(ids) == before + 2
    other.__init__(other, "again")  # type: ignore[misc]
    assert other.token_ids == list(range(100)) and other.extra_key == "again"
    assert sys.getrefcount(ids) == before + 1
    del third
    assert sys.getrefcount(ids) == before


@compiled
@pytest.mark.parametrize(
    "ids",
    [
        np.arange(8, dtype=np.int64),
        np.arange(8, dtype=">i4"),
        np.arange(8, dtype=np.int32)[::2],
        np.frombuffer(b"\0" * 33, np.uint8)[1:].view(np.int32),
        np.arange(8, dtype=np.int32).view(type("Heir", (np.ndarray,), {})),
        array.array("i", range(8)),
    ],
    ids=["wide", "big-endian", "apart", "unaligned", "an heir", "array"],
)
def test_what_lies_otherwise_is_copied(ids: Any) -> None:
    before = sys.getrefcount(ids)
    key = RadixKey(ids)

    assert sys.getrefcount(ids) == before
    assert key.token_ids == list(ids)


def test_a_key_can_be_pickled() -> None:
    for key in (RadixKey([1, 2], "a"), RadixKey([2**40]), RadixKey([(1, 2)])):
        assert pickle.loads(pickle.dumps(key)) == key


@pytest.mark.parametrize("kernel", TWINS)
@pytest.mark.parametrize("verb", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_node_is_neither_copied_nor_pickled(kernel: Any, verb: Any) -> None:
    with pytest.raises(TypeError, match="cannot pickle '"):
        verb(Branch(kernel, 2).insert(b"abcd"))


@pytest.mark.parametrize("kernel", TWINS)
def test_nodes_of_a_type_with_its_own_constructor_are_made_by_it(kernel: Any) -> None:
    class Marked(kernel.Node):  # type: ignore[misc]
        __slots__ = ("mark",)

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.mark = 7

    tree = Branch(kernel, 2)
    tree.nodes[0] = tree.top = Marked(1, tree.root, tree.space, b"", b"", 0, 0)
    leaf = tree.insert(b"abcd")
    above = tree.insert(b"abxy").parent

    assert (leaf.mark, above.mark, above.data, leaf.data) == (7, 7, b"ab", b"cd")
    assert leaf.parent is above and above.parent is tree.top and above.children[b"cd"] is leaf


# ---------------------------------------------------------------- what they refuse


def lone(**fields: Any) -> Any:
    """A node without any ties, with these fields set, or deleted where None is given."""
    node = kernels.Node(0, None, None, b"ab", b"", 2, 0)
    for name, value in fields.items():
        if value is None:
            delattr(node, name)
        else:
            setattr(node, name, value)
    return node


def parent_of(data: bytes) -> Any:
    """The node in a tree that this run hangs below."""
    return Branch(kernels, 2).insert(data).parent


def hashed(hashes: Any) -> Any:
    """A node in a tree with these hashes; None: they are deleted."""
    node = tree_of_one_run(kernels, 2)
    node.hash_values = hashes
    if hashes is None:
        del node.hash_values
    return node


def circle() -> Any:
    node = lone(end=3, own_locks=1)
    node.parent = lone(end=2, parent=node)
    return node


AB, ABC, CDE = (RadixKey.from_packed(data, 1) for data in (b"ab", b"abc", b"cde"))
NO_DATA = RadixKey([1])
VICTIMS = kernels.Victims()
del NO_DATA.data


class Nonsense(kernels.Key):
    """A key that packs what takes a closer look into something else."""

    __slots__ = ()

    @staticmethod
    def _pack_slowly(token_ids: Any) -> Any:
        return token_ids


@compiled
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: kernels.walk(lone(end=0), AB, 1, 3), ValueError),
        (lambda: kernels.walk(lone(end=0), AB, 0, 1), ValueError),
        (lambda: kernels.walk(lone(end=0), b"ab", 1, 1), TypeError),  # type: ignore[arg-type]
        (lambda: kernels.walk(object(), AB, 1, 1), TypeError),
        (lambda: kernels.walk(lone(end=0, children=[]), AB, 1, 1), TypeError),
        (lambda: kernels.walk(lone(end=0, children=None), AB, 1, 1), TypeError),
        (lambda: kernels.walk(lone(end=0, children={b"a": 7}), AB, 1, 1), TypeError),
        (lambda: kernels.walk(lone(end=0, children={b"a": lone(data=None)}), AB, 1, 1), TypeError),
        (lambda: kernels.walk(lone(end=-1), AB, 1, 1), ValueError),
        (lambda: kernels.walk(kernels.Node.__new__(kernels.Node), AB, 1, 1), TypeError),
        (lambda: lone(end="0"), TypeError),
        (lambda: lone(end=None), TypeError),
        (lambda: lone(own_access_time=2**63), OverflowError),
        (lambda: lone(swa_tombstone=7), TypeError),
        (lambda: kernels.gather((lone(),), 1), TypeError),  # type: ignore[arg-type]
        (lambda: kernels.gather([b""], 1), TypeError),
        (lambda: kernels.gather([lone(slots=None)], 1), TypeError),
        (lambda: kernels.gather([lone(slots=bytearray())], 1), TypeError),
        (lambda: kernels.gather([lone()], 1), TypeError),
        (lambda: kernels.gather([lone(parent=lone(end=-1))], 1), ValueError),
        (lambda: kernels.gather([lone(parent=lone(end=3), end=2)], 1), ValueError),
        (lambda: kernels.gather([lone(parent=lone(end=0), end=2**62)], 1), OverflowError),
        (lambda: kernels.gather([], -1), ValueError),
        (lambda: held_by(kernels).lock(object()), TypeError),
        (lambda: held_by(kernels).lock(lone(parent=7)), TypeError),
        (lambda: held_by(kernels).lock(lone(parent=None)), TypeError),
        (lambda: held_by(kernels).lock(lone(parent=lone(end=-1))), ValueError),
        (lambda: held_by(kernels).lock(lone(children=[])), TypeError),
        (lambda: held_by(kernels).lock(circle()), ValueError),
        (lambda: held_by(kernels).unlock(circle()), ValueError),
        (lambda: held_by(kernels).unlock(7), TypeError),
        (lambda: held_by(kernels).lock(7), TypeError),
        (lambda: held_by(kernels).use(7, 0, 1, 0), TypeError),
        (lambda: held_by(kernels).use(lone(), 0, 1), TypeError),
        (lambda: held_by(kernels).use(lone(), 2**63, 1, 0), OverflowError),
        (lambda: held_by(kernels).use(lone(), 0, -1, 0), ValueError),
        (lambda: held_by(kernels).use(lone(), 0, 1, "high"), TypeError),
        (lambda: held_by(kernels).use(lone(own_priority=None), 0, 1, 0), AttributeError),
        (lambda: held_by(kernels).use(lone(children=[]), 0, 1, 0), TypeError),
        (lambda: kernels.last_use(7), AttributeError),
        (lambda: held_by(kernels).add(7), TypeError),
        (lambda: held_by(kernels).add(lone()), TypeError),
        (lambda: held_by(kernels).add(lone(parent=lone(children=[]))), TypeError),
        (lambda: held_by(kernels, 7).fell(1, 1, VICTIMS), TypeError),
        (lambda: held_by(kernels, lone()).fell(1, 1, VICTIMS), TypeError),
        (lambda: held_by(kernels, lone(parent=lone(end=0), data=None)).fell(1, 1, VICTIMS), TypeError),
        (lambda: held_by(kernels, lone(parent=lone())).fell(1, 1, VICTIMS), ValueError),
        (lambda: held_by(kernels, lone(parent=lone(end=-1))).fell(1, 1, VICTIMS), ValueError),
        (lambda: held_by(kernels, lone(parent=lone(end=0), data=b"a")).fell(1, 1, VICTIMS), ValueError),
        (
            lambda: held_by(kernels, lone(parent=lone(end=0), data=b"abcd")).fell(1, 2**62, kernels.Victims()),
            ValueError,
        ),
        (lambda: held_by(kernels, lone(parent=lone(end=0))).fell(1, 1, VICTIMS), KeyError),
        (lambda: held_by(kernels).fell(1, -1, kernels.Victims()), ValueError),
        (lambda: held_by(kernels).fell(2**63, 1, kernels.Victims()), OverflowError),
        (lambda: held_by(kernels).fell(1, 1, []), TypeError),
        (lambda: held_by(kernels, lone()).free_leaves(1, 1, print, print), TypeError),
        (lambda: held_by(kernels).free_leaves(1, -1, print, print), ValueError),
        (lambda: held_by(kernels).free_leaves(1, 1, print), TypeError),
        (lambda: kernels.Victims().add(lone(), b"", -1), ValueError),
        (lambda: kernels.Victims().add(lone(), [], 1), TypeError),  # type: ignore[arg-type]
        (lambda: kernels.top_of([], AB, 1), TypeError),  # type: ignore[arg-type]
        (lambda: kernels.top_of({}, 7, 1), TypeError),  # type: ignore[arg-type]
        (lambda: kernels.top_of({}, NO_DATA, 1), AttributeError),
        (lambda: kernels.top_of({(None, 0): 7}, AB, 1), TypeError),
        (lambda: kernels.top_of({(None, 0): lone(children=[])}, AB, 1), TypeError),
        (lambda: kernels.top_of({}, AB, -1), ValueError),
        (lambda: kernels.Holdings(), TypeError),  # type: ignore[call-arg]
        (lambda: kernels.Holdings.__new__(kernels.Holdings).use(lone(), 0, 1, 0), AttributeError),
        (lambda: kernels.grow(int, count(1), 1, lone(), ABC, 3, b"", 0), TypeError),
        (lambda: kernels.grow(7, count(1), 1, lone(), ABC, 3, b"", 0), TypeError),
        (lambda: kernels.grow(kernels.Node, count(1), 1, None, ABC, 3, b"", 0), TypeError),
        (lambda: kernels.grow(kernels.Node, count(1), 1, lone(), ABC, 4, b"", 0), ValueError),
        (lambda: kernels.grow(kernels.Node, count(1), 1, lone(), ABC, 1, b"", 0), ValueError),
        (lambda: kernels.grow(kernels.Node, count(1), 0, lone(), ABC, 3, b"", 0), ValueError),
        (lambda: kernels.grow(kernels.Node, count(1), 1, lone(), b"abc", 3, b"", 0), TypeError),  # type: ignore[arg-type]
        (lambda: kernels.grow(kernels.Node, iter("1"), 1, lone(), ABC, 3, b"", 0), TypeError),  # type: ignore[arg-type]
        (lambda: kernels.grow(kernels.Node, count(1), 1, lone(), ABC, 3, b"", 2**63), OverflowError),
        (lambda: kernels.grow(kernels.Node, count(1), 1, lone(space=None), ABC, 3, b"", 0), AttributeError),
        (lambda: kernels.grow(kernels.Node, count(1), 1, lone(children=[]), ABC, 3, b"", 0), TypeError),
        (lambda: kernels.cut(kernels.Node, count(1), 1, lone(), 1), TypeError),
        (lambda: kernels.cut(kernels.Node, count(1), 1, lone(parent=lone(end=0), space=None), 1), AttributeError),
        (lambda: kernels.cut(kernels.Node, count(1), 1, lone(parent=lone(end=0), data=b"a"), 1), AssertionError),
        (lambda: kernels.cut(kernels.Node, None, 2, Branch(kernels, 2).insert(b"abcd"), 2), TypeError),
        (lambda: kernels.cut(kernels.Node, count(1), 2, Branch(kernels, 2).insert(b"abcd"), 3), AssertionError),
        (lambda: kernels.cut(kernels.Node, count(1), 2, Branch(kernels, 2).insert(b"abcd"), 4), AssertionError),
        (lambda: kernels.cut(kernels.Node, count(1), 2, Branch(kernels, 2).insert(b"abcd"), 0), AssertionError),
        (lambda: kernels.uproot(lone(), 1), TypeError),
        (lambda: kernels.uproot(lone(parent=lone()), 1), KeyError),
        (lambda: kernels.uproot(lone(parent=lone(children=[])), 1), TypeError),
        (lambda: kernels.uproot(lone(parent=lone(own_priority=None)), 1), AttributeError),
        (lambda: kernels.uproot(lone(parent=lone(own_priority="high")), 1), TypeError),
        (lambda: kernels.uproot(lone(parent=lone(), slots=None), 1), AssertionError),
        (lambda: kernels.uproot(lone(parent=lone(), data=None), 1), TypeError),
        (lambda: kernels.uproot(Branch(kernels, 2).insert(b"abcd"), -1), ValueError),
        (lambda: kernels.uproot(Branch(kernels, 2).insert(b"abcd"), 1), KeyError),
        (lambda: kernels.uproot(Branch(kernels, 2).insert(b"abcd").parent, 2), AssertionError),
        (lambda: kernels.grow(kernels.Node, count(), 2, parent_of(b"cd"), CDE, 2, b"", 0), ValueError),
        (lambda: kernels.grow(kernels.Node, iter(()), 1, lone(), ABC, 3, b"", 0), TypeError),
        (lambda: kernels.grow(kernels.Node, 1, 1, lone(), ABC, 3, b"", 0), TypeError),  # type: ignore[arg-type]
        (lambda: kernels.grow(kernels.Node, iter([-1]), 1, lone(), ABC, 3, b"", 0), ValueError),
        (lambda: kernels.cut(kernels.Node, iter(()), 2, Branch(kernels, 2).insert(b"abcd"), 2), TypeError),
        (lambda: kernels.cut(kernels.Node, count(1), 1, hashed(()), 6), TypeError),
        (lambda: kernels.reach(int, count(1), lone(), ABC, 1, 3), TypeError),
        (lambda: kernels.reach(kernels.Node, count(1), None, ABC, 1, 3), TypeError),
        (lambda: kernels.reach(kernels.Node, count(1), lone(), ABC, 0, 3), ValueError),
        (
            lambda: kernels.reach(kernels.Node, iter(()), parent_of(b"abcdef"), RadixKey.from_packed(b"abcd", 1), 2, 4),
            TypeError,
        ),
        (lambda: kernels.cut(kernels.Node, count(1), 1, hashed(None), 6), TypeError),
        (lambda: kernels.leads_to(AB, 7), TypeError),
        (lambda: kernels.leads_to(7, lone()), TypeError),  # type: ignore[arg-type]
        (lambda: kernels.leads_to(NO_DATA, lone()), AttributeError),
        (lambda: kernels.leads_to(AB, lone(parent=7)), TypeError),
        (lambda: kernels.leads_to(AB, lone(parent=lone(), data=None)), TypeError),
        (lambda: kernels.leads_to(AB, lone(parent=lone(end=-1))), ValueError),
        (lambda: kernels.Key(), TypeError),  # type: ignore[call-arg]
        (lambda: kernels.Key([-1]), AttributeError),
        (lambda: Nonsense((1,)), TypeError),
        (lambda: Nonsense("abc"), TypeError),
        (lambda: Nonsense((bytearray(4), 4, 0)), TypeError),
        (lambda: Nonsense((b"1234", 0, 0)), ValueError),
        (lambda: Nonsense((b"1234", 4, 2**62)), ValueError),
        (lambda: kernels.Key.from_packed("1234", 4), TypeError),  # type: ignore[arg-type]
        (lambda: kernels.Node(1), TypeError),  # type: ignore[call-arg]
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


@compiled
def test_what_is_refused_has_changed_nothing() -> None:
    tree = Branch(kernels, 1)
    tree.insert(b"ab")
    leaf = tree.insert(b"abcd")
    leaf.parent.parent = leaf
    before = [(node.lock_ref, node.own_locks) for node in tree.nodes]

    with pytest.raises(ValueError, match="after its parent"):
        held_by(kernels).lock(leaf)

    assert [(node.lock_ref, node.own_locks) for node in tree.nodes] == before


@pytest.mark.parametrize("kernel", TWINS)
def test_a_use_of_a_priority_that_is_none_has_changed_nothing(kernel: Any) -> None:
    tree = Branch(kernel, 1)
    tree.insert(b"ab")
    before = tree.facts()

    with pytest.raises(TypeError):
        held_by(kernel).use(tree.nodes[1], 5, 1, "high")

    assert tree.facts() == before


# ---------------------------------------------------------------- what they keep alive


@compiled
def test_nothing_is_kept_alive() -> None:
    tree, held = Branch(kernels, 2), held_by(kernels)
    key, other = RadixKey(np.arange(400), "space"), RadixKey(np.arange(300), "space")
    first, second = tree.insert(b"abcd"), tree.insert(b"abcdefgh")
    data, slots, now = b"abcdefghijkl", np.arange(4).tobytes(), 2**40
    packed_key = RadixKey.from_packed(data, 1)
    packed, name, high = bytes(np.arange(100)), "".join(("name", "space")), 2**70
    odd = kernels.Node(9, first, tree.space, b"ab", np.arange(3).tobytes(), first.end + 2, 0)
    watched = [
        tree.root, tree.top, tree.space, first, first.data, first.slots, first.children, second, second.parent,
        key, key.data, other, data, slots, now, packed, name, high, odd, odd.slots, kernels.Node, kernels.Key, RadixKey,
    ]  # fmt: skip
    gc.collect()
    before = [sys.getrefcount(each) for each in watched]

    for turn in range(1_000):
        kernels.walk(tree.top, packed_key, 2, 12)
        kernels.walk(tree.top, RadixKey(np.arange(9, dtype=np.int32)), 2, 4)
        kernels.gather([first, second], 2)
        kernels.leads_to(packed_key, second)
        kernels.top_of({(None, 0): tree.top}, packed_key, 2)
        held.lock(second)
        held.unlock(second)
        held.unlock(second)
        held.use(held._queue.leaves.pop(), now, 1, high)
        second.own_priority = 0
        with suppress(ValueError):
            kernels.gather([first, odd], 2)
        kernels.last_use(second)
        RadixKey.from_packed(packed, 4, name)
        RadixKey(np.arange(9), name).__init__([2**40], name)  # type: ignore[misc]
        leaf = kernels.grow(kernels.Node, count(9), 2, first, RadixKey.from_packed(b"abcdxxyy", 1), 8, slots, now)
        leaf.hash_values = [packed, name]
        if turn % 2:
            above = kernels.cut(kernels.Node, count(10), 2, leaf, 6)
        else:
            path = kernels.reach(kernels.Node, count(10), tree.top, RadixKey.from_packed(b"abcdxx", 1), 2, 6)[0]
            above = path.pop()
            del path
        held.add(leaf)
        held.fell(1, 2, kernels.Victims())
        kernels.uproot(above, 2)
        held._queue.leaves.clear()
        held.add(kernels.grow(kernels.Node, count(9), 2, first, RadixKey.from_packed(b"abcdxxyy", 1), 8, slots, now))
        held.free_leaves(1, 2, id, id)
        del above, leaf

    gc.collect()
    assert [sys.getrefcount(each) for each in watched] == before


@pytest.mark.parametrize("kernel", TWINS)
def test_nodes_that_hold_each_other_are_collected(kernel: Any) -> None:
    class Watched(kernel.Node):  # type: ignore[misc]
        __slots__ = ("__weakref__",)

    tree = Branch(kernel, 1)
    tree.nodes[0] = tree.top = Watched(1, tree.root, tree.space, b"", b"", 0, 0)
    leaf = tree.insert(b"abc")
    leaf.hash_values = [tree.top]
    leaf.space = SimpleNamespace(tree=leaf)
    watched = [weakref.ref(leaf), weakref.ref(tree.top)]
    del tree, leaf

    gc.collect()

    assert [each() for each in watched] == [None, None]


@pytest.mark.parametrize("kernel", TWINS)
def test_a_path_of_a_hundred_thousand_nodes_is_freed(kernel: Any) -> None:
    node = None
    for number in range(100_000):
        node = kernel.Node(number, node, None, b"", b"", number, 0)

    held = held_by(kernel)
    held.lock(node)
    assert held.protected == 99_999
    del node


@compiled
def test_a_leaf_has_no_children_that_one_could_write_to() -> None:
    leaf, other = lone(), lone()

    with pytest.raises(TypeError):
        leaf.children[b"a"] = other

    assert not other.children
    leaf.children = {b"a": other}
    assert not other.children and leaf.children
