"""Figures as JSON, and as a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.figures import Figure

MET, MISSED = "#3a7d44", "#b3423a"


def as_json(figures: Sequence[Figure]) -> str:
    """Return one object per figure."""
    return json.dumps([asdict(figure) | {"met": figure.met} for figure in figures], indent=1) + "\n"


def draw(figures: Sequence[Figure], file: Path) -> None:
    """Draw a bar for each figure with a goal: the factor by which it is better. The goal is the line at 1."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    bars = [(f"{each.group}: {each.what}", margin(each)) for each in figures if each.met is not None]
    names, margins = zip(*reversed(bars), strict=True) if bars else ((), ())
    figure, axes = pyplot.subplots(figsize=(11, 1 + 0.22 * len(bars)), layout="constrained")
    axes.barh(names, [each - 1 for each in margins], left=1, color=[MET if each >= 1 else MISSED for each in margins])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("times better than the goal")
    axes.tick_params(axis="y", labelsize=7)
    figure.savefig(file)
    pyplot.close(figure)


def margin(figure: Figure) -> float:
    """Return the factor by which a figure is better than its goal; 1 meets it."""
    least = 1e-3
    if figure.at_most is not None:
        return figure.at_most / max(figure.judged, figure.at_most * least)
    assert figure.at_least is not None, "only figures with a goal have a margin"
    return max(figure.judged / figure.at_least, least)
