"""`Recordings`: the recordings of a cache's traffic, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from raydix.actors.observe.traffic_recorder import TrafficRecorder
from raydix.cache_core.leases.request_observer import RequestObserver
from raydix.schemas import InvalidRequest, RecordingStatus, StartRecording


class Recordings:
    """Begins and ends them.

    Args:
        watches: those that are told of every request.
        clock: seconds, of any origin.
        page_size: of the cache.
    """

    def __init__(self, watches: list[RequestObserver], clock: Callable[[], float], page_size: int) -> None:
        self._page_size = page_size
        self._observers = watches
        self._clock = clock
        self._recorder: TrafficRecorder | None = None
        self._end: asyncio.TimerHandle | None = None

    def start(self, request: StartRecording) -> None:
        """Record requests from now on. Its time over, a recording writes its file by itself, if a loop runs here.

        Raises:
            InvalidRequest: there is a recording already that is not over, or its file cannot be made.
        """
        if self._recorder is not None and not self._recorder.is_over:
            raise InvalidRequest(f"a recording is under way, to {self._recorder.status().path!r}: stop it first")
        self._recorder = recorder = TrafficRecorder(request, self._clock, self._page_size)
        self._observers.append(recorder)
        with suppress(RuntimeError):  # no loop: somebody will stop it
            self._end_in_time(recorder)

    def status(self) -> RecordingStatus | None:
        """How the recording fares, or fared if it ended by itself; None if there is none."""
        return None if self._recorder is None else self._recorder.status()

    async def stop(self) -> RecordingStatus:
        """End the recording and write its file, in a thread; what became of it, if it ended by itself.

        Until then it is under way; who stops it meanwhile is told the same.

        Raises:
            InvalidRequest: there is none.
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
        """The loop before was closed: a recording ends by itself on the running one."""
        if self._recorder in self._observers:
            self._end_in_time(self._recorder)

    def _end_in_time(self, recorder: TrafficRecorder) -> None:
        loop = asyncio.get_running_loop()
        self._end = loop.call_later(recorder.seconds_left, self._time_is_over, recorder)

    def _time_is_over(self, recorder: TrafficRecorder) -> None:
        """Who began it may have gone, or may still ask what became of it."""
        if recorder in self._observers:
            self._observers.remove(recorder)
            asyncio.get_running_loop().run_in_executor(None, recorder.finish)
