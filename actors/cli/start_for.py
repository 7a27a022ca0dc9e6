"""`raydix start --for ENGINE`: caches that fit an engine, and the engine's command line."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group
from rich.text import Text

from raydix.actors.cli.cluster import cache_names, join
from raydix.actors.cli.failures import USAGE, CommandError
from raydix.actors.cli.output import show
from raydix.actors.cli.start_one import start_one, table_of_started
from raydix.actors.cluster.capacity import Capacity, read_capacity
from raydix.actors.cluster.rank_names import rank_name
from raydix.schemas.cache_name import check_cache_name
from raydix.schemas.shown import brief, counted

if TYPE_CHECKING:
    from raydix.actors.cluster.settings import Settings
    from raydix.actors.engines.engine_kv import EngineKV
    from raydix.actors.engines.vllm.cache import EngineOptions

_ENGINES = ("vllm",)
_NAME = "kv-0"
_TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class EngineWishes(NamedTuple):
    """The options of `raydix start` about an engine, as given."""

    engine: str | None
    model: tuple[str, ...]
    capacity: str | None
    tensor_parallel: int | None
    kv_cache_dtype: str | None
    block_size: int | None
    dtype: str | None
    check: bool


def check_engine(wishes: EngineWishes) -> None:
    """Check that the options about an engine go together.

    Raises:
        CommandError: an engine is unknown, or an option is missing or without an engine; the message names it.
    """
    given = [
        f"--{name.replace('_', '-')}" for name, value in wishes._asdict().items() if value not in (None, False, ())
    ]
    if wishes.engine is None:
        if given:
            named = "MODEL" if given[0] == "--model" else given[0]
            advice = "raydix start --for vllm MODEL --capacity 8GiB"
            if named == "--capacity":
                advice += "; without an engine: --set pool.num_slots=1M"
            raise CommandError(f"{named} must come with --for vllm", advice, USAGE)
        return
    if wishes.engine not in _ENGINES:
        raise CommandError(f"--for must be {' or '.join(_ENGINES)}, not {brief(wishes.engine)}", "--for vllm", USAGE)
    if not wishes.model:
        raise CommandError("--for vllm must come with a model", "raydix start --for vllm MODEL --capacity 8GiB", USAGE)
    if wishes.capacity is None:
        raise CommandError("--for vllm must come with --capacity", "--capacity 8GiB, or a number of tokens", USAGE)


def start_for_engine(
    wishes: EngineWishes,
    file: Path | None,
    given: Iterable[str],
    name: str | None,
    worker_cpus: int,
    timeout_s: float,
    address: str | None,
    namespace: str,
    as_json: bool,
) -> None:
    """Read the engine's configuration, start a cache for each rank, and print the engine's command line."""
    from raydix.actors.engines.vllm.cache import EngineOptions, ReadFailed, has_vllm, read_in_own_process
    from raydix.schemas import InvalidRequest

    assert wishes.capacity is not None, "checked before"
    capacity = read_capacity(wishes.capacity, "--capacity")
    model, *more = wishes.model
    try:
        options = EngineOptions(
            model, wishes.tensor_parallel, wishes.dtype, wishes.kv_cache_dtype, wishes.block_size, tuple(more)
        )
    except InvalidRequest as error:
        raise CommandError(str(error), exit_code=USAGE) from error
    if not has_vllm():
        raise CommandError(
            f"vLLM reads the configuration of the model, and it is not installed for {sys.executable}",
            "run it in the engine's environment, which has vllm, after: pip install raydix",
            USAGE,
        )
    join(address, namespace)
    try:
        kvs = read_in_own_process(options)
    except ReadFailed as error:
        raise CommandError(str(error), "vllm serve with the same model and options shows more") from error
    settings = _settings_for(kvs[0], capacity, wishes.check, file, given, name)
    names = [settings.name] if len(kvs) == 1 else [rank_name(settings.name, rank) for rank in range(len(kvs))]
    there = cache_names(namespace)
    _check_names(settings, names, there, namespace, timeout_s)

    from raydix.actors.cluster.placement import num_gpus
    from raydix.actors.transport.pool_memory import may_lie_on_gpu

    on_gpu = may_lie_on_gpu(settings.config) and num_gpus() > 0
    started = []
    for each in names:
        facts = start_one(settings.config, each, namespace, on_gpu, worker_cpus, timeout_s)
        started.append(facts | {"reused": each in there})
    connector: dict[str, Any] = {"cache": settings.name}
    if address and address != "auto":
        connector["ray_address"] = address
    if namespace != "raydix":
        connector["namespace"] = namespace
    if wishes.check:
        connector["check"] = True
    result = {
        "caches": started,
        "page_size": settings.config.page_size,
        "block_size": kvs[0].block_size,
        "token_bytes": sum(kvs[0].slot_bytes),
        "reads": kvs[0].reads,
        "environment": {"RAY_AUTH_MODE": "token"} if os.environ.get("RAY_AUTH_MODE") == "token" else {},
        "command": options.command(connector),
    }
    show(result, as_json, lambda: _report(result, options))


def _settings_for(
    kv: EngineKV, capacity: Capacity, check: bool, file: Path | None, given: Iterable[str], name: str | None
) -> Settings:
    """Return the settings of a rank's cache: the engine's, to which the user's are added.

    Raises:
        ConfigMismatch: the user's do not fit the engine.
        SettingsError: a setting is wrong.
    """
    from raydix.actors.cluster.settings import load_settings

    num_tokens = capacity.num_tokens(kv.block_size, _token_bytes(kv, check))
    pool = kv.pool_config(num_tokens, check=check).model_dump(mode="json", exclude_defaults=True)
    defaults: dict[tuple[str, ...], Any] = {("name",): _NAME, ("page_size",): kv.block_size}
    defaults |= {("pool", key): value for key, value in pool.items()}
    settings = load_settings(file, options=given, name=name, defaults=defaults)
    kv.check_config(settings.config, check=check)
    if settings.config.pool.num_slots != num_tokens:
        raise CommandError(
            f"pool.num_slots is {settings.config.pool.num_slots:,}, not the {num_tokens:,} of --capacity",
            "set --capacity only",
            USAGE,
        )
    return settings


def _token_bytes(kv: EngineKV, check: bool) -> int:
    """Return the bytes of a token in all layers of a rank's pool."""
    pool = kv.pool_config(kv.block_size, check=check)
    return sum(head_dim for _, head_dim, _ in pool.layer_shapes)


