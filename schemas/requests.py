"""One request per verb. A client makes and checks them; batches carry them to the cache in order."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import InitErrorDetails

from raydix.schemas.fingerprint import LoraId
from raydix.schemas.message import MAX_COUNT, Count, Message, PydanticMessage, apply_rule, quick_message
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
OfferSeconds = Annotated[float | None, Field(gt=0, allow_inf_nan=False)]


MAX_OWNER = 256  # characters
MAX_BOUND = 256  # `lora_id`s that a client lists when it opens another session
MAX_PRIORITY = 2**31  # the first that is too high; the lowest is its negative
MAX_REQUESTS = 1024  # the requests of a batch: the cache's loop serves no other client meanwhile


def _encodable(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError("it must be valid Unicode text") from None
    return name


def _framed(namespace: str) -> str:
    try:
        unframe_namespace(namespace)
    except ValueError:
        raise ValueError("must be a namespace that frame_namespace returns") from None
    return namespace


Framed = Annotated[str, AfterValidator(_framed)]
Namespace = Annotated[Framed | None, Field(description="framed by `frame_namespace`; None: the default namespace")]
Priority = Annotated[
    int, Field(ge=-MAX_PRIORITY, lt=MAX_PRIORITY, strict=True, description="KV used by higher ones stays longer")
]
TimeoutSeconds = Annotated[float | None, Field(ge=0, allow_inf_nan=False)]
Place = Annotated[int, Field(ge=0, strict=True)]
MAX_TIER = 16  # characters
TierName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_TIER,
        description='"device": the pool; "host": the tier in host memory; "disk": the tier on a local disk',
    ),
]
DEVICE: TierName = "device"
HOST: TierName = "host"


class OpenSession(PydanticMessage):
    """Open a session, which owns the leases that a client takes."""

    session_id: LeaseId
    owner: Annotated[str, Field(max_length=MAX_OWNER), AfterValidator(_encodable)] = Field(
        description="the name of the client in statistics and errors"
    )
    config_digest: str | None = Field(default=None, description="the cache must have this configuration; None: any")
    replaces: LeaseId | None = Field(default=None, description="an earlier session of this client, which ends")
    liveness_path: str | None = Field(default=None, description="a file that the client's process has open, and its id")
    bound: tuple[LoraId | None, ...] = Field(
        default=(), max_length=MAX_BOUND, description="the `lora_id`s that this client bound before, the latest last"
    )
    bound_more: bool = Field(default=False, description="the client had bound more of them")


class CloseSession(PydanticMessage):
    """End a session and abort every lease it still holds."""

    session_id: LeaseId


class SessionRef(PydanticMessage):
    """Names an open session, for a heartbeat."""

    session_id: LeaseId
    epoch: str


class MatchRequest(PydanticMessage):
    """Ask how much of `tokens` is cached. A probe: nothing is locked, no recency changes."""

    token_field: ClassVar[str | None] = "tokens"
    traced_as: ClassVar[str | None] = "match"

    tokens: Tokens
    namespace: Namespace = None


class LockRequest(PydanticMessage):
    """Match and lock in one step; only a load gets slots. `lease_id` is the client's, so a retry is harmless.

    The fields behind the namespace are arguments of `PrefixCacheClient.lock`; `offer_id` names the offer.
    """

    takes_slots: ClassVar[bool] = True
    token_field: ClassVar[str | None] = "tokens"
    traced_as: ClassVar[str | None] = "lock"

    lease_id: LeaseId
    tokens: Tokens
    namespace: Namespace = None
    priority: Priority = 0
    offer_id: OfferId | None = None
    offer_s: OfferSeconds = None
    timeout_s: TimeoutSeconds = 0.0
    load: bool = True
    load_timeout_s: TimeoutSeconds = None


@quick_message
class AcquireRequest(Message):
    """Match, lock, and allocate slots for the uncached `tokens` and `new_tokens` more, in one step.

    The tokens, and the fields behind the namespace, are arguments of `PrefixCacheClient.acquire`.

    Attributes:
        lease_id: the client's name for the lease, so that a retry is harmless.
        namespace: framed by `frame_namespace`; None: the default namespace.
    """

    takes_slots: ClassVar[bool] = True
    token_field: ClassVar[str | None] = "tokens"
    traced_as: ClassVar[str | None] = "acquire"

    lease_id: LeaseId
    tokens: Tokens
    namespace: Namespace = None
    new_tokens: Count = 0
    max_prefix_len: Count | None = None
    priority: Priority = 0
    timeout_s: TimeoutSeconds = None
    resumed: bool = False
    boundary_state: bool = False
    load: bool = True
    load_timeout_s: TimeoutSeconds = None

    def check(self) -> None:
        """Apply the rules of the fields. Values that most requests have are compared here, which takes less time."""
        tokens = self.tokens
        if type(self.lease_id) is not str or not 0 < len(self.lease_id) <= MAX_LEASE_ID:
            apply_rule(self, "lease_id")
        if (
            type(tokens) is not TokenIds
            or tokens.width != 4
            or type(tokens.data) is not bytes
            or len(tokens.data) % 4
            or not tokens.data
        ):
            apply_rule(self, "tokens")
        if self.namespace is not None:
            apply_rule(self, "namespace")
        if type(self.new_tokens) is not int or not 0 <= self.new_tokens <= MAX_COUNT:
            apply_rule(self, "new_tokens")
        if self.max_prefix_len is not None:
            apply_rule(self, "max_prefix_len")
        if type(self.priority) is not int or not -MAX_PRIORITY <= self.priority < MAX_PRIORITY:
            apply_rule(self, "priority")
        if self.timeout_s is not None:
            apply_rule(self, "timeout_s")
        if not type(self.resumed) is type(self.boundary_state) is bool:
            apply_rule(self, "resumed")
            apply_rule(self, "boundary_state")
        if type(self.load) is not bool:
            apply_rule(self, "load")
        if self.load_timeout_s is not None:
            apply_rule(self, "load_timeout_s")

    __post_init__ = check  # type: ignore[misc]  # every message is checked


class WaitRequest(PydanticMessage):
    """Wait until the acquire or extend queued under `ticket` is served, or its time runs out."""

    session_id: LeaseId
    epoch: str
    ticket: int


@quick_message
class InsertRequest(Message):
    """Publish the first `num_tokens` tokens of a lease, whole pages of them. Other fields are as in `Lease.insert`.

    Attributes:
        lease_id: the lease.
        num_tokens: at least 1.
        suffix: the ids that the cache has not seen: it knows the first `num_tokens - len(suffix)`.
        known_len: tokens that the client knows to be published already.
    """

    token_field: ClassVar[str | None] = "suffix"
    traced_as: ClassVar[str | None] = "insert"

    lease_id: LeaseId
    num_tokens: Annotated[int, Field(gt=0, strict=True)]
    suffix: TokenIds
    release: bool = False
    publish_state: bool = False
    known_len: Count = 0
    boundary_len: Count | None = None

    def check(self) -> None:
        """As `AcquireRequest.check`."""
        ids = self.suffix
        if type(self.lease_id) is not str or not 0 < len(self.lease_id) <= MAX_LEASE_ID:
            apply_rule(self, "lease_id")
        if type(self.num_tokens) is not int or self.num_tokens <= 0:
            apply_rule(self, "num_tokens")
        if type(ids) is not TokenIds or ids.width != 4 or type(ids.data) is not bytes or len(ids.data) % 4:
            apply_rule(self, "suffix")
        if not type(self.release) is type(self.publish_state) is bool:
            apply_rule(self, "release")
            apply_rule(self, "publish_state")
        if type(self.known_len) is not int or not 0 <= self.known_len <= MAX_COUNT:
            apply_rule(self, "known_len")
        if self.boundary_len is not None:
            apply_rule(self, "boundary_len")

    __post_init__ = check  # type: ignore[misc]  # every message is checked


class ExtendRequest(PydanticMessage):
    """Allocate more private slots for a lease. It names the total, so a retry is harmless."""

    takes_slots: ClassVar[bool] = True
    traced_as: ClassVar[str | None] = "extend"

    lease_id: LeaseId
    num_slots: Count = Field(gt=0, description="slots that the lease must cover afterwards")
    known_pages: int = Field(ge=0, description="pages of the lease that the client knows already")
    timeout_s: TimeoutSeconds = None


class ReleaseWindowRequest(PydanticMessage):
    """Free a lease's sliding-window KV before token `up_to`, except the KV that publishing still needs."""

    lease_id: LeaseId
    up_to: Count


