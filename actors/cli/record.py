"""`raydix record`: write a running cache's traffic to a file for `raydix replay` and `raydix report`."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raydix.actors.cli.cluster import Address, CacheName, Namespace, ask, cache_handle, join
from raydix.actors.cli.failures import FAILED, wrong_option
from raydix.actors.cli.output import AsJson, show
from raydix.schemas.shown import counted

if TYPE_CHECKING:
    from raydix.schemas import RecordingStatus, StartRecording

_ROUND_S = 1.0


def record(
    name: CacheName,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="A path on the cache's node.")] = Path(
        "trace.jsonl"
    ),
    seconds: Annotated[float, typer.Option(min=0.0, help="Duration; Ctrl-C ends it earlier.")] = 60.0,
    max_requests: Annotated[int, typer.Option(min=1, metavar="N", help="End after this number of requests.")] = 100_000,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, max=2**20, metavar="TOKENS", help="Tokens per hash. Default: a page of the cache."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing FILE once the new one is complete.")
    ] = False,
    address: Address = None,
    namespace: Namespace = "raydix",
    as_json: AsJson = False,
) -> None:
    """Record a cache's requests in the Mooncake format: times, lengths and hashes of prompts, no token ids.

    Hashes are salted with a secret that is not kept. The recording never delays requests: it drops and counts any that
    it cannot write in time.
    """
    request = _request(out, max_requests, seconds, block_size, overwrite)
    join(address, namespace)
    cache = cache_handle(name, namespace)
    _take_signals_for_ctrl_c()
    begun: Any = cache.start_recording.remote(request)
    try:
        ask(begun)
        _wait(cache, seconds, max_requests)
    except KeyboardInterrupt:
        typer.echo("stopping", err=True)
        ask(begun)  # wait for the start, which may be in flight
    status: RecordingStatus = ask(cache.stop_recording.remote(), timeout_s=None)
    show(status, as_json, lambda: _sentence(status))
    if status.error:
        raise typer.Exit(FAILED)


def _request(out: Path, max_requests: int, seconds: float, block_size: int | None, overwrite: bool) -> StartRecording:
    from pydantic import ValidationError

    from raydix.schemas import StartRecording

    try:
        return StartRecording(
            path=str(out.absolute()),
            max_requests=max_requests,
            max_seconds=seconds or _ROUND_S,
            block_size=block_size,
            overwrite=overwrite,
        )
    except ValidationError as error:
        raise wrong_option(error, "record", {"max_seconds": "--seconds", "path": "--out"}) from None


def _take_signals_for_ctrl_c() -> None:
    """Let SIGTERM and SIGHUP end the recording like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)


def _wait(cache: Any, seconds: float, max_requests: int) -> None:
    """Wait until the time is up, `max_requests` have ended, or the cache is gone."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(_ROUND_S, left))
        status: RecordingStatus | None = ask(cache.recording.remote())
        if status is None or status.requests + status.dropped >= max_requests:
            return


def _sentence(status: RecordingStatus) -> str:
    if status.error:
        return f"{status.path}: could not write: {status.error}"
    dropped = f", {status.dropped:,} dropped" if status.dropped else ""
    return f"{status.path}: {counted(status.requests, 'request')}{dropped}; try: raydix replay {status.path}"
