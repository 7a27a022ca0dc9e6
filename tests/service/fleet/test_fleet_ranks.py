"""The caches of a tensor-parallel engine's ranks are one destination of a fleet."""

from __future__ import annotations

from typing import Any

import pytest
from support.fleet.running_fleet import STRIDE, caught_up, local_fleet, prompt, publish, slim, until

from raydix.actors import Fleet, LocalPrefixCache, acquire_ranks, connect_fleet
from raydix.actors.fleet import members
from raydix.actors.serve.replica_pairs import ReplicaPairs, ReplicaPlace
from raydix.schemas import CacheUnavailable, InvalidRequest

ENGINES = ("e-tp0", "e-tp1", "f-tp0", "f-tp1")


@pytest.fixture(autouse=True)
def looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have routers look for caches more often."""
    monkeypatch.setattr(members, "_LOOK_S", 0.05)


async def index_has(fleet: Fleet, caches: dict[str, LocalPrefixCache], *names: str) -> None:
    """Wait until a router has the events of these ranks."""
    feeds = fleet.members.feeds
    for name in names:
        column = feeds[name].column
        assert column is not None
        seq = (await feeds[name].client.event_snapshot()).seq
        await until(lambda column=column, seq=seq: fleet.index.position(column)[1] >= seq)  # type: ignore[misc]


async def test_the_hit_is_the_least_of_the_ranks() -> None:
    async with local_fleet({name: slim() for name in ENGINES}) as (fleet, caches):
        await until(lambda: set(fleet.columns()) == {"e", "f"})
        await publish(caches["e-tp0"], prompt(1, 8))
        await publish(caches["e-tp1"], prompt(1, 3))
        await publish(caches["f-tp0"], prompt(1, 4))
        await publish(caches["f-tp1"], prompt(1, 4))
        await index_has(fleet, caches, *ENGINES)

        found = {each.cache: each.prefix_len for each in fleet.explain(prompt(1, 8)).candidates}
        assert found == {"e": 3 * STRIDE, "f": 4 * STRIDE}
        route = await fleet.route(prompt(1, 8), among=["e", "f"])
        assert (route.cache, route.prefix_len, route.promised_len) == ("f", 4 * STRIDE, 4 * STRIDE)
        rows = {each.cache: each for each in fleet.stats().caches}
        assert (rows["e"].ranks, rows["e"].pages, rows["f"].pages) == (2, 3, 8)  # with those that are promised
        assert (rows["e"].routes, rows["f"].routes, fleet.stats().routes) == (0, 1, 1)
        assert rows["f"].pending_tokens == route.uncached_tokens == 4 * STRIDE


async def test_a_route_is_promised_and_ends_at_every_rank() -> None:
    async with local_fleet({name: slim() for name in ENGINES}) as (fleet, _):
        await until(lambda: set(fleet.columns()) == {"e", "f"})
        route = await fleet.route(prompt(1, 4))

        later = await fleet.route(prompt(1, 4), among=[route.cache])
        assert later.promised_len == 4 * STRIDE
        later.cancel()
        route.cancel()

        assert all(
            fleet.index.pages(feed.column)[2] == set()
            for feed in fleet.members.feeds.values()
            if feed.column is not None
        )
        assert all(each.pending_tokens == each.open_routes == 0 for each in fleet.stats().caches)
        assert (await fleet.route(prompt(1, 4), among=[route.cache])).promised_len == 0


async def test_leases_at_all_ranks_of_a_route() -> None:
    async with local_fleet({name: slim() for name in (*ENGINES, "one")}) as (fleet, _):
        await until(lambda: set(fleet.columns()) == {"e", "f", "one"})
        route = await fleet.route(prompt(1, 4), among=["e"])
        leases = await acquire_ranks(fleet.clients(route), prompt(1, 4))
        for lease in leases:
            await lease.insert(prompt(1, 4), release=True)
        route.first_token()
        assert len(leases) == 2

        with pytest.raises(InvalidRequest, match=r"e has 2 ranks: acquire_ranks\(fleet.clients\(route\)"):
            fleet.client(route)
        async with fleet.acquire(prompt(2, 4)):
            routes = {each.cache: each.routes for each in fleet.stats().caches}
            assert routes == {"e": 1, "f": 0, "one": 1}  # of caches that are no rank


async def test_a_fleet_of_ranks_alone_has_no_single_lease() -> None:
    async with local_fleet({name: slim() for name in ENGINES}) as (fleet, _):
        with pytest.raises(InvalidRequest, match=r"route, and then acquire_ranks\(fleet.clients\(route\), ...\)"):
            await fleet.acquire(prompt(1, 1))


async def test_an_engine_without_one_of_its_ranks_is_left_out_by_cause() -> None:
    configs = {"e-tp0": slim(), "e-tp2": slim(), "f-tp0": slim(), "g": slim()}
    configs["f-tp1"] = slim(events="full", events_stride_tokens=512)
    async with local_fleet(configs) as (fleet, caches):
        assert set(fleet.columns()) == {"g"}
        causes = fleet.stats().left_out
        assert set(causes) == {"e", "f"}
        assert causes["e"] == "e-tp1, the cache of one of its ranks, does not run"
        assert causes["f"].startswith("f-tp1: it publishes no slim events")
        with pytest.raises(CacheUnavailable):
            await fleet.route(prompt(1, 1), among=["e", "f"])

        caches["e-tp1"] = LocalPrefixCache(slim())
        await until(lambda: set(fleet.columns()) == {"e", "g"})


async def test_the_highest_rank_that_has_gone_is_missed_until_the_engine_is_replaced() -> None:
    async with local_fleet({name: slim() for name in ("e-tp0", "e-tp1", "g")}) as (fleet, caches):
        await until(lambda: set(fleet.columns()) == {"e", "g"})
        await publish(caches["e-tp0"], prompt(1, 2))
        await caches.pop("e-tp1").close()
        await until(lambda: "e-tp1" in fleet.stats().left_out.get("e", "") and "e" not in fleet.columns())
        await until(lambda: fleet.stats().left_out["e"].endswith("does not run"))
        assert set(fleet.columns()) == {"g"}

        await caches["e-tp0"].close()  # the next engine has one rank
        caches["e-tp0"] = LocalPrefixCache(slim())
        await until(lambda: set(fleet.columns()) == {"e", "g"})
        assert fleet.explain(prompt(1, 2)).candidates[0].prefix_len == 0
        await caught_up(fleet, {"g": caches["g"]})


async def test_beside_a_cache_of_that_name_they_are_caches_like_any_other() -> None:
    async with local_fleet({name: slim() for name in ("e", "e-tp0", "e-tp1")}) as (fleet, _):
        await until(lambda: set(fleet.columns()) == {"e", "e-tp0", "e-tp1"})


async def test_replicas_name_the_engine() -> None:
    async with local_fleet({name: slim() for name in ENGINES}) as (fleet, _):
        await until(lambda: set(fleet.columns()) == {"e", "f"})
        pairs = ReplicaPairs([ReplicaPlace(1, "x", "e"), ReplicaPlace(2, "local")], fleet.places())

        assert pairs.by_replica == {1: ["e"], 2: ["e", "f"]} and pairs.cover_all


@pytest.mark.parametrize("among", ["abc", b"abc", [1], 5])
async def test_among_must_be_names(among: Any) -> None:
    async with local_fleet({"a": slim(), "b": slim()}) as (fleet, _):
        with pytest.raises(InvalidRequest, match="among must"):
            await fleet.route(prompt(1, 1), among=among)
        assert fleet.stats().routes == 0


@pytest.mark.parametrize("name", ["", 5, "a/b"])
async def test_wrong_names_of_caches(name: Any) -> None:
    cache = LocalPrefixCache(slim())
    try:
        with pytest.raises(InvalidRequest, match="caches\\["):
            await connect_fleet({name: cache}, timeout_s=5)
        good = {"g": cache}
        async with await connect_fleet(good, timeout_s=5) as fleet:
            good[name] = cache
            await until(lambda: fleet.members.fault != "")
            assert (await fleet.route(prompt(1, 1))).cache == "g"
    finally:
        await cache.close()
