"""A cache of eight slots with sessions that expire by a clock of the test."""

from __future__ import annotations

from typing import Any

from support.caches.cache_under_test import small_config
from support.processes.fake_clock import Clock

from raydix.actors.service.cache_service import CacheService
from raydix.schemas import AcquireRequest, LeaseConfig, OpenSession

TTL_S, GRACE_S = 10.0, 100.0


class Life:
    """Stands for another process's life; the real one is tried below, and by the tests that kill processes."""

    pid = 4242

    def __init__(self) -> None:
        self.ended = False
        self.num_looks = 0

    def has_ended(self) -> bool:
        self.num_looks += 1
        return self.ended


class Scene:
    """A cache of eight slots of one token, and its clock."""

    def __init__(self) -> None:
        self.clock = Clock(1000.0)
        leases = LeaseConfig(session_ttl_s=TTL_S, quarantine_grace_s=GRACE_S, max_waiters=8)
        config = small_config().model_copy(update={"leases": leases})
        self.service = CacheService(config, "e", clock=self.clock)

    def open(self, session_id: str, **fields: Any) -> None:
        self.service.open_session(OpenSession(session_id=session_id, owner="test", **fields))

    def execute(self, session_id: str, request: Any) -> Any:
        return self.service.execute(session_id, "e", (request,)).responses[0]

    def acquire(self, session_id: str, lease_id: str, num_tokens: int = 2) -> Any:
        return self.execute(session_id, AcquireRequest(lease_id=lease_id, tokens=[7] * num_tokens))

    def wait(self, seconds: float) -> None:
        """Let time pass, and the cache look at the clock."""
        self.clock.now += seconds
        self.service.reaper.reap()

    def tick(self, seconds: float = 1.0) -> None:
        """Let time pass, and the cache look at the clock and at its clients' processes."""
        self.clock.now += seconds
        self.service.reaper._tick()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Free, private and quarantined slots; the tree's are the rest."""
        self.service.core.check_invariants()
        stats = self.service.stats()
        assert stats.free_slots + stats.private_slots + stats.tree_slots + stats.quarantined_slots == stats.num_slots
        return stats.free_slots, stats.private_slots, stats.quarantined_slots
