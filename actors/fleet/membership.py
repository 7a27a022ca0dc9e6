"""Which caches of a fleet are compared with each other, and why the others are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from raydix.schemas import CacheConfig, CacheStats


class PageShape(NamedTuple):
    """The tokens that a page of a cache's slim events stands for. Only equal shapes have equal hashes."""

    page_size: int  # tokens
    stride_tokens: int
    bigram: bool

    def __str__(self) -> str:
        return f"page_size={self.page_size}, stride_tokens={self.stride_tokens}, bigram={self.bigram}"


class CacheFacts(NamedTuple):
    """The facts that decide whether a cache is one of the fleet."""

    events: str | bool  # `CacheConfig.events`
    shape: PageShape
    fingerprint: str  # the base model that is bound, or the only one that may be bound; empty: any

    @classmethod
    def of(cls, config: CacheConfig, stats: CacheStats) -> CacheFacts:
        """Return the facts of a cache."""
        shape = PageShape(config.page_size, config.stride_tokens, config.bigram)
        return cls(config.events, shape, stats.model_fingerprint or config.fingerprint)


class CachePlace(NamedTuple):
    """Where a cache runs."""

    name: str  # one name for all ranks of an engine
    node_id: str  # Ray's id of the node; "local": the cache has no actor
    gpu_uuid: str | None  # the card with the pool; None: the pool lies in memory


def left_out_causes(
    facts: Mapping[str, CacheFacts], shape: PageShape | None, fingerprint: str | None
) -> tuple[PageShape | None, dict[str, str]]:
    """Return the shape that most caches have, and the causes for which caches are left out, by their names.

    Args:
        facts: of every cache, by name.
        shape: the current shape; it wins a tie.
        fingerprint: of the base model; None: the one of most of the caches that have slim events and this shape.
    """
    slim = {name: fact for name, fact in facts.items() if fact.events == "slim"}
    most = _most([fact.shape for fact in slim.values()], shape)
    alike = {name: fact for name, fact in slim.items() if fact.shape == most}
    wanted = fingerprint
    if wanted is None:
        wanted = _most([fact.fingerprint for fact in alike.values() if fact.fingerprint], None)
    causes: dict[str, str] = {}
    for name, fact in facts.items():
        if name not in slim:
            causes[name] = f'it publishes no slim events: its CacheConfig.events must be "slim", not {fact.events!r}'
        elif name not in alike:
            causes[name] = f"its pages must be as those of most caches ({most}), not {fact.shape}"
        elif fact.fingerprint and fact.fingerprint != wanted:
            causes[name] = f"its base model must have the fingerprint {wanted!r}, not {fact.fingerprint!r}"
    return most, causes


def _most(values: list[Any], preferred: Any) -> Any:
    """Return the most frequent value: of several, the preferred one, or else the first; None if there is none."""
    counts = Counter(values)
    most = max(counts.values(), default=0)
    best = [value for value, count in counts.items() if count == most]
    return preferred if preferred in best else next(iter(best), None)
