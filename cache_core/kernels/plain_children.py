"""The children of a node in plain Python: the equivalent of `c/_children.c`."""

from __future__ import annotations

from itertools import islice
from typing import Any


class Children(dict[bytes, Any]):
    """The children of a node by the first page of their data, in the order in which they were added.

    All leaves share one instance, which is read-only. The compiled class is not a dict: besides these methods it has
    only `len`, `get`, `values` and subscripts. It reads the page of a child from the child's data.
    """

    def first(self, limit: int, /) -> list[Any]:
        """Return the first `limit` children, or all if there are fewer. O(limit)."""
        return list(islice(self.values(), limit))

    def last(self, limit: int, /) -> list[Any]:
        """Return the last `limit` children, the last one first, or all if there are fewer. O(limit)."""
        return list(islice(reversed(self.values()), limit))


class _NoChildren(Children):
    def __setitem__(self, page: bytes, child: Any) -> None:
        raise TypeError("the children of a leaf cannot be changed: hang a node below it")


NO_CHILDREN = _NoChildren()
