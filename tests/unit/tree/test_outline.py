"""A tree in outline: its largest branches, for any size, with counts of the omitted ones."""

from __future__ import annotations

import pytest

from raydix.cache_core import RadixCache, RadixKey
from raydix.cache_core.outline import Outline, OutlineLimits, OutlineNode

ALL = OutlineLimits(4096, 4096, 4096)


def told(outline: Outline) -> list[tuple[object, ...]]:
    """Each node's first tokens, own and total sizes, and the tokens of the one above it."""

    def name(each: OutlineNode) -> str:
        return " ".join(map(str, each.tokens)) or str(each.extra_key)

    return [
        (name(each), each.own_tokens, each.tokens_below, each.num_nodes, each.parent and name(each.parent))
        for each in outline.nodes
    ]


@pytest.fixture
def cache() -> RadixCache:
    """[1 2] goes on as [3] and as [4 5 6]; another namespace has [7]."""
    cache = RadixCache(1)
    cache.insert(RadixKey([1, 2, 3]))
    cache.insert(RadixKey([1, 2, 4, 5, 6]))
    cache.insert(RadixKey([7], "other"))
    return cache


def test_levels_come_in_order_and_the_largest_branch_first(cache: RadixCache) -> None:
    assert told(cache.outline(ALL)) == [
        ("None", 0, 6, 4, None),
        ("other", 0, 1, 2, None),
        ("1 2", 2, 6, 3, "None"),
        ("7", 1, 1, 1, "other"),
        ("4 5 6", 3, 3, 1, "1 2"),
        ("3", 1, 1, 1, "1 2"),
    ]
    assert all(each.is_whole for each in cache.outline(ALL).nodes)


def test_locks_hits_and_ages_are_those_of_a_node_and_all_below_it(cache: RadixCache) -> None:
    node = cache.match_prefix(RadixKey([1, 2, 3])).last_node
    cache.inc_lock_ref(node)
    cache.match_prefix(RadixKey([7], "other"))

    outline = cache.outline(ALL)
    facts = {
        " ".join(map(str, each.tokens)): (each.num_locks, each.hits, outline.now - each.last_used)
        for each in outline.nodes
        if each.parent is not None
    }

    assert facts == {"1 2": (1, 1, 1), "3": (1, 1, 1), "4 5 6": (0, 0, 3), "7": (0, 1, 0)}
    cache.dec_lock_ref(node)


def test_siblings_that_begin_a_page_alike_are_named_by_the_tokens_in_which_they_differ() -> None:
    cache = RadixCache(4)
    for last in (7, 8):
        cache.insert(RadixKey([1, 2, 3, 4, 5, 5, 5, last, 9, 9, 9, last]))

    names = [each.tokens for each in cache.outline(ALL).nodes if each.parent is not None]

    assert names[0] == [1, 2, 3, 4]
    assert sorted(names[1:]) == [[7, 9, 9, 9, 7], [8, 9, 9, 9, 8]]


def test_limits_leave_out_the_smallest_the_deepest_and_the_last(cache: RadixCache) -> None:
    assert [each[0] for each in told(cache.outline(OutlineLimits(4096, 4096, 1)))] == ["None", "1 2", "4 5 6"]
    assert [each[0] for each in told(cache.outline(OutlineLimits(4096, 1, 4096)))] == ["None", "other", "1 2", "7"]
    assert [each[0] for each in told(cache.outline(OutlineLimits(3, 4096, 4096)))] == ["None", "other", "1 2"]
    assert cache.outline(OutlineLimits(4096, 0, 1)).nodes[0].tokens_below == 6  # omitted nodes are counted
    assert cache.outline(OutlineLimits(1, 0, 1)).num_namespaces == 2


def test_an_outline_changes_nothing(cache: RadixCache, capsys: pytest.CaptureFixture[str]) -> None:
    cache.pretty_print()
    before = capsys.readouterr().out

    cache.outline(ALL)

    cache.pretty_print()
    assert capsys.readouterr().out == before
    cache.check_invariants()


def test_of_a_large_tree_a_bounded_part_is_looked_at_and_said_to_be_a_part() -> None:
    cache = RadixCache(1)
    for first in range(300):
        for second in range(30):
            cache.insert(RadixKey([first, 1000 + second, 5000 + second]))

    nodes = cache.outline(ALL).nodes
    root = nodes[0]

    assert len(nodes) <= 4096
    assert not root.is_whole
    assert root.num_children == 300
    assert sum(each.parent is root for each in nodes) == 256  # the latest
    assert min(each.tokens[0] for each in nodes if each.parent is root) == 44
    assert max(each.num_nodes for each in nodes if each.parent is root) == 31


def test_an_empty_cache_has_an_empty_outline() -> None:
    assert RadixCache(1).outline(ALL) == Outline([], 0, 0)
