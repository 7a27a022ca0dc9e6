"""Reaching the Ray cluster, and the caches on it."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from raydix.actors.cli.failures import UNREACHABLE, USAGE, CommandError
from raydix.schemas.shown import shown

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_CONNECT_S = 3.0  # to see whether anybody listens; Ray itself would try for minutes
_ANSWER_S = 10.0  # a cache that does not answer so long is given up

Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        envvar="RAY_ADDRESS",
        help="Of the Ray cluster. Default: that of this machine.",
    ),
]
Namespace = Annotated[str, typer.Option("--namespace", envvar="RAYDIX_NAMESPACE", help="Ray namespace of the caches.")]
CacheName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a cache, as `raydix list` shows it.")]


def join(address: str | None, namespace: str) -> None:
    """Connect this process to a Ray cluster that runs already; no effect if it is.

    Raises:
        CommandError: there is none.
    """
    import ray

    if ray.is_initialized():
        return
    if address and address != "auto":
        _check_listens(address)
    try:
        ray.init(address=address or "auto", namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, SystemExit) as error:  # Ray ends the process where a cluster has gone without a word
        raise CommandError(
            "no Ray cluster runs here" if not address else f"the Ray cluster at {address} does not answer",
            "ray start --head, or name a running cluster: --address HOST:6379 (or RAY_ADDRESS); to one that asks for a "
            "token Ray shows it only after export RAY_AUTH_MODE=token (ray get-auth-token)",
            UNREACHABLE,
        ) from error


def _check_listens(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise CommandError(f"{address!r} is no address of a Ray cluster", "--address HOST:6379", USAGE)
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise CommandError(
            f"no Ray cluster answers at {address}: {error.strerror or error}",
            "ray status --address HOST:PORT on the head node, or ray start --head",
            UNREACHABLE,
        ) from error


def cache_names(namespace: str) -> list[str]:
    """The names of the caches in a namespace, sorted."""
    return sorted(_caches(namespace))


def cache_handle(name: str, namespace: str) -> ActorHandle[Any]:
    """The cache of that name.

    Raises:
        CommandError: there is none; it says which there are.
    """
    caches = _caches(namespace)
    if name in caches:
        return caches[name]
    there = ", ".join(map(shown, sorted(caches))) or "none"
    elsewhere = [
        f"{shown(each['name'])} in {shown(each['namespace'])}" for each in _named_actors() if each["name"] == name
    ]
    raise CommandError(
        f"no cache named {name!r} runs in namespace {namespace!r}; there: {there}",
        f"--namespace, as there is {', '.join(elsewhere)}" if elsewhere else "raydix list, or raydix start",
        UNREACHABLE,
    )


def ask(ref: Any, timeout_s: float | None = _ANSWER_S) -> Any:
    """What a cache answers.

    Raises:
        CommandError: it does not, in that time.
        RayError: it is dead.
    """
    import ray

    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise CommandError(
            f"the cache did not answer in {timeout_s:g} s: it is restarting, or its node is gone",
            "ray status, or give it up: raydix stop NAME",
            UNREACHABLE,
        ) from error


def _named_actors() -> list[dict[str, str]]:
    from ray.util import list_named_actors

    return cast(list[dict[str, str]], list_named_actors(all_namespaces=True))


def _caches(namespace: str) -> dict[str, ActorHandle[Any]]:
    """The named actors of a namespace that are caches, by name."""
    import ray

    found: dict[str, ActorHandle[Any]] = {}
    for actor in _named_actors():
        if actor["namespace"] != namespace:
            continue
        try:
            handle: ActorHandle[Any] = ray.get_actor(actor["name"], namespace=namespace)
        except ValueError:  # it has just ended
            continue
        if hasattr(handle, "pool_handle") and hasattr(handle, "open_session"):
            found[actor["name"]] = handle
    return found
