"""`raydix check`: verify the invariants of a live cache."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from raydix.actors.cli.cluster import Address, CacheName, Namespace, ask_client, cache_handle, join
from raydix.actors.cli.output import AsJson, show

if TYPE_CHECKING:
    from raydix.actors import PrefixCacheClient


def check(name: CacheName, address: Address = None, namespace: Namespace = "raydix", as_json: AsJson = False) -> None:
    """Have a cache verify its invariants. It serves no request during that time: about a second per million nodes.

    Fails with exit status 1, and names the broken invariant.
    """
    join(address, namespace)
    seconds = ask_client(cache_handle(name, namespace), "check", _check)
    result = {"name": name, "ok": True, "seconds": seconds}
    show(result, as_json, lambda: f"{name}: every invariant holds, verified in {seconds:.2f} s")


async def _check(client: PrefixCacheClient) -> float:
    started = time.monotonic()
    await client.check_invariants()
    return time.monotonic() - started
