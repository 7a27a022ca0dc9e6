"""The memory of a pool, allocated so that workers on the same node, or on the same card, can map it."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from raydix.actors.memory.pool_shapes import layout_of, pool_of
from raydix.actors.observe.node_memory import available_memory, table_bytes
from raydix.actors.transport.process_liveness import own_liveness_path
from raydix.cache_core import KVPool, PoolLayout, RecordLayout, RecordPool
from raydix.schemas import CacheConfig, CacheUnavailable, PoolHandle
from raydix.schemas.shown import byte_size

logger = logging.getLogger(__name__)

_RESERVING_THREADS = 8  # one thread reserves 1 to 8 GB a second, and a busy machine a tenth of that
_RESERVED_BYTES = 256 * 2**20  # one call's


class ExportedPool:
    """A pool, and the handle by which other processes reach it.

    A CPU pool lies in anonymous shared memory (a memfd), which others open through `/proc`: it has no name in any
    folder, so the kernel frees it when its owner ends. It is reserved in full here, so that a later write cannot
    fail for want of memory. A GPU pool is one allocation, exported by CUDA IPC. If a pool cannot be shared
    (`share` is False, a CPU pool elsewhere than on Linux, memory that CUDA IPC cannot export), others copy through its
    owner.

    Raises:
        CacheUnavailable: this machine has too little memory for the pool.
    """

    def __init__(self, config: CacheConfig, device: torch.device, epoch: str, node_id: str, share: bool) -> None:
        self.layout = layout_of(config)
        self.device = device
        self._fd: int | None = None
        if sys.platform == "linux":
            check_room(POOL, table_bytes(config) + (self.layout.num_bytes if device.type == "cpu" else 0))
        if device.type == "cuda" or not share or sys.platform != "linux":
            self.pool = _own_pool(self.layout, device)
        else:
            self.pool = pool_of(self.layout, storage=self._shared_storage(epoch))
        self.handle = self._make_handle(config, epoch, node_id, share)

    def _shared_storage(self, epoch: str) -> torch.Tensor:
        num_bytes = self.layout.num_bytes
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        try:
            self._fd, storage = make_shared_memory(f"raydix-{epoch}", num_bytes)
        except OSError as error:
            raise CacheUnavailable(f"{too_large(POOL, num_bytes, available_memory())} ({error})") from error
        return storage

    def _make_handle(self, config: CacheConfig, epoch: str, node_id: str, share: bool) -> PoolHandle:
        gpu_uuid, ipc_handle = None, None
        if self.device.type == "cuda" and self.layout.num_bytes and share:
            try:
                gpu_uuid, ipc_handle = gpu_uuid_of(self.device), export_cuda(self.pool.storage)
            except RuntimeError as error:
                logger.warning("CUDA IPC cannot export the pool (%s): workers copy KV through the cache", error)
        return PoolHandle(
            epoch=epoch,
            config=config,
            device_type="cuda" if self.device.type == "cuda" else "cpu",
            node_id=node_id,
            path=None if self._fd is None else f"/proc/{os.getpid()}/fd/{self._fd}",
            liveness_path=own_liveness_path(),
            num_bytes=self.layout.num_bytes,
            gpu_uuid=gpu_uuid,
            ipc_handle=ipc_handle,
        )


def make_shared_memory(
    name: str, num_bytes: int, is_given_up: Callable[[], bool] = lambda: False
) -> tuple[int, torch.Tensor]:
    """Make an anonymous file in memory, and reserve all of it. Return its descriptor and its bytes.

    Args:
        name: of the file, in `/proc`.
        num_bytes: 1 at least.
        is_given_up: checked between ranges of 256 MiB, by several threads.

    Raises:
        OSError: there is too little memory, the bytes cannot be mapped, or it is given up; all memory is given back.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        _reserve(fd, num_bytes, is_given_up)
        return fd, map_shared_file(f"/proc/self/fd/{fd}", num_bytes)
    except OSError:
        os.close(fd)
        raise


