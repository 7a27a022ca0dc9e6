"""Replay a trace in virtual time, with a copier of a given rate: how much of the evicted KV is dropped unwritten.

    python -m benchmarks.bench_tier_writes TRACE [GB/s]

in the tests' folder. The shipped service evicts in the background, at its default watermarks, and a token has 128 KiB.
A request computes in no time, so that its pages are published when it has its lease; it waits for its load. Requests
arrive at the times of the trace, spread over the step that these were rounded to.
"""

from __future__ import annotations

import asyncio
import selectors
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.actors.observe.trace import TracedRequest, read_trace
from raydix.actors.replay.arrivals import Arrivals
from raydix.actors.tiers.copier import Copy, CopyCounts
from raydix.actors.tiers.job_threads import End, Ended
from raydix.cache_core.tiers.page_records import CopyPlan, PageCopies
from raydix.cache_core.tiers.writes import BATCH_BYTES
from raydix.schemas import CacheConfig, CacheStats, HostConfig, PoolConfig, PoolExhausted, TierStats

Done = Callable[[Ended], object]

TOKEN_BYTES = 128 * 1024
POOL_BLOCKS, HOST_BLOCKS = 1_000, (4_000, 8_000)
GB_PER_S = 10.0


class _VirtualSelector(selectors.DefaultSelector):
    """A selector that waits for no time: it moves the clock instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(None if timeout is None else 0)
        if not events and timeout:
            self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on a virtual clock, which jumps to the next timer when nothing is left to do."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return the seconds since the loop began."""
        return self._virtual.now


class TimedCopier:
    """Copies that take virtual time and move no byte: page by page, loads before writes, as those of `Copier`.

    Attributes:
        busy_s: seconds of all copies.

    Args:
        copies: between the pools.
        page_s: seconds of a page.
    """

    def __init__(self, copies: PageCopies, page_s: float) -> None:
        self.busy_s = 0.0
        self._copies = copies
        self._page_s = page_s
        self._queue: list[Copy] = []
        self._current: Copy | None = None
        self._counts = {True: CopyCounts(), False: CopyCounts()}  # is_load -> counts

    def load(self, plan: CopyPlan, done: Done, timeout_s: float | None = None, *, is_awaited: bool = True) -> Copy:
        """Begin a load; it ends after `timeout_s`, if not before."""
        copy = self._start(Copy(plan, self._copies, done, is_load=True, is_awaited=is_awaited))
        if timeout_s is not None:
            asyncio.get_running_loop().call_later(timeout_s, self._end, copy, "late")
        return copy

    def write(self, plan: CopyPlan, done: Done) -> Copy:
        """Begin a write."""
        return self._start(Copy(plan, self._copies, done, is_load=False))

    def _start(self, copy: Copy) -> Copy:
        copy.chunks = self._copies.chunks(copy.plan, 1)
        self._queue.append(copy)
        self._go_on()
        return copy

    def _go_on(self) -> None:
        if self._current is None and self._queue:
            self._current = next((copy for copy in self._queue if copy.is_load), self._queue[0])
            asyncio.get_running_loop().call_later(self._page_s, self._end_page)

    def _end_page(self) -> None:
        copy, self._current = self._current, None
        assert copy is not None
        self.busy_s += self._page_s
        if copy.result is None:
            self._counts[copy.is_load].add(copy.chunks[copy.num_chunks].num_bytes, self._page_s)
            copy.num_chunks += 1
            if copy.num_chunks == len(copy.chunks):
                self._end(copy, "whole")
            elif copy.is_cancelled:
                self._end(copy, "cancelled")
        self._go_on()

    def _end(self, copy: Copy, end: End) -> None:
        if copy.result is None:
            self._queue.remove(copy)
            self._counts[copy.is_load].ends[end] += 1
            copy.result = Ended(copy.num_pages, end)
            asyncio.get_running_loop().call_soon(copy.done, copy.result)

    def cancel(self, copy: Copy) -> None:
        """End a copy: now if none of its pages is being copied, else behind that page."""
        copy.is_cancelled = True
        if copy is not self._current:
            self._end(copy, "cancelled")

    def counts(self, *, loads: bool) -> CopyCounts:
        """Return the counts of loads or of writes."""
        return self._counts[loads]

    def queued_bytes(self, *, loads: bool) -> int:
        """Return the bytes that are still to be copied."""
        return sum(copy.bytes_left for copy in self._queue if copy.is_load is loads)

    def bytes_ahead(self) -> int:
        """Return the bytes that are copied before another load."""
        return self.queued_bytes(loads=True)

    def stop_all(self, timeout_s: float | None = None) -> None:
        """End all copies; none is waited for."""
        for copy in list(self._queue):
            self._end(copy, "cancelled")

    close = stop_all


