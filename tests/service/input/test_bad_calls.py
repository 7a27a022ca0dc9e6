"""Malformed calls made by hand: the caller gets a typed error, and the cache stays unchanged.

Every row is sent to a cache in process and to an actor; the fixture `scene` checks that nothing has changed.
"""

from __future__ import annotations

import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from support.caches.cache_kinds import NUM_LAYERS
from support.caches.raw_calls import Scene, Wire, pickled

from raydix.actors import LocalPrefixCache
from raydix.schemas import (
    Batch,
    CacheError,
    InvalidRequest,
    MatchRequest,
    NextEvents,
    OpenSession,
    ReadKV,
    SessionRef,
    StaleEpoch,
    TokenIds,
    UnknownLease,
    WaitRequest,
    WriteKV,
)
from raydix.schemas.message import receive

PROBE = MatchRequest(tokens=TokenIds.pack([5, 6]))
Call = Callable[[Wire], Awaitable[Any]]
OWNED = {"owner": "me", "config_digest": None, "replaces": None, "liveness_path": None}
NO_ROW, BYTES = np.empty((1, 1), np.int64), np.empty(4, np.uint8)


def kv(**changed: Any) -> dict[str, Any]:
    return {"session_id": "s", "epoch": "e", "lease_id": "l", "slots": np.array([1]), "k": BYTES, "v": BYTES} | changed


BAD_CALLS: dict[str, tuple[Call, type[CacheError], str]] = {
    "no parts": (lambda wire: wire.call("execute"), InvalidRequest, "in 0 parts is torn"),
    "no batch": (lambda wire: wire.call("execute", 7), InvalidRequest, "in 1 parts is torn: TypeError"),
    "a row of no kind": (
        lambda wire: wire.call("execute", pickle.dumps((99, "s"))),
        InvalidRequest,
        "torn: ValueError",
    ),
    "a request of no kind": (
        lambda wire: wire.call("execute", pickle.dumps((0, "s", "e", [(99, "l", 3, b"", 4, True, False, 0)], 0, 0))),
        InvalidRequest,
        "torn: ValueError: no request is of kind 99",
    ),
    "torn": (lambda wire: wire.call("execute", pickle.dumps(PROBE)[:-9]), InvalidRequest, "torn: UnpicklingError"),
    "no message": (lambda wire: wire.call("execute", pickle.dumps(7)), InvalidRequest, "takes a Batch, not int"),
    "a request": (lambda wire: wire.call("execute", PROBE), InvalidRequest, "takes a Batch, not MatchRequest"),
    "no fields": (lambda wire: wire.call("execute", pickled(receive, Batch)), InvalidRequest, "malformed Batch"),
    "a field more": (
        lambda wire: wire.call("execute", pickled(receive, Batch, "s", "e", (PROBE,), 0, 0, "surprise")),
        InvalidRequest,
        "malformed Batch",
    ),
    "no requests": (lambda wire: wire.execute(requests=None), InvalidRequest, "requests: .*tuple"),
    "a string of requests": (lambda wire: wire.execute(requests="release"), InvalidRequest, "requests: .*tuple"),
    "a string in place of one": (lambda wire: wire.execute(PROBE, "release"), InvalidRequest, r"requests\.1"),
    "None in place of one": (lambda wire: wire.execute(None, PROBE), InvalidRequest, r"requests\.0"),
    "a pickle in place of one": (lambda wire: wire.execute(pickle.dumps(PROBE)[:20]), InvalidRequest, r"requests\.0"),
    "a negative number": (lambda wire: wire.execute(PROBE, seq=-1), InvalidRequest, "seq: .*greater than or equal"),
    "a fractional number": (lambda wire: wire.execute(PROBE, seq=1.5), InvalidRequest, "seq: .*valid integer"),
    "after none": (lambda wire: wire.execute(PROBE, seq=1, after=None), InvalidRequest, "after: .*valid integer"),
    "after itself": (lambda wire: wire.execute(PROBE, seq=2**40, after=2**40), InvalidRequest, "cannot wait for batch"),
    "after a later one": (lambda wire: wire.execute(PROBE, seq=1, after=9), InvalidRequest, "cannot wait for batch"),
    "after one, unnumbered": (lambda wire: wire.execute(PROBE, after=1), InvalidRequest, "cannot wait for batch"),
    "an unknown session": (
        lambda wire: wire.execute(PROBE, session_id="nobody"),
        InvalidRequest,
        "open a client first",
    ),
    "a session without name": (
        lambda wire: wire.execute(PROBE, session_id=""),
        InvalidRequest,
        "session_id: .*at least",
    ),
    "another epoch": (lambda wire: wire.execute(PROBE, epoch="another"), StaleEpoch, "drop its leases and acquire"),
    "no epoch": (lambda wire: wire.execute(PROBE, epoch=None), InvalidRequest, "epoch: .*string"),
    "an unknown ticket": (lambda wire: wire.wait(77), UnknownLease, "ticket 77 is not queued"),
    "a ticket of another epoch": (lambda wire: wire.wait(1, epoch="another"), StaleEpoch, "drop its leases"),
    "no ticket": (
        lambda wire: wire.call("wait", WaitRequest.model_construct(**wire.session, ticket="x")),
        InvalidRequest,
        "ticket: .*valid integer",
    ),
    "a wait without a request": (
        lambda wire: wire.call("wait", None),
        InvalidRequest,
        "takes a WaitRequest, not NoneType",
    ),
    "a heartbeat without a session": (
        lambda wire: wire.call("heartbeat", 7, 0.1),
        InvalidRequest,
        "takes a SessionRef, not int",
    ),
    "a heartbeat for ever": (
        lambda wire: wire.call("heartbeat", SessionRef(**wire.session), float("inf")),
        InvalidRequest,
        "finite number of seconds",
    ),
    "a session of a string": (
        lambda wire: wire.call("open_session", "me"),
        InvalidRequest,
        "OpenSession, not str",
    ),
    "a session of no name": (
        lambda wire: wire.call("open_session", OpenSession.model_construct(session_id=None, **OWNED)),
        InvalidRequest,
        "session_id: .*string",
    ),
    "an end without a session": (
        lambda wire: wire.call("close_session", b""),
        InvalidRequest,
        "CloseSession, not bytes",
    ),
    "events of nothing": (lambda wire: wire.call("next_events", {}), InvalidRequest, "takes a NextEvents, not dict"),
    "events that are not published": (
        lambda wire: wire.call("next_events", NextEvents(**wire.session, after_seq=0, timeout_s=0)),
        InvalidRequest,
        "publishes no events",
    ),
    "events of no tier": (
        lambda wire: wire.call(
            "next_events", NextEvents.model_construct(**wire.session, after_seq=0, tier="", timeout_s=0)
        ),
        InvalidRequest,
        "tier: ",
    ),
    "events for ever": (
        lambda wire: wire.call("next_events", NextEvents.model_construct(**wire.session, after_seq=0, timeout_s=1e9)),
        InvalidRequest,
        "timeout_s: .*less than or equal to 60",
    ),
    "KV of nothing": (lambda wire: wire.call("read_kv", [1]), InvalidRequest, "takes a ReadKV, not list"),
    "KV of a list of slots": (
        lambda wire: wire.call("read_kv", ReadKV.model_construct(**wire.session, lease_id="l", slots=[1])),
        InvalidRequest,
        "slots: .*ndarray",
    ),
    "KV for nothing": (lambda wire: wire.call("write_kv", PROBE), InvalidRequest, "takes a WriteKV, not MatchRequest"),
    "KV of the wrong size": (
        lambda wire: wire.call("write_kv", WriteKV.model_construct(**kv(k=b"1234"))),
        InvalidRequest,
        "k: .*ndarray",
    ),
    "KV of an unknown lease": (lambda wire: wire.read_kv("forged", np.array([1])), UnknownLease, "was never granted"),
    "a shutdown some day": (lambda wire: wire.call("shutdown", "soon"), InvalidRequest, "finite number of seconds"),
}


