"""`EventFeed`: the events of one tier of a cache, numbered, and packed into batches once for all readers."""

from __future__ import annotations

import asyncio
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from raydix.cache_core.tree.page_events import Hashes, PageRun
from raydix.schemas import CacheLoad, PackedEvents, SlimEventBatch, SlimEventSnapshot, TokenIds
from raydix.schemas.events import SLIM_EVENT_KINDS, BlockGroup, Blocks, pack_batch

MAX_EVENTS = 10_000  # full events that are kept
MAX_BYTES, MAX_SLIM_BYTES = 64 * 2**20, 16 * 2**20  # packed batches that are kept
MAX_BATCH_EVENTS = 1_000
MAX_BATCH_BYTES = 2**17  # hashes and token ids
MAX_ANSWER_BYTES = 2**20  # one batch is sent in any case
LINGER_S = 0.02  # a new batch of slim events waits so long for more
_STORED, _REMOVED, _CLEARED, _PENDING, _NOT_PENDING, _LOAD_CHANGED, _END_STORED, _END_REMOVED = (
    bytes((place,)) for place in range(len(SLIM_EVENT_KINDS))
)
_ABOUT_PAGES = (_STORED, _REMOVED, _CLEARED)
_NO_PAGES = np.empty(0, np.int64)

Event = tuple[bytes, Hashes, PageRun | None, int | None]  # kind, pages, of `PagesStored` the run, and the group


class _Batch(NamedTuple):
    """A packed batch."""

    seq: int
    packed: bytes


