"""`RadixTrie`, claim by claim: lookups, kept blocks, their holders, and the order of eviction."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.caches.invariant_fixtures import checked_after
from support.faults.faults import around

from raydix.cache_core import InvalidKeyError, LockError, RadixTrie, StaleNodeError, TrieNode
from raydix.cache_core.eviction.recency_queue import RecencyQueue

CHAIN = 10_000  # one-token nodes, one below the other


@pytest.fixture
def displaced() -> list[Any]:
    """The displaced blocks that the trie reported, in order."""
    return []


@pytest.fixture
def make_trie(displaced: list[Any]) -> Iterator[Callable[..., RadixTrie]]:
    def make(page_size: int = 1) -> RadixTrie:
        return RadixTrie(page_size, on_displaced=displaced.append)

    yield from checked_after(make)


@pytest.fixture
def trie(make_trie: Callable[..., RadixTrie]) -> RadixTrie:
    return make_trie()


@pytest.fixture
def paged(make_trie: Callable[..., RadixTrie]) -> RadixTrie:
    """A trie with two tokens a page."""
    return make_trie(2)


def found(trie: RadixTrie, *tokens: Any) -> list[Any]:
    return trie.match_prefix(list(tokens))[1]


# ---------------------------------------------------------------- match and insert


def test_a_sequence_is_found_as_far_as_it_was_inserted(trie: RadixTrie) -> None:
    end = trie.insert([1, 2, 3], [10, 11, 12])

    assert trie.match_prefix([1, 2, 3, 4]) == (end, [10, 11, 12])
    assert trie.match_prefix([2]) == (trie.root, [])


def test_a_match_inside_a_run_splits_it_and_ends_there(trie: RadixTrie) -> None:
    trie.insert([1, 2, 3], [10, 11, 12])

    node, blocks = trie.match_prefix([1, 2, 9])

    assert (node.tokens, node.blocks, blocks) == ([1, 2], [10, 11], [10, 11])
    assert trie.pretty_format() == ["[1, 2]", "--[3]"]


def test_a_peek_finds_the_same_and_changes_nothing(trie: RadixTrie) -> None:
    end = trie.insert([1, 2, 3], [10, 11, 12])

    assert trie.peek_prefix([1, 2, 9]) == [10, 11]
    assert trie.peek_prefix([7], end) == []
    assert trie.pretty_format() == ["[1, 2, 3]"]


def test_matches_are_floored_to_whole_pages(paged: RadixTrie) -> None:
    end = paged.insert([1, 2, 3, 4], [10, 11])

    assert found(paged, 1, 2, 3) == [10]
    assert found(paged, 1, 2, 4, 4) == [10]
    assert paged.match_prefix([1]) == (paged.root, [])
    assert paged.match_prefix([5], end) == (end, [])


def test_a_match_and_an_insert_go_on_from_a_node(trie: RadixTrie) -> None:
    middle = trie.insert([1, 2], [10, 11])
    end = trie.insert([3, 4], [12, 13], node=middle)

    assert trie.match_prefix([3, 4, 5], node=middle) == (end, [12, 13])
    assert found(trie, 1, 2, 3, 4) == [10, 11, 12, 13]


def test_branches_share_their_front(trie: RadixTrie) -> None:
    trie.insert("abc", [10, 11, 12])
    trie.insert("abd", [10, 11, 13])
    trie.insert("x", [14])

    assert trie.pretty_format(print_blocks=True) == [
        "['a', 'b'] : [10, 11]",
        "--['c'] : [12]",
        "--['d'] : [13]",
        "['x'] : [14]",
    ]


def test_a_node_means_the_end_of_its_prefix_also_after_splits_above_it(trie: RadixTrie) -> None:
    end = trie.insert([1, 2, 3, 4], [10, 11, 12, 13])
    middle, _ = trie.match_prefix([1, 2])
    trie.match_prefix([1])
    trie.match_prefix([1, 2, 3])

    trie.insert([5], [14], node=end)
    trie.insert([6], [15], node=middle)

    assert found(trie, 1, 2, 3, 4, 5) == [10, 11, 12, 13, 14]
    assert found(trie, 1, 2, 6) == [10, 11, 15]


def test_two_inserts_from_one_leaf_branch_there(trie: RadixTrie) -> None:
    end = trie.insert([1], [10])

    trie.insert([2], [11], node=end)
    trie.insert([3], [12], node=end)

    assert found(trie, 1, 2) == [10, 11]
    assert found(trie, 1, 3) == [10, 12]


@pytest.mark.parametrize(
    "tokens",
    [
        np.array([1, 2, 3]),
        np.array([1, 2, 3], np.uint8),
        [np.int64(1), np.int32(2), 3],
        (1, 2, 3),
        torch.tensor([1, 2, 3]),
        list(torch.tensor([1, 2, 3])),
        [torch.tensor(1), np.int64(2), 3],
    ],
    ids=repr,
)
def test_tokens_are_compared_by_value(trie: RadixTrie, tokens: Any) -> None:
    trie.insert(tokens, [10, 11, 12])
    trie.insert([1, 2, 3], np.array([10, 11, 12]))

    assert trie.pretty_format(print_blocks=True) == ["[1, 2, 3] : [10, 11, 12]"]
    assert trie.match_prefix(tokens)[1] == found(trie, 1, 2, 3) == [10, 11, 12]


@pytest.mark.parametrize("tokens", [["i", "like"], [(1, 2), (2, 3)], [None, 2**70], [b"x", frozenset({1})]])
def test_any_hashable_value_is_a_token_and_any_value_a_block(trie: RadixTrie, tokens: list[Any]) -> None:
    trie.insert(tokens, ["block 0", {"slot": 7}])

    assert found(trie, *tokens) == ["block 0", {"slot": 7}]
    assert found(trie, tokens[0]) == ["block 0"]


def test_what_the_caller_changes_later_does_not_reach_the_trie(trie: RadixTrie) -> None:
    tokens, blocks = [1, 2], [10, 11]
    trie.insert(tokens, blocks)

    tokens[0] = blocks[0] = 9
    found(trie, 1, 2).clear()

    assert trie.pretty_format(True) == ["[1, 2] : [10, 11]"]


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    [([], []), ([1], [10]), ([1, 2, 3], [10]), ([1, 2], []), ([1, 2], [10, 11]), ([1, [2]], [10]), ([[1, 2]], [10])],
)
def test_an_insert_that_does_not_fit_is_refused_before_anything_changes(
    paged: RadixTrie, displaced: list[Any], tokens: list[Any], blocks: list[Any]
) -> None:
    paged.insert([1, 2, 3, 4], [20, 21])

    with pytest.raises(ValueError, match=r"."):
        paged.insert(tokens, blocks)

    assert paged.pretty_format(True) == ["[1, 2, 3, 4] : [20, 21]"]
    assert displaced == []


def test_a_match_of_nothing_or_of_a_row_that_is_none_is_refused(trie: RadixTrie) -> None:
    rows: list[Any] = [[], np.array([]), np.array(3), np.array([[1, 2]])]
    for tokens in rows:
        with pytest.raises(InvalidKeyError):
            trie.match_prefix(tokens)
        with pytest.raises(InvalidKeyError):
            trie.peek_prefix(tokens)


@pytest.mark.parametrize("tokens", [[torch.tensor([1]), 2], [1, torch.tensor([1, 2])], list(torch.tensor([[1], [2]]))])
def test_a_tensor_in_a_list_is_no_token(trie: RadixTrie, tokens: list[Any]) -> None:
    for call in (trie.match_prefix, trie.peek_prefix, lambda row: trie.insert(row, [10, 11])):
        with pytest.raises(InvalidKeyError, match="not a tensor of shape"):
            call(tokens)

    assert trie.num_blocks == 0


def test_a_tensor_may_be_a_block(trie: RadixTrie) -> None:
    kv = torch.tensor([1, 2])

    trie.insert([1, 2], [kv, torch.tensor(7)])

    assert found(trie, 1, 2)[0] is kv
    assert type(found(trie, 1, 2)[1]) is int


@pytest.mark.parametrize("page_size", [0, -1])
def test_a_page_has_a_token_at_least(page_size: int) -> None:
    with pytest.raises(ValueError, match="page_size"):
        RadixTrie(page_size)


# ---------------------------------------------------------------- blocks that have no place


def test_blocks_that_nobody_uses_give_way_to_the_incoming_ones(trie: RadixTrie, displaced: list[Any]) -> None:
    trie.insert([1, 2, 3], [10, 11, 12])

    trie.insert([1, 2], [20, 21])

    assert found(trie, 1, 2, 3) == [20, 21, 12]
    assert displaced == [10, 11]


def test_blocks_in_use_stay_and_the_incoming_ones_are_displaced(trie: RadixTrie, displaced: list[Any]) -> None:
    node = trie.insert([1, 2], [10, 11])
    trie.mark_in_use_by(node, "seq")

    trie.insert([1, 2, 3], [20, 21, 22])

    assert found(trie, 1, 2, 3) == [10, 11, 22]
    assert displaced == [20, 21]


def test_only_the_part_in_use_stays(trie: RadixTrie, displaced: list[Any]) -> None:
    trie.insert([1, 2, 3], [10, 11, 12])
    trie.mark_in_use_by(trie.match_prefix([1])[0], "seq")

    trie.insert([1, 2, 3], [20, 21, 22])

    assert found(trie, 1, 2, 3) == [10, 21, 22]
    assert displaced == [20, 11, 12]


@pytest.mark.parametrize("used", [False, True])
def test_a_block_that_is_there_already_is_not_displaced(trie: RadixTrie, displaced: list[Any], used: bool) -> None:
    node = trie.insert([1, 2], [10, 11])
    if used:
        trie.mark_in_use_by(node, "seq")

    trie.insert([1, 2], [10, 21])

    assert displaced == ([21] if used else [11])


def test_the_trie_is_whole_when_it_tells_of_a_displaced_block() -> None:
    seen: list[list[str]] = []
    telling = RadixTrie(on_displaced=lambda block: seen.append(telling.pretty_format(True)))
    telling.insert([1, 2], [10, 11])

    telling.insert([1, 3], [20, 21])

    assert seen == [["[1] : [20]", "--[2] : [11]", "--[3] : [21]"]]


def test_without_a_listener_displaced_blocks_are_dropped() -> None:
    trie = RadixTrie()
    trie.insert([1], [10])

    trie.insert([1], [20])

    assert found(trie, 1) == [20]


# ---------------------------------------------------------------- use by sequences


def test_what_a_sequence_uses_is_not_evicted_nor_what_leads_there(trie: RadixTrie) -> None:
    end = trie.insert([1, 2], [10, 11])
    end = trie.insert([3], [12], node=end)
    trie.mark_in_use_by(end, "seq")

    assert trie.evict_blocks(9) == []
    trie.mark_not_in_use_by(end, "seq")
    assert trie.evict_blocks(9) == [12, 11, 10]


def test_a_node_is_free_when_the_last_of_its_sequences_lets_go(trie: RadixTrie) -> None:
    node = trie.insert([1], [10])
    for seq_id in (1, 2):
        trie.mark_in_use_by(node, seq_id)

    trie.mark_not_in_use_by(node, 1)
    assert trie.evict_blocks(1) == []

    trie.mark_not_in_use_by(node, 2)
    assert trie.evict_blocks(1) == [10]


def test_to_mark_twice_is_to_mark_once(trie: RadixTrie) -> None:
    node = trie.insert([1], [10])
    trie.mark_in_use_by(node, "seq")
    trie.mark_in_use_by(node, "seq")

    trie.mark_not_in_use_by(node, "seq")

    assert trie.evict_blocks(1) == [10]


def test_a_sequence_that_goes_on_lets_go_of_all_at_its_new_end(trie: RadixTrie) -> None:
    node = trie.insert([1], [10])
    trie.mark_in_use_by(node, "seq")
    node = trie.insert([2], [11], node=node)
    trie.mark_in_use_by(node, "seq")

    trie.mark_not_in_use_by(node, "seq")

    assert trie.num_evictable_blocks == 2


def test_a_split_keeps_users_and_recency_of_both_halves(trie: RadixTrie) -> None:
    end = trie.insert([1, 2, 3], [10, 11, 12])
    trie.mark_in_use_by(end, "seq")
    trie.insert([9], [13])

    front, _ = trie.match_prefix([1])

    assert list(front.users) == list(end.users) == ["seq"]
    assert front.last_access_time == end.last_access_time
    assert trie.evict_blocks(9) == [13]
    trie.mark_not_in_use_by(end, "seq")
    assert trie.num_evictable_blocks == 3


def test_a_sequence_with_two_branches_keeps_what_they_share_until_it_lets_go_of_both(trie: RadixTrie) -> None:
    shared = trie.insert([1], [10])
    left, right = trie.insert([2], [11], node=shared), trie.insert([3], [12], node=shared)
    trie.mark_in_use_by(left, "seq")
    trie.mark_in_use_by(right, "seq")

    trie.mark_not_in_use_by(left, "seq")
    assert trie.evict_blocks(9) == [11]

    trie.mark_not_in_use_by(right, "seq")
    assert trie.evict_blocks(9) == [12, 10]


def test_letting_go_of_what_is_not_held_raises_and_changes_nothing(trie: RadixTrie) -> None:
    middle = trie.insert([1], [10])
    end = trie.insert([2], [11], node=middle)
    trie.mark_in_use_by(middle, "other")
    trie.mark_in_use_by(middle, "seq")
    stamps = middle.last_access_time, end.last_access_time

    for _ in range(2):
        with pytest.raises(LockError, match="not in use"):
            trie.mark_not_in_use_by(end, "seq")

    assert (middle.last_access_time, end.last_access_time) == stamps
    assert trie.evict_blocks(9) == [11]
    trie.mark_not_in_use_by(middle, "seq")
    with pytest.raises(LockError):
        trie.mark_not_in_use_by(middle, "seq")


def test_letting_go_above_a_node_that_is_still_held_raises(trie: RadixTrie) -> None:
    middle = trie.insert([1], [10])
    end = trie.insert([2], [11], node=middle)
    trie.mark_in_use_by(end, "seq")

    with pytest.raises(LockError, match="below"):
        trie.mark_not_in_use_by(middle, "seq")

    assert trie.num_evictable_blocks == 0


def test_the_root_needs_no_mark(trie: RadixTrie) -> None:
    miss, _ = trie.match_prefix([1])

    trie.mark_in_use_by(miss, "seq")
    trie.insert([1], [10], node=miss)
    trie.mark_not_in_use_by(miss, "seq")

    assert trie.evict_blocks(9) == [10]


# ---------------------------------------------------------------- eviction


def test_eviction_trims_a_leaf_from_its_tail_block_by_block(paged: RadixTrie) -> None:
    paged.insert([1, 2, 3, 4, 5, 6], [10, 11, 12])

    assert paged.evict_blocks(1) == [12]
    assert paged.pretty_format(True) == ["[1, 2, 3, 4] : [10, 11]"]
    assert paged.evict_blocks(5) == [11, 10]
    assert paged.pretty_format() == []
    assert paged.evict_blocks(1) == []


@pytest.mark.parametrize("count", [0, -1])
def test_to_ask_for_no_block_evicts_none(trie: RadixTrie, count: int) -> None:
    trie.insert([1], [10])

    assert trie.evict_blocks(count) == []


def test_the_leaf_that_was_let_go_last_is_evicted_last(trie: RadixTrie) -> None:
    nodes = [trie.insert([token], [10 + token]) for token in range(3)]
    for node in (nodes[1], nodes[0]):
        trie.mark_in_use_by(node, "seq")
        trie.mark_not_in_use_by(node, "seq")

    assert trie.evict_blocks(3) == [12, 11, 10]


def test_an_insert_counts_as_use_and_a_match_does_not(trie: RadixTrie) -> None:
    for token in range(3):
        trie.insert([token], [10 + token])

    trie.insert([0], [10])
    trie.match_prefix([1])

    assert trie.evict_blocks(3) == [11, 12, 10]


def test_the_tail_of_a_split_that_was_not_used_again_goes_first(trie: RadixTrie) -> None:
    trie.insert([1, 2], [10, 11])
    trie.insert([5], [15])
    trie.insert([1], [10])

    assert trie.evict_blocks(3) == [11, 15, 10]


def test_a_parent_goes_right_after_the_last_of_its_children(trie: RadixTrie) -> None:
    parent = trie.insert([1], [10])
    trie.insert([5], [15])
    trie.insert([2], [11], node=parent)
    trie.insert([6], [16])

    assert trie.evict_blocks(2) == [15, 11]
    assert trie.evict_blocks(2) == [10, 16]


def test_a_parent_that_was_used_later_than_its_children_goes_by_that(trie: RadixTrie) -> None:
    parent = trie.insert([1], [10])
    trie.insert([2], [11], node=parent)
    trie.insert([5], [15])
    trie.insert([1], [10])

    assert trie.evict_blocks(3) == [11, 15, 10]


def test_letting_go_stamps_the_node_and_its_ancestors(trie: RadixTrie) -> None:
    parent = trie.insert([1], [10])
    end = trie.insert([2], [11], node=parent)
    other = trie.insert([5], [15])
    trie.mark_in_use_by(end, "seq")

    trie.mark_not_in_use_by(end, "seq")

    assert parent.last_access_time == end.last_access_time > other.last_access_time


def test_one_call_evicts_from_as_many_leaves_as_it_needs_and_no_more(trie: RadixTrie) -> None:
    trie.insert([1, 2], [10, 11])
    trie.insert([3, 4, 5], [12, 13, 14])

    assert trie.evict_blocks(3) == [11, 10, 14]
    assert trie.pretty_format(True) == ["[3, 4] : [12, 13]"]


def test_counts_are_exact_through_use_and_eviction(trie: RadixTrie) -> None:
    def counts() -> tuple[int, int]:
        return trie.num_blocks, trie.num_evictable_blocks

    assert counts() == (0, 0)
    end = trie.insert([1, 2, 3], [10, 11, 12])
    assert counts() == (3, 3)
    front, _ = trie.match_prefix([1])
    trie.mark_in_use_by(front, "seq")
    assert counts() == (3, 2)
    trie.mark_in_use_by(end, "seq")
    assert counts() == (3, 0)
    trie.mark_not_in_use_by(end, "seq")
    trie.evict_blocks(1)
    assert counts() == (2, 2)


# ---------------------------------------------------------------- nodes of long ago


def use_as_stale(trie: RadixTrie, node: TrieNode) -> None:
    """Every door refuses the node, and nothing changes."""
    before = trie.pretty_format(True)
    for use in (
        lambda: trie.match_prefix([9], node),
        lambda: trie.peek_prefix([9], node),
        lambda: trie.insert([9], [99], node),
        lambda: trie.mark_in_use_by(node, "seq"),
        lambda: trie.mark_not_in_use_by(node, "seq"),
    ):
        with pytest.raises(StaleNodeError):
            use()
    assert trie.pretty_format(True) == before


def test_the_node_of_an_evicted_leaf_is_stale_for_ever(trie: RadixTrie) -> None:
    node = trie.insert([1], [10])
    trie.evict_blocks(1)
    use_as_stale(trie, node)

    trie.insert([1], [20])

    use_as_stale(trie, node)


def test_the_node_of_a_trimmed_leaf_is_stale_and_a_new_match_ends_at_what_is_left(trie: RadixTrie) -> None:
    node = trie.insert([1, 2], [10, 11])
    trie.evict_blocks(1)
    use_as_stale(trie, node)

    left, blocks = trie.match_prefix([1, 2])
    trie.insert([2], [21], node=left)

    assert blocks == [10]
    assert found(trie, 1, 2) == [10, 21]


def test_a_node_of_another_trie_is_refused(trie: RadixTrie) -> None:
    other = RadixTrie()

    use_as_stale(trie, other.insert([1], [10]))
    use_as_stale(trie, other.root)


# ---------------------------------------------------------------- long chains and cost


def test_a_chain_of_ten_thousand_one_token_nodes_works_everywhere(
    trie: RadixTrie, capsys: pytest.CaptureFixture[str]
) -> None:
    node = trie.root
    for token in range(CHAIN):
        node = trie.insert([token], [token], node=node)
        trie.mark_in_use_by(node, "seq")

    assert trie.match_prefix(range(CHAIN)) == (node, list(range(CHAIN)))
    assert trie.insert(range(CHAIN), range(CHAIN)) is node
    trie.check_invariants()
    assert len(trie.pretty_format()) == CHAIN
    trie.pretty_print(print_blocks=False)
    assert capsys.readouterr().out.endswith(f"--[{CHAIN - 1}]\n")
    assert trie.evict_blocks(1) == []
    trie.mark_not_in_use_by(node, "seq")
    assert trie.evict_blocks(CHAIN) == list(reversed(range(CHAIN)))


def test_a_chain_that_nobody_uses_is_evicted_from_its_end_at_once(trie: RadixTrie, looks: list[Any]) -> None:
    node = trie.root
    for token in range(CHAIN):
        node = trie.insert([token], [token], node=node)

    assert trie.evict_blocks(3) == [CHAIN - 1, CHAIN - 2, CHAIN - 3]
    assert len(looks) <= 6


@pytest.mark.parametrize("num_leaves", [100, 10_000])
def test_an_eviction_looks_at_as_many_nodes_in_a_large_trie_as_in_a_small_one(
    trie: RadixTrie, looks: list[Any], num_leaves: int
) -> None:
    leaves = [trie.insert([leaf % 10, leaf], [2 * leaf, 2 * leaf + 1]) for leaf in range(num_leaves)]
    for leaf in reversed(leaves):
        trie.mark_in_use_by(leaf, "seq")
        trie.mark_not_in_use_by(leaf, "seq")

    for _ in range(20):
        assert len(trie.evict_blocks(1)) == 1

    assert len(looks) <= 2 * 20


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The queue entries that an eviction looks at."""
    seen: list[Any] = []
    around(monkeypatch, RecencyQueue, "_take_first", lambda original, queue: seen.append(queue) or original(queue))
    return seen


