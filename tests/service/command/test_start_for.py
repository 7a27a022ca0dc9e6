"""`raydix start --for vllm` without vLLM; tests/engines has the tests with it."""

from __future__ import annotations

import sys

import pytest
from support.processes.command_line import run, run_json

from raydix.actors.engines.vllm.cache import has_vllm

FOR = ("start", "--for", "vllm", "a-model")


@pytest.mark.skipif(has_vllm(), reason="vLLM is installed here")
def test_elsewhere_than_in_the_engines_environment_the_message_says_where_to_run_it() -> None:
    error = run_json(*FOR, "--capacity", "8GiB", exit_code=2)["error"]

    assert f"it is not installed for {sys.executable}" in error["message"]
    assert "run it in the engine's environment, which has vllm" in error["advice"]


@pytest.mark.skipif(has_vllm(), reason="vLLM is installed here")
def test_a_host_tier_goes_with_an_engines_pool_on_a_gpu() -> None:
    on_gpu = ("--set", "pool.device=cuda", "--host-capacity", "4x")

    assert "vLLM reads the configuration" in run(*FOR, "--capacity", "1M", *on_gpu, exit_code=2).stderr


@pytest.mark.skipif(has_vllm(), reason="vLLM is installed here")
@pytest.mark.parametrize("more", [(), ("--set", "pool.device=cuda", "--host-capacity", "4x")])
def test_a_disk_goes_with_an_engines_pool_in_host_memory_or_below_a_host_tier(more: tuple[str, ...]) -> None:
    disk = ("--disk", "/nvme/raydix:1TiB")

    assert "vLLM reads the configuration" in run(*FOR, "--capacity", "1M", *disk, *more, exit_code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (FOR, "--for vllm must come with --capacity"),
        ((*FOR, "--capacity", "8 G of RAM"), "--capacity must be tokens"),
        ((*FOR, "--capacity", "1M", "--host-capacity", "lots"), "--host-capacity must be tokens"),
        (
            (*FOR, "--capacity", "1M", "--host-capacity", "4x"),
            "--host-capacity with --for vllm must come with pool.device=cuda",
        ),
        (
            (*FOR, "--capacity", "1M", "--set", "host.num_slots=64", "--set", "pool.device=auto"),
            "--set host.num_slots=64: host with --for vllm must come with pool.device=cuda",
        ),
        ((*FOR, "--capacity", "1M", "--disk", "/nvme"), "--disk must be PATH:SIZE, not '/nvme'"),
        (
            (*FOR, "--capacity", "1M", "--disk", "/nvme:1TiB", "--set", "pool.device=cuda"),
            "--disk with a pool on a GPU must come with --host-capacity: a disk lies below host memory",
        ),
        ((*FOR, "--capacity", "1M", "--count", 2), "--count does not go with --for"),
        ((*FOR, "--capacity", "1M", "--", "--kv-transfer-config", "{}"), "'--kv-transfer-config' must not be among"),
        (("start", "--for", "other", "a-model", "--capacity", "1M"), "--for must be vllm, not 'other'"),
        (("start", "a-model"), "MODEL must come with --for vllm"),
        (("start", "--tensor-parallel", 2), "--tensor-parallel must come with --for vllm"),
    ],
)
def test_wrong_usage_is_named_before_anything_is_read(arguments: tuple[object, ...], message: str) -> None:
    assert message in run(*arguments, exit_code=2).stderr
