"""The sections of a report that are curves: the pool over time, and the hit rate of other sizes."""

from __future__ import annotations

import math

from raydix.actors.report.charts import Series, chart, legend, lines, stacked_areas, table
from raydix.actors.report.units import percent, points, short_count, short_time
from raydix.schemas import CacheConfig, CacheReport, CacheStats, GhostStats

_FACTORS = (0.25, 0.5, 1, 2, 4, 8)


def pool_section(report: CacheReport, config: CacheConfig) -> str:
    """What the slots of the pool were used for, over time."""
    history, num_slots = report.history, report.stats.num_slots
    last = history[-1]
    kinds = (
        ("held", "cached, held by leases", [each.protected_slots for each in history]),
        ("cached", "cached, evictable", [each.evictable_slots for each in history]),
        ("private", "private to leases", [each.private_slots for each in history]),
        ("quarantined", "quarantined", [each.quarantined_slots for each in history]),
    )
    marks = config.eviction
    dashed = [share * num_slots for share in (marks.low_watermark, marks.high_watermark) if marks.high_watermark < 1]
    shapes = stacked_areas(
        [each.at_s for each in history], [Series(style, values) for style, _, values in kinds], num_slots, dashed
    )
    span = last.at_s - history[0].at_s
    x_labels = [f"{short_time(span)} ago", f"{short_time(span / 2)} ago", "now"] if span >= 1 else ["now"]
    y_labels = [short_count(num_slots * share) for share in (1, 0.75, 0.5, 0.25, 0)]
    entries = [(style, f"{text}: {values[-1]:,}") for style, text, values in kinds]
    free = num_slots - sum(values[-1] for _, _, values in kinds)
    text = f"<p class=faint>Free: {free:,} of {num_slots:,} slots. {'Dashed: the watermarks.' if dashed else ''}</p>"
    figure = chart("slots in use over time", shapes, y_labels, x_labels)
    return f"<h2>The pool over time</h2>{figure}{legend(entries)}{text}"


def ghost_section(stats: CacheStats, config: CacheConfig) -> str:
    """What the hit rate would be if the pool were larger or smaller."""
    head, ghost = "<h2>What if the pool were larger?</h2>", stats.ghost
    if ghost is None:
        return f"{head}<p>Not followed: start the cache with <code>CacheConfig(ghost=GhostConfig())</code>.</p>"
    if not ghost.tokens_requested:
        return f"{head}<p>No requests yet.</p>"
    top = max(0.1, math.ceil(10 * max(ghost.hit_rates)) / 10)
    xs = [math.log2(size) for size in ghost.num_slots]
    shapes = lines(xs, [Series("curve", ghost.hit_rates)], top, math.log2(stats.num_slots))
    y_labels = [f"{100 * top * share:.0f} %" for share in (1, 0.5, 0)]
    ends = ghost.num_slots[0], 2 ** ((xs[0] + xs[-1]) / 2), ghost.num_slots[-1]
    figure = chart("hit rate against the size of the pool", shapes, y_labels, [f"{short_count(size)}" for size in ends])
    return f"{head}{_what_if(ghost, stats)}{figure}{_sizes(ghost, stats.num_slots)}{_footnote(ghost, config)}"


def _what_if(ghost: GhostStats, stats: CacheStats) -> str:
    if 2 * stats.num_slots > ghost.num_slots[-1]:  # not followed that far
        return ""
    now, twice = (ghost.hit_rate_at(factor * stats.num_slots) for factor in (1, 2))
    alone = " That is of full KV alone: where a window or a state is missing, hits are shorter."
    more = alone if stats.swa is not None or stats.state is not None else ""
    return f"<p>Twice the pool would give {points(twice - now)} points: {percent(twice)} hits.{more}</p>"


def _sizes(ghost: GhostStats, num_slots: int) -> str:
    now = ghost.hit_rate_at(num_slots)
    rows = []
    for factor in _FACTORS:
        size = factor * num_slots
        if ghost.num_slots[0] <= size <= ghost.num_slots[-1]:
            rate = ghost.hit_rate_at(size)
            rows.append((f"{factor:g}x", f"{size:,.0f}", percent(rate), points(rate - now) if factor != 1 else ""))
    return table(("pool", "slots", "hit rate", "points"), rows)


def _footnote(ghost: GhostStats, config: CacheConfig) -> str:
    lru = (
        "" if config.eviction.policy == "lru" else f" Of policy lru, whereas this cache's is {config.eviction.policy}."
    )
    sample = f"From {percent(ghost.sample_rate)} of the pages" if ghost.sample_rate < 1 else "From every page"
    tokens = f"{sample} of {short_count(ghost.tokens_requested)} prompt tokens"
    return f"<p class=faint>{tokens}. Dashed: the pool as it is.{lru}</p>"
