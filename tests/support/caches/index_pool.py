"""A pool for a cache of which only the index is looked at."""

from __future__ import annotations

import torch


class IndexPool:
    """Takes slots back, and nothing else: the way in which a cache frees most at once."""

    def free(self, indices: torch.Tensor) -> None:
        assert indices.dtype == torch.int64 and len(indices)
