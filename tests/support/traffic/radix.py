"""Random operations on a small cache, chosen so that it branches, splits, fills up and evicts a lot."""

from __future__ import annotations

from collections import deque
from random import Random

from support.checked.radix_cache import CheckedRadixCache, Held
from support.reference.models import ROOT, Tokens

NAMESPACES = (None, "", "a", "b")
NUM_PAGES = 48  # of the pool
MAX_LOCKS = 6
WIDE_IDS = (2**32, 2**32 + 1, 2**40 + 1, 2**64 - 1)


class TrafficFailed(AssertionError):
    """The cache and its model parted, or the cache raised what it should not."""


def run_random_traffic(seed: int, page_size: int, num_operations: int) -> CheckedRadixCache:
    """Do random operations on a cache and its model, and compare all there is to compare after each.

    Raises:
        TrafficFailed: with the number and name of the operation; its cause says what differed.
    """
    return run_traffic(RandomTraffic(seed, page_size), num_operations)


def run_traffic(traffic: RandomTraffic, num_operations: int) -> CheckedRadixCache:
    """`run_random_traffic` of any kind."""
    for number in range(num_operations):
        name = traffic.choose()
        try:
            getattr(traffic, name)()
        except Exception as error:
            where = f"operation {number} ({name}) of {traffic}"
            raise TrafficFailed(f"{where}: {type(error).__name__}: {error}") from error
    return traffic.pair


