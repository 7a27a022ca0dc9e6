"""Caches are started, found, shared by name and stopped; callers of a dead cache get the cache's own errors."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any, NamedTuple, cast
from uuid import uuid4

import pytest
import ray
import torch
from support.caches.cache_under_test import small_config

from raydix.actors import (
    AttachedPool,
    Lease,
    PrefixCacheClient,
    connect,
    connect_fleet,
    shutdown_cache,
    start_cache,
    start_cache_async,
)
from raydix.actors.cluster import deploy
from raydix.actors.cluster.placement import beside
from raydix.actors.service import cache_service
from raydix.actors.service.cache_actor import PrefixCacheActor
from raydix.cache_core.kernels import CORE
from raydix.schemas import (
    CacheConfig,
    CacheUnavailable,
    ConfigMismatch,
    InvalidRequest,
    LeaseConfig,
    PoolConfig,
    StaleEpoch,
)
from raydix.schemas.version import package_version

pytestmark = pytest.mark.ray

CONFIG = small_config()
OTHER_CONFIGS = {  # with the option that differs
    "page size": (small_config(4), "page_size is 1, not 4; pool.num_slots is 8, not 32"),
    "fingerprint": (
        CONFIG.model_copy(update={"fingerprint": "another-model"}),
        "fingerprint is '', not 'another-model'",
    ),
    "leases": (CONFIG.model_copy(update={"leases": LeaseConfig(max_waiters=4)}), "leases.max_waiters is 3, not 4"),
}


def new_name() -> str:
    return f"kv-{uuid4().hex[:8]}"


async def epoch_of(cache: Any) -> str:
    async with PrefixCacheClient(cache) as client:
        return (await client.stats()).epoch


@pytest.fixture
def started(ray_cluster: None) -> Iterator[Callable[..., Any]]:
    """Run `start_cache` for tests that end their cache, and for those that fail to."""
    caches: list[Any] = []

    def start(**options: Any) -> Any:
        caches.append(start_cache(CONFIG, **options))
        return caches[-1]

    yield start
    for cache in caches:
        ray.kill(cache)


# ---------------------------------------------------------------- wrong arguments


@ray.remote
class NoCache:
    """An actor that is not a cache."""

    async def work(self) -> None:
        """Do nothing."""


@pytest.fixture(scope="module")
def no_cache(ray_cluster: None) -> Iterator[Any]:
    """Return an actor that is not a cache."""
    actor = cast(Any, NoCache).options(name="no-cache", namespace=deploy.NAMESPACE).remote()
    yield actor
    ray.kill(actor)


def named_actors() -> set[tuple[str, str]]:
    return {(each["namespace"], each["name"]) for each in ray.util.list_named_actors(all_namespaces=True)}


WRONG_ARGUMENTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "start for ever": (
        lambda actor: start_cache(CONFIG, name="endless", lifetime="detached", timeout_s=float("inf")),
        "finite number of seconds, not inf",
    ),
    "start soon": (lambda actor: start_cache(CONFIG, timeout_s="soon"), "finite number of seconds, not 'soon'"),  # type: ignore[arg-type]
    "start a number": (lambda actor: start_cache(CONFIG, name=7), "a cache's name must be a text, not 7"),  # type: ignore[arg-type]
    "start no name": (
        lambda actor: start_cache(CONFIG, name=""),
        "a cache's name must have 1 to 128 characters, not 0",
    ),
    "start a path": (
        lambda actor: start_cache(CONFIG, name="../../x"),
        "a cache's name must be of printable characters",
    ),
    "start an escape": (lambda actor: start_cache(CONFIG, name="\x1b[31m"), r"it is '\\x1b\[31m'"),
    "start half a character": (lambda actor: start_cache(CONFIG, name="\ud800"), r"it is '\\ud800'"),
    "start the name of another actor": (
        lambda actor: start_cache(CONFIG, name="no-cache", timeout_s=5),
        r"the name 'no-cache' in namespace 'raydix' belongs to Actor\(NoCache.*\), which is no cache: choose another",
    ),
    "connect to no name": (lambda actor: connect(""), "must have 1 to 128 characters"),
    "connect to a path": (lambda actor: connect(".."), "must be of printable characters"),
    "a client of no name": (lambda actor: asyncio.run(PrefixCacheClient("").match([1])), "must have 1 to 128"),
    "connect to a handle": (lambda actor: connect(actor), r"name must be a text, not Actor\("),
    "connect with fields": (lambda actor: connect("some", config={}), "a cache takes a CacheConfig, not dict"),  # type: ignore[arg-type]
    "connect to another actor": (lambda actor: connect("no-cache"), "which is no cache: choose another name"),
    "shut down a name": (lambda actor: shutdown_cache("kv"), "cache must be the handle of a cache actor, .*, not 'kv'"),  # type: ignore[arg-type]
    "shut down another actor": (lambda actor: shutdown_cache(actor), r"not Actor\(NoCache"),
    "beside nothing": (lambda actor: beside(None), "cache must be the handle of a cache actor"),  # type: ignore[arg-type]
    "a client of another actor": (
        lambda actor: asyncio.run(PrefixCacheClient(actor).match([1])),
        r"not Actor\(NoCache",
    ),
}


@pytest.mark.parametrize(("use", "advice"), WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_an_argument_that_cannot_be_is_refused_and_starts_and_ends_nothing(
    use: Callable[[Any], Any], advice: str, no_cache: Any
) -> None:
    before = named_actors()

    with pytest.raises(InvalidRequest, match=advice):
        use(no_cache)

    ray.get(no_cache.work.remote())
    assert named_actors() <= before  # those of other tests may end meanwhile


# ---------------------------------------------------------------- names


@pytest.fixture(scope="module")
def named(ray_cluster: None) -> Iterator[tuple[str, Any]]:
    """A cache with a name, for tests that leave it unchanged."""
    name = new_name()
    cache = start_cache(CONFIG, name=name)
    yield name, cache
    shutdown_cache(cache)


async def test_a_name_leads_to_its_cache(named: tuple[str, Any]) -> None:
    name, cache = named
    epoch = await epoch_of(cache)

    assert await epoch_of(connect(name)) == epoch
    assert await epoch_of(connect(name, config=CONFIG)) == epoch
    assert await epoch_of(name) == epoch


async def test_starting_a_name_that_runs_with_the_same_configuration_gives_the_running_cache(
    named: tuple[str, Any],
) -> None:
    name, cache = named

    assert start_cache(CONFIG, name=name)._actor_id == cache._actor_id
    assert start_cache(CONFIG.model_copy(), name=name)._actor_id == cache._actor_id
    assert (await start_cache_async(CONFIG, name=name))._actor_id == cache._actor_id


@pytest.mark.parametrize(("config", "difference"), OTHER_CONFIGS.values(), ids=OTHER_CONFIGS)
async def test_a_running_name_with_another_configuration_is_a_mismatch_which_names_the_differences(
    named: tuple[str, Any], config: Any, difference: str
) -> None:
    name, cache = named
    digests = f"{CONFIG.digest()}, not {config.digest()}"
    message = f"cache '{name}' runs with another configuration ({digests}): {difference}; use its configuration"

    with pytest.raises(ConfigMismatch, match=re.escape(message + " or another name, or end it: raydix stop ")):
        start_cache(config, name=name)
    with pytest.raises(ConfigMismatch, match=re.escape(message)):
        await start_cache_async(config, name=name)
    with pytest.raises(ConfigMismatch, match=re.escape(message)):
        connect(name, config=config)

    assert (await epoch_of(name)) == await epoch_of(cache)  # it continues unchanged


def test_the_log_of_a_cache_begins_with_its_epoch_and_whether_its_core_is_compiled(ray_cluster: None) -> None:
    cache = start_cache(CONFIG.model_copy(update={"json_logs": True}))
    ready = f"cache ready: raydix {package_version()}, epoch {ray.get(cache.stats.remote()).epoch}, core {CORE}, "
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())

    deadline = time.monotonic() + 60
    while not any(ready in each.read_text(errors="replace") for each in logs.glob("worker-*.err")):
        assert time.monotonic() < deadline
        time.sleep(0.05)  # Ray writes the file

    shutdown_cache(cache)


async def test_a_name_holds_in_its_namespace_alone(named: tuple[str, Any]) -> None:
    name, _ = named

    with pytest.raises(CacheUnavailable, match=f"no cache named '{name}' runs in namespace 'elsewhere'"):
        connect(name, namespace="elsewhere")


async def test_caches_without_a_name_are_each_their_own(
    named: tuple[str, Any], running_cache: Callable[[Any], Any]
) -> None:
    assert await epoch_of(running_cache(CONFIG)) != await epoch_of(named[1])


@pytest.mark.more
async def test_concurrent_starts_of_one_name_get_one_cache_and_a_detached_one_outlives_its_handles(
    ray_cluster: None,
) -> None:
    name = new_name()

    first, second = await asyncio.gather(*(start_cache_async(CONFIG, name=name, lifetime="detached") for _ in range(2)))

    assert first._actor_id == second._actor_id
    epoch = await epoch_of(first)
    del first, second
    assert await epoch_of(name) == epoch
    await asyncio.to_thread(shutdown_cache, connect(name))
    with pytest.raises(CacheUnavailable, match="no cache named"):
        connect(name)


@pytest.fixture
def of_old_ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, as it is with a Ray that has no error for a taken name: Ray 2.54 has one, 2.52 has none."""
    monkeypatch.delattr("ray.exceptions.ActorAlreadyExistsError", raising=False)
    spec = find_spec(deploy.__name__)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "message",
    ["The name kv (namespace=raydix) is already taken.", "Actor with name 'kv' already exists in the namespace raydix"],
)
def test_a_value_error_of_older_ray_says_that_a_name_is_taken(
    of_old_ray: Any, ray_cluster: None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[str] = []

    def refuse(*args: Any, **options: Any) -> None:
        attempts.append("made")
        raise ValueError(message)

    monkeypatch.setattr("ray.actor.ActorClass._remote", refuse)
    with pytest.raises(CacheUnavailable, match=r"exists, but is not ready after 0\.3 s"):
        of_old_ray.start_cache(CONFIG, name=new_name(), timeout_s=0.3)

    assert len(attempts) > 1


def test_older_ray_refuses_an_option_at_the_first_attempt(of_old_ray: Any, ray_cluster: None) -> None:
    with pytest.raises(InvalidRequest, match="lifetime"):
        of_old_ray.start_cache(CONFIG, lifetime="eternal", timeout_s=5)


def test_while_a_name_stays_taken_by_an_actor_that_cannot_be_found_the_deadline_holds(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = new_name()
    monkeypatch.setattr(deploy, "find", lambda name, namespace: None)
    holder = cast(Any, NoCache).options(name=name, namespace=deploy.NAMESPACE).remote()

    with pytest.raises(CacheUnavailable, match=r"exists, but is not ready after 0\.3 s"):
        start_cache(CONFIG, name=name, timeout_s=0.3)

    ray.get(holder.work.remote())
    ray.kill(holder)


@pytest.mark.long
async def test_starting_does_not_hold_the_loop(ray_cluster: None) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    ticking = asyncio.create_task(tick())
    cache = await start_cache_async(CONFIG)
    ticking.cancel()

    assert ticks > 5
    shutdown_cache(cache)


def test_a_cache_for_which_there_is_no_room_is_unavailable_after_its_timeout(ray_cluster: None) -> None:
    with pytest.raises(CacheUnavailable, match=r"did not start in 0\.5 s: check that the cluster has free resources"):
        start_cache(CONFIG, num_gpus=64, timeout_s=0.5)


def test_a_cache_that_did_not_start_in_time_is_ended_with_its_name(ray_cluster: None) -> None:
    name = new_name()

    with pytest.raises(CacheUnavailable, match="did not start"):
        start_cache(CONFIG, name=name, lifetime="detached", num_gpus=64, timeout_s=0.5)

    with pytest.raises(CacheUnavailable, match="no cache named"):
        connect(name)


@pytest.fixture
def never_placed(ray_cluster: None) -> Iterator[tuple[str, Any]]:
    """Return a cache with a name that the cluster has no resources for."""
    name = new_name()
    cache = ray.remote(PrefixCacheActor).options(name=name, namespace="raydix", num_gpus=64).remote(CONFIG)
    yield name, cache
    ray.kill(cache)


def test_a_cache_that_does_not_answer_is_unavailable_after_the_timeout_and_is_left_as_it_is(
    never_placed: tuple[str, Any],
) -> None:
    name, cache = never_placed

    with pytest.raises(CacheUnavailable, match=r"did not answer in 0\.2 s"):
        connect(name, config=CONFIG, timeout_s=0.2)
    with pytest.raises(CacheUnavailable, match=r"exists, but is not ready after 0\.2 s"):
        start_cache(CONFIG, name=name, timeout_s=0.2)

    assert connect(name)._actor_id == cache._actor_id


# ---------------------------------------------------------------- the name of a cache that has died


HUGE = CacheConfig(pool=PoolConfig.uniform(num_slots=2**30, num_layers=8, num_kv_heads=64, head_dim=1024, device="cpu"))


@pytest.mark.long
async def test_while_the_error_of_a_cache_that_could_not_start_is_kept_its_name_is_free(ray_cluster: None) -> None:
    """A notebook or a logger may keep the error."""
    name = new_name()
    with pytest.raises(CacheUnavailable, match="bytes") as caught:
        start_cache(HUGE, name=name)

    cache = start_cache(CONFIG, name=name)

    assert await epoch_of(name) == await epoch_of(cache)
    assert handles_held_by(caught.value) == []
    await asyncio.to_thread(shutdown_cache, cache)


def handles_held_by(error: BaseException | None) -> list[Any]:
    """Return the actor handles that an error and its causes keep, in the variables of all frames but those of tests."""
    held: list[Any] = []
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename != __file__:
                held += [each for each in frame.f_locals.values() if isinstance(each, ray.actor.ActorHandle)]
        error = error.__cause__ or error.__context__
    return held


@pytest.mark.more
@pytest.mark.parametrize("how", ["killed by the kernel", pytest.param("crashed at its start", marks=pytest.mark.long)])
async def test_the_name_of_a_dead_cache_of_which_a_handle_is_kept_is_free(
    started: Callable[..., Any], how: str
) -> None:
    name = new_name()
    if how == "crashed at its start":
        dead = ray.remote(PrefixCacheActor).options(name=name, namespace=deploy.NAMESPACE).remote(HUGE)
    else:
        dead = started(name=name, max_restarts=0)
        handle = await dead.pool_handle.remote()
        os.kill(int(handle.path.split("/")[2]), signal.SIGKILL)
    with pytest.raises(ray.exceptions.ActorDiedError):
        while True:
            with suppress(ray.exceptions.ActorUnavailableError):
                await dead.noop.remote()

    cache = await start_cache_async(CONFIG, name=name)

    assert cache._actor_id != dead._actor_id
    assert await epoch_of(name) == await epoch_of(cache)
    await asyncio.to_thread(shutdown_cache, cache)


def test_a_start_that_is_given_up_leaves_no_thread_and_no_cache(ray_cluster: None) -> None:
    name = new_name()

    async def give_up() -> None:
        starting = start_cache_async(CONFIG, name=name, lifetime="detached", num_gpus=64, timeout_s=3600)
        await asyncio.wait_for(starting, 0.2)

    with asyncio.Runner() as runner, pytest.raises(TimeoutError):
        runner.run(give_up())  # its end waits for the threads of its loop

    with pytest.raises(CacheUnavailable, match="no cache named"):
        connect(name)


def test_a_start_that_is_given_up_leaves_the_cache_of_others(never_placed: tuple[str, Any]) -> None:
    name, cache = never_placed

    async def give_up() -> None:
        await asyncio.wait_for(start_cache_async(CONFIG, name=name, timeout_s=3600), 0.2)

    with asyncio.Runner() as runner, pytest.raises(TimeoutError):
        runner.run(give_up())

    assert connect(name)._actor_id == cache._actor_id


# ---------------------------------------------------------------- shutdown


def test_a_shutdown_has_time_to_close_a_disk_that_stalls() -> None:
    assert 2 * cache_service._DISK_CLOSE_S < deploy.SHUTDOWN_S, "loads and writes are closed in turn"


def test_shutting_down_a_cache_that_does_not_answer_kills_it(
    never_placed: tuple[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name, cache = never_placed
    monkeypatch.setattr(deploy, "SHUTDOWN_S", 0.2)

    with caplog.at_level(logging.WARNING, "raydix.actors.cluster.deploy"):
        shutdown_cache(cache)

    assert "the cache was killed: it did not answer" in caplog.text
    with pytest.raises(CacheUnavailable, match="no cache named"):
        connect(name)


@pytest.mark.more
async def test_a_cache_that_shuts_down_without_a_waiting_caller_ends_and_stays_down(ray_cluster: None) -> None:
    name = new_name()
    cache = start_cache(CONFIG, name=name, lifetime="detached")
    client = PrefixCacheClient(cache)
    lease = await client.acquire([1])

    cache.shutdown.remote(0.3)  # interrupts its caller: the call does not return

    async with asyncio.timeout(300):
        with pytest.raises(ray.exceptions.ActorDiedError):
            while True:
                await cache.noop.remote()
    with pytest.raises(CacheUnavailable, match="no cache named"):
        connect(name)
    await lease.release()
    await client.close()


@pytest.mark.long
async def test_starting_the_name_of_a_cache_that_drains_gives_a_new_one_once_that_has_ended(ray_cluster: None) -> None:
    name = new_name()
    old = start_cache(CONFIG, name=name, lifetime="detached")
    client = PrefixCacheClient(old)
    lease = await client.acquire([1])
    old.shutdown.remote(500.0)
    async with asyncio.timeout(300):
        while await is_welcome(old):  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0.01)

    with pytest.raises(CacheUnavailable, match="draining"):
        connect(name, config=CONFIG)
    with pytest.raises(CacheUnavailable, match="it is shutting down"):
        await start_cache_async(CONFIG, name=name, timeout_s=0.2)
    starting = asyncio.create_task(start_cache_async(CONFIG, name=name))
    await lease.release()
    new = await starting

    assert new._actor_id != old._actor_id
    assert await epoch_of(name) != lease.epoch
    await asyncio.to_thread(shutdown_cache, new)
    await client.close()


async def test_a_cache_shut_down_is_gone_and_can_be_shut_down_again(started: Callable[..., Any]) -> None:
    name = new_name()
    cache = started(name=name)
    client = PrefixCacheClient(cache)
    lease = await client.acquire([1])

    await asyncio.to_thread(shutdown_cache, cache)
    await asyncio.to_thread(shutdown_cache, cache)
    await asyncio.to_thread(shutdown_cache, cache, drain_s=5)

    with pytest.raises(CacheUnavailable, match="no cache named"):
        connect(name)
    with pytest.raises(CacheUnavailable):
        await client.match([1])
    await lease.release()
    await client.close()


@pytest.mark.more
async def test_draining_refuses_new_sessions_and_lets_open_leases_end(started: Callable[..., Any]) -> None:
    cache = started()
    async with PrefixCacheClient(cache) as client:
        lease = await client.acquire([1, 2])
        shutdown = asyncio.create_task(asyncio.to_thread(shutdown_cache, cache, drain_s=500))
        async with asyncio.timeout(300):
            while await is_welcome(cache):  # noqa: ASYNC110 -- there is no event for it
                await asyncio.sleep(0.01)

        assert (await lease.insert([1, 2])).num_inserted == 2  # open sessions continue
        assert not shutdown.done()
        await lease.release()
        async with asyncio.timeout(300):  # not the lifetime of leases
            await shutdown


async def is_welcome(cache: Any) -> bool:
    client = PrefixCacheClient(cache)
    try:
        await client.open()
    except CacheUnavailable as error:
        assert "shutting down" in str(error)
        return False
    await client.close()
    return True


@pytest.mark.more
async def test_leases_still_open_after_the_drain_are_cut_short_and_the_log_says_how_many(
    started: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    cache = started()
    client = PrefixCacheClient(cache)
    leases = [await client.acquire([token]) for token in (1, 2)]

    with caplog.at_level(logging.WARNING, "raydix.actors.cluster.deploy"):
        await asyncio.to_thread(shutdown_cache, cache, drain_s=0.1)

    assert [record.getMessage() for record in caplog.records if record.name == "raydix.actors.cluster.deploy"] == [
        "the shutdown of the cache cut short 2 leases"
    ]
    for lease in leases:
        await lease.release()
    await client.close()


# ---------------------------------------------------------------- death


class Orphans(NamedTuple):
    """References left by a cache that was killed."""

    cache: Any
    client: PrefixCacheClient
    lease: Lease
    slots: torch.Tensor  # its own copy, unchanged
    pool: AttachedPool


@asynccontextmanager
async def killed(name: str) -> AsyncIterator[tuple[Orphans, asyncio.Task[Any]]]:
    cache = start_cache(CONFIG, name=name)
    client = PrefixCacheClient(cache)
    lease, pool = await client.acquire([1] * 8), await client.attach_pool(mapped=False)
    orphans = Orphans(cache, client, lease, lease.slots, pool)
    waiting = asyncio.create_task(client.acquire([2]))
    while not (await client.stats()).waiters:  # noqa: ASYNC110 -- there is no event for it
        await asyncio.sleep(0.001)
    ray.kill(cache)
    yield orphans, waiting


VERBS: dict[str, Callable[[Orphans], Awaitable[Any]]] = {
    "match": lambda left: left.client.match([1]),
    "lock": lambda left: left.client.lock([1]),
    "acquire": lambda left: left.client.acquire([1]),
    "evict": lambda left: left.client.evict(1),
    "reset": lambda left: left.client.reset(),
    "stats": lambda left: left.client.stats(),
    "check_invariants": lambda left: left.client.check_invariants(),
    "attach_pool": lambda left: left.client.attach_pool(),
    "insert": lambda left: left.lease.insert([1]),
    "extend": lambda left: left.lease.extend(1),
    "confirm_open": lambda left: left.lease.confirm_open(),
    "read_kv": lambda left: left.pool.read_kv(left.lease, left.slots),
    "a new client": lambda left: PrefixCacheClient(left.cache).open(),
}


@pytest.mark.more
async def test_of_a_killed_cache_every_verb_says_that_it_is_unavailable(ray_cluster: None) -> None:
    name = new_name()
    async with killed(name) as (left, waiting), asyncio.timeout(300):
        with pytest.raises(CacheUnavailable, match="dead, restarting, or cannot be reached"):
            await waiting
        for verb in VERBS.values():
            with pytest.raises(CacheUnavailable, match="dead, restarting, or cannot be reached") as caught:
                await verb(left)
            assert caught.value.__cause__ is None  # no error of Ray is attached
        # A lease that is being extended cannot be confirmed.
        together = [verb for name, verb in VERBS.items() if "confirm_open" not in name]
        results = await asyncio.gather(*(verb(left) for verb in together), return_exceptions=True)
        assert {type(result) for result in results} == {CacheUnavailable}

        await left.lease.release()  # the lease has ended: no error
        await left.lease.abort()
        await left.client.close()
        await left.client.close()
        with pytest.raises(CacheUnavailable, match="no cache named"):
            connect(name)

    again = start_cache(CONFIG, name=name)
    assert await epoch_of(again) != left.lease.epoch
    shutdown_cache(again)


# ---------------------------------------------------------------- a name that leads to another cache


@pytest.mark.more
async def test_a_client_of_a_name_goes_on_with_the_next_cache_of_that_name_and_one_of_a_handle_does_not(
    ray_cluster: None,
) -> None:
    name = new_name()
    old = await start_cache_async(CONFIG, name=name)
    async with PrefixCacheClient(old) as of_handle, in_use(name) as (client, lease, pool):
        with pytest.raises(CacheUnavailable):
            await of_handle.match([1])
        new = await start_cache_async(CONFIG, name=name)

        assert (await client.match([1])).prefix_len == 0
        again = await client.acquire([1])
        assert (await client.stats()).epoch == again.epoch != lease.epoch
        assert (await again.insert([1])).num_inserted == 1
        with pytest.raises(StaleEpoch):
            await lease.insert([1])
        assert pool.lost
        assert (await client.attach_pool()).epoch == again.epoch
        await client.check_invariants()
        with pytest.raises(CacheUnavailable):
            await of_handle.match([1])
        await again.release()
    await asyncio.to_thread(shutdown_cache, new)


@asynccontextmanager
async def in_use(name: str) -> AsyncIterator[tuple[PrefixCacheClient, Lease, AttachedPool]]:
    """References left by a cache that was shut down: a client made from its name, a lease and the pool."""
    async with PrefixCacheClient(name) as client:
        lease, pool = await client.acquire([1]), await client.attach_pool()
        await asyncio.to_thread(shutdown_cache, connect(name))
        yield client, lease, pool


@pytest.mark.more
async def test_while_there_is_no_cache_of_that_name_a_client_of_it_says_so(started: Callable[..., Any]) -> None:
    name = new_name()
    started(name=name)
    async with in_use(name) as (client, lease, pool):
        async with asyncio.timeout(300):
            with pytest.raises(StaleEpoch, match="the cache has ended since"):
                while True:
                    with suppress(CacheUnavailable):  # its connection breaks before Ray knows
                        await lease.extend(1)
        for _ in range(2):
            with pytest.raises(CacheUnavailable, match="no cache named"):
                await client.match([1])
        assert pool.lost
        await lease.release()


async def test_where_no_cluster_runs_none_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[dict[str, Any]] = []

    def find_nothing(**options: Any) -> None:
        joined.append(options)
        raise ConnectionError("Could not find any running Ray instance.\nPlease start one.")  # Ray's words

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", find_nothing)

    advice = r"no Ray cluster is reached: call ray\.init\(address=\.\.\.\) first.* any running Ray instance"
    with pytest.raises(CacheUnavailable, match=advice):
        connect("kv")
    with pytest.raises(CacheUnavailable, match=advice):
        await connect_fleet("kv-*", timeout_s=60)
    with pytest.raises(CacheUnavailable, match=advice):
        await PrefixCacheClient("kv").open()
    assert joined == [{"address": "auto"}] * 3
