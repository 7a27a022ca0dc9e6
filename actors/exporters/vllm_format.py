"""KV events as vLLM sends them: msgpack of maps with a tag, in a batch that is an array.

The structs have the names, order and defaults of vLLM 0.32's. They end before the fields that a cache cannot fill:
these have defaults in vLLM's, and are not sent. `VllmBlockStored.cache_salt` is not vLLM's. Readers skip fields that
they do not know. Caches with a window or states name groups, as vLLM has since its #37688. Needs the extra `zmq`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import structs

from raydix.schemas import BlockRemoved, BlockStored, KVEvent
from raydix.schemas.engine_namespace import adapter_name
from raydix.schemas.namespace import frame_namespace, unframe_namespace

MAX_BATCH_EVENTS = 1_000
MAX_BATCH_TOKENS = 2**16  # 20 ms of encoding
MAX_PAYLOAD_BYTES = 2**15  # the size of an encoded batch, unless one block is larger
_UNSIGNED = 2**64 - 1
_DYNAMO_SALT = "dynamo-cache-salt:"  # Dynamo's engines put it before a salt, and its indexer takes it away


class VllmBlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """vLLM's `BlockStored`: consecutive blocks of one namespace."""

    block_hashes: list[int]  # unsigned 64-bit, as vLLM's
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None  # not vLLM's: Dynamo reads it


class VllmBlockRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    """vLLM's `BlockRemoved`."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class VllmAllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True, gc=False):
    """vLLM's `AllBlocksCleared`: every block of every namespace is gone."""


VllmEvent = VllmBlockStored | VllmBlockRemoved | VllmAllBlocksCleared


class VllmEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """vLLM's `KVEventBatch`."""

    ts: float  # seconds since 1970
    events: list[VllmEvent]
    data_parallel_rank: int | None = None


class VllmNamespace(NamedTuple):
    """A namespace in the fields that vLLM's format has for it.

    Attributes:
        first_keys: the extra keys of the first block of a sequence.
        later_keys: the extra keys of later blocks.
    """

    lora_name: str | None
    first_keys: tuple[str, ...] | None
    later_keys: tuple[str, ...] | None
    cache_salt: str | None


class VllmEncoder:
    """Makes vLLM's batches from a cache's events.

    Args:
        data_parallel_rank: in each batch.
        medium: in each event; None: the cache's events say it.
    """

    def __init__(self, data_parallel_rank: int, medium: str | None) -> None:
        self._rank = data_parallel_rank
        self._medium = medium
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, events: Iterable[KVEvent]) -> list[bytes]:
        """Return batches of events, in their order, with the present time: one, or several small ones."""
        return self._encode(time.time(), [self._converted(event) for event in events])

    def _encode(self, now_s: float, events: list[VllmEvent]) -> list[bytes]:
        payload = self._encoder.encode(VllmEventBatch(now_s, events, self._rank))
        halves = _halves(events) if len(payload) > MAX_PAYLOAD_BYTES else []
        return [part for half in halves for part in self._encode(now_s, half)] or [payload]

    def _converted(self, event: KVEvent) -> VllmEvent:
        match event:
            case BlockStored():
                return self._stored(event)
            case BlockRemoved():
                hashes = _unsigned(event.block_hashes.data)
                return VllmBlockRemoved(hashes, self._medium or event.medium, event.group_idx)
        return VllmAllBlocksCleared()

    def _stored(self, event: BlockStored) -> VllmBlockStored:
        hashes, parent = _unsigned(event.block_hashes.data), event.parent_block_hash
        namespace = vllm_namespace(event.namespace)
        first = namespace.first_keys if parent is None else namespace.later_keys
        keys = None if first is None else [first, *[namespace.later_keys] * (len(hashes) - 1)]
        return VllmBlockStored(
            block_hashes=hashes,
            parent_block_hash=None if parent is None else parent & _UNSIGNED,
            token_ids=event.token_ids.tolist(),
            block_size=event.block_size,
            lora_id=None,
            medium=self._medium or event.medium,
            lora_name=namespace.lora_name,
            extra_keys=keys,
            group_idx=event.group_idx,
            kv_cache_spec_kind=event.kv_cache_spec_kind,
            kv_cache_spec_sliding_window=event.kv_cache_spec_sliding_window,
            cache_salt=namespace.cache_salt,
        )


def _halves(events: list[VllmEvent]) -> list[list[VllmEvent]]:
    """Return events in two lists; empty: they are one block, or none."""
    middle = len(events) // 2
    if middle:
        return [events[:middle], events[middle:]]
    event = events[0] if events else None
    if isinstance(event, VllmAllBlocksCleared | None) or len(event.block_hashes) < 2:
        return []
    middle = len(event.block_hashes) // 2
    first, second = event.block_hashes[:middle], event.block_hashes[middle:]
    if isinstance(event, VllmBlockRemoved):
        return [[structs.replace(event, block_hashes=half)] for half in (first, second)]
    tokens, keys = event.token_ids, event.extra_keys
    num_tokens = middle * event.block_size
    return [
        [structs.replace(event, block_hashes=first, token_ids=tokens[:num_tokens], extra_keys=keys and keys[:middle])],
        [
            structs.replace(
                event,
                block_hashes=second,
                parent_block_hash=first[-1],
                token_ids=tokens[num_tokens:],
                extra_keys=keys and keys[middle:],
            )
        ],
    ]


def in_batches(events: Iterable[KVEvent]) -> Iterator[list[KVEvent]]:
    """Yield the events in lists of at most 1,000 events, which end with the event that reaches 65,536 tokens."""
    batch: list[KVEvent] = []
    num_tokens = 0
    for event in events:
        batch.append(event)
        num_tokens += len(event.token_ids) if isinstance(event, BlockStored) else 0
        if len(batch) == MAX_BATCH_EVENTS or num_tokens >= MAX_BATCH_TOKENS:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch


@lru_cache(maxsize=1024)
def vllm_namespace(namespace: str | None) -> VllmNamespace:
    """Return the fields for a namespace, as `frame_namespace` gives it.

    The keys have vLLM's order: the adapter's name, other inputs, the salt; after a sequence's first block the name
    alone. An `extra_key` has no field of its own. So it is a key of the first block, and `cache_salt` is the text that
    `frame_namespace` makes of it and of the salt.
    """
    if namespace is None:
        return VllmNamespace(None, None, None, None)
    extra_key, lora_id, cache_salt = unframe_namespace(namespace)
    name = None if lora_id is None else adapter_name(lora_id)
    first = tuple(part for part in (name, extra_key, cache_salt) if part is not None)
    salt = None if cache_salt is None else cache_salt.removeprefix(_DYNAMO_SALT)
    if extra_key is not None:
        salt = frame_namespace(extra_key, None, cache_salt)
    return VllmNamespace(name, first, None if name is None else (name,), salt)


def _unsigned(hashes: bytes) -> list[int]:
    """Return packed 64-bit hashes as unsigned integers."""
    values: list[int] = np.frombuffer(hashes, "<u8").tolist()
    return values
