"""The curves of a report: hit rate and pool over time, and estimated hit rates of other pool sizes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from raydix.actors.report.charts import Chart, Legend, Section, Series, Table, Text, level, lines, stacked_areas, steps
from raydix.schemas import CacheConfig, CacheReport, CacheStats, GhostStats, HistoryPoint
from raydix.schemas.shown import counted, percent, points, short_count, short_time

_FACTORS = (0.25, 0.5, 1, 2, 4, 8)
_WINDOWS = 64  # most windows of the hit rate over time


def hit_rate_section(report: CacheReport) -> Section:
    """Return the section of the hit rate over time, in equal windows."""
    title = "Hit rate over time"
    edges, known = _windows(report.history)
    rates = [_rate_between(*pair) for pair in pairwise(known)]
    highest = max((rate for rate in rates if rate is not None), default=None)
    if highest is None:
        return Section(title, (Text("No requests yet."),))
    top = max(0.1, math.ceil(10 * highest) / 10)
    shapes = [*steps(edges, rates, top, "curve"), level(report.stats.hit_rate, top)]
    legend = list[Legend]()
    if below := report.stats.tiers_below:
        of_pool = [_rate_between(*pair, counts_loaded=False) for pair in pairwise(known)]
        shapes = [*steps(edges, of_pool, top, "alone"), *shapes]
        legend = [Legend([("curve", f"with the tokens loaded from {below}"), ("alone", "of the pool alone")])]
    figure = Chart("hit rate over time", shapes, _percents(top), _times_before_now(edges[-1] - edges[0]))
    text = (
        f"Of the prompt tokens of each {short_time((edges[-1] - edges[0]) / len(rates))}; a gap is a time without "
        f"requests. Dashed: since the start, {percent(report.stats.hit_rate)}."
    )
    return Section(title, (figure, *legend, Text(text, True)))


def _windows(history: Sequence[HistoryPoint]) -> tuple[list[float], list[HistoryPoint]]:
    """Return the edges of equal windows of the history, and the first point at or after each edge."""
    times = [point.at_s for point in history]
    num, span = min(_WINDOWS, len(history) - 1), times[-1] - times[0]
    edges = [times[0] + place * span / num for place in range(num)] + [times[-1]]
    slack = 1e-9 * span  # margin for rounding errors
    return edges, [*(history[bisect_left(times, edge - slack)] for edge in edges[:-1]), history[-1]]


def _rate_between(first: HistoryPoint, last: HistoryPoint, counts_loaded: bool = True) -> float | None:
    """Return the share of prompt tokens that were hit; None without requests.

    Args:
        counts_loaded: whether tokens that were loaded from tiers below the pool count as hits.
    """
    requested = last.tokens_requested - first.tokens_requested
    reused = last.tokens_reused - first.tokens_reused
    if not counts_loaded:
        reused -= last.tokens_loaded - first.tokens_loaded
    return reused / requested if requested > 0 else None


def _percents(top: float) -> list[str]:
    """Return the labels of a share, from `top` down to 0."""
    return [percent(top * share, 0) for share in (1, 0.5, 0)]


def _times_before_now(span_s: float) -> list[str]:
    """Return the labels of a time axis that ends now."""
    return [f"{short_time(span_s)} ago", f"{short_time(span_s / 2)} ago", "now"] if span_s >= 1 else ["now"]


def pool_section(report: CacheReport, config: CacheConfig) -> Section:
    """Return the section of the pool's slots by use, over time."""
    history, num_slots = report.history, report.stats.num_slots
    last = history[-1]
    kinds = (
        ("held", "cached, held by leases", [point.protected_slots for point in history]),
        ("cached", "cached, evictable", [point.evictable_slots for point in history]),
        ("private", "private to leases", [point.private_slots for point in history]),
        ("quarantined", "quarantined", [point.quarantined_slots for point in history]),
    )
    marks = config.eviction
    dashed = [share * num_slots for share in (marks.low_watermark, marks.high_watermark) if marks.high_watermark < 1]
    shapes = stacked_areas(
        [point.at_s for point in history], [Series(style, values) for style, _, values in kinds], num_slots, dashed
    )
    x_labels = _times_before_now(last.at_s - history[0].at_s)
    y_labels = [f"{short_count(num_slots * share)} slots" for share in (1, 0.75, 0.5, 0.25, 0)]
    entries = [(style, f"{text}: {values[-1]:,}") for style, text, values in kinds]
    free = num_slots - sum(values[-1] for _, _, values in kinds)
    text = f"Free: {free:,} of {counted(num_slots, 'slot')}.{' Dashed: the watermarks.' if dashed else ''}"
    figure = Chart("slots in use over time", shapes, y_labels, x_labels)
    return Section("The pool over time", (figure, Legend(entries), Text(text, True)))


def ghost_section(stats: CacheStats, config: CacheConfig) -> Section:
    """Return the section of hit rates by pool size: counted for this pool, estimated for others."""
    title, ghost = "Hit rates of other pool sizes", stats.ghost
    if ghost is None:
        return Section(title, (Text("Not measured: start the cache with `ghost: {}` among its settings."),))
    if not ghost.tokens_requested:
        return Section(title, (Text("No requests yet."),))
    top = max(0.1, math.ceil(10 * max(ghost.hit_rates)) / 10)
    xs = [math.log2(size) for size in ghost.num_slots]
    shapes = lines(xs, [Series("curve", ghost.hit_rates)], top, math.log2(stats.num_slots))
    ends = ghost.num_slots[0], 2 ** ((xs[0] + xs[-1]) / 2), ghost.num_slots[-1]
    x_labels = [f"{short_count(size)} slots" for size in ends]
    figure = Chart("estimated hit rate by size of the pool", shapes, _percents(top), x_labels)
    footnote = Text(_footnote(ghost, config), True)
    return Section(title, (*_what_if(ghost, stats), figure, _sizes(ghost, stats.num_slots), footnote))


def _what_if(ghost: GhostStats, stats: CacheStats) -> tuple[Text, ...]:
    if 2 * stats.num_slots > ghost.num_slots[-1]:  # the last size lies beyond the measured ones
        return ()
    now, twice = (ghost.hit_rate_at(factor * stats.num_slots) for factor in (1, 2))
    alone = " This counts full KV alone: a missing window or state makes hits shorter."
    more = alone if stats.swa is not None or stats.state is not None else ""
    more += f" All rates here are those of a pool without {below}." if (below := stats.tiers_below) else ""
    return (Text(f"Twice the pool would give about {points(twice - now)} points: {percent(twice)} hits.{more}"),)


def _sizes(ghost: GhostStats, num_slots: int) -> Table:
    now = ghost.hit_rate_at(num_slots)
    rows = []
    for factor in _FACTORS:
        size = factor * num_slots
        if ghost.num_slots[0] <= size <= ghost.num_slots[-1]:
            rate = ghost.hit_rate_at(size)
            shown = (percent(rate, 2), "counted") if factor == 1 else (f"about {percent(rate)}", points(rate - now))
            rows.append((f"{factor:g}x", f"{size:,.0f}", *shown))
    return Table(("pool", "slots", "hit rate", "points"), rows)


def _footnote(ghost: GhostStats, config: CacheConfig) -> str:
    lru = "" if config.eviction.policy == "lru" else f" It assumes policy lru; this cache has {config.eviction.policy}."
    sample = f"From {percent(ghost.sample_rate)} of the pages" if ghost.sample_rate < 1 else "From every page"
    tokens = f"{sample} of {short_count(ghost.tokens_requested)} prompt tokens"
    return f"The curve is an estimate, except at the current size (dashed). {tokens}.{lru}"
