"""Routes to caches with host tiers: a prefix to load is worth less than one in the pool, and more than none."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pydantic import ValidationError
from support.fleet.running_fleet import STRIDE, caught_up, check_index, local_fleet, prompt, publish, slim, until
from support.more import more
from support.tiers.gated_loads import GatedLoads, host_config, publish_on_host
from support.tiers.settled_tiers import NO_SPARE, quick_disk, tensors, tiers_settled, whole_host

from raydix.actors import LocalPrefixCache, connect_fleet
from raydix.actors.fleet import cost, members
from raydix.schemas import PoolConfig, RouteConfig

TIERED = slim(pool=tensors(4096), host=whole_host(16_384), eviction=NO_SPARE)
THREE = {"a": TIERED, "b": TIERED, "c": slim()}


@pytest.fixture(autouse=True)
def looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have routers look for caches more often."""
    monkeypatch.setattr(members, "_LOOK_S", 0.05)


async def evict(cache: LocalPrefixCache, tier: str, num_tokens: int = 16_384) -> None:
    """Evict tokens of a tier; those of the pool are on the host before."""
    await tiers_settled(cache)
    await cache.evict(num_tokens, tier)


async def test_a_prefix_on_the_host_is_chosen_before_none_and_after_one_in_a_pool() -> None:
    async with local_fleet(THREE) as (fleet, caches):
        await publish(caches["a"], prompt(1, 4))
        await evict(caches["a"], "device")
        await caught_up(fleet, dict(caches))

        route = await fleet.route(prompt(1, 5, more=7))
        assert (route.cache, route.prefix_len, route.promised_len) == ("a", 0, 0)
        assert (route.host_len, route.loading_tokens, route.uncached_tokens) == (4 * STRIDE, 4 * STRIDE, STRIDE + 7)
        assert f"0 pending + 3 * ({STRIDE + 7} uncached + 0.1 * {4 * STRIDE} to load) tokens" in route.why
        assert route.pending_tokens == 0
        assert fleet.stats().caches[0].pending_tokens == int(STRIDE + 7 + 0.1 * 4 * STRIDE)
        route.cancel()

        await publish(caches["c"], prompt(1, 4))
        await caught_up(fleet, dict(caches))
        route = await fleet.route(prompt(1, 5, more=7))
        assert (route.cache, route.prefix_len, route.host_len, route.loading_tokens) == ("c", 4 * STRIDE, 0, 0)
        assert "to load" not in route.why
        route.cancel()


async def test_an_explanation_has_the_tokens_of_both_tiers() -> None:
    async with local_fleet(THREE, config=RouteConfig(weight=2, tier_cost={"CPU": 0.25})) as (fleet, caches):
        await publish(caches["a"], prompt(1, 2), prompt(1, 4))
        await evict(caches["a"], "device", 2 * STRIDE)  # the later part is on the host alone
        await publish(caches["b"], prompt(1, 3))
        await tiers_settled(caches["b"])
        await caught_up(fleet, dict(caches))

        found = fleet.explain(prompt(1, 5))
        assert (found.weight, found.tier_cost) == (2, {"CPU": 0.25, "STORAGE": 0.4})
        rows = [
            (row.cache, row.prefix_len, row.host_len, row.loading_tokens, row.uncached_tokens, row.cost)
            for row in found.candidates
        ]
        assert rows == [
            ("a", 2 * STRIDE, 4 * STRIDE, 2 * STRIDE, STRIDE, 2 * (STRIDE + 0.25 * 2 * STRIDE)),
            ("b", 3 * STRIDE, 3 * STRIDE, 0, 2 * STRIDE, 2 * 2 * STRIDE),
            ("c", 0, 0, 0, 5 * STRIDE, 2 * 5 * STRIDE),
        ]
        pages = {row.cache: (row.pages, row.host_pages) for row in fleet.stats().caches}
        assert pages == {"a": (2, 4), "b": (3, 3), "c": (0, 0)}


