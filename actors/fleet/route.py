"""`Route`: the way of one request to a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Self

from raydix.schemas.shown import shown


@dataclass(eq=False, repr=False, slots=True)
class Route:
    """The cache that a router has chosen for a request, and why.

    It counts as pending, so that later requests heed it, until `first_token`, the end of `async with route:`, the end
    of the lease that was taken through it, or `RouteConfig.promise_ttl_s`, whichever is first. Each of them may follow
    another, without effect.

    Attributes:
        cache: the name of the cache.
        prefix_len: tokens of the prompt that are stored there, as the router knows: whole strides of the events. Of a
            cache with a window or states: up to the last page at which a match may end there.
        promised_len: tokens that are stored there, or will be once earlier requests are computed; at least prefix_len.
        host_len: tokens that are stored there in the pool or in the host tier; 0: there is no host tier.
        loading_tokens: of these, the tokens beyond promised_len, which the cache loads before the lease is handed out.
        uncached_tokens: the other tokens of the prompt, which the cache's worker has to compute.
        pending_tokens: tokens that are computed there, or wait for it, without this request.
        why: the reason for the choice, as text.
        prompt: the prompt as the router knows it, for another route of the same request.
        rank_others: returns the names of the other caches that were compared, the cheapest first; for the parts of this
            package, as is the next.
        end: called with whether the prompt was computed, perhaps more than once.
    """

    cache: str
    _: KW_ONLY
    prefix_len: int
    promised_len: int
    uncached_tokens: int
    pending_tokens: int
    rank_others: Callable[[], tuple[str, ...]]
    why: str
    end: Callable[[bool], None]
    prompt: Any = None
    host_len: int = 0
    loading_tokens: int = 0
    _next_best: tuple[str, ...] | None = field(default=None, init=False)

    @property
    def next_best(self) -> tuple[str, ...]:
        """The names of the other caches that were compared, the cheapest first. They are sorted when first read."""
        if self._next_best is None:
            self._next_best = self.rank_others()
        return self._next_best

    def first_token(self) -> None:
        """Note that the prompt is computed: its tokens no longer wait. Idempotent."""
        self.end(True)

    def cancel(self) -> None:
        """Note that the prompt will not be computed: its pages are promised no longer. Idempotent."""
        self.end(False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.end(kind is None)

    def __repr__(self) -> str:
        lengths = f"prefix_len={self.prefix_len}, promised_len={self.promised_len}"
        return f"Route({shown(self.cache)}, {lengths}, pending_tokens={self.pending_tokens}, why={self.why!r})"
