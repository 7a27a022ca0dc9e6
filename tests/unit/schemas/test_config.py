"""Configuration: errors with their reasons, and equal digests only for equal configurations."""

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from raydix.actors.service.config_difference import config_difference
from raydix.schemas import (
    CacheConfig,
    DiskConfig,
    EvictionConfig,
    GhostConfig,
    HostConfig,
    LayerShape,
    LeaseConfig,
    MetricsConfig,
    PoolConfig,
    Segment,
    TenantConfig,
)
from raydix.schemas.protocol import PROTOCOL

POOL = PoolConfig.uniform(num_slots=64, num_layers=2, num_kv_heads=3, head_dim=4)
CONFIG = CacheConfig(page_size=4, pool=POOL)
FULL: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 4}
STATE: dict[str, Any] = {"kind": "state", "state_shapes": ((3,),)}
UNLIKE: dict[str, Any] = {"num_slots": 8, "layers": (FULL, FULL | {"num_kv_heads": 2})}
OPAQUE: dict[str, Any] = {"num_slots": 8, "format": "opaque"}
INDEXED: dict[str, Any] = {"num_slots": 8, "layers": (FULL | {"index_head_dim": 5},)}


def one(**fields: Any) -> dict[str, Any]:
    """The fields of a pool with one layer."""
    return {"num_slots": 8, "layers": [fields]}


def segments(*sizes: int) -> tuple[Segment, ...]:
    return tuple(
        Segment.at(sum(sizes[:layer]), name=f"layer {layer}", layer=layer, dtype="uint8", shape=(size,))
        for layer, size in enumerate(sizes)
    )


def test_the_bytes_of_records_follow_from_their_segments() -> None:
    pool = PoolConfig(**OPAQUE, segments=segments(3, 5), state_segments=segments(7), num_state_slots=2)

    assert (pool.slot_bytes, pool.swa_slot_bytes, pool.state_bytes) == (8, 0, 7)
    assert (
        PoolConfig.model_validate(pool.model_dump()) == PoolConfig.model_validate_json(pool.model_dump_json()) == pool
    )
    assert "layer 1" not in repr(pool)  # a log line has no table of segments


def test_records_of_other_segments_or_pages_have_other_digests() -> None:
    configs = [
        CacheConfig(page_size=page, pool=PoolConfig(**OPAQUE, segments=segments(*sizes)))
        for page, sizes in ((4, (3, 5)), (4, (5, 3)), (4, (3, 6)), (2, (3, 5)))
    ]
    more = configs[0].model_copy(update={"pool": configs[0].pool.model_copy(update={"num_slots": 16})})

    assert len({config.record_digest() for config in configs}) == len(configs)
    assert more.record_digest() == configs[0].record_digest()
    assert more.digest() != configs[0].digest()


