"""An operation of an older epoch, or on an ended lease, never takes effect.

However a lease has ended, and in any order of messages, those that name it change nothing. After a restart of the
cache, no lease of before has any effect.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import ray
import torch
from support.caches.cache_kinds import radix
from support.caches.cache_under_test import CacheUnderTest, small_config, unchecked
from support.caches.raw_calls import Wire, counts

from raydix.actors import Lease, PrefixCacheClient, start_cache
from raydix.actors.service.cache_service import CacheService
from raydix.cache_core.leases.lease_table import EndedLeases
from raydix.schemas import (
    AbortRequest,
    AcquireRequest,
    CacheUnavailable,
    ExtendRequest,
    GrantRequest,
    InsertRequest,
    LeaseConfig,
    LockRequest,
    Message,
    ReleaseRequest,
    ReleaseWindowRequest,
    StaleEpoch,
    TokenIds,
    UnknownLease,
)

Patch = pytest.MonkeyPatch
IDS = TokenIds.pack([5, 6, 7])

LATE: dict[str, Callable[[str], Message]] = {  # messages that name a lease
    "insert": lambda lease_id: InsertRequest(lease_id=lease_id, num_tokens=3, suffix=TokenIds.pack([])),
    "extend": lambda lease_id: ExtendRequest(lease_id=lease_id, num_slots=4, known_pages=0),
    "window": lambda lease_id: ReleaseWindowRequest(lease_id=lease_id, up_to=1),
    "grant": lambda lease_id: GrantRequest(lease_id=lease_id, offer_id="o"),
    "acquire": lambda lease_id: AcquireRequest(lease_id=lease_id, tokens=IDS),
    "lock": lambda lease_id: LockRequest(lease_id=lease_id, tokens=IDS),
    "release": lambda lease_id: ReleaseRequest(lease_id=lease_id),
    "abort": lambda lease_id: AbortRequest(lease_id=lease_id),
}
HARMLESS = ("release", "abort")  # of an ended lease: the answers report that it has ended

End = Callable[[CacheUnderTest, Lease], Awaitable[Any]]
ENDS: dict[str, End] = {
    "released": lambda cache, lease: lease.release(),
    "aborted": lambda cache, lease: lease.abort(),
    "published and released": lambda cache, lease: lease.insert([5, 6, 7], release=True),
    "handed over": lambda cache, lease: hand_over(cache, lease),
}


async def hand_over(cache: CacheUnderTest, lease: Lease) -> None:
    await cache.another_client().adopt(await lease.grant())


async def late_messages_change_nothing(cache: CacheUnderTest, lease_id: str, sender: PrefixCacheClient) -> None:
    """Send late messages one at a time, then all in one batch, and check that nothing changes."""
    before, wire = await counts(cache.client), Wire(cache, sender)
    for name, late in LATE.items():
        (answer,) = await wire.execute(late(lease_id))
        assert (type(answer) is UnknownLease) == (name not in HARMLESS), f"{name}: {answer}"
        assert await counts(cache.client) == before, f"{name} took effect"
    await wire.execute(*[late(lease_id) for late in LATE.values()] * 2)
    assert await counts(cache.client) == before
    await cache.client.check_invariants()


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
async def test_late_messages_for_an_ended_lease_have_no_effect(cache1: CacheUnderTest, end: End) -> None:
    lease = await cache1.client.acquire([5, 6, 7])
    await end(cache1, lease)

    if end is not ENDS["handed over"]:  # otherwise it is another client's lease, and its messages take effect
        await late_messages_change_nothing(cache1, lease.lease_id, cache1.client)
    for use in (lease.insert([5, 6, 7]), lease.extend(1), lease.confirm_open(), lease.grant()):
        with pytest.raises(UnknownLease, match="has ended"):
            await use
    await lease.release()
    await lease.abort()


async def test_an_acquire_that_arrives_after_it_was_given_up_grants_nothing(cache1: CacheUnderTest) -> None:
    await cache1.client.open()
    await Wire(cache1).execute(AbortRequest(lease_id="late"))

    await late_messages_change_nothing(cache1, "late", cache1.client)

    assert (await cache1.client.stats()).open_leases == 0


async def messages_of_an_older_epoch_change_nothing(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire([5, 6, 7])
    before, wire = await counts(cache.client), Wire(cache)
    for name, late in LATE.items():
        with pytest.raises(StaleEpoch):
            await wire.execute(late(lease.lease_id), epoch="older")
        assert await counts(cache.client) == before, f"{name} took effect"
    with pytest.raises(StaleEpoch):
        await wire.wait(1, epoch="older")


async def test_messages_of_an_older_epoch_have_no_effect(cache1: CacheUnderTest) -> None:
    await messages_of_an_older_epoch_change_nothing(cache1)


# ---------------------------------------------------------------- a real restart


@pytest.fixture
async def restarted(ray_cluster: None) -> AsyncIterator[tuple[PrefixCacheClient, Lease, Any, Any]]:
    """Return a client of a cache that was killed and restarted, with its lease, grant and pool from before."""
    cache = start_cache(small_config().model_copy(update={"leases": LeaseConfig(session_ttl_s=300)}))
    async with PrefixCacheClient(cache) as client:
        lease, other = await client.acquire([1, 2, 3]), await client.acquire([4])
        await lease.insert([1])
        pool, grant = await client.attach_pool(mapped=True), await other.grant()
        ray.kill(cache, no_restart=False)
        while not await is_new(client, lease.epoch):
            pass
        yield client, lease, grant, pool
    ray.kill(cache)


async def is_new(client: PrefixCacheClient, old_epoch: str) -> bool:
    """Return whether the next epoch of the cache answers."""
    try:
        return (await client.stats()).epoch != old_epoch
    except CacheUnavailable:
        return False


@pytest.mark.ray
async def test_after_a_restart_nothing_of_before_has_any_effect(
    restarted: tuple[PrefixCacheClient, Lease, Any, Any],
) -> None:
    client, lease, grant, pool = restarted
    fresh = await client.acquire([1, 2, 3])
    before = await counts(client)

    for use in (
        lambda: lease.insert([1, 2]),
        lambda: lease.extend(1),
        lambda: lease.confirm_open(),
        lambda: lease.grant(),
        lambda: client.adopt(grant),
        lambda: lease.preempt([1, 2]),
        lambda: pool.read_kv(lease, lease.slots),
        lambda: pool.write_kv(lease, lease.slots[1:], torch.ones(3, 2, 1, 2), torch.ones(3, 2, 1, 1)),
    ):
        with pytest.raises(StaleEpoch):
            await use()
    assert not await client.revoke(grant)  # its lease ended with the cache
    await lease.release()
    await lease.abort()

    await client.match([1])  # ended leases do not make the client open another session
    assert (await client.stats()).open_sessions == 1
    assert await counts(client) == before
    assert (fresh.prefix_len, before["open_leases"], before["private_slots"]) == (0, 1, 3)
    await fresh.insert([1, 2, 3], release=True)
    await client.check_invariants()


# ---------------------------------------------------------------- planted faults


async def test_a_cache_that_forgets_ended_leases_is_detected(monkeypatch: Patch) -> None:
    monkeypatch.setattr(EndedLeases, "check", lambda ended, session_id, lease_id: None)
    cache = unchecked(radix(1))
    lease = await cache.client.acquire([5, 6, 7])
    await lease.release()

    with pytest.raises(AssertionError, match="acquire: "):
        await late_messages_change_nothing(cache, lease.lease_id, cache.client)


async def test_a_cache_that_takes_any_epoch_is_seen(monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        CacheService, "session", lambda service, session_id, epoch: service.sessions.heard_of(session_id)
    )

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        await messages_of_an_older_epoch_change_nothing(unchecked(radix(1)))
