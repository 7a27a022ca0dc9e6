"""Hit rates of "lru" and "2q" on generated traffic that no policy was made by, against those of the rules.

The shipped service replays it on index-only pools of a share of the distinct pages; the median gap between two requests
of a document is half the pool. The rules are those of `PagePool`, which evicts a page at a time while it inserts.
"""

from __future__ import annotations

import asyncio
from statistics import mean

from benchmarks.figures import Figure
from benchmarks.returning_documents import NUM_PAGES, documents
from support.reference.page_pool import PagePool

from raydix.actors.observe.trace import BLOCK, TracedRequest
from raydix.actors.replay.trace_replay import index_config, replay

SHARES = (16, 8, 4, 2)  # the pool is one of so many parts of the distinct pages
FURTHER = {"asked twice": 0.0, "asked often": 0.75}  # how probable a further request of a document is, each time
SEEDS = range(1, 6)
WITHIN = 0.5  # points


def figures(quick: bool) -> list[Figure]:
    """Return the mean rate over the seeds by traffic, size of the pool and policy; a quick run has one seed."""
    return [
        _figure(kind, NUM_PAGES // share, policy, quick)
        for kind in FURTHER
        for share in SHARES
        for policy in ("lru", "2q")
    ]


def _figure(kind: str, num_pages: int, policy: str, quick: bool) -> Figure:
    traces = [documents(num_pages / 2, seed, FURTHER[kind]) for seed in (SEEDS[:1] if quick else SEEDS)]
    rate = mean(_replayed(trace, num_pages, policy) for trace in traces)
    rule = mean(_by_rule(trace, num_pages, policy) for trace in traces)
    within = 2 * WITHIN if quick else WITHIN
    what = f"documents {kind}: hits of {num_pages:,} of {NUM_PAGES:,} pages, {policy}"
    return Figure("policies", what, rate, "%", abs(rate - rule), f"points off {rule:.2f}", at_most=within, gate=within)


def _replayed(trace: list[TracedRequest], num_pages: int, policy: str) -> float:
    done = asyncio.run(replay(trace, index_config(num_pages * BLOCK, policy=policy)))
    return 100 * done.stats.hit_rate


def _by_rule(trace: list[TracedRequest], num_pages: int, policy: str) -> float:
    pool = PagePool(num_pages, policy)
    num_hits = sum(pool.request(request.hash_ids) for request in trace)
    return 100 * num_hits / sum(len(request.hash_ids) for request in trace)
