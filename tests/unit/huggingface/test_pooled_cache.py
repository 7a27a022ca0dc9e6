"""The transformers cache over pool slots gives attention exactly what a `DynamicCache` gives it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.caches.pool_layers import layer_shapes
from support.models.model_variants import config_named
from support.models.model_zoo import tiny_config
from support.models.tiny_llama import LLAMA, continuation, random_llama, random_prompt
from support.models.tiny_models import FALCON_H1, GEMMA_3, MISTRAL, QWEN3_NEXT, WINDOW, random_model
from support.models.tiny_models import continuation as continuation_of
from support.more import more
from support.processes.fresh_process import run_fresh
from transformers import AutoConfig, DynamicCache, LlamaForCausalLM, PreTrainedConfig, cache_utils

from raydix.actors.huggingface.copied_cache import CopiedCache
from raydix.actors.huggingface.layer_mapping import ModelLayers, PoolLayers, StateTensor
from raydix.actors.huggingface.measure import measure
from raydix.actors.huggingface.model_config import cache_config_for, pool_config_for
from raydix.actors.huggingface.pool_shape import PoolShape
from raydix.actors.huggingface.pooled_cache import PooledCache
from raydix.actors.huggingface.pooled_layers import PooledIndexedLayer, PooledKV
from raydix.actors.memory.pool_shapes import layout_of
from raydix.cache_core import KVPool
from raydix.cache_core.pool.pool_layout import PoolLayout
from raydix.schemas import CacheConfig, ConfigMismatch, InvalidRequest, PoolConfig

NUM_ROWS = 64
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return random_llama()


@pytest.fixture
def pool() -> KVPool:
    return KVPool(PoolLayout(NUM_ROWS - 1, 1, layer_shapes(("full",) * 3, 2, 8), torch.float32))


@pytest.fixture
def slots() -> torch.Tensor:
    """Slots for 40 tokens, all over the pool."""
    return torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(1))[:40]


@torch.inference_mode()
def run(model: LlamaForCausalLM, tokens: list[int], cache: object) -> torch.Tensor:
    return model(torch.tensor([tokens]), past_key_values=cache).logits[0]


@pytest.mark.parametrize("cut", [1, 15, 16, 29])
def test_a_prefix_in_the_pool_gives_the_logits_of_a_dynamic_cache_cut_there(
    model: LlamaForCausalLM, pool: KVPool, slots: torch.Tensor, cut: int
) -> None:
    prompt = random_prompt(30)
    expected, generated = continuation(model, prompt, cut, num_new=8)
    run(model, prompt[:cut], PooledCache(pool, slots, 0))

    cache = PooledCache(pool, slots, cut)
    logits = [run(model, prompt[cut:], cache)]
    logits += [run(model, [token], cache) for token in generated[:-1]]

    assert torch.equal(torch.cat(logits), expected)


def test_the_comparison_notices_one_wrong_slot(model: LlamaForCausalLM, pool: KVPool, slots: torch.Tensor) -> None:
    prompt = random_prompt(30)
    expected, _ = continuation(model, prompt, 16, num_new=1)
    run(model, prompt[:16], PooledCache(pool, slots, 0))
    pool.v[1][slots[5]] += 1e-3

    assert not torch.equal(run(model, prompt[16:], PooledCache(pool, slots, 16)), expected)


def test_attention_gets_contiguous_tensors_equal_to_those_of_a_dynamic_cache(pool: KVPool, slots: torch.Tensor) -> None:
    pooled, dynamic = PooledCache(pool, slots, 0), DynamicCache(config=LLAMA)
    for num_new in (7, 1, 3):
        k, v = torch.randn(2, 1, num_new, 2, 8).transpose(2, 3)

        for ours, own in zip(pooled.update(k, v, 0), dynamic.update(k, v, 0), strict=True):
            assert torch.equal(ours, own)
            assert ours.is_contiguous()


def test_only_the_slots_of_the_new_tokens_are_written(
    model: LlamaForCausalLM, pool: KVPool, slots: torch.Tensor
) -> None:
    run(model, random_prompt(10), PooledCache(pool, slots, 0))
    before = pool.storage.clone()
    run(model, random_prompt(6, seed=2), PooledCache(pool, slots, 10))

    was = KVPool(pool.layout, storage=before)
    changed = [(now != old).any(2).any(1) for now, old in zip(pool.k + pool.v, was.k + was.v, strict=True)]

    expected = torch.zeros(NUM_ROWS, dtype=torch.bool)
    expected[slots[10:16]] = True
    assert all(torch.equal(rows, expected) for rows in changed)


def test_after_a_repoint_the_kv_is_read_from_the_new_slots(
    model: LlamaForCausalLM, pool: KVPool, slots: torch.Tensor
) -> None:
    prompt = random_prompt(20)
    expected, _ = continuation(model, prompt, 16, num_new=1)
    cache = PooledCache(pool, slots, 0)
    run(model, prompt[:16], cache)
    free = torch.tensor(sorted(set(range(NUM_ROWS)) - set(slots.tolist())))[:16]
    pool.write_all(free, *pool.read_all(slots[:16]))
    pool.write_all(slots[:16], *torch.full((2, 3, 16, 2, 8), torch.nan))  # freed, and another's by now

    cache.repoint(torch.cat((free, slots[16:])))

    assert torch.equal(run(model, prompt[16:], cache), expected)


@pytest.mark.parametrize("shape", [(2, 2, 3, 8), (1, 2, 41, 8)])
def test_a_batch_or_more_tokens_than_slots_are_refused_before_anything_is_written(
    pool: KVPool, slots: torch.Tensor, shape: tuple[int, ...]
) -> None:
    cache = PooledCache(pool, slots, 0)

    with pytest.raises(ValueError, match="there are slots for 1, 40"):
        cache.update(torch.ones(shape), torch.ones(shape), 0)

    assert not pool.storage.any()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("change", [PooledCache.reset, lambda cache: cache.reorder_cache(torch.tensor([0]))])
def test_what_would_change_shared_kv_is_refused(
    pool: KVPool, slots: torch.Tensor, change: Callable[[PooledCache], None]
) -> None:
    with pytest.raises(NotImplementedError, match="cache"):
        change(PooledCache(pool, slots, 0))


def test_a_copied_cache_gives_back_what_was_computed_once_and_bit_for_bit(
    model: LlamaForCausalLM, pool: KVPool, slots: torch.Tensor
) -> None:
    prompt = random_prompt(24)
    pooled = PooledCache(pool, slots, 0)
    parts = [prompt[:10], prompt[10:16], prompt[16:17], prompt[17:]]
    for part in parts:
        run(model, part, pooled)

    copied = CopiedCache(LLAMA, CPU)
    run(model, parts[0], copied)
    first = copied.take_computed()
    resumed = CopiedCache(LLAMA, CPU, *first)  # in another process
    run(model, parts[1], resumed)
    run(model, parts[2], resumed)
    second = resumed.take_computed()
    run(model, parts[3], resumed)
    third = resumed.take_computed()

    assert [k.shape for k, _ in (first, second, third)] == [(3, 10, 2, 8), (3, 7, 2, 8), (3, 7, 2, 8)]
    for together, held in zip(
        (torch.cat(part, 1) for part in zip(first, second, third, strict=True)),
        pool.read_all(slots[:24]),
        strict=True,
    ):
        assert torch.equal(together, held)


# ---------------------------------------------------------------- sliding windows


@pytest.mark.parametrize("config", [MISTRAL, GEMMA_3], ids=["mistral", "gemma3"])
@pytest.mark.parametrize("cut", [1, WINDOW - 1, WINDOW, 2 * WINDOW + 3])
def test_a_window_is_read_from_its_own_slots_and_nothing_else_is(config: PreTrainedConfig, cut: int) -> None:
    model, prompt = random_model(config), random_prompt(3 * WINDOW)
    expected, generated = continuation_of(model, prompt, [cut], num_new=WINDOW + 2)
    pool = pool_for(cache_config_for(deepcopy(config), 48, num_swa_slots=40, device="cpu"))
    slots, swa_slots = 1 + torch.randperm(48)[:40], 1 + torch.randperm(40)
    layers = ModelLayers.of(config)
    run(model, prompt[:cut], PooledCache(pool, slots, 0, swa_slots=swa_slots[:cut], layers=layers))

    gone = max(0, cut - WINDOW + 1)
    for layer in range(len(layers.kinds)):
        if layers.kinds[layer] == "swa":
            pool.write(layer, swa_slots[:gone], *torch.full((2, gone, 2, 8), torch.nan))
    live = swa_slots.clone()
    live[:gone] = 0
    cache = PooledCache(pool, slots, cut, swa_slots=live, layers=layers)
    logits = [run(model, prompt[cut:], cache)]
    logits += [run(model, [token], cache) for token in generated[:-1]]

    assert torch.equal(torch.cat(logits), expected)


def test_a_window_with_a_hole_is_refused_before_anything_is_written() -> None:
    model = random_model(MISTRAL)
    pool = pool_for(cache_config_for(deepcopy(MISTRAL), 48, device="cpu"))
    slots = torch.arange(1, 25)
    live = slots.clone()
    live[:14] = 0  # the next token attends to those from 13 on
    cache = PooledCache(pool, slots, 20, swa_slots=live, layers=ModelLayers.of(MISTRAL))

    with pytest.raises(ValueError, match="token 13 is attended to, but the KV of those before 14 is gone"):
        run(model, [1], cache)
    assert not pool.storage.any()

    live[13] = 14
    cache.repoint(slots, live)
    run(model, [1], cache)
    assert cache.get_seq_length() == 21


@pytest.mark.parametrize("config", [MISTRAL, GEMMA_3], ids=["mistral", "gemma3"])
def test_a_copied_cache_keeps_what_its_windows_drop_until_it_is_taken(config: PreTrainedConfig) -> None:
    model, prompt = random_model(config), random_prompt(3 * WINDOW)
    whole = CopiedCache(config, CPU)
    run(model, prompt[:20], whole)
    k, v = whole.take_computed()
    assert k.shape == (config.num_hidden_layers, 20, 2, 8)
    swa = [layer for layer, kind in enumerate(ModelLayers.of(config).kinds) if kind == "swa"]
    k[swa, : 20 - WINDOW], v[swa, : 20 - WINDOW] = torch.nan, torch.nan  # gone from the pool, too

    resumed = CopiedCache(config, CPU, k, v)

    assert torch.equal(run(model, prompt[20:], resumed), continuation_of(model, prompt, [20], 1)[0])
    assert resumed.take_computed()[0].shape[1] == 4


# ---------------------------------------------------------------- states


@pytest.mark.long
def test_states_are_measured_where_kernels_for_gpus_are_installed(tmp_path: Path) -> None:
    """They refuse tensors of other devices, and transformers takes them wherever they are."""
    refuses = "def causal_conv1d_{}(x, *args, **kwargs):\n    raise RuntimeError('Expected x.is_cuda() to be true')\n"
    (tmp_path / "causal_conv1d").mkdir()
    (tmp_path / "causal_conv1d" / "__init__.py").write_text(refuses.format("fn") + refuses.format("update"))
    program = """
