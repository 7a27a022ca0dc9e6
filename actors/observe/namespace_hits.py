"""`NamespaceUse`: requests and hits by namespace."""

from __future__ import annotations

from raydix.cache_core import RadixKey
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.leases.request_observer import RequestObserver
from raydix.schemas import NamespaceStats, unframe_namespace

_KEPT = 256  # namespaces after a fold; up to twice as many before it

_Counts = list[int]  # requests, tokens requested, tokens reused, tokens refused, tokens loaded


class NamespaceUse(RequestObserver):
    """Counts requests and hits (`RequestObserver`) of the largest namespaces, and of all others together.

    Attributes:
        tokens_loaded: of the reused tokens of all namespaces, those that were loaded from tiers below the pool.
    """

    def __init__(self) -> None:
        self.tokens_loaded = 0
        self._counts: dict[str | None, _Counts] = {}
        self._others: _Counts = [0] * 5

    def granted(self, lease: LeaseRecord, max_prefix_len: int | None) -> None:
        """Count a request with its hit, once."""
        if not lease.resumed:
            counts = self._counts_of(lease.key)
            counts[0] += 1
            counts[1] += len(lease.key)
            counts[2] += lease.prefix_len

    def loaded(self, lease: LeaseRecord, num_tokens: int) -> None:
        """Count loaded tokens as part of the hit."""
        if not lease.resumed:
            counts = self._counts_of(lease.key)
            counts[2] += num_tokens
            counts[4] += num_tokens
            self.tokens_loaded += num_tokens

    def refused(self, key: RadixKey, num_tokens: int, can_ever_fit: bool) -> None:
        """Count the tokens of a refused request, which are in no hit rate."""
        self._counts_of(key)[3] += len(key)

    def _counts_of(self, key: RadixKey) -> _Counts:
        counts = self._counts.get(key.extra_key)
        if counts is None:
            if len(self._counts) >= 2 * _KEPT:
                self._fold()
            counts = self._counts[key.extra_key] = [0] * 5
        return counts

    def ended(self, lease: LeaseRecord) -> None:
        """Take back the count of a request that begins again: its lease was not handed out."""
        if lease.filling_for and not lease.resumed:
            counts = self._counts_of(lease.key)
            counts[0] -= 1
            counts[1] -= len(lease.key)
            counts[2] -= lease.prefix_len
            counts[4] -= lease.loaded_len
            self.tokens_loaded -= lease.loaded_len

    def stats(self, most: int) -> tuple[NamespaceStats, ...]:
        """Return the counts of the `most` namespaces with the most tokens, then the sums of all others."""
        ranked = self._ranked()
        rows = [_stats(namespace_label(extra_key), counts) for extra_key, counts in ranked[:most]]
        others = [sum(column) for column in zip(self._others, *(counts for _, counts in ranked[most:]), strict=True)]
        return (*rows, _stats("all others", others)) if any(others) else tuple(rows)

    def _ranked(self) -> list[tuple[str | None, _Counts]]:
        return sorted(self._counts.items(), key=lambda item: item[1][1], reverse=True)

    def _fold(self) -> None:
        ranked = self._ranked()
        self._counts = dict(ranked[:_KEPT])
        for _, counts in ranked[_KEPT:]:
            self._others = [sum(pair) for pair in zip(self._others, counts, strict=True)]


def namespace_label(extra_key: str | None) -> str:
    """Return a readable name of a namespace: its fields."""
    if extra_key is None:
        return "no namespace"
    named = zip(("extra_key", "lora_id", "cache_salt"), unframe_namespace(extra_key), strict=True)
    return ", ".join(f"{name}={field}" for name, field in named if field is not None)


def _stats(label: str, counts: list[int]) -> NamespaceStats:
    requests, requested, reused, refused, loaded = counts
    return NamespaceStats(
        label=label,
        requests=requests,
        tokens_requested=requested,
        tokens_reused=reused,
        tokens_loaded=loaded,
        tokens_refused=refused,
    )
