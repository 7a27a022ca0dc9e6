"""`SyncLease` and `SyncPool`: the lease and the pool of a `SyncClient`, with plain calls."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from raydix.actors.client.lease import Lease, Loaded
from raydix.schemas import LeaseGrant

if TYPE_CHECKING:
    import torch

    from raydix.actors.client.attached_pool import AttachedPool
    from raydix.actors.client.prefix_cache_client import SyncClient

P = ParamSpec("P")
R = TypeVar("R")


def _make_plain_lease_verb(
    verb: Callable[Concatenate[Lease, P], Coroutine[Any, Any, R]],
    undo: Callable[[Lease, R], Coroutine[Any, Any, Any]] | None = None,
) -> Callable[Concatenate[SyncLease, P], R]:
    name = verb.__name__

    @wraps(verb)
    def call(self: SyncLease, /, *args: P.args, **kwargs: P.kwargs) -> R:
        now: Callable[P, Coroutine[Any, Any, R]] = getattr(self.lease, name)  # tracing may have replaced it
        return self.owner.run(now(*args, **kwargs), undo and partial(undo, self.lease))

    return call


async def _revoke(lease: Lease, grant: LeaseGrant) -> None:
    """Undo a grant after its caller was interrupted: the lease ends."""
    await lease.client.revoke(grant)


def _make_plain_ending(verb: Callable[[Lease], Coroutine[Any, Any, None]]) -> Callable[[SyncLease], None]:
    run = _make_plain_lease_verb(verb)

    @wraps(verb)
    def call(self: SyncLease, /) -> None:
        if not self.owner.closed:  # closing has ended the lease
            run(self)

    return call


def _of_lease(name: str) -> Any:
    """Return a property: the attribute of that name of the asynchronous lease."""
    return property(lambda lease: getattr(lease.lease, name), doc=f"`Lease.{name}`.")


class SyncLease:
    """A lease with verbs that wait. As a context manager it is released at the end, or aborted if the block raises.

    Attributes:
        owner: the client that made it.
        lease: the asynchronous lease.
        slots, pages, swa_slots, state_slot, boundary_slot, offered, lease_id, prefix_len, loaded, published_len: as of
            `Lease`.
    """

    def __init__(self, owner: SyncClient, lease: Lease) -> None:
        self.owner = owner
        self.lease = lease

    insert = _make_plain_lease_verb(Lease.insert)
    insert_next = _make_plain_lease_verb(Lease.insert_next)
    extend = _make_plain_lease_verb(Lease.extend)
    confirm_open = _make_plain_lease_verb(Lease.confirm_open)
    preempt = _make_plain_lease_verb(Lease.preempt)
    release_window = _make_plain_lease_verb(Lease.release_window)
    grant = _make_plain_lease_verb(Lease.grant, undo=_revoke)
    release = _make_plain_ending(Lease.release)
    abort = _make_plain_ending(Lease.abort)

    slots: torch.Tensor = _of_lease("slots")
    pages: torch.Tensor = _of_lease("pages")
    swa_slots: torch.Tensor = _of_lease("swa_slots")
    state_slot: int | None = _of_lease("state_slot")
    boundary_slot: int | None = _of_lease("boundary_slot")
    offered: LeaseGrant | None = _of_lease("offered")
    lease_id: str = _of_lease("lease_id")
    prefix_len: int = _of_lease("prefix_len")
    loaded: Loaded = _of_lease("loaded")
    published_len: int = _of_lease("published_len")

    def __len__(self) -> int:
        return len(self.lease)

    def __bool__(self) -> bool:
        """Return True, as `Lease` does."""
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        (self.release if kind is None else self.abort)()

    def __reduce__(self) -> Any:
        return self.lease.__reduce__()  # it raises: a grant can be sent instead

    def __repr__(self) -> str:
        return f"Sync{self.lease!r}"


def _unwrap_lease(lease: Any) -> Any:
    """Return the asynchronous lease, or the object itself if it is no lease: the verb rejects it."""
    return getattr(lease, "lease", lease)


class SyncPool:
    """A pool with copies that wait.

    Attributes:
        pool: the asynchronous pool; if it is mapped, its tensors can be used directly.
    """

    def __init__(self, owner: SyncClient, pool: AttachedPool) -> None:
        self._owner = owner
        self.pool = pool

    @property
    def mapped(self) -> bool:
        """`AttachedPool.mapped`."""
        return self.pool.mapped

    def write(
        self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: torch.Tensor | None = None
    ) -> None:
        """`AttachedPool.write`."""
        self.pool.write(layer, slots, k, v, index)

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`AttachedPool.gather`."""
        return self.pool.gather(layer, slots)

    def write_kv(
        self, lease: SyncLease, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: torch.Tensor | None = None
    ) -> None:
        """`AttachedPool.write_kv`."""
        self._owner.run(self.pool.write_kv(_unwrap_lease(lease), slots, k, v, index))

    def read_kv(self, lease: SyncLease, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`AttachedPool.read_kv`."""
        return self._owner.run(self.pool.read_kv(_unwrap_lease(lease), slots))
