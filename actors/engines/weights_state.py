"""`WeightsState`: whether an engine may use the cache with the weights that it has now.

              ┌──────────── reset: the cache is in another generation ─────────────┐
              v                                                                    │
    joined ── reset ──> changing ── the cache is in the engine's generation ──> detached

A connector learns of new weights by a reset, which does not name them. The trainer names them to the
cache: `set_weights(label)`. A reset of an engine that is behind the cache joins the current generation. A reset of an
engine that is in the current generation may have changed its weights to others: the engine is detached.

An engine is behind if the cache has begun another generation since the engine's latest reset, or since the engine was
bound, or has found other weights in the cache. A label alone shows nothing: an engine that was started again with a
checkpoint's weights, and is reset before a push, must not join later weights.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence

from raydix.actors.client.loop_thread import LoopThread
from raydix.actors.engines.cache_link import CacheLink, CurrentWeights, close_links
from raydix.actors.engines.transfer_counts import TransferCounts
from raydix.schemas import CacheError

logger = logging.getLogger(__name__)

_WARN_AFTER_S = 60.0  # time from the first request that is served detached to a warning
_POLL_S = 0.02  # time between two looks whether the links are bound
_ADVICE = (
    "it neither reads nor feeds the cache until weights are named: pause all engines, push to all, call "
    "`await client.set_weights(label)` or `raydix weights NAME LABEL`, then reset each engine"
)


class WeightsState:
    """The weights of one engine, for its scheduler. `reset` and the properties are called by the scheduler's thread.

    Args:
        links: to the cache of each rank; they run on `loop`. The cache of rank 0 decides.
        label: of the weights with which the engine starts.
        reconnect_s: seconds between two attempts to reach a cache.
        counts: counts the requests that are served detached.

    Attributes:
        order: the number of the latest reset that was settled, and the label that the workers bind; None: none.
    """

    def __init__(
        self, links: Sequence[CacheLink], loop: LoopThread, label: str, reconnect_s: float, counts: TransferCounts
    ) -> None:
        self.order: tuple[int, str | None] = (0, label)
        self._links = list(links)
        self._loop = loop
        self._label = label
        self._reconnect_s = reconnect_s
        self._counts = counts
        self._number = 0  # number of the latest reset
        self._state = "joined"
        self._reset_in: CurrentWeights | None = None  # the cache's weights at the latest reset, until it has joined
        self._workers: dict[int, int] = {}  # rank -> order that its worker has carried out
        self._warns_at: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()  # guards `_number` and `_state`
        self._turn = asyncio.Lock()  # One reset is settled after the other.
        self._closed = False

    @property
    def is_usable(self) -> bool:
        """Whether requests may be looked up: scheduler and workers are bound to the engine's weights."""
        return self._state == "joined" and self._are_workers_bound() and all(link.connected for link in self._links)

    @property
    def is_changing(self) -> bool:
        """Whether a reset is not settled yet, or the workers have not reported that they are bound."""
        return self._state == "changing" or (self._state == "joined" and not self._are_workers_bound())

    def _are_workers_bound(self) -> bool:
        number = self.order[0]
        return number == 0 or all(self._workers.get(rank) == number for rank in range(len(self._links)))

    def read_report(self, bound: dict[int, int]) -> None:
        """Note the orders that workers have carried out."""
        self._workers.update(bound)

    def count_request(self) -> None:
        """Count a request that is served without the cache because of its weights."""
        if self._state == "detached" or any(link.refused for link in self._links):
            self._counts.add("detached_requests")
        if self._state == "detached":
            self._loop.call(self._warn_later, self._number)

    def _warn_later(self, number: int) -> None:
        if self._warns_at is None and number == self._number:
            self._warns_at = asyncio.get_running_loop().call_later(_WARN_AFTER_S, self._warn, number)

    def _warn(self, number: int) -> None:
        self._warns_at = None
        if self._state == "detached" and number == self._number:
            message = "the engine was reset %g s ago or more, and its weights have no name: %s"
            logger.warning(message, _WARN_AFTER_S, _ADVICE)

    # ---------------------------------------------------------------- resets

    def reset(self) -> None:
        """Note that the engine's weights may have changed. Never raises, and waits for no reply."""
        with self._lock:
            self._number += 1
            self._state = "changing"
        self._loop.call(self._begin_to_settle, self._number)

    def _begin_to_settle(self, number: int) -> None:
        task = asyncio.get_running_loop().create_task(self._settle(number))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _settle(self, number: int) -> None:
        async with self._turn:
            current = await self._read_weights()
            if current is None:
                return
            if number != self._number:
                # A later reset follows. Its engine has the cache's weights, or has weights without a name.
                self._label = self._label if not self._is_ahead(current) else self._label_of(current)
                self._reset_in = current
                return
            if not self._is_ahead(current):
                self._detach(number, current)
                return
        await self._join(number, current)

    async def _read_weights(self) -> CurrentWeights | None:
        """Return the weights of the cache when it answers; None: the engine was closed."""
        while not self._closed:
            try:
                return await self._links[0].read_weights()
            except CacheError as error:
                logger.debug("a reset waits for the cache: %s", error)
                await asyncio.sleep(self._reconnect_s)
        return None

    def _is_ahead(self, current: CurrentWeights) -> bool:
        """Return whether the cache has begun other weights since the engine was reset, bound or refused in this epoch.

        False if the engine has seen none in this epoch: the next `set_weights` shows.
        """
        known = (self._reset_in, self._links[0].seen)
        seen = [weights for weights in known if weights and weights.epoch == current.epoch]
        return bool(seen) and seen[0].generation != current.generation

    def _label_of(self, current: CurrentWeights) -> str:
        return current.label if current.label is not None else self._label

    async def _join(self, number: int, current: CurrentWeights) -> None:
        label = self._label_of(current)
        self._reset_in = current
        for link in self._links:
            link.order(number, label)
        while any(link.order_done != number for link in self._links):
            await asyncio.sleep(_POLL_S)
            if number != self._number or self._closed:
                return
        self.order = (number, label)
        if not self._conclude(number, "joined"):
            return
        self._label, self._reset_in = label, None
        logger.info("the engine has joined weights %r of the cache", label)

    def _detach(self, number: int, current: CurrentWeights) -> None:
        self._reset_in = current
        for link in self._links:
            link.order(number, None)
        self.order = (number, None)
        if not self._conclude(number, "detached"):
            return
        logger.info("the engine was reset, but the cache's weights are the same, %r: %s", current.label, _ADVICE)

    def _conclude(self, number: int, state: str) -> bool:
        """Enter the state, unless another reset has followed; return whether none has."""
        with self._lock:
            if number == self._number:
                self._state = state
            return number == self._number

    def close(self) -> None:
        """Close the links, and settle nothing more."""
        self._closed = True
        close_links(self._links, self._loop)
