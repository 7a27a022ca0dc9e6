"""The options of `raydix start` about an engine."""

from __future__ import annotations

import json

import pytest
from support.engines.toy_engine import BLOCK, toy_kv

from raydix.actors.cli.failures import USAGE, CommandError
from raydix.actors.cli.start_for import EngineWishes, _settings_for, check_engine
from raydix.actors.cluster.capacity import read_capacity
from raydix.actors.engines.settings import EngineSettings
from raydix.actors.engines.vllm.cache import EngineOptions
from raydix.schemas import DiskConfig, InvalidRequest

NOTHING = EngineWishes(None, (), None, None, None, None, None, False)
WISHES = NOTHING._replace(engine="vllm", model=("a-model",), capacity="1M")


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (NOTHING._replace(model=("a-model",)), "MODEL must come with --for vllm"),
        (NOTHING._replace(block_size=16), "--block-size must come with --for vllm"),
        (NOTHING._replace(check=True), "--check must come with --for vllm"),
        (WISHES._replace(engine="other"), "--for must be vllm, not 'other'"),
        (WISHES._replace(model=()), "must come with a model"),
        (WISHES._replace(capacity=None), "must come with --capacity"),
    ],
)
def test_options_that_do_not_go_together_are_refused(wishes: EngineWishes, message: str) -> None:
    with pytest.raises(CommandError, match=message) as caught:
        check_engine(wishes)

    assert caught.value.exit_code == USAGE


def test_options_that_go_together_are_taken() -> None:
    check_engine(NOTHING)
    check_engine(WISHES)


@pytest.mark.parametrize(
    ("size", "num_ranks", "fields"),
    [
        ("1GiB", 1, {"size": 2**30}),
        ("1GiB", 4, {"size": 2**28}),
        ("4x", 4, {"num_slots": 4 * 1024}),
        ("2048", 2, {"num_slots": 2048}),
    ],
)
def test_a_disk_lies_directly_below_an_engines_pool_and_its_bytes_are_divided_over_ranks(
    size: str, num_ranks: int, fields: dict[str, int]
) -> None:
    capacity = read_capacity("1024", "--capacity")

    config = _settings_for(toy_kv(), num_ranks, capacity, WISHES, None, {"disk": f"/nvme:{size}"}).config

    assert config.disk == DiskConfig(path="/nvme", **fields)  # type: ignore[arg-type]
    assert (config.host, config.pool.device, config.page_size, config.pool.num_slots) == (None, "cpu", BLOCK, 1024)


def test_the_command_line_has_every_option_that_was_given() -> None:
    options = EngineOptions("a-model", 2, "bfloat16", "fp8", 64, ("--max-model-len", "4096"))

    *words, transfer = options.command({"cache": "kv-0", "check": True})

    given = "--tensor-parallel-size 2 --dtype bfloat16 --kv-cache-dtype fp8 --block-size 64 --max-model-len 4096"
    details = "--enable-prompt-tokens-details"
    assert words == ["vllm", "serve", "a-model", *given.split(), details, "--kv-transfer-config"]
    extra = json.loads(transfer).pop("kv_connector_extra_config")
    assert EngineSettings.of(extra) == EngineSettings(cache="kv-0", check=True)


def test_the_command_line_has_no_option_that_was_not_given() -> None:
    given = EngineOptions("a-model").command({"cache": "kv-0"})[:-1]

    assert given == "vllm serve a-model --enable-prompt-tokens-details --kv-transfer-config".split()


@pytest.mark.parametrize("word", ["--no-enable-prompt-tokens-details", "--enable_prompt_tokens_details=true"])
def test_a_user_may_set_whether_answers_name_their_cached_tokens(word: str) -> None:
    given = EngineOptions("a-model", more=(word,)).command({"cache": "kv-0"})[:-1]

    assert given == ["vllm", "serve", "a-model", word, "--kv-transfer-config"]


@pytest.mark.parametrize(
    "word",
    ["--kv-transfer-config", "--kv_transfer_config={}", "--kv-transfer-config.kv_role", "--kv-transfer-config={}"],
)
def test_another_connector_is_refused(word: str) -> None:
    with pytest.raises(InvalidRequest, match="RaydixConnector sets it"):
        EngineOptions("a-model", more=(word,))


@pytest.mark.parametrize("model", ["", "--block-size"])
def test_a_model_must_be_named(model: str) -> None:
    with pytest.raises(InvalidRequest, match="must be a folder or a name on the hub"):
        EngineOptions(model)
