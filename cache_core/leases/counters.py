"""`Counters`: what a cache has done since it started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What has happened since the start, in events and tokens."""

    acquires: int = 0
    hits: int = 0
    tokens_requested: int = 0  # of refused requests, too
    tokens_refused: int = 0
    num_too_large: int = 0  # refused requests that can never fit
    tokens_too_large: int = 0
    largest_too_large: int = 0  # slots
    tokens_reused: int = 0
    tokens_inserted: int = 0
    tokens_duplicate: int = 0
    tokens_evicted: int = 0
    probes: int = 0
