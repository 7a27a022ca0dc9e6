"""`raydix replay`: hit rates of recorded traffic on caches of other sizes, policies, page sizes and tiers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

from raydix.actors.cli.cluster import Address, join
from raydix.actors.cli.failures import USAGE, CommandError, wrong_option
from raydix.actors.cli.output import AsJson, progress_bars, show, table_of
from raydix.actors.cluster.capacity import HOST_OPTION, read_capacity, read_tier_capacity
from raydix.actors.report.too_large import too_large
from raydix.schemas.shown import counted, percent, points, short_count
from raydix.schemas.version import how_to_install

if TYPE_CHECKING:
    from raydix.actors.observe.trace import TracedRequest
    from raydix.actors.replay.instant_tiers import TierConfigs
    from raydix.actors.replay.trace_replay import Replay
    from raydix.schemas import CacheConfig, CacheStats

HOST_POLICY = "--host-policy"
DISK_CAPACITY = "--disk-capacity"
DISK_ADMIT = "--disk-admit"
_NO_BYTES = "a trace does not say how many bytes a token takes"
Limit = Annotated[int | None, typer.Option(min=1, metavar="N", help="Replay the first N requests only.")]
CAPACITIES = (1_024_000, 4_096_000, 16_384_000)  # defaults; a report takes the first


def replay(
    trace: Annotated[Path, typer.Argument(envvar="RAYDIX_TRACE", help="Traffic in the Mooncake format, JSON lines.")],
    capacities: Annotated[
        list[str] | None,
        typer.Option(
            "--capacity",
            metavar="TOKENS",
            help="Such as 200_000 or 1M; rounded down to whole pages; repeatable. "
            f"Default: {', '.join(map(str, CAPACITIES))}.",
        ),
    ] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="NAME", help="lru, lfu, fifo, mru, filo, slru, priority or 2q; repeatable."),
    ] = None,
    host_capacities: Annotated[
        list[str] | None,
        typer.Option(
            HOST_OPTION,
            metavar="TOKENS|Nx",
            help="Put a tier in host memory below each cache, such as 4M, or 4x, four times its capacity; repeatable.",
        ),
    ] = None,
    host_policies: Annotated[
        list[str] | None,
        typer.Option(HOST_POLICY, metavar="NAME", help="Of that tier, as --policy; repeatable. Default: 2q."),
    ] = None,
    disk_capacities: Annotated[
        list[str] | None,
        typer.Option(
            DISK_CAPACITY,
            metavar="TOKENS|Nx",
            help="Put a tier on a disk below each cache and its host tier, such as 16M or 32x; repeatable. It needs no "
            "files.",
        ),
    ] = None,
    disk_admits: Annotated[
        list[str] | None,
        typer.Option(
            DISK_ADMIT,
            metavar="RULE",
            help="Which pages are written there: second_use, at their second use, or all; repeatable. "
            "Default: second_use.",
        ),
    ] = None,
    page_sizes: Annotated[
        list[int] | None,
        typer.Option("--page-size", min=1, metavar="TOKENS", help="Repeatable. Default: a block of the trace."),
    ] = None,
    high_watermark: Annotated[
        float, typer.Option(help="High watermark of background eviction; 1.0 evicts only the shortfall.")
    ] = 1.0,
    limit: Limit = None,
    ghost: Annotated[bool, typer.Option("--ghost", help="Estimate the hit rate of twice each capacity, too.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the rates: .png, .svg or .pdf.")] = None,
    on_ray: Annotated[
        bool, typer.Option("--ray", help="Use a cache actor. Default: a cache in this process, without Ray.")
    ] = False,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Replay recorded traffic against index-only caches, one of each combination, and compare their hit rates.

    Hits are whole pages, and every request publishes its prompt. A request that can never fit is a miss. The replay
    needs neither a GPU nor Ray.

    With `--host-capacity`, KV is written to the tier before it is evicted, and loaded before a request begins. So it
    is with `--disk-capacity`, but pages are written at their second use. All of this takes no time. The hit rate then
    has a part that was found in the cache, and a part for each tier.
    """
    beside = {"--ghost": ghost, "--ray": on_ray}
    hosts = _tiers(HOST_OPTION, host_capacities, HOST_POLICY, host_policies, "2q", beside)
    disks = _tiers(DISK_CAPACITY, disk_capacities, DISK_ADMIT, disk_admits, "second_use", beside)
    requests = requests_of(trace, limit)
    all_capacities, all_page_sizes = capacities or [*map(str, CAPACITIES)], page_sizes or [requests[0].block_size]
    caches = []
    for capacity, policy, page_size, host, disk in product(
        all_capacities, policies or ["lru"], all_page_sizes, hosts, disks
    ):
        config = checked_config(capacity, policy, page_size, high_watermark)
        caches.append((config, _checked_tiers(host, disk, config)))
    if ghost:
        from raydix.schemas import GhostConfig

        caches = [(config.model_copy(update={"ghost": GhostConfig()}), tiers) for config, tiers in caches]
    if plot is not None:
        check_can_plot(plot)
    if on_ray:
        join(address, "raydix")
    replays = _replay_all(requests, caches, on_ray)
    rows = [run.figures() for run in replays]
    if plot is not None:
        from raydix.actors.replay.plot import plot as draw

        with plotting(plot):
            draw(plot, replays, requests)
    show(rows, as_json, lambda: Group(*_too_large(replays), _table(rows), *filter(None, map(_what_if, replays))))


