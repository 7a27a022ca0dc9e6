"""A cache with 100,000 pages on its disk is killed with -9, without any eviction, and its successor has all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.tiers.large_disk import PAGE, config_of, disk_of, fill, prompts_of

from raydix.actors import LocalPrefixCache
from raydix.cache_core.tiers.disk_spaces import DiskSpace

pytestmark = pytest.mark.more

NUM_PAGES = 100_000
LONGEST_RUN = 93  # pages of the end of a prompt, which become one node
AT_ONCE = 32  # pages that a slice builds, and the rest of a run
WAIT_S = 300  # more than a busy machine needs


async def test_a_killed_cache_of_many_pages_is_warm_again_and_serves_meanwhile(tmp_path: Path) -> None:
    assert fill(tmp_path, NUM_PAGES) == {"tokens_evicted": 0, "pages": NUM_PAGES}

    prompts, built, sizes = prompts_of(NUM_PAGES), list[int](), list[int]()
    async with LocalPrefixCache(config_of(tmp_path, NUM_PAGES)) as cache, asyncio.timeout(WAIT_S):
        disk = disk_of(cache)
        build = disk.spaces.build

        def noted_build(num_pages: int) -> list[DiskSpace]:
            before = disk.tier.cache.total_size()
            done = build(num_pages)
            built.append((disk.tier.cache.total_size() - before) // PAGE)
            return done

        disk.spaces.build = noted_build  # type: ignore[method-assign]
        await cache.stats()
        while disk.tier.cache.total_size() < NUM_PAGES * PAGE:
            async with cache.acquire(prompts[0]) as lease:
                sizes.append(lease.prefix_len)
            await asyncio.sleep(0)
        assert sum(built) == NUM_PAGES and max(built) < AT_ONCE + LONGEST_RUN, "the loop is held by one slice"
        assert sizes[0] == 0 < sizes[-1] and sizes == sorted(sizes), "requests are served while the tree is built"

        for prompt in prompts[:: len(prompts) // 20]:
            async with cache.acquire(prompt) as lease:
                assert lease.prefix_len == len(prompt)
        await cache.check_invariants()
