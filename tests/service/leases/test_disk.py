"""A cache with a disk tier: leases are filled from the host and the disk, also after a restart; retirements wait."""

from __future__ import annotations

import asyncio
import errno
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiers.demotion import demote
from support.tiers.faulty_files import FaultyFileCalls
from support.tiers.gated_loads import PAGE
from support.tiers.pool_pages import scatter
from support.tiers.settled_disk import settled, tier_of

from raydix.actors import Lease, Loaded, LocalPrefixCache, PrefixCacheClient, start_cache
from raydix.actors.metrics.table import METRICS
from raydix.actors.report.page import render
from raydix.actors.sessions import admission
from raydix.actors.tiers import tier_loads
from raydix.actors.tiers.disk.disk_tier import DiskTier
from raydix.cache_core.tiers.page_records import PageCopies, PageRecords
from raydix.schemas import (
    CacheConfig,
    CacheUnavailable,
    DiskConfig,
    DiskPoolStats,
    DiskTierStats,
    EvictionConfig,
    GhostConfig,
    HostConfig,
    InvalidRequest,
    LeaseConfig,
    ModelFingerprint,
    PoolConfig,
)

PROMPT = list(range(1, 8 * PAGE + 1))
ALL = len(PROMPT)


def disk_config(
    path: Path, host: bool = False, num_slots: int = 64, fingerprint: str = "m", **disk: Any
) -> CacheConfig:
    """A small pool with tensors, perhaps a host tier, and a disk."""
    pool = PoolConfig.uniform(
        num_slots=num_slots, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", device="cpu"
    )
    fields = {"num_slots": 1024, "direct_io": "off", "write_mib_s": None, "load_timeout_s": 60}
    return CacheConfig(
        page_size=PAGE,
        pool=pool,
        host=HostConfig(num_slots=1024, reserve=0.99, load_timeout_s=60) if host else None,
        disk=DiskConfig(path=str(path), **fields | disk),
        eviction=EvictionConfig(high_watermark=0.99, low_watermark=0.98),
        leases=LeaseConfig(acquire_timeout_s=60),
        validate=True,
        fingerprint=fingerprint,
    )


@asynccontextmanager
async def opened(config: CacheConfig, calls: FaultyFileCalls | None = None) -> AsyncIterator[LocalPrefixCache]:
    """A cache with its disk open."""
    cache = LocalPrefixCache(config)
    tier_of(cache).files.calls = calls
    async with cache:
        await cache.stats()
        await settled(cache)
        yield cache


def records_of(cache: LocalPrefixCache) -> PageRecords:
    pool = cache.service.disk.files.pool()  # type: ignore[union-attr]
    assert pool is not None
    return PageRecords(pool)


def kv_of(prompt: list[int], num_pages: int) -> torch.Tensor:
    """The KV of the first pages of a prompt."""
    rows = [np.random.default_rng(prompt[: (page + 1) * PAGE]).bytes(PAGE * 16) for page in range(num_pages)]
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).reshape(num_pages, -1)


def starts_of(cache: LocalPrefixCache, lease: Lease, num_pages: int) -> np.ndarray:
    return cache.service.core.leases.get(lease.lease_id, cache.session.session_id).starts[:num_pages]  # type: ignore[no-any-return]


async def compute(cache: LocalPrefixCache, prompt: list[int]) -> None:
    """Compute and publish a prompt."""
    async with cache.acquire(prompt) as lease:
        num_pages, known = len(prompt) // PAGE, lease.prefix_len // PAGE
        starts = starts_of(cache, lease, num_pages)
        scatter(records_of(cache), starts[known:], kv_of(prompt, num_pages)[known:])
        await lease.insert(prompt)


async def twice(cache: LocalPrefixCache, *prompts: list[int]) -> None:
    """Use prompts for the second time, and wait until they are on the disk."""
    for _ in range(2):
        for prompt in prompts:
            await compute(cache, prompt)
    await settled(cache)


