"""`DiskRig`: a core, perhaps a host tier, and a `DiskTier` below, without a service."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiers.faulty_files import FaultyFileCalls
from support.tiers.two_tiers import Moves

from raydix.actors.service.core_factory import build_core, build_disk_cache
from raydix.actors.tiers.disk.disk_store import DiskStore
from raydix.actors.tiers.disk.disk_tier import DiskTier
from raydix.actors.tiers.disk.disk_writes import Source
from raydix.actors.tiers.disk.file_calls import FileCalls
from raydix.cache_core import KVCache, RadixKey, RecordLayout, RecordPool
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tiers.disk_spaces import Models
from raydix.cache_core.tiers.index_row import FIRST, IndexRow, RowPlace
from raydix.cache_core.tiers.loads import Filled
from raydix.cache_core.tiers.look_up import LookUp
from raydix.cache_core.tiers.moves import check_all
from raydix.cache_core.tiers.page_records import PageRecords
from raydix.cache_core.tiers.record_keeper import _DORMANT, _WITH_ROW
from raydix.cache_core.tiers.tier import Tier
from raydix.cache_core.tree.page_hashes import chain_hashes
from raydix.schemas import CacheConfig, DiskConfig, PoolConfig

PAGE = 4
SLOT_BYTES, HALF_BYTES, STATE_BYTES = 100, 60, 5000
WAIT_S = 20


class DiskRig:
    """A pool of 64 pages above a disk of some records. All calls are made on the event loop.

    The KV of a page is made of its hash and of the weights, so that each process knows it.

    Args:
        host_pages: of a host tier between them; 0: there is none.
        window: tokens of a sliding window; None: there is none.
        num_states: states of the pool and of the disk; 0: there are none.
        disk: fields of `DiskConfig`.

    Attributes:
        models: that are bound to all namespaces; None: none are.
        weights: that compute the KV of a namespace, so far "".
        may_find: for a namespace, the weights of which KV may be found, if not only the present ones. All KV of a lease
            must be of the same.
    """

    def __init__(
        self,
        path: Path,
        *,
        num_pages: int = 64,
        host_pages: int = 0,
        disk_pages: int = 40,
        models: Models | None = ("m", None, "v1"),
        window: int | None = None,
        num_states: int = 0,
        calls: FileCalls | None = None,
        clock: Callable[[], float] | None = None,
        **disk: Any,
    ) -> None:
        self.models = models
        self.weights: dict[str | None, str] = defaultdict(str)
        self.may_find: dict[str | None, set[str]] = {}
        fields: dict[str, Any] = {"num_state_slots": num_states}
        fields |= {"format": "opaque", "slot_bytes": SLOT_BYTES}
        fields |= {"swa_slot_bytes": HALF_BYTES} if window is not None else {}
        fields |= {"state_bytes": STATE_BYTES} if num_states else {}
        given = {"direct_io": "off", "write_mib_s": None} | disk
        config = CacheConfig(
            kind="mamba" if num_states else "radix",
            page_size=PAGE,
            sliding_window_size=window,
            pool=PoolConfig(num_slots=num_pages * PAGE, device="cpu", **fields),
            disk=DiskConfig(path=str(path), num_slots=disk_pages * PAGE, **given),
        )
        self.window, self.num_states = window, num_states
        self.pool = self._pool(num_pages)
        core, _ = build_core(config, self.pool, lambda: None)
        assert isinstance(core, KVCache)
        self.core = core
        self.pools = {"device": self.pool, "host": self._pool(host_pages) if host_pages else None}
        sources = [Source(Tier("device", "CPU", core), lambda: self.pool)]
        self.host: KVCache | None = None
        self.host_moves: Moves | None = None
        if host_pages:
            self.host = build_disk_cache(config, config.disk_sizes()._replace(num_slots=host_pages * PAGE))
            sources.append(Source(Tier("host", "CPU", self.host), lambda: self.pools["host"]))
            self.host_moves = Moves(sources[0].tier, sources[1].tier)
        options: dict[str, Any] = {} if clock is None else {"clock": clock}
        cache = build_disk_cache(config, config.disk_sizes())
        self.disk = DiskTier(
            config, "kv-0", sources, cache, lambda name: self.models, lambda: None, lambda: None, calls, **options
        )  # fmt: skip
        self._num_leases = 0

    def _pool(self, num_pages: int) -> RecordPool:
        slots, has_window = num_pages * PAGE, self.window is not None
        windows = (slots, HALF_BYTES) if has_window else (0, 0)
        states = (self.num_states, STATE_BYTES) if self.num_states else (0, 0)
        return RecordPool(RecordLayout(slots, PAGE, SLOT_BYTES, *windows, *states))

    @property
    def cache(self) -> KVCache:
        """The disk's cache."""
        return self.disk.tier.cache

    async def wait(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(WAIT_S):
            while not is_so():  # noqa: ASYNC110 -- the thread of the disk changes it
                await asyncio.sleep(0.002)

    async def ready(self) -> None:
        """Wait until the disk is open and built."""
        self.disk.start()
        await self.wait(lambda: self.disk.state == "ready")
        await self.settle()

    async def settle(self) -> None:
        """Wait until the disk has nothing to do."""
        disk = self.disk

        def is_idle() -> bool:
            is_built = all(space.builder is None for space in disk.spaces)
            num_leaving = sum(keeper.num_leaving for keeper in disk.keepers.values())
            return is_built and disk.writes.is_idle and not num_leaving and disk.deletions.future() is None

        await self.wait(lambda: is_idle() and not disk.files.tasks and not disk.work.is_scheduled)
        self.check()

    def check(self) -> None:
        """Check the rules of all caches and of the records."""
        of_host = [] if self.host_moves is None else [self.host_moves]
        all_loads = [self.disk.loads.moves, *(moves.loads for moves in of_host)]
        check_all(all_loads, [*self.disk.all_writes, *(moves.writes for moves in of_host)])
        self.disk.check_invariants()

    def retire(self, weights: str, *namespaces: str | None) -> None:
        """Let other weights come for some namespaces: what they had so far may not be found any more."""
        self.core.retire(lambda name: name in namespaces)
        for namespace in namespaces:
            self.weights[namespace] = weights
            self.may_find.pop(namespace, None)

    async def check_index(self) -> None:
        """Compare the rows of the index with the records and with the tree. The disk must have nothing to do."""
        for cache in (self.core, self.host, self.cache):
            while cache is not None and cache.reclaim(10**6):
                pass
        self.disk.wake()
        await self.settle()
        rows = {(row.kind, row.record): row for row in await self.disk.files.do(_all_rows)}
        for kind, keeper in self.disk.keepers.items():
            named = {record for name, record in rows if name == kind}
            kept = set(np.flatnonzero(np.isin(keeper._states, (_WITH_ROW, _DORMANT))).tolist())
            assert kept == named, f"records of kind {kind} and their rows differ: {kept ^ named}"
        for node in self.cache.radix.parts.tree.nodes():
            space = self.disk.spaces.current(node.namespace.extra_key)
            assert space is not None and node.value is not None
            for start, name in zip(node.value.numpy()[::PAGE].tolist(), chain_hashes(node, PAGE), strict=True):
                row = rows["full", start // PAGE]
                assert (row.digest.hex(), row.space) == (name, space.number), f"{row} is not that of its page"

    # ---------------------------------------------------------------- requests

    def _lease_id(self) -> str:
        self._num_leases += 1
        return f"r{self._num_leases}"

    def request(self, tokens: list[int], namespace: str | None = None, cache: KVCache | None = None) -> int:
        """Compute the KV of a prompt, and publish it; return the prefix that was hit."""
        cache = self.core if cache is None else cache
        key, lease_id, weights = RadixKey(tokens, namespace), self._lease_id(), self.weights[namespace]
        lease = cache.acquire(lease_id, "s", key)
        hit = lease.prefix_len
        pool = self.pools["device" if cache is self.core else "host"]
        if lease.state_slot is not None and pool is not None:
            pool.states[lease.state_slot] = tensor(_state_of(tokens, namespace, weights))
        cache.insert(lease_id, "s", len(tokens), RadixKey([], namespace), publish_state=self.num_states > 0)
        if pool is not None:
            num_pages = len(tokens) // PAGE
            halves = [0] * num_pages
            if self.window is not None:
                halves = cache.allocator.swa_starts(lease.starts[:num_pages]).tolist()
            for start, half, name in zip(lease.starts[:num_pages].tolist(), halves, _hashes(lease), strict=True):
                pool.pages[start // PAGE] = tensor(_kv(name, PAGE * SLOT_BYTES, weights))
                if half:
                    pool.windows[half // PAGE] = tensor(_kv(name, PAGE * HALF_BYTES, weights + "half"))
        cache.release(lease_id, "s")
        return hit

    async def twice(self, *prompts: list[int], namespace: str | None = None) -> None:
        """Use prompts for the second time, and wait until they are written."""
        for _ in range(2):
            for prompt in prompts:
                self.request(prompt, namespace)
        await self.settle()

    def verify(self, lease: LeaseRecord) -> None:
        """Check the KV of a lease's cached prefix."""
        pool, num_pages = self.pool, lease.prefix_len // PAGE
        if pool is None:
            return
        names = _hashes(lease)[:num_pages]
        halves = self.core.swa_starts(lease)[:num_pages].tolist() if self.window is not None else [0] * num_pages
        if not num_pages:
            return
        first = bytes(pool.pages[lease.starts[0] // PAGE].tolist())
        namespace = lease.key.extra_key
        may_find = self.may_find.get(namespace, {self.weights[namespace]})
        right = [weights for weights in may_find if first == _kv(names[0], PAGE * SLOT_BYTES, weights)]
        assert right, "a lease has wrong KV"
        weights = right[0]
        for start, half, name in zip(lease.starts[:num_pages].tolist(), halves, names, strict=True):
            found = bytes(pool.pages[start // PAGE].tolist())
            assert found == _kv(name, PAGE * SLOT_BYTES, weights), "a lease has wrong KV"
            if half:
                found = bytes(pool.windows[half // PAGE].tolist())
                assert found == _kv(name, PAGE * HALF_BYTES, weights + "half"), "a lease has wrong window KV"
        if self.window is not None:
            assert all(halves[-(self.window // PAGE) :]), "a lease has no window KV at its end"
        if lease.state_slot is not None:
            tokens: list[Any] = list(lease.key.token_ids)[: lease.prefix_len]
            state = bytes(pool.states[lease.state_slot].tolist())
            assert state == _state_of(tokens, namespace, weights), "a lease has a wrong state"

    async def load(
        self, tokens: list[int], namespace: str | None = None, timeout_s: float = WAIT_S
    ) -> tuple[int, Filled | None]:
        """Acquire a prompt, load it from the disk, and release it.

        Returns:
            The length of the lease's prefix, of which the KV is right, and the end of the load; None without a load.
        """
        key, lease_id, finished = RadixKey(tokens, namespace), self._lease_id(), None
        lease = self.core.acquire(lease_id, "s", key)
        move = self.disk.loads.load(lease, LookUp(key), timeout_s)
        if move is not None:
            done: asyncio.Future[Filled] = asyncio.get_running_loop().create_future()
            self.disk.loads.when_loaded(move, done.set_result)
            self.check()
            async with asyncio.timeout(WAIT_S):
                finished = await done
            if finished.lease is None:
                return 0, finished
        found = lease.prefix_len
        self.verify(lease)
        self.core.release(lease_id, "s")
        self.check()
        return found, finished

    async def lengths(self, *prompts: list[int]) -> list[int]:
        """The prefixes that are loaded, with the right KV."""
        return [(await self.load(prompt))[0] for prompt in prompts]


def _all_rows(store: DiskStore) -> list[IndexRow]:
    """The rows of all spaces of an index."""
    rows: list[IndexRow] = []
    for space in store.index.spaces():
        place: RowPlace | None = FIRST
        while place is not None:
            some, place = store.index.rows(space.number, place)
            rows += some
    return rows


def tensor(data: bytes) -> torch.Tensor:
    """The bytes as a tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _hashes(lease: LeaseRecord) -> list[str]:
    """The hashes of the published pages of a lease."""
    hashes: list[str] = []
    node = lease.node
    while node.data:
        hashes = chain_hashes(node, PAGE) + hashes
        assert node.parent is not None
        node = node.parent
    return hashes


def _kv(name: str, num_bytes: int, weights: str) -> bytes:
    return hashlib.shake_256(f"{name} {weights}".encode()).digest(num_bytes)


def _state_of(tokens: list[int], namespace: str | None, weights: str) -> bytes:
    return hashlib.shake_256(repr((tokens, namespace, weights)).encode()).digest(STATE_BYTES)


@contextmanager
def stalled_copies() -> Iterator[FaultyFileCalls]:
    """Pages are copied to the writers' buffers as calls of the name "gather", which can be stalled."""
    calls, gather = FaultyFileCalls(), PageRecords.gather

    def noted(*arguments: Any) -> None:
        calls.meet("gather")
        gather(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageRecords, "gather", noted)
        yield calls


@asynccontextmanager
async def opened_rig(path: Path, **options: Any) -> AsyncIterator[DiskRig]:
    """A rig with its disk open."""
    rig = DiskRig(path, **options)
    try:
        await rig.ready()
        yield rig
    finally:
        rig.disk.close(WAIT_S)
