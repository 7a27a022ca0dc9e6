"""`WatchedActor`: a mixin for actors whose death a cache should notice at once."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from typing import Any, Self

from raydix.schemas import InvalidRequest

_PARK_S = 3.0  # a graceful exit of the actor waits for a parked call to end

_instance: weakref.ref[WatchedActor] | None = None  # this process's, if it is such an actor's


class WatchedActor:
    """Derive a Ray actor's class from it: when the actor dies, what its clients hold is free within about a second.

    A client that is opened inside the actor is watched by itself; `PrefixCacheClient(cache, owner=handle)` names
    another actor. The cache keeps a call of `raydix_park` at the actor, so the actor is an async one.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        global _instance
        self = super().__new__(cls)
        _instance = weakref.ref(self)
        return self

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not inspect.iscoroutinefunction(cls.raydix_park):
            raise TypeError(f"{cls.__name__}.raydix_park must be a coroutine function: it would block the actor")

    async def raydix_park(self) -> None:
        """For the cache: takes a while, and is called again. It fails when this actor dies."""
        await asyncio.sleep(_PARK_S)


def watched_self() -> Any:
    """The handle of the actor that this process is, if it is a `WatchedActor`; else None."""
    if _instance is None or _instance() is None:
        return None
    import ray

    context = ray.get_runtime_context()
    handle = context.current_actor if context.get_actor_id() is not None else None
    return handle if hasattr(handle, "raydix_park") else None  # this process may be the actor of another class


def check_watchable(handle: Any) -> None:
    """Raise InvalidRequest unless an actor can be watched: parking would block one that is not made for it."""
    if not hasattr(handle, "raydix_park") or getattr(handle, "_ray_allow_out_of_order_execution", None) is False:
        raise InvalidRequest("an owner is a name for people, or the handle of an actor with the mixin WatchedActor")
