"""Measure a disk tier and LMCache's disks: first tokens after a restart, bytes written, answers after a flipped byte.

    make bench ARGS=disk-peers

It runs in the engines' environment, in about 15 minutes, and in no suite. LMCache is installed there by hand, by the
command that the benchmark prints where it is missing; then Raydix is measured alone. Compared are

- Raydix: vLLM's engine with its connector, and a cache with a disk directly below its pool;
- LMCache: the same engine with LMCache's connector, and its server with files behind its memory (adapter "fs");
- `LocalDiskBackend`, the disk of LMCache's connector without a server, as a library without an engine: LMCache has no
  such connector for CPUs.

The settings of each are its defaults. Both engines run at the same time, are asked in turns, and live three times with
their caches. In the first life, prompts are used twice; in the second, the engines find them, and compute new ones;
before the third, one byte in a record of each prompt is flipped. Before each restart the page cache forgets the files.
Bytes are those that the kernel counts for the processes of the cache or the server, so the folder, that of TMPDIR, must
lie on a disk.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from benchmarks.figures import HEADING, Figure, median_ratio
from support.engines import lmcache_server
from support.engines.engine_process import EngineProcess
from support.engines.laboratory import BLOCK, Laboratory, prompt, slot_bytes
from support.waiting import wait_until

from raydix.actors import shutdown_cache, start_cache
from raydix.actors.tiers.disk.disk_folder import RECORDS, list_folders
from raydix.actors.tiers.disk.disk_index import INDEX
from raydix.actors.tiers.disk.record_file import stride_of
from raydix.cache_core.tiers.page_records import KINDS
from raydix.schemas import CacheConfig, DiskConfig, PoolConfig

GROUP = "disk peers"
MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
NUM_NEW = 16  # tokens of an answer
QUIET_S, QUIET_BYTES = 3.0, 2**16  # A cache has written all when it writes less than this in this time; logs go on.
SETTLE_S = 120.0
FLIPPED = 0x40  # the highest bit of the exponent, in the last byte of a float32
RIGHT = 100.0  # percent


class Answer(NamedTuple):
    """The answer of an engine; no tokens: it failed."""

    tokens: list[int]
    first_s: float
    num_hit: int


def flip(file: Path, start: int, num_bytes: int) -> None:
    """Flip a bit of a number in the middle of a record."""
    with file.open("r+b") as records:
        place = start + num_bytes // 8 * 4 + 3
        records.seek(place)
        (byte,) = records.read(1)
        records.seek(place)
        records.write(bytes([byte ^ FLIPPED]))


def forget_files(folder: Path) -> None:
    """Let the page cache forget the files of a folder, as a restart of the machine would."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Node(ABC):
    """An engine, and a cache with a disk. Both start and end together, several times.

    Args:
        model: folder of the engine's model.
        disk: an existing folder.
        prompts: the known ones.
    """

    name: str

    def __init__(self, laboratory: Laboratory, model: Path, disk: Path, prompts: list[list[int]]) -> None:
        self.laboratory = laboratory
        self.model = model
        self.disk = disk
        self.prompts = prompts
        self.engine: EngineProcess | None = None

    def start(self) -> None:
        """Start the cache, then the engine, which is not ready yet."""
        self.engine = self._start()

    def wait_until_ready(self) -> None:
        """Wait until the engine is ready."""
        assert self.engine is not None, "it does not run"
        self.engine.wait_until_ready()

    def stop(self) -> None:
        """End both; nothing of the files stays in memory."""
        assert self.engine is not None, "it does not run"
        self.engine.close()
        self._stop()
        forget_files(self.disk)

    def answer(self, tokens: list[int]) -> Answer:
        """Return the engine's answer to a prompt."""
        assert self.engine is not None, "it does not run"
        try:
            found = self.engine.answer(tokens, NUM_NEW)
        except (RuntimeError, TimeoutError) as error:
            print(f"{self.name}: the engine failed: {error}", file=sys.stderr)
            return Answer([], float("nan"), 0)
        return Answer(found["tokens"], found["times"][0], found["cached"])

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        assert self.engine is not None, "it does not run"
        self.engine.forget()

    def settled(self) -> int:
        """Wait until all is written; return the bytes that were written in this life."""
        last, since = self._written(), time.monotonic()

        def is_quiet() -> bool:
            nonlocal last, since
            time.sleep(0.1)
            if (now := self._written()) - last >= QUIET_BYTES:
                last, since = now, time.monotonic()
            return time.monotonic() - since >= QUIET_S

        wait_until(is_quiet, SETTLE_S)
        os.sync()  # No write of one node may disturb the reads of the other.
        return self._written()

    def _written(self) -> int:
        process = psutil.Process(self._pid())
        return sum(each.io_counters().write_bytes for each in (process, *process.children(recursive=True)))

    def num_damaged(self) -> int | None:
        """Return the damaged records that were counted in this life; None: none are counted."""
        return None

    @abstractmethod
    def _start(self) -> EngineProcess: ...

    @abstractmethod
    def _stop(self) -> None: ...

    @abstractmethod
    def _pid(self) -> int: ...

    @abstractmethod
    def end(self) -> None:
        """End the cache, if it still runs."""

    @abstractmethod
    def note(self, number: int) -> None:
        """Note which files are those of a known prompt that has just been used; -1: of the prompts before them."""

    @abstractmethod
    def flip(self, number: int) -> None:
        """Flip a byte in a record of a prompt's middle. Nothing runs."""


