"""`raydix start`: detached caches, one on each GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from raydix.actors.cli.cluster import Address, Namespace, ask, cache_names, join
from raydix.actors.cli.failures import CommandError
from raydix.actors.cli.output import AsJson, show, table_of
from raydix.actors.settings import load_settings

if TYPE_CHECKING:
    from raydix.schemas import CacheConfig


def start(
    file: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="YAML file with the fields of CacheConfig.")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting, such as pool.num_slots=65536; repeatable."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            envvar="RAYDIX_NAME", help="Name the caches NAME-0, NAME-1, ... Default: the name in the file, or kv."
        ),
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Number of caches. Default: one per GPU, else one.")] = None,
    worker_cpus: Annotated[int, typer.Option(min=0, help="CPUs to reserve with each GPU, for its workers.")] = 1,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds that a cache may take to start.")
    ] = 60,
    address: Address = None,
    namespace: Namespace = "raydix",
    as_json: AsJson = False,
) -> None:
    """Start caches that outlive this command: one on each GPU of the cluster, or one on the CPU if there is no GPU.

    A pool without layers has no tensors, so such a cache takes no GPU, and one is started.

    The sources of a setting are, in order: `--set`, the environment (`RAYDIX_POOL_NUM_SLOTS`), the file, the default.
    A cache that already runs with the same settings is left as it is.
    """
    settings = load_settings(file, options=options or (), name=name)
    join(address, namespace)
    from raydix.actors.placement import num_gpus
    from raydix.actors.transport.pool_memory import may_lie_on_gpu

    on_gpu = may_lie_on_gpu(settings.config) and num_gpus() > 0
    there = set(cache_names(namespace))
    started = []
    for number in range(count or (num_gpus() if on_gpu else 1)):
        each = f"{settings.name}-{number}"
        facts = _start_one(settings.config, each, namespace, on_gpu, worker_cpus, timeout_s)
        started.append(facts | {"reused": each in there})
    show(started, as_json, lambda: _report(started, namespace))


def _start_one(
    config: CacheConfig, name: str, namespace: str, on_gpu: bool, worker_cpus: int, timeout_s: float
) -> dict[str, Any]:
    from raydix.actors.deploy import start_cache
    from raydix.actors.placement import start_on_own_gpu
    from raydix.schemas import CacheUnavailable

    try:
        if on_gpu:
            cache = start_on_own_gpu(config, name, namespace=namespace, worker_cpus=worker_cpus, timeout_s=timeout_s)
        else:
            cache = start_cache(config, name=name, namespace=namespace, lifetime="detached", timeout_s=timeout_s)
    except CacheUnavailable as error:  # exit status 1: the cluster answered
        raise CommandError(f"{name}: {error}") from error
    handle = ask(cache.pool_handle.remote())
    return {
        "name": name,
        "namespace": namespace,
        "epoch": handle.epoch,
        "device": handle.device_type,
        "gpu_uuid": handle.gpu_uuid,
        "node_id": handle.node_id,
        "num_slots": config.pool.num_slots,
        "num_bytes": handle.num_bytes,
    }


def _report(started: list[dict[str, Any]], namespace: str) -> Group:
    table = table_of("cache", "device", "node", ">slots", ">pool", "")
    for each in started:
        table.add_row(
            each["name"],
            each["device"],
            each["node_id"][:8],
            f"{each['num_slots']:,}",
            f"{each['num_bytes'] / 2**20:,.0f} MiB",
            "ran already" if each["reused"] else "started",
        )
    first = started[0]["name"]
    cache = f'"{first}"' if namespace == "raydix" else f'connect("{first}", namespace="{namespace}")'
    on_gpu = "num_gpus=0.9, " if started[0]["device"] == "cuda" else ""
    lines = (
        f"connect:  async with PrefixCacheClient({cache}) as client: ...",
        f"worker:   Worker.options({on_gpu}scheduling_strategy=beside({cache})).remote({cache})",
        f"watch:    raydix stats {first} --watch",
        f"end:      raydix stop {' '.join(each['name'] for each in started)}",
    )
    return Group(table, Text("\n".join(lines)))
