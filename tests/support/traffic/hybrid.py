"""Random operations on a small cache with a sliding window and states."""

from __future__ import annotations

from support.checked.hybrid import CheckedHybridCache
from support.checked.radix_cache import Held
from support.reference.models import ROOT, Tokens
from support.traffic.radix import NUM_PAGES, run_traffic
from support.traffic.swa import RandomSwaTraffic

NUM_STATES = 14


def run_random_hybrid_traffic(seed: int, page_size: int, window: int, num_operations: int) -> None:
    """Do random operations on a cache and its model, and compare all there is to compare after each."""
    run_traffic(RandomHybridTraffic(seed, page_size, window), num_operations)


class RandomHybridTraffic(RandomSwaTraffic):
    """As with a window; most inserts bring a state, and states are attached to nodes that were found before."""

    OPERATIONS: tuple[tuple[str, float], ...] = (
        ("match", 24),
        ("peek", 6),
        ("insert", 22),
        ("insert_what_was_matched", 12),
        ("insert_from_node", 10),
        ("attach", 6),
        ("lock", 9),
        ("unlock", 6),
        ("release_window", 3),
        ("unlock_without_its_receipt", 2),
        ("evict", 4),
        ("evict_windows", 7),
        ("evict_states", 3),
        ("evict_of_all", 3),
        ("hash", 1),
        ("insert_from_stale_node", 1),
        ("insert_from_foreign_node", 1),
        ("insert_too_few_slots", 1),
        ("insert_state_within_a_page", 1),
        ("lock_stale_node", 1),
        ("retire_all", 0.3),
        ("reclaim_retired", 1),
        ("reset", 0.3),
    )

    def _make_pair(self) -> CheckedHybridCache:
        self.hybrid_pair = CheckedHybridCache(
            self.page_size,
            self.window,
            (1, 2, 24)[(self.seed + self.window) % 3],  # tokens of a state chunk
            NUM_PAGES,
            NUM_STATES,
            self.rng,
            paged_pool=self.seed % 2 == 1,
            transfers=self.seed % 4 < 3,
        )
        self.swa_pair = self.hybrid_pair
        return self.hybrid_pair

    def _insert(
        self, tokens: Tokens, namespace: str | None, slots: list[int], known: int = 0, held: Held | None = None
    ) -> None:
        swa_evicted = self.rng.choice([0, 0, 0, self.rng.randint(0, len(tokens) + self.page_size)])
        with_state = self.rng.random() < 0.8
        self.nodes.append(
            self.hybrid_pair.insert(tokens, namespace, slots, known, held, swa_evicted, with_state=with_state)
        )

    def _new_key(self) -> tuple[Tokens, str | None]:
        """Mostly whole pages, so that a state may come."""
        tokens, namespace = self._key()
        if self.rng.random() < 0.8:
            tokens = tokens[: len(tokens) - len(tokens) % self.page_size]
        self._remember_key(tokens, namespace)
        return tokens, namespace

    def attach(self) -> None:
        held = self._node(stale=False)
        if self.open and self.rng.random() < 0.5:
            held = self.rng.choice(self.open).held
        if held.handle != ROOT and not self.pair.model.is_gone(held.handle) and self.hybrid_pair.states.free:
            self.hybrid_pair.attach(held)

    def evict_states(self) -> None:
        self.hybrid_pair.evict(0, 0, self.rng.randint(0, 3) if self.rng.random() < 0.9 else NUM_STATES)

    def evict_of_all(self) -> None:
        full, swa = self.rng.randint(0, 2 * self.page_size), self.rng.randint(0, 4 * self.page_size)
        self.hybrid_pair.evict(full, swa, self.rng.randint(0, 4))

    def insert_state_within_a_page(self) -> None:
        tokens, namespace = self._key()
        if self.hybrid_pair.states.free and (not tokens or len(tokens) % self.page_size):
            self.hybrid_pair.refuse_state_within_a_page(tokens, namespace)

    def _make_room(self, num_slots: int) -> bool:
        if not self.hybrid_pair.states.free and self.rng.random() < 0.7:
            self.hybrid_pair.evict(0, 0, 1)
        return super()._make_room(num_slots)
