"""The children of a node against a dict, and their errors on misuse."""

from __future__ import annotations

import gc
import sys
import weakref
from random import Random
from typing import Any

import pytest

from raydix.cache_core import TreeNode, kernels
from raydix.cache_core.kernels import plain_kernels
from raydix.cache_core.tree.tree_node import Namespace

SPACE = Namespace(None, 0, 4, 4)
compiled = pytest.mark.skipif(not kernels.COMPILED, reason="a dict takes anything")


def node(data: bytes) -> TreeNode:
    return TreeNode(0, None, SPACE, data, b"", len(data) // 4, 0)


@pytest.fixture(params=[kernels.Children, plain_kernels.Children])
def children(request: pytest.FixtureRequest) -> Any:
    return request.param()


def check(children: Any, model: dict[bytes, TreeNode]) -> None:
    known = list(model.values())
    assert len(children) == len(model)
    assert bool(children) == bool(model)
    assert list(children.values()) == known
    for limit in (0, 1, 5, len(model), len(model) + 1):
        assert children.first(limit) == known[:limit]
        assert children.last(limit) == known[::-1][:limit]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("page_bytes", [0, 3, 4, 8, 64, 65])
def test_they_are_what_a_dict_would_be(children: Any, seed: int, page_bytes: int) -> None:
    rng = Random(seed)
    pages = list({rng.randbytes(page_bytes) for _ in range(rng.choice([3, 9, 200]))})
    model: dict[bytes, TreeNode] = {}
    for _ in range(1500):
        page = rng.choice(pages)
        if rng.random() < rng.choice([0.3, 0.9]):
            children[page] = model[page] = node(page + rng.randbytes(rng.randint(0, 9)))
        elif page in model:
            assert children[page] is model[page]
            del children[page], model[page]
        else:
            with pytest.raises(KeyError):
                del children[page]
            with pytest.raises(KeyError):
                children[page]
        assert children.get(page) is model.get(page)
        if rng.random() < 0.05:
            check(children, model)

    check(children, model)
    for page in pages:
        assert children.get(page) is model.get(page)


def test_a_hundred_thousand_are_found(children: Any) -> None:
    pages = [number.to_bytes(4, "little") for number in range(100_000)]
    nodes = [node(page) for page in pages]
    for page, each in zip(pages, nodes, strict=True):
        children[page] = each
    for page in pages[::3]:
        del children[page]

    assert [children.get(page) for page in pages] == [
        None if number % 3 == 0 else each for number, each in enumerate(nodes)
    ]


def test_a_child_is_kept_alive_and_let_go_of(children: Any) -> None:
    one, other = node(b"abcd"), node(b"abce")
    before = sys.getrefcount(one), sys.getrefcount(other)

    children[b"abcd"] = one
    assert sys.getrefcount(one) == before[0] + 1
    children[b"abcd"] = one
    children[b"abce"] = other
    del children[b"abce"]
    assert (sys.getrefcount(one), sys.getrefcount(other)) == (before[0] + 1, before[1])
    values = children.values(), children.first(1), children.last(1)
    del values
    del children[b"abcd"]

    assert (sys.getrefcount(one), sys.getrefcount(other)) == before


def test_a_node_below_itself_is_collected() -> None:
    class Watched(TreeNode):
        __slots__ = ("__weakref__",)

    above = Watched(0, None, SPACE, b"", b"", 0, 0)
    child = Watched(1, above, SPACE, b"abcd", b"", 1, 0)
    above.children = kernels.Children()
    above.children[b"abcd"] = child
    gone = weakref.ref(above), weakref.ref(child)

    del above, child
    gc.collect()

    assert [each() for each in gone] == [None, None]


def test_what_all_leaves_share_cannot_be_changed() -> None:
    leaf, other = node(b"abcd"), node(b"efgh")

    with pytest.raises(TypeError, match="children of a leaf cannot be changed"):
        leaf.children[b"abcd"] = other

    assert len(other.children) == 0
    assert other.children.get(b"abcd") is None


@compiled
@pytest.mark.parametrize("page", [None, 7, "abcd", bytearray(b"abcd")])
def test_what_is_no_page_is_refused(page: Any) -> None:
    children = kernels.Children()
    for misuse in (
        lambda: children[page],
        lambda: children.get(page),
        lambda: children.__setitem__(page, node(b"abcd")),
        lambda: children.__delitem__(page),
    ):
        with pytest.raises(TypeError, match="a page must be bytes"):
            misuse()


@compiled
def test_what_is_no_child_and_no_number_is_refused() -> None:
    children = kernels.Children()
    for child in (None, 7, b"abcd"):
        with pytest.raises(TypeError, match="a node is needed"):
            children[b"abcd"] = child
    for many in (children.first, children.last):
        with pytest.raises(ValueError, match="limit must not be negative"):
            many(-1)
        with pytest.raises(TypeError):
            many("1")
    assert len(children) == 0


@compiled
def test_a_child_that_lost_its_data_is_found_no_more() -> None:
    children, child = kernels.Children(), node(b"abcd")
    children[b"abcd"] = child
    for data in (7, b"ab", b"abce"):
        child.data = data  # type: ignore[assignment]
        assert children.get(b"abcd") is None
    del child.data
    assert children.get(b"abcd") is None
    assert children.values() == [child]