import torch
from support.models.tiny_models import FALCON_H1, QWEN3_NEXT
from raydix.actors.huggingface.layer_mapping import ModelLayers
from raydix.actors.huggingface.measure import measure
for config in (FALCON_H1, QWEN3_NEXT):
    print([tuple(state) for state in measure(config, ModelLayers.of(config), torch.float32)[1]])
"""

    done = run_fresh(program, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))

    expected = [[tuple(state) for state in states_of(config, torch.float32)] for config in (FALCON_H1, QWEN3_NEXT)]
    assert done.stdout.splitlines() == [str(states) for states in expected], done.stderr


@pytest.mark.parametrize("dtype", [*more("float32"), "bfloat16"])
@pytest.mark.parametrize("config", [FALCON_H1, *more(QWEN3_NEXT)], ids=["falcon_h1", "qwen3_next"])
def test_a_state_in_the_pool_keeps_every_bit_in_whatever_dtype_the_pool_is(
    config: PreTrainedConfig, dtype: str
) -> None:
    kept = getattr(torch, dtype)
    model, prompt = random_model(config).to(kept), random_prompt(24)
    expected, generated = continuation_of(model, prompt, [9], num_new=6)
    states = states_of(config, kept)
    pool = pool_for(cache_config_for(deepcopy(config), 48, num_state_slots=3, dtype=dtype, device="cpu"))
    slots = 1 + torch.randperm(48)
    layers = ModelLayers.of(config)
    first = PooledCache(pool, slots, 0, state_slot=1, layers=layers, states=states)
    run(model, prompt[:9], first)
    for layer in range(len(pool.layout.layers)):
        for tensor in pool.state(layer):
            tensor[3] = tensor[1]  # as a cache hands a state on
    run(model, prompt[9:], first)  # goes on in its own row

    cache = PooledCache(pool, slots, 9, state_slot=3, layers=layers, states=states)
    logits = [run(model, prompt[9:], cache)]
    logits += [run(model, [token], cache) for token in generated[:-1]]

    assert {state.dtype for state in states} == {kept, torch.float32}
    assert torch.equal(torch.cat(logits), expected)


def test_a_layer_with_a_state_needs_a_state_slot() -> None:
    pool = pool_for(cache_config_for(deepcopy(FALCON_H1), 48, num_state_slots=3, device="cpu"))

    with pytest.raises(ValueError, match="needs a state slot"):
        PooledCache(pool, torch.arange(1, 9), 0, layers=ModelLayers.of(FALCON_H1))


def states_of(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[StateTensor, ...]:
    return measure(config, ModelLayers.of(config), dtype)[1]


def pool_for(config: CacheConfig) -> KVPool:
    return KVPool(layout_of(config))


# ---------------------------------------------------------------- index keys

NUM_TOKENS = 28  # more than twice as many as an indexer chooses
DEEPSEEK, DOTS, QWEN_4 = "deepseek_v32", "dots3_note_text", "qwen4_exp_text"
ALL_INDEXED = {"layer_types": ["indexed_attention"] * 2, "num_hidden_layers": 2}


def indexed_config(model_type: str, **options: Any) -> PreTrainedConfig:
    """A tiny model with an indexer: of Qwen 4, keys come before K and V; of dots.note, they are float32."""
    given = tiny_config(model_type).to_dict() | options
    dropped = ("model_type", "per_layer_config") if options else ("model_type",)
    return AutoConfig.for_model(model_type, **{name: value for name, value in given.items() if name not in dropped})


def indexed_pool(config: PreTrainedConfig, dtype: torch.dtype) -> KVPool:
    """The pool of such a model, with room for 48 tokens and 3 states."""
    layers = ModelLayers.of(config)
    fields = measure(config, layers, dtype)[0]._asdict()
    states = 3 if layers.has_states else 0
    pool = PoolConfig(num_slots=48, num_state_slots=states, device="cpu", **fields)
    kind = "mamba" if states else "radix"
    return pool_for(CacheConfig(kind=kind, sliding_window_size=layers.window, pool=pool))


class IndexedRun:
    """A tiny model with an indexer, and the caches of one sequence in its pool."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        self.model = random_model(config).to(dtype)
        self.layers = ModelLayers.of(config)
        self.states = measure(config, self.layers, dtype)[1]
        self.pool = indexed_pool(config, dtype)
        self.slots, self.swa_slots = 1 + torch.randperm(48)[:40], 1 + torch.randperm(48)[:40]

    def cache(self, num_tokens: int) -> PooledCache:
        return PooledCache(
            self.pool,
            self.slots,
            num_tokens,
            swa_slots=None if self.layers.window is None else self.swa_slots,
            state_slot=1 if self.states else None,
            layers=self.layers,
            states=self.states,
        )

    def logits(self, prompt: list[int], cut: int, generated: list[int]) -> torch.Tensor:
        """The logits after a prefix in the pool."""
        cache = self.cache(cut)
        parts = [run(self.model, prompt[cut:], cache)]
        return torch.cat(parts + [run(self.model, [token], cache) for token in generated[:-1]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, *more(torch.float32)], ids=str)
