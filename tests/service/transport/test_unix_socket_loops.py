"""Unix sockets work on asyncio and uvloop, at both ends. Ray runs actors on uvloop if it is installed."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

import pytest
from support.caches.cache_under_test import small_config
from support.processes.fresh_process import run_fresh

from raydix.actors import LocalPrefixCache
from raydix.actors.service.unix_socket_server import UnixSocketServer
from raydix.actors.transport import batch_codec
from raydix.actors.transport.unix_socket import UnixSocketClient
from raydix.schemas import Batch, BatchResponse, OpenSession, StatsRequest

uvloop = pytest.importorskip("uvloop")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets exist only on Linux")

# An actor and its client on different loops. Without the socket the client would fall back to Ray calls.
CLIENT = """
import asyncio, ray, uvloop
from raydix.actors import PrefixCacheClient, start_cache
from raydix.schemas import CacheConfig, PoolConfig

ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
cache = start_cache(CacheConfig(pool=PoolConfig(num_slots=64, device="cpu")))

async def main():
    async with PrefixCacheClient(cache) as client:
        lease = await client.acquire([1, 2, 3])
        await lease.insert([1, 2, 3], release=True)
        found = await client.match([1, 2, 3])
        socket = client.session.transport._socket
        return found.prefix_len, socket is not None and socket.is_open

for run in (asyncio.run, uvloop.run):
    print(*run(main()))
"""


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_batch_is_answered_on_every_loop(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def ask() -> object:
        async with LocalPrefixCache(small_config()) as cache:
            service = cache._host.service
            server = UnixSocketServer(service)
            service.open_session(OpenSession(session_id="s", owner="test"))
            client = await UnixSocketClient.open(await server.address(), cache)
            assert client is not None, "the client cannot connect"
            batch = Batch(session_id="s", epoch=service.epoch, requests=(StatsRequest(),), seq=1, after=0)
            told: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            client.ask(1, batch_codec.pack(batch), lambda answer: told.set_result(batch_codec.unpack(answer)))
            answer = await asyncio.wait_for(told, 30)
            client.close()
            server.close()
            return answer

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert isinstance(runner.run(ask()), BatchResponse)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.parametrize("actors_on_uvloop", ["0", "1"])
def test_client_and_cache_may_run_on_different_loops(actors_on_uvloop: str) -> None:
    done = run_fresh(CLIENT, RAY_USE_UVLOOP=actors_on_uvloop, PYTHONPATH=os.pathsep.join(sys.path))

    assert done.stdout.splitlines().count("3 True") == 2, done.stdout + done.stderr
