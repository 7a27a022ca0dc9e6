"""`explain` of a cache with a host tier: what the host has, and what was evicted before it was written."""

from __future__ import annotations

import pytest
from support.caches.small_kv_cache import NO_IDS, key, publish
from support.tiers.settled_tiers import NO_SPARE, tensors, tiers_settled, whole_host
from support.tiers.two_tiers import Moves
from support.traffic import eviction_order

from raydix.actors import LocalPrefixCache
from raydix.cache_core import KVCache
from raydix.cache_core.tiers.tier import Tier
from raydix.schemas import CacheConfig, ExplainResponse


def tiers(device: int = 24, host: int = 100, kind: str = "radix") -> tuple[KVCache, Moves]:
    """Return two tiers of pages of 2, and the upper one's cache."""
    upper, lower = (eviction_order.make(pages, "lru", kind) for pages in (device, host))
    moves = Moves(Tier("device", "GPU", upper), Tier("host", "CPU", lower))
    moves.writes.batch_pages = 100
    return upper, moves


def write(moves: Moves) -> None:
    """Write all that the lower tier lacks, in one plan."""
    for move in moves.writes.prepare(moves.upper.cache.num_slots).moves:
        moves.complete(move, move.num_pages)


def was_dropped(cache: KVCache, *ids: int) -> bool:
    found = cache.explain(key(*ids))
    assert found.reason == "evicted"
    return found.was_dropped


# ---------------------------------------------------------------- the record of an eviction


def test_what_was_evicted_before_it_was_written_was_dropped() -> None:
    cache, moves = tiers()
    cache.watch_victims(moves.writes.count_dropped)
    publish(cache, 1, 2, 3, 4)
    write(moves)
    publish(cache, 5, 6, 7, 8)

    cache.evict(8)

    assert not was_dropped(cache, 1, 2, 3, 4)
    assert was_dropped(cache, 5, 6, 7, 8)
    assert moves.writes.counts.dropped == 4


def test_the_record_is_that_of_the_last_eviction() -> None:
    cache, moves = tiers()
    cache.watch_victims(moves.writes.count_dropped)
    publish(cache, 1, 2, 3, 4)
    cache.evict(4)
    assert was_dropped(cache, 1, 2, 3, 4)

    publish(cache, 1, 2, 3, 4)
    write(moves)
    cache.evict(4)

    assert not was_dropped(cache, 1, 2, 3, 4)


def test_a_part_that_was_not_written_was_dropped() -> None:
    cache, moves = tiers()
    cache.watch_victims(moves.writes.count_dropped)
    publish(cache, 1, 2, 3, 4, 5, 6)
    (move,) = moves.writes.prepare(cache.num_slots).moves
    moves.complete(move, 1)

    cache.evict(6)

    assert was_dropped(cache, 1, 2, 3, 4)
    assert moves.writes.counts.dropped == 4


def test_a_write_without_room_drops_the_node_that_is_evicted() -> None:
    cache, moves = tiers(host=2)
    cache.watch_victims(moves.write_before_eviction)
    moves.lower.cache.acquire("l", "s", key(*range(100, 104)))
    publish(cache, 1, 2, 3, 4)

    cache.evict(4)

    assert was_dropped(cache, 1, 2, 3, 4)
    assert (moves.writes.counts.dropped, moves.writes.counts.writes_refused) == (4, 1)


def test_a_node_below_the_last_state_is_of_no_use_and_so_not_dropped() -> None:
    cache, moves = tiers(kind="mamba")
    cache.watch_victims(moves.writes.count_dropped)
    for prompt, publish_state in (((1, 2), True), ((1, 2, 3, 4), False)):
        cache.acquire("l", "s", key(*prompt))
        cache.insert("l", "s", len(prompt), NO_IDS, publish_state=publish_state)
        cache.release("l", "s")

    cache.evict(2)
    assert (was_dropped(cache, 1, 2, 3, 4), moves.writes.counts.dropped) == (False, 0)
    cache.evict(2)
    assert (was_dropped(cache, 1, 2), moves.writes.counts.dropped) == (True, 2)


def serve_state(cache: KVCache, *ids: int, publish_state: bool = True) -> None:
    cache.acquire("l", "s", key(*ids))
    cache.insert("l", "s", len(ids), NO_IDS, publish_state=publish_state)
    cache.release("l", "s")


@pytest.mark.parametrize(
    ("written", "num_dropped"), [((), 6), ((1, 2), 6), ((1, 2, 3, 4), 4), ((1, 2, 3, 4, 5, 6, 7, 8, 9, 10), 6)]
)
@pytest.mark.parametrize("is_leaf", [False, True])
def test_a_state_that_leaves_unwritten_counts_the_kv_behind_the_last_end_that_stays_usable(
    written: tuple[int, ...], num_dropped: int, is_leaf: bool
) -> None:
    """The pool has states at 2 and 8, with a node without a state between them; the lower tier has another state."""
    cache, moves = tiers(kind="mamba")
    if written:
        serve_state(cache, *written)
        write(moves)
        cache.evict(100)
    serve_state(cache, 1, 2)
    serve_state(cache, 1, 2, 3, 4, publish_state=False)
    serve_state(cache, 1, 2, 3, 4, 5, 6, 7, 8)
    if not is_leaf:
        serve_state(cache, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, publish_state=False)
    serve_state(cache, 1, 2, publish_state=False)  # the state at 8 is used less recently
    cache.watch_victims(moves.writes.count_dropped)

    cache.evict_states(1)

    assert moves.upper.longest_prefix(key(1, 2, 3, 4, 5, 6, 7, 8)) == 2
    assert moves.writes.counts.dropped == num_dropped
    cache.evict(100)
    assert moves.writes.counts.dropped == num_dropped + (0 if written == (1, 2) else 2), "the state at 2 leaves, too"


