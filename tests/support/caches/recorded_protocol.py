"""A session with a cache from before the protocol had a number, as bytes, in both directions.

`tests/service/transport/protocol_0.json` was recorded with commit 3d47f62. The first calls are those of a client that
reaches the cache through Ray alone; the later calls and all frames are those of a client with a Unix socket. Each
client opens a session, acquires, inserts, releases, reads the statistics and closes. The last two frames are a first
frame of a later protocol, and how the recorded cache refuses it.
"""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parents[2] / "service" / "transport" / "protocol_0.json"


class RecordedCall(NamedTuple):
    """A call of an actor's method; the arguments are a pickled tuple, and so are the result or else the error."""

    method: str
    arguments: bytes
    result: bytes | None
    error: bytes | None


class RecordedFrame(NamedTuple):
    """A frame on the Unix socket with its header, which is `<QI`: the batch's number and the bytes that follow."""

    sender: str  # "client" or "cache"
    data: bytes


def recorded_calls() -> list[RecordedCall]:
    """Return the calls, in order."""
    return [
        RecordedCall(each["method"], b64decode(each["arguments"]), _decoded(each, "result"), _decoded(each, "error"))
        for each in json.loads(FILE.read_text())["calls"]
    ]


def recorded_frames() -> list[RecordedFrame]:
    """Return the frames, in order."""
    return [RecordedFrame(each["from"], b64decode(each["bytes"])) for each in json.loads(FILE.read_text())["frames"]]


def _decoded(entry: dict[str, str], key: str) -> bytes | None:
    return b64decode(entry[key]) if key in entry else None
