"""`Moves`: how writes and loads are planned and ended, without a copier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.caches.small_kv_cache import NO_IDS, key, publish
from support.tiers.two_tiers import Moves
from support.traffic import eviction_order

from raydix.cache_core import (
    ExpiredLeaseError,
    KVCache,
    MambaPool,
    MambaRadixCache,
    OutOfSlotsError,
    RadixCache,
    RadixKey,
    TokenToKVPoolAllocator,
    UnknownLeaseError,
)
from raydix.cache_core.leases.lease_table import TIERS
from raydix.cache_core.tiers.move import Move
from raydix.cache_core.tiers.tier import Tier
from raydix.cache_core.tiers.writes import BATCH_BYTES, Writes

Pair = Callable[..., Moves]


def make_cache(num_slots: int, page_size: int, num_states: int = 0, **options: Any) -> KVCache:
    allocator = TokenToKVPoolAllocator(num_slots, page_size)
    if not num_states:
        return KVCache(RadixCache(page_size, token_to_kv_pool_allocator=allocator), allocator, **options)
    states = MambaPool(num_states)
    return KVCache(MambaRadixCache(page_size, allocator, states), allocator, states=states, **options)


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two tiers of pages of 2, sound at the end of a test."""
    made: list[Moves] = []

    def make(
        device: int = 32,
        host: int = 64,
        bytes_per_page: int = 0,
        page: int = 2,
        states: tuple[int, int] = (0, 0),
        **options: Any,
    ) -> Moves:
        upper = Tier("device", "GPU", make_cache(device, page, states[0], **options))
        lower = Tier("host", "CPU", make_cache(host, page, states[1], **options))
        made.append(Moves(upper, lower, bytes_per_page))
        made[-1].writes.batch_pages = 100
        return made[-1]

    yield make
    for moves in made:
        moves.check_invariants()


def write_all(moves: Moves) -> int:
    """Write until the plan is ahead; return the number of plans."""
    for number in range(1, 1000):
        plan = moves.writes.prepare(moves.upper.cache.num_slots)
        for move in plan.moves:
            moves.complete(move, move.num_pages)
        if plan.is_ahead:
            return number
    raise AssertionError("the plan never gets ahead")


def write(moves: Moves, *ids: int, ns: str | None = None) -> None:
    """Put a prompt into the lower tier alone."""
    publish(moves.upper.cache, *ids, ns=ns)
    write_all(moves)
    moves.upper.cache.evict(moves.upper.cache.num_slots)


def begin_load(moves: Moves, *ids: int, lease_id: str = "l", ns: str | None = None, **options: Any) -> Move:
    lease = moves.upper.cache.acquire(lease_id, "s", key(*ids, ns=ns), **options)
    move = moves.prepare_load(lease)
    assert move is not None
    return move


# ---------------------------------------------------------------- writes


def test_a_write_copies_what_the_lower_tier_lacks(pair: Pair) -> None:
    moves = pair()
    slots = publish(moves.upper.cache, 1, 2, 3, 4)
    write_all(moves)
    more = publish(moves.upper.cache, 1, 2, 3, 4, 5, 6)

    (move,) = moves.writes.prepare(32).moves

    assert (move.first, move.stop, move.source_starts.tolist()) == (4, 6, [more[4]])
    assert more[:4] == slots and not move.is_load
    moves.check_invariants()
    assert moves.complete(move, 1).num_tokens == 2
    assert moves.lower.longest_prefix(key(1, 2, 3, 4, 5, 6)) == 6
    assert moves.writes.counts.written == 6


def test_nothing_is_planned_while_enough_is_free(pair: Pair) -> None:
    moves = pair(device=32)
    publish(moves.upper.cache, 1, 2, 3, 4)

    assert moves.writes.prepare(28) == ([], True)
    assert len(moves.writes.prepare(29).moves) == 1


def conversations(cache: KVCache, num: int, num_turns: int) -> None:
    """Publish chains of nodes of one page of 2, as decoded answers leave them."""
    for number in range(num):
        tokens = [number, 1000]
        for turn in range(num_turns):
            publish(cache, *tokens)
            tokens += [turn, number]


