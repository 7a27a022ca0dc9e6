"""The children of a node in plain Python: the twin of `_children.c`."""

from __future__ import annotations

from itertools import islice
from typing import Any


class Children(dict[bytes, Any]):
    """The children of a node, by the first page of their data, in the order in which they came.

    Compiled, it is no dict, and has these methods alone besides `len`, `get`, `values` and its subscripts; what the
    page of a child is, its data say. Leaves share one, which cannot be changed.
    """

    def first(self, limit: int, /) -> list[Any]:
        """Up to so many, those that came first. O(limit)."""
        return list(islice(self.values(), limit))

    def last(self, limit: int, /) -> list[Any]:
        """Up to so many, those that came last before the others. O(limit)."""
        return list(islice(reversed(self.values()), limit))


class _NoChildren(Children):
    def __setitem__(self, page: bytes, child: Any) -> None:
        raise TypeError("the children of a leaf cannot be changed: hang a node below it")


NO_CHILDREN = _NoChildren()
