"""`Transport`: how a client's requests reach the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from raydix.actors.loop.loop_turns import LoopTurns
from raydix.cache_core import KVPool, RecordPool
from raydix.schemas import (
    CacheError,
    KVResponse,
    LeaseExpired,
    Message,
    OpenSession,
    PackedEvents,
    PoolHandle,
    ReadKV,
    SessionResponse,
    StaleEpoch,
    WriteKV,
)
from raydix.schemas.requests import DEVICE

Outcome = Message | CacheError
OnOutcome = Callable[[Outcome], None]


class Transport(Protocol):
    """Carries the requests of one session. Every failure is a `CacheError`.

    Attributes:
        session_id: the session's, once it is open.
        epoch: the life of the cache in which it was opened.
        lost: why the session is over, once the cache has said so; None: as far as known it is open.
        turns: the turns of the loop that a request takes before it is submitted, if one is due; None: none ever is.
    """

    session_id: str
    epoch: str
    lost: StaleEpoch | LeaseExpired | None
    turns: LoopTurns | None

    async def open(self, request: OpenSession) -> SessionResponse:
        """Open the session."""

    async def beat(self, stay_s: float) -> None:
        """Signal that the client lives. Takes up to `stay_s`, and fails as soon as the session or the cache ends."""

    def submit(self, request: Message, on_outcome: OnOutcome | None = None) -> asyncio.Future[Message]:
        """Send a request after all that were submitted before; the future brings the response or a `CacheError`.

        If the future is cancelled before the request is sent, the request is dropped, unless there is an `on_outcome`.
        That is called with the outcome of the request, before the future is settled.
        """

    def give_up(self, why: str) -> None:
        """Fail all requests with `CacheUnavailable`: the cache is silent. Its later answers are dropped."""

    async def wait(self, ticket: int) -> Message:
        """Return the outcome of a queued request."""

    async def next_events(self, after_seq: int, timeout_s: float, tier: str = DEVICE) -> PackedEvents:
        """Return a tier's events after number `after_seq`; wait for one up to `timeout_s`."""

    async def pool_handle(self) -> PoolHandle:
        """Return how to reach the pool."""

    def local_pool(self) -> KVPool | RecordPool | None:
        """Return the pool itself, if it is in this process."""

    async def read_kv(self, request: ReadKV) -> KVResponse:
        """Copy KV out of the pool."""

    async def write_kv(self, request: WriteKV) -> None:
        """Copy KV into the pool."""

    async def close(self) -> None:
        """Close the session, after the requests submitted before."""
