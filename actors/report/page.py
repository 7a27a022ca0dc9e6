"""`render`: a report as one HTML page that needs nothing else."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from string import Template

from raydix.actors.report.charts import bar, shortened, table
from raydix.actors.report.curves import ghost_section, pool_section
from raydix.actors.report.tree_view import tree_section
from raydix.actors.report.units import percent, short_count, short_time
from raydix.schemas import CacheConfig, CacheReport, NamespaceStats
from raydix.schemas.shown import shown


def render(report: CacheReport, config: CacheConfig, title: str, made_at: datetime | None = None) -> str:
    """The page: self-contained, readable on a phone and in the dark. Its size is bounded, whatever the cache holds."""
    sections = (
        _figures(report),
        pool_section(report, config),
        _namespaces(report.namespaces),
        ghost_section(report.stats, config),
        tree_section(report),
        _eviction_ages(report),
    )
    return Template(files(__package__).joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=escape(shown(title)),
        subtitle=escape(_subtitle(config, made_at or datetime.now(UTC))),
        body="\n".join(sections),
    )


def _subtitle(config: CacheConfig, made_at: datetime) -> str:
    marks = config.eviction
    task = f"evicts from {marks.high_watermark:.0%} down to {marks.low_watermark:.0%}"
    return (
        f"kind {config.kind}, {config.pool.num_slots:,} slots in pages of {config.page_size}, policy {marks.policy}, "
        f"{task if marks.high_watermark < 1 else 'no background eviction'}; {made_at:%Y-%m-%d %H:%M} UTC"
    )


def _figures(report: CacheReport) -> str:
    stats = report.stats
    figures = (
        ("pool in use", percent(1 - stats.free_slots / stats.num_slots)),
        ("hit rate", percent(stats.hit_rate)),
        ("tokens reused", short_count(stats.tokens_reused)),
        ("tokens computed", short_count(stats.tokens_requested - stats.tokens_reused)),
        ("tokens evicted", short_count(stats.tokens_evicted)),
        ("requests", f"{stats.acquires:,}"),
        ("open leases", f"{stats.open_leases:,}"),
        ("waiting", f"{stats.waiters:,}"),
    )
    refused = f"<p class=faint>Rates leave out what was refused for want of room: {stats.exhausted:,}.</p>"
    boxes = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures)
    return f'<dl class="figures">{boxes}</dl>{refused if stats.exhausted else ""}'


def _namespaces(namespaces: tuple[NamespaceStats, ...]) -> str:
    head = "<h2>Hit rate by namespace</h2>"
    if not namespaces:
        return f"{head}<p>No requests yet.</p>"
    rows = []
    for each in namespaces:
        rate = each.tokens_reused / each.tokens_requested if each.tokens_requested else 0.0
        cells = (
            shortened(each.label),
            bar(rate),
            percent(rate),
            f"{each.requests:,}",
            short_count(each.tokens_requested),
        )
        rows.append(cells)
    return head + table(("namespace", "", "hit rate", "requests", "tokens"), rows, numbers_from=2)


def _eviction_ages(report: CacheReport) -> str:
    head = "<h2>How long evicted tokens had not been used</h2>"
    total = sum(each.num_tokens for each in report.eviction_ages)
    if not total:
        return f"{head}<p>Nothing was evicted yet.</p>"
    found = [place for place, each in enumerate(report.eviction_ages) if each.num_tokens]
    rows, since = [], report.eviction_ages[found[0] - 1].below_s if found[0] else None
    for each in report.eviction_ages[found[0] : found[-1] + 1]:
        label = (
            f"under {short_time(each.below_s)}" if each.below_s is not None else f"{short_time(since or 0)} and more"
        )
        share = each.num_tokens / total
        rows.append((label, bar(share), percent(share), short_count(each.num_tokens)))
        since = each.below_s or since
    text = "<p class=faint>Of the latest evictions. Short ages mean that the pool is too small for what comes back.</p>"
    return head + table(("unused for", "", "share", "tokens"), rows, numbers_from=2) + text
