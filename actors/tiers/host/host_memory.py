"""`HostMemory`: the memory of a host pool, reserved and registered with CUDA by threads while the cache serves."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from weakref import finalize

import torch

from raydix.actors.memory.pinned_memory import PinnedMemory
from raydix.actors.memory.pool_memory import Asked, check_room, make_shared_memory, too_large
from raydix.actors.memory.pool_shapes import layout_below
from raydix.actors.observe.node_memory import available_memory
from raydix.cache_core import RecordLayout, RecordPool
from raydix.schemas import CacheConfig, CacheUnavailable

logger = logging.getLogger(__name__)

HOST = Asked("the host pool", "host.num_slots")
RESERVING, READY, CLOSED = "reserving", "ready", "closed"


def host_bytes(config: CacheConfig) -> int:
    """Return the bytes of this machine's memory that the host tier of a cache takes; 0 if it has none."""
    return 0 if config.host is None else layout_below(config, config.host_sizes).num_bytes


class HostMemory:
    """Anonymous memory for the records of a host pool: a memfd without a name, which ends with the process.

    All of it is reserved, in parallel ranges, so that a later write cannot fail for want of memory. Where this process
    has a GPU, the memory is then registered with CUDA, in pieces; until that has ended, copies work, more slowly.

    Args:
        layout: of the records.
        name: of the memory in `/proc`, such as the cache's epoch.
        pin: register it with CUDA; None: if this process has a GPU.
        on_change: called in a thread when `state` has changed.

    Raises:
        CacheUnavailable: this machine has too little memory, or `pin` is True and this process has no GPU.
    """

    def __init__(
        self,
        layout: RecordLayout,
        name: str,
        *,
        pin: bool | None = None,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        has_gpu = torch.cuda.is_available()
        if pin and not has_gpu:
            raise CacheUnavailable(
                "host memory cannot be registered with CUDA (host.pin=True): this process has no GPU"
            )
        if sys.platform == "linux":
            check_room(HOST, layout.num_bytes)
        self.layout = layout
        self._pins = has_gpu and pin is not False
        self._on_change = on_change
        self._lock = threading.Lock()
        self._state = RESERVING
        self._pool: RecordPool | None = None
        self._pinned: PinnedMemory | None = None
        threading.Thread(target=self._run, args=(name,), name="raydix-host-memory", daemon=True).start()

    @property
    def state(self) -> str:
        """ "reserving", "ready", "closed", or why the memory could not be reserved."""
        return self._state

    @property
    def pool(self) -> RecordPool | None:
        """The pool; None: it is not ready."""
        return self._pool

    @property
    def pinned(self) -> bool:
        """Whether all of the memory is registered with CUDA."""
        return self._pinned is not None and self._pinned.is_ready

    def close(self) -> None:
        """Give the memory back, once nothing else refers to the pool. A reservation ends behind its ranges."""
        with self._lock:
            self._state, self._pool = CLOSED, None
            if self._pinned is not None:
                self._pinned.close()

    def _run(self, name: str) -> None:
        state, pool = READY, None
        try:
            pool = RecordPool(self.layout, storage=self._reserved(name))
        except OSError as error:
            state = f"{too_large(HOST, self.layout.num_bytes, available_memory())} ({error})"
        with self._lock:
            if self._state == CLOSED:
                return
            self._state, self._pool = state, pool
            if pool is not None and self._pins:
                self._pinned = PinnedMemory(pool.storage)
                finalize(self, self._pinned.close).atexit = False
        if pool is None:
            logger.warning("the cache serves without its host pool: %s", state)
        self._on_change()

    def _reserved(self, name: str) -> torch.Tensor:
        """Return reserved memory.

        Raises:
            OSError: there is too little, or this was closed.
        """
        if sys.platform != "linux":
            return torch.zeros(self.layout.num_bytes, dtype=torch.uint8)
        fd, storage = make_shared_memory(f"raydix-{name}-host", self.layout.num_bytes, lambda: self._state == CLOSED)
        os.close(fd)  # the mapping keeps the memory
        return storage
