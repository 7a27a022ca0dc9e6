"""One request per verb. A client makes and validates them; batches carry them to the cache in order."""

from __future__ import annotations

from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, model_validator

from raydix.schemas.counts import MAX_COUNT, Count
from raydix.schemas.fingerprint import LoraId
from raydix.schemas.message import Message, assemble, validated
from raydix.schemas.namespace import unframe_namespace
from raydix.schemas.tokens import TokenIds


def _not_empty(tokens: TokenIds) -> TokenIds:
    if not tokens.data:
        raise ValueError("at least one token id is needed")
    return tokens


Tokens = Annotated[TokenIds, AfterValidator(_not_empty)]
MAX_LEASE_ID = 128  # characters
LeaseId = Annotated[str, Field(min_length=1, max_length=MAX_LEASE_ID)]
OfferId = Annotated[LeaseId, Field(description="unique among the offers of all sessions")]


MAX_OWNER = 256  # characters
MAX_BOUND = 256  # `lora_id`s that a client tells of when it comes back
MAX_REQUESTS = 1024  # of a batch: the cache's loop serves no other client meanwhile


def _encodable(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError("it holds what is no character, so that it cannot be shown") from None
    return name


def _framed(namespace: str) -> str:
    try:
        unframe_namespace(namespace)
    except ValueError:
        raise ValueError("not a namespace that frame_namespace gives") from None
    return namespace


Framed = Annotated[str, AfterValidator(_framed)]
Namespace = Annotated[Framed | None, Field(description="framed by `frame_namespace`; None: the default namespace")]
Priority = Annotated[
    int, Field(ge=-(2**31), lt=2**31, strict=True, description="what is used by higher ones stays longer")
]
TimeoutSeconds = Annotated[float | None, Field(ge=0, allow_inf_nan=False)]


class OpenSession(Message):
    """Begin a session: the owner of the leases that a client will take."""

    session_id: LeaseId
    owner: Annotated[str, Field(max_length=MAX_OWNER), AfterValidator(_encodable)] = Field(
        description="who it is, for people: shown in statistics and errors"
    )
    config_digest: str | None = Field(default=None, description="refuse a cache with another configuration")
    replaces: LeaseId | None = Field(default=None, description="an earlier session of this client, which it gives up")
    liveness_path: str | None = Field(default=None, description="a file that the client's process locks, and its id")
    bound: tuple[LoraId | None, ...] = Field(
        default=(), max_length=MAX_BOUND, description="the `lora_id`s that this client bound before, the latest last"
    )
    bound_more: bool = Field(default=False, description="there were more of them")


class CloseSession(Message):
    """End a session and abort every lease it still holds."""

    session_id: LeaseId


class SessionRef(Message):
    """Names an open session: a sign of life, or a wait for its end."""

    session_id: LeaseId
    epoch: str


class MatchRequest(Message):
    """How much of `tokens` is cached. A probe: nothing is held, no recency changes."""

    tokens: Tokens
    namespace: Namespace = None


class LockRequest(Message):
    """Match and lock in one step, without allocating. `lease_id` is the client's, so a retry is harmless."""

    lease_id: LeaseId
    tokens: Tokens
    namespace: Namespace = None
    priority: Priority = 0


class AcquireRequest(Message):
    """Match, lock, and allocate slots for the rest of `tokens` and `new_tokens` more, in one step."""

    lease_id: LeaseId
    tokens: Tokens
    namespace: Namespace = None
    new_tokens: Count = Field(default=0, description="slots beyond those for `tokens`")
    max_prefix_len: Count | None = Field(default=None, description="match at most so many tokens")
    priority: Priority = 0
    timeout_s: TimeoutSeconds = Field(default=None, description="wait for room so long; None: as configured")

    @classmethod
    def of(
        cls,
        lease_id: Any,
        tokens: Any,
        namespace: Any,
        new_tokens: Any,
        max_prefix_len: Any,
        priority: Any,
        timeout_s: Any,
    ) -> AcquireRequest:
        """What `validated` makes of the same, without asking the validator for what most requests are.

        Raises:
            ValidationError: the constructor's.
        """
        fields = {
            "lease_id": lease_id,
            "tokens": tokens,
            "namespace": namespace,
            "new_tokens": new_tokens,
            "max_prefix_len": max_prefix_len,
            "priority": priority,
            "timeout_s": timeout_s,
        }
        if (
            type(lease_id) is str
            and 0 < len(lease_id) <= MAX_LEASE_ID
            and type(tokens) is TokenIds
            and tokens.width == 4
            and type(tokens.data) is bytes
            and len(tokens.data) % 4 == 0 < len(tokens.data)
            and type(new_tokens) is int
            and 0 <= new_tokens <= MAX_COUNT
            and type(priority) is int
            and -(2**31) <= priority < 2**31
            and namespace is max_prefix_len is timeout_s is None
        ):
            return assemble(AcquireRequest, fields)
        return validated(AcquireRequest, fields)


class WaitRequest(Message):
    """Wait until the acquire or extend that was put in line under `ticket` is served, or its time runs out."""

    session_id: LeaseId
    epoch: str
    ticket: int


class InsertRequest(Message):
    """Publish the first `num_tokens` tokens of a lease, whole pages of them.

    `suffix` holds only the ids that the cache has not seen: those after the `num_tokens - len(suffix)` it knows.
    """

    lease_id: LeaseId
    num_tokens: int = Field(gt=0, strict=True)
    suffix: TokenIds
    release: bool = Field(default=False, description="end the lease in the same step")
    publish_state: bool = Field(default=False, description="publish the lease's state as the one after these tokens")
    known_len: Count = Field(default=0, description="tokens that the client knows to be published already")

    @classmethod
    def of(
        cls, lease_id: Any, num_tokens: Any, suffix: Any, release: Any, publish_state: Any, known_len: Any
    ) -> InsertRequest:
        """As `AcquireRequest.of`."""
        fields = {
            "lease_id": lease_id,
            "num_tokens": num_tokens,
            "suffix": suffix,
            "release": release,
            "publish_state": publish_state,
            "known_len": known_len,
        }
        if (
            type(lease_id) is str
            and 0 < len(lease_id) <= MAX_LEASE_ID
            and type(num_tokens) is int
            and num_tokens > 0
            and type(suffix) is TokenIds
            and suffix.width == 4
            and type(suffix.data) is bytes
            and len(suffix.data) % 4 == 0
            and type(release) is type(publish_state) is bool
            and type(known_len) is int
            and 0 <= known_len <= MAX_COUNT
        ):
            return assemble(InsertRequest, fields)
        return validated(InsertRequest, fields)


class ExtendRequest(Message):
    """More private slots for a lease. It names the total, so a retry is harmless."""

    lease_id: LeaseId
    num_slots: Count = Field(gt=0, description="slots the lease is to cover")
    known_pages: int = Field(ge=0, description="pages of the lease that the client knows already")
    timeout_s: TimeoutSeconds = None


class ReleaseWindowRequest(Message):
    """Free a lease's sliding-window KV before token `up_to`, but for what publishing still needs."""

    lease_id: LeaseId
    up_to: Count


class WithdrawRequest(Message):
    """Take a lease's extend out of line: its caller is gone. The lease stays as it is."""

    lease_id: LeaseId


class ReleaseRequest(Message):
    """End a lease: private slots are freed, what was inserted stays. No effect on one that has ended."""

    lease_id: LeaseId


class AbortRequest(Message):
    """End a lease or withdraw it while it waits. The same as a release, kept apart for the statistics."""

    lease_id: LeaseId


class GrantRequest(Message):
    """Offer a lease to another session. It stays this session's until it is adopted, and ends if it is not in time."""

    lease_id: LeaseId
    offer_id: OfferId
    timeout_s: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = Field(
        default=None, description="how long the offer stands; None: as configured"
    )


class RevokeRequest(Message):
    """End a lease that this session offers, unless it was adopted or has ended."""

    lease_id: LeaseId
    offer_id: OfferId


class TakeBackRequest(Message):
    """End an offer of this session, not its lease. No effect on an offer that has ended."""

    lease_id: LeaseId
    offer_id: OfferId


class AdoptRequest(Message):
    """Take over a lease that another session offers: from then on it is this session's."""

    lease_id: LeaseId
    granter: LeaseId = Field(description="the session that offers it")
    granted_epoch: str = Field(description="the life of the cache in which it was offered")
    offer_id: OfferId


class EvictRequest(Message):
    """Evict at least `num_tokens` tokens' KV, or all that nobody holds."""

    num_tokens: Count


class ResetRequest(Message):
    """Make everything cached unmatchable and free it; running leases keep their slots to the end."""


class RetireRequest(Message):
    """Make every namespace unmatchable that matches all fields given; None matches any, so at least one is given."""

    extra_key: str | None = None
    lora_id: str | None = None
    cache_salt: str | None = None


class StatsRequest(Message):
    """A snapshot of the cache's counts."""


class CheckInvariantsRequest(Message):
    """Walk the whole cache and verify every rule it keeps. O(everything)."""


class Batch(Message):
    """Requests of one session, executed in order; one that fails does not hinder the others.

    Batches of a session are executed in the order of `seq`, in whatever order they arrive. One with more than
    `MAX_REQUESTS` requests is refused as a whole.
    """

    session_id: LeaseId
    epoch: str
    requests: tuple[Message, ...] = Field(max_length=MAX_REQUESTS)
    seq: int = Field(default=0, ge=0, strict=True, description="place among the session's batches; 0: in no order")
    after: int = Field(default=0, ge=0, strict=True, description="the last batch that must be executed before; 0: none")

    @classmethod
    def of(cls, session_id: Any, epoch: Any, requests: Any, seq: Any, after: Any) -> Batch:
        """As `AcquireRequest.of`."""
        fields = {"session_id": session_id, "epoch": epoch, "requests": requests, "seq": seq, "after": after}
        if (
            type(session_id) is str
            and 0 < len(session_id) <= MAX_LEASE_ID
            and type(epoch) is str
            and type(seq) is type(after) is int
            and 0 <= after < seq
            and type(requests) is tuple
            and len(requests) <= MAX_REQUESTS
            and all([Message in type(each).__mro__ for each in requests])  # noqa: C419 -- isinstance would call pydantic
        ):
            return assemble(Batch, fields)
        return validated(Batch, fields)

    @model_validator(mode="after")
    def _comes_after_an_earlier_one(self) -> Self:
        if self.after >= max(self.seq, 1):
            raise ValueError(f"batch {self.seq} cannot wait for batch {self.after}")
        return self


class ReadKV(Message):
    """Copy the KV of `slots`, which the lease covers, out of the pool."""

    session_id: LeaseId
    epoch: str
    lease_id: LeaseId
    slots: NDArray[np.int64]


class WriteKV(Message):
    """Copy KV into `slots`, which the lease holds privately.

    `k` and `v` are the raw bytes of `[num_layers, len(slots), num_kv_heads, dim]` in the pool's dtype, as uint8, so
    that they travel out of band whatever the dtype.
    """

    session_id: LeaseId
    epoch: str
    lease_id: LeaseId
    slots: NDArray[np.int64]
    k: NDArray[np.uint8]
    v: NDArray[np.uint8]