class Outcome(NamedTuple):
    """The counts of a replay."""

    stats: CacheStats
    host: TierStats
    waits_s: NDArray[np.float64]  # of the requests that have got a lease, from their arrival
    busy_s: float  # of the copier
    span_s: float  # of the replay

    def __str__(self) -> str:
        stats, host = self.stats, self.host
        loaded = 100 * host.tokens_loaded / stats.tokens_requested
        dropped = 100 * host.tokens_dropped / max(1, stats.tokens_evicted)
        return (
            f"hits {100 * stats.hit_rate:.2f} %, {loaded:.2f} of it loaded; {stats.tokens_evicted:,} tokens evicted, "
            f"{dropped:.1f} % of them dropped; {host.tokens_written:,} written; "
            f"copier busy {100 * self.busy_s / self.span_s:.0f} %; waits {1e3 * self.waits_s.mean():.1f} ms, "
            f"p99 {1e3 * np.percentile(self.waits_s, 99):.0f} ms"
        )


def simulate(
    trace: Sequence[TracedRequest], host: HostConfig, bytes_per_s: float, *, pool_blocks: int = POOL_BLOCKS
) -> Outcome:
    """Replay a trace on a cache with a host tier, in virtual time.

    Args:
        host: of the tier.
        bytes_per_s: the rate of its copier.
        pool_blocks: size of the pool, in blocks of the trace.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_simulate(trace, host, bytes_per_s, pool_blocks))


async def _simulate(trace: Sequence[TracedRequest], host: HostConfig, bytes_per_s: float, pool_blocks: int) -> Outcome:
    page, loop, waits_s = trace[0].block_size, asyncio.get_running_loop(), list[float]()
    # A byte of the pool stands for a token.
    pool = PoolConfig(num_slots=pool_blocks * page, format="opaque", slot_bytes=1, device="cpu")
    copiers: list[TimedCopier] = []

    def make_copier(copies: PageCopies) -> Any:
        copiers.append(TimedCopier(copies, page * TOKEN_BYTES / bytes_per_s))
        return copiers[0]

    async def serve(client: PrefixCacheClient, request: TracedRequest) -> None:
        tokens, arrived_at = request.tokens(), loop.time()
        try:
            lease = await client.acquire(tokens)
        except PoolExhausted as error:
            if error.can_ever_fit:
                raise
            return
        waits_s.append(loop.time() - arrived_at)
        await lease.insert(tokens, release=True)

    async with LocalPrefixCache(CacheConfig(page_size=page, pool=pool, host=host)) as cache:
        tiers = cache.service.host
        assert tiers is not None
        tiers.make_copier = make_copier  # type: ignore[method-assign]
        tiers.writes.batch_pages = max(1, min(tiers.writes.batch_pages, BATCH_BYTES // (page * TOKEN_BYTES)))
        while tiers.state != "ready":
            time.sleep(0.01)  # noqa: ASYNC251 -- a thread reserves the memory, in real time
        started = loop.time()
        async with PrefixCacheClient(cache) as client, asyncio.TaskGroup() as group:
            for arrival_s, request in zip(Arrivals(trace).times_s(seed=0)[0], trace, strict=True):
                await asyncio.sleep(max(0.0, started + arrival_s - loop.time()))
                group.create_task(serve(client, request))
        stats = await cache.stats()
        assert stats.host is not None
        return Outcome(stats, stats.host, np.array(waits_s), copiers[0].busy_s, loop.time() - started)


def main() -> None:
    """Print a line for each size and policy of the host tier."""
    trace = read_trace(Path(sys.argv[1]))
    gb_per_s = float(sys.argv[2]) if len(sys.argv) > 2 else GB_PER_S
    for blocks in HOST_BLOCKS:
        for policy in ("lru", "2q"):
            host = HostConfig.model_validate({"num_slots": blocks * trace[0].block_size, "policy": policy})
            print(
                f"{blocks:,} blocks on the host, {policy}, {gb_per_s:g} GB/s: {simulate(trace, host, 1e9 * gb_per_s)}"
            )


if __name__ == "__main__":
    main()
