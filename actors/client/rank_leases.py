"""Leases of one prompt at the caches of several ranks, at all of them or at none.

`lease_ranks` takes them by any verb of a client; `acquire_ranks` by `acquire`, all with the same prefix.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from random import uniform
from typing import Any, TypeVar

from raydix.actors.client.forwarding import with_options_of
from raydix.actors.client.lease import Lease
from raydix.actors.client.prefix_cache_client import PrefixCacheClient
from raydix.actors.client.shared_acquire import SharedAcquire
from raydix.schemas import CacheBusy, CacheError, InvalidRequest, LeaseGrant, PoolExhausted

logger = logging.getLogger(__name__)

R = TypeVar("R")

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.001, 0.01


@with_options_of(PrefixCacheClient.acquire)
async def acquire_ranks(clients: Sequence[PrefixCacheClient], tokens: Any, **options: Any) -> list[Lease]:
    """Acquire one lease per rank of a tensor-parallel engine, all with the same `prefix_len`, or none.

    Each rank has a cache of its own. The smallest prefix that all of them have, in the pool or in tiers below it, is
    the limit of an `acquire` at the first, which alone waits for slots, and then of one at each of the others. If
    another rank refuses, has lost a part of that prefix or could not load it, all leases are released, and the next
    attempt begins after a random pause of 1 to 10 ms. So callers that name the same ranks in different orders all come
    to an end.

    Nothing is guaranteed once this has returned. If the lease of one rank ends, also by the death of its cache, the
    caller must end the leases of the other ranks.

    Args:
        clients: one client per rank, each of another cache, all on the running event loop; the caches have the same
            `page_size`.
        tokens: as in `PrefixCacheClient.acquire`, and so are the following.
        timeout_s: seconds for all attempts together, from the time when all sessions are open; None:
            `LeaseConfig.acquire_timeout_s` of the first cache; 0: one attempt without waiting. If a rank has lost a
            part of the prefix after that time, another attempt with the shorter prefix follows without waiting.
        resumed: as in `PrefixCacheClient.acquire`, and so is `boundary_state`.
        load: as in `PrefixCacheClient.acquire`, at each rank. Each rank loads the part that its pool lacks; the
            shortest prefix counts.
        load_timeout_s: seconds for the load of each rank; those of the other ranks begin after that of the first.

    Returns:
        The leases in the order of `clients`; the caller ends each. If the caller is cancelled, all that were granted
        are given back in the background.

    Raises:
        PoolExhausted: a rank had too few slots in every attempt; this is the last refusal. With `can_ever_fit=False`
            it is raised immediately.
        CacheBusy: as PoolExhausted, if the last refusal was that the queue of a cache is full.
        CacheUnavailable: a cache is dead, silent or shutting down.
        CacheError: any other error of `acquire` at a rank, also one that says that a lease has been lost meanwhile.
        InvalidRequest: an argument is wrong, `clients` is empty or names a client twice, or the page sizes differ.
    """
    ranks = _checked_clients(clients)
    shared = SharedAcquire(tokens, **options)
    await _gather(client.open() for client in ranks)
    if (time_s := shared.request.timeout_s) is None:
        time_s = ranks[0].session.config.leases.acquire_timeout_s
    now = asyncio.get_running_loop().time
    deadline = now() + time_s
    attempts = _Attempts(ranks, shared)
    while True:
        pause_s = uniform(_MIN_PAUSE_S, _MAX_PAUSE_S)
        try:
            if (leases := await attempts.run(max(0.0, deadline - now()))) is not None:
                break
        except PoolExhausted as error:
            if not error.can_ever_fit or now() >= deadline:
                raise
        except CacheBusy as error:
            if now() >= deadline:
                raise
            pause_s = max(pause_s, error.retry_after_s)
        await asyncio.sleep(pause_s)
    for lease in leases:
        lease.remember_packed(tokens)
    return leases


async def lease_ranks(
    clients: Sequence[PrefixCacheClient],
    take: Callable[[PrefixCacheClient], Coroutine[Any, Any, Lease]],
    held: Sequence[Lease] = (),
) -> list[Lease]:
    """Take a lease at the cache of each rank, concurrently; at all of them, or at none.

    The smallest `prefix_len` of the leases is the prefix that all ranks hold.

    If one rank refuses or fails, the requests on their way to the others are cancelled, and all leases end: an offered
    lease is revoked, any other is released. Then the error is raised. If the caller is cancelled, they end in the
    background.

    Args:
        clients: one per rank, all on the running event loop.
        take: takes the lease at a client's cache, by `lock` or `acquire`; cancelled, it leaves no lease behind.
        held: open leases of earlier ranks, which end with the others.

    Returns:
        The held leases, then a lease of each client, in their order. All that are not offered are open.

    Raises:
        CacheError: the first error of a rank, also one that says that a lease has been lost meanwhile.
    """
    takes = [asyncio.ensure_future(take(client)) for client in clients]
    try:
        leases = [*held, *await asyncio.gather(*takes)]
        for lease in leases:
            if lease.offered is None:
                lease.check_open()
    except BaseException as error:
        for task in takes:
            task.cancel()
        taken = [task.result() for task in takes if task.done() and not task.cancelled() and task.exception() is None]
        end = _end_all([*held, *taken])
        if isinstance(error, Exception):
            await end
        raise
    return leases


async def revoke_grants(clients: Iterable[PrefixCacheClient], grants: Iterable[LeaseGrant]) -> None:
    """Revoke the grant of each rank. A grant that cannot be revoked expires, so an error is logged only."""
    await asyncio.gather(*map(_revoke, clients, grants))


class _Attempts:
    """The attempts of one call to get a lease at each rank.

    Args:
        clients: one per rank.
        shared: the arguments for each rank; it has the limit of the prefix in the first attempt.
    """

    def __init__(self, clients: list[PrefixCacheClient], shared: SharedAcquire) -> None:
        self._clients = clients
        self._shared = shared
        # Each rank that has lost a part of its prefix lowers this limit.
        self._limit = shared.max_prefix_len

    async def run(self, timeout_s: float) -> list[Lease] | None:
        """Return a lease of each rank, all with the same prefix; None if a rank had lost a part of it.

        After None the next attempt has a lower limit, so that caches with states or windows, which can end a prefix at
        few places only, agree after some attempts. Unless leases are returned, none is held.

        Args:
            timeout_s: seconds to wait for slots at the first rank.
        """
        limit = min(self._limit, *await _gather(self._match(client) for client in self._clients))
        _check_page_sizes(self._clients)
        first_client, *other_clients = self._clients
        first = await self._shared.send(first_client, max_prefix_len=limit, timeout_s=timeout_s)
        # The first may have rounded the limit down to a whole page, or may have evicted some of the prefix.
        take = partial(self._shared.send, max_prefix_len=first.prefix_len, timeout_s=0.0)
        leases = await lease_ranks(other_clients, take, held=[first])
        self._limit = min(lease.prefix_len for lease in leases)
        if self._limit == first.prefix_len:
            return leases
        await _end_all(leases)
        return None

    async def _match(self, client: PrefixCacheClient) -> int:
        found = await client.match(self._shared.request.tokens, **self._shared.namespace)
        return max(found.prefix_len, found.host_len, found.disk_len) if self._shared.request.load else found.prefix_len


def _checked_clients(clients: Any) -> list[PrefixCacheClient]:
    """Return the clients as a list; InvalidRequest unless there is at least one, and each is another one."""
    try:
        ranks = list(clients)
    except TypeError:
        given = type(clients).__name__
        raise InvalidRequest(f"clients must be a list of PrefixCacheClient, one per rank, not {given}") from None
    if not ranks:
        raise InvalidRequest("clients must have one PrefixCacheClient per rank, but is empty")
    places: dict[int, int] = {}  # id of a client -> its place
    for place, client in enumerate(ranks):
        if not isinstance(client, PrefixCacheClient):
            raise InvalidRequest(f"clients[{place}] must be a PrefixCacheClient, not {type(client).__name__}")
        if (before := places.setdefault(id(client), place)) != place:
            raise InvalidRequest(
                f"clients[{before}] and clients[{place}] are the same client: each rank must have one of its own"
            )
    return ranks


def _check_page_sizes(clients: list[PrefixCacheClient]) -> None:
    """Raise InvalidRequest unless the caches of all clients have the same page size."""
    sizes = [client.session.config.page_size for client in clients]
    if len(set(sizes)) > 1:
        raise InvalidRequest(
            f"the caches of all ranks must have the same page_size, but in the order of clients they have {sizes}"
        )


async def _gather(steps: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    """Return the results of all steps, which run concurrently. If one raises an error, the others are cancelled."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _end_all(leases: list[Lease]) -> asyncio.Future[Any]:
    """Begin to end all leases, and return a future of the end, which the caller's cancellation does not stop."""
    return asyncio.shield(asyncio.gather(*map(_end, leases)))


async def _end(lease: Lease) -> None:
    """End a lease. Its client repeats a release that may have been lost, so an error is logged only."""
    if lease.offered is not None:
        await _revoke(lease.client, lease.offered)
        return
    try:
        await lease.release()
    except CacheError as error:
        about = {"lease": lease.lease_id, "epoch": lease.epoch}
        logger.warning("lease %r could not be released: %s", lease.lease_id, error, extra=about)


async def _revoke(client: PrefixCacheClient, grant: LeaseGrant) -> None:
    try:
        await client.revoke(grant)
    except CacheError as error:
        # The lease has ended with its session, or its grant expires.
        logger.debug("a grant was not revoked: %s", error)
