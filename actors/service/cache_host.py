"""`CacheHost`: a service and its pool in one process, for the cache actor and for `LocalPrefixCache`."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.actors.memory.pool_memory import ExportedPool
from raydix.actors.memory.pool_shapes import check_layers_alike, given_arrays, with_layers
from raydix.actors.service.cache_service import CacheService
from raydix.actors.service.findings import NEVER_RESTARTED, Restarts
from raydix.actors.transport.error_map import to_cache_error
from raydix.actors.transport.validation import checked_message
from raydix.cache_core import UnknownLeaseError
from raydix.cache_core.kernels import CORE
from raydix.cache_core.pool.kv_pool import wait_for_device
from raydix.schemas import (
    CacheConfig,
    CacheUnavailable,
    InvalidRequest,
    KVResponse,
    ReadKV,
    WriteKV,
)
from raydix.schemas.version import package_version

if TYPE_CHECKING:
    from raydix.actors.tiers.disk.disk_errors import FolderInUse
    from raydix.actors.tiers.disk.disk_store import DiskStore

logger = logging.getLogger(__name__)


class CacheHost:
    """The cache of one process: its bookkeeping and its tensors.

    A disk that cannot be used is an error at the first start. A cache that Ray restarts serves without it.

    Raises:
        CacheUnavailable: the pool does not fit in this machine's memory, or the disk cannot be used.
    """

    def __init__(
        self,
        config: CacheConfig,
        device: torch.device,
        node_id: str,
        share: bool,
        restarts: Restarts = NEVER_RESTARTED,
        name: str = "local",
    ) -> None:
        epoch = uuid.uuid4().hex
        disk = _opened_disk(config, name) if config.disk is not None and not restarts.times else None
        try:
            self.exported = ExportedPool(config, device, epoch, node_id, share)
            medium = "GPU" if device.type == "cuda" else "CPU"
            self.service = CacheService(
                config, epoch, self.exported.pool, medium, restarts=restarts, name=name, disk=disk
            )
        except BaseException:
            if disk is not None and not isinstance(disk, Exception):
                disk.close()
            raise
        self._loop: asyncio.AbstractEventLoop | None = None  # of all its calls
        self._loop_lock = threading.Lock()

    def log_start(self) -> None:
        """Log the version, the epoch, the form of the core and the configuration, once the cache is ready."""
        version, config = package_version(), self.service.config
        logger.info("cache ready: raydix %s, epoch %s, core %s, %s", version, self.service.epoch, CORE, config)

    def stay_on_loop(self) -> None:
        """Bind this cache to the running loop, until that is closed.

        Raises:
            InvalidRequest: it is bound to another loop: two threads may not run one cache.
        """
        loop = asyncio.get_running_loop()
        with self._loop_lock:
            if self._loop is not None and self._loop.is_closed():
                self._loop = None
                self.service.change_loop()
            if self._loop is None:
                self._loop = loop
            if self._loop is not loop:
                raise InvalidRequest(
                    "a local cache is used on one event loop, and this one is used on another event loop: make all its "
                    "clients there; for plain calls, from several threads as well, share one client's `sync`"
                )

    def read_kv(self, request: ReadKV) -> KVResponse:
        """Copy the KV of slots that a lease covers out of the pool.

        Raises:
            UnknownLease: no such open lease of that session.
            InvalidRequest: the lease does not cover all of the slots, or the pool's layers differ in shape.
        """
        pool = with_layers(self.exported.pool)
        self._check(checked_message(ReadKV, request), private=False)
        slots = torch.from_numpy(request.slots.copy())
        k, v, *index = map(_to_bytes, pool.read_all(slots, self.service.core.swa_slots(slots)))
        return KVResponse(k=k, v=v, index=index[0] if index else None)

    def write_kv(self, request: WriteKV) -> None:
        """Copy KV into slots that a lease holds privately.

        Raises:
            UnknownLease: no such open lease of that session.
            InvalidRequest: the lease does not hold all of the slots privately, the sizes do not fit, or the pool's
                layers differ in shape.
        """
        pool = with_layers(self.exported.pool)
        self._check(checked_message(WriteKV, request), private=True)
        layout, device = pool.layout, self.exported.device
        arrays = given_arrays(layout, request.k, request.v, request.index)
        shapes = layout.copy_shapes(len(request.slots))
        k, v, *index = [
            _from_bytes(data, shape, layout.dtype).to(device) for data, shape in zip(arrays, shapes, strict=True)
        ]
        slots = torch.from_numpy(request.slots.copy())
        pool.write_all(slots, k, v, self.service.core.swa_slots(slots), *index)
        wait_for_device(pool.storage)  # the caller may publish as soon as this returns

    def _check(self, request: ReadKV | WriteKV, private: bool) -> None:
        check_layers_alike(self.exported.layout)
        session, core = self.service.session(request.session_id, request.epoch), self.service.core
        try:
            lease = core.leases.get(request.lease_id, session.session_id)
        except UnknownLeaseError as error:
            raise to_cache_error(error) from error
        slots = request.slots
        if slots.ndim != 1 or slots.dtype != np.int64:
            raise InvalidRequest(f"slots must be a 1-D row of int64, not {slots.dtype} of shape {slots.shape}")
        if not (core.holds_privately(lease, slots) if private else core.covers(lease, slots)):
            raise InvalidRequest(
                f"lease {request.lease_id!r} does not {'hold' if private else 'cover'} all of these slots"
                f"{' privately: only slots that were not published yet can be written' if private else ''}"
            )


def _opened_disk(config: CacheConfig, name: str) -> DiskStore | FolderInUse | None:
    """Open the disk of a cache: see `open_disk`. It waits for a predecessor."""
    # This imports xxhash.
    from raydix.actors.tiers.disk.open_disk import open_disk

    return open_disk(config, name)


def local_device(config: CacheConfig) -> torch.device:
    """Return the device of this process's pool: "auto" is a visible GPU if the pool has tensors, else the CPU.

    Raises:
        CacheUnavailable: a GPU is asked for that is not visible here.
    """
    wanted = config.pool.device
    if wanted == "auto":
        on_gpu = config.pool.may_lie_on_gpu and torch.cuda.is_available()
        return torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        seen = torch.cuda.device_count() or "no"
        raise CacheUnavailable(f"PoolConfig.device is {wanted!r}, but {seen} GPU is visible here: use 'auto' or 'cpu'")
    return device


def _to_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return array


def _from_bytes(data: NDArray[np.uint8], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    needed = int(np.prod(shape)) * dtype.itemsize
    if data.dtype != np.uint8 or data.nbytes != needed:
        raise InvalidRequest(f"KV of shape {shape} in {dtype} needs {needed} bytes, not {data.nbytes}")
    return torch.from_numpy(data.copy()).view(dtype).view(shape) if needed else torch.empty(shape, dtype=dtype)
