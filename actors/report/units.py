"""Numbers in the format of a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raydix.schemas import CacheStats

NONE = "-"  # a rate without a base

_TIMES = ((1, "s"), (60, "min"), (3600, "h"), (86_400, "d"))
_SIZES = ((1, ""), (1_000, "k"), (1_000_000, "M"), (1_000_000_000, "G"))


def short_count(count: float) -> str:
    """Return a count in about three digits: 950, 1.2k, 34M."""
    return _short(count, _SIZES, "")


def short_time(seconds: float) -> str:
    """Return a time in its largest unit that fits: 12 s, 3 min, 1.5 h."""
    return _short(seconds, _TIMES, " ")


def percent(share: float, digits: int = 1) -> str:
    """Return a share of one, in percent."""
    return f"{100 * share:.{digits}f} %"


def too_large(stats: CacheStats) -> list[str]:
    """Return a sentence about the requests that can never fit, if there are any."""
    found = stats.too_large
    if not found.requests:
        return []
    noun = "request" if found.requests == 1 else "requests"
    share = percent(found.tokens / (stats.tokens_requested + stats.tokens_refused))
    return [
        f"{found.requests:,} {noun}, {share} of the prompt tokens, can never fit in {stats.num_slots:,} slots and "
        f"are in no hit rate; the largest needs a capacity of {found.largest_slots:,}"
    ]


def rate(part: float, whole: float, digits: int = 1) -> str:
    """Return a part of a whole in percent, "-" if the whole is 0."""
    return percent(part / whole, digits) if whole else NONE


def points(difference: float) -> str:
    """Return the difference of two shares in percentage points, with its sign."""
    return f"{100 * difference:+.1f}"


def _short(value: float, units: tuple[tuple[int, str], ...], gap: str) -> str:
    factor, unit = next((each for each in reversed(units) if value >= each[0]), units[0])
    scaled = value / factor
    digits = f"{scaled:.1f}".removesuffix(".0") if scaled < 10 else f"{scaled:.0f}"
    return f"{digits}{gap if unit else ''}{unit}"
