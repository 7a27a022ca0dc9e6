"""`PageMemory`, against its definition: the sums of pages, which pages it remembers, and for how long."""

from __future__ import annotations

from random import Random

import pytest

from raydix.cache_core.kernels import PageMemory
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


def remembered(memory: PageMemory, ids: list[int], start: int = 0, seed: int = 0) -> int:
    """The number of leading pages of a prefix that are remembered, of one id each, from an id on."""
    data = RadixKey(ids).data
    total = memory.sum_of(data[: 4 * start], 4, 4, 0, seed, 0)
    return memory.num_remembered(data, 4, 4, start, seed, total, 4 * start, len(data))


def test_what_is_remembered_ends_at_the_first_other_page() -> None:
    memory, ids = PageMemory(1, 1_000), list(range(1, 600))
    memory.remember(RadixKey(ids).data, 4, 4, 0, 0, 0)

    assert memory.num_recent == 599
    for place in (0, 1, 4, 5, 21, 300, 598):
        assert remembered(memory, [*ids[:place], 10**6, *ids[place + 1 :]]) == place
    assert remembered(memory, [*ids, 9]) == 599
    assert remembered(memory, ids, start=40) == 559
    assert remembered(memory, ids, seed=1) == 0


def test_the_oldest_pages_are_forgotten() -> None:
    memory = PageMemory(1, 100, bits_per_page=2**16)  # none is remembered by chance
    for page in range(400):
        memory.remember(RadixKey([page]).data, 4, 4, 0, 0, 0)

    known = [page for page in range(400) if remembered(memory, [page])]

    assert known == list(range(200, 400))
    memory.remember(RadixKey([400]).data, 4, 4, 0, 0, 0)
    assert [remembered(memory, [page]) for page in (299, 300, 400)] == [0, 1, 1]
    memory.clear()
    assert [remembered(memory, [page]) for page in (300, 400)] == [0, 0]
    assert memory.num_recent == 0


def test_a_page_that_is_remembered_again_takes_no_more_room() -> None:
    memory = PageMemory(1, 10)
    for _ in range(100):
        memory.remember(RadixKey([1, 2]).data, 4, 4, 0, 0, 0)

    assert memory.num_recent == 2


def test_hardly_any_other_page_is_remembered_by_chance() -> None:
    memory, random = PageMemory(1, 4_000), Random(5)
    known = RadixKey([random.randrange(2**31) for _ in range(7_999)])
    memory.remember(known.data, 4, 4, 0, 0, 0)  # both filters are full

    others = sum(remembered(memory, [random.randrange(2**31)]) for _ in range(3_000))

    assert others <= 30


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (1, 1, 0), (-1, 5)])
def test_sizes_are_at_least_one(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        PageMemory(*sizes)


@pytest.mark.parametrize(
    ("width", "unit", "start", "stop"),
    [(4, 4, 0, 36), (4, 4, -8, 8), (2, 2, 0, 8), (4, 6, 0, 24), (4, 4, 0, 4), (0, 0, 0, 8)],
)
def test_a_run_is_whole_pages_within_the_ids(width: int, unit: int, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="a run"):
        PageMemory(2, 10).num_remembered(bytes(32), width, unit, 0, 0, 0, start, stop)
