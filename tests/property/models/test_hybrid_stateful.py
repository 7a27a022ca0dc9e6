"""The comparison for windows and states in one cache, with operations chosen by Hypothesis: failures are shrunk."""

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.checked.hybrid import CheckedHybridCache
from support.checked.radix_cache import Held
from support.checked.swa import SwaLock
from support.reference.models import ROOT, Tokens

NAMESPACES = st.sampled_from([None, "a"])
NUM_PAGES = 24
NUM_STATES = 6

BOUNDED = settings(
    max_examples=150,
    stateful_step_count=40,
    derandomize=True,  # the same examples in every run
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class HybridMachine(RuleBasedStateMachine):
    """States come with inserts, or later; windows are lost before inserts, given up under locks, and evicted."""

    nodes: Bundle[Held] = Bundle("nodes")
    locks: Bundle[SwaLock] = Bundle("locks")
    page_size = 1
    window = 3

    @initialize(chunk_size=st.sampled_from([1, 2, 8]), paged_pool=st.booleans(), transfers=st.booleans())
    def start(self, chunk_size: int, paged_pool: bool, transfers: bool) -> None:
        self.pair = CheckedHybridCache(
            self.page_size,
            self.window,
            chunk_size,
            NUM_PAGES,
            NUM_STATES,
            Random(0),
            paged_pool=paged_pool,
            transfers=transfers,
        )

    def tokens(self, shape: list[int], tail: int) -> Tokens:
        """Pages that differ in their last token only, and a tail that is no page."""
        pages = [[1] * (self.page_size - 1) + [last] for last in shape]
        return tuple([token for page in pages for token in page] + [1] * (tail % self.page_size))

    shapes = st.lists(st.sampled_from([2, 3]), max_size=6)
    tails = st.integers(0, 15)

    def make_room(self, num_slots: int) -> bool:
        pool = self.pair.ledger
        full, swa = num_slots - len(pool.free_slots), num_slots - len(pool.free_halves)
        if full > 0 or swa > 0:
            self.pair.evict(max(0, full), max(0, swa))
        return num_slots <= min(len(pool.free_slots), len(pool.free_halves))

    @rule(target=nodes, shape=shapes, tail=tails, namespace=NAMESPACES)
    def match(self, shape: list[int], tail: int, namespace: str | None) -> Held:
        return self.pair.match(self.tokens(shape, tail), namespace)

    @rule(shape=shapes, tail=tails, namespace=NAMESPACES)
    def peek(self, shape: list[int], tail: int, namespace: str | None) -> None:
        self.pair.peek(self.tokens(shape, tail), namespace)

    @rule(
        target=nodes,
        shape=shapes,
        tail=tails,
        namespace=NAMESPACES,
        evicted=st.integers(0, 6),
        with_state=st.booleans(),
    )
    def insert(
        self, shape: list[int], tail: int, namespace: str | None, evicted: int, with_state: bool
    ) -> Held | MultipleResults[Held]:
        tokens = self.tokens(shape, 0 if with_state else tail)
        if not self.make_room(len(tokens)):
            return multiple()
        slots = self.pair.pool.lend(len(tokens))
        return self.pair.insert(tokens, namespace, slots, 0, None, evicted * self.page_size, with_state=with_state)

    @rule(target=nodes, held=nodes, shape=shapes, evicted=st.integers(0, 6), with_state=st.booleans())
    def insert_from(self, held: Held, shape: list[int], evicted: int, with_state: bool) -> Held | MultipleResults[Held]:
        prefix, namespace = held.handle.place.prefix, held.handle.place.namespace
        tokens = prefix + self.tokens(shape, 0)
        if not self.make_room(len(tokens)):
            return multiple()
        if self.pair.model.is_stale(held.handle):
            self.pair.refuse_insert_from(held, tokens, namespace)
            return multiple()
        slots = self.pair.pool.lend(len(tokens))
        return self.pair.insert(tokens, namespace, slots, 0, held, evicted * self.page_size, with_state=with_state)

    @rule(held=nodes)
    def attach(self, held: Held) -> None:
        if held.handle != ROOT and self.pair.states.free and not self.pair.model.is_gone(held.handle):
            self.pair.attach(held)

    @rule(target=locks, held=nodes)
    def lock(self, held: Held) -> SwaLock | MultipleResults[SwaLock]:
        lock = self.pair.lock_window(held)
        return multiple() if lock is None else lock

    @rule(lock=consumes(locks))
    def unlock(self, lock: SwaLock) -> None:
        self.pair.unlock_window(lock)
        if lock.held.node is not self.pair.cache.root:
            self.pair.refuse_unlock(lock.held, lock.receipt)

    @rule(lock=locks)
    def release_window(self, lock: SwaLock) -> None:
        if not self.pair.model.is_gone(lock.held.handle):
            self.pair.release_window(lock)

    @rule(num_tokens=st.integers(0, 20), swa_num_tokens=st.integers(0, 20), num_states=st.integers(0, 3))
    def evict(self, num_tokens: int, swa_num_tokens: int, num_states: int) -> None:
        self.pair.evict(num_tokens, swa_num_tokens, num_states)

    @rule(swa_num_tokens=st.integers(1, 8))
    def evict_windows(self, swa_num_tokens: int) -> None:
        self.pair.evict(0, swa_num_tokens)

    @rule(num_states=st.integers(1, 2))
    def evict_states(self, num_states: int) -> None:
        self.pair.evict(0, 0, num_states)

    @precondition(lambda self: self.pair.cache.total_size() > 6 * self.page_size)
    @rule()
    def retire_all(self) -> None:
        self.pair.retire_all()

    @rule()
    def reclaim_retired(self) -> None:
        self.pair.reclaim_retired()

    @precondition(lambda self: self.pair.cache.total_size() > 6 * self.page_size)
    @rule()
    def reset(self) -> None:
        self.pair.reset()


@pytest.mark.more
@pytest.mark.parametrize(("page_size", "window"), [(1, 3), (4, 6)])
def test_no_sequence_of_operations_parts_the_cache_from_its_model(page_size: int, window: int) -> None:
    machine = type(f"PagesOf{page_size}", (HybridMachine,), {"page_size": page_size, "window": window})

    run_state_machine_as_test(machine, settings=BOUNDED)
