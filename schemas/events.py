"""KV events: a cache publishes the blocks that it stores and removes.

A block is a page. Names, order and meaning of the fields are those of vLLM's events, so that routers which read vLLM's
can read them: `event.model_dump()` is the map that vLLM sends. Hashes are the first 64 bits, signed, of the chained
SHA-256 of the page, as `hash_to_int64` gives them. Every event belongs to one namespace; hashes of
different namespaces differ.

Events are about full-attention KV: a block stays stored when its window KV or its state is evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, GetCoreSchemaHandler, model_serializer
from pydantic_core import CoreSchema, core_schema

from raydix.schemas.message import PydanticMessage
from raydix.schemas.namespace import unframe_namespace
from raydix.schemas.requests import LeaseId
from raydix.schemas.tokens import TokenIds


class BlockHashes(Sequence[int]):
    """Signed 64-bit hashes. Reads like a tuple of integers, and is sent as 8 bytes each."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data  # little-endian int64

    @classmethod
    def pack(cls, hashes: BlockHashes | NDArray[np.int64] | Iterable[int]) -> BlockHashes:
        """Pack integers in [-2**63, 2**63).

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
    parent_block_hash: int | None = Field(description="of the block before the first of these; None: none is before it")
    token_ids: TokenIds = Field(description="one per token; where keys are pairs of tokens, the first of each pair")
    block_size: int = Field(gt=0, description="tokens of a block")
    medium: str = Field(description='where the KV is: "GPU" or "CPU"')
    namespace: str | None = Field(default=None, description="as `frame_namespace` gives it; None: the default one")

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
        }


class BlockRemoved(PydanticMessage):
    """Blocks of one namespace were removed."""

    block_hashes: BlockHashes
    medium: str = Field(description='where the KV was: "GPU" or "CPU"')

    @model_serializer
    def _as_vllm(self) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": self.block_hashes.tolist(), "medium": self.medium}


class AllBlocksCleared(PydanticMessage):
    """Every block of every namespace was removed."""

    @model_serializer
    def _as_vllm(self) -> dict[str, Any]:
        return {"type": "AllBlocksCleared"}


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(PydanticMessage):
    """Events in order, without a hole between them.

    They are numbered through an epoch, from 1: this batch's are those in (seq - len(events), seq], and its
    predecessor's `seq` is `seq - len(events)`. After a `gap` that does not hold: events up to `seq` are lost, and
    only `event_snapshot()` lists the stored blocks.
    """

    epoch: str = Field(description="this life of the cache; the next one counts from 1 again, with nothing cached")
    seq: int = Field(ge=0, description="the number of the last of these events: continue after it")
    events: tuple[KVEvent, ...]
    gap: bool = Field(default=False, description="events were dropped before they were read: take a snapshot")


class KVEventSnapshot(PydanticMessage):
    """Every block stored after event `seq`, parents before children. The stream continues after `seq`."""

    epoch: str
    seq: int = Field(ge=0, description="the last event that this includes")
    events: tuple[BlockStored, ...]


class NextEvents(PydanticMessage):
    """Ask for the events after `after_seq`; the cache waits for one if there are none."""

    session_id: LeaseId
    epoch: str
    after_seq: int = Field(ge=0, strict=True)
    timeout_s: float = Field(ge=0, le=60, description="after this time the cache answers with an empty batch")


class EventSnapshotRequest(PydanticMessage):
    """Ask for a snapshot of every stored block."""