class EventFeed:
    """Takes a tree's events and serves them to readers. The cache never waits for it.

    Events collect until a reader asks, or until they are many. Then they become a batch, for every reader: one that has
    the batch's first events already skips them. Old batches are dropped as new ones come; a reader that asks for
    dropped events gets `gap=True` and takes a snapshot. Slim events have the load, too: if it has changed, the batch
    gets an event `LoadChanged`, so that a change alone is a batch. All runs on one event loop; only reading needs one.

    Args:
        epoch: the life of the cache that the numbers belong to.
        page_size: tokens of a page.
        medium: where the KV is: "GPU", "CPU" or "STORAGE"; None: the events are slim.
        stride_tokens: of slim events.
        bigram: the cache's keys are pairs of neighbouring tokens.
        load: returns the cache's load, for slim events.
        groups: the kinds of data that full events are about; empty: they name none.
    """

    def __init__(
        self,
        epoch: str,
        page_size: int,
        medium: str | None,
        stride_tokens: int | None = None,
        bigram: bool = False,
        load: Callable[[], CacheLoad] = CacheLoad,
        groups: tuple[BlockGroup, ...] = (),
    ) -> None:
        self.page_size = page_size
        self._epoch = epoch
        self._medium = medium
        self._stride_tokens = stride_tokens or page_size
        self._bigram = bigram
        self._load = load
        self._groups = groups
        self._max_events = MAX_EVENTS if medium else sys.maxsize
        self._max_bytes = MAX_BYTES if medium else MAX_SLIM_BYTES
        self._linger_s = 0.0 if medium else LINGER_S
        self._sent_load = CacheLoad()  # the load in the last batch
        self._seq = 0  # the number of the last event in a batch
        self._events: list[Event] = []  # later events
        self._num_pages = 0  # the pages of these events
        self._max_pages = MAX_BATCH_BYTES // (8 + 4 * page_size if medium else 8)
        self._kept: list[_Batch] = []  # the last batches
        self._num_bytes = 0
        self._first_seq = 0  # the number of the event before the first kept batch
        self._recordings: list[list[Event]] = []
        self._news: asyncio.Future[None] | None = None  # readers wait for it; the next event sets it
        self._load_check: asyncio.TimerHandle | None = None
        self._closed = False

    # ---------------------------------------------------------------- the sink

    def stored(self, run: PageRun) -> None:
        """Publish that pages can be matched from now on."""
        self._add(_STORED, run.hashes, run, run.group)

    def removed(self, hashes: Hashes, group: int | None = None) -> None:
        """Publish that pages are gone, from one group if the events name groups."""
        self._add(_REMOVED, hashes, None, group)

    def stored_as_ends(self, run: PageRun) -> None:
        """Publish that pages are stored, and that a match may end at each."""
        self._events.append((_STORED, run.hashes, run, None))
        for recording in self._recordings:
            recording.append((_STORED, run.hashes, run, None))
        self._num_pages += len(run.hashes)
        self._add(_END_STORED, _NO_PAGES)

    def ends_stored(self, hashes: Hashes) -> None:
        """Publish that a match may end at pages."""
        self._add(_END_STORED, hashes)

    def ends_removed(self, hashes: Hashes) -> None:
        """Publish that no match may end at pages any more."""
        self._add(_END_REMOVED, hashes)

    def cleared(self) -> None:
        """Publish that all pages are gone."""
        self._add(_CLEARED, _NO_PAGES)

    def pending(self, hashes: Hashes) -> None:
        """Publish that a lease was granted which will publish these pages."""
        self._add(_PENDING, hashes)

    def not_pending(self, hashes: Hashes) -> None:
        """Publish that no open lease will publish these pages any more."""
        self._add(_NOT_PENDING, hashes)

    def _add(self, kind: bytes, hashes: Hashes, run: PageRun | None = None, group: int | None = None) -> None:
        self._events.append((kind, hashes, run, group))
        if self._recordings and kind in _ABOUT_PAGES:
            for recording in self._recordings:
                recording.append((kind, hashes, run, group))
        self._num_pages += len(hashes)
        if self._num_pages >= self._max_pages or len(self._events) >= MAX_BATCH_EVENTS:
            self._seal()
        if self._news is not None:
            self.wake()

    def note_load(self) -> None:
        """Have waiting readers notice a changed load, soon: the load is compared once for many calls."""
        if self._news is None or self._medium or self._load_check is not None:
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
            self._events.append((_LOAD_CHANGED, _NO_PAGES, None, None))
        if not self._events:
            return
        events, self._events, self._num_pages, self._sent_load = self._events, [], 0, load
        self._seq += len(events)
        packed = self._pack(events, self._seq, load)
        self._kept.append(_Batch(self._seq, packed))
        self._num_bytes += len(packed)
        num_dropped = 0
        while self._num_bytes > self._max_bytes or self._seq - self._first_seq > self._max_events:
            self._num_bytes -= len(self._kept[num_dropped].packed)
            self._first_seq = self._kept[num_dropped].seq
            num_dropped += 1
        del self._kept[:num_dropped]

    def _pack(self, events: list[Event], seq: int, load: CacheLoad, gap: bool = False) -> bytes:
        """Return a batch that ends with number `seq`."""
        if self._groups:
            events = _without_repeats(events)
        kinds = b"".join([kind for kind, _, _, _ in events])
        counts = np.array([len(hashes) for _, hashes, _, _ in events], "<i4").tobytes()
        pages = _joined([hashes for _, hashes, _, _ in events])
        batch = SlimEventBatch(self._epoch, seq, self._stride_tokens, kinds, counts, pages, load, gap)
        if self._medium is None:
            return pack_batch(batch)
        runs = [run for _, _, run, _ in events if run is not None]
        parents = tuple([run.parent_hash for run in runs])
        token_ids = tuple([TokenIds.pack(run.token_ids).data for run in runs])
        namespaces = tuple([run.extra_key for run in runs])
        group_of = bytes([group or 0 for _, _, _, group in events]) if self._groups else b""
        return pack_batch(batch, Blocks(self._medium, parents, token_ids, namespaces, self._groups, group_of))

    def batches_after(self, after_seq: int) -> PackedEvents:
        """Return the batches with the events after number `after_seq`, as many as fit; none without later events."""
        if after_seq >= self._seq:
            self._seal()
        if not self._first_seq <= after_seq <= self._seq:
            return PackedEvents((self._pack([], self.seq, self._load(), gap=True),))
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
        if self._linger_s and timeout_s and self._seq <= after_seq <= self.seq and self._events and not self._closed:
            await asyncio.sleep(self._linger_s)
        return self.batches_after(after_seq)

    @contextmanager
    def recording(self) -> Iterator[list[Event]]:
        """Collect the events of the block by which pages come and go."""
        events: list[Event] = []
        self._recordings.append(events)
        try:
            yield events
        finally:
            self._recordings = [recording for recording in self._recordings if recording is not events]

    @staticmethod
    def clears(event: Event) -> bool:
        """Return whether all pages are gone with an event."""
        return event[0] == _CLEARED

    def snapshot(
        self,
        runs: Iterable[PageRun],
        pending: Hashes = _NO_PAGES,
        ends: Hashes | None = None,
        seq: int | None = None,
    ) -> PackedEvents | SlimEventSnapshot:
        """Return a reader's starting point: of full events a batch.

        Args:
            runs: all pages that are cached now and have events, parents before children.
            pending: the pages that are pending now.
            ends: the pages at which a match may end; None: at every page.
            seq: the number of the last event that it includes; None: of the last one that there is.
        """
        load, seq = self._load(), self.seq if seq is None else seq
        if self._medium:
            stored: list[Event] = [(_STORED, run.hashes, run, run.group) for run in runs]
            return PackedEvents((self._pack(stored, seq, load),))
        return SlimEventSnapshot(
            self._epoch,
            seq,
            self._stride_tokens,
            self.page_size,
            self._bigram,
            _joined([run.hashes for run in runs]),
            _joined([pending]),
            load,
            None if ends is None else _joined([ends]),
        )

    @staticmethod
    def joined(parts: Sequence[PackedEvents | SlimEventSnapshot]) -> PackedEvents | SlimEventSnapshot:
        """Return the snapshot of all pages of some snapshots of one number; the first one has the rest of it."""
        first = parts[0]
        if isinstance(first, PackedEvents):
            return PackedEvents(
                tuple([packed for part in parts if isinstance(part, PackedEvents) for packed in part.batches])
            )
        return replace(first, stored=b"".join([part.stored for part in parts if isinstance(part, SlimEventSnapshot)]))

    def close(self) -> None:
        """End every wait, and let none begin."""
        self._closed = True
        self.wake()


def _without_repeats(events: list[Event]) -> list[Event]:
    """Return events without pages that the event of another group before them has: they are packed once."""
    packed: list[Event] = []
    before: tuple[bytes, Hashes] = (b"", _NO_PAGES)
    for kind, hashes, run, group in events:
        is_repeat = (
            (kind, len(hashes)) == (before[0], len(before[1])) and len(hashes) and bool((hashes == before[1]).all())
        )
        packed.append((kind, _NO_PAGES, None, group) if is_repeat else (kind, hashes, run, group))
        before = kind, hashes
    return packed


def _joined(pages: list[Hashes]) -> bytes:
    return np.concatenate([_NO_PAGES, *pages]).astype("<i8", copy=False).tobytes()
