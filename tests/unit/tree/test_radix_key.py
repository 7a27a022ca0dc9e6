"""`RadixKey`: valid and invalid inputs, and parts that are keys of the same namespace."""

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.models.bad_tensors import TENSORS_WITHOUT_A_ROW

from raydix.cache_core import InvalidKeyError, RadixKey

WIDE = 2**32  # the first id that needs more than 32 bits


@pytest.mark.parametrize(
    "ids",
    [
        (1, 2, 3),
        range(1, 4),
        [np.int64(1), np.uint8(2), 3],
        *(array(code, [1, 2, 3]) for code in "bBhHiIlLqQ"),
        *(np.array([1, 2, 3], dtype) for dtype in ("i1", "u1", "<i2", ">u2", "<i4", ">i4", "<u4", "i8", "u8")),
        *(
            torch.tensor([1, 2, 3], dtype=dtype)
            for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        ),
        np.array([9, 3, 9, 2, 9, 1])[::-2],  # a view with a negative stride
        torch.tensor([[1, 9], [2, 9], [3, 9]])[:, 0],  # a view that is not contiguous
        RadixKey([1, 2, 3]),
    ],
    ids=lambda ids: f"{type(ids).__name__}-{getattr(ids, 'dtype', getattr(ids, 'typecode', ''))}",
)
def test_every_accepted_form_of_the_same_ids_gives_an_equal_key(ids: Any) -> None:
    key = RadixKey(ids)

    assert key == RadixKey([1, 2, 3])
    assert hash(key) == hash(RadixKey([1, 2, 3]))
    assert key.token_ids == [1, 2, 3]
    assert len(key) == 3


@pytest.mark.parametrize(
    "ids",
    [
        [2**64 - 1, WIDE, 7],
        array("Q", [2**64 - 1, WIDE, 7]),
        np.array([2**64 - 1, WIDE, 7], np.uint64),
        np.array([2**64 - 1, WIDE, 7], ">u8"),
    ],
    ids=["list", "array", "numpy", "big-endian"],
)
def test_ids_up_to_64_bits_are_kept_exactly(ids: Any) -> None:
    assert RadixKey(ids).token_ids == [2**64 - 1, WIDE, 7]


def test_small_ids_in_64_bit_arrays_stay_as_small_as_a_list() -> None:
    assert len(RadixKey(np.array([1, 2], np.int64)).data) == 8
    assert len(RadixKey([1, WIDE]).data) == 16


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=300), st.data())
def test_a_negative_id_is_found_wherever_it_is_in_an_array(ids: list[int], data: st.DataObject) -> None:
    row = np.array(ids, np.int32)
    assert RadixKey(row).token_ids == ids

    row[data.draw(st.integers(0, len(ids) - 1))] = data.draw(st.integers(-(2**31), -1))

    with pytest.raises(InvalidKeyError, match="negative"):
        RadixKey(row)


@pytest.mark.parametrize("empty", [[], (), array("i"), np.empty(0, np.int32), torch.empty(0, dtype=torch.int64)])
def test_no_ids_make_a_key_of_length_0(empty: Any) -> None:
    assert len(RadixKey(empty)) == 0
    assert RadixKey(empty) == RadixKey([])
    assert RadixKey(empty).token_ids == []


