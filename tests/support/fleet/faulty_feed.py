"""`FaultyFeed`: events that reach their readers late, twice, in another order, or not at all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from random import Random
from typing import Any

from raydix.actors import PrefixCacheClient

HOLD_S = 0.03  # a held batch is delivered after this time, if no other comes
MAX_HELD = 6
BEYOND = 2**40  # the number of no event: the cache answers with a gap

Events = Callable[..., AsyncIterator[Any]]


class FaultyFeed:
    """Disturbs the event batches that `PrefixCacheClient.events` yields.

    A lost batch is followed by another one: a reader can notice a loss by the numbers of later events alone. A gap is
    the cache's own answer to a reader that asks for events which are not there.

    Attributes:
        done: counts of the faults, by name.
    """

    def __init__(self, random: Random) -> None:
        self.done: Counter[str] = Counter()
        self._random = random

    def around(self, original: Events) -> Events:
        """Return a method in place of `PrefixCacheClient.events`, which is the original."""

        def events(
            client: PrefixCacheClient, after_seq: int | None = None, *, tier: str = "device"
        ) -> AsyncIterator[Any]:
            return self._read(partial(original, tier=tier), client, after_seq)

        return events

    async def _read(self, original: Events, client: PrefixCacheClient, after_seq: int | None) -> AsyncIterator[Any]:
        source = original(client, after_seq)
        held: list[Any] = []
        coming = asyncio.create_task(_next(source))
        try:
            while True:
                await asyncio.wait((coming,), timeout=HOLD_S if held else None)
                if coming.done():
                    if (batch := coming.result()) is None:
                        return
                    held.append(batch)
                    coming = asyncio.create_task(_next(source))
                    if len(held) < MAX_HELD and self._happens("late", 0.5):
                        continue
                    self._disturb(held)
                for each in held:
                    yield each
                held.clear()
                if self._happens("gap", 0.05):
                    await _end(coming, source)
                    source = original(client, BEYOND)
                    coming = asyncio.create_task(_next(source))
        finally:
            await _end(coming, source)

    def _disturb(self, held: list[Any]) -> None:
        """Lose, repeat and reorder some of the held batches, of which the last is the newest."""
        if len(held) > 1 and self._happens("lost", 0.4):
            del held[self._random.randrange(len(held) - 1)]
        if self._happens("repeated", 0.2):
            held.append(self._random.choice(held))
        if len(held) > 1 and self._happens("reordered", 0.4):
            self._random.shuffle(held)

    def _happens(self, fault: str, probability: float) -> bool:
        happens = self._random.random() < probability
        self.done[fault] += happens
        return happens


async def _next(source: AsyncIterator[Any]) -> Any:
    return await anext(source, None)


async def _end(coming: asyncio.Task[Any], source: Any) -> None:
    coming.cancel()
    await asyncio.gather(coming, return_exceptions=True)
    await source.aclose()
