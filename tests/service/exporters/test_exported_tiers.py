"""A subscriber of an exporter has the blocks of each tier of the cache, though `AllBlocksCleared` names no tier."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from support.exporters import vllm_subscriber
from support.exporters.running_exporter import FREE_PORT, PAGE, exported, full, host_of, publish, restart
from support.exporters.vllm_subscriber import VllmSubscriber
from support.faults.faults import around
from support.more import more
from support.tiers.settled_tiers import NO_SPARE, quick_disk, tensors, tiers_settled, whole_host

from raydix.actors import LocalPrefixCache
from raydix.actors.exporters import vllm_events
from raydix.actors.exporters.vllm_events import VllmEventExporter
from raydix.actors.exporters.vllm_format import VllmEncoder
from raydix.schemas import (
    AllBlocksCleared,
    CacheConfig,
    InvalidRequest,
    StaleEpoch,
)

NUM_PAGES = 8


def tiered(**fields: Any) -> CacheConfig:
    """Return the configuration of a small cache with a host tier and a disk, in a folder of its own."""
    given = {
        "pool": tensors(NUM_PAGES * PAGE),
        "eviction": NO_SPARE,
        "host": whole_host(20 * PAGE),
        "disk": quick_disk(tempfile.mkdtemp(), 30 * PAGE),
        "fingerprint": "m",
    }
    return full(NUM_PAGES, **given | fields)


async def evict(cache: LocalPrefixCache, num_pages: int, tier: str) -> None:
    await cache.evict(num_pages * PAGE, tier)


def media_of(subscriber: VllmSubscriber) -> set[str]:
    events = [event for batch in subscriber.batches for event in batch.events]
    return {event.medium for event in events if hasattr(event, "medium")}


# ---------------------------------------------------------------- random traffic


async def act(random: Random, cache: LocalPrefixCache, exporter: VllmEventExporter, subscriber: VllmSubscriber) -> None:
    """Do one random thing to the cache, a feed or the subscriber."""
    match random.choices(("publish", "evict", "reset", "hold", "restart", "miss"), (60, 12, 3, 4, 2, 4))[0]:
        case "publish":
            await publish(cache, *[random.randrange(1, 5) for _ in range(random.randrange(1, 6))])
        case "evict":
            with suppress(InvalidRequest):  # the tier may not be there
                await evict(cache, random.randrange(1, 6), random.choice(("device", "host", "disk")))
        case "reset":
            await cache.reset()
        case "hold":  # one tier loses events, or both are cleared and go on, before the exporter reads on
            tier = random.choice(("device", "host", "disk"))
            async with exporter._lock:
                for page in range(5, 25):
                    await publish(cache, page)
                if random.random() < 0.5:
                    await cache.reset()
                    await publish(cache, *range(30, 30 + NUM_PAGES))
                    await publish(cache, *range(40, 43))
                else:
                    with suppress(InvalidRequest):  # the tier may not be there
                        feed = host_of(cache).service.feeds.feed(tier)
                        feed._max_events, before = 0, feed._max_events
                        feed._seal()
                        feed._max_events = before
        case "restart":
            await restart(cache, exporter, random.choice((tiered(), tiered(), tiered(host=None), tiered(disk=None))))
            await cache.stats()
        case "miss":
            await subscriber.pause()
            for page in range(5, 9):
                await publish(cache, page)
            subscriber.go_on(reconnect=True)


async def run_random_traffic(seed: int, num_actions: int = 150) -> VllmSubscriber:
    """Compare a subscriber's blocks with all tiers from time to time; return the subscriber."""
    random = Random(seed)
    async with exported(tiered()) as (cache, exporter, subscriber):
        for number in range(num_actions):
            with suppress(StaleEpoch):  # of the first verb after a restart
                await act(random, cache, exporter, subscriber)
            if number % 10 == 9 or number == num_actions - 1:
                await tiers_settled(host_of(cache).service)
                await subscriber.agrees(exporter, cache)
    return subscriber


@pytest.mark.parametrize("seed", [*range(3), *more(*range(3, 12))])
async def test_after_random_traffic_the_blocks_are_those_of_all_tiers(seed: int) -> None:
    subscriber = await run_random_traffic(seed)

    assert media_of(subscriber) == {"GPU", "CPU", "STORAGE"}


