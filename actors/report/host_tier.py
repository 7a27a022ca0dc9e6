"""The section of a report about the tier in host memory."""

from __future__ import annotations

from raydix.actors.report.charts import Bar, Figure, Figures, Section, Table, Text
from raydix.schemas import CacheStats, TierStats
from raydix.schemas.shown import byte_size, counted, rate, short_count, shown

_NOT_WHOLE = ("late", "failed")  # ends of a load after which the request computes


def host_section(stats: CacheStats, tier: TierStats) -> Section:
    """Return the section: how full the tier is, the tokens that it gave, and those that never reached it."""
    reused = stats.tokens_reused + stats.resumed_tokens_reused
    used = tier.slots.num_slots - tier.slots.free_slots
    written = byte_size(tier.written_bytes) if tier.written_bytes else ""
    num_loads, num_bad = sum(tier.loads.values()), sum(tier.loads.get(end, 0) for end in _NOT_WHOLE)
    figures = (
        Figure("in use", rate(used, tier.slots.num_slots), f"{used:,} of {counted(tier.slots.num_slots, 'slot')}"),
        Figure("tokens loaded", short_count(tier.tokens_loaded), f"{rate(tier.tokens_loaded, reused)} of the reused"),
        Figure("tokens written", short_count(tier.tokens_written), written),
        Figure(
            "tokens dropped",
            short_count(tier.tokens_dropped),
            f"{rate(tier.tokens_dropped, stats.tokens_evicted)} of the evicted",
        ),
        Figure("loads late or failed", f"{num_bad:,}", f"of {counted(num_loads, 'load')}"),
    )
    states = {"ready": (), "reserving": (Text("Its memory is being reserved: it takes nothing yet."),)}
    state = states.get(tier.state, (Text(f"It does not work: {shown(tier.state)}"),))
    pools = {"slots": tier.slots, "window slots": tier.swa, "states": tier.states}
    rows = [
        (
            name,
            Bar(1 - pool.free_slots / pool.num_slots),
            rate(pool.num_slots - pool.free_slots, pool.num_slots),
            short_count(pool.num_slots),
            short_count(pool.evicted),
        )
        for name, pool in pools.items()
        if pool is not None
    ]
    text = (
        f"Policy {tier.policy}. Loaded tokens are a part of the hit rate. Dropped tokens were evicted from the pool "
        "before they were written."
    )
    table = Table(("pool", "", "in use", "size", "evicted"), rows, numbers_from=2)
    return Section("The host tier", (*state, Figures(figures), table, Text(text, True)))
