"""Freed slots are overwritten; published pages have checksums, which detect writes to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raydix.cache_core.errors import ContentError
from raydix.cache_core.pool.content_check import ContentCheck

FLOATS = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
PAGE, ROWS = 4, 24


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64) * PAGE


def tensors_of(dtype: str, dim: int = 5) -> dict[str, torch.Tensor]:
    """The K and V of a layer, of any bits; V is narrower."""
    size = getattr(torch, dtype).itemsize
    rng = np.random.default_rng(7)

    def rows(dim: int) -> torch.Tensor:
        data = torch.from_numpy(rng.integers(0, 120, (ROWS, 1, dim * size), np.uint8))
        return data.view(getattr(torch, dtype))

    return {"K of layer 0": rows(dim), "V of layer 0": rows(dim - 2)}


@pytest.mark.parametrize("dtype", FLOATS)
def test_poison_is_nan_in_the_slots_named_and_nowhere_else(dtype: str) -> None:
    tensors = tensors_of(dtype)
    check = ContentCheck(tensors, PAGE)

    check.poison(pages(2, 5))

    for tensor in tensors.values():
        is_nan = tensor.float().isnan().flatten(1)
        assert torch.equal(is_nan.all(1), is_nan.any(1))
        assert is_nan.any(1).nonzero().flatten().tolist() == [*range(8, 12), *range(20, 24)]


def test_poison_of_bytes_is_their_largest_value() -> None:
    tensors = tensors_of("uint8")
    ContentCheck(tensors, PAGE).poison(pages(1))
    assert all((tensor[4:8] == 255).all() and (tensor[8:] != 255).all() for tensor in tensors.values())


@pytest.mark.parametrize("dtype", [*FLOATS, "uint8"])
@pytest.mark.parametrize("dim", [3, 4, 8], ids=lambda dim: f"dim{dim}")
def test_each_byte_of_a_published_page_is_watched(dtype: str, dim: int) -> None:
    tensors = tensors_of(dtype, dim)
    check = ContentCheck(tensors, PAGE)
    check.publish(pages(1, 3))
    check.verify(pages(3, 1))

    for name, tensor in tensors.items():
        data = tensor.view(torch.uint8).view(ROWS, -1)
        for slot in range(3 * PAGE, 4 * PAGE):
            for byte in range(data.shape[1]):
                data[slot, byte] ^= 1
                with pytest.raises(ContentError, match=rf"published page 3 \(slots 12 to 15\), {name},"):
                    check.verify(pages(1, 3))
                data[slot, byte] ^= 1
    check.verify(pages(1, 3))


def test_two_slots_that_change_places_are_a_change() -> None:
    tensors = tensors_of("float32")
    check = ContentCheck(tensors, PAGE)
    check.publish(pages(1))
    rows = tensors["V of layer 0"]
    rows[[4, 5]] = rows[[5, 4]]
    with pytest.raises(ContentError, match="V of layer 0"):
        check.verify(pages(1))


def test_a_slot_is_named_by_its_number_where_pages_have_one() -> None:
    tensors = {"state tensor 0 of layer 2": torch.zeros(4, 3)}
    check = ContentCheck(tensors, 1, "state slot")
    check.publish(np.array([2]))
    tensors["state tensor 0 of layer 2"][2, 1] = 1
    with pytest.raises(ContentError, match=r"page 2 \(state slot 2\), state tensor 0 of layer 2"):
        check.verify(np.array([2]))


def test_what_is_published_again_is_held_to_its_first_content() -> None:
    tensors = tensors_of("float32")
    check = ContentCheck(tensors, PAGE)
    check.publish(pages(1))
    tensors["K of layer 0"][5] += 1
    check.publish(pages(1, 2))
    check.verify(pages(2))
    with pytest.raises(ContentError):
        check.verify(pages(1))


def test_a_page_that_was_freed_is_published_anew() -> None:
    tensors = tensors_of("float32")
    check = ContentCheck(tensors, PAGE)
    check.publish(pages(1))
    check.poison(pages(1))
    with pytest.raises(AssertionError, match=r"not all of the slots at .* are published"):
        check.verify(pages(1))
    tensors["K of layer 0"][4:8] = 3
    check.publish(pages(1))
    check.verify(pages(1))


def test_a_pool_without_tensors_has_nothing_to_check() -> None:
    check = ContentCheck({"K of layer 0": torch.empty(ROWS, 0, 4)}, PAGE)
    check.publish(pages(1))
    check.verify(pages(1, 2))
    check.poison(pages(1))
