"""One response per verb. In a batch, the `CacheError` of a failed request stands in place of its response."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from raydix.schemas.config import CacheConfig
from raydix.schemas.message import Answer, PydanticAnswer, quick_message
from raydix.schemas.tokens import TokenIds


class SessionResponse(PydanticAnswer):
    """A session is open. Its epoch goes into every later message."""

    epoch: str = Field(description="this life of the cache; a restarted cache has another")
    config: CacheConfig
    sees_process: bool = Field(default=False, description="the cache sees when the client's process ends")
    socket_address: str | None = Field(default=None, description="of the Unix socket for clients on its machine")


class MatchResponse(PydanticAnswer):
    """The outcome of a probe."""

    prefix_len: int = Field(description="leading tokens with KV that can be used now; a multiple of page_size")
    full_prefix_len: int = Field(description="the same for full-attention KV alone; never shorter")
    branching_len: int | None = Field(
        default=None,
        description="a length beyond prefix_len at which publishing a state or window would pay; else None",
    )
    host_len: int = Field(
        default=0,
        description="leading tokens with KV in the pool or in the host tier, at least prefix_len; 0: there is no host "
        "tier",
    )
    disk_len: int = Field(
        default=0,
        description="leading tokens with KV in the pool, in the host tier or on the disk, at least prefix_len and "
        "host_len; 0: there is no disk tier",
    )


@quick_message
class LeaseResponse(Answer):
    """A lease is granted. Its id, its prefix and its own slots of states are attributes of `Lease`.

    Attributes:
        num_slots: slots that the lease covers, one per token.
        page_starts: int32: first slots of the lease's runs of `CacheConfig.run_len`, in token order.
        swa_page_starts: int32: each page in the window pool; 0: gone.
        loaded_len: tokens of prefix_len that were loaded for this lease from the tiers below the pool.
        disk_loaded_len: of these, the tokens that were loaded from the disk.
    """

    lease_id: str
    prefix_len: int
    num_slots: int
    page_starts: bytes = field(repr=False)
    swa_page_starts: bytes = field(default=b"", repr=False)
    state_slot: int | None = None
    boundary_slot: int | None = None
    loaded_len: int = 0
    disk_loaded_len: int = 0


class AdoptResponse(PydanticAnswer):
    """A lease has a new owner."""

    lease: LeaseResponse
    tokens: TokenIds = Field(description="the ids of this request that the cache has received")
    published_len: int = Field(description="leading tokens that are in the tree")


class RevokeResponse(PydanticAnswer):
    """Whether this request ended an offered lease."""

    ended: bool = Field(description="False: it was adopted, revoked or expired before")


class WaitingResponse(PydanticAnswer):
    """The request waits for free slots, for a load, or until the disk has committed a retirement.

    A `WaitRequest` with its ticket returns the outcome.
    """

    ticket: int
    position: int = Field(description="requests before it in the queue; 0 if it does not wait for slots")
    loading_tokens: int = Field(default=0, description="tokens that its load, or that of another request, brings")


class ExtendResponse(PydanticAnswer):
    """More private slots."""

    num_slots: int = Field(description="slots the lease now covers")
    page_starts: bytes = Field(repr=False, description="int32: first slots of the runs that the client did not know")
    swa_page_starts: bytes = Field(default=b"", repr=False, description="int32: each page in the window pool; 0: gone")


@quick_message
class InsertResponse(Answer):
    """The outcome of publishing. The first four fields are for the caller, the others for its client.

    Attributes:
        prefix_len: leading tokens that were in the tree already.
        num_inserted: tokens that the tree took over.
        num_duplicates: private slots freed because the tree had their tokens.
        retired: the namespace was retired; nothing was published.
        repointed: int32: the lease's page starts after `known_len` tokens, as far as they may differ.
        swa_page_starts: int32: each page in the window pool; 0: gone.
        published_len: tokens of the lease that are in the tree.
    """

    prefix_len: int
    num_inserted: int
    num_duplicates: int
    retired: bool = False
    repointed: bytes = field(default=b"", repr=False)
    swa_page_starts: bytes = field(default=b"", repr=False)
    published_len: int = field(default=0, repr=False)


class WindowResponse(PydanticAnswer):
    """A lease's sliding-window pages after the request."""

    swa_page_starts: bytes = Field(default=b"", repr=False, description="int32: each page in the window pool; 0: gone")


class EvictResponse(PydanticAnswer):
    """The outcome of an eviction."""

    num_evicted: int = Field(description="tokens evicted: their slots are free now")


class PrefetchResponse(PydanticAnswer):
    """The outcome of a prefetch."""

    num_tokens: int = Field(description="tokens that are being loaded; 0: nothing is to be loaded, or there is no room")


class RetireResponse(PydanticAnswer):
    """The outcome of a retirement."""

    num_namespaces: int = Field(description="namespaces that held KV and can no longer be matched")


class Ack(PydanticAnswer):
    """The request took effect."""


@quick_message
class BatchResponse(Answer):
    """The responses to a batch, one per request and in its order; `CacheError`s stand for failures."""

    epoch: str
    responses: tuple[Any, ...]


class KVResponse(PydanticAnswer):
    """The KV of some slots: raw bytes of `[num_layers, n, num_kv_heads, dim]` in the pool's dtype, as uint8.

    `index` is the same of `[num_layers, n, index_head_dim]`; None for a pool without index keys.
    """

    k: NDArray[np.uint8]
    v: NDArray[np.uint8]
    index: NDArray[np.uint8] | None = None
