"""Records lie one after the other in one allocation; with `validate`, freed and overwritten records are found."""

from __future__ import annotations

import random

import pytest
import torch
from support.caches.pool_layers import layer_shapes
from support.tiers.pool_pages import layout_of

from raydix.actors.memory.pool_shapes import layers_of, pool_below, pool_of, records_of
from raydix.actors.service.core_factory import build_core
from raydix.cache_core import KVCache, RadixKey, RecordLayout, RecordPool
from raydix.cache_core.errors import ContentError
from raydix.cache_core.tiers.page_records import PageRecords
from raydix.schemas import CacheConfig, EvictionConfig, PoolConfig

PAGE = 2


def test_random_records_share_no_byte_and_fill_the_allocation() -> None:
    rng = random.Random(0)
    for _ in range(50):
        page = rng.randrange(1, 5)
        layout = RecordLayout(
            num_slots=page * rng.randrange(1, 9),
            page_size=page,
            slot_bytes=rng.randrange(1, 40),
            num_swa_slots=page * rng.randrange(1, 9),
            swa_slot_bytes=rng.choice([0, rng.randrange(1, 40)]),
            num_state_slots=rng.randrange(1, 5),
            state_bytes=rng.choice([0, rng.randrange(1, 400)]),
        )
        pool = RecordPool(layout)
        kinds = [kind for kind in (pool.pages, pool.windows, pool.states) if kind.numel()]
        for number, kind in enumerate(kinds, 1):
            kind += number

        assert pool.pages.shape == (layout.num_slots // page + 1, page * layout.slot_bytes)
        assert [set(kind.unique().tolist()) for kind in kinds] == [{number} for number in range(1, len(kinds) + 1)]
        assert int((pool.storage > 0).sum()) == sum(kind.numel() for kind in kinds)
        assert all(kind.data_ptr() % 64 == pool.storage.data_ptr() % 64 for kind in kinds)
        assert pool.storage.numel() == layout.num_bytes


def test_storage_that_is_too_small_is_refused() -> None:
    layout = RecordLayout(num_slots=8, page_size=2, slot_bytes=100)
    with pytest.raises(ValueError, match="at least"):
        RecordPool(layout, storage=torch.zeros(layout.num_bytes - 1, dtype=torch.uint8))


def checked_cache() -> tuple[KVCache, RecordPool]:
    """A checked cache of eight pages, with windows and states."""
    records = {"slot_bytes": 3, "swa_slot_bytes": 5, "num_swa_slots": 12, "state_bytes": 7, "num_state_slots": 3}
    config = CacheConfig(
        kind="mamba",
        page_size=PAGE,
        sliding_window_size=2,
        pool=PoolConfig(num_slots=16, format="opaque", device="cpu", **records),
        eviction=EvictionConfig(high_watermark=1.0),
        validate=True,
    )
    pool = RecordPool(records_of(config))
    core = build_core(config, pool, lambda: None)[0]
    assert isinstance(core, KVCache)
    return core, pool


def test_free_records_are_poisoned_but_for_those_of_the_padding() -> None:
    _, pool = checked_cache()

    for kind in (pool.pages, pool.windows, pool.states):
        assert (kind[1:] == 255).all()
        assert not kind[0].any()


@pytest.mark.parametrize("kind", ["pages", "windows", "states"])
def test_a_published_record_that_is_overwritten_is_found(kind: str) -> None:
    cache, pool = checked_cache()
    key = RadixKey([1, 2, 3, 4])
    lease = cache.acquire("l", "s", key)
    assert lease.state_slot is not None
    for records in (pool.pages, pool.windows):
        records[records == 255] = 1
    pool.states[lease.state_slot] = 1
    page, half = int(lease.starts[1]) // PAGE, int(cache.swa_starts(lease)[1]) // PAGE
    cache.insert("l", "s", 4, key, publish_state=True)
    cache.release("l", "s")
    again = cache.acquire("m", "s", RadixKey([1, 2, 3, 4, 5]))
    assert len(again.starts) == 3
    assert again.state_slot is not None
    assert pool.states[again.state_slot].tolist() == [1] * 7
    cache.release("m", "s")

    state = next(row for row in range(1, 4) if pool.states[row, 0] == 1)
    getattr(pool, kind)[{"pages": page, "windows": half, "states": state}[kind], 2] ^= 1

    with pytest.raises(ContentError, match="its record"):
        cache.acquire("n", "s", RadixKey([1, 2, 3, 4, 5]))


LAYERED = {  # fields of a pool, and what else its cache needs
    "attention": ({"layers": layer_shapes(("full",) * 3, 2)}, {}),
    "latent": ({"layers": layer_shapes(("full",) * 2, 1, 9, 0)}, {}),
    "shapes": ({"layers": (*layer_shapes(("full",), 2), *layer_shapes(("full",), 1, 8, 3, 3))}, {}),
    "windows": ({"layers": layer_shapes(("swa", "full", "swa"), 2)}, {"sliding_window_size": 4}),
    "windows alone": ({"layers": layer_shapes(("swa", "swa"), 2)}, {"sliding_window_size": 4}),
    "states": (
        {
            "layers": layer_shapes(("state", "full", "state"), 2, state_shapes=((3, 2), (64,), (7,))),
            "num_state_slots": 5,
        },
        {"kind": "mamba"},
    ),
}


@pytest.mark.parametrize("name", LAYERED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_the_pool_below_a_cache_takes_its_records_and_names_their_parts(name: str, dtype: str) -> None:
    fields, more = LAYERED[name]
    pool = {"num_slots": 16, "dtype": dtype, "device": "cpu", **fields}
    config = CacheConfig.model_validate({"page_size": PAGE, "pool": pool, **more})
    numbers = (32, 8 if "sliding_window_size" in more else None, 3 if "kind" in more else 0)

    below = config.model_copy(update={"pool": pool_below(config, *numbers)})
    again = config.model_copy(update={"pool": pool_below(below, *numbers)})

    CacheConfig.model_validate(below.model_dump())
    wanted = layout_of(PageRecords(pool_of(layers_of(config))), numbers[0], numbers[1] or 0, numbers[2])
    assert records_of(below) == records_of(again) == wanted
    assert below.record_digest() == again.record_digest()
    tables = (below.pool.segments, below.pool.swa_segments, below.pool.state_segments)
    layers = [segment.layer for table in tables for segment in table]
    assert set(layers) == set(range(len(config.pool.layers)))


def test_pools_below_with_records_of_one_size_but_other_parts_have_other_digests() -> None:
    digests = set()
    for heads, dim, dtype in ((2, 4, "bfloat16"), (4, 2, "bfloat16"), (2, 4, "float16"), (1, 4, "float32")):
        pool = PoolConfig.uniform(num_slots=16, num_layers=2, num_kv_heads=heads, head_dim=dim, dtype=dtype)  # type: ignore[arg-type]
        config = CacheConfig(page_size=PAGE, pool=pool)
        below = config.model_copy(update={"pool": pool_below(config, 32)})
        assert below.pool.slot_bytes == 64
        digests.add(below.record_digest())
    assert len(digests) == 4


def test_the_pool_below_an_index_only_cache_is_index_only() -> None:
    config = CacheConfig(kind="mamba", pool=PoolConfig(num_slots=16, num_state_slots=2))

    assert pool_below(config, 64, num_state_slots=5) == PoolConfig(num_slots=64, num_state_slots=5, device="cpu")
