"""KV and states with a stamp of the tokens that they were computed from, in place of a model's.

The KV of a token depends on all tokens up to it, as a model's does, on the layer, and on the namespace (another
adapter computes other KV). So a reader of a slot can check that it is the right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch
from support.caches.cache_kinds import NUM_LAYERS, KindUnderTest
from support.caches.cache_under_test import CacheUnderTest

from raydix.actors import AttachedPool, Lease
from raydix.cache_core.pool.kv_pool import ARRAYS


def stamps(tokens: Sequence[int], salt: str = "") -> list[int]:
    """A number for each token that depends on all tokens up to it; exact in float32."""
    digest, row = crc32(salt.encode()), []
    for token in tokens:
        digest = crc32(token.to_bytes(8, "little"), digest)
        row.append(digest % 2**20)
    return row


def stamped_kv(kind: KindUnderTest, tokens: Sequence[int], salt: str = "") -> tuple[torch.Tensor, ...]:
    """K, V and, where a kind has them, index keys of each token in each layer, `[num_layers, n, ...]` each."""
    row = torch.tensor(stamps(tokens, salt), dtype=torch.float32)
    layers = torch.stack([row + layer for layer in range(NUM_LAYERS)])
    kv = torch.stack((layers, -layers), -1)[:, :, None, :], (layers + 0.5)[:, :, None, None]
    return (*kv, (layers + 0.25)[:, :, None].repeat(1, 1, kind.index_head_dim)) if kind.index_head_dim else kv


def filled_kv(kind: KindUnderTest, num_slots: int, value: float) -> list[torch.Tensor]:
    """K, V and, where a kind has them, index keys with one value, `[num_layers, n, ...]` each."""
    return [torch.full_like(array, value) for array in stamped_kv(kind, range(num_slots))]


def stamped_state(tokens: Sequence[int], salt: str = "") -> list[torch.Tensor]:
    """The state after these tokens, in the shapes of kind "mamba"; zeros before the first."""
    last = float(stamps(tokens, salt)[-1]) if tokens else 0.0
    return [torch.full((3,), last), torch.full((2, 2), -last)]


async def compute(
    cache: CacheUnderTest, pool: AttachedPool, lease: Lease, tokens: Sequence[int], start: int, salt: str = ""
) -> None:
    """Do what a model would: write the KV of `tokens[start:]` into the lease's slots, and its state after the last.

    Into the mapped tensors if the pool is mapped, by copying otherwise.
    """
    arrays = [array[:, start:] for array in stamped_kv(cache.kind, tokens, salt)]
    stop = len(tokens)
    if not pool.mapped:
        await pool.write_kv(lease, lease.slots[start:stop], *arrays)
        return
    for layer, kind in enumerate(cache.kind.layer_kinds):
        if kind == "state":
            for tensor, value in zip(pool.state(layer), stamped_state(tokens, salt), strict=True):
                tensor[lease.state_slot] = value
        else:
            rows = (lease.slots if kind == "full" else lease.swa_slots)[start:stop]
            held = rows > 0 if kind == "swa" else slice(None)  # a window may have moved on
            pool.write(layer, rows[held], *(array[layer][held] for array in arrays))


async def check_kv(
    cache: CacheUnderTest, pool: AttachedPool, lease: Lease, tokens: Sequence[int], salt: str = ""
) -> None:
    """The KV in the lease's slots is that of these tokens, bit for bit, in every layer that keeps it."""
    expected, found = stamped_kv(cache.kind, tokens, salt), await pool.read_kv(lease, lease.slots[: len(tokens)])
    for layer, kind in enumerate(cache.kind.layer_kinds):
        if kind != "state":
            held = lease.swa_slots[: len(tokens)] > 0 if kind == "swa" else slice(None)
            for name, array, read in zip(ARRAYS, expected, found, strict=False):
                assert torch.equal(read[layer][held], array[layer][held]), f"{name} of layer {layer}"
            assert len(found) == len(expected)


def check_state(cache: CacheUnderTest, pool: AttachedPool, lease: Lease, tokens: Sequence[int], salt: str = "") -> None:
    """The lease's own state is the one after these tokens; nothing to see where there are no states."""
    for layer, kind in enumerate(cache.kind.layer_kinds):
        if kind == "state":
            for tensor, value in zip(pool.state(layer), stamped_state(tokens, salt), strict=True):
                assert torch.equal(tensor[lease.state_slot].cpu(), value), f"the state of layer {layer}"
