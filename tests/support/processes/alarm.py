"""`Alarm`: raises an error in the main thread, which waits, from another thread."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self

__all__ = ["Alarm"]

MAIN = threading.main_thread().ident or 0  # a signal to the process could go to another thread, such as one of Ray's


class Alarm:
    """A signal whose handler raises an error, once. A context manager that handles the signal.

    The signal must not be SIGALRM: a handler of it would take pytest's time limit for the alarm.
    """

    def __init__(self, error: BaseException, by: signal.Signals = signal.SIGUSR2) -> None:
        self._error = error
        self._signal = by
        self._heard = threading.Event()

    def __enter__(self) -> Self:
        self._before = signal.signal(self._signal, self._raise_once)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(self._signal, self._before)

    def ring(self) -> None:
        """Send the signal from another thread until the main thread has heard it.

        One that comes between the interpreter's check for signals and a wait does not end the wait.
        """
        while not self._heard.is_set():
            signal.pthread_kill(MAIN, self._signal)
            self._heard.wait(0.05)

    def _raise_once(self, number: int, frame: FrameType | None) -> None:
        if not self._heard.is_set():
            self._heard.set()
            raise self._error
