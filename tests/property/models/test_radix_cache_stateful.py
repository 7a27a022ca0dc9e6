"""The same comparison, with operations chosen by Hypothesis: failures are shrunk to a few steps."""

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
from support.checked.radix_cache import CheckedRadixCache, Held
from support.reference.models import Tokens

OneOrNone = Held | MultipleResults[Held]
NAMESPACES = st.sampled_from([None, "", "a"])
NUM_PAGES = 24

BOUNDED = settings(
    max_examples=100,
    stateful_step_count=40,
    derandomize=True,  # the same examples in every run
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class RadixCacheMachine(RuleBasedStateMachine):
    """Nodes that were found may be locked, hashed and resumed at, also long after they have gone."""

    nodes: Bundle[Held] = Bundle("nodes")
    locks: Bundle[Held] = Bundle("locks")
    page_size = 1

    @initialize(paged_pool=st.booleans())
    def start(self, paged_pool: bool) -> None:
        self.pair = CheckedRadixCache(self.page_size, NUM_PAGES, Random(0), paged_pool=paged_pool)

    def tokens(self, shape: list[int], tail: int, tuples: bool) -> Tokens:
        """Pages that differ in their last token only, and a tail that is no page."""
        pages = [[1] * (self.page_size - 1) + [last] for last in shape]
        ids = [token for page in pages for token in page] + [1] * (tail % self.page_size)
        return tuple((token, token + 1) for token in ids) if tuples else tuple(ids)

    shapes = st.lists(st.sampled_from([2, 3, 2**32 + 2]), max_size=6)
    tails = st.integers(0, 15)
    tuples = st.sampled_from([False, False, False, True])

    def make_room(self, num_slots: int) -> bool:
        pool = self.pair.pool
        if num_slots > len(pool.free_slots):
            self.pair.evict(num_slots - len(pool.free_slots))
        return num_slots <= len(pool.free_slots)

    @rule(target=nodes, shape=shapes, tail=tails, tuples=tuples, namespace=NAMESPACES)
    def match(self, shape: list[int], tail: int, tuples: bool, namespace: str | None) -> Held:
        return self.pair.match(self.tokens(shape, tail, tuples), namespace)

    @rule(shape=shapes, tail=tails, tuples=tuples, namespace=NAMESPACES)
    def peek(self, shape: list[int], tail: int, tuples: bool, namespace: str | None) -> None:
        self.pair.peek(self.tokens(shape, tail, tuples), namespace)

    @rule(
        target=nodes, shape=shapes, tail=tails, tuples=tuples, namespace=NAMESPACES,
        reuse=st.booleans(), known=st.integers(0, 40),
    )  # fmt: skip
    def insert(
        self, shape: list[int], tail: int, tuples: bool, namespace: str | None, reuse: bool, known: int
    ) -> OneOrNone:
        tokens = self.tokens(shape, tail, tuples)
        if not self.make_room(len(tokens)):
            return multiple()
        held = self.pair.peek(tokens, namespace)
        slots = held if reuse else []
        slots = slots + self.pair.pool.lend(len(tokens) - len(slots))
        return self.pair.insert(tokens, namespace, slots, min(known, len(held)))

    @rule(target=nodes, held=nodes, shape=shapes, tail=tails)
    def insert_from(self, held: Held, shape: list[int], tail: int) -> OneOrNone:
        prefix, namespace = held.handle.place.prefix, held.handle.place.namespace
        tuples = bool(prefix) and isinstance(prefix[0], tuple)
        tokens = prefix + self.tokens(shape, tail, tuples)
        if not self.make_room(len(tokens)):
            return multiple()
        if self.pair.model.is_stale(held.handle):
            self.pair.refuse_insert_from(held, tokens, namespace)
            return multiple()
        slots = self.pair.peek(prefix, namespace)
        slots += self.pair.pool.lend(len(tokens) - len(slots))
        return self.pair.insert(tokens, namespace, slots, held=held)

    @rule(target=locks, held=nodes)
    def lock(self, held: Held) -> OneOrNone:
        stale = self.pair.model.is_stale(held.handle)
        self.pair.lock(held)
        return multiple() if stale else held

    @rule(held=consumes(locks))
    def unlock(self, held: Held) -> None:
        self.pair.unlock(held)

    @rule(held=nodes)
    def unlock_what_is_not_locked(self, held: Held) -> None:
        if self.pair.model.is_gone(held.handle) or not self.pair.model.num_locks(held.handle):
            self.pair.unlock(held)

    @rule(num_tokens=st.integers(0, 40))
    def evict(self, num_tokens: int) -> None:
        self.pair.evict(num_tokens)

    @rule(held=nodes)
    def hash(self, held: Held) -> None:
        if not self.pair.model.is_gone(held.handle):
            self.pair.hash(held)

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
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_no_sequence_of_operations_parts_the_cache_from_its_model(page_size: int) -> None:
    machine = type(f"PagesOf{page_size}", (RadixCacheMachine,), {"page_size": page_size})

    run_state_machine_as_test(machine, settings=BOUNDED)
