"""A lease that is garbage-collected while it is open warns; a lease that has ended does not."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Awaitable, Callable

import pytest
from support.caches.cache_under_test import small_config
from support.more import more

from raydix.actors import Lease, LocalPrefixCache, PrefixCacheClient

End = Callable[[LocalPrefixCache, PrefixCacheClient, Lease], Awaitable[object]]


def warnings_of(lease_id: str) -> list[warnings.WarningMessage]:
    """Collect garbage and return the warnings that name a lease."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.collect()
    return [each for each in caught if f"Lease({lease_id}," in str(each.message)]


async def test_a_lease_that_is_forgotten_while_open_warns() -> None:
    async with LocalPrefixCache(small_config()) as cache:
        lease = await cache.acquire([1, 2, 3])
        lease_id, holder = lease.lease_id, [lease]
        holder.append(holder)  # type: ignore[arg-type]  # a cycle: collected when `gc.collect` runs
        del lease, holder

        (warning,) = warnings_of(lease_id)

        assert warning.category is ResourceWarning
        assert isinstance(warning.source, Lease)
        assert "was never ended: its slots stay held" in str(warning.message)
        assert (await cache.stats()).private_slots == 3


async def release(cache: LocalPrefixCache, client: PrefixCacheClient, lease: Lease) -> None:
    await lease.release()


async def abort(cache: LocalPrefixCache, client: PrefixCacheClient, lease: Lease) -> None:
    await lease.abort()


async def insert_and_release(cache: LocalPrefixCache, client: PrefixCacheClient, lease: Lease) -> None:
    await lease.insert([1, 2, 3], release=True)


async def grant(cache: LocalPrefixCache, client: PrefixCacheClient, lease: Lease) -> None:
    await lease.grant()


async def close_the_client(cache: LocalPrefixCache, client: PrefixCacheClient, lease: Lease) -> None:
    await client.close()


async def lose_the_session(cache: LocalPrefixCache, client: PrefixCacheClient, lease: Lease) -> None:
    cache._host.service.reaper.owner_unavailable(client.session.session_id, is_dead=True)
    await client.match([1])  # in another session


@pytest.mark.parametrize("end", [release, lose_the_session, *more(abort, insert_and_release, grant, close_the_client)])
async def test_a_lease_that_has_ended_does_not_warn(end: End) -> None:
    async with LocalPrefixCache(small_config()) as cache, PrefixCacheClient(cache) as client:
        lease = await client.acquire([1, 2, 3])
        await end(cache, client, lease)
        lease_id, holder = lease.lease_id, [lease]
        holder.append(holder)  # type: ignore[arg-type]
        del lease, holder

        assert warnings_of(lease_id) == []


def test_a_lease_that_could_not_be_made_does_not_warn() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Lease.__new__(Lease)

    assert caught == []
