"""Random traffic and Hypothesis: a cache of rows does what its model does, and rows hold what they are found for."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from support.checked.row_cache import CheckedRowCache
from support.more import more
from support.traffic.rows import OPERATIONS, SESSIONS, run_row_traffic


@pytest.mark.parametrize("page_size", [*more(1, 2), 4])
def test_3000_random_operations_agree_with_the_reference_model(page_size: int) -> None:
    traffic = run_row_traffic(0, page_size, num_operations=3000)

    pair = traffic.pair
    assert set(traffic.done) == set(OPERATIONS)
    assert min(pair.refused, pair.in_place, pair.copied, pair.num_pressure_calls) > 50
    counters = pair.cache.counters
    assert counters.acquires > counters.hits > 100
    assert min(counters.tokens_evicted, counters.tokens_inserted, counters.tokens_reused) > 100
    assert counters.tokens_duplicate == 0


@pytest.mark.long
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_100000_random_operations_agree_with_the_reference_model(page_size: int) -> None:
    for seed in range(10, 20):
        run_row_traffic(seed, page_size, num_operations=10_000)


BOUNDED = settings(
    max_examples=60,
    stateful_step_count=30,
    derandomize=True,  # the same examples in every run
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

prompts = st.lists(st.sampled_from([1, 2, 2**33]), min_size=1, max_size=11).map(tuple)
namespaces = st.sampled_from([None, None, "a"])
sessions = st.sampled_from(SESSIONS)
small = st.integers(0, 4)


class RowCacheMachine(RuleBasedStateMachine):
    """Leases that are taken, written, published and given back in any order; failures are shrunk to a few steps."""

    @initialize(page_size=st.sampled_from([1, 2]))
    def start(self, page_size: int) -> None:
        self.pair = CheckedRowCache(page_size)

    def chosen(self, choice: int) -> str:
        lease_ids = list(self.pair.model.leases)
        return lease_ids[choice % len(lease_ids)]

    def has_leases(self) -> bool:
        return bool(self.pair.model.leases)

    @rule(session=sessions, namespace=namespaces, tokens=prompts, new_tokens=small, cut=st.booleans())
    def acquire(self, session: str, namespace: str | None, tokens: tuple[int, ...], new_tokens: int, cut: bool) -> None:
        self.pair.acquire(session, namespace, tokens, new_tokens, len(tokens) - 1 if cut else None)

    @rule(session=sessions, namespace=namespaces, tokens=prompts)
    def lock(self, session: str, namespace: str | None, tokens: tuple[int, ...]) -> None:
        self.pair.lock(session, namespace, tokens)

    @precondition(has_leases)
    @rule(choice=small, more=prompts, num_tokens=st.integers(0, 10), resend=st.booleans())
    def insert(self, choice: int, more: tuple[int, ...], num_tokens: int, resend: bool) -> None:
        self.pair.insert(self.chosen(choice), more, num_tokens, resend)

    @precondition(has_leases)
    @rule(choice=small, num_tokens=small)
    def extend(self, choice: int, num_tokens: int) -> None:
        self.pair.extend(self.chosen(choice), num_tokens)

    @precondition(has_leases)
    @rule(choice=small)
    def release(self, choice: int) -> None:
        self.pair.release(self.chosen(choice))

    @precondition(has_leases)
    @rule(choice=small)
    def misuse(self, choice: int) -> None:
        self.pair.misuse(self.chosen(choice))

    @rule(session=sessions)
    def end_session(self, session: str) -> None:
        self.pair.end_session(session)

    @rule(session=sessions)
    def quarantine(self, session: str) -> None:
        self.pair.quarantine(session)

    @rule(session=sessions)
    def free_withheld(self, session: str) -> None:
        self.pair.free_withheld(session)

    @rule(namespace=namespaces)
    def retire(self, namespace: str | None) -> None:
        self.pair.retire((namespace,))

    @rule(namespace=namespaces, tokens=prompts)
    def match(self, namespace: str | None, tokens: tuple[int, ...]) -> None:
        self.pair.match(namespace, tokens)

    @rule(num_slots=st.integers(0, 25))
    def evict(self, num_slots: int) -> None:
        self.pair.evict(num_slots)

    @rule()
    def reset(self) -> None:
        self.pair.reset()


def test_no_sequence_of_operations_tells_cache_and_model_apart() -> None:
    run_state_machine_as_test(RowCacheMachine, settings=BOUNDED)
