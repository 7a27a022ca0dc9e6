"""The reference for a cache of hybrid models: pages, and states in a dictionary and a list."""

from __future__ import annotations

from math import lcm

from support.reference.models import Found, Handle, Node, Place, ReferenceRadixCache, Tokens


class ReferenceMambaCache(ReferenceRadixCache):
    """A prefix cache in which a prefix matches where it has a state, the one after its last token.

    Attributes:
        states: the state slot at each place that has one.
        by_use: those places, with the least recently used state first.
    """

    def __init__(self, page_size: int, chunk_size: int = 1) -> None:
        super().__init__(page_size)
        self.branching_unit = lcm(page_size, chunk_size)
        self.states: dict[Place, int] = {}
        self.by_use: list[Place] = []

    # ---------------------------------------------------------------- match and attach

    def peek(self, tokens: Tokens, namespace: str | None) -> Found:
        path = self._usable_path(tokens, namespace)
        return Found(self._slots_of(path), self._handle(path[-1] if path else None))

    def match(self, tokens: Tokens, namespace: str | None) -> Found:
        path = self._usable_path(tokens, namespace)
        self._use(path)
        for place in path:
            self.pages[place].hits += 1
        if path:
            self.use_state(path[-1])
        return Found(self._slots_of(path), self._handle(path[-1] if path else None))

    def full_prefix_len(self, tokens: Tokens, namespace: str | None) -> int:
        """Return the number of leading tokens with full KV."""
        return len(self._resident_path(tokens, namespace)) * self.page_size

    def branching_seqlen(self, tokens: Tokens, namespace: str | None) -> int | None:
        """Where a state would help this key, beyond those that are there."""
        full = self.full_prefix_len(tokens, namespace)
        floored = full - full % self.branching_unit
        return floored if floored > len(self._usable_path(tokens, namespace)) * self.page_size else None

    def _usable_path(self, tokens: Tokens, namespace: str | None) -> list[Place]:
        path = self._resident_path(tokens, namespace)
        while path and path[-1] not in self.states:
            path.pop()
        return path

    def use_state(self, place: Place) -> None:
        """The state at a place, if there is one, was used now."""
        if place in self.states:
            self.by_use.remove(place)
            self.by_use.append(place)

    def attach(self, handle: Handle, slot: int | None) -> bool:
        """Put a state at the end of a node that has none; True if it had one."""
        if handle.place in self.states:
            return True
        if slot is not None:
            self.states[handle.place] = slot
            self.by_use.append(handle.place)
        return False

    # ---------------------------------------------------------------- locks and eviction

    def is_state_locked(self, place: Place) -> bool:
        """Whether the node that ends at this very place is locked itself."""
        return self.num_locks(self._handle(place)) > 0

    def mamba_evictable_size(self) -> int:
        """States without a lock."""
        return sum(not self.is_state_locked(place) for place in self.states)

    def mamba_protected_size(self) -> int:
        """States with one."""
        return sum(self.is_state_locked(place) for place in self.states)

    def evict_both(self, num_tokens: int, num_states: int) -> list[Node]:
        """Full leaves first, then states; returns the nodes that went whole."""
        before = len(self.states)
        victims = self.evict(num_tokens)
        while before - len(self.states) < num_states:
            unlocked = [place for place in self.by_use if not self.is_state_locked(place)]
            if not unlocked:
                break
            if unlocked[0] in self._unlocked_leaves():
                victims.append(self._remove_node(unlocked[0]))
            else:
                self._drop(unlocked[0])
        return victims

    def reset(self) -> list[int]:
        self.states.clear()
        self.by_use.clear()
        return super().reset()

    def _remove_node(self, end: Place) -> Node:
        node = super()._remove_node(end)
        if end in self.states:
            self._drop(end)
        return node

    def _drop(self, place: Place) -> None:
        del self.states[place]
        self.by_use.remove(place)

    # ---------------------------------------------------------------- nodes

    def _node_at(self, place: Place) -> Node:
        return super()._node_at(place)._replace(extra=(self.states.get(place),))
