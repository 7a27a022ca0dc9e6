"""The window KV that leases keep: idle conversations hit on their next turn, and the same prompt hits again."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.caches.invariant_fixtures import checked_after
from support.caches.small_kv_cache import NO_IDS

from raydix.cache_core import KVCache, RadixCache, RadixKey, SWATokenToKVPoolAllocator

NUM_CONVERSATIONS, PROMPT_LEN, TURN_LEN = 12, 512, 64


@pytest.fixture
def windowed() -> Iterator[Callable[..., KVCache]]:
    def make_cache(page_size: int, window: int, num_slots: int, num_swa_slots: int) -> KVCache:
        allocator = SWATokenToKVPoolAllocator(num_slots, num_swa_slots, page_size)
        return KVCache(RadixCache(page_size, window, allocator), allocator)

    yield from checked_after(make_cache)


def serve(cache: KVCache, tokens: RadixKey, chunk: int | None = None, reuse: int | None = None) -> int:
    """Run one request that publishes all of its tokens, in chunks at times; return its cached prefix."""
    lease = cache.acquire("l", "s", tokens, max_prefix_len=reuse)
    ends = [len(tokens)] if chunk is None else [*range(lease.prefix_len + chunk, len(tokens), chunk), len(tokens)]
    for end in ends:
        cache.insert("l", "s", end, NO_IDS if end == len(tokens) else tokens[:end])
    cache.release("l", "s")
    return lease.prefix_len


@pytest.mark.parametrize("chunk", [None, 64])
def test_idle_conversations_hit_while_the_window_slots_hold_their_tails(
    windowed: Callable[..., KVCache], chunk: int | None
) -> None:
    cache = windowed(16, 32, 16_384, 1_200)  # 12 tails of 48 take 576, and a prompt 512
    rng = np.random.default_rng(0)
    history = [rng.integers(0, 50_000, PROMPT_LEN).tolist() for _ in range(NUM_CONVERSATIONS)]
    for tokens in history:
        assert serve(cache, RadixKey(tokens), chunk) == 0

    for _ in range(3):
        for tokens in history:
            known = len(tokens)
            tokens += rng.integers(0, 50_000, TURN_LEN).tolist()
            assert serve(cache, RadixKey(tokens), chunk) == known
            cache.check_invariants()


@pytest.mark.parametrize(
    ("page_size", "reuse", "prefix_len"), [(16, 127, 112), (16, 126, 112), (2, 126, 126), (1, 127, 127), (1, 126, 126)]
)
def test_the_same_prompt_hits_again_once_older_window_kv_is_gone(
    windowed: Callable[..., KVCache], page_size: int, reuse: int, prefix_len: int
) -> None:
    cache = windowed(page_size, 32, 1_024, 256)
    prompt = RadixKey(range(128))
    assert serve(cache, prompt) == 0
    assert cache.tree.kept_tail == 32 + max(page_size, 2)
    cache.evict_window(128 - cache.tree.kept_tail)

    assert [serve(cache, prompt, reuse=reuse) for _ in range(3)] == [prefix_len] * 3


def decode_and_look_up(cache: KVCache, num_tokens: int) -> None:
    """Free the window KV behind decoding, publish, evict all but a tail, and look the same tokens up again."""
    page_size, window = cache.page_size, cache.tree.sliding_window_size
    assert window is not None
    tokens = RadixKey(range(1_000 * num_tokens, 1_000 * num_tokens + num_tokens))
    cache.acquire("l", "s", tokens)
    cache.release_window("l", "s", num_tokens - window + 1)  # the next token attends from there
    cache.insert("l", "s", num_tokens, NO_IDS)
    cache.release("l", "s")
    cache.evict_window(cache.tree.swa_evictable_size() - cache.tree.kept_tail)
    for cut in (1, 2):
        floor = (num_tokens - cut) // page_size * page_size
        assert cache.tree.peek_prefix(tokens[: num_tokens - cut]).prefix_len == floor
    cache.evict(10**6)


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("window", [1, 5, 16, 32])
def test_decoding_frees_no_window_kv_that_the_same_tokens_need_again(
    windowed: Callable[..., KVCache], page_size: int, window: int
) -> None:
    cache = windowed(page_size, window, 1_024, 512)

    for num_tokens in range(100, 140):
        decode_and_look_up(cache, num_tokens)


def test_decoding_keeps_one_tail_of_window_kv(windowed: Callable[..., KVCache]) -> None:
    cache = windowed(16, 32, 1_024, 256)
    lease = cache.acquire("l", "s", RadixKey(range(128)))

    cache.release_window("l", "s", 128 - 32 + 1)

    assert np.flatnonzero(cache.swa_starts(lease)).tolist() == [5, 6, 7]


def test_a_fault_in_what_decoding_keeps_is_seen(
    windowed: Callable[..., KVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = windowed(16, 32, 1_024, 512)
    release_window = KVCache.release_window
    monkeypatch.setattr(KVCache, "release_window", lambda cache, *ids: release_window(cache, *ids[:2], ids[2] + 16))

    with pytest.raises(AssertionError):
        decode_and_look_up(cache, 128)


def test_a_lock_without_the_page_before_its_window_is_seen(
    windowed: Callable[..., KVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = windowed(16, 32, 1_024, 256)
    serve(cache, RadixKey(range(128)))
    assert isinstance(cache.tree, RadixCache) and cache.tree.parts.window is not None
    monkeypatch.setattr(cache.tree.parts.window, "tail", 32)
    cache.acquire("l", "s", RadixKey(range(128)), max_prefix_len=112)
    monkeypatch.undo()

    with pytest.raises(AssertionError, match="holds from token"):
        cache.check_invariants()

    cache.release("l", "s")


def test_a_lease_holds_its_tail_of_the_prefix(windowed: Callable[..., KVCache]) -> None:
    cache = windowed(16, 32, 1_024, 256)
    serve(cache, RadixKey(range(128)))

    lease = cache.acquire("l", "s", RadixKey(range(128)))

    assert np.flatnonzero(cache.swa_starts(lease)).tolist() == [5, 6, 7]
    cache.release("l", "s")


def test_the_use_of_a_window_ends_with_its_lease(windowed: Callable[..., KVCache]) -> None:
    cache = windowed(1, 2, 64, 32)
    prompts = {name: RadixKey([number] * 8) for number, name in enumerate("abc")}
    for name, prompt in prompts.items():
        cache.acquire(name, "s", prompt)
        cache.insert(name, "s", 8, NO_IDS)
    for name in "cab":
        cache.release(name, "s")
    cache.evict_window(12)  # the upper four of each, which are in no tail

    went = []
    for _ in prompts:
        cache.evict_window(1)
        went += [name for name in set(prompts) - set(went) if not cache.tree.peek_prefix(prompts[name]).prefix_len]

    assert went == ["c", "a", "b"]
