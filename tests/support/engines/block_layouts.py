"""Block layouts of engines' KV caches, and a naive reference of copies between them and a pool.

The reference copies page by page, through bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from raydix.actors.engines.block_copies import BlockCopies
from raydix.cache_core.pool import record_copies

BLOCK = 8
NUM_BLOCKS = 40
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn]

Make = Callable[[torch.dtype], list[torch.Tensor]]


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def heads_first(dtype: torch.dtype) -> list[torch.Tensor]:
    return [random_bytes(NUM_BLOCKS, 2, BLOCK, 6 * dtype.itemsize).view(dtype) for _ in range(3)]


def tokens_first(dtype: torch.dtype) -> list[torch.Tensor]:
    """Storage [block, token, head, content]."""
    layers = [random_bytes(NUM_BLOCKS, BLOCK, 2, 6 * dtype.itemsize).view(dtype) for _ in range(3)]
    return [each.permute(0, 2, 1, 3) for each in layers]


def blocks_outermost(dtype: torch.dtype) -> list[torch.Tensor]:
    """All layers of a block side by side in one storage."""
    storage = random_bytes(NUM_BLOCKS, 3, BLOCK, 2, 6 * dtype.itemsize).view(dtype)
    return [storage[:, layer].permute(0, 2, 1, 3) for layer in range(3)]


def latent(dtype: torch.dtype) -> list[torch.Tensor]:
    """Layers of multi-head latent attention: no heads, and another content in each."""
    return [random_bytes(NUM_BLOCKS, BLOCK, width * dtype.itemsize).view(dtype) for width in (5, 9)]


def padded(dtype: torch.dtype) -> list[torch.Tensor]:
    """Each content is a part of a wider row."""
    layers = [random_bytes(NUM_BLOCKS, 3, BLOCK, 8 * dtype.itemsize).view(dtype) for _ in range(2)]
    return [each[..., :5] for each in layers]


LAYOUTS = [heads_first, tokens_first, blocks_outermost, latent, padded]


def make_pool(copies: BlockCopies, page_size: int) -> torch.Tensor:
    """The records of the pages of `NUM_BLOCKS` blocks, and of one more."""
    return random_bytes(NUM_BLOCKS * BLOCK // page_size + 1, page_size * sum(copies.slot_bytes))


def as_bytes(values: torch.Tensor) -> bytes:
    return values.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


def parts_of(layer: torch.Tensor, block: int, step: int) -> list[torch.Tensor]:
    """The tokens of each page of a block, `[num_kv_heads, page_size, content]`."""
    of_block = layer[block] if layer.ndim == 4 else layer[block].unsqueeze(0)
    return list(of_block.split(BLOCK // step, dim=1))


def in_logical_order(segment: torch.Tensor, layer: torch.Tensor, page_size: int) -> bytes:
    """The bytes of a page's segment, which lies as the engine's block does, as those of `[heads, tokens, content]`."""
    heads = 1 if layer.ndim == 3 else layer.shape[1]
    if layer.ndim == 4 and layer.stride(2) > layer.stride(1):
        segment = segment.view(page_size, heads, -1).permute(1, 0, 2)
    return as_bytes(segment)


class Naive:
    """What a pool and the engine's blocks must hold."""

    def __init__(self, layers: Sequence[torch.Tensor], pool: torch.Tensor, page_size: int) -> None:
        self.step = BLOCK // page_size
        self.blocks = [
            [[as_bytes(part) for part in parts_of(layer, block, self.step)] for block in range(NUM_BLOCKS)]
            for layer in (each.cpu() for each in layers)
        ]
        self.pages = []
        start = 0
        for layer in layers:
            end = start + parts_of(layer, 0, self.step)[0].nbytes
            self.pages.append([in_logical_order(record[start:end], layer, page_size) for record in pool])
            start = end

    def save(self, blocks: NDArray[np.int64], pages: NDArray[np.int64]) -> None:
        for of_blocks, of_pages in zip(self.blocks, self.pages, strict=True):
            for at, page in enumerate(pages.tolist()):
                if page >= 0:
                    of_pages[page] = of_blocks[blocks[at // self.step]][at % self.step]

    def load(self, pages: NDArray[np.int64], blocks: NDArray[np.int64]) -> None:
        for of_blocks, of_pages in zip(self.blocks, self.pages, strict=True):
            for at, page in enumerate(pages.tolist()):
                if page >= 0:
                    of_blocks[blocks[at // self.step]][at % self.step] = of_pages[page]


def check_equal(layers: Sequence[torch.Tensor], pool: torch.Tensor, page_size: int, naive: Naive) -> None:
    now = Naive(layers, pool, page_size)
    assert now.blocks == naive.blocks
    assert now.pages == naive.pages


def draw(rng: random.Random, step: int, how: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Different blocks, and different pages for them."""
    number = rng.randrange(1, NUM_BLOCKS)
    blocks, pages = np.arange(NUM_BLOCKS), np.arange(NUM_BLOCKS * step)
    if how == "runs":
        first = rng.randrange(NUM_BLOCKS - number + 1)
        blocks, pages = blocks[first : first + number], np.roll(pages, -rng.randrange(NUM_BLOCKS) * step)
    else:
        rng.shuffle(blocks)
        rng.shuffle(pages)
    pages = pages[: number * step].copy()
    if rng.random() < 0.5:
        pages[[rng.random() < 0.3 for _ in pages]] = -1
    return blocks[:number].astype(np.int64), pages.astype(np.int64)


def check_random_copies(
    patch: pytest.MonkeyPatch, make: Make, dtype: torch.dtype, page_size: int, device: torch.device
) -> None:
    """Save and load random blocks between KV caches on a device and a pool in host memory, as the reference does."""
    torch.manual_seed(0)
    rng = random.Random(0)
    with device:
        layers = make(dtype)
    copies = BlockCopies(layers, BLOCK)
    pool = make_pool(copies, page_size)
    target = copies.attach(pool, page_size)
    naive = Naive(layers, pool, page_size)
    assert layers[0].device == pool.device or target.copies.staging is not None
    for number in range(8):
        blocks, pages = draw(rng, BLOCK // page_size, rng.choice(["runs", "fragments"]))
        patch.setattr(record_copies, "_MANY_RUNS", rng.choice([1, 4, 64]))
        if number % 2:
            target.load(pages, blocks)
            naive.load(pages, blocks)
        else:
            target.save(blocks, pages)
            naive.save(blocks, pages)
        check_equal(layers, pool, page_size, naive)