class RandomTraffic:
    """One caller with some locks, some nodes it remembers (stale ones, too), and keys that resemble each other."""

    OPERATIONS: tuple[tuple[str, float], ...] = (
        ("match", 18),
        ("peek", 8),
        ("insert", 22),
        ("insert_what_was_matched", 12),
        ("insert_from_node", 10),
        ("lock", 8),
        ("unlock", 8),
        ("evict", 8),
        ("hash", 6),
        ("insert_from_stale_node", 1),
        ("insert_from_foreign_node", 1),
        ("insert_too_few_slots", 1),
        ("lock_stale_node", 1),
        ("unlock_unlocked_node", 2),
        ("retire_all", 0.3),
        ("retire", 0.6),
        ("reclaim_retired", 1),
        ("reset", 0.2),
    )

    def __init__(self, seed: int, page_size: int) -> None:
        self.rng = Random(f"{seed}/{page_size}")
        self.page_size = page_size
        self.seed = seed
        self.pair = self._make_pair()
        self.pages = self._similar_pages()
        self.keys: deque[tuple[Tokens, str | None]] = deque(maxlen=12)
        self.nodes: deque[Held] = deque([Held(self.pair.cache.root, ROOT)], maxlen=16)
        self.locks: list[Held] = []

    def _make_pair(self) -> CheckedRadixCache:
        return CheckedRadixCache(self.page_size, NUM_PAGES, self.rng, paged_pool=self.seed % 2 == 1)

    def __repr__(self) -> str:
        return f"seed={self.seed}, page_size={self.page_size}"

    def choose(self) -> str:
        """The name of the next operation."""
        names = [name for name, _ in self.OPERATIONS]
        return self.rng.choices(names, [weight for _, weight in self.OPERATIONS])[0]

    # ---------------------------------------------------------------- operations

    def match(self) -> None:
        self.nodes.append(self.pair.match(*self._key()))

    def peek(self) -> None:
        self.pair.peek(*self._key())

    def insert(self) -> None:
        tokens, namespace = self._new_key()
        if self._make_room(len(tokens)):
            slots = self.pair.pool.lend(len(tokens))
            num_held = len(self.pair.peek(tokens, namespace))
            known = self.rng.choice([0, 0, self.rng.randint(0, num_held)])
            self._insert(tokens, namespace, slots, known)

    def insert_what_was_matched(self) -> None:
        """As a request does it: match, compute what is missing, insert with the slots of the match."""
        tokens, namespace = self._new_key()
        if not self._make_room(len(tokens)):
            return
        held = self.pair.peek(tokens, namespace)
        held = held[: self.rng.choice([len(held), len(held), len(held) // 2])]  # someone else was faster
        slots = held + self.pair.pool.lend(len(tokens) - len(held))
        known = self.rng.choice([0, len(held), self.rng.randint(0, len(held))])
        self._insert(tokens, namespace, slots, known)

    def insert_from_node(self) -> None:
        held = self._node(stale=False)
        tokens = held.handle.place.prefix
        tuples = any(isinstance(token, tuple) for token in tokens)
        namespace = self.rng.choice(NAMESPACES) if held.handle == ROOT else held.handle.place.namespace
        tokens += self._tokens(self.rng.randint(0, 4 * self.page_size), tuples)
        if not self._make_room(len(tokens)) or self.pair.model.is_stale(held.handle):
            return
        matched = self.pair.model.peek(held.handle.place.prefix, namespace).slots
        slots = matched + self.pair.pool.lend(len(tokens) - len(matched))
        self._remember_key(tokens, namespace)
        self._insert(tokens, namespace, slots, held=held)

    def _insert(
        self, tokens: Tokens, namespace: str | None, slots: list[int], known: int = 0, held: Held | None = None
    ) -> None:
        self.nodes.append(self.pair.insert(tokens, namespace, slots, known, held))

    def lock(self) -> None:
        held = self._node(stale=False)
        if len(self.locks) < MAX_LOCKS:
            self.pair.lock(held)
            self.locks.append(held)

    def unlock(self) -> None:
        if self.locks:
            self.pair.unlock(self.locks.pop(self.rng.randrange(len(self.locks))))

    def evict(self) -> None:
        largest = 6 * self.page_size if self.rng.random() < 0.9 else 2 * self.pair.pool.num_slots
        self.pair.evict(self.rng.randint(0, largest))

    def hash(self) -> None:
        self.pair.hash(self._node(stale=False))

    def insert_from_stale_node(self) -> None:
        held = self._node(stale=True)
        if held.handle != ROOT:
            self.pair.refuse_insert_from(held, held.handle.place.prefix, held.handle.place.namespace)

    def insert_from_foreign_node(self) -> None:
        held = self._node(stale=False)
        if held.handle != ROOT:
            prefix, namespace = held.handle.place.prefix, held.handle.place.namespace
            others = [(prefix, f"not {namespace}"), (prefix[:-1], namespace)]
            self.pair.refuse_insert_from(held, *self.rng.choice(others))

    def insert_too_few_slots(self) -> None:
        tokens, namespace = self._key()
        if len(tokens) >= self.page_size:
            self.pair.refuse_short_insert(tokens, namespace)

    def lock_stale_node(self) -> None:
        held = self._node(stale=True)
        if held.handle != ROOT:
            self.pair.lock(held)

    def unlock_unlocked_node(self) -> None:
        held = self.rng.choice(self.nodes)
        if self.pair.model.is_gone(held.handle) or not self.pair.model.num_locks(held.handle):
            self.pair.unlock(held)

    def retire_all(self) -> None:
        self.pair.retire_all()

    def retire(self) -> None:
        self.pair.retire(tuple(self.rng.sample(NAMESPACES, self.rng.randint(1, 2))))

    def reclaim_retired(self) -> None:
        self.pair.reclaim_retired()

    def reset(self) -> None:
        self.pair.reset()
        for held in self.locks:
            self.pair.unlock(held)  # refused: the locked nodes are gone
        self.locks.clear()

    # ---------------------------------------------------------------- what the operations are made of

    def _node(self, *, stale: bool) -> Held:
        """A remembered node that is stale or not; the root if there is none."""
        fitting = [held for held in self.nodes if self.pair.model.is_stale(held.handle) == stale]
        return self.rng.choice(fitting) if fitting else Held(self.pair.cache.root, ROOT)

    def _make_room(self, num_slots: int) -> bool:
        """Evict until that many slots are free, if possible."""
        shortfall = num_slots - len(self.pair.pool.free_slots)
        if shortfall > 0:
            self.pair.evict(shortfall)
        return num_slots <= len(self.pair.pool.free_slots)

    def _new_key(self) -> tuple[Tokens, str | None]:
        tokens, namespace = self._key()
        self._remember_key(tokens, namespace)
        return tokens, namespace

    def _remember_key(self, tokens: Tokens, namespace: str | None) -> None:
        self.keys.append((tokens, namespace))

    def _key(self) -> tuple[Tokens, str | None]:
        """Mostly a known key: whole, cut short, gone on with, or in another namespace."""
        if not self.keys or self.rng.random() < 0.15:
            return self._tokens(self._length(), self.rng.random() < 0.15), self.rng.choice(NAMESPACES)
        tokens, namespace = self.rng.choice(self.keys)
        if self.rng.random() < 0.1:
            namespace = self.rng.choice(NAMESPACES)
        if self.rng.random() < 0.3:
            return tokens, namespace
        head = tokens[: self.rng.randint(0, len(tokens))]
        if self.rng.random() < 0.5:
            head = head[: len(head) - len(head) % self.page_size]
        tuples = any(isinstance(token, tuple) for token in tokens)
        return (head + self._tokens(self._length(), tuples))[: 10 * self.page_size + 3], namespace

    def _length(self) -> int:
        """Tokens, up to six pages: as often as not whole pages."""
        num_pages = self.rng.randint(0, 6)
        return num_pages * self.page_size + self.rng.choice([0, self.rng.randrange(self.page_size)])

    def _tokens(self, length: int, tuples: bool) -> Tokens:
        ids: list[int] = []
        while len(ids) < length:
            ids += self.rng.choice(self.pages)
        ids = ids[:length]
        if ids and self.rng.random() < 0.04:
            ids[self.rng.randrange(length)] = self.rng.choice(WIDE_IDS)
        return tuple((token, 1) for token in ids) if tuples else tuple(ids)

    def _similar_pages(self) -> list[list[int]]:
        """Three pages: the second and third differ from the first in one token."""
        first = [self.rng.randint(1, 3) for _ in range(self.page_size)]
        pages = [first]
        for token in (4, 5):
            page = list(first)
            page[self.rng.randrange(self.page_size)] = token
            pages.append(page)
        return pages
