"""`Key`, the base of `RadixKey`: ids packed at once, in more steps, or before; mistakes; memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.cache_core import RadixKey
from raydix.cache_core.kernels import COMPILED, Key, pack

FIELDS = ("data", "width", "arity", "unit", "num_tokens", "extra_key")
OTHER_ROWS = [
    [-1], [2**32], [2**80], [1.0], [True], ["1"], [(1, 2)], [np.int64(1)], (1, 2), "12", b"12", None, 7,
    np.array([1.0]), np.array([[1]], np.int32), np.array([True]), np.array([3, -1], np.int32), np.array([1]),
    np.array([1], ">i4"), np.array([1], np.uint32),
]  # fmt: skip


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_a_list_of_ids_is_packed_in_4_bytes_each(ids: list[int]) -> None:
    expected = np.array(ids, "<u4").tobytes()

    assert pack(ids) == (expected if COMPILED else None)  # interpreted, `_pack_slowly` takes less time
    assert RadixKey(ids).data == expected


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50), st.integers(1, 3))
def test_an_array_of_int32_is_packed_unless_an_id_is_negative(ids: list[int], step: int) -> None:
    row = np.array(ids, np.int32)[::step]

    assert pack(row) == (None if any(each < 0 for each in row) else row.tobytes())


@pytest.mark.parametrize("ids", OTHER_ROWS, ids=repr)
def test_other_rows_are_not_packed(ids: Any) -> None:
    assert pack(ids) is None


@pytest.mark.parametrize(
    ("ids", "width", "arity"),
    [([1, 2**31], 4, 0), (np.array([1, 2**31]), 4, 0), ([1, 2**32], 8, 0), ([(1, 2), (3, 4)], 4, 2), ([], 4, 0)],
    ids=repr,
)
def test_a_key_is_the_same_however_it_is_made(ids: Any, width: int, arity: int) -> None:
    made = RadixKey(ids, "namespace")
    packed = RadixKey.from_packed(made.data, width, "namespace", arity)

    for key in (made, packed, RadixKey(ids, extra_key="namespace"), RadixKey(made)):
        assert type(key) is RadixKey
        assert [getattr(key, name) for name in FIELDS] == [
            made.data, width, arity, width * (arity or 1), len(ids), "namespace",
        ]  # fmt: skip


def test_a_key_can_be_filled_again() -> None:
    key = RadixKey([1, 2], "a")

    key.__init__(key, "b")  # type: ignore[misc]
    assert (key.token_ids, key.extra_key) == ([1, 2], "b")
    key.__init__([2**32])  # type: ignore[misc]
    assert (key.token_ids, key.extra_key, key.width) == ([2**32], None, 8)


class Unpacked(Key):
    """A key whose ids are packed already, wrongly at times."""

    __slots__ = ()

    @staticmethod
    def _pack_slowly(token_ids: Any) -> Any:
        return token_ids


MISTAKES: list[tuple[Callable[[], Any], Any]] = [
    (lambda: Key(), TypeError),  # type: ignore[call-arg]
    (lambda: Key([-1]), NotImplementedError),
    (lambda: Unpacked((1,)), ValueError),
    (lambda: Unpacked("abc"), TypeError),
    (lambda: Unpacked((b"1234", 0, 0)), ValueError),
    (lambda: Unpacked((b"1234", 9, 0)), ValueError),
    (lambda: Unpacked((b"1234", 4, -1)), ValueError),
    (lambda: Unpacked((b"1234", 4, 2**62)), ValueError),
    (lambda: Unpacked((b"1234", 4, 0), 7), ValueError),
    (lambda: Key.from_packed(b"1234", 0), ValueError),
    (lambda: Key.from_packed(b"1234", 4, None, 2**20), ValueError),
    (lambda: Key.from_packed(b"1234", 4, b"name"), ValueError),
    (lambda: Key.from_packed(b"1234", "4"), TypeError),  # type: ignore[arg-type]
]
COMPILED_MISTAKES: list[tuple[Callable[[], Any], Any]] = [
    (lambda: Unpacked((bytearray(4), 4, 0)), TypeError),
    (lambda: Key.from_packed("1234", 4), TypeError),  # type: ignore[arg-type]
    (lambda: Key.from_packed(b"1234", 4.0), TypeError),  # type: ignore[arg-type]
    (lambda: Key.from_packed(None, 4), TypeError),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("mistake", "error"), MISTAKES + COMPILED_MISTAKES * COMPILED)
def test_a_mistake_raises(mistake: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        mistake()


@pytest.mark.parametrize("ids", [[2**32], "12", None, np.array([-1], np.int32)], ids=repr)
def test_a_key_that_cannot_be_filled_again_stays_as_it_was(ids: Any) -> None:
    key = RadixKey([1, 2], "a")
    with pytest.raises(ValueError, match=r"token id|extra_key"):
        key.__init__(ids, 7)  # type: ignore[misc]

    assert (key.token_ids, key.extra_key) == ([1, 2], "a")


def test_no_array_list_or_name_is_kept_alive() -> None:
    array, ids, name = np.arange(2**10, 2**10 + 9, dtype=np.int32), list(range(2**10, 2**10 + 9)), "".join(("na", "me"))
    watched = [array, ids, ids[0], name, Key, RadixKey]
    before = [sys.getrefcount(each) for each in watched]

    for _ in range(1_000):
        for row in (array, ids, [2**40], array[::2]):
            key = RadixKey(row, name)
            key.__init__(key)  # type: ignore[misc]
            RadixKey.from_packed(key.data, key.width, name)
    with pytest.raises(ValueError, match="token id"):
        RadixKey([-1])
    del key, row

    assert [sys.getrefcount(each) for each in watched] == before