class WithdrawRequest(PydanticMessage):
    """Remove a lease's extend from the wait queue: its caller was cancelled. The lease stays as it is."""

    is_always_queued: ClassVar[bool] = True

    lease_id: LeaseId


class ReleaseRequest(PydanticMessage):
    """End a lease: private slots are freed, published pages stay. No effect on a lease that has ended."""

    is_always_queued: ClassVar[bool] = True
    traced_as: ClassVar[str | None] = "release"

    lease_id: LeaseId


class AbortRequest(PydanticMessage):
    """End a lease, or remove it from the wait queue. As a release, but counted apart."""

    is_always_queued: ClassVar[bool] = True
    traced_as: ClassVar[str | None] = "abort"

    lease_id: LeaseId


class GrantRequest(PydanticMessage):
    """Offer a lease to another session. Until it is adopted this session holds it; it ends if the offer expires."""

    lease_id: LeaseId
    offer_id: OfferId
    timeout_s: OfferSeconds = Field(default=None, description="how long the offer is valid; None: as configured")


class RevokeRequest(PydanticMessage):
    """End a lease that this session offers, unless it was adopted or has ended."""

    lease_id: LeaseId
    offer_id: OfferId


class TakeBackRequest(PydanticMessage):
    """End an offer of this session, not its lease. No effect on an offer that has ended."""

    is_always_queued: ClassVar[bool] = True

    lease_id: LeaseId
    offer_id: OfferId


