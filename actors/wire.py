"""Batches as bytes: Ray carries those as they are, where it would take a message apart object by object."""

from __future__ import annotations

import pickle

from raydix.schemas import CacheError, InvalidRequest, Message

MAX_PART_BYTES = 90_000  # Ray carries up to 100 KB of one argument within the call, more through the object store
_PROTOCOL = 5


def pack(message: Message) -> bytes:
    """A message as bytes."""
    return pickle.dumps(message, _PROTOCOL)


def pack_parts(message: Message) -> list[bytes]:
    """A message as bytes, in parts small enough to travel within a call."""
    packed = pack(message)
    return [packed[start : start + MAX_PART_BYTES] for start in range(0, len(packed), MAX_PART_BYTES)]


def unpack(*parts: bytes, torn: type[CacheError] = InvalidRequest) -> object:
    """What was packed: a message, if nothing else was sent.

    Raises:
        CacheError: it is torn; of the class that the caller names.
    """
    try:
        return pickle.loads(parts[0] if len(parts) == 1 else b"".join(parts))
    except Exception as error:  # pickle raises almost anything
        raise torn(f"what was sent in {len(parts)} parts is torn: {type(error).__name__}: {error}") from None
