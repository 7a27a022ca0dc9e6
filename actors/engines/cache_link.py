"""`CacheLink`: a process's client of one cache, which comes back after every loss, bound to the engine's weights.

not connected ── the cache answers, its shape fits, its base is bound ──> connected
      ^                                                                       │
      └───── the cache restarts or is silent, or its weights change ──────────┘
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from raydix.actors.client.attached_pool import AttachedPool
from raydix.actors.client.loop_thread import LoopThread
from raydix.actors.client.prefix_cache_client import PrefixCacheClient
from raydix.actors.service.findings import restarts_finding
from raydix.schemas import (
    CacheConfig,
    CacheError,
    CacheUnavailable,
    ConfigMismatch,
    ModelFingerprint,
    StaleEpoch,
)

logger = logging.getLogger(__name__)

_CLOSING_S = 2.0
_NOT_REACHED = "cache {!r} is not reached, so the engine computes all KV itself: {}"


@dataclass(frozen=True)
class CurrentWeights:
    """The weights that a cache has now: the label of the base's generation (None: none yet), its number, the epoch."""

    epoch: str
    generation: int  # 0: none has begun
    label: str | None


class _OtherWeights(Exception):
    """The cache fits, but has other weights than the engine."""


class CacheLink:
    """A client of one cache on a loop thread. `start` begins to connect; no call of the engine waits for a reply.

    An engine binds its own label only. It binds again by itself after the cache restarts, and within one epoch only if
    the generation is the one that it was bound to before: `order` binds it to another. If the cache has weights of
    another label, it tries again until the labels are equal.

    Args:
        name: the cache's name, for messages.
        make_client: makes a client of the cache; it may block, and raise CacheError or OSError.
        make_fingerprint: of the model with weights of that label.
        check_config: raises ConfigMismatch if the cache does not fit the engine.
        label: of the engine's weights at its start.
        loop: where the client runs.
        maps_pool: whether this process copies KV.
        reconnect_s: seconds between two attempts.

    Attributes:
        pool: the mapped pool, of the present epoch; None if not connected, or not `maps_pool`.
        connected: whether requests may be sent: the session is open and bound.
        order_done: the number of the latest order that was carried out.
        seen: the weights to which the link was bound last; if it was bound to none in this epoch, those that it found
            in the cache first. None: it has found none.
        refused: why the cache or its weights were refused last; empty: they were not.
    """

    def __init__(
        self,
        name: str,
        make_client: Callable[[], PrefixCacheClient],
        make_fingerprint: Callable[[str], ModelFingerprint],
        check_config: Callable[[CacheConfig], None],
        *,
        label: str,
        loop: LoopThread,
        maps_pool: bool,
        reconnect_s: float,
    ) -> None:
        self.name = name
        self.pool: AttachedPool | None = None
        self.connected = False
        self.order_done = 0
        self.seen: CurrentWeights | None = None
        self.refused = ""
        self._fits = True
        self._make_client = make_client
        self._make_fingerprint = make_fingerprint
        self._check_config = check_config
        self._label: str | None = label
        self._order = 0
        self._bound: CurrentWeights | None = None
        self._loop = loop
        self._maps_pool = maps_pool
        self._reconnect_s = reconnect_s
        self._client: PrefixCacheClient | None = None
        self._tried = threading.Event()
        self._wake: asyncio.Event | None = None  # made on the loop
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False
        self._warned = ""

    @property
    def client(self) -> PrefixCacheClient:
        """The client; there is one while `connected`."""
        if self._client is None:
            raise CacheUnavailable(f"cache {self.name!r} was not reached yet")
        return self._client

    def start(self, wait_s: float) -> None:
        """Begin to connect; wait up to `wait_s` for the first attempt.

        Raises:
            ConfigMismatch: the cache does not fit the engine; the message names what differs. Weights of another label
                are no reason.
        """
        self._loop.call(self._begin)
        if not self._tried.wait(wait_s):
            self._warn(_NOT_REACHED.format(self.name, f"no answer in {wait_s:g} s"))
        if not self._fits:
            raise ConfigMismatch(self.refused)

    def _begin(self) -> None:
        self._wake = asyncio.Event()
        self._keeper = asyncio.get_running_loop().create_task(self._keep_connected())

    async def _keep_connected(self) -> None:
        while not self._closed:
            if not self._is_healthy():
                await self._try_to_connect()
            assert self._wake is not None
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._reconnect_s)
            self._wake.clear()

    def _is_healthy(self) -> bool:
        if self.connected:
            assert self._client is not None
            self.connected = self._client.session.ready and not (self.pool is not None and self.pool.lost)
        return self.connected and self.order_done == self._order

    async def _try_to_connect(self) -> None:
        try:
            await self._connect()
        except (ConfigMismatch, _OtherWeights) as error:
            self.connected = False
            self.refused, self._fits = str(error), isinstance(error, _OtherWeights)
            self._warn(f"cache {self.name!r} is not used: {error}")
        except (CacheError, OSError, RuntimeError, ConnectionError) as error:
            self.connected = False
            text = _NOT_REACHED.format(self.name, error)
            if self._is_new(text):
                self._warn(text + await asyncio.to_thread(self._restarts))
        finally:
            self._tried.set()

    def _warn(self, text: str) -> None:
        """Log a warning once; the next one after the cache was reached again, or for another cause."""
        if self._is_new(text):
            self._warned = _kind_of(text)
            logger.warning("%s. It tries again every %g s", text, self._reconnect_s)

    def _is_new(self, text: str) -> bool:
        """Return whether a warning is of another kind than the last one."""
        return _kind_of(text) != self._warned

    def _restarts(self) -> str:
        """Return how often Ray restarted the cache, and why, to be put behind a warning. Blocks."""
        if self._client is None:
            return ""
        try:
            finding = restarts_finding(self._client.session.connector.restarts())
        except CacheError:  # it is gone
            return ""
        return f". {finding}" if finding else ""

    async def _connect(self) -> None:
        if self._client is None:
            self._client = await asyncio.to_thread(self._make_client)
        client = self._client
        await client.open()
        self._check_config(client.config)
        epoch = client.session.transport.epoch
        if self._maps_pool and (self.pool is None or self.pool.lost or self.pool.epoch != epoch):
            if self.pool is not None and not self.pool.lost:
                self.pool.drop(StaleEpoch(self.pool.epoch, epoch))
            self.pool = None
            self.pool = await client.attach_pool(mapped=True)
            epoch = self.pool.epoch
        order, label = self._order, self._label
        if label is not None:
            await self._bind(label, epoch, ordered=order != self.order_done)
        elif self.seen is None or self.seen.epoch != epoch:
            await self._look()
        self.order_done = order
        self.connected, self.refused, self._warned, self._fits = label is not None, "", "", True
        if self.connected:
            logger.info("cache %r is connected, epoch %s", self.name, epoch)

    async def _bind(self, label: str, epoch: str, *, ordered: bool) -> None:
        current = await self._look()
        bound = self._bound
        if not ordered and bound is not None and bound.epoch == epoch and bound.generation != current.generation:
            raise _OtherWeights(
                f"its weights are of another generation, {current.label!r} now: push them to the engine, then reset it "
                "with reset_prefix_cache(reset_connector=True)"
            )
        try:
            generation = await self.client.bind_model(self._make_fingerprint(label))
        except ConfigMismatch:
            if (current := await self._look()).label in (None, label):
                raise
            raise _OtherWeights(
                f"it has the weights {current.label!r}, not {label!r}: push the same weights to all engines, call "
                "`set_weights`, then reset each with reset_prefix_cache(reset_connector=True)"
            ) from None
        self._bound = self.seen = CurrentWeights(epoch, generation, label)

    async def _look(self) -> CurrentWeights:
        current = await self.read_weights()
        if current.generation and (self.seen is None or self.seen.epoch != current.epoch):
            self.seen = current
        return current

    # ---------------------------------------------------------------- for the engine's side

    async def read_weights(self) -> CurrentWeights:
        """Return the weights that the cache has now."""
        response = await self.client.weights()
        return CurrentWeights(self.client.session.transport.epoch, response.generation, response.label)

    def order(self, number: int, label: str | None) -> None:
        """Bind to weights of this label from now on; None: to none, and do not connect. Call it on the loop.

        Args:
            number: of the order; `order_done` has it when it is carried out.
        """
        if number == self._order:
            return
        self._order, self._label, self.connected = number, label, False
        self.retry()

    def retry(self) -> None:
        """Look at the session now rather than in `reconnect_s`. Call it on the loop."""
        if self._wake is not None:
            self._wake.set()

    def on_error(self, error: CacheError) -> None:
        """Look at the session if a request has failed because it is lost, or its weights are. Call it on the loop."""
        if isinstance(error, ConfigMismatch):
            self.connected, self.refused = False, str(error)
            self.retry()
        elif self._client is not None and not self._client.session.ready:
            self.connected = False
            self.retry()

    async def close(self) -> None:
        """Close the session, which ends its leases. Idempotent."""
        self._closed, self.connected = True, False
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._client is not None:
            await self._client.close()


