"""`LowerTiers`: the places below the pool of a cache, as requests see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from raydix.actors.tiers.lower_tier import KeepingTier, LoadingTier
from raydix.actors.tiers.tier_loads import TierLoads
from raydix.cache_core import LeasedCache, OutOfSlotsError, RadixKey
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tiers.look_up import LookUp
from raydix.cache_core.tiers.move import Move
from raydix.cache_core.tiers.moves import check_all


class LowerTiers:
    """The places below the pool of a cache, from the next one to the last. There may be none.

    A lease is filled from one after the other, with one ticket: see `load`. Each place is looked up once in a step of
    the loop: the functions of a step share a `LookUp`, which does not outlive it.

    Args:
        core: the cache of the pool.
        places: the places.
    """

    def __init__(self, core: LeasedCache, places: Sequence[LoadingTier]) -> None:
        self._core = core
        self._places = places
        self._keeping = [place for place in places if isinstance(place, KeepingTier)]
        self._loads = [place.loads for place in places]
        all_loads = [loads.moves for loads in self._loads]
        for moves in all_loads:
            moves.others = [other for other in all_loads if other is not moves]

    def __bool__(self) -> bool:
        """Whether there is a place."""
        return bool(self._places)

    # ---------------------------------------------------------------- writes

    @property
    def locks_pool(self) -> bool:
        """Whether writes in flight lock pages of the pool."""
        return any(place.locks_pool for place in self._keeping)

    def cancel_writes(self) -> bool:
        """Cancel the writes that lock pages of the pool; return True if all have ended.

        If False, `after_writes` calls back when they have.
        """
        for place in self._keeping:
            if place.locks_pool:
                place.cancel_writes()
        return not self.locks_pool

    def after_writes(self, resume: Callable[[], object]) -> None:
        """Call `resume` once, when no write locks pages of the pool any more."""
        place = next((place for place in self._keeping if place.locks_pool), None)
        if place is None:
            resume()
        else:
            place.after_writes(lambda: self.after_writes(resume))

    # ---------------------------------------------------------------- loads

    def lengths_below(self, key: RadixKey, prefix_len: int) -> dict[str, int]:
        """Return by place how many leading tokens of a request's key it can use, `prefix_len` of them in the pool."""
        lengths: dict[str, int] = {}
        for loads in self._loads:
            prefix_len = lengths[loads.name] = max(prefix_len, loads.moves.source.longest_prefix(key))
        return lengths

    def missing(self, look_up: LookUp) -> int:
        """Return how many tokens of a request's key a place has beyond those of the pool."""
        prefix_len = look_up.length(self._loads[0].moves.pool)
        return max(prefix_len, *(look_up.length(loads.moves.source) for loads in self._loads)) - prefix_len

    def check_room(self, look_up: LookUp) -> None:
        """Raise OutOfSlotsError if a lease that only locks would find no room for its loads."""
        cache = self._loads[0].moves.pool.cache
        tenant = cache.tenants.of(look_up.key.extra_key)
        cache.pools.check_pages(self.missing(look_up) // cache.page_size, tenant)

    def may_load(self, timeout_s: float | None) -> bool:
        """Return whether a request may load anything: its time limit, or that of a place, is not 0."""
        if timeout_s is not None:
            return timeout_s > 0
        return any(loads.timeout_s > 0 for loads in self._loads)

    def loads_of(self, move: Move) -> TierLoads:
        """Return the loads from the place of a load."""
        return next(loads for loads in self._loads if loads.moves.source is move.source_tier)

    def load(
        self, lease: LeaseRecord, look_up: LookUp, timeout_s: float | None, after: Move | None = None
    ) -> Move | None:
        """Begin to load the part of a new lease's prompt that the next place has and the pool lacks.

        Args:
            look_up: of the lease's key.
            timeout_s: that is left of the request's time limit; None: each place's own.
            after: a load of the lease that has ended in this step: the places behind it are asked for the rest.

        Returns:
            The move in flight, for `TierLoads.when_loaded`; None: there is nothing to load.

        Raises:
            OutOfSlotsError: a lease that only locks finds no room; a new one has ended, and another may have its id.
        """
        first = 0 if after is None else 1 + self._loads.index(self.loads_of(after))
        moves = (loads.load(lease, look_up, timeout_s) for loads in self._loads[first:])
        try:
            return next((move for move in moves if move is not None), None)
        except OutOfSlotsError:
            if after is None:
                self._loads[0].moves.end_unplaced(lease)
            raise

    def running_load(self, look_up: LookUp) -> Move | None:
        """Return the load in flight that brings the next page of a request's key; None if there is none."""
        running = (loads.running_load(look_up) for loads in self._loads)
        return next((move for move in running if move is not None), None)

    def prefetch(self, key: RadixKey, first: int = 0) -> int:
        """Begin to load the prefix of a key for no lease; return the number of tokens that are loaded first.

        They come from the next place, from number `first` on, that has more than the pool. When they are there, the
        places below it follow.
        """
        look_up = LookUp(key)
        for place, loads in enumerate(self._loads[first:], start=first + 1):
            if (move := loads.prefetch(look_up)) is not None:
                loads.wait_for(move, partial(self._prefetch_on, key, place))
                return move.num_tokens
        return 0

    def _prefetch_on(self, key: RadixKey, first: int, is_whole: bool) -> None:
        if is_whole:
            self.prefetch(key, first)

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of the pool, of a place or of a move is broken. O(n)."""
        if not self._places:
            self._core.check_invariants()
        all_writes = [writes for place in self._keeping for writes in place.all_writes]
        check_all([loads.moves for loads in self._loads], all_writes)
        for place in self._places:
            place.check_invariants()
