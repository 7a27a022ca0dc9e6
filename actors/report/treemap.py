"""Rectangles whose areas are sizes (a squarified treemap: Bruls, Huizing and van Wijk, 2000)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Rect(NamedTuple):
    """A rectangle, in whatever unit its surroundings have."""

    x: float
    y: float
    width: float
    height: float


def squarify(sizes: Sequence[float], within: Rect) -> list[Rect]:
    """A rectangle for each size, falling, that fill `within` together and are as square as may be."""
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
    """The longest side ratio of a row of areas along a side."""
    total = sum(row)
    if total <= 0 or min(row) <= 0:
        return float("inf")
    return max(side * side * max(row) / total**2, total**2 / (side * side * min(row)))


def _lay_out(row: Sequence[float], within: Rect) -> tuple[list[Rect], Rect]:
    """A row of areas along the shorter side, and what is left beside it."""
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