def pass_on_that_one_tier_was_cleared(patch: pytest.MonkeyPatch) -> None:
    """Take the events of a tier for others than those that the exporter looks for."""
    patch.setattr(vllm_events, "AllBlocksCleared", type("AllBlocksCleared", (AllBlocksCleared,), {}))


def leave_the_host_out_of_snapshots(patch: pytest.MonkeyPatch) -> None:
    full_snapshot = VllmEventExporter._full_snapshot

    async def without_blocks(self: Any, tier: str) -> Any:
        snapshot = await full_snapshot(self, tier)
        return snapshot if tier == "device" else snapshot.model_copy(update={"events": ()})

    patch.setattr(VllmEventExporter, "_full_snapshot", without_blocks)


def number_both_tiers_as_one(patch: pytest.MonkeyPatch) -> None:
    around(
        patch,
        VllmEventExporter,
        "_publish_batch",
        lambda original, exporter, tier, batch: original(exporter, "device", batch),
    )


def give_all_events_the_medium_of_the_pool(patch: pytest.MonkeyPatch) -> None:
    around(patch, VllmEncoder, "__init__", lambda original, encoder, rank, medium: original(encoder, rank, "GPU"))


@pytest.mark.parametrize(
    "plant",
    [
        pass_on_that_one_tier_was_cleared,
        leave_the_host_out_of_snapshots,
        number_both_tiers_as_one,
        give_all_events_the_medium_of_the_pool,
    ],
    ids=lambda plant: plant.__name__,
)
async def test_random_traffic_finds_a_fault(plant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    monkeypatch.setattr(vllm_subscriber, "PATIENCE_S", 5)
    with pytest.raises((AssertionError, KeyError, TimeoutError)):
        for seed in range(6):
            await run_random_traffic(seed)


# ---------------------------------------------------------------- one tier


@pytest.mark.parametrize(("tier", "medium"), [("device", "GPU"), ("host", "CPU"), ("disk", "STORAGE")])
async def test_one_tier_can_be_exported_alone(tier: str, medium: str) -> None:
    async with exported(tiered(), tiers=[tier]) as (cache, exporter, subscriber):
        await subscriber.caught_up(exporter, cache)
        for page in (*range(1, 15), *range(1, 15)):
            await publish(cache, page)
            await tiers_settled(host_of(cache).service)
        await cache.reset()
        for page in (*range(1, 15), *range(1, 15)):
            await publish(cache, page)
            await tiers_settled(host_of(cache).service)
        assert await subscriber.agrees(exporter, cache)
        cleared = [event for batch in subscriber.batches for event in batch.events if not hasattr(event, "medium")]

    assert media_of(subscriber) == {medium}
    assert len(cleared) > exporter.num_snapshots  # the reset of one tier is passed on


async def test_one_tier_may_get_another_medium() -> None:
    async with exported(tiered(), tiers=["device"], medium="CPU") as (cache, exporter, subscriber):
        await publish(cache, 1)
        assert await subscriber.agrees(exporter, cache)

    assert media_of(subscriber) == {"CPU"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiers": ["tape"]}, "tiers must be of 'device', 'host', 'disk', not 'tape'"),
        ({"tiers": "host"}, "tiers must be a list .* not 'host'"),
        ({"tiers": []}, "tiers must be a list of at least one"),
        ({"tiers": 2}, "tiers must be a list"),
        ({"medium": "GPU"}, r"medium must be None for several tiers \(device, host, disk\), not 'GPU'"),
    ],
)
async def test_wrong_tiers_are_refused(options: dict[str, Any], message: str) -> None:
    async with LocalPrefixCache(tiered()) as cache:
        with pytest.raises(InvalidRequest, match=message):
            async with VllmEventExporter(cache, FREE_PORT, **options):
                pass


async def test_a_tier_that_the_cache_never_had_is_refused() -> None:
    async with LocalPrefixCache(tiered(host=None)) as cache:
        with pytest.raises(InvalidRequest, match="tiers must be of 'device', 'disk', not 'host'"):
            async with VllmEventExporter(cache, FREE_PORT, tiers=["host"]):
                pass
