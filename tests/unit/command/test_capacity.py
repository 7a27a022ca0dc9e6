"""The size of a pool as users write it: one form in every option and setting."""

from __future__ import annotations

import pytest

from raydix.actors.cluster.capacity import read_bytes, read_capacity, read_disk, read_tier_capacity
from raydix.actors.cluster.settings_file import SettingsError


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("200_000", 200_000),
        ("200,000", 200_000),
        ("1M", 1_000_000),
        ("1m", 1_000_000),
        ("1.1M", 1_100_000),
        ("0.001G", 1_000_000),
        (" 64 k ", 64_000),
        ("1e6", 1_000_000),
        ("1.5E+6", 1_500_000),
        ("8GiB", 2**33 // 1000),
        ("8gib", 2**33 // 1000),
        ("500 MB", 500_000),
    ],
)
def test_a_capacity_is_tokens_or_bytes(text: str, tokens: int) -> None:
    assert read_capacity(text, "--capacity").num_tokens(1, 1000) == tokens


def test_a_capacity_is_rounded_down_to_whole_pages() -> None:
    assert read_capacity("1M", "--capacity").num_tokens(512) == 999_936
    assert read_capacity("1000", "--capacity").num_tokens(128) == 896
    assert read_capacity("1GiB", "--capacity").num_tokens(16, 3 * 2**20) == 336


@pytest.mark.parametrize(
    "text", ["", "M", "-5", "1e-3", "1e999", "8 GiB of RAM", "nan", "1.2.3", "9" * 100, "_", "0x10", "1T", "٣"]
)
def test_another_capacity_is_refused(text: str) -> None:
    with pytest.raises(
        SettingsError, match="--capacity must be tokens, such as 200_000, 1M or 1e6, or bytes"
    ) as caught:
        read_capacity(text, "--capacity")

    assert caught.value.advice == "--capacity 1M"


@pytest.mark.parametrize(
    ("text", "token_bytes", "expected"),
    [
        ("100", 0, "must hold a page, 128 tokens, not '100', which is 100 tokens"),
        ("0", 0, "must hold a page, 128 tokens, not '0', which is 0 tokens"),
        ("1KiB", 10, "must hold a page, 128 tokens of 10 bytes each, not '1KiB', which is 102 tokens"),
        ("8GiB", 0, "must be tokens, such as 200_000 or 1M, not '8GiB': no shape"),
        ("8G", 0, "must be at most 2,147,418,112 tokens, not '8G', which is 8,000,000,000"),
    ],
)
def test_a_capacity_that_no_pool_has_is_refused_with_the_reason(text: str, token_bytes: int, expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_capacity(text, "--capacity").num_tokens(128, token_bytes, "no shape")

    assert str(caught.value) == f"--capacity {expected}"
    assert caught.value.advice


def test_of_gigas_of_tokens_bytes_are_meant_perhaps() -> None:
    with pytest.raises(SettingsError) as caught:
        read_capacity("8G", "--capacity").num_tokens(16)

    assert caught.value.advice == "a smaller number; for bytes write 8GiB"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4x", 4000), ("1.5X", 1500), (" 2 x ", 2000), ("0.5x", 500), ("3k", 3000), ("1MiB", 2**20 // 100)],
)
def test_the_capacity_of_a_tier_may_also_be_a_multiple_of_the_pool(text: str, tokens: int) -> None:
    assert read_tier_capacity(text, "--host-capacity", 1000).num_tokens(1, 100) == tokens


@pytest.mark.parametrize("text", ["x", "-4x", "4 times", "4xx", "1e3x", "9" * 100 + "x"])
def test_another_capacity_of_a_tier_is_refused(text: str) -> None:
    with pytest.raises(
        SettingsError, match=r"--host-capacity must be tokens, .* or a multiple of the pool, such as 4x"
    ):
        read_tier_capacity(text, "--host-capacity", 1000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0x", "must hold a page, 128 tokens, not '0x', which is 0 tokens"),
        ("9999999x", "must be at most 2,147,418,112 tokens, not '9999999x', which is 9,999,999,000"),
    ],
)
def test_a_multiple_that_no_tier_has_is_refused(text: str, expected: str) -> None:
    with pytest.raises(SettingsError, match=f"--host-capacity {expected}"):
        read_tier_capacity(text, "--host-capacity", 1000).num_tokens(128)


@pytest.mark.parametrize(
    ("text", "path", "number", "is_bytes"),
    [
        ("/nvme/raydix:1TiB", "/nvme/raydix", 2**40, True),
        ("/nvme/a:b:c:500 MB", "/nvme/a:b:c", 500 * 10**6, True),
        ("/nvme/10:30:1_000", "/nvme/10:30", 1000, False),
        ("/nvme:4x", "/nvme", 4, False),
        ("some/folder:1e6", "some/folder", 10**6, False),
    ],
)
def test_a_disk_is_a_path_and_a_size_behind_the_last_colon(text: str, path: str, number: int, is_bytes: bool) -> None:
    found, size = read_disk(text)

    assert (found, size.number, size.is_bytes) == (path, number, is_bytes)


@pytest.mark.parametrize("text", ["", "/nvme", ":1TiB", "/nvme:", "/nvme:lots", "1TiB:/nvme", "/nvme:1TiB:"])
def test_other_texts_of_a_disk_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--disk must be PATH:SIZE, not .*; SIZE is tokens, such as") as refused:
        read_disk(text)
    assert refused.value.advice == "--disk /nvme/raydix:1TiB"


@pytest.mark.parametrize(("text", "number"), [("1TiB", 2**40), ("2e12", 2 * 10**12), ("1_000", 1000), ("3 kb", 3000)])
def test_bytes_have_a_unit_or_none(text: str, number: int) -> None:
    assert read_bytes(text, "disk.size") == number


@pytest.mark.parametrize("text", ["1M", "4x", "lots", "-1GiB", ""])
def test_sizes_in_tokens_are_no_bytes(text: str) -> None:
    with pytest.raises(SettingsError, match=r"disk.size must be bytes, such as 1TiB or 2e12, not "):
        read_bytes(text, "disk.size")
