"""`Connector`, the way to a cache: in this process (`LocalConnector`) or through Ray (`RayConnector`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from raydix.actors.client.watched_actor import warn_if_unwatched, watched_self
from raydix.actors.service.findings import NEVER_RESTARTED, Restarts
from raydix.actors.transport.process_liveness import own_liveness_path
from raydix.schemas import CacheConfig, InvalidRequest

if TYPE_CHECKING:
    from raydix.actors.service.cache_host import CacheHost
    from raydix.actors.transport.transport import Transport


class Connector(Protocol):
    """The way to one cache, for each session that a client opens there."""

    @property
    def liveness_path(self) -> str | None:
        """The file that this process has open while it lives; None: the death of another process counts."""

    def make_transport(self) -> Transport:
        """Return the transport of a new session."""

    def on_open(self, config: CacheConfig, sees_process: bool) -> None:
        """Log advice on a session that has just opened, if there is any.

        Args:
            sees_process: the cache sees when this process ends.
        """

    def restarts(self) -> Restarts:
        """Return how often the cache was restarted, and why, without asking it."""


class LocalConnector:
    """The way to a cache in this process.

    Attributes:
        host: the cache.
    """

    def __init__(self, host: CacheHost) -> None:
        self.host = host

    @property
    def liveness_path(self) -> str | None:
        """This process's, as for any client."""
        return own_liveness_path()

    def make_transport(self) -> Transport:
        """Return a transport of calls in this process."""
        from raydix.actors.client.local_transport import LocalTransport

        return LocalTransport(self.host)

    def on_open(self, config: CacheConfig, sees_process: bool) -> None:
        """Do nothing: a cache in this process dies with its clients."""

    def restarts(self) -> Restarts:
        """Return that Ray never restarted the cache."""
        return NEVER_RESTARTED


class RayConnector:
    """The way to a cache actor.

    Args:
        cache: the actor's handle or its name.
        owner: the handle of an actor: its death ends the sessions. None: the death of this process does.
    """

    def __init__(self, cache: Any, owner: Any = None) -> None:
        self._cache = cache
        self._owner = owner

    @property
    def liveness_path(self) -> str | None:
        """This process's; None if the death of another actor ends the sessions."""
        return own_liveness_path() if self._owner is None else None

    def make_transport(self) -> Transport:
        """Return a transport to the actor; one that is known by its name is looked up now.

        Raises:
            CacheUnavailable: no cache of that name runs.
            InvalidRequest: the cache is neither the handle of a cache actor nor a name.
        """
        from raydix.actors.cluster.deploy import check_handle, connect
        from raydix.actors.transport.ray_transport import RayTransport

        owner = self._owner or watched_self()
        if isinstance(self._cache, str):
            return RayTransport(connect(self._cache), owner, by_name=True)
        if not hasattr(self._cache, "_actor_id"):
            given = type(self._cache).__name__
            raise InvalidRequest(f"cache must be an actor handle, a name or a LocalPrefixCache, not {given}")
        check_handle(self._cache)
        return RayTransport(self._cache, owner)

    def restarts(self) -> Restarts:
        """Return how often Ray restarted the cache, and why. It asks Ray, not the cache, and waits.

        Raises:
            CacheUnavailable: no cache of that name is there, or no Ray cluster runs.
            InvalidRequest: the name is wrong.
        """
        from raydix.actors.cluster.deploy import connect
        from raydix.actors.service.past_lives import restarts_of

        actor = connect(self._cache) if isinstance(self._cache, str) else self._cache
        return restarts_of(actor)

    def on_open(self, config: CacheConfig, sees_process: bool) -> None:
        """Log, once in a process, how long slots stay held if this process is an actor that is killed unseen."""
        if self._owner is None and not sees_process:
            warn_if_unwatched(config.leases)
