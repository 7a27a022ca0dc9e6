"""Policy "2q" over tiers: a page that a load or a write inserts again comes back, as one does that is computed."""

from __future__ import annotations

import pytest

from raydix.actors.observe.trace import BLOCK, TracedRequest
from raydix.actors.replay.instant_tiers import TierConfigs
from raydix.actors.replay.trace_replay import Replay, index_config, replay
from raydix.schemas import HostConfig

PAGE = 1_000  # it is asked for between scans
NUM_SCANNED = 12  # pages of a scan: more than half of each tier, fewer than its policy remembers


async def replayed(pool: int, policy: str, host: int, host_policy: str) -> Replay:
    """Replay a page three times, with a scan between each two; the tiers hold so many pages."""
    scans = [range(start, start + NUM_SCANNED) for start in (0, 100)]
    pages = [PAGE, *scans[0], PAGE, *scans[1], PAGE]
    trace = [
        TracedRequest(timestamp=number, input_length=BLOCK, output_length=0, hash_ids=[page])
        for number, page in enumerate(pages)
    ]
    tier = HostConfig.model_validate({"num_slots": host * BLOCK, "policy": host_policy})
    return await replay(trace, index_config(pool * BLOCK, policy=policy), TierConfigs(tier))


@pytest.mark.parametrize(("policy", "num_loads"), [("2q", 1), ("lru", 2)])
async def test_a_loaded_page_comes_back_to_the_pool(policy: str, num_loads: int) -> None:
    done = await replayed(8, policy, 64, "lru")

    assert (done.reused[[13, 26]] == BLOCK).all()
    assert done.moved["host"].loaded == num_loads * BLOCK, "then the pool protects it"


@pytest.mark.parametrize(("policy", "is_there"), [("2q", True), ("lru", False)])
async def test_a_written_page_comes_back_to_the_tier(policy: str, is_there: bool) -> None:
    done = await replayed(2, "lru", 8, policy)

    assert done.reused[13] == 0, "the scan has evicted it from both"
    assert (done.reused[26] == BLOCK) == is_there
