"""`raydix describe`: the configuration of a running cache, in the format of `raydix start`."""

from __future__ import annotations

import re
from typing import Any

from raydix.actors.cli.cluster import Address, CacheName, Namespace, ask, cache_handle, join
from raydix.actors.cli.output import AsJson, show
from raydix.actors.cli.start_one import disk_facts, host_facts
from raydix.schemas.shown import byte_size, counted

_NUMBER = re.compile(r"-\d+$")  # added to the name by `start`
_ADMITTED = {"second_use": "written at the second use", "all": "written before it is evicted"}


def describe(
    name: CacheName, address: Address = None, namespace: Namespace = "raydix", as_json: AsJson = False
) -> None:
    """Print the configuration of a running cache as YAML, for `raydix start -c FILE`.

    Comments name its base model's fingerprint, and the sizes of its tiers. Settings with their default are left
    out; `--json` prints all.
    """
    from raydix.actors.cluster.settings import Settings, as_yaml

    join(address, namespace)
    cache = cache_handle(name, namespace)
    handle, model = ask(cache.pool_handle.remote()), ask(cache.stats.remote()).model_fingerprint
    settings = Settings(_NUMBER.sub("", name) or name, handle.config)
    found = {
        "name": name,
        "namespace": namespace,
        "device": handle.device_type,
        "node_id": handle.node_id,
        "digest": handle.config.digest(),
        "model_fingerprint": model,
        "host": host_facts(handle.config),
        "disk": disk_facts(handle.config, name),
        "config": handle.config.model_dump(mode="json"),
    }
    head = f"# cache {name!r} in namespace {namespace!r}, on device {handle.device_type} of node {handle.node_id[:8]}\n"
    head += f"# base model: {model or 'none bound'}\n"
    if found["host"]:
        head += f"# host tier: {_tier_text(found['host'])}, evicted by {found['host']['policy']}\n"
    if found["disk"]:
        head += f"# disk tier: {_tier_text(found['disk'])}, {_ADMITTED[found['disk']['admit']]}"
        head += f", in {found['disk']['path']}\n"
    show(found, as_json, lambda: head + as_yaml(settings).rstrip("\n"))


def _tier_text(tier: dict[str, Any]) -> str:
    """Return the sizes of a tier in words."""
    parts = [
        counted(tier[field], what)
        for field, what in (("num_slots", "slot"), ("num_swa_slots", "window slot"), ("num_state_slots", "state"))
        if tier[field]
    ]
    return ", ".join([*parts, byte_size(tier["num_bytes"])])