@pytest.mark.parametrize("model_type", [DEEPSEEK, DOTS, QWEN_4])
def test_index_keys_in_the_pool_give_the_logits_of_a_dynamic_cache_cut_there(
    model_type: str, dtype: torch.dtype
) -> None:
    indexed, prompt, cut = IndexedRun(indexed_config(model_type), dtype), random_prompt(NUM_TOKENS), 17
    expected, generated = continuation_of(indexed.model, prompt, [cut], num_new=6)

    run(indexed.model, prompt[:cut], indexed.cache(0))

    assert torch.equal(indexed.logits(prompt, cut, generated), expected)


def test_the_comparison_notices_one_wrong_index_key() -> None:
    indexed, prompt, cut = IndexedRun(indexed_config(DEEPSEEK), torch.float32), random_prompt(NUM_TOKENS), 17
    expected, generated = continuation_of(indexed.model, prompt, [cut], num_new=1)
    run(indexed.model, prompt[:cut], indexed.cache(0))
    for token in range(cut):
        indexed.pool.index[1][indexed.slots[token]] *= -1

    assert not torch.equal(indexed.logits(prompt, cut, generated), expected)


def indexed_layer(num_tokens: int = 0) -> tuple[KVPool, PooledIndexedLayer]:
    pool = KVPool(PoolLayout(15, 1, layer_shapes(("full",), 2, 8, 4, 6), torch.float32))
    kv = PooledKV(pool.write, CPU)
    kv.point(torch.randperm(16)[:12], None)
    return pool, PooledIndexedLayer(kv, 0, pool.k[0], pool.v[0], num_tokens, pool.index[0], None)


