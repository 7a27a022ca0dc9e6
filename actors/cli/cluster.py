"""Connections to the Ray cluster and its caches."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from raydix.actors.cli.failures import UNREACHABLE, USAGE, CommandError
from raydix.schemas.shown import shown

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from raydix.actors import PrefixCacheClient

R = TypeVar("R")

_CONNECT_S = 3.0  # limit to find a listener; Ray itself would try for minutes
_COMPLETE_S = 5.0  # limit of a completion in the shell
_TRIES_OF_RAY = "RAY_NUM_REDIS_GET_RETRIES"  # read when Ray is imported
_TRIES = "5"  # a second apart, to reach a cluster that listens; Ray's default is 20
_ANSWER_S = 10.0  # limit for the response of a cache

Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        envvar="RAY_ADDRESS",
        help="Address of the Ray cluster. Default: the cluster of this machine.",
    ),
]
Namespace = Annotated[str, typer.Option("--namespace", envvar="RAYDIX_NAMESPACE", help="Ray namespace of the caches.")]


def complete_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of caches that begin with `incomplete`, for the shell; none if no cluster answers in time.

    A separate process asks the cluster, so that Ray cannot print here, and a timeout can end it.
    """
    address, namespace = ctx.params.get("address") or "", ctx.params.get("namespace") or "raydix"
    asking = [sys.executable, "-c", _PRINT_NAMES, address, namespace]
    try:
        answer = subprocess.run(
            asking, env=os.environ | {_TRIES_OF_RAY: "1"}, capture_output=True, check=True, timeout=_COMPLETE_S
        )
        names: list[str] = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    return [name for name in names if name.startswith(incomplete) and name.isprintable()]


_PRINT_NAMES = """
import json, sys
from raydix.actors.cli.cluster import cache_names, join
join(sys.argv[1] or None, sys.argv[2])
print(json.dumps(cache_names(sys.argv[2])))
"""
CacheName = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of a cache, as `raydix list` shows it.", autocompletion=complete_names),
]


def join(address: str | None, namespace: str, *, is_quiet: bool = True) -> None:
    """Connect this process to a running Ray cluster, unless it is connected.

    Args:
        is_quiet: hide Ray's messages on stderr.

    Raises:
        CommandError: no cluster runs there.
    """
    os.environ.setdefault(_TRIES_OF_RAY, _TRIES)
    import ray

    if ray.is_initialized():
        return
    if address and address != "auto":
        _check_listens(address)
    with TemporaryFile() as stderr:
        try:
            with _stderr_into(stderr) if is_quiet else nullcontext():
                ray.init(
                    address=address or "auto", namespace=namespace, log_to_driver=False, logging_level=logging.ERROR
                )
        except getattr(ray.exceptions, "AuthenticationError", ()) as error:  # older Ray has none
            raise _asks_for_token(address) from error
        except (ConnectionError, SystemExit) as error:  # Ray exits if a cluster vanished
            stderr.seek(0)
            if b"InvalidAuthToken" in stderr.read():
                raise _asks_for_token(address) from error
            raise CommandError(
                "no Ray cluster runs here" if not address else f"the Ray cluster at {address} does not answer",
                "ray start --head, or name a running cluster: --address HOST:6379 (or RAY_ADDRESS)",
                UNREACHABLE,
            ) from error
        except Exception as error:  # Ray raises many classes
            from raydix.actors.transport.ray_calls import why_not_joined

            where = f"at {address}" if address else "of this machine"
            raise CommandError(
                f"the Ray cluster {where} cannot be joined: {why_not_joined(error)}",
                "run this command in the cluster's environment; ray --version on its head node prints the version",
                UNREACHABLE,
            ) from error


def _asks_for_token(address: str | None) -> CommandError:
    return CommandError(
        f"the Ray cluster {f'at {address}' if address else 'of this machine'} requires a token, and got none or "
        "another one",
        "export RAY_AUTH_MODE=token, and put the cluster's token into ~/.ray/auth_token or RAY_AUTH_TOKEN; "
        "ray get-auth-token on its head node prints it",
        UNREACHABLE,
    )


