"""Packed rows of slots, as the nodes of a tree hold them; joined and expanded for callers."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.cache_core.errors import InvalidKeyError
from raydix.cache_core.kernels import expand, join
from raydix.cache_core.tree.radix_key import RadixKey

Slots = NDArray[np.int64]
Starts = NDArray[np.int64]  # the first slot of each page, in token order
NO_STARTS: Starts = np.empty(0, np.int64)
# A slot per token, or the first of each page where all pages are runs; `kernels.pack_slots` chooses the smallest form.
Row = bytes

_INT64 = torch.int64
_INTEGERS = {_INT64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64}


def expand_pages(starts: Slots, page_size: int) -> torch.Tensor:
    """One slot per token of pages of consecutive slots; a copy."""
    expanded = expand([starts.tobytes()], starts.size * page_size, page_size)
    assert expanded is not None, "pages of one size make a row of slots"
    return expanded


def unpack(row: Row) -> Slots:
    """Return the slots of a row as they are packed, per token or per page; read-only if possible."""
    return join_slots([row]) if len(row) % 8 else np.frombuffer(row, np.int64)


def expand_slots(row: Row, num_tokens: int) -> torch.Tensor:
    """One slot per token of a row; a copy."""
    slots = expand([row], num_tokens, 1)
    return expand_pages(starts := unpack(row), num_tokens // starts.size) if slots is None else slots


def meet(row: Row, other: Row, num_tokens: int) -> bool:
    """Return whether two rows of as many tokens have the same slot at the same place."""
    both = join_slots([row, other])
    if num_tokens < both.size < 2 * num_tokens:  # One row has the first slots of pages, the other has all slots.
        both = np.concatenate((expand_slots(row, num_tokens), expand_slots(other, num_tokens)))
    half = both.size // 2
    return b"\1" in (both[:half] == both[half:]).tobytes()


def join_slots(rows: list[Row]) -> Slots:
    """Return the slots of rows, one after the other; always a copy."""
    return join(rows)


def as_slots(key: RadixKey, value: torch.Tensor | None, needed: int) -> torch.Tensor:
    """The slots that a caller gave for a key, int64 in a row, at least `needed` of them; None: the key's ids, the first
    of a tuple.

    Raises:
        InvalidKeyError: they are too few, or no row of integers.
    """
    if value is None:
        return torch.from_numpy(key.ids[:: key.arity or 1].astype(np.int64))
    slots = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    dtype, fits = slots.dtype, slots.dim() == 1 and slots.numel() >= needed
    if not fits or dtype not in _INTEGERS:
        shape = tuple(slots.shape)
        raise InvalidKeyError(f"{len(key)} tokens need {needed} integer slots, not {dtype} of shape {shape}")
    return slots.detach().cpu().to(_INT64).contiguous()
