"""A cache's counts as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from raydix.actors.cli.output import share
from raydix.actors.report.units import short_time
from raydix.schemas.shown import shown

if TYPE_CHECKING:
    from raydix.schemas import CacheConfig, CacheStats, Histogram, PoolStats

_BAR = 40  # characters
_MOST_OWNERS = 8


@dataclass(frozen=True)
class Snapshot:
    """The configuration and counts of a cache at one time."""

    name: str
    config: CacheConfig
    stats: CacheStats
    at_s: float  # by this process's clock

    def as_json(self) -> dict[str, Any]:
        """Return the counts, and values computed from them."""
        used = self.stats.num_slots - self.stats.free_slots
        return {
            "name": self.name,
            **self.stats.model_dump(mode="json"),
            "hit_rate": self.stats.hit_rate,
            "used_fraction": used / self.stats.num_slots,
            "high_watermark": self.config.eviction.high_watermark,
            "low_watermark": self.config.eviction.low_watermark,
        }


def view(now: Snapshot, before: Snapshot | None = None) -> Group:
    """Return the table of a snapshot; with an earlier one, it has a rate for each count that has risen."""
    stats = now.stats
    head = (
        f"{shown(now.name)}  {now.config.kind}, pages of {now.config.page_size}, core {stats.core}, "
        f"epoch {stats.epoch[:8]}"
    )
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("up", up_line(stats))
    _add_pool(table, now)
    for title, pool in (("window pool", stats.swa), ("states", stats.state)):
        if pool is not None:
            table.add_row(title, _pool_line(pool))
    _add_traffic(table, now, before)
    _add_times(table, stats)
    _add_holders(table, stats)
    _add_health(table, now)
    return Group(Text(head, style="bold"), table, *(Text(f"warning: {each}") for each in stats.findings))


def up_line(stats: CacheStats) -> str:
    """Return the time since the start of the cache, and the number and last cause of its restarts."""
    since = short_time(stats.uptime_s)
    return f"{since}; restarts: {stats.restarts:,}" + (
        f", the last one: {stats.last_restart_cause}" if stats.restarts else ""
    )


def _add_pool(table: Table, now: Snapshot) -> None:
    stats, marks = now.stats, now.config.eviction
    used = 1 - stats.free_slots / stats.num_slots
    table.add_row("pool", _bar(used, marks.low_watermark, marks.high_watermark))
    table.add_row(
        "",
        f"{used:.1%} of {stats.num_slots:,} slots in use; eviction above {marks.high_watermark:.0%}, "
        f"down to {marks.low_watermark:.0%}" + ("" if stats.eviction_task.enabled else " (off)"),
    )
    table.add_row(
        "slots",
        f"{stats.free_slots:,} free, {stats.private_slots:,} private, {stats.tree_slots:,} cached "
        f"({stats.protected_slots:,} locked), {stats.quarantined_slots:,} quarantined",
    )


def _bar(used: float, low: float, high: float) -> Text:
    """Return a bar with `|` at the watermarks: green below the low one, red above the high one."""
    filled = round(used * _BAR)
    marks = {min(_BAR - 1, int(mark * _BAR)) for mark in (low, high) if mark < 1}
    cells = ["|" if cell in marks else "█" if cell < filled else "░" for cell in range(_BAR)]
    return Text("".join(cells), style="red" if used > high else "yellow" if used > low else "green")


def _pool_line(pool: PoolStats) -> str:
    used = 1 - pool.free_slots / pool.num_slots
    return f"{used:.1%} of {pool.num_slots:,} in use, {pool.evictable_slots:,} evictable"


def _add_traffic(table: Table, now: Snapshot, before: Snapshot | None) -> None:
    stats = now.stats

    def count(field: str) -> str:
        value = getattr(stats, field)
        if before is None or before.stats.epoch != stats.epoch:
            return f"{value:,}"
        rate = (value - getattr(before.stats, field)) / (now.at_s - before.at_s)
        return f"{value:,}" + (f" (+{rate:,.0f}/s)" if rate else "")

    recent = "" if before is None else _recent_rate(stats, before.stats)
    rate = share(stats.tokens_reused, stats.tokens_requested)
    table.add_row("hit rate", f"{rate} of tokens{recent}, {stats.hits:,} of {stats.acquires:,} requests")
    table.add_row("tokens", f"{count('tokens_requested')} requested, {count('tokens_reused')} reused")
    if stats.resumed_acquires:
        resumed = share(stats.resumed_tokens_reused, stats.resumed_tokens)
        table.add_row("resumed", f"{count('resumed_acquires')} preempted requests, {resumed} of tokens reused")
    table.add_row("", f"{count('tokens_inserted')} published, {count('tokens_duplicate')} computed twice")
    if stats.ghost is not None and 2 * stats.num_slots <= stats.ghost.num_slots[-1]:
        gain = stats.ghost.hit_rate_at(2 * stats.num_slots) - stats.ghost.hit_rate_at(stats.num_slots)
        alone = ", of full KV alone" if stats.swa is not None or stats.state is not None else ""
        table.add_row("ghost", f"twice the pool would give about {100 * gain:+.1f} points{alone}")
    table.add_row(
        "evicted",
        f"{count('tokens_evicted')} tokens; {stats.exhausted:,} refusals for lack of slots",
    )
    table.add_row("messages", f"{count('requests')} in {count('batches')} batches, {count('probes')} probes")


def _add_times(table: Table, stats: CacheStats) -> None:
    """Add the times of the verbs and of waits; quantiles are estimated within a bucket."""
    verbs = {"acquire": stats.acquire_latency, "lock": stats.lock_latency, "insert": stats.insert_latency}
    asked = {verb: latency for verb, latency in verbs.items() if latency.count}
    waits = f"; {_spread(stats.wait_time, _seconds)}" if stats.wait_time.count else ""
    for verb, latency in (asked or {"acquire": stats.acquire_latency}).items():
        table.add_row(verb, _spread(latency, _seconds))
    table.add_row("waited", f"{stats.waited:,} acquires and extends{waits}")
    table.add_row("batch size", _spread(stats.batch_size, "{:.0f}".format))


def _spread(histogram: Histogram, written: Callable[[float], str]) -> str:
    if not histogram.count:
        return "-"
    half, most = (written(histogram.quantile(share)) for share in (0.5, 0.99))
    return f"half at most {half}, 99 % at most {most}, mean {written(histogram.mean)}"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"


def _recent_rate(stats: CacheStats, before: CacheStats) -> str:
    requested = stats.tokens_requested - before.tokens_requested
    if requested <= 0 or stats.epoch != before.epoch:
        return ""
    return f" ({share(stats.tokens_reused - before.tokens_reused, requested)} just now)"


def _add_holders(table: Table, stats: CacheStats) -> None:
    """Add leases by owner, and slots by tenant."""
    oldest = max((owner.oldest_s for owner in stats.owners), default=None)
    age = "" if oldest is None else f", the oldest {oldest:,.0f} s old"
    table.add_row("leases", f"{stats.open_leases:,} open{age}; {stats.waiters:,} requests wait for slots")
    if stats.owners:
        table.add_row("", "by owner, shared prefixes counted once, for the oldest lease:")
    for owner in stats.owners[:_MOST_OWNERS]:
        table.add_row(
            "", f"{shown(owner.owner)}: {owner.leases:,} leases, {owner.slots:,} slots, up to {owner.oldest_s:,.0f} s"
        )
    if len(stats.owners) > _MOST_OWNERS:
        table.add_row("", f"{len(stats.owners) - _MOST_OWNERS:,} more owners")
    for tenant in stats.tenants:
        cap = "no cap" if tenant.cap_slots is None else f"cap {tenant.cap_slots:,}"
        name = shown(tenant.name or "others")
        table.add_row("tenant", f"{name}: {tenant.held_slots:,} slots (floor {tenant.floor_slots:,}, {cap})")


def _add_health(table: Table, now: Snapshot) -> None:
    stats, task = now.stats, now.stats.eviction_task
    gone = f"{stats.dead_sessions:,} died, {stats.expired_sessions:,} fell silent"
    table.add_row("sessions", f"{stats.open_sessions:,} open, {gone}")
    if stats.weights is not None:
        table.add_row("weights", shown(stats.weights) or "(no name)")
    if not task.enabled:
        state = "off"
    elif not task.started:
        state = "starts with the first session"
    else:
        state = "alive" if task.alive else "not running"
    failures = f", {task.failures:,} failures, the last: {shown(task.last_error or '')}" if task.failures else ""
    table.add_row(
        "eviction", f"task {state}, {task.rounds:,} rounds, longest slice {task.longest_slice_ms:.1f} ms{failures}"
    )
    table.add_row("loop", f"at most {stats.loop_lag_ms:.1f} ms late")
