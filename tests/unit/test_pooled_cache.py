"""The transformers cache over pool slots gives attention exactly what a `DynamicCache` gives it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from tiny_llama import LLAMA, continuation, random_llama, random_prompt
from transformers import DynamicCache, LlamaForCausalLM

from raydix.actors.pooled_cache import PooledCache
from raydix.actors.pooled_copy import CopiedCache
from raydix.actors.transformers_config import PoolShape, pool_config_for
from raydix.cache_core import KVPool
from raydix.cache_core.memory_pool import PoolLayout
from raydix.schemas import InvalidRequest

NUM_ROWS = 64
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return random_llama()


@pytest.fixture
def pool() -> KVPool:
    return KVPool(PoolLayout(NUM_ROWS - 1, 1, 3, 2, 8, 8, torch.float32))


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


def test_a_pool_is_configured_from_a_model_without_counting() -> None:
    pool = pool_config_for(LLAMA, 640, device="cpu")

    assert PoolShape.of_pool(pool) == PoolShape(("full",) * 3, 2, 8, 8, "float32")
    assert (pool.num_slots, pool.device) == (640, "cpu")
    assert pool_config_for(LLAMA.to_dict(), 640, device="cpu") == pool
    assert pool_config_for(LLAMA, 640, dtype=torch.bfloat16).dtype == "bfloat16"


def test_heads_are_counted_under_the_names_that_older_models_give_them() -> None:
    pool = pool_config_for({"model_type": "gpt2", "n_embd": 48, "n_head": 4, "n_layer": 2}, 64)

    assert PoolShape.of_pool(pool) == PoolShape(("full",) * 2, 4, 12, 12, "float32")


def test_a_dictionary_without_model_type_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="model_type"):
        pool_config_for({"hidden_size": 32}, 64)


def test_without_transformers_the_error_names_the_extra() -> None:
    program = "import sys; sys.modules['transformers'] = None; import raydix.actors.transformers_worker"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)

    assert "ImportError: the transformers worker needs the extra: pip install raydix[transformers]" in done.stderr
