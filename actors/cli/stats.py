"""`raydix stats`: a cache's counts, once or live."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.live import Live

from raydix.actors.cli.cluster import Address, CacheName, Namespace, ask, cache_handle, join
from raydix.actors.cli.output import AsJson, console, print_json, show
from raydix.actors.cli.stats_view import Snapshot, view


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
    """Repeat until `rounds` are done, the user presses Ctrl-C, the cache is gone, or the output is a closed pipe."""
    with _shown_rounds(as_json) as show_round:
        looked, before, now = 1, None, look()
        show_round(now, before)
        while rounds is None or looked < rounds:
            time.sleep(interval_s)
            before, now = now, look()
            show_round(now, before)
            looked += 1


@contextmanager
def _shown_rounds(as_json: bool) -> Iterator[Callable[[Snapshot, Snapshot | None], None]]:
    """Return a function that shows a round: a document a line, a table after the last one, or in its place."""
    screen = console()
    if as_json:
        yield lambda now, _: print_json(now.as_json(), indent=None)
    elif screen.is_terminal:
        with Live(console=screen, auto_refresh=False) as live:
            yield lambda now, before: live.update(view(now, before), refresh=True)
    else:
        yield lambda now, before: screen.print(view(now, before), "", soft_wrap=True)
