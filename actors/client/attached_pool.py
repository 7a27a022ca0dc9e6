"""`AttachedPool`: the pool's tensors for a worker, mapped or by copying."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from math import prod
from operator import index
from typing import TYPE_CHECKING
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.actors.memory.pinned_memory import PinnedMemory
from raydix.actors.memory.pool_memory import open_cuda_pool, open_shared_pool
from raydix.actors.memory.pool_shapes import (
    OPAQUE,
    check_layers_alike,
    given_arrays,
    layout_of,
    pool_of,
    with_layers,
)
from raydix.actors.transport.process_liveness import ProcessLiveness
from raydix.cache_core import KVPool, PoolLayout, RecordLayout, RecordPool
from raydix.schemas import CacheError, CacheUnavailable, InvalidRequest, PoolHandle, ReadKV, WriteKV
from raydix.schemas.shown import brief

if TYPE_CHECKING:
    from raydix.actors.client.lease import Lease
    from raydix.actors.client.prefix_cache_client import PrefixCacheClient

logger = logging.getLogger(__name__)

_INTEGERS = frozenset(
    (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64)
)
_NUMBERS = _INTEGERS | {
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
}

_NAMES = ("k", "v", "index")  # the arguments of a write, and the fields of its message
_KV, _INDEX_KEYS = "K and V", "index keys"  # names in errors

Chunk = tuple[int, int]  # the range of its slots

_CHUNK_BYTES = 8 * 2**20  # copied by one message: a bound on the time that the cache's loop is blocked
_NUM_IN_FLIGHT = 2  # messages: one travels while the other one is copied


class AttachedPool:
    """The pool in this process, from `attach_pool`; it holds the mapping as long as it lives.

    If it is mapped, `write`, `gather`, `k`, `v` and `index` work on the cache's memory. The caller must hold the slots.
    `write_kv` and `read_kv` work everywhere, and the cache checks them against the lease.

    Attributes:
        epoch: the life of the cache that the pool belongs to.
        layout: the shapes and dtypes of its tensors.
        on_lost: called on the client's loop once the cache has ended or restarted, to drop views of its tensors: the
            memory stays mapped as long as there is one.
    """

    on_lost: Callable[[], None] | None = None

    def __init__(self, client: PrefixCacheClient, handle: PoolHandle, pool: KVPool | RecordPool | None) -> None:
        self._client = client
        self._pool = pool
        self._life = (
            None if pool is None or handle.liveness_path is None else ProcessLiveness.find(handle.liveness_path)
        )
        self._lost: CacheError | None = None
        self._pinned: PinnedMemory | None = None
        self.epoch = handle.epoch
        self.layout = layout_of(handle.config)

    @classmethod
    def attach(
        cls, client: PrefixCacheClient, handle: PoolHandle, local: KVPool | RecordPool | None, mapped: bool | None
    ) -> AttachedPool:
        """Attach to a pool; see `PrefixCacheClient.attach_pool`.

        Args:
            local: the pool itself, if it lies in this process.
        """
        pool: KVPool | RecordPool | None = None
        if mapped is not False:
            try:
                pool = local or map_pool(handle)
            except OSError as error:
                if mapped:
                    raise CacheUnavailable(f"the pool cannot be mapped from here: {error}") from error
                try:
                    check_layers_alike(layout_of(handle.config))
                except InvalidRequest as cannot_copy:
                    raise CacheUnavailable(
                        f"the pool cannot be mapped from here: {error}; and {cannot_copy}"
                    ) from error
                logger.warning("the pool cannot be mapped from here (%s): KV is copied through the cache", error)
        return cls(client, handle, pool)

    @staticmethod
    def check_arguments(mapped: object, pin: object) -> None:
        """Raise InvalidRequest unless these are values of `mapped` and `pin` for `attach_pool`."""
        for name, value in (("mapped", mapped), ("pin", pin)):
            if not (value is None or isinstance(value, bool)):
                raise InvalidRequest(f"{name} must be True, False or None, not {brief(value)}")

    async def pin(self, wanted: bool | None) -> None:
        """Register the pool's host memory with CUDA; see `PrefixCacheClient.attach_pool`.

        Raises:
            CacheUnavailable: it is wanted, and cannot be done.
        """
        in_memory = self._pool is not None and self._pool.storage.device.type == "cpu"
        can = in_memory and torch.cuda.is_available()
        if wanted and not can:
            reason = "this process has no GPU" if in_memory else "it is not host memory that is mapped here"
            raise CacheUnavailable(f"the pool cannot be registered with CUDA (pin=True): {reason}")
        if self._pool is None or wanted is False or not can or not self._pool.storage.numel():
            return
        pinned = self._pinned = PinnedMemory(self._pool.storage)
        finalize(self, pinned.close).atexit = False
        if wanted:
            await asyncio.to_thread(pinned.wait)
            if pinned.error:
                raise CacheUnavailable(f"the pool cannot be registered with CUDA (pin=True): {pinned.error}")

    @property
    def pinned(self) -> bool:
        """Whether the mapped host memory is registered with CUDA by now."""
        return self._pinned is not None and self._pinned.is_ready

    @property
    def mapped(self) -> bool:
        """Whether the tensors are the cache's memory."""
        return self._pool is not None

    @property
    def lost(self) -> bool:
        """Whether the cache has restarted or died: its memory is gone, and `attach_pool` gives the new one."""
        return self._lost is not None

    def drop(self, error: CacheError) -> None:
        """Release the memory of a cache that has ended; every later use of the pool raises `error`."""
        self._lost, self._pool = error, None
        if self._pinned is not None:
            self._pinned.close()
        if self.on_lost is not None:
            self.on_lost()

    def drop_if_orphaned(self) -> None:
        """Release mapped memory if the cache's process has ended: a cache that restarts may need the memory."""
        if self._pool is not None and self._life is not None and self._life.has_ended():
            self.drop(CacheUnavailable("the cache's process has ended, and the pool with it: attach_pool again"))

    @property
    def k(self) -> list[torch.Tensor]:
        """Each layer's K, `[num_slots + page_size, num_kv_heads, head_dim]`; in kind "slots" `[num_slots, ...]`.

        Layers that differ in `PoolConfig.layers` each have a shape of their own. Window layers have `num_swa_slots`.
        """
        return self._mapped_pool().k

    @property
    def v(self) -> list[torch.Tensor]:
        """Each layer's V, as `k` with `v_head_dim`."""
        return self._mapped_pool().v

    @property
    def index(self) -> list[torch.Tensor]:
        """Each layer's index keys, `[num_slots + page_size, index_head_dim]`; empty for a layer that has none.

        Window layers have `num_swa_slots`.
        """
        return self._mapped_pool().index

    @property
    def pages(self) -> torch.Tensor:
        """The records of an opaque pool's pages, `[num_slots / page_size + 1, page_size * slot_bytes]` uint8.

        The record of a page is at the number of its first slot divided by the page size. `lease.pages` has the numbers.
        """
        return self._records().pages

    @property
    def windows(self) -> torch.Tensor:
        """The records of an opaque pool's window halves, as `pages` with `swa_slot_bytes`; by `lease.swa_slots`."""
        return self._records().windows

    @property
    def states(self) -> torch.Tensor:
        """The records of an opaque pool's states, `[num_state_slots + 1, state_bytes]`, by `lease.state_slot`."""
        return self._records().states

    def by_sequence(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `(k_cache, v_cache)`, `[sequence, position, layer, num_kv_heads, dim]` each: views of the same memory.

        Raises:
            InvalidRequest: the cache is not of kind "slots", or the pool is not mapped.
        """
        pool = self._mapped_pool()
        if pool.layout.max_seq_len is None:
            raise InvalidRequest("this cache's slots come in pages: only kind 'slots' has them by sequence")
        return pool.by_sequence()

    def state(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a state layer, `[num_state_slots + 1, *shape]` each, indexed by `lease.state_slot`.

        Raises:
            InvalidRequest: there is no such layer, or the pool is not mapped.
        """
        return self._mapped_pool().state(self._checked_layer(layer))

    def write(
        self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: torch.Tensor | None = None
    ) -> None:
        """Write KV of one layer, `[n, num_kv_heads, dim]` each, into private slots of the caller's leases.

        Values of another dtype are cast to the pool's. A layer with index keys takes `index`, `[n, index_head_dim]`. A
        sliding-window layer takes the lease's `swa_slots`.

        Raises:
            InvalidRequest: there is no such layer or slot, a shape does not fit, index keys are missing or given to a
                layer that has none, or the pool is not mapped.
        """
        pool, slots = self._mapped_pool(), _checked_slots(slots)
        k, v = _checked_values(k), _checked_values(v)
        if index is not None:
            index = _checked_values(index, _INDEX_KEYS)
        try:
            pool.write(self._checked_layer(layer), slots, k, v, index)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            _raise_callers_fault(error, pool.k[layer], slots, k, v, *([] if index is None else [index]))
            raise

    def gather(
        self, layer: int, slots: torch.Tensor, out: Sequence[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return copies of the K and V of slots in one layer, `[n, num_kv_heads, dim]` each, in `out` if it is given.

        A layer with index keys also returns these, `[n, index_head_dim]`.

        They belong to the lease's tokens if the lease has not expired by then, which `insert` or `confirm_open` would
        raise. Allocating large tensors takes several times as long as the copy: pass `out` to gather often.

        Raises:
            InvalidRequest: there is no such layer or slot, `out` does not fit, or the pool is not mapped.
        """
        pool, slots = self._mapped_pool(), _checked_slots(slots)
        if out is not None:
            if not isinstance(out, (tuple, list)):
                raise InvalidRequest(f"out must be a tuple of tensors, not a {type(out).__name__}")
            for tensor in out:
                _check_values(tensor)
        try:
            return pool.gather(self._checked_layer(layer), slots, out)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            _raise_callers_fault(error, pool.k[layer], slots)
            raise

    async def write_kv(
        self, lease: Lease, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: torch.Tensor | None = None
    ) -> None:
        """Write KV of all layers, `[num_layers, n, num_kv_heads, dim]` each, into private slots of a lease.

        Values of another dtype are cast to the pool's. Layers with index keys take `index`,
        `[num_layers, n, index_head_dim]`.

        Raises:
            InvalidRequest: the lease does not hold all the slots privately, a shape does not fit, index keys are
                missing or given to layers that have none, or the pool's layers differ in shape.
            UnknownLease: the lease has ended.
            StaleEpoch: the cache has restarted since the pool was attached.
        """
        layout = self._layers()
        self._client.check_lease(lease)
        transport, slots = lease.transport, _checked_slots(slots)
        _check_dense(slots)
        given = {
            name: _checked_values(values, _INDEX_KEYS if name == "index" else _KV)
            for name, values in zip(_NAMES, given_arrays(layout, k, v, index), strict=False)
        }
        for (name, tensor), shape in zip(given.items(), layout.copy_shapes(len(slots)), strict=True):
            if tuple(tensor.shape) != shape:
                raise InvalidRequest(f"{name} must be of shape {shape}, not {tuple(tensor.shape)}")

        async def write(start: int, stop: int) -> None:
            request = WriteKV(
                session_id=transport.session_id,
                epoch=self.epoch,
                lease_id=lease.lease_id,
                slots=slots[start:stop].cpu().numpy(),
                **{name: _raw_bytes(tensor[:, start:stop].to(layout.dtype)) for name, tensor in given.items()},
            )
            await transport.write_kv(request)

        await _run_for_each(_chunks(layout, len(slots)), write)

    async def read_kv(self, lease: Lease, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return copies of the K and V of slots of a lease, all layers, `[num_layers, n, num_kv_heads, dim]` each.

        If the layers have index keys, also these, `[num_layers, n, index_head_dim]`.

        Raises:
            InvalidRequest: the lease does not cover all the slots, or the pool's layers differ in shape.
            UnknownLease: the lease has ended.
            StaleEpoch: the cache has restarted since the pool was attached.
        """
        layout = self._layers()
        self._client.check_lease(lease)
        transport, slots = lease.transport, _checked_slots(slots)
        _check_dense(slots)
        copies = tuple(torch.empty(shape, dtype=layout.dtype) for shape in layout.copy_shapes(len(slots)))

        async def read(start: int, stop: int) -> None:
            request = ReadKV(
                session_id=transport.session_id,
                epoch=self.epoch,
                lease_id=lease.lease_id,
                slots=slots[start:stop].cpu().numpy(),
            )
            response = await transport.read_kv(request)
            arrays = given_arrays(layout, response.k, response.v, response.index)
            for copy, data in zip(copies, arrays, strict=True):
                part = copy[:, start:stop].view(torch.uint8).numpy()
                part[:] = data.reshape(part.shape)

        await _run_for_each(_chunks(layout, len(slots)), read)
        return copies

    def _layers(self) -> PoolLayout:
        """Return the layout of a pool; its layers must be alike, so that KV can be copied."""
        self._check_alive()
        return check_layers_alike(self.layout)

    def _mapped_pool(self) -> KVPool:
        self._check_alive()
        if self._pool is None:
            check_layers_alike(self.layout)
            raise InvalidRequest("this pool is not mapped: use `await write_kv(...)` and `await read_kv(...)`")
        return with_layers(self._pool)

    def _records(self) -> RecordPool:
        self._check_alive()
        if not isinstance(self.layout, RecordLayout):
            raise InvalidRequest("this pool has layers, and no opaque records: use `k`, `v` and `state`")
        if self._pool is None:
            raise InvalidRequest(OPAQUE)
        assert isinstance(self._pool, RecordPool), "a pool has the layout of its configuration"
        return self._pool

    def _check_alive(self) -> None:
        """Raise a copy of the error with which the pool was lost."""
        if self._lost is not None:
            raise type(self._lost)(*self._lost.args)

    def _checked_layer(self, layer: int) -> int:
        num_layers = 0 if isinstance(self.layout, RecordLayout) else len(self.layout.layers)
        with suppress(Exception):  # `index` of a foreign object may raise any error
            if 0 <= index(layer) < num_layers:
                return index(layer)
        raise InvalidRequest(f"layer must be one of the pool's {num_layers}, not {brief(layer)}")


def _chunks(layout: PoolLayout, num_slots: int) -> list[Chunk]:
    slot_values = sum(map(prod, layout.copy_shapes(1)))
    step = max(1, _CHUNK_BYTES // max(1, slot_values * layout.dtype.itemsize))
    return [(start, min(start + step, num_slots)) for start in range(0, num_slots, step)]


async def _run_for_each(chunks: Iterable[Chunk], work: Callable[[int, int], Awaitable[None]]) -> None:
    """Run `work` for each chunk in order, two at a time.

    After an error start no further chunk, but wait for those in flight: a message that was sent takes effect.
    """
    left = deque(chunks)

    async def run_next() -> None:
        try:
            while left:
                await work(*left.popleft())
        except BaseException:
            left.clear()
            raise

    tasks = [asyncio.create_task(run_next()) for _ in range(_NUM_IN_FLIGHT)]
    try:
        await asyncio.wait(tasks)
    finally:  # also if the caller is cancelled
        left.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        task.result()


def map_pool(handle: PoolHandle) -> KVPool | RecordPool:
    """Map the pool of another process.

    Raises:
        OSError: it lies on another node or GPU, or this process cannot open it.
    """
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    if node_id != handle.node_id:
        raise OSError(f"it lies on node {handle.node_id}, this is node {node_id}")
    storage = open_cuda_pool(handle) if handle.device_type == "cuda" else open_shared_pool(handle)
    return pool_of(layout_of(handle.config), storage=storage)


def _checked_slots(slots: torch.Tensor) -> torch.Tensor:
    """Return slots as int64; raise InvalidRequest unless they are a 1-D tensor of integers."""
    if not isinstance(slots, torch.Tensor):
        raise InvalidRequest(f"slots must be a tensor of integers, 1-D, not a {type(slots).__name__}")
    if slots.ndim == 1 and slots.dtype is torch.int64 and not slots.is_neg():
        return slots
    _check_dense(slots)
    if slots.ndim != 1 or slots.dtype not in _INTEGERS:
        raise InvalidRequest(f"slots must be a 1-D tensor of integers, not {slots.dtype} of shape {tuple(slots.shape)}")
    return slots.resolve_neg().to(torch.int64)


def _checked_values(given: torch.Tensor, names: str = _KV) -> torch.Tensor:
    """Return K, V or index keys as plain values: a gradient or a pending negation would go into the pool's tensors."""
    _check_values(given, names)
    return given.detach().resolve_neg() if given.requires_grad or given.is_neg() else given


def _check_values(given: torch.Tensor, names: str = _KV) -> None:
    """Raise InvalidRequest unless this is a dense tensor of real numbers."""
    if not isinstance(given, torch.Tensor):
        raise InvalidRequest(f"{names} must be tensors, not a {type(given).__name__}")
    _check_dense(given)
    if given.dtype not in _NUMBERS:
        raise InvalidRequest(f"{names} must be tensors of real numbers, not of {given.dtype}")


def _check_dense(*given: torch.Tensor) -> None:
    for tensor in given:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
            raise InvalidRequest("slots, K, V and index keys must be dense tensors that have values")


def _raise_callers_fault(error: Exception, rows: torch.Tensor, slots: torch.Tensor, *given: torch.Tensor) -> None:
    """Raise InvalidRequest if an argument of the caller has caused this error of a mapped pool's layer."""
    if isinstance(error, ValueError):
        raise InvalidRequest(str(error)) from error
    _check_dense(slots, *given)
    if isinstance(error, IndexError):
        found = f"{int(slots.min())} to {int(slots.max())}"
        raise InvalidRequest(f"slots must be rows of the pool, 0 to {len(rows) - 1}, not {found}") from error


def _raw_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return array
