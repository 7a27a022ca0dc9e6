"""Recorded traffic holds the requests without their tokens; recording never delays the cache, and a replay is equal."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest
import ray
from support.processes.command_line import run, run_json
from support.processes.fake_clock import Clock
from support.tiers.settled_tiers import NO_SPARE, service_of, tensors, tiers_settled, whole_host

from raydix.actors import LocalPrefixCache, PrefixCacheClient, shutdown_cache, start_cache_async
from raydix.actors.observe.trace import read_trace
from raydix.actors.observe.trace_writer import Recorded, TrafficWriter
from raydix.actors.replay.trace_replay import index_config
from raydix.actors.report.of_trace import report_of_trace
from raydix.actors.service.cache_service import CacheService
from raydix.cache_core import RadixKey
from raydix.cache_core.tiers.look_up import LookUp
from raydix.schemas import (
    CacheConfig,
    EvictionConfig,
    InvalidRequest,
    OpenSession,
    PoolConfig,
    PoolExhausted,
    StartRecording,
    TooLarge,
)

CONFIG = CacheConfig(
    page_size=512, pool=PoolConfig(num_slots=512 * 64, device="cpu"), eviction=EvictionConfig(high_watermark=1.0)
)
A, B = list(range(512)), list(range(7, 519))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(clock: Clock) -> CacheService:
    return CacheService(CONFIG, "epoch", clock=clock)


async def until(holds: Callable[[], object]) -> None:
    """Poll until a condition holds that another thread or process makes true."""
    async with asyncio.timeout(300):
        while not holds():  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0.01)


def begin(service: CacheService, name: str, prompt: list[int], extra_key: str | None = None) -> None:
    service.core.acquire(name, "session", RadixKey(prompt, extra_key), new_tokens=1024)


def end(service: CacheService, name: str, output: tuple[int, ...] = ()) -> None:
    lease = service.core.leases.get(name, "session")
    suffix = RadixKey(list(output), lease.key.extra_key)
    service.core.insert(name, "session", len(lease.key) + len(suffix), suffix)
    service.core.release(name, "session")


async def test_a_request_that_begins_again_behind_its_load_is_recorded_once(clock: Clock, tmp_path: Path) -> None:
    config = CONFIG.model_copy(
        update={"pool": tensors(CONFIG.pool.num_slots), "host": whole_host(512 * 64), "eviction": NO_SPARE}
    )
    service = service_of(config, clock=clock)
    service.open_session(OpenSession(session_id="session", owner="test"))
    tiers = service.host
    assert tiers is not None
    begin(service, "first", A)
    end(service, "first")
    await tiers_settled(service)
    service.core.evict(512)
    service.recordings.start(StartRecording(path=str(tmp_path / "t.jsonl"), max_requests=1))

    begin(service, "again", A)
    load = tiers.loads.moves.prepare(service.core.leases.get("again", "session"), LookUp(RadixKey(A)))
    assert load is not None and load.num_pages == 1
    clock.now += 2
    service.core.reset()
    assert tiers.loads.moves.complete(load, 1).must_restart
    begin(service, "again", A)
    end(service, "again", (1, 2))

    status = await service.recordings.stop()
    (recorded,) = read_trace(tmp_path / "t.jsonl")
    assert (status.requests, recorded.timestamp, recorded.input_length, recorded.output_length) == (1, 0, 512, 2)


async def test_a_recording_has_times_lengths_and_shared_blocks(
    service: CacheService, clock: Clock, tmp_path: Path
) -> None:
    begin(service, "before", A)
    service.recordings.start(StartRecording(path=str(tmp_path / "t.jsonl")))
    end(service, "before")
    begin(service, "long", [*A, *B, 1, 2, 3])
    clock.now += 0.5
    begin(service, "short", [*A, 5])
    clock.now += 1
    begin(service, "other", [*A, 5], extra_key="tenant")
    end(service, "short", output=tuple(range(40)))
    end(service, "long")
    end(service, "other")
    begin(service, "open", [2**40, *A])

    status = await service.recordings.stop()

    assert (status.requests, status.dropped, status.error) == (4, 0, None)
    long, short, other, last = read_trace(tmp_path / "t.jsonl")
    assert [each.timestamp for each in (long, short, other, last)] == [0, 500, 1500, 1500]
    assert [each.input_length for each in (long, short, other, last)] == [1027, 513, 513, 513]
    assert [each.output_length for each in (long, short, other, last)] == [0, 40, 0, 0]
    assert long.hash_ids[0] == short.hash_ids[0]
    ids = {*long.hash_ids, *short.hash_ids, *other.hash_ids, *last.hash_ids}
    assert len(ids) == 3 + 2 + 2 + 2 - 1
    assert service.core.observers == [
        watch for watch in service.core.observers if "Recorder" not in type(watch).__name__
    ]
    service.core.release("open", "session")


async def test_a_recording_replays_with_the_hits_that_the_cache_had(service: CacheService, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    service.recordings.start(StartRecording(path=str(path)))
    for number in range(40):
        prompt = [token for block in range(number % 5 + 1) for token in range(block + number % 3, block + 512)]
        begin(service, f"{number}", [*prompt, number])
        end(service, f"{number}")
    await service.recordings.stop()

    replayed = (await report_of_trace(read_trace(path), index_config(512 * 64))).stats

    stats = service.stats()
    assert stats.tokens_reused > 0
    assert (replayed.tokens_requested, replayed.tokens_reused) == (stats.tokens_requested, stats.tokens_reused)


async def test_blocks_are_pages_of_the_cache_unless_another_size_is_asked_for(tmp_path: Path) -> None:
    config = CacheConfig(
        page_size=16, pool=PoolConfig(num_slots=64, device="cpu"), eviction=EvictionConfig(high_watermark=1.0)
    )
    async with LocalPrefixCache(config) as cache:
        for name, block_size in (("pages", None), ("halves", 8)):
            cache.start_recording(StartRecording(path=str(tmp_path / name), block_size=block_size))
            for prompt in ([1] * 40, [*[1] * 32, 2], [3] * 100, [1] * 17):
                with suppress(PoolExhausted):
                    await (await cache.acquire(prompt)).insert(prompt, release=True)
            await cache.stop_recording()
            if name == "pages":
                stats = await cache.stats()
                await cache.reset()

    pages, halves = read_trace(tmp_path / "pages"), read_trace(tmp_path / "halves")
    assert [(each.block_size, len(each.hash_ids)) for each in pages] == [(16, 3), (16, 3), (16, 7), (16, 2)]
    assert [(each.block_size, len(each.hash_ids)) for each in halves] == [(8, 5), (8, 5), (8, 13), (8, 3)]
    replayed = (await report_of_trace(pages, index_config(64, page_size=16))).stats
    assert (replayed.tokens_requested, replayed.tokens_reused) == (stats.tokens_requested, stats.tokens_reused)
    assert replayed.too_large == stats.too_large == TooLarge(requests=1, tokens=100, largest_slots=112)


async def test_two_recordings_have_no_ids_in_common(service: CacheService, tmp_path: Path) -> None:
    ids = []
    for name in ("a", "b"):
        service.recordings.start(StartRecording(path=str(tmp_path / name)))
        begin(service, name, A)
        end(service, name)
        await service.recordings.stop()
        ids += read_trace(tmp_path / name)[0].hash_ids

    assert len(set(ids)) == 2


async def test_it_ends_by_itself(service: CacheService, clock: Clock, tmp_path: Path) -> None:
    for name, limits in (("few", {"max_requests": 2}), ("soon", {"max_seconds": 1.0})):
        service.recordings.start(StartRecording(path=str(tmp_path / name), **limits))
        for number in range(5):
            begin(service, f"{name}{number}", A)
            end(service, f"{name}{number}")
            clock.now += 0.6
        assert (await service.recordings.stop()).requests == 2


async def test_a_recording_that_times_out_writes_its_file_and_allows_the_next(
    service: CacheService, tmp_path: Path
) -> None:
    service.recordings.start(StartRecording(path=str(tmp_path / "a"), max_seconds=0.01))
    begin(service, "a", A)
    recorder = service.recordings._recorder
    assert recorder is not None
    await until(lambda: recorder.is_over)
    assert service.recordings.status() == recorder.status()
    service.recordings.start(StartRecording(path=str(tmp_path / "b"), max_seconds=0.01))
    await until((tmp_path / "b").exists)

    status = await service.recordings.stop()

    assert (status.path, status.requests) == (str(tmp_path / "b"), 0)
    assert len(read_trace(tmp_path / "a")) == 1
    assert service.recordings.status() is None
    service.core.release("a", "session")


async def test_existing_files_are_not_lost(service: CacheService, tmp_path: Path) -> None:
    (there := tmp_path / "t.jsonl").write_text("kept")
    with pytest.raises(InvalidRequest, match="is a folder"):
        service.recordings.start(StartRecording(path=str(tmp_path), overwrite=True))
    with pytest.raises(
        InvalidRequest, match=r"exists: name another file, or allow to overwrite it \(raydix record --overwrite"
    ):
        service.recordings.start(StartRecording(path=str(there)))

    service.recordings.start(StartRecording(path=str(there), overwrite=True))
    assert there.read_text() == "kept"
    await service.recordings.stop()
    assert there.read_text() == ""


async def test_there_is_one_recording_at_a_time(service: CacheService, tmp_path: Path) -> None:
    request = StartRecording(path=str(tmp_path / "t.jsonl"))
    with pytest.raises(InvalidRequest, match="no recording to stop"):
        await service.recordings.stop()
    with pytest.raises(InvalidRequest, match="No such file"):
        service.recordings.start(StartRecording(path=str(tmp_path / "no" / "t.jsonl")))
    assert service.recordings.status() is None

    service.recordings.start(request)
    with pytest.raises(InvalidRequest, match="stop it first"):
        service.recordings.start(request)

    await service.close()
    assert service.recordings.status() is None
    assert (tmp_path / "t.jsonl").read_bytes() == b""


async def test_until_its_file_is_written_a_recording_is_under_way(
    service: CacheService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, put_in_order = threading.Event(), TrafficWriter._put_in_order
    monkeypatch.setattr(TrafficWriter, "_put_in_order", lambda self: written.wait(30) and put_in_order(self))
    request = StartRecording(path=str(tmp_path / "t.jsonl"))
    service.recordings.start(request)
    begin(service, "a", A)
    end(service, "a")

    first, second = (asyncio.create_task(service.recordings.stop()) for _ in range(2))
    await asyncio.sleep(0.05)
    with pytest.raises(InvalidRequest, match="is running: stop it first"):
        service.recordings.start(request)
    written.set()

    assert (await first).requests == 1
    assert await second == await first
    assert service.recordings.status() is None
    service.recordings.start(StartRecording(path=str(tmp_path / "t.jsonl"), overwrite=True))
    await service.recordings.stop()


def test_two_recordings_to_one_path_do_not_mix_and_touch_no_other_file(tmp_path: Path) -> None:
    (others := tmp_path / "t.jsonl.part").write_text("somebody's own")
    first, second = TrafficWriter(tmp_path / "t.jsonl"), TrafficWriter(tmp_path / "t.jsonl")
    for number in range(50):
        first.take(Recorded(number, RadixKey(A), 0))
        second.take(Recorded(number, RadixKey([*A, *B]), 0))

    lengths = []
    for writer in (first, second):
        writer.finish([])
        assert writer.error is None
        lengths.append([each.input_length for each in read_trace(tmp_path / "t.jsonl")])

    assert lengths == [[512] * 50, [1024] * 50]
    assert {each.name for each in tmp_path.iterdir()} == {"t.jsonl", "t.jsonl.part"}
    assert others.read_text() == "somebody's own"


def test_a_recording_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (usual := tmp_path / "usual").touch()

    TrafficWriter(tmp_path / "t.jsonl").finish([])

    assert (tmp_path / "t.jsonl").stat().st_mode == usual.stat().st_mode


@pytest.mark.parametrize(
    ("name", "complaint"), [("x" * 300, "File name too long"), ("a\0b", "null byte")], ids=["long", "nul"]
)
def test_a_path_that_is_none_is_refused(service: CacheService, tmp_path: Path, name: str, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        service.recordings.start(StartRecording(path=str(tmp_path / name)))

    assert service.recordings.status() is None


def test_a_recording_whose_loop_was_closed_ends_by_itself_on_the_next(tmp_path: Path) -> None:
    cache, path = LocalPrefixCache(CONFIG), tmp_path / "t.jsonl"

    async def begin_recording() -> None:
        cache.start_recording(StartRecording(path=str(path), max_seconds=0.3))
        await PrefixCacheClient(cache).acquire(A)

    async def go_on() -> None:
        await PrefixCacheClient(cache).open()
        await until(path.exists)
        assert (await cache.stop_recording()).requests == 1

    asyncio.run(begin_recording())
    asyncio.run(go_on())


async def test_a_cache_without_ray_records_too(tmp_path: Path) -> None:
    async with LocalPrefixCache(CONFIG) as cache:
        cache.start_recording(StartRecording(path=str(tmp_path / "t.jsonl")))
        await (await cache.acquire(A)).insert(A, release=True)

        assert (await cache.stop_recording()).requests == 1


def test_requests_above_the_rate_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    request = Recorded(0, RadixKey(A), 0)
    monkeypatch.setattr("raydix.actors.observe.trace_writer._MAX_QUEUED_BYTES", len(request.prompt.data) - 1)
    writer = TrafficWriter(tmp_path / "t.jsonl")

    taken = [writer.take(request) for _ in range(3)]
    writer.finish(())

    assert taken == [False] * 3
    assert (writer.num_written, writer.num_dropped, writer.error) == (0, 3, None)


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    writer = TrafficWriter(tmp_path / "t.jsonl")
    writer._file.close()
    writer._file = open("/dev/full", "wb", buffering=0)

    writer.finish([Recorded(0, RadixKey(A), 0)] * 2)

    assert "No space left" in str(writer.error)
    assert not list(tmp_path.iterdir())


@pytest.fixture
async def running(ray_cluster: None) -> AsyncIterator[tuple[ray.actor.ActorHandle, list[str]]]:
    namespace = f"record-{uuid4().hex[:8]}"
    cache = await start_cache_async(CONFIG, name="kv-0", namespace=namespace)
    yield cache, ["kv-0", "--namespace", namespace]
    await asyncio.to_thread(shutdown_cache, cache)


@pytest.mark.ray
async def test_a_cache_actor_records_and_the_command_replays(
    running: tuple[ray.actor.ActorHandle, list[str]], tmp_path: Path
) -> None:
    cache, named = running
    path = tmp_path / "t.jsonl"
    await cache.start_recording.remote(StartRecording(path=str(path)))
    async with PrefixCacheClient(cache) as client:
        for _ in range(3):
            await (await client.acquire(A)).insert(A, release=True)
    refused = await asyncio.to_thread(run_json, "record", *named, "-o", path, "--seconds", 0, exit_code=1)

    status = await cache.stop_recording.remote()

    assert "stop it first" in refused["error"]["message"]
    assert status.requests == 3
    (row,) = await asyncio.to_thread(run_json, "replay", path, "--capacity", 1024)
    assert (row["requests"], row["reused_tokens"]) == (3, 1024)


@pytest.mark.more
@pytest.mark.ray
async def test_the_command_records_for_a_while(
    running: tuple[ray.actor.ActorHandle, list[str]], tmp_path: Path
) -> None:
    _, named = running

    told = await asyncio.to_thread(run, "record", *named, "-o", tmp_path / "t.jsonl", "--seconds", 0.1)

    assert f"{tmp_path / 't.jsonl'}: 0 requests" in told.stdout.replace("\n", "")
    assert (tmp_path / "t.jsonl").exists()


@pytest.mark.more
@pytest.mark.ray
async def test_the_command_ends_with_the_last_request_that_it_was_to_record(
    running: tuple[ray.actor.ActorHandle, list[str]], tmp_path: Path
) -> None:
    cache, named = running
    limits = ("--seconds", 300, "--max-requests", 1)
    recording = asyncio.create_task(asyncio.to_thread(run_json, "record", *named, "-o", tmp_path / "t", *limits))
    await until(lambda: list(tmp_path.glob("t.*.part")))
    async with PrefixCacheClient(cache) as client:
        await (await client.acquire(A)).insert(A, release=True)
        await (await client.acquire(B)).insert(B, release=True)

        assert (await asyncio.wait_for(recording, 200))["requests"] == 1


@pytest.mark.more
@pytest.mark.ray
async def test_the_command_fails_where_the_file_could_not_be_written(
    running: tuple[ray.actor.ActorHandle, list[str]], tmp_path: Path
) -> None:
    _, named = running
    options = ("-o", tmp_path / "t", "--seconds", 1)
    recording = asyncio.create_task(asyncio.to_thread(run, "record", *named, *options, exit_code=1))
    await until(lambda: list(tmp_path.glob("t.*.part")))
    (tmp_path / "t").mkdir()

    assert "could not write: " in (await recording).stdout


def test_a_time_without_an_end_is_refused() -> None:
    assert "--seconds must be a finite number, not inf" in run("record", "a", "--seconds", "inf", exit_code=2).stderr


@pytest.mark.more
@pytest.mark.ray
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)])
async def test_a_command_that_gets_a_signal_to_end_ends_the_recording(
    running: tuple[ray.actor.ActorHandle, list[str]], tmp_path: Path, number: signal.Signals
) -> None:
    cache, named = running
    command = (sys.executable, "-m", "raydix.actors.cli", "record", *named, "-o", str(tmp_path / "t"))
    environ = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    before = signal.signal(number, signal.SIG_DFL)  # the command starts with it; nohup has SIGHUP ignored
    recording = await asyncio.create_subprocess_exec(*command, env=environ, stdout=subprocess.PIPE)
    signal.signal(number, before)
    await until(lambda: list(tmp_path.glob("t.*.part")))

    recording.send_signal(number)

    assert b"0 requests" in (await recording.communicate())[0]
    assert recording.returncode == 0
    assert await cache.recording.remote() is None
