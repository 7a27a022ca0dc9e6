"""`validate=True` on a CPU pool: free slots hold NaN, and a write to published pages is an error at the next hit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from support.caches.cache_kinds import (
    KINDS,
    KindUnderTest,
    has_states,
    has_window,
    only,
    radix,
    shares,
    shares_slots,
    slots,
)
from support.caches.cache_under_test import CacheUnderTest, Pages
from support.models.stamped_kv import compute

from raydix.actors import AttachedPool, LocalPrefixCache
from raydix.cache_core import RadixKey
from raydix.cache_core.pool.content_check import ContentCheck
from raydix.schemas import CacheConfig, CacheError

NAN = "every row is poison"


async def attach(cache: CacheUnderTest) -> AttachedPool:
    return await cache.client.attach_pool(mapped=True)


async def published(cache: CacheUnderTest, *pages: int) -> list[int]:
    """Publish pages with KV in them and return their slots."""
    tokens = cache.tokens(*pages)
    lease = await cache.client.acquire(tokens)
    await compute(cache, await attach(cache), lease, tokens, 0)
    await cache.insert(lease, *pages)
    rows = lease.slots.tolist()
    await lease.release()
    return rows


def rows_of(cache: CacheUnderTest, pool: AttachedPool, lease_slots: list[int], kind: str = "full") -> torch.Tensor:
    """Return a bool tensor `[n]`: whether a slot holds only NaN in all layers of a kind."""
    layers = [layer for layer, each in enumerate(cache.kind.layer_kinds) if each == kind]
    tensors = [tensor for layer in layers for tensor in (pool.k[layer], pool.v[layer])]
    return torch.stack([tensor[lease_slots].isnan().flatten(1).all(1) for tensor in tensors]).all(0)


# ---------------------------------------------------------------- poison


async def test_a_lease_begins_with_poison_in_a_fresh_pool_as_in_a_used_one(cache: CacheUnderTest) -> None:
    lease, pool = await cache.client.acquire(cache.tokens(1, 2)), await attach(cache)

    assert rows_of(cache, pool, lease.slots.tolist()).all(), NAN
    if cache.kind.has_window:
        assert rows_of(cache, pool, lease.swa_slots.tolist(), "swa").all(), NAN
    await lease.release()


async def private_slots_are_poisoned(cache: CacheUnderTest) -> None:
    """Assert a claim that a planted fault must break."""
    tokens = cache.tokens(1, 2)
    lease = await cache.client.acquire(tokens)
    pool = await attach(cache)
    await compute(cache, pool, lease, tokens, 0)
    rows, state = lease.slots.tolist(), lease.state_slot
    window = lease.swa_slots if cache.kind.has_window else lease.slots
    assert not rows_of(cache, pool, rows).any()

    await lease.release()

    assert rows_of(cache, pool, rows).all(), NAN
    if cache.kind.has_window:
        assert rows_of(cache, pool, window[window > 0].tolist(), "swa").all(), NAN
    for layer, kind in enumerate(cache.kind.layer_kinds):
        if kind == "state":
            assert all(tensor[state].isnan().all() for tensor in pool.state(layer)), NAN


async def test_private_slots_are_poisoned_when_their_lease_ends(cache: CacheUnderTest) -> None:
    await private_slots_are_poisoned(cache)


@only(shares)
@pytest.mark.parametrize("how", ["evict", "reset"])
async def test_cached_slots_are_poisoned_when_they_leave_the_tree(cache: CacheUnderTest, how: str) -> None:
    rows = await published(cache, 1, 2)
    pool = await attach(cache)
    kept = cache.reusable(2) * cache.page_size
    assert not rows_of(cache, pool, rows[:kept]).any()

    await (cache.client.reset() if how == "reset" else cache.client.evict(10**6))

    assert rows_of(cache, pool, rows).all(), NAN
    if cache.kind.publishes_states:
        layer = cache.kind.layer_kinds.index("state")
        assert all(tensor[1:].isnan().all() for tensor in pool.state(layer)), NAN


@only(shares, shares_slots)
async def test_duplicates_are_poisoned(cache: CacheUnderTest) -> None:
    tokens, pool = cache.tokens(1, 2), await attach(cache)
    first, second = await cache.client.acquire(tokens), await cache.client.acquire(tokens)
    for lease in (first, second):
        await compute(cache, pool, lease, tokens, 0)
    await cache.insert(first, 1, 2)
    before = second.slots.tolist()

    await cache.insert(second, 1, 2)

    freed = [slot for slot in before if slot not in second.slots.tolist()]
    assert len(freed) == cache.reusable(2) * cache.page_size
    assert rows_of(cache, pool, freed).all(), NAN
    assert not rows_of(cache, pool, second.slots.tolist()).any()
    await first.release()
    await second.release()


async def test_a_row_is_poisoned_where_nothing_of_it_can_be_found(cache_of: Callable[..., CacheUnderTest]) -> None:
    cache = cache_of(slots(4))
    first = (await published(cache, 1, 2, 3))[0]
    pool = await attach(cache)
    row = list(range(first, first + 32))
    assert rows_of(cache, pool, row).tolist() == [False] * 12 + [True] * 20

    lease = await cache.client.acquire(cache.tokens(1, 7))  # reuses the row: pages 2 and 3 are no longer cached

    assert lease.slots.tolist() == row[:8]
    assert rows_of(cache, pool, row).tolist() == [False] * 4 + [True] * 28
    await lease.release()


# ---------------------------------------------------------------- published pages


async def a_writer_is_found_out(cache: CacheUnderTest) -> None:
    """Assert a claim that a planted fault must break."""
    rows = await published(cache, 1, 2)
    pool, before = await attach(cache), await cache.client.stats()
    layer = cache.kind.layer_kinds.index("full")
    slot = rows[cache.page_size - 1]  # of the first page
    pool.k[layer][slot, 0, 1] += 1

    page, first = slot // cache.page_size, slot - cache.page_size + 1
    where = rf"published page {page} \(slots? {first}.*K of layer {layer}, was overwritten"
    for _ in range(2):
        with pytest.raises(CacheError, match=where):
            await cache.client.acquire(cache.tokens(1, 2, 3))
        with pytest.raises(CacheError, match=where):
            await cache.client.lock(cache.tokens(1, 2))
    assert await cache.matched(1, 2) == cache.reusable(2)  # a probe reads no KV
    assert (await cache.pages()).leases == 0
    assert (await cache.client.stats()).free_slots == before.free_slots

    pool.k[layer][slot, 0, 1] -= 1
    await (await cache.client.lock(cache.tokens(1, 2))).release()


@only(shares)
async def test_whoever_writes_to_a_published_page_is_found_out_at_the_next_hit(cache: CacheUnderTest) -> None:
    await a_writer_is_found_out(cache)


@only(has_window)
async def test_whoever_writes_to_published_window_slots_is_found_out(cache: CacheUnderTest) -> None:
    tokens, pool = cache.tokens(1, 2), await attach(cache)
    lease = await cache.client.acquire(tokens)
    await compute(cache, pool, lease, tokens, 0)
    await cache.insert(lease, 1, 2)
    slot = int(lease.swa_slots[cache.reusable(2) * cache.page_size - 1])
    await lease.release()
    layer = cache.kind.layer_kinds.index("swa")

    pool.v[layer][slot] += 1

    with pytest.raises(CacheError, match=rf"page {slot // cache.page_size} \(window slots? .*V of layer {layer}"):
        await cache.client.acquire(tokens)
    await cache.client.reset()


@only(has_states)
async def test_whoever_writes_to_a_published_state_is_found_out(cache: CacheUnderTest) -> None:
    await published(cache, 1, 2)
    pool, layer = await attach(cache), cache.kind.layer_kinds.index("state")

    pool.state(layer)[1][1:] += 1  # all states, so also the published one

    before = await cache.pages()
    with pytest.raises(CacheError, match=rf"\(state slot \d+\), state tensor 1 of layer {layer}"):
        await cache.client.acquire(cache.tokens(1, 2, 3))
    assert await cache.pages() == before
    await cache.client.reset()


async def test_one_who_waits_in_line_hears_of_it_in_the_cache_s_terms(cache1: CacheUnderTest) -> None:
    (slot,) = await published(cache1, 1)
    held = await cache1.client.acquire([2] * 7)
    (waiter,) = await cache1.in_line(cache1.client.acquire([1, 3]))
    (await attach(cache1)).k[0][slot] += 1

    await held.release()

    with pytest.raises(CacheError, match=r"published page \d+ .* was overwritten") as caught:
        await waiter
    assert type(caught.value) is CacheError
    assert (await cache1.client.stats()).waiters == 0


async def test_a_row_that_is_copied_is_checked_before_and_after(cache_of: Callable[..., CacheUnderTest]) -> None:
    cache = cache_of(slots(4))
    tokens, pool = cache.tokens(1, 2), await attach(cache)
    source = await cache.client.acquire(tokens)
    await compute(cache, pool, source, tokens, 0)
    await cache.insert(source, 1, 2)
    copy = await cache.client.acquire(tokens)
    assert int(copy.slots[0]) != int(source.slots[0])
    await copy.release()

    pool.v[1][copy.slots[5]] += 1

    with pytest.raises(CacheError, match=r"V of layer 1"):
        await cache.client.acquire(tokens)
    await source.release()


# ---------------------------------------------------------------- the switch


@pytest.fixture
async def cache_of() -> Callable[[KindUnderTest], CacheUnderTest]:
    """Return a factory of empty local caches."""
    return lambda kind: CacheUnderTest.reached("local", kind.cache_config(), None, kind)


async def test_without_the_switch_nothing_is_touched() -> None:
    for kind in KINDS:
        config: CacheConfig = kind.cache_config().model_copy(update={"validate": False})
        cache = CacheUnderTest.reached("local", config, None, kind)
        with pytest.raises(AssertionError, match=NAN):
            await private_slots_are_poisoned(cache)
        await cache.close()


@pytest.mark.parametrize(
    ("method", "claim", "how"),
    [
        ("poison", private_slots_are_poisoned, NAN),
        ("verify", a_writer_is_found_out, "DID NOT RAISE"),
        ("publish", a_writer_is_found_out, "not all of the slots at .* are published"),
    ],
    ids=["nothing is poisoned", "nothing is compared", "nothing is remembered"],
)
@pytest.mark.parametrize("kind", [radix(4), slots(4)], ids=str)
async def test_a_check_that_does_nothing_is_noticed(
    kind: KindUnderTest,
    method: str,
    claim: Callable[[CacheUnderTest], Awaitable[None]],
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ContentCheck, method, lambda check, starts: None)
    cache = CacheUnderTest.reached("local", kind.cache_config(), None, kind)
    with pytest.raises((AssertionError, CacheError, pytest.fail.Exception), match=how):
        await claim(cache)


# ---------------------------------------------------------------- broken invariants


async def in_the_cache(cache: CacheUnderTest, work: Callable[[Any], None]) -> None:
    """Call `work` with the core of a local cache or an actor."""
    if isinstance(cache.cache, LocalPrefixCache):
        work(cache.cache._host.service.core)
    else:
        await cache.cache.__ray_call__.remote(lambda actor: work(actor._host.service.core))


async def test_while_a_rule_is_broken_every_caller_gets_a_typed_error_and_afterwards_all_goes_on(
    cache1: CacheUnderTest,
) -> None:
    client, lease = cache1.client, await cache1.client.acquire([1, 2])
    key = RadixKey([1])
    await lease.insert([1])

    def lock(core: Any) -> None:
        core.tree.inc_lock_ref(core.tree.match_prefix(key).last_node)

    def unlock(core: Any) -> None:
        core.tree.dec_lock_ref(core.tree.match_prefix(key).last_node)

    await in_the_cache(cache1, lock)
    asked = (client.match([1]), client.acquire([3]), lease.insert([1, 2]), client.stats(), client.check_invariants())
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    await in_the_cache(cache1, unlock)

    for outcome in outcomes:
        assert type(outcome) is CacheError
        assert str(outcome).startswith("a rule of the cache is broken: rule 3")
    await client.check_invariants()
    assert (await client.match([1, 2])).prefix_len == 2  # the insert took effect
    await lease.release()
    assert await cache1.pages() == Pages(free=6, evictable=2)  # the lease of the failed acquire was released