@pytest.mark.parametrize("most_climbed", [7, 1024])
def test_chains_of_pages_are_written_up_to_the_reserve_and_then_the_task_sleeps(
    pair: Pair, most_climbed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 conversations with answers of single pages, in a pool that is 0.9 full: the coldest tenth is written."""
    monkeypatch.setattr("raydix.cache_core.tiers.writes._MOST_CLIMBED", most_climbed)
    moves = pair(device=6400, host=10_000)
    device = moves.upper.cache
    conversations(device, 64, 45)
    assert device.free_slots == 640
    nodes = list(device.radix.parts.tree.nodes())
    assert {len(node) for node in nodes} == {2} and sum(not node.children for node in nodes) == 64

    plans = 1
    while not (plan := moves.writes.prepare(1280)).is_ahead or plan.moves:
        assert sum(move.num_pages for move in plan.moves) <= moves.writes.batch_pages
        for move in plan.moves:
            moves.complete(move, move.num_pages)
        plans += 1
        assert plans < 100, "the task would not sleep"

    assert 640 <= moves.writes.counts.written < 640 + 90, "a conversation more at most"
    device.watch_victims(moves.writes.count_dropped)
    device.evict(640)
    assert moves.writes.counts.dropped == 0
    device.evict(640)
    assert moves.writes.counts.dropped > 500
    assert moves.writes.prepare(device.free_slots) == ([], True)


def test_the_lower_tier_is_asked_once_about_each_use_of_a_leaf(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    moves = pair(device=6400, host=10_000)
    conversations(moves.upper.cache, 20, 5)
    write_all(moves)
    asked: list[str] = []
    ask = Writes.missing
    monkeypatch.setattr(Writes, "missing", lambda self, node: (asked.append("asked"), ask(self, node))[1])

    assert [write_all(moves) for _ in range(3)] == [1, 1, 1] and not asked
    publish(moves.upper.cache, 3, 1000, 0, 3)  # It is an inner node of a chain: no leaf was used.
    assert write_all(moves) == 1 and not asked
    publish(moves.upper.cache, 3, 1000, 0, 3, 1, 3, 2, 3, 3, 3)
    assert write_all(moves) == 1 and len(asked) == 1
    assert moves.writes.counts.written == 20 * 5 * 2


@pytest.mark.parametrize("is_released", [False, True])
def test_what_is_being_written_counts_for_the_reserve(pair: Pair, is_released: bool) -> None:
    moves = pair(device=32)
    moves.writes.batch_pages = 4
    for number in range(3):
        publish(moves.upper.cache, *range(10 * number, 10 * number + 8))

    writes = [move for _ in range(6) for move in moves.writes.prepare(8 + 16).moves]
    if is_released:
        for move in writes:
            moves.writes.release_source(move)
    assert [move for _ in range(6) for move in moves.writes.prepare(8 + 16).moves] == []
    assert [move.num_tokens for move in writes] == [8, 8], "the hottest prompt is not among them"
    for move in writes:
        moves.complete(move, move.num_pages)
    assert moves.writes.prepare(8 + 16) == ([], True)


def test_a_batch_is_bounded_and_a_long_leaf_goes_in_parts(pair: Pair) -> None:
    moves = pair(device=1600, host=1600)
    moves.writes.batch_pages = 4
    tokens = list(range(30))
    publish(moves.upper.cache, *tokens)

    parts = []
    while plan := moves.writes.prepare(1600).moves:
        (move,) = plan
        parts.append((move.first, move.stop))
        moves.complete(move, move.num_pages)

    assert parts == [(0, 8), (8, 16), (16, 24), (24, 30)]
    assert moves.lower.longest_prefix(key(*tokens)) == 30


def test_the_size_of_a_batch_is_32_mib_and_a_part_of_the_pool(pair: Pair) -> None:
    tiers = pair(device=3200)
    assert Writes(tiers.upper, tiers.lower).batch_pages == 100
    assert Writes(tiers.upper, tiers.lower, BATCH_BYTES // 7).batch_pages == 7
    assert Writes(tiers.upper, tiers.lower, 10).batch_pages == 100
    assert Writes(tiers.upper, tiers.lower, 10**9).batch_pages == 1


def test_writes_with_a_common_beginning_go_one_after_the_other(pair: Pair) -> None:
    moves = pair()
    for last in (5, 6, 7):
        publish(moves.upper.cache, 1, 2, 3, 4, last, last)

    (first,) = moves.writes.prepare(32).moves
    assert moves.writes.prepare(32) == ([], False)
    moves.complete(first, first.num_pages)
    others = moves.writes.prepare(32).moves

    assert [(move.first, move.stop) for move in (first, *others)] == [(0, 6), (4, 6), (4, 6)]
    for move in others:
        moves.complete(move, 1)


def test_a_locked_node_is_left_alone(pair: Pair) -> None:
    moves = pair()
    publish(moves.upper.cache, 1, 2, 3, 4)
    moves.upper.cache.acquire("l", "s", key(1, 2, 3, 4))

    assert moves.writes.prepare(32) == ([], True)


def test_the_lower_tier_evicts_for_a_write_and_refuses_what_never_fits(pair: Pair) -> None:
    moves = pair(device=64, host=8)
    for prompt in ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10], range(20, 30)):
        publish(moves.upper.cache, *prompt)
        write_all(moves)

    assert moves.lower.longest_prefix(key(7, 8, 9, 10)) == 4
    assert moves.lower.cache.counters.tokens_evicted > 0
    assert moves.writes.counts.writes_refused == 1
    assert moves.writes.prepare(64) == ([], True), "a refused write is not tried again"


@pytest.mark.parametrize("batch_pages", [2, 100])
def test_while_the_lower_tier_is_locked_nothing_is_tried_twice(pair: Pair, batch_pages: int) -> None:
    moves = pair(host=8)
    moves.writes.batch_pages = batch_pages
    publish(moves.upper.cache, *range(10))
    moves.lower.cache.acquire("l", "s", key(*range(20, 28)))

    plans = [moves.writes.prepare(32) for _ in range(4)]

    assert [plan.moves for plan in plans] == [[]] * 4 and plans[-1].is_ahead
    assert moves.writes.counts.writes_refused == 1
    moves.upper.cache.watch_victims(moves.writes.count_dropped)
    moves.upper.cache.evict(32)
    assert moves.writes.counts.dropped == 10


@pytest.mark.parametrize("is_load", [False, True])
def test_a_refused_node_is_asked_about_again_once_a_move_has_unlocked_the_lower_tier(pair: Pair, is_load: bool) -> None:
    moves = pair(host=8)
    write(moves, *range(8))
    if is_load:
        other = begin_load(moves, *range(8))
    else:
        publish(moves.upper.cache, *range(20, 28))
        (other,) = moves.writes.prepare(32).moves
    publish(moves.upper.cache, *range(30, 34))

    assert [moves.writes.prepare(32) for _ in range(3)][-1] == ([], True)
    assert moves.writes.counts.writes_refused == 1, "it was tried once"
    moves.complete(other, other.num_pages)
    (move,) = moves.writes.prepare(32).moves

    assert move.key[:4] == key(*range(30, 34))
    moves.complete(move, move.num_pages)
    assert moves.lower.longest_prefix(key(*range(30, 34))) == 4
    assert moves.writes.counts.writes_refused == 1


def test_a_refused_node_is_asked_about_once_a_round(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of its round are written, and each unlocks the lower tier."""
    moves = pair(device=64, host=8)
    moves.writes.batch_pages = 2
    device, host = moves.upper.cache, moves.lower.cache
    device.watch_victims(moves.writes.count_dropped)
    host.acquire("l", "s", key(*range(100, 106)))
    publish(device, *range(4))
    for number in range(10, 16):
        publish(device, number, number)
    tried: list[int] = []
    open_target = host.open_target

    def noted(tree_key: RadixKey, *arguments: Any, **more: Any) -> Any:
        tried.append(tree_key[:1] == key(0))
        return open_target(tree_key, *arguments, **more)

    monkeypatch.setattr(host, "open_target", noted)

    for number in range(1, 4):
        write_all(moves)
        assert sum(tried) == number
    assert moves.writes.counts.written == 12
    device.evict(64)
    assert moves.writes.counts.dropped == 4
    host.release("l", "s")


def test_a_refused_state_is_asked_about_again(pair: Pair) -> None:
    moves = pair(states=(8, 1))
    device = moves.upper.cache
    for prompt in ((1, 2), (3, 4)):
        device.acquire("l", "s", key(*prompt))
        device.insert("l", "s", 2, NO_IDS, publish_state=True)
        device.release("l", "s")

    (first,) = moves.writes.prepare_states(8).moves
    assert [moves.writes.prepare_states(8) for _ in range(2)][-1] == ([], True)
    assert moves.writes.counts.writes_refused == 1
    moves.complete(first, 1)
    (second,) = moves.writes.prepare_states(8).moves
    moves.complete(second, 1)

    assert [moves.lower.longest_prefix(key(*prompt)) for prompt in ((1, 2), (3, 4))] == [0, 2]


def test_the_source_cannot_be_evicted_nor_the_target_found_until_the_end(pair: Pair) -> None:
    moves = pair()
    publish(moves.upper.cache, 1, 2, 3, 4)
    (move,) = moves.writes.prepare(32).moves

    assert moves.upper.cache.evict(32) == 0
    assert moves.lower.longest_prefix(key(1, 2, 3, 4)) == 0 and moves.lower.cache.private_slots == 4
    moves.check_invariants()
    assert moves.complete(move, 1).num_tokens == 2
    assert moves.lower.longest_prefix(key(1, 2, 3, 4)) == 2
    assert moves.writes.counts.failed == 2 and not moves.in_flight


def test_leases_of_moves_are_not_remembered(pair: Pair) -> None:
    moves = pair(remembered_leases=4)
    write(moves, 1, 2, 3, 4)
    move = begin_load(moves, 1, 2, 3, 4)
    moves.complete(move, 2)

    for tier in (moves.upper, moves.lower):
        assert not tier.cache.leases.of_session(TIERS)
        assert {name for _, name in tier.cache.leases.ended._ended} <= {"publisher"}


def test_a_write_of_a_retired_namespace_publishes_nothing(pair: Pair) -> None:
    moves = pair()
    publish(moves.upper.cache, 1, 2, ns="a")
    publish(moves.upper.cache, 3, 4, ns="b")
    first, second = moves.writes.prepare(32).moves

    assert moves.upper.cache.retire(lambda namespace: namespace == "a") == 1
    moves.complete(first, 1)
    moves.complete(second, 1)

    assert moves.lower.longest_prefix(key(1, 2, ns="a")) == 0
    assert moves.lower.longest_prefix(key(3, 4, ns="b")) == 2


def test_a_state_moves_with_its_node_and_alone_if_the_pages_are_there(pair: Pair) -> None:
    moves = pair(states=(4, 4))
    device = moves.upper.cache
    for prompt in ([1, 2, 3, 4], [1, 2]):
        device.acquire("l", "s", key(*prompt))
        device.insert("l", "s", len(prompt), NO_IDS, publish_state=True)
        device.release("l", "s")

    plans = [moves.writes.prepare(32).moves]
    moves.complete(plans[0][0], plans[0][0].num_pages)
    plans.append(moves.writes.prepare(32).moves)

    assert [(move.first, move.stop, len(move.target_states)) for (move,) in plans] == [(0, 4, 1), (2, 2, 1)]
    moves.complete(plans[1][0], 0)
    assert moves.lower.longest_prefix(key(1, 2)) == 2 and moves.lower.longest_prefix(key(1, 2, 3, 4)) == 4


def test_states_are_written_before_they_run_short(pair: Pair) -> None:
    moves = pair(device=64, states=(5, 9))
    device, prompts = moves.upper.cache, [(1, 2), (1, 2, 3, 4), (5, 6), (7, 8)]
    for prompt in prompts:
        device.acquire("l", "s", key(*prompt))
        device.insert("l", "s", len(prompt), NO_IDS, publish_state=True)
        device.release("l", "s")
    device.watch_victims(moves.writes.count_dropped)

    assert moves.writes.prepare(32) == moves.writes.prepare_states(1) == ([], True), "a state and 32 slots are free"
    while not (plan := moves.writes.prepare_states(3)).is_ahead or plan.moves:
        for move in plan.moves:
            moves.complete(move, move.num_pages)

    device.evict_states(2)
    assert [moves.lower.longest_prefix(key(*prompt)) for prompt in prompts] == [2, 4, 0, 0]
    assert moves.writes.counts.dropped == 0


def test_windows_are_written_before_they_run_short() -> None:
    device, host = eviction_order.make(24, "lru", "window"), eviction_order.make(100, "lru", "window")
    moves = Moves(Tier("device", "GPU", device), Tier("host", "CPU", host))
    moves.writes.batch_pages = 100
    for number in range(3):
        publish(device, *[number] * 6)  # 18 of 24 window slots
    device.watch_victims(moves.writes.count_dropped)

    assert moves.writes.prepare_windows(6) == ([], True)
    (move,) = moves.writes.prepare_windows(8).moves
    assert (move.live_from, move.stop, len(move.source_windows)) == (0, 6, 3)
    moves.complete(move, 3)
    device.evict_window(2)

    assert [moves.lower.longest_prefix(key(*[number] * 6)) for number in range(3)] == [6, 0, 0]
    assert moves.writes.counts.dropped == 0


def window_pair(device: int = 32, host: int = 100) -> Moves:
    """Return two tiers with a window of 4 and pages of 2; the tail is 6 tokens."""
    tiers = [eviction_order.make(pages, "lru", "window") for pages in (device, host)]
    moves = Moves(Tier("device", "GPU", tiers[0]), Tier("host", "CPU", tiers[1]))
    moves.writes.batch_pages = 100
    return moves


def write_windows(moves: Moves, num_tokens: int) -> list[tuple[int, int]]:
    """Write window KV until so many tokens more are free or written; return the range of each move."""
    device, done = moves.upper.cache, list[tuple[int, int]]()
    for _ in range(100):
        plan = moves.writes.prepare_windows(device.allocator.swa.available_size() + num_tokens)  # type: ignore[union-attr]
        for move in plan.moves:
            done.append((move.live_from, move.stop))
            moves.complete(move, move.num_pages)
        if plan.is_ahead:
            moves.check_invariants()
            return done
    raise AssertionError("the plan never gets ahead")


def test_a_window_is_written_before_the_first_part_of_its_tail_is_dropped() -> None:
    """The same prompt again ends its match a page earlier, so its tail lies in two nodes."""
    moves = window_pair()
    device = moves.upper.cache
    device.watch_victims(moves.writes.count_dropped)
    for limit in (None, 7):
        device.acquire("l", "s", key(*range(8)), 0, limit)
        device.insert("l", "s", 8, NO_IDS)
        device.release("l", "s")
    assert [node.end for node in device.radix.parts.tree.nodes()] == [2, 6, 8]
    device.evict_window(2)  # the window KV of the first page, which no stop needs

    assert write_windows(moves, 1) == [(2, 8)], "a match may end at 6, too"
    device.evict_window(2)

    assert [moves.lower.longest_prefix(key(*range(stop))) for stop in (6, 8)] == [6, 8]
    assert moves.writes.counts.dropped == 0


def test_the_first_part_of_a_tail_that_is_dropped_unwritten_counts_its_prompt() -> None:
    moves = window_pair()
    device = moves.upper.cache
    device.watch_victims(moves.writes.count_dropped)
    for limit in (None, 7):
        device.acquire("l", "s", key(*range(8)), 0, limit)
        device.insert("l", "s", 8, NO_IDS)
        device.release("l", "s")

    device.evict_window(2)
    assert moves.writes.counts.dropped == 0
    device.evict_window(2)
    assert moves.writes.counts.dropped == 8
    device.evict(8)
    assert moves.writes.counts.dropped == 8, "the rest is of no use"


def test_a_part_of_a_prompt_takes_no_window_slots_and_is_no_stop() -> None:
    moves = window_pair(device=64)
    moves.writes.batch_pages = 2
    lower = moves.lower.cache
    publish(moves.upper.cache, *range(20))
    assert lower.allocator.swa is not None
    free = lower.allocator.swa.available_size()
    parts = []
    while (plan := moves.writes.prepare(200)).moves:
        (move,) = plan.moves
        parts.append((move.first, move.stop, free - lower.allocator.swa.available_size()))
        moves.complete(move, move.num_pages)
        moves.check_invariants()

    assert parts == [(0, 4, 0), (4, 8, 0), (8, 12, 0), (12, 20, 6)]
    assert [node.end for node in lower.radix.parts.tree.nodes() if node.swa_stop] == [20]


def put_below(moves: Moves, *ids: int) -> None:
    """Have a prompt in the lower tier alone."""
    publish(moves.upper.cache, *ids)
    write_all(moves)
    moves.upper.cache.evict(moves.upper.cache.num_slots)


def test_where_a_prompt_branches_off_from_one_in_the_lower_tier_its_window_is_written() -> None:
    moves = window_pair()
    device = moves.upper.cache
    put_below(moves, *range(10), *range(20, 30))
    publish(device, *range(10), *range(30, 34))  # A node ends at 8; the tail behind it is warm.
    assert moves.lower.longest_prefix(key(*range(10))) == 0

    (move,) = moves.writes.prepare_windows(device.allocator.swa.available_size() + 1).moves  # type: ignore[union-attr]
    assert (move.live_from, move.stop, len(move.source_windows)) == (4, 10, 3)
    device.evict_window(100)
    moves.check_invariants()
    moves.complete(move, move.num_pages)

    assert moves.lower.longest_prefix(key(*range(10), 40, 41)) == 10
    assert write_windows(moves, 100) == [(8, 14)], "its lock has kept the tail"


def test_where_two_prompts_of_the_pool_branch_off_the_window_is_written() -> None:
    """The second one finds no window KV there, so no match ends there; it computes it again."""
    moves = window_pair()
    device = moves.upper.cache
    publish(device, *range(10), *range(20, 24))
    device.evict_window(8)
    publish(device, *range(10), *range(30, 34))

    assert write_windows(moves, 1) == [(4, 10)]
    assert moves.lower.longest_prefix(key(*range(10))) == 10


def test_no_window_is_written_where_a_prompt_only_goes_on_from_the_lower_tier() -> None:
    moves = window_pair()
    device = moves.upper.cache
    put_below(moves, *range(10))
    moves.lower.cache.evict_window(100)
    publish(device, *range(20))

    assert write_windows(moves, 100) == [(14, 20)]


# ---------------------------------------------------------------- loads


def test_a_load_makes_the_prefix_longer_before_the_hand_out(pair: Pair) -> None:
    moves = pair()
    write(moves, 1, 2, 3, 4, 5, 6)
    publish(moves.upper.cache, 1, 2)
    before = moves.upper.cache.counters.tokens_reused
    move = begin_load(moves, 1, 2, 3, 4, 5, 6, 7)
    lease = move.target

    assert (lease.prefix_len, lease.session_id, lease.filling_for, move.first, move.stop) == (2, TIERS, "s", 2, 6)
    moves.check_invariants()
    finished = moves.complete(move, 2)

    assert finished.lease is lease and (finished.num_tokens, finished.must_restart) == (4, False)
    assert (lease.prefix_len, lease.loaded_len, lease.session_id, lease.filling_for) == (6, 4, "s", None)
    assert moves.upper.cache.leases.get("l", "s") is lease
    assert moves.upper.longest_prefix(key(1, 2, 3, 4, 5, 6)) == 6
    counters = moves.upper.cache.counters
    assert counters.tokens_reused - before == 6 and moves.loads.counts.loaded == 4


def test_a_load_is_a_use_of_the_lower_tier(pair: Pair) -> None:
    moves = pair(host=8)
    write(moves, 1, 2, 3, 4)
    write(moves, 5, 6)
    move = begin_load(moves, 1, 2, 3, 4)
    moves.complete(move, 2)
    moves.upper.cache.end_session("s")
    write(moves, 7, 8, 9, 10)

    assert [moves.lower.longest_prefix(key(*ids)) for ids in ((1, 2, 3, 4), (5, 6), (7, 8, 9, 10))] == [4, 0, 4]
    assert moves.lower.cache.counters.acquires == 1 and moves.lower.cache.counters.tokens_reused == 4


def test_a_failed_load_leaves_the_shorter_prefix(pair: Pair) -> None:
    moves = pair()
    write(moves, 1, 2, 3, 4, 5, 6)
    move = begin_load(moves, 1, 2, 3, 4, 5, 6)

    assert moves.complete(move, 1).lease is move.target

    assert (move.target.prefix_len, move.target.num_slots) == (2, 6)
    assert moves.upper.cache.counters.hits == 1 and moves.loads.counts.failed == 4


def test_the_limit_of_a_request_bounds_its_load(pair: Pair) -> None:
    moves = pair()
    write(moves, 1, 2, 3, 4, 5, 6)
    lease = moves.upper.cache.acquire("l", "s", key(1, 2, 3, 4, 5, 6), max_prefix_len=5)

    move = moves.prepare_load(lease, limit=5)

    assert move is not None and move.stop == 4
    moves.complete(move, 2)
    assert moves.upper.cache.acquire("m", "s", key(9, 9), max_prefix_len=0).prefix_len == 0


def test_a_second_request_waits_for_the_running_load_of_its_next_page(pair: Pair) -> None:
    moves = pair()
    write(moves, 1, 2, 3, 4)
    move = begin_load(moves, 1, 2, 3, 4)

    assert moves.running(key(1, 2, 3, 4, 5)) is move
    assert moves.running(key(1, 2, 9, 9)) is move
    assert moves.running(key(1, 2, 3, 4), limit=1) is None
    assert moves.running(key(9, 9)) is None
    assert moves.running(key(1, 2, 3, 4, ns="a")) is None
    other = moves.upper.cache.acquire("other", "s", key(1, 2, 3, 4))
    assert moves.prepare_load(other) is None, "it was not loaded twice"
    moves.complete(move, 2)
    assert moves.running(key(1, 2, 3, 4)) is None


def test_no_session_can_use_a_lease_that_is_being_filled(pair: Pair) -> None:
    moves = pair()
    write(moves, 1, 2, 3, 4)
    move, device = begin_load(moves, 1, 2, 3, 4), moves.upper.cache

    uses: list[Callable[[], object]] = [
        lambda: device.extend("l", "s", 1),
        lambda: device.insert("l", "s", 4, NO_IDS),
        lambda: device.release_window("l", "s", 1),
        lambda: device.offer("l", "s", "offer", 1.0),
        lambda: device.acquire("l", "s", key(1)),
        lambda: device.release("l", "other"),
    ]
    for use in uses:
        with pytest.raises(UnknownLeaseError):
            use()
    moves.complete(move, 2)
    assert device.acquire("l", "s", key(1)) is move.target, "a retry gets the filled lease"


@pytest.mark.parametrize("end", ["release", "end_session", "quarantine_session"])
def test_a_lease_that_ends_while_it_is_filled_keeps_its_slots_until_the_copy_ends(pair: Pair, end: str) -> None:
    moves = pair(remembered_leases=4)
    write(moves, 1, 2, 3, 4)
    move, device = begin_load(moves, 1, 2, 3, 4, new_tokens=2), moves.upper.cache

    assert getattr(device, end)(*(("l", "s") if end == "release" else ("s",))) == 1

    assert device.private_slots == 6 and not device.quarantine.take("s")
    moves.check_invariants()
    with pytest.raises((UnknownLeaseError, ExpiredLeaseError)):
        device.acquire("l", "s", key(1))
    finished = moves.complete(move, 2)
    assert finished.lease is None and not finished.must_restart
    assert device.private_slots == 0 and moves.upper.longest_prefix(key(1, 2, 3, 4)) == 4
    assert (moves.loads.counts.loaded, moves.loads.counts.loaded_unused) == (0, 4)


@pytest.mark.parametrize("lost", ["retire", "reset"])
def test_a_retirement_during_a_load_begins_the_request_again(pair: Pair, lost: str) -> None:
    moves = pair(remembered_leases=4)
    write(moves, 1, 2, 3, 4, ns="a")
    counters = moves.upper.cache.counters
    before = (counters.acquires, counters.tokens_requested, counters.tokens_reused, counters.hits)
    move = begin_load(moves, 1, 2, 3, 4, ns="a")

    cache = moves.upper.cache
    cache.reset() if lost == "reset" else cache.retire(lambda namespace: namespace == "a")
    moves.check_invariants()
    finished = moves.complete(move, 2)

    assert finished == (0, None, True)
    assert before == (counters.acquires, counters.tokens_requested, counters.tokens_reused, counters.hits)
    assert moves.upper.cache.private_slots == 0
    again = moves.upper.cache.acquire("l", "s", key(1, 2, 3, 4, ns="a"))
    assert again.prefix_len == 0 and moves.prepare_load(again) is None


def test_after_a_retirement_nobody_waits_for_the_old_load(pair: Pair) -> None:
    moves = pair()
    write(moves, 1, 2, 3, 4)
    move = begin_load(moves, 1, 2, 3, 4)
    moves.upper.cache.reset()
    write(moves, 1, 2, 3, 4)

    assert moves.running(key(1, 2, 3, 4)) is None
    new = begin_load(moves, 1, 2, 3, 4, lease_id="new")
    moves.complete(move, 2)
    assert moves.complete(new, 2).lease is new.target


def test_pages_that_another_request_published_meanwhile_are_used(pair: Pair) -> None:
    moves = pair()
    write(moves, 1, 2, 3, 4)
    move = begin_load(moves, 1, 2, 3, 4)
    slots = publish(moves.upper.cache, 1, 2, 3, 4)

    moves.complete(move, 2)

    assert move.target.starts.tolist() == slots[::2] and move.target.prefix_len == 4
    assert moves.upper.cache.counters.tokens_duplicate == 4


def test_a_load_fills_the_states_of_the_lease_and_of_the_tree(pair: Pair) -> None:
    moves = pair(states=(4, 4))
    device = moves.upper.cache
    device.acquire("p", "s", key(1, 2))
    device.insert("p", "s", 2, NO_IDS, publish_state=True)
    device.release("p", "s")
    write_all(moves)
    device.evict(32)
    move = begin_load(moves, 1, 2, 3)

    assert len(set(move.target_states)) == 2 and move.target_states[0] == move.target.state_slot
    moves.check_invariants()
    moves.complete(move, 1)
    assert device.tree.state_at(move.target.node) == move.target_states[1]
    assert moves.loads.counts.states_not_published == 0


def test_without_a_second_slot_a_loaded_state_is_not_published(pair: Pair) -> None:
    moves = pair(states=(2, 4))
    device = moves.upper.cache
    device.acquire("p", "s", key(1, 2))
    device.insert("p", "s", 2, NO_IDS, publish_state=True)
    device.release("p", "s")
    write_all(moves)
    device.evict(32)
    device.acquire("other", "s", key(9, 9))
    move = begin_load(moves, 1, 2, 3)

    assert len(move.target_states) == 1 and moves.loads.counts.states_not_published == 1
    moves.complete(move, 1)
    assert move.target.prefix_len == 2 and device.tree.state_at(move.target.node) is None
    assert moves.upper.longest_prefix(key(1, 2)) == 0


def test_the_prefix_below_survives_the_evictions_of_its_own_request(pair: Pair) -> None:
    moves = pair(device=8, host=8)
    device = moves.upper.cache
    device.watch_victims(moves.write_before_eviction)
    publish(device, 1, 2, 3, 4)
    publish(device, 5, 6, 7, 8, 9, 10)
    assert moves.lower.longest_prefix(key(1, 2, 3, 4)) == 4

    with moves.holding(key(1, 2, 3, 4)):
        lease = device.acquire("l", "s", key(1, 2, 3, 4), new_tokens=4)
        move = moves.prepare_load(lease)
    assert move is not None and moves.complete(move, 2).lease is not None
    assert lease.prefix_len == 4


def test_a_lock_without_room_for_its_load_changes_nothing(pair: Pair) -> None:
    moves = pair(device=8)
    write(moves, 1, 2, 3, 4)
    device = moves.upper.cache
    device.acquire("large", "s", RadixKey([9] * 6))
    lease = device.lock("l", "s", key(1, 2, 3, 4))

    with pytest.raises(OutOfSlotsError):
        moves.prepare_load(lease)

    assert (lease.session_id, lease.filling_for, lease.num_slots) == ("s", None, 0)
    assert not moves.in_flight


def test_a_prefetch_loads_for_no_lease_and_requests_wait_for_it(pair: Pair) -> None:
    moves = pair(device=8)
    write(moves, 1, 2, 3, 4, 5, 6)
    move = moves.prefetch(key(1, 2, 3, 4, 5, 6), limit=5)

    assert move is not None and (move.first, move.stop) == (0, 4)
    assert moves.running(key(1, 2)) is move and moves.prefetch(key(1, 2)) is None
    moves.check_invariants()
    assert moves.complete(move, 2) == (4, None, False)
    assert moves.upper.longest_prefix(key(1, 2, 3, 4, 5, 6)) == 4 and not moves.upper.cache.private_slots
    assert moves.loads.counts.loaded == 0 and moves.upper.cache.counters.acquires == 1
    moves.upper.cache.acquire("l", "s", key(9, 9, 9, 9, 9, 9, 9, 9))
    assert moves.prefetch(key(1, 2)) is None, "there is no room"


def test_a_prefetch_of_a_retired_namespace_publishes_nothing(pair: Pair) -> None:
    moves = pair(states=(4, 4))
    device = moves.upper.cache
    device.acquire("p", "s", key(1, 2))
    device.insert("p", "s", 2, NO_IDS, publish_state=True)
    device.release("p", "s")
    write_all(moves)
    device.evict(32)
    move = moves.prefetch(key(1, 2))
    assert move is not None and len(move.target_states) == 1

    device.reset()

    assert moves.complete(move, 1) == (0, None, False)
    assert device.free_slots == 32


# -------------------------------------------------------------------- writes from buffers


def node_of(moves: Moves, *ids: int) -> Any:
    node, _ = moves.upper.cache.radix.locate(key(*ids), len(ids))
    return node


def test_a_node_is_written_with_what_is_missing_above_it(pair: Pair) -> None:
    moves = pair()
    publish(moves.upper.cache, 1, 2, 3, 4)
    publish(moves.upper.cache, 1, 2, 3, 4, 5, 6)

    move = moves.writes.prepare_prefix(node_of(moves, 1, 2, 3, 4, 5, 6), 100)
    assert move is not None and (move.first, move.stop) == (0, 6)
    assert moves.writes.prepare_prefix(node_of(moves, 1, 2, 3, 4), 100) is None, "it is being written"
    moves.complete(move, 3)
    assert moves.lower.longest_prefix(key(1, 2, 3, 4, 5, 6)) == 6
    assert moves.writes.prepare_prefix(node_of(moves, 1, 2, 3, 4, 5, 6), 100) is None, "it is there"

    publish(moves.upper.cache, *range(20, 30))
    part = moves.writes.prepare_prefix(node_of(moves, *range(20, 30)), 2)
    assert part is not None and part.num_pages == 2
    moves.complete(part, 2)
    assert moves.lower.longest_prefix(key(*range(20, 30))) == 4


def test_no_page_is_locked_once_a_write_is_released(pair: Pair) -> None:
    moves = pair()
    upper, lower = moves.upper.cache, moves.lower.cache
    publish(upper, 1, 2, 3, 4)
    move = moves.writes.prepare_prefix(node_of(moves, 1, 2, 3, 4), 100)
    assert move is not None
    assert upper.protected_size() == 4
    moves.check_invariants()

    moves.writes.release_source(move)
    moves.check_invariants()
    assert upper.protected_size() == 0
    assert upper.evict(4) == 4
    assert moves.writes.prepare(32).moves == []
    moves.complete(move, 2)
    assert moves.lower.longest_prefix(key(1, 2, 3, 4)) == 4
    assert moves.writes.counts.written == 4
    assert not lower.leases.of_session(TIERS) and not upper.leases.of_session(TIERS)


def test_a_page_that_is_computed_again_while_it_is_written_is_not_written_twice(pair: Pair) -> None:
    moves = pair()
    publish(moves.upper.cache, 1, 2, 3, 4)
    move = moves.writes.prepare_prefix(node_of(moves, 1, 2, 3, 4), 100)
    assert move is not None
    moves.writes.release_source(move)
    moves.upper.cache.evict(4)
    publish(moves.upper.cache, 1, 2, 3, 4, 5, 6)
    publish(moves.upper.cache, 7, 8, 9, 10)

    assert moves.writes.prepare_prefix(node_of(moves, 1, 2, 3, 4, 5, 6), 100) is None
    other = moves.writes.prepare_prefix(node_of(moves, 7, 8, 9, 10), 100)
    assert other is not None
    moves.check_invariants()
    moves.complete(move, 0, False)
    again = moves.writes.prepare_prefix(node_of(moves, 1, 2, 3, 4, 5, 6), 100)
    assert again is not None and again.num_pages == 3
    for write in (other, again):
        moves.complete(write, write.num_pages)


def test_a_write_that_is_released_publishes_nothing_of_a_retired_namespace(pair: Pair) -> None:
    moves = pair()
    publish(moves.upper.cache, 1, 2, 3, 4)
    move = moves.writes.prepare_prefix(node_of(moves, 1, 2, 3, 4), 100)
    assert move is not None
    moves.writes.release_source(move)
    moves.upper.cache.reset()

    assert move.is_retired
    assert moves.complete(move, 2).num_tokens == 0
    assert moves.lower.longest_prefix(key(1, 2, 3, 4)) == 0


def test_a_write_without_room_begins_nothing(pair: Pair) -> None:
    moves = pair(host=4)
    publish(moves.upper.cache, *range(6))

    assert moves.writes.prepare_prefix(node_of(moves, *range(6)), 100) is None
    assert moves.upper.cache.protected_size() == 0


# -------------------------------------------------------------------- pages that cannot be used


def test_a_page_is_dropped_with_all_below_it_and_nothing_else() -> None:
    cache = make_cache(64, 2)
    publish(cache, *range(8))
    publish(cache, 0, 1, 2, 3, 4, 5, 16, 17)
    publish(cache, 0, 1, 22, 23)

    assert cache.drop_page(key(*range(8)), 2) == 8  # 2 3 4 5, 6 7 and 16 17
    cache.check_invariants()
    assert cache.radix.cached_lens(key(*range(8)))[0] == 2
    assert cache.radix.cached_lens(key(0, 1, 22, 23))[0] == 4
    assert cache.drop_page(key(*range(8)), 2) == 0, "it is gone"
    assert cache.drop_page(key(0, 1, 22, 23), 0) == 4
    assert cache.evictable_size() == 0


def test_a_page_that_a_lease_locks_is_dropped_later() -> None:
    cache = make_cache(64, 2)
    publish(cache, *range(8))
    lease = cache.find_source(key(*range(4)), 4)

    assert cache.drop_page(key(*range(8)), 2) == 4, "the pages below are not locked"
    cache.check_invariants()
    assert cache.radix.cached_lens(key(*range(8)))[0] == 4
    cache.end_quietly(lease)
    assert cache.drop_page(key(*range(8)), 2) == 2
    cache.check_invariants()