@pytest.mark.parametrize(
    ("pool", "fields", "message"),
    [
        ({}, {}, "needs slot_bytes, or segments"),
        ({"slot_bytes": 3, "layers": (FULL,)}, {}, "layers is for pools with layers"),
        ({"slot_bytes": 3, "segments": segments(4)}, {}, "slot_bytes must be 4, the bytes of segments, not 3"),
        ({"segments": segments(3, 5)[1:]}, {}, "'layer 1' must have the offset 0, not 3"),
        ({"segments": ({"name": "a"},)}, {}, "segments.0.layer"),
        ({"segments": 7}, {}, "segments"),
        ({"slot_bytes": 3, "state_bytes": 3}, {}, r"needs state_bytes \(or state_segments\) and num_state_slots"),
        ({"slot_bytes": 3, "num_swa_slots": 8}, {"sliding_window_size": 4}, "needs swa_slot_bytes"),
        ({"slot_bytes": 3, "swa_slot_bytes": 3}, {}, "needs swa_slot_bytes and sliding_window_size"),
        ({"slot_bytes": 3}, {"sliding_window_size": 4}, "needs swa_slot_bytes and sliding_window_size"),
        ({"slot_bytes": 3}, {"kind": "slots", "max_seq_len": 8}, "not 'slots': its sequences are not whole pages"),
        ({"format": "layers", "slot_bytes": 3}, {}, "slot_bytes is for format='opaque'"),
    ],
)
def test_records_that_do_not_fit_together_are_refused(
    pool: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        CacheConfig(pool=PoolConfig(**{**OPAQUE, **pool}), **fields)


def test_a_segment_has_the_bytes_of_its_shape() -> None:
    found = Segment.at(6, name="a", layer=1, dtype="bfloat16", shape=(2, 3))

    assert (found.bytes, str(found)) == (12, "a at 6: (2, 3) bfloat16")
    with pytest.raises(ValidationError, match=r"bytes must be 12, those of shape \(2, 3\) in bfloat16, not 6"):
        Segment(name="a", layer=0, dtype="bfloat16", shape=(2, 3), bytes=6, offset=0)
    with pytest.raises(ValidationError, match="dtype"):
        Segment.at(0, name="a", layer=0, dtype="int4", shape=(2,))


def test_defaults_are_those_of_the_design() -> None:
    config = CacheConfig(pool=PoolConfig(num_slots=8))

    assert (config.kind, config.page_size, config.fingerprint, config.validate) == ("radix", 1, "", False)
    assert (config.pool.layers, config.pool.dtype, config.pool.device) == ((), "bfloat16", "auto")
    assert (config.eviction.policy, config.eviction.high_watermark, config.eviction.low_watermark) == ("lru", 0.9, 0.8)
    assert config.leases.acquire_timeout_s == 30


@pytest.mark.parametrize(
    ("model", "fields", "reason"),
    [
        (PoolConfig, {"num_slots": 0}, "num_slots"),
        (PoolConfig, {"num_slots": -1}, "num_slots"),
        (PoolConfig, {"num_slots": 2**31}, "num_slots"),
        (PoolConfig, {"num_slots": 1.5}, "num_slots"),
        (PoolConfig, {}, "num_slots"),
        (PoolConfig, one(), "num_kv_heads and head_dim of at least 1"),
        (PoolConfig, one(num_kv_heads=1), "num_kv_heads and head_dim of at least 1"),
        (PoolConfig, one(head_dim=1), "num_kv_heads and head_dim of at least 1"),
        (PoolConfig, one(**FULL, kind="linear"), r"layers\.0\.kind"),
        (PoolConfig, one(**FULL, v_head_dim=-1), r"layers\.0\.v_head_dim"),
        (PoolConfig, one(num_kv_heads=1, head_dim=1.5), r"layers\.0\.head_dim"),
        (PoolConfig, one(**FULL, index_head_dim=-1), r"layers\.0\.index_head_dim"),
        (PoolConfig, one(**FULL, heads=2), r"layers\.0\.heads"),
        (PoolConfig, one(**FULL, count=0), r"layers\.0\.count"),
        (PoolConfig, one(**FULL, count=4097), r"layers\.0\.count"),
        (PoolConfig, one(**FULL, state_shapes=((3,),)), "state_shapes is for layers of kind 'state': leave it out"),
        (PoolConfig, {"num_slots": 8, "layers": (FULL | {"count": 3000},) * 2}, "at most 4,096 layers, not 6,000"),
        (PoolConfig, {"num_slots": 8, "layers": (STATE,)}, "needs num_state_slots"),
        (PoolConfig, one(kind="state") | {"num_state_slots": 2}, "a state layer needs state_shapes"),
        (PoolConfig, one(**STATE, num_kv_heads=1) | {"num_state_slots": 2}, "leave out num_kv_heads"),
        (PoolConfig, one(**STATE, v_head_dim=3) | {"num_state_slots": 2}, "leave out v_head_dim"),
        (PoolConfig, one(**STATE, index_head_dim=3) | {"num_state_slots": 2}, "leave out index_head_dim"),
        (PoolConfig, one(kind="state", state_shapes=((-3,),)), "state_shapes"),
        (PoolConfig, one(kind="state", state_shapes=((4, 0),)), "state_shapes"),
        (
            PoolConfig,
            {"num_slots": 8, "num_layers": 2},
            r"num_layers is a layer's: use PoolConfig.uniform\(...\)",
        ),
        (PoolConfig, {"num_slots": 8, "kv_shapes": ((1, 2, 2),)}, "kv_shapes is a layer's"),
        (CacheConfig, {"pool": UNLIKE, "kind": "slots", "max_seq_len": 8}, "layers that differ is for .* not 'slots'"),
        (CacheConfig, {"pool": INDEXED, "kind": "chunk"}, "index_head_dim of pool.layers is for kinds .* not 'chunk'"),
        (CacheConfig, {"pool": INDEXED, "kind": "trie"}, "index_head_dim of pool.layers is for kinds .* not 'trie'"),
        (CacheConfig, {"pool": INDEXED, "kind": "slots", "max_seq_len": 8}, "index_head_dim of pool.layers is for"),
        (CacheConfig, {"pool": one(**FULL, kind="swa")}, "'swa' layers needs sliding_window_size"),
        (PoolConfig, {"num_slots": 8, "dtype": "int4"}, "dtype"),
        (PoolConfig, {"num_slots": 8, "device": "gpu"}, "device"),
        (PoolConfig, {"num_slots": 8, "device": "cuda:x"}, "device"),
        (PoolConfig, {"num_slots": 8, "device": "cuda:0 "}, "device"),
        (PoolConfig, {"num_slots": 8, "device": "cuda:05"}, "device"),
        (PoolConfig, {"num_slots": 8, "device": "cuda:128"}, "device"),
        (PoolConfig, {"num_slots": 8, "device": "cuda:99999999999"}, "device"),
        (PoolConfig, {"num_slots": 8, "layers": 2}, "layers"),
        (EvictionConfig, {"high_watermark": 0.5, "low_watermark": 0.6}, r"low_watermark \(0.6\) must be below"),
        (EvictionConfig, {"high_watermark": 0.5, "low_watermark": 0.5}, "must be below"),
        (EvictionConfig, {"high_watermark": 0.7}, "must be below"),
        (EvictionConfig, {"high_watermark": 1.1}, "high_watermark"),
        (EvictionConfig, {"high_watermark": 0}, "high_watermark"),
        (EvictionConfig, {"low_watermark": -0.1}, "low_watermark"),
        (EvictionConfig, {"high_watermark": float("nan")}, "high_watermark"),
        (EvictionConfig, {"low_watermark": float("nan")}, "low_watermark"),
        (EvictionConfig, {"slice_ms": 0}, "slice_ms"),
        (EvictionConfig, {"slice_ms": float("inf")}, "slice_ms"),
        (EvictionConfig, {"policy": "random"}, "policy"),
        (LeaseConfig, {"acquire_timeout_s": -1}, "acquire_timeout_s"),
        (LeaseConfig, {"acquire_timeout_s": float("inf")}, "acquire_timeout_s"),
        (LeaseConfig, {"max_waiters": -1}, "max_waiters"),
        (CacheConfig, {}, "pool"),
        (CacheConfig, {"pool": POOL, "page_size": 0}, "page_size"),
        (CacheConfig, {"pool": POOL, "page_size": 5}, r"num_slots \(64\) must be a multiple of page_size \(5\)"),
        (CacheConfig, {"pool": POOL, "page_size": 128}, "multiple of page_size"),
        (CacheConfig, {"pool": POOL, "kind": "tree"}, "kind"),
        (CacheConfig, {"pool": POOL, "kind": "slots"}, "max_seq_len"),
        (CacheConfig, {"pool": POOL, "max_seq_len": 8}, "no other kind takes it"),
        (CacheConfig, {"pool": POOL, "kind": "slots", "max_seq_len": 0}, "max_seq_len"),
        (CacheConfig, {"pool": POOL, "kind": "slots", "max_seq_len": 9}, r"num_slots \(64\) must be a multiple of max"),
        (CacheConfig, {"pool": POOL, "kind": "slots", "max_seq_len": 128}, "multiple of max_seq_len"),
        (CacheConfig, {"pool": POOL, "kind": "slots", "max_seq_len": 8, "page_size": 16}, "multiple of page_size"),
        (CacheConfig, {"pool": POOL, "kind": "slots", "max_seq_len": 8, "bigram": True}, "bigram"),
        (CacheConfig, {"pool": POOL, "kind": "slots", "max_seq_len": 8, "events": True}, "events"),
        (CacheConfig, {"pool": POOL, "kind": "slots", "max_seq_len": 8, "sliding_window_size": 4}, "sliding_window"),
        (
            CacheConfig,
            {"pool": {"num_slots": 64, "num_state_slots": 2}, "kind": "slots", "max_seq_len": 8},
            "num_state_slots",
        ),
        (
            CacheConfig,
            {"pool": {"num_slots": 64, "num_state_slots": 2}, "kind": "mamba", "bigram": True},
            "bigram is for kinds .* not 'mamba': it has a place for each token",
        ),
        (
            CacheConfig,
            {"pool": POOL, "kind": "trie", "eviction": {"policy": "lfu"}},
            "not 'trie': it evicts by 'lru'",
        ),
        (
            CacheConfig,
            {"pool": POOL, "kind": "slots", "max_seq_len": 8, "eviction": {"policy": "lfu"}},
            "it evicts by 'lru' only",
        ),
        (
            CacheConfig,
            {"pool": POOL, "kind": "chunk", "eviction": {"policy": "mru"}},
            "not 'chunk': it evicts by 'lru'",
        ),
        (TenantConfig, {"floor_slots": 8}, "name"),
        (TenantConfig, {"name": ""}, "name"),
        (TenantConfig, {"name": "a", "floor_slots": -1}, "floor_slots"),
        (TenantConfig, {"name": "a", "cap_slots": 0}, "cap_slots"),
        (TenantConfig, {"name": "a", "floor_slots": 9, "cap_slots": 8}, r"floor_slots \(9\) must not be above cap"),
        (TenantConfig, {"name": "a", "extra_key": "x" * 5000}, "extra_key has 5000 characters"),
        (TenantConfig, {"name": "a", "tokens": 8}, "tokens"),
        (CacheConfig, {"pool": POOL, "kind": "trie", "tenants": [{"name": "a"}]}, "not 'trie'"),
        (CacheConfig, {"pool": POOL, "kind": "chunk", "tenants": [{"name": "a"}]}, "not 'chunk'"),
        (
            CacheConfig,
            {"pool": POOL, "kind": "slots", "max_seq_len": 8, "tenants": [{"name": "a"}]},
            "tenants is for kinds",
        ),
        (
            CacheConfig,
            {"pool": POOL, "eviction": {"policy": "2q"}, "tenants": [{"name": "a"}]},
            "eviction.policy='2q' takes no tenants: choose another policy, 'lru' say, or leave the tenants out",
        ),
        (
            CacheConfig,
            {"pool": POOL, "tenants": [{"name": "a"}, {"name": "a", "lora_id": "b"}]},
            "2 tenants have the same name: 'a'",
        ),
        (
            CacheConfig,
            {"pool": POOL, "tenants": [{"name": "a", "lora_id": "c"}, {"name": "b", "lora_id": "c"}]},
            "2 tenants have the same namespace",
        ),
        (
            CacheConfig,
            {"pool": POOL, "page_size": 4, "tenants": [{"name": "a", "floor_slots": 6}]},
            r"multiples of page_size \(4\)",
        ),
        (
            CacheConfig,
            {"pool": POOL, "page_size": 4, "tenants": [{"name": "a", "cap_slots": 6}]},
            r"multiples of page_size \(4\)",
        ),
        (CacheConfig, {"pool": POOL, "tenants": [{"name": "a", "cap_slots": 65}]}, r"above num_slots \(64\)"),
        (
            CacheConfig,
            {"pool": POOL, "tenants": [{"name": n, "lora_id": n, "floor_slots": 33} for n in "ab"]},
            "floors add up to 66 slots, but num_slots is 64",
        ),
        (CacheConfig, {"pool": POOL, "events": "thin"}, "events"),
        (
            CacheConfig,
            {"pool": POOL, "page_size": 32, "events": "slim", "events_stride_tokens": 48},
            r"multiple of page_size \(32\), not 48: set it to 64",
        ),
        (CacheConfig, {"pool": POOL, "events": "slim", "events_stride_tokens": 0}, "events_stride_tokens"),
        (CacheConfig, {"pool": POOL, "events": True, "events_stride_tokens": 64}, "for events='slim': leave it out"),
        (CacheConfig, {"pool": POOL, "kind": "trie", "events": "slim"}, "events is for kinds"),
        (CacheConfig, {"pool": POOL, "pagesize": 4}, "pagesize"),
        (CacheConfig, {"pool": {"num_slots": 0}}, "num_slots"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_reason(
    model: type[BaseModel], fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        model(**fields)


def test_true_means_full_events_with_the_digest_that_it_had() -> None:
    full = CacheConfig(page_size=4, pool=POOL, events="full")

    assert CacheConfig(page_size=4, pool=POOL, events=True) == full  # type: ignore[arg-type]
    assert full.events == "full"
    assert full.digest() == CONFIG.model_copy(update={"events": True}).digest() == "300f8733738312cf"
    assert CacheConfig.model_validate_json(full.model_dump_json()) == full
    assert pickle.loads(pickle.dumps(full)) == full
    digests = {each.digest() for each in (CONFIG, full, CacheConfig(page_size=4, pool=POOL, events="slim"))}
    assert len(digests) == 3


def test_a_stride_is_the_page_if_that_is_larger() -> None:
    strides = [
        CacheConfig(page_size=page, pool=PoolConfig(num_slots=4096), events="slim").stride_tokens
        for page in (1, 16, 512, 1024)
    ]

    assert strides == [512, 512, 512, 1024]


def test_what_is_handed_out_together_is_a_page_or_a_row() -> None:
    assert CONFIG.run_len == CONFIG.page_size
    assert CacheConfig(pool=PoolConfig(num_slots=64), kind="slots", max_seq_len=16, page_size=4).run_len == 16


@pytest.mark.parametrize("kind", ["radix", "mamba", "chunk", "trie"])
def test_layers_that_differ_have_a_shape_each(kind: Any) -> None:
    pool = UNLIKE | ({"num_state_slots": 2} if kind == "mamba" else {})
    config = CacheConfig(kind=kind, pool=PoolConfig.model_validate(pool))

    assert [layer.shapes for layer in config.pool.layers] == [((1, 4),) * 2, ((2, 4),) * 2]
    assert CacheConfig.model_validate_json(config.model_dump_json()).digest() == config.digest()


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ([FULL | {"count": 61}], (LayerShape(**FULL),) * 61),
        ([LayerShape(**FULL, count=2), FULL], (LayerShape(**FULL),) * 3),
        ([FULL | {"v_head_dim": 4}], (LayerShape(**FULL),)),
        ([FULL | {"v_head_dim": 0}], (LayerShape(**FULL, v_head_dim=0),)),
        ([STATE, FULL | {"kind": "swa"}], (LayerShape(**STATE), LayerShape(**FULL, kind="swa"))),
        ([], ()),
    ],
)
def test_an_entry_with_a_count_is_as_many_layers(given: Any, layers: tuple[LayerShape, ...]) -> None:
    pool = PoolConfig(num_slots=8, num_state_slots=2, layers=given)

    assert pool.layers == layers
    assert PoolConfig.model_validate(pool.model_dump()) == pool
    assert PoolConfig.model_validate_json(pool.model_dump_json()) == pool


def test_layers_alike_that_follow_one_another_are_one_entry_of_what_is_written() -> None:
    full, swa = LayerShape(**FULL, v_head_dim=0), LayerShape(kind="swa", **FULL)
    pool = PoolConfig(num_slots=8, num_state_slots=2, layers=(*(full,) * 40, swa, LayerShape(**STATE), full))
    entry = FULL | {"v_head_dim": 0}

    assert pool.model_dump(mode="json")["layers"] == [
        entry | {"count": 40},
        FULL | {"kind": "swa"},
        {"kind": "state", "state_shapes": [[3]]},
        entry,
    ]
    assert repr(pool).count("num_kv_heads") == 3


def test_a_uniform_pool_has_as_many_layers_alike() -> None:
    pool = PoolConfig.uniform(num_slots=8, num_layers=3, num_kv_heads=2, head_dim=4, v_head_dim=3, index_head_dim=5)
    plain = PoolConfig.uniform(num_slots=8, num_layers=1, num_kv_heads=2, head_dim=4, dtype="float32")

    assert [layer.shapes for layer in pool.layers] == [((2, 4), (2, 3), (5,))] * 3
    assert (plain.layers, plain.dtype) == ((LayerShape(num_kv_heads=2, head_dim=4),), "float32")
    with pytest.raises(ValidationError, match=r"layers\.0\.count"):
        PoolConfig.uniform(num_slots=8, num_layers=0, num_kv_heads=2, head_dim=4)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:15", "cuda:99"])
def test_devices_are_named_as_torch_names_them(device: str) -> None:
    assert PoolConfig(num_slots=8, device=device).device == device


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.1), (0.0, 1.0), (0.99, 1.0), (0.5, 0.51)])
def test_watermarks_are_fractions_with_the_low_one_below(low: float, high: float) -> None:
    config = EvictionConfig(low_watermark=low, high_watermark=high)

    assert (config.low_watermark, config.high_watermark) == (low, high)


