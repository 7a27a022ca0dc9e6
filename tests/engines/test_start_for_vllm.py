"""`raydix start --for vllm`: the KV that vLLM makes of a model, the caches that fit, and an engine with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import ray
from support.engines.engine_process import EngineProcess
from support.engines.laboratory import Laboratory, prompt, slot_bytes
from support.processes.command_line import run, run_json
from support.waiting import wait_until

from raydix.actors.engines.vllm.cache import EngineOptions, read_in_own_process
from raydix.schemas import InvalidRequest

DEFAULT_BLOCK = 128  # vLLM's on a CPU; 16 for MLA


@pytest.fixture
def name(ray_address: str) -> Iterator[str]:
    """A name for caches; they are ended after the test."""
    name = f"kv-{uuid4().hex[:8]}"
    yield name
    for each in run_json("list"):
        if each["name"].startswith(name):
            run("stop", each["name"])


@pytest.mark.parametrize(
    ("kind", "ranks", "dtype", "kv_dtype", "block_size", "expected_block"),
    [
        ("llama", None, "bfloat16", None, None, DEFAULT_BLOCK),
        ("llama", 2, "float32", "fp8", 64, 64),
        ("gemma3", None, "float32", None, 32, 32),
        ("deepseek", None, "float32", None, None, 16),
    ],
)
def test_the_kv_is_what_vllm_makes_of_the_model(
    laboratory: Laboratory,
    kind: str,
    ranks: int | None,
    dtype: str,
    kv_dtype: str | None,
    block_size: int | None,
    expected_block: int,
) -> None:
    more = {} if ranks is None else {"num_key_value_heads": 2}
    model = laboratory.save_model(kind, **more)

    kvs = read_in_own_process(EngineOptions(str(model), ranks, dtype, kv_dtype, block_size))

    assert [each.fields["rank"] for each in kvs] == list(range(ranks or 1))
    expected = slot_bytes(kind, kv_dtype or dtype, ranks or 1, **more)
    assert {each.block_size for each in kvs} == {expected_block}
    assert {tuple(segment.bytes for segment in kv.segments) for kv in kvs} == {expected}
    assert kvs[0].reads == (kind != "deepseek")  # vLLM on a CPU switches its prefix caching off for MLA


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("lfm2", (), r"KV cache group \d \(layer model.layers.0\S*\) is a \w+, which RaydixConnector does not serve"),
        ("llama", ("--pipeline-parallel-size", "2"), "pipeline_parallel_size must be 1 with RaydixConnector, not 2"),
        ("llama", ("--block-size", "many"), "vLLM refuses the engine's options: .*block-size"),
        ("llama", ("--max-model-len", "1000000"), "vLLM refuses the model .* or its options: .*max_model_len"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    laboratory: Laboratory, kind: str, more: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"(?s){message}"):
        read_in_own_process(EngineOptions(str(laboratory.save_model(kind)), more=more))


def test_a_model_that_does_not_exist_is_named(laboratory: Laboratory) -> None:
    missing = laboratory.folder / "no-model"

    with pytest.raises(InvalidRequest, match="no-model"):
        read_in_own_process(EngineOptions(str(missing)))


def start_printed(laboratory: Laboratory, command: list[str], **changed: Any) -> EngineProcess:
    """Start an engine with the printed options."""
    assert command[:2] == ["vllm", "serve"]
    model, *words = [word for word in command[2:] if word != "--enable-prompt-tokens-details"]  # of the HTTP server
    options = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    transfer = json.loads(options.pop("kv_transfer_config"))
    given = {name: int(value) if value.isdigit() else value for name, value in options.items()}
    log = laboratory.folder / f"engine-{len(laboratory.engines)}.log"
    connector = transfer.pop("kv_connector_extra_config")
    engine = EngineProcess(model, connector, log, transfer=transfer, **{**given, **changed})
    laboratory.engines.append(engine)
    return engine


def test_an_engine_with_the_printed_options_uses_the_cache_and_one_with_other_blocks_is_refused(
    laboratory: Laboratory, name: str
) -> None:
    model = laboratory.save_model("llama")
    options = (
        "--dtype",
        "bfloat16",
        "--block-size",
        64,
        "--name",
        name,
        "--check",
        "--address",
        laboratory.ray_address,
    )

    started = run_json("start", "--for", "vllm", model, "--capacity", "1MiB", *options)

    assert [(each["name"], each["reused"]) for each in started["caches"]] == [(name, False)]
    token_bytes = sum(slot_bytes("llama", "bfloat16"))
    assert started["token_bytes"] == token_bytes
    num_tokens = 2**20 // (token_bytes + 16)  # a stamp of 16 bytes each
    assert started["caches"][0]["num_slots"] == num_tokens - num_tokens % 64
    engine = start_printed(laboratory, started["command"])
    other = start_printed(laboratory, started["command"], block_size=32)
    laboratory.caches[name] = ray.get_actor(name, namespace="raydix")
    alone = engine.answer(prompt(300), 8)
    wait_until(lambda: laboratory.stats(name).tree_slots >= 256)
    engine.forget()
    loaded = engine.answer(prompt(300), 8)
    assert (loaded["tokens"], loaded["cached"]) == (alone["tokens"], 256)
    with pytest.raises(RuntimeError):
        other.wait_until_ready()
    assert "page_size is 64, not 32 or a divisor of it" in other.log.read_text()
    laboratory.client(name).close()
    del laboratory.clients[name]
    engine.close()
    laboratory.caches.pop(name)


def test_each_rank_has_a_cache_and_unfit_ones_are_refused_before_any_is_started(
    laboratory: Laboratory, name: str
) -> None:
    model = laboratory.save_model("llama", num_key_value_heads=2)
    base = ("start", "--for", "vllm", model, "--dtype", "float32", "--name", name, "--address", laboratory.ray_address)
    two = (*base, "--tensor-parallel", 2, "--capacity")

    unfit = run_json(*two, 4608, "--set", "page_size=48", exit_code=1)["error"]
    assert "page_size is 48, not 128 or a divisor of it" in unfit["message"]
    assert [each for each in run_json("list") if each["name"].startswith(name)] == []

    started = run_json(*two, "5k", "--set", "page_size=32")
    assert [each["name"] for each in started["caches"]] == [f"{name}-tp0", f"{name}-tp1"]
    assert {each["num_slots"] for each in started["caches"]} == {4992}
    assert json.loads(started["command"][-1])["kv_connector_extra_config"]["cache"] == name
    text = run(*two, "5k", "--set", "page_size=32").stdout
    assert text.count("ran already") == 2
    details = "--enable-prompt-tokens-details"
    assert f"vllm serve {model} --tensor-parallel-size 2 --dtype float32 {details} --kv-transfer-config '{{" in text
    assert "num_slots is 4992, not 3968" in run(*two, "4k", "--set", "page_size=32", exit_code=1).stderr
    one_rank = run(*base, "--capacity", 4096, exit_code=1).stderr
    assert f"{name}-tp0, {name}-tp1 runs" in one_rank
