"""`InstantTiers`: the tiers below the index-only cache of a replay, between which moves take no time."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from raydix.actors.tiers.tier_stats import move_stats
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


class InstantTiers:
    """A host tier, a disk tier or both below an index-only cache without windows and states.

    A node is written to the tier below just before it is evicted. A disk with `admit="second_use"` gets a prefix when
    it is used for the second time. A lease is filled in the call that opens it.

    Args:
        core: the cache, which must be empty.
        tiers: at least one tier.
    """

    def __init__(self, core: KVCache, tiers: TierConfigs) -> None:
        self._core = core
        self._loads: dict[str, Loads] = {}
        self._writes: dict[str, list[Writes]] = {}
        self._tiers = [Tier(DEVICE, "GPU", core)]
        if tiers.host is not None:
            self._add("host", "CPU", tiers.host.num_slots, tiers.host.policy, writes_victims=True)
        if tiers.disk is not None:
            assert tiers.disk.num_slots is not None, "a disk without KV has no bytes"
            self._add("disk", "STORAGE", tiers.disk.num_slots, "lru", writes_victims=tiers.disk.admit == "all")
            for writes in self._writes["disk"]:
                writes.batch_pages = min(writes.batch_pages, _MOST_PAGES)

    def _add(self, name: str, medium: str, num_slots: int, policy: str, *, writes_victims: bool) -> None:
        """Add the next lower tier; if it does not get what the tier above evicts, it gets what is used twice."""
        core, above = self._core, self._tiers[-1]
        allocator = TokenToKVPoolAllocator(num_slots, core.page_size)
        tree = RadixCache(core.page_size, None, allocator, eviction_policy=policy)
        tier = Tier(name, medium, KVCache(tree, allocator))
        self._loads[name] = Loads(tier, self._tiers[0])
        self._writes[name] = [Writes(source, tier, are_neighbours=source is above) for source in self._tiers]
        self._tiers.append(tier)
        if writes_victims:
            above.cache.watch_victims(partial(_write_victim, self._writes[name][-1]))
        else:
            num_pages = sum(tier.cache.num_slots for tier in self._tiers) // core.page_size
            core.observers.append(UseCounter(core, SecondUse(num_pages), None, partial(self._write_prefix, name)))

    def moved(self) -> dict[str, Moved]:
        """Return the tokens that were moved from and to each tier, by its name."""
        counts = {name: move_stats(loads, self._writes[name]) for name, loads in self._loads.items()}
        return {
            name: Moved(moved["tokens_loaded"], moved["tokens_written"], moved["tokens_dropped"])
            for name, moved in counts.items()
        }

    def acquire(self, lease_id: str, session_id: str, key: RadixKey) -> LeaseRecord:
        """Open a lease with the prefix that the tiers have.

        Raises:
            OutOfSlotsError: too few slots are free or evictable.
        """
        look_up, held = LookUp(key), list[tuple[KVCache, LeaseRecord]]()
        for tier in self._tiers[1:]:
            # The lease evicts nodes, and so do their writes: they may not evict the prefix that is about to be loaded.
            if stop := look_up.length(tier):
                held.append((tier.cache, tier.cache.open_target(key[:stop], stop)))
        try:
            lease = self._core.acquire(lease_id, session_id, key)
            for loads in self._loads.values():
                if (load := loads.prepare(lease, look_up)) is not None:
                    loads.complete(load, load.num_pages)
        finally:
            for cache, target in held:
                cache.end_quietly(target)
        return lease

    def _write_prefix(self, name: str, key: RadixKey) -> None:
        """Write a prefix to a tier, in parts, from the tier that has most of it."""
        stop = 0
        while stop < len(key):
            lengths = [writes.upper.cache.radix.cached_lens(key)[0] for writes in self._writes[name]]
            longest = max(lengths)
            writes = self._writes[name][lengths.index(longest)]
            if writes.lower.longest_prefix(key) >= longest:
                return
            node, _ = writes.upper.cache.radix.locate(key, longest)
            if (move := writes.prepare_prefix(node, writes.batch_pages)) is None:
                return
            writes.complete(move, move.num_pages)
            stop = move.stop


def _write_victim(writes: Writes, node: TreeNode, component: Component | None = None) -> None:
    """Write what the tier below lacks of a node's path, in parts: see `KVCache.watch_victims`.

    The node has left the queue of candidates already, so that it cannot be locked. What has no room is counted.
    """
    while (found := writes.missing(node)) is not None:
        stop = writes.stop_within(found, writes.batch_pages)
        key = found.path.key[:stop]
        try:
            target = writes.lower.cache.open_target(key, found.first)
        except OutOfSlotsError:
            writes.count_lost(node, [node])
            return
        writes.publish(target, key, stop, is_whole=False)
