"""`PinnedMemory`: mapped host memory that is registered with CUDA, for fast copies to and from a card."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from typing import Any, cast

import torch

from raydix.cache_core.pool.record_copies import PIECE_BYTES

logger = logging.getLogger(__name__)

_EXIT_S = 30.0  # the longest wait of an interpreter that ends
_running: set[PinnedMemory] = set()


class PinnedMemory:
    """Registers memory with CUDA in a thread of its own, piece by piece: a GiB takes about half a second.

    Each call holds a lock of the driver. A piece ends where `PIECE_BYTES` divides the address, so no two pieces have a
    page of memory in common. CUDA refuses a transfer that crosses the end of a piece; `RecordCopies` cuts it there.

    Unregistered memory works, more slowly. The memory stays mapped until it is registered no more. An interpreter that
    ends waits for that: a thread must not be in a call of CUDA then.

    Args:
        storage: 1-D uint8, in host memory.
        register: registers `(address, number of bytes)`, and raises RuntimeError if that fails.
        unregister: the opposite, of an address.
    """

    def __init__(
        self,
        storage: torch.Tensor,
        register: Callable[[int, int], None] | None = None,
        unregister: Callable[[int], None] | None = None,
    ) -> None:
        self.error = ""  # why it could not be registered
        self._register = register or _register
        self._unregister = unregister or _unregister
        self._is_closed = threading.Event()
        self._ended = threading.Event()
        self._is_ready = False
        self._thread = threading.Thread(target=self._run, args=(storage,), name="raydix-pin", daemon=True)
        _running.add(self)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether all of the memory is registered."""
        return self._is_ready and not self._is_closed.is_set()

    def wait(self) -> None:
        """Wait until all of the memory is registered, or that has failed."""
        self._ended.wait()

    def close(self) -> None:
        """Have the memory registered no more. The thread does that, and then drops the memory."""
        self._is_closed.set()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, which `close` makes it do."""
        self._thread.join(timeout_s)

    def _run(self, storage: torch.Tensor) -> None:
        try:
            self._register_all(storage)
        finally:
            _running.discard(self)

    def _register_all(self, storage: torch.Tensor) -> None:
        """Register the memory, and unregister it after `close`."""
        address, pieces = storage.data_ptr(), []
        try:
            end = address + storage.numel()
            for border in range(address - address % PIECE_BYTES, end, PIECE_BYTES):
                if self._is_closed.is_set():
                    break
                start = max(address, border)
                self._register(start, min(border + PIECE_BYTES, end) - start)
                pieces.append(start)
            self._is_ready = not self._is_closed.is_set()
        except RuntimeError as error:
            self.error = str(error).strip().splitlines()[0]
            logger.warning("host memory could not be registered with CUDA (%s): copies work, more slowly", self.error)
        self._ended.set()
        if not self.error:
            self._is_closed.wait()
        for piece in pieces:
            try:
                self._unregister(piece)
            except RuntimeError as error:
                logger.warning("host memory stays registered with CUDA: %s", error)
                return


def _register(address: int, num_bytes: int) -> None:
    cudart = cast(Any, torch.cuda).cudart()
    torch.cuda.check_error(int(cudart.cudaHostRegister(address, num_bytes, 0)))


def _unregister(address: int) -> None:
    torch.cuda.synchronize()  # a copy that runs ends first
    cudart = cast(Any, torch.cuda).cudart()
    torch.cuda.check_error(int(cudart.cudaHostUnregister(address)))


@atexit.register
def _close_all() -> None:
    """End all threads: Python ends a process that is in a call of CUDA by an abort."""
    memories = list(_running)
    for memory in memories:
        memory.close()
    for memory in memories:
        memory.join(_EXIT_S)
