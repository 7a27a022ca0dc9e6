"""`PageMemory` and `HashMemory`, against their definitions: sums of pages, and which pages are remembered, how long."""

from __future__ import annotations

from collections import OrderedDict
from random import Random

import numpy as np
import pytest

from raydix.cache_core.kernels import HashMemory, PageMemory
from raydix.cache_core.tree.radix_key import RadixKey

MASK = 2**64 - 1
IDS = [7, 0, 2**32 - 1, 5, 5, 123_456, 1, 2]


def mixed(value: int) -> int:
    value ^= value >> 31
    value = value * 0xBF58476D1CE4E5B9 & MASK
    value ^= value >> 29
    value = value * 0x9E3779B97F4A7C15 & MASK
    return value ^ (value >> 32)


def expected_sum(ids: list[int], page_size: int, first: int, seed: int, total: int) -> int:
    """The sum of whole pages of ids, as the module's docstring defines it."""
    for start in range(0, len(ids), page_size):
        content = (first + start // page_size) * 0x9E3779B97F4A7C15 + seed
        for place, number in enumerate(ids[start : start + page_size]):
            factor = pow(0xD1342543DE82EF95, place + 1, 2**64)
            content += (number + (number >> 32) * 0xD6E8FEB86659FD93) * factor
        total = (total + mixed(content & MASK)) & MASK
    return total


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
@pytest.mark.parametrize(("first", "seed", "total"), [(0, 0, 0), (3, MASK, 5), (2**40, 1, MASK)])
def test_the_sum_is_that_of_mixed_pages(page_size: int, first: int, seed: int, total: int) -> None:
    memory = PageMemory(page_size, 10)
    wide = [*IDS[1:], 2**63 + 9]
    for ids, width in ((IDS, 4), (wide, 8)):
        data = b"".join(number.to_bytes(width, "little") for number in ids)

        assert memory.sum_of(data, width, width, first, seed, total) == expected_sum(ids, page_size, first, seed, total)


def test_ids_have_one_sum_at_both_widths() -> None:
    memory, key = PageMemory(4, 10), RadixKey(IDS)

    assert memory.sum_of(key.data, 4, 4, 0, 1, 0) == memory.sum_of(key.with_width(8).data, 8, 8, 0, 1, 0)


def test_parts_of_a_run_have_the_sum_of_the_whole() -> None:
    memory, data = PageMemory(2, 10), RadixKey(IDS).data

    half = memory.sum_of(data[:16], 4, 4, 0, 9, 0)

    assert memory.sum_of(data[16:], 4, 4, 2, 9, half) == memory.sum_of(data, 4, 4, 0, 9, 0)
    assert memory.sum_of(b"", 4, 4, 0, 9, 77) == 77


def run_of(ids: list[int], seed: int = 0) -> tuple[bytes, int, int, int, int, int]:
    """Return the arguments of `remember` for a prefix of pages of one id."""
    return RadixKey(ids).data, 4, 4, 0, seed, 0


def recalled(memory: PageMemory, ids: list[int], start: int = 0, seed: int = 0) -> int:
    """Recall a prefix of pages of one id, from an id on; return the number of pages up to the last remembered one."""
    data = RadixKey(ids).data
    total = memory.sum_of(data[: 4 * start], 4, 4, 0, seed, 0)
    return memory.recall(data, 4, 4, start, seed, total, 4 * start, len(data))


def test_a_recalled_page_is_forgotten() -> None:
    memory = PageMemory(1, 10)
    memory.remember(*run_of([1, 2, 3]))

    assert (recalled(memory, [1, 2]), memory.num_pages) == (2, 1)
    assert recalled(memory, [1, 2]) == 0
    assert (recalled(memory, [1, 2, 3]), memory.num_pages) == (3, 0)


def test_all_pages_of_a_run_are_looked_up() -> None:
    memory = PageMemory(1, 1_000)
    for end in (3, 40, 600):
        memory.remember(*run_of(list(range(1, end))))
        kept = recalled(memory, list(range(1, end - 1)))
        assert (kept, memory.num_pages) == (end - 2, 1)  # the last page alone is remembered

        assert recalled(memory, list(range(1, end + 50))) == end - 1
        assert memory.num_pages == 0


def test_a_page_is_remembered_for_its_whole_prefix() -> None:
    memory, ids = PageMemory(1, 1_000), list(range(1, 600))
    for place in (0, 1, 4, 300, 598):
        memory.remember(*run_of(ids))
        assert recalled(memory, [*ids[:place], 10**6, *ids[place + 1 :]]) == place
    memory.remember(*run_of(ids))
    assert recalled(memory, ids, seed=1) == 0
    assert recalled(memory, ids, start=40) == 559
    assert memory.num_pages == 40


def test_the_oldest_pages_are_forgotten() -> None:
    memory = PageMemory(1, 100)
    for page in range(400):
        memory.remember(*run_of([page]))
    assert memory.num_pages == 100
    assert [recalled(memory, [page]) for page in (0, 299, 350)] == [0, 0, 1]

    memory.remember(*run_of([400]))  # in the place of page 350
    assert recalled(memory, [300]) == 1
    memory.remember(*run_of([401]))
    memory.remember(*run_of([402]))
    assert [recalled(memory, [page]) for page in (301, 302, 402)] == [0, 1, 1]

    memory.clear()
    assert [recalled(memory, [page]) for page in (303, 401)] == [0, 0]
    assert memory.num_pages == 0


def test_the_last_page_of_a_run_is_the_oldest() -> None:
    memory = PageMemory(1, 3)

    memory.remember(*run_of([1, 2, 3, 4, 5]))

    assert recalled(memory, [1, 2, 3, 4, 5]) == 3


def test_a_page_that_is_remembered_again_takes_no_more_room() -> None:
    memory = PageMemory(1, 10)
    for _ in range(100):
        memory.remember(*run_of([1, 2]))

    assert memory.num_pages == 2


@pytest.mark.parametrize("capacity", [200, 201, 1_000, 12_345])
def test_a_remembered_page_takes_at_most_16_bytes(capacity: int) -> None:
    assert 15 * capacity < PageMemory(16, capacity).num_bytes <= 16 * capacity


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 5), (1, -1), (1, 2**31 + 1)])
def test_sizes_are_at_least_one(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        PageMemory(*sizes)


@pytest.mark.parametrize(
    ("width", "unit", "start", "stop"),
    [(4, 4, 0, 36), (4, 4, -8, 8), (2, 2, 0, 8), (4, 6, 0, 24), (4, 4, 0, 4), (0, 0, 0, 8)],
)
def test_a_run_is_whole_pages_within_the_ids(width: int, unit: int, start: int, stop: int) -> None:
    memory = PageMemory(2, 10)
    memory.remember(bytes(32), 4, 4, 0, 0, 0)

    with pytest.raises(ValueError, match="a run"):
        memory.recall(bytes(32), width, unit, 0, 0, 0, start, stop)
    assert memory.num_pages == 4


# ---------------------------------------------------------------- the table


def counted(memory: HashMemory, hashes: list[int], salt: int = 0) -> list[int]:
    """Count hashes; return for each whether it was noted before."""
    known = bytearray(len(hashes))
    memory.count(memoryview(np.array(hashes, np.int64)), salt, known)
    return list(known)


@pytest.mark.parametrize("capacity", [1, 2, 3, 15, 31, 36, 40, 300])
def test_random_operations_agree_with_an_exact_set(capacity: int) -> None:
    random, memory, pages = Random(capacity), HashMemory(capacity), PageMemory(1, capacity)
    noted: OrderedDict[int, None] = OrderedDict()
    remembered: OrderedDict[int, None] = OrderedDict()
    for _ in range(600):
        hashes = [random.randrange(4 * capacity + 3) for _ in range(random.randrange(4))]
        assert counted(memory, hashes) == [number in noted for number in hashes]
        for number in reversed(hashes):
            note(noted, number, capacity)
        assert memory.num_hashes == len(noted)

        page = random.randrange(4 * capacity + 3)
        if random.random() < 0.3:
            assert recalled(pages, [page]) == (page in remembered)
            remembered.pop(page, None)
        else:
            pages.remember(*run_of([page]))
            note(remembered, page, capacity)
        assert pages.num_pages == len(remembered)


def note(noted: OrderedDict[int, None], number: int, capacity: int) -> None:
    noted[number] = None
    noted.move_to_end(number)
    if len(noted) > capacity:
        noted.popitem(last=False)


def test_a_full_table_has_all_its_hashes_and_no_other_one() -> None:
    """An unknown hash counts as known in at most 1 of 10,000 cases; expected is less than 1 of 100 million."""
    capacity, random = 20_000, np.random.default_rng(4)
    memory = HashMemory(capacity)
    for _ in range(6):
        hashes, known = random.integers(-(2**63), 2**63, capacity), np.zeros(capacity, np.uint8)

        memory.count(memoryview(hashes), 5, memoryview(known))
        assert np.count_nonzero(known) == 0
        assert memory.num_hashes == capacity

        memory.count(memoryview(hashes), 5, memoryview(known))
        assert np.count_nonzero(known) == capacity


def test_numbers_of_pages_are_as_good_as_digests() -> None:
    memory, numbers = HashMemory(5_000), list(range(5_000))
    counted(memory, numbers)

    assert sum(counted(memory, [*range(10_000, 15_000)])) == 0
    assert sum(counted(memory, [*range(10_000, 15_000)])) == 5_000


def test_each_hash_has_a_place_for_its_result() -> None:
    memory = HashMemory(4)

    with pytest.raises(ValueError, match="known must have 2 places, not 1"):
        memory.count(memoryview(np.array([1, 2])), 0, bytearray(1))
    assert memory.num_hashes == 0
