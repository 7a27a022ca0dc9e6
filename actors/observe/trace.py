"""Recorded traffic in the Mooncake format: times, lengths and hashes of prompts, without their text.

A trace has one JSON object per line, with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`. Each
block of 512 prompt tokens, or of the line's `block_size`, has one id. `TracedRequest.tokens` expands each id to the
token ids of its block, so that equal prefixes stay equal.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError, model_validator

from raydix.schemas.shown import fault_text

BLOCK = 512  # tokens per hash id, unless the line has a block_size
MAX_NUMBER = 2**53  # limit of milliseconds and of tokens: the largest exact integer of a float


FORMAT = "one JSON object a line: timestamp, input_length, output_length, hash_ids"


class TraceError(ValueError):
    """A trace cannot be read; the message names the file and the line. `advice` is the next step for the user."""

    def __init__(self, message: str, advice: str = FORMAT) -> None:
        super().__init__(message, advice)
        self.advice = advice

    def __str__(self) -> str:
        return str(self.args[0])


class TracedRequest(BaseModel):
    """One line of a trace."""

    timestamp: float = Field(
        ge=0, le=MAX_NUMBER, allow_inf_nan=False, strict=True, description="ms since the start of the trace"
    )
    input_length: int = Field(gt=0, description="prompt tokens")
    output_length: int = Field(ge=0, le=MAX_NUMBER)
    hash_ids: list[int] = Field(description="one for each block of the prompt; equal ids mean equal prefixes")
    block_size: int = Field(default=BLOCK, gt=0, le=2**20, description="tokens of a block; the same on every line")

    @model_validator(mode="after")
    def _blocks_cover_the_prompt(self) -> TracedRequest:
        needed = -(-self.input_length // self.block_size)
        if len(self.hash_ids) != needed:
            raise ValueError(f"{self.input_length} tokens need {needed} hash ids, not {len(self.hash_ids)}")
        if min(self.hash_ids) < 0:
            raise ValueError("hash ids must not be negative")
        if max(self.hash_ids) >= 2**64:
            raise ValueError("hash ids must be below 2**64")
        return self

    def tokens(self) -> NDArray[np.uint32]:
        """Return the prompt: each hash id seeds a SplitMix64 generator, which gives the tokens of its block."""
        ids = np.array(self.hash_ids, np.uint64)[:, None]
        num_bits = max(1, (self.block_size - 1).bit_length())
        mixed: NDArray[Any] = (ids << np.uint64(num_bits)) + np.arange(self.block_size, dtype=np.uint64)
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= ids >> np.uint64(64 - num_bits)  # bits that the shift has dropped
        mixed = mixed.reshape(-1)[: self.input_length]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (mixed >> np.uint64(32)).astype(np.uint32)


def read_trace(path: Path, limit: int | None = None) -> list[TracedRequest]:
    """Return the first `limit` requests of a trace, or all, with times from 0, the time of the first.

    A name that ends in `.gz` means a gzip file.

    Raises:
        TraceError: the file cannot be read, a line has another format, or a line is earlier than the line before;
            the message names the line and the cause.
    """
    trace: list[TracedRequest] = []
    start_ms = last_ms = 0.0
    try:
        with _opened(path) as lines:
            for number, line in enumerate(lines, start=1):
                if len(trace) == limit:
                    break
                if line.strip():
                    request = _parse(line, f"{path}, line {number}")
                    if not trace:
                        start_ms = last_ms = request.timestamp
                    if request.timestamp < last_ms:
                        raise TraceError(
                            f"{path}, line {number}: timestamp must be at least {last_ms:.15g}, that of the line "
                            f"before, not {request.timestamp:.15g}: sort the lines by time"
                        )
                    last_ms = request.timestamp
                    trace.append(request.model_copy(update={"timestamp": last_ms - start_ms}))
                    if request.block_size != trace[0].block_size:
                        sizes = f"{request.block_size}, but {trace[0].block_size} on earlier lines"
                        raise TraceError(
                            f"{path}, line {number}: block_size must be the same on all lines; it is {sizes}"
                        )
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: {error}", "copy the file again; a name that ends in .gz means gzip") from None
    except OSError as error:
        raise TraceError(
            f"{path}: {error.strerror or error}",
            "give the path of a trace; raydix record NAME -o FILE writes that of a running cache",
        ) from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8: {error.reason}", f"{FORMAT}; a gzip file ends in .gz") from None
    if not trace:
        raise TraceError(f"{path}: the trace has no requests", "record for longer: raydix record NAME --seconds 600")
    return trace


def _opened(path: Path) -> TextIO:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _parse(line: str, where: str) -> TracedRequest:
    try:
        return TracedRequest.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise TraceError(f"{where}: {field + ': ' if field else ''}{fault_text(first)}") from None
