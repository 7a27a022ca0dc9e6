"""`explain`, reason by reason: where a match ends and why."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from support.caches.index_pool import IndexPool
from support.processes.fake_clock import Clock

from raydix.cache_core import ChunkCache, MambaRadixCache, RadixCache, RadixKey
from raydix.cache_core.eviction.history import EvictionHistory
from raydix.cache_core.explanation import Elsewhere
from raydix.cache_core.radix.prefix_cache import PrefixCache
from raydix.cache_core.trie_prefix_cache import TriePrefixCache


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def history(clock: Clock) -> EvictionHistory:
    return EvictionHistory(clock=clock)


@pytest.fixture
def cache(history: EvictionHistory) -> RadixCache:
    cache = RadixCache(2, token_to_kv_pool_allocator=IndexPool())
    cache.keep_history(history)
    return cache


def why(cache: PrefixCache, *tokens: int, extra_key: str | None = None) -> tuple[int, str]:
    found = cache.explain(RadixKey(tokens, extra_key))
    assert found.num_tokens == len(tokens)
    assert found.prefix_len == cache.peek_prefix(RadixKey(tokens, extra_key)).prefix_len
    return found.prefix_len, found.reason


def test_all_that_can_be_there_is_there(cache: RadixCache) -> None:
    cache.insert(RadixKey([1, 2, 3, 4]))

    assert why(cache, 1, 2, 3, 4) == (4, "complete")
    assert why(cache, 1, 2, 3) == (2, "page_alignment")
    assert why(cache, 1, 2, 3, 4, 5) == (4, "page_alignment")
    assert why(cache, 9) == (0, "page_alignment")


def test_what_went_from_the_tail_of_a_long_leaf_was_evicted(cache: RadixCache, history: EvictionHistory) -> None:
    cache.insert(RadixKey(range(4096)))
    for left in (3084, 1084):
        history.cause = f"down to {left}"
        cache.evict(cache.total_size() - left)

    assert why(cache, *range(4096)) == (1084, "evicted")
    assert cache.explain(RadixKey(range(4096))).cause == "down to 1084"
    assert why(cache, *range(1084)) == (1084, "complete")


def test_what_was_never_there(cache: RadixCache) -> None:
    assert why(cache, 1, 2) == (0, "never_stored")
    cache.insert(RadixKey([1, 2, 3, 4]))

    assert why(cache, 5, 6) == (0, "never_stored")
    assert why(cache, 1, 2, 5, 6) == (2, "never_stored")
    assert why(cache, 1, 2, 3, 4, 5, 6) == (4, "never_stored")


def test_what_was_evicted_and_when_and_for_what(cache: RadixCache, history: EvictionHistory, clock: Clock) -> None:
    cache.insert(RadixKey([1, 2, 3, 4]))
    cache.insert(RadixKey([1, 2, 5, 6]))
    cache.match_prefix(RadixKey([1, 2, 5, 6]))
    history.cause = "watermark"
    cache.evict(2)
    clock.now += 30

    found = cache.explain(RadixKey([1, 2, 3, 4, 9, 9]))

    assert (found.prefix_len, found.reason, found.cause, found.seconds_ago) == (2, "evicted", "watermark", 30)
    assert why(cache, 1, 2, 7, 7) == (2, "never_stored")


def test_a_namespace_that_was_emptied_is_remembered(cache: RadixCache, history: EvictionHistory) -> None:
    for extra_key in (None, "a"):
        cache.insert(RadixKey([1, 2, 3, 4], extra_key))
    history.cause = "shortfall"
    cache.evict(8)

    assert why(cache, 1, 2) == (0, "evicted")
    assert why(cache, 1, 2, 3, 4, extra_key="a") == (0, "evicted")
    assert why(cache, 3, 4, extra_key="a") == (0, "never_stored")
    assert why(cache, 1, 2, extra_key="b") == (0, "never_stored")
    cache.insert(RadixKey([7, 7], "a"))
    assert why(cache, 1, 2, extra_key="a") == (0, "evicted")


def test_what_came_again_is_not_told_of_as_evicted(cache: RadixCache) -> None:
    cache.insert(RadixKey([1, 2]))
    cache.evict(2)
    cache.insert(RadixKey([1, 2]))

    assert why(cache, 1, 2) == (2, "complete")
    assert why(cache, 1, 2, 3, 4) == (2, "forgotten")  # it may have followed the first one


def test_what_was_never_there_is_told_from_what_is_forgotten_and_since_when(
    cache: RadixCache, history: EvictionHistory, clock: Clock
) -> None:
    clock.now += 100
    cache.insert(RadixKey([1, 2]))
    found = cache.explain(RadixKey([1, 2, 3, 4]))
    assert (found.reason, found.remembered_s) == ("never_stored", 100)

    cache.evict(2)
    clock.now += 10
    cache.insert(RadixKey([1, 2, 9, 9]))
    clock.now += 10
    cache.insert(RadixKey([1, 2, 5, 5]))
    for key in ([1, 2, 3, 4], [1, 2, 9, 9, 3, 4], [1, 2, 9, 9, 3, 4, 5, 6]):
        found = cache.explain(RadixKey(key))
        assert (found.reason, found.remembered_s, found.seconds_ago) == ("forgotten", 20, None)
    assert cache.explain(RadixKey([3, 4])).reason == "never_stored"
    cache.evict(2)
    assert why(cache, 1, 2, 9, 9) == (2, "evicted")

    cache.retire(lambda _: True)
    clock.now += 5
    cache.insert(RadixKey([1, 2]))
    found = cache.explain(RadixKey([1, 2, 3, 4]))
    assert (found.reason, found.remembered_s) == ("forgotten", 5)


def test_what_left_at_another_width_of_ids_is_remembered(cache: RadixCache) -> None:
    wide = 2**40
    for one, other in (([1, 2], [wide, 3]), ([wide, 3], [1, 2])):
        cache.insert(RadixKey(one))
        cache.evict(2)
        cache.insert(RadixKey(other))  # the namespace packs its ids in another width from now on
        assert why(cache, *one) == (0, "evicted")
        cache.evict(2)
    cache.insert(RadixKey([5, 5]))
    cache.insert(RadixKey([5, 5, wide, 6]))
    cache.match_prefix(RadixKey([5, 5]))
    cache.evict(2)
    assert why(cache, 5, 5, wide, 6) == (2, "evicted")


def test_a_retired_namespace(cache: RadixCache, clock: Clock) -> None:
    cache.insert(RadixKey([1, 2], "a"))
    cache.insert(RadixKey([1, 2], "b"))
    cache.retire(lambda extra_key: extra_key == "a")
    clock.now += 5

    found = cache.explain(RadixKey([1, 2], "a"))

    assert (found.prefix_len, found.reason, found.cause, found.seconds_ago) == (0, "retired", None, 5)
    assert found.elsewhere == Elsewhere("b", 2)
    cache.reclaim_retired()
    assert why(cache, 1, 2, extra_key="a") == (0, "retired")
    cache.insert(RadixKey([7, 7], "a"))
    assert why(cache, 1, 2, extra_key="a") == (0, "retired")


def test_the_same_tokens_in_other_namespaces(cache: RadixCache) -> None:
    cache.insert(RadixKey([1, 2], "a"))
    cache.insert(RadixKey([1, 2, 3, 4], "b"))

    found = cache.explain(RadixKey([1, 2, 3, 4, 5, 6]))

    assert (found.reason, found.elsewhere) == ("other_namespace", Elsewhere("b", 4))
    assert cache.explain(RadixKey([8, 8])).elsewhere is None
    assert cache.explain(RadixKey([(1, 2), (2, 3)])).elsewhere is None


def test_a_window_and_a_state_that_are_missing() -> None:
    windows, states = RadixCache(1, 4), MambaRadixCache(1)
    windows.insert(RadixKey(range(8)), swa_evicted_seqlen=6)
    states.insert(RadixKey(range(8)))

    assert why(windows, *range(8)) == (0, "window")
    assert why(states, *range(8)) == (0, "no_state")
    both = MambaRadixCache(1, sliding_window_size=4)
    both.insert(RadixKey(range(4)), mamba_value=1)
    both.insert(RadixKey(range(8)), swa_evicted_seqlen=8, mamba_value=2)
    assert why(both, *range(8)) == (4, "window")
    both.insert(RadixKey(range(20, 24)), mamba_value=3)
    both.insert(RadixKey(range(20, 28)))
    assert why(both, *range(20, 28)) == (4, "no_state")


def test_kinds_that_keep_no_record_say_so() -> None:
    trie = TriePrefixCache(2)
    assert trie.explain(RadixKey([1, 2])).reason == "not_there"
    assert trie.explain(RadixKey([1])).reason == "page_alignment"
    assert ChunkCache().explain(RadixKey([1])).reason == "not_shared"


def test_the_history_forgets_the_oldest(clock: Clock) -> None:
    cache, history = RadixCache(1), EvictionHistory(10, clock)
    cache.keep_history(history)
    for token in range(30):
        cache.insert(RadixKey([token]))
        cache.evict(1)
    for number in range(30):
        cache.insert(RadixKey([1], f"namespace {number}"))
        cache.retire(lambda extra_key: True)

    assert (len(history._evicted), len(history._retired), len(history.evictions())) == (10, 10, 10)
    assert why(cache, 29) == (0, "evicted")
    assert why(cache, 2) == (0, "forgotten")
    assert cache.explain(RadixKey([2])).remembered_s == 0


def test_an_explanation_changes_nothing(cache: RadixCache) -> None:
    cache.insert(RadixKey([1, 2, 3, 4, 5, 6]))
    cache.insert(RadixKey([7, 7]))
    cache.explain(RadixKey([1, 2]))
    cache.explain(RadixKey([1, 2, 9, 9]))

    assert len(cache.tree_starts()) == 2
    assert cache.evict(1).full_evicted == 6  # still the one used least
    cache.check_invariants()


@pytest.mark.parametrize("max_entries", [16_384, 12])
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_is_explained_as_it_was(seed: int, max_entries: int, clock: Clock) -> None:
    """The explanation is the last thing that happened to the page that a match lacks, or since when nothing did."""
    rng, cache = Random(seed), RadixCache(1)
    cache.keep_history(EvictionHistory(max_entries, clock))
    last: dict[tuple[int, ...], tuple[str, float]] = {}  # to each prefix that ever was: stored or evicted, and when
    reasons: Counter[str] = Counter()
    for _ in range(400):
        clock.now += 1
        tokens = tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 6)))
        there = {prefix for prefix, (what, _) in last.items() if what == "stored"}
        if rng.random() < 0.5:
            cache.insert(RadixKey(tokens))
            last |= {tokens[:end]: ("stored", clock.now) for end in range(1, len(tokens) + 1)}
        elif rng.random() < 0.3:
            cache.evict(rng.randint(1, 5))
            gone = {prefix for prefix in there if cache.peek_prefix(RadixKey(prefix)).prefix_len < len(prefix)}
            last |= dict.fromkeys(gone, ("evicted", clock.now))
        else:
            found = cache.explain(RadixKey(tokens))
            missing = tokens[: found.prefix_len + 1]
            reasons[found.reason] += 1
            if missing == tokens[: found.prefix_len]:
                assert found.reason == "complete"
            elif found.reason == "evicted":
                assert last[missing] == ("evicted", clock.now - found.seconds_ago)
            elif found.reason == "never_stored":
                assert missing not in last
            else:
                assert found.reason == "forgotten"
                assert missing not in last or last[missing][1] <= clock.now - found.remembered_s
    assert reasons["evicted"] and reasons["forgotten"] and (reasons["never_stored"] or max_entries == 12), reasons
