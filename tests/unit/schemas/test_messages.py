"""Every message: frozen, closed to unknown fields, and the same after pickling, fields that are arrays included."""

import dataclasses
import inspect
import pickle
import re
from collections.abc import Callable
from copy import copy
from typing import Any, Self, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from support.caches.raw_calls import forged, pickled

from raydix import schemas
from raydix.actors.transport import batch_codec
from raydix.actors.transport.validation import make_request
from raydix.schemas import (
    AcquireRequest,
    Batch,
    BatchResponse,
    BlockStored,
    CacheConfig,
    CacheError,
    CacheStats,
    EvictRequest,
    ExtendRequest,
    InsertRequest,
    InsertResponse,
    InvalidRequest,
    LeaseOwner,
    LeaseResponse,
    LockRequest,
    MatchRequest,
    MatchResponse,
    Message,
    OpenSession,
    PoolConfig,
    ReleaseRequest,
    TenantStats,
    TokenIds,
    UnknownLease,
    frame_namespace,
)
from raydix.schemas.message import Count, Malformed, PydanticMessage, restore
from raydix.schemas.report import TreePart
from raydix.schemas.requests import MAX_REQUESTS, LeaseId, Namespace, Priority, TimeoutSeconds, Tokens

PUBLIC = [getattr(schemas, name) for name in schemas.__all__]
EVERY_MESSAGE = [each for each in PUBLIC if inspect.isclass(each) and issubclass(each, Message) and each is not Message]
QUICK = {AcquireRequest, InsertRequest, Batch, LeaseResponse, InsertResponse, BatchResponse}
every_message = pytest.mark.parametrize("model", EVERY_MESSAGE, ids=lambda model: model.__name__)

LEAF = TreePart(namespace="a", num_tokens=2, own_tokens=2, num_nodes=1, unused_s=0.5, num_locks=0, parts=())
BY_NAME: dict[str, Any] = {
    "requests": (ReleaseRequest(lease_id="l"), MatchRequest(tokens=[1, 2])),
    "responses": (MatchResponse(prefix_len=4, full_prefix_len=4), UnknownLease("l has ended")),
    "slots": np.array([3, 1, 2]),
    "k": np.arange(6, dtype=np.uint8),
    "v": np.arange(4, dtype=np.uint8),
    "index": np.arange(2, dtype=np.uint8),
    "device_type": "cpu",
    "namespace": "-1:a-",
    "parts": (LEAF,),
    "reason": "evicted",
    "core": "interpreted",
    "events": (BlockStored(block_hashes=[-5], parent_block_hash=7, token_ids=[1], block_size=1, medium="GPU"),),
    "owners": (LeaseOwner(owner="a", leases=2, slots=32, oldest_s=1.5),),
    "tenants": (TenantStats(name="a", held_slots=3, evictable_slots=2, floor_slots=1, cap_slots=5, tokens_evicted=7),),
    "block_hashes": [2**63 - 1, -(2**63)],
    "loads": {"late": 1},
    "prefixes_dropped": {"no_room": 1},
    "refusals": {"no_wait": 1},
    "restart_causes": {"ended by Ray": 1},
    "writes": {"failed": 1},
    "fields": {"rope_theta": 1e4},
    "bound": ("a", None),
}
BY_TYPE: dict[Any, Any] = {
    str: "text",
    int: 3,
    float: 1.5,
    bool: True,
    bytes: b"\x01\x00\x00\x00",
    CacheConfig: CacheConfig(pool=PoolConfig(num_slots=8)),
    PoolConfig: PoolConfig(num_slots=8),
    TokenIds: [1, 2**40],
}


def value_of(name: str, annotation: Any) -> Any:
    """A value that is no default: so that nothing that is lost goes unseen."""
    if inspect.isclass(annotation) and issubclass(annotation, Message):
        return filled(annotation)
    if annotation in BY_TYPE:
        return BY_TYPE[annotation]
    if name in BY_NAME:
        return BY_NAME[name]
    if get_origin(annotation) is tuple:
        return (value_of(name, get_args(annotation)[0]),)
    return next(value_of(name, each) for each in get_args(annotation) if each is not type(None))


