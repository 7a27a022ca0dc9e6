"""Starting, finding and ending cache actors."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from raydix.actors.cache_actor import PrefixCacheActor
from raydix.actors.pool_export import layout_of
from raydix.actors.ray_transport import from_ray
from raydix.schemas import CacheConfig, CacheUnavailable, ConfigMismatch

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

NAMESPACE = "raydix"
_SHARED_GPU = 0.1  # of a card: the rest is the workers'
_MAX_CONCURRENCY = 16_384  # open sessions and waiting requests each hold a place


class StartOptions(TypedDict, total=False):
    """The keyword arguments of `start_cache`."""

    name: str | None
    namespace: str
    num_gpus: float | None
    lifetime: Literal["detached", "non_detached"] | None
    scheduling_strategy: Any
    max_restarts: int
    timeout_s: float


def start_cache(
    config: CacheConfig,
    *,
    name: str | None = None,
    namespace: str = NAMESPACE,
    num_gpus: float | None = None,
    lifetime: Literal["detached", "non_detached"] | None = None,
    scheduling_strategy: Any = None,
    max_restarts: int = -1,
    timeout_s: float = 60,
) -> ActorHandle[Any]:
    """Start a cache actor and wait until it is ready.

    Keep the handle: the cache ends with the last one, unless its `lifetime` is "detached".

    Args:
        name: others find it by `connect(name)`; a cache of that name that runs already is used if its configuration
            is the same.
        num_gpus: share of a GPU to reserve. None: 0.1 where the cluster has GPUs and the pool has tensors that may lie
            on one, else 0.
        max_restarts: how often it may start anew after a crash, -1: always. It is empty then, and its clients, which
            are told `StaleEpoch` of what they held, go on with it. 0 for a detached cache in a placement group: Ray
            leaves such an actor restarting for ever when the group is removed.
        timeout_s: how long starting may take.

    Raises:
        ConfigMismatch: a cache of that name runs with another configuration.
        CacheUnavailable: it could not be started or did not become ready in time; the message says why.
    """
    if not ray.is_initialized():
        ray.init()
    if num_gpus is None:
        may_lie_on_gpu = config.pool.device != "cpu" and layout_of(config).num_bytes > 0
        num_gpus = _SHARED_GPU if may_lie_on_gpu and _cluster_has_gpus() else 0
    options: dict[str, Any] = {
        "num_cpus": 0,
        "num_gpus": num_gpus,
        "max_concurrency": _MAX_CONCURRENCY,
        "max_restarts": max_restarts,
        "max_task_retries": 0,  # what was sent to one life of the cache must not reach the next
    }
    if name is not None:
        options |= {"name": name, "namespace": namespace, "get_if_exists": True}
    if lifetime is not None:
        options["lifetime"] = lifetime
    if scheduling_strategy is not None:
        options["scheduling_strategy"] = scheduling_strategy
    try:
        actor: ActorHandle[Any] = cast(Any, ray.remote(PrefixCacheActor)).options(**options).remote(config)
        running = _digest_of(actor, timeout_s)
    except GetTimeoutError as error:
        raise CacheUnavailable(
            f"the cache did not start in {timeout_s} s: does the cluster have room for it?"
        ) from error
    except RayError as error:
        raise from_ray(error) from error
    _check_digest(running, config, name)
    return actor


async def start_cache_async(config: CacheConfig, **options: Unpack[StartOptions]) -> ActorHandle[Any]:
    """`start_cache` for coroutines: the same arguments, result and errors, without holding the loop."""
    return await asyncio.to_thread(start_cache, config, **options)


def connect(name: str, *, namespace: str = NAMESPACE, config: CacheConfig | None = None) -> ActorHandle[Any]:
    """The handle of a running cache, by name.

    Raises:
        CacheUnavailable: no cache of that name runs.
        ConfigMismatch: it runs with another configuration than `config`.
    """
    if not ray.is_initialized():
        ray.init()
    try:
        actor: ActorHandle[Any] = ray.get_actor(name, namespace=namespace)
    except ValueError as error:
        raise CacheUnavailable(f"no cache named {name!r} runs in namespace {namespace!r}: start_cache first") from error
    if config is not None:
        try:
            _check_digest(_digest_of(actor), config, name)
        except RayError as error:
            raise from_ray(error) from error
    return actor


def shutdown_cache(cache: ActorHandle[Any], *, drain_s: float = 0) -> None:
    """End a cache, with its process and its pool. Idempotent; a cache that has died is not restarted.

    First it drains: sessions, `acquire`, `lock` and `extend`, and those who wait in line, are refused with
    `CacheUnavailable` at once; leases that are open can be written, published and ended for `drain_s` seconds. Those
    still open then are cut short, which the log tells.
    """
    try:
        cut_short = cast(int, ray.get(cache.shutdown.remote(drain_s)))
        if cut_short:
            logger.warning("%d leases were cut short by the shutdown of the cache", cut_short)
    except RayActorError:
        logger.info("the cache had ended before its shutdown")
    ray.kill(cache)


def _cluster_has_gpus() -> bool:
    return bool(cast(Any, ray.cluster_resources)().get("GPU"))


def _digest_of(actor: ActorHandle[Any], timeout_s: float | None = None) -> str:
    return cast(str, ray.get(actor.config_digest.remote(), timeout=timeout_s))


def _check_digest(running: str, config: CacheConfig, name: str | None) -> None:
    if running != config.digest():
        raise ConfigMismatch(
            f"cache {name!r} runs with configuration {running}, not {config.digest()}: use its configuration, another "
            "name, or shutdown_cache first"
        )
