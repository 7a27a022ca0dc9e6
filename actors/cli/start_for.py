"""`raydix start --for ENGINE`: caches that fit an engine, and the engine's command line."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group
from rich.text import Text

from raydix.actors.cli.cluster import cache_names, join
from raydix.actors.cli.engine_nodes import SHORT_ID, check_memory, check_no_node_is_named, choose_nodes, name_engines
from raydix.actors.cli.failures import USAGE, CommandError
from raydix.actors.cli.output import show
from raydix.actors.cli.start_one import start_one, table_of_started
from raydix.actors.cluster.capacity import DISK_OPTION, HOST_OPTION, Capacity, read_capacity, read_tier_capacity
from raydix.actors.cluster.rank_names import rank_name
from raydix.schemas.cache_name import check_cache_name
from raydix.schemas.shown import brief, byte_size, counted

if TYPE_CHECKING:
    from raydix.actors.cluster.settings import Settings
    from raydix.actors.cluster.settings_file import Sources, StandardInput
    from raydix.actors.engines.engine_kv import EngineKV
    from raydix.actors.engines.vllm.cache import EngineOptions

_ENGINES = ("vllm",)
_NAME = "kv-0"
_NAMES = "kv"  # kv-0, kv-1, ... on several nodes
_CONNECT_S = 60.0
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
    node: str | None = None
    every_gpu_node: bool = False


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
    if wishes.node is not None and wishes.every_gpu_node:
        raise CommandError("--node does not go with --every-gpu-node", "one of them", USAGE)
    if wishes.capacity is None:
        raise CommandError("--for vllm must come with --capacity", "--capacity 8GiB, or a number of tokens", USAGE)


def start_for_engine(
    wishes: EngineWishes,
    file: Path | StandardInput | None,
    sources: Sources,
    worker_cpus: int,
    timeout_s: float | None,
    address: str | None,
    namespace: str,
    as_json: bool,
) -> None:
    """Read the engine's configuration, start a cache for each rank, and print the engine's command line."""
    from raydix.actors.engines.vllm.cache import EngineOptions, ReadFailed, has_vllm, read_in_own_process
    from raydix.schemas import InvalidRequest

    assert wishes.capacity is not None, "checked before"
    capacity = read_capacity(wishes.capacity, "--capacity")
    check_tiers(file, sources)
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
            "run it in the engine's environment, which has vllm; there first, in the clone: pip install .",
            USAGE,
        )
    join(address, namespace)
    try:
        kvs = read_in_own_process(options)
    except ReadFailed as error:
        raise CommandError(str(error), "vllm serve with the same model and options shows more") from error
    settings = _settings_for(kvs[0], len(kvs), capacity, wishes, file, sources)
    in_memory = not settings.config.pool.may_lie_on_gpu
    if not in_memory:
        check_no_node_is_named(wishes.node, wishes.every_gpu_node)
    nodes: list[str] | list[None] = _nodes(wishes) if in_memory else [None]
    engines = [settings.name]
    if wishes.every_gpu_node:
        engines = name_engines(settings.name, [node for node in nodes if node], _running(settings.name, namespace))
    names = {engine: _names_of_ranks(engine, len(kvs)) for engine in engines}
    there = cache_names(namespace)
    _check_names(settings, names, there, namespace, timeout_s)

    from raydix.actors.cluster.placement import free_memory, num_gpus
    from raydix.actors.memory.pool_shapes import layout_of

    on_gpu = not in_memory and num_gpus() > 0
    for engine, node_id in zip(engines, nodes, strict=True):
        if node_id is not None:
            num_new = sum(cache not in there for cache in names[engine])
            check_memory(num_new, layout_of(settings.config).num_bytes, node_id, free_memory(node_id))
    started = []
    for engine, node_id in zip(engines, nodes, strict=True):
        for cache in names[engine]:
            facts = start_one(settings.config, cache, namespace, on_gpu, worker_cpus, timeout_s, node_id)
            started.append(facts | {"reused": cache in there})
    connector: dict[str, Any] = {"cache": engines[0]}
    if address and address != "auto":
        connector["ray_address"] = address
    if namespace != "raydix":
        connector["namespace"] = namespace
    if wishes.check:
        connector["check"] = True
    result = {
        "caches": started,
        "engines": engines,
        "page_size": settings.config.page_size,
        "block_size": kvs[0].block_size,
        "token_bytes": kvs[0].token_bytes,
        "reads": kvs[0].reads,
        "environment": {"RAY_AUTH_MODE": "token"} if os.environ.get("RAY_AUTH_MODE") == "token" else {},
        "command": options.command(connector),
    }
    show(result, as_json, lambda: _report(result, options))


def check_tiers(file: Path | StandardInput | None, sources: Sources) -> None:
    """Check that an engine's cache has a host tier only below a pool on a GPU, and a disk tier below host memory.

    Args:
        file, sources: of the settings, as of `load_settings`.

    Raises:
        CommandError: the pool is host memory itself, as by default, or may be, and has a host tier; or it lies on a
            GPU, and has a disk tier alone.
        SettingsError: a source cannot be read, or `--host-capacity` or `--disk` has another form.
    """
    from raydix.actors.cluster.settings import given_settings

    if (host_capacity := sources.get("host_capacity")) is not None:
        read_tier_capacity(host_capacity, HOST_OPTION, pool_slots=1)
    settings, places = given_settings(file, **sources)
    pool = settings.get("pool")
    device = pool.get("device") if isinstance(pool, dict) else None
    on_gpu = str(device).startswith("cuda")
    if settings.get("disk") is not None and on_gpu and settings.get("host") is None:
        place = places.get(("disk", "path"), places.get(("disk",), "the settings"))
        raise CommandError(
            f"{place if place == DISK_OPTION else f'{place}: disk'} with a pool on a GPU must come with "
            f"{HOST_OPTION}: a disk lies below host memory",
            f"{HOST_OPTION} 4x, or leave out pool.device",
            USAGE,
        )
    if settings.get("host") is not None and not on_gpu:
        place = places.get(("host", "num_slots"), places.get(("host",), "the settings"))
        raise CommandError(
            f"{place if place == HOST_OPTION else f'{place}: host'} with --for vllm must come with pool.device=cuda: "
            "else the pool is host memory itself",
            "a larger --capacity, or --set pool.device=cuda",
            USAGE,
        )


def _settings_for(
    kv: EngineKV,
    num_ranks: int,
    capacity: Capacity,
    wishes: EngineWishes,
    file: Path | StandardInput | None,
    sources: Sources,
) -> Settings:
    """Return the settings of a rank's cache: the engine's, to which the user's are added.

    Raises:
        ConfigMismatch: the user's do not fit the engine.
        SettingsError: a setting is wrong.
    """
    from raydix.actors.cluster.settings import load_settings

    check = wishes.check
    num_tokens = capacity.num_tokens(kv.block_size, kv.pool_config(kv.block_size, check=check).slot_bytes)
    pool = kv.pool_config(num_tokens, check=check).model_dump(mode="json", exclude_defaults=True)
    defaults: dict[tuple[str, ...], Any] = {
        ("name",): _NAMES if wishes.every_gpu_node else _NAME,
        ("page_size",): kv.block_size,
    }
    defaults |= {("pool", key): value for key, value in pool.items()}
    settings = load_settings(file, **(sources | {"num_ranks": num_ranks, "defaults": defaults}))
    kv.check_config(settings.config, check=check)
    if settings.config.pool.num_slots != num_tokens:
        raise CommandError(
            f"pool.num_slots is {settings.config.pool.num_slots:,}, not the {num_tokens:,} of --capacity",
            "set --capacity only",
            USAGE,
        )
    return settings


def _names_of_ranks(engine: str, num_ranks: int) -> list[str]:
    return [engine] if num_ranks == 1 else [rank_name(engine, rank) for rank in range(num_ranks)]


def _nodes(wishes: EngineWishes) -> list[str]:
    import ray

    from raydix.actors.cluster.placement import alive_nodes

    here = ray.get_runtime_context().get_node_id()
    return choose_nodes(wishes.node, wishes.every_gpu_node, alive_nodes(), here)


def _running(name: str, namespace: str) -> dict[str, str | None]:
    """Return the node of each running cache NAME-0, NAME-1, ..., by its name without its rank."""
    from raydix.actors.cluster.placement import pools_of

    nodes: dict[str, str | None] = {}
    for cache, pool in pools_of(f"{escape(name)}-*", namespace).items():
        if found := re.fullmatch(rf"({re.escape(name)}-\d+)(-tp\d+)?", cache):
            nodes[found[1]] = pool.node_id if pool is not None else nodes.get(found[1])
    return nodes


def _check_names(
    settings: Settings, names: Mapping[str, list[str]], there: list[str], namespace: str, timeout_s: float | None
) -> None:
    """Check the caches that run already, so that none is started if one does not fit.

    Args:
        names: of the caches of all ranks, by the name that an engine has for them.

    Raises:
        CommandError: a name is too long, or other caches have the names of these ranks.
        ConfigMismatch: one of them runs with another configuration.
    """
    from raydix.actors.cluster.deploy import connect

    for engine, of_ranks in names.items():
        for cache in of_ranks:
            try:
                check_cache_name(cache)
            except ValueError as error:
                raise CommandError(f"the name of a cache {error}", "a shorter --name", USAGE) from None
        ranks = re.compile(rf"{re.escape(engine)}(-tp\d+)?")
        if others := [cache for cache in there if ranks.fullmatch(cache) and cache not in of_ranks]:
            raise CommandError(
                f"the caches of {engine!r} would be {', '.join(of_ranks)}, but {', '.join(others)} runs: an engine "
                "with another number of ranks has that name",
                f"another --name, or raydix stop {' '.join(others)}",
            )
        for cache in of_ranks:
            if cache in there:
                connect(cache, namespace=namespace, config=settings.config, timeout_s=timeout_s or _CONNECT_S)


def _report(result: dict[str, Any], options: EngineOptions) -> Group:
    started = result["caches"]
    words = [f"{name}={value}" for name, value in result["environment"].items()]
    words += [shlex.quote(word) for word in result["command"]]
    names = " ".join(cache["name"] for cache in started)
    num_bytes = sum(cache["num_bytes"] for cache in started)
    facts = f"blocks of {counted(result['block_size'], 'token')}, "
    facts += f"{counted(result['token_bytes'], 'byte')} a token on each rank"
    if len(started) > 1:
        facts += f"; {byte_size(num_bytes)} in {counted(len(started), 'pool')}"
    lines = [
        f"engine:   {brief(options.model)}: {facts}",
        f"start:    {' '.join(words)}",
        f"watch:    raydix stats {started[0]['name']} --watch",
        f"end:      raydix stop {names}",
    ]
    if result["environment"] and (found := [name for name in _TOKEN_VARIABLES if name in os.environ]):
        lines.append(f"note:     the engine needs {' and '.join(found)} as well, as in this shell")
    first_ranks = started[:: len(started) // len(result["engines"])]
    for engine, cache in list(zip(result["engines"], first_ranks, strict=True))[1:]:
        lines.append(f"note:     on node {cache['node_id'][:SHORT_ID]}, the engine's cache is {engine!r}")
    if not result["reads"]:
        lines.append("note:     vLLM switches its prefix caching off for this model: the engine loads no KV")
    return Group(table_of_started(started), Text("\n".join(lines)))
