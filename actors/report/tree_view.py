"""The section of a report that shows what is cached: a tree map, and its namespaces as a table."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from raydix.actors.report.charts import legend, shortened, table
from raydix.actors.report.treemap import Rect, squarify
from raydix.actors.report.units import percent, short_count, short_time
from raydix.schemas import CacheReport, TreePart

_AGES_S = (10, 60, 600, 3600)  # of the shades, the younger the stronger
_SMALLEST = 0.4  # percent of the map's side; what is smaller is not drawn
_LABELLED = Rect(0, 0, 9, 9)  # percent; smaller boxes have no room for their number
_WHOLE = Rect(0, 0, 100, 100)


def tree_section(report: CacheReport) -> str:
    """What hangs where in the tree."""
    head = "<h2>What is cached</h2>"
    if not report.tree:
        return f"{head}<p>Nothing is cached yet.</p>"
    boxes = "".join(_draw(report))
    ages = [f"a{place}" for place in range(len(_AGES_S) + 1)]
    texts = (*(f"used in the last {short_time(age)}" for age in _AGES_S), "longer ago")
    return (
        f'{head}<div class="map" role="img" aria-label="tree map of the cached tokens">{boxes}</div>'
        f"{legend(list(zip(ages, texts, strict=True)))}{_namespaces(report)}"
        "<p class=faint>Areas are tokens. Boxes in a box are what continues it; of a large tree they are estimates, "
        "and of more than 1,024 namespaces every second, third and so on is looked at.</p>"
    )


def _draw(report: CacheReport) -> Iterator[str]:
    rects = squarify([part.num_tokens for part in report.tree], _WHOLE)
    for number, (part, rect) in enumerate(zip(report.tree, rects, strict=False), start=1):
        yield _box(part, rect, "space", str(number))
        yield from _inside(part, rect)


def _inside(part: TreePart, rect: Rect) -> Iterator[str]:
    """What hangs below a part, in its place; its own run and what is too small to show keep theirs."""
    sizes = [each.num_tokens for each in part.parts]
    rest = max(0, part.num_tokens - sum(sizes))
    order = sorted(range(len(sizes) + 1), key=lambda place: (*sizes, rest)[place], reverse=True)
    rects = squarify([(*sizes, rest)[place] for place in order], rect)
    for place, each in zip(order, rects, strict=False):
        if place < len(sizes) and min(each.width, each.height) >= _SMALLEST:
            yield _box(part.parts[place], each, "part", "")
            yield from _inside(part.parts[place], each)


def _box(part: TreePart, rect: Rect, style: str, number: str) -> str:
    age = sum(part.unused_s >= limit for limit in _AGES_S)
    has_room = rect.width >= _LABELLED.width and rect.height >= _LABELLED.height
    label = f"<span>{number}</span>" if number and has_room else ""
    place = f"left:{rect.x:.2f}%;top:{rect.y:.2f}%;width:{rect.width:.2f}%;height:{rect.height:.2f}%"
    return f'<div class="{style} a{age}" style="{place}" title="{escape(_told(part), quote=True)}">{label}</div>'


def _told(part: TreePart) -> str:
    held = f", held by {part.num_locks} leases" if part.num_locks else ""
    return (
        f"{short_count(part.num_tokens)} tokens in {short_count(part.num_nodes)} runs, "
        f"{short_count(part.own_tokens)} shared by all of it; used {short_time(part.unused_s)} ago{held}"
    )


def _namespaces(report: CacheReport) -> str:
    total = report.stats.tree_slots or 1
    rows = [
        (
            f"{number}",
            shortened(part.namespace),
            short_count(part.num_tokens),
            percent(min(1.0, part.num_tokens / total)),
            short_time(part.unused_s),
        )
        for number, part in enumerate(report.tree, start=1)
    ]
    return table(("#", "namespace", "tokens", "share", "unused"), rows, numbers_from=2)