@pytest.mark.parametrize("part", [CONFIG, CONFIG.pool, CONFIG.eviction, CONFIG.leases])
def test_a_configuration_cannot_be_changed(part: BaseModel) -> None:
    for field in type(part).model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, field, getattr(part, field))


def test_equal_configurations_have_equal_digests_however_they_were_made() -> None:
    same = CacheConfig.model_validate(
        {
            "fingerprint": "",
            "pool": {"layers": [{"head_dim": 4, "v_head_dim": 4, "num_kv_heads": 3}] * 2, "num_slots": 64},
            "page_size": 4,
        }
    )

    assert same == CONFIG
    assert same.digest() == CONFIG.digest()
    assert pickle.loads(pickle.dumps(CONFIG)).digest() == CONFIG.digest()


def test_a_digest_is_short_text() -> None:
    assert len(CONFIG.digest()) == 16
    assert int(CONFIG.digest(), 16) >= 0


SEGMENT = Segment(name="layer 0", layer=0, dtype="uint8", shape=(3,), bytes=3, offset=0)
CHANGES: dict[str, dict[str, Any]] = {
    "": {
        "kind": "chunk",
        "page_size": 8,
        "sliding_window_size": 16,
        "max_seq_len": 32,
        "bigram": True,
        "events": "full",
        "events_stride_tokens": 64,
        "ghost": GhostConfig(),
        "host": HostConfig(num_slots=64),
        "disk": DiskConfig(path="/disk", num_slots=64),
        "json_logs": True,
        "metrics": MetricsConfig(),
        "tenants": (TenantConfig(name="a", floor_slots=8),),
        "validate": True,
        "fingerprint": "model-a",
    },
    "pool": {
        "num_slots": 128,
        "format": "opaque",
        "slot_bytes": 3,
        "swa_slot_bytes": 3,
        "state_bytes": 3,
        "segments": (SEGMENT,),
        "swa_segments": (SEGMENT,),
        "state_segments": (SEGMENT,),
        "layers": (LayerShape(**FULL),),
        "num_swa_slots": 32,
        "num_state_slots": 2,
        "dtype": "float32",
        "device": "cpu",
    },
    "eviction": {"policy": "slru", "high_watermark": 0.95, "low_watermark": 0.7, "slice_ms": 2.0},
    "leases": {
        "acquire_timeout_s": 1.0,
        "grant_timeout_s": 7.0,
        "max_waiters": 7,
        "session_ttl_s": 2.0,
        "quarantine_grace_s": 3.0,
        "remembered_leases": 5,
    },
}