class RaydixNode(Node):
    """An engine with a cache of which the disk lies directly below the pool."""

    name = "Raydix"
    cache = "disk-peers"

    def _start(self) -> EngineProcess:
        num_slots = 4 * sum(map(len, self.prompts)) + 64 * BLOCK
        layers = slot_bytes("llama", **MODEL)
        pool = PoolConfig(num_slots=num_slots, format="opaque", slot_bytes=sum(layers), device="cpu")
        config = CacheConfig(page_size=BLOCK, pool=pool, disk=DiskConfig(path=str(self.disk), num_slots=num_slots))
        self.laboratory.caches[self.cache] = start_cache(config, name=self.cache)
        return self.laboratory.start_engine(self.model, self.cache, settings={"check": False}, **_engine_options())

    def _stop(self) -> None:
        if self.cache in self.laboratory.clients:
            self.laboratory.clients.pop(self.cache).close()
        shutdown_cache(self.laboratory.caches.pop(self.cache))

    def _pid(self) -> int:
        return self.laboratory.pid_of(self.cache)

    def note(self, number: int) -> None:
        """Do nothing: the index names the records."""

    def end(self) -> None:
        """Do nothing: the laboratory ends its caches."""

    def num_damaged(self) -> int | None:
        disk = self.laboratory.stats(self.cache).disk
        return None if disk is None else disk.damaged_records

    def flip(self, number: int) -> None:
        tokens = self.prompts[number]
        depth = len(tokens) // BLOCK // 2
        (folder,) = (Path(each.path) for each in list_folders(str(self.disk)))
        with closing(sqlite3.connect(folder / INDEX)) as index:
            query = "SELECT record, tokens FROM rows WHERE kind = ? AND depth = ?"
            rows = index.execute(query, (KINDS.index("full"), depth)).fetchall()
        page = np.array(tokens[(depth - 1) * BLOCK : depth * BLOCK])
        (record,) = (record for record, ids in rows if ids == page.astype(f"<i{len(ids) // BLOCK}").tobytes())
        num_bytes = BLOCK * sum(slot_bytes("llama", **MODEL))
        flip(folder / RECORDS["full"], (record - 1) * stride_of(num_bytes), num_bytes)


