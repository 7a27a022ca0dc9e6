"""`LowerTiers`: the host tier and the disk tier of a cache, as requests see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

from raydix.actors.tiers.tier_loads import TierLoads
from raydix.actors.tiers.tier_manager import TierManager
from raydix.actors.transport.validation import unknown_tier
from raydix.cache_core import RadixKey
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tiers.move import Move
from raydix.cache_core.tiers.moves import Finished, Moves, check_all
from raydix.cache_core.tiers.tier import Tier

if TYPE_CHECKING:
    from raydix.actors.tiers.disk_tier import DiskTier


class LowerTiers:
    """The tiers below the pool of a cache: at least one of the two.

    A lease is filled from the host first, then from the disk, with one ticket: see `load` and `load_on`.

    Args:
        host, disk: the tiers; None: there is none.
    """

    def __init__(self, host: TierManager | None, disk: DiskTier | None) -> None:
        self.host = host
        self.disk = disk
        # From the next tier to the last one.
        self._loads = [tier.loads for tier in (host, disk) if tier is not None]
        self._is_instant = any(tier.is_instant for tier in (host, disk) if tier is not None)
        self._loads_from = {loads.moves.lower: loads for loads in self._loads}
        self._all_moves: list[Moves] = [] if host is None else [host.moves]
        if disk is not None:
            self._all_moves += disk.all_moves
        into_pool = [moves for moves in self._all_moves if moves.upper is self.pool]
        for moves in into_pool:
            moves.others = [other for other in into_pool if other is not moves]

    @property
    def pool(self) -> Tier:
        """The first tier."""
        return self._all_moves[0].upper

    @property
    def tiers(self) -> list[Tier]:
        """All tiers, the pool first."""
        return [self.pool, *self._loads_from]

    def tier(self, name: str) -> Tier:
        """Return the tier of that name.

        Raises:
            InvalidRequest: there is no such tier.
        """
        tiers = {tier.name: tier for tier in self.tiers}
        if name not in tiers:
            raise unknown_tier(name, tiers)
        return tiers[name]

    @property
    def loads_in_flight(self) -> list[Move]:
        """The loads of leases that sessions wait for."""
        moves = [move for some in self._all_moves for move in some.in_flight]
        return [move for move in moves if move.is_load and move.target.filling_for]

    @property
    def needs_threads(self) -> bool:
        """Whether threads are at work."""
        host, disk = self.host, self.disk
        return bool(host is not None and host.needs_threads) or (disk is not None and disk.needs_threads)

    @property
    def has_work(self) -> bool:
        """Whether threads are at work, or the disk has other work for the loop."""
        return bool(self.host is not None and self.host.needs_threads) or (self.disk is not None and self.disk.has_work)

    # ---------------------------------------------------------------- writes

    @property
    def has_writes(self) -> bool:
        """Whether writes in flight lock pages of the pool."""
        return bool(self.host is not None and self.host.has_writes) or (self.disk is not None and self.disk.locks_pool)

    def cancel_writes(self) -> bool:
        """Cancel the writes that lock pages of the pool; return True if all have ended.

        If False, `after_writes` calls back when they have.
        """
        if self.host is not None and self.host.has_writes:
            self.host.cancel_writes()
        if self.disk is not None:
            self.disk.cancel_writes()
        return not self.has_writes

    def after_writes(self, resume: Callable[[], object]) -> None:
        """Call `resume` once, when no write locks pages of the pool any more."""

        def go_on() -> None:
            self.after_writes(resume)

        if self.host is not None and self.host.has_writes:
            self.host.after_writes(go_on if self.disk is not None else resume)
        elif self.disk is not None and self.disk.locks_pool:
            self.disk.writes.after_writes(go_on)
        else:
            resume()

    # ---------------------------------------------------------------- loads

    def holding(self, key: RadixKey, limit: int | None) -> AbstractContextManager[None]:
        """Lock the tiers' prefixes of a key while a lease is opened, as `Moves.holding` says."""
        return self._holding(key, limit) if self._is_instant else nullcontext()

    @contextmanager
    def _holding(self, key: RadixKey, limit: int | None) -> Iterator[None]:
        with ExitStack() as held:
            for loads in self._loads:
                held.enter_context(loads.moves.holding(key, limit))
            yield

    def _longest_prefix(self, key: RadixKey) -> int:
        return max(tier.longest_prefix(key) for tier in self.tiers)

    def lengths_below(self, key: RadixKey, prefix_len: int) -> tuple[int, int]:
        """Return how many leading tokens of a request's key it can use, loads from the host included; then of both.

        Args:
            prefix_len: tokens that the pool has; no length is below it.

        Returns:
            Two lengths; the first is 0 without a host tier, the second without a disk.
        """
        longest = prefix_len if self.host is None else max(prefix_len, self.host.moves.lower.longest_prefix(key))
        in_memory = 0 if self.host is None else longest
        return in_memory, 0 if self.disk is None else max(longest, self.disk.tier.longest_prefix(key))

    def has_more(self, key: RadixKey) -> bool:
        """Return whether a tier has a longer prefix of a request's key than the pool."""
        return self._longest_prefix(key) > self.pool.longest_prefix(key)

    def check_room(self, key: RadixKey) -> None:
        """Raise OutOfSlotsError if a lease that only locks would find no room for its loads."""
        cache = self.pool.cache
        missing = self._longest_prefix(key) - self.pool.longest_prefix(key)
        cache.pools.check_pages(missing // cache.page_size, cache.tenants.of(key.extra_key))

    def may_load(self, timeout_s: float | None) -> bool:
        """Return whether a request may load anything: its time limit, or that of a tier, is not 0."""
        if timeout_s is not None:
            return timeout_s > 0
        return any(loads.timeout_s > 0 for loads in self._loads)

    def wait_s(self, load: Move, timeout_s: float | None) -> float:
        """Return how long another request waits for a load, at most."""
        return self._loads_from[load.source_tier].timeout_s if timeout_s is None else timeout_s

    def load(self, lease: LeaseRecord, limit: int | None, timeout_s: float | None) -> Move | None:
        """Begin to load the part of a new lease's prompt that the next tier has and the pool lacks.

        Args:
            limit: the lease reuses at most so many tokens.
            timeout_s: of the request; None: each tier's own.

        Returns:
            The move in flight, for `when_loaded`; None: there is nothing to load, or it was loaded in this call.

        Raises:
            OutOfSlotsError: a lease that only locks finds no room; nothing has changed.
        """
        return self._load_from(self._loads, lease, limit, timeout_s)

    def load_on(
        self, lease: LeaseRecord, before: Move, finished: Finished, limit: int | None, left_s: float | None
    ) -> Move | None:
        """Begin the next load of a lease, in the step in which one has ended, before its session gets it.

        Args:
            before: the load that has ended, with the result `finished`. If it is not whole, nothing follows.
            left_s: of the request's time limit; None: it has none.

        Returns, Raises: as `load`.
        """
        if finished.num_tokens < before.num_tokens:
            return None
        place = self._loads.index(self._loads_from[before.source_tier])
        return self._load_from(self._loads[place + 1 :], lease, limit, left_s)

    def _load_from(
        self, all_loads: Iterable[TierLoads], lease: LeaseRecord, limit: int | None, timeout_s: float | None
    ) -> Move | None:
        """Begin to load from the first of some tiers that has more than the lease."""
        moves = (loads.load(lease, limit, timeout_s) for loads in all_loads)
        return next((move for move in moves if move is not None), None)

    def when_loaded(self, load: Move, on_end: Callable[[Finished], object]) -> None:
        """Call `on_end` on the loop when the load of a lease has ended."""
        self._loads_from[load.source_tier].when_loaded(load, on_end)

    def running_load(self, key: RadixKey, limit: int | None) -> Move | None:
        """Return the load in flight that brings the next page of a request's key; None if there is none."""
        running = (loads.running_load(key, limit) for loads in self._loads)
        return next((move for move in running if move is not None), None)

    def wait_for(self, load: Move, resume: Callable[[bool], object]) -> None:
        """Call `resume(is_whole)`, for a request, when a load has ended, in the order of these calls."""
        loads = self._loads_from[load.source_tier]
        loads.hurry(load)
        loads.wait_for(load, resume)

    def give_back(self, lease: LeaseRecord) -> None:
        """End a new lease for which `load` found no room: see `Moves.give_back`."""
        self._all_moves[0].give_back(lease)

    def prefetch(self, key: RadixKey) -> int:
        """Begin to load the prefix of a key for no lease; return the number of tokens that are loaded first.

        They come from the next tier that has more than the pool. When they are there, the tiers below it follow.
        """
        for place, loads in enumerate(self._loads):
            if (move := loads.prefetch(key)) is not None:
                self._prefetch_after(place, move, key)
                return move.num_tokens
        return 0

    def _prefetch_after(self, place: int, move: Move, key: RadixKey) -> None:
        """Go on with the next tier when a prefetch from the tier at `place` has ended whole."""
        if place + 1 == len(self._loads):
            return

        def go_on(is_whole: bool) -> None:
            if is_whole and (after := self._loads[place + 1].prefetch(key)) is not None:
                self._prefetch_after(place + 1, after, key)

        if self._loads[place].is_in_flight(move):
            self._loads[place].wait_for(move, go_on)
        else:
            go_on(True)  # It was loaded in the call: there are no tensors.

    # ---------------------------------------------------------------- checks

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of a tier or of a move is broken. O(n)."""
        check_all(self._all_moves)
        if self.host is not None:
            self.host.check_copies()
        if self.disk is not None:
            self.disk.check_invariants()
