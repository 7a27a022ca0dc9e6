"""Calls to a cache made by hand: messages of a client, and messages that no client sends."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel
from support.caches.cache_under_test import CacheUnderTest

from raydix.actors import Lease, LocalPrefixCache, PrefixCacheClient
from raydix.actors.transport import batch_codec
from raydix.actors.transport.ray_calls import call
from raydix.schemas import Batch, Message, ReadKV, WaitRequest, WriteKV
from raydix.schemas.protocol import handshake

M = TypeVar("M", bound=Message)

COUNTED_ANYWAY = {
    *("batches", "requests", "probes", "open_sessions", "loop_lag_ms", "owners", "uptime_s"),
    *("oldest_lease_s", "oldest_waiter_s", "silent_sessions"),
    *("exhausted", "refusals", "too_large", "tokens_requested", "tokens_refused"),
    *("batch_size", "acquire_latency", "lock_latency", "insert_latency", "waited", "wait_time"),
}


def forged(model: type[M], **fields: Any) -> M:
    """A message of these fields, and of the defaults of others, that is not checked."""
    if issubclass(model, BaseModel):
        return model.model_construct(**fields)
    message = object.__new__(model)
    for field in dataclasses.fields(model):  # type: ignore[arg-type]
        object.__setattr__(message, field.name, fields.get(field.name, field.default))
    return message


class _Remade:
    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call[0], self._call[1:]


def pickled(remake: Callable[..., Any], *arguments: Any) -> bytes:
    """The pickle of what `remake` makes of these where it arrives."""
    return pickle.dumps(_Remade(remake, *arguments))


class Scene(NamedTuple):
    """A cache of eight slots with two cached tokens, [5, 6], and a lease that holds them and one slot more."""

    cache: CacheUnderTest
    client: PrefixCacheClient
    lease: Lease


async def counts(client: PrefixCacheClient) -> dict[str, Any]:
    """Return all counts of `stats`, except those that include refused requests."""
    return (await client.stats()).model_dump(exclude=COUNTED_ANYWAY)


class Wire:
    """The calls of a client's session; their messages are pickled also for a local cache."""

    def __init__(self, cache: CacheUnderTest, sender: PrefixCacheClient | None = None) -> None:
        self._cache = cache.cache
        sender = sender or cache.client
        self.session = {"session_id": sender.session.session_id, "epoch": sender.session.transport.epoch}

    async def call(self, method: str, *arguments: Any) -> Any:
        """The cache's answer; a batch goes packed."""
        if method == "execute":
            packed = [
                batch_codec.in_parts(batch_codec.pack(each)) if isinstance(each, Message) else [each]
                for each in arguments
            ]
            return batch_codec.unpack(await self._call("execute", *chain.from_iterable(packed)))
        return await self._call(method, *arguments)

    async def _call(self, method: str, *arguments: Any) -> Any:
        if not isinstance(self._cache, LocalPrefixCache):
            row = (None, handshake()) if method == "open_session" else ()  # no owner
            return await call(getattr(self._cache, method), *arguments, *row)
        host, arrived = self._cache._host, pickle.loads(pickle.dumps(arguments))
        match method:
            case "execute":
                return await host.service.execute_packed(*arrived)
            case "read_kv" | "write_kv":
                return getattr(host, method)(*arrived)
            case "shutdown":
                return await host.service.drain(*arrived)
            case "open_session" | "close_session":
                return getattr(host.service, method)(*arrived)
        return await getattr(host.service, method)(*arrived)

    def batch(self, *requests: Any, **changed: Any) -> Batch:
        """A batch of whatever requests, with whatever fields."""
        return forged(Batch, **self.session | {"requests": requests, "seq": 0, "after": 0} | changed)

    async def execute(self, *requests: Any, **changed: Any) -> tuple[Any, ...]:
        responses: tuple[Any, ...] = (await self.call("execute", self.batch(*requests, **changed))).responses
        return responses

    async def wait(self, ticket: int, **changed: Any) -> Any:
        return await self.call("wait", WaitRequest(**self.session | {"ticket": ticket} | changed))

    async def read_kv(self, lease_id: str, slots: Any) -> Any:
        return await self.call("read_kv", ReadKV.model_construct(**self.session, lease_id=lease_id, slots=slots))

    async def write_kv(self, lease_id: str, slots: Any, k: Any, v: Any) -> None:
        await self.call("write_kv", WriteKV.model_construct(**self.session, lease_id=lease_id, slots=slots, k=k, v=v))
