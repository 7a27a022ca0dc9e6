"""Random traffic under policy "2q": `RadixCache` evicts what its model evicts; and a fault in each part is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.checked.radix_cache import CheckedRadixCache
from support.faults.faults import around
from support.faults.split_faults import after_cuts
from support.reference import two_queues
from support.reference.two_queues import CAPACITY, PairedTwoQueues
from support.traffic.radix import NUM_PAGES, RandomTraffic, TrafficFailed, run_traffic

from raydix.cache_core.eviction.two_queues import TwoQueues
from raydix.cache_core.kernels import PageMemory

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
    patch.setattr(TwoQueues, "recall", lambda queues, parent, key, num_tokens: num_tokens)


def _no_page_is_known(patch: Patch) -> None:
    patch.setattr(TwoQueues, "recall", lambda queues, parent, key, num_tokens: parent.end)


def _leaves_are_not_cut(patch: Patch) -> None:
    patch.setattr(TwoQueues, "cut", lambda queues, spans, protected_until: spans)


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


class OtherMemory:
    """A `PageMemory` with other rules: the pages of a run go to it one by one."""

    def __init__(self, page_size: int, capacity: int) -> None:
        self._page_size = page_size
        self._memory = PageMemory(page_size, capacity)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def _pages(self, data: bytes, width: int, unit: int, first: int, seed: int, total: int) -> Iterator[Any]:
        """Yield the arguments of each page, as `PageMemory.remember` takes them."""
        size = self._page_size * unit
        for at in range(0, len(data), size):
            page = (data[at : at + size], width, unit, first, seed, total)
            yield page
            first, total = first + 1, self._memory.sum_of(*page)

    def _recall_page(self, page: Any) -> int:
        return self._memory.recall(*page, 0, len(page[0]))

    def _recalled(self, data: bytes, *args: Any) -> list[tuple[int, Any]]:
        """Recall the pages of a run; return the number up to each that was remembered, and its arguments."""
        *where, start, stop = args
        pages = enumerate(self._pages(data[start:stop], *where), start=1)
        return [(number, page) for number, page in pages if self._recall_page(page)]


def _other_memory(patch: Patch, memory: Callable[[int, int], Any]) -> None:
    patch.setattr(two_queues, "PageMemory", memory)


def _pages_that_come_back_stay_remembered(patch: Patch) -> None:
    class Memory(OtherMemory):
        def recall(self, data: bytes, *args: Any) -> int:
            found = self._recalled(data, *args)
            for _, page in reversed(found):
                self._memory.remember(*page)
            return max((number for number, _ in found), default=0)

    _other_memory(patch, Memory)


def _pages_behind_an_unknown_one_are_not_looked_up(patch: Patch) -> None:
    class Memory(OtherMemory):
        def recall(self, data: bytes, *args: Any) -> int:
            *where, start, stop = args
            found = 0
            for page in self._pages(data[start:stop], *where):
                if not self._recall_page(page):
                    break
                found += 1
            return found

    _other_memory(patch, Memory)


def _only_the_first_remembered_page_is_protected(patch: Patch) -> None:
    class Memory(OtherMemory):
        def recall(self, data: bytes, *args: Any) -> int:
            return min((number for number, _ in self._recalled(data, *args)), default=0)

    _other_memory(patch, Memory)


def _only_the_last_remembered_page_is_forgotten(patch: Patch) -> None:
    class Memory(OtherMemory):
        def recall(self, data: bytes, *args: Any) -> int:
            found = self._recalled(data, *args)
            for _, page in reversed(found[:-1]):
                self._memory.remember(*page)
            return max((number for number, _ in found), default=0)

    _other_memory(patch, Memory)


def _the_first_page_of_a_leaf_is_forgotten_first(patch: Patch) -> None:
    class Memory(OtherMemory):
        def remember(self, *run: Any) -> None:
            for page in self._pages(*run):
                self._memory.remember(*page)

    _other_memory(patch, Memory)


def _a_page_too_few_is_remembered(patch: Patch) -> None:
    _other_memory(patch, lambda page_size, capacity: PageMemory(page_size, CAPACITY - 1))


def _a_page_too_many_is_remembered(patch: Patch) -> None:
    _other_memory(patch, lambda page_size, capacity: PageMemory(page_size, CAPACITY + 1))


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
        _pages_that_come_back_stay_remembered,
        _pages_behind_an_unknown_one_are_not_looked_up,
        _only_the_first_remembered_page_is_protected,
        _only_the_last_remembered_page_is_forgotten,
        _the_first_page_of_a_leaf_is_forgotten_first,
        _a_page_too_few_is_remembered,
        _a_page_too_many_is_remembered,
    )
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str, monkeypatch: Patch) -> None:
    FAULTS[name](monkeypatch)

    with pytest.raises(TrafficFailed) as failure:
        run(num_operations=1_000, seeds=6, page_sizes=(4, 1))

    assert isinstance(failure.value.__cause__, AssertionError), "a comparison or an invariant has to find it"
