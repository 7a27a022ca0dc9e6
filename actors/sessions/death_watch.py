"""`DeathWatch`: notices the death of actors that own sessions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorDiedError, RayActorError, RayError

from raydix.actors.transport.ray_calls import actor_id_of

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

_PAUSE_S = 0.5  # pause before a call to an actor that is out of reach


class DeathWatch:
    """Keeps a call parked at each actor that owns a session: it fails when the actor dies.

    Args:
        on_unavailable: called with a session if its owner does not answer, and with whether Ray says that the owner
            has died; returns whether that ends the session.
    """

    def __init__(self, on_unavailable: Callable[[str, bool], bool]) -> None:
        self._on_unavailable = on_unavailable
        self._sessions: dict[Any, set[str]] = {}  # actor id -> its sessions
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, owner: ActorHandle[Any], session_id: str) -> None:
        """Watch the owner of a session until the session or the owner ends."""
        actor_id = actor_id_of(owner)
        if actor_id in self._sessions:
            self._sessions[actor_id].add(session_id)
            return
        self._sessions[actor_id] = {session_id}
        task = asyncio.get_running_loop().create_task(self._park(owner, actor_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def unwatch(self, session_id: str) -> None:
        """Watch no longer for a session that has ended."""
        for sessions in self._sessions.values():
            sessions.discard(session_id)

    async def _park(self, owner: ActorHandle[Any], actor_id: Any) -> None:
        sessions = self._sessions[actor_id]
        try:
            while sessions:
                watched = set(sessions)  # sessions opened later belong to the actor's next life
                try:
                    await owner.raydix_park.remote()
                except RayActorError as error:
                    logger.info("actor %s does not answer: %s", actor_id, error)
                    self._on_no_answer(watched & sessions, isinstance(error, ActorDiedError))
                    await asyncio.sleep(_PAUSE_S)
        except RayError:
            logger.exception("actor %s cannot be watched: its sessions end by their time to live", actor_id)
        finally:
            del self._sessions[actor_id]

    def _on_no_answer(self, sessions: set[str], is_dead: bool) -> None:
        for session_id in sessions:
            if self._on_unavailable(session_id, is_dead):
                self.unwatch(session_id)
