"""A match never reports KV that is not there, for that namespace and that exact token sequence.

Workers compute KV that identifies its tokens, layer by layer, and compare every hit bit by bit, in caches of every kind
that evict, split and reset all the while.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.caches.cache_kinds import TIGHT_STATES, TIGHT_WINDOW, KindUnderTest, radix
from support.caches.cache_under_test import CacheUnderTest, Reached, unchecked
from support.processes.kv_workers import work

from raydix.actors.service.request_handlers import RequestHandlers
from raydix.actors.transport import validation
from raydix.cache_core import KVCache, RadixKey
from raydix.schemas import MatchRequest, MatchResponse

Patch = pytest.MonkeyPatch


async def test_every_hit_reads_the_kv_computed_for_that_very_prefix(cache: CacheUnderTest) -> None:
    reused = await work(cache, num_steps=40)

    assert (reused > 0) == cache.kind.shares


@pytest.mark.parametrize("kind", [TIGHT_WINDOW, TIGHT_STATES], ids=str)
async def test_so_it_is_where_windows_or_states_run_out_before_slots_do(reached: Reached, kind: KindUnderTest) -> None:
    async with reached(kind) as cache:
        assert await work(cache, num_steps=40) > 0


# ---------------------------------------------------------------- planted faults


def a_hit_is_a_page_too_long(patch: Patch) -> None:
    acquire = KVCache.acquire

    def too_long(core: KVCache, lease_id: str, session_id: str, key: RadixKey, *arguments: Any) -> Any:
        lease = acquire(core, lease_id, session_id, key, *arguments)
        lease.prefix_len = min(lease.prefix_len + core.page_size, len(key) // core.page_size * core.page_size)
        return lease

    patch.setattr(KVCache, "acquire", too_long)


def a_probe_promises_a_page_too_many(patch: Patch) -> None:
    match = RequestHandlers._match

    def too_many(handlers: RequestHandlers, session_id: str, request: MatchRequest) -> MatchResponse:
        whole = len(request.tokens) // handlers._core.page_size * handlers._core.page_size
        return match(handlers, session_id, request).model_copy(update={"prefix_len": whole})

    patch.setattr(RequestHandlers, "_match", too_many)


def namespaces_do_not_count(patch: Patch) -> None:
    patch.setattr(validation, "frame_namespace", lambda *parts: None)


def the_order_of_pages_does_not_count(patch: Patch) -> None:
    from_packed = RadixKey.from_packed

    def unordered(data: bytes, width: int, extra_key: str | None = None, arity: int = 0) -> Any:
        return from_packed(b"".join(sorted(data[at : at + 4] for at in range(0, len(data), 4))), 4, extra_key)

    patch.setattr(RadixKey, "from_packed", staticmethod(unordered))


FAULTS = [
    a_hit_is_a_page_too_long,
    a_probe_promises_a_page_too_many,
    namespaces_do_not_count,
    the_order_of_pages_does_not_count,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
async def test_a_hit_that_is_not_real_is_seen(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    cache = unchecked(radix(4))

    with pytest.raises(AssertionError, match=r"is not there|K of layer"):
        await work(cache, num_steps=60)