def _tiers(
    option: str,
    capacities: list[str] | None,
    rule: str,
    rules: list[str] | None,
    default: str,
    beside: dict[str, bool],
) -> Sequence[tuple[str, str] | None]:
    """Return the capacity and the rule of each tier of one kind to replay with; None: without one.

    Args:
        option: the option with the capacities.
        rule, rules, default: the option with the rules, such as policies; its values, and its default.
        beside: whether options are given that do not go with a tier.

    Raises:
        CommandError: an option does not go with the others; the message names it.
    """
    if not capacities:
        if rules:
            raise CommandError(f"{rule} must come with {option}", f"{option} 4x", USAGE)
        return [None]
    if beside["--ghost"]:
        raise CommandError(
            f"--ghost does not go with {option}: it estimates caches without a tier below",
            f"replay both sizes: --capacity 1M --capacity 2M {option} {capacities[0]}",
            USAGE,
        )
    if beside["--ray"]:
        raise CommandError(
            f"--ray does not go with {option}: the tiers of a replay are in this process", "leave --ray out", USAGE
        )
    return list(product(capacities, rules or [default]))


def requests_of(trace: Path, limit: int | None) -> list[TracedRequest]:
    """Return the first `limit` requests of a trace, or all.

    Raises:
        CommandError: the trace cannot be read.
    """
    from raydix.actors.observe.trace import TraceError, read_trace

    try:
        return read_trace(trace, limit)
    except TraceError as error:
        raise CommandError(str(error), error.advice, USAGE) from None


def checked_config(
    capacity: str,
    policy: str,
    page_size: int,
    high_watermark: float = 1.0,
    command: str = "replay",
) -> CacheConfig:
    """Return the configuration of an index-only cache; its capacity is rounded down to whole pages.

    Args:
        command: it has the arguments.

    Raises:
        CommandError: an argument of `command` is wrong; the message names it.
        SettingsError: the capacity is wrong, or smaller than a page.
    """
    from pydantic import ValidationError

    from raydix.actors.replay.trace_replay import index_config

    num_slots = tokens_of(capacity, page_size)
    try:
        return index_config(num_slots, page_size=page_size, policy=policy, high_watermark=high_watermark)
    except ValidationError as error:
        raise wrong_option(error, command, {}) from None


def _checked_tiers(host: tuple[str, str] | None, disk: tuple[str, str] | None, config: CacheConfig) -> TierConfigs:
    """Return the configurations of the tiers below a cache; their capacities are rounded down to whole pages.

    Args:
        host: the capacity and the policy of the host tier; None: there is none.
        disk: the capacity and the rule of admission of the disk tier; None: there is none.
    """
    from pydantic import ValidationError

    from raydix.actors.replay.instant_tiers import TierConfigs
    from raydix.actors.replay.trace_replay import index_disk
    from raydix.schemas import HostConfig

    host_tier = disk_tier = None
    try:
        if host is not None:
            num_slots = _tier_tokens(host[0], HOST_OPTION, config.pool.num_slots, config.page_size)
            host_tier = HostConfig.model_validate({"num_slots": num_slots, "policy": host[1]})
        if disk is not None:
            num_slots = _tier_tokens(disk[0], DISK_CAPACITY, config.pool.num_slots, config.page_size)
            disk_tier = index_disk(num_slots, disk[1])
    except ValidationError as error:
        raise wrong_option(error, "replay", {"policy": HOST_POLICY, "admit": DISK_ADMIT}) from None
    return TierConfigs(host_tier, disk_tier)


def _tier_tokens(capacity: str, option: str, pool_slots: int, page_size: int) -> int:
    return read_tier_capacity(capacity, option, pool_slots).num_tokens(page_size, unknown=_NO_BYTES)


