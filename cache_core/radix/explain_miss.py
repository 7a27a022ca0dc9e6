"""Why a match ends where it does: found in the tree, and in the history of evictions and retirements."""

from __future__ import annotations

from collections.abc import Iterator

from raydix.cache_core.eviction.history import EvictionHistory, EvictionRecord, place_of
from raydix.cache_core.explanation import Elsewhere, Explanation
from raydix.cache_core.kernels import walk
from raydix.cache_core.tree.radix_key import RadixKey
from raydix.cache_core.tree.radix_tree import RadixTree
from raydix.cache_core.tree.tree_node import TreeNode

MAX_SPACES_LOOKED_AT = 1000


def explain_absence(found: Explanation, tree: RadixTree, key: RadixKey, history: EvictionHistory | None) -> None:
    """Add the reason why the full KV of `key` ends before its last whole page."""
    found.elsewhere = max(
        _elsewhere(tree, key, found.full_prefix_len), key=lambda other: other.prefix_len, default=None
    )
    if history is not None:
        _explain_from(history, found, tree, key)
    if found.elsewhere is not None and found.reason not in ("evicted", "retired"):
        found.reason = "other_namespace"


def _explain_from(history: EvictionHistory, found: Explanation, tree: RadixTree, key: RadixKey) -> None:
    """Add the record of the page that `key` lacks.

    The page left the node that the match ends at. Or it left with an earlier node in the place of this one or of one
    above it, and the history has the eviction of that node. Without either record, the page has not been there since
    the latest such eviction.
    """
    page_size = tree.page_size
    top, there = tree.find_namespace(key)
    path, end, rest = walk(top, there, page_size, there.num_tokens) if top is not None else ([], 0, 0)
    retired = history.retired(key.extra_key)
    if path:
        earlier = [_left(history, node.parent, key[node.parent.end :][:page_size]) for node in path]
        gone = None if rest else _left(history, path[-1], key[end:][:page_size])
        since = _latest(retired, *earlier)
    else:
        gone = _latest(retired, _left(history, (key.extra_key, key.arity), key[:page_size]))
        since = None
    if gone is not None:
        found.reason, found.cause = ("retired", None) if gone.cause == "retired" else ("evicted", gone.cause)
        found.seconds_ago, found.was_dropped = history.clock() - gone.at_s, gone.was_dropped
        return
    known = [at_s for at_s in (history.forgotten_until, since and since.at_s) if at_s is not None]
    found.reason = "forgotten" if known else "never_stored"
    found.remembered_s = history.clock() - max(known, default=history.began_at)


def _left(history: EvictionHistory, above: TreeNode | tuple[str | None, int], page: RadixKey) -> EvictionRecord | None:
    """Return the latest record of a page below a node, or below the top of a namespace; None if there is none.

    A namespace packs its ids in 4 or 8 bytes, which may have changed since.
    """
    place = above if isinstance(above, tuple) else place_of(above)
    return _latest(*(history.evicted(place, data) for data in {page.data, page.with_width(8).data}))


def _latest(*departures: EvictionRecord | None) -> EvictionRecord | None:
    return max((record for record in departures if record is not None), key=lambda record: record.at_s, default=None)


def _elsewhere(tree: RadixTree, key: RadixKey, full_len: int) -> Iterator[Elsewhere]:
    """Yield other namespaces that hold more of the tokens."""
    for number, (extra_key, arity) in enumerate(tree.tops):
        if number >= MAX_SPACES_LOOKED_AT:
            return
        if extra_key == key.extra_key or arity != key.arity:
            continue
        top, there = tree.find_namespace(RadixKey.from_packed(key.data, key.width, extra_key, key.arity))
        prefix_len = walk(top, there, tree.page_size, there.num_tokens)[1] if top is not None else 0
        if prefix_len > full_len:
            yield Elsewhere(extra_key, prefix_len)
