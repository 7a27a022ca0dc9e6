"""How names and values that callers give are shown: in errors, logs and tables, on a terminal."""

from __future__ import annotations

from reprlib import Repr

_MOST = 160  # characters of a value in an error


def shown(name: str) -> str:
    """Return a name with its control, format and other unprintable characters escaped, as `repr` escapes them.

    A terminal would obey them: colours, titles, links, text that runs from right to left.
    """
    return name if name.isprintable() else "".join([each if each.isprintable() else repr(each)[1:-1] for each in name])


def shown_text(text: str) -> str:
    """Return `shown` of each line of a text; its line ends and tabs stay."""
    return "".join([each if each in "\n\t" else shown(each) for each in text])


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
