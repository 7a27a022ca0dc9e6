"""Routes: to the longest prefix, away from load, with promises, and to the next best cache. Caches in this process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from support.fleet.running_fleet import STRIDE, caught_up, local_fleet, prompt, publish, slim, until

from raydix.actors import LocalPrefixCache, connect_fleet
from raydix.actors.fleet import members
from raydix.schemas import CacheUnavailable, InvalidRequest, PoolConfig, PoolExhausted, RouteConfig

THREE = {"a": slim(), "b": slim(), "c": slim()}


async def test_a_route_leads_to_the_longest_prefix() -> None:
    async with local_fleet(THREE) as (fleet, caches):
        await publish(caches["b"], prompt(1, 4))
        await publish(caches["c"], prompt(1, 2))
        await caught_up(fleet, dict(caches))

        route = await fleet.route(prompt(1, 5, more=7))

        assert (route.cache, route.prefix_len, route.promised_len) == ("b", 4 * STRIDE, 4 * STRIDE)
        assert (route.uncached_tokens, route.pending_tokens) == (STRIDE + 7, 0)
        assert route.next_best == ("c", "a")
        assert "3 * 39 uncached" in route.why
        assert fleet.client(route) is fleet.client(await fleet.route(prompt(1, 5, more=7)))


HYBRID = slim(kind="mamba", pool=PoolConfig(num_slots=4096, num_state_slots=8))
WINDOW = slim(sliding_window_size=2 * STRIDE, pool=PoolConfig(num_slots=4096, num_swa_slots=4096))


async def test_a_hybrid_cache_is_promised_up_to_its_last_state_and_not_by_its_kv() -> None:
    async with local_fleet({"a": HYBRID, "b": HYBRID, "c": HYBRID}) as (fleet, caches):
        await publish(caches["b"], prompt(1, 4))  # without a state
        short = prompt(1, 2, more=16)
        async with caches["c"].acquire(short) as lease:
            await lease.insert(short, publish_state=True)
        await caught_up(fleet, dict(caches))

        route = await fleet.route(prompt(1, 5, more=7))
        assert (route.cache, route.prefix_len, route.promised_len) == ("c", len(short), len(short))
        assert (await caches["c"].match(prompt(1, 5))).prefix_len == len(short)
        route.cancel()
        by_name = {row.cache: row for row in fleet.explain(prompt(1, 5)).candidates}
        assert [by_name[name].prefix_len for name in "abc"] == [0, 0, len(short)]
        assert {row.cache: row.pages for row in fleet.stats().caches} == {"a": 0, "b": 4, "c": 2}


async def test_a_window_cache_is_promised_where_a_window_ends() -> None:
    async with local_fleet({"a": WINDOW, "b": WINDOW}) as (fleet, caches):
        tokens = prompt(1, 4, more=17)
        await publish(caches["b"], tokens)
        await caught_up(fleet, dict(caches))
        whole = len(tokens) - len(tokens) % 16
        async with await fleet.route([*tokens, 7, 8]) as route:
            assert (route.cache, route.prefix_len) == ("b", whole)
        assert (await fleet.route([*tokens[: 2 * STRIDE], 7])).prefix_len == 2 * STRIDE

        for _ in range(3):  # The tail goes first, and then the other node.
            await caches["b"].evict(1)
            await caught_up(fleet, dict(caches))
            found = await caches["b"].match([*tokens, 7, 8])
            assert fleet.explain([*tokens, 7, 8]).candidates[0].prefix_len == found.prefix_len


async def test_a_prompt_that_was_hashed_before_a_cache_with_ends_came_is_hashed_again() -> None:
    caches: dict[str, Any] = {"a": slim()}
    async with local_fleet(caches) as (fleet, running):
        route = await fleet.route(prompt(1, 2))
        assert route.prompt.pages is None
        hybrid = LocalPrefixCache(HYBRID)
        async with hybrid, hybrid.acquire(prompt(1, 2)) as lease:
            await lease.insert(prompt(1, 2), publish_state=True)
            running["z"] = hybrid
            await until(lambda: "z" in fleet.columns())

            again = await fleet.route(prompt(1, 2), replaces=route)

            assert (again.cache, again.prefix_len, len(again.prompt.pages)) == ("z", 2 * STRIDE, 4)
            again.cancel()
            running.pop("z")
            await until(lambda: "z" not in fleet.columns())


async def test_only_the_same_namespace_counts() -> None:
    async with local_fleet(THREE) as (fleet, caches):
        await publish(caches["b"], prompt(1, 4))
        await caught_up(fleet, dict(caches))

        assert (await fleet.route(prompt(1, 4), lora_id="x")).promised_len == 0
        assert fleet.explain(prompt(1, 4)).candidates[0].cache == "b"
        assert {each.prefix_len for each in fleet.explain(prompt(1, 4), cache_salt="s").candidates} == {0}


async def test_more_load_than_the_prefix_is_worth_leads_elsewhere() -> None:
    async with local_fleet(THREE, config=RouteConfig(weight=2)) as (fleet, caches):
        await publish(caches["b"], prompt(1, 2))
        await caught_up(fleet, dict(caches))
        tokens = prompt(1, 2, more=8)

        first = await fleet.route(tokens)
        assert first.cache == "b"
        held = [await fleet.client(first).acquire(prompt(number, 4)) for number in (7, 8)]  # of another router's, say
        await until(lambda: stats_of(fleet, "b").pending_tokens >= 8 * STRIDE)
        second = await fleet.route(tokens)

        assert second.cache != "b"
        assert fleet.explain(tokens).candidates[-1].cache == "b"
        for lease in held:
            await lease.abort()
        await until(lambda: stats_of(fleet, "b").unpublished_tokens == 0)


async def test_equal_costs_lead_to_all_caches() -> None:
    async with local_fleet(THREE) as (fleet, _):
        found = set[str]()
        for _ in range(100):
            async with await fleet.route([1, 2, 3]) as route:
                found.add(route.cache)
        assert found == set(THREE)


async def test_a_route_counts_until_its_first_token_and_each_end_may_follow_another() -> None:
    async with local_fleet(THREE) as (fleet, _):
        tokens = prompt(1, 3)
        async with await fleet.route(tokens) as route:
            assert pending(fleet) == {route.cache: 3 * STRIDE}
            column = fleet.columns()[route.cache]
            assert len(fleet.index.pages(column)[2]) == 3
            same = await fleet.route(tokens)
            assert (same.cache, same.prefix_len, same.promised_len) == (route.cache, 0, 3 * STRIDE)
            same.cancel()
            same.cancel()
            same.first_token()
            assert pending(fleet) == {route.cache: 3 * STRIDE}
            route.first_token()
            assert pending(fleet) == {}
            route.first_token()
        assert fleet.stats().open_routes == 0
        assert fleet.stats().routes == 2


async def test_a_cancelled_route_ends_its_promise() -> None:
    async with local_fleet(THREE) as (fleet, _):
        with pytest.raises(ZeroDivisionError):
            async with await fleet.route(prompt(1, 3)) as route:
                raise ZeroDivisionError
        assert fleet.index.pages(fleet.columns()[route.cache])[2] == set()


async def test_a_promise_ends_after_its_time() -> None:
    async with local_fleet(THREE, config=RouteConfig(promise_ttl_s=0.05)) as (fleet, _):
        route = await fleet.route(prompt(1, 3))
        await asyncio.sleep(0.06)

        assert pending(fleet) == {}
        assert fleet.index.num_pages() == 0
        route.first_token()
        assert fleet.stats().open_routes == 0


async def test_a_computed_prompt_stays_promised_until_the_events_have_it() -> None:
    async with local_fleet(THREE) as (fleet, caches):
        tokens = prompt(1, 3)
        async with fleet.acquire(tokens) as lease:
            await lease.insert(tokens)
            assert pending(fleet) == {}
        again = await fleet.route(tokens)  # in the same tick as the end
        assert again.promised_len == 3 * STRIDE
        again.cancel()

        await caught_up(fleet, dict(caches))

        assert (await fleet.route(tokens)).prefix_len == 3 * STRIDE


async def test_two_routers_see_each_others_requests_through_the_caches() -> None:
    async with local_fleet(THREE) as (one, caches), await connect_fleet(caches, timeout_s=10) as other:
        tokens = prompt(1, 4)
        lease = await one.acquire(tokens)
        (name,) = pending(one)
        await until(lambda: pending(other) == {name: 4 * STRIDE})

        route = await other.route(tokens)
        assert (route.cache, route.prefix_len, route.promised_len) == (name, 0, 4 * STRIDE)
        route.cancel()
        await until(lambda: stats_of(one, name).unpublished_tokens > 0)
        assert pending(one) == {name: 4 * STRIDE}  # the own request is counted once

        await lease.abort()
        await until(lambda: pending(other) == {} and other.index.num_pages() == 0)


async def test_a_refusal_leads_to_the_next_best() -> None:
    async with local_fleet({"small": slim(96), "large": slim()}) as (fleet, caches):
        await publish(caches["small"], prompt(1, 2))
        await caught_up(fleet, dict(caches))
        tokens = prompt(1, 4)
        assert fleet.explain(tokens).candidates[0].cache == "small"

        async with fleet.acquire(tokens) as lease:  # it can never fit there
            assert lease.prefix_len == 0
            assert pending(fleet) == {"large": 4 * STRIDE}
        assert stats_of(fleet, "small").refused == 1

        with pytest.raises(PoolExhausted):
            await fleet.acquire(prompt(1, 200))
        assert pending(fleet) == {}


async def test_a_request_waits_at_the_best_if_all_are_full() -> None:
    async with local_fleet({"a": slim(64), "b": slim(64)}) as (fleet, caches):
        held = {name: await cache.acquire(prompt(5, 2)) for name, cache in caches.items()}
        with pytest.raises(PoolExhausted):
            await fleet.acquire(prompt(1, 2), timeout_s=0)

        waiting = asyncio.create_task(fleet.acquire(prompt(1, 2), timeout_s=30))
        await until(lambda: any(cache.service.stats().waiters for cache in caches.values()))
        for lease in held.values():
            await lease.abort()

        await (await waiting).release()


async def test_an_unavailable_cache_leads_to_the_next_best_and_is_forgotten_at_once() -> None:
    async with local_fleet(THREE) as (fleet, caches):
        await publish(caches["b"], prompt(1, 4))
        await caught_up(fleet, dict(caches))
        await caches["b"].close()

        async with fleet.acquire(prompt(1, 4)) as lease:  # before any event says so
            assert lease.prefix_len == 0
        assert "b" not in fleet.columns()
        assert fleet.index.num_pages(fleet.columns()["a"]) + fleet.index.num_pages(fleet.columns()["c"]) <= 4


async def test_a_route_yields_to_nothing_and_calls_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_fleet({f"cache-{number}": slim(64) for number in range(20)}) as (fleet, _):
        ticks = 0

        def count() -> None:
            nonlocal ticks
            ticks += 1
            asyncio.get_running_loop().call_soon(count)

        asyncio.get_running_loop().call_soon(count)
        for number in range(200):
            await fleet.route(prompt(number, 2))
        assert ticks == 0
        assert fleet.stats().open_routes == 200


async def test_of_many_caches_those_with_the_prefix_are_compared() -> None:
    async with local_fleet({f"cache-{number}": slim(256) for number in range(20)}) as (fleet, caches):
        for name, length in (("cache-3", 4), ("cache-7", 5), ("cache-11", 1)):
            await publish(caches[name], prompt(1, length))
        await caught_up(fleet, dict(caches))
        lengths = {"cache-3": 4 * STRIDE, "cache-7": 5 * STRIDE, "cache-11": STRIDE}

        for _ in range(50):
            candidates = fleet.explain(prompt(1, 6)).candidates
            assert [each.cache for each in candidates[:2]] == ["cache-7", "cache-3"]
            assert 2 <= len(candidates) <= 4
            assert all(each.prefix_len == lengths.get(each.cache, 0) for each in candidates)


async def test_wrong_arguments_are_refused_before_anything_is_counted() -> None:
    async with local_fleet(THREE) as (fleet, _):
        for wrong in ([], [-1], "text", None):
            with pytest.raises(InvalidRequest):
                await fleet.route(wrong)
            with pytest.raises(InvalidRequest):
                await fleet.acquire(wrong)
        with pytest.raises(InvalidRequest):
            await fleet.acquire([1], timeout_s=-1)
        assert fleet.stats().routes == 0
    with pytest.raises(InvalidRequest, match="closed"):
        await fleet.route([1])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"caches": 5}, "caches"),
        ({"config": {"weight": 3}}, "config"),
        ({"fingerprint": 5}, "fingerprint"),
        ({"timeout_s": float("nan")}, "seconds"),
    ],
    ids=str,
)
async def test_wrong_arguments_of_connect_fleet_are_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        await connect_fleet(**{"caches": {}} | given)


async def test_the_content_of_every_hit_is_its_own_tokens() -> None:
    """Traffic on small caches that evict: the KV of each hit is that of its tokens, and no slot is lost."""
    pool = PoolConfig.uniform(num_slots=320, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", device="cpu")
    async with local_fleet({name: slim(pool=pool) for name in THREE}) as (fleet, caches):
        hits = 0
        for number in range(120):
            tokens = prompt(number * 7 % 9, 1 + number % 5, more=number % 16)
            async with fleet.acquire(tokens) as lease:
                kv = await lease.client.attach_pool()  # type: ignore[attr-defined]
                k, _ = await kv.read_kv(lease, lease.slots[: lease.prefix_len])
                assert k[0].flatten().tolist() == tokens[: lease.prefix_len]
                rest = torch.tensor(tokens[lease.prefix_len :], dtype=torch.float32).reshape(-1, 1, 1)
                if len(rest):
                    kv.write(0, lease.slots[lease.prefix_len :], rest, rest)
                await lease.insert(tokens)
                hits += lease.prefix_len
        assert hits > 0
        assert fleet.stats().open_routes == 0
        for cache in caches.values():
            await cache.check_invariants()
            assert (await cache.stats()).open_leases == 0


async def test_a_lease_that_publishes_nothing_ends_its_route() -> None:
    async with local_fleet(THREE) as (fleet, _):
        lease = await fleet.acquire(prompt(1, 2))
        await lease.insert(prompt(1, 1))  # a part of the prompt
        assert sum(pending(fleet).values()) == 2 * STRIDE
        await lease.release()
        assert pending(fleet) == {}


async def test_a_fleet_without_a_cache_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_GATHER_S", 0.1)
    with pytest.raises(CacheUnavailable, match="none was found"):
        await connect_fleet({}, timeout_s=0.1)
    async with local_fleet({"a": slim()}, timeout_s=2) as (fleet, caches):
        await caches["a"].close()
        await until(lambda: not fleet.columns())
        with pytest.raises(CacheUnavailable, match="shut down"):
            await fleet.route([1])


def stats_of(fleet: Any, name: str) -> Any:
    return next(each for each in fleet.stats().caches if each.cache == name)


def pending(fleet: Any) -> dict[str, int]:
    """Return the pending tokens of the caches with any."""
    return {each.cache: each.pending_tokens for each in fleet.stats().caches if each.pending_tokens}
