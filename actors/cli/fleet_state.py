"""`raydix fleet list`, `stats` and `explain`: running caches, as a router sees them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Group
from rich.table import Table

from raydix.actors.cli.cluster import Address, Namespace, join
from raydix.actors.cli.explain import NamespacePart, TokensFile, read_tokens
from raydix.actors.cli.output import AsJson, show, table_of
from raydix.actors.cli.route_defaults import WEIGHT
from raydix.schemas.shown import shown

if TYPE_CHECKING:
    from raydix.actors import Fleet
    from raydix.schemas import FleetStats, RouteConfig

R = TypeVar("R")

Pattern = Annotated[str, typer.Argument(metavar="PATTERN", help='Names of the caches, such as "chat-*".')]
Timeout = Annotated[float, typer.Option("--timeout", min=0, metavar="SECONDS", help="To wait for a first cache.")]
_TIMEOUT_S = 10.0


def list_fleet(
    pattern: Pattern = "*",
    timeout_s: Timeout = _TIMEOUT_S,
    address: Address = None,
    namespace: Namespace = "raydix",
    as_json: AsJson = False,
) -> None:
    """List the caches that a router would send requests to, and the caches that it would leave out, with the cause."""
    stats = _with_fleet(pattern, address, namespace, timeout_s, lambda fleet: fleet.stats())
    rows: list[dict[str, Any]] = [{"cache": load.cache, "state": "in", "cause": ""} for load in stats.caches]
    rows += [{"cache": name, "state": "left out", "cause": cause} for name, cause in stats.left_out.items()]
    show(rows, as_json, lambda: _listing(rows, stats))


def stats(
    pattern: Pattern = "*",
    timeout_s: Timeout = _TIMEOUT_S,
    address: Address = None,
    namespace: Namespace = "raydix",
    as_json: AsJson = False,
) -> None:
    """Print the pages and the load of the caches, as a new router learns them from their events."""
    answer = _with_fleet(pattern, address, namespace, timeout_s, lambda fleet: fleet.stats())
    show(answer, as_json, lambda: _loads(answer))


def explain(
    tokens: TokensFile,
    pattern: Pattern = "*",
    extra_key: NamespacePart = None,
    lora_id: NamespacePart = None,
    cache_salt: NamespacePart = None,
    weight: Annotated[float, typer.Option(min=0, help="Of uncached tokens against pending ones.")] = WEIGHT,
    timeout_s: Timeout = _TIMEOUT_S,
    address: Address = None,
    namespace: Namespace = "raydix",
    as_json: AsJson = False,
) -> None:
    """Print the caches that a router would compare for a prompt, and the cost of each."""
    from raydix.schemas import RouteConfig

    ids = read_tokens(tokens)

    def ask(fleet: Fleet) -> dict[str, Any]:
        left_out = fleet.stats().left_out
        if not fleet.columns():
            return {"num_tokens": len(ids), "weight": weight, "candidates": [], "left_out": left_out}
        answer = fleet.explain(ids, extra_key=extra_key, lora_id=lora_id, cache_salt=cache_salt)
        return answer.model_dump(mode="json") | {"left_out": left_out}

    answer = _with_fleet(pattern, address, namespace, timeout_s, ask, RouteConfig(weight=weight))
    show(answer, as_json, lambda: _costs(answer))


def _with_fleet(
    pattern: str,
    address: str | None,
    namespace: str,
    timeout_s: float,
    ask: Callable[[Fleet], R],
    config: RouteConfig | None = None,
) -> R:
    """Return what `ask` gets from a router that reads the caches' snapshots, and ends then.

    Raises:
        CacheUnavailable: no cache was found within `timeout_s`.
    """
    from raydix.actors import Fleet
    from raydix.actors.fleet.cache_directory import directory_of
    from raydix.schemas import RouteConfig

    join(address, namespace)
    logging.getLogger("raydix.actors.fleet.cache_feed").addHandler(logging.NullHandler())  # the tables have the causes

    async def run() -> R:
        async with Fleet(directory_of(pattern, namespace), config or RouteConfig(), None, timeout_s) as fleet:
            await fleet.open(needs_one=False)
            return ask(fleet)

    return asyncio.run(run())


_ADVICE = "no cache gets requests; to start caches for a router: raydix start --set events=slim ..."


def _listing(rows: list[dict[str, Any]], stats: FleetStats) -> Group:
    table = table_of("cache", "state")
    for row in rows:
        table.add_row(shown(row["cache"]), row["state"])
    note = f"page_size {stats.page_size}, events_stride_tokens {stats.stride_tokens}" if stats.caches else _ADVICE
    return Group(table, *_left_out(stats.left_out), note)


def _loads(stats: FleetStats) -> Group:
    on_host = [">on host"] if any(load.host_pages for load in stats.caches) else []
    table = table_of("cache", ">pages", *on_host, ">pending", ">waiting", ">unpublished", ">leased", ">private slots")
    for load in stats.caches:
        pages = (load.pages, load.host_pages) if on_host else (load.pages,)
        counts = (load.pending_tokens, load.waiting_tokens, load.unpublished_tokens, load.leased_tokens)
        table.add_row(shown(load.cache), *(f"{count:,}" for count in (*pages, *counts, load.private_slots)))
    note = f"pages are of {stats.stride_tokens} tokens each; the other counts are tokens" if stats.caches else _ADVICE
    return Group(table, *_left_out(stats.left_out), note)


def _costs(answer: dict[str, Any]) -> Group:
    has_hosts = any(row["host_len"] for row in answer["candidates"])
    to_load = [">to load"] if has_hosts else []
    table: Table = table_of("cache", ">cost", ">prefix", ">promised", *to_load, ">uncached", ">pending")
    for row in answer["candidates"]:
        loading = [row["loading_tokens"]] if has_hosts else []
        lengths = (row["prefix_len"], row["promised_len"], *loading, row["uncached_tokens"], row["pending_tokens"])
        table.add_row(shown(row["cache"]), f"{row['cost']:,.0f}", *(f"{length:,}" for length in lengths))
    price = f"(uncached + {answer['tier_cost']['CPU']:g} * to load)" if has_hosts else "uncached"
    note = f"{answer['num_tokens']:,} tokens; cost = pending + {answer['weight']:g} * {price}"
    return Group(table, *_left_out(answer["left_out"]), note if answer["candidates"] else _ADVICE)


def _left_out(causes: dict[str, str]) -> list[str]:
    return [f"left out: {shown(name)}: {cause}" for name, cause in causes.items()]
