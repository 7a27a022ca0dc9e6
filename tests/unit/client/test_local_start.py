"""A cache in this process logs and counts which core it runs on, as a cache actor does."""

import logging

import pytest

from raydix.actors import LocalPrefixCache
from raydix.cache_core.kernels import CORE
from raydix.schemas import CacheConfig, PoolConfig
from raydix.schemas.version import package_version


async def test_the_log_and_the_stats_of_a_local_cache_name_its_core(caplog: pytest.LogCaptureFixture) -> None:
    config = CacheConfig(pool=PoolConfig(num_slots=8, device="cpu"))

    with caplog.at_level(logging.INFO, "raydix"):
        cache = LocalPrefixCache(config)

    stats = await cache.stats()
    await cache.close()
    assert stats.core == CORE
    assert caplog.messages[0] == f"cache ready: raydix {package_version()}, epoch {stats.epoch}, core {CORE}, {config}"
