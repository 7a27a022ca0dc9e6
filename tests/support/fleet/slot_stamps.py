"""`SlotStamps`: contents of the slots of caches without tensors, in files that all processes of a test map."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydix.actors import Lease


class SlotStamps:
    """A number for each slot, in place of its KV, which identifies the prompt up to the slot's token.

    Each life of a cache has other slots, and so a file of its own. A write or a read has the effect that one of KV in a
    mapped pool would have, also if the process is killed in between.

    Args:
        folder: of the files, the same for all processes.
        num_slots: at least the slots of each cache, with the page for padding.
    """

    def __init__(self, folder: str, num_slots: int) -> None:
        self._folder = Path(folder)
        self._num_slots = num_slots
        self._lives: dict[str, NDArray[np.int64]] = {}

    def write(self, lease: Lease, stamps: NDArray[np.int64]) -> None:
        """Fill the private slots of a lease's prompt."""
        start, stop = lease.published_len, len(stamps)
        self._life(lease.epoch)[lease.slots[start:stop].numpy()] = stamps[start:]

    def wrong(self, lease: Lease, stamps: NDArray[np.int64]) -> list[int]:
        """Return the positions of published tokens with contents of other tokens."""
        stop = min(lease.published_len, len(stamps))
        found = self._life(lease.epoch)[lease.slots[:stop].numpy()]
        return np.nonzero(found != stamps[:stop])[0].tolist()

    def _life(self, epoch: str) -> NDArray[np.int64]:
        if epoch not in self._lives:
            path = self._folder / f"slots-{epoch}"
            file = os.open(path, os.O_CREAT | os.O_RDWR)
            os.ftruncate(file, 8 * self._num_slots)  # the contents of a file of this size stay
            os.close(file)
            self._lives[epoch] = np.memmap(path, np.int64, "r+", shape=(self._num_slots,))
        return self._lives[epoch]


def stamps_of(tokens: list[int], namespace: int) -> NDArray[Any]:
    """Return the stamps of a prompt of `running_fleet.prompt`, of which equal tokens have equal prefixes."""
    return np.array(tokens, np.int64) + 1_000_000 * (namespace + 1)
