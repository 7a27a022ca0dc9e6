"""`BlockCopies`: an engine's KV caches as pages of bytes; `PoolTarget` copies blocks to a mapped pool and back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.schemas import InvalidRequest

STAMP_BYTES = 16  # of each slot, in the last layer of a pool with stamps; a page has one identity and one digest
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # torch copies no float8 by index
_MANY_RUNS = 64  # from here on pages are copied by index, through a temporary tensor

Runs = list[tuple[int, int, int]]  # of consecutive blocks: first block, first page, number of blocks


class BlockCopies:
    """The KV caches of one worker, seen as pages of bytes.

    A block of a layer is `[num_kv_heads, block_size, content]`; content is a token's K and V side by side. A page is a
    block, or one of the equal parts into which `page_size` cuts a block's tokens. The layout of the engine's tensors
    does not matter; that of a page is always `[num_kv_heads, page_size, content]`.

    Args:
        layers: each layer's tensor, `[num_blocks, num_kv_heads, block_size, content]`, or without the heads (MLA).
        block_size: tokens of a block.
        check: stamp each saved page with its identity and the digest of its bytes, and verify both when it is loaded.

    Raises:
        InvalidRequest: a tensor has another shape.
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
        """Bytes of a token in each layer of a pool for these KV caches; with `check`, the stamps are the last layer."""
        layers = [each.shape[1] * each.shape[3] * each.dtype.itemsize for each in self._blocks]
        return [*layers, STAMP_BYTES] if self.check else layers

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return sum(each[0].numel() * each.dtype.itemsize for each in self._blocks)

    def attach(self, pool: Sequence[torch.Tensor], page_size: int, epoch: str = "") -> PoolTarget:
        """Return what copies blocks to a pool and back.

        Args:
            pool: each layer's K, `[num_pages * page_size, 1, bytes]` uint8, as `AttachedPool.k`.
            page_size: tokens of a page of the cache; a divisor of the block size.
            epoch: the life of the cache that the pool belongs to.
        """
        in_pool = list(pool)
        assert [layer.shape[-1] for layer in in_pool] == self.slot_bytes, "a cache that does not fit is refused"
        assert self._block_size % page_size == 0, (self._block_size, page_size)
        layers = tuple(_by_page(layer, page_size) for layer in self._blocks)
        stamps = in_pool.pop().view(-1, page_size * STAMP_BYTES) if self.check else None
        pages = tuple(
            ours.view(-1, page_size * ours.shape[-1]).view(theirs.dtype).view(-1, *theirs.shape[2:])
            for ours, theirs in zip(in_pool, layers, strict=True)
        )
        return PoolTarget(layers, pages, page_size, self._block_size // page_size, stamps, self._stream, epoch)


@dataclass(frozen=True, slots=True, eq=False)
class PoolTarget:
    """A pool to which a worker's blocks are copied, and from which they are loaded. It never changes.

    The pages of a copy are those of one life of a cache. So a copy keeps the target that it was prepared with: if the
    cache restarts before it runs, it writes into the pool of the old life, which no cache uses any more.

    Attributes:
        layers: of the engine, `[num_blocks, pages_per_block, num_kv_heads, page_size, content]` each.
        pool: `[num_pages, num_kv_heads, page_size, content]` of each layer.
        page_size: tokens of a page.
        pages_per_block: pages in which a block is cached.
        stamps: bytes of each page's stamp, `[num_pages, bytes]`; None: pages are not stamped.
        stream: of the copies, where the KV caches lie on a GPU.
        epoch: the life of the cache that the pool belongs to.
    """

    layers: tuple[torch.Tensor, ...]
    pool: tuple[torch.Tensor, ...]
    page_size: int
    pages_per_block: int
    stamps: torch.Tensor | None
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
            self._copy_parts(block_ids, pages, to_pool=to_pool)
            return
        with torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            self._copy_parts(block_ids, pages, to_pool=to_pool)
        self.stream.synchronize()

    def _copy_parts(self, block_ids: NDArray[np.int64], pages: NDArray[np.int64], *, to_pool: bool) -> None:
        step = self.pages_per_block
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for part in range(step):
            of_part = pages[part::step]
            kept = of_part >= 0
            blocks, of_part = block_ids[kept], of_part[kept]
            if not len(blocks):
                continue
            runs = find_runs(blocks, of_part, step)
            for layer, pool in zip(self.layers, self.pool, strict=True):
                ours = layer[:, part]
                if len(runs) > _MANY_RUNS:
                    _copy_by_index(ours, pool, blocks, of_part, to_pool=to_pool)
                    continue
                for block, page, length in runs:
                    in_engine = ours[block : block + length]
                    in_pool = pool[page : page + (length - 1) * step + 1 : step]
                    targets.append(in_pool if to_pool else in_engine)
                    sources.append(in_engine if to_pool else in_pool)
        if targets:
            torch._foreach_copy_(targets, sources)


def _digest(layers: Sequence[torch.Tensor], page: int) -> bytes:
    """Return the digest of one page's bytes in all layers."""
    digest = hashlib.blake2b(digest_size=STAMP_BYTES)
    for layer in layers:
        digest.update(layer[page].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.digest()


def _by_page(layer: torch.Tensor, page_size: int) -> torch.Tensor:
    num_blocks, num_heads, block_size, content = layer.shape
    by_page = layer.view(num_blocks, num_heads, block_size // page_size, page_size, content)
    return by_page.permute(0, 2, 1, 3, 4)


def _with_heads(layer: torch.Tensor, block_size: int) -> torch.Tensor:
    if layer.ndim == 3:
        layer = layer.unsqueeze(1)
    if layer.ndim != 4 or layer.shape[2] != block_size:
        wanted = f"[num_blocks, num_kv_heads, {block_size}, content]"
        raise InvalidRequest(f"a layer's KV cache must be {wanted}, not of shape {tuple(layer.shape)}")
    return layer.view(_INTEGERS[layer.dtype.itemsize])


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
    in_engine = torch.from_numpy(blocks).to(layer.device)
    in_pool = torch.from_numpy(pages).to(pool.device)
    if to_pool:
        pool.index_copy_(0, in_pool, layer.index_select(0, in_engine).to(pool.device))
    else:
        layer.index_copy_(0, in_engine, pool.index_select(0, in_pool).to(layer.device))


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