class LMCacheNode(Node):
    """An engine with LMCache's server, which has files behind its memory."""

    name = "LMCache"

    def __init__(self, laboratory: Laboratory, model: Path, disk: Path, prompts: list[list[int]]) -> None:
        super().__init__(laboratory, model, disk, prompts)
        self._files: dict[int, list[Path]] = {}  # number of a prompt -> its files
        self._server: lmcache_server.LMCacheServer | None = None

    def _start(self) -> EngineProcess:
        self._server = lmcache_server.LMCacheServer(self.laboratory.folder / "lmcache.log", disk=self.disk)
        return self.laboratory.start_engine(self.model, "unused", transfer=self._server.transfer, **_engine_options())

    def _stop(self) -> None:
        assert self._server is not None, "it does not run"
        self._server.close()
        self._server = None

    def end(self) -> None:
        if self._server is not None:
            self._stop()

    def _pid(self) -> int:
        assert self._server is not None, "it does not run"
        return self._server.process.pid

    def note(self, number: int) -> None:
        known = {file for files in self._files.values() for file in files}
        self._files[number] = sorted({*self.disk.glob("*.data")} - known, key=lambda file: file.stat().st_mtime_ns)

    def flip(self, number: int) -> None:
        files = self._files[number]
        file = files[len(files) // 2]
        flip(file, 0, file.stat().st_size)


def _engine_options() -> dict[str, Any]:
    return {"num_gpu_blocks_override": 160, "kv_cache_memory_bytes": 2**30}


@dataclass
class Course:
    """The figures of the three lives of a node."""

    name: str
    opened: int = 0  # bytes that were written before the first prompt
    once: int = 0  # bytes that were written when each prompt had been used once
    twice: int = 0
    computed: list[Answer] = field(default_factory=list)  # in the second life
    found: list[Answer] = field(default_factory=list)
    flipped: list[Answer] = field(default_factory=list)
    expected: list[list[int]] = field(default_factory=list)  # tokens of the answers in the first life
    num_damaged: int | None = None

    def right(self, answers: list[Answer]) -> float:
        """Return the percentage of the answers that are those of the first life."""
        pairs = zip(answers, self.expected, strict=True)
        return RIGHT * mean(answer.tokens == expected for answer, expected in pairs)


def run(nodes: list[Node], prompts: list[list[int]]) -> list[Course]:
    """Let nodes live three times, all at the same time, with these prompts."""
    seeds = iter(range(10_000, 20_000))
    courses = {node: Course(node.name) for node in nodes}

    def new_prompt() -> list[int]:
        return prompt(len(prompts[0]), next(seeds))

    def in_turns(number: int) -> list[Node]:
        first = number % len(nodes)
        return nodes[first:] + nodes[:first]

    def start() -> None:
        for node in nodes:
            node.start()
        for node, course in courses.items():
            node.wait_until_ready()
            course.opened = course.opened or node.settled()
            for _ in range(2):  # Code is compiled at the first, and the model bound.
                node.answer(new_prompt())

    def stop() -> None:
        for node in nodes:
            node.stop()

    start()
    before = {node: node.settled() for node in nodes}
    for node in nodes:
        node.note(-1)
    for number, tokens in enumerate(prompts):
        for node in in_turns(number):
            courses[node].expected.append(node.answer(tokens).tokens)
            courses[node].once = node.settled() - before[node]
            node.note(number)
    for node, course in courses.items():
        node.forget()
        for tokens in prompts:
            node.answer(tokens)
        course.twice = node.settled() - before[node]
    stop()

    start()
    for number, tokens in enumerate(prompts):
        new = new_prompt()
        for asked, answers in ((tokens, "found"), (new, "computed")):
            for node in in_turns(number):
                node.settled()
                getattr(courses[node], answers).append(node.answer(asked))
    stop()

    for node in nodes:
        for number in range(len(prompts)):
            node.flip(number)
    start()
    for number, tokens in enumerate(prompts):
        for node in in_turns(number):
            courses[node].flipped.append(node.answer(tokens))
    for node, course in courses.items():
        course.num_damaged = node.num_damaged()
    stop()
    return list(courses.values())


class LocalDisk:
    """LMCache's `LocalDiskBackend` on a folder, as a library.

    Args:
        shape: of a chunk: K and V, layers, tokens, elements of a token.
    """

    def __init__(self, folder: Path, shape: tuple[int, int, int, int]) -> None:
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        self.shape = shape
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=shape[2],
            local_cpu=False,
            max_local_cpu_size=0.5,
            local_disk=f"file://{folder}",
            max_local_disk_size=1.0,
        )
        two, layers, tokens, width = shape
        metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.float32, (layers, two, tokens, 1, width))
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.memory = LocalCPUBackend(config, metadata)
        self.disk = LocalDiskBackend(config, self.loop, self.memory, "cpu", metadata=metadata)

    @staticmethod
    def key(number: int) -> Any:
        from lmcache.utils import CacheEngineKey

        return CacheEngineKey("model", 1, 0, 1 + number, torch.float32)

    def put(self, number: int, chunk: torch.Tensor) -> None:
        """Write a chunk; return when it can be found."""
        from lmcache.v1.memory_management import MemoryFormat

        held = self.memory.allocate(torch.Size(self.shape), torch.float32, MemoryFormat.KV_2LTD)
        held.tensor.copy_(chunk)
        self.disk.batched_submit_put_task([self.key(number)], [held])
        held.ref_count_down()
        wait_until(lambda: self.has(number))

    def has(self, number: int) -> bool:
        return bool(self.disk.contains(self.key(number)))

    def get(self, number: int) -> torch.Tensor:
        """Read a chunk."""
        held = self.disk.get_blocking(self.key(number))
        chunk: torch.Tensor = held.tensor.clone()
        held.ref_count_down()
        return chunk

    def close(self) -> None:
        self.disk.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


def library_figures(folder: Path, num_chunks: int = 8) -> Iterator[Figure]:
    """Yield the chunks that `LocalDiskBackend` finds after a restart, and returns after a flipped byte in each file."""
    disk = LocalDisk(folder, (2, 8, 256, 256))
    chunks = [torch.randn(disk.shape) for _ in range(num_chunks)]
    for number, chunk in enumerate(chunks):
        disk.put(number, chunk)
    assert all(torch.equal(disk.get(number), chunk) for number, chunk in enumerate(chunks))
    for file in folder.glob("*.pt"):
        flip(file, 0, file.stat().st_size)
    right = mean(torch.equal(disk.get(number), chunk) for number, chunk in enumerate(chunks))
    disk.close()
    disk = LocalDisk(folder, disk.shape)
    found = mean(disk.has(number) for number in range(num_chunks))
    disk.close()
    yield Figure(GROUP, "chunks found after a restart, LocalDiskBackend", RIGHT * found, "%")
    yield Figure(GROUP, "chunks right after one flipped byte in each, LocalDiskBackend", RIGHT * right, "%")


