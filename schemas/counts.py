"""`Count`: how many tokens or slots a request names."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

MAX_COUNT = 2**62  # far more than any pool has: what is larger means the same, and would not fit into 64 bits


def _capped(count: int) -> int:
    return min(count, MAX_COUNT)


Count = Annotated[int, Field(ge=0, strict=True), AfterValidator(_capped)]
