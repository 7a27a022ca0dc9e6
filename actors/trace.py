"""Recorded traffic in the Mooncake format: what was asked and when, without its text.

One JSON object a line, with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one id for each block of
512 prompt tokens, or of the line's `block_size`. As the text is not there, each id is expanded to as many token ids of
its own; equal prefixes stay equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError, model_validator

from raydix.schemas.shown import cut

BLOCK = 512  # tokens a hash id stands for, unless its line has another block_size
MAX_NUMBER = 2**53  # of milliseconds, and of tokens: what is larger is no whole number as a float


class TraceError(ValueError):
    """A trace cannot be read; the message names the file and the line."""


class TracedRequest(BaseModel):
    """One line of a trace."""

    timestamp: float = Field(
        ge=0, le=MAX_NUMBER, allow_inf_nan=False, strict=True, description="ms since the trace began"
    )
    input_length: int = Field(gt=0, description="prompt tokens")
    output_length: int = Field(ge=0, le=MAX_NUMBER)
    hash_ids: list[int] = Field(description="one for each block of the prompt; equal ones stand for equal blocks")
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
        """The prompt: each hash id, as the seed of a SplitMix64 generator, gives the tokens of its block."""
        ids = np.array(self.hash_ids, np.uint64)[:, None]
        num_bits = max(1, (self.block_size - 1).bit_length())
        mixed: NDArray[Any] = (ids << np.uint64(num_bits)) + np.arange(self.block_size, dtype=np.uint64)
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= ids >> np.uint64(64 - num_bits)  # the bits that the seeds have lost
        mixed = mixed.reshape(-1)[: self.input_length]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (mixed >> np.uint64(32)).astype(np.uint32)


def read_trace(path: Path, limit: int | None = None) -> list[TracedRequest]:
    """The first `limit` requests of a trace, or all.

    Raises:
        TraceError: the file cannot be read, or a line is not in the format; the message says which and why.
    """
    trace: list[TracedRequest] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if len(trace) == limit:
                    break
                if line.strip():
                    trace.append(request := _parse(line, f"{path}, line {number}"))
                    if request.block_size != trace[0].block_size:
                        sizes = f"{request.block_size}, but {trace[0].block_size} on the lines before"
                        raise TraceError(f"{path}, line {number}: block_size is {sizes}: it must be the same on all")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8: {error.reason}") from None
    if not trace:
        raise TraceError(f"{path}: no requests in it")
    return trace


def _parse(line: str, where: str) -> TracedRequest:
    try:
        return TracedRequest.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise TraceError(f"{where}: {field + ': ' if field else ''}{cut(first['msg'])}") from None