@pytest.mark.parametrize(("share", "winner"), [(0.0, "a"), (0.74, "a"), (0.76, "b"), (1.0, "b")])
async def test_the_share_of_a_loaded_token_decides(share: float, winner: str) -> None:
    async with local_fleet({"a": TIERED, "b": TIERED}, config=RouteConfig(tier_cost={"CPU": share})) as (fleet, caches):
        await publish(caches["a"], prompt(1, 4))
        await evict(caches["a"], "device")
        await publish(caches["b"], prompt(1, 1))
        await caught_up(fleet, dict(caches))

        assert (await fleet.route(prompt(1, 4))).cache == winner


async def test_a_router_reads_the_events_of_pools_and_host_tiers_and_none_of_disks(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"pool": tensors(4096), "eviction": NO_SPARE, "fingerprint": "m"}
    disks = [quick_disk(tempfile.mkdtemp(dir=tmp_path), 16_384) for _ in range(2)]
    async with local_fleet(
        {"a": slim(disk=disks[0], **fields), "b": slim(host=whole_host(16_384), disk=disks[1], **fields)}
    ) as (fleet, caches):
        for cache in (*caches.values(), *caches.values()):
            await publish(cache, prompt(1, 4))
            await tiers_settled(cache)
        assert [(await cache.match(prompt(1, 4))).disk_len for cache in caches.values()] == [4 * STRIDE] * 2
        for cache in caches.values():
            await evict(cache, "device")
        await caught_up(fleet, dict(caches))

        route = await fleet.route(prompt(1, 4))
        assert (route.cache, route.prefix_len, route.host_len) == ("b", 0, 4 * STRIDE)
        route.cancel()
        assert fleet.stats().indexed_pages == 4  # on the host of b


async def test_a_loaded_prefix_is_in_the_pool_for_the_next_route() -> None:
    async with local_fleet({"a": TIERED}) as (fleet, caches):
        await publish(caches["a"], prompt(1, 4))
        await evict(caches["a"], "device")
        await caught_up(fleet, dict(caches))

        async with fleet.acquire(prompt(1, 4, more=1)) as lease:
            assert lease.prefix_len == 4 * STRIDE
        await caught_up(fleet, dict(caches))
        route = await fleet.route(prompt(1, 4))
        assert (route.prefix_len, route.host_len, route.loading_tokens) == (4 * STRIDE, 4 * STRIDE, 0)
        assert fleet.stats().caches[0].missed_tokens == 0
        await caches["a"].reset()
        await until(lambda: [row.host_pages for row in fleet.stats().caches] == [0])


async def test_what_earlier_routes_promise_is_not_loaded_again() -> None:
    async with local_fleet({"a": TIERED}) as (fleet, caches):
        await publish(caches["a"], prompt(1, 4))
        await evict(caches["a"], "device")
        await caught_up(fleet, dict(caches))

        first = await fleet.route(prompt(1, 3))
        assert (first.loading_tokens, first.uncached_tokens) == (3 * STRIDE, 0)
        later = await fleet.route(prompt(1, 5))
        assert (later.promised_len, later.host_len) == (3 * STRIDE, 4 * STRIDE)
        assert (later.loading_tokens, later.uncached_tokens) == (STRIDE, STRIDE)


async def test_a_cache_may_come_back_with_and_without_a_host_tier() -> None:
    async with local_fleet({"a": TIERED}) as (fleet, caches):
        for config in (TIERED, TIERED, slim(), slim(), TIERED):
            await caches["a"].close()
            caches["a"] = LocalPrefixCache(config)
            await publish(caches["a"], prompt(1, 2))
            await check_index(fleet, dict(caches))
            if config is TIERED:
                await evict(caches["a"], "device")
                await caught_up(fleet, dict(caches))

            route = await fleet.route(prompt(1, 2))
            found = (route.prefix_len, route.host_len)
            assert found == ((0, 2 * STRIDE) if config is TIERED else (2 * STRIDE, 0))
            route.cancel()