@pytest.mark.parametrize(("call", "error", "fault"), BAD_CALLS.values(), ids=BAD_CALLS)
async def test_a_bad_call_fails_as_a_whole(scene: Scene, call: Call, error: type[CacheError], fault: str) -> None:
    with pytest.raises(error, match=fault) as caught:
        await call(Wire(scene.cache))

    assert caught.type is error


class Broken:
    """An argument that cannot be unpickled."""

    def __reduce__(self) -> Any:
        return pickle.loads, (pickle.dumps(PROBE)[:-9],)


async def test_a_call_that_cannot_be_unpickled_fails_and_the_cache_goes_on(scene: Scene) -> None:
    wire = Wire(scene.cache)

    with pytest.raises((CacheError, pickle.UnpicklingError, EOFError)) as caught:
        await wire.call("execute", Broken())

    if not isinstance(scene.cache.cache, LocalPrefixCache):
        assert caught.type is CacheError
        assert "could not read the call" in str(caught.value)
    assert (await wire.execute(PROBE))[0].prefix_len == 2


async def test_kv_of_another_size_is_refused(scene: Scene) -> None:
    slots, lease_id, wire = scene.lease.slots[2:].numpy(), scene.lease.lease_id, Wire(scene.cache)
    k_size, v_size = 8 * NUM_LAYERS, 4 * NUM_LAYERS
    right, wrong = np.zeros(k_size, np.uint8), np.zeros(k_size - 1, np.uint8)

    with pytest.raises(InvalidRequest, match=f"needs {k_size} bytes, not {k_size - 1}"):
        await wire.write_kv(lease_id, slots, wrong, right[:v_size])
    with pytest.raises(InvalidRequest, match=f"needs {v_size} bytes, not {k_size}"):
        await wire.write_kv(lease_id, slots, right, right)
    with pytest.raises(InvalidRequest, match=f"needs {k_size} bytes"):
        await wire.write_kv(lease_id, slots, right.astype(np.float32), right)
    with pytest.raises(InvalidRequest, match="slots must be a 1-D row of int64, not int32"):
        await wire.read_kv(lease_id, slots.astype(np.int32))
    with pytest.raises(InvalidRequest, match="slots must be a 1-D row of int64, not int64 of shape"):
        await wire.read_kv(lease_id, slots[None])
