"""`raydix record`: a running cache's traffic as a file, for `raydix replay` and `raydix report`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from raydix.actors.cli.cluster import Address, CacheName, Namespace, ask, cache_handle, join
from raydix.actors.cli.output import AsJson, show
from raydix.schemas import RecordingStatus, StartRecording

_ROUND_S = 1.0


def record(
    name: CacheName,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="On the cache's node.")] = Path(
        "trace.jsonl"
    ),
    seconds: Annotated[float, typer.Option(min=0.0, help="How long; Ctrl-C ends it before.")] = 60.0,
    max_requests: Annotated[int, typer.Option(min=1, metavar="N", help="And how many requests at most.")] = 100_000,
    address: Address = None,
    namespace: Namespace = "raydix",
    as_json: AsJson = False,
) -> None:
    """Record a cache's requests in the Mooncake format: times, lengths and hashes of prompts, no token ids.

    Hashes are salted with a secret that is thrown away. Requests are not slowed down: what cannot be written in time is
    dropped, and counted.
    """
    join(address, namespace)
    cache = cache_handle(name, namespace)
    request = StartRecording(path=str(out.absolute()), max_requests=max_requests, max_seconds=seconds or _ROUND_S)
    ask(cache.start_recording.remote(request))
    try:
        _wait(cache, seconds)
    except KeyboardInterrupt:
        typer.echo("stopping", err=True)
    status: RecordingStatus = ask(cache.stop_recording.remote(), timeout_s=None)
    show(status, as_json, lambda: _told(status))


def _wait(cache: Any, seconds: float) -> None:
    """Until it is over, or the cache is gone."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(_ROUND_S, left))
        ask(cache.recording.remote())


def _told(status: RecordingStatus) -> str:
    dropped = f", {status.dropped:,} dropped" if status.dropped else ""
    problem = f"\ncould not write: {status.error}" if status.error else ""
    return f"{status.path}: {status.requests:,} requests{dropped}; try: raydix replay {status.path}{problem}"
