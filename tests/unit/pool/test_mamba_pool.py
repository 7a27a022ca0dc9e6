"""`MambaPool`, claim by claim: owners of state slots, and exact copies."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from raydix.cache_core import MambaPool, OutOfSlotsError, SlotError

SHAPES = [[(3, 2), (4,)], [(5,)]]  # two layers: one with two tensors, one with one


def test_slots_are_handed_out_once(any_pool: MambaPool) -> None:
    slots = [any_pool.alloc_track_slot() for _ in range(3)]

    assert sorted(slots) == [1, 2, 3]
    assert any_pool.available_size() == 0
    with pytest.raises(OutOfSlotsError):
        any_pool.alloc_track_slot()
    any_pool.check_invariants()


@pytest.fixture
def any_pool() -> MambaPool:
    return MambaPool(3, SHAPES)


def test_a_freed_slot_is_handed_out_again(any_pool: MambaPool) -> None:
    slots = [any_pool.alloc_track_slot() for _ in range(3)]

    any_pool.free_track_slot(slots[1])

    assert any_pool.free_slots() == [slots[1]]
    assert any_pool.alloc_track_slot() == slots[1]
    any_pool.check_invariants()


@pytest.mark.parametrize("slot", [-1, 0, 2, 4])
def test_what_was_not_handed_out_is_not_taken_back(any_pool: MambaPool, slot: int) -> None:
    assert any_pool.alloc_track_slot() == 1

    with pytest.raises(SlotError):
        any_pool.free_track_slot(slot)

    assert any_pool.available_size() == 2
    any_pool.check_invariants()


def test_a_slot_is_not_taken_back_twice(any_pool: MambaPool) -> None:
    slot = any_pool.alloc_track_slot()
    any_pool.free_track_slot(slot)

    with pytest.raises(SlotError):
        any_pool.free_track_slot(slot)


def pool_over_tensors(dtype: torch.dtype) -> MambaPool:
    """Tensors that have nothing to do with each other."""
    layers = [tuple(torch.zeros(4, *shape, dtype=dtype) for shape in shapes) for shapes in SHAPES]
    return MambaPool(3, layers=layers)


@pytest.mark.parametrize("make", [partial(MambaPool, 3, SHAPES), pool_over_tensors])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_copy_is_bit_exact_in_every_layer_and_touches_nothing_else(
    make: Callable[[torch.dtype], MambaPool], dtype: torch.dtype
) -> None:
    pool = make(dtype)
    source, target = pool.alloc_track_slot(), pool.alloc_track_slot()
    for tensors in pool.layers:
        for tensor in tensors:
            tensor.view(torch.uint8).random_(0, 256)  # any bits, NaNs among them
    before = [tensor.clone() for tensors in pool.layers for tensor in tensors]

    pool.copy_states(source, target)

    after = [tensor for tensors in pool.layers for tensor in tensors]
    for old, new in zip(before, after, strict=True):
        old[target] = old[source]
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


def test_a_copy_goes_its_own_way(any_pool: MambaPool) -> None:
    source, target = any_pool.alloc_track_slot(), any_pool.alloc_track_slot()
    any_pool.layers[0][0][source] = 1.0
    any_pool.copy_states(source, target)

    any_pool.layers[0][0][target] += 1.0

    assert any_pool.layers[0][0][source].unique().tolist() == [1.0]


def test_a_state_is_copied_and_cleared_at_once_however_many_layers_it_has() -> None:
    pool = MambaPool(2, [[(3, 2), (4,)]] * 50)

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        pool.copy_states(1, 2)
        pool.clear_state(1)

    assert [event.name for event in seen.events() if event.name.endswith("_")] == ["aten::copy_", "aten::zero_"]


def test_a_state_is_cleared_alone(any_pool: MambaPool) -> None:
    for tensors in any_pool.layers:
        for tensor in tensors:
            tensor.fill_(1.0)

    any_pool.clear_state(2)

    for tensors in any_pool.layers:
        for tensor in tensors:
            assert [float(tensor[slot].sum()) > 0 for slot in range(4)] == [True, True, False, True]


@pytest.mark.parametrize("slot", [-1, 0, 4, 2**70])
@pytest.mark.parametrize("change", ["clear", "copy from", "copy to"])
def test_a_row_that_is_no_slot_is_neither_copied_nor_cleared(any_pool: MambaPool, slot: int, change: str) -> None:
    for tensors in any_pool.layers:
        for tensor in tensors:
            tensor.view(4, -1)[:] = torch.arange(4.0)[:, None]
    before = [tensor.clone() for tensors in any_pool.layers for tensor in tensors]

    with pytest.raises(SlotError, match=rf"state slot {slot} is outside \[1, 3\]"):
        if change == "clear":
            any_pool.clear_state(slot)
        else:
            any_pool.copy_states(*((slot, 2) if change == "copy from" else (2, slot)))

    after = [tensor for tensors in any_pool.layers for tensor in tensors]
    assert all(map(torch.equal, before, after))


def test_each_layer_has_its_own_shapes_and_a_row_to_spare(any_pool: MambaPool) -> None:
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in any_pool.layers]

    assert shapes == [[(4, 3, 2), (4, 4)], [(4, 5)]]


def test_given_tensors_are_used_as_they_are() -> None:
    rows = torch.zeros(3, 2)
    pool = MambaPool(2, layers=[(rows,)])

    pool.layers[0][0][1] = 5.0

    assert rows[1].tolist() == [5.0, 5.0]


def test_a_pool_has_at_least_one_slot() -> None:
    with pytest.raises(ValueError, match="num_slots"):
        MambaPool(0)
