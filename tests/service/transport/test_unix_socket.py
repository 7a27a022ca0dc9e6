"""Clients on the cache's machine send batches over a Unix socket, with the guarantees of Ray calls."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from random import Random
from typing import Any

import pytest
import ray
from pydantic import ValidationError
from support.caches.cache_fixtures import over_calls
from support.caches.cache_in_process import HandleInProcess
from support.caches.cache_under_test import small_config
from support.caches.raw_calls import forged

from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.actors.service.unix_socket_server import UnixSocketServer
from raydix.actors.transport import batch_codec
from raydix.actors.transport.unix_socket import UnixSocketClient
from raydix.schemas import (
    Batch,
    BatchResponse,
    CacheConfig,
    CacheUnavailable,
    InvalidRequest,
    LeaseConfig,
    LeaseExpired,
    MatchRequest,
    Message,
    OpenSession,
    PoolConfig,
    StaleEpoch,
    StatsRequest,
    TokenIds,
)
from raydix.schemas.message import receive
from raydix.schemas.protocol import packed_handshake
from raydix.schemas.requests import MAX_REQUESTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets exist only on Linux")

PROBE, LOOK = MatchRequest(tokens=TokenIds.pack([1])), StatsRequest()
HEADER = struct.Struct("<QI")  # of a frame: batch number, payload bytes
NOBODY = 65534


class Listening:
    """A cache in this process that listens on a Unix socket, with one open session."""

    def __init__(self, cache: LocalPrefixCache) -> None:
        self.cache = cache
        self.service = cache._host.service
        self.server = UnixSocketServer(self.service)
        self.service.open_session(OpenSession(session_id="s", owner="test"))

    async def address(self) -> str:
        address = await self.server.address()
        assert address is not None
        return address

    async def connected(self) -> socket.socket:
        """Return a connected socket that has sent nothing."""
        peer = socket.socket(socket.AF_UNIX)
        peer.setblocking(False)
        await asyncio.get_running_loop().sock_connect(peer, await self.address())
        return peer

    async def admitted(self) -> socket.socket:
        """Return a connected socket after the handshake."""
        peer = await self.connected()
        await asyncio.get_running_loop().sock_sendall(peer, framed(0, packed_handshake()))
        assert await asyncio.wait_for(next_payload(peer), 30) == (0, packed_handshake())
        return peer

    def batch(self, seq: int, after: int, *requests: Message) -> Batch:
        return Batch(session_id="s", epoch=self.service.epoch, requests=requests, seq=seq, after=after)


@pytest.fixture
async def listening() -> AsyncIterator[Listening]:
    async with LocalPrefixCache(small_config()) as cache:
        there = Listening(cache)
        yield there
        there.server.close()
        cache._host.service.core.check_invariants()


def framed(number: int, payload: bytes) -> bytes:
    return HEADER.pack(number, len(payload)) + payload


async def next_frame(peer: socket.socket) -> tuple[int, Any]:
    """Return the number of a batch and its unpacked answer."""
    number, payload = await next_payload(peer)
    return number, batch_codec.unpack(payload)


async def next_payload(peer: socket.socket) -> tuple[int, bytes]:
    number, size = HEADER.unpack(await received(peer, HEADER.size))
    return number, await received(peer, size)


async def received(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await asyncio.get_running_loop().sock_recv(peer, size - len(data))
        assert more, "the connection was closed"
        data += more
    return data


# ---------------------------------------------------------------- frames


@pytest.mark.parametrize("longest", [1, 7, 300, 10**6])
async def test_batches_are_whole_however_the_stream_is_cut(listening: Listening, longest: int) -> None:
    rng = Random(longest)
    sent = [listening.batch(seq, seq - 1, *[PROBE] * rng.randint(0, 20), LOOK) for seq in range(1, 12)]
    stream = b"".join(framed(100 + batch.seq, batch_codec.pack(batch)) for batch in sent)
    peer = await listening.admitted()

    while stream:
        size = rng.randint(1, longest)
        await asyncio.get_running_loop().sock_sendall(peer, stream[:size])
        await asyncio.sleep(0)
        stream = stream[size:]
    answers = [await asyncio.wait_for(next_frame(peer), 30) for _ in sent]

    probes = 0
    for batch, (number, answer) in zip(sent, answers, strict=True):
        probes += len(batch.requests) - 1
        assert number == 100 + batch.seq
        assert isinstance(answer, BatchResponse)
        assert answer.responses[-1].probes == probes
    peer.close()


async def test_what_is_no_batch_is_refused_and_the_next_one_served(listening: Listening) -> None:
    torn = batch_codec.pack(listening.batch(1, 0, LOOK))[:-5]
    past = Batch(session_id="s", epoch="another", requests=(LOOK,), seq=1, after=0)
    peer = await listening.admitted()

    for number, payload in enumerate([torn, batch_codec.pack(LOOK), b"", batch_codec.pack(past)]):
        await asyncio.get_running_loop().sock_sendall(peer, framed(number, payload))
    answers = [await asyncio.wait_for(next_frame(peer), 30) for _ in range(4)]
    await asyncio.get_running_loop().sock_sendall(peer, framed(9, batch_codec.pack(listening.batch(1, 0, LOOK))))

    assert [number for number, _ in answers] == [0, 1, 2, 3]
    assert [type(answer) for _, answer in answers] == [InvalidRequest] * 3 + [StaleEpoch]
    assert isinstance((await asyncio.wait_for(next_frame(peer), 30))[1], BatchResponse)
    peer.close()


async def test_what_is_no_frame_ends_the_connection(listening: Listening) -> None:
    peer = await listening.connected()

    await asyncio.get_running_loop().sock_sendall(peer, b"GET / HTTP/1.1\r\n\r\n")

    with pytest.raises((AssertionError, ConnectionError)):
        await asyncio.wait_for(next_frame(peer), 30)
    peer.close()


async def test_a_frame_larger_than_any_batch_ends_its_connection_and_no_other(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raydix.actors.service.unix_socket_server.MAX_FIRST_FRAME_BYTES", 4096)
    large, small = await listening.connected(), await listening.admitted()

    await asyncio.get_running_loop().sock_sendall(large, framed(1, bytes(4097))[:100])  # the rest is never sent
    await asyncio.get_running_loop().sock_sendall(small, framed(1, batch_codec.pack(listening.batch(1, 0, LOOK))))

    with pytest.raises((AssertionError, ConnectionError)):
        await asyncio.wait_for(next_frame(large), 30)
    assert isinstance((await asyncio.wait_for(next_frame(small), 30))[1], BatchResponse)
    large.close()
    small.close()


async def test_a_batch_of_too_many_requests_is_refused_before_any_of_them_is_looked_at(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = 0

    def counted(*row: Any) -> Message:
        nonlocal looked_at
        looked_at += 1
        return receive(*row)

    monkeypatch.setattr(batch_codec, "receive", counted)
    fields = {"session_id": "s", "epoch": listening.service.epoch, "seq": 1, "after": 0}
    too_many = forged(Batch, requests=(PROBE,) * (MAX_REQUESTS + 1), **fields)
    most = Batch(requests=(PROBE,) * (MAX_REQUESTS - 1) + (LOOK,), **fields)  # type: ignore[arg-type]
    peer = await listening.admitted()

    await asyncio.get_running_loop().sock_sendall(peer, framed(1, batch_codec.pack(too_many)))
    _, refused = await asyncio.wait_for(next_frame(peer), 30)
    assert looked_at == 0
    await asyncio.get_running_loop().sock_sendall(peer, framed(2, batch_codec.pack(most)))
    _, answer = await asyncio.wait_for(next_frame(peer), 30)

    assert isinstance(refused, InvalidRequest)
    assert str(refused) == "malformed Batch: at most 1024 requests travel in one, not 1025"
    assert answer.responses[-1].probes == MAX_REQUESTS - 1
    assert answer.responses[-1].requests == MAX_REQUESTS
    peer.close()


@pytest.mark.parametrize("seq", [1, 0])
def test_no_batch_of_too_many_requests_can_be_made(seq: int) -> None:
    with pytest.raises(ValidationError, match="at most 1024 items"):
        Batch("s", "e", (PROBE,) * (MAX_REQUESTS + 1), seq, 0)


async def test_between_the_batches_of_one_client_others_are_served(listening: Listening) -> None:
    greedy, other = await listening.admitted(), await listening.admitted()
    batches = [batch_codec.pack(listening.batch(seq, seq - 1, *[PROBE] * 20, LOOK)) for seq in range(1, 31)]
    stream = b"".join(framed(seq, packed) for seq, packed in enumerate(batches, 1))

    assert greedy.send(stream) == len(stream)  # the server can read both sockets in its next turn
    other.send(framed(1, batch_codec.pack(Batch(session_id="s", epoch=listening.service.epoch, requests=(LOOK,)))))
    _, answer = await asyncio.wait_for(next_frame(other), 30)

    assert answer.responses[0].probes <= 2 * 20  # of 30 * 20
    for seq in range(1, 31):
        number, answer = await asyncio.wait_for(next_frame(greedy), 30)
        assert (number, answer.responses[-1].probes) == (seq, seq * 20)
    greedy.close()
    other.close()


async def test_of_a_client_that_does_not_read_its_answers_no_more_is_taken_until_it_does(listening: Listening) -> None:
    num_batches = 2000
    peer = await listening.admitted()
    stream = b"".join(
        framed(seq, batch_codec.pack(listening.batch(seq, seq - 1, *[PROBE] * 50, LOOK)))
        for seq in range(1, num_batches + 1)
    )
    sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(peer, stream))

    executed = turns = 0
    while turns < 100:  # until the count is unchanged for 100 turns
        await asyncio.sleep(0.001)
        before, executed = executed, listening.service.stats().requests
        turns = turns + 1 if 0 < executed == before else 0
    assert executed < num_batches * 51 / 2

    answers = [await asyncio.wait_for(next_frame(peer), 30) for _ in range(num_batches)]
    await sending
    assert [number for number, _ in answers] == list(range(1, num_batches + 1))
    assert answers[-1][1].responses[-1].probes == num_batches * 50
    peer.close()


async def test_many_clients_connect_while_the_cache_is_busy(listening: Listening) -> None:
    address, peers = await listening.address(), []
    for _ in range(300):
        peers.append(socket.socket(socket.AF_UNIX))
        peers[-1].setblocking(False)
        peers[-1].connect(address)  # the server accepts none before the loop runs
    for peer in peers:
        await asyncio.get_running_loop().sock_sendall(peer, framed(1, packed_handshake()))
    for peer in peers:
        assert (await asyncio.wait_for(next_payload(peer), 30))[0] == 1
        peer.close()


async def test_a_client_that_comes_when_too_many_connect_is_told_so_and_calls(
    listening: Listening, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("raydix.actors.service.unix_socket_server._BACKLOG", 1)
    address, peers = await listening.address(), []
    with pytest.raises(BlockingIOError):
        while True:
            peers.append(socket.socket(socket.AF_UNIX))
            peers[-1].setblocking(False)
            peers[-1].connect(address)

    assert await UnixSocketClient.open(address, listening) is None

    assert [record.getMessage() for record in caplog.records if record.name.startswith("raydix")] == [
        "no socket to the cache, Ray calls instead: too many clients connect to it at the same time"
    ]
    for peer in peers:
        peer.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")
async def test_another_users_process_is_refused(listening: Listening) -> None:
    await listening.address()

    os.seteuid(NOBODY)  # the kernel records the user that connects
    try:
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(await listening.address())
    finally:
        os.seteuid(0)

    stranger.setblocking(False)
    with pytest.raises((AssertionError, ConnectionError)):
        await asyncio.wait_for(next_frame(stranger), 30)
    stranger.close()
    peer = await listening.admitted()
    await asyncio.get_running_loop().sock_sendall(peer, framed(1, batch_codec.pack(listening.batch(1, 0, LOOK))))
    assert isinstance((await asyncio.wait_for(next_frame(peer), 30))[1], BatchResponse)
    peer.close()


# ---------------------------------------------------------------- clients


class CountingHandle(HandleInProcess):
    """The handle of a cache in this process that counts calls of `execute`."""

    num_calls = 0

    def __getattr__(self, method: str) -> Any:
        self.num_calls += method == "execute"
        return super().__getattr__(method)


@pytest.fixture
def handle(listening: Listening) -> CountingHandle:
    return CountingHandle(listening.cache, Random(0), socket_server=listening.server)


def socket_of(client: PrefixCacheClient) -> UnixSocketClient | None:
    return client.session.transport._socket  # type: ignore[attr-defined]


async def test_a_client_on_the_caches_machine_makes_no_calls(handle: CountingHandle) -> None:
    async with PrefixCacheClient(handle) as client:
        async with await client.acquire([1, 2, 3]) as lease:
            assert (await lease.insert([1, 2, 3])).num_inserted == 3
        assert (await client.match([1, 2, 3])).prefix_len == 3

    assert handle.num_calls == 0


@pytest.mark.parametrize("why", ["another machine", "switched off", "the cache does not listen"])
async def test_a_client_that_cannot_reach_the_socket_calls(
    why: str, listening: Listening, handle: CountingHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    await listening.address()
    if why == "another machine":
        listening.server.close()  # the address does not exist on another machine
    elif why == "switched off":
        over_calls(monkeypatch)
    else:
        handle = CountingHandle(listening.cache, Random(0))

    async with PrefixCacheClient(handle) as client:
        assert socket_of(client) is None
        assert (await client.match([1])).prefix_len == 0

    assert handle.num_calls == 1


async def test_batches_and_answers_may_be_longer_than_a_first_frame(
    handle: CountingHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raydix.actors.service.unix_socket_server.MAX_FIRST_FRAME_BYTES", 2048)
    async with PrefixCacheClient(handle) as client:
        lease = await client.acquire([1])
        large = asyncio.create_task(client.match(range(2000)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        small = asyncio.create_task(lease.insert([1], release=True))
        stats = await asyncio.gather(*[client.stats() for _ in range(100)])

        assert len(batch_codec.pack(BatchResponse(epoch="e", responses=tuple(stats)))) > 2 * 2 * 2048  # in two answers
        assert ((await large).prefix_len, (await small).num_inserted) == (0, 1)
        there = socket_of(client)
        assert there is not None and there.is_open

    assert handle.num_calls == 0


async def test_a_batch_longer_than_any_frame_is_refused_and_the_next_one_served(
    handle: CountingHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raydix.actors.transport.ray_transport.MAX_FRAME_BYTES", 4096)
    async with PrefixCacheClient(handle) as client:
        with pytest.raises(InvalidRequest, match="at most 4,096 can be sent"):
            await client.match(range(2000))
        assert (await client.match([1])).prefix_len == 0


async def test_when_the_connection_breaks_what_was_on_its_way_fails_and_the_session_ends(
    listening: Listening, handle: CountingHandle
) -> None:
    async with PrefixCacheClient(handle) as client:
        lease = await client.acquire([1])
        there, session_id = socket_of(client), client.session.session_id
        assert there is not None
        asking = asyncio.create_task(client.match([1]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

        there._transport.abort()

        with pytest.raises(CacheUnavailable, match="its connection broke"):
            await asking
        with pytest.raises(LeaseExpired, match="the connection to the cache broke, and its session ended with it"):
            await lease.insert([1])
        assert (await client.match([1])).prefix_len == 0  # in another session
        assert client.session.session_id != session_id
        assert session_id not in listening.service.sessions
        assert (await client.stats()).open_leases == 0
    assert handle.num_calls == 0


async def test_a_client_that_asks_nothing_notices_that_its_connection_broke(
    handle: CountingHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raydix.actors.client.client_session._MAX_BEAT_S", 0.01)
    async with PrefixCacheClient(handle) as client:
        await client.match([1])
        transport, there = client.session.transport, socket_of(client)
        assert there is not None

        there._transport.abort()

        async with asyncio.timeout(60):
            while not isinstance(transport.lost, LeaseExpired):  # noqa: ASYNC110 -- until the next heartbeat
                await asyncio.sleep(0.01)


async def test_whenever_a_connection_breaks_nothing_is_left_behind() -> None:
    config = CacheConfig(
        pool=PoolConfig(num_slots=256, device="cpu"), leases=LeaseConfig(session_ttl_s=0.6, quarantine_grace_s=300)
    )
    async with LocalPrefixCache(config) as cache:
        server = UnixSocketServer(cache._host.service)
        for number in range(40):
            rng = Random(number)
            async with PrefixCacheClient(HandleInProcess(cache, rng, socket_server=server)) as client:
                await client.open()
                served = await asyncio.gather(
                    breaking(client, rng), *(some_requests(client, Random(seed)) for seed in range(8))
                )
                assert sum(served[1:]) > 0
                async with asyncio.timeout(60):
                    while (await cache.stats()).open_leases:  # noqa: ASYNC110 -- until the next heartbeat
                        await asyncio.sleep(0.01)
            await cache.check_invariants()
            stats = await cache.stats()
            assert stats.free_slots + stats.tree_slots == stats.num_slots
        server.close()


async def breaking(client: PrefixCacheClient, rng: Random) -> int:
    there = socket_of(client)
    assert there is not None
    for _ in range(rng.randint(0, 60)):
        await asyncio.sleep(0)
    there._transport.abort()
    return 0


async def some_requests(client: PrefixCacheClient, rng: Random) -> int:
    """Return the number of requests that were served completely."""
    served = 0
    for _ in range(10):
        tokens = [rng.randrange(4) for _ in range(6)]
        try:
            async with await client.acquire(tokens) as lease:
                await lease.insert(tokens, release=rng.random() < 0.5)
            served += 1
        except (CacheUnavailable, LeaseExpired) as error:
            assert "connection" in str(error) and "broke" in str(error)
    return served


@pytest.mark.more
async def test_a_client_dropped_without_a_close_leaves_no_connection(listening: Listening, handle: Any) -> None:
    client = PrefixCacheClient(handle)
    await client.match([1])
    assert num_sockets(await listening.address()) == 2  # the listening one, and this client's

    del client
    gc.collect()

    async with asyncio.timeout(60):
        while num_sockets(await listening.address()) != 1:  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0.01)


def num_sockets(address: str) -> int:
    """Return the number of sockets of an address in the kernel's table: the listening one and one per connection."""
    with open("/proc/net/unix") as table:
        return sum(line.rstrip().endswith(address.replace("\0", "@")) for line in table)


