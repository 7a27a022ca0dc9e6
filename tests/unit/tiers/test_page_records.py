"""Pages of pools with all kinds of layers become records and pages again, bit for bit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.other_device import OnCard, WithCard
from support.tiers.pool_pages import (
    DTYPES,
    LAYOUTS,
    PAGE,
    check_random_plans,
    contents,
    copied,
    draw,
    kv,
    layout,
    pool_below,
    random_plan,
    random_pool,
    scatter,
)

from raydix.cache_core import KVPool
from raydix.cache_core.pool import record_copies
from raydix.cache_core.tiers import page_records
from raydix.cache_core.tiers.page_records import KINDS, CopyPlan, PageCopies, PageRecords, Pairs

NAMES = list(LAYOUTS)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gathered_records_scattered_to_another_pool_are_its_pages(name: str, dtype: torch.dtype) -> None:
    rng = random.Random(0)
    pool, other = (random_pool(LAYOUTS[name], dtype) for _ in range(2))
    records, others = PageRecords(pool), PageRecords(other)
    for kind in KINDS:
        wanted, slots = contents(other), 1 if kind == "state" else PAGE
        number = len(wanted[kind])
        assert records.num_bytes(kind) == (len(wanted[kind][0]) if number else 0)
        for count in {0, 1, number // 2, number - 1} if number else {0}:
            found, to = draw(rng, number, count), draw(rng, number, count)
            out = torch.empty(count, records.num_bytes(kind), dtype=torch.uint8)

            records.gather(found * slots, out, kind)
            scatter(others, to * slots, out, kind)

            assert [bytes(record.numpy()) for record in out] == [contents(pool)[kind][page] for page in found]
            for page, target in zip(found, to, strict=True):
                wanted[kind][target] = contents(pool)[kind][page]
            assert contents(other) == wanted


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("many", [0, 1, 64])
def test_random_plans_move_their_records_and_no_others(name: str, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_copies, "_MANY_RUNS", many)
    monkeypatch.setattr(record_copies, "_TEMPORARY_BYTES", 150)
    for dtype in DTYPES:
        check_random_plans(random_pool(LAYOUTS[name], dtype), 5)


@pytest.mark.parametrize("piece", [2**30, 64], ids=["one piece", "small pieces"])
@pytest.mark.parametrize("name", ["attention", "mixed", "opaque, mixed"])
def test_records_of_a_card_are_staged_there(name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_records, "CHUNK_BYTES", 200)  # some records
    monkeypatch.setattr(record_copies, "PIECE_BYTES", piece)
    on_host = random_pool(LAYOUTS[name])
    pool = random_pool(LAYOUTS[name], storage=on_host.storage.clone().as_subclass(OnCard))
    below, rng = pool_below(on_host), random.Random(2)
    with WithCard():
        copies = PageCopies(pool, below)
        plans = [random_plan(rng, on_host, below) for _ in range(6)]
        for plan in plans:
            on_host.storage.copy_(pool.storage.cpu())
            wanted = copied(plan, contents(on_host), contents(below), down=True)
            copies.write(plan, 0, len(plan))
            assert contents(below) == wanted
            below.storage.random_(0, 256)
            wanted = copied(plan, contents(below), contents(on_host), down=False)
            copies.load(plan, 0, len(plan))
            on_host.storage.copy_(pool.storage.cpu())
            assert contents(on_host) == wanted


def test_layers_that_are_alike_are_copied_by_one_call() -> None:
    def num_calls(name: str, kind: Any = "full") -> int:
        records = PageRecords(random_pool(LAYOUTS[name], torch.bfloat16))
        return len(records.copies(torch.empty(1, records.num_bytes(kind), dtype=torch.uint8), kind).rows)

    alike = ["attention", "latent", "states", "opaque"]
    assert [num_calls(name) for name in alike] == [1] * len(alike)
    assert [num_calls(name, "state") for name in ("states", "mixed", "opaque, mixed")] == [1] * 3
    assert num_calls("narrow V") == 2
    assert num_calls("no layers") == 0


def test_words_are_as_wide_as_the_rows_allow() -> None:
    for dtype, dim, item_bytes in ((torch.bfloat16, 2, 16), (torch.bfloat16, 1, 8), (torch.uint8, 1, 4)):
        records = PageRecords(random_pool(layout(*[kv(1, dim, dim)] * 2), dtype))
        copies = records.copies(torch.empty(3, records.num_bytes(), dtype=torch.uint8), "full")
        assert [tensor.itemsize for tensor in (*copies.rows, *copies.segments)] == [item_bytes] * 2


def test_chunks_follow_one_another_and_have_room_for_their_bytes() -> None:
    rng = random.Random(3)
    for name in NAMES:
        pool = random_pool(LAYOUTS[name])
        below, records = pool_below(pool), PageRecords(pool)
        copies = PageCopies(pool, below)
        for _ in range(8):
            plan, most = random_plan(rng, pool, below), rng.choice([1, 100, 500, 10**6])
            chunks = copies.chunks(plan, most)
            assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
            assert chunks[-1].stop == len(plan)
            numbers = (len(plan), len(plan.windows.pages), len(plan.states.pages))
            total = sum(count * records.num_bytes(kind) for count, kind in zip(numbers, KINDS, strict=True))
            assert sum(chunk.num_bytes for chunk in chunks) == total
            assert all(chunk.num_bytes <= most or chunk.stop - chunk.start <= 1 for chunk in chunks)


def test_one_state_is_loaded_into_two_slots() -> None:
    pool = random_pool(LAYOUTS["states"], torch.float32)
    below = pool_below(pool)
    slots = np.asarray([4, 1]), np.asarray([3, 3])
    plan = CopyPlan(np.asarray([8]), np.asarray([4]), states=Pairs(*slots, np.asarray([0, 0])))

    PageCopies(pool, below).load(plan, 0, 1)

    assert torch.equal(pool.state_rows()[[4, 1]], below.states[[3, 3]])


def test_wrong_pages_and_pools_are_refused() -> None:
    pool = random_pool(LAYOUTS["attention"])
    below, records = pool_below(pool), PageRecords(pool)
    copies = PageCopies(pool, below)
    before = contents(pool), contents(below)
    out = torch.empty(1, records.num_bytes(), dtype=torch.uint8)

    for wrong in (-PAGE, 0, 6, 48 + PAGE):
        with pytest.raises(ValueError, match=f"first slots of pages of 4, from 4 to 48, not {wrong}"):
            records.gather(np.asarray([wrong]), out)
        for plan in (CopyPlan(np.asarray([wrong]), np.asarray([4])), CopyPlan(np.asarray([4]), np.asarray([wrong]))):
            for copy in (copies.write, copies.load):
                with pytest.raises(ValueError, match="first slots of pages"):
                    copy(plan, 0, 1)
    with pytest.raises(ValueError, match=r"records must be \[2, 192\] uint8"):
        records.gather(np.asarray([4, 8]), out)
    with pytest.raises(ValueError, match="lower must have records of the pool's sizes"):
        PageCopies(pool, random_pool(LAYOUTS["opaque"]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_seq_len"):
        PageRecords(KVPool(replace(layout(kv(), kv()), max_seq_len=8)))
    assert (contents(pool), contents(below)) == before


# -------------------------------------------------------------------- planted faults


def test_a_flipped_bit_is_found_in_its_page() -> None:
    pool = random_pool(LAYOUTS["mixed"], torch.bfloat16)
    below, rng = pool_below(pool), random.Random(5)
    copies, plan = PageCopies(pool, below), random_plan(rng, pool, below, 6)
    copies.write(plan, 0, 6)
    assert copies.first_difference(plan) is None

    below.pages[int(plan.lower[4]) // PAGE, -1] ^= 1

    assert copies.first_difference(plan) == 4


FAULTS = {
    "a run takes one page for another": (
        record_copies,
        "find_runs",
        lambda rows, records, step: [(int(rows[0]), int(records[0]), len(rows))],
    ),
    "tensors at other distances are stacked": (
        page_records._Stack,
        "with_next",
        lambda self, place, offset: self._replace(
            number=self.number + 1,
            place_step=self.place_step or place - self.place,
            offset_step=self.offset_step or offset - self.offset,
        ),
    ),
    "a chunk forgets window halves and states": (
        CopyPlan,
        "parts",
        lambda self, start, stop: [("full", self.upper[start:stop], self.lower[start:stop])],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checks_see(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises((AssertionError, RuntimeError)):
        for name in ("index keys", "mixed"):
            check_random_plans(random_pool(LAYOUTS[name], torch.bfloat16), 12)
