"""Replays as a picture. Needs matplotlib, which the extra `plot` brings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raydix.actors.replay import Replay

if TYPE_CHECKING:
    from raydix.actors.trace import TracedRequest

_WINDOWS = 60  # of equal length, for the rate over time


def plot(path: Path, replays: Sequence[Replay], trace: Sequence[TracedRequest]) -> None:
    """Draw the hit rate against capacity, a line per policy and page size, and over the time of the trace.

    Raises:
        ImportError: matplotlib is not there.
        ValueError: matplotlib knows no format of the path's suffix.
    """
    from matplotlib.figure import Figure

    prompt = np.array([request.input_length for request in trace], np.float64)
    minutes = np.array([request.timestamp for request in trace]) / 60_000
    length = max(float(minutes.max()), 1e-9)
    window = np.minimum((minutes / length * _WINDOWS).astype(np.int64), _WINDOWS - 1)
    present = np.unique(window)
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    by_capacity, over_time = figure.subplots(1, 2)
    for name, group in groupby(sorted(replays, key=_series), key=_series):
        ordered = sorted(group, key=lambda each: each.config.pool.num_slots)
        rates = [each.figures()["hit_rate_percent"] for each in ordered]
        by_capacity.semilogx([each.config.pool.num_slots for each in ordered], rates, marker="o", label=name)
    for each in replays:
        reused = np.bincount(window, weights=each.reused)[present]
        rate = 100 * reused / np.bincount(window, weights=prompt)[present]
        label = f"{each.config.pool.num_slots:,} tokens, {_series(each)}"
        over_time.plot((present + 0.5) / _WINDOWS * length, rate, label=label)
    by_capacity.set(xlabel="capacity, tokens", ylabel="hit rate, %", title="Hit rate against capacity", ylim=0)
    over_time.set(xlabel="time in the trace, minutes", ylabel="hit rate, %", title="Hit rate over time", ylim=0)
    for axes in (by_capacity, over_time):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _series(replay: Replay) -> str:
    return f"{replay.config.eviction.policy}, pages of {replay.config.page_size}"
