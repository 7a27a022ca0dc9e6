"""`LRUList`, claim by claim: order of use, links in both directions, and candidates for eviction."""

from collections.abc import Iterator

import pytest

from raydix.cache_core import LRUList, MambaTreeNode
from raydix.cache_core.kernels.tree import add_child
from raydix.cache_core.tree.tree_node import Namespace

SPACE = Namespace(None, 0, 4, 4)


def node(node_id: int, parent: MambaTreeNode | None = None) -> MambaTreeNode:
    made = MambaTreeNode(node_id, parent, SPACE, b"1234", None, 1, 0)
    if parent is not None:
        hang(parent, made)
    return made


def hang(parent: MambaTreeNode, child: MambaTreeNode) -> None:
    add_child(parent, bytes([child.id % 256]), child)


@pytest.fixture
def chain() -> list[MambaTreeNode]:
    """A root, its child, and so on down to a leaf."""
    nodes = [node(0)]
    for node_id in (1, 2, 3):
        nodes.append(node(node_id, nodes[-1]))
    return nodes


@pytest.fixture(params=[False, True], ids=["full", "mamba"])
def lru(request: pytest.FixtureRequest) -> Iterator[LRUList]:
    lru = LRUList(mamba=request.param)
    yield lru
    assert ids(lru) == from_the_head(lru)[::-1]
    assert len(lru) == len(ids(lru))


def ids(lru: LRUList) -> list[int]:
    """From the least to the most recently used."""
    return [each.id for each in lru]


def from_the_head(lru: LRUList) -> list[int]:
    step = "mamba_next" if isinstance(lru.head.mamba_next, MambaTreeNode) else "next"
    walked, at = [], getattr(lru.head, step)
    while at is not lru.tail:
        walked.append(at.id)
        at = getattr(at, step)
    return walked


def test_an_empty_list_has_nothing_to_give(lru: LRUList) -> None:
    assert (len(lru), ids(lru)) == (0, [])
    assert lru.get_lru_unlocked() is None
    assert lru.get_lru_leaf_unlocked() is None


def test_nodes_stand_in_the_order_of_their_insertion(lru: LRUList) -> None:
    nodes = [node(each) for each in (1, 2, 3)]
    for each in nodes:
        lru.insert_mru(each)

    assert ids(lru) == [1, 2, 3]
    assert lru.get_lru_unlocked() is nodes[0]
    assert nodes[0] in lru
    assert node(1) not in lru
    assert "1" not in lru


def test_a_touch_makes_a_node_the_most_recently_used(lru: LRUList) -> None:
    nodes = [node(each) for each in (1, 2, 3)]
    for each in nodes:
        lru.insert_mru(each)

    lru.touch_mru(nodes[0])
    lru.touch_mru(nodes[2])
    lru.touch_mru(nodes[2])

    assert ids(lru) == [2, 1, 3]


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_removed_node_leaves_no_gap(lru: LRUList, position: int) -> None:
    nodes = [node(each) for each in (1, 2, 3)]
    for each in nodes:
        lru.insert_mru(each)

    lru.remove(nodes[position])

    assert ids(lru) == [each for each in (1, 2, 3) if each != position + 1]
    assert nodes[position] not in lru
    lru.insert_mru(nodes[position])
    assert ids(lru)[-1] == position + 1


def test_a_node_stands_in_a_list_once(lru: LRUList) -> None:
    one = node(1)
    lru.insert_mru(one)

    with pytest.raises(ValueError, match="already"):
        lru.insert_mru(one)
    lru.remove(one)
    for operation in (lru.remove, lru.touch_mru):
        with pytest.raises(ValueError, match="does not stand"):
            operation(one)
    assert ids(lru) == []


def test_a_node_stands_in_a_full_and_a_mamba_list_at_once() -> None:
    full, mamba = LRUList(), LRUList(mamba=True)
    nodes = [node(each) for each in (1, 2, 3)]
    for each in nodes:
        full.insert_mru(each)
        mamba.insert_mru(each)

    full.touch_mru(nodes[0])
    mamba.remove(nodes[1])

    assert (ids(full), ids(mamba)) == ([2, 3, 1], [1, 3])


def test_a_path_is_touched_with_each_child_more_recent_than_its_parent(
    lru: LRUList, chain: list[MambaTreeNode]
) -> None:
    root, *below = chain
    other = node(9)
    for each in (*reversed(below), other):
        lru.insert_mru(each)
    assert ids(lru) == [3, 2, 1, 9]

    lru.touch_node_and_parents_mru(below[1], root)

    assert ids(lru) == [3, 9, 1, 2]


def test_ancestors_outside_the_list_are_passed_over(lru: LRUList, chain: list[MambaTreeNode]) -> None:
    root, first, _, third = chain
    lru.insert_mru(third)
    lru.insert_mru(first)

    lru.touch_node_and_parents_mru(third, root)

    assert ids(lru) == [1, 3]


def test_the_next_leaf_to_go_has_no_children_and_no_lock(lru: LRUList, chain: list[MambaTreeNode]) -> None:
    leaf, other = chain[-1], node(9)
    for each in (*chain[1:], other):
        lru.insert_mru(each)

    assert lru.get_lru_leaf_unlocked() is leaf
    leaf.lock_ref = 1
    assert lru.get_lru_leaf_unlocked() is other
    other.lock_ref = 1
    assert lru.get_lru_leaf_unlocked() is None


def test_a_full_list_passes_over_nodes_that_are_locked_from_below_a_mamba_list_does_not() -> None:
    full, mamba = LRUList(), LRUList(mamba=True)
    above, other = node(1), node(2)
    for each in (above, other):
        full.insert_mru(each)
        mamba.insert_mru(each)
    above.lock_ref = 1

    assert full.get_lru_unlocked() is other
    assert mamba.get_lru_unlocked() is above
    above.own_locks = 1
    assert mamba.get_lru_unlocked() is other


def test_ten_thousand_nodes_work(lru: LRUList) -> None:
    root = node(0)
    nodes = [node(1, root)]
    for node_id in range(2, 10_001):
        made = MambaTreeNode(node_id, nodes[-1], SPACE, b"1234", None, 1, 0)
        hang(nodes[-1], made)
        nodes.append(made)
    for each in reversed(nodes):
        lru.insert_mru(each)

    lru.touch_node_and_parents_mru(nodes[-1], root)

    assert ids(lru) == list(range(1, 10_001))