# ---------------------------------------------------------------- for people


@pytest.mark.parametrize("depth", [1, 20_000])
@pytest.mark.parametrize("verb", [copy.deepcopy, pickle.dumps])
def test_a_trie_and_its_nodes_are_neither_copied_nor_pickled_whatever_their_depth(
    trie: RadixTrie, verb: Any, depth: int
) -> None:
    node = trie.root
    for token in range(depth):
        node = trie.insert([token], [token], node)

    for what in (trie, node):
        with pytest.raises(TypeError, match="cannot pickle 'TrieNode' object"):
            verb(what)


def test_the_trie_prints_a_line_per_node(trie: RadixTrie, capsys: pytest.CaptureFixture[str]) -> None:
    trie.insert(["i", "like", "tea"], [10, 11, 12])
    trie.insert(["i", "like", "pie"], [10, 11, 13])

    trie.pretty_print()

    assert capsys.readouterr().out.splitlines() == [
        "['i', 'like'] : [10, 11]",
        "--['tea'] : [12]",
        "--['pie'] : [13]",
    ]


def test_the_repr_of_a_node_shows_its_users_but_not_its_tokens(trie: RadixTrie) -> None:
    node = trie.insert(range(100), range(100))
    trie.mark_in_use_by(node, "seq")

    assert repr(node) == "TrieNode(100 tokens, 100 blocks, users=['seq'], children=0)"


def test_the_check_finds_a_trie_that_was_meddled_with(trie: RadixTrie) -> None:
    node = trie.insert([1, 2], [10, 11])
    trie.check_invariants()

    node.blocks.append(12)
    with pytest.raises(AssertionError, match="rule 1"):
        trie.check_invariants()
    node.blocks.pop()

    trie.num_evictable_blocks += 1
    with pytest.raises(AssertionError, match="rule 5"):
        trie.check_invariants()
    trie.num_evictable_blocks -= 1
