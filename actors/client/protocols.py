"""Protocols between the parts of a client: the way to a cache, and the client as leases and pools see it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from raydix.actors.service.findings import Restarts
    from raydix.actors.transport.transport import Transport
    from raydix.schemas import CacheConfig, InsertResponse, LeaseGrant

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
    """The client of a `Lease`, which carries out the lease's verbs."""

    @property
    def config(self) -> CacheConfig: ...
    @property
    def closed(self) -> bool: ...
    async def insert_next(self, lease: Any, num_tokens: int, more: Any = ()) -> InsertResponse: ...
    async def insert(
        self,
        lease: Any,
        tokens: Any,
        *,
        release: bool = False,
        publish_state: bool = False,
        boundary_len: int | None = None,
    ) -> InsertResponse: ...
    async def extend(self, lease: Any, num_tokens: int, *, timeout_s: float | None = None) -> torch.Tensor: ...
    async def confirm_open(self, lease: Any) -> None: ...
    async def release_window(self, lease: Any, up_to: int) -> None: ...
    async def grant(self, lease: Any, *, timeout_s: float | None = None) -> LeaseGrant: ...
    async def preempt(
        self, lease: Any, tokens: Any, *, publish_state: bool = False, boundary_len: int | None = None
    ) -> None: ...
    async def revoke(self, grant: LeaseGrant) -> bool: ...
    def check_lease(self, lease: Any) -> None: ...
    async def release(self, lease: Any) -> None: ...
    async def abort(self, lease: Any) -> None: ...


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