def filled(model: type[Message]) -> Message:
    """A message with a value in every field."""
    return model(**values_of(model))


def values_of(model: type[Message]) -> dict[str, Any]:
    values = {name: value_of(name, annotation) for name, (annotation, _) in fields_of(model).items()}
    return values | {"after": 2} if model is Batch else values


def fields_of(model: type[Message]) -> dict[str, tuple[Any, bool]]:
    """The type of each field, and whether it is required."""
    if issubclass(model, BaseModel):
        return {name: (field.annotation, field.is_required()) for name, field in model.model_fields.items()}
    types, fields = get_type_hints(model), dataclasses.fields(model)  # type: ignore[arg-type]
    return {each.name: (types[each.name], each.default is dataclasses.MISSING) for each in fields}


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal in type and content, arrays and errors too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Message):
        return same(one.__reduce__()[1][1:], other.__reduce__()[1][1:])
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, Exception):
        return one.args == other.args
    return bool(one == other)


def dumps_by_value(message: Message) -> bytes:
    from ray import cloudpickle  # only here: the import takes a while

    data: bytes = cloudpickle.dumps(message)
    return data


@every_message
@pytest.mark.parametrize("dumps", [pickle.dumps, dumps_by_value], ids=["pickle", "cloudpickle"])
def test_every_message_is_the_same_after_pickling(model: type[Message], dumps: Any) -> None:
    message = filled(model)

    back = pickle.loads(dumps(message))

    assert same(back, message)
    assert repr(back) == repr(message)


@every_message
def test_a_message_of_defaults_is_the_same_after_pickling(model: type[Message]) -> None:
    required = {name: annotation for name, (annotation, is_required) in fields_of(model).items() if is_required}
    message = model(**{name: value_of(name, annotation) for name, annotation in required.items()})

    assert same(pickle.loads(pickle.dumps(message)), message)


@every_message
def test_what_was_unpickled_is_a_whole_message(model: type[Message]) -> None:
    back = pickle.loads(pickle.dumps(filled(model)))

    assert same(pickle.loads(pickle.dumps(back)), back)
    assert same(copy(back), back)
    if isinstance(back, BaseModel):
        assert back.model_fields_set == set(model.model_fields)
        assert back.model_extra is None
    if model not in QUICK:
        check_frozen(back)


@every_message
def test_every_message_is_frozen_but_those_of_each_request_that_have_slots(model: type[Message]) -> None:
    message: Any = filled(model)

    if model in QUICK:  # frozen for type checkers
        with pytest.raises(AttributeError):
            message.surprise = 1
    else:
        check_frozen(message)


def check_frozen(message: Message) -> None:
    for field in fields_of(type(message)):
        with pytest.raises((ValidationError, dataclasses.FrozenInstanceError), match=r"frozen|cannot assign to field"):
            setattr(message, field, getattr(message, field))


@every_message
def test_unknown_fields_are_refused(model: type[Message]) -> None:
    fields = values_of(model)

    unknown = r"surprise\n  Extra inputs are not permitted|unexpected keyword argument 'surprise'"
    with pytest.raises((ValidationError, TypeError), match=unknown):
        model(**fields, surprise=1)


@every_message
def test_required_fields_are_required(model: type[Message]) -> None:
    fields = values_of(model)

    for name, (_, is_required) in fields_of(model).items():
        if is_required:
            missing = f"{name}\n  Field required|missing 1 required positional argument: '{name}'"
            with pytest.raises((ValidationError, TypeError), match=missing):
                model(**{each: value for each, value in fields.items() if each != name})


@every_message
def test_every_message_says_what_it_is(model: type[Message]) -> None:
    assert model.__doc__ and model.__doc__ != BaseModel.__doc__


def test_tokens_are_packed_where_a_message_is_made() -> None:
    assert MatchRequest(tokens=[1, 2]).tokens == TokenIds.pack([1, 2])
    assert MatchRequest(tokens=np.array([1, 2])).tokens == TokenIds.pack([1, 2])


def test_messages_of_equal_content_are_equal_and_hash_alike() -> None:
    one, other = MatchRequest(tokens=[1, 2]), MatchRequest(tokens=(1, 2))

    assert one == other
    assert hash(one) == hash(other)
    assert one != MatchRequest(tokens=[1, 3])
    assert pickle.loads(pickle.dumps(one)) == one


