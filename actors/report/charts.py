"""The blocks of a report's sections. `page.html` draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from raydix.schemas.shown import shown

_WIDTH, _HEIGHT = 1000.0, 300.0  # size of a drawing; the page stretches it


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str
    is_faint: bool = False


class Figure(NamedTuple):
    """A count with its name, and a note below it."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Figures:
    """Counts side by side."""

    kind: ClassVar[str] = "figures"
    figures: Sequence[Figure]


class Series(NamedTuple):
    """One area or line: its style in the page's CSS, and a value for each x."""

    style: str
    values: Sequence[float]


class Shape(NamedTuple):
    """An SVG element with points."""

    tag: str
    style: str
    points: str


@dataclass(frozen=True)
class Chart:
    """A drawing; `y_labels` from the top down, `x_labels` from the left, at equal distances."""

    kind: ClassVar[str] = "chart"
    width, height = _WIDTH, _HEIGHT
    title: str
    shapes: Sequence[Shape]
    y_labels: Sequence[str]
    x_labels: Sequence[str]


@dataclass(frozen=True)
class Legend:
    """The meaning of styles: (style, text)."""

    kind: ClassVar[str] = "legend"
    entries: Sequence[tuple[str, str]]


class Bar(NamedTuple):
    """A cell of a table: a bar, as wide as its share of the cell."""

    share: float

    @property
    def percent(self) -> float:
        """The width in percent, 0 to 100."""
        return 100 * min(1.0, max(0.0, self.share))


@dataclass(frozen=True)
class Table:
    """Rows of cells. Columns from `numbers_from` on are aligned to the right; a narrow page hides unnamed ones."""

    kind: ClassVar[str] = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str | Bar]]
    numbers_from: int = 1


class Label(NamedTuple):
    """A text in a tree map, and the width of a box, in rem, that it needs."""

    text: str
    width: int


class Box(NamedTuple):
    """A rectangle of a tree map; `place` is CSS. The page shows the first label that fits; the longest comes first."""

    style: str
    place: str
    tooltip: str
    labels: Sequence[Label]


@dataclass(frozen=True)
class TreeMap:
    """Rectangles, parents before children."""

    kind: ClassVar[str] = "map"
    title: str
    boxes: Sequence[Box]


Block = Text | Figures | Chart | Legend | Table | TreeMap


@dataclass(frozen=True)
class Section:
    """A heading and its blocks; without a title, the blocks alone."""

    title: str
    blocks: Sequence[Block]


def stacked_areas(xs: Sequence[float], series: Sequence[Series], top: float, marks: Sequence[float]) -> list[Shape]:
    """Return stacked areas over rising `xs`, and a dashed line at each of `marks`."""
    shapes, floor = [], [0.0] * len(xs)
    for style, values in series:
        ceiling = [low + value for low, value in zip(floor, values, strict=True)]
        outline = [*_points(xs, ceiling, top), *reversed(_points(xs, floor, top))]
        shapes.append(Shape("polygon", style, _joined(outline)))
        floor = ceiling
    return shapes + [level(mark, top) for mark in marks]


def lines(xs: Sequence[float], series: Sequence[Series], top: float, present: float | None = None) -> list[Shape]:
    """Return lines over rising `xs`, and a dashed vertical line at `present`."""
    shapes = [Shape("polyline", style, _joined(_points(xs, values, top))) for style, values in series]
    if present is not None:
        place = _WIDTH * (present - xs[0]) / ((xs[-1] - xs[0]) or 1)
        shapes.append(Shape("polyline", "mark", _joined([(place, 0.0), (place, _HEIGHT)])))
    return shapes


def steps(edges: Sequence[float], values: Sequence[float | None], top: float, style: str) -> list[Shape]:
    """Return a step line: each value lasts from one edge to the next; None leaves a gap. `edges` has one more item."""
    shapes: list[Shape] = []
    run: list[tuple[float, float]] = []
    for place, value in enumerate([*values, None]):
        if value is not None:
            run += [(edges[place], value), (edges[place + 1], value)]
        elif run:
            xs, ys = zip(*run, strict=True)
            shapes.append(Shape("polyline", style, _joined(_points(xs, ys, top, (edges[0], edges[-1])))))
            run = []
    return shapes


def level(value: float, top: float) -> Shape:
    """Return a dashed horizontal line at a value."""
    return Shape("polyline", "mark", _joined(_points((0.0, 1.0), (value, value), top)))


def _points(
    xs: Sequence[float], values: Sequence[float], top: float, ends: tuple[float, float] | None = None
) -> list[tuple[float, float]]:
    first, last = ends or (xs[0], xs[-1])
    span, top = (last - first) or 1.0, top or 1.0
    return [
        (_WIDTH * (x - first) / span, _HEIGHT * (1 - min(value, top) / top))
        for x, value in zip(xs, values, strict=True)
    ]


def _joined(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def shortened(label: str, most: int = 40) -> str:
    """Return a printable label. One with more than `most` characters loses its middle, marked by an ellipsis."""
    label = shown(label)
    return label if len(label) <= most else f"{label[: most // 2]}…{label[-most // 2 :]}"
