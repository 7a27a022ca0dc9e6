"""Random traffic on caches that a router follows: then its index equals the union of the caches' snapshots."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from support.fleet.running_fleet import caught_up, local_fleet, prompt, slim, until

from raydix.actors import Fleet, Lease, LocalPrefixCache, Route
from raydix.actors.fleet import cache_feed
from raydix.actors.fleet import fleet as fleet_module
from raydix.actors.service import slim_event_feed
from raydix.schemas import PoolExhausted, RouteConfig

NUM_OPERATIONS = 150
NUM_OPERATIONS_LONG = 3_000


class Traffic:
    """Requests through a router and beside it, and caches that restart, come and go."""

    def __init__(self, fleet: Fleet, caches: dict[str, LocalPrefixCache], random: Random) -> None:
        self.fleet = fleet
        self.caches = caches
        self.random = random
        self.leases: list[tuple[Lease, list[int]]] = []
        self.routes: list[Route] = []
        self.num_started = len(caches)

    async def step(self) -> None:
        """Do one thing."""
        names = [
            "acquire",
            "aside",
            "insert",
            "end",
            "route",
            "end_route",
            "evict",
            "reset",
            "wait",
            "restart",
            "scale",
        ]
        (name,) = self.random.choices(names, [8, 3, 5, 5, 3, 3, 1, 0.3, 2, 0.5, 0.5])
        await getattr(self, name)()

    def tokens(self) -> list[int]:
        """Return one of few prompts, of another length each time."""
        return prompt(self.random.randrange(4), self.random.randrange(1, 6), self.random.randrange(20))

    def any_cache(self) -> LocalPrefixCache:
        return self.random.choice(list(self.caches.values()))

    async def acquire(self) -> None:
        tokens = self.tokens()
        try:
            self.leases.append((await self.fleet.acquire(tokens, timeout_s=0), tokens))
        except PoolExhausted:
            await self.end()

    async def aside(self) -> None:
        tokens = self.tokens()
        try:
            self.leases.append((await self.any_cache().acquire(tokens, timeout_s=0), tokens))
        except PoolExhausted:
            await self.end()

    async def insert(self) -> None:
        if self.leases:
            lease, tokens = self.random.choice(self.leases)
            if self.is_alive(lease):
                await lease.insert(tokens[: self.random.randint(max(1, lease.prefix_len), len(tokens))])

    async def end(self) -> None:
        if self.leases:
            lease, _ = self.leases.pop(self.random.randrange(len(self.leases)))
            if self.is_alive(lease):
                await self.random.choice([lease.release, lease.abort])()
            else:
                lease.mark_ended()

    def is_alive(self, lease: Lease) -> bool:
        return not lease.client.closed and lease.epoch in {each.service.epoch for each in self.caches.values()}

    async def route(self) -> None:
        self.routes.append(await self.fleet.route(self.tokens()))

    async def end_route(self) -> None:
        if self.routes:
            route = self.random.choice(self.routes)  # some end more than once
            self.random.choice([route.first_token, route.cancel])()

    async def evict(self) -> None:
        await self.any_cache().evict(self.random.randrange(1, 200))

    async def reset(self) -> None:
        await self.any_cache().reset()

    async def wait(self) -> None:
        await caught_up(self.fleet, dict(self.caches))

    async def restart(self) -> None:
        """Replace a cache by an empty one of the same name."""
        name = self.random.choice(list(self.caches))
        await self.caches[name].close()
        self.caches[name] = LocalPrefixCache(slim(256))

    async def scale(self) -> None:
        """Add a cache, or end one."""
        if len(self.caches) < 4:
            self.num_started += 1
            self.caches[f"cache-{self.num_started}"] = LocalPrefixCache(slim(256))
        else:
            await self.caches.pop(self.random.choice(list(self.caches))).close()


@pytest.mark.parametrize("seed", range(3))
async def test_the_index_equals_the_snapshots(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    await run(seed, NUM_OPERATIONS, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 108))
async def test_the_index_equals_the_snapshots_long(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    await run(seed, NUM_OPERATIONS_LONG, monkeypatch)


async def run(seed: int, num_operations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_LOOK_S", 0.01)
    monkeypatch.setattr(cache_feed, "_RETRY_S", 0.01)
    monkeypatch.setattr(slim_event_feed, "MAX_BYTES", 2_000)  # so that some readers meet gaps
    random = Random(seed)
    names = [f"cache-{number}" for number in range(3)]
    async with local_fleet(dict.fromkeys(names, slim(256)), config=RouteConfig(promise_ttl_s=0.5)) as (fleet, caches):
        traffic = Traffic(fleet, caches, random)
        for _ in range(num_operations):
            await traffic.step()
        while traffic.leases and random.random() < 0.9:  # some stay: pending pages
            await traffic.end()
        await check(fleet, caches)
        while traffic.leases:
            await traffic.end()
        for route in traffic.routes:
            route.first_token()
        await check(fleet, caches)
        await until(lambda: fleet.stats().open_routes == 0 and not promised(fleet))
        for cache in caches.values():
            await cache.check_invariants()
            stats = await cache.stats()
            assert stats.open_leases == stats.private_slots == 0


def promised(fleet: Fleet) -> set[int]:
    """Return the promised pages of all caches."""
    return set[int]().union(*(fleet.index.pages(column)[2] for column in fleet.columns().values()))


async def check(fleet: Fleet, caches: dict[str, Any]) -> None:
    """Assert that the index has exactly the pages of the caches' snapshots."""
    await until(lambda: set(fleet.columns()) == set(caches))
    snapshots = await caught_up(fleet, caches)
    fleet.index.check_invariants()
    for name, snapshot in snapshots.items():
        stored, pending, _ = fleet.index.pages(fleet.columns()[name])
        assert stored == set(snapshot.stored_hashes.tolist())
        assert pending == set(snapshot.pending_hashes.tolist())
    assert set(fleet.columns()) == set(caches)
