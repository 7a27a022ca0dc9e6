"""`Loads`: the loads of prefixes from one place to the pool of a cache, and the leases that they fill."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from raydix.cache_core.errors import OutOfSlotsError
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tiers.look_up import LookUp
from raydix.cache_core.tiers.move import Move, new_move
from raydix.cache_core.tiers.tier import Readable, Source, Tier
from raydix.cache_core.tree.radix_key import RadixKey


@dataclass(slots=True)
class LoadCounts:
    """Counts of loads since the start. Tokens, unless they say otherwise."""

    loaded: int = 0  # tokens of prefixes that were handed out
    loaded_unused: int = 0  # loaded for no lease, or for one that had ended
    failed: int = 0  # tokens that were to be copied and were not
    states_not_published: int = 0  # loaded states without a second slot


class Filled(NamedTuple):
    """The end of a load."""

    num_tokens: int  # tokens published
    lease: LeaseRecord | None = None  # the lease, handed out; None: it has ended, or there was none
    must_restart: bool = False  # the namespace was retired meanwhile: the request must begin again


class Loads:
    """Prepares the loads from one place, and ends them.

    Args:
        source: has the prefixes; its pages, windows and states are those of the pool.
        pool: the tier that they are loaded to.

    Attributes:
        counts: of loads since the start.
        others: the other loads into the pool, from other places.
    """

    def __init__(self, source: Readable, pool: Tier) -> None:
        self.source = source
        self.pool = pool
        self.counts = LoadCounts()
        self.others: Sequence[Loads] = ()
        self._page_size = pool.page_size
        self._in_flight: dict[Move, None] = {}

    @property
    def in_flight(self) -> list[Move]:
        """The loads in flight, the oldest first."""
        return list(self._in_flight)

    def running(self, look_up: LookUp) -> Move | None:
        """Return the load that brings the next page of a request's key; None if there is none.

        Such a request waits for the load, without slots. O(loads in flight), each with a compare of the prefix.
        """
        if not self._in_flight:
            return None
        tree_key = self.pool.cache.tree_key(look_up.key)[: look_up.limit]
        wanted = look_up.length(self.pool) + self._page_size
        if wanted > len(tree_key):
            return None
        prefix = tree_key[:wanted]
        loads = (load for load in self._in_flight if load.stop >= wanted and not load.is_retired)
        return next((load for load in loads if load.key[:wanted] == prefix), None)

    def _any_runs(self, look_up: LookUp) -> bool:
        """Return whether a load in flight, from any place, brings the next page of a request's key."""
        return any(loads.running(look_up) is not None for loads in (self, *self.others))

    # ---------------------------------------------------------------- the beginning

    def prepare(self, lease: LeaseRecord, look_up: LookUp, most: int | None = None) -> Move | None:
        """Begin to load the prefix of an open lease that the source has beyond it; None if it has none.

        The lease must be new: its session has not got it yet. `complete` hands it out. A lease that only locks gets
        pages for the load.

        Args:
            look_up: of the lease's key.
            most: the lease gets a prefix of at most so many tokens.

        Raises:
            OutOfSlotsError: a lease that only locks finds no room; nothing has changed.
        """
        stop = self._stop(look_up, most)
        if stop <= lease.prefix_len or lease.retired or self._any_runs(look_up):
            return None
        cache = self.pool.cache
        cache.begin_fill(lease, stop)
        source, first = self.source.lock(lease.key, stop), lease.prefix_len
        if source.stop <= first:
            self.source.unlock(source.lock)
            cache.hand_out(lease, first)
            return None
        load = self._add(source, lease, cache.tree_key(lease.key)[: source.stop], first)
        if source.state is not None:
            assert lease.state_slot is not None
            load.target_states = (lease.state_slot,)
            self._add_spare(load)
        return load

    def _stop(self, look_up: LookUp, most: int | None) -> int:
        """Return how much of a key the source has, at most so many tokens."""
        stop = look_up.length(self.source)
        return stop if most is None or most >= stop else self.source.longest_prefix(look_up.key, most)

    def prepare_prefetch(self, look_up: LookUp, most: int | None = None) -> Move | None:
        """Begin to load the prefix of a key for no lease; None if there is nothing to load, or no room.

        It may evict what no lease locks.

        Args:
            most: load a prefix of at most so many tokens.
        """
        cache, usable = self.pool.cache, look_up.length(self.pool)
        stop = self._stop(look_up, most)
        if stop <= usable or self._any_runs(look_up):
            return None
        source = self.source.lock(look_up.key, stop)
        tree_key = cache.tree_key(look_up.key)[: source.stop]
        # Where window KV is to be loaded, it begins before the usable prefix.
        first, target = min(cache.radix.cached_lens(tree_key)[1], source.live_from), None
        loads_in_flight = (load for loads in (self, *self.others) for load in loads._in_flight)
        is_coming = any(load.moves_page_of(tree_key, first, len(tree_key)) for load in loads_in_flight)
        if source.stop > usable and not is_coming:
            with suppress(OutOfSlotsError):
                target = cache.open_target(tree_key, first, live_from=source.live_from)
        if target is None:
            self.source.unlock(source.lock)
            return None
        target.filling_for = ""
        load = self._add(source, target, tree_key, target.num_published_pages * self._page_size)
        if source.state is not None:
            self._add_spare(load)
        return load

    def _add(self, source: Source, lease: LeaseRecord, key: RadixKey, first: int) -> Move:
        load = new_move(self.source, self.pool, source, lease, key, first)
        self._in_flight[load] = None
        return load

    def _add_spare(self, load: Move) -> None:
        """Take a second state slot for a load, which the tree gets; without one its state is not published."""
        try:
            load.spare = self.pool.cache.open_target(load.key[:0], 0, with_state=True)
        except OutOfSlotsError:
            self.counts.states_not_published += 1
            return
        assert load.spare.state_slot is not None
        load.target_states += (load.spare.state_slot,)

    # ---------------------------------------------------------------- the end

    def end_unplaced(self, lease: LeaseRecord) -> None:
        """End a new lease for which `prepare` found no room. Its session may open another one of the same id.

        Nothing has changed, so pressure is not notified: its observer would try the request again and again.
        """
        cache = self.pool.cache
        cache.leases.begin_fill(lease)
        cache.take_back_fill(lease, notify=False)

    def abandon(self, load: Move) -> None:
        """Take the lease that a load fills from its request, which begins again. The load goes on for no request."""
        assert load in self._in_flight
        _take_back_loads(load.target)
        self.pool.cache.give_up_fill(load.target)

    def complete(self, load: Move, num_pages: int, is_whole: bool | None = None) -> Filled:
        """End a load: publish the copied pages, and hand its lease out. The copier no longer uses its slots.

        Nothing of a retired namespace is published. A part of a load with window KV or a state is of no use, so nothing
        of it is published either.

        Args:
            num_pages, is_whole: as in `Move.usable`.
        """
        assert load in self._in_flight, "the load has ended"
        del self._in_flight[load]
        self.pool.num_unlocks += 1
        num_pages, is_whole = load.usable(num_pages, is_whole)
        self.counts.failed += (load.num_pages - num_pages) * self._page_size
        try:
            return self._hand_out(load, load.key[: load.first + num_pages * self._page_size], is_whole)
        finally:
            if load.spare is not None:
                self.pool.cache.end_quietly(load.spare)
            self.source.unlock(load.source)

    def _hand_out(self, load: Move, key: RadixKey, is_whole: bool) -> Filled:
        """Publish the loaded pages of a key, and hand the lease out if its request waits for it."""
        cache, lease, spare = self.pool.cache, load.target, load.spare
        is_wanted = bool(lease.filling_for)
        if load.is_retired:
            _take_back_loads(lease)
            cache.take_back_fill(lease)
            return Filled(0, None, is_wanted)
        slot = spare.state_slot if spare is not None and is_whole else None
        cache.publish_copy(lease, key, load.live_from, slot)
        if spare is not None and slot is not None:
            spare.state_slot = None
        if load.source_state is not None and not is_whole:
            cache.reload_state(lease)
        num_loaded = len(key) - load.first
        if not is_wanted:
            self.counts.loaded_unused += num_loaded
            cache.end_quietly(lease, is_use=True)
            return Filled(num_loaded)
        self.counts.loaded += num_loaded
        lease.loads += ((self.counts, num_loaded),)
        if self.source.medium == "STORAGE":
            lease.disk_loaded_len += num_loaded
        cache.hand_out(lease, len(key))
        return Filled(num_loaded, lease)


def _take_back_loads(lease: LeaseRecord) -> None:
    """Count earlier loads of a lease as unused, if its request begins again."""
    if lease.filling_for:
        for counts, num_loaded in lease.loads:
            counts.loaded -= num_loaded
            counts.loaded_unused += num_loaded
