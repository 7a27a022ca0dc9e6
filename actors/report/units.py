"""Numbers as a report shows them."""

from __future__ import annotations

NONE = "-"  # a rate of nothing

_TIMES = ((1, "s"), (60, "min"), (3600, "h"), (86_400, "d"))
_SIZES = ((1, ""), (1_000, "k"), (1_000_000, "M"), (1_000_000_000, "G"))


def short_count(count: float) -> str:
    """A count in three digits or so: 950, 1.2k, 34M."""
    return _short(count, _SIZES, "")


def short_time(seconds: float) -> str:
    """A time in its largest unit that fits: 12 s, 3 min, 1.5 h."""
    return _short(seconds, _TIMES, " ")


def percent(share: float) -> str:
    """A share of one, in percent."""
    return f"{100 * share:.1f} %"


def rate(part: float, whole: float) -> str:
    """A part of a whole, in percent; "-" of nothing."""
    return percent(part / whole) if whole else NONE


def points(difference: float) -> str:
    """The difference of two shares, in percentage points, with its sign."""
    return f"{100 * difference:+.1f}"


def _short(value: float, units: tuple[tuple[int, str], ...], gap: str) -> str:
    factor, unit = next((each for each in reversed(units) if value >= each[0]), units[0])
    scaled = value / factor
    digits = f"{scaled:.1f}".removesuffix(".0") if scaled < 10 else f"{scaled:.0f}"
    return f"{digits}{gap if unit else ''}{unit}"
