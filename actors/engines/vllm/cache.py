"""The cache that fits a vLLM engine: `EngineOptions`, the options of `vllm serve`, and the KV that vLLM makes of them.

vLLM builds the model without weights and without memory, so no GPU is used. Its global state and its output are those
of a process of their own: `read_in_own_process` runs this module.

    python -m raydix.actors.engines.vllm.cache RESULT OPTIONS     # both written by read_in_own_process
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from raydix.schemas import InvalidRequest
from raydix.schemas.shown import brief

if TYPE_CHECKING:
    from raydix.actors.engines.engine_kv import EngineKV

_READ_S = 600.0  # limit of the process that reads; vLLM alone takes many seconds to import
_LOG_CHARACTERS = 2000  # of its output, in the message if it fails
_ANY_MEMORY = 2**50  # bytes; the number of blocks does not matter here
_TRANSFER = "--kv-transfer-config"
_DETAILS = "enable-prompt-tokens-details"


@dataclass(frozen=True)
class EngineOptions:
    """The options of `vllm serve` that a user has given; None: vLLM's default.

    Attributes:
        model: a folder, or a name on Hugging Face's hub.
        tensor_parallel: the number of ranks.
        dtype: of the model, such as "bfloat16".
        kv_cache_dtype: of the KV cache, such as "fp8".
        block_size: tokens of a block.
        more: other words of the command line, as vLLM reads them. Those of the HTTP server are ignored.
    """

    model: str
    tensor_parallel: int | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    more: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the words in `more`.

        Raises:
            InvalidRequest: they name the connector, or the model is not named.
        """
        if not self.model or self.model.startswith("-"):
            raise InvalidRequest(f"the model must be a folder or a name on the hub, not {brief(self.model)}")
        for word in self.more:
            if word.partition("=")[0].replace("_", "-").startswith(_TRANSFER) or word.startswith(f"{_TRANSFER}."):
                raise InvalidRequest(f"{brief(word)} must not be among the engine's options: RaydixConnector sets it")

    def words(self) -> list[str]:
        """Return the options as words of `vllm serve MODEL`, without the connector's."""
        given = {
            "--tensor-parallel-size": self.tensor_parallel,
            "--dtype": self.dtype,
            "--kv-cache-dtype": self.kv_cache_dtype,
            "--block-size": self.block_size,
        }
        return [word for name, value in given.items() if value is not None for word in (name, str(value))] + [
            *self.more
        ]

    def command(self, settings: Mapping[str, Any]) -> list[str]:
        """Return the words of `vllm serve` with RaydixConnector and its settings.

        Unless `more` has that option, `usage` of the answers has the number of cached tokens.
        """
        words = self.words()
        if not any(word.partition("=")[0].replace("_", "-").endswith(_DETAILS) for word in self.more):
            words.append(f"--{_DETAILS}")
        return ["vllm", "serve", self.model, *words, _TRANSFER, json.dumps(transfer_config(settings))]


class ReadFailed(Exception):
    """vLLM could not read a model, for a reason that it did not name."""


