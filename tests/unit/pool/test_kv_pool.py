"""`KVPool` and its layout: sizes, rows, and exact reads after writes."""

import re
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from support.caches.pool_layers import layer_shapes

from raydix.cache_core import KVPool, PoolLayout

TINY = PoolLayout(num_slots=4, page_size=2, layers=layer_shapes(("full",) * 2, 3, 4, 5), dtype=torch.float32)
EXACT = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
EVERY_DTYPE = [*EXACT, *FLOAT8]


def counting(dtype: torch.dtype, *shape: int, start: int = 1) -> torch.Tensor:
    """Small whole numbers, each different from its neighbours, which every dtype but float8 holds exactly."""
    return (torch.arange(torch.Size(shape).numel()) % 7 + start).reshape(shape).to(dtype)


def test_a_layer_has_a_row_for_each_slot_and_for_the_padding_page() -> None:
    pool = KVPool(TINY)

    assert [tuple(k.shape) for k in pool.k] == [(6, 3, 4)] * 2
    assert [tuple(v.shape) for v in pool.v] == [(6, 3, 5)] * 2
    assert {t.dtype for t in (*pool.k, *pool.v)} == {torch.float32}


def test_sizes_are_those_of_the_tensors_each_on_a_boundary() -> None:
    assert TINY.shapes(0) == TINY.shapes(1) == [(6, 3, 4), (6, 3, 5)]
    assert TINY.num_bytes == 2 * (512 + 512)  # 288 and 360, each to the next multiple of 256
    assert KVPool(TINY).storage.numel() == TINY.num_bytes


@pytest.mark.parametrize("dtype", [*EXACT, *FLOAT8])
def test_tensors_lie_one_after_the_other_and_start_on_boundaries(dtype: torch.dtype) -> None:
    pool = KVPool(replace(TINY, dtype=dtype))
    tensors = [pool.k[0], pool.v[0], pool.k[1], pool.v[1]]
    offsets = [each.data_ptr() - pool.storage.data_ptr() for each in tensors]

    assert all(offset % 256 == 0 for offset in offsets)
    ends = [offset + each.nbytes for offset, each in zip(offsets, tensors, strict=True)]
    assert all(end <= start for end, start in zip(ends, offsets[1:], strict=False))
    assert ends[-1] <= pool.layout.num_bytes


HYBRID_KINDS = ("state", "full", "swa", "state")
HYBRID = replace(
    TINY,
    layers=layer_shapes(HYBRID_KINDS, 3, 4, 5, state_shapes=((3, 2), (5,))),
    num_swa_slots=2,
    num_state_slots=3,
)


def test_the_states_of_a_slot_lie_together_behind_all_kv() -> None:
    pool = KVPool(HYBRID)
    rows = pool.state_rows()
    states = [tensor for layer in range(4) for tensor in pool.state(layer)]

    assert HYBRID.shapes(0) == HYBRID.shapes(3) == []
    assert [tuple(tensor.shape) for tensor in states] == [(4, 3, 2), (4, 5)] * 2
    assert (tuple(rows.shape), rows.dtype) == ((4, 4 * 256), torch.uint8)
    assert rows.data_ptr() >= max(pool.v[layer].data_ptr() + pool.v[layer].nbytes for layer in (1, 2))
    assert all(tensor.data_ptr() % 256 == rows.data_ptr() % 256 for tensor in states)
    for number, tensor in enumerate(states, 1):
        tensor[2] = number
    assert rows.any(1).tolist() == [False, False, True, False]
    assert rows[2].view(torch.float32).view(4, -1).sum(1).tolist() == [1 * 6, 2 * 5, 3 * 6, 4 * 5]


def test_no_two_tensors_of_a_pool_share_memory() -> None:
    pool = KVPool(HYBRID)
    tensors = [*pool.k[1:3], *pool.v[1:3], *pool.state(0), *pool.state(3)]
    for number, tensor in enumerate(tensors, 1):
        tensor.fill_(number)

    assert [tensor.unique().tolist() for tensor in tensors] == [[number] for number in range(1, len(tensors) + 1)]


