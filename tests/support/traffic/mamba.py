"""Random operations on a small cache with states."""

from __future__ import annotations

from support.checked.mamba import CheckedMambaCache
from support.checked.radix_cache import Held
from support.reference.models import ROOT, Tokens
from support.traffic.radix import NUM_PAGES, RandomTraffic, run_traffic

NUM_STATES = 10


def run_random_mamba_traffic(seed: int, page_size: int, num_operations: int) -> None:
    """Do random operations on a cache and its model, and compare all there is to compare after each."""
    run_traffic(RandomMambaTraffic(seed, page_size), num_operations)


class RandomMambaTraffic(RandomTraffic):
    """As for full attention; most inserts bring a state, and states are attached to nodes that were found before."""

    OPERATIONS: tuple[tuple[str, float], ...] = (
        ("match", 18),
        ("peek", 8),
        ("insert", 22),
        ("insert_what_was_matched", 12),
        ("insert_from_node", 10),
        ("attach", 6),
        ("lock", 8),
        ("unlock", 8),
        ("evict", 4),
        ("evict_states", 6),
        ("hash", 2),
        ("insert_from_stale_node", 1),
        ("insert_from_foreign_node", 1),
        ("insert_too_few_slots", 1),
        ("insert_state_within_a_page", 1),
        ("lock_stale_node", 1),
        ("unlock_unlocked_node", 2),
        ("retire_all", 0.3),
        ("retire", 0.6),
        ("reclaim_retired", 1),
        ("reset", 0.6),
    )

    def _make_pair(self) -> CheckedMambaCache:
        chunk_size = (1, 2, 24)[self.seed % 3]
        self.mamba_pair = CheckedMambaCache(
            self.page_size, chunk_size, NUM_PAGES, NUM_STATES, self.rng, paged_pool=self.seed % 2 == 1
        )
        return self.mamba_pair

    def _insert(
        self, tokens: Tokens, namespace: str | None, slots: list[int], known: int = 0, held: Held | None = None
    ) -> None:
        if not self.mamba_pair.states.free and self.rng.random() < 0.7:
            self.mamba_pair.evict(0, 1)  # may take the very node that the insert was to resume at
            known = min(known, self.mamba_pair.reference.full_prefix_len(tokens, namespace))
        if (held is not None and self.pair.model.is_stale(held.handle)) or self._lost_what_it_holds(slots):
            self.pair.pool.take_back([slot for slot in slots if slot in self.pair.pool.lent])
            return
        with_state = self.rng.random() < 0.7
        self.nodes.append(self.mamba_pair.insert(tokens, namespace, slots, known, held, with_state=with_state))

    def _lost_what_it_holds(self, slots: list[int]) -> bool:
        pool = self.pair.pool
        return not (pool.lent | pool.tree).issuperset(slots)

    def attach(self) -> None:
        held = self._node(stale=False)
        if self.locks and self.rng.random() < 0.5:
            held = self.rng.choice(self.locks)
        if held.handle != ROOT and not self.pair.model.is_gone(held.handle) and self.mamba_pair.states.free:
            self.mamba_pair.attach(held)

    def evict_states(self) -> None:
        full = self.rng.choice([0, 0, self.rng.randint(0, 2 * self.page_size)])
        self.mamba_pair.evict(full, self.rng.randint(0, 3) if self.rng.random() < 0.9 else NUM_STATES)

    def insert_state_within_a_page(self) -> None:
        tokens, namespace = self._key()
        if self.mamba_pair.states.free and (not tokens or len(tokens) % self.page_size):
            self.mamba_pair.refuse_state_within_a_page(tokens, namespace)
