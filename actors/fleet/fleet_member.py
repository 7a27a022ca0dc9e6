"""`FleetMember`: a destination of requests, which is a cache or the caches of a tensor-parallel engine's ranks."""

from __future__ import annotations

from collections.abc import Mapping

from raydix.actors.cluster.rank_names import group_ranks, missing_ranks, rank_name
from raydix.actors.fleet.cache_feed import CacheFeed
from raydix.actors.fleet.membership import CachePlace


class FleetMember:
    """A destination of requests: one cache, or the caches of all ranks of a tensor-parallel engine.

    Each rank has a part of every page. So such a member gets requests only while all its ranks can, and its hit is the
    least of theirs.

    Attributes:
        name: of the cache; of the caches NAME-tp0, NAME-tp1 and so on it is NAME.
        feeds: of the caches, in the order of the ranks.
        num_routes: requests that were routed here.
        num_refused: routed requests that the cache refused, or that it did not answer.
        missed_tokens: stored tokens that the index promised and the cache did not have, of all leases of the fleet.
    """

    def __init__(self, name: str, feeds: Mapping[int, CacheFeed], lost: frozenset[int] = frozenset()) -> None:
        """Make a member.

        Args:
            feeds: by rank, in ascending order; of one cache, rank 0 alone.
            lost: ranks that had a cache until now.
        """
        self.name = name
        self.feeds = tuple(feeds.values())
        self.num_routes = self.num_refused = self.missed_tokens = 0
        self._ranks = frozenset(feeds)
        self._missing = lost | frozenset(missing_ranks(feeds))

    @property
    def columns(self) -> tuple[int, ...]:
        """The columns of the caches that can get requests, in the order of the ranks."""
        return tuple(feed.column for feed in self.feeds if feed.column is not None)

    @property
    def cause(self) -> str:
        """Why it gets no requests; empty: it does."""
        if self._missing:
            return f"{rank_name(self.name, min(self._missing))}, the cache of one of its ranks, does not run"
        for feed in self.feeds:
            if feed.cause:
                return feed.cause if feed.name == self.name else f"{feed.name}: {feed.cause}"
        return ""

    def places(self) -> list[CachePlace]:
        """Return where each of its caches runs, all under the member's name."""
        return [feed.place._replace(name=self.name) for feed in self.feeds if feed.place is not None]

    def with_feeds(self, feeds: Mapping[int, CacheFeed]) -> FleetMember:
        """Return the member of the caches that have its name now: itself if they are the same.

        Ranks that are gone are missing, unless the engine was replaced as a whole by one with fewer ranks.
        """
        is_replaced = set(self.feeds).isdisjoint(feeds.values())
        lost = frozenset() if is_replaced else (self._ranks | self._missing) - feeds.keys()
        later = FleetMember(self.name, feeds, lost)
        return self if (later.feeds, later._missing) == (self.feeds, self._missing) else later


def members_of(feeds: Mapping[str, CacheFeed], earlier: Mapping[str, FleetMember]) -> dict[str, FleetMember]:
    """Return the members that the caches are, by name.

    Args:
        feeds: by the name of the cache.
        earlier: the members before caches came or went.
    """
    groups = group_ranks(feeds)
    grouped = {cache for caches in groups.values() for cache in caches.values()}
    by_rank = {name: {rank: feeds[cache] for rank, cache in caches.items()} for name, caches in groups.items()}
    by_rank.update((name, {0: feed}) for name, feed in feeds.items() if name not in grouped)
    return {
        name: earlier[name].with_feeds(ranks) if name in earlier else FleetMember(name, ranks)
        for name, ranks in sorted(by_rank.items())
    }
