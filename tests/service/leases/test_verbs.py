"""The arguments of a verb stand once: every other way to call it has the same, and refuses others in the call."""

from __future__ import annotations

import asyncio
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.caches.cache_under_test import small_config
from support.source_files import ROOT

from raydix.actors import Fleet, Lease, LocalPrefixCache, PrefixCacheClient, acquire_ranks, connect_fleet
from raydix.actors.client.prefix_cache_client import SyncClient
from raydix.actors.client.sync_lease import SyncLease
from raydix.actors.client.tracing import trace_verbs
from raydix.schemas import CacheError, InvalidRequest

OF_LEASES = (
    "insert",
    "insert_next",
    "extend",
    "confirm_open",
    "release",
    "release_window",
    "abort",
    "grant",
    "preempt",
)
WAYS: dict[str, tuple[Callable[..., Any], ...]] = {  # verb of a client -> other ways to call it
    "acquire": (SyncClient.acquire, Fleet.acquire, acquire_ranks),
    "lock": (SyncClient.lock,),
    "match": (SyncClient.match,),
    "prefetch": (SyncClient.prefetch,),
    "explain": (SyncClient.explain,),
    "attach_pool": (SyncClient.attach_pool,),
}


def arguments(verb: Callable[..., Any], without: int = 1) -> list[inspect.Parameter]:
    """Return the parameters of a verb behind its first ones."""
    return list(inspect.signature(verb).parameters.values())[without:]


@pytest.mark.parametrize("name", OF_LEASES)
def test_a_verb_of_a_lease_has_its_arguments_and_documentation_at_the_clients(name: str) -> None:
    verb = getattr(Lease, name)
    at_client, plain = getattr(PrefixCacheClient, name), getattr(SyncLease, name)

    assert arguments(at_client, 2) == arguments(plain) == arguments(verb)
    assert list(inspect.signature(at_client).parameters)[:2] == ["self", "lease"]
    assert at_client.__doc__ == plain.__doc__ == verb.__doc__


@pytest.mark.parametrize("name", WAYS)
def test_a_verb_of_a_client_has_the_same_arguments_wherever_it_is_called(name: str) -> None:
    verb = getattr(PrefixCacheClient, name)

    for other in WAYS[name]:
        assert arguments(other) == arguments(verb), other.__qualname__


def test_help_lists_arguments_with_their_defaults() -> None:
    for verb in (Fleet.acquire, acquire_ranks, SyncClient.acquire, PrefixCacheClient.acquire):
        assert "max_prefix_len: 'int | None' = None" in str(inspect.signature(verb))
        assert "options" not in str(inspect.signature(verb))


@pytest.fixture(params=["plain", "traced"])
def traced(request: Any) -> Iterator[None]:
    """Run the test without and with tracing spans."""
    if request.param == "plain":
        yield
        return
    pytest.importorskip("opentelemetry.trace")
    stop = trace_verbs()
    yield
    stop()


def required(verb: Callable[..., Any]) -> int:
    """Return the number of arguments behind `self` that a verb needs."""
    return sum(part.default is part.empty and part.kind is part.POSITIONAL_OR_KEYWORD for part in arguments(verb))


def calls_of(cache: PrefixCacheClient, lease: Lease, fleet: Fleet) -> dict[str, Callable[..., Any]]:
    """Return each verb in each way, with the arguments that it needs, none of which is used."""
    owners: dict[str, Any] = {"client": cache, "lease": lease, "fleet": fleet}
    verbs: dict[str, list[str]] = {
        "client": [name for name, _ in inspect.getmembers(PrefixCacheClient, inspect.isfunction)],
        "lease": [*OF_LEASES],
        "fleet": ["acquire", "route", "explain"],
    }
    calls: dict[str, Callable[..., Any]] = {"ranks": lambda **options: acquire_ranks([cache], [1], **options)}
    for owner, names in verbs.items():
        for name in names:
            verb = getattr(type(owners[owner]), name)
            if not name.startswith("_") and name != "check_lease":
                bound, given = getattr(owners[owner], name), [lease] * required(verb)
                calls[f"{owner}.{name}"] = lambda bound=bound, given=given, **options: bound(*given, **options)
    return calls


