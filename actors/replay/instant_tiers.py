"""`InstantTiers`: the tiers below the index-only cache of a replay, between which moves take no time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from raydix.cache_core import KVCache, OutOfSlotsError, RadixCache, RadixKey, TokenToKVPoolAllocator
from raydix.cache_core.components.component import Component
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tiers.loads import Loads
from raydix.cache_core.tiers.look_up import LookUp
from raydix.cache_core.tiers.second_use import SecondUse
from raydix.cache_core.tiers.tier import Tier
from raydix.cache_core.tiers.use_counter import UseCounter
from raydix.cache_core.tiers.writes import Writes
from raydix.cache_core.tree.tree_node import TreeNode
from raydix.schemas import DiskConfig, HostConfig
from raydix.schemas.requests import DEVICE

_MOST_PAGES = 256  # of one write to a disk


class TierConfigs(NamedTuple):
    """The configurations of the tiers below a pool; None: there is no such tier."""

    host: HostConfig | None = None
    disk: DiskConfig | None = None


class Moved(NamedTuple):
    """Tokens that were moved from and to a tier; those that were dropped have left the tier above unwritten."""

    loaded: int
    written: int
    dropped: int


class _Tier(NamedTuple):
    """The loads from a tier, and the writes to it."""

    loads: Loads
    writes: Sequence[Writes]


class InstantTiers:
    """A host tier, a disk tier or both below an index-only cache.

    A node is written to the tier below just before it is evicted. A disk with `admit="second_use"` gets a prefix when
    it is used for the second time. A lease is filled in the call that opens it.

    Args:
        core: the cache, which must be empty.
        tiers: at least one tier.
    """

    def __init__(self, core: KVCache, tiers: TierConfigs) -> None:
        self._core = core
        self._tiers: dict[str, _Tier] = {}
        device = Tier(DEVICE, "GPU", core)
        sources = [device]
        if tiers.host is not None:
            host = Tier("host", "CPU", _make_cache(core, tiers.host.num_slots, tiers.host.policy))
            writes = Writes(device, host)
            core.watch_victims(VictimWrites(writes))
            self._tiers[host.name] = _Tier(Loads(host, device), [writes])
            sources.append(host)
        if tiers.disk is not None:
            assert tiers.disk.num_slots is not None, "a disk without KV has no bytes"
            disk = Tier("disk", "STORAGE", _make_cache(core, tiers.disk.num_slots, "lru"))
            to_disk = [Writes(source, disk, are_neighbours=source is sources[-1]) for source in sources]
            for writes in to_disk:
                writes.batch_pages = min(writes.batch_pages, _MOST_PAGES)
            self._tiers[disk.name] = _Tier(Loads(disk, device), to_disk)
            if tiers.disk.admit == "all":
                sources[-1].cache.watch_victims(VictimWrites(to_disk[-1]))
            else:
                num_slots = sum(tier.cache.num_slots for tier in (*sources, disk))
                core.observers.append(UseCounter(core, SecondUse(num_slots // core.page_size), None, self._write))

    def moved(self) -> dict[str, Moved]:
        """Return the tokens that were moved from and to each tier, by its name."""
        return {
            name: Moved(
                tier.loads.counts.loaded,
                sum(writes.counts.written for writes in tier.writes),
                sum(writes.counts.dropped for writes in tier.writes),
            )
            for name, tier in self._tiers.items()
        }

    def acquire(self, lease_id: str, session_id: str, key: RadixKey) -> LeaseRecord:
        """Open a lease with the prefix that the tiers have.

        Raises:
            OutOfSlotsError: too few slots are free or evictable.
        """
        with ExitStack() as held:
            for tier in self._tiers.values():
                held.enter_context(holding(tier.writes[0].lower.cache, key))
            lease = self._core.acquire(lease_id, session_id, key)
            for tier in self._tiers.values():
                if (load := tier.loads.prepare(lease, LookUp(key))) is not None:
                    tier.loads.complete(load, load.num_pages)
        return lease

    def _write(self, key: RadixKey) -> None:
        """Write a prefix to the disk, in parts, from the tier that has most of it."""
        to_disk, stop = self._tiers["disk"].writes, 0
        while stop < len(key):
            lengths = [writes.upper.cache.radix.cached_lens(key)[0] for writes in to_disk]
            longest = max(lengths)
            if to_disk[0].lower.cache.radix.cached_lens(key)[0] >= min(longest, len(key)):
                return
            writes = to_disk[lengths.index(longest)]
            move = writes.prepare_prefix(writes.upper.cache.radix.locate(key, longest)[0], writes.batch_pages)
            if move is None:
                return
            writes.complete(move, move.num_pages)
            stop = move.stop


class VictimWrites:
    """Writes each node of a tier to the one below just before it is evicted: see `KVCache.watch_victims`.

    Args:
        writes: between the two tiers.
    """

    def __init__(self, writes: Writes) -> None:
        self._writes = writes

    def __call__(self, node: TreeNode, component: Component | None = None) -> None:
        """Write what the lower tier lacks of a node's path; count what it has no room for."""
        ends = self._writes.ends_of(node, component)
        self._writes.count_lost(node, [end for end in ends if not self._write(end)])

    def _write(self, end: TreeNode) -> bool:
        """Write what the lower tier lacks of a path, in parts; return False if that has no room.

        The node has left the queue of candidates already, so that it cannot be locked.
        """
        writes = self._writes
        upper, lower = writes.upper.cache, writes.lower.cache
        while (found := writes.missing(end)) is not None:
            stop = writes.stop_within(found, writes.batch_pages)
            is_whole = stop == found.node.end
            state = upper.tree.state_at(found.node) if is_whole else None
            key = found.path.key[:stop]
            try:
                target = lower.open_target(key, found.first, state is not None, found.live_from)
            except OutOfSlotsError:
                writes.counts.writes_refused += 1
                return False
            writes.publish(target, key, found.live_from, is_whole)
            if is_whole:
                break
        return True


@contextmanager
def holding(lower: KVCache, key: RadixKey, limit: int | None = None) -> Iterator[None]:
    """Keep the prefix that a lower tier has of a request's key, while the request's lease is opened.

    The lease may evict nodes of the tier above. These are written first, so the lower tier evicts, too: the prefix that
    is about to be loaded may be its oldest. No use is noted.

    Args:
        limit: the request reuses at most so many tokens.
    """
    tree_key = lower.tree_key(key)
    stop = lower.radix.cached_lens(tree_key[:limit])[0]
    if not stop:
        yield
        return
    held = lower.open_target(tree_key[:stop], stop)
    try:
        yield
    finally:
        lower.end_quietly(held)


def _make_cache(core: KVCache, num_slots: int, policy: str) -> KVCache:
    """Return the empty cache of a tier below a cache."""
    allocator = TokenToKVPoolAllocator(num_slots, core.page_size)
    return KVCache(RadixCache(core.page_size, None, allocator, eviction_policy=policy), allocator)