def tokens_of(capacity: str, page_size: int) -> int:
    """Return the tokens of `--capacity`, in whole pages, for a command that replays a trace.

    Raises:
        SettingsError: it is wrong, or smaller than a page.
    """
    return read_capacity(capacity, "--capacity").num_tokens(page_size, unknown=_NO_BYTES)


def _replay_all(
    trace: list[TracedRequest], caches: list[tuple[CacheConfig, TierConfigs]], on_ray: bool
) -> list[Replay]:
    """Replay the trace on one cache after another, with a progress bar on stderr."""
    from raydix.actors.replay.trace_replay import replay, series_of

    replays = []
    with progress_bars() as bars:
        for config, tiers in caches:
            name = f"{config.pool.num_slots:,} tokens, {series_of(config, tiers)}"
            bar = bars.add_task(name, total=len(trace))

            def advance(done: int, bar: Any = bar) -> None:
                bars.update(bar, completed=done)

            replays.append(asyncio.run(replay(trace, config, tiers, on_ray=on_ray, progress=advance)))
    return replays


def check_can_plot(path: Path) -> None:
    """Raise CommandError before the replay if its picture could not be drawn afterwards."""
    from raydix.actors.replay.plot import check_can_draw

    try:
        with plotting(path):
            check_can_draw(path)
    except ImportError:
        raise CommandError("--plot needs matplotlib", how_to_install("plot"), USAGE) from None


@contextmanager
def plotting(path: Path) -> Iterator[None]:
    """Raise the errors of a picture as CommandError."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CommandError(f"{path}: {reason}", "--plot rates.png", USAGE) from None


def _table(rows: list[dict[str, Any]]) -> Table:
    cells = [_cells(row) for row in rows]
    table = table_of(*cells[0])
    for row_cells in cells:
        table.add_row(*row_cells.values())
    table.title = f"{counted(rows[0]['requests'], 'request')}, {short_count(rows[0]['prompt_tokens'])} prompt tokens"
    return table


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a replay by their columns: all replays have the same tiers.

    With lower tiers some columns are left out, so that a terminal of 80 columns shows all others.
    """
    hit_rate = {">hit rate": percent(row["hit_rate_percent"] / 100, 2)}
    host, disk = row.get("host"), row.get("disk")
    if disk:
        cells = {"cache": f"{short_count(row['capacity'])} {row['policy']}"}
        if host:
            cells["host"] = f"{short_count(host['capacity'])} {host['policy']}"
        cells |= {"disk": f"{short_count(disk['capacity'])} {disk['admit']}", **hit_rate}
        if host:
            cells[">on host"] = percent(host["loaded_percent"] / 100, 2)
        else:
            cells[">in cache"] = percent(row["device_hit_rate_percent"] / 100, 2)
        cells[">on disk"] = percent(disk["loaded_percent"] / 100, 2)
        return cells | {">written": short_count(disk["written_tokens"])}
    if host:
        return {
            ">capacity": f"{row['capacity']:,}",
            "policy": row["policy"],
            ">host": short_count(host["capacity"]),
            "host policy": host["policy"],
            **hit_rate,
            ">in cache": percent(row["device_hit_rate_percent"] / 100, 2),
            ">loaded": percent(host["loaded_percent"] / 100, 2),
            ">evicted": short_count(row["evicted_tokens"]),
        }
    return {
        ">capacity": f"{row['capacity']:,}",
        "policy": row["policy"],
        ">page": f"{row['page_size']}",
        **hit_rate,
        ">reused": short_count(row["reused_tokens"]),
        ">evicted": short_count(row["evicted_tokens"]),
        ">too large": f"{row['too_large']:,}",
        ">requests/s": f"{row['requests_per_s']:,.0f}",
    }


def _too_large(replays: list[Replay]) -> list[str]:
    """Return a line for each capacity that is too small for some requests."""
    largest: dict[int, CacheStats] = {}
    for run in replays:
        largest.setdefault(run.config.pool.num_slots, run.stats)
    return [line for stats in largest.values() for line in too_large(stats)]


def _what_if(replay: Replay) -> str:
    """Return the estimate for twice the capacity of a run; empty without `--ghost`."""
    ghost, capacity = replay.stats.ghost, replay.config.pool.num_slots
    if ghost is None:
        return ""
    now, twice = (ghost.hit_rate_at(factor * capacity) for factor in (1, 2))
    change = f"would change the hit rate by about {points(twice - now)} points, to {percent(twice)}"
    return f"{counted(capacity, 'token')}: twice as many {change}"
