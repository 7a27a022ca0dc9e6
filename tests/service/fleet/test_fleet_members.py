"""Caches that come, go, restart and do not fit, in this process: who is in, who is left out, and why."""

from __future__ import annotations

import logging

import pytest
from support.fleet.running_fleet import STRIDE, caught_up, local_fleet, prompt, publish, slim, until

from raydix.actors import LocalPrefixCache, PrefixCacheClient, connect_fleet
from raydix.actors.fleet import cache_feed, members
from raydix.schemas import CacheConfig, CacheUnavailable, ModelFingerprint, PoolConfig

BASE, OTHER = (ModelFingerprint(fields={"model": name}, weights="1") for name in ("base", "other"))


@pytest.fixture(autouse=True)
def looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have routers look for caches and at left-out ones more often."""
    monkeypatch.setattr(members, "_LOOK_S", 0.05)
    monkeypatch.setattr(members, "_REFRESH_S", 0.1)
    monkeypatch.setattr(cache_feed, "_RECHECK_S", 0.1)


async def test_caches_that_do_not_fit_are_left_out_with_one_warning_each(caplog: pytest.LogCaptureFixture) -> None:
    configs = {
        "a": slim(),
        "b": slim(),
        "silent": CacheConfig(page_size=16, pool=PoolConfig(num_slots=64)),
        "full": slim(events="full", events_stride_tokens=512),
        "pages": slim(page_size=32, events_stride_tokens=STRIDE),
        "stride": slim(events_stride_tokens=64),
        "pairs": slim(bigram=True),
    }
    with caplog.at_level(logging.WARNING, "raydix.actors.fleet"):
        async with local_fleet(configs) as (fleet, caches):
            assert set(fleet.columns()) == {"a", "b"}
            causes = fleet.stats().left_out
            assert set(causes) == set(configs) - {"a", "b"}
            assert "not False" in causes["silent"] and "not 'full'" in causes["full"]
            assert "not page_size=32" in causes["pages"] and "stride_tokens=64" in causes["stride"]
            assert {(await fleet.route([number])).cache for number in range(50)} <= {"a", "b"}

            caches["c"] = LocalPrefixCache(slim())
            await until(lambda: set(fleet.columns()) == {"a", "b", "c"})

    named = [each.getMessage() for each in caplog.records if each.name.startswith("raydix.actors.fleet")]
    assert sorted(message.split("'")[1] for message in named) == sorted(set(configs) - {"a", "b"})


async def test_a_base_bound_to_another_model_leaves_its_cache_out() -> None:
    configs = {name: slim() for name in ("a", "b", "c", "unbound")} | {"fixed": slim(fingerprint=str(OTHER))}
    async with local_fleet(configs) as (fleet, caches):
        await until(lambda: len(fleet.columns()) == 5)  # the only fingerprint is that of most
        for name, model in (("a", BASE), ("b", BASE), ("c", OTHER)):
            await caches[name].bind_model(model)
        async with await connect_fleet(caches, fingerprint=OTHER, timeout_s=10) as other:
            await until(lambda: set(other.columns()) == {"c", "unbound", "fixed"})
            assert str(OTHER) in other.stats().left_out["a"]
        async with await connect_fleet(caches, fingerprint=str(BASE), timeout_s=10) as base:
            await until(lambda: set(base.columns()) == {"a", "b", "unbound"})

            await caches["c"].reset()  # the next model may be bound
            await caches["c"].bind_model(BASE)
            await until(lambda: set(base.columns()) == {"a", "b", "c", "unbound"})

        await until(lambda: "fixed" not in fleet.columns())  # that of most caches has changed
        assert set(fleet.columns()) == {"a", "b", "c", "unbound"}


async def test_caches_come_and_go_without_a_restart_of_the_router() -> None:
    async with local_fleet({"a": slim()}) as (fleet, caches):
        await publish(caches["a"], prompt(1, 2))
        added = LocalPrefixCache(slim())
        await publish(added, prompt(2, 3))
        caches["b"] = added
        await until(lambda: "b" in fleet.columns())
        assert fleet.explain(prompt(2, 3)).candidates[0].cache == "b"
        route = await fleet.route(prompt(2, 3))

        await caches.pop("b").close()
        await until(lambda: "b" not in fleet.columns())

        assert (await fleet.route(prompt(2, 3))).cache == "a"
        await until(lambda: "b" not in fleet.stats().left_out)  # it is no longer listed
        route.first_token()
        with pytest.raises(CacheUnavailable, match="'b'"):
            fleet.client(route)


async def test_a_cache_started_again_with_another_configuration_is_left_out() -> None:
    async with local_fleet({name: slim() for name in "abc"}) as (fleet, caches):
        await publish(caches["c"], prompt(1, 2))
        await caught_up(fleet, dict(caches))
        assert (await fleet.route(prompt(1, 2))).cache == "c"

        await caches["c"].close()
        caches["c"] = LocalPrefixCache(slim(page_size=8))
        await until(lambda: "not page_size=8" in fleet.stats().left_out.get("c", ""))
        assert (await fleet.route(prompt(1, 2))).promised_len == 0

        await caches["c"].close()
        caches["c"] = LocalPrefixCache(slim())
        await until(lambda: "c" in fleet.columns())
        assert fleet.explain(prompt(1, 2)).candidates[0].prefix_len == 0


async def test_most_caches_decide_also_if_that_changes() -> None:
    async with local_fleet({"a": slim(), "b": slim(events_stride_tokens=64), "c": slim()}) as (fleet, caches):
        assert set(fleet.columns()) == {"a", "c"}
        await publish(caches["b"], prompt(1, 4))
        await caches.pop("a").close()
        caches["d"] = LocalPrefixCache(slim(events_stride_tokens=64))

        await until(lambda: set(fleet.columns()) == {"b", "d"})

        assert "stride_tokens=64" in fleet.stats().left_out["c"]
        route = await fleet.route(prompt(1, 4))
        assert (route.cache, route.prefix_len) == ("b", 4 * STRIDE)


async def test_no_lease_is_lost_when_most_caches_change() -> None:
    async with local_fleet({"a": slim(), "b": slim()}) as (fleet, caches):
        lease = await fleet.acquire(prompt(1, 2))
        for name in "cde":
            caches[name] = LocalPrefixCache(slim(events_stride_tokens=64))
        await until(lambda: set(fleet.columns()) == set("cde"))

        await lease.insert(prompt(1, 2), release=True)


async def test_closing_a_fleet_ends_its_leases_and_nothing_else() -> None:
    async with local_fleet({"a": slim()}) as (fleet, caches):
        await fleet.acquire(prompt(1, 2))
        async with PrefixCacheClient(caches["a"]) as client:
            kept = await client.acquire(prompt(2, 2))
            await fleet.close()
            await fleet.close()
            assert (await client.stats()).open_leases == 1
            await kept.release()
