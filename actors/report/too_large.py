"""`too_large`: the requests of a cache that can never fit, as a sentence for reports and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raydix.schemas.shown import counted, percent

if TYPE_CHECKING:
    from raydix.schemas import CacheStats


def too_large(stats: CacheStats) -> list[str]:
    """Return a sentence about the requests that can never fit, if there are any."""
    found = stats.too_large
    if not found.requests:
        return []
    share = percent(found.tokens / (stats.tokens_requested + stats.tokens_refused))
    verb = "is" if found.requests == 1 else "are"
    return [
        f"{counted(found.requests, 'request')}, {share} of the prompt tokens, can never fit in "
        f"{counted(stats.num_slots, 'slot')} and {verb} in no hit rate; the largest needs a capacity of "
        f"{found.largest_slots:,}"
    ]
