"""The chained digests of pages, compiled and interpreted, are those of hashlib."""

from __future__ import annotations

import hashlib
from random import Random
from typing import Any

import numpy as np
import pytest
from support.processes.fresh_process import run_fresh

from raydix.cache_core.kernels import chain_pages


def by_hashlib(ids: bytes, page_bytes: int, tail: bytes, prior: bytes, skipped: int, stride: int) -> list[int]:
    found = []
    for at in range(0, len(ids), page_bytes):
        prior = hashlib.sha256(prior + ids[at : at + page_bytes] + tail).digest()
        found.append(int.from_bytes(prior[:8], "big", signed=True))
    return found[skipped::stride]


def test_pages_of_every_size_have_the_digests_of_hashlib() -> None:
    rng = Random(1)
    for page_bytes in range(1, 200):  # one to four blocks of SHA-256, with every length of the rest
        for prior in (b"", rng.randbytes(32)):
            ids, tail = rng.randbytes(5 * page_bytes), rng.randbytes(page_bytes % 3)
            call = ids, page_bytes, tail, prior, page_bytes % 4, 1 + page_bytes % 2
            found = chain_pages(*call)
            assert found.dtype == np.int64
            assert found.tolist() == by_hashlib(*call), call[1:]


def test_zeros_and_ones_and_long_chains() -> None:
    for byte in (b"\0", b"\xff"):
        assert chain_pages(byte * 64_000, 64, b"", b"", 999, 1).tolist() == by_hashlib(
            byte * 64_000, 64, b"", b"", 999, 1
        )
        assert chain_pages(byte * 8192, 8192, b"", byte * 32, 0, 1).tolist() == by_hashlib(
            byte * 8192, 8192, b"", byte * 32, 0, 1
        )
    assert chain_pages(b"", 64, b"", b"", 0, 1).tolist() == chain_pages(bytes(64), 64, b"", b"", 1, 1).tolist() == []


@pytest.mark.parametrize(
    "call",
    [
        (bytes(65), 64, b"", b"", 0, 1),
        (bytes(64), 0, b"", b"", 0, 1),
        (bytes(64), -64, b"", b"", 0, 1),
        (bytes(64), 64, b"", bytes(31), 0, 1),
        (bytes(64), 64, b"", b"", -1, 1),
        (bytes(64), 64, b"", b"", 0, 0),
    ],
)
def test_what_is_no_page_is_refused(call: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="ids must be whole pages"):
        chain_pages(*call)


def test_the_interpreted_form_gives_the_same() -> None:
    call = "k.chain_pages(bytes(range(200)), 8, b'ab', b'', 3, 2)"

    done = run_fresh(f"from raydix.cache_core import kernels as k; print(k.CORE, *{call})", RAYDIX_PLAIN="1")

    form, *found = done.stdout.split()
    assert (form, list(map(int, found))) == ("interpreted", by_hashlib(bytes(range(200)), 8, b"ab", b"", 3, 2))
