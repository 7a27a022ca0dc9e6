"""`Quarantine`: private slots whose owner has vanished, but may still be writing them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Starts = NDArray[np.int64]


@dataclass(slots=True)
class WithheldSlots:
    """What one lease held privately when its owner vanished."""

    starts: Starts  # first slots of its pages, which keep whatever window halves they have
    state_slot: int | None


class Quarantine:
    """Slots that nobody may use until it is certain that their last owner writes them no more. By session."""

    def __init__(self) -> None:
        self.num_pages = 0
        self.num_states = 0
        self._by_session: dict[str, list[WithheldSlots]] = {}

    def add(self, session_id: str, starts: Starts, state_slot: int | None) -> None:
        """Withhold what a lease of that session held."""
        if len(starts) or state_slot is not None:
            self._by_session.setdefault(session_id, []).append(WithheldSlots(starts, state_slot))
            self.num_pages += len(starts)
            self.num_states += state_slot is not None

    def take(self, session_id: str) -> list[WithheldSlots]:
        """Give up all that is withheld of a session; the caller frees it."""
        withheld = self._by_session.pop(session_id, [])
        self.num_pages -= sum(len(each.starts) for each in withheld)
        self.num_states -= sum(each.state_slot is not None for each in withheld)
        return withheld

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._by_session

    def __iter__(self) -> Iterator[WithheldSlots]:
        for withheld in self._by_session.values():
            yield from withheld
