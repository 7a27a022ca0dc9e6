"""`raydix stop`: end caches, with or without a drain."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from raydix.actors.cli.cluster import Address, Namespace, cache_handle, cache_names, complete_names, join
from raydix.actors.cli.failures import USAGE, CommandError
from raydix.actors.cli.output import AsJson, show
from raydix.schemas.shown import counted, shown


def stop(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="Names of caches.", autocompletion=complete_names),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Stop every cache of the namespace.")] = False,
    drain_s: Annotated[
        float,
        typer.Option("--drain", min=0, metavar="SECONDS", help="Time for open leases to end; new ones are refused."),
    ] = 0,
    address: Address = None,
    namespace: Namespace = "raydix",
    as_json: AsJson = False,
) -> None:
    """End caches with their process and pool. A cache that does not answer is killed.

    The cached KV is lost, but for that on a disk: such a cache first writes the KV that is due, for `disk.flush_s` at
    most.
    """
    if bool(names) == every:
        raise CommandError("name the caches to stop, or give --all", "raydix list", USAGE)
    join(address, namespace)
    from raydix.actors.cluster.deploy import SHUTDOWN_S, disk_seconds

    chosen = cache_names(namespace) if every else list(dict.fromkeys(names or ()))
    handles = [(name, cache_handle(name, namespace, to_end=True)) for name in chosen]  # fail before any cache ends
    ends: list[Any] = [cache.shutdown.remote(drain_s) for _, cache in handles]  # all drain at the same time
    deadline = time.monotonic() + drain_s + SHUTDOWN_S + disk_seconds([cache for _, cache in handles])
    results = [_stop(name, cache, end, deadline, namespace) for (name, cache), end in zip(handles, ends, strict=True)]
    show(results, as_json, lambda: "\n".join(map(_sentence, results)) or "no cache runs")


def _stop(name: str, cache: Any, end: Any, deadline: float, namespace: str) -> dict[str, Any]:
    """Wait until a cache has shut down, or for the deadline, and end its process and placement group."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    from raydix.actors.cluster.placement import remove_placement

    answered, cut_short = True, None
    try:
        cut_short = ray.get(end, timeout=max(0.0, deadline - time.monotonic()))
    except (GetTimeoutError, RayActorError):
        answered = False
    ray.kill(cache)
    remove_placement(name, namespace)
    return {"name": name, "answered": answered, "leases_cut_short": cut_short}


def _sentence(result: dict[str, Any]) -> str:
    if not result["answered"]:
        return f"{shown(result['name'])}: killed, as it did not answer"
    cut_short = result["leases_cut_short"]
    cut = f", which cut short {counted(cut_short, 'open lease')}" if cut_short else ""
    return f"{shown(result['name'])}: stopped{cut}"
