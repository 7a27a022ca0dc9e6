"""Random traffic of several sessions over four rows: they run out, branch, are copied, reused and evicted a lot."""

from __future__ import annotations

from collections import Counter, deque
from random import Random

import pytest
from support.checked.row_cache import CheckedRowCache
from support.reference.row_cache import Tokens

SESSIONS = ("s0", "s1", "s2")
NAMESPACES = (None, None, None, "a")
OPERATIONS = {
    "acquire": 14,
    "insert": 16,
    "extend": 5,
    "release": 12,
    "match": 4,
    "lock": 2,
    "evict": 1.5,
    "reset": 0.4,
    "retire": 0.6,
    "end_session": 0.7,
    "quarantine": 0.7,
    "free_withheld": 3,
    "misuse": 1,
    "repeat": 1,
}


class RowTrafficFailed(AssertionError):
    """The cache and its model parted, or the cache raised what it should not."""


def run_row_traffic(seed: int, page_size: int, num_operations: int) -> RowTraffic:
    """Do random operations on a cache and its model, and compare all there is to compare after each.

    Raises:
        RowTrafficFailed: with the number and name of the operation; its cause says what differed.
    """
    traffic = RowTraffic(seed, page_size)
    for number in range(num_operations):
        (name,) = traffic.rng.choices(list(OPERATIONS), list(OPERATIONS.values()))
        try:
            getattr(traffic, name)()
        except (Exception, pytest.fail.Exception) as error:
            where = f"operation {number} ({name}) of {seed=}, {page_size=}"
            raise RowTrafficFailed(f"{where}: {type(error).__name__}: {error}") from error
        traffic.done[name] += 1
    return traffic


class RowTraffic:
    """Clients with prompts that resemble each other."""

    def __init__(self, seed: int, page_size: int) -> None:
        self.rng = Random(f"{seed}/{page_size}")
        self.pair = CheckedRowCache(page_size)
        self.page_size = page_size
        self.keys: deque[Tokens] = deque([()], maxlen=8)
        self.done: Counter[str] = Counter()

    def acquire(self) -> None:
        tokens = self.some_tokens()
        new_tokens = self.rng.choice([0, 0, self.rng.randrange(2 * self.page_size + 1)])
        limit = self.rng.choice([None, None, len(tokens) - 1])
        self.pair.acquire(self.rng.choice(SESSIONS), self.rng.choice(NAMESPACES), tokens, new_tokens, limit)

    def lock(self) -> None:
        self.pair.lock(self.rng.choice(SESSIONS), self.rng.choice(NAMESPACES), self.some_tokens())

    def insert(self) -> None:
        if (lease_id := self.some_lease()) is not None:
            lease = self.pair.model.leases[lease_id]
            num_tokens = self.rng.choice([lease.covered, len(lease.tokens), self.rng.randint(0, lease.covered)])
            more = tuple(self.rng.randint(1, 3) for _ in range(max(0, num_tokens - len(lease.tokens))))
            self.keys.append(lease.tokens + more)
            self.pair.insert(lease_id, more, num_tokens, resend=self.rng.random() < 0.2)

    def extend(self) -> None:
        if (lease_id := self.some_lease()) is not None:
            self.pair.extend(lease_id, self.rng.randint(0, 2 * self.page_size))

    def release(self) -> None:
        if (lease_id := self.some_lease()) is not None:
            self.pair.release(lease_id)

    def match(self) -> None:
        self.pair.match(self.rng.choice(NAMESPACES), self.some_tokens())

    def evict(self) -> None:
        self.pair.evict(self.rng.choice([0, 1, self.pair.row_len, self.pair.row_len + 1, 99 * self.pair.row_len]))

    def reset(self) -> None:
        self.pair.reset()

    def end_session(self) -> None:
        self.pair.end_session(self.rng.choice(SESSIONS))

    def retire(self) -> None:
        self.pair.retire(self.rng.choice([(None,), ("a",), (None, "a")]))

    def quarantine(self) -> None:
        self.pair.quarantine(self.rng.choice(SESSIONS))

    def free_withheld(self) -> None:
        self.pair.free_withheld(self.rng.choice(SESSIONS))

    def misuse(self) -> None:
        if (lease_id := self.some_lease()) is not None:
            self.pair.misuse(lease_id)

    def repeat(self) -> None:
        if (lease_id := self.some_lease()) is not None:
            self.pair.repeat(lease_id)

    # ------------------------------------------------------------ choices

    def some_lease(self) -> str | None:
        return self.rng.choice(list(self.pair.model.leases)) if self.pair.model.leases else None

    def some_tokens(self) -> Tokens:
        """A prefix of tokens seen before, mostly at a page's end, and more; now and then too many for a row."""
        head = self.rng.choice(self.keys)[: self.pair.row_len]
        head = head[: self.rng.randint(0, len(head))]
        if self.rng.random() < 0.7:
            head = head[: len(head) - len(head) % self.page_size]
        row_len = self.pair.row_len
        length = row_len + 1 if self.rng.random() < 0.02 else self.rng.randint(max(1, len(head)), row_len)
        tokens = list(head)
        while len(tokens) < length:
            tokens += [self.rng.randint(1, 3)] * self.rng.choice([1, self.page_size])
        if self.rng.random() < 0.03:
            tokens[length - 1] += 2**33
        self.keys.append(tuple(tokens[:length]))
        return tuple(tokens[:length])
