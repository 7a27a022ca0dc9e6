"""Failed and cancelled requests at any moment: no caller is left waiting, and no lease is left behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

import numpy as np
import pytest
from support.caches.cache_fixtures import over_calls
from support.caches.cache_under_test import CacheUnderTest, Pages, small_config
from support.more import more

from raydix.actors import Lease, LocalPrefixCache, PrefixCacheClient
from raydix.actors.transport import batch_codec
from raydix.actors.transport.ray_transport import settle
from raydix.actors.transport.transport import Transport
from raydix.schemas import (
    CacheConfig,
    CacheError,
    CacheUnavailable,
    CloseSession,
    LeaseConfig,
    LeaseExpired,
    Message,
    PoolConfig,
    ReadKV,
    StatsRequest,
    WindowResponse,
    WriteKV,
)

QUICK = small_config().model_copy(update={"leases": LeaseConfig(session_ttl_s=0.3, quarantine_grace_s=300)})


async def test_a_session_whose_closing_is_cancelled_is_closed_all_the_same(cache1: CacheUnderTest) -> None:
    for ticks in range(12):
        leaving = cache1.another_client()
        await leaving.acquire([1, 2])
        task = asyncio.create_task(leaving.close())
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))

        await leaving.close()  # waits for the close that already runs
        if ticks == 0:
            continue  # the task was cancelled before it began
        stats = await cache1.client.stats()
        assert (stats.open_sessions, stats.open_leases) == (1, 0), f"cancelled after {ticks} ticks"


@pytest.mark.parametrize("verb", ["match", "lock", "acquire"])
async def test_a_first_verb_cancelled_after_any_number_of_ticks_leaves_no_lease(
    cache1: CacheUnderTest, verb: str
) -> None:
    for ticks in range(20):
        client = cache1.another_client()
        task = asyncio.create_task(getattr(client, verb)([1, 2]))
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))

        if task.cancelled() or verb == "match":
            await client.match([1])  # executed after the cancelled request
            assert (await cache1.client.stats()).open_leases == 0, f"cancelled after {ticks} ticks"
        await client.close()
    assert await cache1.pages() == Pages(free=8)


async def test_window_kv_given_up_by_a_caller_who_was_cancelled_is_no_longer_the_leases() -> None:
    pool = PoolConfig(num_slots=8, device="cpu")
    async with LocalPrefixCache(CacheConfig(pool=pool, sliding_window_size=2)) as cache:
        lease = await cache.acquire([1, 2, 3, 4, 5, 6])
        submit = cache.session.transport.submit
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        notes: list[Any] = []
        cache.session.transport.submit = lambda request, note: notes.append(note) or answer  # type: ignore[method-assign]
        task = asyncio.create_task(lease.release_window(6))
        await asyncio.sleep(0)
        cache.session.transport.submit = submit  # type: ignore[method-assign]
        sent = asyncio.create_task(lease.release_window(6))
        await sent
        expected = lease.swa_slots.tolist()
        lease._held._window = b"\x01\0\0\0" * 6
        task.cancel()
        await asyncio.wait((task,))

        late = WindowResponse(swa_page_starts=b"".join(n.to_bytes(4, "little") for n in expected))
        settle(answer, notes[0], late)

        assert lease.swa_slots.tolist() == expected
        assert expected[:3] == [0, 0, 0]


# ---------------------------------------------------------------- faults in transit


@pytest.fixture
def ray_cache(running_cache: Callable[[CacheConfig], Any]) -> Any:
    """A cache with a short heartbeat interval. Its clients run in other processes, so beats may be late."""
    leases = LeaseConfig(session_ttl_s=3, quarantine_grace_s=300)
    return running_cache(small_config().model_copy(update={"leases": leases}))


@pytest.mark.ray
async def test_a_fault_in_sending_fails_the_requests_and_leaves_nobody_waiting(
    ray_cache: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with PrefixCacheClient(ray_cache) as client:
        await client.match([1])

        def broken(message: Message) -> bytes:
            raise TypeError("cannot be pickled")

        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "raydix.actors.transport.ray_transport"):
            patch.setattr(batch_codec, "pack", broken)
            for verb in (client.match([1]), client.acquire([1])):
                with pytest.raises(CacheError, match="internal error of the client: TypeError: cannot be pickled"):
                    await asyncio.wait_for(verb, 30)

        assert (await client.match([1])).prefix_len == 0


class LossyHandle:
    """An actor's handle that, while `lossy`, loses answers to batches, or truncates them if `error` is CacheError."""

    def __init__(self, actor: Any, error: type[CacheError] = CacheUnavailable) -> None:
        self._actor = actor
        self._actor_id = actor._actor_id
        self.lossy = False
        self.error = error

    def __getattr__(self, method: str) -> Any:
        if method != "execute":
            return getattr(self._actor, method)
        return Lossy(self, self._actor)


