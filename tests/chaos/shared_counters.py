"""`Board` and `Mailbox`: the shared data of a swarm's processes. It outlives the processes that write to it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

NUM_ACTORS, NUM_PLAIN = 8, 4
NUM_PLACES = NUM_ACTORS + NUM_PLAIN

PID, IDLE, WRITING, WAITING = STATES = ("pid", "idle", "writing", "waiting")  # present states
OUTCOMES = ("served", "cancelled", "PoolExhausted", "CacheBusy", "CacheUnavailable", "StaleEpoch", "LeaseExpired")
OUTCOMES += ("UnknownLease",)  # of a granted lease, or of one that ended while its extend waited
DETAILS = ("tokens compared", "leases granted", "leases adopted", "answers lost", "sessions")
FIELDS = (*STATES, *OUTCOMES, *DETAILS)
STOP, CLOSE, RESTARTS = range(
    3
)  # in the row of all: send no more requests; end; twice the cache's restarts, odd while down


class Board:
    """A row of numbers for each place, in shared memory: counts of a killed process remain."""

    def __init__(self, folder: str) -> None:
        path = Path(folder, "board")
        shape = (NUM_PLACES + 1, len(FIELDS))
        self._rows = np.memmap(path, np.int64, "r+" if path.exists() else "w+", shape=shape)
        self._all = self._rows[NUM_PLACES]

    def __getitem__(self, at: tuple[int, str]) -> int:
        return int(self._rows[at[0], FIELDS.index(at[1])])

    def __setitem__(self, at: tuple[int, str], value: int) -> None:
        self._rows[at[0], FIELDS.index(at[1])] = value

    def add(self, place: int, field: str, number: int = 1) -> None:
        self._rows[place, FIELDS.index(field)] += number

    @contextmanager
    def doing(self, place: int, field: str) -> Iterator[None]:
        """Count one more activity at a place while the block runs."""
        self.add(place, field)
        try:
            yield
        finally:
            self.add(place, field, -1)

    def vacate(self, place: int) -> None:
        """Clear the states of a place; its counts remain."""
        for field in STATES:
            self[place, field] = 0

    def states(self, place: int) -> dict[str, int]:
        """Return the present states at a place, by name."""
        return {field: self[place, field] for field in STATES}

    def sums(self) -> dict[str, int]:
        """Return the sums of all counts over all places, by name."""
        fields = (*OUTCOMES, *DETAILS)
        return {field: sum(self[place, field] for place in range(NUM_PLACES)) for field in fields}

    @property
    def stopped(self) -> bool:
        """Return whether clients keep their sessions but send no more requests."""
        return bool(self._all[STOP])

    def stop(self) -> None:
        self._all[STOP] = 1

    @property
    def closed(self) -> bool:
        """Return whether clients must end."""
        return bool(self._all[CLOSE])

    def close(self) -> None:
        self._all[CLOSE] = 1

    @property
    def restarts(self) -> int:
        return int(self._all[RESTARTS])

    def note_restart(self) -> None:
        """Count that the cache goes down, or is back."""
        self._all[RESTARTS] += 1


class Mailbox:
    """Letters in a folder, each of which one process may take."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder, "letters")
        self._folder.mkdir(exist_ok=True)
        self._numbers = count()

    def put(self, letter: Any) -> None:
        name = f"{os.getpid()}-{next(self._numbers)}"
        written = self._folder / f"{name}.part"
        written.write_bytes(pickle.dumps(letter))
        written.rename(self._folder / f"{name}.letter")

    def take(self, pattern: str = "*.letter") -> Any:
        """Return a letter that no other process gets, or None if there is none."""
        for letter in self._folder.glob(pattern):
            mine = letter.with_suffix(f".taken-by-{os.getpid()}")
            try:
                letter.rename(mine)
            except FileNotFoundError:
                continue  # another process was faster
            content = pickle.loads(mine.read_bytes())
            mine.unlink()
            return content
        return None

    def leftover(self) -> Any:
        """Take a letter when no other process takes any: also those that killed processes had taken."""
        return self.take() or self.take("*.taken-by-*")
