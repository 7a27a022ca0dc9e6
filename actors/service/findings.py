"""Findings about a cache's node: too little memory left by the pool, and restarts by cause. Each names its remedy."""

from __future__ import annotations

from typing import NamedTuple

from raydix.schemas.shown import byte_size, counted

OUT_OF_MEMORY = "killed by Ray's memory monitor"  # a cause of restarts
_LEAST_LEFT = 0.1  # the part of the node's memory that a full pool must leave
_REMEDY = (
    "give the pool fewer slots, run fewer engines and other processes on this node, or raise the limit of Ray's "
    "monitor (RAY_memory_usage_threshold)"
)


class Restarts(NamedTuple):
    """How often Ray restarted a cache, and why.

    Attributes:
        times: restarts.
        last_cause: one line; empty: there was no restart.
        causes: pairs of a cause without its details and its number of restarts, the most frequent first.
    """

    times: int = 0
    last_cause: str = ""
    causes: tuple[tuple[str, int], ...] = ()


NEVER_RESTARTED = Restarts()


def findings(memory_left: int, memory_total: int, restarts: Restarts) -> tuple[str, ...]:
    """Return the faults of a node, one line each.

    Args:
        memory_left: bytes that are free once the pool is full.
        memory_total: bytes of the node, or of its container.
    """
    return tuple(text for text in (memory_finding(memory_left, memory_total), restarts_finding(restarts)) if text)


def memory_finding(left: int, total: int) -> str:
    """Return a warning if too little memory is left when the pool is full; else an empty text."""
    if left >= _LEAST_LEFT * total:
        return ""
    return (
        f"{byte_size(max(0, left))} of the {byte_size(total)} of memory are left when the pool is full: processes "
        f"outside Ray can fill them, and Ray's memory monitor then kills the cache, the largest process; {_REMEDY}"
    )


def restarts_finding(restarts: Restarts) -> str:
    """Return how often a cache was restarted for each cause, with the remedy; empty if it never was."""
    if not restarts.times:
        return ""
    counts = "; ".join(f"{cause}, {counted(count, 'time')}" for cause, count in restarts.causes)
    remedy = f": {_REMEDY}" if OUT_OF_MEMORY in dict(restarts.causes) else ""
    return f"Ray restarted the cache, empty: {counts}{remedy}"
