"""`stats().ghost` gives the hit rates of pools of other sizes."""

import pytest

from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.cache_core.ghost.curve import GhostCurve
from raydix.schemas import (
    CacheConfig,
    CacheStats,
    EvictionConfig,
    GhostConfig,
    PoolConfig,
    PoolExhausted,
    TooLarge,
)

NO_TASK = EvictionConfig(high_watermark=1.0)


def config_of(num_slots: int, page_size: int = 4, ghost: GhostConfig | None = None) -> CacheConfig:
    pool = PoolConfig(num_slots=num_slots, device="cpu")
    return CacheConfig(page_size=page_size, pool=pool, eviction=NO_TASK, ghost=ghost)


async def send(client: PrefixCacheClient, *prompts: list[int]) -> CacheStats:
    for prompt in prompts:
        await (await client.acquire(prompt)).insert(prompt, release=True)
    return await client.stats()


@pytest.mark.parametrize("where", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.more])])
async def test_two_prompts_that_take_turns_would_fit_a_pool_twice_as_large(
    where: str, request: pytest.FixtureRequest
) -> None:
    config = config_of(4, ghost=GhostConfig(max_factor=2))
    cache = LocalPrefixCache(config) if where == "local" else request.getfixturevalue("running_cache")(config)

    async with PrefixCacheClient(cache) as client:
        stats = await send(client, [1] * 4, [2] * 4, [1] * 4, [2] * 4)
        await client.reset()

    assert stats.hit_rate == 0
    assert stats.ghost is not None
    assert stats.ghost.num_slots == (4, 8)
    assert stats.ghost.hit_rates == (0, 0.5)
    assert (stats.ghost.tokens_requested, stats.ghost.sample_rate) == (16, 1)
    assert stats.ghost.hit_rate_at(6) == 0.25
    if where == "local":
        await cache.close()


async def test_a_cache_of_pairs_is_followed_by_pages_of_pairs() -> None:
    config = config_of(64, ghost=GhostConfig()).model_copy(update={"bigram": True})
    prompts = [[7] * 4 + [number] * 4 for number in range(4)]  # the last page lacks a pair

    async with LocalPrefixCache(config) as cache:
        stats = await send(cache, *prompts, *prompts, prompts[0] * 2)

    assert stats.tokens_evicted == 0
    assert stats.ghost is not None
    assert stats.ghost.hit_rate_at(64) == stats.hit_rate > 0


async def test_requests_are_followed_only_if_configured() -> None:
    async with LocalPrefixCache(config_of(4)) as cache:
        stats = await send(cache, [1] * 4)

        assert stats.ghost is None
        assert not any(isinstance(watch, GhostCurve) for watch in cache._host.service.core.observers)


@pytest.mark.parametrize("kind", ["chunk", "slots"])
def test_a_kind_that_shares_no_pages_has_no_ghost(kind: str) -> None:
    with pytest.raises(ValueError, match="its requests share no pages"):
        CacheConfig(
            kind=kind, max_seq_len=4 if kind == "slots" else None, pool=PoolConfig(num_slots=4), ghost=GhostConfig()
        )


async def test_requests_that_can_never_fit_are_in_no_rate() -> None:
    small, large, mid = [1] * 4, [2] * 16, [3] * 8
    async with LocalPrefixCache(config_of(8, ghost=GhostConfig(max_factor=4))) as cache:
        await send(cache, small)
        for _ in range(2):
            with pytest.raises(PoolExhausted):
                await cache.acquire(large)
        stats = await send(cache, mid, small)

    requested = 4 + 8 + 4
    assert (stats.tokens_requested, stats.tokens_refused, stats.tokens_reused) == (requested, 32, 0)
    assert stats.too_large == TooLarge(requests=2, tokens=32, largest_slots=16)
    assert (stats.hit_rate, stats.exhausted, stats.acquires) == (0, 2, 3)
    assert stats.ghost is not None
    assert stats.ghost.tokens_requested == requested
    assert stats.ghost.hit_rate_at(8) == 0
    assert stats.ghost.hit_rate_at(16) == stats.ghost.hit_rate_at(32) == 4 / requested


async def test_requests_that_found_no_room_in_time_are_in_no_rate() -> None:
    async with LocalPrefixCache(config_of(8, ghost=GhostConfig(max_factor=4))) as cache:
        held = await cache.acquire([1] * 8)
        for timeout_s in (0, 0.01, 0.01):
            with pytest.raises(PoolExhausted):
                await cache.acquire([2] * 8, timeout_s=timeout_s)
        with pytest.raises(PoolExhausted):
            await held.extend(4, timeout_s=0)
        await held.release()
        stats = await send(cache, [3] * 8, [3] * 8)

    assert (stats.tokens_requested, stats.tokens_refused, stats.tokens_reused) == (24, 24, 8)
    assert (stats.exhausted, stats.too_large) == (4, TooLarge())
    assert stats.ghost is not None
    assert stats.ghost.tokens_requested == 24
    assert stats.ghost.hit_rate_at(8) == stats.ghost.hit_rate_at(32) == stats.hit_rate == 8 / 24


async def test_the_curve_passes_through_the_hit_rate_that_was_counted() -> None:
    config = config_of(16, ghost=GhostConfig(max_factor=2)).model_copy(
        update={"eviction": EvictionConfig(policy="mru", high_watermark=1.0)}
    )
    async with LocalPrefixCache(config) as cache:
        stats = await send(cache, *([number % 6] * 4 for number in range(40)))

    assert stats.ghost is not None
    assert stats.ghost.hit_rate_at(16) == stats.hit_rate > 0.3  # under least recently used, no page would hit again
    assert max(stats.ghost.hit_rates) <= 1
