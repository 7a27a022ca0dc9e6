"""`frame_namespace`: one string for three, and no two triples that share it."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raydix.schemas import frame_namespace, namespaces_of
from raydix.schemas.namespace import MAX_FIELD_LENGTH

Triple = tuple[str | None, str | None, str | None]
part = st.none() | st.text("-0123:ab\0é", max_size=5) | st.text(max_size=3)
triples = st.tuples(part, part, part)


def test_the_default_namespace_is_none() -> None:
    assert frame_namespace(None, None, None) is None


@pytest.mark.parametrize(
    ("triple", "framed"),
    [
        (("a", None, None), "1:a--"),
        ((None, "lora", None), "-4:lora-"),
        ((None, None, "s"), "--1:s"),
        (("", "", ""), "0:0:0:"),
        (("é", None, None), "1:é--"),
    ],
)
def test_each_part_is_its_presence_its_length_and_its_text(triple: Triple, framed: str) -> None:
    assert frame_namespace(*triple) == framed


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("bc", "a", None), ("c", "ab", None)),
        ((None, "a", None), ("a", None, None)),
        ((None, None, "a"), (None, "a", None)),
        (("", None, None), (None, None, None)),
        (("", None, None), (None, "", None)),
        (("1:a", None, None), ("a", "a", None)),
        (("-", None, None), (None, "-", None)),
        (("a--", None, None), ("a", None, None)),
        (("a1:b", None, None), ("a", "b", None)),
        (("a", "b-", None), ("a", "b", "")),
    ],
)
def test_triples_that_look_alike_differ(one: Triple, other: Triple) -> None:
    assert frame_namespace(*one) != frame_namespace(*other)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(wanted=triples, others=st.lists(triples, max_size=5), named=st.tuples(*[st.booleans()] * 3))
def test_the_namespaces_of_parts_are_those_that_were_made_of_them(
    wanted: Triple, others: list[Triple], named: tuple[bool, ...]
) -> None:
    asked = [part if is_named else None for part, is_named in zip(wanted, named, strict=True)]
    is_meant = namespaces_of(*asked)

    assert is_meant(frame_namespace(*wanted))
    for other in others:
        fits = all(part in (None, its) for part, its in zip(asked, other, strict=True))
        assert is_meant(frame_namespace(*other)) is fits


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(one=triples, other=triples)
def test_two_triples_meet_only_if_they_are_equal(one: Triple, other: Triple) -> None:
    assert (frame_namespace(*one) == frame_namespace(*other)) is (one == other)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text("-01:ab", max_size=9), st.integers(0, 9), st.integers(0, 9))
def test_one_text_cut_in_two_places_makes_two_namespaces(text: str, at: int, there: int) -> None:
    one, other = (text[:at], text[at:], None), (text[:there], text[there:], None)

    assert (frame_namespace(*one) == frame_namespace(*other)) is (one == other)


@pytest.mark.parametrize("wrong", [1, b"a", ["a"], 1.5, True])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_no_string_is_refused_by_name(wrong: Any, place: int) -> None:
    triple: list[Any] = [None, None, None]
    triple[place] = wrong

    with pytest.raises(ValueError, match=("extra_key", "lora_id", "cache_salt")[place]):
        frame_namespace(*triple)


def test_a_part_may_be_so_long_and_no_longer() -> None:
    frame_namespace("x" * MAX_FIELD_LENGTH, None, None)

    with pytest.raises(ValueError, match=r"4097 characters.*digest"):
        frame_namespace("x" * (MAX_FIELD_LENGTH + 1), None, None)


def test_text_that_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(ValueError, match="cache_salt is not valid Unicode"):
        frame_namespace(None, None, "\ud800")
