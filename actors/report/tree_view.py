"""The cached tokens in a report: the top prefixes, a tree map, and a table of namespaces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from raydix.actors.report.charts import Box, Label, Legend, Section, Table, Text, TreeMap, shortened
from raydix.actors.report.treemap import Rect, squarify
from raydix.schemas import CacheReport, PrefixUse, TreePart
from raydix.schemas.shown import counted, percent, short_count, short_time, shown

LABEL_WIDTHS = range(2, 37)  # rem; the page shows a label if its box is at least as wide
_REM_PER_CHAR = 0.47  # a little more than most characters take
_AGES_S = (10, 60, 600, 3600)  # limits of the shades; recent use is dark
_SMALLEST = 0.4  # percent of the map's side; smaller boxes are not drawn
_STRIP = 3.6  # percent of the map's height: a line of text
_IDS = (3, 1)  # ids in a label
_WHOLE = Rect(0, 0, 100, 100)


def prefix_section(report: CacheReport) -> Section:
    """Return the section of the cached prefixes with the most reused tokens."""
    title = "Top prefixes"
    if not report.prefixes:
        return Section(title, (_nothing(report),))
    rows = [
        (
            f"{_ids_of_prefix(prefix)} ({shortened(prefix.namespace)})",
            f"{prefix.num_tokens:,}",
            f"{_about(prefix)}{prefix.num_hits:,}",
            f"{_about(prefix)}{prefix.num_slots:,}",
            f"{prefix.num_leases:,}",
        )
        for prefix in report.prefixes
    ]
    head = ("token ids", "tokens", "hits", "slots", "leases")
    text = (
        "A prefix ends where its continuations differ; the ids after … are those in which it differs. Slots include "
        "its continuations, and leases are those that hold a part of it. The order is that of the tokens reused up to "
        "its end. ~ marks estimates: the report visits a sample of the nodes of a large tree."
    )
    return Section(title, (Table(head, rows), Text(text, True)))


def _nothing(report: CacheReport) -> Text:
    """Return the reason for an empty section."""
    other_kind = "Not available for this kind of cache; raydix tree shows the largest branches."
    return Text(other_kind if report.stats.tree_slots else "No tokens are cached yet.")


def _about(prefix: PrefixUse) -> str:
    return "" if prefix.is_whole else "~"


def _ids_of_prefix(prefix: PrefixUse) -> str:
    """Return the first ids, and the first ids that no other prefix continues with."""
    first = _ids(prefix.tokens, 6, prefix.num_tokens)
    return first if prefix.run_tokens == prefix.tokens else f"{first} {_ids(prefix.run_tokens, 3, prefix.num_tokens)}"


def _ids(tokens: Sequence[int], most: int, num_tokens: int) -> str:
    shown = " ".join(map(str, tokens[:most]))
    return f"{shown} …" if num_tokens > most else shown


def tree_section(report: CacheReport) -> Section:
    """Return the section of the tree map."""
    title = "Cached tokens"
    if not report.tree:
        return Section(title, (_nothing(report),))
    ages = [f"a{place}" for place in range(len(_AGES_S) + 1)]
    since = map(short_time, _AGES_S)
    texts = (
        f"used in the last {next(since)}",
        *(f"{short_time(last)} to {age} ago" for last, age in zip(_AGES_S, since, strict=False)),
        f"more than {short_time(_AGES_S[-1])} ago",
    )
    text = (
        "Areas are tokens, except for the strips with names. Boxes in a box are its continuations, named by "
        "the first token ids in which they differ; point at one for details. In a large tree they are estimates. "
        "Beyond 1,024 namespaces, only every second, third and so on is visited."
    )
    blocks = (
        TreeMap("tree map of the cached tokens", list(_draw(report))),
        Legend(list(zip(ages, texts, strict=True))),
        _namespaces(report),
        Text(text, True),
    )
    return Section(title, blocks)


def _draw(report: CacheReport) -> Iterator[Box]:
    rects = squarify([part.num_tokens for part in report.tree], _WHOLE)
    for number, (part, rect) in enumerate(zip(report.tree, rects, strict=False), start=1):
        name = shortened(part.namespace)
        yield from _boxes(part, rect, "space", (f"{name}: {_size(part)} tokens", name, f"#{number}"))


def _size(part: TreePart) -> str:
    return short_count(part.num_tokens)


def _boxes(part: TreePart, rect: Rect, style: str, labels: Sequence[str]) -> Iterator[Box]:
    """Yield the box of a part and of all parts in it, below a strip with its name if the strip fits."""
    has_strip = rect.height >= 3 * _STRIP
    inner = Rect(rect.x, rect.y + _STRIP, rect.width, rect.height - _STRIP) if has_strip else rect
    below = list(_inside(part, inner))
    has_room = rect.height >= _STRIP and (has_strip or not below)
    yield _box(part, rect, style, labels if has_room else ())
    yield from below


def _inside(part: TreePart, rect: Rect) -> Iterator[Box]:
    """Yield the boxes in a part. The part's own tokens and parts too small to draw leave their area empty."""
    sizes = [child.num_tokens for child in part.parts]
    rest = max(0, part.num_tokens - sum(sizes))
    order = sorted(range(len(sizes) + 1), key=lambda place: (*sizes, rest)[place], reverse=True)
    rects = squarify([(*sizes, rest)[place] for place in order], rect)
    for place, area in zip(order, rects, strict=False):
        if place < len(sizes) and min(area.width, area.height) >= _SMALLEST:
            child = part.parts[place]
            size = f"{_size(child)} tokens"
            starts = [_ids(child.tokens, most, child.own_tokens) for most in _IDS]
            yield from _boxes(child, area, "part", (*(f"{start}: {size}" for start in starts), size, _size(child)))


def _box(part: TreePart, rect: Rect, style: str, labels: Sequence[str]) -> Box:
    age = sum(part.unused_s >= limit for limit in _AGES_S)
    place = f"left:{rect.x:.2f}%;top:{rect.y:.2f}%;width:{rect.width:.2f}%;height:{rect.height:.2f}%"
    fitting = [Label(label, min(ceil(_REM_PER_CHAR * len(label) + 0.6), LABEL_WIDTHS[-1])) for label in labels]
    return Box(f"{style} a{age}", place, _tooltip(part), fitting)


def _tooltip(part: TreePart) -> str:
    held = f", held by {counted(part.num_locks, 'lease')}" if part.num_locks else ""
    run = f"; continues with {_ids(part.tokens, 8, part.own_tokens)}" if part.tokens else ""
    return (
        f"{shown(part.namespace)}: {short_count(part.num_tokens)} tokens in {short_count(part.num_nodes)} runs, "
        f"{short_count(part.own_tokens)} shared by all of it{run}; used {short_time(part.unused_s)} ago{held}"
    )


def _namespaces(report: CacheReport) -> Table:
    total = report.stats.tree_slots or 1
    rows = [
        (
            f"#{number} {shortened(part.namespace)}",
            short_count(part.num_tokens),
            percent(min(1.0, part.num_tokens / total)),
            short_time(part.unused_s),
        )
        for number, part in enumerate(report.tree, start=1)
    ]
    return Table(("namespace", "tokens", "share", "unused for"), rows)