async def found(cache: LocalPrefixCache, prompt: list[int], **options: Any) -> int:
    """The prefix of a lease, of which the KV is right."""
    async with cache.acquire(prompt, **options) as lease:
        num_pages = lease.prefix_len // PAGE
        if num_pages:
            out = torch.empty(num_pages, PAGE * 16, dtype=torch.uint8)
            records_of(cache).gather(starts_of(cache, lease, num_pages), out)
            assert torch.equal(out, kv_of(prompt, num_pages)), "a lease has wrong KV"
        return lease.prefix_len


async def test_a_prompt_is_loaded_from_the_disk_and_found_after_a_restart(tmp_path: Path) -> None:
    async with opened(disk_config(tmp_path)) as cache:
        await twice(cache, PROMPT)
        await cache.evict(10**6)
        assert await found(cache, PROMPT) == ALL
        await cache.check_invariants()
    async with opened(disk_config(tmp_path)) as cache:
        assert await found(cache, PROMPT) == ALL
        assert (await cache.stats()).tokens_reused == ALL


async def test_what_the_background_task_evicts_lies_on_the_disk(tmp_path: Path) -> None:
    config = disk_config(tmp_path, num_slots=160 * PAGE, admit="all").model_copy(update={"eviction": EvictionConfig()})
    prompts = [list(range(100 * number, 100 * number + ALL)) for number in range(1, 31)]
    async with opened(config) as cache:
        for prompt in prompts:
            await compute(cache, prompt)
            await asyncio.sleep(0.01)  # The tasks of the cache begin.
            await settled(cache)
        assert (await cache.stats()).tokens_evicted >= 10 * ALL

        assert [await found(cache, prompt) for prompt in prompts[:8]] == [ALL] * 8


async def test_one_lease_is_filled_from_the_host_and_then_from_the_disk(tmp_path: Path) -> None:
    async with opened(disk_config(tmp_path, host=True)) as cache:
        await twice(cache, PROMPT)
        await demote(cache)
        await cache.evict(10**6, tier="host")
        assert (await cache.match(PROMPT)).host_len == 0
        await compute(cache, PROMPT[: 3 * PAGE])
        await demote(cache)
        assert (await cache.match(PROMPT)).host_len == 3 * PAGE
        assert cache.service.host is not None
        before = cache.service.host.loads.moves.counts.loaded, tier_of(cache).loads.moves.counts.loaded

        assert await found(cache, PROMPT) == ALL

        after = cache.service.host.loads.moves.counts.loaded, tier_of(cache).loads.moves.counts.loaded
        assert (after[0] - before[0], after[1] - before[1]) == (3 * PAGE, 5 * PAGE)
        await cache.check_invariants()


async def test_a_prefetch_goes_on_with_the_disk_when_the_part_of_the_host_is_there(tmp_path: Path) -> None:
    async with opened(disk_config(tmp_path, host=True, num_slots=256)) as cache:
        await twice(cache, PROMPT)
        await demote(cache)
        await cache.evict(10**6, tier="host")
        await compute(cache, PROMPT[: 3 * PAGE])
        await demote(cache)

        assert await cache.prefetch(PROMPT) == 3 * PAGE
        async with asyncio.timeout(60):
            while (await cache.match(PROMPT)).prefix_len < ALL:  # noqa: ASYNC110 -- threads load
                await asyncio.sleep(0.002)
        assert tier_of(cache).loads.moves.counts.loaded_unused == 5 * PAGE


async def test_many_requests_with_one_prompt_load_it_once(tmp_path: Path) -> None:
    async with opened(disk_config(tmp_path, num_slots=512)) as cache:
        await twice(cache, PROMPT)
        await cache.evict(10**6)

        assert await asyncio.gather(*(found(cache, PROMPT) for _ in range(12))) == [ALL] * 12
        assert tier_of(cache).loads.moves.counts.loaded == ALL


