"""Rows of slots: one per token, or the first of each page where pages are runs of consecutive slots."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.cache_core.errors import InvalidKeyError
from raydix.cache_core.radix_key import RadixKey

Slots = NDArray[np.int64]


def compact_slots(slots: Slots, page_size: int) -> Slots:
    """A copy of a row of slots: the first of each page if pages are runs of consecutive slots, else all of them."""
    if page_size > 1:
        pages = slots.reshape(-1, page_size)
        if (pages == pages[:, :1] + np.arange(page_size)).all():
            return pages[:, 0].copy()
    return slots.copy()


def expand_slots(slots: Slots, num_tokens: int) -> Slots:
    """One slot per token, from what `compact_slots` made; a copy."""
    if len(slots) == num_tokens:
        return slots.copy()
    page_size = num_tokens // len(slots)
    return (slots[:, None] + np.arange(page_size)).reshape(-1)


def join_rows(rows: list[Slots]) -> Slots:
    """The rows in a row; always a copy."""
    if len(rows) == 1:
        return rows[0].copy()
    return np.concatenate(rows) if rows else np.empty(0, np.int64)


def as_slots(key: RadixKey, value: torch.Tensor | None, needed: int) -> Slots:
    """The slots that a caller gave for a key, at least `needed` of them; None: the key's ids, the first of a tuple.

    Raises:
        InvalidKeyError: they are too few, or no row of integers.
    """
    if value is None:
        return key.ids[:: key.arity or 1].astype(np.int64)
    slots = torch.as_tensor(value).detach().cpu().numpy()
    if slots.ndim != 1 or slots.dtype.kind not in "iu" or len(slots) < needed:
        raise InvalidKeyError(
            f"{len(key)} tokens need {needed} integer slots, not {slots.dtype} of shape {slots.shape}"
        )
    return slots.astype(np.int64, copy=False)