@pytest.mark.parametrize("keys_first", [True, False])
def test_index_keys_are_written_with_kv_whichever_comes_first(keys_first: bool) -> None:
    pool, ours = indexed_layer()
    own = cache_utils.DynamicIndexedLayer()
    num_tokens = 0
    for num_new in (5, 1, 3):
        kv = torch.randn(1, 2, num_new, 8), torch.randn(1, 2, num_new, 4)
        keys, before = torch.randn(1, num_new, 6), pool.storage.clone()
        for of_keys in (keys_first, not keys_first):
            assert torch.equal(pool.storage, before)
            found, expected = ((layer.update_indexer(keys),) if of_keys else layer.update(*kv) for layer in (ours, own))
            assert all(torch.equal(rows, others) for rows, others in zip(found, expected, strict=True))
            assert all(rows.is_contiguous() for rows in found)
        num_tokens += num_new
        ids = ours._kv.full.ids[:num_tokens]
        assert ours.get_seq_length() == num_tokens
        assert torch.equal(pool.index[0][ids], own.indexer_keys[0])
        assert torch.equal(pool.k[0][ids].transpose(0, 1), own.keys[0])
        assert torch.equal(pool.v[0][ids].transpose(0, 1), own.values[0])


def test_a_layer_that_gets_no_index_keys_refuses_the_next_tokens() -> None:
    pool, layer = indexed_layer()
    k, v = torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 4)
    layer.update(k, v)

    with pytest.raises(ValueError, match="has index keys, but the model kept none of the last tokens"):
        layer.update(k, v)

    assert not pool.storage.any()


