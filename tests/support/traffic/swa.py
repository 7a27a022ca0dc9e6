"""Random operations on a small cache with a sliding window."""

from __future__ import annotations

from support.checked.radix_cache import Held
from support.checked.swa import CheckedSwaCache, SwaLock
from support.reference.models import ROOT, Tokens
from support.traffic.radix import MAX_LOCKS, NUM_PAGES, RandomTraffic, run_traffic


def run_random_swa_traffic(seed: int, page_size: int, window: int, num_operations: int) -> None:
    """Do random operations on a cache and its model, and compare all there is to compare after each."""
    run_traffic(RandomSwaTraffic(seed, page_size, window), num_operations)


class RandomSwaTraffic(RandomTraffic):
    """As for full attention; requests may have freed the window halves of their first tokens before they insert."""

    OPERATIONS: tuple[tuple[str, float], ...] = (
        ("match", 18),
        ("peek", 8),
        ("insert", 22),
        ("insert_what_was_matched", 12),
        ("insert_from_node", 10),
        ("lock", 10),
        ("unlock", 6),
        ("release_window", 3),
        ("unlock_without_its_receipt", 3),
        ("evict", 5),
        ("evict_windows", 10),
        ("hash", 2),
        ("insert_from_stale_node", 1),
        ("insert_from_foreign_node", 1),
        ("insert_too_few_slots", 1),
        ("lock_stale_node", 1),
        ("retire_all", 0.3),
        ("retire", 0.6),
        ("reclaim_retired", 1),
        ("reset", 0.2),
    )

    def __init__(self, seed: int, page_size: int, window: int) -> None:
        self.window = window
        self.open: list[SwaLock] = []
        self.closed: list[SwaLock] = []
        super().__init__(seed, page_size)

    def _make_pair(self) -> CheckedSwaCache:
        seed, num_pages = self.seed, NUM_PAGES
        self.swa_pair = CheckedSwaCache(
            self.page_size, self.window, num_pages, self.rng, paged_pool=seed % 2 == 1, transfers=seed % 4 < 3
        )
        return self.swa_pair

    def __repr__(self) -> str:
        return f"{super().__repr__()}, window={self.window}"

    def _insert(
        self, tokens: Tokens, namespace: str | None, slots: list[int], known: int = 0, held: Held | None = None
    ) -> None:
        swa_evicted = self.rng.choice([0, 0, 0, self.rng.randint(0, len(tokens) + self.page_size)])
        self.nodes.append(self.swa_pair.insert(tokens, namespace, slots, known, held, swa_evicted))

    def lock(self) -> None:
        if len(self.open) < MAX_LOCKS:
            lock = self.swa_pair.lock_window(self._node(stale=False))
            assert lock is not None
            self.open.append(lock)

    def lock_stale_node(self) -> None:
        held = self._node(stale=True)
        if held.handle != ROOT:
            assert self.swa_pair.lock_window(held) is None

    def unlock(self) -> None:
        if self.open:
            lock = self.open.pop(self.rng.randrange(len(self.open)))
            self.swa_pair.unlock_window(lock)
            if lock.held.handle != ROOT:
                self.closed = [*self.closed[-3:], lock]

    def unlock_without_its_receipt(self) -> None:
        if self.closed and self.rng.random() < 0.5:
            lock = self.rng.choice(self.closed)
            self.swa_pair.refuse_unlock(lock.held, lock.receipt)
            return
        held = self.rng.choice(self.open).held if self.open and self.rng.random() < 0.7 else self.rng.choice(self.nodes)
        others = [lock.receipt for lock in self.open if lock.held.node is not held.node]
        used = [lock.receipt for lock in self.closed]
        self.swa_pair.refuse_unlock(held, self.rng.choice([None, 7, *others, *used]))

    def release_window(self) -> None:
        if self.open:
            self.swa_pair.release_window(self.rng.choice(self.open))

    def evict_windows(self) -> None:
        largest = 4 * self.page_size if self.rng.random() < 0.9 else 2 * self.pair.pool.num_slots
        full = self.rng.choice([0, 0, self.rng.randint(0, 2 * self.page_size)])
        self.swa_pair.evict(full, self.rng.randint(0, largest))

    def reset(self) -> None:
        self.pair.reset()
        for lock in self.open:
            if lock.held.handle != ROOT:
                self.swa_pair.unlock_window(lock)  # refused: the locked nodes are gone
        self.open.clear()

    def _make_room(self, num_slots: int) -> bool:
        pool = self.swa_pair.ledger
        full, swa = num_slots - len(pool.free_slots), num_slots - len(pool.free_halves)
        if full > 0 or swa > 0:
            self.swa_pair.evict(max(0, full), max(0, swa))
        return num_slots <= min(len(pool.free_slots), len(pool.free_halves))
