"""A model's fingerprint: any bit of its weights changes it, and so does what its KV depends on; nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from support.models.tiny_llama import LLAMA, random_llama, random_prompt
from support.models.tiny_models import FALCON_H1, GEMMA_3
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from raydix.actors.huggingface.fingerprint import (
    _CHUNK,
    _sums,
    _sums_of_rows,
    _sums_on_cpu,
    _weights_on,
    model_fingerprint,
    weights_of,
)
from raydix.schemas import InvalidRequest, ModelFingerprint


def model_of(config: PreTrainedConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype).eval()


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Change one bit of a contiguous tensor's memory; a second time, change it back."""
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("config", [LLAMA, GEMMA_3, FALCON_H1], ids=lambda config: config.model_type)
def test_one_changed_bit_of_any_parameter_or_buffer_changes_it(config: PreTrainedConfig) -> None:
    model, rng = model_of(config, torch.bfloat16), np.random.default_rng(0)
    before = model_fingerprint(model)
    tensors = dict(weights_of(model))
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= tensors.keys()
    assert any(name.endswith("inv_freq") for name in tensors)  # buffers that are not saved, too

    for name, tensor in tensors.items():
        num_bits = tensor.nbytes * 8
        for bit in (0, num_bits - 1, int(rng.integers(num_bits))):
            flip(tensor, bit)
            after = model_fingerprint(model)
            assert after.differences(before) == ("weights",), (name, bit)
            flip(tensor, bit)
    assert model_fingerprint(model) == before


def test_equal_seeds_give_equal_fingerprints_and_other_seeds_others() -> None:
    first, same, other = (model_fingerprint(random_llama(seed)) for seed in (0, 0, 1))

    assert first == same and str(first) == str(same)
    assert other.differences(first) == ("weights",)
    assert other.difference(first) == "the weights differ"


def test_names_shapes_and_dtypes_are_part_of_it() -> None:
    def bare(**tensors: torch.Tensor) -> str:
        model = random_llama()
        model.lm_head = torch.nn.Module()
        for name, tensor in tensors.items():
            model.lm_head.register_buffer(name, tensor)
        return model_fingerprint(model).weights

    zeros = torch.zeros(4)
    prints = [
        bare(a=zeros),
        bare(b=zeros),
        bare(a=zeros.view(2, 2)),
        bare(a=zeros.view(torch.int32)),
        bare(a=zeros[:2]),
        bare(a=zeros[:2], b=zeros[2:]),
        bare(a=zeros, b=zeros),  # one tensor under two names
        bare(a=torch.zeros(0)),
    ]
    assert len(set(prints)) == len(prints)
    assert bare(a=zeros, b=zeros.clone()) == prints[6]
    ones = torch.ones(9)
    assert bare(a=ones, b=ones[:3]) == bare(a=ones, b=ones[:3].clone())  # at one address


KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint8)
SIZES = (1, 3, 8, 9, 4096, 2 * _CHUNK + 5)  # bytes and more


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_each_bit_and_each_exchange_counts_whatever_the_dtype(dtype: torch.dtype, size: int) -> None:
    rng = np.random.default_rng(size)
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.from_numpy(rng.integers(0, 256, size * width, dtype=np.uint8))
    tensor, elements = raw.view(dtype), raw.view(size, width)
    before = _sums(tensor)
    for bit in (0, raw.nbytes * 8 - 1, *map(int, rng.integers(raw.nbytes * 8, size=4))):
        flip(raw, bit)
        assert _sums(tensor) != before, bit
        flip(raw, bit)
    for _ in range(8):
        one, other = (int(each) for each in rng.integers(size, size=2))
        elements[[one, other]] = elements[[other, one]]
        assert (_sums(tensor) != before) is not torch.equal(elements[one], elements[other])
        elements[[one, other]] = elements[[other, one]]
    assert _sums(tensor) == before


@pytest.mark.parametrize("lane", range(4))
@pytest.mark.parametrize("distance", [1, 2, 3, 2**17, _CHUNK, _CHUNK + 1])
def test_numbers_that_differ_in_their_sign_alone_do_not_trade_places_unseen(lane: int, distance: int) -> None:
    words = torch.ones(_CHUNK + 2 + distance, 4, dtype=torch.bfloat16)
    words[0, lane] = -1  # its bit may be the highest of the word, which an even number would shift out
    before = _sums(words)
    words[[0, distance], lane] = words[[distance, 0], lane]

    assert _sums(words) != before


SHAPES: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "strided": lambda: torch.arange(12.0)[::2],
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "beginning in the middle of a word": lambda: torch.arange(13.0)[1:],
    "of no dimension": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 3),
    "bools": lambda: torch.tensor([True, False, True]),
    "complex": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "with a gradient": lambda: torch.nn.Parameter(torch.arange(5.0)),
}


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_tensors_count_by_their_values_however_they_lie(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    plain = tensor.detach().clone().resolve_conj().contiguous()

    assert _sums(tensor) == _sums(plain)
    if plain.numel():
        raw = plain.view(-1).view(torch.uint8)
        raw[-1] ^= 1
        assert _sums(tensor) != _sums(plain)


def test_the_sums_are_those_that_the_text_says_on_every_device() -> None:
    words = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63, 2 * _CHUNK))
    weights = [int(each) for each in _weights_on(torch.device("cpu"))]
    expected = []
    for chunk in words.view(2, _CHUNK).tolist():
        for shift in (0, 32):
            total = sum([weight * (word >> shift) for weight, word in zip(weights, chunk, strict=True)])
            expected.append((total + 2**63) % 2**64 - 2**63)

    rows, on_cpu = words.view(2, _CHUNK), _weights_on(torch.device("cpu"))
    assert _sums_on_cpu(rows, on_cpu).flatten().tolist() == expected
    assert _sums_of_rows(rows, on_cpu).flatten().tolist() == expected
    assert all(weight % 2 for weight in weights) and len(set(weights)) == _CHUNK


