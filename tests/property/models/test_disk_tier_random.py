"""Random requests to a `DiskTier` on real files, with faults of the disk, retirements and restarts."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter, defaultdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.tiers.disk_rig import PAGE, DiskRig
from support.tiers.faulty_files import FaultyFileCalls

from raydix.actors.tiers.disk import disk_errors

SHAPES: dict[str, dict[str, Any]] = {
    "pages": {},
    "host": {"host_pages": 40},
    "windows": {"window": 8},
    "states": {"num_states": 30},
    "both": {"window": 8, "num_states": 30},
    "all": {"admit": "all", "reserve": 0.99},
}


class Traffic:
    """Random operations on a rig, which lives on after a restart.

    Attributes:
        done: how often things happened.
    """

    def __init__(self, path: Path, seed: int, shape: dict[str, Any]) -> None:
        self.rng, self.path, self.shape = Random(seed), path, shape
        self.done = Counter[str]()
        self.models = ("m", None, "v1")
        self.weights: dict[str | None, str] = defaultdict(str)

    async def start(self) -> None:
        self.calls = FaultyFileCalls()
        rng = self.rng
        self.rig = DiskRig(
            self.path,
            disk_pages=rng.choice((32, 40)),
            calls=self.calls,
            models=self.models,
            **{"num_pages": 48} | self.shape,
        )
        self.rig.weights = self.weights
        self.rig.disk.start()
        if rng.random() < 0.5:
            await self.rig.ready()

    def prompt(self) -> list[int]:
        rng, tokens = self.rng, list[int]()
        for _ in range(rng.randint(1, 5)):
            tokens += [rng.choice((1, 1, 2, 3))] * PAGE
        return tokens

    def namespace(self) -> str | None:
        return self.rng.choice((None, None, "a"))

    async def request(self) -> None:
        self.done["hit in the pool"] += self.rig.request(self.prompt(), self.namespace()) > 0

    async def load(self) -> None:
        prompt = self.prompt()
        found, finished = await self.rig.load(prompt, self.namespace())
        self.done["loaded"] += finished is not None and found > 0

    async def evict(self) -> None:
        self.rig.core.evict(self.rng.choice((PAGE, 6 * PAGE, 10**6)))

    async def demote(self) -> None:
        """Write all of the pool to the host."""
        rig = self.rig
        if rig.host_moves is not None:
            for move in rig.host_moves.writes.prepare(10**6).moves:
                pool, host = rig.pools["device"], rig.pools["host"]
                assert pool is not None and host is not None
                host.pages[move.target_starts // PAGE] = pool.pages[move.source_starts // PAGE]
                rig.host_moves.complete(move, move.num_pages)

    async def wait(self) -> None:
        await asyncio.sleep(self.rng.choice((0, 0, 0.001, 0.01)))

    async def settle(self) -> None:
        await self.rig.ready()
        self.rig.core.reclaim(10**6)
        if self.rig.host is not None:
            self.rig.host.reclaim(10**6)
        self.rig.cache.reclaim(10**6)
        await self.rig.check_index()

    async def fail(self) -> None:
        name = self.rng.choice(("pwritev", "preadv", "INSERT", "DELETE", "COMMIT"))
        self.calls.fail(name, self.rng.choice((errno.EIO, errno.ENOSPC)), self.rng.randint(0, 2))

    async def retire(self) -> None:
        self.done["retired"] += 1
        self.rig.retire(f"retirement {self.done['retired']}", self.namespace())

    async def set_weights(self) -> None:
        """Retire all, and bind other weights."""
        self.done["weights"] += 1
        self.rig.core.reset()
        self.rig.weights.update(dict.fromkeys((None, "a"), f"weights {self.done['weights']}"))
        self.models = self.rig.models = ("m", None, self.rng.choice(("v1", "v2")))

    async def restart(self) -> None:
        deletion = self.rig.disk.deletions.future()
        if deletion is not None:
            await self.rig.wait(deletion.done)
        self.rig.disk.close(60)
        self.done["restart"] += 1
        await self.start()

    async def run(self, num_operations: int) -> None:
        operations = {
            self.request: 40,
            self.load: 25,
            self.evict: 12,
            self.demote: 10,
            self.wait: 20,
            self.settle: 4,
            self.fail: 3,
            self.retire: 2,
            self.set_weights: 0.5,
            self.restart: 2,
        }
        await self.start()
        try:
            choices = self.rng.choices(list(operations), list(operations.values()), k=num_operations)
            for number, operation in enumerate(choices):
                try:
                    await operation()
                    self.rig.check()
                except Exception as error:
                    raise AssertionError(f"operation {number}, {operation.__name__}: {error!r}") from error
            await self.settle()
            self.done["written"] += self.rig.disk.stats().tokens_written
            self.rig.core.reset()
            await self.settle()
            assert self.rig.cache.free_slots == self.rig.cache.num_slots, "a record is lost"
        finally:
            self.rig.disk.close(60)


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.more), pytest.param(3, marks=pytest.mark.more)])
async def test_no_lease_reads_wrong_kv_and_no_record_is_lost(
    tmp_path: Path, shape: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_errors, "RETRY_S", 0.005)
    traffic = Traffic(tmp_path, seed, SHAPES[shape])

    await traffic.run(400)

    assert traffic.done["loaded"] and traffic.done["restart"] and traffic.done["retired"], traffic.done
