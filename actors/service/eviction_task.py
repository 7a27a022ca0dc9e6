"""`EvictionTask`: frees slots in the background before requests need them, and starts writes to the tier below."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from raydix.actors.tiers.host.host_tier import Progress
from raydix.schemas import EvictionConfig, EvictionTaskStats

logger = logging.getLogger(__name__)

_MIN_STEP, _MAX_STEP = 64, 16_384  # tokens evicted between two looks at the clock
_BACKOFF_S = 0.1  # the pause after a round that failed
_REST_FACTOR = 20  # A pause between two looks for KV to write is so many times as long as a look.
_MIN_REST_S, _MAX_REST_S = 0.002, 0.1


class PoolGauge:
    """The fill of one pool, and the call that evicts from it.

    Args:
        config: watermarks.
        num_slots: its size.
        free_slots: returns the number of free slots.
        evict: frees at least so many slots, or all it may; returns the number freed.
        pool: its name, as in `OutOfSlotsError`.

    Attributes:
        is_evicting: it has been below the floor, and is not at the goal yet; used where KV is written before.
    """

    def __init__(
        self,
        config: EvictionConfig,
        num_slots: int,
        free_slots: Callable[[], int],
        evict: Callable[[int], int],
        pool: str = "slots",
    ) -> None:
        # Both marks as free slots: below the floor the task wakes, at the goal it sleeps again.
        enabled = config.high_watermark < 1.0
        self.pressure_floor = num_slots - int(config.high_watermark * num_slots) if enabled else 0
        self.least_free = self.pressure_floor // 2  # Requests would soon evict by themselves with fewer.
        self.goal = num_slots - int(config.low_watermark * num_slots)
        self.free_slots = free_slots
        self.evict = evict
        self.pool = pool
        self.is_evicting = False

    def is_pressed(self) -> bool:
        """Return whether fewer slots are free than the floor."""
        return self.free_slots() < self.pressure_floor


class Steps:
    """The steps of a slice.

    A step has enough tokens to outweigh the cost of a call, and takes a small part of the slice. Large nodes take as
    long as single tokens, so the number of tokens is adjusted by the time of the last step.

    Attributes:
        num_tokens: tokens of the next step.
    """

    def __init__(self, slice_s: float) -> None:
        self.num_tokens = _MIN_STEP
        self._slice_s = slice_s
        self._ends_at = self._last = 0.0

    def begin(self) -> None:
        """Begin a slice."""
        self._last = time.monotonic()
        self._ends_at = self._last + self._slice_s

    def done(self) -> bool:
        """Adjust the next step by the one just made; return whether the slice is over."""
        now = time.monotonic()
        took, self._last = now - self._last, now
        if took > self._slice_s / 4:
            self.num_tokens = max(_MIN_STEP, self.num_tokens // 2)
        elif took < self._slice_s / 16:
            self.num_tokens = min(_MAX_STEP, self.num_tokens * 2)
        return now > self._ends_at


class EvictionTask:
    """Sleeps until `wake`, then evicts down to the low watermark, in slices that let other work in between.

    With a tier below the pool, the task first starts writes of the KV that it will evict. It evicts when they have
    ended, or earlier if few slots are left.

    Args:
        config: watermarks and the longest slice.
        gauges: the pools to keep below the marks.
        reclaim: frees about so many slots of retired namespaces; returns the number freed, 0 if none is left.
        after_slice: called after each slice, while slots may have become free.
        write_ahead: begins to write KV to the tier below; None: there is none.
    """

    def __init__(
        self,
        config: EvictionConfig,
        gauges: Sequence[PoolGauge],
        reclaim: Callable[[int], int],
        after_slice: Callable[[], None],
        write_ahead: Callable[[], Progress] | None = None,
    ) -> None:
        self.enabled = config.high_watermark < 1.0
        self._gauges = gauges if self.enabled else ()
        self._reclaim = reclaim
        self._steps = Steps(config.slice_ms / 1000)
        self._after_slice = after_slice
        self._write_ahead = write_ahead
        self._rest: asyncio.TimerHandle | None = None
        self._rest_s = _MIN_REST_S
        self._is_running = False  # in a round
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._rounds = self._slices = self._retired = self._failures = 0
        self._evicted: Counter[str] = Counter()  # pool -> evicted slots
        self._longest_slice_s = 0.0
        self._last_error: str | None = None

    @property
    def is_due(self) -> bool:
        """Whether the task would go on if its loop ran now."""
        if self._task is None or self._task.done():
            return False
        if self._rest is not None and self._rest.when() <= self._task.get_loop().time():
            return True
        return self._is_running or self._wake.is_set()

    def start(self) -> None:
        """Start on the running loop; no effect if the task runs already or is switched off."""
        if self.enabled:
            self._start()

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="raydix-eviction")

    def wake(self) -> None:
        """Evict soon: slots run short, or namespaces were retired. Retired slots are freed even if the task is off."""
        self._wake.set()
        if not self.enabled:
            self._start()

    def wake_if_pressed(self) -> None:
        """Evict soon if a pool is below its floor: more may be evictable than before."""
        if any(gauge.is_pressed() for gauge in self._gauges):
            self.wake()

    def note_pressure(self) -> None:
        """Wake the task, because slots run short.

        With a tier and no pool below its floor, wake it after a pause: KV is to be written, and nothing evicted.
        """
        if self._write_ahead is None or any(gauge.is_pressed() for gauge in self._gauges):
            self.wake()
        elif self._rest is None and self._task is not None:
            self._rest = asyncio.get_running_loop().call_later(self._rest_s, self._end_rest)

    def _end_rest(self) -> None:
        self._rest = None
        self.wake()

    def change_loop(self) -> None:
        """Forget the loop that was closed; the next `start` begins on another."""
        self._task, self._rest = None, None
        self._wake, woken = asyncio.Event(), self._wake.is_set()
        if woken:
            self._wake.set()

    async def stop(self) -> None:
        """End the task and wait until it has ended."""
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def abandon(self) -> None:
        """End the task soon, on its loop, without waiting. Any thread may call it."""
        if self._task is not None and not (loop := self._task.get_loop()).is_closed():
            loop.call_soon_threadsafe(self._task.cancel)

    async def run_round(self) -> int:
        """Evict down to the low watermarks, until nothing is evictable, or until writes are in flight.

        Return the number of tokens freed.
        """
        before, done = self._retired + self._evicted["slots"], False
        self._is_running = True
        try:
            while not done:
                done = self._run_slice()
                self._after_slice()
                if not done:
                    await asyncio.sleep(0)
        finally:
            self._is_running = False
        self._rounds += 1
        return self._retired + self._evicted["slots"] - before

    def _run_slice(self) -> bool:
        """Evict for as long as a slice lasts; return whether the round is over."""
        self._steps.begin()
        started = time.thread_time()  # another program may have the core meanwhile
        done = self._reclaim_retired()
        if self._write_ahead is None:
            done = self._relieve_all(self._gauges) and done
        elif done:
            done = self._write_and_relieve(self._write_ahead)
        self._slices += 1
        self._longest_slice_s = max(self._longest_slice_s, time.thread_time() - started)
        return done

    def _write_and_relieve(self, write_ahead: Callable[[], Progress]) -> bool:
        """Start writes; evict if they are done, or if few slots are left. Return whether the round is over."""
        began_at = time.monotonic()
        progress = write_ahead()
        while progress is Progress.MORE and not self._steps.done():
            progress = write_ahead()
        self._rest_s = min(max(_MIN_REST_S, _REST_FACTOR * (time.monotonic() - began_at)), _MAX_REST_S)
        for gauge in self._gauges:
            gauge.is_evicting = gauge.is_evicting or gauge.is_pressed()
        evicting = [gauge for gauge in self._gauges if gauge.is_evicting]  # a full tier evicts nothing from the pool
        if not evicting:
            return progress is not Progress.MORE
        if progress is Progress.AHEAD:
            return self._relieve_all(evicting)
        # KV that is not written yet is evicted only so far that requests find some room.
        done = all([self._relieve(gauge, gauge.least_free) for gauge in evicting])  # noqa: C419 -- each of them
        return done and progress is Progress.WORKING  # the end of a write wakes the task

    def _relieve_all(self, gauges: Sequence[PoolGauge]) -> bool:
        """Evict from some pools for as long as the slice lasts; return whether their goals are met."""
        is_done = True
        for gauge in gauges:
            gauge.is_evicting = not self._relieve(gauge, gauge.goal)
            is_done = is_done and not gauge.is_evicting
        return is_done

    def _reclaim_retired(self) -> bool:
        """Free retired slots for as long as the slice lasts; return whether none is left."""
        while freed := self._reclaim(self._steps.num_tokens):
            self._retired += freed
            if self._steps.done():
                return False
        return True

    def _relieve(self, gauge: PoolGauge, goal: int) -> bool:
        """Evict from one pool for as long as the slice lasts; return whether the goal is met."""
        done = gauge.free_slots() >= goal
        while not done:
            evicted = gauge.evict(min(goal - gauge.free_slots(), self._steps.num_tokens))
            self._evicted[gauge.pool] += evicted
            done = evicted == 0 or gauge.free_slots() >= goal
            if self._steps.done():
                break
        return done

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self.run_round()
                await asyncio.sleep(0)  # other work comes in between, though the round may have woken the task
            except Exception as error:  # the task must outlive a failing round
                self._failures += 1
                self._last_error = f"{type(error).__name__}: {error}"
                logger.exception("a round of background eviction failed")
                await asyncio.sleep(_BACKOFF_S)

    def stats(self) -> EvictionTaskStats:
        """Return the task's counts."""
        return EvictionTaskStats(
            enabled=self.enabled,
            started=self._task is not None,
            alive=self._task is not None and not self._task.done(),
            rounds=self._rounds,
            slices=self._slices,
            tokens_evicted=self._evicted["slots"],
            window_slots_evicted=self._evicted["window slots"],
            states_evicted=self._evicted["states"],
            retired_tokens=self._retired,
            failures=self._failures,
            last_error=self._last_error,
            longest_slice_ms=self._longest_slice_s * 1000,
        )