class AdoptRequest(PydanticMessage):
    """Take over a lease that another session offers: from then on this session holds it."""

    lease_id: LeaseId
    granter: LeaseId = Field(description="the session that offers it")
    granted_epoch: str = Field(description="the life of the cache in which it was offered")
    offer_id: OfferId


class EvictRequest(PydanticMessage):
    """Evict the KV of at least `num_tokens` tokens from a tier, or all its unlocked KV if there is less."""

    num_tokens: Count
    tier: TierName = DEVICE


class PrefetchRequest(PydanticMessage):
    """Load into the pool the part of the prefix of `tokens` that the tiers below have, for no lease."""

    token_field: ClassVar[str | None] = "tokens"

    tokens: Tokens
    namespace: Namespace = None


class ResetRequest(PydanticMessage):
    """Make all cached KV unmatchable and free it; open leases keep their slots until they end."""


class RetireRequest(PydanticMessage):
    """Make every namespace unmatchable that matches all fields given; None matches any, so name at least one."""

    extra_key: str | None = None
    lora_id: str | None = None
    cache_salt: str | None = None


class StatsRequest(PydanticMessage):
    """Ask for a snapshot of the cache's counts."""


class CheckInvariantsRequest(PydanticMessage):
    """Check every invariant of the cache. Takes time proportional to the size of the whole cache."""


@quick_message
class Batch(Message):
    """Requests of one session, executed in order; one that fails does not hinder the others.

    Batches of a session are executed in the order of `seq`, in whatever order they arrive. A batch that arrives after a
    later one was executed, or with more than `MAX_REQUESTS` requests, is refused as a whole.

    Attributes:
        session_id: the session.
        epoch: the life of the cache in which the session was opened.
        requests: any messages.
        seq: place among the session's batches, from 1; 0: in no order.
        after: the batch that must be executed before this one; 0: none.
    """

    session_id: LeaseId
    epoch: str
    requests: Annotated[tuple[Message, ...], Field(max_length=MAX_REQUESTS)]
    seq: Place = 0
    after: Place = 0

    def check(self) -> None:
        """As `AcquireRequest.check`."""
        if type(self.session_id) is not str or not 0 < len(self.session_id) <= MAX_LEASE_ID:
            apply_rule(self, "session_id")
        if type(self.epoch) is not str:
            apply_rule(self, "epoch")
        if type(self.requests) is not tuple or len(self.requests) > MAX_REQUESTS:
            apply_rule(self, "requests")
        for request in self.requests:
            if not isinstance(request, Message):
                apply_rule(self, "requests")
        if not type(self.seq) is type(self.after) is int or self.seq < 0 or self.after < 0:
            apply_rule(self, "seq")
            apply_rule(self, "after")
        if self.after >= max(self.seq, 1):
            error = ValueError(f"batch {self.seq} cannot wait for batch {self.after}")
            detail = InitErrorDetails(type="value_error", input=self, ctx={"error": error})
            raise ValidationError.from_exception_data("Batch", [detail], hide_input=True)

    __post_init__ = check  # type: ignore[misc]  # every message is checked


class ReadKV(PydanticMessage):
    """Copy the KV of `slots`, which the lease covers, out of the pool."""

    session_id: LeaseId
    epoch: str
    lease_id: LeaseId
    slots: NDArray[np.int64]


class WriteKV(PydanticMessage):
    """Copy KV into `slots`, which the lease holds privately.

    `k` and `v` are the raw bytes of `[num_layers, len(slots), num_kv_heads, dim]` in the pool's dtype, as uint8, so
    that pickle sends them out of band whatever the dtype. `index` is the same of `[num_layers, len(slots),
    index_head_dim]`; None for a pool without index keys.
    """

    session_id: LeaseId
    epoch: str
    lease_id: LeaseId
    slots: NDArray[np.int64]
    k: NDArray[np.uint8]
    v: NDArray[np.uint8]
    index: NDArray[np.uint8] | None = None
