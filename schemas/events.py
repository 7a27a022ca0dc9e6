"""Events: a cache publishes the pages that it stores and removes. Full ones name blocks, slim ones pages at strides.

Full events are vLLM's: a block is a page, and the fields have the names, the order and the meaning of vLLM's, so that
routers which read vLLM's events can read them: `event.model_dump()` is the map that vLLM sends. Hashes are the first 64
bits, signed, of the chained SHA-256 of the page, as `hash_to_int64` gives them. Every event belongs to one namespace;
hashes of different namespaces differ. A cache with a sliding window or states publishes by group, as vLLM does for such
models: group 0 is the full-attention KV, window KV the next one, and states the last one. An event then names its
group, and a block is stored in each group by itself. Other caches name no group.

Slim events are for routers: hashes without token ids, pending pages, and the cache's load. A page stands for all tokens
up to its end, and only pages that end at a multiple of `stride_tokens` are named. A cache with a sliding window or
states also names *ends*, whatever the stride: pages at which a match may end, of those at which one is likely to. All
KV before an end is stored. A batch is flat: the kinds of its events, the number of pages of each, and the hashes of all
these pages, one after the other. An event without pages may have those of the event before it: see `split`.

Both travel as flat batches, packed once for all readers. With full events strides are pages, and `Blocks` are added.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, GetCoreSchemaHandler, model_serializer
from pydantic_core import CoreSchema, core_schema

from raydix.schemas.message import Answer, PydanticMessage
from raydix.schemas.namespace import unframe_namespace
from raydix.schemas.requests import DEVICE, LeaseId, TierName
from raydix.schemas.tokens import TokenIds

SlimEventKind = Literal[
    "PagesStored",
    "PagesRemoved",
    "PagesCleared",
    "PagesPending",
    "PagesNotPending",
    "LoadChanged",
    "EndStored",
    "EndRemoved",
]
SLIM_EVENT_KINDS: tuple[SlimEventKind, ...] = get_args(SlimEventKind)  # a kind's place here is its byte in `kinds`
_REPEATABLE = ("PagesStored", "PagesRemoved", "EndStored")
_PROTOCOL = 5

# ---------------------------------------------------------------- full events


class BlockHashes(Sequence[int]):
    """Signed 64-bit hashes. Reads like a tuple of integers, and is sent as 8 bytes each."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data  # little-endian int64

    @classmethod
    def pack(cls, hashes: BlockHashes | NDArray[np.int64] | Iterable[int]) -> BlockHashes:
        """Pack integers in `[-2**63, 2**63)`.

        Raises:
            ValueError: a hash is not such an integer.
        """
        if isinstance(hashes, BlockHashes):
            return hashes
        try:
            array = hashes if isinstance(hashes, np.ndarray) else np.array(list(hashes), "<i8")
        except (OverflowError, TypeError) as error:
            raise ValueError(f"block hashes must be signed 64-bit integers: {error}") from None
        if array.ndim != 1 or array.dtype.kind != "i":
            raise ValueError(
                f"block hashes must be signed integers in one dimension, not {array.dtype} of shape {array.shape}"
            )
        return cls(array.astype("<i8", copy=False).tobytes())

    def tolist(self) -> list[int]:
        """The hashes as Python integers."""
        hashes: list[int] = np.frombuffer(self.data, "<i8").tolist()
        return hashes

    def __len__(self) -> int:
        return len(self.data) // 8

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        found = np.frombuffer(self.data, "<i8")[index]
        return found.tolist() if isinstance(index, slice) else int(found)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockHashes) and self.data == other.data

    def __hash__(self) -> int:
        return hash(self.data)

    def __reduce__(self) -> tuple[type[BlockHashes], tuple[bytes]]:
        return BlockHashes, (self.data,)

    def __repr__(self) -> str:
        return f"BlockHashes([{', '.join(map(str, self[:3]))}{', ...' if len(self) > 3 else ''}], len={len(self)})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(cls.pack)


