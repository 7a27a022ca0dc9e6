"""Measure how fast an engine's blocks are copied to the records of a pool and back, against a memcpy of the same size.

    python -m benchmarks.bench_blocks [--quick]

in the tests' folder. A block has a segment in each of many layers; the figures are by the bytes of a segment. Where
there is a GPU, the blocks are in its memory, and the pool in host memory that is registered with CUDA.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import numpy as np
import torch
from benchmarks.figures import HEADING, Figure, median_ratio, times_in_turns
from numpy.typing import NDArray

from raydix.actors.engines.block_copies import BlockCopies
from raydix.actors.memory.pinned_memory import PinnedMemory

BLOCK, NUM_HEADS, NUM_LAYERS = 16, 8, 32
SEGMENTS = (8 * 2**10, 32 * 2**10, 256 * 2**10)  # bytes
LARGE = 32 * 2**10
GOALS = {"runs": (0.35, 0.7), "scattered": (0.4, 0.4)}  # small segments, and large ones
GATES = {0.35: 0.2, 0.4: 0.2, 0.7: 0.5}
HOLD_BYTES = 512 * 2**20
MAX_HOLD_MS, HOLD_GATE_MS = 2.0, 20.0
Pages = NDArray[np.int64]


class Blocks:
    """An engine's KV caches, and a pool for its blocks.

    Args:
        segment: bytes of a block in a layer.
        num_bytes: bytes of the blocks that are copied, a quarter of all.
    """

    def __init__(self, segment: int, num_bytes: int, device: torch.device) -> None:
        self.number = num_bytes // segment // NUM_LAYERS
        shape = (4 * self.number, NUM_HEADS, BLOCK, segment // NUM_HEADS // BLOCK)
        self.layers = [torch.ones(shape, dtype=torch.uint8, device=device) for _ in range(NUM_LAYERS)]
        copies = BlockCopies(self.layers, BLOCK)
        records = torch.ones(4 * self.number, NUM_LAYERS * segment, dtype=torch.uint8)
        self.pinned = PinnedMemory(records.view(-1)) if device.type == "cuda" else None
        if self.pinned is not None:
            self.pinned.wait()
        self.target = copies.attach(records, BLOCK)
        rng = np.random.default_rng(0)
        self.places: dict[str, tuple[Pages, Pages]] = {
            "runs": (np.arange(self.number), np.arange(self.number) + self.number),
            "scattered": (
                rng.permutation(4 * self.number)[: self.number],
                rng.permutation(4 * self.number)[: self.number],
            ),
        }

    def works(self) -> dict[str, Callable[[], object]]:
        """Return the measured works, and the memcpy to compare with."""
        ours = torch.ones(self.number * NUM_LAYERS * self.layers[0][0].numel(), dtype=torch.uint8)
        theirs = torch.ones_like(ours)
        works: dict[str, Callable[[], object]] = {"memcpy": partial(theirs.copy_, ours)}
        for name, (blocks, pages) in self.places.items():
            works[f"save, {name}"] = partial(self.target.save, blocks, pages)
            works[f"load, {name}"] = partial(self.target.load, pages, blocks)
        return works


def figures(quick: bool) -> list[Figure]:
    """Return the figures of each size of a segment, and the longest hold of the interpreter."""
    return list(_figures(quick))


def _figures(quick: bool) -> Iterator[Figure]:
    """Yield the figures of each size of a segment, and the longest hold of the interpreter."""
    num_bytes, num_rounds = (32 * 2**20, 3) if quick else (128 * 2**20, 9)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that both are one thread's work
    for segment in SEGMENTS:
        blocks = Blocks(segment, num_bytes, device)
        times = times_in_turns(blocks.works(), num_rounds)
        for name in list(times)[1:]:
            goal = GOALS[name.partition(", ")[2]][segment >= LARGE]
            rate, ratio = num_bytes / median(times[name]) / 1e9, median_ratio(times, name, "memcpy")
            what = f"{name}, segments of {segment // 1024} KiB"
            yield Figure("blocks", what, rate, "GB/s", ratio, "memcpy", at_least=goal, gate=GATES[goal])
    blocks = Blocks(LARGE, HOLD_BYTES // 4 if quick else HOLD_BYTES, device)
    for name, (ids, pages) in blocks.places.items():
        # Where other programs run, a thread that only sleeps is held for 4 ms, too.
        held = 1e3 * min(longest_hold(partial(blocks.target.save, ids, pages)) for _ in range(7))
        what = f"longest hold of the interpreter, {name}, {blocks.number * NUM_LAYERS * LARGE >> 20} MiB"
        yield Figure("blocks", what, held, "ms", at_most=MAX_HOLD_MS, gate=HOLD_GATE_MS)
    torch.set_num_threads(num_threads)


def longest_hold(work: Callable[[], object]) -> float:
    """Return the longest time for which `work` in a thread keeps this thread from running, in seconds."""
    thread = threading.Thread(target=work)
    switch_s, longest = 1e-4, 0.0
    sys.setswitchinterval(switch_s)
    thread.start()
    last = time.perf_counter()
    while thread.is_alive():
        time.sleep(switch_s)
        now = time.perf_counter()
        longest, last = max(longest, now - last - switch_s), now
    sys.setswitchinterval(0.005)
    return longest


def main() -> None:
    """Print the table."""
    print(HEADING)
    for figure in figures("--quick" in sys.argv):
        print(figure.line(), flush=True)


if __name__ == "__main__":
    main()
