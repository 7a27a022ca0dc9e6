"""The load check finds how each model must be run, and refuses models that give other logits with cached KV."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from support.caches.unheard_loss import expire_unheard
from support.models.model_zoo import tiny_config
from support.models.tiny_llama import LLAMA
from support.models.tiny_models import BAMBA, COMMON, JAMBA, MOSHI, check_same, random_model, random_prompt
from support.more import more
from transformers import (
    AutoConfig,
    BertConfig,
    Gemma3TextConfig,
    Mamba2Config,
    MambaConfig,
    MoshiConfig,
    OpenAIGPTConfig,
    PreTrainedConfig,
    RwkvConfig,
    XLMRobertaConfig,
    xLSTMConfig,
)

from raydix.actors import LocalPrefixCache
from raydix.actors.huggingface import model_traits
from raydix.actors.huggingface.causal_model import CausalModel
from raydix.actors.huggingface.forward_pass import Positions
from raydix.actors.huggingface.leased_request import LeasedRequest
from raydix.actors.huggingface.small_twin import TwinUnavailable
from raydix.actors.huggingface.worker import TransformersWorker, cache_config_for
from raydix.schemas import CacheConfig, ConfigMismatch, InvalidRequest, LeaseExpired, PoolConfig

PAD = 1
SIZES = {name: value for name, value in COMMON.items() if name not in ("num_key_value_heads", "head_dim")}
ROBERTA = XLMRobertaConfig(**SIZES, num_hidden_layers=2, is_decoder=True, pad_token_id=PAD)
BERT = BertConfig(**SIZES, num_hidden_layers=2)
BIDIRECTIONAL = Gemma3TextConfig(**COMMON, num_hidden_layers=2, use_bidirectional_attention=True)
RECURRENT = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "dtype": "float32", "eos_token_id": None}
WITHOUT_A_CACHE = [
    MambaConfig(**RECURRENT, state_size=8, initializer_range=0.3),
    Mamba2Config(**RECURRENT, num_heads=8, head_dim=8, state_size=8, n_groups=1, initializer_range=0.3),
    OpenAIGPTConfig(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3),
    RwkvConfig(**RECURRENT),
    xLSTMConfig(**RECURRENT, num_heads=4, eps=1e-5),
]


@torch.inference_mode()
def one_pass(model: Any, prompt: list[int], num_new: int) -> tuple[torch.Tensor, list[int]]:
    """Generate with one pass over all tokens for each; return the logits of the last pass, and the ids."""
    tokens = list(prompt)
    for _ in range(num_new):
        rows = model(torch.tensor([tokens]), use_cache=False).logits[0]
        tokens.append(int(rows[-1].argmax()))
    return rows, tokens[len(prompt) :]


def name(config: PreTrainedConfig) -> str:
    return config.model_type


# ---------------------------------------------------------------- without a cache


MORE_MODELS = [pytest.param(each, marks=pytest.mark.long) for each in (*WITHOUT_A_CACHE[1:], JAMBA, MOSHI)]


@pytest.mark.parametrize("config", [WITHOUT_A_CACHE[0], LLAMA, *more(BAMBA, ROBERTA), *MORE_MODELS], ids=name)
async def test_a_worker_without_a_cache_gives_the_logits_of_one_pass(config: PreTrainedConfig) -> None:
    """The model's own cache does not matter: that of Moshi forgets tokens, and RWKV has none that fits."""
    expected = one_pass(random_model(config), random_prompt(40), 12)
    async with TransformersWorker(None, model=deepcopy(config), use_cache=False, device="cpu") as worker:
        found = await worker.generate(random_prompt(40), 12, return_logits=True)

    assert found.prefix_len == 0
    check_same(found, *expected)


@pytest.mark.parametrize("config", [LLAMA, ROBERTA, BAMBA], ids=name)
async def test_reuse_off_gives_the_logits_of_one_pass(config: PreTrainedConfig) -> None:
    async with cache_for(config) as cache, TransformersWorker(cache, model=deepcopy(config), device="cpu") as worker:
        await worker.generate(random_prompt(40), 12)
        found = await worker.generate(random_prompt(40), 12, return_logits=True, reuse=False)

        assert found.prefix_len == 0
        check_same(found, *one_pass(random_model(config), random_prompt(40), 12))