def _reserve(fd: int, num_bytes: int, is_given_up: Callable[[], bool]) -> None:
    """Reserve the memory of a file, in parallel ranges.

    Raises:
        OSError: there is too little, or it is given up; closing the file gives back the ranges that were reserved.
    """

    def reserve(start: int) -> None:
        if is_given_up():
            raise OSError(errno.ECANCELED, "the reservation was given up")
        os.posix_fallocate(fd, start, min(_RESERVED_BYTES, num_bytes - start))

    with ThreadPoolExecutor(_RESERVING_THREADS, "raydix-reserve") as threads:
        ranges = [threads.submit(reserve, start) for start in range(0, num_bytes, _RESERVED_BYTES)]
        try:
            for reserved in ranges:
                reserved.result()
        finally:
            threads.shutdown(cancel_futures=True)


def _own_pool(layout: PoolLayout | RecordLayout, device: torch.device) -> KVPool | RecordPool:
    try:
        return pool_of(layout, device)
    except RuntimeError as error:
        needed = byte_size(layout.num_bytes)
        said = str(error).strip().splitlines()[0]
        raise CacheUnavailable(f"no room for the pool of {needed}: {said}; lower pool.num_slots") from error


def map_shared_file(path: str, num_bytes: int) -> torch.Tensor:
    """Return a file's bytes as a tensor that shares them with every process that maps the file.

    Raises:
        OSError: it cannot be mapped; this process may have no more addresses.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        mmap.mmap(fd, num_bytes).close()  # tried first: torch leaves the file open if it fails
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error).strip().splitlines()[0]) from error
    finally:
        os.close(fd)


def open_shared_pool(handle: PoolHandle) -> torch.Tensor:
    """Map the CPU pool of another process on this node.

    Raises:
        OSError: its process is gone, or cannot be seen from here (another container, say), or it cannot be mapped.
    """
    if handle.num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if handle.path is None:
        raise OSError("the pool of this cache cannot be mapped")
    fd = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if f"raydix-{handle.epoch}" not in name or os.fstat(fd).st_size != handle.num_bytes:
            raise FileNotFoundError(f"{handle.path} is no longer the pool of epoch {handle.epoch}")
        return map_shared_file(f"/proc/self/fd/{fd}", handle.num_bytes)
    finally:
        os.close(fd)


class Asked(NamedTuple):
    """A pool in words, for errors."""

    what: str
    argument: str  # the argument that says how large it is


POOL = Asked("the pool", "pool.num_slots")


def check_room(asked: Asked, needed: int) -> None:
    """Raise CacheUnavailable unless this machine has `needed` bytes of free memory."""
    available = available_memory()
    if needed > available:
        raise CacheUnavailable(too_large(asked, needed, available))


def too_large(asked: Asked, needed: int, available: int) -> str:
    """Return the error of a pool that is larger than the free memory."""
    return (
        f"{asked.what} needs {byte_size(needed)} with its tables of slots, but {byte_size(available)} are free: "
        f"lower {asked.argument}, or raise the memory limit of the machine or container (the pool is not bound by "
        "--shm-size)"
    )


def gpu_uuid_of(device: torch.device) -> str:
    """Return the identity of a card, which is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def gpu_uuids() -> list[str]:
    """Return the identities of the cards that this process sees."""
    return [gpu_uuid_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


def export_cuda(storage: torch.Tensor) -> bytes:
    """Return a CUDA IPC handle of a tensor, for `open_cuda_pool`. The tensor must outlive every mapping."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(storage)  # type: ignore[no-untyped-call]
    return pickle.dumps(arguments)


def open_cuda_pool(handle: PoolHandle) -> torch.Tensor:
    """Map the GPU pool of another process, on the card that this process sees under any index.

    Raises:
        OSError: no visible card is the pool's, its process is gone, or CUDA IPC does not work from here.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    if handle.num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if handle.ipc_handle is None:
        raise OSError("the pool of this cache cannot be mapped")
    try:
        for index in range(torch.cuda.device_count()):
            if gpu_uuid_of(torch.device("cuda", index)) == handle.gpu_uuid:
                arguments = list(pickle.loads(handle.ipc_handle))
                arguments[_DEVICE_ARGUMENT] = index
                storage: torch.Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
                return storage
    except RuntimeError as error:
        raise OSError(f"CUDA: {error}") from error
    raise OSError(f"this process does not see the card {handle.gpu_uuid} of the pool")


_DEVICE_ARGUMENT = 6  # of rebuild_cuda_tensor: the index of the card in the process that maps it
