"""`DueWrites`: which KV of a pool is written to the host tier, if that takes pages at their second use alone."""

from __future__ import annotations

from collections.abc import Callable

from raydix.actors.tiers.due_prefixes import DuePrefixes
from raydix.cache_core import RadixKey
from raydix.cache_core.tiers.move import Move
from raydix.cache_core.tiers.moves import Moves, Plan
from raydix.cache_core.tiers.second_use import SecondUse
from raydix.cache_core.tiers.use_counter import UseCounter

_LOOKED_AT = 16  # prefixes that one plan looks up: about 1 ms


class DueWrites(UseCounter):
    """Counts the uses of a pool's pages, and plans the writes of prefixes that are due.

    A disk tier has a counter of its own, as that counts the uses of bound models alone.

    Args:
        moves: between the pool and the tier.
        wake: called when a prefix waits to be written.
        is_instant: a due prefix is written in the call in which it is due, as there are no tensors.
    """

    def __init__(self, moves: Moves, wake: Callable[[], object], *, is_instant: bool) -> None:
        upper = moves.upper.cache
        pages = (upper.num_slots + moves.lower.cache.num_slots) // upper.page_size
        super().__init__(upper, SecondUse(pages), None, self._write_now if is_instant else self._offer)
        self._moves = moves
        self._wake = wake
        self._due = DuePrefixes()
        self._begun = DuePrefixes()  # those of which a part is being written
        upper.observers.append(self)

    def _write_now(self, key: RadixKey) -> None:
        while (move := self._begin(key, self._moves.batch_pages)) is not None:
            self._moves.finish(move, move.num_pages)
            if move.stop >= len(key):
                break

    def _offer(self, key: RadixKey) -> None:
        self._due.offer(key)
        self._wake()

    def plan(self, _reserve: int) -> Plan:
        """Begin to write what is due, the prefix used last first: one batch, as `Moves.plan_demotion` does."""
        found, budget = list[Move](), self._moves.batch_pages
        for _ in range(_LOOKED_AT):
            if (key := self._due.hottest()) is None:
                return Plan(found, True)
            if budget <= 0:
                break
            self._due.take(key)
            refused = self._moves.counts.writes_refused
            move = self._begin(key, budget)
            if move is not None:
                found.append(move)
                budget -= max(1, move.num_pages)
            is_refused = self._moves.counts.writes_refused > refused
            if move is not None or (not is_refused and any(not flying.is_load for flying in self._moves.in_flight)):
                self._begun.offer(key)
        return Plan(found, False)

    def _begin(self, key: RadixKey, num_pages: int) -> Move | None:
        """Begin to write about so many pages of a due prefix; None: the tier has it or no room, or it has left."""
        upper, lower = self._moves.upper.cache.radix, self._moves.lower.cache.radix
        (stop, full), (known, full_below) = upper.cached_lens(key), lower.cached_lens(key)
        if known >= stop:
            self._moves.counts.dropped += len(key) - min(len(key), max(full, full_below))
            return None
        return self._moves.plan_write(upper.locate(key, stop)[0], num_pages)

    def retired(self, is_meant: Callable[[str | None], bool]) -> None:
        """Forget the uses and the prefixes of namespaces. Writes in flight publish nothing of them."""
        super().retired(is_meant)
        for prefixes in (self._due, self._begun):
            prefixes.forget(is_meant)

    def end_writes(self, *, has_failed: bool) -> None:
        """Note that writes have ended. What they left out is due again, unless a copy failed."""
        begun, self._begun = self._begun, DuePrefixes()
        if not has_failed:
            for key in begun:
                self._due.offer(key)
