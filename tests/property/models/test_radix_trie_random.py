"""`RadixTrie` does what a dictionary of page-prefixes says: random traffic, and operations chosen by Hypothesis."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule, run_state_machine_as_test
from support.reference.trie import Prefix, SeqId
from support.traffic.trie import SEQUENCES, Held, PairedTrie, run_trie_traffic

PAGE_SIZES = (1, 4, 16)

BOUNDED = settings(
    max_examples=60,
    stateful_step_count=40,
    derandomize=True,  # the same examples in every run
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_random_operations_agree_with_the_reference_model(page_size: int) -> None:
    run_trie_traffic(0, page_size, num_operations=1000)


@pytest.mark.long
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_100000_random_operations_agree_with_the_reference_model(page_size: int) -> None:
    for seed in range(10, 20):
        run_trie_traffic(seed, page_size, num_operations=10_000)


class RadixTrieMachine(RuleBasedStateMachine):
    """Nodes that were handed out may be used at any time after, by sequences that hold one, several or no branches."""

    nodes: Bundle[Held] = Bundle("nodes")
    page_size = 1

    shapes = st.lists(st.sampled_from([2, 3]), min_size=1, max_size=5)
    sequences = st.sampled_from(SEQUENCES)

    @initialize(target=nodes)
    def start(self) -> Held:
        self.pair = PairedTrie(self.page_size)
        return self.pair.root

    def tokens(self, shape: list[int]) -> Prefix:
        """Pages that differ in their last token only."""
        return tuple(token for last in shape for token in [1] * (self.page_size - 1) + [last])

    @rule(target=nodes, held=nodes, shape=shapes, tail=st.integers(0, 15))
    def match(self, held: Held, shape: list[int], tail: int) -> object:
        found = self.pair.match(self.tokens(shape) + (1,) * (tail % self.page_size), held)
        return multiple() if found is held else found

    @rule(held=nodes, shape=shapes)
    def peek(self, held: Held, shape: list[int]) -> None:
        self.pair.peek(self.tokens(shape), held)

    @rule(target=nodes, held=nodes, shape=shapes, num_known=st.integers(0, 5))
    def insert(self, held: Held, shape: list[int], num_known: int) -> object:
        tokens = self.tokens(shape)
        blocks = self.pair.peek(tokens, held)[:num_known]
        blocks += self.pair.new_blocks(len(shape) - len(blocks))
        inserted = self.pair.insert(tokens, blocks, held)
        return multiple() if inserted is held else inserted

    @rule(held=nodes, shape=shapes)
    def refuse_bad_inserts(self, held: Held, shape: list[int]) -> None:
        self.pair.refuse_bad_inserts(self.tokens(shape), held)

    @rule(held=nodes, seq_id=sequences)
    def mark(self, held: Held, seq_id: SeqId) -> None:
        self.pair.mark(held, seq_id)

    @rule(held=nodes, seq_id=sequences)
    def release(self, held: Held, seq_id: SeqId) -> None:
        self.pair.release(held, seq_id)

    @rule(num_blocks=st.integers(0, 12))
    def evict(self, num_blocks: int) -> None:
        self.pair.evict(num_blocks)


@pytest.mark.more
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_no_sequence_of_operations_parts_the_trie_from_its_model(page_size: int) -> None:
    machine = type(f"TriePagesOf{page_size}", (RadixTrieMachine,), {"page_size": page_size})

    run_state_machine_as_test(machine, settings=BOUNDED)
