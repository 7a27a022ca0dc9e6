"""Why a match in a tree of pages goes no further, looked up in what is there and in what is remembered of the rest."""

from __future__ import annotations

from collections.abc import Iterator

from raydix.cache_core.eviction_history import Departure, EvictionHistory, place_of
from raydix.cache_core.explanation import Elsewhere, Explanation
from raydix.cache_core.kernels import walk
from raydix.cache_core.radix_key import RadixKey
from raydix.cache_core.radix_tree import RadixTree

MAX_SPACES_LOOKED_AT = 1000


def explain_absence(found: Explanation, tree: RadixTree, key: RadixKey, history: EvictionHistory | None) -> None:
    """Say why the full KV of `key` ends before its last whole page."""
    found.reason = "never_stored"
    gone = _departure(tree, key, history)
    if gone is not None:
        found.reason, found.cause = ("retired", None) if gone.cause == "retired" else ("evicted", gone.cause)
        assert history is not None
        found.seconds_ago = history.clock() - gone.at_s
    found.elsewhere = max(
        _elsewhere(tree, key, found.full_prefix_len), key=lambda other: other.prefix_len, default=None
    )
    if gone is None and found.elsewhere is not None:
        found.reason = "other_namespace"


def _departure(tree: RadixTree, key: RadixKey, history: EvictionHistory | None) -> Departure | None:
    """When and why what follows the match went, if that is remembered."""
    if history is None:
        return None
    top, there = tree.find_space(key)
    path, end, rest = walk(top, there, tree.page_size, there.num_tokens) if top is not None else ([], 0, 0)
    if rest:
        return None
    if path:
        start = end * there.unit
        return history.evicted(place_of(path[-1]), there.data[start : start + tree.page_size * there.unit])
    first = there if there.num_tokens >= tree.page_size else key
    evicted = history.evicted((key.extra_key, key.arity), first.data[: tree.page_size * first.unit])
    return _latest(evicted, history.retired(key.extra_key))


def _latest(*departures: Departure | None) -> Departure | None:
    return max((each for each in departures if each is not None), key=lambda each: each.at_s, default=None)


def _elsewhere(tree: RadixTree, key: RadixKey, full_len: int) -> Iterator[Elsewhere]:
    """Other namespaces in which more of the tokens are there."""
    for number, (extra_key, arity) in enumerate(tree.tops):
        if number >= MAX_SPACES_LOOKED_AT:
            return
        if extra_key == key.extra_key or arity != key.arity:
            continue
        top, there = tree.find_space(RadixKey.from_packed(key.data, key.width, extra_key, key.arity))
        prefix_len = walk(top, there, tree.page_size, there.num_tokens)[1] if top is not None else 0
        if prefix_len > full_len:
            yield Elsewhere(extra_key, prefix_len)
