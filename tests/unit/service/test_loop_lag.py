"""How late a loop is: the worst of the last five to ten seconds, and no longer."""

from __future__ import annotations

import asyncio
import time

from raydix.actors.observe.loop_lag import LoopLag


def lag_after(*ticks: float) -> LoopLag:
    """Ticks at these times; each is due 0.1 s after the one before."""
    lag = LoopLag()
    lag._due_at = ticks[0]
    for at in ticks:
        lag.note(at)
    return lag


def test_a_tick_that_comes_late_is_remembered() -> None:
    assert round(lag_after(10.0, 10.1, 10.45, 10.55).longest_ms) == 250
    assert round(lag_after(10.0, 10.1, 10.2).longest_ms) == 0


def test_it_is_forgotten_after_two_windows_of_five_seconds() -> None:
    on_time = [10.45 + n / 10 for n in range(1, 120)]

    assert round(lag_after(10.0, 10.1, 10.45, *on_time[:60]).longest_ms) == 250  # in the window before
    assert round(lag_after(10.0, 10.1, 10.45, *on_time).longest_ms) == 0


def test_after_a_long_silence_only_the_silence_counts() -> None:
    assert round(lag_after(10.0, 10.4, 100.0).longest_ms) == 89_500


async def test_a_loop_that_is_held_is_late() -> None:
    lag = LoopLag()
    lag.start()
    lag.start()

    time.sleep(0.2)  # noqa: ASYNC251 -- the delay to measure
    async with asyncio.timeout(10):
        while not lag.longest_ms:  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0.01)

    assert lag.longest_ms > 50  # due after 0.1 s, and not before 0.2 s
    lag.stop()
