"""The figures of tiers: copies, hit rates of recorded traffic, and what a tier costs requests."""

from __future__ import annotations

from benchmarks import bench_tiers, tier_rates, tier_speed
from benchmarks.figures import Figure


def figures(quick: bool) -> list[Figure]:
    """Return all figures of tiers that can be measured here."""
    return [*bench_tiers.figures(quick), *tier_rates.figures(quick), *tier_speed.figures(quick)]