def _kind_of(text: str) -> str:
    """Return a warning without its details."""
    return text.partition(":")[0]


def make_ray_client(name: str, namespace: str, address: str, owner: str) -> PrefixCacheClient:
    """Return a client of a cache actor; connect this process to the running Ray cluster first. Blocks.

    Raises:
        CacheUnavailable: no cluster is reached, or it runs another version of Ray or Python; or no cache of that name
            runs.
        InvalidRequest: the name is wrong.
    """
    import ray

    from raydix.actors.cluster.deploy import NAMESPACE, connect

    if not ray.is_initialized():
        try:
            with _fresh_random():
                ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            from raydix.actors.transport.ray_calls import why_not_joined

            advice = "" if os.environ.get("RAY_AUTH_MODE") else "; a cluster with a token needs RAY_AUTH_MODE=token"
            raise CacheUnavailable(
                f"no Ray cluster is reached at {address!r}{advice}: {why_not_joined(error)}"
            ) from error
    handle = connect(name, namespace=namespace)
    return PrefixCacheClient(name if namespace == NAMESPACE else handle, owner=owner)


@contextmanager
def _fresh_random() -> Iterator[None]:
    """Seed `random` from the system, and give it its state back at the end.

    Ray draws the ids of its subscribers from it, and engines seed it alike in all their workers. Two subscribers with
    one id end each other's polls, which then follow one another without a pause.
    """
    state = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)


def close_links(links: Sequence[CacheLink], loop: LoopThread) -> None:
    """Close links; wait for a silent cache for `_CLOSING_S` at most."""
    for link in links:
        with suppress(FutureTimeoutError):
            loop.spawn(link.close()).result(timeout=_CLOSING_S)
