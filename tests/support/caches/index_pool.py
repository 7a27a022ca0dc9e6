"""A pool for a cache of which only the index is looked at."""

from __future__ import annotations

import torch


class IndexPool:
    """A pool that only takes slots back, which lets a cache free the most slots in one call."""

    def free(self, indices: torch.Tensor) -> None:
        assert indices.dtype == torch.int64 and len(indices)
