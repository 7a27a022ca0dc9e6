"""`raydix fleet list`, `stats` and `explain`: running caches, as a router sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Group
from rich.table import Table

from raydix.actors.cli.cluster import Address, Namespace, join
from raydix.actors.cli.explain import TokensFile, read_tokens
from raydix.actors.cli.output import AsJson, show, table_of
from raydix.schemas import FleetStats, RouteConfig, RouteExplanation
from raydix.schemas.shown import shown

if TYPE_CHECKING:
    from raydix.actors import Fleet

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
    """List the caches that a router would send requests to, and those that it would leave out, with the cause."""
    stats = _with_fleet(pattern, address, namespace, timeout_s, lambda fleet: fleet.stats())
    rows: list[dict[str, Any]] = [{"cache": each.cache, "state": "in", "cause": ""} for each in stats.caches]
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
    extra_key: Annotated[str | None, typer.Option(help="Part of the prompt's namespace.")] = None,
    lora_id: Annotated[str | None, typer.Option(help="Part of the prompt's namespace.")] = None,
    cache_salt: Annotated[str | None, typer.Option(help="Part of the prompt's namespace.")] = None,
    weight: Annotated[float, typer.Option(min=0, help="Of uncached tokens against pending ones.")] = (
        RouteConfig().weight
    ),
    timeout_s: Timeout = _TIMEOUT_S,
    address: Address = None,
    namespace: Namespace = "raydix",
    as_json: AsJson = False,
) -> None:
    """Print the caches that a router would compare for a prompt, and the cost of each."""
    ids = read_tokens(tokens)

    def ask(fleet: Fleet) -> RouteExplanation:
        return fleet.explain(ids, extra_key=extra_key, lora_id=lora_id, cache_salt=cache_salt)

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
    """Return what `ask` gets from a router that reads the caches' snapshots, and ends then."""
    from raydix.actors import connect_fleet  # imported here: it loads torch, which --help does not need

    join(address, namespace)

    async def run() -> R:
        async with await connect_fleet(pattern, config=config, namespace=namespace, timeout_s=timeout_s) as fleet:
            return ask(fleet)

    return asyncio.run(run())


def _listing(rows: list[dict[str, Any]], stats: FleetStats) -> Group:
    table = table_of("cache", "state", "cause")
    for row in rows:
        table.add_row(shown(row["cache"]), row["state"], row["cause"])
    return Group(table, f"page_size {stats.page_size}, events_stride_tokens {stats.stride_tokens}")


def _loads(stats: FleetStats) -> Group:
    table = table_of("cache", ">pages", ">pending", ">waiting", ">unpublished", ">leased", ">private slots")
    for each in stats.caches:
        counts = (each.pages, each.pending_tokens, each.waiting_tokens, each.unpublished_tokens, each.leased_tokens)
        table.add_row(shown(each.cache), *(f"{count:,}" for count in (*counts, each.private_slots)))
    left_out = [f"left out: {shown(name)}: {cause}" for name, cause in stats.left_out.items()]
    return Group(table, f"pages are of {stats.stride_tokens} tokens each; the other counts are tokens", *left_out)


def _costs(answer: RouteExplanation) -> Group:
    table: Table = table_of("cache", ">cost", ">prefix", ">promised", ">uncached", ">pending")
    for each in answer.candidates:
        lengths = (each.prefix_len, each.promised_len, each.uncached_tokens, each.pending_tokens)
        table.add_row(shown(each.cache), f"{each.cost:,.0f}", *(f"{length:,}" for length in lengths))
    return Group(table, f"{answer.num_tokens:,} tokens; cost = pending + {answer.weight:g} * uncached")