def changed(part: str, field: str) -> CacheConfig:
    """The configuration with another value in one field."""
    value = CHANGES[part][field]
    if not part:
        return CONFIG.model_copy(update={field: value})
    inner: BaseModel = getattr(CONFIG, part)
    return CONFIG.model_copy(update={part: inner.model_copy(update={field: value})})


def fields_that_can_differ() -> list[tuple[str, str]]:
    parts = {"": CacheConfig, "pool": PoolConfig, "eviction": EvictionConfig, "leases": LeaseConfig}
    every = [(part, field) for part, model in parts.items() for field in model.model_fields]
    return [(part, field) for part, field in every if field not in parts]


def test_every_field_changes_the_digest() -> None:
    every = fields_that_can_differ()

    digests = {CONFIG.digest(), *(changed(part, field).digest() for part, field in every)}

    assert len(digests) == len(every) + 1


def test_a_field_that_has_its_default_is_no_part_of_the_digest() -> None:
    class Later(CacheConfig):
        added: int = 3

    later = Later(page_size=4, pool=CONFIG.pool)

    assert later.digest() == CONFIG.digest() != later.model_copy(update={"added": 4}).digest()


# By protocol: the digests of two releases of one protocol mean the same only if they have the same defaults.
DEFAULTS: dict[int, dict[type[BaseModel], dict[str, Any]]] = {
    1: {
        CacheConfig: {
            "kind": "radix",
            "page_size": 1,
            "sliding_window_size": None,
            "max_seq_len": None,
            "bigram": False,
            "eviction": EvictionConfig(),
            "leases": LeaseConfig(),
            "tenants": (),
            "events": False,
            "events_stride_tokens": 512,
            "ghost": None,
            "json_logs": False,
            "metrics": None,
            "validate": False,
            "fingerprint": "",
        },
        PoolConfig: {
            "format": "layers",
            "slot_bytes": 0,
            "swa_slot_bytes": 0,
            "state_bytes": 0,
            "segments": (),
            "swa_segments": (),
            "state_segments": (),
            "num_layers": 0,
            "num_kv_heads": 0,
            "head_dim": 0,
            "v_head_dim": None,
            "kv_shapes": None,
            "index_head_dim": 0,
            "index_layers": None,
            "layer_kinds": None,
            "num_swa_slots": None,
            "num_state_slots": 0,
            "state_shapes": (),
            "dtype": "bfloat16",
            "device": "auto",
        },
        EvictionConfig: {"policy": "lru", "high_watermark": 0.9, "low_watermark": 0.8, "slice_ms": 1.0},
        LeaseConfig: {
            "acquire_timeout_s": 30.0,
            "grant_timeout_s": 30.0,
            "session_ttl_s": 30.0,
            "quarantine_grace_s": 120.0,
            "remembered_leases": 65_536,
            "max_waiters": 1024,
        },
        MetricsConfig: {"interval_s": 5.0},
        GhostConfig: {"max_factor": 8.0, "max_pages": 16_384},
        TenantConfig: dict.fromkeys(("extra_key", "lora_id", "cache_salt", "cap_slots")) | {"floor_slots": 0},
    }
}


