"""`TokenIds`: valid and invalid inputs, and exact packing."""

import pickle
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raydix.cache_core import RadixKey
from raydix.schemas import MatchRequest, TokenIds

WIDE = 2**32  # the first id that needs more than 32 bits


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        [np.int64(1), np.uint8(2), 3],
        *(array(code, [1, 2, 3]) for code in "bBhHiIlLqQ"),
        *(np.array([1, 2, 3], dtype) for dtype in ("i1", "u1", ">u2", "<i4", ">i4", "i8", "u8")),
        *(torch.tensor([1, 2, 3], dtype=dtype) for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)),
        np.array([9, 3, 9, 2, 9, 1])[::-2],
        torch.tensor([[1, 9], [2, 9], [3, 9]])[:, 0],
    ],
    ids=lambda ids: f"{type(ids).__name__}-{getattr(ids, 'dtype', getattr(ids, 'typecode', ''))}",
)
def test_every_accepted_form_of_the_same_ids_packs_to_equal_bytes(ids: Any) -> None:
    packed = TokenIds.pack(ids)

    assert packed == TokenIds.pack([1, 2, 3])
    assert hash(packed) == hash(TokenIds.pack([1, 2, 3]))
    assert (packed.data, packed.width) == (bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]), 4)
    assert packed.tolist() == [1, 2, 3]


def test_what_is_packed_already_is_taken_as_it_is() -> None:
    packed = TokenIds.pack([1, 2])

    assert TokenIds.pack(packed) is packed


@pytest.mark.parametrize("form", [list, lambda ids: np.array(ids, np.uint64), lambda ids: array("Q", ids)])
def test_one_id_of_more_than_32_bits_makes_all_of_them_8_bytes(form: Any) -> None:
    packed = TokenIds.pack(form([1, WIDE, 2**64 - 1]))

    assert (packed.width, len(packed.data), len(packed)) == (8, 24, 3)
    assert packed.tolist() == [1, WIDE, 2**64 - 1]


def test_small_ids_in_64_bit_arrays_stay_narrow() -> None:
    assert TokenIds.pack(np.array([1, WIDE - 1])).width == 4


@pytest.mark.parametrize("empty", [[], (), range(0), np.empty(0, np.int32), torch.empty(0, dtype=torch.int64)])
def test_no_ids_pack_to_nothing(empty: Any) -> None:
    assert TokenIds.pack(empty) == TokenIds.pack([])
    assert len(TokenIds.pack(empty)) == 0


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([-1], "negative"),
        ([1.5], "fractional"),
        ([2.0], "fractional"),
        ([2**64], "too large"),
        ([None], "must be integers"),
        (["1"], "must be integers"),
        ([[1, 2]], "must be integers"),
        ([(1, 2)], "must be integers"),
        ("123", "not str"),
        (b"123", "not bytes"),
        (7, "not int"),
        (None, "not NoneType"),
        ({1, 2}, "not set"),
        ({1: 2}, "not dict"),
        (iter([1]), "not list_iterator"),
        (np.array([3, -2]), "found -2"),
        (torch.tensor([3, -2]), "found -2"),
        (array("b", [-1]), "found -1"),
        (np.array([1.0]), "float64: cast them first"),
        (torch.tensor([1.0]), "float32: cast them first"),
        (torch.tensor([True]), "not bool"),
        (np.array([[1, 2]]), "shape (1, 2)"),
        (np.array(1), "shape ()"),
        (torch.tensor([[1]]), "shape (1, 1)"),
        (np.array([1], object), "not object"),
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],
)
def test_what_is_no_row_of_ids_is_refused_with_the_reason(ids: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        TokenIds.pack(ids)

    assert message in str(caught.value)
    with pytest.raises(ValueError):
        MatchRequest(tokens=ids)


def test_a_bfloat16_tensor_is_refused_as_other_floats_are() -> None:
    with pytest.raises(ValueError):
        MatchRequest(tokens=torch.tensor([1.0], dtype=torch.bfloat16))


def test_packed_ids_are_a_copy_that_cannot_be_written() -> None:
    ids = np.array([1, 2, 3], np.uint32)
    packed = TokenIds.pack(ids)

    ids[0] = 9

    assert packed.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        packed.ids[0] = 9


def test_slices_are_packed_as_narrow_as_they_can_be() -> None:
    packed = TokenIds.pack([1, 2, WIDE, 3])

    assert packed.slice(0, 2) == TokenIds.pack([1, 2])
    assert packed.slice(1, 3) == TokenIds.pack([2, WIDE])
    assert packed.slice(3, 9) == TokenIds.pack([3])
    assert packed.slice(2, 2) == TokenIds.pack([])


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ([], True),
        ([1], True),
        ([1, 2, 3], True),
        ([2], False),
        ([1, 3], False),
        ([1, 2, 3, 4], False),
        ([1, WIDE], False),
    ],
)
@pytest.mark.parametrize("tail", [[], [WIDE]], ids=["narrow", "wide"])
def test_starts_with_compares_ids_at_any_width(prefix: list[int], expected: bool, tail: list[int]) -> None:
    assert TokenIds.pack([1, 2, 3, *tail]).starts_with(TokenIds.pack(prefix)) is expected


def test_a_wide_prefix_is_found_in_wide_ids_only_where_it_stands() -> None:
    packed = TokenIds.pack([1, WIDE, 2])

    assert packed.starts_with(TokenIds.pack([1, WIDE]))
    assert not packed.starts_with(TokenIds.pack([WIDE]))
    assert not TokenIds.pack([5, 1]).starts_with(TokenIds.pack([WIDE + 5]))  # the same bytes


def test_rows_of_different_ids_differ() -> None:
    assert TokenIds.pack([1]) != TokenIds.pack([2])
    assert TokenIds.pack([5, 1]) != TokenIds.pack([WIDE + 5])
    assert TokenIds.pack([1]) != [1]


def test_a_row_prints_its_head_and_its_length() -> None:
    assert repr(TokenIds.pack([1, 2])) == "TokenIds([1, 2], len=2)"
    assert repr(TokenIds.pack(range(9))) == "TokenIds([0, 1, 2, 3, 4, 5, ...], len=9)"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ids=st.lists(st.integers(0, 9) | st.integers(0, 2**64 - 1), max_size=12), at=st.integers(0, 12))
def test_packing_loses_nothing(ids: list[int], at: int) -> None:
    packed = TokenIds.pack(ids)

    assert packed.tolist() == ids
    assert len(packed) == len(ids)
    assert TokenIds.pack(np.array(ids, np.uint64)) == packed
    assert pickle.loads(pickle.dumps(packed)) == packed
    assert packed.slice(at, len(ids)) == TokenIds.pack(ids[at:])
    assert packed.starts_with(packed.slice(0, at))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 9) | st.integers(0, 2**64 - 1), max_size=12))
def test_packed_ids_are_those_of_the_cores_keys(ids: list[int]) -> None:
    packed, key = TokenIds.pack(ids), RadixKey(ids)

    assert (packed.data, packed.width) == (key.data, key.width)
    assert RadixKey.from_packed(packed.data, packed.width) == key