async def test_a_lock_and_a_prefetch_load_from_the_disk(tmp_path: Path) -> None:
    async with opened(disk_config(tmp_path, num_slots=256)) as cache:
        await twice(cache, PROMPT)
        await cache.evict(10**6)
        assert await cache.prefetch(PROMPT) == ALL
        async with asyncio.timeout(60):
            while (await cache.match(PROMPT)).prefix_len < ALL:  # noqa: ASYNC110 -- a thread loads it
                await asyncio.sleep(0.002)
        await cache.evict(10**6)
        async with cache.lock(PROMPT) as lease:
            assert lease.prefix_len == ALL
        await cache.check_invariants()


async def test_a_prompt_is_found_after_a_restart_by_equal_models_alone(tmp_path: Path) -> None:
    model, other = (ModelFingerprint(weights=label, fields={"name": "model"}) for label in ("1", "2"))
    config = disk_config(tmp_path, fingerprint="")
    async with opened(config) as cache:
        await cache.bind_model(model)
        await twice(cache, PROMPT)
    async with opened(config) as cache:
        assert await found(cache, PROMPT) == 0, "no model is bound"
    async with opened(config) as cache:
        await cache.bind_model(other)
        await settled(cache)
        assert await found(cache, PROMPT) == 0
    async with opened(config) as cache:
        await cache.bind_model(model)
        await settled(cache)
        assert await found(cache, PROMPT) == ALL


async def test_the_first_request_after_a_binding_finds_what_is_on_the_disk(tmp_path: Path) -> None:
    model, config = ModelFingerprint(weights="1", fields={"name": "model"}), disk_config(tmp_path, fingerprint="")
    async with opened(config) as cache:
        await cache.bind_model(model)
        await twice(cache, PROMPT)
    async with LocalPrefixCache(config) as cache:  # its disk is not open yet
        await cache.bind_model(model)
        assert await found(cache, PROMPT) == ALL


async def test_a_binding_waits_no_longer_than_a_load(tmp_path: Path) -> None:
    model, config = (
        ModelFingerprint(weights="1", fields={"name": "model"}),
        disk_config(tmp_path, fingerprint="", load_timeout_s=0.05),
    )
    async with opened(config) as cache:
        await cache.bind_model(model)
        await twice(cache, PROMPT)
    calls = FaultyFileCalls()
    async with opened(config, calls) as cache:
        go_on = calls.stall("SELECT")
        await cache.bind_model(model)
        assert await found(cache, PROMPT) == 0
        go_on()
        await settled(cache)
        await cache.evict(10**6)
        await cache.bind_model(model)
        assert await found(cache, PROMPT, load_timeout_s=60) == ALL


