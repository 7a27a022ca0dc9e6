"""`raydix list`: the running caches."""

from __future__ import annotations

from typing import Any

from rich.console import Group

from raydix.actors.cli.cluster import Address, Namespace, answers_of, join
from raydix.actors.cli.output import AsJson, first_finding, show, table_of
from raydix.schemas.shown import percent, rate, short_time, shown

_ANSWER_S = 5.0


def list_caches(address: Address = None, namespace: Namespace = "raydix", as_json: AsJson = False) -> None:
    """List the caches of a cluster, with their kind and use."""
    join(address, namespace)
    rows = _facts(namespace)
    show(rows, as_json, lambda: _table(rows, namespace))


def _facts(namespace: str) -> list[dict[str, Any]]:
    """Return a row of facts for each cache.

    The state of a cache that does not answer in time is "silent", and "ended" of one that cannot run again.
    """
    from raydix.actors.cluster.deploy import find_caches
    from raydix.actors.service.findings import restarts_finding
    from raydix.actors.service.past_lives import LOST_GROUP, has_lost_its_group, restarts_of
    from raydix.actors.transport.process_liveness import process_id

    rows: list[dict[str, Any]] = []
    asked: dict[str, list[Any]] = {}
    caches = find_caches(namespace=namespace)
    for name, cache in caches.items():
        if has_lost_its_group(cache):
            rows.append({"name": name, "namespace": namespace, "state": "ended", "findings": [LOST_GROUP]})
        else:
            asked[name] = [cache.pool_handle.remote(), cache.stats.remote()]
    for name, answer in answers_of(asked, _ANSWER_S).items():
        if answer is None:
            finding = restarts_finding(restarts_of(caches[name]))
            rows.append(
                {"name": name, "namespace": namespace, "state": "silent", "findings": [finding] if finding else []}
            )
            continue
        handle, stats = answer
        rows.append(
            {
                "name": name,
                "namespace": namespace,
                "state": "ready",
                "kind": handle.config.kind,
                "page_size": handle.config.page_size,
                "fingerprint": handle.config.fingerprint,
                "device": handle.device_type,
                "node_id": handle.node_id,
                "pid": process_id(handle.liveness_path),
                "epoch": stats.epoch,
                "uptime_s": stats.uptime_s,
                "restarts": stats.restarts,
                "last_restart_cause": stats.last_restart_cause,
                "restart_causes": stats.restart_causes,
                "findings": list(stats.findings),
                "num_slots": stats.num_slots,
                "free_slots": stats.free_slots,
                "open_leases": stats.open_leases,
                "open_sessions": stats.open_sessions,
                "hit_rate": stats.hit_rate,
                "tokens_requested": stats.tokens_requested,
                "tokens_reused": stats.tokens_reused,
            }
        )
    return sorted(rows, key=lambda row: str(row["name"]))


def _table(rows: list[dict[str, Any]], namespace: str) -> Group | str:
    if not rows:
        return f"no cache runs in namespace {namespace!r}; start one: raydix start -c cache.yaml"
    table = table_of("cache", "kind", ">page", ">slots", ">in use", ">leases", ">hit rate", "device, node", ">up")
    notes = [f"{shown(row['name'])}  {first_finding(row['findings'])}" for row in rows if row["findings"]]
    for row in rows:
        if row["state"] != "ready":
            table.add_row(shown(row["name"]), row["state"])
            continue
        table.add_row(
            shown(row["name"]),
            row["kind"],
            f"{row['page_size']}",
            f"{row['num_slots']:,}",
            percent(1 - row["free_slots"] / row["num_slots"]),
            f"{row['open_leases']:,}",
            rate(row["tokens_reused"], row["tokens_requested"]),
            f"{row['device']} {row['node_id'][:8]}",
            short_time(row["uptime_s"]),
        )
    return Group(table, *notes)
