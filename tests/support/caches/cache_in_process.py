"""A cache actor without Ray: its handle's calls travel over this event loop, in any order, and may be lost."""

from __future__ import annotations

import asyncio
import pickle
from random import Random
from typing import Any

from raydix.actors import LocalPrefixCache
from raydix.actors.service.cache_actor import PrefixCacheActor
from raydix.actors.service.unix_socket_server import UnixSocketServer
from raydix.actors.sessions.death_watch import DeathWatch
from raydix.schemas import CacheUnavailable


class NoSocketServer(UnixSocketServer):
    """A cache on another machine."""

    async def address(self) -> None:
        """Nowhere."""


class HandleInProcess:
    """A stand-in for the handle of a cache actor: the actor's methods, on the cache of this process.

    Args:
        cache: the cache with the service that answers.
        rng: draws the delays and losses of calls and responses.
        loss: the share of lost calls, and of lost responses.
        socket_server: for clients on this machine; None: the cache seems to be on another.
    """

    def __init__(
        self, cache: LocalPrefixCache, rng: Random, loss: float = 0.0, socket_server: UnixSocketServer | None = None
    ) -> None:
        self._actor_id = id(self)
        self.rng = rng
        self.loss = loss
        self.actor = PrefixCacheActor.__new__(PrefixCacheActor)  # its __init__ asks Ray where it runs
        self.actor._host = cache._host
        self.actor._watch = DeathWatch(cache._host.service.reaper.owner_unavailable)
        self.actor._socket_server = socket_server or NoSocketServer(cache._host.service)
        self.actor._metrics = None

    def __getattr__(self, method: str) -> _Method:
        return _Method(self, method)


class _Method:
    def __init__(self, handle: HandleInProcess, name: str) -> None:
        self._handle = handle
        self._name = name

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        """Call the actor; a cancelled caller does not stop the call."""
        packed = pickle.dumps(arguments)
        task = asyncio.get_running_loop().create_task(self._travel(packed))
        task.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # retrieve the exception, also without a waiting caller
        return asyncio.shield(task)

    async def _travel(self, packed: bytes) -> Any:
        await self._way("the call")
        answer = await getattr(self._handle.actor, self._name)(*pickle.loads(packed))
        await self._way("the answer")
        return pickle.loads(pickle.dumps(answer))

    async def _way(self, what: str) -> None:
        for _ in range(self._handle.rng.randrange(3)):
            await asyncio.sleep(0)
        if self._handle.rng.random() < self._handle.loss:
            raise CacheUnavailable(f"{what} of {self._name} was lost")
