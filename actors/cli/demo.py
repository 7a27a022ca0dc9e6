"""`raydix demo`: what sharing saves, and that it changes no answer."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Any

import typer
from rich.table import Table

from raydix.actors.cli.failures import FAILED, USAGE, CommandError
from raydix.actors.cli.output import AsJson, console, show
from raydix.actors.demo_workload import Workload

Tokens = Annotated[int, typer.Option(min=1, metavar="TOKENS")]
_LOAD = Workload()


def demo(
    conversations: Annotated[int, typer.Option(min=1)] = _LOAD.conversations,
    turns: Annotated[int, typer.Option(min=1, help="Of each conversation.")] = _LOAD.turns,
    workers: Annotated[int, typer.Option(min=1)] = _LOAD.workers,
    system_prompts: Annotated[int, typer.Option(min=1)] = _LOAD.system_prompts,
    system_prompt_len: Tokens = _LOAD.system_prompt_len,
    message_len: Tokens = _LOAD.message_len,
    answer_len: Tokens = _LOAD.answer_len,
    pool_tokens: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Whole pages of 16.")] = _LOAD.pool_tokens,
    seed: Annotated[int, typer.Option(min=0)] = _LOAD.seed,
    as_json: AsJson = False,
) -> None:
    """Several model workers, dozens of conversations, one cache: once with it, once without. Takes minutes on a CPU.

    Fails with exit status 1 if greedy answers differ; and, of the load without options, if the hit rate is not above
    60 % or the first token of prompts that share a prefix not three times sooner. It starts a Ray of its own.
    """
    try:
        load = Workload(
            conversations, turns, workers, system_prompts, system_prompt_len, message_len, answer_len, pool_tokens, seed
        )
    except ValueError as error:
        raise CommandError(str(error), "raydix demo --help", USAGE) from None
    try:
        from raydix.actors.demo import broken_promises, demonstrate
    except ImportError as error:
        raise CommandError(f"the demo needs a package: {error}", "pip install 'raydix[transformers]'", USAGE) from None
    import ray

    if not ray.is_initialized():
        ray.init("local", num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    figures = asyncio.run(demonstrate(load, console(stderr=True)))
    broken = broken_promises(figures, load)
    show(figures | {"not_kept": broken}, as_json, lambda: table_of(figures))
    if broken:
        typer.echo(f"not kept: {'; '.join(broken)}", err=True)
        raise typer.Exit(FAILED)


def table_of(f: dict[str, Any]) -> Table:
    """The closing table."""
    table = Table("", "cache on", "cache off", title=f"{f['turns']} turns, served twice")
    table.add_row("hit rate", f"{f['hit_rate']:.1%}", "0.0%")
    table.add_row("prompt tokens requested", f"{f['prompt_tokens']:,}", f"{f['prompt_tokens']:,}")
    table.add_row("prompt tokens reused", f"{f['reused_tokens']:,}", "0")
    table.add_row("prompt tokens computed", f"{f['computed_tokens']:,}", f"{f['prompt_tokens']:,}")
    for name, on_ms in f["first_token_ms_on"].items():
        table.add_row(f"time to first token, {name} *", f"{on_ms:,.0f} ms", f"{f['first_token_ms_off'][name]:,.0f} ms")
    table.add_row("... sooner by (mean)", f"{f['first_token_speedup']:.1f}x", "")
    table.add_row("all turns took", f"{f['seconds_on']:.1f} s", f"{f['seconds_off']:.1f} s")
    identical = "yes" if f["identical_turns"] == f["turns"] else "NO"
    table.add_row("greedy answers identical", f"{identical}, {f['identical_turns']} of {f['turns']}", end_section=True)
    table.add_row("tokens evicted (by the task)", f"{f['evicted_tokens']:,} ({f['evicted_by_task']:,})")
    table.add_row("pool (wanted by the load)", f"{f['pool_slots']:,} ({f['wanted_slots']:,}) slots")
    table.add_row("pool in use, at most **", f"{f['peak_slots'] / f['pool_slots']:.0%}")
    table.add_row("acquires that waited at once **", f"{f['peak_waiters']:,} of {f['acquires']:,}")
    table.add_row("acquires refused", f"{f['acquires_refused']:,}")
    shared = f"* the {f['shared_prefix_turns']} turns that share a prefix with an earlier one"
    table.caption = f"{shared}\n** seen after each turn"
    return table
