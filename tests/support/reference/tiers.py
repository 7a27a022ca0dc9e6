"""The reference for two tiers: for each a dictionary of prefixes, page by page, with the KV that a page must hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

Place = tuple[str | None, tuple[int, ...]]  # namespace, and all tokens up to the end of a page


@dataclass
class ReferenceTier:
    """The prefixes that one tier has, each with the generation of the weights that computed it."""

    page_size: int
    pages: dict[Place, int] = field(default_factory=dict)

    def longest(self, namespace: str | None, tokens: tuple[int, ...], limit: int | None = None) -> int:
        """The leading tokens that are here, whole pages of them."""
        end, most = 0, len(tokens) if limit is None else min(limit, len(tokens))
        while end + self.page_size <= most and (namespace, tokens[: end + self.page_size]) in self.pages:
            end += self.page_size
        return end

    def publish(self, namespace: str | None, tokens: tuple[int, ...], generation: int) -> None:
        """Add the whole pages of a prefix; pages that are here stay."""
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            self.pages.setdefault((namespace, tokens[:end]), generation)

    def forget(self, places: Iterable[Place]) -> None:
        """Remove evicted pages. Each tier is closed: it has all pages above a page."""
        for place in places:
            del self.pages[place]
        for namespace, tokens in self.pages:
            above = tokens[: -self.page_size]
            assert not above or (namespace, above) in self.pages, f"{tokens} is here without the page above it"


class ReferenceTiers:
    """Two tiers that share nothing but their namespaces' generations.

    Attributes:
        device, host: the tiers.
        generations: of each namespace: it rises when the namespace is retired.
        reused: tokens of prefixes that were handed out, found in the device.
        loaded: tokens of prefixes that were handed out, found in the host.
    """

    def __init__(self, page_size: int) -> None:
        self.device, self.host = ReferenceTier(page_size), ReferenceTier(page_size)
        self.generations: dict[str | None, int] = {}
        self.reused = self.loaded = 0

    def generation(self, namespace: str | None) -> int:
        """The generation of a namespace's weights."""
        return self.generations.get(namespace, 0)

    def retire(self, is_meant: Callable[[str | None], bool], namespaces: Iterable[str | None]) -> None:
        """Forget the pages of namespaces in both tiers."""
        for namespace in namespaces:
            if is_meant(namespace):
                self.generations[namespace] = self.generation(namespace) + 1
        for tier in (self.device, self.host):
            tier.pages = {place: made for place, made in tier.pages.items() if not is_meant(place[0])}
