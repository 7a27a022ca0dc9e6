"""`BlockCopies`: an engine's KV caches as records of pages; `PoolTarget` copies blocks to a mapped pool and back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.cache_core.pool.record_copies import Cut, RecordCopies
from raydix.schemas import InvalidRequest

STAMP_BYTES = 16  # the last segment of a slot; a page has one identity and one digest


class BlockCopies:
    """The KV caches of one worker, seen as records of pages.

    A block of a layer is `[num_kv_heads, block_size, content]`; content is a token's K and V side by side. A page is a
    block, or one of the equal parts into which `page_size` cuts a block's tokens. The record of a page has a segment
    for each layer, one after the other. Inside a segment, heads and tokens lie in the order in which the engine has
    them, so that whole blocks are contiguous on both sides.

    Args:
        layers: each layer's tensor, `[num_blocks, num_kv_heads, block_size, content]`, or without the heads (MLA).
        block_size: tokens of a block.
        check: stamp each saved page with its identity and the digest of its bytes, and verify both when it is loaded.

    Raises:
        InvalidRequest: a tensor has another shape, or the content of a token is not contiguous.
    """

    def __init__(self, layers: Sequence[torch.Tensor], block_size: int, *, check: bool = False) -> None:
        self.check = check
        self._block_size = block_size
        self._blocks = [_with_heads(layer, block_size) for layer in layers]
        device = layers[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def on_gpu(self) -> bool:
        """Whether the KV caches lie on a GPU."""
        return self._stream is not None

    @property
    def slot_bytes(self) -> list[int]:
        """Bytes of a token in each segment of a record; with `check`, the stamps are the last segment."""
        layers = [layer.shape[1] * layer.shape[3] for layer in self._blocks]
        return [*layers, STAMP_BYTES] if self.check else layers

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return sum(layer[0].numel() for layer in self._blocks)

    def attach(self, records: torch.Tensor, page_size: int, epoch: str = "") -> PoolTarget:
        """Return what copies blocks to a pool and back.

        Args:
            records: of the pool's pages, `[num_pages, page_size * sum(slot_bytes)]` uint8, as `AttachedPool.pages`.
            page_size: tokens of a page of the cache; a divisor of the block size.
            epoch: the life of the cache that the pool belongs to.
        """
        sizes = [page_size * num_bytes for num_bytes in self.slot_bytes]
        assert records.shape[1] == sum(sizes), "a cache that does not fit is refused"
        assert self._block_size % page_size == 0, (self._block_size, page_size)
        tensors: list[tuple[torch.Tensor, Cut]] = []
        at = 0
        for blocks, num_bytes in zip(self._blocks, sizes, strict=False):
            layer = _by_page(blocks, page_size)
            tensors.append((layer, partial(_segment, slice(at, at + num_bytes), layer.shape[2:])))
            at += num_bytes
        return PoolTarget(
            copies=RecordCopies.between(tensors, records, self._stream),
            page_size=page_size,
            pages_per_block=self._block_size // page_size,
            stamps=records[:, at:] if self.check else None,
            epoch=epoch,
        )


@dataclass(frozen=True, slots=True, eq=False)
class PoolTarget:
    """A pool to which a worker's blocks are copied, and from which they are loaded. It never changes.

    The pages of a copy are those of one life of a cache. So a copy keeps the target that it was prepared with: if the
    cache restarts before it runs, it writes into the pool of the old life, which no cache uses any more.

    Attributes:
        copies: between the engine's layers, `[num_blocks, pages_per_block, *segment]` each, and the pool's records.
        page_size: tokens of a page.
        pages_per_block: pages in which a block is cached.
        stamps: bytes of each page's stamp, `[num_pages, bytes]`; None: pages are not stamped.
        epoch: the life of the cache that the pool belongs to.
    """

    copies: RecordCopies
    page_size: int
    pages_per_block: int
    stamps: torch.Tensor | None
    epoch: str

    def save(
        self,
        block_ids: NDArray[np.int64],
        pages: NDArray[np.int64],
        stamps: Sequence[bytes] | None = None,
        after: torch.cuda.Event | None = None,
    ) -> None:
        """Copy blocks into pages of the pool; return when the pages are written.

        Args:
            block_ids: of the blocks.
            pages: `pages_per_block` for each block; negative: not copied.
            stamps: 16 bytes for each page.
            after: an event behind the work that the GPU must have done before.
        """
        self.copies.save(block_ids, pages, after)
        if self.stamps is not None and stamps is not None:
            for at, page in enumerate(pages.tolist()):
                if page >= 0:
                    stamp = stamps[at] + _digest(self.copies.segments, page)
                    self.stamps[page, : len(stamp)] = torch.frombuffer(bytearray(stamp), dtype=torch.uint8)

    def load(
        self,
        pages: NDArray[np.int64],
        block_ids: NDArray[np.int64],
        stamps: Sequence[bytes] | None = None,
        after: torch.cuda.Event | None = None,
    ) -> None:
        """Copy pages of the pool into blocks; return when the blocks are written.

        Args:
            pages: `pages_per_block` for each block; negative: not copied.
            block_ids: of the blocks.
            stamps: 16 bytes for each page; verified with `check`.
            after: an event behind the work that the GPU must have done before.

        Raises:
            WrongPage: a page has the KV of other tokens, or other bytes than were saved.
        """
        self.copies.load(block_ids, pages, after)
        if self.stamps is None or stamps is None:
            return
        for at, page in enumerate(pages.tolist()):
            if page < 0:
                continue
            block, part = divmod(at, self.pages_per_block)
            found = bytes(self.stamps[page, : 2 * STAMP_BYTES].cpu().numpy())
            if found[:STAMP_BYTES] != stamps[at]:
                raise WrongPage(f"page {page} has the KV of other tokens")
            loaded = [layer[int(block_ids[block])] for layer in self.copies.rows]
            if found[STAMP_BYTES:] != _digest(loaded, part):
                raise WrongPage(f"page {page} has other bytes than were saved")


def _segment(place: slice, shape: Sequence[int], records: torch.Tensor) -> torch.Tensor:
    """Return the same segment of each record, `[number, *shape]`."""
    return records[:, place].view(-1, *shape)


def _digest(layers: Sequence[torch.Tensor], page: int) -> bytes:
    """Return the digest of one page's bytes in all layers."""
    digest = hashlib.blake2b(digest_size=STAMP_BYTES)
    for layer in layers:
        digest.update(layer[page].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.digest()


def _by_page(layer: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return blocks as pages, `[num_blocks, pages_per_block, ...]`: heads, tokens and content as they lie in memory."""
    num_blocks, num_heads, block_size, content = layer.shape
    by_page = layer.view(num_blocks, num_heads, block_size // page_size, page_size, content)
    strides = by_page.stride()
    in_memory = sorted((1, 3, 4), key=lambda dim: -strides[dim])
    return by_page.permute(0, 2, *in_memory)


def _with_heads(layer: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return a layer's blocks as bytes, `[num_blocks, num_kv_heads, block_size, bytes]`."""
    if layer.ndim == 3:
        layer = layer.unsqueeze(1)
    if layer.ndim != 4 or layer.shape[2] != block_size:
        wanted = f"[num_blocks, num_kv_heads, {block_size}, content]"
        raise InvalidRequest(f"a layer's KV cache must be {wanted}, not of shape {tuple(layer.shape)}")
    if layer.stride(3) != 1:
        raise InvalidRequest(f"the content of a token must be contiguous, not of stride {layer.stride(3)}")
    return layer.view(torch.uint8)


class WrongPage(Exception):
    """A loaded page has other contents than its stamp says."""


def make_stamps(tokens: NDArray[np.int64], namespace: str, page_size: int, start: int, end: int) -> list[bytes]:
    """Return the identity of each page of tokens [start, end): a hash of its namespace and all tokens up to its end.

    Args:
        tokens: ids of at least `end` tokens.
        start, end: multiples of `page_size`.
    """
    digest = hashlib.blake2b(namespace.encode(), digest_size=STAMP_BYTES)
    digest.update(tokens[:start].tobytes())
    stamps = []
    for at in range(start, end, page_size):
        digest.update(tokens[at : at + page_size].tobytes())
        stamps.append(digest.copy().digest())
    return stamps
