"""`BlockCopies`: an engine's KV caches as records of pages; `PoolTarget` copies blocks to a mapped pool and back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.schemas import InvalidRequest

STAMP_BYTES = 16  # the last segment of a slot; a page has one identity and one digest
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANY_RUNS = 64  # more runs are copied by index, through a temporary tensor
_TEMPORARY_BYTES = 2**20
_STAGING_BYTES = 64 * 2**20

Runs = list[tuple[int, int, int]]  # first block, first page, number of blocks


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
        staging = None
        if records.device != self._blocks[0].device:
            num_staged = max(1, _STAGING_BYTES // records.shape[1])
            staging = self._blocks[0].new_empty((num_staged, records.shape[1]))
        layers, pool, staged, at = [], [], [], 0
        for blocks, num_bytes in zip(self._blocks, sizes, strict=False):
            words = _INTEGERS[_word_bytes(blocks, at, records)]
            layer = _by_page(blocks.view(words), page_size)
            segment = slice(at, at + num_bytes)
            layers.append(layer)
            pool.append(records[:, segment].view(words).view(-1, *layer.shape[2:]))
            if staging is not None:
                staged.append(staging[:, segment].view(words).view(-1, *layer.shape[2:]))
            at += num_bytes
        return PoolTarget(
            layers=tuple(layers),
            pool=tuple(pool),
            records=records,
            page_size=page_size,
            pages_per_block=self._block_size // page_size,
            stamps=records[:, at:] if self.check else None,
            staging=staging,
            staged=tuple(staged),
            stream=self._stream,
            epoch=epoch,
        )


@dataclass(frozen=True, slots=True, eq=False)
class PoolTarget:
    """A pool to which a worker's blocks are copied, and from which they are loaded. It never changes.

    The pages of a copy are those of one life of a cache. So a copy keeps the target that it was prepared with: if the
    cache restarts before it runs, it writes into the pool of the old life, which no cache uses any more.

    Each call copies with few large operations, which do not hold the interpreter. Where the pool lies on another device
    than the KV caches, records are gathered on the engine's device, and each run of records is one transfer.

    Attributes:
        layers: of the engine, `[num_blocks, pages_per_block, *segment]` each.
        pool: the segment of each layer in all records, `[num_pages, *segment]`.
        records: the pool's records, `[num_pages, bytes]`.
        page_size: tokens of a page.
        pages_per_block: pages in which a block is cached.
        stamps: bytes of each page's stamp, `[num_pages, bytes]`; None: pages are not stamped.
        staging: some records on the engine's device, `[number, bytes]`; None: the pool is on the same device.
        staged: the segment of each layer in them, `[number, *segment]`.
        stream: of the copies, where the KV caches lie on a GPU.
        epoch: the life of the cache that the pool belongs to.
    """

    layers: tuple[torch.Tensor, ...]
    pool: tuple[torch.Tensor, ...]
    records: torch.Tensor
    page_size: int
    pages_per_block: int
    stamps: torch.Tensor | None
    staging: torch.Tensor | None
    staged: tuple[torch.Tensor, ...]
    stream: torch.cuda.Stream | None
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
        self._copy(block_ids, pages, to_pool=True, after=after)
        if self.stamps is not None and stamps is not None:
            for at, page in enumerate(pages.tolist()):
                if page >= 0:
                    stamp = stamps[at] + _digest(self.pool, page)
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
        self._copy(block_ids, pages, to_pool=False, after=after)
        if self.stamps is None or stamps is None:
            return
        for at, page in enumerate(pages.tolist()):
            if page < 0:
                continue
            block, part = divmod(at, self.pages_per_block)
            found = bytes(self.stamps[page, : 2 * STAMP_BYTES].cpu().numpy())
            if found[:STAMP_BYTES] != stamps[at]:
                raise WrongPage(f"page {page} has the KV of other tokens")
            loaded = [layer[int(block_ids[block])] for layer in self.layers]
            if found[STAMP_BYTES:] != _digest(loaded, part):
                raise WrongPage(f"page {page} has other bytes than were saved")

    def _copy(
        self, block_ids: NDArray[np.int64], pages: NDArray[np.int64], *, to_pool: bool, after: torch.cuda.Event | None
    ) -> None:
        if self.stream is None:
            self._copy_pages(block_ids, pages, to_pool=to_pool)
            return
        with torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            self._copy_pages(block_ids, pages, to_pool=to_pool)
        self.stream.synchronize()

    def _copy_pages(self, block_ids: NDArray[np.int64], pages: NDArray[np.int64], *, to_pool: bool) -> None:
        step = self.pages_per_block
        if self.staging is not None:
            kept = np.flatnonzero(pages >= 0)
            kept = kept[np.argsort(pages[kept], kind="stable")]  # records that follow one another are one transfer
            for start in range(0, len(kept), len(self.staging)):
                of_chunk = kept[start : start + len(self.staging)]
                blocks, parts = block_ids[of_chunk // step], of_chunk % step
                self._copy_staged(self.staging, blocks, parts, pages[of_chunk], to_pool=to_pool)
            return
        for part in range(step):
            of_part = pages[part::step]
            is_kept = of_part >= 0
            blocks, of_part = block_ids[is_kept], of_part[is_kept]
            if not len(blocks):
                continue
            runs = find_runs(blocks, of_part, step)
            for layer, pool in zip(self.layers, self.pool, strict=True):
                if len(runs) > _MANY_RUNS:
                    _copy_by_index(layer[:, part], pool, blocks, of_part, to_pool=to_pool)
                    continue
                for block, page, length in runs:
                    in_engine = layer[block : block + length, part]
                    in_pool = pool[page : page + (length - 1) * step + 1 : step]
                    target, source = (in_pool, in_engine) if to_pool else (in_engine, in_pool)
                    if target.device.type == "cpu":
                        # torch would share the copy among threads that an engine keeps busy.
                        np.copyto(target.numpy(), source.numpy())
                    else:
                        target.copy_(source)

    def _copy_staged(
        self,
        staging: torch.Tensor,
        blocks: NDArray[np.int64],
        parts: NDArray[np.int64],
        pages: NDArray[np.int64],
        *,
        to_pool: bool,
    ) -> None:
        """Copy pages in ascending order, as many as are staged at most, between the engine and the pool."""
        places = torch.from_numpy(blocks).to(staging.device), torch.from_numpy(parts).to(staging.device)
        number = len(pages)
        runs = find_runs(np.arange(number), pages, 1)
        if to_pool:
            for layer, staged in zip(self.layers, self.staged, strict=True):
                staged[:number].copy_(layer[places])
            for first, page, length in runs:
                self.records[page : page + length].copy_(staging[first : first + length], non_blocking=True)
            return
        for first, page, length in runs:
            staging[first : first + length].copy_(self.records[page : page + length], non_blocking=True)
        for layer, staged in zip(self.layers, self.staged, strict=True):
            layer[places] = staged[:number]


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


def _word_bytes(layer: torch.Tensor, start: int, records: torch.Tensor) -> int:
    """Return the size of the widest integers as which both a layer and its segment of the records can be copied."""
    places = (start, records.shape[1], layer.storage_offset(), layer.shape[3], *layer.stride()[:3], max(_INTEGERS))
    return gcd(*places)


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


def find_runs(blocks: NDArray[np.int64], pages: NDArray[np.int64], step: int) -> Runs:
    """Return the runs in which block ids grow by 1 and pages by `step`."""
    breaks = np.flatnonzero((np.diff(blocks) != 1) | (np.diff(pages) != step)) + 1
    starts = [0, *breaks.tolist()]
    return [
        (int(blocks[start]), int(pages[start]), end - start)
        for start, end in zip(starts, [*starts[1:], len(blocks)], strict=True)
    ]


def _copy_by_index(
    layer: torch.Tensor, pool: torch.Tensor, blocks: NDArray[np.int64], pages: NDArray[np.int64], *, to_pool: bool
) -> None:
    """Copy blocks to pages or back, on one device, through a temporary tensor of bounded size."""
    source, found, target, wanted = (layer, blocks, pool, pages) if to_pool else (pool, pages, layer, blocks)
    step = max(1, _TEMPORARY_BYTES // (layer[0].numel() * layer.itemsize))
    for start in range(0, len(blocks), step):
        at, to = found[start : start + step], wanted[start : start + step]
        if layer.device.type == "cpu":  # numpy copies rows by index at up to twice the speed of torch
            target.numpy()[to] = source.numpy()[at]
        else:
            rows = source.index_select(0, torch.from_numpy(at).to(layer.device))
            target.index_copy_(0, torch.from_numpy(to).to(layer.device), rows)


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
