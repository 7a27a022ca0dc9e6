"""`LoadingTier`, `KeepingTier`: what the cache needs of the places below its pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from raydix.actors.tiers.tier_loads import TierLoads
from raydix.cache_core.tiers.tier import Tier
from raydix.cache_core.tiers.writes import Writes


class LoadingTier(Protocol):
    """A place below the pool from which requests load.

    Its `Readable` may answer only of prefixes that it knows in the step of the question. What it learns in a later turn
    of the loop, it tells by the end of a load, which has published fewer tokens than were asked for.
    """

    @property
    def loads(self) -> TierLoads:
        """The loads from here to the pool."""

    @property
    def needs_threads(self) -> bool:
        """Whether threads are at work."""

    @property
    def has_work(self) -> bool:
        """Whether the tier goes on when the loop runs."""

    def start(self) -> None:
        """Begin on the running loop; no effect if that has happened."""

    def close(self, timeout_s: float | None = None) -> bool:
        """End all moves; return whether all have ended: the pools may be freed then.

        Args:
            timeout_s: for which it waits for a device; None: without a limit.
        """

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of the tier is broken. `check_all` checks the moves."""


@runtime_checkable
class KeepingTier(LoadingTier, Protocol):
    """A tier that keeps the KV of this pool: it has a cache with events and eviction, and gets writes."""

    tier: Tier

    @property
    def all_writes(self) -> Sequence[Writes]:
        """The writes to the tier, one for each tier above it that it gets KV from."""

    @property
    def locks_pool(self) -> bool:
        """Whether writes lock pages of the pool."""

    def cancel_writes(self) -> bool:
        """Cancel the writes that lock pages of the pool; return True if all are unlocked.

        If False, `after_writes` calls back when they are.
        """

    def after_writes(self, resume: Callable[[], object]) -> None:
        """Call `resume` once, when no write locks pages of the pool any more."""