@pytest.mark.usefixtures("traced")
async def test_an_unknown_argument_raises_type_error_in_the_call_and_nothing_happens() -> None:
    config = small_config().model_copy(update={"events": "slim"})
    async with LocalPrefixCache(config) as cache, await connect_fleet({"a": cache}) as fleet:
        async with cache.acquire([1, 2]) as lease:
            before = await cache.stats()
            calls = calls_of(cache, lease, fleet)
            assert {"ranks", "client.acquire", "client.insert", "client.unlock", "lease.grant"} <= calls.keys()

            for name, call in calls.items():
                with pytest.raises(TypeError, match="unexpected keyword argument 'loads'"):
                    call(loads=True)
                    pytest.fail(f"{name} took it")

            after = await cache.stats()
            assert (after.acquires, after.open_leases) == (before.acquires, 1)


def test_an_unknown_argument_of_a_plain_call_raises_type_error_and_runs_nothing() -> None:
    with LocalPrefixCache(small_config()).sync as cache, cache.acquire([1, 2]) as lease:
        verbs = dict.fromkeys(("acquire", "lock", "match", "attach_pool", "stats", "retire"), cache)
        for name, owner in {**verbs, **dict.fromkeys(OF_LEASES, lease)}.items():
            verb: Any = getattr(owner, name)
            with pytest.raises(TypeError, match="unexpected keyword argument 'loads'"):
                verb(*[[1]] * required(getattr(type(owner), name)), loads=True)

        assert cache.stats().open_leases == 1


async def test_a_lease_can_be_named_and_must_be_the_clients_own() -> None:
    async with LocalPrefixCache(small_config()) as cache, PrefixCacheClient(cache) as other:
        lease = await cache.acquire(tokens=[1, 2])
        for name in OF_LEASES:
            verb: Any = getattr(other, name)
            with pytest.raises(CacheError, match="belongs to another client"):
                await verb(lease, *[[1, 2]] * required(getattr(Lease, name)))
            with pytest.raises(InvalidRequest, match="lease must be a Lease"):
                await verb(7, *[[1, 2]] * required(getattr(Lease, name)))
        task = asyncio.ensure_future(other.release(lease))  # it raises where it is awaited
        with pytest.raises(CacheError, match="belongs to another client"):
            await task

        client: Any = cache
        assert (await client.insert(lease=lease, tokens=[1, 2])).num_inserted == 2
        await client.unlock(lease=lease)
        assert (await cache.stats()).open_leases == 0


WRONG = """
from raydix.actors import Fleet, Lease, LocalPrefixCache, PrefixCacheClient, acquire_ranks

async def use(client: PrefixCacheClient, lease: Lease, fleet: Fleet, cache: LocalPrefixCache) -> None:
    await client.acquire([1], {argument})
    await fleet.acquire([1], {argument})
    await acquire_ranks([client], [1], {argument})
    client.sync.acquire([1], {argument})
    await client.extend(lease, 1, {second})
    await lease.extend(1, {second})
    cache.sync.acquire([1]).extend(1, {second})
"""


@pytest.mark.more
@pytest.mark.skipif(not find_spec("mypy"), reason="needs the extra dev: make lint")
def test_mypy_checks_the_arguments_of_every_way_to_call_a_verb(tmp_path: Path) -> None:
    right = WRONG.format(argument="load=False, timeout_s=1", second="timeout_s=1")
    unknown = WRONG.format(argument="loads=False", second="timeout=1")
    mistyped = WRONG.format(argument="timeout_s='1'", second="timeout_s='1'")
    for name, text in (("right", right), ("unknown", unknown), ("mistyped", mistyped)):
        (tmp_path / f"{name}.py").write_text(text)
    files = [str(tmp_path / f"{name}.py") for name in ("right", "unknown", "mistyped")]
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *files]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    def lines_with(file: str, code: str) -> list[int]:
        return [int(line) for line in re.findall(rf"{file}\.py:(\d+): error: .*\[{code}\]", done.stdout)]

    verbs = list(range(5, 12))
    assert "right.py" not in done.stdout, done.stdout
    assert lines_with("unknown", "call-arg") == verbs, done.stdout
    assert lines_with("mistyped", "arg-type") == verbs, done.stdout