class Lossy:
    def __init__(self, handle: LossyHandle, actor: Any) -> None:
        self._handle, self._actor = handle, actor

    async def remote(self, *batches: Any) -> Any:
        lossy = self._handle.lossy
        answer = await self._actor.execute.remote(*batches)
        if lossy and self._handle.error is CacheUnavailable:
            raise CacheUnavailable("the answer was lost")
        return answer[:-9] if lossy else answer


@pytest.mark.ray
@pytest.mark.parametrize("error", [CacheUnavailable, *more(CacheError)])
@pytest.mark.parametrize("lost", ["the grant", *more("the end")])
async def test_what_an_answer_that_was_lost_leaves_behind_is_given_back_when_the_cache_answers_again(
    ray_cache: Any, lost: str, error: type[CacheError], monkeypatch: pytest.MonkeyPatch
) -> None:
    over_calls(monkeypatch)
    handle = LossyHandle(ray_cache, error)
    async with PrefixCacheClient(ray_cache) as witness, PrefixCacheClient(handle) as client:
        lease = await client.acquire([1, 2])
        execute, handle.lossy = client.session.transport, True
        if lost == "the grant":
            with pytest.raises(error):
                await client.acquire([3, 4])
        else:
            execute._actor = Unreachable(ray_cache, error)  # type: ignore[attr-defined]
        with suppress(CacheError):  # `release` raises every error but a lost answer
            await lease.release()
        assert client.session._undos or lost == "the grant"
        execute._actor, handle.lossy = handle, False  # type: ignore[attr-defined]

        async with asyncio.timeout(300):
            while (await witness.stats()).open_leases or client.session._undos:  # noqa: ASYNC110 -- until the next heartbeat
                await asyncio.sleep(0.01)
        assert (await witness.stats()).free_slots == 8


class Unreachable(LossyHandle):
    """An actor's handle that loses every batch before the cache gets it."""

    def __getattr__(self, method: str) -> Any:
        return Never(self.error) if method == "execute" else getattr(self._actor, method)


class Never:
    def __init__(self, error: type[CacheError]) -> None:
        self._error = error

    async def remote(self, *batches: Any) -> Any:
        raise self._error("the batch was lost")


# ---------------------------------------------------------------- garbage-collected without a close


@pytest.mark.more
async def test_a_local_cache_dropped_without_a_close_leaves_no_task(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "asyncio"):
        cache = LocalPrefixCache(CacheConfig(pool=PoolConfig(num_slots=8, device="cpu")))
        await (await cache.acquire([1])).release()
        service = weakref.ref(cache._host.service)
        tasks = [task for task in asyncio.all_tasks() if task.get_name() == "raydix-eviction"]
        assert len(tasks) == 1

        del cache
        gc.collect()
        await asyncio.wait(tasks, timeout=60)
        del tasks
        for _ in range(3):
            gc.collect()
            await asyncio.sleep(0)

    assert service() is None
    assert [told for record in caplog.records if "raydix" in (told := record.getMessage())] == []


async def test_a_client_dropped_without_a_close_expires() -> None:
    async with LocalPrefixCache(QUICK) as cache:
        client = PrefixCacheClient(cache)
        await client.acquire([1, 2])
        await (await cache.acquire([3])).insert([3], release=True)

        del client
        gc.collect()

        async with asyncio.timeout(60):
            while (stats := await cache.stats()).open_sessions > 1:  # noqa: ASYNC110 -- until the reaper runs
                await asyncio.sleep(0.01)
        assert (stats.quarantined_slots, stats.tree_slots, stats.free_slots) == (2, 1, 5)


