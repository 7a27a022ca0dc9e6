"""Salts, adapters and weights: engines never read KV of another namespace or of other weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.engines.engine_process import EngineProcess
from support.engines.laboratory import Laboratory, prompt, slot_bytes

from raydix.schemas.engine_namespace import namespace_of

HIDDEN, RANK, LAYERS = 64, 4, 2


def save_adapter(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, out in (("q_proj", 64), ("v_proj", 32)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator) * 0.3
            weights[f"{place}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none", "task_type": "CAUSAL_LM"}))
    return folder


def test_adapters_salts_and_the_base_never_share(laboratory: Laboratory) -> None:
    cache = laboratory.start_cache(slot_bytes("llama"))
    model = laboratory.save_model("llama")
    first, second = (save_adapter(laboratory.folder / f"adapter-{seed}", seed) for seed in (1, 2))
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    one, other = (laboratory.start_engine(model, cache, **options) for _ in range(2))
    tokens = prompt(300)
    variants: list[dict[str, Any]] = [
        {},
        {"lora": ["french", 1, str(first)]},
        {"lora": ["german", 2, str(second)]},
        {"lora": ["french", 3, str(second)]},  # the same name at another path
        {"salt": "a"},
        {"salt": "b"},
    ]

    computed = []
    for each in variants:
        one.forget()  # vLLM's own cache knows adapters by their name alone
        computed.append(one.answer(tokens, 8, **each))
    assert [each["cached"] for each in computed] == [0] * len(variants)
    loaded = []
    for each in variants:
        other.forget()
        loaded.append(other.answer(tokens, 8, **each))

    assert [each["cached"] for each in loaded] == [288] * len(variants)
    assert [each["tokens"] for each in loaded] == [each["tokens"] for each in computed]
    assert computed[0]["tokens"] == computed[4]["tokens"] == computed[5]["tokens"]
    assert len({tuple(computed[at]["tokens"]) for at in (0, 1, 2)}) == 3
    lora_id = namespace_of("french", str(first)).lora_id
    laboratory.client(cache).retire(lora_id=lora_id)  # as after the file was replaced
    other.forget()
    assert other.answer(tokens, 8, lora=["french", 1, str(first)])["cached"] == 0
    laboratory.wait_until_free(cache)


def push(laboratory: Laboratory, model: Path, seed: int, engines: list[EngineProcess]) -> None:
    """Replace the checkpoint's weights, and those of engines."""
    new = laboratory.save_model("llama", seed=seed)
    for name in os.listdir(new):
        if name.endswith(".safetensors"):
            os.replace(new / name, model / name)
    for engine in engines:
        engine.ask("rpc", method="reload_weights")


def test_an_engine_that_resets_late_shares_only_after_its_reset(laboratory: Laboratory) -> None:
    cache = laboratory.start_cache(slot_bytes("llama"))
    model = laboratory.save_model("llama")
    a, b = (laboratory.start_engine(model, cache) for _ in range(2))
    p, q = prompt(300), prompt(300, seed=1)
    old = a.answer(p, 8)
    assert b.answer(p, 8)["cached"] == 288

    for engine in (a, b):
        engine.ask("pause")
    push(laboratory, model, 7, [a, b])
    laboratory.client(cache).set_weights("v2")
    assert a.ask("reset", connector=True)
    for engine in (a, b):
        engine.ask("resume")
        engine.ask("reset")  # vLLM's own cache alone
    b_alone = b.answer(q, 8)  # it is behind
    a_new = a.answer(q, 8)
    assert (b_alone["cached"], a_new["cached"]) == (0, 0)
    a.forget()
    assert a.answer(q, 8)["cached"] == 288
    assert b.ask("reset", connector=True)
    b_joined = b.answer(q, 8)
    fresh = laboratory.start_engine(model, None).answer(q, 8)

    assert b_joined["cached"] == 288
    assert b_joined["tokens"] == a_new["tokens"] == b_alone["tokens"] == fresh["tokens"]
    assert a.answer(p, 8)["tokens"] != old["tokens"]
    assert laboratory.client(cache).weights().label == "v2"


def test_a_reset_without_a_name_detaches_until_the_next_set_weights(laboratory: Laboratory) -> None:
    cache = laboratory.start_cache(slot_bytes("llama"))
    model = laboratory.save_model("llama")
    a, b = (laboratory.start_engine(model, cache, settings={"weights": "v1"}) for _ in range(2))
    p = prompt(300)
    a.answer(p, 8)
    assert b.answer(p, 8)["cached"] == 288

    b.ask("reset", connector=True)
    assert b.answer(p, 8)["cached"] == 0
    assert "the engine was reset, but the cache's weights are the same, 'v1'" in b.log.read_text()
    push(laboratory, model, 8, [a, b])
    laboratory.client(cache).set_weights("v2")
    for engine in (a, b):
        engine.ask("reset", connector=True)
    a.answer(p, 8)
    assert b.answer(p, 8)["cached"] == 288
    late = laboratory.start_engine(model, cache, settings={"weights": "v1"})  # the checkpoint's first label
    assert late.answer(p, 8)["cached"] == 0
    assert "weights" in late.log.read_text()
