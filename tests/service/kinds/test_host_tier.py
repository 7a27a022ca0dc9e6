"""A host tier under workers that compute and check stamped KV: evicted KV comes back, and is the KV of its tokens."""

from __future__ import annotations

import pytest
from support.caches.cache_kinds import TIGHT_STATES, TIGHT_WINDOW, KindUnderTest, bigram, hybrid, mamba, radix, window
from support.caches.cache_under_test import CacheUnderTest
from support.processes.kv_workers import work

MORE = [radix(1), window(2, 4), mamba(2), TIGHT_WINDOW, TIGHT_STATES]
KINDS = [
    *(radix(4, index_head_dim=3), hybrid(4, 8), bigram(4)),
    *(pytest.param(kind, marks=pytest.mark.more, id=str(kind)) for kind in MORE),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_every_hit_reads_the_kv_of_its_tokens_while_pages_move_between_the_tiers(kind: KindUnderTest) -> None:
    above_host = kind.with_host()
    cache = CacheUnderTest.reached("local", above_host.cache_config(), None, above_host)

    await work(cache, num_steps=40)

    stats = await cache.client.stats()
    assert stats.host is not None and stats.host.state == "ready"
    assert 0 < stats.host.tokens_loaded <= stats.tokens_reused
    assert stats.host.tokens_written > 0
    await cache.close()
