"""The names of the caches of a tensor-parallel engine's ranks: NAME-tp0, NAME-tp1 and so on."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RANK = re.compile(r"(.+)-tp(0|[1-9]\d{0,5})", re.DOTALL)


def rank_name(name: str, rank: int) -> str:
    """Return the name of the cache of a rank."""
    return f"{name}-tp{rank}"


def group_ranks(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Return the caches of ranks among `names`, by the name that they share, and by rank in ascending order.

    If there is a cache NAME, then NAME-tp0, NAME-tp1 and so on are caches like any other.
    """
    names = set(names)
    groups: dict[str, dict[int, str]] = {}
    for name in names:
        found = _RANK.fullmatch(name)
        if found is not None and found.group(1) not in names:
            groups.setdefault(found.group(1), {})[int(found.group(2))] = name
    return {name: dict(sorted(ranks.items())) for name, ranks in sorted(groups.items())}


def missing_ranks(ranks: Iterable[int]) -> list[int]:
    """Return the ranks below the highest of `ranks` that are not among them."""
    ranks = set(ranks)
    return [rank for rank in range(max(ranks, default=0)) if rank not in ranks]
