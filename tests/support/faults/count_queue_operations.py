"""Counts what eviction queues are asked to do, in place of a clock."""

from __future__ import annotations

from typing import Any

import pytest

from raydix.cache_core.eviction.queue import EvictionQueue, LateNodes
from raydix.cache_core.eviction.recency_queue import RecencyQueue

ON_QUEUES = ("push", "discard", "touch", "pop")
COUNTED = ((EvictionQueue, ON_QUEUES), (RecencyQueue, ("push", "discard", "pop")), (LateNodes, ("add", "remove")))


def queue_operations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by its name for each operation on any queue from now on, and on what is sorted in it."""
    done: list[str] = []

    def counted(owner: type, name: str) -> Any:
        original = getattr(owner, name)

        def count(*args: Any) -> Any:
            done.append(name)
            return original(*args)

        return count

    for owner, names in COUNTED:
        for name in names:
            monkeypatch.setattr(owner, name, counted(owner, name))
    return done
