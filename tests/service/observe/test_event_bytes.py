"""The bytes of slim events: ends add little to them, and nothing in a cache where a match may end at every page."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from raydix.actors.service.cache_service import CacheService
from raydix.cache_core import KVCache, RadixKey
from raydix.schemas import CacheConfig, PackedEvents, SlimEventBatch
from raydix.schemas.events import SLIM_EVENT_KINDS, pack_batch

PAGE, STRIDE, WINDOW, NUM_TURNS = 16, 512, 1024, 60
ENDS = [SLIM_EVENT_KINDS.index("EndStored"), SLIM_EVENT_KINDS.index("EndRemoved")]
POOL = {"num_slots": 32 * 1024}
CACHES: dict[str, dict[str, Any]] = {
    "plain": {"pool": POOL},
    "window": {"sliding_window_size": WINDOW, "pool": POOL | {"num_swa_slots": 24 * 1024}},
    "hybrid": {"kind": "mamba", "pool": POOL | {"num_state_slots": 40}},
}


def without_ends(packed: bytes, batch: SlimEventBatch) -> int:
    """Return the bytes that a batch would have without its events of ends."""
    kept = [(kind, data) for kind, data in batch.split() if SLIM_EVENT_KINDS.index(kind) not in ENDS]
    counts = np.array([len(data) // 8 for _, data in kept], "<i4").tobytes()
    kinds = bytes([SLIM_EVENT_KINDS.index(kind) for kind, _ in kept])
    pages = b"".join([data for _, data in kept])
    plain = SlimEventBatch(batch.epoch, batch.seq, batch.stride_tokens, kinds, counts, pages, batch.load, batch.gap)
    return len(pack_batch(plain)) if kept else 0


@pytest.mark.parametrize("kind", CACHES)
def test_ends_add_less_than_three_tenths_to_the_bytes_of_events(kind: str) -> None:
    fields = {"page_size": PAGE, "events": "slim", "events_stride_tokens": STRIDE}
    service = CacheService(CacheConfig.model_validate(fields | CACHES[kind]), "e" * 32)
    core, feed, random = service.core, service.feeds.feed("device"), Random(kind)
    assert isinstance(core, KVCache)
    talks = [[number] * 700 for number in range(4)] * 4
    has_states, seq, num_bytes, num_without = kind == "hybrid", 0, 0, 0

    def read() -> None:
        nonlocal seq, num_bytes, num_without
        for packed in feed.batches_after(seq).batches:
            (batch,) = PackedEvents((packed,)).unpack()
            assert isinstance(batch, SlimEventBatch)
            seq, num_bytes = batch.seq, num_bytes + len(packed)
            num_without += without_ends(packed, batch)

    for turn in range(NUM_TURNS):
        talk = random.randrange(len(talks))
        new = [random.randrange(50_000) for _ in range(random.randrange(100, 2_000))]
        prompt, answer = talks[talk][:6_000] + new, [7] * random.randrange(50, 500)
        whole, tokens = len(prompt) // PAGE * PAGE, prompt + answer
        stop = len(tokens) // PAGE * PAGE
        lease = core.acquire(str(turn), "s", RadixKey(prompt), len(answer), boundary_state=has_states)
        read()
        core.insert(str(turn), "s", whole, RadixKey(tokens[:whole]), has_states)
        read()
        boundary = stop if lease.boundary_slot is not None else None
        core.insert(str(turn), "s", stop, RadixKey(tokens[whole:stop]), False, boundary)
        read()
        core.release(str(turn), "s")
        read()
        talks[talk] = tokens

    assert core.counters.tokens_reused > 0 and num_bytes > 10_000
    if kind == "plain":
        assert num_bytes == num_without
    else:
        assert num_without < num_bytes < 1.3 * num_without
