"""`WatchedActor`: a mixin for actors, so that a cache notices their death immediately."""

from __future__ import annotations

import asyncio
import inspect
import logging
import weakref
from typing import Any, Self

from raydix.schemas import LeaseConfig

logger = logging.getLogger(__name__)

_PARK_S = 3.0  # a graceful exit of the actor waits for a parked call to end

_instance: weakref.ref[WatchedActor] | None = None  # this process's, if it is such an actor's
_is_warned = False  # this process has logged that it is another actor's


class WatchedActor:
    """Derive a Ray actor's class from it: when the actor dies, its clients' slots are free within about a second.

    A cache sees that by itself where it sees the actor's process, as on its own node; this class is for other nodes.

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

    if not ray.is_initialized():  # Ray would start a cluster, or wait for one; an actor has one.
        return None
    context = ray.get_runtime_context()
    handle = context.current_actor if context.get_actor_id() is not None else None
    return handle if hasattr(handle, "raydix_park") else None  # this process may be the actor of another class


def warn_if_unwatched(config: LeaseConfig) -> None:
    """Log, once in a process, how long slots stay held if this process is an actor that is killed unwatched."""
    global _is_warned
    if _is_warned or watched_self() is not None:
        return
    import ray

    if ray.get_runtime_context().get_actor_id() is not None:
        _is_warned = True
        logger.warning(
            "this actor does not derive from raydix.actors.WatchedActor, and the cache does not see its process (it "
            "runs on another node, or does not share /proc): if it is killed, what its clients hold stays held for "
            "session_ttl_s (%g s), and private slots for up to quarantine_grace_s (%g s) more; derive it from "
            "WatchedActor, or name one as the client's owner",
            config.session_ttl_s,
            config.quarantine_grace_s,
        )