@contextmanager
def _stderr_into(file: IO[bytes]) -> Iterator[None]:
    """Redirect stderr into a file. Ray writes a line a second while a cluster refuses it."""
    stderr = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)


def _check_listens(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise CommandError(
            f"the address of a Ray cluster must be HOST:PORT, not {address!r}", "--address HOST:6379", USAGE
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise CommandError(
            f"no Ray cluster answers at {address}: {error.strerror or error}",
            "ray status --address HOST:PORT on the head node, or ray start --head",
            UNREACHABLE,
        ) from error


def cache_names(namespace: str) -> list[str]:
    """Return the names of the caches in a namespace, sorted."""
    from raydix.actors.cluster.deploy import find_caches

    return sorted(find_caches(namespace=namespace))


def cache_handle(name: str, namespace: str, to_end: bool = False) -> ActorHandle[Any]:
    """Return the handle of the cache with that name.

    Args:
        to_end: also of a cache that cannot run again.

    Raises:
        CommandError: no such cache runs, and the message lists the running ones; or it cannot run again.
    """
    from raydix.actors.cluster.deploy import find_caches
    from raydix.actors.service.past_lives import LOST_GROUP, has_lost_its_group

    caches = find_caches(namespace=namespace)
    if name in caches:
        if not to_end and has_lost_its_group(caches[name]):
            raise CommandError(f"cache {name!r} {LOST_GROUP.partition('.')[0]}", f"raydix stop {name}", UNREACHABLE)
        return caches[name]
    namespaces = [actor["namespace"] for actor in _named_actors() if actor["name"] == name]
    if namespace in namespaces:
        raise CommandError(
            f"the actor named {name!r} in namespace {namespace!r} is no cache", "raydix list", UNREACHABLE
        )
    there = ", ".join(map(shown, sorted(caches))) or "none"
    elsewhere = [f"{shown(name)} in {shown(other)}" for other in namespaces]
    raise CommandError(
        f"no cache named {name!r} runs in namespace {namespace!r}; there: {there}",
        f"--namespace, as there is {', '.join(elsewhere)}" if elsewhere else "raydix list, or raydix start",
        UNREACHABLE,
    )


def ask(ref: Any, timeout_s: float | None = _ANSWER_S) -> Any:
    """Return the response of a cache.

    Raises:
        CommandError: it did not answer in `timeout_s`.
        RayError: it is dead.
    """
    import ray

    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise CommandError(
            f"the cache did not answer in {timeout_s:g} s: it is restarting, or its node is gone",
            "ray status, or end it: raydix stop NAME",
            UNREACHABLE,
        ) from error


def answers_of(asked: Mapping[str, Sequence[Any]], timeout_s: float) -> dict[str, list[Any] | None]:
    """Return the answers of caches by their names; None of a cache that has not answered in time."""
    import ray

    refs = [ref for of_cache in asked.values() for ref in of_cache]
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
    answers: dict[str, list[Any] | None] = dict.fromkeys(asked)
    for name, of_cache in asked.items():
        with suppress(ray.exceptions.RayError):
            answers[name] = ray.get(list(of_cache), timeout=0)
    return answers


def ask_client(cache: ActorHandle[Any], command: str, ask: Callable[[PrefixCacheClient], Awaitable[R]]) -> R:
    """Return what `ask` gets from a client of a cache, which has the command as its owner."""
    from raydix.actors import PrefixCacheClient

    async def run() -> R:
        async with PrefixCacheClient(cache, owner=f"raydix {command}") as client:
            return await ask(client)

    return asyncio.run(run())


def _named_actors() -> list[dict[str, str]]:
    from ray.util import list_named_actors

    return cast(list[dict[str, str]], list_named_actors(all_namespaces=True))