async def test_lost_events_of_a_host_are_replaced_by_a_snapshot_of_it() -> None:
    async with local_fleet({"a": TIERED}) as (fleet, caches):
        feed = caches["a"]._host.service.feeds.feed("host")
        column, num_snapshots = fleet.members.feeds["a"].columns["host"], fleet.members.feeds["a"].num_snapshots
        feed._max_bytes = 0  # each batch is dropped before it is read
        await publish(caches["a"], prompt(1, 4))
        await publish(caches["a"], prompt(2, 1))
        await evict(caches["a"], "device")

        await until(lambda: fleet.members.feeds["a"].num_snapshots > num_snapshots)
        await until(lambda: fleet.index.num_pages(column) == 5)
        feed._max_bytes = 2**20
        await check_index(fleet, dict(caches))


async def test_the_host_of_an_engine_is_the_least_of_its_ranks() -> None:
    async with local_fleet({"e-tp0": TIERED, "e-tp1": TIERED, "f": slim()}) as (fleet, caches):
        await until(lambda: set(fleet.columns()) == {"e", "f"})
        for name, strides in (("e-tp0", 4), ("e-tp1", 3)):
            await publish(caches[name], prompt(1, strides))
        await evict(caches["e-tp0"], "device")
        await tiers_settled(caches["e-tp1"])
        column = fleet.members.feeds["e-tp0"].columns["host"]
        await until(lambda: fleet.index.num_pages(column) == 4)
        await until(lambda: fleet.index.num_pages(fleet.members.feeds["e-tp0"].columns["device"]) == 0)

        row = {row.cache: row for row in fleet.explain(prompt(1, 5)).candidates}["e"]
        assert (row.prefix_len, row.host_len, row.loading_tokens) == (0, 3 * STRIDE, 3 * STRIDE)
        assert row.uncached_tokens == 2 * STRIDE
        route = await fleet.route(prompt(1, 5))
        assert (route.cache, route.host_len, route.loading_tokens) == ("e", 3 * STRIDE, 3 * STRIDE)
        assert {row.cache: row.host_pages for row in fleet.stats().caches} == {"e": 3, "f": 0}


async def test_among_many_caches_the_prefixes_on_hosts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MAX_ALL", 3)
    configs = {f"c{number}": TIERED if number % 2 else slim() for number in range(6)}
    async with local_fleet(configs, config=RouteConfig(num_random=0)) as (fleet, caches):
        await publish(caches["c0"], prompt(1, 2))
        for name, strides in (("c3", 4), ("c5", 3)):
            await publish(caches[name], prompt(1, strides))
            await evict(caches[name], "device")
        await caught_up(fleet, dict(caches))

        assert [row.cache for row in fleet.explain(prompt(1, 5)).candidates] == ["c3", "c5"]
        route = await fleet.route(prompt(1, 5), among=["c0", "c1", "c2", "c4", "c5"])
        assert (route.cache, route.host_len) == ("c5", 3 * STRIDE)


async def test_longer_prefixes_of_caches_that_may_not_be_chosen_hide_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MAX_ALL", 1)
    configs = {f"c{number}": TIERED for number in range(8)}
    async with local_fleet(configs, config=RouteConfig(num_random=0)) as (fleet, caches):
        for name in ("c2", "c3", "c4", "c5", "c6", "c7"):
            await publish(caches[name], prompt(1, 4))
            await evict(caches[name], "device")
            await publish(caches[name], prompt(1, 4))  # now in both tiers
        await publish(caches["c1"], prompt(1, 2))
        await evict(caches["c1"], "device")
        await caught_up(fleet, dict(caches))

        for _ in range(10):
            async with await fleet.route(prompt(1, 5), among=["c0", "c1"]) as route:
                assert (route.cache, route.host_len) == ("c1", 2 * STRIDE)
                route.cancel()


