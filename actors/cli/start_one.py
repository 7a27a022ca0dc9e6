"""`start_one`: a detached cache for `raydix start`, and the table of those that were started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group

from raydix.actors.cli.cluster import ask
from raydix.actors.cli.engine_nodes import SHORT_ID
from raydix.actors.cli.failures import CommandError
from raydix.actors.cli.output import table_of
from raydix.schemas.shown import NONE, byte_size

if TYPE_CHECKING:
    from raydix.schemas import CacheConfig


def start_one(
    config: CacheConfig,
    name: str,
    namespace: str,
    on_gpu: bool,
    worker_cpus: int,
    timeout_s: float | None,
    node_id: str | None = None,
) -> dict[str, Any]:
    """Start a cache that outlives this process, or find it running with the same configuration; return its facts.

    Args:
        on_gpu: it takes a whole GPU, with `worker_cpus` CPUs for its workers.
        timeout_s: of the start; None: see `start_cache`.
        node_id: where it starts and restarts; None: on any node.

    Raises:
        CommandError: it did not start in `timeout_s`.
        ConfigMismatch: a cache of that name runs with another configuration.
    """
    from raydix.actors.cluster.deploy import start_cache
    from raydix.actors.cluster.placement import on_node, start_on_own_gpu
    from raydix.actors.service.findings import niceness_finding
    from raydix.schemas import CacheUnavailable

    try:
        if on_gpu:
            cache = start_on_own_gpu(config, name, namespace=namespace, worker_cpus=worker_cpus, timeout_s=timeout_s)
        else:
            place = None if node_id is None else on_node(node_id)
            cache = start_cache(
                config,
                name=name,
                namespace=namespace,
                lifetime="detached",
                timeout_s=timeout_s,
                scheduling_strategy=place,
            )
    except CacheUnavailable as error:  # exit status 1: the cluster answered
        where = f" on node {node_id[:SHORT_ID]}" if node_id else ""
        raise CommandError(f"{name}{where}: {error}") from error
    handle = ask(cache.pool_handle.remote())
    stats = ask(cache.stats.remote())
    return {
        "name": name,
        "namespace": namespace,
        "epoch": handle.epoch,
        "device": handle.device_type,
        "gpu_uuid": handle.gpu_uuid,
        "node_id": handle.node_id,
        "num_slots": config.pool.num_slots,
        "num_bytes": handle.num_bytes,
        "host": host_facts(config),
        "disk": disk_facts(config, name),
        "findings": [*stats.findings, *filter(None, [niceness_finding(stats.niceness)])],
    }


def host_facts(config: CacheConfig) -> dict[str, Any] | None:
    """Return the sizes of a cache's host tier, its bytes and its policy; None: it has no such tier."""
    if config.host is None:
        return None
    from raydix.actors.memory.pool_shapes import layout_below

    sizes = config.host_sizes
    return sizes._asdict() | {"num_bytes": layout_below(config, sizes).num_bytes, "policy": config.host.policy}


def disk_facts(config: CacheConfig, name: str) -> dict[str, Any] | None:
    """Return the sizes of a cache's disk tier, its bytes, its folder and its rule of writes; None: it has none."""
    if config.disk is None:
        return None
    from raydix.actors.tiers.disk.disk_folder import folder_of
    from raydix.actors.tiers.disk.disk_layout import disk_bytes, disk_sizes, index_layout

    sizes = disk_sizes(config)
    path = folder_of(config.disk.path, name, index_layout(config).digest)
    return sizes._asdict() | {"num_bytes": disk_bytes(config, sizes), "path": path, "admit": config.disk.admit}


def table_of_started(started: list[dict[str, Any]]) -> Group:
    """Return a table of the facts of caches; `reused` says whether each ran already.

    Each finding follows once, with the names of the caches that have it.
    """
    tiers = [tier for tier in ("host", "disk") if any(facts[tier] for facts in started)]
    columns = [column for tier in tiers for column in (f">{tier} slots", f">{tier}")]
    table = table_of("cache", "device", "node", ">slots", ">pool", *columns, "")
    for facts in started:
        below = [cell for tier in tiers for cell in _cells(facts[tier])]
        end = "ran already" if facts["reused"] else "started"
        table.add_row(facts["name"], facts["device"], facts["node_id"][:8], *_cells(facts), *below, end)
    found: dict[str, list[str]] = {}
    for facts in started:
        for finding in facts["findings"]:
            found.setdefault(finding, []).append(facts["name"])
    return Group(table, *(f"warning: {', '.join(names)}: {finding}" for finding, names in found.items()))


def _cells(pool: dict[str, Any] | None) -> tuple[str, str]:
    """Return the slots and the bytes of a pool or tier; None: there is none."""
    if pool is None:
        return NONE, NONE
    return f"{pool['num_slots']:,}", byte_size(pool["num_bytes"]) if pool["num_bytes"] else NONE
