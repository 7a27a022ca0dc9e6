"""Random traffic on caches that two routers follow, also where event batches reach them late, twice, in another order
or not at all: then the index of each equals the union of the caches' snapshots.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
from support.faults.faults import around
from support.fleet import running_fleet
from support.fleet.faulty_feed import FaultyFeed
from support.fleet.running_fleet import caught_up, check_index, local_fleet, prompt, slim, until
from support.more import more
from support.tiers.settled_tiers import tensors

from raydix.actors import Fleet, Lease, LocalPrefixCache, PrefixCacheClient, Route, connect_fleet
from raydix.actors.fleet import cache_feed, members
from raydix.actors.fleet import fleet as fleet_module
from raydix.actors.fleet.open_routes import OpenRoutes
from raydix.actors.service import event_feed
from raydix.cache_core import PageIndex
from raydix.schemas import CacheConfig, HostConfig, PoolExhausted, RouteConfig

NUM_OPERATIONS = 150
NUM_OPERATIONS_LONG = 3_000


def config_of(name: str) -> CacheConfig:
    """Return the configuration of a cache: every second one has a host tier."""
    has_tier = int(name.removeprefix("cache-")) % 2
    return slim(256, pool=tensors(256), host=HostConfig(num_slots=1024) if has_tier else None)


class Traffic:
    """Requests through routers and beside them, and caches that restart, come and go."""

    def __init__(self, fleets: list[Fleet], caches: dict[str, LocalPrefixCache], random: Random) -> None:
        self.fleets = fleets
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
            self.leases.append((await self.random.choice(self.fleets).acquire(tokens, timeout_s=0), tokens))
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
        self.routes.append(await self.random.choice(self.fleets).route(self.tokens()))

    async def end_route(self) -> None:
        if self.routes:
            route = self.random.choice(self.routes)  # some end more than once
            self.random.choice([route.first_token, route.cancel])()

    async def evict(self) -> None:
        cache = self.any_cache()
        await cache.open()
        tier = self.random.choice(["device", *cache.config.tiers_below])
        await cache.evict(self.random.randrange(1, 200), tier)

    async def reset(self) -> None:
        await self.any_cache().reset()

    async def wait(self) -> None:
        await caught_up(self.random.choice(self.fleets), dict(self.caches))

    async def restart(self) -> None:
        """Replace a cache by an empty one of the same name."""
        name = self.random.choice(list(self.caches))
        await self.caches[name].close()
        self.caches[name] = LocalPrefixCache(config_of(name))

    async def scale(self) -> None:
        """Add a cache, or end one."""
        if len(self.caches) < 4:
            self.num_started += 1
            name = f"cache-{self.num_started}"
            self.caches[name] = LocalPrefixCache(config_of(name))
        else:
            await self.caches.pop(self.random.choice(list(self.caches))).close()


@pytest.mark.parametrize("disturbed", [False, True], ids=["all arrive", "disturbed"])
@pytest.mark.parametrize("seed", [0, *more(1, 2)])
async def test_each_index_equals_the_snapshots(seed: int, disturbed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    await run(seed, NUM_OPERATIONS, monkeypatch, disturbed)


@pytest.mark.long
@pytest.mark.parametrize("disturbed", [False, True], ids=["all arrive", "disturbed"])
@pytest.mark.parametrize("seed", range(100, 108))
async def test_each_index_equals_the_snapshots_long(
    seed: int, disturbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(seed, NUM_OPERATIONS_LONG, monkeypatch, disturbed)


async def run(seed: int, num_operations: int, monkeypatch: pytest.MonkeyPatch, disturbed: bool) -> None:
    monkeypatch.setattr(members, "_LOOK_S", 0.01)
    monkeypatch.setattr(cache_feed, "_RETRY_S", 0.01)
    monkeypatch.setattr(event_feed, "MAX_SLIM_BYTES", 2_000)  # so that some readers meet gaps
    random = Random(seed)
    faults = FaultyFeed(random)
    if disturbed:
        monkeypatch.setattr(PrefixCacheClient, "events", faults.around(PrefixCacheClient.events))
        monkeypatch.setattr(event_feed, "LINGER_S", 0.001)
    names = [f"cache-{number}" for number in range(3)]
    config = RouteConfig(promise_ttl_s=0.5)
    async with (
        local_fleet({name: config_of(name) for name in names}, config=config) as (fleet, caches),
        await connect_fleet(caches, config=config, timeout_s=10) as other,
    ):
        fleets = [fleet, other]
        traffic = Traffic(fleets, caches, random)
        for _ in range(num_operations):
            await traffic.step()
            await asyncio.sleep(0.005 * disturbed)  # else few batches are sent
        while traffic.leases and random.random() < 0.9:  # some stay: pending pages
            await traffic.end()
        for each in fleets:
            await check_index(each, dict(caches))
        while traffic.leases:
            await traffic.end()
        for route in traffic.routes:
            route.first_token()
        for each in fleets:
            await check_index(each, dict(caches))
            await until(lambda each=each: each.stats().open_routes == 0 and not promised(each))  # type: ignore[misc]
        for cache in caches.values():
            await cache.check_invariants()
            stats = await cache.stats()
            assert stats.open_leases == stats.private_slots == 0
    if disturbed:
        assert all(faults.done[fault] for fault in ("late", "lost", "repeated", "reordered", "gap")), faults.done


def promised(fleet: Fleet) -> set[int]:
    """Return the promised pages of all caches."""
    return set[int]().union(*(fleet.index.pages(column)[2] for column in fleet.columns().values()))


# ---------------------------------------------------------------- planted faults


def overlook_a_loss(patch: pytest.MonkeyPatch) -> None:
    """A batch is applied though those before it are missing."""

    def apply(original: Any, self: PageIndex, column: int, epoch: str, seq: int, kinds: Any, *pages: Any) -> Any:
        entry = self._columns[column]
        if entry.epoch == epoch:
            entry.seq = max(entry.seq, seq - len(kinds))
        return original(self, column, epoch, seq, kinds, *pages)

    around(patch, PageIndex, "apply", apply)


def take_no_snapshot_after_a_gap(patch: pytest.MonkeyPatch) -> None:
    def apply(original: Any, feed: cache_feed.CacheFeed, column: int, batch: Any) -> bool:
        original(feed, column, batch)
        return True

    around(patch, cache_feed.CacheFeed, "_apply", apply)


def keep_the_pages_of_a_cache_that_is_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageIndex, "drop_column", lambda *_: None)


def forget_that_a_lease_has_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fleet_module, "_note_lease", lambda *_: None)
    patch.setattr(OpenRoutes, "expire", lambda _: None)


@pytest.mark.parametrize(
    "fault",
    [
        overlook_a_loss,
        take_no_snapshot_after_a_gap,
        keep_the_pages_of_a_cache_that_is_gone,
        forget_that_a_lease_has_ended,
    ],
)
async def test_a_planted_fault_is_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    monkeypatch.setattr(running_fleet, "PATIENCE_S", 1.0)

    with pytest.raises((AssertionError, TimeoutError)):
        for seed in range(3):
            await run(seed, NUM_OPERATIONS, monkeypatch, disturbed=True)
