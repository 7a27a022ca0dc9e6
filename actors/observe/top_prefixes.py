"""`top_prefixes`: the cached prefixes with the most reused tokens."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest
from operator import attrgetter
from typing import NamedTuple

from raydix.actors.observe.namespace_hits import namespace_label
from raydix.cache_core.outline import SHOWN, OutlineNode
from raydix.schemas import PrefixUse


class _Prefix(NamedTuple):
    """A run of tokens, and the runs before it."""

    node: OutlineNode
    above: _Prefix | None
    start: int  # tokens before the run

    @property
    def tokens(self) -> list[int]:
        """The first few ids."""
        head = self.above.tokens if self.above is not None else []
        return head if len(head) >= SHOWN else [*head, *self.node.first_tokens][:SHOWN]

    @property
    def rank(self) -> tuple[float, float]:
        """The tokens of the run times its hits, then the tokens of all prefixes that begin with it."""
        return self.node.own_tokens * self.node.hits, self.start + self.node.tokens_below


def top_prefixes(nodes: Iterable[OutlineNode], most: int, scale: float) -> tuple[PrefixUse, ...]:
    """Return the prefixes with the most tokens reused through their last run, then by most slots. O(nodes).

    Args:
        nodes: the namespaces of a sampled tree.
        most: the length of the result.
        scale: a factor for slots, so that a sample adds up to the slots of the tree.
    """
    found = [_Prefix(node, None, 0) for node in nodes]
    for prefix in found:  # grows as it goes
        found += [_Prefix(node, prefix, prefix.start + prefix.node.own_tokens) for node in prefix.node.children]
    chosen = nlargest(most, (prefix for prefix in found if prefix.node.own_tokens), key=attrgetter("rank"))
    return tuple(_use(prefix, scale) for prefix in chosen)


def _use(prefix: _Prefix, scale: float) -> PrefixUse:
    node = prefix.node
    return PrefixUse(
        namespace=namespace_label(node.extra_key),
        tokens=tuple(prefix.tokens),
        run_tokens=tuple(node.tokens),
        num_tokens=prefix.start + node.own_tokens,
        num_hits=node.hits,
        num_slots=prefix.start + round(scale * node.tokens_below),
        num_leases=node.num_locks,
        is_whole=node.is_whole,
    )
