"""Batches as bytes: Ray carries those as they are, where it would take a message apart object by object.

Pickle calls a function for each object that is not its own, so of messages it gets rows of plain values:
(kind, field, field...). Requests are validated where they arrive, once their number is known to be within the bound.
"""

from __future__ import annotations

import pickle
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
from raydix.schemas.message import Malformed, assemble, receive, refused
from raydix.schemas.requests import MAX_REQUESTS

MAX_PART_BYTES = 90_000  # Ray carries up to 100 KB of one argument within the call, more through the object store
_PROTOCOL = 5
_BATCH_FIELDS = len(Batch.model_fields)
_BATCH, _ANSWERS, _ACQUIRE, _INSERT, _LEASE, _INSERTED = range(6)  # kinds of rows

Packed = Message | CacheError | tuple[Any, ...]


def pack(message: Message | CacheError) -> bytes:
    """A message as bytes, or what stands in place of an answer."""
    packed: Packed = message
    fields = message.__dict__
    if type(message) is Batch and type(fields.get("requests")) is tuple and len(fields) == _BATCH_FIELDS:
        packed = (_BATCH, *(fields | {"requests": [_row_of_request(each) for each in fields["requests"]]}).values())
    elif type(message) is BatchResponse:
        packed = (_ANSWERS, fields["epoch"], [_row_of_answer(each) for each in fields["responses"]])
    return pickle.dumps(packed, _PROTOCOL)


def in_parts(packed: bytes) -> list[bytes]:
    """A packed message in parts small enough to travel within a call."""
    if len(packed) <= MAX_PART_BYTES:
        return [packed]
    return [packed[start : start + MAX_PART_BYTES] for start in range(0, len(packed), MAX_PART_BYTES)]


def unpack(*parts: bytes | memoryview, torn: type[CacheError] = InvalidRequest) -> object:
    """What was packed: a message, if nothing else was sent.

    Raises:
        CacheError: it is torn; of the class that the caller names.
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
        return assemble(BatchResponse, {"epoch": epoch, "responses": tuple([_answer(row) for row in rows])})
    if kind != _BATCH:
        raise ValueError(f"no message is of kind {kind!r}")
    session_id, epoch, rows, *place = fields
    if len(rows) > MAX_REQUESTS:
        return Malformed(model=Batch.__name__, fault=f"at most {MAX_REQUESTS} requests travel in one, not {len(rows)}")
    try:
        return Batch.of(session_id, epoch, tuple([_request(row) for row in rows]), *place)
    except ValidationError as error:
        return refused(Batch, error)


def _row_of_request(request: Any) -> Any:
    kind = type(request)
    if kind is AcquireRequest and type(request.tokens) is TokenIds:
        lease_id, tokens, namespace, new_tokens, max_prefix_len, priority, timeout_s = request.__dict__.values()
        data, width = tokens.data, tokens.width
        return _ACQUIRE, lease_id, data, width, namespace, new_tokens, max_prefix_len, priority, timeout_s
    if kind is InsertRequest and type(request.suffix) is TokenIds:
        lease_id, num_tokens, suffix, release, publish_state, known_len = request.__dict__.values()
        return _INSERT, lease_id, num_tokens, suffix.data, suffix.width, release, publish_state, known_len
    return (kind, *request.__dict__.values()) if Message in kind.__mro__ else request


def _request(row: Any) -> Any:
    """A request that has arrived, validated."""
    if type(row) is not tuple:
        return row
    if row[0] == _ACQUIRE:
        _, lease_id, data, width, namespace, new_tokens, max_prefix_len, priority, timeout_s = row
        tokens = TokenIds(data, width)
        try:
            return AcquireRequest.of(lease_id, tokens, namespace, new_tokens, max_prefix_len, priority, timeout_s)
        except ValidationError as error:
            return refused(AcquireRequest, error)
    if type(row[0]) is type(Message) and Message in row[0].__mro__:
        return receive(*row)
    kind, lease_id, num_tokens, data, width, release, publish_state, known_len = row
    if kind != _INSERT:
        raise ValueError(f"no request is of kind {kind!r}")
    try:
        return InsertRequest.of(lease_id, num_tokens, TokenIds(data, width), release, publish_state, known_len)
    except ValidationError as error:
        return refused(InsertRequest, error)


def _row_of_answer(answer: Any) -> Any:
    kind = type(answer)
    if kind is LeaseResponse:
        return (_LEASE, *answer.__dict__.values())
    if kind is InsertResponse:
        return (_INSERTED, *answer.__dict__.values())
    return answer


def _answer(row: Any) -> Any:
    """An answer, taken as it is: the cache made it."""
    if type(row) is not tuple:
        return row
    if row[0] == _LEASE:
        return LeaseResponse.of(*row[1:])
    return InsertResponse.of(*row[1:])
