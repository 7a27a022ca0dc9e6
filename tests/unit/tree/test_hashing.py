"""Page hashes: their exact bytes, their chain, and that no encoding or namespace can be mistaken for another."""

import hashlib
import struct
from itertools import product
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raydix.cache_core import InvalidKeyError, hash_bytes, hash_to_int64, hash_token_ids
from raydix.cache_core.tree.hashing import hash_pages, namespace_seed

WIDE = 2**32


def sha(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def test_a_page_is_hashed_as_little_endian_32_bit_integers() -> None:
    assert hash_token_ids([1, 2, 258]) == sha(bytes([1, 0, 0, 0, 2, 0, 0, 0, 2, 1, 0, 0]))
    assert hash_token_ids([2**32 - 1]) == sha(b"\xff\xff\xff\xff")
    assert hash_token_ids([]) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_the_prior_digest_goes_first_as_raw_bytes() -> None:
    first = hash_token_ids([1, 2])

    assert hash_token_ids([3, 4], first) == sha(bytes.fromhex(first), struct.pack("<2I", 3, 4))


def test_equal_pages_at_different_places_differ() -> None:
    first = hash_token_ids([7, 7])
    second = hash_token_ids([7, 7], first)
    third = hash_token_ids([7, 7], second)

    assert len({first, second, third}) == 3


def test_a_chain_tells_where_the_pages_were_cut_only_by_its_digests() -> None:
    assert hash_token_ids([2, 3], hash_token_ids([1])) != hash_token_ids([3], hash_token_ids([1, 2]))


@pytest.mark.parametrize(
    ("width", "arity", "tail"), [(4, 0, b""), (4, 2, b"\4\2"), (8, 0, b"\x08\0"), (8, 3, b"\x08\3")]
)
def test_a_row_of_pages_has_the_chained_digests_of_hashlib(width: int, arity: int, tail: bytes) -> None:
    rng = Random(1)
    for num_tokens in range(1, 50):
        page_bytes = num_tokens * width * max(arity, 1)
        for prior in (None, rng.randbytes(32)):
            ids, skipped, stride = rng.randbytes(5 * page_bytes), num_tokens % 4, 1 + num_tokens % 2
            last, expected = prior or b"", []
            for at in range(0, len(ids), page_bytes):
                last = hashlib.sha256(last + ids[at : at + page_bytes] + tail).digest()
                expected.append(hash_to_int64(last.hex()))
            found = hash_pages(ids, page_bytes, width, arity, prior, skipped=skipped, stride=stride)
            assert (found.dtype, found.tolist()) == (np.int64, expected[skipped::stride]), (num_tokens, prior)


def test_a_row_of_no_pages_has_no_digests() -> None:
    assert hash_pages(b"", 64, 4, 0, None, skipped=0, stride=1).tolist() == []
    assert hash_pages(bytes(64), 64, 4, 0, None, skipped=1, stride=1).tolist() == []


def test_a_wide_page_is_tagged_and_has_8_bytes_an_id() -> None:
    assert hash_token_ids([1, WIDE]) == sha(struct.pack("<2Q", 1, WIDE), b"\x08\x00")


def test_tuples_are_tagged_with_their_length_and_hash_each_element_in_order() -> None:
    assert hash_token_ids([(1, 2), (2, 3)]) == sha(struct.pack("<4I", 1, 2, 2, 3), b"\x04\x02")
    assert hash_token_ids([(1, WIDE)]) == sha(struct.pack("<2Q", 1, WIDE), b"\x08\x02")


def test_a_wide_id_differs_from_the_two_narrow_ones_of_the_same_bytes() -> None:
    assert hash_token_ids([WIDE + 5]) != hash_token_ids([5, 1])


def test_tuples_differ_from_plain_ids_and_from_tuples_of_another_length() -> None:
    hashes = {
        hash_token_ids(page) for page in ([1, 2, 3, 4], [(1, 2), (3, 4)], [(1, 2, 3, 4)], [(1,), (2,), (3,), (4,)])
    }

    assert len(hashes) == 4


def test_no_page_can_spell_a_digest_and_the_page_after_it() -> None:
    seed = namespace_seed("104288")
    assert seed is not None and seed[:2] == b"\x04\x0a"  # as the tag of tuples of ten narrow ids
    tag_and_page = b"\x08\x00" + struct.pack("<Q", WIDE)
    in_front = struct.unpack("<10I", seed[2:] + tag_and_page)  # a forgery that tags in front would allow
    behind = struct.unpack("<10I", (seed + struct.pack("<Q", WIDE)))

    assert hash_token_ids([WIDE], seed.hex()) not in (hash_token_ids([in_front]), hash_token_ids([behind]))


@pytest.mark.parametrize("page", [[-1], [0.5], [2**64], ["1"]])
def test_what_is_no_id_is_not_hashed(page: list[int]) -> None:
    with pytest.raises(InvalidKeyError):
        hash_token_ids(page)


def test_a_prior_hash_that_is_not_hexadecimal_is_refused() -> None:
    with pytest.raises(ValueError, match="hexadecimal"):
        hash_token_ids([1], "xyz")


def test_the_default_namespace_has_no_seed() -> None:
    assert namespace_seed(None) is None


def test_the_seed_of_a_namespace_is_the_digest_of_an_odd_number_of_bytes() -> None:
    assert namespace_seed("") == bytes.fromhex(sha(b"namespace:\0"))
    assert namespace_seed("a") == bytes.fromhex(sha(b"namespace:a\1\1"))
    assert namespace_seed("ab") == bytes.fromhex(sha(b"namespace:ab\0"))


def test_no_page_can_forge_the_seed_of_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []

    class Recorder:
        def __init__(self, data: bytes = b"") -> None:
            self.data = data

        def digest(self) -> bytes:
            hashed.append(self.data)
            return hashlib.blake2s(self.data).digest()

    monkeypatch.setattr("raydix.cache_core.tree.hashing.hashlib", SimpleNamespace(sha256=Recorder))
    for page, prior in product(([], [1], [1, 2, 3], [WIDE], [(1, 2)], [(1, 2, WIDE)]), (None, "00" * 32)):
        hash_token_ids(page, prior)
    pages, hashed = hashed, []
    for name in ("", "a", "ab", "abc", "\u00e9"):
        namespace_seed(name)

    assert [len(each) % 2 for each in pages] == [0] * 12
    assert [len(each) % 2 for each in hashed] == [1] * 5


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.text("\0\1a", max_size=4) | st.text(max_size=3), min_size=2, max_size=8, unique=True))
def test_different_namespaces_have_different_seeds(names: list[str]) -> None:
    assert len(set(map(namespace_seed, names))) == len(names)


@pytest.mark.parametrize(("one", "other"), [("a\0", "a\0\0"), ("a", "a\1\1"), ("a", "a\1\1\0"), ("", "\0")])
def test_names_that_differ_in_what_pads_them_have_seeds_of_their_own(one: str, other: str) -> None:
    assert namespace_seed(one) != namespace_seed(other)


def test_a_namespace_of_lone_surrogates_has_a_seed() -> None:
    assert namespace_seed("\ud800") != namespace_seed("\ud801")


def test_events_carry_the_first_16_hex_characters_as_a_signed_integer() -> None:
    assert hash_to_int64("0000000000000001" + "f" * 48) == 1
    assert hash_to_int64("7fffffffffffffff" + "0" * 48) == 2**63 - 1
    assert hash_to_int64("8000000000000000" + "0" * 48) == -(2**63)
    assert hash_to_int64("f" * 64) == -1


def test_hash_bytes_is_the_head_of_the_sha_256_as_an_unsigned_integer() -> None:
    assert hash_bytes(b"") == 0xE3B0C44298FC1C14
    assert hash_bytes(b"image") == int(sha(b"image")[:16], 16)
    assert 0 <= hash_bytes(b"image") < 2**64
