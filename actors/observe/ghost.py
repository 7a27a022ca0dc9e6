"""`Ghost`: estimated hit rates of other pool sizes (a miss-ratio curve), for `stats()`."""

from __future__ import annotations

import math

from raydix.cache_core.ghost.curve import GhostCurve
from raydix.schemas import CacheConfig, EvictionConfig, GhostConfig, GhostStats

_STEPS = 4  # sizes per doubling
_SMALLEST = 2  # halvings of the pool's size


class Ghost:
    """Estimate the hit rates of pools from a quarter of the cache's size to `max_factor` times its size.

    The pools have no tier below.

    Args:
        config: the configuration of the cache.
        ghost: the largest factor, and the bound of the sample.
    """

    def __init__(self, config: CacheConfig, ghost: GhostConfig) -> None:
        page, num_slots = config.page_size, config.pool.num_slots
        self._num_slots = num_slots
        self._filled = _filled(config.eviction)
        steps = range(-_SMALLEST * _STEPS, int(_STEPS * math.log2(ghost.max_factor)) + 1)
        sizes = {max(page, round(num_slots * 2 ** (step / _STEPS) / page) * page) for step in steps}
        self._sizes = tuple(sorted(sizes))
        max_size = max(page, int(self._filled * self._sizes[-1]))
        self.curve = GhostCurve(page, max_size, ghost.max_pages, bigram=config.bigram)

    def stats(self, hit_rate: float) -> GhostStats:
        """Return the curve so far, queued requests included. Takes a few milliseconds at most.

        Args:
            hit_rate: the counted hit rate of the cache. Without its loaded part, the curve passes through it.
        """
        if self.curve.tokens_requested:
            hit_rate = max(0.0, hit_rate - self.curve.tokens_loaded / self.curve.tokens_requested)
        estimates = self.curve.hit_rates([int(size * self._filled) for size in self._sizes])
        off = hit_rate - estimates[self._sizes.index(self._num_slots)]
        return GhostStats(
            tokens_requested=self.curve.tokens_requested,
            sample_rate=self.curve.sample_rate,
            num_slots=self._sizes,
            hit_rates=tuple(
                hit_rate if size == self._num_slots else min(1.0, max(0.0, estimate + off))
                for size, estimate in zip(self._sizes, estimates, strict=True)
            ),
        )


def _filled(eviction: EvictionConfig) -> float:
    """Return the used share of a busy pool: between its watermarks, or 1 without background eviction."""
    return 1.0 if eviction.high_watermark >= 1.0 else (eviction.high_watermark + eviction.low_watermark) / 2
