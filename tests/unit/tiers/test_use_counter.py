"""`UseCounter`: which pages are used for the second time, and when this is noticed."""

from __future__ import annotations

from support.caches.small_kv_cache import NO_IDS
from support.tiers.two_tiers import Moves

from raydix.cache_core import KVCache, RadixCache, RadixKey, TokenToKVPoolAllocator
from raydix.cache_core.tiers.second_use import SecondUse
from raydix.cache_core.tiers.tier import Tier
from raydix.cache_core.tiers.use_counter import UseCounter

PAGE = 2


def make_cache(num_slots: int = 64) -> KVCache:
    allocator = TokenToKVPoolAllocator(num_slots, PAGE)
    return KVCache(RadixCache(PAGE, token_to_kv_pool_allocator=allocator), allocator)


class Uses:
    """A cache of which the uses are counted."""

    def __init__(self) -> None:
        self.cache = make_cache()
        self.counted: set[str | None] = {None}
        self._due: list[list[int]] = []
        self.counter = UseCounter(
            self.cache,
            SecondUse(100),
            lambda name: name in self.counted,
            lambda found: self._due.append(list(found.token_ids)),
        )
        self.cache.observers.append(self.counter)

    def due(self) -> list[list[int]]:
        """The prefixes that became due since the last call."""
        due, self._due[:] = list(self._due), []
        return due

    def request(self, tokens: list[int], *, stop: int | None = None, **options: bool) -> None:
        """Acquire, publish and release a prompt."""
        self.cache.acquire("r", "s", RadixKey(tokens), **options)
        self.cache.insert("r", "s", len(tokens) if stop is None else stop, NO_IDS)
        self.cache.release("r", "s")


def test_a_page_is_due_at_its_second_use() -> None:
    uses = Uses()

    uses.request([1, 2, 3, 4, 5])
    assert uses.due() == []
    uses.request([1, 2, 3, 4, 6, 7])
    assert uses.due() == [[1, 2, 3, 4]]
    uses.request([1, 2, 3, 4, 6, 7, 8, 9])
    assert uses.due() == [[1, 2, 3, 4, 6, 7]]
    assert (uses.counter.num_uses, uses.counter.num_first_uses) == (2 + 3 + 4, 4)


def test_hits_are_counted_when_the_lease_ends_and_new_pages_when_they_are_published() -> None:
    uses = Uses()
    uses.request([1, 2])

    uses.cache.acquire("a", "s", RadixKey([1, 2, 3, 4, 5, 6]))
    assert uses.counter.num_uses == 1
    uses.cache.insert("a", "s", 4, NO_IDS)
    assert uses.counter.num_uses == 2
    uses.cache.insert("a", "s", 6, NO_IDS)
    uses.cache.insert("a", "s", 6, NO_IDS)
    assert (uses.counter.num_uses, uses.due()) == (3, [])
    uses.cache.release("a", "s")
    assert (uses.counter.num_uses, uses.due()) == (4, [[1, 2]])


def test_a_page_that_was_evicted_is_due_when_it_is_computed_again() -> None:
    uses = Uses()
    uses.request([1, 2, 3, 4])
    uses.cache.evict(64)

    uses.cache.acquire("a", "s", RadixKey([1, 2, 3, 4]))
    uses.cache.insert("a", "s", 4, NO_IDS)

    assert uses.due() == [[1, 2, 3, 4]]


def test_a_lock_is_a_use() -> None:
    uses = Uses()
    uses.request([1, 2, 3, 4])

    uses.cache.lock("a", "s", RadixKey([1, 2, 9]))
    uses.cache.release("a", "s")

    assert uses.due() == [[1, 2]]


def test_a_resumed_request_counts_once() -> None:
    uses = Uses()
    uses.request([1, 2, 3, 4])

    uses.request([1, 2, 3, 4], resumed=True)

    assert (uses.counter.num_uses, uses.due()) == (2, [])


def test_pages_of_a_namespace_that_is_not_kept_are_not_counted_and_a_retirement_forgets_uses() -> None:
    uses = Uses()
    uses.counted.clear()
    uses.request([1, 2])
    uses.request([1, 2])
    assert uses.counter.num_uses == 0

    uses.counted.add(None)
    uses.request([1, 2])
    uses.cache.reset()
    uses.request([1, 2])
    assert uses.due() == []
    uses.request([1, 2])
    assert uses.due() == [[1, 2]]


def test_a_retirement_of_others_forgets_no_use() -> None:
    uses = Uses()
    uses.request([1, 2])

    for number in range(200):
        uses.cache.retire(lambda name, number=number: name == str(number))  # type: ignore[misc]
    uses.request([1, 2])

    assert uses.due() == [[1, 2]]


def test_the_pages_of_a_load_are_hits_of_its_request_and_a_load_for_none_uses_nothing() -> None:
    uses, disk = Uses(), make_cache()
    moves = Moves(Tier("device", "CPU", uses.cache), Tier("disk", "STORAGE", disk))
    disk.acquire("d", "s", RadixKey([1, 2, 3, 4]))
    disk.insert("d", "s", 4, NO_IDS)
    disk.release("d", "s")

    prefetch = moves.prefetch(RadixKey([1, 2]))
    assert prefetch is not None
    moves.complete(prefetch, 1)
    assert uses.counter.num_uses == 0
    lease = uses.cache.acquire("a", "s", RadixKey([1, 2, 3, 4, 5, 6]))
    load = moves.prepare_load(lease)
    assert load is not None
    moves.complete(load, 1)
    assert uses.counter.num_uses == 0
    uses.cache.insert("a", "s", 6, NO_IDS)
    assert uses.counter.num_uses == 1, "the request has computed one page"
    uses.cache.release("a", "s")

    assert uses.counter.num_uses == 3
    moves.check_invariants()


def test_a_request_whose_load_is_given_up_has_used_nothing_yet() -> None:
    uses, disk = Uses(), make_cache()
    moves = Moves(Tier("device", "CPU", uses.cache), Tier("disk", "STORAGE", disk))
    disk.acquire("d", "s", RadixKey([1, 2, 3, 4]))
    disk.insert("d", "s", 4, NO_IDS)
    disk.release("d", "s")
    load = moves.prepare_load(uses.cache.acquire("a", "s", RadixKey([1, 2, 3, 4])))
    assert load is not None

    moves.loads.abandon(load)
    moves.complete(load, 2)

    assert uses.counter.num_uses == 0
