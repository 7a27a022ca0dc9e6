"""A deployment of Ray Serve that uses caches without a model, and the function that reads its requests' tokens."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ray import serve

from raydix.actors import PrefixCacheClient, connect
from raydix.actors.serve.tokens import token_ids
from raydix.schemas import CacheUnavailable
from raydix.schemas.engine_namespace import CacheNamespace

never_set = threading.Event()


def tokens_of(request: Any) -> tuple[Any, CacheNamespace] | None:
    """Return the token ids of a call, or do as its argument `how` says."""
    match request.kwargs.get("how"):
        case "none":
            return None
        case "raise":
            raise ValueError("the test asked for it")
        case "wait":
            never_set.wait(5)
    return token_ids(request)


@serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=2, graceful_shutdown_timeout_s=1)
class Replica:
    """Publishes each prompt at the replica's cache, and answers with a sum of its tokens."""

    def __init__(self, caches: list[str], namespace: str) -> None:
        self._name = caches[serve.get_replica_context().rank.rank % len(caches)]
        self._client = PrefixCacheClient(connect(self._name, namespace=namespace))

    def record_replica_metadata(self) -> dict[str, str]:
        """Name the replica's cache, for the router."""
        return {"raydix_cache": self._name}

    async def generate(self, token_ids: list[int], how: str = "", gate: str = "") -> dict[str, Any]:
        """Answer a prompt, as soon as the file at `gate` exists. That with the suffix .called is made before."""
        answer = {"sum": sum(token_ids), "prefix_len": 0, "cache": self._name, "pid": os.getpid()}
        try:
            async with self._client.acquire(token_ids) as lease:
                answer["prefix_len"] = lease.prefix_len
                await lease.insert(token_ids)
        except CacheUnavailable:  # then it computes everything
            answer["cache"] = ""
        await _opened(gate)
        return answer

    async def stream(self, token_ids: list[int], gate: str = "") -> AsyncIterator[int]:
        """Yield the number of tokens, and the same again as soon as the file at `gate` exists."""
        yield len(token_ids)
        await _opened(gate)
        yield len(token_ids)


async def _opened(gate: str) -> None:
    if gate:
        Path(f"{gate}.called").touch()  # noqa: ASYNC240 -- it takes no time
    while gate and not Path(gate).exists():  # noqa: ASYNC110, ASYNC240 -- another process makes it
        await asyncio.sleep(0.02)