# ---------------------------------------------------------------- on Ray


@pytest.fixture
def actor(running_cache: Callable[[CacheConfig], Any]) -> Iterator[Any]:
    yield running_cache(small_config())


@pytest.mark.ray
@pytest.mark.parametrize("way", ["socket", "calls"])
async def test_an_actors_client_on_its_machine_has_a_channel_unless_it_is_switched_off(
    actor: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "calls":
        over_calls(monkeypatch)

    async with PrefixCacheClient(actor) as client:
        assert (socket_of(client) is not None) == (way == "socket")
        async with await client.acquire([1, 2]) as lease:
            assert (await lease.insert([1, 2])).num_inserted == 2
        await client.reset()


@pytest.mark.more
@pytest.mark.ray
async def test_a_killed_cache_is_known_to_be_gone_at_once_and_leaves_no_socket(
    ray_cluster: None,
) -> None:
    from raydix.actors import start_cache

    cache = start_cache(small_config())
    client = PrefixCacheClient(cache)
    await client.match([1])
    address = f"\0raydix-{client.session.transport.epoch}"
    assert num_sockets(address) == 2

    ray.kill(cache)

    with pytest.raises(CacheUnavailable):
        async with asyncio.timeout(300):
            while True:
                await client.match([1])
    async with asyncio.timeout(300):
        while num_sockets(address):  # noqa: ASYNC110 -- until its process has ended
            await asyncio.sleep(0.01)
    await client.close()
