"""The request to record a cache's traffic, and the status of a recording."""

from __future__ import annotations

from pydantic import Field

from raydix.schemas.message import PydanticMessage


class StartRecording(PydanticMessage):
    """Record requests to a file on the cache's node, in the Mooncake format: lengths, times, hashes; no token ids."""

    path: str = Field(min_length=1, description="on the cache's node")
    max_requests: int = Field(default=100_000, ge=1, description="more requests are not recorded")
    max_seconds: float = Field(
        default=3600.0,
        gt=0,
        allow_inf_nan=False,
        description="later requests are not recorded; then the file is written",
    )
    block_size: int | None = Field(
        default=None, ge=1, le=2**20, description="prompt tokens per hash; None: a page of the cache"
    )
    overwrite: bool = Field(default=False, description="replace an existing file, once the new one is complete")


class RecordingStatus(PydanticMessage):
    """The progress of a recording, or its outcome."""

    path: str
    seconds: float = Field(description="since it began")
    requests: int = Field(description="requests that have ended and were recorded")
    dropped: int = Field(description="requests that were not recorded, as the writer was too slow or failed")
    error: str | None = Field(default=None, description="why it could not write")