# ---------------------------------------------------------------- the configuration

CHANGED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "rope_theta": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, ("rope_parameters.rope_theta",)),
    "rope type": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        ("rope_parameters.factor", "rope_parameters.rope_type"),
    ),
    "rms_norm_eps": ({"rms_norm_eps": 1e-5}, ("rms_norm_eps",)),
    "activation": ({"hidden_act": "gelu"}, ("hidden_act",)),
}


@pytest.mark.parametrize(("changed", "names"), CHANGED.values(), ids=CHANGED)
def test_a_field_that_changes_the_kv_is_named(changed: dict[str, Any], names: tuple[str, ...]) -> None:
    other = LlamaConfig.from_dict(LLAMA.to_dict() | changed)

    assert model_fingerprint(model_of(other)).differences(model_fingerprint(random_llama())) == names


def test_the_dtype_and_the_family_are_named() -> None:
    llama = model_fingerprint(random_llama())

    assert model_fingerprint(random_llama().to(torch.bfloat16)).differences(llama) == ("dtype",)
    assert "model_type" in model_fingerprint(model_of(GEMMA_3)).differences(llama)
    assert (llama.fields["model_type"], llama.fields["dtype"]) == ("llama", "torch.float32")


def test_names_labels_and_what_training_uses_change_nothing() -> None:
    model = model_of(LLAMA)
    before = model_fingerprint(model)
    cosmetic: dict[str, Any] = {
        "_name_or_path": "elsewhere",
        "transformers_version": "4.0.0",
        "architectures": ["Another"],
        "eos_token_id": [1, 2],
        "bos_token_id": 7,
        "use_cache": False,
        "attention_dropout": 0.5,
        "id2label": {0: "a", 1: "b"},
        "initializer_range": 0.5,
        "output_hidden_states": True,
    }
    for name, value in cosmetic.items():
        setattr(model.config, name, value)
    model.set_attn_implementation("eager")

    assert model_fingerprint(model) == before


def test_fields_of_every_type_are_taken_and_their_number_is_bounded() -> None:
    model = model_of(LLAMA)
    model.config.odd = {"limits": [0.0, float("inf")], "nan": float("nan"), "dtype_of": torch.float32, "none": None}
    model.config.long = "x" * 5000
    model.config.many = {f"{number}": number for number in range(2000)}

    fingerprint = model_fingerprint(model)

    assert fingerprint.fields["odd.limits"] == "[0.0, Infinity]"
    assert (fingerprint.fields["odd.nan"], fingerprint.fields["odd.none"]) == ("NaN", None)
    assert str(fingerprint.fields["long"]).startswith("sha256:")
    assert len(fingerprint.fields) < 64
    model.config.many = dict(reversed(model.config.many.items()))
    assert model_fingerprint(model) == fingerprint
    model.config.many["1999"] = 0
    assert model_fingerprint(model).differences(fingerprint) == ("many",)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 16,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_passes_over_long_sequences_change_nothing(rope: dict[str, Any]) -> None:
    config = deepcopy(LLAMA)
    config.rope_parameters, config.max_position_embeddings = rope, 16
    model = model_of(config)
    before, frequencies = model_fingerprint(model), model.model.rotary_emb.inv_freq.clone()

    with torch.inference_mode():
        model(torch.tensor([random_prompt(40)]))

    assert not torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert model_fingerprint(model) == before


# ---------------------------------------------------------------- what has none


def unreadable() -> Iterator[tuple[Any, str]]:
    yield object(), "model must be a transformers model with its config, not object"
    yield LLAMA, "model must be a transformers model .* not LlamaConfig"
    yield torch.nn.Linear(2, 2), "model must be a transformers model .* not Linear"
    with torch.device("meta"):
        yield AutoModelForCausalLM.from_config(LLAMA), "'model.embed_tokens.weight' has no bits to read .* meta device"
    sparse = random_llama()
    sparse.register_buffer("s", torch.eye(3).to_sparse())
    yield sparse, "model: 's' has no bits to read"


def test_what_has_no_fingerprint_is_refused_by_name() -> None:
    for model, fault in unreadable():
        with pytest.raises(InvalidRequest, match=fault):
            model_fingerprint(model)


def test_a_fingerprint_of_ones_own_compares_in_the_same_way() -> None:
    one = ModelFingerprint(fields={"a": 1, "b": None, "c": True}, weights="1")
    same = ModelFingerprint(fields={"c": 1, "b": None, "a": 1.0}, weights="1")
    other = ModelFingerprint(fields={"a": 1.5, "c": True, "\x1b": "\x1b"}, weights="2")

    assert one == same and str(one) == str(same) and hash(one) == hash(same)
    assert one.differences(other) == ("\x1b", "a", "b")
    assert one.difference(other) == "\\x1b is absent, not '\\x1b'; a is 1, not 1.5; b is None, not absent"
    assert len(str(one)) == 16 and str(one) != str(other)
    many = ModelFingerprint(fields={f"{number}": number for number in range(100)}, weights="1")
    assert many.difference(one).endswith("and 95 more fields")
