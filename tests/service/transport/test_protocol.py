"""Clients and caches of different protocols reject each other before any request. The error names both versions."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import re
import sys
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import pytest
from service.transport.test_unix_socket import HEADER, Listening, framed, next_payload
from support.caches.cache_in_process import HandleInProcess
from support.caches.cache_under_test import small_config
from support.caches.recorded_protocol import recorded_calls, recorded_frames

from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.actors.cluster import deploy
from raydix.actors.transport import batch_codec
from raydix.actors.transport.unix_socket import UnixSocketClient
from raydix.schemas import Batch, ConfigMismatch, ResetRequest, RetireRequest, SetWeightsRequest
from raydix.schemas.protocol import PROTOCOL, Handshake, check_handshake, handshake, packed_handshake, read_handshake

OWN = re.escape(f"protocol {PROTOCOL} (raydix {handshake()[2]})")
OLD_CACHE = rf"the cache speaks protocol 0 \(raydix unknown\), but this client speaks {OWN}: restart the cache with"
OLD_CLIENT = rf"the client speaks protocol 0 \(raydix unknown\), but this cache speaks {OWN}: install raydix"
NEXT = ("raydix", PROTOCOL + 1, "9.9.9")
BEFORE = ("raydix", PROTOCOL - 1, "0.1.9")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets exist only on Linux")


# ---------------------------------------------------------------- the handshake


def test_a_handshake_is_a_row_of_built_in_types_whose_layout_never_changes() -> None:
    name, protocol, version = handshake()

    assert [type(each) for each in handshake()] == [str, int, str]
    assert (name, protocol) == ("raydix", PROTOCOL)
    assert packed_handshake() == f'["raydix", {PROTOCOL}, "{version}"]'.encode()
    assert read_handshake(packed_handshake()) == read_handshake([*handshake()]) == handshake()


@pytest.mark.parametrize(
    "row",
    [
        *(None, (), ("raydix",), ("other", 1, "1"), ("raydix", "1", "1"), ("raydix", True, 1), (*handshake(), 1)),
        *(("raydix", -1, "1"), ("raydix", 2**31, "1"), {"raydix": 1}, b"", b"[", b"[" * 1000, b"\xff", bytes(2000)),
        pickle.dumps(handshake()),
    ],
    ids=lambda row: repr(row)[:20].partition("+")[0],
)
def test_anything_else_is_of_protocol_0(row: object) -> None:
    assert read_handshake(row) is None
    with pytest.raises(ConfigMismatch, match=OLD_CACHE):
        check_handshake(row, "cache")


def test_versions_of_one_protocol_speak_to_each_other_and_others_do_not() -> None:
    check_handshake(("raydix", PROTOCOL, "0.0.1"), "cache")
    check_handshake(json.dumps(["raydix", PROTOCOL, "7"]).encode(), "client")

    with pytest.raises(ConfigMismatch, match=rf"the cache speaks protocol {PROTOCOL + 1} \(raydix 9.9.9\).*{OWN}"):
        check_handshake(NEXT, "cache")
    with pytest.raises(ConfigMismatch, match=r"raydix \\x1b\[31m"):
        check_handshake(("raydix", PROTOCOL + 1, "\x1b[31m"), "cache")


# ---------------------------------------------------------------- a client of protocol 0, a cache of this one


@pytest.fixture
async def listening() -> AsyncIterator[Listening]:
    async with LocalPrefixCache(small_config()) as cache:
        there = Listening(cache)
        yield there
        there.server.close()


FIRST_CALLS = [call for call in recorded_calls() if call.method in ("config_digest", "open_session")]


@pytest.mark.parametrize("call", FIRST_CALLS, ids=lambda call: call.method)
async def test_the_first_calls_of_an_old_client_raise_what_it_understands(listening: Listening, call: Any) -> None:
    method = getattr(HandleInProcess(listening.cache, Random(0)).actor, call.method)

    with pytest.raises(ConfigMismatch, match=OLD_CLIENT) as raised:
        await method(*pickle.loads(call.arguments))

    assert_plain(pickle.dumps(raised.value))
    assert (await listening.cache.stats()).open_sessions == 2  # of the fixture and of the local cache


@on_linux
async def test_every_frame_of_an_old_client_is_answered_with_an_error_that_it_understands(listening: Listening) -> None:
    peer = await listening.connected()
    frames = [frame.data for frame in recorded_frames() if frame.sender == "client"][:4]

    for frame in frames:
        await asyncio.get_running_loop().sock_sendall(peer, frame)
        number, payload = await asyncio.wait_for(next_payload(peer), 30)

        assert number == HEADER.unpack(frame[: HEADER.size])[0]
        assert_plain(payload)
        with pytest.raises(ConfigMismatch, match=OLD_CLIENT):
            raise pickle.loads(payload)
    assert listening.service.stats().requests == 0
    peer.close()


class OldUnpickler(pickle.Unpickler):
    """An unpickler that finds only the class `ConfigMismatch`, which every release of protocol 0 has."""

    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) == ("raydix.schemas.errors", "ConfigMismatch")
        return ConfigMismatch


def assert_plain(pickled: bytes) -> None:
    """Check that an error is pickled as its class name and one string."""
    error = OldUnpickler(io.BytesIO(pickled)).load()
    assert list(map(type, error.args)) == [str]


@on_linux
@pytest.mark.parametrize("row", [NEXT, BEFORE], ids=["later", "earlier"])
async def test_a_client_of_another_protocol_gets_the_handshake_and_is_served_nothing(
    listening: Listening, row: Handshake
) -> None:
    """A client of protocol 7 takes no ticket for the answer to `reset`, `retire` and `set_weights`."""
    peer, session = await listening.connected(), listening.cache.session
    requests = ResetRequest(), RetireRequest(lora_id="a"), SetWeightsRequest(label="2")
    batch = batch_codec.pack(Batch(session_id=session.session_id, epoch=listening.service.epoch, requests=requests))

    await asyncio.get_running_loop().sock_sendall(peer, framed(0, json.dumps(row).encode()) + framed(1, batch))

    assert await asyncio.wait_for(next_payload(peer), 30) == (0, packed_handshake())
    number, payload = await asyncio.wait_for(next_payload(peer), 30)
    assert number == 1
    assert_plain(payload)
    with pytest.raises(ConfigMismatch, match=rf"the client speaks protocol {row[1]} .* install raydix"):
        raise pickle.loads(payload)
    assert listening.service.stats().requests == 0
    peer.close()


# ---------------------------------------------------------------- a client of this protocol, a cache of protocol 0


class RecordedHandle:
    """The handle of a recorded cache. Its methods return the recorded answers."""

    _actor_id = "recorded"

    def __init__(self) -> None:
        self.called: list[str] = []
        for method in {call.method for call in recorded_calls()}:
            setattr(self, method, RecordedMethod(self, method))


class RecordedMethod:
    def __init__(self, handle: RecordedHandle, name: str) -> None:
        self._handle = handle
        self._name = name

    async def remote(self, *arguments: Any) -> Any:
        """Return or raise the recorded answer."""
        self._handle.called.append(self._name)
        call = next(call for call in recorded_calls() if call.method == self._name)
        if call.error is not None:
            raise pickle.loads(call.error)
        return pickle.loads(call.result or b"")


async def test_a_session_with_an_old_cache_is_refused_before_anything_is_sent() -> None:
    handle = RecordedHandle()

    with pytest.raises(ConfigMismatch, match=OLD_CACHE):
        await PrefixCacheClient(handle).match([1])

    assert handle.called == []


async def test_an_actor_that_lacks_the_method_is_an_old_cache(listening: Listening) -> None:
    class OldActor(HandleInProcess):
        def __getattr__(self, method: str) -> Any:
            return super().__getattr__("no_such_method" if method == "handshake" else method)

    with pytest.raises(ConfigMismatch, match=OLD_CACHE):
        await PrefixCacheClient(OldActor(listening.cache, Random(0))).open()


async def test_a_cache_of_a_later_protocol_is_refused_before_anything_is_sent(listening: Listening) -> None:
    handle = HandleInProcess(listening.cache, Random(0))
    handle.actor.handshake = later  # type: ignore[method-assign]

    with pytest.raises(ConfigMismatch, match=rf"the cache speaks protocol {PROTOCOL + 1} \(raydix 9.9.9\)"):
        await PrefixCacheClient(handle).open()

    assert (await listening.cache.stats()).open_sessions == 2


@pytest.mark.parametrize("call", ["events", "event_snapshot"])
async def test_a_follower_of_a_cache_of_another_protocol_is_refused_before_anything_is_sent(
    call: str, listening: Listening
) -> None:
    handle = HandleInProcess(listening.cache, Random(0))
    handle.actor.handshake = later  # type: ignore[method-assign]
    client = PrefixCacheClient(handle)

    with pytest.raises(ConfigMismatch, match=rf"the cache speaks protocol {PROTOCOL + 1} \(raydix 9.9.9\)"):
        await (client.event_snapshot() if call == "event_snapshot" else anext(client.events(0)))

    assert (await listening.cache.stats()).open_sessions == 2
    await client.close()


async def later(row: Any) -> Any:
    return NEXT


@pytest.mark.parametrize("verb", ["connect", "start_cache"])
def test_an_old_cache_is_refused_when_it_is_found(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = RecordedHandle()
    monkeypatch.setattr(deploy, "find", lambda name, namespace: handle)
    monkeypatch.setattr(deploy.ray, "is_initialized", lambda: True)
    calls: dict[str, Callable[[], Any]] = {
        "connect": lambda: deploy.connect("old", config=small_config()),
        "start_cache": lambda: deploy.start_cache(small_config(), name="old", num_gpus=0),
    }

    with pytest.raises(ConfigMismatch, match=OLD_CACHE):
        calls[verb]()

    assert handle.called == []


@on_linux
@pytest.mark.parametrize("answer", ["as recorded", "of a later protocol"])
async def test_a_socket_whose_first_answer_is_of_another_protocol_is_refused(answer: str) -> None:
    refusal = recorded_frames()[-1]
    assert refusal.sender == "cache"
    answers = {"as recorded": refusal.data, "of a later protocol": framed(0, json.dumps(NEXT).encode())}
    arrived: list[bytes] = []

    async def cache(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.append(await reader.readexactly(HEADER.size + len(packed_handshake())))
        writer.write(answers[answer])
        arrived.append(await reader.read())
        writer.close()

    server = await asyncio.start_unix_server(cache, "\0raydix-recorded-cache")
    expected = OLD_CACHE if answer == "as recorded" else f"the cache speaks protocol {PROTOCOL + 1}"
    with pytest.raises(ConfigMismatch, match=expected):
        await UnixSocketClient.open("\0raydix-recorded-cache", server)
    async with asyncio.timeout(30):
        while len(arrived) < 2:  # noqa: ASYNC110 -- until the client has closed
            await asyncio.sleep(0)
    server.close()

    assert arrived == [framed(0, packed_handshake()), b""]


@on_linux
async def test_a_cache_that_closes_the_socket_in_place_of_an_answer_is_called() -> None:
    async def cache(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_unix_server(cache, "\0raydix-closing-cache")
    assert await UnixSocketClient.open("\0raydix-closing-cache", server) is None
    server.close()
