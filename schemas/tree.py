"""The request for an outline of a tree, and its response."""

from __future__ import annotations

from pydantic import Field

from raydix.schemas.message import PydanticMessage


class TreeRequest(PydanticMessage):
    """Ask for the largest branches of the tree. A probe: nothing changes. Takes a few milliseconds at any size."""

    max_nodes: int = Field(default=200, ge=1, le=4096, strict=True)
    max_depth: int = Field(default=64, ge=0, le=4096, strict=True, description="levels below the namespaces")
    max_width: int = Field(default=64, ge=1, le=4096, strict=True, description="children of a node, the largest")


class TreeBranch(PydanticMessage):
    """A node of the tree, with totals of the nodes below it; or a namespace, which has no tokens itself."""

    parent: int | None = Field(description="index of the parent in `TreeResponse.branches`; None: a namespace")
    extra_key: str | None = Field(default=None, description="of the namespace, as are the next two")
    lora_id: str | None = None
    cache_salt: str | None = None
    tokens: tuple[int, ...] = Field(description="its first few after those that it shares with its siblings")
    num_tokens: int = Field(description="its own")
    num_tokens_below: int = Field(description="its own and those of the sampled nodes below it")
    num_nodes: int = Field(description="this one and the sampled nodes below it")
    num_children: int = Field(description="all of its children, listed or not")
    is_whole: bool = Field(description="all nodes below it were sampled; at most 4,096 nodes are, in total")
    num_locks: int = Field(description="of leases, on it and below it")
    num_hits: int = Field(description="matches that ended at it or below; 0 if this kind of cache does not count them")
    age: int = Field(description="uses of the cache since its last use; 0: the latest")
    unused_s: float | None = Field(
        default=None,
        description="seconds since its last use, to about a second; None: this kind keeps no time",
    )


class TreeResponse(PydanticMessage):
    """The largest branches of the tree, parents before children, the largest first."""

    branches: tuple[TreeBranch, ...]
    num_namespaces: int