async def test_tokens_that_a_cache_loads_wait_as_their_share() -> None:
    loaded, computed = list(range(16)), list(range(100, 108))
    async with LocalPrefixCache(host_config(events="slim", events_stride_tokens=4)) as cache:
        gate = GatedLoads(cache)
        await publish_on_host(cache, loaded)
        async with await connect_fleet({"a": cache}, timeout_s=10) as fleet:
            assert fleet.stats().caches[0].pending_tokens == 0
            waiting = asyncio.ensure_future(cache.acquire(loaded + computed).__aenter__())
            await gate.until_begun()
            await until(lambda: fleet.stats().caches[0].loading_tokens == 16)
            row = fleet.stats().caches[0]
            assert (row.unpublished_tokens, row.pending_tokens) == (16 + 8, 24 - int(0.9 * 16))

            gate.pass_chunks()
            lease = await waiting
            assert lease.loaded.host == 16
            await until(lambda: fleet.stats().caches[0].loading_tokens == 0)
            assert fleet.stats().caches[0].pending_tokens == 8
            await lease.release()


POOL: dict[str, Any] = {"num_slots": 512, "format": "opaque", "slot_bytes": 4, "device": "cpu"}
WINDOW: dict[str, Any] = {"num_swa_slots": 512, "swa_slot_bytes": 4}
STATES: dict[str, Any] = {"num_state_slots": 6, "state_bytes": 4}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"sliding_window_size": 2 * STRIDE, "pool": PoolConfig(**POOL | WINDOW)},
    "states": {"kind": "mamba", "pool": PoolConfig(**POOL | STATES)},
    "both": {"kind": "mamba", "sliding_window_size": 2 * STRIDE, "pool": PoolConfig(**POOL | WINDOW | STATES)},
}


@pytest.mark.parametrize("seed", [0, *more(1, 2, 3)])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_route_knows_what_the_cache_finds_in_both_tiers(kind: str, seed: int) -> None:
    rng = Random(seed)
    fields = {"pool": PoolConfig(**POOL), "host": whole_host(2_048), "eviction": NO_SPARE} | KINDS[kind]
    async with local_fleet({"a": slim(events_stride_tokens=16, **fields)}) as (fleet, caches):
        cache, has_states, num_deeper = caches["a"], kind in ("states", "both"), 0
        for _ in range(40):
            tokens = prompt(rng.randrange(4), rng.randrange(1, 5), 16 * rng.randrange(2))
            async with cache.acquire(tokens) as lease:
                await lease.insert(tokens, publish_state=has_states)
            if rng.random() < 0.3:
                await evict(cache, rng.choice(("device", "host")), rng.randrange(1, 400))
        await tiers_settled(cache)
        await caught_up(fleet, dict(caches))

        for first in range(4):
            tokens = prompt(first, 5)
            (row,) = fleet.explain(tokens).candidates
            found = await cache.match(tokens)
            assert (row.prefix_len, row.host_len) == (found.prefix_len, found.host_len)
            num_deeper += row.host_len > row.prefix_len
        assert num_deeper


# ---------------------------------------------------------------- configuration


def test_the_shares_of_other_media_stay_as_they_are() -> None:
    assert RouteConfig().tier_cost == {"CPU": 0.1, "STORAGE": 0.4}
    assert RouteConfig(tier_cost={"CPU": 1}).tier_cost == {"CPU": 1.0, "STORAGE": 0.4}
    assert RouteConfig(tier_cost={}).tier_cost == {"CPU": 0.1, "STORAGE": 0.4}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"GPU": 0.1}, "'CPU' or 'STORAGE'"),
        ({"cpu": 0.1}, "'CPU' or 'STORAGE'"),
        ({"CPU": 1.5}, "less than or equal to 1"),
        ({"CPU": -0.1}, "greater than or equal to 0"),
        ({"CPU": float("nan")}, "finite|greater"),
        ({"STORAGE": "much"}, "valid number"),
        (0.1, "valid dictionary"),
    ],
)
def test_a_wrong_share_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        RouteConfig(tier_cost=wrong)
    assert "tier_cost" in str(caught.value)
