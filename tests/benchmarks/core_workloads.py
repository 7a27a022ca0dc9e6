"""Six workloads for the core of a prefix cache, made from seeds, each with the hits of an unlimited cache."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

VOCABULARY = 128_000
BLOCK = 512  # tokens of a hash id of a trace
TRACE_REQUESTS, TRACE_SLOTS = 1_000, 3_000_000


@dataclass
class Workload:
    """Requests in order of arrival: prompts, and the output generated after each."""

    name: str
    prompts: list[Tokens]
    sequences: list[Tokens]  # prompt and output
    num_slots: int | None = None  # of the pool; None: large enough for all

    def hits(self, page_size: int) -> list[int]:
        """The prefix that each prompt shares with some earlier sequence, in whole pages: the hits of an unlimited
        cache."""
        return [length // page_size * page_size for length in self._shared]

    def capacity(self, page_size: int) -> int:
        """Return the slots of the pool, in whole pages."""
        new = sum(map(len, self.sequences)) - sum(self.hits(page_size))
        wanted = self.num_slots or new + 2 * page_size * len(self.prompts)
        return -(-wanted // page_size) * page_size

    def __post_init__(self) -> None:
        earlier: list[bytes] = []  # sorted, so that sequences with long shared prefixes are neighbours
        self._shared: list[int] = []
        for prompt, sequence in zip(self.prompts, self.sequences, strict=True):
            key = prompt.astype(">u4").tobytes()
            at = bisect_left(earlier, key)
            self._shared.append(max((_common(key, other) for other in earlier[max(0, at - 1) : at + 1]), default=0))
            whole = sequence.astype(">u4").tobytes()
            earlier.insert(bisect_left(earlier, whole), whole)


def _common(one: bytes, other: bytes) -> int:
    """Return the number of leading 4-byte ids that two keys share."""
    size = min(len(one), len(other))
    differ = np.frombuffer(one, ">u4", size // 4) != np.frombuffer(other, ">u4", size // 4)
    return int(differ.argmax()) if differ.any() else size // 4


def _ids(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(0, VOCABULARY, count, np.int32)


def _made(name: str, pairs: list[tuple[Tokens, Tokens]], num_slots: int | None = None) -> Workload:
    return Workload(name, [prompt for prompt, _ in pairs], [np.concatenate(pair) for pair in pairs], num_slots)


def chat(scale: float) -> Workload:
    """Return conversations of eight turns, several under each system prompt, in turns."""
    rng = np.random.default_rng(11)
    systems = [_ids(rng, 1_000) for _ in range(8)]
    histories = [systems[number % len(systems)] for number in range(max(2, int(48 * scale)))]
    pairs: list[tuple[Tokens, Tokens]] = []
    for _ in range(8):
        for number in rng.permutation(len(histories)):
            prompt = np.concatenate((histories[number], _ids(rng, rng.integers(80, 180))))
            output = _ids(rng, rng.integers(80, 180))
            pairs.append((prompt, output))
            histories[number] = np.concatenate((prompt, output))
    return _made("chat", pairs)


def documents(scale: float) -> Workload:
    """Return questions about long documents."""
    rng = np.random.default_rng(12)
    texts = [_ids(rng, 32_000) for _ in range(max(2, int(24 * scale)))]
    order = rng.permutation(len(texts) * 12) % len(texts)
    return _made("documents", [(np.concatenate((texts[at], _ids(rng, 130))), _ids(rng, 60)) for at in order])


def short(scale: float) -> Workload:
    """Return short prompts; the first half of each is one of a few templates."""
    return _made("short", _templated(scale, 13, cut=False))


def pressed(scale: float) -> Workload:
    """Return the same workload with slots for a tenth of it."""
    workload = _made("pressed", _templated(scale, 13, cut=False))
    new = sum(map(len, workload.sequences)) - sum(workload.hits(1))
    workload.num_slots = new // 10
    return workload


def chains(scale: float) -> Workload:
    """Return short prompts that diverge from their templates anywhere, so that paths become chains of many short
    nodes."""
    return _made("chains", _templated(scale, 14, cut=True))


def _templated(scale: float, seed: int, cut: bool) -> list[tuple[Tokens, Tokens]]:
    rng = np.random.default_rng(seed)
    templates = [_ids(rng, 256 if cut else rng.integers(64, 257)) for _ in range(max(4, int(100 * scale)))]
    pairs = []
    for _ in range(int(8_000 * scale)):
        template = templates[rng.integers(len(templates))]
        shared = template[: rng.integers(64, 257)] if cut else template
        pairs.append((np.concatenate((shared, _ids(rng, len(shared)))), _ids(rng, 32)))
    return pairs


def traced(scale: float) -> Workload:
    """Return the first requests of the trace named by RAYDIX_TRACE (Mooncake format); equal ids are equal blocks."""
    blocks: dict[int, Tokens] = {}

    def block(number: int) -> Tokens:
        if number not in blocks:
            blocks[number] = _ids(np.random.default_rng((15, number)), BLOCK)
        return blocks[number]

    def request(entry: dict[str, Any]) -> tuple[Tokens, Tokens]:
        prompt = np.concatenate([block(number) for number in entry["hash_ids"]])[: entry["input_length"]]
        return prompt, _ids(rng, entry["output_length"])

    rng = np.random.default_rng(15)
    with open(os.environ["RAYDIX_TRACE"]) as lines:
        pairs = [request(json.loads(line)) for line in islice(lines, int(TRACE_REQUESTS * scale))]
    return _made("traced", pairs, max(int(TRACE_SLOTS * scale), 300_000))


WORKLOADS: dict[str, Callable[[float], Workload]] = {
    "chat": chat,
    "documents": documents,
    "short": short,
    "traced": traced,
    "pressed": pressed,
    "chains": chains,
}


def known_workloads() -> list[str]:
    """Return the names of the workloads that can be made here: `traced` needs its trace."""
    return [name for name in WORKLOADS if name != "traced" or os.environ.get("RAYDIX_TRACE")]
