"""`Recordings`: the recordings of a cache's traffic, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from raydix.actors.observe.traffic_recorder import TrafficRecorder
from raydix.cache_core.leases.request_observer import RequestObserver
from raydix.schemas import InvalidRequest, RecordingStatus, StartRecording


class Recordings:
    """Starts and ends recordings, one at a time.

    Args:
        watches: the cache's observers of requests; a recording is added to them.
        clock: returns seconds, from any origin.
        page_size: tokens per page of the cache.
    """

    def __init__(self, watches: list[RequestObserver], clock: Callable[[], float], page_size: int) -> None:
        self._page_size = page_size
        self._observers = watches
        self._clock = clock
        self._recorder: TrafficRecorder | None = None
        self._end: asyncio.TimerHandle | None = None

    def start(self, request: StartRecording) -> None:
        """Record requests from now on. When its time is up, a recording writes its file, if a loop runs here.

        Raises:
            InvalidRequest: a recording is running, or the file cannot be created.
        """
        if self._recorder is not None and not self._recorder.is_over:
            raise InvalidRequest(f"a recording to {self._recorder.status().path!r} is running: stop it first")
        self._recorder = recorder = TrafficRecorder(request, self._clock, self._page_size)
        self._observers.append(recorder)
        with suppress(RuntimeError):  # no loop: the caller must stop it
            self._end_in_time(recorder)

    def status(self) -> RecordingStatus | None:
        """Return the counts of the recording, also after its time is up; None without a recording."""
        return None if self._recorder is None else self._recorder.status()

    async def stop(self) -> RecordingStatus:
        """End the recording, write its file in a thread, and return its final counts.

        If its time was up before, only return the counts. Concurrent calls return the same.

        Raises:
            InvalidRequest: no recording was started.
        """
        recorder = self._recorder
        if recorder is None:
            raise InvalidRequest("there is no recording to stop")
        if self._end is not None:
            self._end.cancel()
        if recorder in self._observers:
            self._observers.remove(recorder)
        status = await asyncio.to_thread(recorder.finish)
        if self._recorder is recorder:
            self._recorder = None
        return status

    def change_loop(self) -> None:
        """Move the timer of a recording to the running loop, after the previous loop was closed."""
        if self._recorder in self._observers:
            self._end_in_time(self._recorder)

    def _end_in_time(self, recorder: TrafficRecorder) -> None:
        loop = asyncio.get_running_loop()
        self._end = loop.call_later(recorder.seconds_left, self._time_is_over, recorder)

    def _time_is_over(self, recorder: TrafficRecorder) -> None:
        """Write the file; the recording stays for a later `stop`."""
        if recorder in self._observers:
            self._observers.remove(recorder)
            asyncio.get_running_loop().run_in_executor(None, recorder.finish)
