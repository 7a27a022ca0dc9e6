"""`raydix export-events`: publish a cache's KV events in vLLM's format."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raydix.actors.cli.cluster import Address, CacheName, Namespace, cache_handle, join
from raydix.actors.cli.failures import USAGE, CommandError
from raydix.actors.cli.output import AsJson, show
from raydix.schemas.shown import counted, shown
from raydix.schemas.version import how_to_install

if TYPE_CHECKING:
    from raydix.actors.exporters.vllm_events import VllmEventExporter


def export_events(
    name: CacheName,
    endpoint: Annotated[
        str, typer.Option(metavar="ADDRESS", help="ZMQ address where subscribers connect; to port * any free one.")
    ] = "tcp://127.0.0.1:5557",
    replay_endpoint: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address where they ask for missed batches. Default: none.")
    ] = None,
    topic: Annotated[str, typer.Option(help="Topic of every batch.")] = "",
    rank: Annotated[int, typer.Option("--dp-rank", min=0, help="Data-parallel rank in every batch.")] = 0,
    medium: Annotated[
        str | None, typer.Option(metavar="GPU|CPU", help="Where consumers find the KV. Default: where the pool is.")
    ] = None,
    tiers: Annotated[
        list[str] | None, typer.Option("--tier", metavar="device|host|disk", help="Repeatable. Default: all tiers.")
    ] = None,
    connect: Annotated[
        bool, typer.Option("--connect", help="Connect to ADDRESS, which the consumer has bound.")
    ] = False,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="Duration. Default: until Ctrl-C.")] = None,
    address: Address = None,
    namespace: Namespace = "raydix",
    as_json: AsJson = False,
) -> None:
    """Publish a cache's KV events in vLLM's format, for Dynamo's indexer and others that read vLLM's.

    The cache needs `events: full`. Needs the packages of the extra `zmq`.
    """
    from raydix.actors.cluster.deploy import NAMESPACE

    try:
        from raydix.actors.exporters.vllm_events import VllmEventExporter
    except ImportError:
        raise CommandError("exporting events needs msgspec and pyzmq", how_to_install("zmq"), USAGE) from None
    join(address, namespace)
    handle = cache_handle(name, namespace)

    async def export() -> VllmEventExporter:
        exporter = VllmEventExporter(
            # A client that has the name of a cache follows its replacement.
            name if namespace == NAMESPACE else handle,
            endpoint,
            replay_endpoint=replay_endpoint,
            topic=topic,
            data_parallel_rank=rank,
            medium=medium,
            tiers=tiers or None,
            connect=connect,
        )
        async with exporter:
            typer.echo(_sentence(name, exporter), err=True)
            await _run(exporter, seconds)
        return exporter

    done = asyncio.run(export())
    counts = {"batches": done.num_batches, "events": done.num_events, "snapshots": done.num_snapshots}
    document: dict[str, Any] = {"cache": name, "endpoint": done.endpoint, "replay_endpoint": done.replay_endpoint}
    nouns = {"batches": "batch", "events": "event", "snapshots": "snapshot"}
    show(
        document | counts,
        as_json,
        lambda: ", ".join(counted(count, nouns[name]) for name, count in counts.items()),
    )


async def _run(exporter: VllmEventExporter, seconds: float | None) -> None:
    """Run until the time is up, or a signal comes."""
    running = asyncio.create_task(exporter.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with suppress(ValueError, RuntimeError):  # only the main thread gets signals
            loop.add_signal_handler(number, running.cancel)
    if seconds is not None:
        loop.call_later(seconds, running.cancel)
    with suppress(asyncio.CancelledError):
        await running


def _sentence(name: str, exporter: VllmEventExporter) -> str:
    replay = f", missed batches at {exporter.replay_endpoint}" if exporter.replay_endpoint else ""
    return f"{shown(name)}: events at {exporter.endpoint}{replay}; Ctrl-C ends it"
