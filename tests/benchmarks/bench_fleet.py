"""Measure a router: a route among a thousand caches, the index and its events, and how late the events are.

    python -m benchmarks.bench_fleet [--quick]

in the tests' folder. All but the last figures are of one router and its caches in this process, in CPU time, so that
other load counts little. The last ones need Ray, and are wall times.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import time
import tracemalloc
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from benchmarks.figures import HEADING, Figure, median_ratio, times_in_turns
from benchmarks.local_ray import ray_started
from numpy.typing import NDArray
from support.fleet.running_fleet import PAGE, slim, until

from raydix.actors import Fleet, LocalPrefixCache, PrefixCacheClient, connect_fleet, shutdown_cache, start_cache
from raydix.actors.fleet.route import Route
from raydix.actors.fleet.route_chooser import Prompt
from raydix.cache_core import Applied, PageIndex, RadixKey, page_hashes
from raydix.schemas import SlimEventBatch
from raydix.schemas.events import SLIM_EVENT_KINDS, pack_batch, unpack_batch

NUM_CACHES, NUM_PAGES = 1_000, 1_000_000
STRIDE = 512  # tokens
CHAIN = 50  # pages of each cached prompt
MAX_PROMPT_PAGES = 64  # of a routed prompt: 32k tokens
NUM_OPEN = 1_000  # routes without a first token
MAX_ROUTE_US, MAX_ROUTE_TAIL_US = 100.0, 1_000.0
MAX_PAGE_BYTES = 64.0
BATCH_PAGES = 64
MIN_PAGES_A_SECOND = 1e6
MAX_HOLD_MS = 2.0
NUM_FEEDS, NUM_ACTORS, BATCHES_A_SECOND, SENT_PAGES = 50, 4, 20, 16
MAX_STALE_MS, STALE_GATE_MS = 100.0, 300.0  # the gate leaves room for a machine that does other work
ROUNDS = 7
STORED, REMOVED = SLIM_EVENT_KINDS.index("PagesStored"), SLIM_EVENT_KINDS.index("PagesRemoved")
Pages = NDArray[np.int64]


def some_pages(rng: np.random.Generator, *shape: int) -> Pages:
    """Return hashes that no other page has."""
    return rng.integers(-(2**63), 2**63 - 1, shape, np.int64)


class LargeFleet:
    """A router of many caches, in this process; each cache holds as many chains of pages as any other.

    The caches themselves are empty, and idle. The index gets their pages as snapshots of the caches' own epochs.

    Attributes:
        fleet: the router.
        chains: by column, the pages of each cached prompt.
    """

    def __init__(self, fleet: Fleet, num_pages: int, seed: int = 0) -> None:
        self.fleet = fleet
        self.rng = np.random.default_rng(seed)
        columns = fleet.columns().values()
        per_cache = num_pages // len(columns) // CHAIN
        self.chains = {column: some_pages(self.rng, per_cache, CHAIN) for column in columns}
        for column, chains in self.chains.items():
            epoch, seq = fleet.index.position(column)
            assert epoch is not None
            assert fleet.index.apply_snapshot(column, epoch, seq, chains.reshape(-1))

    def prompts(self, count: int, first: Pages) -> list[Prompt]:
        """Return prompts of 1 to 64 pages, each of `first`, a part of a cached chain, and pages that no cache has."""
        columns, shape = list(self.chains), self.fleet.members.shape
        assert shape is not None
        found = []
        for _ in range(count):
            chains = self.chains[columns[self.rng.integers(len(columns))]]
            cached = chains[self.rng.integers(len(chains))][: self.rng.integers(CHAIN + 1)]
            num_pages = int(self.rng.integers(1, MAX_PROMPT_PAGES + 1))
            hashes = np.concatenate((first, cached, some_pages(self.rng, num_pages)))[:num_pages].copy()
            found.append(Prompt(num_pages * STRIDE + 7, hashes, shape))
        return found

    def route_us(self, count: int, first: Pages) -> NDArray[np.float64]:
        """Return the microseconds of each of so many routes, with the end of an earlier one and of its promises."""
        is_open: deque[Route] = deque()
        times = []
        for prompt in self.prompts(count + NUM_OPEN, first):
            started = time.thread_time_ns()
            is_open.append(self.fleet.chooser.send(prompt))
            if len(is_open) > NUM_OPEN:
                is_open.popleft().cancel()
            times.append(time.thread_time_ns() - started)
        for route in is_open:
            route.cancel()
        return np.array(times[NUM_OPEN:]) / 1e3

    def batch_ms(self, count: int) -> NDArray[np.float64]:
        """Return the milliseconds of each of so many batches at 50 of the feeds: half its pages come, half go."""
        half = BATCH_PAGES // 2
        feeds = [(column, member.feeds[0]) for column, member in self.fleet.members.by_column.items()][:NUM_FEEDS]
        held = {column: self.chains[column].reshape(-1) for column, _ in feeds}
        times = []
        for number in range(count):
            column, feed = feeds[number % len(feeds)]
            epoch, seq = self.fleet.index.position(column)
            assert epoch is not None
            new, gone = some_pages(self.rng, half), held[column][:half]
            held[column] = np.concatenate((held[column][half:], new))
            hashes = np.concatenate((new, gone)).tobytes()
            kinds, counts = bytes((STORED, REMOVED)), np.array([half, half], "<i4").tobytes()
            load = self.fleet.members.routes.load(column)
            packed = pack_batch(SlimEventBatch(epoch, seq + 2, STRIDE, kinds, counts, hashes, load))
            started = time.thread_time_ns()
            applied = feed._apply(column, unpack_batch(packed))
            times.append(time.thread_time_ns() - started)
            assert applied
        return np.array(times) / 1e6


@asynccontextmanager
async def large_fleet(num_caches: int, num_pages: int) -> AsyncIterator[LargeFleet]:
    """Yield a router of so many caches, and of so many pages in all."""
    config = slim(PAGE, events_stride_tokens=STRIDE)
    caches = {f"cache-{number}": LocalPrefixCache(config) for number in range(num_caches)}
    try:
        async with await connect_fleet(caches) as fleet:
            await until(lambda: len(fleet.columns()) == num_caches)
            gc.collect()
            gc.freeze()  # a router does not collect the objects of its caches, which are elsewhere
            yield LargeFleet(fleet, num_pages)
    finally:
        gc.unfreeze()
        for cache in caches.values():
            await cache.close()


async def router_figures(num_caches: int, num_pages: int, num_routes: int, num_batches: int) -> list[Figure]:
    """Return the figures of routes and of batches of events, of a router of so many caches and pages."""
    async with large_fleet(num_caches, num_pages) as large:
        index = large.fleet.index
        assert index.num_pages() == num_pages
        routes = large.route_us(num_routes, some_pages(large.rng, 0))
        batches = large.batch_ms(num_batches)
        assert len(index.pages(min(large.chains))[0]) == num_pages // num_caches, "as many pages come as go"
        common = some_pages(large.rng, 1)
        for column in large.chains:
            epoch, seq = index.position(column)
            assert epoch is not None
            applied = index.apply(column, epoch, seq + 1, bytes((STORED,)), np.array([1], np.int32), common)
            assert applied is Applied.DONE
        hot = large.route_us(num_routes, common)
    what = f"route, {num_caches:,} caches, {num_pages / 1e6:g}M pages"
    tail = f"loop held by a batch of {BATCH_PAGES} pages, p99 of {num_batches:,}"
    rate = BATCH_PAGES * len(batches) / batches.sum() * 1e3
    return [
        _at_most(f"{what}, one holder each, p50", _percentile(routes, 50), "us", MAX_ROUTE_US),
        _at_most(f"{what}, one holder each, p99", _percentile(routes, 99), "us", MAX_ROUTE_TAIL_US),
        Figure("fleet", f"{what}, first page in all, p50", _percentile(hot, 50), "us"),
        Figure("fleet", f"{what}, first page in all, p99", _percentile(hot, 99), "us"),
        Figure(
            "fleet", "pages of events on one core", rate, "1/s", at_least=MIN_PAGES_A_SECOND, gate=MIN_PAGES_A_SECOND
        ),
        _at_most(tail, _percentile(batches, 99), "ms", MAX_HOLD_MS),
    ]


def _percentile(times: NDArray[np.float64], percent: int) -> float:
    return float(np.percentile(times, percent))


def _at_most(what: str, value: float, unit: str, limit: float) -> Figure:
    """Return a figure with a goal that is its gate, too: it is no wall time."""
    return Figure("fleet", what, value, unit, at_most=limit, gate=limit)


def page_bytes(num_columns: int, num_pages: int) -> float:
    """Return the bytes of a page in an index, as the allocator of Python's memory counts them."""
    rng = np.random.default_rng(1)
    pages = some_pages(rng, num_columns, num_pages // num_columns)
    gc.collect()
    tracemalloc.start()
    index = PageIndex()
    for of_column in pages:
        index.apply_snapshot(index.add_column(), "e", 0, of_column)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.num_pages() == pages.size
    return held / pages.size


def hashing_figures(num_tokens: int = 32_768) -> list[Figure]:
    """Return the cost of the hashes of a prompt, which comes before its route."""
    key = RadixKey(np.random.default_rng(2).integers(0, 128_000, num_tokens, np.int32))

    def by_hashlib() -> int:
        last = b""
        for at in range(0, len(key.data), 4 * PAGE):
            last = hashlib.sha256(last + key.data[at : at + 4 * PAGE]).digest()
        return int.from_bytes(last[:8], "big", signed=True)

    assert page_hashes(key, PAGE, STRIDE)[-1] == by_hashlib()
    times = times_in_turns({"ours": partial(page_hashes, key, PAGE, STRIDE), "hashlib": by_hashlib}, ROUNDS)
    what, ratio = f"hashes of {num_tokens:,} tokens, pages of {PAGE}", median_ratio(times, "hashlib", "ours")
    return [Figure("fleet", what, median(times["ours"]) * 1e6, "us", ratio, "calls of hashlib")]


# ---------------------------------------------------------------- staleness


class Staleness:
    """The time from the start of a publication to the moment at which a router's index has its pages.

    Attributes:
        delays_ms: of each publication, at each feed.
    """

    def __init__(self, index: PageIndex) -> None:
        self.delays_ms: list[float] = []
        self._index = index
        self._sent_at: dict[int, float] = {}  # by the last page of a publication
        self._apply = index.apply
        index.apply = self._watch  # type: ignore[method-assign]

    def sends(self, last_page: int) -> None:
        """Note that pages are published from now on, of which this is the last one."""
        self._sent_at[last_page] = time.perf_counter()

    def _watch(self, column: int, epoch: str, seq: int, kinds: bytes, counts: Any, hashes: Pages) -> Applied:
        applied = self._apply(column, epoch, seq, kinds, counts, hashes)
        now, ends = time.perf_counter(), np.cumsum(counts)
        for kind, end in zip(kinds, ends.tolist(), strict=True):
            if kind == STORED and (sent_at := self._sent_at.get(int(hashes[end - 1]))) is not None:
                self.delays_ms.append(1e3 * (now - sent_at))
        return applied


async def staleness_ms(num_feeds: int, num_actors: int, seconds: float) -> list[float]:
    """Return the delays of events from cache actors, each a process, to the feeds of one router.

    Each actor is read by several feeds, as by several routers, and publishes a prompt of 16 pages 20 times a second.
    """
    config = slim(2**17, events_stride_tokens=PAGE)
    actors = [start_cache(config) for _ in range(num_actors)]
    names = {f"feed-{number}": actors[number % num_actors] for number in range(num_feeds)}
    num_sent = round(seconds * BATCHES_A_SECOND)
    try:
        async with await connect_fleet(names) as fleet:
            await until(lambda: len(fleet.columns()) == num_feeds)
            staleness = Staleness(fleet.index)
            await asyncio.gather(
                *(_publish(actor, number, num_sent, staleness.sends) for number, actor in enumerate(actors))
            )
            await until(lambda: len(staleness.delays_ms) >= num_feeds * num_sent)
    finally:
        await asyncio.gather(*(asyncio.to_thread(shutdown_cache, actor) for actor in actors))
    assert len(staleness.delays_ms) == num_feeds * num_sent, "each feed gets each page once"
    return staleness.delays_ms


async def _publish(actor: Any, number: int, num_sent: int, sends: Callable[[int], None]) -> None:
    """Publish so many prompts at a cache, evenly."""
    rng = np.random.default_rng(number)
    prompts = rng.integers(0, 2**31 - 1, (num_sent, SENT_PAGES * PAGE), np.int32)
    loop = asyncio.get_running_loop()
    async with PrefixCacheClient(actor) as client:
        start = loop.time() + number / NUM_ACTORS / BATCHES_A_SECOND
        for place, prompt in enumerate(prompts):
            await asyncio.sleep(start + place / BATCHES_A_SECOND - loop.time())
            lease = await client.acquire(prompt)
            sends(int(page_hashes(prompt, PAGE)[-1]))
            await lease.insert(prompt, release=True)


def staleness_figures(seconds: float) -> list[Figure]:
    """Return the median and the tail of the events' delays."""
    with ray_started():
        delays = asyncio.run(staleness_ms(NUM_FEEDS, NUM_ACTORS, seconds))
    p50, p99 = np.percentile(delays, (50, 99)).tolist()
    what = f"staleness, {NUM_FEEDS} feeds of {NUM_ACTORS} processes"
    return [
        Figure("fleet", f"{what}, p50", p50, "ms"),
        Figure("fleet", f"{what}, p99", p99, "ms", at_most=MAX_STALE_MS, gate=STALE_GATE_MS),
    ]


# ---------------------------------------------------------------- all


def figures(quick: bool) -> list[Figure]:
    """Return all figures."""
    num_routes, num_batches, seconds = (2_000, 2_000, 3.0) if quick else (20_000, 10_000, 15.0)
    memory = page_bytes(NUM_CACHES, NUM_PAGES)
    return [
        *asyncio.run(router_figures(NUM_CACHES, NUM_PAGES, num_routes, num_batches)),
        _at_most(f"memory of an indexed page, of 1M in {NUM_CACHES:,} caches", memory, "B", MAX_PAGE_BYTES),
        *hashing_figures(),
        *staleness_figures(seconds),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    print(HEADING)
    for figure in figures(args.quick):
        print(figure.line())


if __name__ == "__main__":
    main()
