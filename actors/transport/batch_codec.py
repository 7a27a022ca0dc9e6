"""Batches as bytes: Ray carries bytes as they are, where it would take a message apart object by object.

Pickle calls a function for each object of a class of ours, so the most frequent messages become rows of plain values:
(kind, field, field...). Requests are checked where they arrive, once their number is known to be within the bound.
"""

from __future__ import annotations

import pickle
from operator import attrgetter
from typing import Any

from pydantic import ValidationError

from raydix.schemas import (
    AcquireRequest,
    Batch,
    BatchResponse,
    CacheError,
    InsertRequest,
    InsertResponse,
    InvalidRequest,
    LeaseResponse,
    Message,
    TokenIds,
)
from raydix.schemas.message import Malformed, malformed, receive
from raydix.schemas.requests import MAX_REQUESTS

MAX_PART_BYTES = 90_000  # Ray carries up to 100 KB of one argument within the call, more through the object store
_PROTOCOL = 5
_BATCH, _ANSWERS, _ACQUIRE, _INSERT, _LEASE, _INSERTED = range(6)  # kinds of rows


def pack(message: Message | CacheError) -> bytes:
    """Return a message, or the error in place of an answer, as bytes."""
    packed: Any = message
    if isinstance(message, Batch) and type(message.requests) is tuple:
        rows = [_row_of_request(request) for request in message.requests]
        packed = _BATCH, message.session_id, message.epoch, rows, message.seq, message.after
    elif isinstance(message, BatchResponse):
        packed = _ANSWERS, message.epoch, [_row_of_answer(response) for response in message.responses]
    return pickle.dumps(packed, _PROTOCOL)


def in_parts(packed: bytes) -> list[bytes]:
    """Return a packed message in parts, each small enough for the arguments of a call."""
    if len(packed) <= MAX_PART_BYTES:
        return [packed]
    return [packed[start : start + MAX_PART_BYTES] for start in range(0, len(packed), MAX_PART_BYTES)]


def unpack(*parts: bytes | memoryview, torn: type[CacheError] = InvalidRequest) -> object:
    """Return the packed object: a message, if the sender sent one.

    Raises:
        CacheError: the bytes are torn; of the class `torn`.
    """
    try:
        packed = pickle.loads(parts[0] if len(parts) == 1 else b"".join(parts))
        return _unpacked(*packed) if type(packed) is tuple else packed
    except Exception as error:  # pickle raises almost anything
        what = f"what was sent in {len(parts)} parts is torn: {type(error).__name__}: {error}"
        raise torn(f"{what}; if all of it arrived, the versions of raydix differ on both sides") from None


def _unpacked(kind: Any, *fields: Any) -> Message:
    if kind == _ANSWERS:
        epoch, rows = fields
        return BatchResponse(epoch, tuple([_answer(row) for row in rows]))
    if kind != _BATCH:
        raise ValueError(f"no message is of kind {kind!r}")
    session_id, epoch, rows, seq, after = fields
    if len(rows) > MAX_REQUESTS:
        return Malformed(model=Batch.__name__, fault=f"at most {MAX_REQUESTS} requests travel in one, not {len(rows)}")
    try:
        return Batch(session_id, epoch, tuple([_request(row) for row in rows]), seq, after)
    except ValidationError as error:
        return malformed(Batch, error)


# The fields behind the tokens, or behind the suffix.
_acquire_fields = attrgetter(*AcquireRequest.field_names()[2:])
_insert_fields = attrgetter(*InsertRequest.field_names()[3:])


def _row_of_request(request: Message) -> Any:
    if isinstance(request, AcquireRequest):
        tokens = request.tokens
        return _ACQUIRE, request.lease_id, tokens.data, tokens.width, *_acquire_fields(request)
    if isinstance(request, InsertRequest):
        ids = request.suffix
        return _INSERT, request.lease_id, request.num_tokens, ids.data, ids.width, *_insert_fields(request)
    return request.__reduce__()[1] if isinstance(request, Message) else request


def _request(row: Any) -> Any:
    """Return a request that has arrived, checked."""
    if type(row) is not tuple:
        return row
    kind = row[0]
    try:
        if kind == _ACQUIRE:
            _, lease_id, data, width, *fields = row
            return AcquireRequest(lease_id, TokenIds(data, width), *fields)
        if kind == _INSERT:
            _, lease_id, num_tokens, data, width, *fields = row
            return InsertRequest(lease_id, num_tokens, TokenIds(data, width), *fields)
    except ValidationError as error:
        return malformed(AcquireRequest if kind == _ACQUIRE else InsertRequest, error)
    if not (isinstance(kind, type) and issubclass(kind, Message)):
        raise ValueError(f"no request is of kind {kind!r}")
    return receive(*row)


def _row_of_answer(answer: Any) -> Any:
    kind = type(answer)
    if kind is LeaseResponse:
        return _LEASE, *_lease_fields(answer)
    if kind is InsertResponse:
        return _INSERTED, *_inserted_fields(answer)
    return answer


_lease_fields, _inserted_fields = (attrgetter(*model.field_names()) for model in (LeaseResponse, InsertResponse))


def _answer(row: Any) -> Any:
    """Return an answer, unchecked: the cache made it."""
    if type(row) is not tuple:
        return row
    return LeaseResponse(*row[1:]) if row[0] == _LEASE else InsertResponse(*row[1:])
