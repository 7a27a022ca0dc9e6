"""Copies of KV into and out of the slots of a tensor, with the shape checks for them.

On a CPU, torch copies a slice at memory bandwidth, but `index_select` copies slot by slot and `index_copy_` element by
element. So consecutive slots are copied as a slice, and slots of whole pages page by page. All copies are of bits, in
the widest elements that fit.
"""

from __future__ import annotations

import numpy as np
import torch

_WIDTHS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)  # of 16, 8, 4, 2 and 1 bytes


def check_shapes(slots: torch.Tensor, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Raise ValueError unless in each pair the first tensor is `[len(slots), *rest]`, for a second of `[n, *rest]`."""
    num_slots = len(slots)
    for given, rows in pairs:
        needed, found = (num_slots, *rows.shape[1:]), given.shape
        if found != needed:
            raise ValueError(f"{num_slots} slots need {list(needed)}, not {list(found)}")


def check_out(out: torch.Tensor, rows: torch.Tensor) -> None:
    """Raise ValueError unless `out` can take copies of the bits of `rows`."""
    if out.device != rows.device:
        raise ValueError(f"out must be on {rows.device}, where the pool is")
    if out.dtype is not rows.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous and of {rows.dtype}, the pool's dtype, not {out.dtype}")
    if out.requires_grad or out.is_neg() or (out.is_inference() and not torch.is_inference_mode_enabled()):
        raise ValueError("out must be a tensor that can be overwritten, without a gradient")


def put_rows(target: torch.Tensor, slots: torch.Tensor, source: torch.Tensor, page_size: int) -> None:
    """Do `target[slots] = source`.

    Args:
        target: `[rows, ..., dim]`, contiguous.
        slots: `[n]`.
        source: `[n, ..., dim]`, of the target's dtype and device.

    Raises:
        IndexError, RuntimeError: a slot is out of range.
    """
    first = _first_of_run(slots, target)
    if first is not None:
        target[first : first + len(slots)].copy_(source)
        return
    target, source = widened(target, source)
    whole, pages = _pages_of(slots, target, page_size)
    if pages is not None and source.is_contiguous():
        _paged(target, page_size).index_copy_(0, pages, _paged(source[:whole], page_size))
        slots, source = slots[whole:], source[whole:]
    target.index_copy_(0, slots, source)


def take_rows(source: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, page_size: int) -> None:
    """Do `out[...] = source[slots]`.

    Args:
        source: `[rows, ..., dim]`, contiguous.
        slots: `[n]`.
        out: `[n, ..., dim]`, contiguous, of the source's dtype and device.

    Raises:
        IndexError, RuntimeError: a slot is out of range.
    """
    first = _first_of_run(slots, source)
    if first is not None:
        out.copy_(source[first : first + len(slots)])
        return
    source, out = widened(source, out)
    whole, pages = _pages_of(slots, source, page_size)
    if pages is not None:
        torch.index_select(_paged(source, page_size), 0, pages, out=_paged(out[:whole], page_size))
        slots, out = slots[whole:], out[whole:]
    torch.index_select(source, 0, slots, out=out)


def _first_of_run(slots: torch.Tensor, rows: torch.Tensor) -> int | None:
    """Return the first slot if the slots are consecutive, else None.

    On other devices than the CPU, returns None: to read the slots would wait for the device.
    """
    n = len(slots)
    if n == 0 or not rows.is_cpu or slots.dtype != torch.int64:
        return None
    ids = slots.numpy()
    first = int(ids[0])
    if first < 0 or first + n > len(rows) or int(ids[-1]) - first != n - 1:
        return None
    return first if n <= 2 or bool((ids[1:] - ids[:-1] == 1).all()) else None


def _pages_of(slots: torch.Tensor, rows: torch.Tensor, page_size: int) -> tuple[int, torch.Tensor | None]:
    """Return how many leading slots fill whole pages, and the numbers of these pages.

    Returns `(0, None)` if these slots cannot be copied page by page.
    """
    whole = len(slots) // page_size * page_size
    if page_size == 1 or whole == 0 or not rows.is_cpu or slots.dtype != torch.int64:
        return 0, None
    ids = slots.numpy()[:whole].reshape(-1, page_size)
    starts = ids[:, 0]
    if (starts % page_size).any() or (ids != starts[:, None] + np.arange(page_size)).any():
        return 0, None
    return whole, torch.from_numpy(starts // page_size)


def _paged(rows: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return a view of contiguous rows as `[pages, elements of a page]`, without the rest after the last page."""
    num_pages = len(rows) // page_size
    return rows[: num_pages * page_size].view(num_pages, -1)


def widened(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return views of the tensors in the widest elements that fit all of them."""
    return [tensor.view(_width_of(tensors)) for tensor in tensors]


def _width_of(tensors: tuple[torch.Tensor, ...]) -> torch.dtype:
    narrowest = tensors[0].dtype
    if any(each.numel() == 0 or each.stride(-1) != 1 for each in tensors):
        return torch.uint8 if narrowest.itemsize == 1 else narrowest
    return next(width for width in _WIDTHS if all(_fits(each, width.itemsize) for each in tensors))


def _fits(tensor: torch.Tensor, width: int) -> bool:
    """Return whether the last dimension can be viewed in elements of `width` bytes, aligned to that width."""
    size = tensor.element_size()
    lengths = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return tensor.data_ptr() % width == 0 and all(length * size % width == 0 for length in lengths)
