"""`HostTier` in its service: requests that wait for copies which are slow, fail, or end in any order."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiers.disk_service import DiskService
from support.tiers.tiered_service import TieredService, tiered_config

from raydix.actors import LocalPrefixCache
from raydix.actors.tiers.copier import CopyCounts
from raydix.actors.tiers.host.host_tier import Progress
from raydix.actors.tiers.job_threads import End
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.leases.request_observer import RequestObserver
from raydix.schemas import (
    Ack,
    BindModelRequest,
    BindModelResponse,
    CacheConfig,
    CloseSession,
    ConfigMismatch,
    EvictRequest,
    EvictResponse,
    ExtendRequest,
    ExtendResponse,
    HostConfig,
    InsertRequest,
    InsertResponse,
    InvalidRequest,
    LeaseResponse,
    LockRequest,
    ModelFingerprint,
    OpenSession,
    PoolConfig,
    PoolExhausted,
    PrefetchRequest,
    ResetRequest,
    SetWeightsRequest,
    TokenIds,
    UnknownLease,
    WaitingResponse,
    WeightsResponse,
    WithdrawRequest,
)

MODEL = ModelFingerprint(fields={"model": "toy"}, weights="1")
A, B, C = tuple(range(1, 9)), tuple(range(11, 19)), tuple(range(21, 29))


def scene(**config: Any) -> TieredService:
    return TieredService(tiered_config(**config))


def lock(cache: TieredService, tokens: tuple[int, ...], session_id: str = "s", **more: Any) -> Any:
    return cache.ask(LockRequest(lease_id=cache.new_id(), tokens=TokenIds.pack(tokens), **more), session_id)


def prefetch(cache: TieredService, tokens: tuple[int, ...]) -> int:
    done: int = cache.ask(PrefetchRequest(tokens=TokenIds.pack(tokens))).num_tokens
    return done


async def loaded(cache: TieredService, waiting: Any, tokens: tuple[int, ...], session_id: str = "s") -> LeaseResponse:
    """The lease of a ticket whose load has ended, after a read of its prefix."""
    lease = await cache.outcome(waiting, session_id)
    assert isinstance(lease, LeaseResponse), lease
    cache.check_prefix(cache.record(lease.lease_id, session_id), tokens)
    return lease


class Heard(RequestObserver):
    """Notes the leases that began."""

    def __init__(self) -> None:
        self.granted_leases: list[str] = []

    def granted(self, lease: LeaseRecord, max_prefix_len: int | None) -> None:
        self.granted_leases.append(lease.lease_id)


async def wait_for(is_true: Callable[[], object]) -> None:
    """Poll until a condition holds."""
    for _ in range(600):
        await asyncio.sleep(0.1)
        if is_true():
            return
    raise AssertionError("waited in vain")


# ---------------------------------------------------------------- loads


async def test_a_slow_load_gives_its_lease_when_it_has_ended() -> None:
    cache = scene()
    cache.put_below(A)

    waiting = cache.acquire((*A, 9))
    assert isinstance(waiting, WaitingResponse) and waiting.loading_tokens == 8
    cache.copier.advance(cache.loads[0], 7)
    assert not cache.is_settled(waiting)
    assert isinstance(cache.ask(ExtendRequest(lease_id="l2", num_slots=10, known_pages=0)), UnknownLease)
    cache.copier.finish(cache.loads[0])

    lease = await loaded(cache, waiting, A)
    assert (lease.prefix_len, lease.loaded_len) == (8, 8)
    assert cache.service.stats().host is not None
    await cache.close()


@pytest.mark.parametrize("end", ["late", "failed"])
@pytest.mark.parametrize("num_pages", [0, 3])
async def test_a_load_that_ends_early_gives_the_shorter_prefix(end: End, num_pages: int) -> None:
    cache = scene()
    cache.put_below(A)

    waiting = cache.acquire(A)
    cache.copier.finish(cache.loads[0], end, num_pages)

    lease = await loaded(cache, waiting, A)
    assert (lease.prefix_len, lease.loaded_len) == (num_pages, num_pages)
    assert cache.tiers.loads.moves.counts.failed == 8 - num_pages
    cache.compute(cache.record(lease.lease_id), A)
    cache.release(lease.lease_id)
    await cache.close()


async def test_a_load_of_states_that_ends_early_leaves_the_state_of_the_shorter_prefix() -> None:
    cache = scene(num_states=8, page_size=2)
    cache.put_below(A)

    waiting = cache.acquire(A)
    cache.copier.finish(cache.loads[0], "failed", 3)

    assert (await loaded(cache, waiting, A)).prefix_len == 0
    await cache.close()


async def test_loads_end_in_any_order() -> None:
    cache = scene(device_pages=32)
    for tokens in (A, B, C):
        cache.put_below(tokens)

    waiting = {tokens: cache.acquire(tokens) for tokens in (A, B, C)}
    for tokens, copy in zip((C, A, B), [cache.loads[at] for at in (2, 0, 1)], strict=True):
        cache.copier.finish(copy)
        assert (await loaded(cache, waiting[tokens], tokens)).prefix_len == 8
    await cache.close()


async def test_a_flipped_byte_is_found_by_the_check() -> None:
    cache = scene()
    cache.publish(A)
    cache.tiers.write_ahead()
    cache.tiers.check_invariants()
    cache.service.core.evict(0)

    cache.put_below(B)
    cache.acquire(B)
    copy = cache.loads[0]
    cache.copier.advance(copy, 5)
    cache.copier.flip(copy, 4)
    cache.copier.finish(copy)

    with pytest.raises(AssertionError, match="differs between the tiers"):
        cache.tiers.check_invariants()
    await cache.service.close()


async def test_a_client_that_is_gone_loses_its_lease_and_others_have_the_pages() -> None:
    cache = scene()
    cache.open("other")
    cache.put_below(A)
    first = cache.acquire(A, "gone", "other")
    second = cache.acquire(A)
    assert isinstance(first, WaitingResponse) and isinstance(second, WaitingResponse)
    assert len(cache.loads) == 1, "the pages are loaded once"

    cache.service.close_session(CloseSession(session_id="other"))
    cache.tiers.check_invariants()
    cache.copier.finish(cache.loads[0])

    assert (await loaded(cache, second, A)).prefix_len == 8
    assert cache.tiers.loads.moves.counts.loaded_unused == 8
    assert cache.service.stats().private_slots == 0
    await cache.close()


async def test_a_ticket_that_was_given_up_leaves_no_lease() -> None:
    cache = scene()
    cache.put_below(A)
    cache.acquire(A, "gone")
    assert cache.ask(WithdrawRequest(lease_id="gone")) == Ack()

    cache.copier.finish(cache.loads[0])

    assert not len(cache.service.core.leases)
    await cache.close()


# ---------------------------------------------------------------- waits for loads


async def test_those_behind_a_load_hold_no_slots_and_are_served_in_order() -> None:
    cache = scene(device_pages=10)
    cache.put_below(A)
    tickets = [cache.acquire(A) for _ in range(3)]
    assert cache.service.core.private_slots == 8, "those of the first request alone"

    order: list[int] = []
    waiters = [cache.service.wait_queue._by_ticket[ticket.ticket] for ticket in tickets]
    for number, waiter in enumerate(waiters):
        waiter.outcome.add_done_callback(lambda _, number=number: order.append(number))
    cache.copier.finish(cache.loads[0])
    await cache.turn()

    assert order == [0, 1, 2]
    for ticket in tickets:
        assert (await loaded(cache, ticket, A)).prefix_len == 8
    await cache.close()


async def test_after_a_failed_load_those_behind_it_go_on_without_it() -> None:
    cache = scene(device_pages=20)
    cache.put_below(A)
    first, second = cache.acquire(A), cache.acquire(A)

    cache.copier.finish(cache.loads[0], "failed")

    assert not cache.loads
    for waiting in (first, second):
        assert (await loaded(cache, waiting, A)).prefix_len == 0
    await cache.close()


async def test_who_is_tired_of_waiting_for_a_load_computes() -> None:
    cache = scene(device_pages=20)
    cache.put_below(A)
    first, second = cache.acquire(A), cache.acquire(A, load_timeout_s=0.001)
    await asyncio.sleep(0.01)
    await cache.turn()

    assert (await loaded(cache, second, A)).prefix_len == 0
    cache.copier.finish(cache.loads[0])
    assert (await loaded(cache, first, A)).prefix_len == 8
    await cache.close()


async def test_a_retry_has_the_ticket_of_its_load_and_then_its_lease() -> None:
    cache = scene()
    cache.put_below(A)
    first = cache.acquire(A, "l")
    assert cache.acquire(A, "l") == first
    cache.copier.finish(cache.loads[0])

    again = cache.acquire(A, "l")

    assert isinstance(again, LeaseResponse) and (again.prefix_len, again.loaded_len) == (8, 8)
    assert await cache.outcome(first) == again
    assert cache.service.core.counters.tokens_reused == 8
    await cache.close()


async def test_one_prompt_for_many_is_loaded_once() -> None:
    cache = scene(device_pages=36)
    cache.put_below(A)
    tickets = [cache.acquire((*A, *[99] * 7), timeout_s=60) for _ in range(64)]
    cache.copier.finish(cache.loads[0])

    for ticket in tickets:
        lease = await loaded(cache, ticket, A)
        assert lease.prefix_len == 8
        cache.release(lease.lease_id)
    assert cache.tiers.loads.moves.counts.loaded == 8
    await cache.close()


# ---------------------------------------------------------------- restarts


async def test_after_a_reset_in_the_middle_of_its_load_a_request_begins_again() -> None:
    cache = scene(device_pages=20)
    cache.put_below(A)
    first, second = cache.acquire(A), cache.acquire(A)
    cache.copier.advance(cache.loads[0], 5)

    cache.ask(ResetRequest())
    cache.copier.finish(cache.loads[0])

    for waiting in (first, second):
        lease = await loaded(cache, waiting, A)
        assert lease.prefix_len == 0, "nothing that was copied is handed out"
    assert cache.service.core.counters.tokens_reused == 0
    await cache.close()


async def test_a_request_that_begins_again_is_refused_if_its_model_has_other_weights() -> None:
    cache = scene(device_pages=20)
    bind = BindModelRequest(fingerprint=MODEL)
    assert isinstance(cache.ask(bind), BindModelResponse)
    cache.put_below(A)
    waiting = cache.acquire(A)

    assert isinstance(cache.ask(SetWeightsRequest(label="step 1")), WeightsResponse)
    cache.copier.finish(cache.loads[0])

    assert isinstance(await cache.outcome(waiting), ConfigMismatch)
    assert not len(cache.service.core.leases)
    await cache.close()


async def test_a_lock_that_waited_in_vain_is_refused_if_its_model_has_other_weights() -> None:
    cache = scene()
    cache.ask(BindModelRequest(fingerprint=MODEL))
    cache.put_below(A)
    cache.acquire(B + C[:1])
    waiting = lock(cache, A, timeout_s=0.001)

    cache.ask(SetWeightsRequest(label="step 1"))
    await asyncio.sleep(0.01)
    await cache.turn()

    assert isinstance(await cache.outcome(waiting), ConfigMismatch)
    await cache.close()


async def test_a_retry_of_an_open_lease_does_not_wait_for_room() -> None:
    cache = scene()
    lease = cache.acquire(A, "l")
    cache.acquire((*B, 30), timeout_s=60)

    assert cache.acquire(A, "l") == lease
    assert cache.acquire(A, "l", timeout_s=60) == lease
    await cache.close()


# ---------------------------------------------------------------- a lock


async def test_a_lock_that_loads_holds_its_path_alone() -> None:
    cache = scene()
    cache.put_below(A)

    waiting = lock(cache, A)
    assert isinstance(waiting, WaitingResponse) and cache.service.core.private_slots == 8
    cache.copier.finish(cache.loads[0], "late", 5)

    lease = await loaded(cache, waiting, A)
    assert (lease.prefix_len, lease.num_slots) == (5, 5)
    assert cache.service.core.private_slots == 0
    await cache.close()


async def test_a_lock_without_room_for_its_load_does_not_wait_by_default() -> None:
    cache = scene()
    cache.put_below(A)
    cache.acquire(B + C[:1])  # 7 slots are left

    lease = lock(cache, A)

    assert isinstance(lease, LeaseResponse) and lease.prefix_len == 0
    await cache.close()


async def test_a_queued_lock_loads_once_there_is_room() -> None:
    cache = scene()
    cache.put_below(A)
    held = cache.acquire(B + C[:1])

    waiting = lock(cache, A, timeout_s=60.0)
    assert isinstance(waiting, WaitingResponse) and len(cache.service.wait_queue) == 1
    cache.release(held.lease_id)

    assert len(cache.loads) == 1 and not cache.is_settled(waiting)
    cache.copier.finish(cache.loads[0])
    assert (await loaded(cache, waiting, A)).prefix_len == 8
    await cache.close()


async def test_a_queued_lock_without_room_is_not_tried_again_and_again() -> None:
    cache = scene(eviction={"high_watermark": 0.5, "low_watermark": 0.2})
    cache.put_below(A)
    cache.acquire((*B, *C[:7]))
    heard = Heard()
    cache.service.core.observers.append(heard)

    waiting = lock(cache, A, timeout_s=60.0)
    cache.service.eviction_task.wake()
    await cache.turn(20)

    assert not cache.is_settled(waiting)
    assert cache.service.stats().eviction_task.rounds < 5
    assert not heard.granted_leases, "it would be recorded as a request each time"
    await cache.close()


async def test_a_queued_lock_whose_time_is_over_has_what_the_pool_has() -> None:
    cache = scene()
    cache.put_below(A)
    cache.acquire(B + C[:1])

    waiting = lock(cache, A, timeout_s=0.001)
    await asyncio.sleep(0.01)
    await cache.turn()

    assert (await loaded(cache, waiting, A)).prefix_len == 0
    await cache.close()


async def test_a_lock_behind_others_that_wait_for_room_takes_none_for_its_load() -> None:
    cache = scene()
    cache.put_below(A)
    cache.acquire(B)
    cache.acquire((*C, 30), timeout_s=60)

    lease = lock(cache, A)

    assert isinstance(lease, LeaseResponse) and not cache.loads
    await cache.close()


async def test_the_offer_of_a_lock_begins_when_it_is_handed_out() -> None:
    cache = scene()
    cache.put_below(A)
    leases = cache.service.core.leases

    waiting = lock(cache, A, offer_id="o", offer_s=5.0)
    assert not leases.offers
    cache.clock.now += 100
    cache.copier.finish(cache.loads[0])

    lease = await loaded(cache, waiting, A)
    assert leases.offers == {lease.lease_id: cache.clock.now + 5}
    await cache.close()


# ---------------------------------------------------------------- requests short of slots


def full_and_writing(**config: Any) -> TieredService:
    """All 16 slots are cached, and the first 4 prompts of 4 tokens are being written."""
    cache = scene(host={"reserve": 0.9}, **config)
    cache.tiers.writes.batch_pages = 8
    for first in (10, 20, 30, 40):
        cache.publish(range(first, first + 4))
    cache.tiers.write_ahead()
    cache.tiers.write_ahead()
    assert len(cache.writes) == 2 and cache.service.core.evictable_size() == 0
    return cache


async def test_a_request_short_of_slots_ends_writes_that_are_not_being_copied() -> None:
    cache = full_and_writing()

    lease = cache.acquire(A)

    assert isinstance(lease, LeaseResponse) and not cache.writes
    cache.copier.deliver()
    cache.tiers.check_invariants()
    assert cache.tiers.writes.counts.dropped == 8
    await cache.close()


async def test_a_request_short_of_slots_waits_for_one_chunk_alone() -> None:
    cache = full_and_writing()
    cache.copier.current = cache.writes[0]

    waiting = cache.acquire((*A, *B))
    assert isinstance(waiting, WaitingResponse) and waiting.loading_tokens == 0
    assert len(cache.writes) == 1, "the other write has ended"
    cache.tiers.write_ahead()
    assert len(cache.writes) == 1, "no write begins meanwhile"
    assert prefetch(cache, C) == 0
    cache.copier.pass_page()

    lease = await loaded(cache, waiting, A)
    assert lease.num_slots == 16
    assert cache.tiers.writes.counts.written == 1, "what was copied is kept"
    cache.copier.deliver()
    await cache.close()


async def test_who_does_not_wait_for_room_is_refused_behind_the_chunk() -> None:
    cache = full_and_writing()
    held = lock(cache, tuple(range(10, 14)))
    cache.copier.current = cache.writes[0]

    waiting = cache.acquire((*A, *B))
    cache.copier.pass_page()

    assert isinstance(await cache.outcome(waiting), PoolExhausted)
    cache.release(held.lease_id)
    cache.copier.deliver()
    await cache.close()


async def test_a_growing_lease_ends_writes_too() -> None:
    cache = scene(host={"reserve": 0.9})
    cache.tiers.writes.batch_pages = 8
    cache.publish(range(10, 18))
    lease = cache.acquire(A)
    cache.tiers.write_ahead()
    cache.copier.current = cache.writes[0]

    waiting = cache.ask(ExtendRequest(lease_id=lease.lease_id, num_slots=10, known_pages=8, timeout_s=0.0))
    assert isinstance(waiting, WaitingResponse)
    cache.copier.pass_page()

    grown = await cache.outcome(waiting)
    assert isinstance(grown, ExtendResponse) and grown.num_slots == 10
    await cache.close()


async def test_a_state_to_publish_ends_writes_too() -> None:
    cache = scene(device_pages=24, num_states=3, host={"reserve": 0.9})
    cache.tiers.writes.batch_pages = 8
    for tokens in (A, B):
        cache.publish(tokens)
    lease = cache.acquire(C)
    cache.tiers.write_ahead()
    cache.tiers.write_ahead()
    assert len(cache.writes) == 2 and cache.service.core.tree.mamba_evictable_size() == 0

    done = cache.ask(InsertRequest(lease.lease_id, 8, TokenIds.pack([]), publish_state=True))

    assert isinstance(done, InsertResponse) and done.num_inserted == 8
    cache.copier.deliver()
    await cache.close()


async def test_those_that_wait_for_a_chunk_go_on_in_order() -> None:
    cache = full_and_writing()
    cache.copier.current = cache.writes[0]
    first, second = cache.acquire(A), cache.acquire((*B, *C))
    cache.copier.pass_page()

    assert isinstance(await cache.outcome(first), LeaseResponse)
    assert isinstance(await cache.outcome(second), PoolExhausted)
    cache.copier.deliver()
    await cache.close()


async def test_a_copy_in_flight_is_no_deadlock() -> None:
    cache = scene()
    cache.put_below(A)
    waiting = cache.acquire(A, timeout_s=60)
    lease = cache.acquire(B)

    grows = cache.ask(ExtendRequest(lease_id=lease.lease_id, num_slots=9, known_pages=8, timeout_s=60.0))
    assert isinstance(grows, WaitingResponse) and not cache.is_settled(grows)
    cache.copier.finish(cache.loads[0])
    first = await loaded(cache, waiting, A)
    assert not cache.is_settled(grows)
    cache.release(first.lease_id)

    assert isinstance(await cache.outcome(grows), ExtendResponse)
    assert cache.service.stats().deadlocks == 0
    await cache.close()


# ---------------------------------------------------------------- writes


@pytest.mark.parametrize("end", ["cancelled", "failed", "closed"])
async def test_a_write_that_ends_early_is_written_later(end: End) -> None:
    cache = scene(host={"reserve": 0.9})
    cache.tiers.writes.batch_pages = 8
    for tokens in (A, B):
        cache.publish(tokens)
    cache.tiers.write_ahead()

    cache.copier.finish(cache.writes[0], end, 3)
    assert cache.tiers.tier.cache.total_size() == 3
    cache.write_all()

    assert cache.tiers.tier.cache.total_size() == 16
    await cache.close()


async def test_a_write_that_always_fails_is_not_tried_again_and_again() -> None:
    cache = scene(host={"reserve": 0.9})
    cache.tiers.writes.batch_pages = 8
    cache.publish(A)
    cache.publish(B)

    num_writes = 0
    while cache.tiers.write_ahead() is not Progress.AHEAD:
        num_writes += len(cache.writes)
        for copy in cache.writes:
            cache.copier.finish(copy, "failed", 0)

    assert num_writes == 2
    await cache.close()


async def test_what_the_task_evicts_has_been_written() -> None:
    cache = scene(device_pages=20, eviction={"high_watermark": 0.9, "low_watermark": 0.2}, host={"reserve": 0.1})
    for first in range(10, 190, 10):
        cache.publish([first])
    cache.publish([300])
    for _ in range(50):
        await cache.turn()
        for copy in cache.writes:
            cache.copier.finish(copy)

    assert cache.service.core.free_slots == 16
    assert cache.tiers.writes.counts.dropped == 0
    await cache.close()


async def test_an_idle_pool_has_its_coldest_part_on_the_host_and_the_task_sleeps() -> None:
    """64 conversations, each a chain of one-page nodes, fill 0.9 of the pool: a tenth is free."""
    cache = TieredService(tiered_config(device_pages=640, host_pages=640, eviction={"high_watermark": 0.95}), True)
    tiers, stats = cache.tiers, cache.service.stats
    for turn in range(1, 10):
        for number in range(64):
            cache.publish([1000 * number + token for token in range(turn)])
    assert cache.service.core.free_slots == 64

    await wait_for(lambda: tiers.tier.cache.total_size() >= 64)
    rounds = [0]
    await wait_for(lambda: rounds.append(stats().eviction_task.rounds) or rounds[-2] == rounds[-1])

    tiers.check_invariants()
    assert stats().tokens_evicted == 0, "it writes without an eviction"
    cache.service.core.evict(64)
    assert tiers.writes.counts.dropped == 0, "the coldest tenth was on the host"
    await cache.close()


async def test_a_full_host_evicts_nothing_from_the_pool() -> None:
    marks = {"high_watermark": 0.9, "low_watermark": 0.5}
    cache = scene(device_pages=20, host_pages=20, eviction=marks, host={"high_watermark": 0.5, "low_watermark": 0.2})
    for first in range(10, 180, 10):
        cache.publish([first])
    cache.write_all()
    cache.service.eviction_task.wake()
    await cache.turn(20)

    assert cache.tiers.tier.cache.free_slots == 16
    assert cache.service.core.total_size() == 17
    await cache.close()


# ---------------------------------------------------------------- prefetch


async def test_prefetches_fill_a_quarter_of_the_pool_at_most() -> None:
    cache = scene(device_pages=24)
    cache.put_below(A)
    cache.put_below(B)

    assert [prefetch(cache, A), prefetch(cache, A), prefetch(cache, B)] == [6, 0, 0]
    cache.copier.finish(cache.loads[0])
    assert prefetch(cache, B) == 6
    cache.copier.finish(cache.loads[0])

    lease = cache.acquire(A, load=False)
    assert lease.prefix_len == 6
    cache.check_prefix(cache.record(lease.lease_id), A)
    await cache.close()


async def test_a_prefetch_takes_no_room_that_others_wait_for() -> None:
    cache = scene(device_pages=16)
    cache.put_below(A)
    cache.acquire(B)
    cache.acquire((*C, 30), timeout_s=60)

    assert prefetch(cache, A) == 0
    await cache.close()


async def test_a_prefetch_of_window_kv_loads_no_page_of_another_load() -> None:
    cache = scene(device_pages=24, window=3)
    cache.put_below(A[:4])
    waiting = cache.acquire(A[:2])
    assert isinstance(waiting, WaitingResponse)
    cache.publish(A[:3])  # the usable prefix is longer now, and window KV is missing before its end

    assert prefetch(cache, A[:4]) == 0
    cache.tiers.check_invariants()

    cache.copier.finish(cache.loads[0])
    await loaded(cache, waiting, A[:2])
    assert prefetch(cache, A[:4]) > 0
    await cache.close()


async def test_a_request_waits_for_the_prefetch_of_its_pages() -> None:
    cache = scene(device_pages=32)
    cache.put_below(A)
    assert prefetch(cache, A) == 8

    waiting = cache.acquire(A)
    cache.copier.finish(cache.loads[0])

    lease = await loaded(cache, waiting, A)
    assert (lease.prefix_len, lease.loaded_len) == (8, 0)
    await cache.close()


# ---------------------------------------------------------------- the measured rate


class Measured(CopyCounts):
    """Counts of loads of 8 bytes a token, one of which takes a second."""

    @property
    def bytes_per_s(self) -> float:
        return 8.0


async def measured(monkeypatch: pytest.MonkeyPatch) -> TieredService:
    """Return a scene with A below, in which one load has been measured."""
    cache = scene(device_pages=32)
    cache.put_below(A)
    cache.put_below(B)
    counts = Measured()
    monkeypatch.setattr(cache.copier, "counts", lambda *, loads: counts)
    first = cache.acquire(B)
    cache.copier.finish(cache.loads[0])
    await loaded(cache, first, B)
    return cache


async def test_a_load_is_as_long_as_what_can_be_there_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = await measured(monkeypatch)

    waiting = cache.acquire(A, load_timeout_s=3)
    assert isinstance(waiting, WaitingResponse) and waiting.loading_tokens == 3
    cache.copier.finish(cache.loads[0])
    assert (await loaded(cache, waiting, A)).prefix_len == 3
    await cache.close()


async def test_a_rate_by_which_nothing_is_loaded_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = await measured(monkeypatch)

    assert isinstance(cache.acquire(A, load_timeout_s=0.1), LeaseResponse), "less than a page can be there"
    assert isinstance(cache.acquire(A, load_timeout_s=0.1), WaitingResponse)
    await cache.close()


# ---------------------------------------------------------------- the end


async def test_close_in_the_middle_of_moves_ends_them() -> None:
    cache = scene(device_pages=32)
    cache.put_below(A)
    cache.publish(B)
    cache.acquire(A)
    cache.acquire(A)
    prefetch(cache, C)
    cache.tiers.write_ahead()
    cache.copier.current = cache.loads[0]

    await cache.close()

    assert cache.tiers.state == "closed"


async def test_a_loop_that_ends_in_the_middle_of_moves_ends_them() -> None:
    cache = full_and_writing(device_pages=16)
    await cache.service.eviction_task.stop()  # it ends with its loop, which goes on here
    cache.service.change_loop()
    assert not cache.in_flight and not len(cache.service.core.leases)

    cache.open()
    cache.service.core.evict(100)
    cache.put_below(A)
    cache.acquire(A, "l")
    cache.acquire(A, "m")
    cache.copier.current = cache.loads[0]
    await cache.service.eviction_task.stop()
    cache.service.change_loop()
    assert not cache.in_flight and not len(cache.service.core.leases)

    cache.open()
    assert isinstance(cache.acquire(A), LeaseResponse | WaitingResponse)
    await cache.close()


async def test_a_cache_that_drains_begins_no_moves_and_ends() -> None:
    cache = scene(host={"reserve": 0.9})
    cache.put_below(A)
    cache.publish(B)
    waiting = cache.acquire(A)

    draining = asyncio.create_task(cache.service.drain(60))
    await cache.turn()
    for copy in cache.writes:  # those of the first turn
        cache.copier.finish(copy, "failed", 0)
    cache.tiers.write_ahead()
    assert not cache.writes and prefetch(cache, A) == 0
    assert cache.is_settled(waiting), "it was refused"
    cache.copier.finish(cache.loads[0])

    assert await asyncio.wait_for(draining, 30) == 0
    await cache.close()


# ---------------------------------------------------------------- bad input


async def test_a_session_may_not_have_the_name_of_the_moves() -> None:
    cache = scene()
    with pytest.raises(InvalidRequest, match="'tiers'"):
        cache.service.open_session(OpenSession(session_id="tiers", owner="test"))
    await cache.close()


async def test_a_tier_that_is_not_there_is_refused_by_name() -> None:
    cache = scene()
    refused = cache.ask(EvictRequest(num_tokens=1, tier="disk"))
    assert isinstance(refused, InvalidRequest)
    assert "'device', 'host'" in str(refused) and "'disk'" in str(refused)

    cache.put_below(A)
    assert cache.ask(EvictRequest(num_tokens=8, tier="host")) == EvictResponse(num_evicted=8)
    assert isinstance(cache.acquire(A), LeaseResponse)
    await cache.close()


async def test_a_growth_is_given_up_with_the_insert_that_ends_its_lease() -> None:
    cache = scene(host={"reserve": 0.9})
    cache.tiers.writes.batch_pages = 8
    cache.publish(range(10, 18))
    lease = cache.acquire(A)
    cache.compute(cache.record(lease.lease_id), A)
    cache.tiers.write_ahead()
    cache.copier.current = cache.writes[0]
    cache.ask(ExtendRequest(lease_id=lease.lease_id, num_slots=10, known_pages=8, timeout_s=0.0))

    cache.ask(InsertRequest(lease.lease_id, 8, TokenIds.pack([]), release=True))

    assert not cache.service.wait_queue._by_ticket
    cache.copier.pass_page()
    await cache.close()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is reserved on Linux")
async def test_a_closed_cache_gives_the_memory_of_its_tier_back_though_it_is_kept() -> None:
    pool = PoolConfig.uniform(num_slots=64, num_layers=1, num_kv_heads=1, head_dim=4, device="cpu")
    cache = LocalPrefixCache(CacheConfig(page_size=4, pool=pool, host=HostConfig(num_slots=128, reserve=0.9)))
    async with cache:
        async with cache.acquire(list(range(32))) as lease:
            await lease.insert(list(range(32)))
        while not await written(cache):  # noqa: ASYNC110 -- a write has no event
            await asyncio.sleep(0.01)
        assert is_mapped(f"raydix-{lease.epoch}-host")

    gc.collect()

    assert cache is not None and not is_mapped(f"raydix-{lease.epoch}-host")


async def written(cache: LocalPrefixCache) -> int:
    stats = await cache.stats()
    assert stats.host is not None
    return stats.host.tokens_written


def is_mapped(name: str) -> bool:
    return name in Path("/proc/self/maps").read_text()


async def test_after_a_load_that_failed_the_next_tier_is_asked_for_the_rest(tmp_path: Path) -> None:
    disk = {"path": str(tmp_path), "num_slots": 32}
    cache = DiskService(tiered_config(host_pages=24, host={"reserve": 0.9}, disk=disk, fingerprint="m"))
    await cache.settle()
    for _ in range(2):
        cache.publish(A)
    await cache.settle()
    cache.put_below(A)
    await cache.settle()

    ticket = cache.acquire(A)
    (load,) = cache.loads
    cache.copier.finish(load, "failed", 3)
    lease = await cache.answer(ticket)

    assert (lease.prefix_len, lease.loaded_len, lease.disk_loaded_len) == (8, 8, 5)
    cache.check_prefix(cache.record(lease.lease_id), A)
    cache.release(lease.lease_id)
    await cache.kill()
