"""Caches in this process for toy engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from support.engines.toy_engine import BLOCK, ToyEngine, toy_kv
from support.tiers.gated_loads import GatedLoads
from support.tiers.settled_disk import tier_of

from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.actors.client.loop_thread import LoopThread
from raydix.actors.tiers.disk.file_calls import FileCalls
from raydix.schemas import CacheConfig, CacheStats, DiskConfig, EvictionConfig, HostConfig, LeaseConfig


def toy_config(
    num_tokens: int = 4096,
    *,
    check: bool = True,
    page_size: int = BLOCK,
    host_tokens: int = 0,
    disk: Path | None = None,
    disk_load_s: float = 60,
    **changed: object,
) -> CacheConfig:
    pool = toy_kv().pool_config(num_tokens, check=check)
    config = CacheConfig(page_size=page_size, pool=pool, leases=LeaseConfig(), validate=True)
    config = CacheConfig.model_validate(config.model_copy(update=changed))
    if disk is not None:
        tier = DiskConfig(path=str(disk), num_slots=4096, direct_io="off", write_mib_s=None, load_timeout_s=disk_load_s)
        return CacheConfig.model_validate(config.model_copy(update={"disk": tier}))
    if not host_tokens:
        return config
    marks = EvictionConfig(high_watermark=0.99, low_watermark=0.98)
    host = HostConfig(num_slots=host_tokens, reserve=0.99, load_timeout_s=60)  # All of the pool is written.
    return CacheConfig.model_validate(config.model_copy(update={"host": host, "eviction": marks}))


class ToyCaches:
    """The caches of all ranks, on a loop of their own, and engines of them.

    Args:
        host_tokens: of a host tier below each cache, whose loads pass the gate in `gates`; 0: there is none.
        disk: a folder for a disk tier below each cache, in a folder of its own; None: there is none.
        disk_load_s: the time limit of the disk's loads.
        calls: of the operating system, for the disks; None: the usual ones.
        changed: other fields of each cache's configuration.
    """

    def __init__(
        self,
        num_ranks: int = 1,
        num_tokens: int = 4096,
        *,
        check: bool = True,
        page_size: int = BLOCK,
        host_tokens: int = 0,
        disk: Path | None = None,
        disk_load_s: float = 60,
        calls: FileCalls | None = None,
        **changed: object,
    ) -> None:
        self.loop = LoopThread("toy-caches")
        self.check = check
        folders = [None if disk is None else disk / f"rank {rank}" for rank in range(num_ranks)]
        self.gates: list[GatedLoads] = []
        self.caches: list[LocalPrefixCache] = []
        for folder in folders:
            if folder is not None:
                folder.mkdir(exist_ok=True)
            config = toy_config(
                num_tokens,
                check=check,
                page_size=page_size,
                host_tokens=host_tokens,
                disk=folder,
                disk_load_s=disk_load_s,
                **changed,
            )
            self.caches.append(self.loop.run(self._make(config, calls)))
        self.engines: list[ToyEngine] = []

    def make_engine(self, **options: object) -> ToyEngine:
        makers: list[Callable[[], PrefixCacheClient]] = [partial(PrefixCacheClient, each) for each in self.caches]
        settings: dict[str, object] = {"check": self.check, **options}
        engine = ToyEngine(makers, loop=self.loop, **settings)  # type: ignore[arg-type]
        self.engines.append(engine)
        return engine

    def stats(self, rank: int = 0) -> CacheStats:
        return self.loop.run(self.caches[rank].stats())

    async def _make(self, config: CacheConfig, calls: FileCalls | None) -> LocalPrefixCache:
        cache = LocalPrefixCache(config)
        if calls is not None:
            tier_of(cache).files.calls = calls
        if config.host is not None:
            self.gates.append(GatedLoads(cache))
        return await cache.open()

    def close(self) -> None:
        for gate in self.gates:
            gate.pass_chunks()
        for engine in self.engines:
            engine.close()
        for cache in self.caches:
            self.loop.run(cache.close())
        self.loop.stop()
