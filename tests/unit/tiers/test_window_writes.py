"""Which window KV a host tier gets: that before the stops, where requests come back to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence

import pytest

from raydix.actors import LocalPrefixCache
from raydix.actors.tiers.host.host_tier import Progress
from raydix.cache_core.tiers.tier import Tier
from raydix.schemas import CacheConfig, HostConfig, PoolConfig

WINDOW, PAGE, TAIL = 64, 16, 80  # the tail is the window and a page
POOL = PoolConfig(
    num_slots=8192, num_swa_slots=1792, format="opaque", slot_bytes=8, swa_slot_bytes=8, device="cpu"
)  # fmt: skip
CONFIG = CacheConfig(
    page_size=PAGE,
    sliding_window_size=WINDOW,
    pool=POOL,
    host=HostConfig(num_slots=8 * 8192, num_swa_slots=8 * 1792, reserve=0.6),
)
CHAT_HAS = 2 * TAIL  # window slots, of its two prompts


def prompt(number: int, num_tokens: int = 512) -> list[int]:
    return list(range(1000 * number, 1000 * number + num_tokens))


def host_of(cache: LocalPrefixCache) -> Tier:
    assert cache.service.host is not None
    return cache.service.host.tier


async def settle(cache: LocalPrefixCache) -> None:
    """Wait until all that the reserve asks for is written."""
    tiers = cache.service.host
    assert tiers is not None
    async with asyncio.timeout(60):
        while tiers.state != "ready" or tiers.locks_pool or tiers.write_ahead() is not Progress.AHEAD:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def serve(cache: LocalPrefixCache, tokens: Sequence[int], publish_state: bool = False) -> tuple[int, int]:
    """Serve a prompt; return how much of it had KV, and how much of that was loaded."""
    async with cache.acquire(tokens, load_timeout_s=30) as lease:
        await lease.insert(tokens, publish_state=publish_state)
    await settle(cache)
    return lease.prefix_len, lease.loaded.host


async def push_out(cache: LocalPrefixCache, numbers: Iterable[int]) -> None:
    """Serve other prompts, which take the pool."""
    for number in numbers:
        await serve(cache, prompt(number))


def windows_on_host(cache: LocalPrefixCache) -> Iterator[tuple[int, int]]:
    """Yield the first token and the end of each run of window KV on the host; runs are joined."""
    tree = host_of(cache).cache.radix.parts.tree
    for node in tree.nodes():
        goes_on = any(not child.swa_tombstone for child in node.children.values())
        if not node.swa_tombstone and not goes_on:
            first = node
            while first.parent is not None and first.parent.data and not first.parent.swa_tombstone:
                first = first.parent
            yield first.end - len(first), node.end


async def test_the_host_keeps_the_windows_of_as_many_chats_as_it_has_window_slots_for() -> None:
    chats = [prompt(number) for number in range(100)]
    async with LocalPrefixCache(CONFIG) as cache:
        await cache.open()
        for chat in chats:
            await serve(cache, chat[:256])
            await serve(cache, chat)
        host = host_of(cache)
        found = [[(await cache.match(chat[:end])).host_len for end in (256, 512)] for chat in chats]
        stats = (await cache.stats()).host
        assert stats is not None

        assert found.count([256, 512]) >= CONFIG.host_sizes.num_swa_slots // CHAT_HAS == 89
        assert set(windows_on_host(cache)) == {(256 - TAIL, 256), (512 - TAIL, 512)}
        assert stats.tokens_dropped == stats.writes_refused == 0
        assert host.cache.allocator.swa is not None
        assert host.cache.allocator.swa.available_size() < TAIL, "no window slot of the host is left unused"


@pytest.mark.parametrize("is_by_rounds", [False, True])
@pytest.mark.parametrize("length", [48, 256])
async def test_system_prompts_with_three_continuations_are_hit_whole_from_the_host(
    is_by_rounds: bool, length: int
) -> None:
    """By rounds, the pool no longer has a system prompt when its next continuation comes."""
    systems = [prompt(number, 256) for number in range(24)]
    order = [(system, turn) for turn in range(3) for system in systems]
    if not is_by_rounds:
        order.sort()
    async with LocalPrefixCache(CONFIG) as cache:
        await cache.open()
        found = [await serve(cache, [*system, *prompt(500 + turn, length)]) for system, turn in order]
        assert sum(prefix_len for prefix_len, _ in found) > 0
        await push_out(cache, range(100, 130))
        assert not any([(await cache.match(system)).prefix_len for system in systems]), "the pool has some"

        again = [await serve(cache, [*system, *prompt(600, length)]) for system in systems]

        assert again == [(256, 256)] * len(systems)


async def test_with_states_the_host_gets_the_windows_before_them() -> None:
    pool = {"num_state_slots": 40, "state_bytes": 8}
    config = CONFIG.model_copy(update={"kind": "mamba", "pool": POOL.model_copy(update=pool)})
    chats = [prompt(number) for number in range(85)]
    async with LocalPrefixCache(CacheConfig.model_validate(config.model_dump())) as cache:
        await cache.open()
        for chat in chats:
            for end, has_state in ((256, True), (384, False), (512, True)):
                await serve(cache, chat[:end], publish_state=has_state)
        found = [[(await cache.match(chat[:end])).host_len for end in (256, 384, 512)] for chat in chats]
        stats = (await cache.stats()).host

        assert found == [[256, 256, 512]] * len(chats)
        assert set(windows_on_host(cache)) == {(256 - TAIL, 256), (512 - TAIL, 512)}
        assert stats is not None and stats.tokens_dropped == 0


async def test_a_window_that_no_stop_needs_is_neither_written_nor_dropped() -> None:
    async with LocalPrefixCache(CONFIG) as cache:
        await cache.open()
        await serve(cache, prompt(1))
        core = cache.service.core
        await settle(cache)
        before = core.counters.window_slots_evicted

        core.evict_window(512 - TAIL)  # type: ignore[attr-defined]

        stats = (await cache.stats()).host
        assert core.counters.window_slots_evicted - before == 512 - TAIL
        assert stats is not None and stats.tokens_dropped == 0
        assert list(windows_on_host(cache)) == []

        core.evict_window(16)  # type: ignore[attr-defined]

        stats = (await cache.stats()).host
        assert stats is not None and stats.tokens_dropped == 512, "the prompt cannot be hit any more"
