"""Charts as HTML: shapes in SVG that stretch with the page, and their labels as text beside them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from raydix.schemas.shown import shown

_WIDTH, _HEIGHT = 1000.0, 300.0  # of the drawing; the page stretches it


class Series(NamedTuple):
    """One line or area: the style it has in the page's CSS, and a value for each place."""

    style: str
    values: Sequence[float]


def stacked_areas(xs: Sequence[float], series: Sequence[Series], top: float, marks: Sequence[float]) -> str:
    """Areas upon each other over rising `xs`, and a dashed line at each of `marks`."""
    shapes, floor = [], [0.0] * len(xs)
    for style, values in series:
        ceiling = [low + value for low, value in zip(floor, values, strict=True)]
        outline = [*_points(xs, ceiling, top), *reversed(_points(xs, floor, top))]
        shapes.append(f'<polygon class="{style}" points="{_joined(outline)}"/>')
        floor = ceiling
    lines = [_line("mark", _points((xs[0], xs[-1]), (mark, mark), top)) for mark in marks]
    return "".join(shapes + lines)


def lines(xs: Sequence[float], series: Sequence[Series], top: float, present: float | None = None) -> str:
    """Lines over rising `xs`, and a dashed one upright at `present`."""
    shapes = [_line(style, _points(xs, values, top)) for style, values in series]
    if present is not None:
        place = _WIDTH * (present - xs[0]) / ((xs[-1] - xs[0]) or 1)
        shapes.append(_line("mark", [(place, 0.0), (place, _HEIGHT)]))
    return "".join(shapes)


def chart(title: str, shapes: str, y_labels: Sequence[str], x_labels: Sequence[str]) -> str:
    """A figure: `y_labels` from the top down, `x_labels` from the left, at equal distances."""
    ys = "".join(f"<span>{escape(label)}</span>" for label in y_labels)
    xs = "".join(f"<span>{escape(label)}</span>" for label in x_labels)
    return (
        f'<div class="chart"><div class="y">{ys}</div>'
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f'{shapes}</svg><div class="x">{xs}</div></div>'
    )


def bar(share: float, style: str = "bar") -> str:
    """A bar as wide as its share of the place it has."""
    return f'<div class="track"><div class="{style}" style="width:{100 * min(1.0, max(0.0, share)):.2f}%"></div></div>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """What the styles mean: (style, text)."""
    items = (f'<li><i class="{style}"></i>{escape(text)}</li>' for style, text in entries)
    return f'<ul class="legend">{"".join(items)}</ul>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int = 1) -> str:
    """A table of cells that are HTML already; columns from `numbers_from` on are aligned to the right."""

    def row(cells: Sequence[str], tag: str) -> str:
        parts = (
            f"<{tag}{_column(head[place], place >= numbers_from)}>{cell}</{tag}>" for place, cell in enumerate(cells)
        )
        return f"<tr>{''.join(parts)}</tr>"

    return f"<table><thead>{row(head, 'th')}</thead><tbody>{''.join(row(each, 'td') for each in rows)}</tbody></table>"


def _column(name: str, is_number: bool) -> str:
    """The class of a column; one without a name is left out where the page is narrow."""
    return " class=wide" if not name else " class=n" if is_number else ""


def _points(xs: Sequence[float], values: Sequence[float], top: float) -> list[tuple[float, float]]:
    span, top = (xs[-1] - xs[0]) or 1.0, top or 1.0
    return [
        (_WIDTH * (x - xs[0]) / span, _HEIGHT * (1 - min(value, top) / top))
        for x, value in zip(xs, values, strict=True)
    ]


def _joined(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _line(style: str, points: Sequence[tuple[float, float]]) -> str:
    return f'<polyline class="{style}" points="{_joined(points)}"/>'


def shortened(label: str, most: int = 40) -> str:
    """A label as HTML, its middle left out if it is long."""
    label = shown(label)
    return escape(label if len(label) <= most else f"{label[: most // 2]}…{label[-most // 2 :]}")
