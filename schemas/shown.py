"""How names, values, numbers and plurals are shown: in errors, logs, tables and reports, on a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from reprlib import Repr
from typing import Any

NONE = "-"  # a rate without a base

_SECRET = ("cache_salt",)  # fields with values that no error shows
_MOST = 160  # characters of a value in an error
_TIMES = ((1, "s"), (60, "min"), (3600, "h"), (86_400, "d"))
_COUNTS = ((1, ""), (1_000, "k"), (1_000_000, "M"), (1_000_000_000, "G"))
_SIZES = ((1, "bytes"), (2**10, "KiB"), (2**20, "MiB"), (2**30, "GiB"), (2**40, "TiB"), (2**50, "PiB"))


def shown(name: str) -> str:
    """Return a name with its control, format and other unprintable characters escaped, as `repr` escapes them.

    A terminal would obey them: colours, titles, links, text that runs from right to left.
    """
    return name if name.isprintable() else "".join([char if char.isprintable() else repr(char)[1:-1] for char in name])


def shown_text(text: str) -> str:
    """Return `shown` of each line of a text; its line ends and tabs stay."""
    return "".join([char if char in "\n\t" else shown(char) for char in text])


def cut(text: str) -> str:
    """Return `shown` of a text's first characters, for an error that names what a caller wrote."""
    return shown(text if len(text) <= _MOST else f"{text[: _MOST - 3]}...")


class _Brief(Repr):
    """`repr` of a value, cut short, without walking all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxstring = self.maxother = 80

    def repr_int(self, x: int, level: int) -> str:
        """Return the digits of a number, or its size: Python writes none of more than 4,300 digits."""
        return repr(x) if x.bit_length() <= 256 else f"an int of {x.bit_length()} bits"


_brief = _Brief()


def brief(value: object) -> str:
    """Return the `repr` of a value at a bounded length, for an error that refuses it.

    Of lists and dicts the first few members are shown. A value that has no `repr` is shown by its type.
    """
    return cut(_brief.repr(value))


def fault_text(fault: Mapping[str, Any]) -> str:
    """Return an error of pydantic's `ValidationError.errors()` as a predicate with the wrong value: "must be ..."."""
    text: str = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "missing":
        return "must be given"
    if fault["type"] in ("model_type", "dict_type", "model_attributes_type"):
        text = "must have keys"
    elif text.startswith("Input should be "):
        text = re.sub(r"(a valid \w+), .*", r"\1", text.replace("Input should be", "must be", 1))
        text = text.replace("a valid tuple", "a list").replace("a valid integer", "a whole number")
    rule, colon, hint = text.partition(": ")
    field = fault["loc"][-1] if fault["loc"] else ""
    if text.startswith("must ") and ", not " not in rule and "input" in fault and field not in _SECRET:
        rule += f", not {brief(fault['input'])}"
    return cut(f"{rule}{colon}{hint}")


def counted(number: int, noun: str, mark: str = "") -> str:
    """Return a number with its noun: "1 namespace", "2,048 slots", with a mark "4,096+ tokens".

    The noun is given in the singular; an adjective may come before it.
    """
    return f"{number:,}{mark} {noun if number == 1 and not mark else _plural(noun)}"


def short_count(count: float) -> str:
    """Return a count in about three digits: 950, 1.2k, 34M."""
    return _short(count, _COUNTS, "")


def short_time(seconds: float) -> str:
    """Return a time in its largest unit that fits: 12 s, 3 min, 1.5 h."""
    return _short(seconds, _TIMES, " ")


def measured_time(seconds: float) -> str:
    """Return a measured time in up to three digits: 0.31 ms, 504 ms, 2.24 s, 1,200 s."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1000 * seconds:.3g} ms" if seconds < 0.01 else f"{1000 * seconds:.0f} ms"


def byte_size(num_bytes: int) -> str:
    """Return a number of bytes in its largest unit that fits: 512 bytes, 1.5 GiB, 119 TiB."""
    return counted(num_bytes, "byte") if num_bytes < 2**10 else _short(num_bytes, _SIZES, " ")


def percent(share: float, digits: int = 1) -> str:
    """Return a share of one, in percent."""
    return f"{100 * share:.{digits}f} %"


def rate(part: float, whole: float, digits: int = 1) -> str:
    """Return a part of a whole in percent, "-" if the whole is 0."""
    return percent(part / whole, digits) if whole else NONE


def points(difference: float) -> str:
    """Return the difference of two shares in percentage points, with its sign."""
    return f"{100 * difference:+.1f}"


def _plural(noun: str) -> str:
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2:-1] not in "aeiou" else f"{noun}s"


def _short(value: float, units: tuple[tuple[int, str], ...], gap: str) -> str:
    factor, unit = next((entry for entry in reversed(units) if value >= entry[0]), units[0])
    scaled = value / factor
    digits = f"{scaled:.1f}".removesuffix(".0") if scaled < 10 else f"{scaled:,.0f}"
    return f"{digits}{gap if unit else ''}{unit}"
