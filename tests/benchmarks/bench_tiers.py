"""Measure how fast pages are copied between a pool and the records below it, against a memcpy of the same size.

    python -m benchmarks.bench_tiers [--quick]

in the tests' folder. A page has a segment for each of many tensors; the figures are by the bytes of a segment. One
thread copies, chunk by chunk, as a copier does. Where there is a GPU, the pool is in its memory, and the records in
host memory that is registered with CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import numpy as np
import torch
from benchmarks.bench_blocks import HOLD_GATE_MS, MAX_HOLD_MS, longest_hold
from benchmarks.figures import HEADING, Figure, median_ratio, times_in_turns
from support.caches.pool_layers import layer_shapes
from support.tiers.pool_pages import layout_of

from raydix.actors.memory.pinned_memory import PinnedMemory
from raydix.cache_core import KVPool, PoolLayout, RecordLayout, RecordPool
from raydix.cache_core.tiers.page_records import CopyPlan, PageCopies, PageRecords

PAGE, NUM_HEADS, NUM_LAYERS = 16, 8, 16
NUM_TENSORS = 2 * NUM_LAYERS  # K and V
SEGMENTS = (8 * 2**10, 32 * 2**10, 256 * 2**10)  # bytes
LARGE = 32 * 2**10
RUNS, SCATTERED = "runs", "scattered"
GATES = {RUNS: (0.35, 0.7), SCATTERED: (0.4, 0.4)}  # small segments, and large ones
IN_PLACE_GOAL, IN_PLACE_GATE = 0.9, 0.7
NUM_ROUNDS = 7
TRIES = 7


class Tiers:
    """A pool, the records below it, and plans of pages to copy.

    Args:
        layout: of the pool.
        num_bytes: bytes of the pages that are copied, a quarter of all.
    """

    def __init__(self, layout: PoolLayout | RecordLayout, num_bytes: int, device: torch.device) -> None:
        pool = RecordPool(layout, device) if isinstance(layout, RecordLayout) else KVPool(layout, device)
        pool.storage.fill_(1)
        records = PageRecords(pool)
        below = RecordPool(layout_of(records, layout.num_slots))
        below.storage.fill_(1)
        self.pinned = PinnedMemory(below.storage) if device.type == "cuda" else None
        if self.pinned is not None:
            self.pinned.wait()
        self.copies = PageCopies(pool, below)
        number, rng = num_bytes // records.num_bytes(), np.random.default_rng(0)
        self.num_bytes = number * records.num_bytes()
        run = np.arange(1, number + 1) * PAGE
        upper, lower = (rng.permutation(4 * number)[:number] * PAGE + PAGE for _ in range(2))
        self.plans = {RUNS: CopyPlan(run, run + number * PAGE), SCATTERED: CopyPlan(upper, lower)}

    def copy(self, plan: CopyPlan, *, down: bool) -> None:
        """Copy all pages of a plan, chunk by chunk."""
        copy = self.copies.write if down else self.copies.load
        for start, stop, _ in self.copies.chunks(plan):
            copy(plan, start, stop)

    def works(self) -> dict[str, Callable[[], object]]:
        """Return the measured works, and the memcpy to compare with."""
        ours = np.ones(self.num_bytes, np.uint8)
        theirs = np.ones_like(ours)
        works: dict[str, Callable[[], object]] = {"memcpy": partial(np.copyto, theirs, ours)}
        for how, plan in self.plans.items():
            works[f"write, {how}"] = partial(self.copy, plan, down=True)
            works[f"load, {how}"] = partial(self.copy, plan, down=False)
        return works


def layers(segment: int, num_bytes: int) -> PoolLayout:
    """Return the layout of a pool with four times as many pages as are copied."""
    num_slots = 4 * num_bytes // segment // NUM_TENSORS * PAGE
    dim = segment // PAGE // NUM_HEADS // torch.bfloat16.itemsize
    return PoolLayout(num_slots, PAGE, layer_shapes(("full",) * NUM_LAYERS, NUM_HEADS, dim), torch.bfloat16)


def figures(quick: bool) -> list[Figure]:
    """Return the figures of each size of a segment, of records in place, and the longest hold of the interpreter."""
    return list(_figures(quick))


def _figures(quick: bool) -> Iterator[Figure]:
    """Yield the figures of each size of a segment, of records in place, and the longest hold of the interpreter."""
    num_bytes = (64 if quick else 256) * 2**20
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for segment in SEGMENTS:
        tiers = Tiers(layers(segment, num_bytes), num_bytes, device)
        for name, rate, ratio in _measured(tiers):
            gate = GATES[name.partition(", ")[2]][segment >= LARGE]
            what = f"{name}, segments of {segment // 1024} KiB"
            yield Figure("tiers", what, rate, "GB/s", ratio, "memcpy", at_least=gate, gate=gate)
        if segment == LARGE:
            for how, plan in tiers.plans.items():
                held = 1e3 * min(longest_hold(partial(tiers.copy, plan, down=True)) for _ in range(TRIES))
                what = f"longest hold of the interpreter, {how}, {tiers.num_bytes >> 20} MiB"
                yield Figure("tiers", what, held, "ms", at_most=MAX_HOLD_MS, gate=HOLD_GATE_MS)
    record_bytes = NUM_TENSORS * LARGE // PAGE
    tiers = Tiers(RecordLayout(4 * num_bytes // record_bytes // PAGE * PAGE, PAGE, record_bytes), num_bytes, device)
    for name, rate, ratio in _measured(tiers):
        what = f"{name}, records in place"
        yield Figure("tiers", what, rate, "GB/s", ratio, "memcpy", at_least=IN_PLACE_GOAL, gate=IN_PLACE_GATE)
    torch.set_num_threads(num_threads)


def _measured(tiers: Tiers) -> Iterator[tuple[str, float, float]]:
    """Yield each work's name, its GB/s, and the ratio of its speed to a memcpy's."""
    times = times_in_turns(tiers.works(), NUM_ROUNDS)
    for name in list(times)[1:]:
        yield name, tiers.num_bytes / median(times[name]) / 1e9, median_ratio(times, name, "memcpy")


def main() -> None:
    """Print the table."""
    print(HEADING)
    for figure in figures("--quick" in sys.argv):
        print(figure.line(), flush=True)


if __name__ == "__main__":
    main()
