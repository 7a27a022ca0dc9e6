"""Blocks of every dtype and layout are copied to pages and back, byte for byte, as one block after the other would be.

The naive reference copies token by token, through integers of one byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.engines.block_layouts import (
    BLOCK,
    DTYPES,
    LAYOUTS,
    Make,
    Naive,
    as_bytes,
    check_equal,
    check_random_copies,
    heads_first,
    latent,
    make_pool,
    tokens_first,
)
from support.engines.other_device import OnCard, WithCard

from raydix.actors.engines.block_copies import STAMP_BYTES, BlockCopies, PoolTarget, WrongPage, make_stamps
from raydix.cache_core.pool import record_copies
from raydix.cache_core.pool.record_copies import find_runs
from raydix.schemas import InvalidRequest


@pytest.mark.parametrize("page_size", [BLOCK, BLOCK // 2, 1])
@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_copies_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, make: Make, page_size: int
) -> None:
    check_random_copies(monkeypatch, make, dtype, page_size, torch.device("cpu"))


@pytest.mark.parametrize("page_size", [BLOCK, BLOCK // 4])
@pytest.mark.parametrize("make", LAYOUTS)
def test_no_operation_mixes_the_tensors_of_a_card_and_of_host_memory(
    monkeypatch: pytest.MonkeyPatch, make: Make, page_size: int
) -> None:
    monkeypatch.setattr(record_copies, "_STAGING_BYTES", 1000)  # some records
    monkeypatch.setattr(record_copies, "PIECE_BYTES", 256)  # less than some records

    def on_card(dtype: torch.dtype) -> list[torch.Tensor]:
        return [layer.as_subclass(OnCard) for layer in make(dtype)]

    with WithCard():
        check_random_copies(monkeypatch, on_card, torch.bfloat16, page_size, torch.device("cpu"))
        check_stamped_copies(on_card(torch.bfloat16), page_size)
        layers = on_card(torch.bfloat16)
        check_copies_on_one_device(monkeypatch, layers, page_size)
        with pytest.raises(RuntimeError, match="same device"):
            layers[0][torch.tensor([1])]


def check_copies_on_one_device(patch: pytest.MonkeyPatch, layers: list[torch.Tensor], page_size: int) -> None:
    """Save and load blocks, by index and by runs, where the pool lies on the card, too."""
    copies = BlockCopies(layers, BLOCK)
    target = copies.attach(make_pool(copies, page_size).as_subclass(OnCard), page_size)
    assert target.copies.staging is None
    pages = np.arange(3 * target.pages_per_block)
    for most in (0, 64):
        patch.setattr(record_copies, "_MANY_RUNS", most)
        target.save(np.asarray([1, 3, 2]), pages)
        target.load(pages, np.asarray([9, 8, 7]))
        assert [as_bytes(layer[9].cpu()) for layer in layers] == [as_bytes(layer[1].cpu()) for layer in layers]


def check_stamped_copies(layers: list[torch.Tensor], page_size: int) -> None:
    """Save and load blocks with stamps, where a load of a page with another stamp fails."""
    copies = BlockCopies(layers, BLOCK, check=True)
    target = copies.attach(make_pool(copies, page_size), page_size)
    assert target.copies.staging is not None
    stamps = make_stamps(np.arange(2 * BLOCK), "", page_size, 0, 2 * BLOCK)
    pages = np.arange(len(stamps))
    target.save(np.asarray([1, 2]), pages, stamps)

    target.load(pages, np.asarray([5, 6]), stamps)

    assert as_bytes(layers[0][5].cpu()) == as_bytes(layers[0][1].cpu())
    with pytest.raises(WrongPage):
        target.load(pages, np.asarray([5, 6]), stamps[::-1])


@pytest.mark.parametrize("make", LAYOUTS)
def test_a_save_and_a_load_move_the_bytes_of_blocks_to_others(make: Make) -> None:
    torch.manual_seed(1)
    layers = make(torch.bfloat16)
    copies = BlockCopies(layers, BLOCK)
    target = copies.attach(make_pool(copies, BLOCK // 4), BLOCK // 4)
    pages = np.asarray([8, 9, 10, 11, 3, 2, 1, 0], np.int64)

    target.save(np.asarray([1, 7], np.int64), pages)
    target.load(pages, np.asarray([30, 2], np.int64))

    for layer in layers:
        assert as_bytes(layer[30]) == as_bytes(layer[1])
        assert as_bytes(layer[2]) == as_bytes(layer[7])


def test_layers_are_measured_and_checked() -> None:
    layers = [*heads_first(torch.float16), *latent(torch.float16)]

    assert BlockCopies(layers, BLOCK).slot_bytes == [24, 24, 24, 10, 18]
    assert BlockCopies(layers, BLOCK, check=True).slot_bytes == [24, 24, 24, 10, 18, STAMP_BYTES]
    assert BlockCopies(layers, BLOCK).block_bytes == BLOCK * 100
    with pytest.raises(InvalidRequest, match="not of shape"):
        BlockCopies(layers, BLOCK * 2)
    with pytest.raises(InvalidRequest, match="not of shape"):
        BlockCopies([torch.zeros(4, BLOCK)], BLOCK)


def test_no_pages_or_negative_ones_alone_copy_nothing() -> None:
    layers = heads_first(torch.float32)
    copies = BlockCopies(layers, BLOCK)
    pool = make_pool(copies, BLOCK)
    target = copies.attach(pool, BLOCK)
    naive = Naive(layers, pool, BLOCK)
    nothing = np.empty(0, np.int64)

    target.save(nothing, nothing)
    target.load(nothing, nothing)
    target.save(np.asarray([1, 2]), np.asarray([-1, -1]))
    target.load(np.asarray([-1, -1]), np.asarray([1, 2]))

    check_equal(layers, pool, BLOCK, naive)


def test_runs_cover_all_blocks_in_order() -> None:
    blocks, pages = np.asarray([3, 4, 5, 9, 10, 2]), np.asarray([6, 8, 10, 12, 13, 15])

    assert find_runs(blocks, pages, 2) == [(3, 6, 3), (9, 12, 1), (10, 13, 1), (2, 15, 1)]
    assert find_runs(np.asarray([7]), np.asarray([0]), 1) == [(7, 0, 1)]


# -------------------------------------------------------------------- stamps


@pytest.fixture(params=[BLOCK, BLOCK // 2])
def stamped(request: Any) -> tuple[PoolTarget, list[torch.Tensor], torch.Tensor, int]:
    """A target with stamps, the layers, and the pool."""
    torch.manual_seed(2)
    layers = tokens_first(torch.bfloat16)
    copies = BlockCopies(layers, BLOCK, check=True)
    pool = make_pool(copies, request.param)
    target = copies.attach(pool, request.param)
    return target, layers, pool, request.param


Stamped = tuple[PoolTarget, list[torch.Tensor], torch.Tensor, int]


def test_a_loaded_page_is_that_of_its_stamp_and_has_its_bytes(stamped: Stamped) -> None:
    target, layers, pool, page_size = stamped
    step = BLOCK // page_size
    tokens = np.arange(4 * BLOCK)
    stamps = make_stamps(tokens, "base", page_size, 0, len(tokens))
    other = make_stamps(tokens, "salted", page_size, 0, len(tokens))
    blocks, pages = np.arange(1, 5), np.arange(4 * step)[::-1].copy()
    target.save(blocks, pages, stamps)

    target.load(pages, blocks + 10, stamps)
    assert all(as_bytes(each[11:15]) == as_bytes(each[1:5]) for each in layers)

    with pytest.raises(WrongPage, match="other tokens"):
        target.load(pages, blocks + 10, other)
    with pytest.raises(WrongPage, match="other tokens"):
        target.load(np.roll(pages, 1), blocks + 10, stamps)
    pool[int(pages[-1]), page_size * 24] ^= 1
    with pytest.raises(WrongPage, match="other bytes"):
        target.load(pages, blocks + 10, stamps)
    pages[-1] = -1  # a page that is not loaded is not verified
    target.load(pages, blocks + 10, stamps)


def test_a_page_that_is_not_saved_keeps_its_stamp(stamped: Stamped) -> None:
    target, _, _, page_size = stamped
    step = BLOCK // page_size
    one, other = (make_stamps(np.full(2 * BLOCK, number), "", page_size, 0, 2 * BLOCK) for number in (1, 2))
    blocks, pages = np.asarray([1, 2]), np.arange(2 * step)
    target.save(blocks, pages, one)
    kept = pages.copy()
    kept[:step] = -1

    target.save(blocks, kept, other)

    target.load(pages, blocks + 5, one[:step] + other[step:])
    with pytest.raises(WrongPage):
        target.load(pages, blocks + 5, other)


def test_stamps_depend_on_all_tokens_before_and_on_the_namespace() -> None:
    tokens = np.arange(4 * BLOCK)
    stamps = make_stamps(tokens, "", BLOCK, 0, 4 * BLOCK)
    changed = tokens.copy()
    changed[BLOCK] += 1

    assert make_stamps(tokens, "", BLOCK, 2 * BLOCK, 4 * BLOCK) == stamps[2:]
    assert [a == b for a, b in zip(make_stamps(changed, "", BLOCK, 0, 4 * BLOCK), stamps, strict=True)] == [
        True,
        False,
        False,
        False,
    ]
    assert not set(make_stamps(tokens, "a", BLOCK, 0, 4 * BLOCK)) & set(stamps)
    assert {len(each) for each in stamps} == {STAMP_BYTES}


# -------------------------------------------------------------------- planted faults


def test_a_run_that_takes_one_page_for_another_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = heads_first(torch.float32)
    copies = BlockCopies(layers, BLOCK)
    pool = make_pool(copies, BLOCK)
    target = copies.attach(pool, BLOCK)
    naive = Naive(layers, pool, BLOCK)
    monkeypatch.setattr(record_copies, "find_runs", lambda blocks, pages, _: [(blocks[0], pages[0], len(blocks))])

    target.save(np.asarray([1, 3]), np.asarray([0, 1]))
    naive.save(np.asarray([1, 3]), np.asarray([0, 1]))

    with pytest.raises(AssertionError):
        check_equal(layers, pool, BLOCK, naive)
