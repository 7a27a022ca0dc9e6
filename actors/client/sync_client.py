"""`SyncClient`: the verbs as plain calls, for notebooks and scripts; `client.sync` returns it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from raydix.actors.client.lease import Lease
from raydix.actors.client.loop_thread import LoopThread
from raydix.actors.client.pending_lease import PendingLease
from raydix.actors.client.prefix_cache_client import PrefixCacheClient
from raydix.schemas import CacheConfig, InvalidRequest, KVEventBatch, LeaseGrant

if TYPE_CHECKING:
    import torch

    from raydix.actors.client.attached_pool import AttachedPool

P = ParamSpec("P")
R = TypeVar("R")


def _make_plain(
    verb: Callable[Concatenate[PrefixCacheClient, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[SyncClient, P], R]:
    name = verb.__name__

    @wraps(verb)
    def call(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> R:
        now: Callable[P, Coroutine[Any, Any, R]] = getattr(self.client, name)  # tracing may have replaced it
        return self.run(now(*args, **kwargs))

    return call


def _make_leasing(
    verb: Callable[Concatenate[Any, P], PendingLease],
) -> Callable[Concatenate[SyncClient, P], SyncLease]:
    name = verb.__name__

    @wraps(verb)
    def call(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> SyncLease:
        now: Callable[P, PendingLease] = getattr(self.client, name)
        return SyncLease(self, self.run(now(*args, **kwargs), undo=Lease.abort))

    return call


def _make_plain_lease_verb(
    verb: Callable[Concatenate[Lease, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[SyncLease, P], R]:
    @wraps(verb)
    def call(self: SyncLease, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.owner.run(verb(self.lease, *args, **kwargs))

    return call


def _make_plain_ending(verb: Callable[[Lease], Coroutine[Any, Any, None]]) -> Callable[[SyncLease], None]:
    @wraps(verb)
    def call(self: SyncLease, /) -> None:
        if not self.owner.closed:  # closing has ended the lease
            self.owner.run(verb(self.lease))

    return call


class SyncClient:
    """A client whose verbs wait for their results, also if a loop runs already, as in a notebook.

        with PrefixCacheClient("kv-0").sync as cache:
            print(cache.match(tokens))
            with cache.acquire(tokens) as lease:
                lease.insert(tokens)

    The client runs on a loop in a thread of its own. There it sends its heartbeats, and ends the leases of interrupted
    calls (Ctrl-C). Calls may come from several threads. Close it: the thread ends with it.

    Attributes:
        client: the asynchronous client; its coroutines belong to the other thread's loop.
        thread: the thread of that loop.
        closed: whether `close` has ended all its leases.
    """

    def __init__(self, client: PrefixCacheClient) -> None:
        self.client = client
        self.thread = LoopThread("raydix-sync")
        self.closed = False

    def run(self, coroutine: Coroutine[Any, Any, R], undo: Callable[[R], Coroutine[Any, Any, Any]] | None = None) -> R:
        """Run a coroutine on the thread's loop, as `LoopThread.run` does.

        Raises:
            InvalidRequest: the client was closed.
        """
        if self.closed:
            coroutine.close()
            raise InvalidRequest("this client was closed: make a new one")
        return self.thread.run(coroutine, undo)

    match = _make_plain(PrefixCacheClient.match)
    acquire = _make_leasing(PrefixCacheClient.acquire)
    lock = _make_leasing(PrefixCacheClient.lock)
    adopt = _make_leasing(PrefixCacheClient.adopt)
    revoke = _make_plain(PrefixCacheClient.revoke)
    bind_model = _make_plain(PrefixCacheClient.bind_model)
    evict = _make_plain(PrefixCacheClient.evict)
    reset = _make_plain(PrefixCacheClient.reset)
    retire = _make_plain(PrefixCacheClient.retire)
    explain = _make_plain(PrefixCacheClient.explain)
    stats = _make_plain(PrefixCacheClient.stats)
    tree = _make_plain(PrefixCacheClient.tree)
    check_invariants = _make_plain(PrefixCacheClient.check_invariants)
    event_snapshot = _make_plain(PrefixCacheClient.event_snapshot)

    def attach_pool(self, mapped: bool | None = None) -> SyncPool:
        """`PrefixCacheClient.attach_pool`."""
        return SyncPool(self, self.run(self.client.attach_pool(mapped)))

    def events(self, after_seq: int | None = None) -> Iterator[KVEventBatch]:
        """`PrefixCacheClient.events`, as an iterator that waits for each batch."""
        batches = self.client.events(after_seq)

        async def read_next() -> KVEventBatch | None:
            return await anext(batches, None)

        while (batch := self.run(read_next())) is not None:
            yield batch

    @property
    def config(self) -> CacheConfig:
        """The cache's configuration, known once the session is open."""
        return self.client.config

    def open(self) -> Self:
        """Open the session, as the first verb also does."""
        self.run(self.client.open())
        return self

    def close(self) -> None:
        """Close the session, which ends its leases, and the thread. Idempotent."""
        if self.closed:
            return
        try:
            self.run(self.client.close())
            self.closed = True
        finally:
            self.thread.stop()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SyncLease:
    """A lease whose verbs wait. As a context manager it is released at the end, or aborted if the block raises.

    Attributes:
        owner: the client that made it.
        lease: the asynchronous lease.
    """

    def __init__(self, owner: SyncClient, lease: Lease) -> None:
        self.owner = owner
        self.lease = lease

    insert = _make_plain_lease_verb(Lease.insert)
    extend = _make_plain_lease_verb(Lease.extend)
    preempt = _make_plain_lease_verb(Lease.preempt)
    release_window = _make_plain_lease_verb(Lease.release_window)
    release = _make_plain_ending(Lease.release)
    abort = _make_plain_ending(Lease.abort)

    def grant(self, *, timeout_s: float | None = None) -> LeaseGrant:
        """`Lease.grant`. If it is interrupted, the lease is as before, or has ended."""
        return self.owner.run(self.lease.grant(timeout_s=timeout_s), undo=self.owner.client.revoke)

    @property
    def slots(self) -> torch.Tensor:
        """`Lease.slots`."""
        return self.lease.slots

    @property
    def pages(self) -> torch.Tensor:
        """`Lease.pages`."""
        return self.lease.pages

    @property
    def swa_slots(self) -> torch.Tensor:
        """`Lease.swa_slots`."""
        return self.lease.swa_slots

    @property
    def state_slot(self) -> int | None:
        """`Lease.state_slot`."""
        return self.lease.state_slot

    @property
    def lease_id(self) -> str:
        """`Lease.lease_id`."""
        return self.lease.lease_id

    @property
    def prefix_len(self) -> int:
        """`Lease.prefix_len`."""
        return self.lease.prefix_len

    @property
    def published_len(self) -> int:
        """`Lease.published_len`."""
        return self.lease.published_len

    def __len__(self) -> int:
        return len(self.lease)

    def __bool__(self) -> bool:
        """Return True, as `Lease` does."""
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (self.release if kind is None else self.abort)()

    def __reduce__(self) -> Any:
        return self.lease.__reduce__()  # it raises: a grant can be sent instead

    def __repr__(self) -> str:
        return f"Sync{self.lease!r}"


def _unwrap_lease(lease: Any) -> Any:
    """Return the asynchronous lease, or the object itself if it is no lease: the verb rejects it."""
    return getattr(lease, "lease", lease)


class SyncPool:
    """A pool whose copies wait.

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

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """`AttachedPool.write`."""
        self.pool.write(layer, slots, k, v)

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`AttachedPool.gather`."""
        return self.pool.gather(layer, slots)

    def write_kv(self, lease: SyncLease, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """`AttachedPool.write_kv`."""
        self._owner.run(self.pool.write_kv(_unwrap_lease(lease), slots, k, v))

    def read_kv(self, lease: SyncLease, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`AttachedPool.read_kv`."""
        return self._owner.run(self.pool.read_kv(_unwrap_lease(lease), slots))
