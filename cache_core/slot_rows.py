"""Rows of slots, packed: what the nodes of a tree hold, joined and expanded where it is handed out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.cache_core.errors import InvalidKeyError
from raydix.cache_core.radix_key import RadixKey

Slots = NDArray[np.int64]
Row = bytes  # int64 as the machine has them: a slot per token, or the first of each page where all pages are runs

SLOT_BYTES = 8
_MIN_LANES = 4096
_INT64 = torch.int64
_lanes: dict[int, Slots] = {}  # by page size: 0, 1, ..., page_size - 1, over and over


def compact_slots(slots: Slots, page_size: int) -> Row:
    """A row of its own: the first slot of each page if pages are runs of consecutive slots, else all of them."""
    if page_size > 1 and slots.size:
        jumps = slots[1:] != slots[:-1] + 1
        jumps[page_size - 1 :: page_size] = False  # from page to page there may be one
        if b"\1" not in jumps.tobytes():
            return slots[::page_size].tobytes()
    return slots.tobytes()


def expand_pages(starts: Slots, page_size: int) -> Slots:
    """One slot per token of pages of consecutive slots; a copy."""
    slots = starts.repeat(page_size)
    slots += _lanes_of(page_size, slots.size)
    return slots


def _lanes_of(page_size: int, num_tokens: int) -> Slots:
    """The place of each token in its page."""
    lanes = _lanes.get(page_size)
    if lanes is None or lanes.size < num_tokens:
        num_pages = max(2 * num_tokens, _MIN_LANES) // page_size + 1
        lanes = _lanes[page_size] = np.tile(np.arange(page_size), num_pages)
    return lanes[:num_tokens]


def unpack(row: Row | bytearray) -> Slots:
    """What a row says, as it says it; read-only if the row is."""
    return np.frombuffer(row, np.int64)


def expand_row(row: Row, num_tokens: int) -> Slots:
    """One slot per token of a row; a copy."""
    slots = unpack(row)
    return slots.copy() if slots.size == num_tokens else expand_pages(slots, num_tokens // slots.size)


def join_rows(rows: Iterable[Row]) -> Slots:
    """The rows in a row, as they are; always a copy."""
    return np.frombuffer(bytearray().join(rows), np.int64)


def expand_rows(rows: Sequence[Row], spans: Sequence[Sized], num_tokens: int, page_size: int) -> torch.Tensor:
    """One slot per token of rows over so many tokens in all, of which `spans` have `len` each; a copy."""
    packed = bytearray().join(rows)
    num_slots = len(packed) // SLOT_BYTES
    if num_slots == num_tokens:
        return torch.frombuffer(packed, dtype=_INT64) if packed else torch.empty(0, dtype=_INT64)
    if num_slots * page_size == num_tokens:
        return torch.from_numpy(expand_pages(unpack(packed), page_size))
    return torch.from_numpy(np.concatenate([expand_row(row, len(span)) for row, span in zip(rows, spans, strict=True)]))


def as_slots(key: RadixKey, value: torch.Tensor | None, needed: int) -> Slots:
    """The slots that a caller gave for a key, at least `needed` of them; None: the key's ids, the first of a tuple.

    Raises:
        InvalidKeyError: they are too few, or no row of integers.
    """
    if value is None:
        return key.ids[:: key.arity or 1].astype(np.int64)
    if isinstance(value, torch.Tensor) and value.dtype is torch.int64 and value.is_cpu:
        slots: Slots = value.numpy()
        if slots.ndim == 1 and slots.size >= needed:
            return slots
    else:
        slots = torch.as_tensor(value).detach().cpu().numpy()
    if slots.ndim != 1 or slots.dtype.kind not in "iu" or slots.size < needed:
        raise InvalidKeyError(
            f"{len(key)} tokens need {needed} integer slots, not {slots.dtype} of shape {slots.shape}"
        )
    return slots.astype(np.int64, copy=False)
