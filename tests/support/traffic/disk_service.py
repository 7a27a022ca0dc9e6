"""Random requests to a whole `CacheService` with a disk, also below a host tier, with faults, kills and restarts.

Every slot that a lease of a bound session reads must have the stamp of its token, of the namespace and of the weights,
whatever was killed before. Some sessions never bind, and compute other stamps. A retirement that the disk has not
confirmed before a kill is repeated, unless other weights are bound then.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from support.tiers.disk_service import DiskService
from support.tiers.faulty_files import FaultyFileCalls
from support.tiers.tiered_service import tiered_config
from support.traffic.tiered_service import NAMESPACES, Request, ServiceTraffic, Shape

from raydix.actors.tiers.disk.record_file import BLOCK
from raydix.schemas import (
    AcquireRequest,
    CacheConfig,
    CacheError,
    CacheUnavailable,
    ConfigMismatch,
    InsertRequest,
    Message,
    ResetRequest,
    RetireRequest,
    SetWeightsRequest,
    TokenIds,
    WaitingResponse,
)


@dataclass(frozen=True)
class DiskShape(Shape):
    """The sizes of the tiers. `host_pages` is 0 without a host tier."""

    disk_pages: int = 40
    admit: str = "second_use"

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.disk_pages} on the disk, {self.admit}"

    def config_at(self, path: Path) -> CacheConfig:
        """The configuration of a cache of these sizes, with its disk in a folder."""
        states = {"num_state_slots": self.num_states} if self.num_states else {}
        windows = {"num_swa_slots": self.disk_pages * self.page_size} if self.window else {}
        return tiered_config(
            page_size=self.page_size,
            device_pages=self.device_pages,
            host_pages=self.host_pages,
            window=self.window,
            num_states=self.num_states,
            bigram=self.bigram,
            host={"policy": self.policy, "reserve": 0.9} if self.host_pages else None,
            disk={"path": str(path), "num_slots": self.disk_pages * self.page_size, "admit": self.admit, "reserve": 0.9}
            | states
            | windows,
            eviction={"high_watermark": 0.9, "low_watermark": 0.7, "policy": self.policy},
            leases={"session_ttl_s": 1000.0},
        )


class DiskServiceTraffic(ServiceTraffic):
    """Random operations on services that follow each other on one disk."""

    REFUSALS = (*ServiceTraffic.REFUSALS, ConfigMismatch)
    LATE_REFUSALS = (*ServiceTraffic.LATE_REFUSALS, ConfigMismatch)
    cache: DiskService
    shape: DiskShape

    def __init__(self, seed: int, shape: DiskShape, path: Path) -> None:
        super().__init__(seed, shape)
        self.path = path
        self.label = "0"
        self.num_weights = 0
        self.is_confirmed = True  # whether the disk has committed all retirements under the present label
        self.has_damage = seed % 2 == 0  # else no record may be found to be wrong
        self.tickets: list[WaitingResponse] = []  # of retirements
        self.strangers: set[str] = set()  # sessions that never bind

    # ---------------------------------------------------------------- lives

    def make(self) -> DiskService:
        self.calls = FaultyFileCalls()
        cache = DiskService(self.shape.config_at(self.path), self.calls)
        cache.disk.work._clock = cache.disk.loads._clock = self.now
        return cache

    def now(self) -> float:
        return self.loop.now

    def start(self) -> None:
        super().start()
        self.bind()

    def operations(self) -> dict[Callable[[], Any], float]:
        operations = super().operations()
        if not self.shape.host_pages:
            del operations[self.write_ahead]
        return operations | {
            self.end_session: 0.5,
            self.use_again: 24,
            self.copy_step: 8,
            self.write_step: 12,
            self.report: 12,
            self.work: 16,
            self.bind: 2,
            self.fail: 2,
            self.damage: 3,
            self.retire: 0.7,
            self.restart: 0.7,
        }

    def use_again(self) -> None:
        """A client computes a prompt of before, and ends its lease: the pages are due."""
        tokens, namespace = self.prompt()
        tokens = tokens[: len(tokens) // self.page * self.page]
        message = AcquireRequest(self.cache.new_id(), TokenIds.pack(tokens), self.framed(namespace), timeout_s=0.0)
        self.begin(message, tokens, namespace)
        request = self.requests.get(message.lease_id)
        if request is not None and request.is_open:
            flags = self.shape.num_states > 0
            insert = InsertRequest(request.lease_id, len(tokens), TokenIds.pack([]), release=True, publish_state=flags)
            if not isinstance(self.ask(insert, request.session_id), CacheError):
                self.requests.pop(request.lease_id)

    def bind(self) -> None:
        """The clients that have a model bind it, with the weights as they are."""
        for session_id in ("s", *self.sessions):
            if session_id not in self.strangers:
                self.cache.bind(self.label, session_id)
        self.was_checked = True

    def open_session(self) -> None:
        super().open_session()
        if self.rng.random() < 0.25:
            self.strangers.add(self.sessions[-1])

    def knows(self, session_id: str) -> bool:
        bindings = self.cache.service.bindings
        bound, base = bindings.sessions.get(session_id), bindings._bindings.get(None)
        return bound is not None and base is not None and bound.generations.get(None) == base.generation

    def salt_of(self, request: Request) -> str:
        return super().salt_of(request) + ", unknown" * (request.session_id in self.strangers)

    async def restart(self) -> None:
        """The service ends, or is killed; another one takes its disk."""
        cache = self.cache
        is_killed = self.rng.random() < 0.6
        self.done["kill" if is_killed else "end"] += 1
        self.count_life()
        if not is_killed:
            for ticket in self.tickets:
                cache.service.wait_queue._by_ticket[ticket.ticket].outcome.add_done_callback(self.note_end)
            await cache.service.close()
            cache.check_end()
        self.is_confirmed = cache.disk.deletions.future() is None
        if is_killed:
            await cache.kill()
        self.requests.clear()
        self.sessions.clear()
        self.tickets.clear()
        self.owned.clear()
        self.given_up.clear()
        self.from_pool = 0
        self.cache = self.make()
        self.start()
        if not self.is_confirmed:
            self.done["repeated retirement"] += 1
            await self.repeat()

    def note_end(self, outcome: Any) -> None:
        """A retirement is answered before the service ends."""
        self.done["answered at the end"] += 1
        error = outcome.exception()
        assert error is None or "has not confirmed" in str(error), error

    async def repeat(self) -> None:
        """Retire all once more, until the disk confirms it, before anything is used."""
        while True:
            answer = await self.cache.answer(self.cache.ask(ResetRequest()))
            if not isinstance(answer, CacheError):
                break
            assert isinstance(answer, CacheUnavailable), answer
            await self.cache.settle()
            self.loop.now += 2
            await self.cache.turn()
        assert self.cache.disk.deletions.future() is None
        self.is_confirmed = True
        self.bind()

    # ---------------------------------------------------------------- retirements

    async def retire(self) -> None:  # type: ignore[override]
        """Other weights come, for one namespace or for all."""
        rng = self.rng
        self.done["retirement"] += 1
        meant = rng.choice(("a", "all", "weights"))
        for namespace in NAMESPACES:
            self.generations[namespace] += meant in (namespace, "all", "weights")
        message: Message = ResetRequest()
        if meant == "weights":
            self.num_weights += 1
            self.label = str(self.num_weights)
            message = SetWeightsRequest(label=self.label)
        elif meant == "a":
            message = RetireRequest(extra_key="a")
        answer = self.cache.ask(message, "s")
        self.was_checked = True
        assert not isinstance(answer, CacheError), answer
        if isinstance(answer, WaitingResponse):
            self.tickets.append(answer)
        else:
            assert self.cache.disk.deletions.future() is None
        if rng.random() < 0.3:
            await self.restart()
        elif meant != "a" and rng.random() < 0.8:
            self.bind()

    async def collect(self) -> None:
        await super().collect()
        for ticket in [ticket for ticket in self.tickets if self.cache.is_settled(ticket)]:
            self.tickets.remove(ticket)
            outcome = await self.cache.outcome(ticket)
            if isinstance(outcome, CacheError):
                assert isinstance(outcome, CacheUnavailable) and "has not confirmed" in str(outcome), outcome
            self.done["not confirmed" if isinstance(outcome, CacheError) else "confirmed"] += 1

    # ---------------------------------------------------------------- the disk

    def copy_step(self) -> None:
        if self.cache.writer is not None:
            self.cache.writer.copy_step()

    def write_step(self) -> None:
        if self.cache.writer is not None:
            self.cache.writer.open()
            self.cache.writer.write_step()

    def report(self) -> None:
        if self.cache.writer is not None:
            self.cache.writer.deliver(self.rng.randint(1, 3))

    async def work(self) -> None:
        """The disk does some steps in a row."""
        for _ in range(self.rng.randint(1, 12)):
            if self.cache.writer is not None:
                self.cache.writer.step()
            await self.cache.turn(2)

    def fail(self) -> None:
        """A call will fail."""
        name = self.rng.choice(("pwritev", "preadv", "INSERT", "DELETE", "COMMIT"))
        self.calls.fail(name, self.rng.choice((errno.EIO, errno.ENOSPC)), self.rng.randint(0, 2))

    def damage(self) -> None:
        """A bit of a record flips, or all of it is lost."""
        if not self.has_damage or self.cache.disk.state == "opening":
            return
        at = self.rng.randrange(self.shape.disk_pages) * BLOCK
        with self.cache.records.open("r+b") as file:
            file.seek(at)
            data = bytearray(file.read(8 * self.page))
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            file.seek(at)
            file.write(self.rng.choice((data, bytes(len(data)))))

    # ---------------------------------------------------------------- checks

    async def end(self) -> None:
        await self.cache.settle()
        self.count_life()
        await super().end()

    def count_life(self) -> None:
        """Count what a life has done."""
        stats = self.cache.disk.stats()
        self.done["damaged"] += stats.damaged_records
        self.done["written to the disk"] += stats.tokens_written
        self.done["loaded from the disk"] += stats.tokens_loaded

    def end_copies(self) -> None:
        super().end_copies()
        for _ in range(20):
            if self.cache.writer is not None:
                self.cache.writer.step()

    def check(self) -> None:
        num_damaged = self.cache.disk.readers.num_damaged
        assert self.has_damage or not num_damaged, "a record has not the KV of its row"
        super().check()


def run_disk_traffic(shape: DiskShape, seeds: range, num_operations: int) -> Counter[str]:
    """Run the traffic of each seed; return what happened in all."""
    done = Counter[str]()
    for seed in seeds:
        with TemporaryDirectory() as path:
            done += DiskServiceTraffic(seed, shape, Path(path)).run(num_operations)
    return done