@pytest.mark.parametrize("shape", [(2, 3, 6), (1, 13, 6)])
def test_index_keys_of_a_batch_or_of_more_tokens_than_slots_are_refused(shape: tuple[int, ...]) -> None:
    pool, layer = indexed_layer()

    with pytest.raises(ValueError, match="there are slots for 1, 12"):
        layer.update_indexer(torch.ones(shape))

    assert not pool.storage.any()


COPIED = {
    "deepseek": (indexed_config(DEEPSEEK), torch.float32),
    "float32 keys": (indexed_config(DOTS, **ALL_INDEXED, mlp_layer_types=["dense"] * 2), torch.bfloat16),
    "positions": (indexed_config(QWEN_4, **ALL_INDEXED), torch.float32),
}


@pytest.mark.parametrize(("config", "dtype"), COPIED.values(), ids=COPIED)
def test_a_copied_cache_gives_back_index_keys_once_and_bit_for_bit(
    config: PreTrainedConfig, dtype: torch.dtype
) -> None:
    indexed, prompt = IndexedRun(config, dtype), random_prompt(24)
    parts = [prompt[:10], prompt[10:16], prompt[16:]]
    pooled = indexed.cache(0)
    expected = [run(indexed.model, part, pooled) for part in parts]

    copied = CopiedCache(config, CPU)
    run(indexed.model, parts[0], copied)
    first = copied.take_computed()
    resumed = CopiedCache(config, CPU, *first)  # in another process
    found = [run(indexed.model, part, resumed) for part in parts[1:]]
    second = resumed.take_computed()

    assert all(torch.equal(mine, pools) for mine, pools in zip(found, expected[1:], strict=True))
    together = [torch.cat(part, 1) for part in zip(first, second, strict=True)]
    held = indexed.pool.read_all(indexed.slots[:24])
    assert [
        array.view(torch.uint8).equal(other.view(torch.uint8)) for array, other in zip(together, held, strict=True)
    ] == [True] * 3


