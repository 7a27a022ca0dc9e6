"""Configurations that RaydixConnector refuses at the engine's start, by name; and starts without a cache."""

from __future__ import annotations

from typing import Any

import pytest
from support.engines.engine_process import EngineProcess
from support.engines.laboratory import BLOCK, Laboratory, prompt, slot_bytes
from support.waiting import wait_until


def refusal_of(engine: EngineProcess) -> str:
    """Wait until an engine has failed to start; return its log."""
    with pytest.raises(RuntimeError):
        engine.wait_until_ready()
    return engine.log.read_text()


@pytest.mark.parametrize(
    ("transfer", "settings", "message"),
    [
        ({"kv_load_failure_policy": "fail"}, {}, "kv_load_failure_policy must be \"recompute\", not 'fail'"),
        ({"kv_role": "kv_producer"}, {}, "kv_role must be \"kv_both\", not 'kv_producer'"),
        ({}, {"chunk_size": 3}, "unknown setting 'chunk_size'"),
    ],
)
def test_settings_are_refused_by_name(
    laboratory: Laboratory, transfer: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    engine = laboratory.start_engine(laboratory.save_model("llama"), "kv-0", transfer=transfer, settings=settings)

    assert message in refusal_of(engine)


def test_a_cache_of_another_shape_is_refused_with_both_values(laboratory: Laboratory) -> None:
    model = laboratory.save_model("llama")
    page = laboratory.start_cache(slot_bytes("llama"), page_size=48, num_tokens=4800)
    shape = laboratory.start_cache(slot_bytes("llama", "bfloat16"))
    engines = [laboratory.start_engine(model, each) for each in (page, shape)]

    assert "page_size is 48, not 32 or a divisor of it" in refusal_of(engines[0])
    assert "pool.slot_bytes is 272, not 528" in refusal_of(engines[1])


def test_hybrid_models_and_pipelines_are_refused_by_name(laboratory: Laboratory) -> None:
    cache = laboratory.start_cache(slot_bytes("llama"))
    hybrid = laboratory.start_engine(laboratory.save_model("lfm2"), cache)
    pipeline = laboratory.start_engine(laboratory.save_model("llama"), cache, pipeline_parallel_size=2)

    text = refusal_of(hybrid)
    assert "KV cache group" in text and "RaydixConnector" in text
    assert "pipeline_parallel_size must be 1" in refusal_of(pipeline)


def test_an_engine_starts_without_a_cache_and_uses_it_once_it_is_there(laboratory: Laboratory) -> None:
    name = "kv-late"
    engine = laboratory.start_engine(laboratory.save_model("llama"), name)
    alone = engine.answer(prompt(300), 8)
    assert engine.log.read_text().count("is not reached, so the engine computes all KV itself") <= 2  # a line a process
    laboratory.start_cache(slot_bytes("llama"), name=name)

    wait_until(lambda: laboratory.stats(name).open_sessions >= 3)  # scheduler, worker, and this test
    wait_until(lambda: has_saved(engine, laboratory, name))
    engine.forget()
    loaded = engine.answer(prompt(300), 8)

    assert loaded["tokens"] == alone["tokens"]
    assert loaded["cached"] == 300 - 300 % BLOCK


def has_saved(engine: EngineProcess, laboratory: Laboratory, cache: str) -> bool:
    engine.forget()
    engine.answer(prompt(300), 8)
    return laboratory.stats(cache).tree_slots > 0


def test_no_cluster_is_ever_started(laboratory: Laboratory) -> None:
    engine = laboratory.start_engine(laboratory.save_model("llama"), "kv-0", settings={"ray_address": "127.0.0.1:1"})

    assert len(engine.answer(prompt(100), 4)["tokens"]) == 4
    assert "cache 'kv-0' is not reached, so the engine computes all KV itself" in engine.log.read_text()
