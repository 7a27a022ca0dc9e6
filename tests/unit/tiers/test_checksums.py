"""A record whose bytes, page or kind differ in one bit has another sum."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from raydix.actors.tiers.disk.checksums import are_right, checksums

Bytes = NDArray[np.uint8]


def some(number: int, num_bytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (number, num_bytes), np.uint8)


@pytest.mark.parametrize("num_bytes", [1, 30, 241, 513])
def test_each_flipped_bit_of_a_record_is_found(num_bytes: int) -> None:
    record, digest = some(1, num_bytes), some(1, 32, seed=1)
    right = checksums(record, digest, "full")
    flips = np.eye(8 * num_bytes, dtype=np.uint8)
    flipped = np.packbits(np.unpackbits(record) ^ flips, axis=1)

    digests, sums = np.repeat(digest, len(flipped), 0), np.repeat(right, len(flipped), 0)
    assert not are_right(flipped, digests, sums, "full").any()
    assert are_right(np.repeat(record, len(flipped), 0), digests, sums, "full").all()


def test_each_flipped_bit_of_the_digest_or_of_the_sum_is_found() -> None:
    record, digest = some(1, 300), some(1, 32, seed=1)
    right = checksums(record, digest, "full")

    digests = np.packbits(np.unpackbits(digest) ^ np.eye(256, dtype=np.uint8), axis=1)
    records = np.repeat(record, 256, 0)
    assert not are_right(records, digests, np.repeat(right, 256, 0), "full").any()
    sums = np.packbits(np.unpackbits(right) ^ np.eye(128, dtype=np.uint8), axis=1)
    assert not are_right(records[:128], np.repeat(digest, 128, 0), sums, "full").any()


@pytest.mark.parametrize("place", [0, 7, 8, 31])
def test_equal_bytes_of_another_page_or_kind_are_refused(place: int) -> None:
    record = np.zeros((1, 4096), np.uint8)
    digest, other = some(1, 32), some(1, 32)
    other[0, place] ^= 1

    sums = [checksums(record, pages, kind).tobytes() for pages in (digest, other) for kind in ("full", "swa", "state")]
    assert all(one != another for one, another in combinations(sums, 2))


def test_torn_zeroed_and_swapped_records_are_found() -> None:
    records, digests = some(8, 9000), some(8, 32, seed=1)
    sums = checksums(records, digests, "full")
    found = records.copy()
    found[1, 4096:8192] = records[2, 4096:8192]  # a block of another record
    found[3, 512:] = 0
    found[4] = 0
    found[[5, 6]] = records[[6, 5]]

    assert are_right(found, digests, sums, "full").tolist() == [True, False, True, False, False, False, False, True]


def test_the_padding_of_a_file_is_not_summed() -> None:
    rows, digests = some(3, 4096), some(3, 32, seed=1)
    sums = checksums(rows[:, :700], digests, "state")
    rows[:, 700:] = 7

    assert are_right(rows[:, :700], digests, sums, "state").all()
    assert (checksums(np.ascontiguousarray(rows[:, :700]), digests, "state") == sums).all()


def test_no_records_have_no_sums() -> None:
    assert checksums(some(0, 9), some(0, 32), "full").shape == (0, 16)
    with pytest.raises(ValueError, match=r"digests must be \[2, 32\], not \[1, 32\]"):
        checksums(some(2, 9), some(1, 32), "full")


def test_sums_are_those_of_the_format() -> None:
    """Records of earlier versions must stay readable."""
    record, digest = np.arange(200, dtype=np.uint8)[None], np.arange(32, dtype=np.uint8)[None]

    assert checksums(record, digest, "full").tobytes().hex() == "b0f1440ddf3b23facbc9711ba4a299f5"
