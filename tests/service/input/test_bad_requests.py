"""Malformed requests sent by hand: the sender gets a typed error, and the cache stays unchanged.

Every row is sent to a cache in process and to an actor; the fixture `scene` checks that nothing has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.caches.cache_under_test import CacheUnderTest, Pages
from support.caches.raw_calls import Scene, Wire, forged

from raydix.schemas import (
    AbortRequest,
    Ack,
    AcquireRequest,
    AdoptRequest,
    BindModelRequest,
    CacheError,
    CloseSession,
    EvictRequest,
    ExplainRequest,
    ExtendRequest,
    GrantRequest,
    InsertRequest,
    InvalidRequest,
    LeaseResponse,
    LockRequest,
    MatchRequest,
    MatchResponse,
    Message,
    ModelFingerprint,
    PoolExhausted,
    PrefetchRequest,
    ReleaseRequest,
    ReleaseWindowRequest,
    RetireRequest,
    RevokeRequest,
    SetWeightsRequest,
    StaleEpoch,
    TakeBackRequest,
    TokenIds,
    UnknownLease,
    WithdrawRequest,
)

FINGERPRINT = ModelFingerprint(fields={"model_type": "llama"}, weights="0")
MALFORMED = ModelFingerprint.model_construct(fields={"model_type": ["llama"]}, weights="0")
IDS, NO_IDS = TokenIds.pack([5, 6, 7]), TokenIds.pack([])
PROBE = MatchRequest(tokens=TokenIds.pack([5, 6]))
NOT_A_NUMBER = float("nan")

# ---------------------------------------------------------------- requests among others in a batch

WHOLE: dict[type[Message], dict[str, Any]] = {  # a right request of each verb; "held" is the scene's lease
    MatchRequest: {"tokens": IDS, "namespace": None},
    ExplainRequest: {"tokens": IDS, "namespace": None},
    LockRequest: {"lease_id": "new", "tokens": IDS, "namespace": None, "priority": 0},
    AcquireRequest: {
        "lease_id": "new",
        "tokens": IDS,
        "namespace": None,
        "new_tokens": 0,
        "max_prefix_len": None,
        "priority": 0,
        "timeout_s": 0.0,
    },
    InsertRequest: {"lease_id": "held", "num_tokens": 3, "suffix": NO_IDS, "release": False, "publish_state": False},
    ExtendRequest: {"lease_id": "held", "num_slots": 4, "known_pages": 3, "timeout_s": 0.0},
    ReleaseWindowRequest: {"lease_id": "held", "up_to": 1},
    WithdrawRequest: {"lease_id": "held"},
    ReleaseRequest: {"lease_id": "held"},
    AbortRequest: {"lease_id": "held"},
    GrantRequest: {"lease_id": "held", "offer_id": "o", "timeout_s": None},
    RevokeRequest: {"lease_id": "held", "offer_id": "o"},
    TakeBackRequest: {"lease_id": "held", "offer_id": "o"},
    AdoptRequest: {"lease_id": "held", "granter": "me", "granted_epoch": "now", "offer_id": "o"},
    BindModelRequest: {"fingerprint": FINGERPRINT, "lora_id": "x"},
    EvictRequest: {"num_tokens": 1, "tier": "device"},
    PrefetchRequest: {"tokens": IDS, "namespace": None},
    RetireRequest: {"extra_key": None, "lora_id": "x", "cache_salt": None},
    SetWeightsRequest: {"label": "v2"},
}

Row = tuple[type[Message], dict[str, Any], type[CacheError], str]

BAD_REQUESTS: list[Row] = [
    # token ids
    (MatchRequest, {"tokens": None}, InvalidRequest, "tokens: .*not NoneType"),
    (MatchRequest, {"tokens": "abc"}, InvalidRequest, "tokens: .*not str"),
    (MatchRequest, {"tokens": [1.5]}, InvalidRequest, "tokens: .*fractional"),
    (MatchRequest, {"tokens": [True, -1]}, InvalidRequest, "tokens: .*negative"),
    (MatchRequest, {"tokens": [2**64]}, InvalidRequest, "tokens: .*too large"),
    (MatchRequest, {"tokens": np.array([[1, 2]])}, InvalidRequest, "tokens: .*one-dimensional"),
    (MatchRequest, {"tokens": NO_IDS}, InvalidRequest, "tokens: .*at least one"),
    (LockRequest, {"tokens": TokenIds(b"abc", 4)}, InvalidRequest, "tokens: .*torn"),
    (AcquireRequest, {"tokens": TokenIds(b"abcde", 4)}, InvalidRequest, "tokens: .*torn"),
    (AcquireRequest, {"tokens": TokenIds(b"abcdef", 3)}, InvalidRequest, "tokens: .*torn"),
    (AcquireRequest, {"tokens": TokenIds(b"ab", 0)}, InvalidRequest, "tokens: .*torn"),
    (AcquireRequest, {"tokens": TokenIds("abcd", 4)}, InvalidRequest, "tokens: .*torn"),  # type: ignore[arg-type]
    (ExplainRequest, {"tokens": TokenIds(None, 4)}, InvalidRequest, "tokens: .*torn"),  # type: ignore[arg-type]
    (InsertRequest, {"suffix": TokenIds(b"abc", 8)}, InvalidRequest, "suffix: .*torn"),
    # namespaces
    (MatchRequest, {"namespace": 7}, InvalidRequest, "namespace: .*string"),
    (AcquireRequest, {"namespace": "lora-7"}, InvalidRequest, "namespace: must be a namespace"),
    (LockRequest, {"namespace": "3:a--"}, InvalidRequest, "namespace: must be a namespace"),
    (RetireRequest, {"lora_id": 7}, InvalidRequest, "lora_id: .*string"),
    (RetireRequest, {"lora_id": None}, InvalidRequest, "name at least one"),
    # models
    (BindModelRequest, {"lora_id": 7}, InvalidRequest, "lora_id: .*string"),
    (BindModelRequest, {"lora_id": "x" * 4097}, InvalidRequest, "lora_id: .*at most 4096"),
    (BindModelRequest, {"fingerprint": None}, InvalidRequest, "fingerprint: .*ModelFingerprint"),
    (BindModelRequest, {"fingerprint": "0"}, InvalidRequest, "fingerprint: .*ModelFingerprint"),
    (BindModelRequest, {"fingerprint": MALFORMED}, InvalidRequest, "fingerprint: .*ModelFingerprint"),
    (SetWeightsRequest, {"label": ""}, InvalidRequest, "label: .*at least 1"),
    (SetWeightsRequest, {"label": "x" * 257}, InvalidRequest, "label: .*at most 256"),
    (SetWeightsRequest, {"label": "\ud800"}, InvalidRequest, "label: .*unicode"),
    (SetWeightsRequest, {"label": 7}, InvalidRequest, "label: .*string"),
    # numbers
    (AcquireRequest, {"new_tokens": -1}, InvalidRequest, "new_tokens: .*greater than or equal to 0"),
    (AcquireRequest, {"new_tokens": 1.5}, InvalidRequest, "new_tokens: .*valid integer"),
    (AcquireRequest, {"new_tokens": NOT_A_NUMBER}, InvalidRequest, "new_tokens: .*valid integer"),
    (AcquireRequest, {"new_tokens": True}, InvalidRequest, "new_tokens: .*valid integer"),
    (AcquireRequest, {"new_tokens": 2**64}, PoolExhausted, "can never fit"),
    (AcquireRequest, {"max_prefix_len": -1}, InvalidRequest, "max_prefix_len: .*greater than or equal to 0"),
    (AcquireRequest, {"max_prefix_len": "1"}, InvalidRequest, "max_prefix_len: .*valid integer"),
    (AcquireRequest, {"priority": 2**31}, InvalidRequest, "priority: .*less than"),
    (LockRequest, {"priority": None}, InvalidRequest, "priority: .*valid integer"),
    (AcquireRequest, {"timeout_s": -0.5}, InvalidRequest, "timeout_s: .*greater than or equal to 0"),
    (AcquireRequest, {"timeout_s": NOT_A_NUMBER}, InvalidRequest, "timeout_s: .*finite"),
    (ExtendRequest, {"timeout_s": float("inf")}, InvalidRequest, "timeout_s: .*finite"),
    (ExtendRequest, {"num_slots": 0}, InvalidRequest, "num_slots: .*greater than 0"),
    (ExtendRequest, {"num_slots": 3.5}, InvalidRequest, "num_slots: .*valid integer"),
    (ExtendRequest, {"num_slots": 9}, PoolExhausted, "can never fit"),
    (ExtendRequest, {"known_pages": -1}, InvalidRequest, "known_pages: .*greater than or equal to 0"),
    (InsertRequest, {"num_tokens": 0}, InvalidRequest, "num_tokens: .*greater than 0"),
    (InsertRequest, {"num_tokens": "3"}, InvalidRequest, "num_tokens: .*valid integer"),
    (InsertRequest, {"release": "perhaps"}, InvalidRequest, "release: .*boolean"),
    (InsertRequest, {"publish_state": None}, InvalidRequest, "publish_state: .*boolean"),
    (ReleaseWindowRequest, {"up_to": -1}, InvalidRequest, "up_to: .*greater than or equal to 0"),
    (ReleaseWindowRequest, {"up_to": 4}, InvalidRequest, r"up_to must be in \[0, 3\], the tokens of the lease, not 4"),
    # loads and tiers
    (AcquireRequest, {"load": "perhaps"}, InvalidRequest, "load: .*boolean"),
    (AcquireRequest, {"load": None}, InvalidRequest, "load: .*boolean"),
    (AcquireRequest, {"load_timeout_s": -1.0}, InvalidRequest, "load_timeout_s: .*greater than or equal to 0"),
    (LockRequest, {"load": "perhaps"}, InvalidRequest, "load: .*boolean"),
    (LockRequest, {"timeout_s": NOT_A_NUMBER}, InvalidRequest, "timeout_s: .*finite"),
    (LockRequest, {"load_timeout_s": float("inf")}, InvalidRequest, "load_timeout_s: .*finite"),
    (PrefetchRequest, {"tokens": NO_IDS}, InvalidRequest, "tokens: .*at least one"),
    (PrefetchRequest, {"namespace": "lora-7"}, InvalidRequest, "namespace: must be a namespace"),
    (EvictRequest, {"tier": 7}, InvalidRequest, "tier: .*string"),
    (EvictRequest, {"tier": ""}, InvalidRequest, "tier: .*at least 1"),
    (EvictRequest, {"tier": "host"}, InvalidRequest, "tier must be one of 'device', not 'host'"),
    (EvictRequest, {"num_tokens": -1}, InvalidRequest, "num_tokens: .*greater than or equal to 0"),
    (EvictRequest, {"num_tokens": [1]}, InvalidRequest, "num_tokens: .*valid integer"),
    # lease ids
    (AcquireRequest, {"lease_id": ""}, InvalidRequest, "lease_id: .*at least 1"),
    (LockRequest, {"lease_id": "x" * 129}, InvalidRequest, "lease_id: .*at most 128"),
    (InsertRequest, {"lease_id": 7}, InvalidRequest, "lease_id: .*string"),
    (ReleaseRequest, {"lease_id": None}, InvalidRequest, "lease_id: .*string"),
    (AbortRequest, {"lease_id": 1.5}, InvalidRequest, "lease_id: .*string"),
    (WithdrawRequest, {"lease_id": ["held"]}, InvalidRequest, "lease_id: .*string"),
    (InsertRequest, {"lease_id": "forged"}, UnknownLease, "has ended, was never granted"),
    (ExtendRequest, {"lease_id": "forged"}, UnknownLease, "has ended, was never granted"),
    (ReleaseWindowRequest, {"lease_id": "forged"}, UnknownLease, "has ended, was never granted"),
    (GrantRequest, {"lease_id": "forged"}, UnknownLease, "has ended, was never granted"),
    # tokens other than the lease's
    (InsertRequest, {"num_tokens": 2, "suffix": IDS}, InvalidRequest, "missing"),
    (InsertRequest, {"suffix": TokenIds.pack([8])}, InvalidRequest, "differ"),
    (InsertRequest, {"suffix": TokenIds.pack([7 + 2**40])}, InvalidRequest, "differ"),
    (InsertRequest, {"num_tokens": 4, "suffix": TokenIds.pack([8])}, InvalidRequest, "extend it"),
    (InsertRequest, {"num_tokens": 2**64}, InvalidRequest, "covers 3|extend it"),
    # adopting
    (AdoptRequest, {}, UnknownLease, "not offered"),
    (AdoptRequest, {"granter": "somebody"}, UnknownLease, "belongs to another"),
    (AdoptRequest, {"granter": ""}, InvalidRequest, "granter: .*at least 1"),
    (AdoptRequest, {"granted_epoch": "before"}, StaleEpoch, "drop its leases"),
    (AdoptRequest, {"granted_epoch": None}, InvalidRequest, "granted_epoch: .*string"),
    (AdoptRequest, {"offer_id": ""}, InvalidRequest, "offer_id: .*at least 1"),
    (GrantRequest, {"offer_id": 7}, InvalidRequest, "offer_id: .*string"),
    (GrantRequest, {"timeout_s": 0}, InvalidRequest, "timeout_s: .*greater than 0"),
    (RevokeRequest, {"offer_id": None}, InvalidRequest, "offer_id: .*string"),
    (TakeBackRequest, {"lease_id": ""}, InvalidRequest, "lease_id: .*at least 1"),
]


def name_of(row: Row) -> str:
    model, changed, _, _ = row
    return f"{model.__name__.removesuffix('Request')} {changed}"[:60]


@pytest.mark.parametrize(("model", "changed", "error", "fault"), BAD_REQUESTS, ids=map(name_of, BAD_REQUESTS))
async def test_a_bad_request_fails_alone(
    scene: Scene, model: type[Message], changed: dict[str, Any], error: type[CacheError], fault: str
) -> None:
    wire = Wire(scene.cache)
    real = {"held": scene.lease.lease_id, "me": wire.session["session_id"], "now": wire.session["epoch"]}
    whole = {name: real[value] if value in ("held", "me", "now") else value for name, value in WHOLE[model].items()}
    model(**whole)  # so that the changed field is the reason for the refusal

    first, refused, last = await wire.execute(PROBE, forged(model, **whole | changed), PROBE)

    assert (first.prefix_len, last.prefix_len) == (2, 2)
    assert type(refused) is error, refused
    with pytest.raises(error, match=fault):
        raise refused


STRANGERS: list[Message] = [Ack(), MatchResponse(prefix_len=1, full_prefix_len=1), CloseSession(session_id="me")]


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda stranger: type(stranger).__name__)
async def test_an_unknown_verb_fails_alone(scene: Scene, stranger: Message) -> None:
    first, refused, last = await Wire(scene.cache).execute(PROBE, stranger, PROBE)

    assert (first.prefix_len, last.prefix_len) == (2, 2)
    assert isinstance(refused, InvalidRequest)
    assert f"{type(stranger).__name__} is not a verb" in str(refused)


# ---------------------------------------------------------------- leases of other clients, and repeated requests

FORGED: dict[str, Callable[[str], Message]] = {
    "insert": lambda lease_id: InsertRequest(lease_id=lease_id, num_tokens=3, suffix=NO_IDS),
    "extend": lambda lease_id: ExtendRequest(lease_id=lease_id, num_slots=4, known_pages=3),
    "window": lambda lease_id: ReleaseWindowRequest(lease_id=lease_id, up_to=1),
    "grant": lambda lease_id: GrantRequest(lease_id=lease_id, offer_id="o"),
    "release": lambda lease_id: ReleaseRequest(lease_id=lease_id),
    "abort": lambda lease_id: AbortRequest(lease_id=lease_id),
    "acquire": lambda lease_id: AcquireRequest(lease_id=lease_id, tokens=IDS),
    "lock": lambda lease_id: LockRequest(lease_id=lease_id, tokens=IDS),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
async def test_naming_another_sessions_lease_has_no_effect(scene: Scene, forge: Callable[[str], Message]) -> None:
    other = scene.cache.another_client()
    await other.open()

    (refused,) = await Wire(scene.cache, other).execute(forge(scene.lease.lease_id))

    assert isinstance(refused, UnknownLease)
    assert "belongs to another session" in str(refused)


@pytest.mark.parametrize("use", [use for use in FORGED if use not in ("release", "abort")])
async def test_a_request_for_an_ended_lease_has_no_effect(cache1: CacheUnderTest, use: str) -> None:
    lease = await cache1.client.acquire([5, 6, 7])
    await lease.release()

    refused, released, aborted = await Wire(cache1).execute(
        FORGED[use](lease.lease_id), FORGED["release"](lease.lease_id), FORGED["abort"](lease.lease_id)
    )

    assert type(refused) is UnknownLease
    assert "has ended" in str(refused)
    assert released == aborted == Ack()
    assert await cache1.pages() == Pages(free=8)


async def test_the_same_acquire_twice_is_one_lease(cache1: CacheUnderTest) -> None:
    await cache1.client.open()
    wire = Wire(cache1)
    request = AcquireRequest(lease_id="mine", tokens=TokenIds.pack([1, 2]))

    first, again = await wire.execute(request, request)

    assert isinstance(first, LeaseResponse)
    assert first == again
    assert await cache1.pages() == Pages(free=6, private=2, leases=1)
    await wire.execute(ReleaseRequest(lease_id="mine"), ReleaseRequest(lease_id="mine"))
    assert await cache1.pages() == Pages(free=8)