def transfer_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of `--kv-transfer-config` for RaydixConnector with settings of `EngineSettings`."""
    return {
        "kv_connector": "RaydixConnector",
        "kv_connector_module_path": "raydix.actors.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",  # vLLM's default, "fail", would end a request with an error
        "kv_connector_extra_config": dict(settings),
    }


def has_vllm() -> bool:
    """Return whether vLLM is installed here."""
    return find_spec("vllm") is not None


def read_in_own_process(options: EngineOptions) -> list[EngineKV]:
    """Return the KV of each tensor-parallel rank of an engine, read in a process of its own.

    Raises:
        InvalidRequest: vLLM or RaydixConnector refuses the options or the model.
        ReadFailed: the process has failed; the message has the end of its output.
    """
    from raydix.actors.engines.engine_kv import EngineKV

    with TemporaryDirectory(prefix="raydix-") as folder:
        result, log = Path(folder, "result"), Path(folder, "log")
        asking = [sys.executable, "-m", __name__, str(result), json.dumps(asdict(options))]
        with log.open("wb") as output:
            try:
                done = subprocess.run(asking, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=_READ_S)
                ended = f"exit status {done.returncode}"
            except subprocess.TimeoutExpired:
                ended = f"no answer in {_READ_S:g} s"
        if not result.exists():
            text = log.read_text(errors="replace").strip()[-_LOG_CHARACTERS:]
            raise ReadFailed(f"vLLM has not read the model {brief(options.model)}: {ended}\n{text}")
        answer = json.loads(result.read_text())
    if "refused" in answer:
        raise InvalidRequest(answer["refused"])
    return TypeAdapter(list[EngineKV]).validate_python(answer["kv"])


def read_engine_kv(options: EngineOptions) -> list[EngineKV]:
    """Return the KV of each tensor-parallel rank of an engine, in this process; its vLLM cannot be used later.

    vLLM reads the options as `vllm serve` does, with RaydixConnector. It makes the model on torch's device "meta", in
    the place of rank 0; all ranks have layers of the same shape. The layers' specifications become KV cache groups as
    in vLLM's `EngineCore`.

    Raises:
        InvalidRequest: vLLM or RaydixConnector refuses the options or the model.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    from raydix.actors.engines.vllm.kv import check_layers, check_parallel, describe_vllm

    config = _read_config(options)
    check_parallel(config)
    num_ranks = config.parallel_config.tensor_parallel_size
    _take_place_of_rank_0(num_ranks)
    register_all_kvcache_specs(config)
    with set_current_vllm_config(config):
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            initialize_model(config)
        current_platform.update_block_size_for_backend(config)
        specs = get_kv_cache_spec(config)
        check_layers(specs)
        layouts = [each.name for each in get_supported_kv_cache_layouts(get_current_attn_backends(config))]
        resolve_kv_cache_layout(config, [layouts] * num_ranks, specs.values())
        of_ranks = get_kv_cache_configs(config, [dict(specs) for _ in range(num_ranks)], [_ANY_MEMORY] * num_ranks)
    for each in of_ranks:
        each.kv_cache_layout = config.cache_config.kv_cache_layout
    return [describe_vllm(config, each, rank) for rank, each in enumerate(of_ranks)]


def _read_config(options: EngineOptions) -> Any:
    """Return vLLM's `VllmConfig` for the options of `vllm serve`."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: Any = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())

    def refuse(message: str) -> None:
        raise InvalidRequest(f"vLLM refuses the engine's options: {message}")

    parser.error = refuse
    words = ["--model", options.model, *options.words(), _TRANSFER, json.dumps(transfer_config({"cache": "any"}))]
    try:
        given, _ = parser.parse_known_args(words)  # the rest are options of the HTTP server
        return AsyncEngineArgs.from_cli_args(given).create_engine_config()
    except (ValueError, OSError, NotImplementedError) as error:  # pydantic's errors are ValueErrors
        raise InvalidRequest(f"vLLM refuses the model {brief(options.model)} or its options: {error}") from error


def _take_place_of_rank_0(num_ranks: int) -> None:
    """Set vLLM's groups of ranks, without the other ranks' processes.

    A layer asks its group for its size and for its rank, to know its part of the heads; it sends nothing.
    """
    from vllm.distributed import parallel_state

    for name, size in (
        ("_WORLD", num_ranks),
        ("_TP", num_ranks),
        ("_ETP", num_ranks),
        ("_EP", num_ranks),
        ("_INNER_DP_WORLD", 1),
        ("_DP", 1),
        ("_PP", 1),
        ("_DCP", 1),
        ("_PCP", 1),
    ):
        group = parallel_state.GroupCoordinator.__new__(parallel_state.GroupCoordinator)
        group.rank = group.local_rank = group.rank_in_group = 0
        group.ranks, group.world_size = list(range(size)), size
        group.unique_name = f"raydix:{name}"
        group.device_communicator, group.use_device_communicator = None, False
        setattr(parallel_state, name, group)


def _main(result: str, options: str) -> None:
    from raydix.actors.engines.engine_kv import EngineKV

    given = json.loads(options)
    try:
        kvs = read_engine_kv(EngineOptions(**{**given, "more": tuple(given["more"])}))
        answer: dict[str, Any] = {"kv": TypeAdapter(list[EngineKV]).dump_python(kvs, mode="json")}
    except InvalidRequest as error:
        answer = {"refused": str(error)}
    Path(result).write_text(json.dumps(answer))


if __name__ == "__main__":
    _main(*sys.argv[1:])
