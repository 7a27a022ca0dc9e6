"""`TokenToKVPoolAllocator`: whole pages, each with one holder, and nothing changed by a mistake."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raydix.cache_core import OutOfSlotsError, SlotError, TokenToKVPoolAllocator


@pytest.fixture
def make() -> Iterator[Callable[..., TokenToKVPoolAllocator]]:
    allocators: list[TokenToKVPoolAllocator] = []

    def make_allocator(num_slots: int, page_size: int = 1) -> TokenToKVPoolAllocator:
        allocators.append(TokenToKVPoolAllocator(num_slots, page_size))
        return allocators[-1]

    yield make_allocator
    for allocator in allocators:
        allocator.check_invariants()


@pytest.fixture
def pool(make: Callable[..., TokenToKVPoolAllocator]) -> TokenToKVPoolAllocator:
    """Four pages of two slots: [2 3] [4 5] [6 7] [8 9]."""
    return make(8, 2)


def row(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def state(pool: TokenToKVPoolAllocator) -> tuple[int, list[int], list[bool]]:
    return pool.available_size(), pool.free_starts().tolist(), (pool._marks == 0).tolist()


@pytest.mark.parametrize(("num_slots", "page_size"), [(0, 1), (-4, 1), (4, 0), (4, -1), (6, 4), (2, 4), (0, 4)])
def test_a_pool_is_whole_pages_and_at_least_one(num_slots: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="positive multiple"):
        TokenToKVPoolAllocator(num_slots, page_size)


def test_everything_is_free_at_first(pool: TokenToKVPoolAllocator) -> None:
    assert pool.available_size() == pool.num_slots == 8
    assert sorted(pool.free_starts().tolist()) == [2, 4, 6, 8]


@pytest.mark.parametrize(("page_size", "ids"), [(1, [1, 2, 3, 4]), (2, [2, 3, 4, 5]), (4, [4, 5, 6, 7])])
def test_page_0_is_never_handed_out(
    make: Callable[..., TokenToKVPoolAllocator], page_size: int, ids: list[int]
) -> None:
    slots = make(4, page_size).alloc(4)

    assert slots.tolist() == ids
    assert slots.dtype == torch.int64


def test_slots_come_in_whole_pages(pool: TokenToKVPoolAllocator) -> None:
    assert pool.alloc(3).tolist() == [2, 3, 4]
    assert pool.available_size() == 4
    assert pool.alloc(1).tolist() == [6]
    assert pool.available_size() == 2


def test_pages_are_named_by_their_first_slots(pool: TokenToKVPoolAllocator) -> None:
    assert pool.alloc_pages(3).tolist() == [2, 4, 6]
    assert pool.alloc_pages(0).tolist() == []


def test_no_tokens_take_no_slots(pool: TokenToKVPoolAllocator) -> None:
    assert pool.alloc(0).tolist() == []
    assert pool.available_size() == 8


@pytest.mark.parametrize("num_tokens", [-1, -9])
def test_a_negative_request_is_refused(pool: TokenToKVPoolAllocator, num_tokens: int) -> None:
    with pytest.raises(SlotError, match=f"cannot allocate {num_tokens} slots"):
        pool.alloc(num_tokens)

    assert pool.available_size() == 8


def test_a_negative_number_of_pages_is_refused() -> None:
    pool = TokenToKVPoolAllocator(4)

    with pytest.raises(ValueError):
        pool.alloc_pages(-1)

    assert pool.available_size() == 4


def test_can_alloc_says_what_alloc_would_do(pool: TokenToKVPoolAllocator) -> None:
    pool.alloc(3)

    assert pool.can_alloc(4)
    assert not pool.can_alloc(5)
    assert pool.can_alloc(0)
    assert not pool.can_alloc(-1)


def test_a_request_without_room_takes_nothing(pool: TokenToKVPoolAllocator) -> None:
    pool.alloc(3)
    before = state(pool)

    with pytest.raises(OutOfSlotsError) as caught:
        pool.alloc(5)

    assert caught.value.args == (6, 4, 0, 8, "slots", None)  # needed, free, evictable, capacity
    assert caught.value.can_ever_fit
    assert state(pool) == before


def test_what_was_freed_last_is_reused_first(pool: TokenToKVPoolAllocator) -> None:
    slots = pool.alloc(8)

    pool.free(slots[:2])
    pool.free(slots[4:6])

    assert pool.alloc(2).tolist() == [6, 7]
    assert pool.alloc(2).tolist() == [2, 3]


def test_pages_freed_together_are_reused_in_their_order(pool: TokenToKVPoolAllocator) -> None:
    pool.free(pool.alloc(8))

    assert pool.alloc(8).tolist() == [2, 3, 4, 5, 6, 7, 8, 9]


def test_a_part_of_a_page_frees_all_of_it(pool: TokenToKVPoolAllocator) -> None:
    slots = pool.alloc(7)

    pool.free(slots[:1])
    pool.free(slots[3:])

    assert pool.available_size() == 8


@pytest.mark.parametrize("nothing", [row(), torch.empty(0), np.empty(0, np.int64), []])
def test_nothing_can_be_freed(pool: TokenToKVPoolAllocator, nothing: torch.Tensor) -> None:
    pool.alloc(2)

    pool.free(nothing)

    assert pool.available_size() == 6


@pytest.mark.parametrize(
    "slots",
    [
        row(6),  # free, never handed out
        row(2, 3, 6),  # one handed out, one not
        row(0),  # the reserved page
        row(1),
        row(10),  # beyond the pool
        row(2, 10),
        row(-1),
        row(-2, -1),
        row(2**40),
        row(2, 4, 3),  # one page in two places
        row(2, 4, 2),
        torch.tensor([2.0]),
        torch.tensor([True]),
        torch.tensor([[2, 3]]),
        torch.empty(0, 2),
        torch.tensor(2),
        2,
    ],
    ids=str,
)
def test_a_wrong_free_raises_and_changes_nothing(pool: TokenToKVPoolAllocator, slots: torch.Tensor) -> None:
    pool.alloc(4)
    before = state(pool)

    with pytest.raises(SlotError):
        pool.free(slots)

    assert state(pool) == before


def test_what_is_no_row_of_slots_is_told_what_it_is(pool: TokenToKVPoolAllocator) -> None:
    with pytest.raises(SlotError, match=r"slots must be a 1-D tensor of integers, not int64 of shape \(\)"):
        pool.free(5)  # type: ignore[arg-type]
    for slots in (None, {}, object(), "2", [[2], [3, 4]]):
        with pytest.raises(SlotError, match=f"slots must be a 1-D tensor of integers, not {type(slots).__name__}"):
            pool.free(slots)  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size", [1, 2])
def test_slots_are_freed_whatever_lies_between_them_in_memory(page_size: int) -> None:
    pool = TokenToKVPoolAllocator(8 * page_size, page_size)
    slots = pool.alloc(8 * page_size)
    pool.free(slots[:: 2 * page_size])
    pool.free(slots[page_size :: 2 * page_size])

    assert pool.available_size() == pool.num_slots
    pool.check_invariants()


def test_what_was_freed_cannot_be_freed_again(pool: TokenToKVPoolAllocator) -> None:
    slots = pool.alloc(4)
    pool.free(slots)
    before = state(pool)

    with pytest.raises(SlotError, match="free already"):
        pool.free(slots)
    with pytest.raises(SlotError, match="free already"):
        pool.free_pages(np.array([2]))

    assert state(pool) == before


def test_a_slot_named_twice_is_refused_without_pages_too(make: Callable[..., TokenToKVPoolAllocator]) -> None:
    pool = make(4)
    pool.alloc(4)

    with pytest.raises(SlotError, match="twice"):
        pool.free(row(2, 2))

    assert pool.available_size() == 0


@pytest.mark.parametrize("starts", [[0], [10], [2, 10], [-2], [8], [3], [2, 5], [-3], [11]])
def test_wrong_pages_are_refused(pool: TokenToKVPoolAllocator, starts: list[int]) -> None:
    pool.alloc(4)
    before = state(pool)

    with pytest.raises(SlotError):
        pool.free_pages(np.array(starts))

    assert state(pool) == before


def test_a_slot_within_a_page_is_none_of_its_names(pool: TokenToKVPoolAllocator) -> None:
    """It would be handed out as the first of a page, which would reach into the next."""
    pool.alloc(4)

    with pytest.raises(SlotError, match=r"must be in \[2, \d+\) and first in a page of 2"):
        pool.free_pages(np.array([3]))


def test_a_misaligned_page_is_found_by_the_check() -> None:
    pool = TokenToKVPoolAllocator(8, 2)
    pool._stack[0] += 1

    with pytest.raises(AssertionError, match="is not its first"):
        pool.check_invariants()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_slots_of_any_integer_type_are_taken_back(pool: TokenToKVPoolAllocator, dtype: torch.dtype) -> None:
    pool.free(pool.alloc(4).to(dtype))

    assert pool.available_size() == 8


def test_what_alloc_returns_is_the_callers(pool: TokenToKVPoolAllocator) -> None:
    pool.alloc_pages(2)[:] = 99
    pool.alloc(2)[:] = 99
    pool.free_starts()[:] = 99

    assert pool.alloc(2).tolist() == [8, 9]


def test_what_alloc_returned_does_not_change_when_others_free(pool: TokenToKVPoolAllocator) -> None:
    first, second = pool.alloc_pages(1), pool.alloc_pages(1)

    pool.free_pages(first)

    assert (first.tolist(), second.tolist()) == ([2], [4])


@pytest.mark.parametrize("slot", [0, 1, 10, -1])
def test_a_slot_that_cannot_exist_is_told_from_one_that_is_free(pool: TokenToKVPoolAllocator, slot: int) -> None:
    with pytest.raises(SlotError, match=r"must be in \[2, 10\)"):
        pool.free(row(slot))


@pytest.mark.parametrize("page_size", [1, 3])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(st.integers(-3, 7), max_size=30))
def test_every_slot_has_one_holder_whatever_the_order(page_size: int, steps: list[int]) -> None:
    pool = TokenToKVPoolAllocator(12, page_size)
    held: list[torch.Tensor] = []
    for step in steps:
        if step > 0 and pool.can_alloc(step):
            held.append(pool.alloc(step))
        elif step <= 0 and held:
            pool.free(held.pop(step % len(held)))

        pool.check_invariants()
        slots = [slot for each in held for slot in each.tolist()]
        pages = sum(-(-len(each) // page_size) for each in held)
        assert len(set(slots)) == len(slots)
        assert pool.available_size() == 12 - pages * page_size
        assert not slots or (min(slots) >= page_size and max(slots) < 12 + page_size)
