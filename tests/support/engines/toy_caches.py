"""Caches in this process for toy engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from support.engines.toy_engine import BLOCK, ToyEngine, toy_kv

from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.actors.client.loop_thread import LoopThread
from raydix.schemas import CacheConfig, CacheStats, LeaseConfig


def toy_config(num_tokens: int = 4096, *, check: bool = True, page_size: int = BLOCK) -> CacheConfig:
    pool = toy_kv().pool_config(num_tokens, check=check)
    return CacheConfig(page_size=page_size, pool=pool, leases=LeaseConfig(), validate=True)


class ToyCaches:
    """The caches of all ranks, on a loop of their own, and engines of them."""

    def __init__(self, num_ranks: int = 1, num_tokens: int = 4096, *, check: bool = True, page_size: int = BLOCK):
        self.loop = LoopThread("toy-caches")
        self.check = check
        config = toy_config(num_tokens, check=check, page_size=page_size)
        self.caches = [self.loop.run(_make(config)) for _ in range(num_ranks)]
        self.engines: list[ToyEngine] = []

    def make_engine(self, **options: object) -> ToyEngine:
        makers: list[Callable[[], PrefixCacheClient]] = [partial(PrefixCacheClient, each) for each in self.caches]
        settings: dict[str, object] = {"check": self.check, **options}
        engine = ToyEngine(makers, loop=self.loop, **settings)  # type: ignore[arg-type]
        self.engines.append(engine)
        return engine

    def stats(self, rank: int = 0) -> CacheStats:
        return self.loop.run(self.caches[rank].stats())

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for cache in self.caches:
            self.loop.run(cache.close())
        self.loop.stop()


async def _make(config: CacheConfig) -> LocalPrefixCache:
    return await LocalPrefixCache(config).open()
