"""`Laboratory`: the models, caches and vLLM engines of one test."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
import torch
from ray.exceptions import RayError
from support.engines.checkpoints import make_config, save_model
from support.engines.engine_process import EngineProcess
from support.waiting import wait_until

from raydix.actors import PrefixCacheClient, start_cache
from raydix.actors.client.prefix_cache_client import SyncClient
from raydix.actors.engines.block_copies import STAMP_BYTES
from raydix.schemas import CacheConfig, CacheStats, DiskConfig, PoolConfig

BLOCK = 32
PATIENT = {"lookup_timeout_ms": 60_000.0, "load_timeout_ms": 60_000.0}  # other programs may use the machine
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e5m2": 1, "fp8_e4m3": 1, "fp8": 1}


def slot_bytes(kind: str, dtype: str = "float32", ranks: int = 1, **more: Any) -> tuple[int, ...]:
    """Bytes of a token in each layer of a small model on one rank."""
    config = make_config(kind, **more)
    if kind == "deepseek":
        return ((config.kv_lora_rank + config.qk_rope_head_dim) * _ITEM_BYTES[dtype],) * config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = max(1, config.num_key_value_heads // ranks)
    return (heads * 2 * head_dim * _ITEM_BYTES[dtype],) * config.num_hidden_layers


class Laboratory:
    """Makes the parts of a test, and ends them.

    Attributes:
        folder: for models and logs.
    """

    def __init__(self, ray_address: str, folder: Path) -> None:
        self.ray_address = ray_address
        self.folder = folder
        self.caches: dict[str, Any] = {}
        self.clients: dict[str, SyncClient] = {}
        self.engines: list[EngineProcess] = []

    def save_model(self, kind: str, *, seed: int = 0, **more: Any) -> Path:
        folder = self.folder / f"{kind}-{seed}-{len(more)}"
        return folder if folder.exists() else save_model(kind, folder, seed=seed, **more)

    def start_cache(
        self,
        layers: tuple[int, ...],
        num_tokens: int = 400 * BLOCK,
        *,
        page_size: int = BLOCK,
        check: bool = True,
        name: str | None = None,
        fields: dict[str, Any] | None = None,
        **disk: Any,
    ) -> str:
        """Start a cache for layers of so many bytes a token; return its name.

        Args:
            fields: others of its configuration.
            disk: fields of a disk tier, which lies in this test's folder; none: there is no disk.
        """
        name = name or f"kv-{uuid4().hex[:8]}"
        slot_bytes = sum(layers) + (STAMP_BYTES if check else 0)
        pool = PoolConfig(num_slots=num_tokens, format="opaque", slot_bytes=slot_bytes, device="cpu")
        tier = DiskConfig(path=str(self.folder), direct_io="off", write_mib_s=None, **disk) if disk else None
        config = CacheConfig(page_size=page_size, pool=pool, disk=tier, **(fields or {}))
        self.caches[name] = start_cache(config, name=name)
        return name

    def client(self, cache: str) -> SyncClient:
        if cache not in self.clients:
            self.clients[cache] = PrefixCacheClient(self.caches[cache], owner="test").sync
        return self.clients[cache]

    def stats(self, cache: str) -> CacheStats:
        return self.client(cache).stats()

    def start_engine(
        self, model: Path, cache: str | None, *, transfer: dict[str, Any] | None = None, **options: Any
    ) -> EngineProcess:
        """Start an engine; it is not ready yet. Options that are settings of the connector go there."""
        settings = {**PATIENT, "check": True, **options.pop("settings", {})}
        connector = None if cache is None else {"cache": cache, "ray_address": self.ray_address, **settings}
        log = self.folder / f"engine-{len(self.engines)}.log"
        engine = EngineProcess(model, connector, log, transfer=transfer, **options)
        self.engines.append(engine)
        return engine

    def wait_until_free(self, cache: str, seconds: float = 60) -> None:
        """Wait until no lease is open, and check the cache's rules."""
        wait_until(lambda: self.stats(cache).open_leases == 0, seconds)
        assert self.stats(cache).private_slots == 0
        self.client(cache).check_invariants()

    def wait_until_kept(self, cache: str, seconds: float = 60) -> None:
        """Wait until no lease is open, and the disk has all KV that is due."""
        self.wait_until_free(cache, seconds)
        wait_until(lambda: self._is_disk_idle(cache), seconds)

    def kill_cache(self, cache: str, seconds: float = 60) -> None:
        """Kill a cache with -9, and wait until Ray has restarted it, with its disk."""
        pid = self.pid_of(cache)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self.pid_of(cache) not in (0, pid), seconds)
        self.stats(cache)  # The disk is opened with the first session.
        wait_until(lambda: self._is_disk_idle(cache), seconds)

    def _is_disk_idle(self, cache: str) -> bool:
        """Whether the disk is open, and nothing is written or read again."""

        def is_idle(actor: Any) -> bool:  # It is sent to the actor, which cannot import this module.
            disk = actor._host.service.disk
            return bool(disk.state == "ready" and disk.writes.is_idle and not disk.files.tasks)

        return bool(ray.get(self.caches[cache].__ray_call__.remote(is_idle)))

    def pages(self, cache: str) -> torch.Tensor:
        """Return the mapped records of the cache's pages."""
        client = self.client(cache)
        return client.run(client.client.attach_pool(mapped=True)).pages

    def shuffle_pages(self, cache: str) -> None:
        """Give each page the KV of the page before it."""
        pages = self.pages(cache)
        pages[:] = pages.roll(1, 0)

    def pid_of(self, cache: str) -> int:
        """The cache's process; 0 while it restarts."""
        try:
            handle = ray.get(self.caches[cache].pool_handle.remote())
        except RayError:
            return 0
        return int(handle.path.split("/")[2])

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for client in self.clients.values():
            client.close()
        for cache in self.caches.values():
            ray.kill(cache)
        for model in self.folder.glob("*/model*.safetensors"):
            os.unlink(model)


def prompt(length: int, seed: int = 0) -> list[int]:
    import random

    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(length)]
