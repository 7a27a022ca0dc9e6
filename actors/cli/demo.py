"""`raydix demo`: the savings of a shared cache, and a check that it changes no answer."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

from raydix.actors.cli.failures import FAILED, USAGE, CommandError
from raydix.actors.cli.output import AsJson, console, show
from raydix.actors.cluster.capacity import DISK_OPTION, read_capacity, read_disk, read_tier_capacity
from raydix.actors.demo.workload import LONG_LOAD, PAGE_SIZE, Workload
from raydix.schemas.shown import brief, counted, percent, rate
from raydix.schemas.version import how_to_install

if TYPE_CHECKING:
    from raydix.schemas import DiskConfig

Tokens = Annotated[int, typer.Option(min=1, metavar="TOKENS")]
_LOAD = Workload()
_DISK_SIZE = "4x"  # the pool
_SPREAD = {"p50": "median", "p95": "95th percentile"}


def demo(
    conversations: Annotated[int, typer.Option(min=1)] = _LOAD.conversations,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each conversation.")] = _LOAD.turns,
    workers: Annotated[int, typer.Option(min=1)] = _LOAD.workers,
    system_prompts: Annotated[int, typer.Option(min=1)] = _LOAD.system_prompts,
    system_prompt_len: Tokens = _LOAD.system_prompt_len,
    message_len: Tokens = _LOAD.message_len,
    answer_len: Tokens = _LOAD.answer_len,
    pool_tokens: Annotated[
        str, typer.Option(metavar="TOKENS", help="Such as 20_000 or 8k; rounded down to whole pages of 16.")
    ] = str(_LOAD.pool_tokens),
    host_capacity: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="A tier in host memory below the pool, such as 10k. Default: none."),
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(
            metavar="PATH[:SIZE]",
            help="A tier on a local disk, in an existing folder, such as /nvme/demo or /nvme/demo:1GiB. Run the demo "
            "twice with it: the second run begins with the KV of the first. Default: none; its size: 4 times the pool.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = _LOAD.seed,
    as_json: AsJson = False,
) -> None:
    """Serve dozens of conversations with several model workers, with a cache and without. Takes minutes on a CPU.

    Fails with exit status 1 if greedy answers differ. With the default load it also fails if the hit rate is not above
    60 %, or if the first token of prompts that share a prefix is not three times sooner. It starts its own Ray.
    """
    num_tokens, host_tokens = (
        read_capacity(given, option).num_tokens(PAGE_SIZE, unknown="it is the same for every model") if given else 0
        for given, option in ((pool_tokens, "--pool-tokens"), (host_capacity, "--host-capacity"))
    )
    sizes = conversations, turns, workers, system_prompts, system_prompt_len, message_len, answer_len, num_tokens
    try:
        load = Workload(*sizes, seed, host_tokens, None if disk is None else _disk_of(disk, num_tokens))
    except ValueError as error:
        message = str(error).replace("pool_tokens", "--pool-tokens")
        raise CommandError(message, "raydix demo --help", USAGE) from None
    try:
        from raydix.actors.demo.run import broken_promises, demonstrate
    except ImportError as error:
        raise CommandError(f"the demo needs a package: {error}", how_to_install("transformers"), USAGE) from None
    import ray

    if not ray.is_initialized():
        ray.init("local", num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    figures = asyncio.run(demonstrate(load, console(stderr=True)))
    broken = broken_promises(figures, load)
    show(figures | {"not_kept": broken}, as_json, lambda: Group(table_of(figures), "", closing(figures)))
    if broken:
        typer.echo(f"not kept: {'; '.join(broken)}", err=True)
        raise typer.Exit(FAILED)


def _disk_of(text: str, pool_tokens: int) -> DiskConfig:
    """Return the disk that the option names."""
    from raydix.schemas import DiskConfig  # pydantic takes long to import

    path, size = read_disk(text) if ":" in text else (text, None)
    if not os.path.isdir(path):
        advice = f"mkdir -p {shlex.quote(path)}"
        raise CommandError(f"{DISK_OPTION} must name a folder that is there, not {brief(path)}", advice, USAGE)
    place = os.path.abspath(path)
    if size is not None and size.is_bytes:
        return DiskConfig(path=place, size=size.number)
    tokens = read_tier_capacity(_DISK_SIZE if size is None else size.text, DISK_OPTION, pool_tokens)
    return DiskConfig(path=place, num_slots=tokens.num_tokens(PAGE_SIZE))


def table_of(f: dict[str, Any]) -> Table:
    """Return the table of the figures."""
    turns, tokens = f["turns"], f["prompt_tokens"]

    def of_prompts(part: int) -> str:
        return f"{part:,} ({rate(part, tokens)})"

    table = Table(
        "", "cache on", "cache off", title=f"{counted(turns, 'turn')}, served twice: with the cache and without"
    )
    table.add_row("prompt tokens hit: taken from the cache", of_prompts(f["reused_tokens"]), "-")
    if "host_slots" in f:
        on_host = f["loaded_tokens"] - f.get("disk_tokens_loaded", 0)
        table.add_row("... loaded from host memory for the turn", of_prompts(on_host), "-")
    if "disk_slots" in f:
        table.add_row("... loaded from the disk for the turn", of_prompts(f["disk_tokens_loaded"]), "-")
    table.add_row("prompt tokens missed: computed", of_prompts(f["computed_tokens"]), of_prompts(tokens))
    for name, on_ms in f["first_token_ms_on"].items():
        off_ms = f["first_token_ms_off"][name]
        table.add_row(f"time to first token *, {_SPREAD.get(name, name)}", f"{on_ms:,.0f} ms", f"{off_ms:,.0f} ms")
    if f.get("long_loads"):
        name = f"... median of {counted(f['long_loads'], 'turn')} that loaded {LONG_LOAD} tokens or more"
        table.add_row(name, f"{f['long_load_ms_on']:,.0f} ms", f"{f['long_load_ms_off']:,.0f} ms")
    table.add_row("time for all turns", f"{f['seconds_on']:.1f} s", f"{f['seconds_off']:.1f} s")
    identical = _yes(f["identical_turns"] == turns)
    table.add_row("same answers as without the cache", f"{identical}, {f['identical_turns']} of {turns}", "")
    if "first_hit_rate" in f:
        _add_restart(table, f)
    table.add_section()
    table.add_row("slots of the pool", f"{f['pool_slots']:,}")
    if "host_slots" in f:
        table.add_row("slots of the tier in host memory", f"{f['host_slots']:,}")
        table.add_row("... tokens written to it", f"{f['host_tokens_written']:,}")
        table.add_row("... tokens evicted before they were written", f"{f['host_tokens_dropped']:,}")
    if "disk_slots" in f:
        table.add_row("slots of the tier on the disk", f"{f['disk_slots']:,}")
        table.add_row("... tokens written to it", f"{f['disk_tokens_written']:,}")
    table.add_row("slots to keep every conversation", f"{f['wanted_slots']:,}")
    table.add_row("slots in use at the same moment, at most", f"{f['peak_slots']:,}")
    table.add_row("tokens evicted", f"{f['evicted_tokens']:,}")
    table.add_row("... of those by the background task", f"{f['evicted_by_task']:,}")
    table.add_row("acquires", f"{f['acquires']:,}")
    table.add_row("... waiting at the same moment, at most", f"{f['peak_waiters']:,}")
    table.add_row("... refused", f"{f['acquires_refused']:,}")
    sharing, verb = f["shared_prefix_turns"], "shares" if f["shared_prefix_turns"] == 1 else "share"
    shared = f"* of the {counted(sharing, 'turn')} that {verb} a prefix with an earlier one"
    table.caption = f"{shared}\nAt most: as seen after each turn."
    return table


def _yes(is_true: bool) -> str:
    return "yes" if is_true else "NO"


def _add_restart(table: Table, f: dict[str, Any]) -> None:
    """Add the hit rates of the first turns and of the last, also those before the restart."""
    edge = counted(f["edge_turns"], "turn")
    table.add_section()
    is_warm = "hit_rate_before" in f
    if is_warm:
        table.add_row(f"hit rate of the last {edge} before the restart", percent(f["hit_rate_before"]))
    table.add_row(f"hit rate of the first {edge}{' after it' if is_warm else ''}", percent(f["first_hit_rate"]))
    table.add_row(f"hit rate of the last {edge}", percent(f["last_hit_rate"]))
    if is_warm:
        table.add_row("same answers as before the restart", _yes(f["same_as_before"]))


def closing(f: dict[str, Any]) -> str:
    """Return the sentence below the table, and the next command."""
    sooner = f["first_token_speedup"]
    when = f"came {sooner:.1f} times sooner" if sooner >= 1.05 else "came no sooner"
    changed = f["turns"] - f["identical_turns"]
    same = (
        f"all {f['turns']:,} answers are the same" if not changed else f"{changed:,} of {f['turns']:,} answers DIFFER"
    )
    share_hit = rate(f["reused_tokens"], f["prompt_tokens"])
    following = (
        f"Next, a cache of your own: {_activate()}RAY_worker_niceness=0 ray start --head && "
        "raydix start --set page_size=16 --set pool.num_slots=4096"
    )
    if "first_hit_rate" in f and "hit_rate_before" not in f:
        following = "Next, the same command again: it begins with the KV that is on the disk now."
    return (
        f"{share_hit} of the prompt tokens came from the cache, the first token of turns that share a prefix {when} "
        f"on average, and {same}.\n{following}"
    )


def _activate() -> str:
    """Return the shell command that activates this environment, if it is not active."""
    if shutil.which("raydix") is not None:
        return ""
    folder = Path(sys.executable).parent
    here = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    return f"source {here / 'activate'} && "
