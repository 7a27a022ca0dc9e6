"""`TrafficRecorder`: records the requests of a running cache, for `raydix replay`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from raydix.actors.observe.trace_writer import Recorded, TrafficWriter
from raydix.cache_core import RadixKey
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.leases.request_observer import RequestObserver
from raydix.schemas import InvalidRequest, RecordingStatus, StartRecording


class TrafficRecorder(RequestObserver):
    """Records requests (`RequestObserver`): each acquired prompt, and the number of tokens published after it.

    It costs the cache a microsecond per request; the writer's thread hashes and writes.

    Args:
        request: the file and the limits.
        clock: returns seconds, from any origin.
        page_size: tokens per page of the cache.

    Raises:
        InvalidRequest: the file exists, or cannot be created.
    """

    def __init__(self, request: StartRecording, clock: Callable[[], float], page_size: int) -> None:
        self._writer = _writer(request, request.block_size or page_size)
        self._request = request
        self._clock = clock
        self._began_at = clock()
        self._open: dict[LeaseRecord, tuple[float, RadixKey]] = {}
        self._num_begun = 0
        self._finishing = threading.Lock()
        self._ended: RecordingStatus | None = None

    @property
    def is_over(self) -> bool:
        """Whether the file has been written, or has failed."""
        return self._ended is not None

    @property
    def seconds_left(self) -> float:
        """The time until it ignores new requests."""
        return max(0.0, self._request.max_seconds - (self._clock() - self._began_at))

    def granted(self, lease: LeaseRecord, max_prefix_len: int | None) -> None:
        """Note the start of a request. A resumed one was noted before."""
        if not lease.resumed and (since := self._since_begun()) is not None:
            self._open[lease] = since, lease.key

    def refused(self, key: RadixKey, num_tokens: int, can_ever_fit: bool) -> None:
        """Record a request that can never fit. Callers repeat other refused requests."""
        if not can_ever_fit and (since := self._since_begun()) is not None:
            self._writer.take(Recorded(round(1000 * since), key, num_tokens - len(key)))

    def _since_begun(self) -> float | None:
        """Count a request and return the seconds since the start; None if the recording is full or over."""
        since = self._clock() - self._began_at
        if self._num_begun >= self._request.max_requests or since >= self._request.max_seconds:
            return None
        self._num_begun += 1
        return since

    def ended(self, lease: LeaseRecord) -> None:
        """Write a request that has ended. One that begins again is noted then: its lease was not handed out."""
        if (begun := self._open.pop(lease, None)) is None:
            return
        if lease.filling_for:
            self._num_begun -= 1
        else:
            self._writer.take(_recorded(lease, *begun))

    def finish(self) -> RecordingStatus:
        """Write the file, with open requests as they are now. Waits for the disk: call it in a thread.

        Remove the recorder from the observers first. Later calls return the same counts.
        """
        with self._finishing:
            if self._ended is None:
                last = [_recorded(lease, *begun) for lease, begun in self._open.items()]
                self._open.clear()
                self._writer.finish(last)
                self._ended = self.status()
        return self._ended

    def status(self) -> RecordingStatus:
        """Return the counts, final if the recording is over."""
        return self._ended or RecordingStatus(
            path=str(self._writer.path),
            seconds=self._clock() - self._began_at,
            requests=self._writer.num_written,
            dropped=self._writer.num_dropped,
            error=self._writer.error,
        )


def _writer(request: StartRecording, block_size: int) -> TrafficWriter:
    cannot = f"cannot record to {request.path!r} on the cache's node"
    path = Path(request.path)
    try:
        if path.is_dir() or (path.exists() and not request.overwrite):
            exists = (
                "exists: name another file, or allow to overwrite it (raydix record --overwrite, or overwrite=True)"
            )
            what = "is a folder" if path.is_dir() else exists
            raise InvalidRequest(f"{cannot}: it {what}")
        return TrafficWriter(path, block_size)
    except OSError as error:
        raise InvalidRequest(f"{cannot}: {error.strerror}") from None
    except ValueError as error:  # the file name is not valid
        raise InvalidRequest(f"{cannot}: {error}") from None


def _recorded(lease: LeaseRecord, since: float, prompt: RadixKey) -> Recorded:
    return Recorded(round(1000 * since), prompt, max(0, len(lease.key) - len(prompt)))
