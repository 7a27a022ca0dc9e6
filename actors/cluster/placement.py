"""Placement: a cache on each GPU of a cluster, and workers on the same GPU or node."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raydix.actors.cluster.deploy import (
    NAMESPACE,
    StartOptions,
    check_handle,
    connect,
    find,
    find_caches,
    start_cache,
    start_seconds,
)
from raydix.actors.memory.pool_memory import gpu_uuids
from raydix.actors.observe.node_memory import available_memory
from raydix.actors.transport.ray_calls import from_ray
from raydix.actors.transport.validation import checked_seconds
from raydix.schemas import CacheConfig, CacheUnavailable, ConfigMismatch, InvalidRequest, PoolHandle
from raydix.schemas.shown import brief

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

SchedulingStrategy = NodeAffinitySchedulingStrategy | PlacementGroupSchedulingStrategy
_LOOK_AGAIN_S = 5.0  # pause between two searches for a cache of this node


def start_on_own_gpu(
    config: CacheConfig, name: str, *, namespace: str = NAMESPACE, worker_cpus: int = 1, timeout_s: float | None = None
) -> ActorHandle[Any]:
    """Start a detached cache in a placement group with a whole GPU, which its workers share (`beside`).

    If a cache of that name runs with the same configuration, return its handle. `remove_placement` frees the GPU after
    the cache has ended. `timeout_s` is that of `start_cache`.

    Raises:
        CacheUnavailable: no GPU was free, or the cache did not start in time, and all was undone. Or a cache of that
            name is shutting down.
        ConfigMismatch: a cache of that name runs with another configuration.
    """
    timeout_s = start_seconds(config) if timeout_s is None else timeout_s
    if find(name, namespace) is not None:
        return connect(name, namespace=namespace, config=config, timeout_s=timeout_s)
    group = placement_group(
        [{"GPU": 1, "CPU": worker_cpus}], "STRICT_PACK", name=group_name(name, namespace), lifetime="detached"
    )
    if not group.wait(timeout_s):
        remove_placement_group(group)
        raise CacheUnavailable(
            f"cache {name!r} found no node with a free GPU and {worker_cpus} free CPUs within {timeout_s:g} s"
        )
    options: StartOptions = {"name": name, "namespace": namespace, "lifetime": "detached", "timeout_s": timeout_s}
    options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    try:
        return start_cache(config, **options)
    except BaseException as error:
        unready = None if isinstance(error, ConfigMismatch) else find(name, namespace)
        if unready is not None:
            ray.kill(unready)  # else it tries to start forever without its group
        remove_placement_group(group)
        raise


def beside(cache: ActorHandle[Any] | str, *, namespace: str = NAMESPACE, timeout_s: float = 60) -> SchedulingStrategy:
    """Return the scheduling strategy that puts a worker where it can map a cache's pool: on its card, else its node.

        worker = Worker.options(num_gpus=0.9, scheduling_strategy=beside("kv-0")).remote("kv-0")

    Raises:
        CacheUnavailable: no cache of that name runs, it has ended, or it does not answer within `timeout_s`.
        InvalidRequest: `cache` is neither a handle nor a name, or `timeout_s` is not a finite number of seconds.
    """
    actor = connect(cache, namespace=namespace) if isinstance(cache, str) else cache
    check_handle(actor)
    checked_seconds(timeout_s)
    try:
        found: Any = ray.get([actor.placement.remote(), actor.pool_handle.remote()], timeout=timeout_s)
    except RayError as error:
        raise from_ray(error) from error
    place, handle = cast(tuple[tuple[PlacementGroup, int] | None, PoolHandle], found)
    if place is not None:
        group, bundle = place
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return on_node(handle.node_id)


def nearest_cache(
    pattern: str, *, place: int = 0, namespace: str = NAMESPACE, timeout_s: float = 60, wait_s: float = 0
) -> str:
    """Return the name of a cache on this node: on a card that this process sees, if there are any such caches.

    Workers of one node that count their places from 0 are spread evenly over its caches.

        name = nearest_cache("chat-*", place=serve.get_replica_context().rank.local_rank)

    Args:
        pattern: a shell pattern for the caches' names.
        place: the number of this worker on its node. It chooses one of several caches, in the order of their names.
        timeout_s: for the caches to answer.
        wait_s: for a cache of this node to start, as on a node that has just joined. The first one that answers ends
            the wait, so workers that started before the other caches may share it.

    Raises:
        CacheUnavailable: no such cache ran on this node within `wait_s`, or it does not answer within `timeout_s`.
        InvalidRequest: `place` is negative, or `timeout_s` or `wait_s` is not a finite number of seconds.
    """
    if not isinstance(place, int) or place < 0:
        raise InvalidRequest(f"place must be a number from 0, such as a replica's local_rank, not {brief(place)}")
    checked_seconds(timeout_s)
    deadline = time.monotonic() + checked_seconds(wait_s)
    while True:
        try:
            return _nearest(pattern, place, namespace, timeout_s)
        except CacheUnavailable as error:
            if time.monotonic() >= deadline:
                raise
            logger.warning("%s; looking again in %g s", error, _LOOK_AGAIN_S)
            time.sleep(min(_LOOK_AGAIN_S, max(0.0, deadline - time.monotonic())))


def _nearest(pattern: str, place: int, namespace: str, timeout_s: float) -> str:
    """Look once; see `nearest_cache`."""
    node_id = ray.get_runtime_context().get_node_id()
    pools = pools_of(pattern, namespace, timeout_s)
    here = {name: pool.gpu_uuid for name, pool in pools.items() if pool is not None and pool.node_id == node_id}
    if not here:
        raise CacheUnavailable(f"no cache with a name like {pattern!r} runs on node {node_id}: start one there")
    cards = gpu_uuids() if any(here.values()) else []
    near = [name for name, card in here.items() if card in cards] or list(here)
    return near[place % len(near)]


def pools_of(pattern: str, namespace: str = NAMESPACE, timeout_s: float = 60) -> dict[str, PoolHandle | None]:
    """Return the pools of the caches with names that match a pattern, in the order of their names.

    The pool of a cache that does not answer within `timeout_s` is None: it restarts, or has ended.
    """
    found = find_caches(pattern, namespace)
    asked: dict[str, Any] = {name: found[name].pool_handle.remote() for name in sorted(found)}
    answered = set(ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)[0]) if asked else set()
    pools: dict[str, PoolHandle | None] = dict.fromkeys(asked)
    for name, answer in asked.items():
        if answer in answered:
            with suppress(RayError):
                pools[name] = cast(PoolHandle, ray.get(answer))
    return pools


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Return the scheduling strategy that puts an actor on a node, and on no other when it is restarted."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def alive_nodes() -> dict[str, bool]:
    """Return the ids of the cluster's nodes, each with whether it has a GPU."""
    nodes = cast(Any, ray.nodes)()
    return {node["NodeID"]: node["Resources"].get("GPU", 0) > 0 for node in nodes if node["Alive"]}


def free_memory(node_id: str, *, timeout_s: float = 60) -> int:
    """Return the bytes that a process on a node could still allocate.

    Raises:
        CacheUnavailable: the node does not answer within `timeout_s`.
    """
    ask: Any = cast(Any, ray.remote(available_memory)).options(num_cpus=0, scheduling_strategy=on_node(node_id))
    try:
        return cast(int, ray.get(ask.remote(), timeout=timeout_s))
    except RayError as error:
        raise from_ray(error) from error


def remove_placement(name: str, namespace: str = NAMESPACE) -> None:
    """Free the GPU of an ended cache that `start_on_own_gpu` had started; no effect on other caches."""
    wanted = group_name(name, namespace)
    for group_id, group in cast(Any, placement_group_table)().items():
        if group["name"] == wanted and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group_id)))


def group_name(name: str, namespace: str) -> str:
    """Return the name of a cache's placement group."""
    return f"raydix/{namespace}/{name}"


def num_gpus() -> int:
    """Return the number of GPUs in the cluster, in use or not."""
    return int(cast(Any, ray.cluster_resources)().get("GPU", 0))
