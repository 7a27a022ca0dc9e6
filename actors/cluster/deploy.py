"""Start, find and end cache actors."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast

import ray
import ray.util
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError

from raydix.actors.service.cache_actor import PrefixCacheActor
from raydix.actors.service.config_difference import config_difference
from raydix.actors.service.past_lives import LOST_GROUP, has_lost_its_group
from raydix.actors.transport.ray_calls import from_ray, why_not_joined
from raydix.actors.transport.validation import checked_config, checked_name, checked_seconds
from raydix.schemas import CacheConfig, CacheError, CacheUnavailable, ConfigMismatch, InvalidRequest
from raydix.schemas.protocol import check_handshake, handshake
from raydix.schemas.shown import brief, counted, cut

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from raydix.schemas import PoolHandle

logger = logging.getLogger(__name__)

NAMESPACE = "raydix"
_SHARED_GPU = 0.1  # part of a card; its workers share the other 0.9
_MAX_CONCURRENCY = 16_384  # each open session and waiting request takes one
SHUTDOWN_S = 15.0  # added to the drain, and to the writes to a disk, which takes 10 s to close if it stalls
_ASK_S = 1.0  # limit to ask a cache for that time
_RETRY_S = 0.1  # pause between attempts while a cache of the same name ends
_LOOK_S = 0.25  # pause between checks whether the caller was cancelled
# Ray before 2.54 raises ValueError.
_NAME_IS_TAKEN: type[Exception] = getattr(ray.exceptions, "ActorAlreadyExistsError", ValueError)
_given_up: ContextVar[threading.Event] = ContextVar("given_up", default=threading.Event())  # noqa: B039 -- never set


_START_S = 60.0
_START_S_A_GIB = 4.0
_MAX_START_S = 86_400.0  # a pool that large is refused before its memory is reserved


class StartOptions(TypedDict, total=False):
    """The keyword arguments of `start_cache`."""

    name: str | None
    namespace: str
    num_gpus: float | None
    lifetime: Literal["detached", "non_detached"] | None
    scheduling_strategy: Any
    max_restarts: int
    timeout_s: float | None


def start_cache(
    config: CacheConfig,
    *,
    name: str | None = None,
    namespace: str = NAMESPACE,
    num_gpus: float | None = None,
    lifetime: Literal["detached", "non_detached"] | None = None,
    scheduling_strategy: Any = None,
    max_restarts: int = -1,
    timeout_s: float | None = None,
) -> ActorHandle[Any]:
    """Start a cache actor and wait until it is ready.

    Keep the handle: the cache ends with the last one, unless its `lifetime` is "detached".

    Args:
        name: name for `connect(name)`; 1 to 128 printable characters other than "/". If a cache of that name runs with
            the same configuration, return its handle. If one is shutting down, wait for its end. A cache with a disk
            tier must have a name: the next cache of that name has its KV.
        num_gpus: share of a GPU to reserve. None: 0.1 if the cluster has GPUs and the pool has tensors that may lie on
            one, else 0.
        max_restarts: number of restarts after crashes, -1 for any number. A restarted cache is empty, but for a disk
            tier. Its clients go on with it; their old leases raise `StaleEpoch`. Use 0 for a detached cache in a
            placement group: Ray restarts such an actor forever after the group is removed.
        timeout_s: time limit, including the wait for another cache of that name to end. None: 60 s, and 4 s for each
            GiB of the pool, which is reserved in full before the cache is ready. For a disk tier, also the time that
            its folder may still be in use, and that its index takes.

    Raises:
        ConfigMismatch: a cache of that name runs with another configuration, or speaks another protocol.
        CacheUnavailable: the cache could not be started, such as for a disk that cannot be used, or was not ready in
            time; the message names the cause. An actor that this call has started is ended.
        InvalidRequest: `config` is not a CacheConfig, `timeout_s` is not a finite number of seconds, `name` is invalid,
            a cache with a disk tier has no name, or Ray refuses another argument.
    """

    checked_config(config)
    timeout_s = start_seconds(config) if timeout_s is None else timeout_s
    checked_seconds(timeout_s)
    if name is not None:
        checked_name(name)
    elif config.disk is not None:
        raise InvalidRequest(
            "name must be given for a cache with a disk tier: its folder has that name, and the next cache of that "
            "name finds the KV"
        )
    if not ray.is_initialized():
        ray.init()
    if num_gpus is None:
        may_share = config.pool.may_lie_on_gpu and cast(Any, ray.cluster_resources)().get("GPU")
        num_gpus = _SHARED_GPU if may_share else 0
    options: dict[str, Any] = {
        "num_cpus": 0,
        "num_gpus": num_gpus,
        "max_concurrency": _MAX_CONCURRENCY,
        "max_restarts": max_restarts,
        "max_task_retries": 0,  # a call to one epoch must not reach the next
    }
    if name is not None:
        options |= {"name": name, "namespace": namespace}
    if lifetime is not None:
        options["lifetime"] = lifetime
    if scheduling_strategy is not None:
        options["scheduling_strategy"] = scheduling_strategy

    def make() -> ActorHandle[Any]:
        try:
            return cast("ActorHandle[Any]", cast(Any, ray.remote(PrefixCacheActor)).options(**options).remote(config))
        except (TypeError, ValueError, ArithmeticError) as error:
            if _is_taken_name(error):
                raise
            raise InvalidRequest(f"Ray refuses an option of the cache's actor: {cut(str(error))}") from error

    deadline = time.monotonic() + timeout_s
    while (outcome := _ready(name, namespace, make, deadline, timeout_s)) is None:
        time.sleep(_RETRY_S)
    if isinstance(outcome, CacheError):
        try:
            raise outcome
        finally:
            del outcome  # avoid a reference cycle with this frame
    actor, running = outcome
    _check_digest(actor, running, config, name, deadline - time.monotonic())
    return actor


def start_seconds(config: CacheConfig) -> float:
    """Return how long a cache may take to start: a busy machine reserves a GiB in some seconds."""
    from raydix.actors.memory.pool_shapes import layout_of  # imports torch, which other functions do without

    disk_s = 0.0
    if config.disk is not None:
        from raydix.actors.tiers.disk.open_disk import start_seconds

        disk_s = start_seconds(config)
    return min(_START_S + _START_S_A_GIB * layout_of(config).num_bytes / 2**30 + disk_s, _MAX_START_S)


async def start_cache_async(config: CacheConfig, **options: Unpack[StartOptions]) -> ActorHandle[Any]:
    """Run `start_cache` in a thread: the same arguments, result and errors, without blocking the loop.

    If it is cancelled, an actor that it has started is ended, and its thread ends within about a second.
    """
    given_up = threading.Event()

    def start() -> ActorHandle[Any]:
        _given_up.set(given_up)  # changes only the thread's copy of this context
        return start_cache(config, **options)

    try:
        return await asyncio.to_thread(start)
    finally:
        given_up.set()


def connect(
    name: str, *, namespace: str = NAMESPACE, config: CacheConfig | None = None, timeout_s: float = 60
) -> ActorHandle[Any]:
    """Return the handle of a running cache, by name.

    Args:
        config: the expected configuration, compared with the cache's within `timeout_s`. None: no comparison.

    Raises:
        CacheUnavailable: no cache of that name runs, or it waits for a placement group that was removed. With `config`,
            also: it shuts down or does not answer.
        ConfigMismatch: with `config`: the cache runs with another configuration, or speaks another protocol.
        InvalidRequest: an argument is wrong; the message names it.
    """
    if config is not None:
        checked_config(config)
        checked_seconds(timeout_s)
    actor = find(name, namespace)
    if actor is None:
        raise CacheUnavailable(f"no cache named {name!r} runs in namespace {namespace!r}: start_cache first")
    _check_named(actor, name, namespace)
    if config is not None:
        try:
            _check_digest(actor, _digest_of(actor, timeout_s), config, name, timeout_s)
        except GetTimeoutError as error:
            raise CacheUnavailable(f"cache {name!r} did not answer in {timeout_s} s") from error
        except RayError as error:
            raise from_ray(error) from error
    return actor


def shutdown_cache(cache: ActorHandle[Any], *, drain_s: float = 0) -> None:
    """End a cache, with its process and its pool. Idempotent; a dead cache is not restarted.

    The cache ends even if this call is interrupted. A cache that does not answer is killed, with a warning in the log.
    It may speak any protocol.

    First the cache drains: new sessions, `acquire`, `lock`, `extend` and waiting requests immediately raise
    `CacheUnavailable`. Open leases can be written, published and ended for `drain_s` seconds. The log counts the
    leases that are still open after that. A cache with a disk then writes the KV that is due, for `disk.flush_s` at
    most.

    Raises:
        InvalidRequest: `drain_s` is not a finite number of seconds, or `cache` is not the handle of a cache.
    """
    check_handle(cache)
    limit_s = checked_seconds(drain_s) + SHUTDOWN_S
    try:
        ended: Any = cache.shutdown.remote(drain_s)
        cut_short = cast(int, ray.get(ended, timeout=limit_s + disk_seconds([cache])))
        if cut_short:
            logger.warning("the shutdown of the cache cut short %s", counted(cut_short, "lease"))
    except RayActorError:
        logger.info("the cache had ended before its shutdown")
    except GetTimeoutError:
        logger.warning("the cache was killed: it did not answer within %g s of its drain", SHUTDOWN_S)
    ray.kill(cache)


def disk_seconds(caches: Sequence[ActorHandle[Any]]) -> float:
    """Return how long the ends of caches may take to write KV to their disks, after their drains.

    Caches that do not say so within a second count as without a disk.
    """
    asked: list[Any] = [cache.pool_handle.remote() for cache in caches]
    if asked:
        ray.wait(asked, num_returns=len(asked), timeout=_ASK_S)
    longest = 0.0
    for answer in asked:
        try:
            disk = cast("PoolHandle", ray.get(answer, timeout=0)).config.disk
        except Exception:  # It is dead or silent; an answer of another version raises any class here.
            continue
        if disk is not None:
            longest = max(longest, disk.flush_s)
    return longest


def _is_taken_name(error: Exception) -> bool:
    """Return whether Ray refuses an actor because its name is taken. Older Ray says so by the text of a ValueError."""
    if _NAME_IS_TAKEN is not ValueError:
        return isinstance(error, _NAME_IS_TAKEN)
    return isinstance(error, ValueError) and re.search("is already taken|already exists", str(error)) is not None


def _ready(
    name: str | None, namespace: str, make: Callable[[], ActorHandle[Any]], deadline: float, timeout_s: float
) -> tuple[ActorHandle[Any], str] | CacheError | None:
    """Return the cache of that name or a new one, with its configuration's digest; None: try again.

    Errors are returned, not raised: a traceback would keep the handle, and so the name of a dead cache.
    """
    if name is not None and (found := find(name, namespace)) is not None:
        try:
            _check_named(found, name, namespace)
        except CacheUnavailable as error:
            return error.with_traceback(None)
    else:
        found = None
    try:
        actor = make() if found is None else found
    except _NAME_IS_TAKEN:  # another caller was faster, or the name's owner is gone
        return None if _may_wait(deadline) else _still_there(name, timeout_s)
    except RayError as error:
        return from_ray(error)
    failed: CacheError
    try:
        return actor, _digest_of(actor, max(0.0, deadline - time.monotonic()))
    except ConfigMismatch as error:  # it speaks another protocol
        failed = error.with_traceback(None)
        if found is not None:
            return failed
    except GetTimeoutError:
        if found is not None:
            return _still_there(name, timeout_s)
        failed = CacheUnavailable(
            f"the cache did not start in {timeout_s} s: check that the cluster has free resources"
        )
    except RayError as error:
        failed = from_ray(error)
        failed.__cause__ = error.with_traceback(None)
        if found is not None and not isinstance(failed, CacheUnavailable):
            return failed
        if found is not None and not isinstance(error, ActorDiedError):  # it shuts down, or restarts
            return None if _may_wait(deadline) else _still_there(name, timeout_s)
    ray.kill(actor)  # else a dead one keeps its name while any process has its handle
    if found is not None and _may_wait(deadline):
        return None
    return failed


def _may_wait(deadline: float) -> bool:
    return time.monotonic() < deadline and not _given_up.get().is_set()


def _still_there(name: str | None, timeout_s: float) -> CacheUnavailable:
    return CacheUnavailable(
        f"cache {name!r} exists, but is not ready after {timeout_s} s: it is shutting down or stuck"
    )


def find(name: str, namespace: str) -> ActorHandle[Any] | None:
    """Return the handle of the cache with that name, ready or not; None without such a cache."""
    checked_name(name)
    if not isinstance(namespace, str) or not namespace:
        raise InvalidRequest(f"a Ray namespace must be a text of at least one character, not {brief(namespace)}")
    _join_cluster()
    try:
        actor: ActorHandle[Any] = ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None
    return actor


def _join_cluster() -> None:
    """Connect this process to the running Ray cluster, unless it is connected; a new one would have no caches.

    Raises:
        CacheUnavailable: no cluster runs.
    """
    if ray.is_initialized():
        return
    try:
        ray.init(address="auto")
    except Exception as error:  # Ray raises many classes, AssertionError among them
        raise CacheUnavailable(
            "no Ray cluster is reached: call ray.init(address=...) first, or start one: ray start --head "
            f"({why_not_joined(error)})"
        ) from error


def find_caches(pattern: str = "*", namespace: str = NAMESPACE) -> dict[str, ActorHandle[Any]]:
    """Return the handles of the running caches with names that match a pattern, by name. It asks Ray and waits.

    Args:
        pattern: as of a shell: `*`, `?` and `[...]`; upper and lower case differ.

    Raises:
        CacheUnavailable: no cluster runs.
    """
    _join_cluster()
    found: dict[str, ActorHandle[Any]] = {}
    for actor in cast(list[dict[str, str]], ray.util.list_named_actors(all_namespaces=True)):
        if actor["namespace"] != namespace or not fnmatchcase(actor["name"], pattern):
            continue
        try:
            handle: ActorHandle[Any] = ray.get_actor(actor["name"], namespace=namespace)
        except ValueError:  # it ended after the listing
            continue
        if hasattr(handle, "pool_handle") and hasattr(handle, "open_session"):
            found[actor["name"]] = handle
    return found


def check_handle(cache: Any) -> None:
    """Raise InvalidRequest unless this is the handle of a cache actor."""
    if not (hasattr(cache, "_actor_id") and hasattr(cache, "open_session")):
        raise InvalidRequest(
            f"cache must be the handle of a cache actor, from `start_cache` or `connect`, not {brief(cache)}"
        )


def _check_named(actor: ActorHandle[Any], name: str, namespace: str) -> None:
    """Check the actor that has a name.

    Raises:
        InvalidRequest: it is no cache.
        CacheUnavailable: it waits for a placement group that was removed, which Ray lets it do without end.
    """
    try:
        check_handle(actor)
    except InvalidRequest:
        raise InvalidRequest(
            f"the name {name!r} in namespace {namespace!r} belongs to {brief(actor)}, which is no cache: choose "
            "another name, or end that actor"
        ) from None
    if has_lost_its_group(actor):
        raise CacheUnavailable(f"cache {name!r} {LOST_GROUP}")


def _digest_of(actor: ActorHandle[Any], timeout_s: float) -> str:
    """Return the digest of a cache's configuration, as soon as the cache is ready.

    Raises:
        ConfigMismatch: the cache speaks another protocol.
        GetTimeoutError: the cache has not answered in `timeout_s`, or the caller was cancelled.
        RayError: the cache has died, restarts or shuts down.
    """
    deadline = time.monotonic() + timeout_s
    try:
        row = _answer_of(actor.handshake.remote(handshake()), deadline)
    except AttributeError:  # the handle's: a cache of protocol 0 has no such method
        row = None
    except RayTaskError as error:
        if not isinstance(error.cause, AttributeError):  # the actor's
            raise
        row = None
    check_handshake(row, "cache")
    return cast(str, _answer_of(actor.config_digest.remote(handshake()), deadline))


def _answer_of(asked: Any, deadline: float) -> Any:
    while not ray.wait([asked], timeout=min(_LOOK_S, max(0.0, deadline - time.monotonic())))[0]:
        if not _may_wait(deadline):
            raise GetTimeoutError("the cache has not answered in time")
    return ray.get(asked)


def _check_digest(
    actor: ActorHandle[Any], running: str, config: CacheConfig, name: str | None, timeout_s: float
) -> None:
    if running == config.digest():
        return
    try:
        there = cast("PoolHandle", ray.get(actor.pool_handle.remote(), timeout=max(0.0, timeout_s))).config
    except RayError as error:
        raise from_ray(error) from error
    raise ConfigMismatch(
        f"cache {name!r} runs with another configuration ({running}, not {config.digest()}): "
        f"{config_difference(there, config)}; use its configuration or another name, or end it: "
        f"raydix stop {name}"
    )