# ---------------------------------------------------------------- clients that return after an expiry


async def silenced(cache: LocalPrefixCache, prompt: Sequence[int] = (1, 2)) -> tuple[PrefixCacheClient, Lease]:
    """Return a client that let its session expire, and its expired lease."""
    client, withheld = PrefixCacheClient(cache), (await cache.stats()).quarantined_slots
    lease = await client.acquire([*prompt])
    await silent(cache, client)
    assert (await cache.stats()).quarantined_slots == withheld + 2
    return client, lease


async def silent(cache: LocalPrefixCache, client: PrefixCacheClient) -> None:
    """Stop the heartbeats of a client until its leases have expired."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client.session._timer, "schedule", lambda delay_s: None)
        client.session._timer.stop()
        async with asyncio.timeout(60):
            while (await cache.stats()).open_leases:  # noqa: ASYNC110 -- until the reaper runs
                await asyncio.sleep(0.01)


async def test_a_client_that_has_not_heard_of_its_loss_hears_of_it_by_confirm_open_and_not_by_release() -> None:
    async with LocalPrefixCache(QUICK) as cache:
        (one, lost), (other, released) = [await silenced(cache, prompt) for prompt in ([1, 2], [3, 4])]
        assert one.session.transport.lost is other.session.transport.lost is None

        await released.release()
        with pytest.raises(LeaseExpired):
            await lost.confirm_open()

        for client in (one, other):
            await client.close()


async def test_a_client_that_comes_back_by_any_verb_gets_another_session() -> None:
    async with LocalPrefixCache(QUICK) as cache:
        client, lease = await silenced(cache)

        again = await client.acquire([3])

        stats = await cache.stats()
        assert (stats.quarantined_slots, stats.private_slots, stats.open_sessions) == (0, 1, 2)
        verbs = lease.insert([1]), lease.extend(1), lease.confirm_open(), lease.grant(), lease.release_window(0)
        for use in verbs:
            with pytest.raises(LeaseExpired):
                await use
        await lease.release()
        assert (await again.insert([3])).num_inserted == 1
        await client.close()


TOLD_OF_LOSS: dict[str, Callable[[Transport], Awaitable[Any]]] = {
    "submit": lambda transport: transport.submit(StatsRequest()),
    "wait": lambda transport: transport.wait(1),
    "next_events": lambda transport: transport.next_events(0, 0.0),
    "pool_handle": lambda transport: transport.pool_handle(),
    "read_kv": lambda transport: transport.read_kv(
        ReadKV(session_id=transport.session_id, epoch=transport.epoch, lease_id="l", slots=np.zeros(1, np.int64))
    ),
    "write_kv": lambda transport: transport.write_kv(
        WriteKV(
            session_id=transport.session_id,
            epoch=transport.epoch,
            lease_id="l",
            slots=np.zeros(1, np.int64),
            k=np.zeros(1, np.uint8),
            v=np.zeros(1, np.uint8),
        )
    ),
    "beat": lambda transport: transport.beat(0.0),
}


@pytest.mark.parametrize("ask", TOLD_OF_LOSS.values(), ids=TOLD_OF_LOSS)
async def test_whatever_is_asked_in_a_session_that_has_expired_tells_the_client_that_it_is_lost(
    ask: Callable[[Transport], Awaitable[Any]],
) -> None:
    async with LocalPrefixCache(QUICK) as cache:
        client, _ = await silenced(cache)

        with pytest.raises(LeaseExpired):
            await ask(client.session.transport)

        assert isinstance(client.session.transport.lost, LeaseExpired)
        await client.close()


async def test_a_session_that_the_cache_has_forgotten_is_lost() -> None:
    async with LocalPrefixCache(QUICK) as cache:
        client = PrefixCacheClient(cache)
        await client.acquire([1, 2])
        cache._host.service.close_session(CloseSession(session_id=client.session.session_id))

        client.session._timer.schedule(0.0)  # the next beat
        async with asyncio.timeout(60):
            while client.session.transport.lost is None:  # noqa: ASYNC110 -- until that beat is answered
                await asyncio.sleep(0.01)

        assert (await client.match([1])).prefix_len == 0
        await client.close()


async def test_a_reader_of_events_goes_on_when_its_session_expires() -> None:
    async with LocalPrefixCache(QUICK.model_copy(update={"events": True})) as cache:
        client, _ = await silenced(cache)

        async with asyncio.timeout(60), aclosing(client.events()) as events:
            await (await cache.acquire([3])).insert([3], release=True)
            assert len((await anext(events)).events) == 1
        await client.close()


END_LATE: dict[str, Callable[[Lease], Any]] = {
    "release": lambda lease: lease.release(),
    "use": lambda lease: refused(lease.insert([1])),
}


async def refused(verb: Awaitable[Any]) -> None:
    with pytest.raises(LeaseExpired):
        await verb


@pytest.mark.parametrize("end", END_LATE.values(), ids=END_LATE)
async def test_what_is_mapped_stays_withheld_until_whoever_may_write_it_knows(end: Callable[[Lease], Any]) -> None:
    async with LocalPrefixCache(QUICK) as cache:
        client = PrefixCacheClient(cache)
        pool = await client.attach_pool()
        lease = await client.acquire([1, 2])
        await silent(cache, client)

        again = await client.acquire([3])  # another coroutine of the client opens a session

        assert pool.mapped and (await cache.stats()).quarantined_slots == 2
        await end(lease)
        async with asyncio.timeout(60):
            while (await cache.stats()).quarantined_slots:  # noqa: ASYNC110 -- until the next heartbeat
                await asyncio.sleep(0.01)
        await again.release()
        await client.close()


async def test_what_is_mapped_is_free_when_the_client_closes() -> None:
    async with LocalPrefixCache(QUICK) as cache:
        client = PrefixCacheClient(cache)
        pool = await client.attach_pool()
        lease = await client.acquire([1, 2])
        await silent(cache, client)
        await client.open()
        assert (await cache.stats()).quarantined_slots == 2

        await client.close()

        assert (await cache.stats()).free_slots == 8
        assert pool.mapped
        await lease.release()


async def test_a_client_that_comes_back_only_to_close_is_rid_of_everything() -> None:
    async with LocalPrefixCache(QUICK) as cache:
        client, lease = await silenced(cache)
        with pytest.raises(LeaseExpired):
            await lease.insert([1])

        await client.close()

        assert (await cache.stats()).free_slots == 8
        await lease.release()


@pytest.mark.parametrize("mapped", [False, True])
async def test_a_client_that_has_nothing_more_to_ask_is_back_as_soon_as_nobody_writes(mapped: bool) -> None:
    async with LocalPrefixCache(QUICK) as cache:
        client = PrefixCacheClient(cache)
        pool = await client.attach_pool(mapped=mapped)
        lease = await client.acquire([1, 2])
        await silent(cache, client)

        client.session._timer.schedule(0.0)  # its heartbeats resume

        if pool.mapped:
            await asyncio.sleep(3 * client.session._beat_s)
            assert (await cache.stats()).quarantined_slots == 2
            await refused(lease.insert([1]))
        async with asyncio.timeout(60):
            while (stats := await cache.stats()).quarantined_slots:  # noqa: ASYNC110 -- until the next heartbeat
                await asyncio.sleep(0.01)
        assert (stats.free_slots, stats.open_sessions) == (8, 1)
        await client.match([1, 2])
        assert (await cache.stats()).open_sessions == 2
        await client.close()


async def test_a_pool_stays_attached_when_a_session_expires() -> None:
    async with LocalPrefixCache(QUICK) as cache:
        client, lease = await silenced(cache)
        pool = await client.attach_pool()
        again = await client.acquire([1, 2])
        await silent(cache, client)

        with pytest.raises(LeaseExpired):
            await pool.read_kv(again, again.slots)
        third = await client.acquire([4])

        k, _ = await pool.read_kv(third, third.slots)
        assert k.shape[:2] == (len(pool.layout.layers), 1)
        assert not pool.lost and pool.mapped
        with pytest.raises(LeaseExpired):
            await pool.read_kv(lease, lease.slots)
        await client.close()