async def test_a_retirement_is_answered_when_the_disk_has_committed_it(tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    async with opened(disk_config(tmp_path), calls) as cache:
        await twice(cache, PROMPT)
        go_on = calls.stall("DELETE")
        retiring = asyncio.ensure_future(cache.reset())
        await asyncio.sleep(0.05)
        assert not retiring.done()
        assert await found(cache, PROMPT) == 0, "it cannot be found any more"
        go_on()
        await retiring
        assert (await cache.retire(extra_key="nothing")).num_namespaces == 0
    async with opened(disk_config(tmp_path)) as cache:
        assert await found(cache, PROMPT) == 0


async def test_a_retirement_that_the_disk_does_not_confirm_in_time_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_COMMIT_TIMEOUT_S", 0.05)
    calls = FaultyFileCalls()
    async with opened(disk_config(tmp_path, fingerprint=""), calls) as cache:
        await cache.bind_model(ModelFingerprint(weights="old", fields={"name": "model"}))
        await twice(cache, PROMPT)
        go_on = calls.stall("DELETE")
        with pytest.raises(CacheUnavailable, match="the disk has not confirmed"):
            await cache.reset()
        with pytest.raises(CacheUnavailable, match="the disk has not confirmed"):
            await cache.set_weights("new")
        go_on()
        async with asyncio.timeout(60):
            while tier_of(cache).deletions.future() is not None:  # noqa: ASYNC110 -- a thread deletes
                await asyncio.sleep(0.002)
        await cache.set_weights("new")
        await cache.reset()


async def test_a_retirement_waits_for_the_disk_where_nothing_is_loaded(tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    async with opened(disk_config(tmp_path, load_timeout_s=0), calls) as cache:
        await twice(cache, PROMPT)
        go_on = calls.stall("DELETE")
        retiring = asyncio.ensure_future(cache.reset())
        await asyncio.sleep(0.02)
        assert not retiring.done()
        go_on()
        await retiring
        assert (await cache.prefetch(PROMPT)) == 0


async def test_a_disk_that_commits_nothing_keeps_no_request_that_has_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_COMMIT_TIMEOUT_S", 0.001)
    calls = FaultyFileCalls()
    async with opened(disk_config(tmp_path), calls) as cache:
        await twice(cache, PROMPT)
        go_on = calls.stall("DELETE")
        try:
            for _ in range(5):
                with pytest.raises(CacheUnavailable, match="the disk has not confirmed"):
                    await cache.reset()
            waiting = tier_of(cache).deletions.future()
            assert waiting is not None and not waiting._callbacks
        finally:
            go_on()


async def test_a_retirement_names_a_disk_that_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_COMMIT_TIMEOUT_S", 0.02)
    calls = FaultyFileCalls()
    async with opened(disk_config(tmp_path), calls) as cache:
        await twice(cache, PROMPT)
        go_on = calls.stall("DELETE")
        try:
            monkeypatch.setattr(DiskTier, "state", "failed: the disk is gone")
            with pytest.raises(CacheUnavailable, match="The disk has failed: the disk is gone; mend it, or clear it"):
                await cache.reset()
        finally:
            monkeypatch.undo()
            go_on()


async def test_a_request_goes_on_without_a_disk_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_loads, "GRACE_S", 0.01)
    calls = FaultyFileCalls()
    async with opened(disk_config(tmp_path, load_timeout_s=0.05), calls) as cache:
        await twice(cache, PROMPT)
        await cache.evict(10**6)
        go_on = calls.stall("preadv")
        try:
            assert await found(cache, PROMPT[: 4 * PAGE]) == 0
            assert tier_of(cache).state == "stalled"
            async with asyncio.timeout(20):  # No request waits for the load that was given up.
                assert await found(cache, PROMPT, load_timeout_s=600) == 0
            await cache.check_invariants()
        finally:
            go_on()


async def test_a_request_that_begins_again_after_its_load_from_the_host_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_loads, "GRACE_S", 0.01)
    calls = FaultyFileCalls()
    config = disk_config(tmp_path, host=True, load_timeout_s=0.05).model_copy(update={"ghost": GhostConfig()})
    async with opened(config, calls) as cache:
        await twice(cache, PROMPT)
        await demote(cache)
        await cache.evict(10**6, tier="host")
        await compute(cache, PROMPT[: 3 * PAGE])
        await demote(cache)
        before = await cache.stats()
        go_on = calls.stall("preadv")
        try:
            assert await found(cache, PROMPT) == 3 * PAGE, "the host's pages are in the pool now"
        finally:
            go_on()

        after, (namespace,) = await cache.stats(), cache.report().namespaces
        assert after.tokens_requested - before.tokens_requested == ALL
        assert after.tokens_reused - before.tokens_reused == 3 * PAGE
        assert after.host is not None and before.host is not None
        assert (after.host.tokens_loaded, after.host.tokens_loaded_unused) == (before.host.tokens_loaded, 3 * PAGE)
        assert after.disk is not None and after.ghost is not None
        loaded = after.host.tokens_loaded + after.disk.tokens_loaded
        assert (namespace.tokens_reused, namespace.tokens_loaded) == (after.tokens_reused, loaded)
        alone = (after.tokens_reused - loaded) / after.tokens_requested
        assert after.ghost.hit_rate_at(after.num_slots) == pytest.approx(alone), "estimates are of the pool alone"
        await cache.check_invariants()