DEFAULTS[2] = DEFAULTS[3] = DEFAULTS[4] = DEFAULTS[5] = DEFAULTS[6] = DEFAULTS[1]
DEFAULTS[7] = DEFAULTS[1] | {
    CacheConfig: DEFAULTS[1][CacheConfig] | {"host": None, "disk": None},
    DiskConfig: {
        "num_slots": None,
        "size": None,
        "num_swa_slots": None,
        "num_state_slots": None,
        "admit": "second_use",
        "reserve": 0.1,
        "write_mib_s": 256.0,
        "direct_io": "auto",
        "load_timeout_s": 5.0,
        "flush_s": 10.0,
        "fingerprint": "",
    },
    HostConfig: {
        "num_swa_slots": None,
        "num_state_slots": None,
        "policy": "2q",
        "admit": "all",
        "reserve": 0.2,
        "write_mib_s": None,
        "high_watermark": 1.0,
        "low_watermark": 1.0,
        "pin": None,
        "load_timeout_s": 2.0,
    },
}
DEFAULTS[8] = DEFAULTS[7]
DEFAULTS[9] = DEFAULTS[8] | {
    DiskConfig: {name: value for name, value in DEFAULTS[8][DiskConfig].items() if name != "fingerprint"}
}
DEFAULTS[10] = DEFAULTS[9] | {
    HostConfig: {name: value for name, value in DEFAULTS[9][HostConfig].items() if name != "admit"},
    PoolConfig: {
        "format": "layers",
        "layers": (),
        "slot_bytes": 0,
        "swa_slot_bytes": 0,
        "state_bytes": 0,
        "segments": (),
        "swa_segments": (),
        "state_segments": (),
        "num_swa_slots": None,
        "num_state_slots": 0,
        "dtype": "bfloat16",
        "device": "auto",
    },
}


