"""Plots of simulated fleets. Needs matplotlib, from the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from raydix.actors.replay.fleet_simulation import RouterResult


def plot(path: Path, results: Sequence[RouterResult]) -> None:
    """Draw hit rate, balance and time to first token of each router, and how that time is distributed.

    Bars are medians over the seeds, with the least and the greatest value; the distribution is of the first seed.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
        ValueError: matplotlib has no format for the path's suffix.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    ((hits, balance), (times, spread)) = figure.subplots(2, 2)
    names = [result.router for result in results]
    colours = [f"C{place % 10}" for place in range(len(results))]
    panels = (
        (hits, "hit_rate_percent", "hit rate, %", "%.1f"),
        (balance, "busy_max_over_mean", "busy time, busiest server / mean", "%.2f"),
        (times, "first_token_mean_s", "mean time to first token, s", "%.3g"),
    )
    for axes, key, label, form in panels:
        medians = np.array([result.medians()[key] for result in results])
        by_seed = np.array([[figures[key] for figures in result.by_seed] for result in results])
        error = np.stack([medians - by_seed.min(axis=1), by_seed.max(axis=1) - medians])
        bars = axes.barh(names, medians, xerr=error, color=colours, capsize=2)
        axes.bar_label(bars, labels=[form % value for value in medians], padding=6)
        axes.invert_yaxis()
        axes.set(xlabel=label)
        axes.margins(x=0.15)
    for colour, result in zip(colours, results, strict=True):
        spread.semilogx(np.maximum(result.first_token_s, 1e-3), np.arange(101), color=colour, label=result.router)
    spread.set(xlabel="time to first token, s", ylabel="requests that had it by then, %", ylim=(0, 100))
    spread.grid(alpha=0.3)
    spread.legend(fontsize="small")
    figure.savefig(path, dpi=120)
