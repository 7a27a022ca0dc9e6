"""`TrafficRecorder`: records the requests of a running cache, for `raydix replay`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from raydix.actors.observe.trace_writer import Recorded, TrafficWriter
from raydix.cache_core import RadixKey
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.schemas import InvalidRequest, RecordingStatus, StartRecording


class TrafficRecorder:
    """Watches requests (`RequestObserver`): a prompt as it was acquired, and how many tokens were published behind it.

    On the cache's path it costs a microsecond; all else is the writer's, in its thread.

    Args:
        request: where to, and how much.
        clock: seconds, of any origin.
        page_size: of the cache.

    Raises:
        InvalidRequest: the file cannot be made, or is there already.
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
        """The file has been written, or could not be."""
        return self._ended is not None

    @property
    def seconds_left(self) -> float:
        """How long it goes on to take requests."""
        return max(0.0, self._request.max_seconds - (self._clock() - self._began_at))

    def granted(self, lease: LeaseRecord, max_prefix_len: int | None) -> None:
        """A request begins."""
        if (since := self._since_begun()) is not None:
            self._open[lease] = since, lease.key

    def refused(self, key: RadixKey, num_tokens: int, can_ever_fit: bool) -> None:
        """Record a request that can never fit; one that can is asked again by its caller."""
        if not can_ever_fit and (since := self._since_begun()) is not None:
            self._writer.take(Recorded(round(1000 * since), key.kept(), num_tokens - len(key)))

    def _since_begun(self) -> float | None:
        """Return how long ago the recording began and count one more request; None if it takes no more."""
        since = self._clock() - self._began_at
        if self._num_begun >= self._request.max_requests or since >= self._request.max_seconds:
            return None
        self._num_begun += 1
        return since

    def published(self, lease: LeaseRecord) -> None:
        """Nothing to do: the lease knows how long it has become."""

    def ended(self, lease: LeaseRecord) -> None:
        """A request is over."""
        if (begun := self._open.pop(lease, None)) is not None:
            self._writer.take(_recorded(lease, *begun))

    def retired(self, is_meant: Callable[[str | None], bool]) -> None:
        """Nothing to do."""

    def finish(self) -> RecordingStatus:
        """Write the file, with the requests that are under way as they are. Waits for the disk: not on the loop.

        It must watch no more. Done again it says once more what became of it.
        """
        with self._finishing:
            if self._ended is None:
                last = [_recorded(lease, *begun) for lease, begun in self._open.items()]
                self._open.clear()
                self._writer.finish(last)
                self._ended = self.status()
        return self._ended

    def status(self) -> RecordingStatus:
        """How it fares, or what became of it."""
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
            what = "is a folder" if path.is_dir() else "is there already, and is not to be overwritten"
            raise InvalidRequest(f"{cannot}: it {what}")
        return TrafficWriter(path, block_size)
    except OSError as error:
        raise InvalidRequest(f"{cannot}: {error.strerror}") from None
    except ValueError as error:  # no name of a file
        raise InvalidRequest(f"{cannot}: {error}") from None


def _recorded(lease: LeaseRecord, since: float, prompt: RadixKey) -> Recorded:
    return Recorded(round(1000 * since), prompt, max(0, len(lease.key) - len(prompt)))
