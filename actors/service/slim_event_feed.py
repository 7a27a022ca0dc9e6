"""`SlimEventFeed`: a cache's slim events, numbered, and packed into batches once for all readers."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from raydix.cache_core.tree.page_events import Hashes, PageRun
from raydix.schemas import CacheLoad, PackedEvents, SlimEventBatch, SlimEventSnapshot
from raydix.schemas.slim_events import SLIM_EVENT_KINDS, SlimEventKind, pack_batch

MAX_BYTES = 16 * 2**20  # of the packed batches that are kept
MAX_ANSWER_BYTES = 2**20  # of the batches in one answer; one is sent in any case
MAX_BATCH_PAGES = 16_384
LINGER_S = 0.02  # that a new batch waits for more events
_BYTE = {kind: bytes((place,)) for place, kind in enumerate(SLIM_EVENT_KINDS)}


class _Event(NamedTuple):
    """An event that no batch has yet."""

    kind: bytes
    hashes: Hashes


class _Batch(NamedTuple):
    """A packed batch."""

    seq: int
    packed: bytes


class SlimEventFeed:
    """Takes a tree's strided events and its pending pages, and serves them to readers. The cache never waits for it.

    Events collect until a reader asks, or until they are many. Then they become a batch, for every reader: one that has
    the batch's first events already skips them. Old batches are dropped as new ones come; a reader that asks for
    dropped events gets `gap=True` and takes a snapshot. If the load has changed, the batch gets an event `LoadChanged`,
    so that a change alone is a batch, too. All runs on one event loop; only reading needs one.

    Attributes:
        num_packed: batches that were packed since the start.

    Args:
        epoch: the life of the cache that the numbers belong to.
        page_size: tokens of a page.
        stride_tokens: of the events that come.
        bigram: the cache's keys are pairs of neighbouring tokens.
        load: returns the cache's load.
        linger_s: see `LINGER_S`.
    """

    def __init__(
        self,
        epoch: str,
        page_size: int,
        stride_tokens: int,
        bigram: bool,
        load: Callable[[], CacheLoad],
        max_bytes: int = MAX_BYTES,
        linger_s: float = LINGER_S,
    ) -> None:
        self.num_packed = 0
        self._epoch = epoch
        self._page_size = page_size
        self._stride_tokens = stride_tokens
        self._bigram = bigram
        self._load = load
        self._max_bytes = max_bytes
        self._linger_s = linger_s
        self._sent_load = CacheLoad()  # of the last batch
        self._seq = 0  # of the last event in a batch
        self._events: list[_Event] = []  # since
        self._num_pages = 0  # of these
        self._kept: list[_Batch] = []  # the last batches
        self._first_seq = 0  # of the event before the first kept batch
        self._num_bytes = 0  # of these
        self._news: asyncio.Future[None] | None = None  # set with the next event, for readers that wait
        self._load_check: asyncio.TimerHandle | None = None
        self._closed = False

    # ---------------------------------------------------------------- the sink

    def stored(self, run: PageRun) -> None:
        """Publish that pages can be matched from now on."""
        self._add("PagesStored", run.hashes)

    def removed(self, hashes: Hashes) -> None:
        """Publish that pages are gone."""
        self._add("PagesRemoved", hashes)

    def cleared(self) -> None:
        """Publish that all pages are gone."""
        self._add("PagesCleared", np.empty(0, np.int64))

    def pending(self, hashes: Hashes) -> None:
        """Publish that a lease was granted which will publish these pages."""
        self._add("PagesPending", hashes)

    def not_pending(self, hashes: Hashes) -> None:
        """Publish that no open lease will publish these pages any more."""
        self._add("PagesNotPending", hashes)

    def _add(self, kind: SlimEventKind, hashes: Hashes) -> None:
        self._events.append(_Event(_BYTE[kind], hashes))
        self._num_pages += len(hashes)
        if self._num_pages >= MAX_BATCH_PAGES:
            self._seal()
        self.wake()

    def note_load(self) -> None:
        """Have waiting readers notice a changed load, soon: the load is compared once for many calls."""
        if self._news is None or self._load_check is not None:
            return
        loop = self._news.get_loop()
        if not loop.is_closed():
            self._load_check = loop.call_later(self._linger_s, self._compare_load)

    def _compare_load(self) -> None:
        self._load_check = None
        if self._load() != self._sent_load:
            self.wake()

    def wake(self) -> None:
        """Have waiting readers look for events, for another load, and for the end of their sessions."""
        news, self._news = self._news, None
        if news is not None and not news.done() and not news.get_loop().is_closed():
            news.set_result(None)

    def change_loop(self) -> None:
        """Forget the readers that waited on a loop that was closed."""
        self._news = self._load_check = None

    # ---------------------------------------------------------------- batches

    @property
    def seq(self) -> int:
        """The number of the last event."""
        return self._seq + len(self._events)

    def _seal(self) -> None:
        """Make a batch of the events since the last one, and of the load if it has changed. None if nothing has."""
        load = self._load()
        if load != self._sent_load:
            self._events.append(_Event(_BYTE["LoadChanged"], np.empty(0, np.int64)))
        if not self._events:
            return
        events, self._events, self._num_pages, self._sent_load = self._events, [], 0, load
        self._seq += len(events)
        kinds = b"".join([event.kind for event in events])
        counts = np.array([len(event.hashes) for event in events], "<i4").tobytes()
        hashes = np.concatenate([event.hashes for event in events]).astype("<i8", copy=False).tobytes()
        packed = pack_batch(SlimEventBatch(self._epoch, self._seq, self._stride_tokens, kinds, counts, hashes, load))
        self.num_packed += 1
        self._kept.append(_Batch(self._seq, packed))
        self._num_bytes += len(packed)
        num_dropped = 0
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._kept[num_dropped].packed)
            self._first_seq = self._kept[num_dropped].seq
            num_dropped += 1
        del self._kept[:num_dropped]

    def batches_after(self, after_seq: int) -> PackedEvents:
        """Return the batches with the events after number `after_seq`, as many as fit; none without later events."""
        if after_seq >= self._seq:
            self._seal()
        if not self._first_seq <= after_seq <= self._seq:
            gap = SlimEventBatch(self._epoch, self.seq, self._stride_tokens, b"", b"", b"", self._load(), gap=True)
            return PackedEvents((pack_batch(gap),))
        found: list[bytes] = []
        num_bytes = 0
        for batch in self._kept[bisect_right(self._kept, after_seq, key=lambda batch: batch.seq) :]:
            num_bytes += len(batch.packed)
            if found and num_bytes > MAX_ANSWER_BYTES:
                break
            found.append(batch.packed)
        return PackedEvents(tuple(found))

    async def next_batch(self, after_seq: int, timeout_s: float) -> PackedEvents:
        """Wait up to `timeout_s` for an event or another load, and return `batches_after`."""
        if after_seq == self.seq and not self._closed and self._load() == self._sent_load:
            if self._news is None:
                self._news = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._news,), timeout=timeout_s)  # leaves the future to the other readers
        if timeout_s and self._seq <= after_seq <= self.seq and self._events and not self._closed:
            await asyncio.sleep(self._linger_s)
        return self.batches_after(after_seq)

    def snapshot(self, runs: Iterable[PageRun], pending: Hashes) -> SlimEventSnapshot:
        """Return a reader's starting point.

        Args:
            runs: all strided pages that are cached now.
            pending: the pages that are pending now.
        """
        stored = np.concatenate([np.empty(0, np.int64), *(run.hashes for run in runs)])
        return SlimEventSnapshot(
            self._epoch,
            self.seq,
            self._stride_tokens,
            self._page_size,
            self._bigram,
            stored.astype("<i8", copy=False).tobytes(),
            pending.astype("<i8", copy=False).tobytes(),
            self._load(),
        )

    def close(self) -> None:
        """End every wait, and let none begin."""
        self._closed = True
        self.wake()
