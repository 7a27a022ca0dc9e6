"""`TierFeeds`: the events of each tier of a cache, for its readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from raydix.actors.service.event_feed import EventFeed
from raydix.actors.service.event_readers import EventReaders
from raydix.actors.service.sliced_snapshot import sliced_snapshot
from raydix.actors.transport.validation import unknown_tier
from raydix.cache_core import LeasedCache
from raydix.schemas import CacheConfig, CacheLoad, InvalidRequest, NextEvents, PackedEvents, SlimEventSnapshot
from raydix.schemas.events import BlockGroup

MOST_PAGES = 256  # the most pages of a tier below the pool that a snapshot takes in one step: 2 ms
_NO_EVENTS = "this cache publishes no events: start it with CacheConfig(events='full') or events='slim'"


class _TierFeed(NamedTuple):
    """The events of one tier."""

    feed: EventFeed
    readers: EventReaders
    cache: LeasedCache


class TierFeeds:
    """The feed of each tier, by the tier's name. Without `CacheConfig.events` there is none.

    Each tier numbers its own events. The cache's load is in the slim events of the first tier, as its leases are there.

    Args:
        config: of the cache.
        epoch: the life of the cache that the numbers belong to.
        load: returns the cache's load.
        clock: seconds, of any origin; by it readers are late.
    """

    def __init__(
        self, config: CacheConfig, epoch: str, load: Callable[[], CacheLoad], clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._epoch = epoch
        self._load = load
        self._clock = clock
        self._tiers: dict[str, _TierFeed] = {}  # name -> tier, the pool first
        self._first: EventFeed | None = None

    def add(self, name: str, medium: str, cache: LeasedCache) -> None:
        """Publish the events of one more tier; no effect if the cache publishes none.

        Args:
            medium: where its KV is, for full events: "GPU", "CPU" or "STORAGE".
            cache: the tier's, which has no pages yet.
        """
        config, epoch = self._config, self._epoch
        if not config.events:
            return
        if config.events == "slim":
            load = self._load if self._first is None else CacheLoad
            feed = EventFeed(epoch, config.page_size, None, config.stride_tokens, config.bigram, load)
            cache.publish_slim_events_to(feed, config.stride_tokens // config.page_size)
        else:
            feed = EventFeed(epoch, config.page_size, medium, groups=_groups_of(config))
            cache.publish_events_to(feed)
        self._first = self._first or feed
        self._tiers[name] = _TierFeed(feed, EventReaders(self._clock), cache)

    def feed(self, tier: str) -> EventFeed:
        """Return the feed of a tier.

        Raises:
            InvalidRequest: this cache publishes no events, or has no such tier.
        """
        return self._tier(tier).feed

    def _tier(self, name: str) -> _TierFeed:
        tier = self._tiers.get(name)
        if tier is not None:
            return tier
        if not self._tiers:
            raise InvalidRequest(_NO_EVENTS)
        raise unknown_tier(name, self._tiers)

    # ---------------------------------------------------------------- readers

    async def next_events(self, request: NextEvents) -> PackedEvents:
        """Return the events of a tier that a reader has not seen, or none after its timeout.

        Raises:
            InvalidRequest: this cache publishes no events, or has no such tier.
        """
        tier = self._tier(request.tier)
        tier.readers.ask(request.session_id, request.after_seq, tier.feed.seq)
        try:
            return await tier.feed.next_batch(request.after_seq, request.timeout_s)
        finally:
            tier.readers.answer(request.session_id)

    def snapshot(self, tier: str) -> PackedEvents | SlimEventSnapshot:
        """Return a reader's starting point in a tier.

        Raises:
            InvalidRequest: this cache publishes no events, or has no such tier.
        """
        feed, _, cache = self._tier(tier)
        return feed.snapshot(cache.resident_pages(), cache.pending_pages(), cache.usable_ends())

    def is_large(self, tier: str) -> bool:
        """Return whether a snapshot of a tier is to be made in slices: of one below the pool with many pages.

        Raises:
            InvalidRequest: as of `snapshot`.
        """
        feed, _, cache = self._tier(tier)
        return feed is not self._first and cache.total_size() > MOST_PAGES * self._config.page_size

    async def sliced_snapshot(self, tier: str) -> PackedEvents | SlimEventSnapshot:
        """Return a reader's starting point in a tier below the pool, made in slices."""
        feed, _, cache = self._tier(tier)
        return await sliced_snapshot(feed, cache)

    def num_stale(self) -> int:
        """Return the readers that are behind, as `EventReaders.num_stale` counts them; each tier has its own."""
        return sum(tier.readers.num_stale(tier.feed.seq) for tier in self._tiers.values())

    def end_session(self, session_id: str) -> None:
        """Forget the readers of a session that has ended, and wake them."""
        for tier in self._tiers.values():
            tier.readers.forget(session_id)
            tier.feed.wake()

    # ---------------------------------------------------------------- the cache's life

    def note_load(self) -> None:
        """Have waiting readers notice a changed load, soon."""
        if self._first is not None:
            self._first.note_load()

    def change_loop(self) -> None:
        """Forget the readers that waited on a loop that was closed."""
        for tier in self._tiers.values():
            tier.feed.change_loop()

    def close(self) -> None:
        """End every wait, and let none begin."""
        for tier in self._tiers.values():
            tier.feed.close()


def _groups_of(config: CacheConfig) -> tuple[BlockGroup, ...]:
    """Return the kinds of data of a cache that full events name, as `GroupEvents` numbers them; empty: there is one."""
    groups = [BlockGroup("full_attention")]
    if config.sliding_window_size is not None:
        groups.append(BlockGroup("sliding_window", config.sliding_window_size))
    if config.kind == "mamba":
        groups.append(BlockGroup("mamba"))
    return tuple(groups) if len(groups) > 1 else ()
