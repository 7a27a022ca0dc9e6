"""`CacheFeed`: one cache as a router sees it, kept up to date by a task that reads the events of its tiers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing, suppress

from raydix.actors.client.event_reader import until_one_ends
from raydix.actors.client.prefix_cache_client import PrefixCacheClient
from raydix.actors.fleet.cache_directory import CacheSource
from raydix.actors.fleet.membership import CacheFacts, CachePlace, PageShape
from raydix.actors.fleet.open_routes import OpenRoutes
from raydix.cache_core import Applied, PageIndex
from raydix.schemas import CacheError, CacheUnavailable, KVEventBatch, SlimEventBatch, SlimEventSnapshot, StaleEpoch
from raydix.schemas.requests import DEVICE, HOST

logger = logging.getLogger(__name__)

_RETRY_S = 0.25  # pause after an error
_RECHECK_S = 2.0  # time between two questions to a cache that is left out


class CacheFeed:
    """One cache of a fleet: its client, its columns in the index while its events are read, and counts.

    The task asks for the cache's facts, and the fleet decides whether the cache is in. If so, the task takes a snapshot
    of each tier and applies the events that follow; after a gap it takes another snapshot. After an error, and after a
    restart of the cache, the columns are dropped immediately, and the task begins again.

    Attributes:
        name: of the cache.
        identity: of the cache; another one of the same name has another identity.
        client: for the requests of this process.
        facts: as the cache has given them last; None: it has not answered yet.
        verdict: why the fleet leaves the cache out; empty: it is in; None: this is not decided.
        trouble: the last error, until the cache answers again; empty: none.
        place: where the cache runs; None: it has not got requests yet.
        columns: tier -> column of the index; empty: the cache gets no requests.
        heard_at: loop time of the last batch or snapshot.
        num_batches, num_snapshots: of events, that were applied.
    """

    def __init__(
        self,
        name: str,
        source: CacheSource,
        index: PageIndex,
        routes: OpenRoutes,
        decide: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        """Begin to read. Needs a running loop.

        Args:
            decide: called with new facts; sets the verdicts of all feeds.
            on_change: called after `columns`, `facts` or `trouble` has changed.
        """
        self.name = name
        self.identity = source.identity
        self.client = PrefixCacheClient(source.cache)
        self.facts: CacheFacts | None = None
        self.verdict: str | None = None
        self.trouble = ""
        self.place: CachePlace | None = None
        self.columns: dict[str, int] = {}
        self.heard_at = 0.0
        self.num_batches = self.num_snapshots = 0
        self._index = index
        self._routes = routes
        self._decide = decide
        self._on_change = on_change
        self._admitted = asyncio.Event()
        self._task = asyncio.create_task(self._follow())

    @property
    def column(self) -> int | None:
        """The column of the pool, by which the cache is known; None: the cache gets no requests."""
        return self.columns.get(DEVICE)

    @property
    def cause(self) -> str:
        """Why the cache gets no requests; empty: it may get some."""
        if self.column is not None:
            return ""
        return self.trouble or self.verdict or "it has not answered yet"

    @property
    def is_settled(self) -> bool:
        """Whether the cache is in, is left out, or has failed to answer."""
        return self.column is not None or bool(self.verdict) or bool(self.trouble)

    def set_verdict(self, verdict: str) -> None:
        """Take the cache in (empty), or leave it out for a cause."""
        if verdict and verdict != self.verdict:
            logger.warning("cache %r is left out of the fleet: %s", self.name, verdict, extra={"cache": self.name})
        self.verdict = verdict
        if not verdict:
            self._admitted.set()
        elif self.column is not None:
            self._begin_again()

    def note_unavailable(self, error: CacheUnavailable) -> None:
        """Send nothing here until the cache has given another snapshot: a request has failed."""
        if self.column is not None:
            self._note_trouble(error)
            self._begin_again(_RETRY_S)

    async def refresh(self) -> None:
        """Ask the cache for its facts, and have the fleet decide."""
        stats = await self.client.stats()
        facts = CacheFacts.of(self.client.config, stats)
        self.trouble = ""
        if facts != self.facts or self.verdict is None:
            self.facts = facts
            self._decide()
            self._on_change()

    def stop(self) -> None:
        """Forget the cache. The caller closes the client, which ends its leases."""
        self._task.cancel()
        self._drop()

    # ---------------------------------------------------------------- the task

    def _begin_again(self, pause_s: float = 0.0) -> None:
        self._task.cancel()
        self._drop()
        self._task = asyncio.create_task(self._follow(pause_s))

    async def _follow(self, pause_s: float = 0.0) -> None:
        while True:
            await asyncio.sleep(pause_s)
            pause_s = _RETRY_S
            try:
                await self._read()
            except StaleEpoch as error:
                self._note_trouble(error)
                pause_s = 0.0
            except CacheError as error:
                self._note_trouble(error)
            except Exception as error:
                logger.exception("the events of cache %r could not be read", self.name)
                self._note_trouble(error)
            self._drop()

    def _note_trouble(self, error: Exception) -> None:
        if not self.trouble:
            logger.info("cache %r gets no requests: %s", self.name, error, extra={"cache": self.name})
        self.trouble = str(error)
        self._on_change()

    async def _read(self) -> None:
        """Read one life of the cache, as long as it is in. Return if its epoch or its shape has changed."""
        await self.refresh()
        while self.verdict != "":
            self._admitted.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_RECHECK_S):
                    await self._admitted.wait()
            await self.refresh()
        pool, _ = await self.client.session.ask_for_pool()
        self.place = CachePlace(self.name, pool.node_id, pool.gpu_uuid)
        snapshots: dict[str, SlimEventSnapshot] = {}
        for tier in (DEVICE, HOST) if HOST in self.client.config.tiers_below else (DEVICE,):  # no route looks at disks
            snapshot = await self._snapshot(tier)
            if snapshot is None or snapshot.epoch != snapshots.get(DEVICE, snapshot).epoch:
                return
            snapshots[tier] = snapshot
        self.columns = {tier: self._index.add_column() for tier in snapshots}
        self._routes.add_cache(self.columns[DEVICE])
        for tier, snapshot in snapshots.items():
            self._apply_snapshot(self.columns[tier], snapshot)
        self._on_change()
        await until_one_ends(self._read_tier(tier, snapshot) for tier, snapshot in snapshots.items())

    async def _read_tier(self, tier: str, snapshot: SlimEventSnapshot) -> None:
        """Apply the events of a tier after a snapshot, in one life of the cache. Return if its epoch has changed."""
        column, epoch = self.columns[tier], snapshot.epoch
        async with aclosing(self.client.events(snapshot.seq, tier=tier)) as batches:  # type: ignore[type-var]
            async for batch in batches:
                if batch.epoch != epoch:
                    return
                if not self._apply(column, batch):
                    later = await self._snapshot(tier)
                    if later is None or later.epoch != epoch:
                        return
                    self._apply_snapshot(column, later)
        raise CacheUnavailable(f"the client of cache {self.name!r} was closed")

    async def _snapshot(self, tier: str) -> SlimEventSnapshot | None:
        """Return a snapshot; None if the cache has restarted with another configuration, so that it does not fit."""
        snapshot = await self.client.event_snapshot(tier=tier)
        if not isinstance(snapshot, SlimEventSnapshot) or self.facts is None:
            return None
        shape = PageShape(snapshot.page_size, snapshot.stride_tokens, snapshot.bigram)
        return snapshot if shape == self.facts.shape else None

    def _apply_snapshot(self, column: int, snapshot: SlimEventSnapshot) -> None:
        stored, pending = snapshot.stored_hashes, snapshot.pending_hashes
        self._index.apply_snapshot(column, snapshot.epoch, snapshot.seq, stored, pending, snapshot.end_hashes)
        if column == self.column:
            self._routes.note_load(column, snapshot.load, stored)
            self._routes.note_load(column, snapshot.load, pending)
        self.num_snapshots += 1
        self.heard_at = asyncio.get_running_loop().time()

    def _apply(self, column: int, batch: KVEventBatch | SlimEventBatch) -> bool:
        """Apply a batch. Return False if events are missing before it, so that a snapshot is needed."""
        assert isinstance(batch, SlimEventBatch)
        hashes = batch.page_hashes
        if not batch.gap:
            applied = self._index.apply(column, batch.epoch, batch.seq, batch.kinds, batch.page_counts, hashes)
            if applied is not Applied.NEEDS_SNAPSHOT:
                if column == self.column:
                    self._routes.note_load(column, batch.load, hashes)
                self.num_batches += 1
                self.heard_at = asyncio.get_running_loop().time()
                return True
        return False

    def _drop(self) -> None:
        if self.columns:
            for column in self.columns.values():
                self._index.drop_column(column)
            self._routes.drop_cache(self.columns[DEVICE])
            self.columns = {}
            self._on_change()
