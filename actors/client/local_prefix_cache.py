"""`LocalPrefixCache`: a cache in this process, without Ray."""

from __future__ import annotations

import asyncio
import logging
import weakref
from typing import TYPE_CHECKING

from raydix.actors.client.lease_verbs import CacheVerbs
from raydix.actors.transport.validation import checked_config, checked_message, checked_seconds
from raydix.schemas import CacheConfig, CacheReport, RecordingStatus, StartRecording

if TYPE_CHECKING:
    from raydix.actors.transport.transport import Transport

logger = logging.getLogger(__name__)


class LocalPrefixCache(CacheVerbs):
    """The same verbs, errors and guarantees as a cache actor's, for a worker that is alone on its device.

    Requests are validated, but not serialised; `attach_pool` gives the tensors themselves. It is its own client;
    further sessions come from `PrefixCacheClient(local_cache)`, all on one event loop: another is refused until that
    one is closed. Like any client it stays on the loop that it was first used on: after that one's end, make others.

    Raises:
        InvalidRequest: `config` is none.
        CacheUnavailable: the pool does not fit in memory, or the device is not there.
    """

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(owner="local")
        checked_config(config)
        from raydix.actors.service.cache_host import CacheHost, local_device

        self._host = CacheHost(config, local_device(config), node_id="local", share=False)
        self._ending: set[asyncio.Task[None]] = set()
        weakref.finalize(self, self._host.service.eviction_task.abandon).atexit = False

    def _make_transport(self) -> Transport:
        from raydix.actors.client.local_transport import LocalTransport

        return LocalTransport(self._host)

    def report(self) -> CacheReport:
        """What the cache has been doing, for `raydix.actors.report.page.render`. O(1): a few ms."""
        return self._host.service.report()

    def start_recording(self, request: StartRecording) -> None:
        """Record requests to a file from now on, in the Mooncake format: lengths, times, hashes; no token ids.

        Raises:
            InvalidRequest: there is a recording already, or its file cannot be made.
        """
        self._host.service.recordings.start(checked_message(StartRecording, request))

    async def stop_recording(self) -> RecordingStatus:
        """End the recording; its file is whole then.

        Raises:
            InvalidRequest: there is none.
        """
        return await self._host.service.recordings.stop()

    async def close(self, *, drain_s: float = 0) -> None:
        """Close the cache with all its sessions. Idempotent.

        As `shutdown_cache` does: nothing new is granted from now on, and open leases have `drain_s` seconds to end.
        It goes on to its end even if the caller is cancelled; another call cuts the time short.

        Raises:
            InvalidRequest: it is used on another event loop, or `drain_s` is no finite number of seconds.
        """
        checked_seconds(drain_s)
        if not self._closed:
            self._host.stay_on_loop()
        ending = asyncio.get_running_loop().create_task(self._shut_down(drain_s))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        await asyncio.shield(ending)

    async def _shut_down(self, drain_s: float) -> None:
        is_mine = self._loop in (None, asyncio.get_running_loop())  # else it refuses below
        if drain_s and is_mine and (cut_short := await self._host.service.drain(drain_s)):
            logger.warning("%d leases were cut short by the shutdown of the cache", cut_short)
        await super().close()
        await self._host.service.close()
