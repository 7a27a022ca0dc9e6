"""`EventVerbs`: reading a cache's KV events."""

from __future__ import annotations

from collections.abc import AsyncIterator

from raydix.actors.client.client_session import ClientSession
from raydix.schemas import (
    CacheError,
    EventSnapshotRequest,
    InvalidRequest,
    KVEventBatch,
    KVEventSnapshot,
    LeaseExpired,
    StaleEpoch,
)
from raydix.schemas.shown import brief

_TIMEOUT_S = 10.0  # a reader asks anew after it, so that nobody waits at a cache for ever


class EventVerbs(ClientSession):
    """The verbs of whoever follows what a cache holds; needs `CacheConfig(events=True)`.

    following = True
    while following:
        try:
            index = Index(await client.event_snapshot())
            async for batch in client.events(index.seq):
                if batch.gap or batch.epoch != index.epoch:
                    index = Index(await client.event_snapshot())
                elif batch.seq > index.seq:
                    index.apply(batch)
            following = False  # the client was closed
        except (StaleEpoch, CacheUnavailable):  # the cache has restarted, or is about to
            await asyncio.sleep(1)
    """

    async def events(self, after_seq: int | None = None) -> AsyncIterator[KVEventBatch]:
        """What is stored and removed, as it happens, in batches; ends when this client is closed.

        Applied in order to an empty index, from the beginning, or to one made of `event_snapshot()`, they give exactly
        what is there. Nothing slows the cache down: it keeps its latest events for all readers (10,000 of them, up to
        64 MiB), and who falls behind gets a batch with `gap=True`, without events. Then replace the index by a new
        snapshot and go on with the same iterator. Batches up to the snapshot's `seq` need not be applied, but may be.

        Args:
            after_seq: go on after this event of the present epoch; None: from the beginning, with a gap if that is long
                ago. Another epoch counts anew: whoever kept a number across a restart compares epochs.

        Raises:
            InvalidRequest: `after_seq` is no number of an event, or the cache publishes no events.
            StaleEpoch: the cache has restarted; its events begin anew.
            CacheUnavailable: it does not answer, as while it restarts.

        After either of these a new snapshot and a new `events()` go on.
        """
        seq = 0 if after_seq is None else after_seq
        if not isinstance(seq, int) or isinstance(seq, bool) or seq < 0:
            raise InvalidRequest(f"after_seq must be the number of an event, not {brief(after_seq)}")
        await self.open()
        epoch = self._transport.epoch
        while not self._closed:
            transport = self._transport
            if transport.epoch != epoch:  # another verb was told of the restart, and opened this session
                raise StaleEpoch(epoch, transport.epoch)
            try:
                batch = await transport.next_events(seq, _TIMEOUT_S)
            except CacheError as error:
                if self._closed:
                    return
                self._note_loss(transport)
                if not isinstance(error, LeaseExpired):
                    raise
                await self.open()  # the same events, for another session
                continue
            seq = batch.seq
            if batch.events or batch.gap:
                yield batch

    async def event_snapshot(self) -> KVEventSnapshot:
        """Everything that is there, as events, and the number to go on after: `events(snapshot.seq)`.

        It includes what this client did before. The cache does nothing else while it walks its tree: some 10 us a
        node, and 0.1 us a page.

        Raises:
            InvalidRequest: the cache publishes no events.
        """
        response = await self._call(EventSnapshotRequest())
        assert isinstance(response, KVEventSnapshot), f"a snapshot was due, not {type(response).__name__}"
        return response
