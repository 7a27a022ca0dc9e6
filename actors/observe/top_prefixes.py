"""`top_prefixes`: the cached prefixes through which most was reused."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest
from operator import attrgetter
from typing import NamedTuple

from raydix.actors.observe.namespace_hits import namespace_label
from raydix.cache_core.outline import SHOWN
from raydix.cache_core.radix.sample import TreeBox
from raydix.schemas import PrefixUse


class _Prefix(NamedTuple):
    """A run, and what is before it."""

    box: TreeBox
    above: _Prefix | None
    start: int  # tokens before the run

    @property
    def tokens(self) -> list[int]:
        """The first few ids."""
        head = self.above.tokens if self.above is not None else []
        return head if len(head) >= SHOWN else [*head, *self.box.tokens][:SHOWN]

    @property
    def rank(self) -> tuple[float, float]:
        """Tokens of the run that matches found, then those of all that begins with it."""
        return self.box.own_tokens * self.box.num_hits, self.start + self.box.num_tokens


def top_prefixes(boxes: Iterable[TreeBox], most: int, scale: float) -> tuple[PrefixUse, ...]:
    """Those through whose last run the most tokens were reused, then those with the most slots. O(boxes).

    Args:
        boxes: the namespaces, from `sample_tree`.
        scale: for slots, to make them add up to those of the tree.
    """
    found = [_Prefix(box, None, 0) for box in boxes]
    for each in found:  # grows as it goes
        found += [_Prefix(box, each, each.start + each.box.own_tokens) for box in each.box.boxes]
    chosen = nlargest(most, (each for each in found if each.box.own_tokens), key=attrgetter("rank"))
    return tuple(_use(each, scale) for each in chosen)


def _use(prefix: _Prefix, scale: float) -> PrefixUse:
    box = prefix.box
    return PrefixUse(
        namespace=namespace_label(box.extra_key),
        tokens=tuple(prefix.tokens),
        run_tokens=tuple(box.tokens),
        num_tokens=prefix.start + box.own_tokens,
        num_hits=round(box.num_hits),
        num_slots=prefix.start + round(scale * box.num_tokens),
        num_leases=box.num_locks,
        is_whole=box.is_whole,
    )
