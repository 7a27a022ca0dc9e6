"""`LocalPrefixCache`: a cache in this process, without Ray, and its client."""

from __future__ import annotations

import asyncio
import logging
import weakref
from typing import TYPE_CHECKING

from raydix.actors.client.connectors import LocalConnector
from raydix.actors.client.prefix_cache_client import PrefixCacheClient
from raydix.actors.transport.validation import checked_config, checked_message, checked_seconds
from raydix.schemas import CacheConfig, CacheReport, RecordingStatus, StartRecording
from raydix.schemas.shown import counted

if TYPE_CHECKING:
    from raydix.actors.service.cache_service import CacheService

logger = logging.getLogger(__name__)


class LocalPrefixCache(PrefixCacheClient):
    """The same verbs, errors and guarantees as a cache actor's, for a worker that is alone on its device.

    Requests are validated, but not serialised; `attach_pool` gives the tensors themselves. About once a millisecond, a
    request waits for evictions or copies that are due, before it is executed. The cache is its own client; further
    sessions come from `PrefixCacheClient(local_cache)`. All sessions use one event loop: another loop is
    rejected until the cache is closed. Like any client it stays on the loop of its first verb: if that loop ends, make
    another cache.

    The KV of its disk tier lies in `disk.path`/local, so a path serves one local cache at a time.

    Raises:
        InvalidRequest: `config` is not a CacheConfig.
        CacheUnavailable: the pool does not fit in memory, the device is not there, or the disk cannot be used. For a
            disk that another process has, the cache waits up to 10 s, then serves without it until it gets it.
    """

    def __init__(self, config: CacheConfig) -> None:
        checked_config(config)
        from raydix.actors.service.cache_host import CacheHost, local_device

        self._host = CacheHost(config, local_device(config), node_id="local", share=False)
        super().__init__(LocalConnector(self._host), owner="local")
        self._shutdowns: set[asyncio.Task[None]] = set()
        weakref.finalize(self, self._host.service.eviction_task.abandon).atexit = False
        self._host.log_start()

    def report(self) -> CacheReport:
        """Return the cache's counts and history, for `raydix.actors.report.page.render`. O(1): a few ms."""
        return self._host.service.report()

    @property
    def service(self) -> CacheService:
        """The service of the cache, for the parts of this package."""
        return self._host.service

    def start_recording(self, request: StartRecording) -> None:
        """Record requests to a file from now on, in the Mooncake format: lengths, times, hashes; no token ids.

        Raises:
            InvalidRequest: a recording runs already, or its file cannot be made.
        """
        self._host.service.recordings.start(checked_message(StartRecording, request))

    async def stop_recording(self) -> RecordingStatus:
        """End the recording; its file is complete then.

        Raises:
            InvalidRequest: no recording runs.
        """
        return await self._host.service.recordings.stop()

    async def close(self, *, drain_s: float = 0) -> None:
        """Close the cache with all its sessions. Idempotent.

        As `shutdown_cache` does: nothing new is granted from now on, and open leases have `drain_s` seconds to end.
        It continues even if the caller is cancelled; another call ends the wait.

        Raises:
            InvalidRequest: another event loop runs than the cache's, or `drain_s` is not a finite number of seconds.
        """
        checked_seconds(drain_s)
        if not self.closed:
            self._host.stay_on_loop()
        shutdown = asyncio.get_running_loop().create_task(self._shut_down(drain_s))
        self._shutdowns.add(shutdown)
        shutdown.add_done_callback(self._shutdowns.discard)
        await asyncio.shield(shutdown)

    async def _shut_down(self, drain_s: float) -> None:
        on_own_loop = self.session.loop in (None, asyncio.get_running_loop())  # else `close` raises below
        if drain_s and on_own_loop and (cut_short := await self._host.service.drain(drain_s)):
            logger.warning("the shutdown of the cache cut short %s", counted(cut_short, "lease"))
        await super().close()
        await self._host.service.close()
