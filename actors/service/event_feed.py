"""`EventFeed`: a cache's numbered events. The latest are kept for readers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import islice

from raydix.cache_core.tree.page_events import Hashes, PageRun
from raydix.schemas import (
    AllBlocksCleared,
    BlockHashes,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
    KVEventSnapshot,
    TokenIds,
)

MAX_EVENTS = 10_000  # kept
MAX_BYTES = 64 * 2**20  # of hashes and token ids in the kept events
MAX_BATCH_EVENTS = 1_000
MAX_BATCH_BYTES = 4 * 2**20


class EventFeed:
    """Takes a tree's events and serves them to readers. It never makes the cache wait.

    Old events are dropped as new ones come. A reader that asks for dropped events gets `gap=True` and takes a snapshot.
    All runs on one event loop; only reading needs one.

    Args:
        epoch: the life of the cache that the numbers belong to.
        block_size: tokens of a page.
        medium: where the KV is: "GPU" or "CPU".
    """

    def __init__(
        self, epoch: str, block_size: int, medium: str, max_events: int = MAX_EVENTS, max_bytes: int = MAX_BYTES
    ) -> None:
        self.seq = 0  # the number of the last event
        self._epoch = epoch
        self._block_size = block_size
        self._medium = medium
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._kept: deque[KVEvent] = deque()  # the last of them is event `seq`
        self._num_bytes = 0  # of those
        self._news: asyncio.Future[None] | None = None  # set with the next event, for readers that wait
        self._closed = False

    # ---------------------------------------------------------------- the sink

    def stored(self, run: PageRun) -> None:
        """Publish that pages can be matched from now on."""
        self._publish(self._stored(run))

    def removed(self, hashes: Hashes) -> None:
        """Publish that pages are gone."""
        self._publish(BlockRemoved(block_hashes=BlockHashes.pack(hashes), medium=self._medium))

    def cleared(self) -> None:
        """Publish that all pages are gone."""
        self._publish(AllBlocksCleared())

    def _stored(self, run: PageRun) -> BlockStored:
        return BlockStored(
            block_hashes=BlockHashes.pack(run.hashes),
            parent_block_hash=run.parent_hash,
            token_ids=TokenIds.pack(run.token_ids),
            block_size=self._block_size,
            medium=self._medium,
            namespace=run.extra_key,
        )

    def _publish(self, event: KVEvent) -> None:
        self.seq += 1
        self._kept.append(event)
        self._num_bytes += _num_bytes(event)
        while len(self._kept) > self._max_events or self._num_bytes > self._max_bytes:
            self._num_bytes -= _num_bytes(self._kept.popleft())
        self.wake()

    def wake(self) -> None:
        """Have waiting readers look for events, and for the end of their sessions."""
        news, self._news = self._news, None
        if news is not None and not news.done() and not news.get_loop().is_closed():
            news.set_result(None)

    def change_loop(self) -> None:
        """Forget the readers that waited on a loop that was closed."""
        self._news = None

    # ---------------------------------------------------------------- readers

    def batch_after(self, after_seq: int) -> KVEventBatch:
        """Return the events after number `after_seq`, as many as fit in one batch; none if there is no later one."""
        missed = self.seq - after_seq
        if not 0 <= missed <= len(self._kept):
            return KVEventBatch(epoch=self._epoch, seq=self.seq, events=(), gap=True)
        first = len(self._kept) - missed
        events = _head(islice(self._kept, first, first + MAX_BATCH_EVENTS))
        return KVEventBatch(epoch=self._epoch, seq=after_seq + len(events), events=events)

    async def next_batch(self, after_seq: int, timeout_s: float) -> KVEventBatch:
        """Wait up to `timeout_s` for an event, and return `batch_after`."""
        if after_seq == self.seq and not self._closed:
            if self._news is None:
                self._news = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._news,), timeout=timeout_s)  # leaves the future to the other readers
        return self.batch_after(after_seq)

    def snapshot(self, runs: Iterable[PageRun]) -> KVEventSnapshot:
        """Return a reader's starting point.

        Args:
            runs: all pages that are cached now, parents before children.
        """
        return KVEventSnapshot(epoch=self._epoch, seq=self.seq, events=tuple([self._stored(run) for run in runs]))

    def close(self) -> None:
        """End every wait, and let none begin."""
        self._closed = True
        self.wake()


def _num_bytes(event: KVEvent) -> int:
    match event:
        case BlockStored():
            return len(event.block_hashes.data) + len(event.token_ids.data)
        case BlockRemoved():
            return len(event.block_hashes.data)
    return 0


def _head(events: Iterable[KVEvent]) -> tuple[KVEvent, ...]:
    """Return the first events, as many as a batch takes: one at least, if there is one."""
    head: list[KVEvent] = []
    num_bytes = 0
    for event in events:
        num_bytes += _num_bytes(event)
        if head and num_bytes > MAX_BATCH_BYTES:
            break
        head.append(event)
    return tuple(head)