class BlockStored(PydanticMessage):
    """Consecutive blocks of one namespace were stored, `block_size` tokens each."""

    block_hashes: BlockHashes
    parent_block_hash: int | None = Field(description="of the block before the first one; None: none is before it")
    token_ids: TokenIds = Field(description="one per token; where keys are pairs of tokens, the first of each pair")
    block_size: int = Field(gt=0, description="tokens of a block")
    medium: str = Field(description='where the KV is: "GPU", "CPU" or "STORAGE"')
    namespace: str | None = Field(default=None, description="as `frame_namespace` gives it; None: the default one")
    group_idx: int | None = Field(default=None, description="the kind of data that was stored; None: there is one kind")
    kv_cache_spec_kind: str | None = Field(
        default=None, description='of the group: "full_attention", "sliding_window" or "mamba"'
    )
    kv_cache_spec_sliding_window: int | None = Field(default=None, description="tokens of the group's window")

    @property
    def lora_id(self) -> None:
        """A number that vLLM gives; here adapters have names only."""
        return None

    @property
    def lora_name(self) -> str | None:
        """The `lora_id` of the verbs."""
        return None if self.namespace is None else unframe_namespace(self.namespace)[1]

    @property
    def extra_keys(self) -> list[tuple[str, ...]] | None:
        """For each block, the namespace: besides the tokens, its hash depends on it."""
        return None if self.namespace is None else [(self.namespace,)] * len(self.block_hashes)

    @model_serializer
    def _as_vllm(self) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": self.block_hashes.tolist(),
            "parent_block_hash": self.parent_block_hash,
            "token_ids": self.token_ids.tolist(),
            "block_size": self.block_size,
            "lora_id": self.lora_id,
            "medium": self.medium,
            "lora_name": self.lora_name,
            "extra_keys": self.extra_keys,
            **_given(self, "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
        }


class BlockRemoved(PydanticMessage):
    """Blocks of one namespace were removed."""

    block_hashes: BlockHashes
    medium: str = Field(description='where the KV was: "GPU", "CPU" or "STORAGE"')
    group_idx: int | None = Field(default=None, description="the kind of data that was removed, as of `BlockStored`")

    @model_serializer
    def _as_vllm(self) -> dict[str, Any]:
        hashes = self.block_hashes.tolist()
        return {
            "type": "BlockRemoved",
            "block_hashes": hashes,
            "medium": self.medium,
            **_given(self, "group_idx"),
        }


def _given(event: BlockStored | BlockRemoved, *names: str) -> dict[str, Any]:
    """Return the fields that are not None, as vLLM sends them."""
    return {name: value for name in names if (value := getattr(event, name)) is not None}


class AllBlocksCleared(PydanticMessage):
    """Every block of every namespace was removed."""

    @model_serializer
    def _as_vllm(self) -> dict[str, Any]:
        return {"type": "AllBlocksCleared"}


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(PydanticMessage):
    """Events in order, without a hole between them.

    They are numbered through an epoch, from 1: this batch has the numbers in (seq - len(events), seq], and its
    predecessor's `seq` is `seq - len(events)`. After a `gap` that does not hold: events up to `seq` are lost, and
    only `event_snapshot()` lists the stored blocks.
    """

    epoch: str = Field(description="this life of the cache; the next one counts from 1 again, with nothing cached")
    seq: int = Field(ge=0, description="the number of the last event: continue after it")
    events: tuple[KVEvent, ...]
    gap: bool = Field(default=False, description="events were dropped before they were read: take a snapshot")


class KVEventSnapshot(PydanticMessage):
    """Every block stored after event `seq`, parents before children. The stream continues after `seq`."""

    epoch: str
    seq: int = Field(ge=0, description="the last event that this includes")
    events: tuple[BlockStored, ...]


# ---------------------------------------------------------------- slim events


