"""`PoolHandle`: how a worker reaches the tensors of a cache's pool. It is sent once; later only slot ids are sent."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raydix.schemas.config import CacheConfig
from raydix.schemas.message import PydanticMessage


class PoolHandle(PydanticMessage):
    """Where the pool lies and how to map it.

    A worker maps it if it runs on the same node and, for a GPU pool, on the same card; otherwise it copies through
    the actor.
    """

    epoch: str = Field(description="the life of the cache to which this memory belongs")
    config: CacheConfig
    device_type: Literal["cpu", "cuda"]
    node_id: str = Field(description="the Ray node of the cache")
    path: str | None = Field(default=None, description="CPU pools: the file to map, valid on that node")
    liveness_path: str | None = Field(default=None, description="a file that the cache's process has open, and its id")
    num_bytes: int = Field(default=0, description="size of the whole pool")
    gpu_uuid: str | None = Field(default=None, description="GPU pools: the UUID of the card")
    ipc_handle: bytes | None = Field(default=None, description="GPU pools: the pickled CUDA IPC handle")