# ---------------------------------------------------------------- without a small model


@pytest.mark.parametrize("dtype", ["float32", *more("bfloat16")])
@pytest.mark.parametrize(
    ("config", "can_share"),
    [(LLAMA, True), (MoshiConfig(**COMMON, num_hidden_layers=2, sliding_window=12), False), *more((BAMBA, True))],
    ids=lambda value: getattr(value, "model_type", ""),
)
async def test_a_model_that_has_no_small_one_is_checked_itself(
    config: PreTrainedConfig, can_share: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(config: PreTrainedConfig) -> PreTrainedConfig:
        raise TwinUnavailable("none")

    monkeypatch.setattr(model_traits, "small_twin", unavailable)
    monkeypatch.setattr(model_traits, "_kept", type(model_traits._kept)())
    model = CausalModel(deepcopy(config), device="cpu", dtype=dtype)

    traits = await model.prepare()

    assert (traits.cannot_share is None) == can_share
    model.close()


# ---------------------------------------------------------------- positions


@pytest.mark.parametrize(
    ("config", "positions"),
    [(LLAMA, Positions.COUNTED), (BAMBA, Positions.COUNTED), (ROBERTA, Positions.BEYOND_PADS)],
    ids=lambda value: getattr(value, "model_type", ""),
)
async def test_a_model_gets_the_position_ids_that_it_needs(config: PreTrainedConfig, positions: Positions) -> None:
    model = CausalModel(deepcopy(config), device="cpu")

    assert (await model.prepare()).positions is positions

    model.close()


@pytest.mark.parametrize("config", [*more(BAMBA), ROBERTA], ids=name)
async def test_cut_prompts_with_pad_tokens_get_the_logits_of_one_pass(config: PreTrainedConfig) -> None:
    """RoBERTa's positions skip pad tokens, also those in the cached prefix."""
    prompt = random_prompt(40)
    prompt[5] = prompt[6] = prompt[25] = PAD
    expected = one_pass(random_model(config), prompt, 12)
    async with cache_for(config) as cache:
        writer, reader = (TransformersWorker(cache, model=deepcopy(config), device="cpu") for _ in range(2))
        for cut in range(4, 40, 4):
            await writer.generate([*prompt[:cut], 95 - prompt[cut]], 1, extra_key=f"{cut}")
            found = await reader.generate(prompt, 12, extra_key=f"{cut}", return_logits=True)
            assert found.prefix_len == cut
            check_same(found, *expected)
        await writer.close()
        await reader.close()


async def test_positions_of_roberta_end_before_its_table() -> None:
    config = deepcopy(ROBERTA)
    config.max_position_embeddings = 64
    async with TransformersWorker(None, model=config, use_cache=False, device="cpu") as worker:
        with pytest.raises(InvalidRequest, match="63 tokens to compute, but the model has 62 positions"):
            await worker.generate(random_prompt(60), 4)
        assert len((await worker.generate(random_prompt(60), 3)).token_ids) == 3


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [BERT, BIDIRECTIONAL], ids=name)
async def test_a_model_that_is_not_causal_is_refused_in_each_dtype(config: PreTrainedConfig, dtype: str) -> None:
    with pytest.raises(ConfigMismatch, match="is not causal"):
        cache_config_for(deepcopy(config), 64, device="cpu", dtype=dtype)
    with pytest.raises(ConfigMismatch, match="is not causal"):
        await TransformersWorker(None, model=deepcopy(config), use_cache=False, device="cpu", dtype=dtype).open()


@pytest.mark.parametrize("model_type", [*more("inkling2_text"), "xlstm"])
async def test_a_model_that_fails_in_its_dtype_alone_is_refused_before_its_first_request(model_type: str) -> None:
    """These models multiply float32 by weights of another dtype; xLSTM only if a prompt fills a chunk."""
    config = tiny_config(model_type)
    await TransformersWorker(None, model=deepcopy(config), use_cache=False, device="cpu").open()
    worker = TransformersWorker(None, model=config, use_cache=False, device="cpu", dtype="bfloat16")
    with pytest.raises(ConfigMismatch, match=r"cannot run this .* model in torch\.bfloat16: RuntimeError"):
        await worker.open()
    await worker.close()


