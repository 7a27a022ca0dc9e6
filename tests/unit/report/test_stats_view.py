"""The printed counts of a cache, live or once."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest

from raydix.actors.cli.output import console
from raydix.actors.cli.stats import _watch
from raydix.actors.cli.stats_view import Snapshot, view
from raydix.schemas import (
    CacheConfig,
    CacheStats,
    DiskPoolStats,
    DiskTierStats,
    EvictionTaskStats,
    GhostStats,
    Histogram,
    HostConfig,
    LeaseOwner,
    PoolConfig,
    PoolStats,
    TierStats,
)
from raydix.schemas.stats import TenantStats

CONFIG = CacheConfig(pool=PoolConfig(num_slots=1000))
TASK = EvictionTaskStats(
    enabled=True,
    started=True,
    alive=True,
    rounds=3,
    slices=4,
    tokens_evicted=5,
    failures=0,
    last_error=None,
    longest_slice_ms=0.5,
)
POOL = {"free_slots": 50, "private_slots": 150, "tree_slots": 800, "quarantined_slots": 0}
STATS = CacheStats(
    epoch="0123456789",
    core="interpreted",
    uptime_s=90.0,
    restarts=0,
    last_restart_cause="",
    restart_causes={},
    findings=(),
    num_slots=1000,
    **POOL,
    evictable_slots=700,
    protected_slots=100,
    open_leases=3,
    oldest_lease_s=9.0,
    owners=tuple(LeaseOwner(owner=f"[w{i}]", leases=1, slots=10, oldest_s=i) for i in range(10)),
    open_sessions=2,
    waiters=4,
    oldest_waiter_s=6.0,
    expired_sessions=1,
    dead_sessions=2,
    acquires=100,
    hits=60,
    tokens_requested=10_000,
    tokens_reused=2_500,
    tokens_inserted=7_000,
    tokens_duplicate=500,
    tokens_evicted=6_000,
    exhausted=7,
    probes=8,
    waited=11,
    wait_time=Histogram(bounds=(1.0, 2.0), counts=(5, 5, 0), sum=12.0, count=10),
    acquire_latency=Histogram(bounds=(0.001, 0.1, 1.0), counts=(50, 45, 5, 0), sum=10.0, count=100),
    lock_latency=Histogram(bounds=(0.001, 0.1), counts=(10, 10, 0), sum=0.04, count=20),
    insert_latency=Histogram(bounds=(0.001, 0.1), counts=(0, 40, 0), sum=0.12, count=40),
    batch_size=Histogram(bounds=(1.0, 2.0), counts=(0, 0, 9), sum=300.0, count=9),
    batches=9,
    requests=300,
    loop_lag_ms=12.5,
    eviction_task=TASK,
)


def text_of(now: Snapshot, before: Snapshot | None = None) -> str:
    with console() as here, here.capture() as captured:
        here.print(view(now, before), soft_wrap=True)
    return " ".join(captured.get().split())


def snapshot(at_s: float = 10.0, **changed: object) -> Snapshot:
    return Snapshot("kv-0", CONFIG, STATS.model_copy(update=changed), at_s)


def test_every_count_that_matters_is_there() -> None:
    text = text_of(snapshot())

    for part in (
        "kv-0 radix, pages of 1, core interpreted, epoch 01234567",
        "95.0 % of 1,000 slots in use; eviction above 90 %, down to 80 %",
        "50 free, 150 private, 800 cached (100 locked), 0 quarantined",
        "25.0 % of tokens, 60 of 100 requests",
        "10,000 requested, 2,500 reused",
        "7,000 published, 500 computed twice",
        "6,000 tokens; 7 refusals for lack of slots",
        "acquire half at most 1 ms, 99 % at most 820 ms, mean 100 ms",
        "lock half at most 1 ms, 90 % at most 80 ms, mean 2 ms",
        "insert half at most 50 ms, 90 % at most 90 ms, mean 3 ms",
        "waited 11 requests; half at most 1 s, 90 % at most 1.8 s, mean 1.2 s",
        "batch size mean 33.3 of 9 values",
        "up 1.5 min; restarts: 0 ",
        "3 open, the oldest 9 s old; 4 requests wait for slots, the longest for 6 s",
        "by owner, shared prefixes counted once, for the oldest lease: [w0]: 1 lease, 10 slots, up to 0 s old",
        "2 more owners",
        "2 open; 2 ended with their process, 1 fell silent",
        "task alive, 3 rounds, longest slice 0.5 ms of CPU time",
        "at most 12 ms late in the last seconds",
    ):
        assert part in text


def test_names_that_clients_choose_stay_on_their_line_and_do_nothing() -> None:
    owner = LeaseOwner(owner="a\n\x1b[31mb", leases=1, slots=10, oldest_s=1)
    tenant = TenantStats(
        name="t\n\u202e", held_slots=30, evictable_slots=0, floor_slots=20, cap_slots=None, tokens_evicted=0
    )

    text = text_of(snapshot(owners=(owner,), tenants=(tenant,)))

    assert r"a\n\x1b[31mb: 1 lease" in text
    assert r"tenant t\n\u202e: 30 slots" in text


def test_requests_are_leases_and_messages_are_what_batches_carry() -> None:
    text = text_of(snapshot())

    assert "messages 300 in 9 batches, 8 probes" in text
    assert "requests 300" not in text


def test_a_cache_that_was_asked_for_nothing_has_no_hit_rate() -> None:
    text = text_of(snapshot(tokens_requested=0, tokens_reused=0, acquires=0, hits=0))

    assert "hit rate - of tokens, 0 of 0 requests" in text


def test_before_the_first_request_there_is_no_latency() -> None:
    none = Histogram(bounds=(1.0,), counts=(0, 0), sum=0.0, count=0)

    latencies = dict.fromkeys(("acquire_latency", "lock_latency", "insert_latency"), none)
    text = text_of(snapshot(waited=0, wait_time=none, **latencies, batch_size=none))

    assert "acquire - waited 0 requests batch size - " in text


def test_a_cache_that_only_engines_use_shows_the_verbs_that_they_send() -> None:
    none = Histogram(bounds=(1.0,), counts=(0, 0), sum=0.0, count=0)

    text = text_of(snapshot(acquire_latency=none))

    assert "lock half at most 1 ms, 90 % at most 80 ms, mean 2 ms insert half" in text
    assert "acquire -" not in text


def test_rates_are_those_between_two_looks_and_not_across_a_restart() -> None:
    before = snapshot(at_s=8.0, tokens_requested=8_000, tokens_reused=1_000, tokens_evicted=5_000)

    text = text_of(snapshot(), before)
    after_restart = text_of(snapshot(epoch="another"), before)

    assert "10,000 (1,000 a second just now) requested, 2,500 (750 a second just now) reused" in text
    assert "25.0 % of tokens (75.0 % just now)" in text
    assert "6,000 tokens (500 a second just now)" in text
    assert "a second" not in after_restart
    assert "just now" not in after_restart


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "-"),
        (1, "mean 0.5 ms of 1 value"),
        (9, "mean 0.5 ms of 9 values"),
        (10, "half at most 0.5 ms, 90 % at most 0.9 ms, mean 0.5 ms"),
        (100, "half at most 0.5 ms, 99 % at most 0.99 ms, mean 0.5 ms"),
    ],
)
def test_a_share_of_the_values_is_named_if_at_least_one_lies_above_it(count: int, expected: str) -> None:
    times = Histogram(bounds=(0.001,), counts=(count, 0), sum=0.0005 * count, count=count)

    none = Histogram(bounds=(0.001,), counts=(0, 0), sum=0.0, count=0)
    text = text_of(snapshot(acquire_latency=times, lock_latency=none, insert_latency=none))

    assert f"acquire {expected} waited" in text


def test_sizes_of_batches_are_whole_numbers() -> None:
    sizes = Histogram(bounds=(1.0, 2.0), counts=(20, 1, 0), sum=22.0, count=21)

    assert "batch size half at most 1, 90 % at most 1, mean 1.0" in text_of(snapshot(batch_size=sizes))


def test_tenants_other_pools_and_what_if_are_shown_where_there_are_any() -> None:
    window = PoolStats(num_slots=200, free_slots=50, private_slots=0, tree_slots=150, quarantined_slots=0,
                       evictable_slots=100, protected_slots=50)  # fmt: skip
    quiet = TenantStats(
        name="quiet", held_slots=30, evictable_slots=0, floor_slots=20, cap_slots=None, tokens_evicted=0
    )
    rest = quiet.model_copy(update={"name": None, "cap_slots": 900})
    ghost = GhostStats(
        tokens_requested=10, sample_rate=1.0, num_slots=(500, 1000, 2000, 4000), hit_rates=(0.1, 0.25, 0.35, 0.5)
    )

    text = text_of(snapshot(swa=window, tenants=(quiet, rest), ghost=ghost))

    assert "window pool 75.0 % of 200 in use, 100 evictable" in text
    assert "tenant quiet: 30 slots (floor 20, no cap)" in text
    assert "tenant others: 30 slots (floor 20, cap 900)" in text
    assert "twice the pool would change the hit rate by about +10.0 points, of full KV alone" in text


HOST_POOL = PoolStats(num_slots=4000, free_slots=500, private_slots=0, tree_slots=3500, quarantined_slots=0,
                      evictable_slots=3400, protected_slots=100)  # fmt: skip
HOST = TierStats(
    state="ready",
    pinned=True,
    policy="2q",
    slots=HOST_POOL,
    tokens_written=5_000,
    tokens_loaded=1_000,
    tokens_loaded_unused=64,
    tokens_dropped=600,
    writes_refused=2,
    loads={"late": 1, "whole": 9},
    writes={"cancelled": 3},
    moves_in_flight=4,
    loading_requests=2,
    loaded_bytes=3 * 2**30,
    load_s=2.0,
    queued_bytes=5 * 2**20,
)


def test_the_host_tier_is_shown_with_the_tokens_that_it_gave_and_lost() -> None:
    config = CONFIG.model_copy(update={"host": HostConfig(num_slots=4000)})
    before = HOST.model_copy(update={"tokens_loaded": 400, "tokens_dropped": 600})

    now = replace(snapshot(host=HOST, resumed_tokens_reused=1_500), config=config)
    text = text_of(now, snapshot(at_s=8.0, host=before))

    for part in (
        "87.5 % of 4,000 slots in use, policy 2q, pinned loaded",
        "loaded 1,000 tokens (300 a second just now), 25.0 % of the reused ones, 64 for no request",
        "written 5,000 tokens; 2 writes refused for lack of room",
        "dropped 600 tokens before they were written, 10.0 % of the evicted ones",
        "copies loads 9 whole, 1 late at 1.5 GiB a second; writes 3 cancelled; 4 in flight, 5 MiB to be copied; "
        "2 requests wait for loads",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("reserving", "12.5 % of 4,000 slots in use, policy 2q; its memory is being reserved loaded"),
        ("the host pool needs 8 GiB", "in use, policy 2q; the host pool needs 8 GiB loaded 0 tokens, - of the reused"),
    ],
)
def test_a_host_tier_that_does_not_work_says_why(state: str, expected: str) -> None:
    slots = HOST_POOL.model_copy(update={"free_slots": 3500})
    tier = TierStats(state=state, policy="2q", slots=slots)

    assert expected in text_of(snapshot(host=tier, tokens_reused=0))
    assert "host tier" not in text_of(snapshot())


def test_windows_and_states_of_the_host_tier_have_their_lines() -> None:
    text = text_of(snapshot(host=HOST.model_copy(update={"swa": HOST_POOL, "states": HOST_POOL})))

    assert "host window 87.5 % of 4,000 in use, 3,400 evictable" in text
    assert "host states 87.5 % of 4,000 in use, 3,400 evictable" in text


DISK_POOL = DiskPoolStats(num_slots=8000, free_slots=2000, private_slots=16, tree_slots=4984, quarantined_slots=0,
                          evictable_slots=4984, protected_slots=0, dormant_slots=900, leaving_slots=100)  # fmt: skip
DISK = DiskTierStats(
    state="ready",
    admit="second_use",
    slots=DISK_POOL,
    num_spaces=3,
    due_prefixes=1,
    pages_used=200,
    pages_refused=150,
    tokens_written=5_000,
    tokens_loaded=1_000,
    tokens_loaded_unused=64,
    tokens_dropped=600,
    writes={"failed": 1, "committed": 9},
    prefixes_dropped={"no_room": 2, "left_memory": 4},
    last_error="No space left on device",
    written_bytes=3 * 2**30,
    written_bytes_day=2**30,
    loads_in_flight=2,
    loaded_bytes=3 * 2**30,
    load_s=2.0,
    queued_bytes=5 * 2**20,
    loads_late=1,
    stalls=2,
    damaged_records=3,
)


def test_the_disk_is_shown_with_what_it_gave_and_what_was_written() -> None:
    before = DISK.model_copy(update={"tokens_loaded": 400})

    text = text_of(snapshot(disk=DISK, resumed_tokens_reused=1_500), snapshot(at_s=8.0, disk=before))

    for part in (
        "75.0 % of 8,000 slots in use, written at the second use disk slots 2,000 free, 16 private, 4,984 cached, "
        "900 dormant, 100 leaving; 3 namespaces",
        "disk loads 1,000 tokens (300 a second just now), 25.0 % of the reused ones, 64 for no request at 1.5 GiB a "
        "second; 2 in flight, 5 MiB to be read; 1 late load; 2 stalls; 3 damaged records",
        "disk writes 5,000 tokens, 3 GiB, 1 GiB in the last 24 hours; batches 9 committed, 1 failed (No space left on "
        "device)",
        "200 uses of pages, 75.0 % the first ones; 1 prefix to be written, 6 were not written: 2 no_room, 4 "
        "left_memory",
    ):
        assert part in text
    assert "retirement" not in text and "disk" not in text_of(snapshot())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"state": "locked by pid 7"}, "in use, written at the second use; locked by pid 7"),
        ({"admit": "all"}, "600 tokens dropped before they were written"),
        ({"uncommitted_s": 12.0}, "a retirement is not committed for 12 s: a restart may bring it back"),
        ({"swa": DISK_POOL}, "disk window 75.0 % of 8,000 in use, 4,984 evictable"),
        ({"states": DISK_POOL}, "disk states 75.0 % of 8,000 in use, 4,984 evictable"),
    ],
)
def test_the_view_of_a_disk_says_what_else_there_is(fields: dict[str, object], expected: str) -> None:
    assert expected in text_of(snapshot(disk=DISK.model_copy(update=fields)))


def test_twice_the_pool_is_a_pool_without_the_tiers_below() -> None:
    ghost = GhostStats(tokens_requested=10, sample_rate=1.0, num_slots=(1000, 2000), hit_rates=(0.25, 0.35))

    for tiers, expected in (
        ({"host": HOST}, ", without the host tier"),
        ({"disk": DISK}, ", without the disk"),
        ({"host": HOST, "disk": DISK}, ", without the host tier and the disk"),
    ):
        assert f"points{expected} evicted" in text_of(snapshot(ghost=ghost, **tiers))


def test_of_twice_the_pool_nothing_is_told_where_it_was_not_followed() -> None:
    ghost = GhostStats(tokens_requested=10, sample_rate=1.0, num_slots=(500, 1000), hit_rates=(0.1, 0.25))

    assert "twice the pool" not in text_of(snapshot(ghost=ghost))


def test_a_task_that_fails_is_off_or_is_not_needed_yet_is_said_to() -> None:
    failed = TASK.model_copy(update={"failures": 2, "last_error": "ValueError: no", "alive": False})
    off = TASK.model_copy(update={"enabled": False, "started": False, "alive": False})
    fresh = TASK.model_copy(update={"started": False, "alive": False, "rounds": 0})

    assert (
        "task not running, 3 rounds, longest slice 0.5 ms of CPU time, 2 failures, the last: ValueError: no"
        in text_of(snapshot(eviction_task=failed))
    )
    assert "in use; no eviction in the background" in text_of(snapshot(eviction_task=off))
    assert "eviction task off, 3 rounds" in text_of(snapshot(eviction_task=off))
    assert "eviction task starts with the first session, 0 rounds" in text_of(snapshot(eviction_task=fresh))


@pytest.mark.parametrize("rounds", [1, 3, None], ids=["once", "some", "until Ctrl-C"])
def test_watched_stats_end_their_last_line(rounds: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    looked = 0

    def look() -> Snapshot:
        nonlocal looked
        looked += 1
        if rounds is None and looked == 3:
            raise KeyboardInterrupt
        return snapshot(at_s=10.0 + looked)

    with suppress(KeyboardInterrupt):
        _watch(look, 0.001, rounds, as_json=False)

    assert looked == (rounds or 3)
    assert capsys.readouterr().out.endswith("\n")