def test_a_pool_without_state_layers_has_empty_rows() -> None:
    pool = KVPool(replace(TINY, num_state_slots=3))

    assert pool.state_rows().shape == (4, 0)
    assert pool.storage.numel() == TINY.num_bytes


class StateLayer(NamedTuple):
    """A layer that may have empty tensors."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("shapes", [((),), ((0,),), ((0, 3), (2,)), ((), (5,), (0,))])
def test_a_state_may_be_of_any_shape(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    state = StateLayer("state", shapes)
    pool = KVPool(replace(HYBRID, layers=(state, *HYBRID.layers[1:3], state), dtype=dtype))

    assert [tuple(tensor.shape) for tensor in pool.state(3)] == [(4, *shape) for shape in shapes]
    for layer in (0, 3):
        for number, tensor in enumerate(pool.state(layer), 1):
            tensor[1] = number + layer
    found = [tensor[1].float().unique().tolist() for layer in (0, 3) for tensor in pool.state(layer)]
    numbers = [number + layer for layer in (0, 3) for number in range(1, len(shapes) + 1)]
    assert found == [[number] * (0 not in shape) for number, shape in zip(numbers, shapes * 2, strict=True)]


def test_values_may_be_narrower_than_keys_or_absent() -> None:
    narrow, absent = (KVPool(replace(TINY, layers=layer_shapes(("full",) * 2, 3, 4, dim))) for dim in (1, 0))

    assert narrow.v[1].shape == (6, 3, 1)
    assert absent.v[1].shape == (6, 3, 0)


def test_a_pool_without_layers_has_no_memory() -> None:
    pool = KVPool(replace(TINY, layers=()))

    assert (pool.k, pool.v, pool.storage.numel()) == ([], [], 0)


def test_a_new_pool_is_zeroed() -> None:
    assert not KVPool(TINY).storage.any()


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_what_is_written_is_read_back_bit_for_bit(dtype: torch.dtype) -> None:
    pool = KVPool(replace(TINY, dtype=dtype))
    k, v = counting(dtype, 2, 3, 4), counting(dtype, 2, 3, 5, start=2)
    slots = torch.tensor([5, 2])

    pool.write(1, slots, k, v)
    read_k, read_v = pool.gather(1, slots)

    assert read_k.dtype == read_v.dtype == dtype
    assert read_k.view(torch.uint8).equal(k.view(torch.uint8))
    assert read_v.view(torch.uint8).equal(v.view(torch.uint8))


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_all_layers_are_written_and_read_at_once(dtype: torch.dtype) -> None:
    pool = KVPool(replace(TINY, dtype=dtype))
    k, v = counting(dtype, 2, 3, 3, 4), counting(dtype, 2, 3, 3, 5)
    slots = torch.tensor([4, 2, 5])

    pool.write_all(slots, k, v)
    read_k, read_v = pool.read_all(slots)

    assert read_k.view(torch.uint8).equal(k.view(torch.uint8))
    assert read_v.view(torch.uint8).equal(v.view(torch.uint8))
    assert pool.gather(1, slots)[0].view(torch.uint8).equal(k[1].view(torch.uint8))


def test_layers_of_states_are_read_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool(replace(TINY, layers=layer_shapes(("state", "full"), 3, 4, 5)))
    slots = torch.tensor([4, 2])
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(shape, 7, **how))  # memory used before

    k, v = pool.read_all(slots)

    assert not k.any()
    assert not v.any()


def test_a_write_touches_its_rows_of_its_layer_only() -> None:
    pool = KVPool(TINY)

    pool.write(1, torch.tensor([3]), counting(torch.float32, 1, 3, 4), counting(torch.float32, 1, 3, 5))

    assert [row for row in range(6) if pool.k[1][row].any()] == [3]
    assert [row for row in range(6) if pool.v[1][row].any()] == [3]
    assert not pool.k[0].any()
    assert not pool.v[0].any()


def test_the_first_and_the_last_slot_can_be_used() -> None:
    pool = KVPool(TINY)
    k, v = counting(torch.float32, 2, 3, 4), counting(torch.float32, 2, 3, 5)

    pool.write(0, torch.tensor([2, 5]), k, v)

    assert pool.k[0][2].equal(k[0])
    assert pool.v[0][5].equal(v[1])


def test_a_slot_beyond_the_pool_is_refused() -> None:
    with pytest.raises((IndexError, RuntimeError)):
        KVPool(TINY).write(0, torch.tensor([6]), torch.ones(1, 3, 4), torch.ones(1, 3, 5))


def test_what_is_written_is_cast_to_the_pools_dtype() -> None:
    pool = KVPool(replace(TINY, dtype=torch.float16))

    pool.write(0, torch.tensor([2]), torch.full((1, 3, 4), 1.5), torch.full((1, 3, 5), 2.5))

    assert pool.k[0][2].equal(torch.full((3, 4), 1.5, dtype=torch.float16))


def test_what_is_gathered_is_a_copy() -> None:
    pool = KVPool(TINY)
    slots = torch.tensor([2])

    for k, v in (pool.gather(0, slots), pool.read_all(slots)):
        k.fill_(9)
        v.fill_(9)

    assert not pool.storage.any()


@pytest.mark.parametrize("slots", [[2, 3], [4, 2]])
def test_what_is_gathered_into_lies_where_the_pool_does(slots: list[int]) -> None:
    """However the slots lie: torch copies between devices where they follow one another, and only there."""
    out = torch.empty(2, 3, 4, device="meta"), torch.empty(2, 3, 5)

    with pytest.raises(ValueError, match="out must be on cpu"):
        KVPool(TINY).gather(0, torch.tensor(slots), out)


@pytest.mark.parametrize("slots", [[2, 3], [4, 2]])
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_gathered_into_is_contiguous_and_of_the_pools_dtype(slots: list[int], place: int) -> None:
    """However the slots lie: rows that do not follow one another are copied as bits."""
    fitting = torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)
    strided = torch.zeros(2, 3, 8)[..., ::2], torch.zeros(2, 3, 10)[..., ::2]
    for others in (tuple(each.half() for each in fitting), tuple(each.int() for each in fitting), strided):
        out = [others[i] if i == place else fitting[i] for i in (0, 1)]

        with pytest.raises(ValueError, match=r"out must be contiguous and of torch.float32"):
            KVPool(TINY).gather(0, torch.tensor(slots), (out[0], out[1]))


def test_no_slots_are_no_work() -> None:
    pool = KVPool(TINY)
    none = torch.empty(0, dtype=torch.int64)

    pool.write_all(none, torch.empty(2, 0, 3, 4), torch.empty(2, 0, 3, 5))

    assert [tuple(each.shape) for each in pool.read_all(none)] == [(2, 0, 3, 4), (2, 0, 3, 5)]


def test_two_pools_over_one_storage_see_each_others_writes() -> None:
    writer = KVPool(TINY)
    reader = KVPool(TINY, storage=writer.storage)
    k, v = counting(torch.float32, 2, 2, 3, 4), counting(torch.float32, 2, 2, 3, 5)

    writer.write_all(torch.tensor([3, 4]), k, v)

    read_k, read_v = reader.read_all(torch.tensor([3, 4]))
    assert read_k.equal(k)
    assert read_v.equal(v)
    assert reader.storage.data_ptr() == writer.storage.data_ptr()


def test_a_storage_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match=f"at least {TINY.num_bytes} bytes, not {TINY.num_bytes - 1}"):
        KVPool(TINY, storage=torch.zeros(TINY.num_bytes - 1, dtype=torch.uint8))


def test_a_storage_may_be_larger_than_needed() -> None:
    pool = KVPool(TINY, storage=torch.zeros(TINY.num_bytes + 4096, dtype=torch.uint8))

    assert pool.k[1].shape == (6, 3, 4)


# ---------------------------------------------------------------- layers that differ in shape

UNLIKE = replace(HYBRID, layers=(*HYBRID.layers[:2], *layer_shapes(("swa",), 1, 8), HYBRID.layers[3]))


def test_each_layer_has_the_rows_of_its_kind_in_its_own_shape() -> None:
    pool = KVPool(UNLIKE)

    assert [tuple(pool.k[layer].shape) for layer in (1, 2)] == [(6, 3, 4), (4, 1, 8)]
    assert [tuple(pool.v[layer].shape) for layer in (1, 2)] == [(6, 3, 5), (4, 1, 8)]
    assert [tuple(tensor.shape) for tensor in pool.state(3)] == [(4, 3, 2), (4, 5)]
    assert UNLIKE.num_bytes == pool.storage.numel() == (512 + 512) + (256 + 256) + 4 * 4 * 256


def test_a_layer_takes_kv_of_its_own_shape_only() -> None:
    pool, slots = KVPool(UNLIKE), torch.tensor([2])

    with pytest.raises(ValueError, match=r"1 slots need \[1, 1, 8\], not \[1, 3, 4\]"):
        pool.write(2, slots, torch.ones(1, 3, 4), torch.ones(1, 3, 5))
    with pytest.raises(ValueError, match=r"1 slots need \[1, 3, 4\], not \[1, 1, 8\]"):
        pool.gather(1, slots, (torch.empty(1, 1, 8), torch.empty(1, 1, 8)))

    assert not pool.storage.any()


def test_layers_that_differ_are_not_copied_at_once() -> None:
    pool, slots = KVPool(UNLIKE), torch.tensor([2])
    difference = re.escape(
        "one by one: a token has shapes ((3, 4), (3, 5)) in layer 1, but ((1, 8), (1, 8)) in layer 2"
    )

    with pytest.raises(ValueError, match=difference):
        pool.write_all(slots, torch.ones(4, 1, 3, 4), torch.ones(4, 1, 3, 5), slots)
    with pytest.raises(ValueError, match=difference):
        pool.read_all(slots, slots)

    assert not pool.storage.any()
    assert TINY.difference == HYBRID.difference == ""


# ---------------------------------------------------------------- index keys

INDEXED = replace(TINY, layers=layer_shapes(("full",) * 2, 3, 4, 5, 7))
SOME_INDEXED, WINDOWS_INDEXED = (
    replace(HYBRID, layers=layer_shapes(HYBRID_KINDS, 3, 4, 5, 7, layers, state_shapes=((3, 2), (5,))))
    for layers in ((1,), (1, 2))
)


def indexed_kv(dtype: torch.dtype, *lead: int) -> tuple[torch.Tensor, ...]:
    """K, V and index keys in the shape of `INDEXED`."""
    return (*(counting(dtype, *lead, 3, dim) for dim in (4, 5)), counting(dtype, *lead, 7, start=3))


def test_a_layer_with_index_keys_has_a_third_tensor_by_the_slots_of_its_kind() -> None:
    pool, some = KVPool(WINDOWS_INDEXED), KVPool(SOME_INDEXED)

    assert [tuple(index.shape) for index in pool.index] == [(0,), (6, 7), (4, 7), (0,)]
    assert [tuple(index.shape) for index in some.index] == [(0,), (6, 7), (0,), (0,)]
    assert SOME_INDEXED.shapes(1) == [(6, 3, 4), (6, 3, 5), (6, 7)]
    assert SOME_INDEXED.num_bytes == HYBRID.num_bytes + 256  # 168 bytes, to the next multiple of 256
    assert [index.numel() for index in KVPool(TINY).index] == [0, 0]


def test_index_keys_share_no_memory_with_other_tensors() -> None:
    pool = KVPool(WINDOWS_INDEXED)
    tensors = [*pool.k[1:3], *pool.v[1:3], *pool.index[1:3], *pool.state(0), *pool.state(3)]
    for number, tensor in enumerate(tensors, 1):
        tensor.fill_(number)

    assert [tensor.unique().tolist() for tensor in tensors] == [[number] for number in range(1, len(tensors) + 1)]


@pytest.mark.parametrize("slots", [[2, 3], [5, 2], [4, 5, 2, 3]], ids=str)
@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_index_keys_are_written_and_read_with_kv_bit_for_bit(dtype: torch.dtype, slots: list[int]) -> None:
    pool, rows = KVPool(replace(INDEXED, dtype=dtype)), torch.tensor(slots)
    arrays = indexed_kv(dtype, len(slots))
    out = [torch.empty_like(array) for array in arrays]

    pool.write(1, rows, *arrays)

    expected = [bits(array) for array in arrays]
    assert [bits(array) for array in pool.gather(1, rows)] == expected
    assert [bits(array) for array in pool.gather(1, rows, out)] == [bits(array) for array in out] == expected
    assert bits(pool.index[1][rows]) == expected[2]
    assert sorted(slots) == [row for row in range(6) if bits(pool.index[1][row]).strip(b"\0")]
    assert not pool.index[0].any()


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_index_keys_of_all_layers_are_copied_at_once(dtype: torch.dtype) -> None:
    pool, slots = KVPool(replace(INDEXED, dtype=dtype)), torch.tensor([4, 2, 5])
    k, v, index = indexed_kv(dtype, 2, 3)

    pool.write_all(slots, k, v, index=index)

    assert [bits(array) for array in pool.read_all(slots)] == [bits(k), bits(v), bits(index)]
    assert INDEXED.copy_shapes(3) == [tuple(array.shape) for array in (k, v, index)]
    assert TINY.copy_shapes(3) == [tuple(array.shape) for array in (k, v)]


def test_index_keys_of_window_layers_are_copied_by_window_slots() -> None:
    pool, slots, swa_slots = KVPool(WINDOWS_INDEXED), torch.tensor([4, 5]), torch.tensor([2, 3])
    k, v, index = indexed_kv(torch.float32, 4, 2)

    pool.write_all(slots, k, v, swa_slots, index)

    assert pool.index[1][slots].equal(index[1])
    assert pool.index[2][swa_slots].equal(index[2])
    for read, array in zip(pool.read_all(slots, swa_slots), (k, v, index), strict=True):
        assert read[1:3].equal(array[1:3])
        assert not read[0].any() and not read[3].any()


def test_index_keys_are_cast_to_the_pools_dtype() -> None:
    pool = KVPool(replace(INDEXED, dtype=torch.float16))

    pool.write(0, torch.tensor([2]), *(torch.full_like(array, 1.5) for array in indexed_kv(torch.float32, 1)))

    assert pool.index[0][2].equal(torch.full((7,), 1.5, dtype=torch.float16))


@pytest.mark.parametrize(
    ("layer", "index", "reason"),
    [
        (1, None, "index must be given"),
        (2, torch.ones(1, 7), "index must be left out"),
        (3, torch.ones(1, 7), "index must be left out"),
        (1, torch.ones(1, 6), r"1 slots need \[1, 7\], not \[1, 6\]"),
        (1, torch.ones(2, 7), r"1 slots need \[1, 7\], not \[2, 7\]"),
        (1, torch.ones(1, 1, 7), r"1 slots need \[1, 7\], not \[1, 1, 7\]"),
    ],
    ids=["none", "window", "state", "narrow", "rows", "heads"],
)
def test_index_keys_that_do_not_fit_are_refused_before_anything_is_written(
    layer: int, index: torch.Tensor | None, reason: str
) -> None:
    pool = KVPool(SOME_INDEXED)

    with pytest.raises(ValueError, match=reason):
        pool.write(layer, torch.tensor([2]), torch.ones(1, 3, 4), torch.ones(1, 3, 5), index)

    assert not pool.storage.any()


@pytest.mark.parametrize("given", [True, False])
def test_all_layers_take_index_keys_or_none_does(given: bool) -> None:
    pool = KVPool(TINY if given else INDEXED)
    k, v, index = indexed_kv(torch.float32, 2, 1)

    with pytest.raises(ValueError, match="index must be left out" if given else "index must be given"):
        pool.write_all(torch.tensor([2]), k, v, index=index if given else None)

    assert not pool.storage.any()


@pytest.mark.parametrize(("layer", "number"), [(1, 2), (2, 3)])
def test_a_layer_is_gathered_into_as_many_tensors_as_it_has(layer: int, number: int) -> None:
    out = [torch.empty_like(array) for array in indexed_kv(torch.float32, 1)][:number]

    with pytest.raises(ValueError, match=f"out must be {5 - number} tensors, of K, V.*, not {number}"):
        KVPool(SOME_INDEXED).gather(layer, torch.tensor([2]), out)


def test_layers_that_differ_in_having_index_keys_are_not_copied_at_once() -> None:
    pool, slots = KVPool(SOME_INDEXED), torch.tensor([2])
    difference = re.escape("a token has shapes ((3, 4), (3, 5), (7,)) in layer 1, but ((3, 4), (3, 5)) in layer 2")

    with pytest.raises(ValueError, match=difference):
        pool.write_all(slots, *indexed_kv(torch.float32, 4, 1)[:2], slots)
    with pytest.raises(ValueError, match=difference):
        pool.read_all(slots, slots)

    assert not pool.storage.any()
    assert INDEXED.difference == WINDOWS_INDEXED.difference == ""


# ---------------------------------------------------------------- rows of whole sequences

SEQUENCES = replace(TINY, num_slots=6, max_seq_len=3)


def test_a_pool_of_sequences_reserves_no_slots() -> None:
    pool = KVPool(SEQUENCES)

    assert [tuple(k.shape) for k in pool.k] == [(6, 3, 4)] * 2
    assert [tuple(v.shape) for v in pool.v] == [(6, 3, 5)] * 2


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_a_pool_of_sequences_is_one_view_of_all_k_and_one_of_all_v(dtype: torch.dtype) -> None:
    memory = torch.zeros(64 + KVPool(replace(SEQUENCES, dtype=dtype)).storage.numel() + 64, dtype=torch.uint8)
    pool = KVPool(replace(SEQUENCES, dtype=dtype), storage=memory[64:])  # as part of something larger
    k, v = counting(dtype, 2, 6, 3, 4), counting(dtype, 2, 6, 3, 5, start=2)

    pool.write_all(torch.arange(6), k, v)
    k_cache, v_cache = pool.by_sequence()

    assert (tuple(k_cache.shape), tuple(v_cache.shape)) == ((2, 3, 2, 3, 4), (2, 3, 2, 3, 5))
    for slot in range(6):
        for layer in range(2):
            assert bits(k_cache[slot // 3, slot % 3, layer]) == bits(k[layer, slot])
            assert bits(v_cache[slot // 3, slot % 3, layer]) == bits(v[layer, slot])
    k_cache[1, 2, 1] = k_cache[0, 0, 0]
    assert bits(pool.k[1][5]) == bits(k[0, 0])


def test_a_pool_of_sequences_without_layers_has_empty_views() -> None:
    k_cache, v_cache = KVPool(replace(SEQUENCES, layers=())).by_sequence()

    assert (tuple(k_cache.shape[:3]), tuple(v_cache.shape[:3])) == ((2, 3, 0), (2, 3, 0))


def test_values_of_a_pool_of_sequences_may_be_absent() -> None:
    _, v_cache = KVPool(replace(SEQUENCES, layers=layer_shapes(("full",) * 2, 3, 4, 0))).by_sequence()

    assert tuple(v_cache.shape) == (2, 3, 2, 3, 0)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
