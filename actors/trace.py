"""Recorded traffic in the Mooncake format: what was asked and when, without its text.

One JSON object a line, with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one id for each block of
512 prompt tokens. As the text is not there, each id is expanded to 512 token ids of its own; equal prefixes stay equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError, model_validator

from raydix.schemas.shown import cut

BLOCK = 512  # tokens a hash id stands for
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

    @model_validator(mode="after")
    def _blocks_cover_the_prompt(self) -> TracedRequest:
        needed = -(-self.input_length // BLOCK)
        if len(self.hash_ids) != needed:
            raise ValueError(f"{self.input_length} tokens need {needed} hash ids, not {len(self.hash_ids)}")
        if min(self.hash_ids) < 0:
            raise ValueError("hash ids must not be negative")
        if max(self.hash_ids) >= 2**64:
            raise ValueError("hash ids must be below 2**64")
        return self

    def tokens(self) -> NDArray[np.uint32]:
        """The prompt: each hash id, as the seed of a SplitMix64 generator, gives the 512 tokens of its block."""
        ids = np.array(self.hash_ids, np.uint64)[:, None]
        mixed: NDArray[Any] = ids * np.uint64(BLOCK) + np.arange(BLOCK, dtype=np.uint64)
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= ids >> np.uint64(64 - 9)  # the bits that the seeds have lost
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
                    trace.append(_parse(line, f"{path}, line {number}"))
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
