"""Random traffic under policy "2q": `RadixCache` evicts what its model evicts; and a fault in each part is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.checked.radix_cache import CheckedRadixCache
from support.faults.faults import around
from support.faults.split_faults import after_cuts
from support.reference.two_queues import PairedTwoQueues
from support.traffic.radix import NUM_PAGES, RandomTraffic, TrafficFailed, run_traffic

from raydix.cache_core.eviction.two_queues import TwoQueues

Patch = pytest.MonkeyPatch
PAGE_SIZES = (1, 4, 16)


class TwoQueuesTraffic(RandomTraffic):
    """The traffic of `RadixCache`, under policy "2q"."""

    def _make_pair(self) -> CheckedRadixCache:
        return PairedTwoQueues(self.page_size, NUM_PAGES, self.rng, paged_pool=self.seed % 2 == 1)


def run(num_operations: int, seeds: int, page_sizes: tuple[int, ...] = PAGE_SIZES) -> None:
    for seed in range(seeds):
        for page_size in page_sizes:
            run_traffic(TwoQueuesTraffic(seed, page_size), num_operations)


def test_random_operations_agree_with_the_reference_model() -> None:
    run(num_operations=800, seeds=1)


@pytest.mark.more
def test_10000_random_operations_agree_with_the_reference_model() -> None:
    run(num_operations=1_700, seeds=2)


@pytest.mark.long
def test_100000_random_operations_agree_with_the_reference_model() -> None:
    run(num_operations=11_200, seeds=3)


# ---------------------------------------------------------------- planted faults


def _every_page_is_known(patch: Patch) -> None:
    patch.setattr(TwoQueues, "known_until", lambda queues, parent, key, num_tokens: num_tokens)


def _no_page_is_known(patch: Patch) -> None:
    patch.setattr(TwoQueues, "known_until", lambda queues, parent, key, num_tokens: parent.end)


def _leaves_are_not_cut(patch: Patch) -> None:
    patch.setattr(TwoQueues, "cut", lambda queues, spans, known_until: spans)


def _nodes_above_stay_on_probation(patch: Patch) -> None:
    def protect(queues: TwoQueues, leaf: Any) -> None:
        leaf.is_protected = True
        queues.num_protected += len(leaf)

    patch.setattr(TwoQueues, "protect", protect)


def _the_wrong_queue_goes_first(patch: Patch) -> None:
    def pop(original: Any, queues: TwoQueues) -> Any:
        queues.num_protected, kept = queues.num_slots - queues.num_protected, queues.num_protected
        try:
            return original(queues)
        finally:
            queues.num_protected = kept

    around(patch, TwoQueues, "pop", pop)


def _an_empty_queue_gives_no_victim(patch: Patch) -> None:
    def pop(queues: TwoQueues) -> Any:
        is_full = 2 * queues.num_protected >= queues.num_slots
        return (queues.protected if is_full else queues.probation).pop()

    patch.setattr(TwoQueues, "pop", pop)


def _cut_nodes_are_not_protected(patch: Patch) -> None:
    after_cuts(patch, lambda above, node: setattr(above, "is_protected", False))


def _cut_nodes_keep_the_sum(patch: Patch) -> None:
    after_cuts(patch, lambda above, node: setattr(above, "prefix_sum", node.prefix_sum))


def _protected_victims_are_remembered(patch: Patch) -> None:
    def removed(original: Any, queues: TwoQueues, leaf: Any) -> None:
        if leaf.is_protected:
            queues.num_protected -= len(leaf)
            leaf.is_protected = False
        original(queues, leaf)

    around(patch, TwoQueues, "removed", removed)


def _removed_nodes_are_still_counted(patch: Patch) -> None:
    def removed(original: Any, queues: TwoQueues, leaf: Any) -> None:
        kept = queues.num_protected
        original(queues, leaf)
        queues.num_protected = kept

    around(patch, TwoQueues, "removed", removed)


def _retired_pages_are_remembered(patch: Patch) -> None:
    patch.setattr(TwoQueues, "retire", lambda queues, extra_key: None)


def _namespaces_share_their_hashes(patch: Patch) -> None:
    patch.setattr(TwoQueues, "_seed_of", lambda queues, namespace: 1)


FAULTS: dict[str, Callable[[Patch], None]] = {
    plant.__name__.strip("_").replace("_", " "): plant
    for plant in (
        _every_page_is_known,
        _no_page_is_known,
        _leaves_are_not_cut,
        _nodes_above_stay_on_probation,
        _the_wrong_queue_goes_first,
        _an_empty_queue_gives_no_victim,
        _cut_nodes_are_not_protected,
        _cut_nodes_keep_the_sum,
        _protected_victims_are_remembered,
        _removed_nodes_are_still_counted,
        _retired_pages_are_remembered,
        _namespaces_share_their_hashes,
    )
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str, monkeypatch: Patch) -> None:
    FAULTS[name](monkeypatch)

    with pytest.raises(TrafficFailed) as failure:
        run(num_operations=1_000, seeds=6, page_sizes=(4, 1))

    assert isinstance(failure.value.__cause__, AssertionError), "a comparison or an invariant has to find it"
