"""`TrafficWriter`: hashes recorded requests and writes them to a file, in a thread."""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from typing import IO, NamedTuple

from raydix.actors.observe.trace import BLOCK
from raydix.cache_core import RadixKey
from raydix.cache_core.tree.hashing import hash_page, namespace_seed

_MAX_QUEUED = 4096  # requests
_MAX_QUEUED_BYTES = 64 * 2**20  # token ids of the queued requests
_ID_BYTES = 6  # an id must be an exact integer for every JSON reader


class Recorded(NamedTuple):
    """One request."""

    at_ms: int
    prompt: RadixKey
    output_length: int


class TrafficWriter:
    """Takes requests without waiting: it drops and counts requests that arrive faster than it can write.

    The thread writes to a temporary file in the same folder, with the suffix `.part`. `finish` sorts it by time and
    renames it to `path`. An id is the start of a SHA-256 over all tokens up to the end of its block, seeded by the
    namespace and a secret that is not kept. So prompts cannot be guessed from ids, and two recordings share no ids.

    Args:
        path: the file to write.
        block_size: prompt tokens per id.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path, block_size: int = BLOCK) -> None:
        self.path = path
        self._block_size = block_size
        self.num_written = self.num_dropped = 0
        self.error: str | None = None
        self._part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        self._file: IO[bytes] = self._part.open("xb")
        self._secret = secrets.token_bytes(32)
        self._queue: Queue[Recorded | None] = Queue(_MAX_QUEUED)
        self._bytes_in = self._bytes_out = 0  # each is written by only one thread
        self._lines: list[tuple[int, int, int]] = []  # time, place, length
        self._thread = threading.Thread(target=self._run, name="raydix-traffic-writer", daemon=True)
        self._thread.start()

    def take(self, request: Recorded) -> bool:
        """Queue a request for the thread; return False if it was dropped."""
        size = len(request.prompt.data)
        try:
            if self.error is not None or self._bytes_in - self._bytes_out + size > _MAX_QUEUED_BYTES:
                raise Full
            self._queue.put_nowait(request)
        except Full:
            self.num_dropped += 1
            return False
        self._bytes_in += size
        return True

    def finish(self, last: Iterable[Recorded]) -> None:
        """Write the queued and the last requests, then the sorted file. Waits for the disk."""
        self._queue.put(None)
        self._thread.join()
        try:
            for request in last:
                self._write(request)
            self._file.close()
            if self.error is None:
                self._put_in_order()
        except OSError as error:
            self.error = str(error)
        with suppress(OSError):  # an unwritten buffer
            self._file.close()
        self._part.unlink(missing_ok=True)

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            self._bytes_out += len(request.prompt.data)
            try:
                self._write(request)
            except OSError as error:
                self.error = str(error)

    def _write(self, request: Recorded) -> None:
        if self.error is not None:
            self.num_dropped += 1
            return
        line = {
            "timestamp": request.at_ms,
            "input_length": len(request.prompt),
            "output_length": request.output_length,
            "hash_ids": self._hash_ids(request.prompt),
        }
        if self._block_size != BLOCK:
            line["block_size"] = self._block_size
        data = json.dumps(line).encode() + b"\n"
        place = self._lines[-1][1] + self._lines[-1][2] if self._lines else 0
        self._file.write(data)
        self._lines.append((request.at_ms, place, len(data)))
        self.num_written += 1

    def _hash_ids(self, prompt: RadixKey) -> list[int]:
        prior = hash_page(self._secret, 4, 0, namespace_seed(prompt.extra_key))
        ids = []
        step = self._block_size * prompt.unit
        for at in range(0, len(prompt.data), step):
            prior = hash_page(prompt.data[at : at + step], prompt.width, prompt.arity, prior)
            ids.append(int.from_bytes(prior[:_ID_BYTES], "big"))
        return ids

    def _put_in_order(self) -> None:
        """Sort the file by the start of requests; they were written when they ended."""
        ordered = self._part.with_name(self._part.name + "s")
        try:
            with self._part.open("rb") as written, ordered.open("xb") as file:
                for _, place, length in sorted(self._lines):
                    written.seek(place)
                    file.write(written.read(length))
            os.replace(ordered, self.path)
        finally:
            ordered.unlink(missing_ok=True)
