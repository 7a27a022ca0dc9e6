"""The sections of a report about the tiers below the pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raydix.actors.report.charts import Bar, Figure, Figures, Section, Table, Text
from raydix.actors.service.findings import unbound_finding
from raydix.schemas import CacheStats, DiskTierStats, TierStats
from raydix.schemas.shown import byte_size, counted, rate, short_count, short_time, shown

_NOT_WHOLE = ("late", "failed")  # ends of a load after which the request computes
_STATES = {
    "ready": "",
    "reserving": "Its memory is being reserved: it takes nothing yet.",
    "opening": "It is being opened: it takes nothing yet.",
    "reading": "Its index is being read.",
}


class _Own(NamedTuple):
    """The parts of a section that one tier alone has; its columns are fields of the pools."""

    title: str
    figures: Sequence[Figure]
    notes: Sequence[str]
    columns: Mapping[str, str]
    text: str


def tier_section(stats: CacheStats, tier: TierStats | DiskTierStats) -> Section:
    """Return the section of a tier: how full it is, the tokens that it gave, and those that never reached it."""
    title, figures, notes, columns, text = _of_disk(tier) if isinstance(tier, DiskTierStats) else _of_host(stats, tier)
    reused, slots = stats.tokens_reused + stats.resumed_tokens_reused, tier.slots
    used = slots.num_slots - slots.free_slots
    shared = (
        Figure("in use", rate(used, slots.num_slots), f"{used:,} of {counted(slots.num_slots, 'slot')}"),
        Figure("tokens loaded", short_count(tier.tokens_loaded), f"{rate(tier.tokens_loaded, reused)} of the reused"),
        Figure("tokens written", short_count(tier.tokens_written), byte_size(tier.written_bytes)),
    )
    state = _STATES.get(tier.state, f"It does not work: {shown(tier.state)}")
    pools = {"slots": slots, "window slots": tier.swa, "states": tier.states}
    rows: list[tuple[str | Bar, ...]] = [
        (
            name,
            Bar(1 - pool.free_slots / pool.num_slots),
            rate(pool.num_slots - pool.free_slots, pool.num_slots),
            short_count(pool.num_slots),
            *(short_count(getattr(pool, field)) for field in columns.values()),
        )
        for name, pool in pools.items()
        if pool is not None
    ]
    table = Table(("pool", "", "in use", "size", *columns), rows, numbers_from=2)
    sentences = [Text(note) for note in (state, *notes) if note]
    return Section(title, (*sentences, Figures((*shared, *figures)), table, Text(text, True)))


def _of_host(stats: CacheStats, tier: TierStats) -> _Own:
    num_loads, num_bad = sum(tier.loads.values()), sum(tier.loads.get(end, 0) for end in _NOT_WHOLE)
    dropped = f"{rate(tier.tokens_dropped, stats.tokens_evicted)} of the evicted"
    figures = (
        Figure("tokens dropped", short_count(tier.tokens_dropped), dropped),
        Figure("loads late or failed", f"{num_bad:,}", f"of {counted(num_loads, 'load')}"),
    )
    text = (
        f"Policy {tier.policy}. Loaded tokens are a part of the hit rate. Dropped tokens were evicted from the pool "
        "before they were written."
    )
    return _Own("The host tier", figures, (), {"evicted": "evicted"}, text)


def _of_disk(disk: DiskTierStats) -> _Own:
    if disk.admit == "all":
        missed = Figure("tokens dropped", short_count(disk.tokens_dropped), "before they were written")
    else:
        of_uses = f"first uses: {rate(disk.pages_refused, disk.pages_used)} of {short_count(disk.pages_used)}"
        missed = Figure("prefixes not written", short_count(sum(disk.prefixes_dropped.values())), of_uses)
    figures = (
        Figure("written in a day", byte_size(disk.written_bytes_day), "the last 24 hours"),
        missed,
        Figure("loads late", f"{disk.loads_late:,}", counted(disk.stalls, "stall")),
        Figure("damaged records", f"{disk.damaged_records:,}", "dropped, and not used"),
    )
    age, unbound = short_time(disk.uncommitted_s), unbound_finding(disk.unbound_namespaces)
    uncommitted = f"A retirement is not committed for {age}: a restart now may bring its pages back."
    notes = (uncommitted if disk.uncommitted_s else "", f"{unbound[0].upper()}{unbound[1:]}." if unbound else "")
    admit = "its second use" if disk.admit == "second_use" else "its first use, before it leaves memory"
    text = (
        f"A page is written at {admit}. Loaded tokens are a part of the hit rate. Dormant slots keep KV of models that "
        "are not bound. Counts begin with the start of the cache."
    )
    columns = {"cached": "tree_slots", "dormant": "dormant_slots", "evicted": "evicted"}
    return _Own("The disk", figures, notes, columns, text)
