"""The section of a report about the tier on a local disk."""

from __future__ import annotations

from raydix.actors.report.charts import Bar, Figure, Figures, Section, Table, Text
from raydix.actors.service.findings import unbound_finding
from raydix.schemas import CacheStats, DiskTierStats
from raydix.schemas.shown import byte_size, counted, rate, short_count, short_time, shown

_STATES = {"ready": "", "opening": "It is being opened: it takes nothing yet.", "reading": "Its index is being read."}


def disk_section(stats: CacheStats, disk: DiskTierStats) -> Section:
    """Return the section: how full the disk is, the tokens that it gave, and the prefixes that were not written."""
    reused = stats.tokens_reused + stats.resumed_tokens_reused
    slots = disk.slots
    used = slots.num_slots - slots.free_slots
    if disk.admit == "all":
        missed = Figure("tokens dropped", short_count(disk.tokens_dropped), "before they were written")
    else:
        of_uses = f"first uses: {rate(disk.pages_refused, disk.pages_used)} of {short_count(disk.pages_used)}"
        missed = Figure("prefixes not written", short_count(sum(disk.prefixes_dropped.values())), of_uses)
    figures = (
        Figure("in use", rate(used, slots.num_slots), f"{used:,} of {counted(slots.num_slots, 'slot')}"),
        Figure("tokens loaded", short_count(disk.tokens_loaded), f"{rate(disk.tokens_loaded, reused)} of the reused"),
        Figure("tokens written", short_count(disk.tokens_written), byte_size(disk.written_bytes)),
        Figure("written in a day", byte_size(disk.written_bytes_day), "the last 24 hours"),
        missed,
        Figure("loads late", f"{disk.loads_late:,}", counted(disk.stalls, "stall")),
        Figure("damaged records", f"{disk.damaged_records:,}", "dropped, and not used"),
    )
    notes = [
        Text(sentence) for sentence in (_STATES.get(disk.state, f"It does not work: {shown(disk.state)}"),) if sentence
    ]
    if disk.uncommitted_s:
        age = short_time(disk.uncommitted_s)
        notes.append(Text(f"A retirement is not committed for {age}: a restart now may bring its pages back."))
    if unbound := unbound_finding(disk.unbound_namespaces):
        notes.append(Text(f"{unbound[0].upper()}{unbound[1:]}."))
    pools = {"slots": slots, "window slots": disk.swa, "states": disk.states}
    rows = [
        (
            name,
            Bar(1 - pool.free_slots / pool.num_slots),
            rate(pool.num_slots - pool.free_slots, pool.num_slots),
            short_count(pool.num_slots),
            short_count(pool.tree_slots),
            short_count(pool.dormant_slots),
            short_count(pool.evicted),
        )
        for name, pool in pools.items()
        if pool is not None
    ]
    admit = "its second use" if disk.admit == "second_use" else "its first use, before it leaves memory"
    text = (
        f"A page is written at {admit}. Loaded tokens are a part of the hit rate. Dormant slots keep KV of models that "
        "are not bound. Counts begin with the start of the cache."
    )
    table = Table(("pool", "", "in use", "size", "cached", "dormant", "evicted"), rows, numbers_from=2)
    return Section("The disk", (*notes, Figures(figures), table, Text(text, True)))
