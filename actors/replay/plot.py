"""Plots of replays. Needs matplotlib, from the extra `plot`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from errno import EACCES, EISDIR, ENOENT
from io import BytesIO
from itertools import cycle, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raydix.actors.replay.trace_replay import Replay, series_of

if TYPE_CHECKING:
    from raydix.actors.observe.trace import TracedRequest

_WINDOWS = 60  # equal parts of the trace, for the rate over time


def check_can_draw(path: Path) -> None:
    """Raise the error that `plot` would raise for this path.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the folder does not exist, or cannot be written to.
        ValueError: matplotlib has no format for the path's suffix.
    """
    from matplotlib.figure import Figure

    Figure().savefig(BytesIO(), format=path.suffix.removeprefix(".") or None)
    if path.is_dir():
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
    if not path.parent.is_dir():
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(EACCES, os.strerror(EACCES))


def plot(path: Path, replays: Sequence[Replay], trace: Sequence[TracedRequest]) -> None:
    """Draw the hit rate against capacity, a line per policy, page size and lower tiers, and over the time of the trace.

    A replay has the same colour in both. If all have one capacity, bars replace the lines of the first.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib has no format for the path's suffix.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    if len({replay.config.pool.num_slots for replay in replays}) == 1:
        _draw_bars(left, replays)
    else:
        _draw_lines(left, replays)
    _draw_over_time(right, replays, trace)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=120)


def _draw_bars(axes: Any, replays: Sequence[Replay]) -> None:
    rates = [replay.figures()["hit_rate_percent"] for replay in replays]
    bars = axes.barh([series_of(replay.config, replay.tiers) for replay in replays], rates, color=_colours(replays))
    axes.bar_label(bars, fmt="%.1f %%", padding=3)
    axes.invert_yaxis()
    axes.set(xlabel="hit rate, %", title=f"Hit rate of {replays[0].config.pool.num_slots:,} tokens")
    axes.margins(x=0.15)


def _draw_lines(axes: Any, replays: Sequence[Replay]) -> None:
    for colour, replay in zip(_colours(replays), replays, strict=True):
        axes.plot(replay.config.pool.num_slots, replay.figures()["hit_rate_percent"], "o", color=colour, zorder=3)
    by_series = sorted(replays, key=lambda replay: series_of(replay.config, replay.tiers))
    groups = groupby(by_series, key=lambda replay: series_of(replay.config, replay.tiers))
    for style, (name, group) in zip(cycle(("-", "--", ":", "-.")), groups, strict=False):
        ordered = sorted(group, key=lambda replay: replay.config.pool.num_slots)
        rates = [replay.figures()["hit_rate_percent"] for replay in ordered]
        sizes = [replay.config.pool.num_slots for replay in ordered]
        axes.semilogx(sizes, rates, color="0.5", linestyle=style, label=name, zorder=2)
    axes.set(xlabel="capacity, tokens", ylabel="hit rate, %", title="Hit rate against capacity", ylim=0)
    axes.legend(fontsize="small", loc="upper left")
    axes.grid(alpha=0.3)


def _draw_over_time(axes: Any, replays: Sequence[Replay], trace: Sequence[TracedRequest]) -> None:
    prompt = np.array([request.input_length for request in trace], np.float64)
    minutes = np.array([request.timestamp for request in trace]) / 60_000
    length = max(float(minutes.max()), 1e-9)
    window = np.minimum((minutes / length * _WINDOWS).astype(np.int64), _WINDOWS - 1)
    present = np.unique(window)
    for colour, replay in zip(_colours(replays), replays, strict=True):
        rate = 100 * np.bincount(window, weights=replay.reused)[present] / np.bincount(window, weights=prompt)[present]
        label = f"{replay.config.pool.num_slots:,} tokens, {series_of(replay.config, replay.tiers)}"
        axes.plot((present + 0.5) / _WINDOWS * length, rate, color=colour, label=label)
    axes.set(xlabel="time in the trace, minutes", ylabel="hit rate, %", title="Hit rate over time", ylim=0)
    axes.grid(alpha=0.3)


def _colours(replays: Sequence[Replay]) -> list[str]:
    """Return a colour for each replay, of matplotlib's ten in turn."""
    return [f"C{place % 10}" for place in range(len(replays))]