class SlimEvent(NamedTuple):
    """One event of a slim batch.

    `PagesCleared` removes every page, stored or pending, and every end. `PagesRemoved` removes the ends at its pages,
    too. `LoadChanged` has no pages.
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
        loading_tokens: of unpublished_tokens, the tokens that are being loaded from a tier below the pool.
    """

    waiting_tokens: int = 0
    leased_tokens: int = 0
    unpublished_tokens: int = 0
    private_slots: int = 0
    loading_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SlimEventBatch(Answer):
    """Events in order, without a hole between them; numbered as the events of `KVEventBatch`.

    This batch has the numbers in (seq - len(kinds), seq]. A reader that has the first events already skips them. After
    a `gap` events up to `seq` are lost, and only `event_snapshot()` lists the pages.

    Attributes:
        epoch: this life of the cache.
        seq: the number of the last event.
        stride_tokens: the tokens of a stride.
        kinds: one byte an event, its place in `SLIM_EVENT_KINDS`.
        counts: int32, little-endian: the number of pages of each event.
        hashes: int64, little-endian: of the pages, event after event.
        load: of the cache after the last event.
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
        return tuple([SlimEvent(kind, tuple(np.frombuffer(data, "<i8").tolist())) for kind, data in self.split()])

    def split(self) -> Iterator[tuple[SlimEventKind, bytes]]:
        """Yield the kind of each event, and the hashes of its pages as bytes.

        `EndStored` without pages has the pages of the event before it. So has a full event of another group.
        """
        start, data = 0, b""
        for place, count in zip(self.kinds, self.page_counts.tolist(), strict=True):
            stop, kind = start + 8 * count, SLIM_EVENT_KINDS[place]
            if count or kind not in _REPEATABLE:
                data = self.hashes[start:stop]
            yield kind, data
            start = stop


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
        ends: as `stored`, of the pages at which a match may end; None: at every page that is stored.
    """

    epoch: str
    seq: int
    stride_tokens: int
    page_size: int
    bigram: bool
    stored: bytes = field(repr=False)
    pending: bytes = field(repr=False)
    load: CacheLoad
    ends: bytes | None = field(default=None, repr=False)

    @property
    def stored_hashes(self) -> NDArray[np.int64]:
        """The hashes of the stored pages, a read-only view."""
        return np.frombuffer(self.stored, "<i8")

    @property
    def pending_hashes(self) -> NDArray[np.int64]:
        """The hashes of the pending pages, a read-only view."""
        return np.frombuffer(self.pending, "<i8")

    @property
    def end_hashes(self) -> NDArray[np.int64] | None:
        """The hashes of the ends, a read-only view; None: a match may end at every page that is stored."""
        return None if self.ends is None else np.frombuffer(self.ends, "<i8")


# ---------------------------------------------------------------- the way to the readers


class BlockGroup(NamedTuple):
    """A kind of data of a cache, in vLLM's words."""

    kind: str  # "full_attention", "sliding_window", "mamba"
    sliding_window: int | None = None  # tokens


class Blocks(NamedTuple):
    """The part of full events that slim ones lack. An event without pages has all of these of the event before it.

    Attributes:
        medium: where the KV of all events is: "GPU", "CPU" or "STORAGE".
        parents: for each event `PagesStored` the hash of the page before its first one; None: none is before it.
        token_ids: for each the ids of all its pages, as in `TokenIds.data`.
        namespaces: for each its namespace.
        groups: the kinds of data of the cache; empty: it names none.
        group_of: one byte for each event of any kind, its place in `groups`; empty: there are none.
    """

    medium: str
    parents: tuple[int | None, ...]
    token_ids: tuple[bytes, ...]
    namespaces: tuple[str | None, ...]
    groups: tuple[BlockGroup, ...] = ()
    group_of: bytes = b""


