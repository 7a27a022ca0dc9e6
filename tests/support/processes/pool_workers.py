"""A small pool with layers, random contents for it, and workers on Ray that write and read it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raydix.actors import PrefixCacheClient
from raydix.schemas import CacheConfig, EvictionConfig, PoolConfig

PAGE, NUM_LAYERS, NUM_HEADS, K_DIM, V_DIM = 4, 3, 2, 8, 4
PROMPT = list(range(1, 11))  # two pages and a half


def config_of(dtype: str, device: str = "cpu", **pool: Any) -> CacheConfig:
    return CacheConfig(
        page_size=PAGE,
        pool=PoolConfig.uniform(
            num_slots=64,
            num_layers=NUM_LAYERS,
            num_kv_heads=NUM_HEADS,
            head_dim=K_DIM,
            v_head_dim=V_DIM,
            dtype=dtype,
            device=device,
            **pool,
        ),
        eviction=EvictionConfig(high_watermark=1.0),
        validate=True,
    )


def random_kv(num_slots: int, dtype: str, seed: int, index_dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Return random bits for K, V and index keys of that width, if any; NaN and infinity included."""
    generator = np.random.default_rng(seed)
    torch_dtype: torch.dtype = getattr(torch, dtype)

    def rows(*of_token: int) -> torch.Tensor:
        shape = (NUM_LAYERS, num_slots, *of_token)
        if not num_slots:
            return torch.empty(shape, dtype=torch_dtype)
        data = generator.integers(0, 256, int(np.prod(shape)) * torch_dtype.itemsize, np.uint8)
        return torch.from_numpy(data).view(torch_dtype).view(shape)

    kv = rows(NUM_HEADS, K_DIM), rows(NUM_HEADS, V_DIM)
    return (*kv, rows(index_dim)) if index_dim else kv


def bits(*tensors: torch.Tensor) -> list[bytes]:
    return [tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]


Workers = tuple[Any, Any]  # one that writes, one that reads


def worker_class() -> Any:
    """Return a local class: it is pickled by value, as Ray's processes cannot import this file."""

    class Worker:
        """A process that maps a cache's pool, and also copies. It returns KV as bytes, which no conversion changes."""

        async def attach(self, cache: Any) -> tuple[bool, bool]:
            self._client = PrefixCacheClient(cache)
            self._pool = await self._client.attach_pool()
            self._copying = await self._client.attach_pool(mapped=False)
            return self._pool.mapped, self._copying.mapped

        async def acquire(self, tokens: list[int]) -> tuple[int, list[int]]:
            self._lease = await self._client.acquire(tokens)
            return self._lease.prefix_len, self._lease.slots.tolist()

        async def write(
            self, k: torch.Tensor, v: torch.Tensor, mapped: bool, index: torch.Tensor | None = None
        ) -> None:
            slots, arrays = self._lease.slots, [k, v] if index is None else [k, v, index]
            if not mapped:
                await self._copying.write_kv(self._lease, slots, *arrays)
                return
            device = self._pool.k[0].device
            for layer in range(len(k)):
                self._pool.write(layer, slots, *(array[layer].to(device) for array in arrays))
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

        async def publish(self, tokens: list[int]) -> int:
            return (await self._lease.insert(tokens)).num_inserted

        async def read(self, num_tokens: int, mapped: bool) -> list[bytes]:
            slots = self._lease.slots[:num_tokens]
            if mapped:
                layers = [self._pool.gather(layer, slots) for layer in range(len(self._pool.k))]
                kv = [torch.stack(rows) for rows in zip(*layers, strict=True)]
            else:
                kv = list(await self._copying.read_kv(self._lease, slots))
            return [tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes() for tensor in kv]

        async def poke(self, slot: int, value: float) -> None:
            self._pool.k[1][slot] = value
            await self.peek(slot)  # which waits for a GPU

        async def peek(self, slot: int) -> float:
            return self._pool.k[1][slot].float().mean().item()

        def mapping(self, epoch: str) -> tuple[int, int]:
            """Return the inode and size of this process's mapping of that epoch's pool."""
            rows = [row.split() for row in Path("/proc/self/maps").read_text().splitlines() if f"raydix-{epoch}" in row]
            (inode,) = {int(row[4]) for row in rows}
            size = sum(int(row[0].split("-")[1], 16) - int(row[0].split("-")[0], 16) for row in rows)
            return inode, size

        def is_lost(self) -> bool:
            return self._pool.lost

        def pid(self) -> int:
            return os.getpid()

        async def detach(self) -> None:
            await self._client.close()

    return Worker


@asynccontextmanager
async def attached(processes: Workers, cache: Any) -> AsyncIterator[Workers]:
    """Attach the workers to a cache, with a session each; afterwards check that the cache is unchanged."""
    assert [await worker.attach.remote(cache) for worker in processes] == [(True, False)] * 2
    yield processes
    for worker in processes:
        await worker.detach.remote()
    async with PrefixCacheClient(cache) as client:
        await client.check_invariants()
        assert (await client.stats()).private_slots == 0
        await client.reset()
