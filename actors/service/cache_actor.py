"""`PrefixCacheActor`: the Ray actor that owns a cache and its tensors."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, get_current_placement_group

from raydix.actors.observe.json_logs import log_as_json
from raydix.actors.service.findings import Restarts, facts_when_full, findings
from raydix.actors.service.past_lives import restarts_of_this_actor
from raydix.actors.transport.validation import check_watchable
from raydix.schemas import (
    CacheConfig,
    CacheReport,
    CacheStats,
    CacheUnavailable,
    CloseSession,
    KVResponse,
    Message,
    NextEvents,
    OpenSession,
    PackedEvents,
    PoolHandle,
    ReadKV,
    RecordingStatus,
    SessionRef,
    SessionResponse,
    StartRecording,
    WaitRequest,
    WriteKV,
)
from raydix.schemas.protocol import Handshake, check_handshake, handshake

if TYPE_CHECKING:
    import torch
    from ray.actor import ActorHandle

    from raydix.actors.metrics.publisher import MetricsPublisher
    from raydix.actors.service.cache_host import CacheHost

logger = logging.getLogger(__name__)

# The memory of this actor's last life may be freed so late.
_MEMORY_TIMEOUT_S = 20.0
_MEMORY_POLL_S = 0.25
_FAREWELL_S = 0.5  # the answer to a shutdown leaves meanwhile
_BUNDLE = re.compile(r"bundle_group_(?P<bundle>\d+)_(?P<group>\w+)")  # Ray's name of a resource of a bundle


class PrefixCacheActor:
    """The Ray calls of one `CacheHost`. Deploy it with `start_cache`.

    A plain class: `ray.remote` is applied where it is placed. All methods run on the actor's one event loop; each
    changes the cache without awaiting in between, so each is atomic.

    Raises:
        CacheUnavailable: the pool does not fit in memory, `device` asks for a GPU that the actor does not have, or the
            disk cannot be used; after a restart, the cache serves without such a disk.
    """

    def __init__(self, config: CacheConfig) -> None:
        # A process that gets this actor's handle imports this module. It needs none of these imports: torch takes a
        # second.
        import torch

        from raydix.actors.observe.node_facts import node_facts, own_niceness
        from raydix.actors.service.cache_host import local_device
        from raydix.actors.service.unix_socket_server import UnixSocketServer
        from raydix.actors.sessions.death_watch import DeathWatch
        from raydix.actors.tiers.host.host_memory import host_bytes

        torch.set_num_threads(1)  # small copies stall when they are spread over busy cores
        node_id = ray.get_runtime_context().get_node_id()
        has_gpu = config.pool.device != "auto" or ray.get_gpu_ids()  # others' GPUs may be visible
        device = local_device(config) if has_gpu else torch.device("cpu")
        restarts = restarts_of_this_actor()
        facts = node_facts(own_niceness())
        self._host = _make_host(config, device, node_id, restarts)
        exported = self._host.exported
        pool_bytes = exported.handle.num_bytes if device.type == "cpu" else 0
        full, when = facts_when_full(facts, pool_bytes, host_bytes(config))
        self._host.service.findings = findings(full, restarts, when)
        self._host.service.niceness = facts.niceness
        if self._host.service.disk is not None:  # its rows are read before the first session
            self._host.service.disk.start()
        self._socket_server = UnixSocketServer(self._host.service)
        self._watch = DeathWatch(self._host.service.reaper.owner_unavailable)
        self._host.service.reaper.on_end = self._watch.unwatch
        if config.json_logs:
            log_as_json(cache=_own_name(), epoch=self._host.service.epoch)
        self._metrics = self._make_metrics(config)
        # No client may call after a restart, and the cache must not look like one that is gone. Ray calls this method
        # on the actor's loop.
        if self._metrics is not None:
            self._metrics.start()
        gc.collect()
        gc.freeze()  # modules and tables stay: collections need not visit them
        self._host.log_start()
        for finding in self._host.service.findings:
            logger.warning("%s", finding)

    def _make_metrics(self, config: CacheConfig) -> MetricsPublisher | None:
        if config.metrics is None:
            return None
        from raydix.actors.metrics.publisher import MetricsPublisher

        return MetricsPublisher(self._host.service.stats, _own_name(), config.metrics.interval_s)

    async def handshake(self, row: Sequence[str | int]) -> Handshake:
        """Return this cache's protocol and version; its callers compare them with their own: see `schemas.protocol`.

        It is the first call of every client. The argument and the result are of built-in types, whatever the protocol.
        """
        return handshake()

    async def config_digest(self, row: Sequence[str | int] = ()) -> str:
        """Return the digest of this cache's configuration, once the cache is ready.

        Args:
            row: the caller's handshake. Clients of protocol 0 send none.

        Raises:
            CacheUnavailable: the cache is shutting down.
            ConfigMismatch: the caller speaks another protocol.
        """
        check_handshake(row, "client")
        self._host.service.check_taking()
        return self._host.service.config.digest()

    async def open_session(
        self, request: OpenSession, owner: ActorHandle[Any] | None = None, row: Sequence[str | int] = ()
    ) -> SessionResponse:
        """Open a client's session.

        Args:
            owner: the handle of an actor; its death ends the session. None: there is no such actor.
            row: the client's handshake. Clients of protocol 0 send none.

        Raises:
            ConfigMismatch: the client speaks another protocol, or asks for another configuration.
        """
        check_handshake(row, "client")
        if owner is not None:
            check_watchable(owner)
        address = await self._socket_server.address()
        response = self._host.service.open_session(request)
        if owner is not None:
            self._watch.watch(owner, request.session_id)
        return response.model_copy(update={"socket_address": address})

    async def close_session(self, request: CloseSession) -> None:
        """Close a client's session and end its leases."""
        self._host.service.close_session(request)

    async def heartbeat(self, request: SessionRef, stay_s: float) -> None:
        """Note that a client lives. The call takes `stay_s`: it fails as soon as the session or this actor ends."""
        await self._host.service.heartbeat(request, stay_s)

    @ray.method(enable_task_events=False)
    async def execute(self, *parts: bytes) -> bytes:
        """Execute a packed batch after the session's earlier ones, and return a packed `BatchResponse`."""
        return await self._host.service.execute_packed(*parts)

    async def wait(self, request: WaitRequest) -> Message:
        """Wait for the outcome of a queued request."""
        return await self._host.service.wait(request)

    async def next_events(self, request: NextEvents) -> PackedEvents:
        """Wait for events."""
        return await self._host.service.next_events(request)

    async def pool_handle(self) -> PoolHandle:
        """Return how to reach the pool's tensors."""
        return self._host.exported.handle

    async def placement(self) -> tuple[PlacementGroup, int] | None:
        """Return this actor's placement group and its bundle there; None if it has none."""
        group = get_current_placement_group()
        return None if group is None else (group, _own_bundle(group))

    async def read_kv(self, request: ReadKV) -> KVResponse:
        """Copy KV out of the pool."""
        return self._host.read_kv(request)

    async def write_kv(self, request: WriteKV) -> None:
        """Copy KV into the pool."""
        self._host.write_kv(request)

    async def stats(self) -> CacheStats:
        """Return all counts, without a session."""
        return self._host.service.stats()

    async def start_recording(self, request: StartRecording) -> None:
        """Record requests to a file on this node from now on."""
        self._host.service.recordings.start(request)

    async def recording(self) -> RecordingStatus | None:
        """Return the status of the recording; None if there is none."""
        return self._host.service.recordings.status()

    async def stop_recording(self) -> RecordingStatus:
        """End the recording and close its file."""
        return await self._host.service.recordings.stop()

    async def report(self) -> CacheReport:
        """Return the report of `raydix report`, without a session."""
        return self._host.service.report()

    async def noop(self) -> None:
        """Do nothing: benchmarks compare other calls with it."""

    async def shutdown(self, drain_s: float) -> int:
        """Grant nothing new, give open leases `drain_s` to end, then end them; return the number cut short.

        The process ends soon after, even if the caller has died, and is not restarted.
        """
        cut_short = await self._host.service.drain(drain_s)
        try:
            if self._metrics is not None:
                self._metrics.stop()
            self._socket_server.close()
            await self._host.service.close()
        finally:
            asyncio.get_running_loop().call_later(_FAREWELL_S, _end)
        return cut_short


