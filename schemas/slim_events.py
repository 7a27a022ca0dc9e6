"""Slim KV events, for routers: hashes of every s-th page without token ids, pending pages, and the cache's load.

A page stands for all tokens up to its end, and only pages that end at a multiple of `stride_tokens` are named. A batch
is flat: the kinds of its events, the number of pages of each, and the hashes of these pages, one after the other.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from raydix.schemas.message import Answer

SlimEventKind = Literal["PagesStored", "PagesRemoved", "PagesCleared", "PagesPending", "PagesNotPending", "LoadChanged"]
SLIM_EVENT_KINDS: tuple[SlimEventKind, ...] = get_args(SlimEventKind)  # a kind's place here is its byte in `kinds`

_PROTOCOL = 5


class SlimEvent(NamedTuple):
    """One event of a slim batch.

    `PagesCleared` removes every page, stored or pending. `LoadChanged` has no pages.
    """

    kind: SlimEventKind
    hashes: tuple[int, ...]  # int64, of pages at the ends of strides


@dataclass(frozen=True, slots=True)
class CacheLoad(Answer):
    """The work that a cache has taken on, in tokens.

    Attributes:
        waiting_tokens: of requests that wait for free slots; of a growing lease, its growth alone.
        leased_tokens: that open leases cover, cached prefixes included.
        unpublished_tokens: prompt tokens of open leases that were not cached at the grant and are not published yet.
        private_slots: slots that open leases may write.
    """

    waiting_tokens: int = 0
    leased_tokens: int = 0
    unpublished_tokens: int = 0
    private_slots: int = 0


@dataclass(frozen=True, slots=True)
class SlimEventBatch(Answer):
    """Events in order, without a hole between them; numbered as those of `KVEventBatch` are.

    This batch's are those in (seq - len(kinds), seq]. A reader that has the first of them already skips these. After a
    `gap` events up to `seq` are lost, and only `event_snapshot()` lists the pages.

    Attributes:
        epoch: this life of the cache.
        seq: the number of the last of these events.
        stride_tokens: the tokens of a stride.
        kinds: one byte an event, its place in `SLIM_EVENT_KINDS`.
        counts: int32, little-endian: the number of pages of each event.
        hashes: int64, little-endian: of the pages, event after event.
        load: of the cache after these events.
        gap: events were dropped before they were read: take a snapshot.
    """

    epoch: str
    seq: int
    stride_tokens: int
    kinds: bytes = field(repr=False)
    counts: bytes = field(repr=False)
    hashes: bytes = field(repr=False)
    load: CacheLoad
    gap: bool = False

    @property
    def page_counts(self) -> NDArray[np.int32]:
        """The number of pages of each event, a read-only view."""
        return np.frombuffer(self.counts, "<i4")

    @property
    def page_hashes(self) -> NDArray[np.int64]:
        """The hashes of the pages of all events, a read-only view."""
        return np.frombuffer(self.hashes, "<i8")

    @property
    def events(self) -> tuple[SlimEvent, ...]:
        """The events, one by one. O(pages)."""
        found: list[SlimEvent] = []
        hashes = self.page_hashes.tolist()
        start = 0
        for kind, count in zip(self.kinds, self.page_counts.tolist(), strict=True):
            found.append(SlimEvent(SLIM_EVENT_KINDS[kind], tuple(hashes[start : start + count])))
            start += count
        return tuple(found)


@dataclass(frozen=True, slots=True)
class SlimEventSnapshot(Answer):
    """Every page after event `seq`. The stream continues after `seq`.

    Attributes:
        epoch: this life of the cache.
        seq: the number of the last event that this includes.
        stride_tokens: the tokens of a stride.
        page_size: tokens of a page.
        bigram: the cache's keys are pairs of neighbouring tokens.
        stored: int64, little-endian: the hashes of the stored pages, each once.
        pending: the same, of the pages that open leases will publish.
        load: of the cache.
    """

    epoch: str
    seq: int
    stride_tokens: int
    page_size: int
    bigram: bool
    stored: bytes = field(repr=False)
    pending: bytes = field(repr=False)
    load: CacheLoad

    @property
    def stored_hashes(self) -> NDArray[np.int64]:
        """The hashes of the stored pages, a read-only view."""
        return np.frombuffer(self.stored, "<i8")

    @property
    def pending_hashes(self) -> NDArray[np.int64]:
        """The hashes of the pending pages, a read-only view."""
        return np.frombuffer(self.pending, "<i8")


@dataclass(frozen=True, slots=True)
class PackedEvents(Answer):
    """Slim batches that follow one another, each packed once for all readers. Empty: there is no later event.

    Attributes:
        batches: as `pack_batch` made them.
    """

    batches: tuple[bytes, ...] = field(repr=False)

    def unpack(self) -> list[SlimEventBatch]:
        """Return the batches."""
        return [unpack_batch(packed) for packed in self.batches]


def pack_batch(batch: SlimEventBatch) -> bytes:
    """Return a batch as bytes."""
    *values, load, gap = batch._values()
    return pickle.dumps((*values, tuple(load._values()), gap), _PROTOCOL)


def unpack_batch(packed: bytes) -> SlimEventBatch:
    """Return the batch of `pack_batch`. The cache made it, so that nothing is checked."""
    epoch, seq, stride_tokens, kinds, counts, hashes, load, gap = pickle.loads(packed)
    return SlimEventBatch(epoch, seq, stride_tokens, kinds, counts, hashes, CacheLoad(*load), gap)
