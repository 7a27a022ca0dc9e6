"""`raydix check`: verify the invariants of a live cache."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from raydix.actors.cli.cluster import Address, CacheName, Namespace, cache_handle, join
from raydix.actors.cli.output import AsJson, show

if TYPE_CHECKING:
    from ray.actor import ActorHandle


def check(name: CacheName, address: Address = None, namespace: Namespace = "raydix", as_json: AsJson = False) -> None:
    """Have a cache verify its invariants. It serves no request during that time: about a second per million nodes.

    Fails with exit status 1, and names the broken invariant.
    """
    join(address, namespace)
    cache = cache_handle(name, namespace)
    seconds = asyncio.run(_check(cache))
    result = {"name": name, "ok": True, "seconds": seconds}
    show(result, as_json, lambda: f"{name}: every invariant holds, verified in {seconds:.2f} s")


async def _check(cache: ActorHandle[Any]) -> float:
    from raydix.actors import PrefixCacheClient

    async with PrefixCacheClient(cache, owner="raydix check") as client:
        started = time.monotonic()
        await client.check_invariants()
        return time.monotonic() - started