def _end() -> None:
    """End this actor for good. Ray's `exit_actor` would wait for calls that are still open."""
    ray.kill(ray.get_runtime_context().current_actor)


def _make_host(config: CacheConfig, device: torch.device, node_id: str, restarts: Restarts) -> CacheHost:
    """Make the host. After a restart, clients that have not noticed yet may still map the pool of the last life."""
    from raydix.actors.service.cache_host import CacheHost

    deadline = time.monotonic() + _MEMORY_TIMEOUT_S
    while True:
        try:
            return CacheHost(config, device, node_id, share=True, restarts=restarts, name=_own_name())
        except CacheUnavailable as error:
            if time.monotonic() > deadline or not restarts.times:
                raise
            logger.warning("waiting for memory: %s", error)
            time.sleep(_MEMORY_POLL_S)


def _own_bundle(group: PlacementGroup) -> int:
    """Return the index of this actor's bundle: Ray names it in the actor's resources."""
    taken = (_BUNDLE.fullmatch(name) for name in ray.get_runtime_context().worker.core_worker.resource_ids())
    return next((int(part["bundle"]) for part in taken if part and part["group"] == group.id.hex()), 0)


def _own_name() -> str:
    """Return the name of this actor; its id if it has no name."""
    context = ray.get_runtime_context()
    return context.get_actor_name() or context.get_actor_id() or ""