@pytest.mark.parametrize(
    "ids",
    [
        [-1],
        [1, 2, -3],
        [1.5],
        [2.0],
        [2**64],
        [2**70],
        [None],
        ["1"],
        "123",
        b"123",
        bytearray(b"123"),
        7,
        None,
        {1, 2},
        {1: 2},
        iter([1, 2]),
        [[1, 2]],
        [1, (2, 3)],
        [(1, 2), 3],
        [(1, 2), (3,)],
        [()],
        [(1, -2)],
        [(1, 0.5)],
        [(1, 2**64)],
        np.array([-1]),
        np.array([1, 2, -1], np.int32),
        np.array([[1, 2]], np.int32),
        np.array(1, np.int32),
        np.array([1.0], np.float32),
        np.array([1.0]),
        np.array([True]),
        np.array([[1, 2]]),
        np.array(1),
        np.array([1], object),
        torch.tensor([-1]),
        torch.tensor([1.0]),
        torch.tensor([True]),
        torch.tensor([[1]]),
        torch.tensor(1),
        [np.array([1, 2])],
        [torch.tensor([1, 2])],
        [torch.tensor(1.5)],
        [torch.tensor(1, device="meta")],
        [(np.array([1, 2]), 3)],
        *TENSORS_WITHOUT_A_ROW,
        array("d", [1.0]),
        array("b", [-1]),
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],
)
def test_what_is_no_row_of_ids_is_refused(ids: Any) -> None:
    with pytest.raises(InvalidKeyError):
        RadixKey(ids)


def test_a_bfloat16_tensor_is_refused_as_other_floats_are() -> None:
    with pytest.raises(InvalidKeyError):
        RadixKey(torch.tensor([1.0], dtype=torch.bfloat16))


def test_a_refusal_is_a_value_error_that_says_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"integer in \[0, 2\*\*64\)"):
        RadixKey([1, -2])
    with pytest.raises(ValueError, match="found -2"):
        RadixKey(np.array([1, -2]))
    with pytest.raises(ValueError, match="not str"):
        RadixKey("12")


@pytest.mark.parametrize("form", [list, np.array, torch.tensor, lambda ids: array("i", ids)])
def test_a_key_is_a_copy_of_its_argument(form: Any) -> None:
    ids = form([1, 2, 3])
    key = RadixKey(ids)

    ids[0] = 9

    assert key.token_ids == [1, 2, 3]


def test_the_ids_of_a_key_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        RadixKey([1, 2]).ids[0] = 9


def test_tuples_are_elements() -> None:
    key = RadixKey([(1, 2), (2, 3), (3, 4)])

    assert len(key) == 3
    assert list(key) == [(1, 2), (2, 3), (3, 4)]
    assert key[1] == RadixKey([(2, 3)])
    assert key[1:] == RadixKey([(2, 3), (3, 4)])


def test_tuples_differ_from_the_same_ids_in_a_row() -> None:
    assert RadixKey([(1, 2)]) != RadixKey([1, 2])
    assert RadixKey([(1, 2), (3, 4)]) != RadixKey([(1, 2, 3, 4)])


def test_keys_of_different_namespaces_differ() -> None:
    keys = [RadixKey([1, 2], extra_key) for extra_key in (None, "", "a", "b")]

    assert len(set(keys)) == 4
    assert all(a != b for a in keys for b in keys if a is not b)


@pytest.mark.parametrize("extra_key", [0, 1, True, 1.0, b"a", ("a", 1), ["a"]], ids=repr)
def test_a_namespace_is_named_by_a_str(extra_key: Any) -> None:
    """1, True and 1.0 would be one namespace, and no other value can be hashed as names are."""
    for ids in ([1, 2], [], [(1, 2)], [WIDE], np.array([1, 2], np.int32), RadixKey([1, 2], "a")):
        with pytest.raises(InvalidKeyError, match=f"a str or None, not {type(extra_key).__name__}"):
            RadixKey(ids, extra_key)
    with pytest.raises(InvalidKeyError):
        RadixKey.from_packed(b"1234", 4, extra_key)


def test_a_name_of_a_namespace_may_be_any_kind_of_str() -> None:
    class Name(str):
        pass

    assert RadixKey([1], Name("a")) == RadixKey([1], "a")


@pytest.mark.parametrize("ids", [[1, 2], [1, WIDE], [(1, 2), (3, 4)], np.array([1, 2], np.int32)], ids=repr)
@pytest.mark.parametrize("name", ["", "a"])
def test_a_key_of_a_key_stays_in_its_namespace_unless_another_is_given(ids: Any, name: str) -> None:
    key = RadixKey(ids, name)

    assert RadixKey(key) == RadixKey(key, None) == RadixKey(key, extra_key=None) == key
    assert RadixKey(key, "b") == RadixKey(ids, "b")
    assert RadixKey(RadixKey(ids), name) == key


