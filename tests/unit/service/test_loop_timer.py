"""A timer calls a method as often as it asks, survives its failures, and keeps no object alive."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from raydix.actors.loop.loop_timer import LoopTimer


class Counted:
    """Counts its calls; the second one fails, the fourth is the last."""

    def __init__(self) -> None:
        self.timer = LoopTimer(self._tick)
        self.num_calls = 0

    def _tick(self) -> float | None:
        self.num_calls += 1
        if self.num_calls == 2:
            raise KeyError("once")
        return None if self.num_calls == 4 else 0.0


async def test_a_method_that_fails_is_called_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("raydix.actors.loop.loop_timer._RETRY_S", 0.01)
    counted = Counted()

    counted.timer.schedule(0.0)
    async with asyncio.timeout(10):
        while counted.timer.is_set:  # noqa: ASYNC110 -- it must be polled
            await asyncio.sleep(0.01)

    assert counted.num_calls == 4
    (record,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert "Counted._tick failed" in record.getMessage()
    assert record.exc_info is not None and record.exc_info[0] is KeyError


async def test_an_object_that_is_dropped_takes_its_timer_with_it() -> None:
    counted = Counted()
    timer = counted.timer
    timer.schedule(0.0)

    del counted
    gc.collect()
    await asyncio.sleep(0.01)

    assert not timer.is_set
