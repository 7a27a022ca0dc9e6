"""Faults in how nodes are cut, by a match or by an insert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.faults.faults import Patch, around

from raydix.cache_core import RadixKey
from raydix.cache_core.radix import lookup
from raydix.cache_core.tree import radix_tree


def walk_and_split(node_type: Any, ids: Any, node: Any, key: RadixKey, page_size: int, num_tokens: int) -> Any:
    """The kernel, put together from two of which one may be broken."""
    path, end, rest = lookup.walk(node, key, page_size, num_tokens)
    if rest:
        path[-1] = radix_tree.split_node(node_type, ids, page_size, path[-1], end)
    return path, end, 0


def after_cuts(patch: Patch, change: Callable[[Any, Any], None]) -> None:
    """Have `change(above, node)` done after each cut."""

    def split_node(original: Any, node_type: Any, ids: Any, page_size: int, node: Any, end: int) -> Any:
        above = original(node_type, ids, page_size, node, end)
        change(above, node)
        return above

    around(patch, radix_tree, "split_node", split_node)
    patch.setattr(lookup, "walk_and_split", walk_and_split)