def test_a_default_that_changes_gets_a_new_protocol_number() -> None:
    defaults = {
        model: {name: field.get_default() for name, field in model.model_fields.items() if not field.is_required()}
        for model in DEFAULTS[PROTOCOL]
    }

    assert PROTOCOL in DEFAULTS, "a new protocol: add its defaults to the table, and leave the others as they are"
    assert defaults == DEFAULTS[PROTOCOL], "a default has changed: raise PROTOCOL; a field was added: add it here"


@pytest.mark.parametrize(("part", "field"), fields_that_can_differ())
def test_a_field_that_differs_is_named_with_both_values(part: str, field: str) -> None:
    text = config_difference(CONFIG, changed(part, field))

    name = f"{part}.{field}" if part else field
    assert text.startswith(f"{name} is ")
    assert text.count(" is ") == 1
    assert config_difference(changed(part, field), changed(part, field)) == ""


def test_what_is_said_of_a_difference_is_of_bounded_length_and_shows_no_control_character() -> None:
    other = CacheConfig(
        kind="chunk",
        page_size=4,
        pool=PoolConfig.uniform(num_slots=10**6, num_layers=3, num_kv_heads=1, head_dim=1, dtype="uint8", device="cpu"),
        eviction=EvictionConfig(slice_ms=9.0, high_watermark=0.5, low_watermark=0.1),
        leases=LeaseConfig(max_waiters=1),
        fingerprint="\x1b[31m" + "x" * 200,
    )

    text = config_difference(CONFIG, other)

    assert text.startswith("kind is 'radix', not 'chunk'; pool.num_slots is 64, not 1000000; ")
    assert text.endswith("; and 2 more fields")
    assert len(text) < 1000
    (name,) = config_difference(CONFIG, CONFIG.model_copy(update={"fingerprint": other.fingerprint})).split("; ")
    assert name.startswith("fingerprint is '', not '\\x1b[31mxxx")
    assert len(name) < 200