@pytest.mark.parametrize(
    ("config", "dtype", "dims"),
    [
        (indexed_config(DEEPSEEK), torch.float32, [16, 16]),
        (config_named("glm_moe_dsa, shared indexers"), torch.bfloat16, [16, 0, 16]),
        (indexed_config(DOTS), torch.bfloat16, [32, 0, 32, 0]),  # float32, in two elements each
        (indexed_config(QWEN_4), torch.float32, [0, 8, 0, 8]),
        (LLAMA, torch.float32, [0, 0, 0]),
    ],
    ids=["deepseek", "shared", "dots", "qwen", "llama"],
)
def test_the_index_keys_of_a_pool_are_measured(config: PreTrainedConfig, dtype: torch.dtype, dims: list[int]) -> None:
    layers = ModelLayers.of(config)
    shape, _ = measure(config, layers, dtype)
    pool = PoolConfig(num_slots=8, num_state_slots=2 if layers.has_states else 0, **shape._asdict())

    assert [layer.index_head_dim for layer in pool.layers] == dims
    assert PoolShape(pool.layers, pool.dtype) == shape
    assert shape.is_uniform == (config.model_type in (DEEPSEEK, QWEN_4, "llama"))
    assert ("with index keys of" in str(shape)) == (max(dims) > 0)


def test_a_pool_without_a_models_index_keys_is_named_as_unlike() -> None:
    needed = PoolShape(layer_shapes(("full",) * 3, 1, 8, None, 6, (0, 2)), "float32")
    held = PoolShape(layer_shapes(("full",) * 3, 1, 8), "bfloat16")

    assert needed != held
    indexed = "1 layer (full: 1 KV heads of 8 with index keys of 6)"
    assert str(needed) == f"{indexed} + 1 layer (full: 1 KV heads of 8) + {indexed} in float32"
    assert str(held) == "3 layers (full: 1 KV heads of 8) in bfloat16"
    assert not needed.is_uniform


def test_index_keys_that_a_pool_cannot_hold_are_refused() -> None:
    cache = DynamicCache()
    cache.layers = [cache_utils.DynamicIndexedLayer()]
    cache.update(torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 8), 0)
    cache.update_indexer(torch.ones(1, 1, 6).half(), 0)

    with pytest.raises(ConfigMismatch, match=r"an index key in torch.float16 does not fit into a pool of torch.float"):
        ModelLayers.full(1).kv_in(cache)


# ---------------------------------------------------------------- configurations


