"""`raydix stats`: a cache's counts, once or live."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live

from raydix.actors.cli.cluster import Address, CacheName, Namespace, ask, cache_handle, join
from raydix.actors.cli.output import AsJson, console, print_json, show
from raydix.actors.cli.stats_view import Snapshot, view

if TYPE_CHECKING:
    from collections.abc import Callable


def stats(
    name: CacheName,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C; with --json, one document per line.")
    ] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two updates.")] = 1.0,
    rounds: Annotated[int | None, typer.Option(min=1, help="With --watch: number of updates.")] = None,
    address: Address = None,
    namespace: Namespace = "raydix",
    as_json: AsJson = False,
) -> None:
    """Show a cache's counts: use of the pool, hits, waiting requests, owners of leases, eviction."""
    join(address, namespace)
    cache = cache_handle(name, namespace)
    config = ask(cache.pool_handle.remote()).config

    def look() -> Snapshot:
        return Snapshot(name, config, ask(cache.stats.remote()), time.monotonic())

    if watch:
        _watch(look, interval_s, rounds, as_json)
        return
    now = look()
    show(now.as_json(), as_json, lambda: view(now))


def _watch(look: Callable[[], Snapshot], interval_s: float, rounds: int | None, as_json: bool) -> None:
    """Repeat until `rounds` are done, the user presses Ctrl-C, or the cache is gone."""
    looked, before, now = 1, None, look()
    if as_json:
        print_json(now.as_json(), indent=None)
        while rounds is None or looked < rounds:
            time.sleep(interval_s)
            print_json(look().as_json(), indent=None)
            looked += 1
        return
    screen = console()
    try:
        with Live(view(now), console=screen, auto_refresh=False) as live:
            while rounds is None or looked < rounds:
                time.sleep(interval_s)
                before, now = now, look()
                live.update(view(now, before), refresh=True)
                looked += 1
    finally:
        if not screen.is_terminal:  # Live ends the line only on a terminal
            screen.line()
