"""`PendingLease`: the result of a verb that takes a lease, to be awaited or entered."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from raydix.actors.client.lease import Lease

C = TypeVar("C")
P = ParamSpec("P")


class PendingLease(Coroutine[Any, Any, "Lease"]):
    """The coroutine of a verb that takes a lease, and an asynchronous context manager. Usable once, either way.

        lease = await client.acquire(tokens)
        async with client.acquire(tokens) as lease: ...
        async with await client.acquire(tokens) as lease: ...

    Nothing is sent before it is awaited or entered. If it is cancelled, the cache ends the lease that it granted.
    """

    __slots__ = ("_coroutine", "_lease")

    def __init__(self, coroutine: Coroutine[Any, Any, Lease]) -> None:
        self._coroutine = coroutine

    def __getattr__(self, name: str) -> Any:
        """Return the coroutine's name or frame, which asyncio shows for a task."""
        if name.startswith("cr_") or name in ("__name__", "__qualname__"):
            return getattr(self._coroutine, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __await__(self) -> Generator[Any, Any, Lease]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    async def __aenter__(self) -> Lease:
        self._lease = await self._coroutine
        return self._lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._lease.__aexit__(kind, error, trace)


def make_pending(
    verb: Callable[Concatenate[C, P], Coroutine[Any, Any, Lease]],
) -> Callable[Concatenate[C, P], PendingLease]:
    """Return `verb` with a result that can be awaited or entered."""

    @wraps(verb)
    def call(client: C, /, *args: P.args, **kwargs: P.kwargs) -> PendingLease:
        return PendingLease(verb(client, *args, **kwargs))

    return call
