"""`client.sync`: the verbs as blocking calls, in process and on Ray, also in a thread that runs an event loop."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.caches.cache_under_test import small_config
from support.processes.alarm import Alarm

from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.actors.client import prefix_cache_client
from raydix.actors.client.prefix_cache_client import SyncClient
from raydix.schemas import (
    AcquireRequest,
    EvictionConfig,
    InvalidRequest,
    LeaseConfig,
    OpenSession,
    PoolExhausted,
    TokenIds,
)

CONFIG = small_config(4)  # eight pages of four
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def cache(request: pytest.FixtureRequest) -> Iterator[SyncClient]:
    """A client of an empty cache. At the end the test must have released all leases."""
    if request.param == "local":
        client: PrefixCacheClient = LocalPrefixCache(CONFIG)
    else:
        client = PrefixCacheClient(request.getfixturevalue("running_cache")(CONFIG))
    with client.sync as cache:
        yield cache
        cache.reset()
        cache.check_invariants()
        stats = cache.stats()
        assert (stats.free_slots, stats.open_leases, stats.waiters) == (32, 0, 0)


def test_the_verbs_wait_for_their_answers(cache: SyncClient) -> None:
    with cache.acquire(PROMPT, new_tokens=2) as lease:
        assert (lease.prefix_len, len(lease), lease.slots.shape) == (0, 11, (11,))
        assert lease.insert(PROMPT).num_inserted == 8
        assert lease.published_len == 8
        assert len(lease.extend(3)) == 3

    assert cache.match(PROMPT).prefix_len == 8
    assert str(cache.explain(PROMPT)).startswith("8 of 9 tokens hit")
    assert cache.tree().branches[0].num_tokens_below == 8
    with cache.lock(PROMPT) as lease:
        assert lease.prefix_len == 8
        assert cache.stats().protected_slots == 8
    assert cache.evict(1).num_evicted == 8
    assert cache.config == CONFIG


async def test_it_works_where_a_loop_runs_already(cache: SyncClient) -> None:
    with cache.acquire(PROMPT) as lease:
        lease.insert(PROMPT)
    assert cache.match(PROMPT).prefix_len == 8


def test_a_block_that_raises_aborts_and_errors_are_the_caches_own(cache: SyncClient) -> None:
    with pytest.raises(ZeroDivisionError), cache.acquire(PROMPT):
        raise ZeroDivisionError
    with pytest.raises(PoolExhausted, match="can never fit"):
        cache.acquire(range(1, 100))
    with pytest.raises(InvalidRequest, match="token"):
        cache.match([])


def test_a_lease_is_true_whatever_it_covers(cache: SyncClient) -> None:
    lease = cache.lock(PROMPT)
    assert len(lease) == 0

    if lease:
        lease.release()

    assert cache.stats().open_leases == 0


def test_a_lease_can_be_handed_over(cache: SyncClient) -> None:
    lease = cache.acquire(PROMPT)
    with cache.adopt(lease.grant()) as adopted:
        assert adopted.lease_id == lease.lease_id
        assert len(adopted) == 9
        with pytest.raises(InvalidRequest, match=r"cannot be pickled .* `await lease.grant\(\)`"):
            pickle.dumps(adopted)


def test_the_pool_is_read_and_written(cache: SyncClient) -> None:
    pool = cache.attach_pool()
    k, v = (torch.rand(len(CONFIG.pool.layers), 4, *shape) for shape in CONFIG.pool.layers[0].shapes)

    with cache.acquire(PROMPT) as lease:
        pool.write_kv(lease, lease.slots[:4], k, v)
        read_k, read_v = pool.read_kv(lease, lease.slots[:4])
        assert torch.equal(read_k, k)
        assert torch.equal(read_v, v)
        with pytest.raises(InvalidRequest, match="gives, not NoneType"):
            pool.read_kv(None, lease.slots[:4])  # type: ignore[arg-type]
        if pool.mapped:
            assert torch.equal(pool.gather(1, lease.slots[:4])[0], k[1])


def ring_when(cache: SyncClient, reached: Callable[[Any], bool], alarm: Alarm) -> threading.Thread:
    """Interrupt the main thread once `reached(stats)` is true."""

    def watch() -> None:
        while not reached(cache.stats()):
            time.sleep(0.001)
        alarm.ring()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("error", "by"),
    [(KeyboardInterrupt(), signal.SIGINT), (TimeoutError("too late"), signal.SIGUSR2)],
    ids=["ctrl_c", "alarm"],
)
def test_an_interrupt_while_waiting_for_room_leaves_nothing_behind(
    cache: SyncClient, error: BaseException, by: signal.Signals
) -> None:
    with cache.acquire([1], new_tokens=31), Alarm(error, by) as alarm:
        watching = ring_when(cache, lambda stats: stats.waiters == 1, alarm)

        with pytest.raises(type(error)):
            cache.acquire(PROMPT)

        watching.join()
        assert (cache.stats().waiters, cache.stats().open_leases) == (0, 1)
    assert cache.stats().open_leases == 0


def test_closing_ends_what_is_held_and_the_thread() -> None:
    cache = LocalPrefixCache(CONFIG)
    cache.sync.acquire(PROMPT)

    cache.sync.close()
    cache.sync.close()

    assert cache._host.service.stats().open_leases == 0
    assert not [each for each in threading.enumerate() if each.name == "raydix-sync"]
    with pytest.raises(InvalidRequest, match="closed"):
        cache.sync.match(PROMPT)
    cache.sync.thread.stop()


def test_a_closed_client_starts_no_thread_to_refuse_a_verb_or_to_end_a_lease_again() -> None:
    cache = LocalPrefixCache(CONFIG).sync
    lease = cache.acquire(PROMPT)
    cache.close()

    for verb in (lambda: cache.match(PROMPT), lambda: lease.insert(PROMPT), lambda: list(cache.events()), cache.open):
        with pytest.raises(InvalidRequest, match="this client was closed: make a new one"):
            verb()
    lease.release()
    cache.close()

    assert not [each for each in threading.enumerate() if each.name == "raydix-sync"]


def test_several_threads_that_ask_first_are_given_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(SyncClient):
        def __init__(self, client: PrefixCacheClient) -> None:
            time.sleep(0.05)
            super().__init__(client)

    monkeypatch.setattr(prefix_cache_client, "SyncClient", Slow)
    cache = LocalPrefixCache(CONFIG)
    with ThreadPoolExecutor(4) as threads:
        clients = set(threads.map(lambda _: cache.sync, range(4)))

    assert len(clients) == 1
    cache.sync.close()


async def test_a_client_that_coroutines_use_cannot_be_used_by_plain_calls_too() -> None:
    async with LocalPrefixCache(CONFIG) as cache:
        with pytest.raises(InvalidRequest, match="another event loop"):
            cache.sync.match(PROMPT)
        cache.sync.thread.stop()


def test_a_local_cache_is_used_on_one_loop_at_a_time() -> None:
    cache = LocalPrefixCache(CONFIG)
    first, second = PrefixCacheClient(cache).sync, PrefixCacheClient(cache).sync
    first.open()

    with pytest.raises(InvalidRequest, match="a local cache is used on one event loop"):
        second.open()
    with pytest.raises(InvalidRequest, match="a local cache is used on one event loop"):
        cache.sync.match(PROMPT)
    with pytest.raises(InvalidRequest, match="a local cache is used on one event loop"):
        asyncio.run(cache.close())
    assert first.match(PROMPT).prefix_len == 0

    first.close()
    assert second.match(PROMPT).prefix_len == 0  # the first client's loop has ended
    second.close()
    cache.sync.thread.stop()


def test_a_local_cache_whose_loop_has_ended_evicts_and_expires_on_the_next() -> None:
    changed = {"leases": LeaseConfig(session_ttl_s=0.3), "eviction": EvictionConfig()}
    cache = LocalPrefixCache(CONFIG.model_copy(update=changed))

    async def on_a_loop(expired: int) -> None:
        async with PrefixCacheClient(cache) as client:
            assert (await client.match(PROMPT)).prefix_len == (8 if expired else 0)
            async with await client.acquire(PROMPT) as lease:
                await lease.insert(PROMPT)
            cache._host.service.open_session(OpenSession(session_id=f"silent {expired}", owner="test"))
            async with asyncio.timeout(20):
                while (stats := await client.stats()).expired_sessions == expired:  # noqa: ASYNC110 -- no event
                    await asyncio.sleep(0.01)
            assert stats.eviction_task.alive

    for expired in range(3):
        asyncio.run(on_a_loop(expired))


def test_who_stood_in_line_on_a_loop_that_was_closed_is_in_nobodys_way() -> None:
    cache = LocalPrefixCache(CONFIG.model_copy(update={"leases": LeaseConfig(session_ttl_s=0.3)}))
    queue, loop = cache._host.service.wait_queue, asyncio.new_event_loop()

    async def fill() -> None:
        client = PrefixCacheClient(cache)
        await client.acquire([1] * 32)
        await client.session.transport.submit(AcquireRequest(lease_id="2", tokens=TokenIds.pack([2])))
        queue._queue[0].outcome.add_done_callback(lambda _: None)  # as if a caller waited for it

    async def go_on() -> None:
        async with PrefixCacheClient(cache) as client:
            assert (await client.stats()).waiters == 0
            async with asyncio.timeout(20):
                while not (stats := await client.stats()).expired_sessions:  # noqa: ASYNC110 -- no event
                    await asyncio.sleep(0.01)
            assert (stats.open_leases, stats.quarantined_slots) == (0, 32)

    loop.run_until_complete(fill())
    loop.close()
    asyncio.run(go_on())


def test_every_verb_of_a_client_has_its_plain_twin_with_the_same_parameters() -> None:
    of_leases = {
        "insert",
        "insert_next",
        "extend",
        "confirm_open",
        "release",
        "release_window",
        "abort",
        "unlock",
        "grant",
        "preempt",
        "check_lease",
    }
    verbs = {
        name: verb
        for name, verb in inspect.getmembers(PrefixCacheClient, inspect.isfunction)
        if not name.startswith("_") and name not in of_leases
    }

    assert {"match", "acquire", "stats", "events", "close"} <= verbs.keys()
    for name, verb in verbs.items():
        plain = getattr(SyncClient, name)
        assert list(inspect.signature(plain).parameters) == list(inspect.signature(verb).parameters), name
        assert not inspect.iscoroutinefunction(inspect.unwrap(plain) if name in ("open", "close") else plain), name
        assert plain.__doc__, name
