"""Recording a cache's traffic."""

from __future__ import annotations

from pydantic import Field

from raydix.schemas.message import PydanticMessage


class StartRecording(PydanticMessage):
    """Record requests to a file on the cache's node, in the Mooncake format: lengths, times, hashes; no token ids."""

    path: str = Field(min_length=1, description="on the cache's node")
    max_requests: int = Field(default=100_000, ge=1, description="requests beyond them are not recorded")
    max_seconds: float = Field(
        default=3600.0, gt=0, allow_inf_nan=False, description="nor those that begin later: then the file is written"
    )
    block_size: int | None = Field(
        default=None, ge=1, le=2**20, description="prompt tokens that a hash stands for; None: a page of the cache"
    )
    overwrite: bool = Field(default=False, description="a file that is there already, once the new one is whole")


class RecordingStatus(PydanticMessage):
    """How a recording fares, or what became of it."""

    path: str
    seconds: float = Field(description="since it began")
    requests: int = Field(description="that have ended and were recorded")
    dropped: int = Field(description="not recorded, as the writer was too slow, or could not write")
    error: str | None = Field(default=None, description="why it could not write")
