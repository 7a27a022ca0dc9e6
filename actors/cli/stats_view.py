"""A cache's counts as a table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from raydix.actors.cli.output import first_finding
from raydix.schemas.shown import NONE, byte_size, counted, measured_time, percent, points, rate, short_time, shown

if TYPE_CHECKING:
    from raydix.schemas import CacheConfig, CacheStats, DiskTierStats, Histogram, PoolStats, TierStats

_BAR = 40  # characters
_MOST_OWNERS = 8
_QUANTILES = ((100, 0.99), (10, 0.9))  # the least number of values of which one in so many lies above


@dataclass(frozen=True)
class Snapshot:
    """The configuration and counts of a cache at one time."""

    name: str
    config: CacheConfig
    stats: CacheStats
    at_s: float  # this process's clock

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
    _add_pools(table, {"window pool": stats.swa, "states": stats.state})
    if stats.host is not None:
        _add_host(table, now, before, stats.host)
    if stats.disk is not None:
        _add_disk(table, now, before, stats.disk)
    _add_traffic(table, now, before)
    _add_times(table, stats)
    _add_holders(table, stats)
    _add_health(table, now)
    finding = first_finding(stats.findings)
    return Group(Text(head, style="bold"), table, *([Text(f"warning: {finding}")] if finding else []))


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
        f"{percent(used)} of {counted(stats.num_slots, 'slot')} in use; "
        + (
            f"eviction above {percent(marks.high_watermark, 0)}, down to {percent(marks.low_watermark, 0)}"
            if stats.eviction_task.enabled
            else "no eviction in the background"
        ),
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


def _add_pools(table: Table, pools: dict[str, PoolStats | None]) -> None:
    for title, pool in pools.items():
        if pool is not None:
            used = percent(1 - pool.free_slots / pool.num_slots)
            table.add_row(title, f"{used} of {pool.num_slots:,} in use, {pool.evictable_slots:,} evictable")


def _add_host(table: Table, now: Snapshot, before: Snapshot | None, tier: TierStats) -> None:
    stats, marks = now.stats, now.config.host
    slots, count = tier.slots, partial(_count, now, before, noun="token", tier="host")
    used = 1 - slots.free_slots / slots.num_slots
    low, high = (1.0, 1.0) if marks is None else (marks.low_watermark, marks.high_watermark)
    table.add_row("host tier", _bar(used, low, high))
    state = {"ready": "", "reserving": "; its memory is being reserved"}.get(tier.state, f"; {shown(tier.state)}")
    pinned = ", pinned" if tier.pinned else ""
    table.add_row(
        "", f"{percent(used)} of {counted(slots.num_slots, 'slot')} in use, policy {tier.policy}{pinned}{state}"
    )
    _add_pools(table, {"host window": tier.swa, "host states": tier.states})
    reused = stats.tokens_reused + stats.resumed_tokens_reused
    unused = f", {tier.tokens_loaded_unused:,} for no request" if tier.tokens_loaded_unused else ""
    table.add_row("loaded", f"{count('tokens_loaded')}, {rate(tier.tokens_loaded, reused)} of the reused ones{unused}")
    refused = f"; {counted(tier.writes_refused, 'write')} refused for lack of room" if tier.writes_refused else ""
    table.add_row("written", f"{count('tokens_written')}{refused}")
    dropped = count("tokens_dropped")
    share = rate(tier.tokens_dropped, stats.tokens_evicted)
    table.add_row("dropped", f"{dropped} before they were written, {share} of the evicted ones")
    waiting = f"; {counted(tier.loading_requests, 'request')} wait for loads" if tier.loading_requests else ""
    table.add_row(
        "copies",
        f"loads {_ends(tier.loads)}{_speed(tier.loaded_bytes, tier.load_s)}; "
        f"writes {_ends(tier.writes)}{_speed(tier.written_bytes, tier.write_s)}; "
        f"{tier.moves_in_flight:,} in flight, {byte_size(tier.queued_bytes)} to be copied{waiting}",
    )


def _add_disk(table: Table, now: Snapshot, before: Snapshot | None, disk: DiskTierStats) -> None:
    from raydix.actors.metrics.table import DISK_FAULTS

    stats, slots = now.stats, disk.slots
    count = partial(_count, now, before, noun="token", tier="disk")
    used = 1 - slots.free_slots / slots.num_slots
    state = "" if disk.state == "ready" else f"; {shown(disk.state)}"
    admit = "the second use" if disk.admit == "second_use" else "the first use"
    table.add_row("disk", _bar(used, 1.0, 1.0))
    table.add_row("", f"{percent(used)} of {counted(slots.num_slots, 'slot')} in use, written at {admit}{state}")
    kept = {"dormant": slots.dormant_slots, "leaving": slots.leaving_slots, "unread": slots.unread_slots}
    others = "".join(f", {number:,} {name}" for name, number in kept.items() if number)
    counts = f"{slots.free_slots:,} free, {slots.private_slots:,} private, {slots.tree_slots:,} cached"
    table.add_row("disk slots", f"{counts}{others}; {counted(disk.num_spaces, 'namespace')}")
    _add_pools(table, {"disk window": disk.swa, "disk states": disk.states})
    reused = stats.tokens_reused + stats.resumed_tokens_reused
    loaded = f"{count('tokens_loaded')}, {rate(disk.tokens_loaded, reused)} of the reused"
    unused = f" ones, {disk.tokens_loaded_unused:,} for no request" if disk.tokens_loaded_unused else " ones"
    found = ((getattr(disk, metric.field), metric.noun) for metric in DISK_FAULTS)
    faults = "".join(f"; {counted(number, noun)}" for number, noun in found if number)
    in_flight = f"{disk.loads_in_flight:,} in flight, {byte_size(disk.queued_bytes)} to be read"
    table.add_row("disk loads", f"{loaded}{unused}{_speed(disk.loaded_bytes, disk.load_s)}; {in_flight}{faults}")
    written = f"{count('tokens_written')}, {byte_size(disk.written_bytes)}"
    day = f"{byte_size(disk.written_bytes_day)} in the last 24 hours"
    last = f" ({shown(disk.last_error)})" if disk.last_error else ""
    table.add_row("disk writes", f"{written}, {day}; batches {_ends(disk.writes, 'committed')}{last}")
    if disk.admit == "all":
        table.add_row("", f"{count('tokens_dropped')} dropped before they were written")
    else:
        uses = f"{counted(disk.pages_used, 'use')} of pages, {rate(disk.pages_refused, disk.pages_used)} the first ones"
        dropped = sum(disk.prefixes_dropped.values())
        causes = f", {dropped:,} were not written: {_ends(disk.prefixes_dropped)}" if dropped else ""
        table.add_row("", f"{uses}; {counted(disk.due_prefixes, 'prefix')} to be written{causes}")
    if disk.uncommitted_s:
        age = short_time(disk.uncommitted_s)
        table.add_row("", Text(f"a retirement is not committed for {age}: a restart may bring it back", style="red"))


def _ends(ends: dict[str, int], first: str = "whole") -> str:
    """Return the copies by their end, those of the end `first` first."""
    return (
        ", ".join(f"{number:,} {end}" for end, number in sorted(ends.items(), key=lambda item: item[0] != first)) or "0"
    )


def _speed(num_bytes: int, seconds: float) -> str:
    return f" at {byte_size(int(num_bytes / seconds))} a second" if num_bytes and seconds else ""


def _count(now: Snapshot, before: Snapshot | None, field: str, noun: str, tier: str = "") -> str:
    """Return a count and, with an earlier snapshot of the same life of the cache, its rate since then.

    Args:
        tier: the field of the tier that has the count; empty: the cache has it.
    """
    name = f"{tier}.{field}" if tier else field
    value = attrgetter(name)(now.stats)
    text = counted(value, noun) if noun else f"{value:,}"
    if before is None or before.stats.epoch != now.stats.epoch:
        return text
    a_second = (value - attrgetter(name)(before.stats)) / (now.at_s - before.at_s)
    return text + (f" ({a_second:,.0f} a second just now)" if a_second else "")


def _add_traffic(table: Table, now: Snapshot, before: Snapshot | None) -> None:
    stats = now.stats

    def count(field: str, noun: str = "") -> str:
        return _count(now, before, field, noun)

    recent = "" if before is None else _recent_rate(stats, before.stats)
    hits = rate(stats.tokens_reused, stats.tokens_requested)
    requests = counted(stats.acquires, "request")
    table.add_row("hit rate", f"{hits} of tokens{recent}, {stats.hits:,} of {requests}")
    table.add_row("tokens", f"{count('tokens_requested')} requested, {count('tokens_reused')} reused")
    if stats.resumed_acquires:
        resumed = rate(stats.resumed_tokens_reused, stats.resumed_tokens)
        table.add_row("resumed", f"{count('resumed_acquires')} preempted and granted again, {resumed} of tokens reused")
    table.add_row("", f"{count('tokens_inserted')} published, {count('tokens_duplicate')} computed twice")
    if stats.ghost is not None and 2 * stats.num_slots <= stats.ghost.num_slots[-1]:
        gain = stats.ghost.hit_rate_at(2 * stats.num_slots) - stats.ghost.hit_rate_at(stats.num_slots)
        alone = ", of full KV alone" if stats.swa is not None or stats.state is not None else ""
        alone += f", without {below}" if (below := stats.tiers_below) else ""
        table.add_row("ghost", f"twice the pool would change the hit rate by about {points(gain)} points{alone}")
    table.add_row(
        "evicted",
        f"{count('tokens_evicted', 'token')}; {counted(stats.exhausted, 'refusal')} for lack of slots",
    )
    table.add_row("messages", f"{count('requests')} in {count('batches', 'batch')}, {count('probes', 'probe')}")


def _add_times(table: Table, stats: CacheStats) -> None:
    """Add the times of the verbs and of waits, and the sizes of batches."""
    verbs = {"acquire": stats.acquire_latency, "lock": stats.lock_latency, "insert": stats.insert_latency}
    asked = {verb: latency for verb, latency in verbs.items() if latency.count}
    waits = f"; {_spread(stats.wait_time, measured_time)}" if stats.wait_time.count else ""
    for verb, latency in (asked or {"acquire": stats.acquire_latency}).items():
        table.add_row(verb, _spread(latency, measured_time))
    table.add_row("waited", f"{counted(stats.waited, 'request')}{waits}")
    table.add_row("batch size", _spread(stats.batch_size, _whole, "{:.1f}".format))


def _spread(
    histogram: Histogram, written: Callable[[float], str], mean_written: Callable[[float], str] | None = None
) -> str:
    """Return the mean of the values; of ten values or more, also quantiles, estimated within a bucket.

    A share is named only if at least one value lies above it: 90 % of ten values, 99 % of a hundred.
    """
    count = histogram.count
    if not count:
        return NONE
    mean = f"mean {(mean_written or written)(histogram.mean)}"
    share = next((share for least, share in _QUANTILES if count >= least), None)
    if share is None:
        return f"{mean} of {counted(count, 'value')}"
    half, most = (written(histogram.quantile(part)) for part in (0.5, share))
    return f"half at most {half}, {percent(share, 0)} at most {most}, {mean}"


def _whole(value: float) -> str:
    """Return a value of a histogram of whole numbers: the estimate within a bucket, rounded up."""
    return f"{math.ceil(value):,}"


def _recent_rate(stats: CacheStats, before: CacheStats) -> str:
    requested = stats.tokens_requested - before.tokens_requested
    if requested <= 0 or stats.epoch != before.epoch:
        return ""
    return f" ({rate(stats.tokens_reused - before.tokens_reused, requested)} just now)"


def _add_holders(table: Table, stats: CacheStats) -> None:
    """Add leases by owner, and slots by tenant."""
    age = f", the oldest {short_time(stats.oldest_lease_s)} old" if stats.open_leases else ""
    longest = f", the longest for {short_time(stats.oldest_waiter_s)}" if stats.waiters else ""
    waiting = f"{counted(stats.waiters, 'request')} wait{'s' if stats.waiters == 1 else ''} for slots"
    table.add_row("leases", f"{stats.open_leases:,} open{age}; {waiting}{longest}")
    if stats.owners:
        table.add_row("", "by owner, shared prefixes counted once, for the oldest lease:")
    for owner in stats.owners[:_MOST_OWNERS]:
        table.add_row(
            "",
            f"{shown(owner.owner)}: {counted(owner.leases, 'lease')}, {counted(owner.slots, 'slot')}, "
            f"up to {short_time(owner.oldest_s)} old",
        )
    if len(stats.owners) > _MOST_OWNERS:
        table.add_row("", counted(len(stats.owners) - _MOST_OWNERS, "more owner"))
    for tenant in stats.tenants:
        cap = "no cap" if tenant.cap_slots is None else f"cap {tenant.cap_slots:,}"
        name = shown(tenant.name or "others")
        table.add_row("tenant", f"{name}: {counted(tenant.held_slots, 'slot')} (floor {tenant.floor_slots:,}, {cap})")


def _add_health(table: Table, now: Snapshot) -> None:
    stats, task = now.stats, now.stats.eviction_task
    gone = f"{stats.dead_sessions:,} ended with their process, {stats.expired_sessions:,} fell silent"
    silent = f", {stats.silent_sessions:,} silent now" if stats.silent_sessions else ""
    table.add_row("sessions", f"{stats.open_sessions:,} open; {gone}{silent}")
    if stats.stale_readers:
        table.add_row("events", f"{counted(stats.stale_readers, 'reader')} more than ten seconds behind")
    if stats.weights is not None:
        table.add_row("weights", shown(stats.weights) or "(no name)")
    if not task.enabled:
        state = "off"
    elif not task.started:
        state = "starts with the first session"
    else:
        state = "alive" if task.alive else "not running"
    last = f", the last: {shown(task.last_error or '')}"
    failures = f", {counted(task.failures, 'failure')}{last}" if task.failures else ""
    longest = measured_time(task.longest_slice_ms / 1000)
    table.add_row(
        "eviction",
        f"task {state}, {counted(task.rounds, 'round')}, longest slice {longest} of CPU time{failures}",
    )
    table.add_row("loop", f"at most {measured_time(stats.loop_lag_ms / 1000)} late in the last seconds")
