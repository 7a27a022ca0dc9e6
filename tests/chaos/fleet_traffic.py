"""Requests through a router, with a check of the contents of each hit; `RouterActor` sends them from a process of its
own.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from random import Random
from typing import Any

from support.fleet.running_fleet import STRIDE, prompt
from support.fleet.slot_stamps import SlotStamps, stamps_of

from raydix.actors import Fleet, WatchedActor, connect_fleet
from raydix.schemas import CacheBusy, CacheUnavailable, LeaseExpired, PoolExhausted, StaleEpoch

NUM_SLOTS = 320  # of each cache: too few for all prompts
NUM_PROMPTS, MAX_STRIDES = 40, 5
NUM_COROUTINES = 3
REFUSALS = (CacheBusy, CacheUnavailable, LeaseExpired, PoolExhausted, StaleEpoch)  # that a failure may cause


class WrongKV(AssertionError):
    """A hit had the contents of other tokens."""


class Traffic:
    """Coroutines that acquire, compare what they hit, compute and publish, until they are paused.

    Attributes:
        outcomes: counts of the requests that were served, and of those refused, by the error; hit tokens.
    """

    def __init__(self, fleet: Fleet, stamps: SlotStamps, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._fleet = fleet
        self._stamps = stamps
        self._random = Random(seed)
        self._tasks: list[asyncio.Task[None]] = []
        self._paused = False

    def resume(self) -> None:
        """Begin to send requests."""
        self._paused = False
        self._tasks = [asyncio.create_task(self._requests()) for _ in range(NUM_COROUTINES)]

    async def pause(self) -> None:
        """End the running requests, and send no more.

        Raises:
            WrongKV: a hit had the contents of other tokens.
        """
        self._paused = True
        await asyncio.gather(*self._tasks)
        self._tasks = []

    @property
    def served(self) -> int:
        """Return the number of served requests."""
        for task in self._tasks:
            if task.done():
                task.result()  # raises what has ended it
        return self.outcomes["served"]

    async def _requests(self) -> None:
        while not self._paused:
            try:
                await self._request()
            except REFUSALS as error:
                self.outcomes[type(error).__name__] += 1
                await asyncio.sleep(0.01)
            else:
                self.outcomes["served"] += 1

    async def _request(self) -> None:
        random = self._random
        namespace = random.randrange(2)
        tokens = prompt(random.randrange(NUM_PROMPTS), random.randint(1, MAX_STRIDES), random.randrange(STRIDE))
        stamps = stamps_of(tokens, namespace)
        async with self._fleet.acquire(tokens, lora_id=("a", "b")[namespace], timeout_s=5) as lease:
            wrong = self._stamps.wrong(lease, stamps)
            self.outcomes["hit tokens"] += lease.prefix_len
            self._stamps.write(lease, stamps)
            await asyncio.sleep(random.random() * 0.01)
            await lease.insert(tokens)  # raises if the lease had ended before, so that its reads do not count
            wrong += self._stamps.wrong(lease, stamps)
            if random.random() < 0.3:
                await lease.extend(8)
        if wrong:
            raise WrongKV(f"{lease} of {tokens[0]}... in namespace {namespace}: positions {wrong}")


class RouterActor(WatchedActor):
    """A router in a process of its own, and requests through it."""

    async def start(self, pattern: str, folder: str, seed: int) -> int:
        """Connect, begin to send requests, and return the process id."""
        self._fleet = await connect_fleet(pattern)
        self._traffic = Traffic(self._fleet, SlotStamps(folder, 2 * NUM_SLOTS), seed)
        self._traffic.resume()
        return os.getpid()

    async def pause(self) -> None:
        await self._traffic.pause()

    async def resume(self) -> None:
        self._traffic.resume()

    async def outcomes(self) -> dict[str, int]:
        return {"served": self._traffic.served, **self._traffic.outcomes}

    async def pages(self) -> dict[str, Any]:
        """Return the position and the stored and pending pages of each cache, by name."""
        index = self._fleet.index
        return {name: (index.position(at), *index.pages(at)[:2]) for name, at in self._fleet.columns().items()}
