"""`raydix fleet replay`: recorded traffic on several caches, with one router and another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

from raydix.actors.cli.failures import USAGE, CommandError, wrong_option
from raydix.actors.cli.output import AsJson, progress_bars, show, table_of
from raydix.actors.cli.replay import Limit, check_can_plot, plotting, requests_of, tokens_of
from raydix.actors.cli.route_defaults import NUM_RANDOM, PROMISE_TTL_S, ROUTERS, WEIGHT
from raydix.schemas.shown import counted, measured_time, percent

if TYPE_CHECKING:
    from raydix.actors.replay.arrivals import Arrivals
    from raydix.actors.replay.fleet_simulation import FleetSetup, RouterResult
    from raydix.schemas import RouteConfig

CAPACITY = 1_024_000  # tokens, as in the tables of the guides
MAX_CACHES = 10_000


def replay(
    trace: Annotated[
        Path, typer.Argument(envvar="RAYDIX_TRACE", help="Traffic in the Mooncake format, JSON lines, plain or .gz.")
    ],
    caches: Annotated[int, typer.Option(min=1, max=MAX_CACHES, metavar="N", help="Caches, each with a server.")] = 8,
    capacity: Annotated[
        str,
        typer.Option(metavar="TOKENS", help="Of each cache, such as 200_000 or 1M; rounded down to whole blocks."),
    ] = str(CAPACITY),
    routers: Annotated[
        str, typer.Option("--router", metavar="NAMES", help=f"Separated by commas: {', '.join(ROUTERS)}.")
    ] = ",".join(ROUTERS),
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Runs of each router; the table has medians.")] = 5,
    weight: Annotated[
        float, typer.Option(help="Router ttft: weight of uncached tokens against pending ones.")
    ] = WEIGHT,
    promise_ttl_s: Annotated[
        float, typer.Option("--promise-ttl", metavar="SECONDS", help="Router ttft: longest life of a promise.")
    ] = PROMISE_TTL_S,
    num_random: Annotated[
        int, typer.Option("--num-random", help="Router ttft: random candidates, beyond 16 caches.")
    ] = NUM_RANDOM,
    num_routers: Annotated[
        int, typer.Option("--routers", min=1, max=256, metavar="N", help="Routers that share the requests.")
    ] = 1,
    event_delay_s: Annotated[
        float, typer.Option("--event-delay", min=0, max=3600, metavar="SECONDS", help="From a cache to the routers.")
    ] = 0.1,
    load: Annotated[
        float, typer.Option(min=1e-6, max=1e6, help="Share of the servers' time that the prompts need without hits.")
    ] = 0.8,
    prefill_rate: Annotated[
        float | None, typer.Option(min=1e-3, help="Tokens a second of each server, in place of --load.")
    ] = None,
    copies: Annotated[
        int, typer.Option(min=1, max=10_000, metavar="N", help="Repeat the trace at the same time, with other prompts.")
    ] = 1,
    limit: Limit = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the results: .png, .svg or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay recorded traffic on several caches, on a virtual clock, and compare routers.

    The table has hit rate, time to first token, waiting and balance. Router `ttft` is Raydix's own. `shared` is one
    cache of all capacity for all servers, for comparison. The replay needs neither a GPU nor Ray.
    """
    from raydix.actors.replay.arrivals import Arrivals
    from raydix.actors.replay.fleet_simulation import LEFT_OUT, MEASURED_ERROR, FleetSetup

    names = _checked_routers(routers)
    config = _checked_config(weight, promise_ttl_s, num_random)
    arrivals = Arrivals(requests_of(trace, limit), copies=copies)
    num_pages = tokens_of(capacity, arrivals.page_size) // arrivals.page_size
    setups = [
        FleetSetup(
            router=name,
            num_caches=caches,
            capacity=num_pages,
            config=config,
            num_routers=num_routers,
            event_delay_s=event_delay_s,
            load=load,
            prefill_rate=prefill_rate,
        )
        for name in names
    ]
    if plot is not None:
        check_can_plot(plot)
    results = _simulate_all(arrivals, setups, seeds)
    if plot is not None:
        from raydix.actors.replay.fleet_plot import plot as draw

        with plotting(plot):
            draw(plot, results)
    document = {
        "requests": len(arrivals),
        "prompt_tokens": arrivals.tokens,
        "caches": caches,
        "capacity": setups[0].capacity * arrivals.page_size,
        "route_config": config.model_dump(),
        "routers": num_routers,
        "event_delay_s": event_delay_s,
        "load": None if prefill_rate else load,
        "prefill_rate": prefill_rate,
        "copies": copies,
        "left_out": LEFT_OUT,
        "measured_error": MEASURED_ERROR,
        "results": [
            {"router": result.router, "medians": result.medians(), "seeds": result.by_seed} for result in results
        ],
    }
    show(document, as_json, lambda: Group(_table(document, results), f"{LEFT_OUT} {MEASURED_ERROR}"))


def _checked_routers(routers: str) -> list[str]:
    """Return the names of routers in a list with commas."""
    names = [name.strip() for name in routers.split(",")]
    for name in names:
        if name not in ROUTERS:
            known = ",".join(ROUTERS)
            raise CommandError(f"--router must be among {known}, not {name!r}", f"--router {known}", USAGE)
    return list(dict.fromkeys(names))


def _checked_config(weight: float, promise_ttl_s: float, num_random: int) -> RouteConfig:
    from pydantic import ValidationError

    from raydix.schemas import RouteConfig

    try:
        return RouteConfig(weight=weight, promise_ttl_s=promise_ttl_s, num_random=num_random)
    except ValidationError as error:
        raise wrong_option(error, "fleet replay", {"promise_ttl_s": "--promise-ttl"}) from None


def _simulate_all(arrivals: Arrivals, setups: list[FleetSetup], seeds: int) -> list[RouterResult]:
    """Simulate one router after another, with a progress bar on stderr."""
    from raydix.actors.replay.fleet_simulation import RouterResult, simulate

    results = []
    with progress_bars() as bars:
        for setup in setups:
            bar = bars.add_task(setup.router, total=seeds * len(arrivals))
            results.append(result := RouterResult(setup.router))
            for seed in range(seeds):

                def advance(done: int, bar: Any = bar, before: int = seed * len(arrivals)) -> None:
                    bars.update(bar, completed=before + done)

                result.add(simulate(arrivals, setup, seed, progress=advance))
    return results


def _table(document: dict[str, Any], results: list[RouterResult]) -> Table:
    table = table_of(
        "router", ">hit rate", ">first token", ">p99", ">waiting", ">longest queue", ">busiest / mean", ">servers busy"
    )
    for result in results:
        medians = result.medians()
        table.add_row(
            result.router,
            percent(medians["hit_rate_percent"] / 100),
            measured_time(medians["first_token_mean_s"]),
            measured_time(medians["first_token_p99_s"]),
            measured_time(medians["wait_mean_s"]),
            f"{medians['max_queue']:.0f}",
            f"{medians['busy_max_over_mean']:.2f}",
            percent(medians["utilisation"]),
        )
    num_seeds = len(results[0].by_seed)
    table.title = (
        f"{counted(document['requests'], 'request')}, {counted(document['caches'], 'cache')} of "
        f"{counted(document['capacity'], 'token')}, {'medians of ' if num_seeds > 1 else ''}"
        f"{counted(num_seeds, 'seed')}"
    )
    return table