def course_figures(course: Course, length: int, kv_bytes: int) -> Iterator[Figure]:
    """Yield the figures of one node. Only Raydix's answers have a goal."""
    name = course.name
    goal = {"at_least": RIGHT, "gate": RIGHT} if name == RaydixNode.name else {}
    computed = median(answer.first_s for answer in course.computed)
    found = median(answer.first_s for answer in course.found)
    hit = mean(answer.num_hit for answer in course.found)
    what = f"first of {length:,} tokens after a restart, {name}"
    yield Figure(GROUP, f"first of {length:,} tokens, computed, {name}", 1e3 * computed, "ms")
    yield Figure(GROUP, what, 1e3 * found, "ms", computed / found, "computed")
    yield Figure(GROUP, f"tokens of a prompt that hit after a restart, {name}", hit, "tokens", hit / length, "all")
    yield Figure(GROUP, f"right answers after a restart, {name}", course.right(course.found), "%", **goal)
    for times, num_bytes in (("once", course.once), ("twice", course.twice)):
        what = f"written for prompts used {times}, {name}"
        yield Figure(GROUP, what, num_bytes / 2**20, "MiB", num_bytes / kv_bytes, "their KV")
    yield Figure(GROUP, f"written when it was opened, {name}", course.opened / 2**20, "MiB")
    hit = mean(answer.num_hit for answer in course.flipped)
    what = f"right answers after one flipped byte in each prompt, {name}"
    yield Figure(GROUP, what, course.right(course.flipped), "%", **goal)
    yield Figure(GROUP, f"tokens that hit after it, {name}", hit, "tokens", hit / length, "all")
    if course.num_damaged is not None:
        share = course.num_damaged / len(course.flipped)
        yield Figure(
            GROUP, f"damaged records that were counted, {name}", course.num_damaged, "", share, "flipped bytes"
        )


def figures(quick: bool) -> list[Figure]:
    """Return the figures of both; of Raydix alone where LMCache is not installed."""
    if find_spec("vllm") is None:
        print(f"{GROUP}: not measured, as vLLM is not installed: make bench ARGS=disk-peers runs it where it is")
        return []
    kinds: list[type[Node]] = [RaydixNode]
    if lmcache_server.is_installed():
        kinds.append(LMCacheNode)
    else:
        print(f"{GROUP}: Raydix alone, as LMCache is not installed: {lmcache_server.INSTALL}")
    length, num_prompts = (1024, 2) if quick else (2048, 6)
    prompts = [prompt(length, seed) for seed in range(num_prompts)]
    kv_bytes = num_prompts * length * sum(slot_bytes("llama", **MODEL))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    with TemporaryDirectory(prefix="raydix-peers-") as folder:
        courses = _run_in_folder(kinds, Path(folder), prompts)
        found = [figure for course in courses for figure in course_figures(course, length, kv_bytes)]
        if len(courses) == 2:
            firsts = {course.name: [answer.first_s for answer in course.found] for course in courses}
            ratio = median_ratio(firsts, RaydixNode.name, LMCacheNode.name)
            what, first_ms = f"first of {length:,} tokens after a restart", 1e3 * median(firsts[RaydixNode.name])
            found.append(Figure(GROUP, what, first_ms, "ms", ratio, LMCacheNode.name))
            (library := Path(folder) / "library").mkdir()
            found += library_figures(library)
    return found


def _run_in_folder(kinds: list[type[Node]], folder: Path, prompts: list[list[int]]) -> list[Course]:
    """Run nodes on a Ray cluster of their own."""
    import ray

    context = ray.init("local", num_cpus=2, include_dashboard=False, namespace="raydix", log_to_driver=False)
    laboratory = Laboratory(context.address_info["gcs_address"], folder)
    nodes: list[Node] = []
    try:
        model = laboratory.save_model("llama", **MODEL)
        for kind in kinds:
            (disk := folder / kind.name).mkdir()
            nodes.append(kind(laboratory, model, disk, prompts))
        return run(nodes, prompts)
    finally:
        laboratory.close()
        for node in nodes:
            node.end()
        ray.shutdown()


def main() -> None:
    """Print the table."""
    print(HEADING)
    for figure in figures("--quick" in sys.argv):
        print(figure.line(), flush=True)


if __name__ == "__main__":
    main()
