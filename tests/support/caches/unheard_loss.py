"""`expire_unheard`: a client that stands still for so long that its session expires, and that has not heard of it."""

from __future__ import annotations

import asyncio

from raydix.actors import LocalPrefixCache
from raydix.actors.client.client_session import ClientSession

__all__ = ["expire_unheard"]


async def expire_unheard(cache: LocalPrefixCache, *sessions: ClientSession) -> None:
    """End the heartbeats of clients of a cache in this process, and have their sessions expire.

    The process of the sessions is this one, which lives.
    """
    service = cache.service
    for session in sessions:
        if session._beating is not None and not session._beating.done():
            await asyncio.wait([session._beating])
        await asyncio.sleep(0)  # the callback of the last heartbeat has set the timer
        session._timer.stop()
        at_cache = service.sessions.find(session.session_id)
        assert at_cache is not None and session.session_id in service.sessions
        at_cache.deadline = service.clock() - service.config.leases.session_ttl_s
    service.reaper.reap()
    for session in sessions:
        assert session.session_id not in service.sessions and session.transport.lost is None
