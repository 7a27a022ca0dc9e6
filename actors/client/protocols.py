"""Protocols between the parts of a client: the way to a cache, and the client as leases and pools see it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from raydix.actors.client.client_session import ClientSession
    from raydix.actors.service.findings import Restarts
    from raydix.actors.transport.transport import Transport
    from raydix.schemas import CacheConfig, LeaseGrant

R = TypeVar("R")


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


class LeaseClient(Protocol):
    """The client of a `Lease`, as the lease sees it."""

    @property
    def session(self) -> ClientSession: ...
    @property
    def config(self) -> CacheConfig: ...
    async def revoke(self, grant: LeaseGrant) -> bool: ...


class CoroutineRunner(Protocol):
    """The client of a `SyncLease` and a `SyncPool`, which runs their coroutines on its thread."""

    @property
    def closed(self) -> bool: ...
    def run(
        self, coroutine: Coroutine[Any, Any, R], undo: Callable[[R], Coroutine[Any, Any, Any]] | None = None
    ) -> R: ...


class PoolClient(Protocol):
    """The client of an `AttachedPool`, which knows its open leases."""

    def check_lease(self, lease: Any) -> None:
        """Raise an error unless this is an open lease of the client, on the client's event loop."""
