"""`raydix report`: one HTML page about a running cache, or about recorded traffic."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raydix.actors.cli.cluster import Address, Namespace, ask, cache_handle, complete_names, join
from raydix.actors.cli.failures import USAGE, CommandError
from raydix.actors.cli.output import AsJson, show
from raydix.actors.cli.replay import CAPACITIES, checked_config, requests_of
from raydix.schemas.shown import rate, short_count

if TYPE_CHECKING:
    from raydix.schemas import CacheConfig, CacheReport, CacheStats

_OF_FILES = (".json", ".jsonl")  # not any suffix: a cache may be called llama-3.1-0


def report(
    source: Annotated[
        str,
        typer.Argument(
            metavar="NAME|TRACE", help="A running cache, or a file of traffic.", autocompletion=complete_names
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File to write.")] = Path("report.html"),
    capacity: Annotated[
        str,
        typer.Option(
            metavar="TOKENS",
            help="With TRACE: slots of the cache that replays it, such as 200_000 or 1M, in whole pages.",
        ),
    ] = str(CAPACITIES[0]),
    page_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="TOKENS", help="With TRACE: its page size. Default: a block."),
    ] = None,
    policy: Annotated[str, typer.Option(metavar="NAME", help="With TRACE: its eviction policy.")] = "lru",
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Take the first N requests of a trace.")] = None,
    address: Address = None,
    namespace: Namespace = "raydix",
    as_json: AsJson = False,
) -> None:
    """Write one self-contained page: pool, hit rates, larger pools, cached prefixes, and the age of evicted tokens.

    The source is a running cache, or a file of recorded traffic. `report` replays a file in this process, without Ray,
    with the hit rate of `raydix replay`.
    """
    if not out.parent.is_dir():
        raise CommandError(f"--out {out}: there is no folder {out.parent}", f"mkdir -p {out.parent}", USAGE)
    if (path := Path(source)).is_file():
        found, config = _of_trace(path, capacity, page_size, policy, limit)
    elif path.suffix in _OF_FILES or "/" in source:
        raise CommandError(f"{source}: no such file", "the path of a trace, or the name of a cache: raydix list", USAGE)
    else:
        found, config = _of_cache(source, address, namespace)
    _write(out, found, config, source)
    stats = found.stats
    document = {"path": str(out), "hit_rate_percent": 100 * stats.hit_rate, "report": found.model_dump(mode="json")}
    show(document, as_json, lambda: _summary(stats, out))


def _summary(stats: CacheStats, out: Path) -> str:
    """Return the printed lines; requests that can never fit come first."""
    from raydix.actors.report.too_large import too_large

    hits = rate(stats.tokens_reused, stats.tokens_requested, 2)
    hit_rate = f"hit rate {hits} of {short_count(stats.tokens_requested)} prompt tokens"
    return "\n".join([*too_large(stats), hit_rate, f"{out}: open it in a browser"])


def _of_cache(name: str, address: str | None, namespace: str) -> tuple[CacheReport, CacheConfig]:
    join(address, namespace)
    cache = cache_handle(name, namespace)
    return ask(cache.report.remote()), ask(cache.pool_handle.remote()).config


def _of_trace(
    path: Path, capacity: str, page_size: int | None, policy: str, limit: int | None
) -> tuple[CacheReport, CacheConfig]:
    from raydix.actors.report.of_trace import report_of_trace
    from raydix.schemas import GhostConfig

    trace = requests_of(path, limit)
    config = checked_config(capacity, policy, page_size or trace[0].block_size, command="report").model_copy(
        update={"ghost": GhostConfig()}
    )
    return asyncio.run(report_of_trace(trace, config)), config


def _write(out: Path, found: CacheReport, config: CacheConfig, source: str) -> None:
    from raydix.actors.report.page import render

    try:
        out.write_text(render(found, config, title=Path(source).name), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{out}: {error.strerror}", "--out report.html", USAGE) from None
