"""Random traffic and Hypothesis: the slot cache does what one record per slot says, and rows hold what it claims."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from support.checked.slot_cache import NUM_SLOTS, CheckedSlotCache
from support.reference.slot_cache import Prefix
from support.traffic.slots import run_slot_traffic

both_ways = pytest.mark.parametrize("with_allocator", [True, False], ids=["allocator", "no_allocator"])


@pytest.mark.parametrize("seed", [0, 1])
@both_ways
def test_random_operations_agree_with_the_reference_model(with_allocator: bool, seed: int) -> None:
    run_slot_traffic(seed, with_allocator, num_operations=1000)


@pytest.mark.long
@both_ways
def test_100000_random_operations_agree_with_the_reference_model(with_allocator: bool) -> None:
    for seed in range(10, 20):
        run_slot_traffic(seed, with_allocator, num_operations=10_000)


BOUNDED = settings(
    max_examples=150,
    stateful_step_count=40,
    derandomize=True,  # the same examples in every run
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

prefixes = st.builds(
    Prefix,
    st.sampled_from([None, None, "a"]),
    st.lists(st.sampled_from([1, 2, 2**33]), max_size=6).map(tuple),
)
slots = st.integers(0, NUM_SLOTS - 1)


class SlotCacheMachine(RuleBasedStateMachine):
    """Rows that are taken, written, published and given back in any order; failures are shrunk to a few steps."""

    with_allocator = True

    @initialize(max_capacity=st.sampled_from([1, 4, 9, 1000]))
    def start(self, max_capacity: int) -> None:
        self.pair = CheckedSlotCache(max_capacity, with_allocator=self.with_allocator)

    @rule()
    def alloc(self) -> None:
        self.pair.alloc()

    @rule(slot=slots)
    def occupy(self, slot: int) -> None:
        if slot in self.pair.model_slots.free:
            self.pair.occupy(slot)

    @rule(slot=slots)
    def free(self, slot: int) -> None:
        if slot not in self.pair.model_slots.free:
            self.pair.free(slot)

    @rule(slot=st.integers(-1, NUM_SLOTS))
    def mistake(self, slot: int) -> None:
        self.pair.mistake_slots(slot)

    @rule(query=prefixes)
    def find(self, query: Prefix) -> None:
        self.pair.find(query)

    @rule(query=prefixes)
    def peek(self, query: Prefix) -> None:
        self.pair.peek(query)

    @rule(written=prefixes, slot=slots)
    def write_and_insert(self, written: Prefix, slot: int) -> None:
        if written.tokens:
            self.pair.write(slot, 0, written)
            self.pair.insert(written, slot)

    @rule(written=prefixes, slot=slots)
    def insert_stale(self, written: Prefix, slot: int) -> None:
        self.pair.insert_stale(written, slot)

    @rule(slot=slots, valid_len=st.integers(0, 6))
    def invalidate(self, slot: int, valid_len: int) -> None:
        self.pair.invalidate(slot, valid_len)

    @rule(prefix=prefixes, slot=slots)
    def copy(self, prefix: Prefix, slot: int) -> None:
        self.pair.copy(prefix, slot)

    @rule(prefix=prefixes)
    def pin(self, prefix: Prefix) -> None:
        self.pair.pin(prefix)

    @rule(prefix=prefixes)
    def release(self, prefix: Prefix) -> None:
        self.pair.release(prefix)

    @rule(data=st.data())
    def release_what_is_pinned(self, data: st.DataObject) -> None:
        if self.pair.model.pins:
            self.pair.release(data.draw(st.sampled_from(sorted(self.pair.model.pins, key=repr))))

    @rule(num_nodes=st.integers(0, 8))
    def evict(self, num_nodes: int) -> None:
        self.pair.evict(num_nodes)

    @rule()
    def evict_lru_slot(self) -> None:
        self.pair.evict_lru_slot()

    @rule()
    def reset(self) -> None:
        if self.pair.cache.num_nodes > 6:
            self.pair.reset()


@pytest.mark.more
@both_ways
def test_no_sequence_of_operations_parts_the_cache_from_its_model(with_allocator: bool) -> None:
    machine = type("Machine", (SlotCacheMachine,), {"with_allocator": with_allocator})

    run_state_machine_as_test(machine, settings=BOUNDED)
