"""Moves of pages between a pool and the places below it, and the rules that all of them keep.

    device pool                                    host pool
      a node, locked        ── write ──────────>     private pages, then published
      a lease being filled  <──────────── load ──    a prefix, locked

`Writes` copies down what eviction would drop next, and evicts nothing itself. `Loads` fills the private pages of a
lease before its session gets the lease. Both `prepare` moves and `complete` them. The leases of a move stand under the
session `TIERS` of both caches, so each pool's accounting holds as it is; a lease that is being filled names its session
in `filling_for`.

A pool above a host and a disk has two `Loads`, from either, and three `Writes`: between the neighbours, and from the
pool to the disk. Each lease of a move belongs to the object that has opened it.

Rules, checked by `check_all`:

1. Each tier's own rules hold.
2. The leases under `TIERS` are exactly the ends of the moves in flight. Without a move there are none.
3. No two moves into one tier copy the same page of a prefix, unless one is of a retired namespace.
4. The source of a move is locked until `complete` or `release_source`, and its target private until `complete`.
5. A lease that is being filled was not handed out: no session has it. For a prefetch, none will.
6. Every reused token is counted once: at most `tokens_reused` were loaded.

`complete` publishes a prefix of the move, of pages that the copier has confirmed, and nothing of a retired namespace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from raydix.cache_core.leases.lease_table import TIERS, LeaseRecord
from raydix.cache_core.tiers.loads import Loads
from raydix.cache_core.tiers.move import Move
from raydix.cache_core.tiers.tier import Tier
from raydix.cache_core.tiers.writes import Writes


def check_all(all_loads: Sequence[Loads], all_writes: Sequence[Writes]) -> None:
    """Raise AssertionError if a rule of this module is broken. O(n).

    Args:
        all_loads, all_writes: all of a cache.
    """
    moves = [move for loads in all_loads for move in loads.in_flight]
    moves += [move for writes in all_writes for move in writes.in_flight]
    tiers = [tier for writes in all_writes for tier in (writes.upper, writes.lower)]
    tiers += [loads.pool for loads in all_loads]
    for tier in dict.fromkeys(tiers):
        tier.cache.check_invariants()
        ends = {lease.lease_id for move in moves for place, lease in _leases_of(move) if place is tier}
        open_leases = {lease.lease_id for lease in tier.cache.leases.of_session(TIERS)}
        assert open_leases == ends, f"rule 2 at tier {tier.name}: {open_leases ^ ends}"
        loaded = sum(loads.counts.loaded for loads in all_loads if loads.pool is tier)
        reused = tier.cache.counters
        assert loaded <= reused.tokens_reused + reused.tokens_reused_resumed, f"rule 6 at tier {tier.name}: {loaded=}"
    for move, other in combinations([move for move in moves if not move.is_retired], 2):
        is_same = move.target_tier is other.target_tier and move.moves_page_of(other.key, other.first, other.stop)
        assert not is_same, f"rule 3: both moves copy a page of {other.key}"
    for move in moves:
        _check_ends(move)


def _leases_of(move: Move) -> Iterator[tuple[object, LeaseRecord]]:
    """Yield the leases of a move, each with its tier."""
    if isinstance(move.source, LeaseRecord) and not move.is_released:
        yield move.source_tier, move.source
    yield move.target_tier, move.target
    if move.spare is not None:
        yield move.target_tier, move.spare


def _check_ends(move: Move) -> None:
    page, tier, source = move.target_tier.page_size, move.source_tier, move.source
    if isinstance(tier, Tier) and isinstance(source, LeaseRecord) and not move.is_released:
        read = source.starts[: source.num_published_pages][move.first // page : move.stop // page]
        is_locked = read.tolist() == move.source_starts.tolist()
        if len(move.source_windows):
            windows = tier.cache.allocator.swa_starts(move.source_starts[-len(move.source_windows) :])
            is_locked = is_locked and windows.tolist() == move.source_windows.tolist()
        assert is_locked, f"rule 4: the source of {move.key} is not locked"
    written = move.target.private_starts[: move.num_pages]
    assert written.tolist() == move.target_starts.tolist(), f"rule 4: the target of {move.key} is not private"
    assert (move.target.filling_for is not None) == move.is_load, "rule 5: only a load fills a lease of a session"
