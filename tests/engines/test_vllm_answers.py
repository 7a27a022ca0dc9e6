"""Answers with KV from Raydix are those of the lone engine, for each kind of model; wrong KV would change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engines.engine_process import EngineProcess
from support.engines.laboratory import Laboratory, prompt, slot_bytes

NUM_NEW = 12
OWN_HIT = 1e-5  # the same positions are computed in the same shapes
COLD = 1e-3


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(abs(a - b) for a, b in zip(one["logprobs"], other["logprobs"], strict=True))


def answers_agree(laboratory: Laboratory, cache: str, engine: EngineProcess, tokens: list[int]) -> list[int]:
    """Compare cold, own hit and loaded; return the cached tokens of each. The engine has computed nothing yet."""
    cold = engine.answer(tokens, NUM_NEW)
    laboratory.wait_until_free(cache)  # all blocks are saved: vLLM loads the last one of a prompt that it holds
    own = engine.answer(tokens, NUM_NEW)
    again = engine.answer(tokens, NUM_NEW)
    engine.forget()
    loaded = engine.answer(tokens, NUM_NEW)

    assert cold["tokens"] == own["tokens"] == loaded["tokens"]
    noise = largest_difference(own, again)
    assert largest_difference(loaded, own) <= (OWN_HIT if noise else 0.0)
    assert largest_difference(loaded, cold) <= COLD
    return [each["cached"] for each in (cold, own, loaded)]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gemma3"])
def test_answers_with_loaded_kv_are_those_of_the_engine(laboratory: Laboratory, kind: str) -> None:
    cache = laboratory.start_cache(slot_bytes(kind))
    engine = laboratory.start_engine(laboratory.save_model(kind), cache)

    assert answers_agree(laboratory, cache, engine, prompt(500)) == [0, 480, 480]
    assert answers_agree(laboratory, cache, engine, prompt(64, seed=1)) == [0, 64, 64]
    laboratory.wait_until_free(cache)


def test_another_engine_loads_and_a_wrong_page_changes_the_answer(laboratory: Laboratory) -> None:
    cache = laboratory.start_cache(slot_bytes("llama"), check=False)
    model = laboratory.save_model("llama")
    one, other = (laboratory.start_engine(model, cache, settings={"check": False}) for _ in range(2))
    tokens = prompt(500)

    computed = one.answer(tokens, NUM_NEW)
    laboratory.wait_until_free(cache)
    loaded = other.answer(tokens, NUM_NEW)

    assert (computed["cached"], loaded["cached"]) == (0, 480)
    assert loaded["tokens"] == computed["tokens"]
    assert other.ask("metrics")["vllm:external_prefix_cache_hits"] == 480
    laboratory.shuffle_pages(cache)
    other.forget()
    wrong = other.answer(tokens, NUM_NEW)
    assert wrong["cached"] == 480
    assert wrong["tokens"] != computed["tokens"]


def test_mla_is_served_without_hits(laboratory: Laboratory) -> None:
    cache = laboratory.start_cache(slot_bytes("deepseek"), page_size=16)
    model = laboratory.save_model("deepseek")
    engine, alone = (
        laboratory.start_engine(model, name, block_size=16, trust_remote_code=False) for name in (cache, None)
    )
    tokens = prompt(300)

    answers = [engine.answer(tokens, NUM_NEW) for _ in range(2)]
    expected = alone.answer(tokens, NUM_NEW)

    assert [each["cached"] for each in answers] == [0, 0]
    assert all(each["tokens"] == expected["tokens"] for each in answers)
    assert "answers 0 hits" in engine.log.read_text()
    assert laboratory.stats(cache).acquires == 0


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), [("bfloat16", "auto"), ("float16", "auto"), ("bfloat16", "fp8_e5m2")]
)
def test_other_dtypes(laboratory: Laboratory, dtype: str, kv_cache_dtype: str) -> None:
    stored = dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    cache = laboratory.start_cache(slot_bytes("llama", stored))
    engine = laboratory.start_engine(laboratory.save_model("llama"), cache, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    tokens = prompt(300)

    if kv_cache_dtype.startswith("fp8") and "avx512f" not in Path("/proc/cpuinfo").read_text():
        with pytest.raises(RuntimeError, match="FP8 KV cache on CPU requires x86 with AVX-512"):  # says vLLM
            engine.wait_until_ready()
        return
    computed = engine.answer(tokens, NUM_NEW)
    own = engine.answer(tokens, NUM_NEW)
    laboratory.wait_until_free(cache)
    engine.forget()
    loaded = engine.answer(tokens, NUM_NEW)

    assert [each["cached"] for each in (computed, own, loaded)] == [0, 288, 288]
    assert loaded["tokens"] == own["tokens"]


def test_tensor_parallel_ranks_have_a_cache_each(laboratory: Laboratory) -> None:
    layers = slot_bytes("llama", ranks=2, num_key_value_heads=2)
    names = [laboratory.start_cache(layers, name=f"kv-parallel-tp{rank}") for rank in range(2)]
    model = laboratory.save_model("llama", num_key_value_heads=2)
    engine = laboratory.start_engine(model, "kv-parallel", tensor_parallel_size=2)

    assert answers_agree(laboratory, names[0], engine, prompt(300)) == [0, 288, 288]
    for name in names:
        laboratory.wait_until_free(name)
        assert laboratory.stats(name).tree_slots >= 288