@dataclass(frozen=True, slots=True)
class PackedEvents(Answer):
    """Batches that follow one another, each packed once for all readers. Empty: there is no later event.

    Attributes:
        batches: as `pack_batch` made them.
    """

    batches: tuple[bytes, ...] = field(repr=False)

    def unpack(self, after_seq: int | None = None) -> list[KVEventBatch | SlimEventBatch]:
        """Return the batches; full ones without the events up to number `after_seq`, which a reader has."""
        return [unpack_batch(packed, after_seq) for packed in self.batches]

    def snapshot(self) -> KVEventSnapshot:
        """Return the full snapshot that travels as batches of `BlockStored`, all of one number."""
        batches = self.unpack()
        stored = tuple([event for batch in batches for event in batch.events if isinstance(event, BlockStored)])
        return KVEventSnapshot(epoch=batches[0].epoch, seq=batches[0].seq, events=stored)


def pack_batch(batch: SlimEventBatch, blocks: Blocks | None = None) -> bytes:
    """Return a batch as bytes. With `blocks` it is one of full events."""
    *values, load, gap = batch._values()
    rows: tuple[Any, ...] | None = None
    if blocks is not None:
        groups = (tuple(map(tuple, blocks.groups)), blocks.group_of) if blocks.groups else ()
        rows = (*blocks[:4], *groups)
    return pickle.dumps((*values, tuple(load._values()), gap, rows), _PROTOCOL)


def unpack_batch(packed: bytes, after_seq: int | None = None) -> KVEventBatch | SlimEventBatch:
    """Return the batch of `pack_batch`, as `PackedEvents.unpack`. The cache made it, so that nothing is checked."""
    epoch, seq, stride_tokens, kinds, counts, hashes, load, gap, blocks = pickle.loads(packed)
    batch = SlimEventBatch(epoch, seq, stride_tokens, kinds, counts, hashes, CacheLoad(*load), gap)
    if blocks is None:
        return batch
    num_known = 0 if after_seq is None else max(0, after_seq - seq + len(kinds))
    return KVEventBatch(epoch=epoch, seq=seq, events=_full_events(batch, Blocks(*blocks))[num_known:], gap=gap)


def _full_events(batch: SlimEventBatch, blocks: Blocks) -> tuple[KVEvent, ...]:
    stored = zip(blocks.parents, blocks.token_ids, blocks.namespaces, strict=True)
    medium, block_size = blocks.medium, batch.stride_tokens
    groups = [BlockGroup(*group) for group in blocks.groups]
    parent, ids, namespace = None, b"", None
    events: list[KVEvent] = []
    for place, (kind, data) in enumerate(batch.split()):
        if kind == "PagesCleared":
            events.append(AllBlocksCleared())
            continue
        hashes, group = BlockHashes(data), blocks.group_of[place] if groups else None
        if kind == "PagesRemoved":
            events.append(BlockRemoved(block_hashes=hashes, medium=medium, group_idx=group))
            continue
        if batch.page_counts[place]:
            parent, ids, namespace = next(stored)
        events.append(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=parent,
                token_ids=TokenIds(ids, len(ids) // (len(hashes) * block_size)),
                block_size=block_size,
                medium=medium,
                namespace=namespace,
                group_idx=group,
                kv_cache_spec_kind=None if group is None else groups[group].kind,
                kv_cache_spec_sliding_window=None if group is None else groups[group].sliding_window,
            )
        )
    return tuple(events)


class NextEvents(PydanticMessage):
    """Ask for a tier's events after `after_seq`; the cache waits for one if there are none."""

    session_id: LeaseId
    epoch: str
    after_seq: int = Field(ge=0, strict=True)
    tier: TierName = DEVICE
    timeout_s: float = Field(ge=0, le=60, description="after this time the cache answers with an empty batch")


class EventSnapshotRequest(PydanticMessage):
    """Ask for a snapshot of every stored block of a tier."""

    tier: TierName = DEVICE
