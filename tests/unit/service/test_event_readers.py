"""Readers of events that fall behind are counted, and others are not: by a clock of the test."""

from __future__ import annotations

import pytest
from support.caches.cache_under_test import small_config
from support.processes.fake_clock import Clock

from raydix.actors.service.cache_service import CacheService
from raydix.actors.service.event_readers import EventReaders
from raydix.schemas import (
    AcquireRequest,
    CloseSession,
    InsertRequest,
    LeaseConfig,
    NextEvents,
    OpenSession,
    ReleaseRequest,
    TokenIds,
)


class Stream:
    """The events of a cache: their number, and one reader's questions for them."""

    def __init__(self) -> None:
        self.clock = Clock(100.0)
        self.readers = EventReaders(self.clock)
        self.last_seq = 0
        self.read_seq = 0

    def run(self, seconds: float, events: int = 0) -> None:
        self.clock.now += seconds
        self.last_seq += events

    def read(self, answer_s: float = 0.0, most: int = 1_000) -> None:
        """Ask, and get up to `most` of the events that there are after `answer_s`."""
        self.readers.ask("s", self.read_seq, self.last_seq)
        self.clock.now += answer_s
        self.readers.answer("s")
        self.read_seq = min(self.last_seq, self.read_seq + most)

    @property
    def num_stale(self) -> int:
        return self.readers.num_stale(self.last_seq)


def test_a_reader_that_stops_is_behind_after_ten_seconds_and_forgotten_after_ten_minutes() -> None:
    stream = Stream()
    stream.read()
    stream.run(500)
    assert stream.num_stale == 0  # there is no event

    stream.read()
    stream.run(1, events=1)
    assert stream.num_stale == 0
    stream.run(9.5)
    assert stream.num_stale == 1
    stream.run(580)
    assert stream.num_stale == 1
    stream.run(10)
    assert stream.num_stale == 0


def test_a_reader_that_reads_again_is_behind_no_more() -> None:
    stream = Stream()
    stream.read()
    stream.run(20, events=5)
    assert stream.num_stale == 1

    stream.read()
    stream.read()

    assert stream.num_stale == 0


def test_a_reader_that_has_waited_for_long_is_not_behind_when_an_event_comes() -> None:
    stream = Stream()
    stream.run(5, events=1)
    stream.read()

    stream.read(answer_s=60)
    stream.run(0, events=1)

    assert stream.num_stale == 0


def test_a_reader_under_constant_load_is_never_at_the_last_event_and_not_behind() -> None:
    stream = Stream()
    for _ in range(300):
        stream.read()
        stream.run(0.1, events=10)
        assert stream.num_stale == 0


def test_a_reader_that_is_slower_than_the_events_is_behind() -> None:
    stream = Stream()
    for _ in range(300):
        stream.read(most=5)
        stream.run(0.1, events=10)

    assert stream.num_stale == 1


def test_a_snapshot_lets_a_reader_go_on_at_the_last_event() -> None:
    stream = Stream()
    stream.read()
    stream.run(60, events=10_000)
    assert stream.num_stale == 1

    stream.read_seq = stream.last_seq
    stream.read()

    assert stream.num_stale == 0


async def test_the_statistics_count_a_reader_that_is_behind_until_its_session_ends() -> None:
    clock = Clock(1000.0)
    events = {"events": "slim", "events_stride_tokens": 1}
    config = small_config().model_copy(update=events | {"leases": LeaseConfig(session_ttl_s=600)})
    service = CacheService(config, "e", clock=clock)
    for name in ("router", "slow", "worker"):
        service.open_session(OpenSession(session_id=name, owner=name))

    async def read(session_id: str, after_seq: int) -> int:
        question = NextEvents(session_id=session_id, epoch="e", after_seq=after_seq, timeout_s=0)
        return [after_seq, *(batch.seq for batch in (await service.next_events(question)).unpack(after_seq))][-1]

    def publish(lease_id: str, *tokens: int) -> None:
        ids = TokenIds.pack(list(tokens))
        requests = (
            AcquireRequest(lease_id=lease_id, tokens=ids),
            InsertRequest(lease_id=lease_id, num_tokens=len(tokens), suffix=ids),
            ReleaseRequest(lease_id=lease_id),
        )
        service.execute("worker", "e", requests)

    seen = {name: await read(name, 0) for name in ("router", "slow")}
    publish("a", 1, 2)
    clock.now += 11
    assert service.stats().stale_readers == 2
    seen["router"] = await read("router", seen["router"])
    await read("router", seen["router"])

    assert service.stats().stale_readers == 1
    service.close_session(CloseSession(session_id="slow"))
    assert service.stats().stale_readers == 0
    await service.close()


async def test_a_cache_without_events_has_no_readers() -> None:
    service = CacheService(small_config(), "e")

    assert service.stats().stale_readers == 0
    await service.close()


@pytest.mark.parametrize("last_seq", [0, 5])
def test_the_end_of_a_session_that_never_read_has_no_effect(last_seq: int) -> None:
    readers = EventReaders(Clock(0.0))

    readers.answer("s")
    readers.forget("s")

    assert readers.num_stale(last_seq) == 0