# ---------------------------------------------------------------- answers and statistics


async def test_answers_tell_the_tokens_of_the_tiers_apart(tmp_path: Path) -> None:
    async with opened(disk_config(tmp_path, host=True)) as cache:
        await twice(cache, PROMPT)
        await demote(cache)
        await cache.evict(10**6, tier="host")
        await compute(cache, PROMPT[: 3 * PAGE])
        await demote(cache)
        await compute(cache, PROMPT[:PAGE])

        match, why = await cache.match([*PROMPT, 0]), await cache.explain([*PROMPT, 0])
        assert (match.prefix_len, match.host_len, match.disk_len) == (PAGE, 3 * PAGE, ALL)
        assert (why.prefix_len, why.host_len, why.disk_len, why.disk_left_s) == (PAGE, 3 * PAGE, ALL, None)
        assert f"{2 * PAGE} more are on the host and {5 * PAGE} on the disk: acquire loads them" in str(why)
        before = await cache.stats()
        async with cache.acquire(PROMPT) as lease:
            assert (lease.prefix_len, lease.loaded) == (ALL, Loaded(host=2 * PAGE, disk=5 * PAGE))
        after = await cache.stats()

        assert after.host is not None and after.disk is not None and before.host is not None and before.disk is not None
        assert after.host.tokens_loaded - before.host.tokens_loaded == 2 * PAGE
        assert after.disk.tokens_loaded - before.disk.tokens_loaded == 5 * PAGE
        assert after.tokens_reused - before.tokens_reused == ALL


async def test_a_prompt_that_left_the_disk_is_explained(tmp_path: Path) -> None:
    async with opened(disk_config(tmp_path)) as cache:
        await twice(cache, PROMPT)
        assert (await cache.explain(PROMPT)).disk_left_s is None
        await cache.evict(ALL - 3 * PAGE, tier="disk")
        assert (await cache.explain(PROMPT)).disk_left_s is None, "the pool has it"
        await cache.evict(10**6)

        found, unknown = await cache.explain(PROMPT), await cache.explain([7] * ALL)

        assert (found.prefix_len, found.host_len, found.disk_len, found.reason) == (0, 0, 3 * PAGE, "evicted")
        assert found.disk_left_s is not None and 0 <= found.disk_left_s < 60
        assert str(found).startswith(
            f"0 of {ALL} tokens hit; {3 * PAGE} more are on the disk: acquire loads them; what follows them was on the "
            "disk until "
        )
        await cache.evict(10**6, tier="disk")
        found = await cache.explain(PROMPT)
        assert re.search(
            r"what follows was evicted \(request\), .* s ago; it was on the disk until .* s ago", str(found)
        )
        assert (unknown.disk_len, unknown.disk_left_s) == (0, None)


async def test_the_statistics_count_the_disk(tmp_path: Path) -> None:
    async with opened(disk_config(tmp_path)) as cache:
        await compute(cache, PROMPT)
        await settled(cache)
        stats = (await cache.stats()).disk
        assert stats is not None
        sizes = DiskPoolStats(
            num_slots=1024,
            free_slots=1024,
            private_slots=0,
            tree_slots=0,
            quarantined_slots=0,
            evictable_slots=0,
            protected_slots=0,
        )
        assert stats == DiskTierStats(state="ready", admit="second_use", slots=sizes, pages_used=8, pages_refused=8)
        await twice(cache, PROMPT)
        await cache.evict(10**6)
        assert await found(cache, PROMPT) == ALL
        assert await found(cache, PROMPT) == ALL

        stats = (await cache.stats()).disk
        assert stats is not None
        tree = {"tree_slots": ALL, "evictable_slots": ALL, "free_slots": 1024 - ALL}
        assert stats.slots == sizes.model_copy(update=tree)
        assert (stats.tokens_written, stats.tokens_loaded, stats.writes) == (ALL, ALL, {"committed": 8})
        assert stats.written_bytes == stats.written_bytes_day > ALL * 16
        assert stats.loaded_bytes >= ALL * 16 and stats.load_s > 0
        assert (stats.pages_used, stats.pages_refused) == (5 * 8, 8)
    async with opened(disk_config(tmp_path, fingerprint="other")) as cache:
        stats = (await cache.stats()).disk
        assert stats is not None
        dormant = {"dormant_slots": ALL, "free_slots": 1024 - ALL}
        assert (stats.slots, stats.num_spaces) == (sizes.model_copy(update=dormant), 1)
        assert stats.written_bytes == stats.written_bytes_day == 0


