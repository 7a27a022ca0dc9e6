"""One response per verb. Where a batch carries them, a failed request's place holds its `CacheError` instead."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from raydix.schemas.config import CacheConfig
from raydix.schemas.message import Answer, assemble
from raydix.schemas.tokens import TokenIds


class SessionResponse(Answer):
    """A session is open. Its epoch goes into every later message."""

    epoch: str = Field(description="this life of the cache; a restarted cache has another")
    config: CacheConfig
    channel: str | None = Field(default=None, description="where the cache listens for clients on its machine")


class MatchResponse(Answer):
    """What a probe found."""

    prefix_len: int = Field(description="leading tokens whose KV can be used now; a multiple of page_size")
    full_prefix_len: int = Field(description="the same for full-attention KV alone; never shorter")
    branching_len: int | None = Field(
        default=None,
        description="where a state or window would be worth publishing, beyond prefix_len; else None",
    )


class LeaseResponse(Answer):
    """A lease is granted."""

    lease_id: str
    prefix_len: int = Field(description="leading tokens whose KV is there; a multiple of page_size")
    num_slots: int = Field(description="slots the lease covers, one per token")
    page_starts: bytes = Field(
        repr=False,
        description="int32: first slots of the lease's runs of `CacheConfig.run_len`, in token order",
    )
    swa_page_starts: bytes = Field(default=b"", repr=False, description="int32: each page in the window pool; 0: gone")
    state_slot: int | None = Field(default=None, description="the lease's own recurrent state")

    @classmethod
    def of(
        cls,
        lease_id: str,
        prefix_len: int,
        num_slots: int,
        page_starts: bytes,
        swa_page_starts: bytes,
        state_slot: int | None,
    ) -> LeaseResponse:
        """What the constructor makes of the same, taken as it is."""
        fields = {
            "lease_id": lease_id,
            "prefix_len": prefix_len,
            "num_slots": num_slots,
            "page_starts": page_starts,
            "swa_page_starts": swa_page_starts,
            "state_slot": state_slot,
        }
        return assemble(LeaseResponse, fields)


class AdoptResponse(Answer):
    """A lease has a new owner."""

    lease: LeaseResponse
    tokens: TokenIds = Field(description="the ids that the cache has been sent of this request")
    published_len: int = Field(description="leading tokens that are in the tree")


class RevokeResponse(Answer):
    """Whether a lease that was offered has ended by this request."""

    ended: bool = Field(description="False: it was adopted, revoked or expired before")


class WaitingResponse(Answer):
    """There is no room now; the request stands in line. A `WaitRequest` with its ticket brings the outcome."""

    ticket: int
    position: int = Field(description="how many wait before it")


class ExtendResponse(Answer):
    """More private slots."""

    num_slots: int = Field(description="slots the lease now covers")
    page_starts: bytes = Field(repr=False, description="int32: first slots of the runs beyond those the client knew")
    swa_page_starts: bytes = Field(default=b"", repr=False, description="int32: each page in the window pool; 0: gone")


class InsertResponse(Answer):
    """What publishing did. The first four fields are for the caller, the others for its client: how things are now."""

    prefix_len: int = Field(description="leading tokens that were in the tree already")
    num_inserted: int = Field(description="tokens the tree took over")
    num_duplicates: int = Field(description="private slots freed because the tree had their tokens")
    retired: bool = Field(default=False, description="the namespace was retired; nothing was published")
    repointed: bytes = Field(
        default=b"",
        repr=False,
        description="int32: page starts after `known_len` tokens, as far as they may differ",
    )
    swa_page_starts: bytes = Field(default=b"", repr=False, description="int32: each page in the window pool; 0: gone")
    published_len: int = Field(default=0, repr=False, description="tokens of the lease that are in the tree")

    @classmethod
    def of(
        cls,
        prefix_len: int,
        num_inserted: int,
        num_duplicates: int,
        retired: bool,
        repointed: bytes,
        swa_page_starts: bytes,
        published_len: int,
    ) -> InsertResponse:
        """What the constructor makes of the same, taken as it is."""
        fields = {
            "prefix_len": prefix_len,
            "num_inserted": num_inserted,
            "num_duplicates": num_duplicates,
            "retired": retired,
            "repointed": repointed,
            "swa_page_starts": swa_page_starts,
            "published_len": published_len,
        }
        return assemble(InsertResponse, fields)


class WindowResponse(Answer):
    """A lease's sliding-window KV as it is now."""

    swa_page_starts: bytes = Field(default=b"", repr=False, description="int32: each page in the window pool; 0: gone")


class EvictResponse(Answer):
    """What an eviction freed."""

    num_evicted: int = Field(description="tokens whose slots are free now")


class RetireResponse(Answer):
    """What a retirement did."""

    num_namespaces: int = Field(description="namespaces that held something, and can no longer be matched")


class Ack(Answer):
    """Done, with nothing to tell."""


class BatchResponse(Answer):
    """The responses to a batch, one per request and in its order; `CacheError`s stand for failures."""

    epoch: str
    responses: tuple[Any, ...]


class KVResponse(Answer):
    """The KV of some slots: raw bytes of `[num_layers, n, num_kv_heads, dim]` in the pool's dtype, as uint8."""

    k: NDArray[np.uint8]
    v: NDArray[np.uint8]
