"""`read_events`: the KV events of a cache's tier, read batch by batch; `until_one_ends`: readers of several tiers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from raydix.actors.transport.validation import make_request
from raydix.schemas import (
    CacheError,
    EventSnapshotRequest,
    InvalidRequest,
    KVEventBatch,
    LeaseExpired,
    SlimEventBatch,
    StaleEpoch,
)
from raydix.schemas.shown import brief

if TYPE_CHECKING:
    from raydix.actors.client.client_session import ClientSession

_TIMEOUT_S = 10.0  # a reader asks again after this time, so that no call waits at a cache forever


async def read_events(
    session: ClientSession, after_seq: int | None, tier: str
) -> AsyncIterator[KVEventBatch | SlimEventBatch]:
    """Yield a tier's events after a number, as `PrefixCacheClient.events` documents; end when the session is closed."""
    seq = 0 if after_seq is None else after_seq
    if not isinstance(seq, int) or isinstance(seq, bool) or seq < 0:
        raise InvalidRequest(f"after_seq must be the number of an event, not {brief(after_seq)}")
    tier = make_request(EventSnapshotRequest, tier=tier).tier
    await session.open()
    epoch = session.transport.epoch
    while not session.closed:
        transport = session.transport
        if transport.epoch != epoch:  # another request met the restart, and opened this session
            raise StaleEpoch(epoch, transport.epoch)
        try:
            packed = await transport.next_events(seq, _TIMEOUT_S, tier)
        except CacheError as error:
            if session.closed:
                return
            session.check_loss(transport)
            if not isinstance(error, LeaseExpired):
                raise
            await session.open()  # the next session reads the same events
            continue
        for batch in packed.unpack(seq):
            seq = batch.seq
            yield batch


async def until_one_ends(readers: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run readers until one of them has ended; cancel the others. If it has failed, raise its error."""
    tasks = [asyncio.create_task(reader) for reader in readers]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
