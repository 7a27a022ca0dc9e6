"""Runs at the start of each Python process of `make coverage`: saves what was measured, once a second.

Ray ends its workers without running Python's exit handlers, so coverage.py would lose their data.
"""

import threading
import time
from importlib.util import find_spec

INTERVAL_S = 1.0


def start_saver() -> None:
    """Start a thread that saves this process's data, if coverage.py measures it."""
    from coverage import Coverage  # only here: the processes of other environments may lack it

    if (measurement := Coverage.current()) is not None:
        threading.Thread(target=save, args=(measurement,), daemon=True).start()


def save(measurement: object) -> None:
    """Save the data of this process for as long as it runs."""
    while True:
        time.sleep(INTERVAL_S)
        measurement.save()  # type: ignore[attr-defined]


if find_spec("coverage") is not None:
    start_saver()
