"""`Unsteady`: a handle of a cache in this process of which a test loses or delays answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from support.caches.cache_in_process import HandleInProcess

from raydix.actors import LocalPrefixCache
from raydix.actors.service.unix_socket_server import UnixSocketServer
from raydix.schemas import CacheUnavailable


class Unsteady(HandleInProcess):
    """A handle that can lose or delay the answers of a method."""

    def __init__(self, cache: LocalPrefixCache, socket_server: UnixSocketServer | None = None) -> None:
        super().__init__(cache, Random(0), socket_server=socket_server)
        self.lost: set[str] = set()  # methods
        self.held_back: dict[str, asyncio.Event] = {}  # the next answer of a method waits for its event

    def __getattr__(self, method: str) -> Any:
        answering = super().__getattr__(method)
        if method in self.lost or method in self.held_back:
            return _Unsteady(answering, lambda: self.held_back.pop(method, None))
        return answering


class _Unsteady:
    def __init__(self, method: Any, take_held_back: Callable[[], asyncio.Event | None]) -> None:
        self._method = method
        self._take_held_back = take_held_back

    def remote(self, *arguments: Any) -> Awaitable[Any]:
        """Call the method. Its answer is lost, or waits for an event."""
        return self._answered(self._method.remote(*arguments), self._take_held_back())

    @staticmethod
    async def _answered(answering: Awaitable[Any], held_back: asyncio.Event | None) -> Any:
        answer = await answering
        if held_back is None:
            raise CacheUnavailable("the answer was lost")
        await held_back.wait()
        return answer