def test_notes_of_dropped_nodes_do_not_outlive_their_eviction() -> None:
    cache, moves = tiers(device=200, kind="mamba")
    cache.watch_victims(moves.writes.count_dropped)
    for number in range(40):
        cache.acquire("l", "s", key(number, 0))
        cache.insert("l", "s", 2, NO_IDS, publish_state=True)
        cache.release("l", "s")
        cache.evict_states(1)  # A leaf goes with its state, an inner node stays.
        cache.evict(1)

    assert not cache.pools.history._dropped
    assert moves.writes.counts.dropped > 0


# ---------------------------------------------------------------- the answer of a cache


async def test_explain_says_how_much_more_is_on_the_host() -> None:
    config = CacheConfig(
        page_size=4,
        pool=tensors(64),
        eviction=NO_SPARE,
        host=whole_host(256),
    )
    prompt = [*range(32), 1]
    async with LocalPrefixCache(config) as cache:
        for served in (prompt[:8], prompt):
            await (await cache.acquire(served)).insert(served, release=True)
        await tiers_settled(cache)
        await cache.evict(24)

        found, longer = await cache.explain(prompt), await cache.explain([*prompt, *range(100)])
        unknown = await cache.explain([7] * 8)

    assert (found.prefix_len, found.host_len, found.reason, found.was_dropped) == (8, 32, "evicted", False)
    assert str(found) == "8 of 33 tokens hit; 24 more are on the host: acquire loads them"
    assert (longer.host_len, longer.was_dropped) == (32, False)
    assert (unknown.host_len, unknown.reason) == (0, "never_stored")


@pytest.mark.parametrize(("bigram", "num_tokens"), [(False, 32), (True, 33)])
async def test_explain_says_that_kv_was_dropped_if_the_host_lacks_some_of_it(bigram: bool, num_tokens: int) -> None:
    config = CacheConfig(
        page_size=4,
        bigram=bigram,
        pool=tensors(64),
        eviction=NO_SPARE,
        host=whole_host(16),
    )
    prompt = list(range(num_tokens))
    async with LocalPrefixCache(config) as cache:
        assert cache.service.host is not None
        cache.service.host.writes.batch_pages = 2
        await (await cache.acquire(prompt)).insert(prompt, release=True)
        await tiers_settled(cache)
        await cache.evict(32)
        found, head = await cache.explain(prompt), await cache.explain(prompt[: 16 + bigram])

    assert (found.prefix_len, found.host_len, found.was_dropped) == (0, 16, True)
    assert str(found) == (
        f"0 of {num_tokens} tokens hit; 16 more are on the host: acquire loads them; "
        "what follows them was dropped before it was written"
    )
    assert (head.host_len, head.was_dropped) == (16, False)


# ---------------------------------------------------------------- the sentence


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"host_len": 7168},
            "1,024 of 8,192 tokens hit; 6,144 more are on the host: acquire loads them",
        ),
        (
            {"host_len": 1024},
            "1,024 of 8,192 tokens hit: what follows was evicted (shortfall), 3.0 s ago",
        ),
        (
            {"host_len": 1024, "was_dropped": True},
            "1,024 of 8,192 tokens hit: what follows was evicted (shortfall), 3.0 s ago, and dropped before it was "
            "written",
        ),
        (
            {},
            "1,024 of 8,192 tokens hit: what follows was evicted (shortfall), 3.0 s ago",
        ),
        (
            {"disk_len": 7168},
            "1,024 of 8,192 tokens hit; 6,144 more are on the disk: acquire loads them",
        ),
        (
            {"host_len": 2048, "disk_len": 7168},
            "1,024 of 8,192 tokens hit; 1,024 more are on the host and 5,120 on the disk: acquire loads them",
        ),
        (
            {"host_len": 2048, "disk_len": 2048, "was_dropped": True},
            "1,024 of 8,192 tokens hit; 1,024 more are on the host: acquire loads them; what follows them was dropped "
            "before it was written",
        ),
        (
            {"disk_len": 1024, "disk_left_s": 40.0},
            "1,024 of 8,192 tokens hit: what follows was evicted (shortfall), 3.0 s ago; it was on the disk until "
            "40.0 s ago",
        ),
        (
            {"disk_len": 7168, "disk_left_s": 40.0, "was_dropped": True},
            "1,024 of 8,192 tokens hit; 6,144 more are on the disk: acquire loads them; what follows them was on the "
            "disk until 40.0 s ago",
        ),
    ],
)
def test_the_sentence_names_the_tiers_first(fields: dict[str, object], expected: str) -> None:
    of_device = {"num_tokens": 8192, "prefix_len": 1024, "full_prefix_len": 1024}
    of_eviction = {"reason": "evicted", "cause": "shortfall", "seconds_ago": 3.0}

    assert str(ExplainResponse.model_validate(of_device | of_eviction | fields)) == expected
