"""The contract of the tree's outline for every cache: any kind and page size, in process or on Ray."""

from __future__ import annotations

import pytest
from support.caches.cache_kinds import KindUnderTest, only, shares, shares_slots
from support.caches.cache_under_test import CacheUnderTest

from raydix.schemas import InvalidRequest


def has_plain_units(kind: KindUnderTest) -> bool:
    """Return whether branches lie at pages: not if a unit of the tree is a pair of tokens, or leases have rows."""
    return shares_slots(kind) and not kind.lost_tokens


@only(shares)
async def test_sizes_of_branches_add_up_to_their_parents(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3)
    await cache.publish(4, 5, 6)

    answer = await cache.client.tree()

    namespace = answer.branches[0]
    assert (namespace.parent, namespace.num_tokens) == (None, 0)
    assert namespace.num_tokens_below == sum(each.num_tokens for each in answer.branches) > 0
    assert namespace.num_nodes == len(answer.branches)
    assert all(each.is_whole for each in answer.branches)
    assert {each.tokens[0] for each in answer.branches if each.parent == 0} <= {1, 4}
    (alone,) = (await cache.client.tree(max_depth=0)).branches
    assert alone.model_copy(update={"unused_s": namespace.unused_s}) == namespace


@only(shares, has_plain_units)
async def test_the_tree_branches_where_published_prompts_do(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    await cache.publish(1, 3)

    answer = await cache.client.tree()

    below = [each.tokens[0] for each in answer.branches if each.parent == 1]
    assert [each.tokens[0] for each in answer.branches if each.parent == 0] == [1]
    assert sorted(below) == [2, 3]
    assert answer.branches[0].num_tokens_below == 3 * cache.page_size


@only(lambda kind: not shares(kind))
async def test_a_cache_that_shares_nothing_has_no_tree(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)

    assert (await cache.client.tree()).branches == ()


@only(shares, has_plain_units)
async def test_leases_are_reported_as_locks_of_their_pages(cache: CacheUnderTest) -> None:
    lease = await cache.hold(1)

    branches = (await cache.client.tree()).branches

    assert [each.num_locks for each in branches if each.parent is not None] == [1]
    await lease.release()
    assert not any(each.num_locks for each in (await cache.client.tree()).branches)


@pytest.mark.parametrize("limits", [{"max_nodes": 0}, {"max_depth": -1}, {"max_width": 5000}, {"max_nodes": 1.5}])
async def test_limits_that_make_no_sense_are_refused(cache1: CacheUnderTest, limits: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(limits))):
        await cache1.client.tree(**limits)
