"""`SWATokenToKVPoolAllocator`, claim by claim: two halves to a slot, one of which may go before the other."""

from typing import Any

import pytest
import torch

from raydix.cache_core import OutOfSlotsError, SlotError, SWATokenToKVPoolAllocator


def row(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def free(allocator: SWATokenToKVPoolAllocator) -> tuple[int, int]:
    """Free slots of the full and of the window pool."""
    allocator.check_invariants()
    return allocator.available_size(), allocator.swa_available_size()


@pytest.fixture
def allocator() -> SWATokenToKVPoolAllocator:
    """Six pages of two slots, four of which may have a window half."""
    return SWATokenToKVPoolAllocator(12, 8, 2)


def test_a_slot_comes_with_a_window_half(allocator: SWATokenToKVPoolAllocator) -> None:
    slots = allocator.alloc(4)

    halves = allocator.swa_slots(slots)

    assert free(allocator) == (8, 4)
    assert len(set(halves.tolist())) == 4
    assert bool((halves >= 2).all())
    assert (halves % 2).tolist() == (slots % 2).tolist()


def test_slots_are_freed_with_their_window_halves(allocator: SWATokenToKVPoolAllocator) -> None:
    slots = allocator.alloc(5)
    assert free(allocator) == (6, 2)

    allocator.free(slots)

    assert free(allocator) == (12, 8)
    assert allocator.swa_slots(slots).tolist() == [0] * 5


def test_window_halves_are_freed_alone(allocator: SWATokenToKVPoolAllocator) -> None:
    slots = allocator.alloc(6)

    allocator.free_swa(slots[:4])

    assert free(allocator) == (6, 6)
    assert allocator.swa_slots(slots[:4]).tolist() == [0] * 4
    assert bool((allocator.swa_slots(slots[4:]) > 0).all())
    allocator.free(slots)
    assert free(allocator) == (12, 8)


def test_a_freed_window_half_serves_another_slot_and_no_longer_this_one(allocator: SWATokenToKVPoolAllocator) -> None:
    old = allocator.alloc(8)
    freed = set(allocator.swa_slots(old[:4]).tolist())
    allocator.free_swa(old[:4])

    new = allocator.alloc(4)

    assert set(allocator.swa_slots(new).tolist()) == freed
    allocator.free(old[:4])
    assert free(allocator) == (4, 0)
    assert set(allocator.swa_slots(new).tolist()) == freed


def test_slots_run_out_with_either_pool(allocator: SWATokenToKVPoolAllocator) -> None:
    slots = allocator.alloc(8)

    assert not allocator.can_alloc(1)
    with pytest.raises(OutOfSlotsError) as refused:
        allocator.alloc(1)
    assert (refused.value.needed, refused.value.free, refused.value.capacity) == (2, 0, 8)
    assert free(allocator) == (4, 0)
    allocator.free_swa(slots)
    assert allocator.can_alloc(4)
    assert not allocator.can_alloc(5)
    with pytest.raises(OutOfSlotsError) as refused:
        allocator.alloc(5)
    assert (refused.value.needed, refused.value.free, refused.value.capacity) == (6, 4, 12)
    assert free(allocator) == (4, 8)


def test_a_window_half_is_not_freed_twice(allocator: SWATokenToKVPoolAllocator) -> None:
    slots = allocator.alloc(4)
    allocator.free_swa(slots[:2])

    for wrong in (slots[:2], slots, row(8), row(0)):
        with pytest.raises(SlotError):
            allocator.free_swa(wrong)
    other = allocator.alloc(2)
    with pytest.raises(SlotError):
        allocator.free_swa(torch.cat((slots[2:3], other, slots[3:])))  # one page in two places

    assert free(allocator) == (6, 4)


@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize(
    "wrong",
    [torch.tensor([True]), torch.tensor([2.0]), torch.tensor([[2]]), torch.tensor(2), 2, [2, 4, 2], [2, 2, 4, 2]],
    ids=str,
)
def test_what_is_no_row_of_slots_frees_no_window_half(wrong: Any, page_size: int) -> None:
    allocator = SWATokenToKVPoolAllocator(8, 8, page_size)
    allocator.alloc(8)

    with pytest.raises(SlotError):
        allocator.free_swa(wrong)

    assert free(allocator) == (0, 0)
    allocator.check_invariants()


def test_freeing_nothing_is_allowed(allocator: SWATokenToKVPoolAllocator) -> None:
    allocator.free_swa(row())
    allocator.free(row())

    assert free(allocator) == (12, 8)


def test_a_slot_is_not_freed_twice(allocator: SWATokenToKVPoolAllocator) -> None:
    slots = allocator.alloc(4)
    allocator.free(slots[:2])

    with pytest.raises(SlotError):
        allocator.free(slots)

    assert free(allocator) == (10, 6)


def test_window_halves_move_page_by_page_in_order(allocator: SWATokenToKVPoolAllocator) -> None:
    source, target = allocator.alloc(4), allocator.alloc(4)
    halves = allocator.swa_slots(source)
    allocator.free_swa(target)

    allocator.transfer_swa(source, target)

    assert allocator.swa_slots(target).tolist() == halves.tolist()
    assert allocator.swa_slots(source).tolist() == [0] * 4
    assert free(allocator) == (4, 4)
    allocator.free(source)
    assert allocator.swa_slots(target).tolist() == halves.tolist()
    allocator.free(target)
    assert free(allocator) == (12, 8)


def test_window_halves_move_from_where_they_are_to_where_none_are(allocator: SWATokenToKVPoolAllocator) -> None:
    full, empty, other = allocator.alloc(2), allocator.alloc(2), allocator.alloc(2)
    allocator.free_swa(empty)
    halves = allocator.swa_slots(full).tolist()

    for source, target in ((full, other), (empty, empty), (empty, full)):
        with pytest.raises(SlotError):
            allocator.transfer_swa(source, target)

    assert allocator.swa_slots(full).tolist() == halves
    assert free(allocator) == (6, 4)


def test_window_halves_move_behind_pages_that_are_handed_out_once_each() -> None:
    allocator = SWATokenToKVPoolAllocator(24, 16, 2)
    slots = allocator.alloc(8)
    allocator.free_swa(slots[4:])
    full, empty, nobodys = slots[:4], slots[4:], row(20, 21, 22, 23)
    halves = allocator.swa_slots(full).tolist()

    for source, target in (
        (full, nobodys),
        (full, row(0, 1, 6, 7)),
        (full, row(-2, -1, 6, 7)),
        (full, row(26, 27, 6, 7)),
        (full, empty[:2]),
        (full[:2], empty),
        (full, torch.cat((empty[:2], empty[:2]))),
        (torch.cat((full[:2], full[:2])), empty),
        (torch.cat((full, full[:2])), row(6, 7, 8, 9, 20, 21)),
        (full[1:3], empty[:2]),
        (full[1:], empty[:3]),
        (full, empty.flip(0)),
        (nobodys, empty),
    ):
        with pytest.raises(SlotError):
            allocator.transfer_swa(source, target)

    assert allocator.swa_slots(full).tolist() == halves
    assert free(allocator) == (16, 12)
    allocator.transfer_swa(full[:3], empty[:3])
    allocator.transfer_swa(row(), row())
    assert allocator.swa_slots(empty).tolist() == halves


@pytest.mark.parametrize(
    "wrong",
    [None, "ab", object(), torch.tensor([2.0]), torch.tensor([True]), torch.tensor([[2]]), 2**70],
    ids=lambda wrong: f"{wrong}".partition(" at 0x")[0],  # the same in each process that runs tests
)
def test_what_is_no_row_of_slots_is_refused_by_every_verb(wrong: Any) -> None:
    allocator = SWATokenToKVPoolAllocator(8, 8)
    slots = allocator.alloc(2)
    allocator.free_swa(slots[1:])

    for verb in (
        lambda: allocator.transfer_swa(wrong, slots[1:]),
        lambda: allocator.transfer_swa(slots[:1], wrong),
        lambda: allocator.swa_slots(wrong),
        lambda: allocator.free_swa(wrong),
        lambda: allocator.free(wrong),
    ):
        with pytest.raises(SlotError, match="must be a 1-D tensor of integers"):
            verb()

    assert free(allocator) == (6, 7)


@pytest.mark.parametrize("slot", [-1, -3, 10, 99])
def test_slots_out_of_range_have_no_window_slots(allocator: SWATokenToKVPoolAllocator, slot: int) -> None:
    allocator.alloc(8)

    with pytest.raises(SlotError, match="must be in"):
        allocator.swa_slots(row(2, slot + 4 * (slot > 0)))

    assert allocator.swa_slots(row(0, 1)).tolist() == [0, 0]  # padding


def test_sizes_are_whole_pages() -> None:
    for sizes in ((12, 7), (11, 8), (12, 0)):
        with pytest.raises(ValueError, match="multiple of page_size"):
            SWATokenToKVPoolAllocator(*sizes, page_size=2)


def test_negative_counts_are_refused(allocator: SWATokenToKVPoolAllocator) -> None:
    with pytest.raises(SlotError):
        allocator.alloc(-1)

    assert free(allocator) == (12, 8)


@pytest.mark.parametrize("slot", [-1, -2, 99])
def test_window_halves_out_of_range_are_refused(slot: int) -> None:
    allocator = SWATokenToKVPoolAllocator(8, 8)
    allocator.alloc(8)

    with pytest.raises(SlotError):
        allocator.free_swa(row(slot))
