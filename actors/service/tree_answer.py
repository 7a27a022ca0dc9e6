"""A tree in outline, as it travels."""

from __future__ import annotations

from collections.abc import Callable

from raydix.cache_core.outline import Outline
from raydix.schemas import TreeBranch, TreeResponse, unframe_namespace


def tree_answer(outline: Outline, unused_s: Callable[[int], float | None]) -> TreeResponse:
    """What the core found, with namespaces as their fields and parents as places.

    Args:
        unused_s: returns the seconds since a tick of the cache's clock, if it has one.
    """
    places = {each: place for place, each in enumerate(outline.nodes)}
    branches = []
    for each in outline.nodes:
        extra_key, lora_id, cache_salt = unframe_namespace(each.extra_key) if each.extra_key else (None, None, None)
        branch = TreeBranch(
            parent=None if each.parent is None else places[each.parent],
            extra_key=extra_key,
            lora_id=lora_id,
            cache_salt=cache_salt,
            tokens=tuple(each.facts.tokens),
            num_tokens=each.facts.num_tokens,
            num_tokens_below=each.tokens_below,
            num_nodes=each.num_nodes,
            num_children=each.num_children,
            is_whole=each.is_whole,
            num_locks=each.facts.num_locks,
            num_hits=each.hits,
            age=max(0, outline.now - each.last_used),
            unused_s=unused_s(each.last_used),
        )
        branches.append(branch)
    return TreeResponse(branches=tuple(branches), num_namespaces=outline.num_namespaces)
