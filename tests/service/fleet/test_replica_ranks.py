"""`ReplicaRanks`: replicas in the order of their caches' costs, with caches in this process and no Serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.fleet.running_fleet import STRIDE, prompt, publish, slim, until

from raydix.actors import LocalPrefixCache
from raydix.actors.fleet import route_chooser
from raydix.actors.serve.prompt_reader import PromptReader
from raydix.actors.serve.replica_pairs import ReplicaPlace
from raydix.actors.serve.replica_ranks import FleetOptions, ReplicaRanks, least_loaded
from raydix.schemas import RouteConfig

REPLICAS = [ReplicaPlace(1, "x", "a"), ReplicaPlace(2, "x", "b"), ReplicaPlace(3, "x", "b"), ReplicaPlace(4, "x")]
KEYS = [1, 2, 3, 4]


class Request:
    """A request as `token_ids` takes it."""

    def __init__(self, tokens: Any) -> None:
        self.args = [tokens]
        self.kwargs: dict[str, Any] = {}


@asynccontextmanager
async def ranked(caches: dict[str, LocalPrefixCache]) -> AsyncIterator[ReplicaRanks]:
    reader = PromptReader("raydix.actors.serve.tokens:token_ids", None, 60)
    ranks = ReplicaRanks("d", FleetOptions(caches, RouteConfig(), "raydix", None), reader)
    ranks.set_replicas(REPLICAS)
    try:
        yield ranks
    finally:
        await ranks.close()
        for cache in caches.values():
            await cache.close()


def two_caches() -> dict[str, LocalPrefixCache]:
    return {"a": LocalPrefixCache(slim()), "b": LocalPrefixCache(slim())}


async def until_paired(ranks: ReplicaRanks, **replicas: int) -> None:
    await until(lambda: ranks.stats().replicas == replicas)


async def test_the_replicas_of_the_longest_prefix_come_first_and_those_without_a_cache_last() -> None:
    caches = two_caches()
    await publish(caches["b"], prompt(1, 4))
    async with ranked(caches) as ranks:
        await until_paired(ranks, a=1, b=2)

        found = await ranks.rank(Request(prompt(1, 5)), KEYS)

        assert [sorted(map(str, group)) for group in found.groups] == [["2", "3"], ["1"], ["4"]]
        assert found.route is not None and found.route.prefix_len == 4 * STRIDE
        assert ranks.caches_of(2) == ["b"] and ranks.caches_of(4) == []
        assert ranks.stats().routes == 0  # no replica has accepted it
        ranks.count(found)
        stats = ranks.stats()
        assert (stats.routes, stats.prompt_tokens, stats.prefix_tokens) == (1, 5 * STRIDE, 4 * STRIDE)
        assert (stats.deployment, stats.unpaired, stats.least_loaded) == ("d", 1, {})


async def test_replicas_that_may_not_get_the_request_are_left_out() -> None:
    caches = two_caches()
    await publish(caches["b"], prompt(1, 4))
    async with ranked(caches) as ranks:
        await until_paired(ranks, a=1, b=2)

        assert (await ranks.rank(Request(prompt(1, 5)), [1, 3])).groups == [[3], [1]]


async def test_a_route_counts_at_the_cache_of_the_replica_that_took_the_request() -> None:
    caches = two_caches()
    await publish(caches["b"], prompt(1, 4))
    async with ranked(caches) as ranks:
        await until_paired(ranks, a=1, b=2)
        found = await ranks.rank(Request(prompt(1, 5)), KEYS)

        route = await ranks.move(found, ranks.caches_of(1))

        assert route is not None and route.cache == "a"
        fleet = ranks.stats().fleet
        assert fleet is not None
        assert {each.cache: each.open_routes for each in fleet.caches} == {"a": 1, "b": 0}
        assert ranks.stats().moved == 1
        route.cancel()
        assert await ranks.move(found, []) is None


async def test_only_caches_with_replicas_are_compared() -> None:
    caches = two_caches() | {"lonely": LocalPrefixCache(slim())}
    await publish(caches["lonely"], prompt(1, 4))
    async with ranked(caches) as ranks:
        await until(lambda: len(getattr(ranks.stats().fleet, "caches", ())) == 3)

        found = await ranks.rank(Request(prompt(1, 5)), KEYS)

        assert found.route is not None and found.route.cache in {"a", "b"}
        assert "lonely" not in found.route.next_best


async def test_without_caches_or_tokens_all_replicas_are_one_group() -> None:
    caches: dict[str, LocalPrefixCache] = {}
    async with ranked(caches) as ranks:
        (group,) = (await ranks.rank(Request([1]), KEYS)).groups
        assert sorted(map(str, group)) == list("1234")
        caches |= two_caches()
        await until_paired(ranks, a=1, b=2)
        for tokens in ("text", [], [-1]):
            assert len((await ranks.rank(Request(tokens), KEYS)).groups) == 1

        gone = [caches.pop(name) for name in ("a", "b")]
        await until_paired(ranks)
        assert (await ranks.rank(Request(prompt(1, 1)), KEYS)).route is None

        assert ranks.stats().least_loaded == {"no cache": 2, "no tokens": 1, "failed": 2}
        for cache in gone:
            await cache.close()


async def test_without_replicas_the_caches_are_left_and_found_again_later() -> None:
    async with ranked(two_caches()) as ranks:
        await until_paired(ranks, a=1, b=2)

        ranks.set_replicas([])

        assert ranks.stats().fleet is None and ranks.stats().replicas == {}
        ranks.set_replicas(REPLICAS)
        await until_paired(ranks, a=1, b=2)
        assert (await ranks.rank(Request(prompt(1, 1)), KEYS)).route is not None


def test_of_many_replicas_some_random_ones_are_asked_first() -> None:
    first, others = least_loaded(range(100))

    assert (len(first), len(others), set(first) | set(others)) == (16, 84, set(range(100)))
    assert least_loaded([]) == []


async def test_a_request_counts_once_however_often_it_is_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt is read and hashed once, and one route is open."""
    caches = two_caches()
    await publish(caches["b"], prompt(1, 4))
    hashed: list[int] = []
    page_hashes = route_chooser.page_hashes

    def count(key: Any, *args: Any) -> Any:
        hashed.append(len(key))
        return page_hashes(key, *args)

    async with ranked(caches) as ranks:
        await until_paired(ranks, a=1, b=2)
        monkeypatch.setattr(route_chooser, "page_hashes", count)
        requests = [Request(prompt(1, 5)), Request(prompt(1, 4))]
        found = []
        for request in requests:
            found.append(await ranks.rank(request, KEYS))
            for _ in range(10):
                found[-1] = await ranks.rank(None, KEYS, found[-1])
        for each in found:
            ranks.count(each)

        stats = ranks.stats()
        assert (stats.routes, stats.prompt_tokens, stats.prefix_tokens) == (2, 9 * STRIDE, 8 * STRIDE)
        assert stats.fleet is not None
        assert (stats.fleet.routes, stats.fleet.open_routes) == (2, 2)
        assert {each.cache: each.routes for each in stats.fleet.caches} == {"a": 0, "b": 2}
        assert len(hashed) == 2


async def test_a_request_without_a_prompt_counts_once_however_often_it_is_ranked() -> None:
    caches = two_caches()
    async with ranked(caches) as ranks:
        await until_paired(ranks, a=1, b=2)
        found = await ranks.rank(Request(None), KEYS)
        for _ in range(5):
            found = await ranks.rank(Request(None), KEYS, found)

        assert found.route is None
        assert sum(ranks.stats().least_loaded.values()) == 1