async def test_windows_that_are_long_are_filled_nevertheless() -> None:
    """Moshi forgets tokens when its window is full, by default after 3,000 tokens."""
    config = MoshiConfig(**COMMON, num_hidden_layers=2, sliding_window=3000)
    with pytest.raises(ConfigMismatch, match="cannot continue from cached KV"):
        cache_config_for(config, 64, device="cpu")


async def test_a_model_that_fails_with_a_pool_alone_is_refused_before_a_lease_is_taken() -> None:
    """Mllama runs in its own cache, but not in one that has all its layers from the start."""
    text = COMMON | {"num_hidden_layers": 4, "cross_attention_layers": [1], "pad_token_id": 0}
    config = AutoConfig.for_model("mllama", text_config=text)
    pool = PoolConfig.uniform(num_slots=64, num_layers=4, num_kv_heads=2, head_dim=8, dtype="float32", device="cpu")
    async with LocalPrefixCache(CacheConfig(pool=pool)) as cache:
        worker = TransformersWorker(cache, model=config, device="cpu")
        for _ in range(2):
            with pytest.raises(ConfigMismatch, match=r"this mllama model.*use_cache=False"):
                await worker.generate([1, 2, 3], 2)
        assert (await cache.stats()).acquires == 0
        await worker.close()


# ---------------------------------------------------------------- states computed by decoding


@pytest.mark.parametrize("model_type", [*more("zamba2"), "nemotron_h"])
async def test_the_next_turn_computes_the_states_that_decoding_made(model_type: str) -> None:
    """These models clamp the steps of their states in a prefill, but not in decoding."""
    config, prompt = tiny_config(model_type), random_prompt(24)
    async with cache_for(config) as cache:
        writer, reader = (TransformersWorker(cache, model=deepcopy(config), device="cpu") for _ in range(2))
        first = await writer.generate(prompt, 60, eos_token_id=())
        turn = [*prompt, *first.token_ids, *random_prompt(9, seed=3)]
        second = await reader.generate(turn, 1, return_logits=True)
        third = await writer.generate(turn, 1, return_logits=True)

        assert not writer._model.traits.decodes_alike
        assert second.prefix_len == 24  # the prompt, which a prefill computed
        assert third.prefix_len == (len(turn) - 2) // 4 * 4  # a part of one token would run as in decoding
        for found in (second, third):
            check_same(found, *one_pass(random_model(config), turn, 1))
        await writer.close()
        await reader.close()


@pytest.mark.parametrize("config", [*more(LLAMA), tiny_config("nemotron_h")], ids=lambda config: config.model_type)
async def test_an_answer_is_not_given_if_the_lease_has_ended_while_the_worker_stood_still(
    config: PreTrainedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages may have been overwritten. A worker whose decoding publishes nothing asks the cache."""
    async with cache_for(config) as cache:
        worker = TransformersWorker(cache, model=deepcopy(config), device="cpu")
        decode = LeasedRequest._decode

        async def stand_still(request: LeasedRequest) -> None:
            await decode(request)
            assert worker._client is not None
            await expire_unheard(cache, worker._client.session)

        monkeypatch.setattr(LeasedRequest, "_decode", stand_still)
        with pytest.raises(LeaseExpired):
            await worker.generate(random_prompt(24), 8, eos_token_id=())
        monkeypatch.undo()

        answer = await worker.generate(random_prompt(24), 8, eos_token_id=())
        assert len(answer.token_ids) == 8
        await worker.close()


def cache_for(config: PreTrainedConfig) -> LocalPrefixCache:
    states = {} if config in (LLAMA, ROBERTA) else {"num_state_slots": 16}
    return LocalPrefixCache(cache_config_for(deepcopy(config), 512, device="cpu", page_size=4, validate=True, **states))
