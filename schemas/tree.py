"""Asking what a tree holds in outline, and the answer."""

from __future__ import annotations

from pydantic import Field

from raydix.schemas.message import PydanticMessage


class TreeRequest(PydanticMessage):
    """The largest branches of the tree. A probe: nothing changes. A few milliseconds, however large the tree is."""

    max_nodes: int = Field(default=200, ge=1, le=4096, strict=True)
    max_depth: int = Field(default=64, ge=0, le=4096, strict=True, description="levels below the namespaces")
    max_width: int = Field(default=64, ge=1, le=4096, strict=True, description="children of a node, the largest")


class TreeBranch(PydanticMessage):
    """A node of the tree, and what is known of all below it; or a namespace, which holds no tokens of its own."""

    parent: int | None = Field(description="place in `TreeResponse.branches` of the one above; None: a namespace")
    extra_key: str | None = Field(default=None, description="of the namespace, as the next two")
    lora_id: str | None = None
    cache_salt: str | None = None
    tokens: tuple[int, ...] = Field(description="its first few")
    num_tokens: int = Field(description="its own")
    num_tokens_below: int = Field(description="its own and those below it, as far as they were looked at")
    num_nodes: int = Field(description="this one and those below it, likewise")
    num_children: int = Field(description="all of them, told or not")
    is_whole: bool = Field(description="everything below it was looked at: no more than 4,096 nodes are, in all")
    num_locks: int = Field(description="of leases, on it and below it")
    num_hits: int = Field(description="that ended at it or below; 0 where this kind of cache does not count them")
    age: int = Field(description="uses of the cache since it was last used: 0 is the latest")
    unused_s: float | None = Field(
        default=None, description="seconds since it was last used, to about a second; None: this kind keeps no time"
    )


class TreeResponse(PydanticMessage):
    """The largest branches of the tree, parents before children, the largest first."""

    branches: tuple[TreeBranch, ...]
    num_namespaces: int
