"""A `CacheService` with a host tier, of which the test ends the copies: `TieredService`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from support.models.stamped_kv import stamps
from support.processes.fake_clock import Clock
from support.tiers.faulty_copier import FaultyCopier
from support.waiting import wait_until

from raydix.actors.memory.pool_shapes import records_of
from raydix.actors.service.cache_service import CacheService
from raydix.actors.tiers.copier import Copy
from raydix.actors.tiers.host.host_memory import READY
from raydix.actors.tiers.host.host_tier import HostTier, Progress
from raydix.actors.tiers.lower_tiers import LowerTiers
from raydix.cache_core import RecordPool
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tiers.loads import Loads
from raydix.cache_core.tiers.move import Move
from raydix.cache_core.tiers.page_records import PageCopies
from raydix.cache_core.tiers.writes import Writes
from raydix.schemas import (
    AcquireRequest,
    CacheConfig,
    CacheError,
    DiskConfig,
    EvictionConfig,
    HostConfig,
    InsertRequest,
    LeaseConfig,
    LeaseResponse,
    Message,
    OpenSession,
    PoolConfig,
    ReleaseRequest,
    TokenIds,
    WaitingResponse,
    WaitRequest,
)

_BYTES = 8  # of a stamp

Found = TypeVar("Found")


@cache
def stamps_of(tokens: tuple[int, ...], salt: str = "") -> NDArray[np.int64]:
    """The stamp of each token."""
    return np.array(stamps(tokens, salt), np.int64)


def tiered_config(
    *,
    page_size: int = 1,
    device_pages: int = 16,
    host_pages: int = 32,
    window: int | None = None,
    num_states: int = 0,
    bigram: bool = False,
    host: dict[str, Any] | None = None,
    disk: dict[str, Any] | None = None,
    eviction: dict[str, Any] | None = None,
    leases: dict[str, Any] | None = None,
    **more: Any,
) -> CacheConfig:
    """A cache of records with one stamp for each token, window token and state; every rule is checked at each step.

    Args:
        host_pages: 0: there is no host tier.
        disk: fields of `DiskConfig`; None: there is no disk tier.
    """
    pool: dict[str, Any] = {"slot_bytes": _BYTES}
    if window is not None:
        pool |= {"swa_slot_bytes": _BYTES, "num_swa_slots": device_pages * page_size}
        more["sliding_window_size"] = window
    if num_states:
        pool |= {"state_bytes": _BYTES, "num_state_slots": num_states}
        more["kind"] = "mamba"
    host_fields: dict[str, Any] = {"num_slots": host_pages * page_size, "policy": "lru"}
    return CacheConfig(
        page_size=page_size,
        bigram=bigram,
        pool=PoolConfig(num_slots=device_pages * page_size, format="opaque", device="cpu", **pool),
        host=HostConfig(**host_fields | (host or {})) if host_pages else None,
        disk=None if disk is None else DiskConfig(**{"direct_io": "off", "write_mib_s": None, "flush_s": 0} | disk),
        eviction=EvictionConfig(**eviction or {}),
        leases=LeaseConfig(**leases or {}),
        validate=True,
        **more,
    )


class TieredService:
    """The service, its pool of stamps, and its copier. Make it, and use it, on a running loop.

    Args:
        config: of the cache; `tiered_config` has the pools.
        has_thread: copies run in a thread, as they do for users; False: they end when the test says so.

    Attributes:
        clock: of the service; timers go by the loop's.
        service: the service, with the open session "s".
        full, windows, states: the stamps in the pool, by slot, window slot and state slot.
    """

    def __init__(self, config: CacheConfig, has_thread: bool = False) -> None:
        self.clock = Clock()
        self.pool = RecordPool(records_of(config))
        self.service = CacheService(config, "e", self.pool, clock=self.clock)
        self.page = config.page_size
        self.window = config.sliding_window_size
        self.full, self.windows, self.states = (
            part.view(-1).numpy().view(np.int64) for part in (self.pool.pages, self.pool.windows, self.pool.states)
        )
        self._copier: FaultyCopier | None = None
        self._num_leases = 0
        if self.service.host is not None:
            if not has_thread:
                self.tiers.make_copier = self._make_copier  # type: ignore[method-assign, assignment]
            wait_until(lambda: self.tiers.state == READY)
        self.begin()

    def begin(self) -> None:
        """Open the session "s"."""
        self.open()

    def _make_copier(self, copies: PageCopies) -> FaultyCopier:
        lower = self.tiers.memory
        assert lower is not None and lower.pool is not None
        self._copier = FaultyCopier(self.pool, lower.pool)
        return self._copier

    @property
    def tiers(self) -> HostTier:
        assert self.service.host is not None
        return self.service.host

    @property
    def copier(self) -> FaultyCopier:
        self.tiers._is_ready()
        assert self._copier is not None
        return self._copier

    @property
    def copiers(self) -> list[FaultyCopier]:
        """All copiers."""
        return [] if self.service.host is None else [self.copier]

    @property
    def lower(self) -> LowerTiers:
        assert self.service.tiers is not None
        return self.service.tiers

    @property
    def all_loads(self) -> list[Loads]:
        """The loads to the pool, by the tier that they come from."""
        return [place.loads.moves for place in self.service._places]

    @property
    def all_writes(self) -> list[Writes]:
        """The writes between the tiers."""
        return [writes for place in self.service._places for writes in place.all_writes]

    @property
    def in_flight(self) -> list[Move]:
        """The moves in flight."""
        return [move for some in (*self.all_loads, *self.all_writes) for move in some.in_flight]

    @property
    def writes(self) -> list[Copy]:
        """The open writes."""
        return [copy for copy in self.copier.open if not copy.is_load]

    @property
    def loads(self) -> list[Copy]:
        """The open loads."""
        return [copy for copy in self.copier.open if copy.is_load]

    # ---------------------------------------------------------------- requests

    def open(self, session_id: str = "s") -> None:
        """Open a session."""
        self.service.open_session(OpenSession(session_id=session_id, owner="test"))

    def ask(self, request: Message, session_id: str = "s") -> Any:
        """The answer to one request, or the error in its place."""
        return self.service.execute(session_id, "e", (request,)).responses[0]

    def new_id(self) -> str:
        """The id of another lease."""
        self._num_leases += 1
        return f"l{self._num_leases}"

    def acquire(self, tokens: Sequence[int], lease_id: str | None = None, session_id: str = "s", **more: Any) -> Any:
        """The answer to an `acquire`."""
        request = AcquireRequest(lease_id or self.new_id(), TokenIds.pack(tokens), **{"timeout_s": 0.0} | more)
        return self.ask(request, session_id)

    async def outcome(self, waiting: WaitingResponse, session_id: str = "s") -> Any:
        """The outcome of a ticket that is settled, or its error."""
        assert self.is_settled(waiting), f"ticket {waiting.ticket} waits"
        try:
            return await self.service.wait(WaitRequest(session_id=session_id, epoch="e", ticket=waiting.ticket))
        except CacheError as error:
            return error

    def is_settled(self, waiting: WaitingResponse) -> bool:
        """Whether a ticket has an outcome that was not collected."""
        return self.service.wait_queue._by_ticket[waiting.ticket].outcome.done()

    def record(self, lease_id: str, session_id: str = "s") -> LeaseRecord:
        """The open lease of that id."""
        return self.service.core.leases.get(lease_id, session_id)

    # ---------------------------------------------------------------- content

    def slots_of(self, record: LeaseRecord, num_tokens: int) -> NDArray[np.int64]:
        """The slots of a lease's first tokens."""
        return (record.starts[:, None] + np.arange(self.page)).ravel()[:num_tokens]

    def check_read(self, record: LeaseRecord, tokens: tuple[int, ...], num_tokens: int, salt: str = "") -> None:
        """Read the first tokens of a lease: their KV, and the window KV that it has."""
        wanted = stamps_of(tokens, salt)[:num_tokens]
        found = self.full[self.slots_of(record, num_tokens)]
        assert (found == wanted).all(), f"{record.lease_id} reads {found}, not {wanted}"
        if self.window is None:
            return
        starts = self.service.core.swa_starts(record)[: -(-num_tokens // self.page)]
        halves = (starts[:, None] + np.arange(self.page)).ravel()[:num_tokens]
        held = np.repeat(starts > 0, self.page)[:num_tokens]
        found = self.windows[halves[held]]
        assert (found == wanted[held]).all(), f"{record.lease_id} reads window KV {found}, not {wanted[held]}"

    def check_prefix(self, record: LeaseRecord, tokens: tuple[int, ...], salt: str = "") -> None:
        """Read what a new lease has found: its prefix, all window KV that the next token needs, and its state."""
        num_tokens = record.prefix_len
        self.check_read(record, tokens, num_tokens, salt)
        if self.window is not None:
            needed = self.service.core.swa_starts(record)[max(0, num_tokens - self.window + 1) // self.page :]
            assert needed[: num_tokens // self.page].all() or not num_tokens, f"{record.lease_id} lacks window KV"
        if record.state_slot is not None:
            wanted = stamps_of(tokens, salt)[num_tokens - 1] if num_tokens else 0
            found = self.states[record.state_slot]
            assert found == wanted, f"{record.lease_id} begins with state {found}, not {wanted}"

    def compute(self, record: LeaseRecord, tokens: tuple[int, ...], salt: str = "") -> None:
        """Write the KV of the private pages of a lease, and the state after its last whole page."""
        first, wanted = record.num_published_pages * self.page, stamps_of(tokens, salt)
        self.full[self.slots_of(record, len(tokens))[first:]] = wanted[first:]
        if self.window is not None:
            starts = self.service.core.swa_starts(record)[: -(-len(tokens) // self.page)]
            halves = (starts[:, None] + np.arange(self.page)).ravel()[first : len(tokens)]
            held = np.repeat(starts > 0, self.page)[first : len(tokens)]
            self.windows[halves[held]] = wanted[first:][held]
        whole = len(tokens) // self.page * self.page
        if record.state_slot is not None and whole:
            self.states[record.state_slot] = wanted[whole - 1]

    def publish(self, tokens: Sequence[int], **more: Any) -> LeaseResponse:
        """Acquire, compute, publish and release a prompt; return the lease that it had."""
        row = tuple(tokens)
        lease = self.acquire(row, load=False, **more)
        assert isinstance(lease, LeaseResponse), lease
        record = self.record(lease.lease_id)
        self.check_prefix(record, row)
        self.compute(record, row)
        whole = len(row) // self.page * self.page if record.state_slot is not None else len(row)
        flags = record.state_slot is not None and whole > 0
        insert = InsertRequest(lease.lease_id, whole, TokenIds.pack([]), release=True, publish_state=flags)
        assert not isinstance(done := self.ask(insert), CacheError), done
        return lease

    def release(self, lease_id: str, session_id: str = "s") -> None:
        """End a lease."""
        assert not isinstance(done := self.ask(ReleaseRequest(lease_id=lease_id), session_id), CacheError), done

    # ---------------------------------------------------------------- moves

    async def turn(self, times: int = 3) -> None:
        """Let the loop run what is ready."""
        for _ in range(times):
            await asyncio.sleep(0)

    def write_all(self) -> None:
        """Write all that is in the pool, not the reserve alone."""
        configured = self.tiers._reserves
        self.tiers._reserves = [(plan, 10**6) for plan, _ in configured]
        for _ in range(1000):
            progress = self.tiers.write_ahead()
            for copy in self.writes:
                self.copier.finish(copy)
            if progress is Progress.AHEAD:
                self.tiers._reserves = configured
                return
        raise AssertionError("it writes without an end")

    def put_below(self, tokens: Sequence[int]) -> None:
        """Have a prompt on the host alone."""
        self.publish(tokens)
        self.write_all()
        self.service.core.evict(10**6)

    async def close(self) -> None:
        """Close the service; check both tiers, and that no slot is lost in either."""
        self.lower.check_invariants()
        await self.service.close()
        if self._copier is not None:
            assert not self._copier.open, "a copy is open after the end"
            self._copier.deliver()
        self.check_end()

    def check_end(self) -> None:
        """Check all tiers of a closed service, and that no slot is lost in any."""
        self.lower.check_invariants()
        assert not self.in_flight, "a move is left"
        for tier in (self.all_loads[0].pool, *(place.tier for place in self.service._places)):
            if tier.name == "disk":  # its records may be dormant, or leaving
                continue
            cache = tier.cache
            assert not len(cache.leases), f"{tier.name} has leases"
            cache.reset()
            while cache.reclaim(10**6):
                pass
            assert cache.free_slots == cache.num_slots, f"{tier.name} has lost slots"
            for sizes in (cache.swa_sizes(), cache.state_sizes()):
                assert sizes is None or sizes.free == sizes.num_slots, f"{tier.name} has lost {sizes}"
