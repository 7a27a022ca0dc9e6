"""`render`: a report as one self-contained HTML page."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template

from raydix.actors.report.charts import Bar, Figure, Figures, Section, Table, Text, shortened
from raydix.actors.report.curves import ghost_section, hit_rate_section, pool_section
from raydix.actors.report.tiers import tier_section
from raydix.actors.report.too_large import too_large
from raydix.actors.report.tree_view import LABEL_WIDTHS, prefix_section, tree_section
from raydix.schemas import CacheConfig, CacheReport, CacheStats, NamespaceStats
from raydix.schemas.shown import NONE, counted, percent, rate, short_count, short_time, shown

_CAUSES = {  # cause in `CacheStats.refusals` -> text
    "never_fits": "larger than the pool or the tenant's share: it can never fit",
    "tenant_cap": "the tenant is at its cap",
    "no_wait": "too few free slots, and the request did not wait (timeout_s=0)",
    "waited_too_long": "too few slots became free before the timeout",
    "deadlocked": "no slots can become free: every holder waits",
    "queue_full": "the queue of waiting requests was full",
    "draining": "the cache was shutting down",
    "invalid_request": "the request was invalid",
    "unknown_lease": "the lease had ended, or was another client's",
    "lease_expired": "the lease's client had been silent for too long",
    "model_mismatch": "another model was bound, or the session must bind its model again",
    "internal_error": "a fault of the cache: see its log",
}


def render(report: CacheReport, config: CacheConfig, title: str, made_at: datetime | None = None) -> str:
    """Return the page: self-contained, for wide and narrow screens, light and dark, with a bounded size."""
    stats = report.stats
    sections = (
        _figures(report),
        hit_rate_section(report),
        pool_section(report, config),
        *(tier_section(stats, tier) for tier in (stats.host, stats.disk) if tier is not None),
        _namespaces(report.namespaces, has_tiers=bool(stats.tiers_below)),
        *([_tenants(stats)] if stats.tenants else []),
        _refusals(stats),
        ghost_section(stats, config),
        prefix_section(report),
        tree_section(report),
        _eviction_ages(report),
    )
    return _template().render(
        title=shown(title),
        subtitle=_subtitle(config, stats, made_at or datetime.now(UTC)),
        sections=sections,
        label_widths=LABEL_WIDTHS,
    )


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))


def _subtitle(config: CacheConfig, stats: CacheStats, made_at: datetime) -> str:
    marks = config.eviction
    task = f"evicts from {percent(marks.high_watermark, 0)} down to {percent(marks.low_watermark, 0)}"
    slots = f"{counted(config.pool.num_slots, 'slot')} in pages of {config.page_size}"
    below = {"host tier": stats.host, "disk": stats.disk}
    tiers = [f"{name} of {counted(tier.slots.num_slots, 'slot')}, " for name, tier in below.items() if tier is not None]
    return (
        f"kind {config.kind}, {slots}, {''.join(tiers)}policy {marks.policy}, "
        f"{task if marks.high_watermark < 1 else 'no background eviction'}; {made_at:%Y-%m-%d %H:%M} UTC"
    )


def _figures(report: CacheReport) -> Section:
    stats = report.stats
    used = stats.num_slots - stats.free_slots
    slots = f"{used:,} of {counted(stats.num_slots, 'slot')}"
    figures = (
        Figure("pool in use", rate(used, stats.num_slots) if used else NONE, slots),
        Figure("hit rate", rate(stats.tokens_reused, stats.tokens_requested, 2), "of granted prompt tokens"),
        Figure("tokens reused", short_count(stats.tokens_reused), "of prompts"),
        Figure("tokens computed", short_count(stats.tokens_requested - stats.tokens_reused), "of prompts"),
        Figure("tokens evicted", short_count(stats.tokens_evicted)),
        Figure("requests served", f"{stats.acquires:,}", "leases granted"),
        Figure("open leases", f"{stats.open_leases:,}", f"of {counted(stats.open_sessions, 'client')}"),
        Figure("waiting", f"{stats.waiters:,}", "requests in the queue"),
        Figure("up", short_time(stats.uptime_s)),
        Figure("restarts", f"{stats.restarts:,}", "by Ray, empty"),
    )
    never = [Text(f"{sentence}.") for sentence in too_large(stats)]
    notes = []
    if stats.exhausted:
        refused = counted(stats.exhausted, "request")
        notes.append(Text(f"Refused for lack of slots, and in no hit rate: {refused}.", True))
    if stats.restarts:
        notes.append(Text(f"The last restart: {stats.last_restart_cause}", True))
    return Section("", (*never, Figures(figures), *notes))


def _namespaces(namespaces: tuple[NamespaceStats, ...], has_tiers: bool) -> Section:
    title = "Hit rate by namespace"
    if not namespaces:
        return Section(title, (Text("No requests yet."),))
    head = ("namespace", "", "hit rate", "requests", "tokens", "refused", "loaded")
    width = len(head) if has_tiers else len(head) - 1
    rows = [
        (
            shortened(namespace.label),
            Bar(namespace.tokens_reused / (namespace.tokens_requested or 1)),
            rate(namespace.tokens_reused, namespace.tokens_requested),
            f"{namespace.requests:,}",
            short_count(namespace.tokens_requested),
            short_count(namespace.tokens_refused),
            short_count(namespace.tokens_loaded),
        )[:width]
        for namespace in namespaces
    ]
    return Section(title, (Table(head[:width], rows, numbers_from=2),))


def _tenants(stats: CacheStats) -> Section:
    """Return the section of tenants, with a bar for the share of the cap or the pool."""
    rows = [
        (
            "all others" if share.name is None else shortened(share.name),
            Bar(share.held_slots / ((share.cap_slots or stats.num_slots) or 1)),
            short_count(share.held_slots),
            f"{short_count(share.floor_slots)} / {NONE if share.cap_slots is None else short_count(share.cap_slots)}",
            short_count(share.tokens_evicted),
        )
        for share in stats.tenants
    ]
    head = ("tenant", "", "held", "floor / cap", "evicted")
    text = "In slots; evicted in tokens. The bar is the share of the tenant's cap, or of the pool without a cap."
    return Section("Tenants", (Table(head, rows, numbers_from=2), Text(text, True)))


def _refusals(stats: CacheStats) -> Section:
    """Return the section of refused requests by cause, the most frequent first."""
    title, total = "Refused requests", sum(stats.refusals.values())
    if not total:
        return Section(title, (Text("No request was refused."),))
    ranked = sorted(stats.refusals.items(), key=lambda item: item[1], reverse=True)
    rows = [(_CAUSES.get(cause, cause), Bar(num / total), rate(num, total), f"{num:,}") for cause, num in ranked if num]
    text = "Requests on leases that reached the cache. Requests that a client did not send are not counted."
    return Section(title, (Table(("cause", "", "share", "requests"), rows, numbers_from=2), Text(text, True)))


def _eviction_ages(report: CacheReport) -> Section:
    title = "Time without use before eviction"
    total = sum(age.num_tokens for age in report.eviction_ages)
    if not total:
        return Section(title, (Text("No tokens were evicted yet."),))
    found = [place for place, age in enumerate(report.eviction_ages) if age.num_tokens]
    rows, since = [], report.eviction_ages[found[0] - 1].below_s if found[0] else None
    for age in report.eviction_ages[found[0] : found[-1] + 1]:
        label = _interval(since, age.below_s)
        share = age.num_tokens / total
        rows.append((label, Bar(share), percent(share), short_count(age.num_tokens)))
        since = age.below_s or since
    text = "Of the latest evictions. Short times mean that the pool is too small for prompts that return."
    return Section(title, (Table(("unused for", "", "share", "tokens"), rows, numbers_from=2), Text(text, True)))


def _interval(from_s: float | None, below_s: float | None) -> str:
    """Return the name of the times from one limit to the next; None is no limit."""
    if below_s is None:
        return f"{short_time(from_s or 0)} and more"
    return f"under {short_time(below_s)}" if from_s is None else f"{short_time(from_s)} to {short_time(below_s)}"
