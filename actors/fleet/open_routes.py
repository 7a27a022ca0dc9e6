"""`OpenRoutes`: the tokens that wait at each cache, and the pages that a router's own requests will publish there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from raydix.cache_core import PageIndex
from raydix.cache_core.fleet_index.page_hashes import Hashes
from raydix.schemas import CacheLoad

_NONE: Hashes = np.empty(0, np.int64)
_SEEN_S = 0.1  # A request without pages of its own counts as part of its cache's load after this time.
_STORED_S = 1.0  # The events of a computed prompt arrive in this time, or it was not published.


@dataclass(eq=False, slots=True)
class _Sent:
    """A request that was sent to a cache."""

    place: _Place
    hashes: Hashes
    uncached: int  # tokens
    last_page: int | None  # the page that shows in the cache's events; None: it has none of its own
    is_pending: bool = True  # its tokens wait
    is_promised: bool = True  # its pages are promised in the index
    is_seen: bool = False  # the cache's load includes it


@dataclass(eq=False, slots=True)
class _Place:
    """A column's counts."""

    column: int
    is_open: bool = True
    load: CacheLoad = field(default_factory=CacheLoad)
    own: int = 0  # tokens of this router's pending requests
    unseen: int = 0  # tokens of this router's pending requests that the cache's load does not include yet
    reported: int = 0  # tokens of all routers' requests, as the cache's load includes them
    num_pending: int = 0  # number of this router's pending requests
    awaited: dict[int, list[_Sent]] = field(default_factory=dict)  # page that shows in the cache's events -> requests


class OpenRoutes:
    """A router's requests without a first token, and the pending tokens of each cache.

    The pending tokens of a cache are the tokens that it reports, of all routers' requests with a lease there, and the
    tokens of this router's requests that it cannot have reported yet. They are at least as many as this router's own
    pending tokens.

    Each request's pages are promised in the index while it is pending. If it was computed, they stay promised until the
    cache's events name them, one second at most. Nothing runs between calls: every call first ends what is too old.
    """

    def __init__(self, index: PageIndex, ttl_s: float, clock: Callable[[], float], load_cost: float = 1.0) -> None:
        """Start without caches.

        Args:
            index: where the pages are promised.
            ttl_s: the longest life of a request here.
            clock: returns the time in seconds; it never goes back.
            load_cost: of a token that a cache loads from a tier below its pool, as a share of computing it.
        """
        self._index = index
        self._ttl_s = ttl_s
        self._clock = clock
        self._load_cost = load_cost
        self._places: dict[int, _Place] = {}
        self._by_age: deque[tuple[float, _Sent]] = deque()  # (time of its end, request)
        self._to_see: deque[tuple[float, _Sent]] = deque()  # (time at which it counts as seen, request)
        self._to_store: deque[tuple[float, _Sent]] = deque()  # (time at which its promise ends, request)

    # ---------------------------------------------------------------- caches

    def add_cache(self, column: int) -> None:
        """Begin to count at a column."""
        assert column not in self._places
        self._places[column] = _Place(column)

    def drop_cache(self, column: int) -> None:
        """End every request at a column. The index drops the column itself."""
        self._places.pop(column).is_open = False

    def note_load(self, column: int, load: CacheLoad, pages: Hashes) -> None:
        """Note a cache's load, and the pages that came with it: requests with such pages are part of the load."""
        place = self._places[column]
        place.load = load
        saved = int((1 - self._load_cost) * load.loading_tokens)  # tokens
        place.reported = load.waiting_tokens + load.unpublished_tokens - saved
        if place.awaited:
            for page in place.awaited.keys() & set(pages.tolist()):
                for sent in place.awaited.pop(page):
                    self._see(sent)

    # ---------------------------------------------------------------- requests

    def add(self, column: int, hashes: Hashes, num_expected: int, uncached: int) -> Callable[[bool], None]:
        """Count a request at a column, and promise its pages there.

        Args:
            column: of the cache.
            hashes: of the prompt's pages.
            num_expected: leading pages that were stored, pending or promised there before.
            uncached: tokens of the prompt to compute.

        Returns:
            A function that ends the request; its argument is whether the prompt was computed. Idempotent.
        """
        place = self._places[column]
        sent = _Sent(place, hashes, uncached, int(hashes[-1]) if num_expected < len(hashes) else None)
        place.own += uncached
        place.unseen += uncached
        place.num_pending += 1
        self._index.promise(column, hashes)
        now = self._clock()
        self._by_age.append((now + self._ttl_s, sent))
        if sent.last_page is None:
            self._to_see.append((now + _SEEN_S, sent))
        else:
            place.awaited.setdefault(sent.last_page, []).append(sent)
        return lambda computed: self._end(sent, computed)

    def pending(self, column: int) -> int:
        """Return the tokens that wait at a column, or are computed there."""
        place = self._places[column]
        return max(place.own, place.reported + place.unseen)

    def num_pending(self, column: int) -> int:
        """Return the number of this router's pending requests at a column."""
        return self._places[column].num_pending

    def load(self, column: int) -> CacheLoad:
        """Return the load that the cache of a column has reported last."""
        return self._places[column].load

    def expire(self) -> None:
        """End what has been here for too long."""
        now = self._clock()
        while self._by_age and self._by_age[0][0] <= now:
            self._end(self._by_age.popleft()[1], False)
        while self._to_see and self._to_see[0][0] <= now:
            self._see(self._to_see.popleft()[1])
        while self._to_store and self._to_store[0][0] <= now:
            self._withdraw(self._to_store.popleft()[1])

    def _see(self, sent: _Sent) -> None:
        """Note that the cache's load includes a request, or has included it."""
        if not sent.is_seen and sent.is_pending:
            sent.place.unseen -= sent.uncached
        sent.is_seen = True
        if not sent.is_pending:
            self._withdraw(sent)

    def _end(self, sent: _Sent, computed: bool) -> None:
        place = sent.place
        if not sent.is_pending:
            return
        sent.is_pending = False
        place.own -= sent.uncached
        place.num_pending -= 1
        if not sent.is_seen:
            place.unseen -= sent.uncached
            if computed and sent.last_page is not None:
                self._to_store.append((self._clock() + _STORED_S, sent))
                return
        self._withdraw(sent)

    def _withdraw(self, sent: _Sent) -> None:
        """End the promise of a request that is not pending. Idempotent."""
        assert not sent.is_pending
        place = sent.place
        if not sent.is_promised:
            return
        sent.is_promised = False
        # The entry itself stays until its time is over, without the pages.
        hashes, sent.hashes = sent.hashes, _NONE
        if not place.is_open:
            return
        self._index.withdraw(place.column, hashes)
        if sent.last_page is not None and (waiting := place.awaited.get(sent.last_page)) and sent in waiting:
            waiting.remove(sent)
            if not waiting:
                del place.awaited[sent.last_page]
