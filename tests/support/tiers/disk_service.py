"""`DiskService`: a `CacheService` with a disk, perhaps below a host tier, of which the test makes each step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.tiers.faulty_copier import FaultyCopier
from support.tiers.faulty_files import FaultyFileCalls
from support.tiers.stepped_writer import SteppedWriter
from support.tiers.tiered_service import TieredService

from raydix.actors.tiers.disk.disk_copies import DiskCopies
from raydix.actors.tiers.disk.disk_tier import DiskTier
from raydix.actors.tiers.job_threads import JobThreads
from raydix.schemas import (
    BindModelRequest,
    BindModelResponse,
    CacheConfig,
    LeaseResponse,
    ModelFingerprint,
    WaitingResponse,
)

_MOST_STEPS = 3_000


class DiskService(TieredService):
    """The service, its stamps, its copiers, and the writer of its disk.

    Args:
        config: of the cache, with a disk.
        calls: of the operating system; faults may be planted there.

    Attributes:
        calls: see above.
    """

    def __init__(self, config: CacheConfig, calls: FaultyFileCalls | None = None) -> None:
        self.calls = calls or FaultyFileCalls()
        self._disk_copiers: list[FaultyCopier] = []
        super().__init__(config)

    def begin(self) -> None:
        disk = self.disk
        disk.files.calls = self.calls
        disk.files.make_writer = self._make_writer  # type: ignore[method-assign]
        disk.readers.make_copier = self._make_disk_copier  # type: ignore[method-assign, assignment]
        super().begin()

    def _make_writer(self, *arguments: Any) -> SteppedWriter:
        return SteppedWriter(*arguments, buffer_bytes=self.disk.files.buffer_bytes, clock=self.clock)

    def _make_disk_copier(self, copies: DiskCopies, threads: JobThreads) -> FaultyCopier:
        copier = FaultyCopier(self.pool, copies)
        self._disk_copiers.append(copier)
        return copier

    @property
    def disk(self) -> DiskTier:
        assert self.service.disk is not None
        return self.service.disk

    @property
    def writer(self) -> SteppedWriter | None:
        writer = self.disk.files.writer
        assert writer is None or isinstance(writer, SteppedWriter)
        return writer

    @property
    def copiers(self) -> list[FaultyCopier]:
        return super().copiers + self._disk_copiers

    @property
    def records(self) -> Path:
        """The file with the pages of the disk."""
        assert self.disk.config is not None
        (found,) = Path(self.disk.config.path).glob("local/*/pages.bin")
        return found

    # ---------------------------------------------------------------- steps

    async def settle(self) -> None:
        """Do all that the disk and the copiers have to do."""
        for _ in range(_MOST_STEPS):
            stepped = self.writer is not None and self.writer.step()
            for copier in self.copiers:
                for copy in list(copier.open):
                    if copy in copier.open:
                        copier.finish(copy)
                        stepped = True
                copier.deliver()
            await self.turn(2)
            disk = self.disk
            has_more = self.writer is not None and self.writer.has_more
            has_more |= bool(disk.files.tasks) or disk.work.is_scheduled
            is_idle = not (has_more or any(space.builder for space in disk.spaces))
            if not stepped and is_idle and disk.state != "opening":
                return
            if not stepped:  # it waits until it tries again
                await asyncio.sleep(0.02)
        raise AssertionError(f"the disk does not come to an end: {self.disk.stats()}")

    async def answer(self, response: Any) -> Any:
        """The answer to a retirement, of which the response may be a ticket."""
        if isinstance(response, WaitingResponse):
            while not self.is_settled(response):
                await self.settle()
            return await self.outcome(response)
        return response

    # ---------------------------------------------------------------- requests

    def bind(self, label: str, session_id: str = "s") -> None:
        """Bind the model, with weights of that label. The answer may wait for the pages that the disk has."""
        fingerprint = ModelFingerprint(weights=label, fields={"name": "model"})
        answer = self.ask(BindModelRequest(lora_id=None, fingerprint=fingerprint), session_id)
        assert isinstance(answer, BindModelResponse | WaitingResponse), answer

    async def put_on_disk(self, tokens: Sequence[int]) -> None:
        """Use a prompt twice, and have it on the disk and not in the pool."""
        for _ in range(2):
            self.publish(tokens)
        await self.settle()
        self.service.core.evict(10**6)

    async def find(self, tokens: Sequence[int]) -> int:
        """The length of the prefix that a lease has, of which all KV is right."""
        answer = await self.answer(self.acquire(tokens))
        assert isinstance(answer, LeaseResponse), answer
        self.check_prefix(self.record(answer.lease_id), tuple(tokens))
        self.release(answer.lease_id)
        return answer.prefix_len

    # ---------------------------------------------------------------- the end

    async def kill(self) -> None:
        """End as by SIGKILL: all that is not on the disk is lost. Nothing else may run on the loop."""
        self.disk.files.is_closed = True  # its callbacks do nothing any more
        if self.writer is not None:
            self.writer.kill()
        loop = asyncio.get_running_loop()
        for timer in loop._scheduled:  # type: ignore[attr-defined]
            timer.cancel()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await self.turn(3)
        if self.service.host is not None:
            self.tiers.close()

    def check_end(self) -> None:
        super().check_end()
        self.disk.check_invariants()
