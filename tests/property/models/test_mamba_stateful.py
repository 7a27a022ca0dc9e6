"""The comparison for states, with operations chosen by Hypothesis: failures are shrunk to a few steps."""

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
from support.checked.mamba import CheckedMambaCache
from support.checked.radix_cache import Held
from support.reference.models import ROOT, Tokens

NAMESPACES = st.sampled_from([None, "a"])
NUM_PAGES = 24
NUM_STATES = 5

BOUNDED = settings(
    max_examples=150,
    stateful_step_count=40,
    derandomize=True,  # the same examples in every run
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class MambaMachine(RuleBasedStateMachine):
    """States come with inserts, or later, to nodes that are locked or not."""

    nodes: Bundle[Held] = Bundle("nodes")
    locks: Bundle[Held] = Bundle("locks")
    page_size = 1

    @initialize(chunk_size=st.sampled_from([1, 2, 8]))
    def start(self, chunk_size: int) -> None:
        self.pair = CheckedMambaCache(self.page_size, chunk_size, NUM_PAGES, NUM_STATES, Random(0))

    def tokens(self, shape: list[int], tail: int) -> Tokens:
        """Pages that differ in their last token only, and a tail that is no page."""
        pages = [[1] * (self.page_size - 1) + [last] for last in shape]
        return tuple([token for page in pages for token in page] + [1] * (tail % self.page_size))

    shapes = st.lists(st.sampled_from([2, 3]), max_size=6)
    tails = st.integers(0, 15)

    def make_room(self, num_slots: int) -> bool:
        pool = self.pair.pool
        if num_slots > len(pool.free_slots):
            self.pair.evict(num_slots - len(pool.free_slots))
        return num_slots <= len(pool.free_slots)

    @rule(target=nodes, shape=shapes, tail=tails, namespace=NAMESPACES)
    def match(self, shape: list[int], tail: int, namespace: str | None) -> Held:
        return self.pair.match(self.tokens(shape, tail), namespace)

    @rule(shape=shapes, tail=tails, namespace=NAMESPACES)
    def peek(self, shape: list[int], tail: int, namespace: str | None) -> None:
        self.pair.peek(self.tokens(shape, tail), namespace)

    @rule(target=nodes, shape=shapes, tail=tails, namespace=NAMESPACES, with_state=st.booleans())
    def insert(
        self, shape: list[int], tail: int, namespace: str | None, with_state: bool
    ) -> Held | MultipleResults[Held]:
        tokens = self.tokens(shape, 0 if with_state else tail)
        if not self.make_room(len(tokens)):
            return multiple()
        return self.pair.insert(tokens, namespace, self.pair.pool.lend(len(tokens)), with_state=with_state)

    @rule(target=nodes, held=nodes, shape=shapes, with_state=st.booleans())
    def insert_from(self, held: Held, shape: list[int], with_state: bool) -> Held | MultipleResults[Held]:
        tokens, namespace = held.handle.place.prefix + self.tokens(shape, 0), held.handle.place.namespace
        if not self.make_room(len(tokens)):
            return multiple()
        if self.pair.model.is_stale(held.handle):
            self.pair.refuse_insert_from(held, tokens, namespace)
            return multiple()
        slots = self.pair.pool.lend(len(tokens))
        return self.pair.insert(tokens, namespace, slots, held=held, with_state=with_state)

    @rule(held=nodes)
    def attach(self, held: Held) -> None:
        if held.handle != ROOT and self.pair.states.free and not self.pair.model.is_gone(held.handle):
            self.pair.attach(held)

    @rule(shape=shapes, tail=tails)
    def refuse_a_state_within_a_page(self, shape: list[int], tail: int) -> None:
        if tail % self.page_size and self.pair.states.free:
            self.pair.refuse_state_within_a_page(self.tokens(shape, tail), None)

    @rule(target=locks, held=nodes)
    def lock(self, held: Held) -> Held | MultipleResults[Held]:
        stale = self.pair.model.is_stale(held.handle)
        self.pair.lock(held)
        return multiple() if stale else held

    @rule(held=consumes(locks))
    def unlock(self, held: Held) -> None:
        self.pair.unlock(held)

    @rule(num_tokens=st.integers(0, 20), num_states=st.integers(0, 3))
    def evict(self, num_tokens: int, num_states: int) -> None:
        self.pair.evict(num_tokens, num_states)

    @rule(num_states=st.integers(1, 2))
    def evict_states(self, num_states: int) -> None:
        self.pair.evict(0, num_states)

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
@pytest.mark.parametrize("page_size", [1, 4])
def test_no_sequence_of_operations_parts_the_cache_from_its_model(page_size: int) -> None:
    machine = type(f"PagesOf{page_size}", (MambaMachine,), {"page_size": page_size})

    run_state_machine_as_test(machine, settings=BOUNDED)
