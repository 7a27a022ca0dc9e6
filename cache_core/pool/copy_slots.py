"""Copies into and out of rows of a tensor: as slices where slots follow one another, page by page where they can be.

On a CPU torch copies a slice at the speed of memory, but goes through rows one by one (`index_select`) or element by
element (`index_copy_`). So rows are copied a page at a time where their slots are whole pages, and in the widest
elements that fit: every copy is of bits.
"""

from __future__ import annotations

import numpy as np
import torch

_WIDTHS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)  # 16 bytes to one


def check_shapes(slots: torch.Tensor, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Raise ValueError unless the first of each pair has a row of the second's shape for each slot."""
    for given, rows in pairs:
        if given.shape != (len(slots), *rows.shape[1:]):
            raise ValueError(f"{len(slots)} slots need {[len(slots), *rows.shape[1:]]}, not {list(given.shape)}")


def check_out(out: torch.Tensor, rows: torch.Tensor) -> None:
    """Raise ValueError unless bits of rows can be copied into a tensor as they are."""
    if out.device != rows.device:
        raise ValueError(f"out must be on {rows.device}, where the pool is")
    if out.dtype is not rows.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous and of {rows.dtype}, the pool's dtype, not {out.dtype}")
    if out.requires_grad or out.is_neg() or (out.is_inference() and not torch.is_inference_mode_enabled()):
        raise ValueError("out must be a tensor that can be overwritten, without a gradient")


def put_rows(target: torch.Tensor, slots: torch.Tensor, source: torch.Tensor, page_size: int) -> None:
    """`target[slots] = source`: `[rows, heads, dim]`, contiguous, and `[n, heads, dim]`, of one dtype and device.

    Raises:
        IndexError, RuntimeError: a slot is not a row.
    """
    first = _first_of_run(slots, target)
    if first is not None:
        target[first : first + len(slots)].copy_(source)
        return
    target, source = _widened(target, source)
    whole, pages = _pages_of(slots, target, page_size)
    if pages is not None and source.is_contiguous():
        _paged(target, page_size).index_copy_(0, pages, _paged(source[:whole], page_size))
        slots, source = slots[whole:], source[whole:]
    target.index_copy_(0, slots, source)


def take_rows(source: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, page_size: int) -> None:
    """`out[...] = source[slots]`: `[rows, heads, dim]` and `[n, heads, dim]`, contiguous, of one dtype and device.

    Raises:
        IndexError, RuntimeError: a slot is not a row.
    """
    first = _first_of_run(slots, source)
    if first is not None:
        out.copy_(source[first : first + len(slots)])
        return
    source, out = _widened(source, out)
    whole, pages = _pages_of(slots, source, page_size)
    if pages is not None:
        torch.index_select(_paged(source, page_size), 0, pages, out=_paged(out[:whole], page_size))
        slots, out = slots[whole:], out[whole:]
    torch.index_select(source, 0, slots, out=out)


def _first_of_run(slots: torch.Tensor, rows: torch.Tensor) -> int | None:
    """The first of slots that follow one another, on a CPU: elsewhere to look would be to wait for the device."""
    n = len(slots)
    if n == 0 or not rows.is_cpu or slots.dtype != torch.int64:
        return None
    ids = slots.numpy()
    first = int(ids[0])
    if first < 0 or first + n > len(rows) or int(ids[-1]) - first != n - 1:
        return None
    return first if n <= 2 or bool((ids[1:] - ids[:-1] == 1).all()) else None


def _pages_of(slots: torch.Tensor, rows: torch.Tensor, page_size: int) -> tuple[int, torch.Tensor | None]:
    """How many slots at the beginning are whole pages, and which; none if any of those is not."""
    whole = len(slots) // page_size * page_size
    if page_size == 1 or whole == 0 or not rows.is_cpu or slots.dtype != torch.int64:
        return 0, None
    ids = slots.numpy()[:whole].reshape(-1, page_size)
    starts = ids[:, 0]
    if (starts % page_size).any() or (ids != starts[:, None] + np.arange(page_size)).any():
        return 0, None
    return whole, torch.from_numpy(starts // page_size)


def _paged(rows: torch.Tensor, page_size: int) -> torch.Tensor:
    """Contiguous rows as `[pages, elements of a page]`, without those at the end that fill none."""
    num_pages = len(rows) // page_size
    return rows[: num_pages * page_size].view(num_pages, -1)


def _widened(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same memory in the widest elements that all have room for."""
    return [each.view(_width_of(tensors)) for each in tensors]


def _width_of(tensors: tuple[torch.Tensor, ...]) -> torch.dtype:
    narrowest = tensors[0].dtype
    if any(each.numel() == 0 or each.stride(-1) != 1 for each in tensors):
        return torch.uint8 if narrowest.itemsize == 1 else narrowest
    return next(width for width in _WIDTHS if all(_fits(each, width.itemsize) for each in tensors))


def _fits(tensor: torch.Tensor, width: int) -> bool:
    """Whether every stretch of the last dimension is of whole elements of so many bytes, on their boundaries."""
    size = tensor.element_size()
    lengths = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return tensor.data_ptr() % width == 0 and all(length * size % width == 0 for length in lengths)