async def test_evicted_records_are_leaving_until_their_rows_are_deleted(tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    async with opened(disk_config(tmp_path), calls) as cache:
        await twice(cache, PROMPT)
        go_on = calls.stall("DELETE")
        try:
            await cache.evict(2 * PAGE, tier="disk")
            stats = (await cache.stats()).disk
            assert stats is not None
            slots = stats.slots
            assert (slots.leaving_slots, slots.tree_slots, slots.private_slots) == (2 * PAGE, ALL - 2 * PAGE, 0)
            assert slots.free_slots == 1024 - ALL and slots.evicted == 2 * PAGE
        finally:
            go_on()


async def test_dropped_and_failed_writes_are_counted_by_cause(tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    async with opened(disk_config(tmp_path), calls) as cache:
        calls.fail("pwritev", errno.ENOSPC)
        for _ in range(2):
            await compute(cache, PROMPT)
        async with asyncio.timeout(60):
            while not (stats := (await cache.stats()).disk) or not stats.writes:  # noqa: ASYNC110 -- a thread writes
                await asyncio.sleep(0.002)
        assert stats.writes == {"failed": 1}
        assert "No space left on device" in str(stats.last_error)


async def test_a_retirement_that_is_not_committed_has_an_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_COMMIT_TIMEOUT_S", 0.02)
    calls = FaultyFileCalls()
    async with opened(disk_config(tmp_path), calls) as cache:
        await twice(cache, PROMPT)
        stats = (await cache.stats()).disk
        assert stats is not None and stats.uncommitted_s == 0
        go_on = calls.stall("DELETE")
        try:
            with pytest.raises(CacheUnavailable, match="the disk has not confirmed"):
                await cache.reset()
            stats = (await cache.stats()).disk
            assert stats is not None and stats.uncommitted_s >= 0.02
        finally:
            go_on()
        await settled(cache)
        async with asyncio.timeout(60):
            while (stats := (await cache.stats()).disk) and stats.uncommitted_s:  # noqa: ASYNC110 -- a thread commits
                await asyncio.sleep(0.002)


async def test_kv_that_leaves_memory_before_it_is_written_is_counted(tmp_path: Path) -> None:
    async with opened(disk_config(tmp_path, admit="all", reserve=0.001)) as cache:
        await compute(cache, PROMPT)
        await settled(cache)
        await cache.evict(ALL)

        stats, why = (await cache.stats()).disk, await cache.explain(PROMPT)

        assert stats is not None
        assert (stats.tokens_dropped, stats.pages_used, stats.tokens_written) == (ALL, 0, 0)
        assert (why.prefix_len, why.disk_len, why.was_dropped) == (0, 0, True)


def test_a_cache_actor_with_a_disk_needs_a_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="name must be given for a cache with a disk tier"):
        start_cache(disk_config(tmp_path))


async def test_a_load_from_the_disk_counts_in_the_load_of_the_cache(tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    async with opened(disk_config(tmp_path), calls) as cache:
        await twice(cache, PROMPT)
        await cache.evict(10**6)
        go_on = calls.stall("preadv")
        asking = asyncio.ensure_future(found(cache, PROMPT))
        async with asyncio.timeout(60):
            while not (stats := (await cache.stats()).disk) or not stats.loads_in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        load = cache.service._load()
        go_on()

        assert (load.loading_tokens, load.unpublished_tokens, load.leased_tokens) == (ALL, ALL, ALL)
        assert await asking == ALL
        assert cache.service._load().loading_tokens == 0


def damage(path: Path) -> None:
    """Flip a bit of each record of the only disk in a folder."""
    (pages,) = path.rglob("pages.bin")
    data = bytearray(pages.read_bytes())
    for record in range(0, len(data), 4096):
        data[record] ^= 1
    pages.write_bytes(data)


async def test_a_disk_that_does_not_answer_and_damaged_records_are_counted(tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    async with opened(disk_config(tmp_path, load_timeout_s=0.05), calls) as cache:
        await twice(cache, PROMPT)
        await cache.evict(10**6)
        go_on = calls.stall("preadv")
        try:
            assert await found(cache, PROMPT) == 0
            stats = (await cache.stats()).disk
            assert stats is not None
            assert (stats.state, stats.loads_late, stats.stalls, stats.loads_in_flight) == ("stalled", 1, 1, 1)
            assert stats.queued_bytes > 0
        finally:
            go_on()
    damage(tmp_path)
    async with opened(disk_config(tmp_path)) as cache:
        assert await found(cache, PROMPT) == 0
        all_stats = await cache.stats()
        assert all_stats.disk is not None and all_stats.disk.damaged_records > 0
        assert all_stats.disk.tokens_loaded == all_stats.tokens_reused == 0

        read = {metric.name: dict(metric.read(all_stats)) for metric in METRICS if "_disk_" in metric.name}
        assert {name for name, samples in read.items() if not samples} == {
            "raydix_disk_writes_total",
            "raydix_disk_dropped_prefixes_total",
        }, "counters by cause appear with their first count"
        assert read["raydix_disk_damaged_records_total"] == {(): all_stats.disk.damaged_records}
        assert read["raydix_disk_state"][("state", "ready"),] == 1
        assert "damaged records" in render(cache.service.report(), cache.service.config, "kv-0")


def run_and_leave(work: Coroutine[Any, Any, None]) -> None:
    """Run work on a loop that is closed with its tasks pending."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(work)
    loop.close()


@pytest.mark.parametrize("run", [asyncio.run, run_and_leave])
def test_a_cache_goes_on_if_its_loop_ends_while_its_disk_is_read(
    tmp_path: Path, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    cache, calls = LocalPrefixCache(disk_config(tmp_path, fingerprint="")), FaultyFileCalls()
    tier_of(cache).files.calls = calls
    model, go_on = ModelFingerprint(weights="1", fields={"name": "model"}), calls.stall("SELECT")

    async def bind() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await cache.bind_model(model)

    async def use() -> None:
        async with PrefixCacheClient(cache) as client:
            await client.bind_model(model)
            for hit in (0, ALL):
                async with client.acquire(PROMPT) as lease:
                    assert lease.prefix_len == hit
                    await lease.insert(PROMPT)
            stats = (await client.stats()).disk
            assert stats is not None and stats.state == "closed"

    try:
        run(bind())
    finally:
        go_on()
    asyncio.run(use())


def test_a_cache_goes_on_if_its_loop_ends_during_a_load_from_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = LocalPrefixCache(disk_config(tmp_path, host=True, num_slots=256, admit="all"))
    may_load, load = threading.Event(), PageCopies.load

    def load_later(*arguments: Any) -> None:
        may_load.wait(60)
        load(*arguments)

    monkeypatch.setattr(PageCopies, "load", load_later)

    async def prefetch() -> None:
        await cache.stats()
        await settled(cache)
        await compute(cache, PROMPT)
        await demote(cache)
        assert await cache.prefetch(PROMPT) == ALL

    async def use() -> None:
        async with PrefixCacheClient(cache) as client, client.acquire(PROMPT) as lease:
            assert lease.prefix_len == ALL

    asyncio.run(prefetch())
    may_load.set()
    asyncio.run(use())
