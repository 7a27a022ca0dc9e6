"""The reference for a cache with a sliding window and states: both references, and their interaction."""

from __future__ import annotations

from math import lcm

from support.reference.mamba import ReferenceMambaCache
from support.reference.models import Found, Node, Place, Tokens
from support.reference.swa import ReferenceSwaCache


class ReferenceHybridCache(ReferenceSwaCache, ReferenceMambaCache):
    """A prefix cache in which a prefix matches where it has a state and its last window is live.

    A state does not outlive the window half of its pages, unless the node that ends there is locked itself. It may be
    brought to pages without window halves: it is of use once they heal.
    """

    def __init__(self, page_size: int, window: int, chunk_size: int = 1, *, heals_under_locks: bool = True) -> None:
        super().__init__(page_size, window, heals_under_locks=heals_under_locks)
        self.branching_unit = lcm(page_size, chunk_size)

    def match(self, tokens: Tokens, namespace: str | None) -> Found:
        found = super().match(tokens, namespace)
        self.use_state(found.handle.place)
        return found

    def _usable_path(self, tokens: Tokens, namespace: str | None) -> list[Place]:
        """The longest prefix that both allow. Tries every length."""
        path = self._resident_path(tokens, namespace)
        num_window_pages = -(-self.window // self.page_size)
        while path and not (path[-1] in self.states and all(map(self.is_live, path[-num_window_pages:]))):
            path.pop()
        return path

    def evict_all(self, num_tokens: int, swa_num_tokens: int, num_states: int) -> list[Node]:
        """Full leaves first, then window halves, then states; those of leaves count. Return the evicted leaves."""
        windows, states = self.swa_evictable_size(), len(self.states)
        victims = ReferenceSwaCache.evict_both(self, num_tokens, swa_num_tokens)
        victims += ReferenceMambaCache.evict_both(self, 0, num_states - (states - len(self.states)))
        self.swa_freed = windows - self.swa_evictable_size()
        return victims

    def _lose_window(self, end: Place) -> None:
        super()._lose_window(end)
        if end in self.states and not self.is_state_locked(end):
            self._drop(end)

    def _node_at(self, place: Place) -> Node:
        node = super()._node_at(place)
        return node._replace(extra=(*node.extra, self.states.get(place)))
