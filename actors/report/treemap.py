"""Rectangles with areas in proportion to sizes (a squarified treemap: Bruls, Huizing and van Wijk, 2000)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Rect(NamedTuple):
    """A rectangle, in the unit of the rectangle around it."""

    x: float
    y: float
    width: float
    height: float


def squarify(sizes: Sequence[float], within: Rect) -> list[Rect]:
    """Return a rectangle for each size; together they fill `within`, nearly square.

    `sizes` must be in descending order.
    """
    total = sum(sizes)
    areas = [size * within.width * within.height / total for size in sizes] if total > 0 else []
    rects: list[Rect] = []
    while areas:
        side = min(within.width, within.height)
        num = 1
        while num < len(areas) and _worst(areas[: num + 1], side) <= _worst(areas[:num], side):
            num += 1
        row, areas = areas[:num], areas[num:]
        placed, within = _lay_out(row, within)
        rects += placed
    return rects


def _worst(row: Sequence[float], side: float) -> float:
    """Return the largest ratio of sides in a row of areas along a side."""
    total = sum(row)
    if total <= 0 or min(row) <= 0:
        return float("inf")
    return max(side * side * max(row) / total**2, total**2 / (side * side * min(row)))


def _lay_out(row: Sequence[float], within: Rect) -> tuple[list[Rect], Rect]:
    """Return the rectangles of a row along the shorter side of `within`, and the rectangle left free."""
    x, y, width, height = within
    total = sum(row)
    rects = []
    if width >= height:
        depth = total / height if height else 0.0
        for area in row:
            rects.append(Rect(x, y, depth, area / depth if depth else 0.0))
            y += rects[-1].height
        return rects, Rect(x + depth, within.y, max(0.0, width - depth), height)
    depth = total / width if width else 0.0
    for area in row:
        rects.append(Rect(x, y, area / depth if depth else 0.0, depth))
        x += rects[-1].width
    return rects, Rect(within.x, within.y + depth, width, max(0.0, height - depth))