def test_a_batch_carries_requests_of_every_kind_in_order() -> None:
    requests = (
        AcquireRequest(lease_id="l", tokens=[1, 2], new_tokens=3),
        InsertRequest(lease_id="l", num_tokens=2, suffix=[]),
        ReleaseRequest(lease_id="l"),
    )

    back = pickle.loads(pickle.dumps(Batch(session_id="s", epoch="e", requests=requests)))

    assert back.requests == requests
    assert [type(each) for each in back.requests] == [type(each) for each in requests]


def test_a_batch_carries_nothing_but_messages() -> None:
    for wrong in ((1,), ("release",), ({"lease_id": "l"},)):
        with pytest.raises(ValidationError):
            Batch(session_id="s", epoch="e", requests=wrong)


def test_errors_travel_in_the_place_of_responses() -> None:
    response = BatchResponse(
        epoch="e", responses=(UnknownLease("l has ended"), MatchResponse(prefix_len=1, full_prefix_len=1))
    )

    first, second = pickle.loads(pickle.dumps(response)).responses

    assert isinstance(first, UnknownLease)
    assert first.args == ("l has ended",)
    assert second.prefix_len == 1


@pytest.mark.parametrize(
    ("model", "fields", "reason"),
    [
        (MatchRequest, {"tokens": []}, "at least one token"),
        (LockRequest, {"lease_id": "l", "tokens": []}, "at least one token"),
        (AcquireRequest, {"lease_id": "l", "tokens": []}, "at least one token"),
        (MatchRequest, {"tokens": [-1]}, "negative"),
        (MatchRequest, {"tokens": [0.5]}, "fractional"),
        (MatchRequest, {"tokens": "12"}, "not str"),
        (MatchRequest, {"tokens": [1], "namespace": 3}, "namespace"),
        (LockRequest, {"lease_id": "", "tokens": [1]}, "lease_id"),
        (LockRequest, {"lease_id": "l" * 129, "tokens": [1]}, "lease_id"),
        (AcquireRequest, {"lease_id": "l", "tokens": [1], "new_tokens": -1}, "new_tokens"),
        (AcquireRequest, {"lease_id": "l", "tokens": [1], "new_tokens": 1.0}, "new_tokens"),
        (AcquireRequest, {"lease_id": "l", "tokens": [1], "new_tokens": True}, "new_tokens"),
        (AcquireRequest, {"lease_id": "l", "tokens": [1], "new_tokens": "1"}, "new_tokens"),
        (AcquireRequest, {"lease_id": "l", "tokens": [1], "max_prefix_len": -1}, "max_prefix_len"),
        (AcquireRequest, {"lease_id": "l", "tokens": [1], "timeout_s": -1}, "timeout_s"),
        (AcquireRequest, {"lease_id": "l", "tokens": [1], "timeout_s": float("inf")}, "timeout_s"),
        (AcquireRequest, {"lease_id": "l", "tokens": [1], "timeout_s": float("nan")}, "timeout_s"),
        (InsertRequest, {"lease_id": "l", "num_tokens": 0, "suffix": []}, "num_tokens"),
        (InsertRequest, {"lease_id": "l", "num_tokens": 1, "suffix": [-1]}, "negative"),
        (ExtendRequest, {"lease_id": "l", "num_slots": 0, "known_pages": 0}, "num_slots"),
        (ExtendRequest, {"lease_id": "l", "num_slots": 1, "known_pages": -1}, "known_pages"),
        (EvictRequest, {"num_tokens": -1}, "num_tokens"),
        (OpenSession, {"session_id": "", "owner": "me"}, "session_id"),
        (ReleaseRequest, {"lease_id": None}, "lease_id"),
    ],
)
def test_a_wrong_request_is_refused_where_it_is_made(model: type[Message], fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        model(**fields)


Forge = Callable[[], Message]
TOKENS = TokenIds.pack([1])
FORGED: dict[str, tuple[Forge, str]] = {
    "wrong type": (lambda: EvictRequest.model_construct(num_tokens="all"), "EvictRequest: num_tokens: .*valid integer"),
    "a float": (lambda: EvictRequest.model_construct(num_tokens=1.5), "EvictRequest: num_tokens: .*valid integer"),
    "out of range": (lambda: EvictRequest.model_construct(num_tokens=-1), "num_tokens: .* greater than or equal to 0"),
    "a field less": (lambda: ReleaseRequest.model_construct(), "ReleaseRequest: ValueError: zip"),
    "a field more": (lambda: ReleaseRequest.model_construct(lease_id="l").model_copy(update={"x": 1}), "zip"),
    "torn tokens": (lambda: MatchRequest.model_construct(tokens=TokenIds(b"abc", 4), namespace=None), "torn"),
    "no bytes": (lambda: MatchRequest.model_construct(tokens=TokenIds("abcd", 4), namespace=None), "torn"),  # type: ignore[arg-type]
    "no tokens": (lambda: MatchRequest.model_construct(tokens=7, namespace=None), "tokens: .*not int"),
    "no namespace": (lambda: MatchRequest.model_construct(tokens=TOKENS, namespace="lora"), "frame_namespace"),
    "no messages": (
        lambda: forged(Batch, session_id="s", epoch="e", requests=(1,)),
        "requests.0",
    ),
}


@pytest.mark.parametrize(("forge", "fault"), FORGED.values(), ids=FORGED)
def test_what_breaks_its_models_rules_arrives_as_malformed(forge: Forge, fault: str) -> None:
    back = pickle.loads(pickle.dumps(forge()))

    assert isinstance(back, Malformed)
    assert re.search(fault, str(back)), str(back)


def test_a_malformed_request_arrives_as_such_among_whole_ones() -> None:
    requests = (ReleaseRequest(lease_id="l"), EvictRequest.model_construct(num_tokens=-1))

    back = pickle.loads(pickle.dumps(Batch(session_id="s", epoch="e", requests=requests)))

    assert [type(each) for each in back.requests] == [ReleaseRequest, Malformed]


Values = tuple[Any, ...]
EMPTY, TORN, WIDE = TokenIds(b"", 4), TokenIds(b"abc", 4), TokenIds.pack([2**40])


class _Rules(BaseModel):
    model_config = PydanticMessage.model_config


class _AcquireRules(_Rules):
    model_config = ConfigDict(title="AcquireRequest")
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


class _InsertRules(_Rules):
    model_config = ConfigDict(title="InsertRequest")
    lease_id: LeaseId
    num_tokens: int = Field(gt=0, strict=True)
    suffix: TokenIds
    release: bool = False
    publish_state: bool = False
    known_len: Count = 0
    boundary_len: Count | None = None


class _BatchRules(_Rules):
    model_config = ConfigDict(title="Batch")
    session_id: LeaseId
    epoch: str
    requests: tuple[Message, ...] = Field(max_length=MAX_REQUESTS)
    seq: int = Field(default=0, ge=0, strict=True)
    after: int = Field(default=0, ge=0, strict=True)

    @model_validator(mode="after")
    def _comes_after_an_earlier_one(self) -> Self:
        if self.after >= max(self.seq, 1):
            raise ValueError(f"batch {self.seq} cannot wait for batch {self.after}")
        return self


RULES = {AcquireRequest: _AcquireRules, InsertRequest: _InsertRules, Batch: _BatchRules}
FREQUENT: dict[type[Message], tuple[Values, list[list[Any]]]] = {  # a request's values, and others in place of each
    AcquireRequest: (
        ("l", TOKENS, None, 0, None, 0, None, True, False, True, None),
        [
            ["", "l" * 128, "l" * 129, None, b"l"],
            [WIDE, [1, 2], EMPTY, TORN, TokenIds("abcd", 4), None],  # type: ignore[arg-type]
            [frame_namespace("a", None, None), "a", 1],
            [1, 2**70, -1, True, 1.0, "1", None],
            [0, 7, -1, False, 1.5],
            [-(2**31), 2**31 - 1, -(2**31) - 1, 2**31, True, 0.0, None],
            [0, 1.5, -1, float("nan"), float("inf"), "soon"],
            [1, "perhaps", None],
            [True, 1, None],
            [False, 1, "perhaps", None],
            [0, 1.5, -1, float("nan"), float("inf"), "soon"],
        ],
    ),
    InsertRequest: (
        ("l", 3, EMPTY, True, False, 2, None),
        [
            ["", None],
            [0, -1, True, "3"],
            [TOKENS, [], TORN, None],
            [1, "perhaps", None],
            [1, None],
            [0, 2**70, -1, True, 1.0, None],
            [0, 16, 2**70, -1, True, 1.0],
        ],
    ),
    Batch: (
        ("s", "e", (ReleaseRequest(lease_id="l"),), 2, 1),
        [["", None], ["", None], [(), (1,), None], [0, 1, -1, 1.5, True], [0, 2, 3, -1, None]],
    ),
}


@pytest.mark.parametrize("model", FREQUENT, ids=lambda model: model.__name__)
def test_a_dataclass_refuses_and_takes_what_pydantic_would(model: Any) -> None:
    most, others = FREQUENT[model]
    changed = [(*most[:i], other, *most[i + 1 :]) for i, each in enumerate(others) for other in each]
    reference = RULES[model]
    assert len(others) == len(most)
    assert model.field_names() == tuple(reference.model_fields)

    for values in [most, *changed]:
        fields = dict(zip(model.field_names(), values, strict=True))
        assert made(model, fields) == made(reference, fields)


def made(model: Callable[..., Any], fields: dict[str, Any]) -> tuple[list[Any], list[str]] | str:
    """The values of the fields, and their types; or the refusal."""
    try:
        message = model(**fields)
    except ValidationError as error:
        return str(error)
    values = [getattr(message, name) for name in fields]
    return values, [type(value).__name__ for value in values]


@pytest.mark.parametrize("form", [np.int64, np.uint8, np.array, torch.tensor], ids=lambda form: form.__name__)
def test_a_request_takes_what_stands_for_an_int(form: Callable[[int], Any]) -> None:
    fields = {"new_tokens": form(3), "max_prefix_len": form(2), "priority": form(1)}

    request = make_request(AcquireRequest, lease_id="l", tokens=TOKENS, **fields)

    assert same(request, AcquireRequest(lease_id="l", tokens=TOKENS, new_tokens=3, max_prefix_len=2, priority=1))
    assert same(make_request(EvictRequest, num_tokens=form(7)), EvictRequest(num_tokens=7))


@pytest.mark.parametrize("number", [np.float64(3), np.bool_(True), True, 3.0, "3", None, np.array([3, 4])], ids=repr)
def test_a_request_takes_nothing_else_for_an_int(number: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"new_tokens: .*valid integer"):
        make_request(AcquireRequest, lease_id="l", tokens=TOKENS, new_tokens=number)


def test_an_integer_out_of_range_is_refused_as_an_int_is() -> None:
    with pytest.raises(InvalidRequest, match="greater than or equal to 0"):
        make_request(EvictRequest, num_tokens=np.int64(-1))


def test_an_insert_may_bring_no_new_ids() -> None:
    assert len(InsertRequest(lease_id="l", num_tokens=1, suffix=[]).suffix) == 0


@pytest.mark.parametrize(("requested", "reused", "rate"), [(0, 0, 0.0), (8, 0, 0.0), (8, 2, 0.25), (8, 8, 1.0)])
def test_the_hit_rate_is_reused_tokens_as_a_share_of_requested_ones(requested: int, reused: int, rate: float) -> None:
    stats = filled(CacheStats).model_copy(update={"tokens_requested": requested, "tokens_reused": reused})

    assert isinstance(stats, CacheStats)
    assert stats.hit_rate == rate


def test_an_answer_of_another_version_says_that_versions_differ() -> None:
    packed = pickled(restore, LeaseResponse, *range(10))
    row_of_one_more = pickle.dumps((1, "epoch", [(4, *range(10))]))

    with pytest.raises(ValueError, match=r"^a LeaseResponse has 9 fields here, 10 where it was made: the versions"):
        pickle.loads(packed)
    for answer in (packed, row_of_one_more):
        with pytest.raises(CacheError, match="the versions of raydix differ on both sides"):
            batch_codec.unpack(answer, torn=CacheError)
