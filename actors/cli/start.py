"""`raydix start`: detached caches, one on each GPU, or those that fit an engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from raydix.actors.cli.cluster import Address, Namespace, cache_names, join
from raydix.actors.cli.failures import USAGE, CommandError
from raydix.actors.cli.output import AsJson, show
from raydix.actors.cli.start_for import EngineWishes, check_engine, start_for_engine
from raydix.actors.cli.start_one import start_one, table_of_started
from raydix.actors.cluster.settings_file import Sources, StandardInput

_of_engine = partial(typer.Option, rich_help_panel="Of the engine")


def start(
    model: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL [-- OPTION...]]",
            help="With --for: the engine's model, and after -- more options of the engine's command line.",
        ),
    ] = None,
    engine: Annotated[
        str | None, _of_engine("--for", metavar="vllm", help="Start what fits this engine, and print its command line.")
    ] = None,
    capacity: Annotated[
        str | None,
        _of_engine(
            metavar="TOKENS|GiB",
            help="Size of a rank's pool, such as 200_000, 1M or 8GiB; rounded down to whole blocks.",
        ),
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        _of_engine(
            "--tensor-parallel", "--tensor-parallel-size", min=1, help="Ranks; each has a cache, NAME-tp0 and so on."
        ),
    ] = None,
    kv_cache_dtype: Annotated[str | None, _of_engine(help="dtype of its KV cache, such as fp8.")] = None,
    block_size: Annotated[int | None, _of_engine(min=1, help="Tokens of its blocks.")] = None,
    dtype: Annotated[str | None, _of_engine(help="dtype of the model, such as bfloat16.")] = None,
    check: Annotated[bool, _of_engine("--check", help="Stamp saved pages and verify loaded ones, for tests.")] = False,
    node: Annotated[
        str | None,
        _of_engine(metavar="ID", help="Node for the pools, by the first characters of its id. Default: this node."),
    ] = None,
    every_gpu_node: Annotated[
        bool, _of_engine("--every-gpu-node", help="A cache on each node with a GPU: NAME-0, NAME-1, ...")
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", metavar="FILE", help="YAML file with the fields of CacheConfig, or - for stdin."
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting, such as pool.num_slots=1M; repeatable."),
    ] = None,
    host_capacity: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS|GiB|Nx",
            help="Size of a tier in host memory below each pool, such as 1M, 64GiB or 4x, four times the pool; "
            "rounded down to whole pages.",
        ),
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(
            metavar="PATH:SIZE",
            help="A tier on a local disk below each pool in host memory, or below its host tier: a folder of the "
            "cache's node, and the size of the tier there, such as /nvme/raydix:1TiB, 10M or 4x. "
            "With --for, bytes are divided over the ranks.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            envvar="RAYDIX_NAME",
            help="Name the caches NAME-0, NAME-1, ... Default: the name in the file, or kv. "
            "With --for, the cache is NAME, by default kv-0.",
        ),
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Number of caches. Default: one per GPU, else one.")] = None,
    worker_cpus: Annotated[int, typer.Option(min=0, help="CPUs to reserve with each GPU, for its workers.")] = 1,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0.1,
            help="Seconds that a cache may take to start. Default: 60, and 4 for each GiB of its pool.",
        ),
    ] = None,
    address: Address = None,
    namespace: Namespace = "raydix",
    as_json: AsJson = False,
) -> None:
    """Start caches that outlive this command: one on each GPU of the cluster, or one on the CPU if there is no GPU.

    A pool without layers has no tensors, so such a cache takes no GPU, and one is started.

    The sources of a setting are, in order: `--set`, the environment (`RAYDIX_POOL_NUM_SLOTS`), the file, the default.
    A cache that already runs with the same settings is left as it is.

    `raydix start --for vllm MODEL --capacity 8GiB` reads vLLM's configuration of the model, so it runs in the engine's
    environment. It starts a cache that fits, one for each rank, and prints the command line of the engine. The pool is
    host memory of this node, which all engines of the node share; `--set pool.device=cuda` takes a GPU of its own, and
    only then `--host-capacity` has a use. `--disk` lies directly below the pool in host memory. The other sources of
    settings can add to it; settings that do not fit the engine are refused.
    """
    wishes = EngineWishes(
        engine,
        tuple(model or ()),
        capacity,
        tensor_parallel,
        kv_cache_dtype,
        block_size,
        dtype,
        check,
        node,
        every_gpu_node,
    )
    check_engine(wishes)
    source = StandardInput() if file == Path("-") else file
    sources: Sources = {"options": options or (), "name": name, "host_capacity": host_capacity, "disk": disk}
    if engine is not None:
        if count is not None:
            raise CommandError("--count does not go with --for: each rank has one cache", "--tensor-parallel N", USAGE)
        start_for_engine(wishes, source, sources, worker_cpus, timeout_s, address, namespace, as_json)
        return
    from raydix.actors.cluster.settings import load_settings

    settings = load_settings(source, **sources)
    join(address, namespace)
    from raydix.actors.cluster.placement import num_gpus

    on_gpu = settings.config.pool.may_lie_on_gpu and num_gpus() > 0
    there = set(cache_names(namespace))
    started = []
    for number in range(count or (num_gpus() if on_gpu else 1)):
        cache = f"{settings.name}-{number}"
        facts = start_one(settings.config, cache, namespace, on_gpu, worker_cpus, timeout_s)
        started.append(facts | {"reused": cache in there})
    needs_model = settings.config.disk is not None and not settings.config.fingerprint
    show(started, as_json, lambda: _report(started, namespace, needs_model))


def _report(started: list[dict[str, Any]], namespace: str, needs_model: bool = False) -> Group:
    """Return the started caches, and the next steps.

    Args:
        needs_model: they have a disk, and their configuration names no model.
    """
    from raydix.actors.service.findings import BIND

    first = started[0]["name"]
    cache = f'"{first}"' if namespace == "raydix" else f'connect("{first}", namespace="{namespace}")'
    on_gpu = "num_gpus=0.9, " if started[0]["device"] == "cuda" else ""
    lines = [
        f"connect:  async with PrefixCacheClient({cache}) as client: ...",
        f"worker:   Worker.options({on_gpu}scheduling_strategy=beside({cache})).remote({cache})",
        f"watch:    raydix stats {first} --watch",
        f"end:      raydix stop {' '.join(facts['name'] for facts in started)}",
    ]
    if needs_model:
        lines.insert(2, f"disk:     keeps KV of bound models alone: {BIND}")
    return Group(table_of_started(started), Text("\n".join(lines)))