@pytest.mark.parametrize(
    ("config", "kinds", "window"),
    [
        (LLAMA, ("full", "full", "full"), None),
        (MISTRAL, ("swa", "swa"), WINDOW),
        (GEMMA_3, ("swa", "full", "swa"), WINDOW),
        (QWEN3_NEXT, ("state", "state", "state", "full"), None),
        (FALCON_H1, ("full", "state", "full", "state"), None),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_models_layers_are_mapped_to_the_pools(
    config: PreTrainedConfig, kinds: tuple[str, ...], window: int | None
) -> None:
    layers = ModelLayers.of(config)

    assert (layers.kinds, layers.window, layers.has_states) == (kinds, window, "state" in kinds)


def test_a_layer_that_keeps_two_things_uses_two_layers_of_the_pool() -> None:
    assert ModelLayers.of(FALCON_H1).layers == (PoolLayers(kv=0, state=1), PoolLayers(kv=2, state=3))


def test_a_cache_is_configured_from_a_model_without_counting() -> None:
    gemma = cache_config_for(deepcopy(GEMMA_3), 64, num_swa_slots=32, device="cpu", page_size=4)
    qwen = cache_config_for(deepcopy(QWEN3_NEXT), 64, num_state_slots=5, dtype="bfloat16", device="cpu")
    llama = cache_config_for(LLAMA, 64, device="cpu")

    assert (gemma.kind, gemma.sliding_window_size, gemma.page_size) == ("radix", WINDOW, 4)
    assert ([layer.kind for layer in gemma.pool.layers], gemma.pool.num_swa_slots) == (["swa", "full", "swa"], 32)
    assert (qwen.kind, qwen.pool.num_state_slots, qwen.sliding_window_size) == ("mamba", 5, None)
    assert qwen.pool.layers[0].state_shapes == ((64, 4), (4, 8, 16))  # the second is float32, in two elements each
    assert llama == CacheConfig(pool=pool_config_for(LLAMA, 64, device="cpu"))


@pytest.mark.parametrize(
    ("config", "numbers", "message"),
    [
        (LLAMA, {"num_swa_slots": 8}, "llama model has no sliding windows"),
        (LLAMA, {"num_state_slots": 8}, "llama model keeps no recurrent states"),
        (FALCON_H1, {}, "falcon_h1 model keeps recurrent states: num_state_slots must say how many"),
    ],
    ids=["swa", "state", "missing"],
)
def test_a_number_that_is_missing_or_for_another_kind_of_model_is_refused(
    config: PreTrainedConfig, numbers: dict[str, int], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        pool_config_for(deepcopy(config), 64, **numbers)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("mamba", "keeps no KV"),
        ("recurrent_gemma", "keeps its recurrent states outside the layers of its cache"),
        ("openai-gpt", "keep no KV in the cache of transformers"),
    ],
)
def test_a_model_that_keeps_what_no_cache_has_a_place_for_is_refused(model_type: str, message: str) -> None:
    with pytest.raises(ConfigMismatch, match=message):
        pool_config_for({"model_type": model_type}, 64, num_state_slots=4)


def test_a_layer_of_an_unknown_kind_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class CompressedLayer(cache_utils.DynamicLayer):
        """A layer that a later transformers may have."""

    monkeypatch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", CompressedLayer)

    with pytest.raises(ConfigMismatch, match="layer 0 of this llama model keeps a CompressedLayer: a cache serves"):
        ModelLayers.of(LLAMA)


def test_a_pool_is_configured_from_a_model_without_counting() -> None:
    pool = pool_config_for(LLAMA, 640, device="cpu")

    assert PoolShape(pool.layers, pool.dtype) == PoolShape(layer_shapes(("full",) * 3, 2, 8), "float32")
    assert (pool.num_slots, pool.device) == (640, "cpu")
    assert pool_config_for(LLAMA.to_dict(), 640, device="cpu") == pool
    assert pool_config_for(LLAMA, 640, dtype=torch.bfloat16).dtype == "bfloat16"


def test_heads_are_counted_under_the_names_that_older_models_give_them() -> None:
    pool = pool_config_for({"model_type": "gpt2", "n_embd": 48, "n_head": 4, "n_layer": 2}, 64)

    assert PoolShape(pool.layers, pool.dtype) == PoolShape(layer_shapes(("full",) * 2, 4, 12), "float32")


def test_a_dictionary_without_model_type_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="model_type"):
        pool_config_for({"hidden_size": 32}, 64)


def test_without_transformers_the_error_names_the_extra() -> None:
    program = "import sys; sys.modules['transformers'] = None; import raydix.actors.huggingface.worker"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert "the transformers worker needs an extra; in the clone: pip install '.[transformers]'; or" in done.stderr