def test_a_key_equals_nothing_but_keys() -> None:
    assert RadixKey([1, 2]) != [1, 2]


def test_indices_and_slices_keep_the_namespace() -> None:
    key = RadixKey([1, 2, 3, 4, 5], "lora")

    assert key[0] == RadixKey([1], "lora")
    assert key[-1] == RadixKey([5], "lora")
    assert key[-5] == RadixKey([1], "lora")
    assert key[1:3] == RadixKey([2, 3], "lora")
    assert key[:-2] == RadixKey([1, 2, 3], "lora")
    assert key[-2:] == RadixKey([4, 5], "lora")
    assert key[:] == key


def test_slices_are_clipped_as_those_of_a_list_are() -> None:
    key = RadixKey([1, 2, 3], "lora")

    assert key[1:99] == RadixKey([2, 3], "lora")
    assert key[3:] == key[2:1] == RadixKey([], "lora")


@pytest.mark.parametrize("index", [3, -4, 99])
def test_an_index_outside_the_key_raises(index: int) -> None:
    with pytest.raises(IndexError, match=f"index {index} is outside a key of length 3"):
        RadixKey([1, 2, 3])[index]


def test_iteration_and_a_for_loop_end() -> None:
    assert list(RadixKey([4, 5, 6])) == [4, 5, 6]


@pytest.mark.parametrize("step", [2, -1])
def test_a_slice_with_steps_is_refused(step: int) -> None:
    with pytest.raises(InvalidKeyError, match="steps of 1"):
        RadixKey([1, 2, 3])[::step]


def test_the_narrow_part_of_a_wide_key_equals_a_narrow_key() -> None:
    key = RadixKey([1, 2, WIDE, 3])

    assert key[:2] == RadixKey([1, 2])
    assert key[3] == RadixKey([3])
    assert key[2] == RadixKey([WIDE])
    assert key.num_narrow() == 2


def test_a_tuple_with_one_wide_id_is_wide() -> None:
    assert RadixKey([(1, 2), (3, WIDE), (4, 5)]).num_narrow() == 1
    assert RadixKey([(1, 2)]).num_narrow() == 1


def test_joining_keeps_namespace_and_widens_as_needed() -> None:
    assert RadixKey([1], "a") + RadixKey([2, 3], "a") == RadixKey([1, 2, 3], "a")
    assert RadixKey([1]) + RadixKey([WIDE]) == RadixKey([1, WIDE])
    assert RadixKey([WIDE]) + RadixKey([1]) == RadixKey([WIDE, 1])


@pytest.mark.parametrize("other", [RadixKey([2], "b"), RadixKey([2]), RadixKey([(2, 3)], "a")])
def test_keys_of_different_kinds_cannot_be_joined(other: RadixKey) -> None:
    with pytest.raises(InvalidKeyError, match="joined"):
        RadixKey([1], "a") + other


def test_a_key_prints_its_first_ids_its_length_and_its_namespace() -> None:
    assert repr(RadixKey([1, 2])) == "RadixKey([1, 2], len=2, extra_key=None)"
    assert repr(RadixKey(range(10), "a")) == "RadixKey([0, 1, 2, 3, 4, 5, 6, 7, ...], len=10, extra_key='a')"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    ids=st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 9), max_size=12),
    start=st.integers(-14, 14),
    stop=st.integers(-14, 14),
)
def test_a_key_behaves_as_the_list_it_was_made_of(ids: list[int], start: int, stop: int) -> None:
    key = RadixKey(ids, "a")

    assert list(key) == ids
    assert key == RadixKey(np.array(ids, np.uint64), "a")
    assert list(key[start:stop]) == ids[start:stop]
    assert key[start:stop] == RadixKey(ids[start:stop], "a")