def _check_names(settings: Settings, names: list[str], there: list[str], namespace: str, timeout_s: float) -> None:
    """Check the caches that run already, so that none is started if one does not fit.

    Raises:
        CommandError: a name is too long, or other caches have the names of this one's ranks.
        ConfigMismatch: one of them runs with another configuration.
    """
    from raydix.actors.cluster.deploy import connect

    for each in names:
        try:
            check_cache_name(each)
        except ValueError as error:
            raise CommandError(f"the name of a cache {error}", "a shorter --name", USAGE) from None
    ranks = re.compile(rf"{re.escape(settings.name)}(-tp\d+)?")
    if others := [each for each in there if ranks.fullmatch(each) and each not in names]:
        raise CommandError(
            f"the caches of {settings.name!r} would be {', '.join(names)}, but {', '.join(others)} runs: an engine "
            "with another number of ranks has that name",
            f"another --name, or raydix stop {' '.join(others)}",
        )
    for each in names:
        if each in there:
            connect(each, namespace=namespace, config=settings.config, timeout_s=timeout_s)


def _report(result: dict[str, Any], options: EngineOptions) -> Group:
    started = result["caches"]
    words = [f"{name}={value}" for name, value in result["environment"].items()]
    words += [shlex.quote(each) for each in result["command"]]
    names = " ".join(each["name"] for each in started)
    facts = f"blocks of {counted(result['block_size'], 'token')}, "
    facts += f"{counted(result['token_bytes'], 'byte')} a token on each rank"
    lines = [
        f"engine:   {brief(options.model)}: {facts}",
        f"start:    {' '.join(words)}",
        f"watch:    raydix stats {started[0]['name']} --watch",
        f"end:      raydix stop {names}",
    ]
    if result["environment"] and (found := [each for each in _TOKEN_VARIABLES if each in os.environ]):
        lines.append(f"note:     the engine needs {' and '.join(found)} as well, as in this shell")
    if not result["reads"]:
        lines.append("note:     vLLM switches its prefix caching off for this model: the engine loads no KV")
    return Group(table_of_started(started), Text("\n".join(lines)))