def test_a_configuration_survives_pickling() -> None:
    assert pickle.loads(pickle.dumps(CONFIG)) == CONFIG


@pytest.mark.parametrize(
    ("fields", "host", "message"),
    [
        ({"kind": "chunk"}, {}, "host is for kinds 'radix' and 'mamba', not 'chunk'"),
        ({"kind": "trie"}, {}, "host is for kinds 'radix' and 'mamba', not 'trie'"),
        ({"kind": "slots", "max_seq_len": 16}, {}, "host is for kinds 'radix' and 'mamba', not 'slots'"),
        ({"eviction": EvictionConfig(high_watermark=1.0)}, {}, "host needs eviction.high_watermark below 1.0"),
        ({"pool": PoolConfig(num_slots=8)}, {}, "host keeps KV, and this cache has none: leave it out, or give"),
        ({}, {"num_slots": 0}, "num_slots"),
        ({}, {"num_slots": -4}, "num_slots"),
        ({}, {"num_slots": 66}, r"host.num_slots \(66\) must be a multiple of page_size \(4\): set it to 64"),
        ({}, {"num_swa_slots": 8}, "host.num_swa_slots needs sliding_window_size"),
        ({"sliding_window_size": 8}, {"num_swa_slots": 6}, r"host.num_swa_slots \(6\) must be a multiple"),
        ({}, {"num_state_slots": 8}, "host.num_state_slots is for kind 'mamba'"),
        ({}, {"load_timeout_s": -1.0}, "load_timeout_s"),
        ({}, {"write_mib_s": 0}, "write_mib_s"),
        ({}, {"reserve": 0}, "reserve"),
        ({}, {"reserve": 1}, "reserve"),
        ({}, {"high_watermark": 0.5, "low_watermark": 0.5}, r"low_watermark \(0.5\) must be below"),
        ({}, {"policy": "arc"}, "policy"),
    ],
)
def test_a_host_tier_that_does_not_fit_is_refused(fields: dict[str, Any], host: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CacheConfig(**{"page_size": 4, "pool": POOL} | fields, host=HostConfig(**{"num_slots": 64} | host))


def test_the_sizes_of_a_host_tier_are_in_proportion_unless_given() -> None:
    pool = POOL.model_copy(update={"num_swa_slots": 16, "num_state_slots": 3})
    config = CacheConfig(kind="mamba", page_size=4, pool=pool, sliding_window_size=8, host=HostConfig(num_slots=160))
    given = HostConfig(num_slots=160, num_swa_slots=8, num_state_slots=1)

    assert config.host_sizes == (160, 40, 7)
    assert config.model_copy(update={"host": given}).host_sizes == (160, 8, 1)
    with pytest.raises(ValueError, match="no host tier"):
        _ = CONFIG.host_sizes


CPU_POOL = POOL.model_copy(update={"device": "cpu"})


@pytest.mark.parametrize(
    ("fields", "disk", "message"),
    [
        ({"kind": "chunk"}, {}, "disk is for kinds 'radix' and 'mamba', not 'chunk'"),
        ({"kind": "trie"}, {}, "disk is for kinds 'radix' and 'mamba', not 'trie'"),
        ({"kind": "slots", "max_seq_len": 16}, {}, "disk is for kinds 'radix' and 'mamba', not 'slots'"),
        ({"pool": POOL}, {}, "set pool.device to 'cpu', not 'auto', or add CacheConfig.host"),
        ({}, {"path": ""}, "path"),
        ({}, {"path": "disk"}, "must be an absolute path, such as /nvme/raydix, not 'disk'"),
        ({}, {"path": "~/disk"}, "must be an absolute path"),
        ({}, {"path": "/disk\0"}, "must be an absolute path"),
        ({}, {"path": "/" + "d" * 5000}, "path"),
        ({}, {"num_slots": None}, "disk needs num_slots or size, one of them"),
        ({}, {"size": 2**20}, "disk needs num_slots or size, one of them"),
        ({}, {"num_slots": 0}, "num_slots"),
        ({}, {"num_slots": 2**31}, "num_slots"),
        ({}, {"num_slots": 66}, r"disk.num_slots \(66\) must be a multiple of page_size \(4\): set it to 64"),
        ({}, {"num_slots": None, "size": 0}, "size"),
        ({}, {"num_slots": None, "size": "1TiB"}, "size"),
        ({"pool": PoolConfig(num_slots=8)}, {}, "disk keeps KV, and this cache has none: leave it out, or give"),
        ({}, {"num_slots": None, "size": 2**20, "num_swa_slots": 8}, "leave out num_swa_slots, or give num_slots"),
        ({}, {"num_slots": None, "size": 2**20, "num_state_slots": 8}, "leave out num_state_slots, or give num_slots"),
        ({}, {"num_swa_slots": 8}, "disk.num_swa_slots needs sliding_window_size"),
        ({"sliding_window_size": 8}, {"num_swa_slots": 6}, r"disk.num_swa_slots \(6\) must be a multiple"),
        ({}, {"num_state_slots": 8}, "disk.num_state_slots is for kind 'mamba'"),
        ({}, {"admit": "none"}, "admit"),
        ({}, {"reserve": 0}, "reserve"),
        ({}, {"reserve": 1}, "reserve"),
        ({}, {"write_mib_s": 0}, "write_mib_s"),
        ({}, {"write_mib_s": float("inf")}, "write_mib_s"),
        ({}, {"direct_io": True}, "direct_io"),
        ({}, {"load_timeout_s": -1}, "load_timeout_s"),
        ({}, {"flush_s": float("nan")}, "flush_s"),
        ({}, {"fingerprint": "f" * 5000}, "fingerprint"),
        ({}, {"policy": "lru"}, "policy"),
    ],
)
def test_a_disk_tier_that_does_not_fit_is_refused(fields: dict[str, Any], disk: dict[str, Any], message: str) -> None:
    values = {"path": "/disk", "num_slots": 64} | disk

    with pytest.raises(ValidationError, match=message):
        CacheConfig(**{"page_size": 4, "pool": CPU_POOL} | fields, disk=DiskConfig(**values))


def test_a_disk_lies_below_the_host_or_a_pool_in_host_memory() -> None:
    disk = DiskConfig(path="/disk", num_slots=64)

    assert CacheConfig(page_size=4, pool=CPU_POOL, disk=disk).tiers_below == {"disk": "STORAGE"}
    below_host = CacheConfig(page_size=4, pool=POOL, host=HostConfig(num_slots=64), disk=disk)
    assert below_host.tiers_below == {"host": "CPU", "disk": "STORAGE"}


def test_the_slots_of_a_disk_tier_are_in_proportion_unless_given() -> None:
    pool = CPU_POOL.model_copy(update={"num_swa_slots": 16, "num_state_slots": 3})
    disk = DiskConfig(path="/disk", num_slots=160)
    config = CacheConfig(kind="mamba", page_size=4, pool=pool, sliding_window_size=8, disk=disk)
    named = DiskConfig(path="/disk", num_slots=160, num_swa_slots=8, num_state_slots=1)

    assert config.disk_sizes() == (160, 40, 7)
    assert config.model_copy(update={"disk": named}).disk_sizes() == (160, 8, 1)
    with pytest.raises(ValueError, match="no disk tier"):
        CONFIG.disk_sizes()


HYBRID = PoolConfig(
    num_slots=64,
    num_swa_slots=16,
    num_state_slots=4,
    device="cpu",
    layers=(LayerShape(**FULL), LayerShape(kind="swa", **FULL), LayerShape(**STATE)),
)


@given(st.integers(1, 10**7), st.integers(0, 10**5), st.integers(0, 10**5), st.integers(0, 10**5))
def test_a_size_in_bytes_is_divided_in_the_proportion_of_the_pool(size: int, page: int, half: int, state: int) -> None:
    disk = DiskConfig(path="/disk", size=size)
    config = CacheConfig(kind="mamba", page_size=4, pool=HYBRID, sliding_window_size=8, disk=disk)
    in_pool = 16 * page + 4 * half + 4 * state

    if not in_pool or size < page + half + state:
        with pytest.raises(ValueError, match=r"disk\.size"):
            config.disk_sizes(page, half, state)
        return
    sizes = config.disk_sizes(page, half, state)

    pages, halves, states = sizes.num_slots // 4, sizes.num_swa_slots // 4, sizes.num_state_slots
    assert sizes.num_slots % 4 == sizes.num_swa_slots % 4 == 0 and min(pages, halves, states) >= 1
    assert pages * page + halves * half + states * state <= size
    if size >= in_pool:
        assert (pages, halves, states) == (16 * size // in_pool, 4 * size // in_pool, 4 * size // in_pool)


def test_a_size_for_more_slots_than_a_tier_can_have_is_refused() -> None:
    config = CacheConfig(page_size=4, pool=CPU_POOL, disk=DiskConfig(path="/disk", size=2**50))

    with pytest.raises(ValueError, match="a tier has 2,147,418,112 at most"):
        config.disk_sizes(4096)
