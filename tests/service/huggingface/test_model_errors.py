"""Models and arguments that a worker cannot take raise a typed error that names them, before any request to the
cache."""

from __future__ import annotations

from collections.abc import AsyncIterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.models.tiny_llama import LLAMA
from transformers import BertConfig, LlamaConfig, T5Config

from raydix.actors import LocalPrefixCache
from raydix.actors.huggingface.worker import TransformersWorker, cache_config_for, pool_config_for
from raydix.schemas import ConfigMismatch, InvalidRequest

REFUSED: dict[str, tuple[Any, str]] = {
    "t5": ({"model_type": "t5"}, "transformers has no causal LM of model_type 't5'"),
    "t5 object": (T5Config(), "transformers has no causal LM of model_type 't5'"),
    "qwen2_vl": ({"model_type": "qwen2_vl"}, "transformers has no causal LM of model_type 'qwen2_vl'"),
    "mistral3": ({"model_type": "mistral3"}, "transformers has no causal LM of model_type 'mistral3'"),
    "llava": ({"model_type": "llava"}, "transformers has no causal LM of model_type 'llava'"),
    "bart": ({"model_type": "bart"}, "this bart model is an encoder and a decoder"),
    "prophetnet": ({"model_type": "prophetnet"}, "this prophetnet model is an encoder and a decoder"),
    "whisper": ({"model_type": "whisper"}, "this whisper model is an encoder and a decoder"),
    "unknown": ({"model_type": "no such model"}, "transformers has no configuration of 'no such model'"),
    "no path": ("/no/such/model", "transformers has no configuration of '/no/such/model'"),
    "no package": ({"model_type": "gemma3n"}, "transformers cannot make this gemma3n model: ImportError"),
    "wrong field": (
        {"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4},
        "transformers has no configuration of 'llama'",
    ),
    "activation": (
        LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, hidden_act="none such"),
        "transformers cannot make this llama model: KeyError",
    ),
    "encoder": (BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1), "is not causal"),
}


@pytest.fixture
async def cache() -> AsyncIterator[LocalPrefixCache]:
    async with LocalPrefixCache(cache_config_for(LLAMA, 64, device="cpu")) as cache:
        yield cache
        stats = await cache.stats()
        assert (stats.acquires, stats.open_leases, stats.free_slots) == (0, 0, 64)
        await cache.check_invariants()


@pytest.mark.parametrize("name", REFUSED)
def test_no_pool_is_made_for_a_model_that_cannot_be_served(name: str) -> None:
    model, message = REFUSED[name]
    for make in (cache_config_for, pool_config_for):
        with pytest.raises(ConfigMismatch, match=message):
            make(deepcopy(model), 64)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", REFUSED)
async def test_a_worker_refuses_a_model_before_it_takes_a_lease(
    cache: LocalPrefixCache, name: str, use_cache: bool
) -> None:
    model, message = REFUSED[name]

    with pytest.raises(ConfigMismatch, match=message):
        worker = TransformersWorker(cache, model=deepcopy(model), use_cache=use_cache, device="cpu")
        await worker.generate([1, 2, 3], 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 7}, "model must be a transformers configuration, a dictionary of one, or a name or path, not 7"),
        ({"model": {"hidden_size": 32}}, "needs its model_type"),
        ({"dtype": "int8"}, "dtype must be float32, float16, bfloat16 or float64, not 'int8'"),
        ({"dtype": "float7"}, "dtype must be float32"),
        ({"dtype": torch.int64}, "dtype must be float32"),
        ({"device": "abacus"}, "device must be 'auto' or a device of torch, not 'abacus'"),
        ({"device": 1.5}, "device must be 'auto' or a device of torch"),
    ],
    ids=str,
)
async def test_a_wrong_argument_is_named(cache: LocalPrefixCache, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        TransformersWorker(cache, **({"model": deepcopy(LLAMA), "device": "cpu"} | arguments))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
async def test_a_gpu_that_is_not_there_is_named(cache: LocalPrefixCache) -> None:
    with pytest.raises(InvalidRequest, match="device is 'cuda:3', but this process has no GPU"):
        TransformersWorker(cache, model=deepcopy(LLAMA), device="cuda:3")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([96], "token 96 is not in the model's vocabulary of 96"), ([1.5], "tokens")],
    ids=str,
)
async def test_a_wrong_token_leaves_the_cache_as_it_was(cache: LocalPrefixCache, tokens: Any, message: str) -> None:
    async with TransformersWorker(cache, model=deepcopy(LLAMA), device="cpu") as worker:
        with pytest.raises(InvalidRequest, match=message):
            await worker.generate(tokens, 1)
