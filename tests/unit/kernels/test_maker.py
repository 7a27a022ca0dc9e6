"""Makers make what the constructors of dataclasses with slots would, and refuse what has none."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from raydix.cache_core import EvictResult, InsertResult, MatchResult, kernels
from raydix.cache_core.base_prefix_cache import NO_SLOTS
from raydix.cache_core.kernels import plain_kernels

compiled = pytest.mark.skipif(not kernels.COMPILED, reason="the kernels were not compiled: no compiler was at hand")
TWINS = [pytest.param(kernels, marks=compiled), plain_kernels]


@dataclass(slots=True, weakref_slot=True)
class Base:
    zebra: Any
    apple: Any = 7


@dataclass(slots=True)
class Heir(Base):
    mango: Any = None


@dataclass
class Loose:
    apple: int


class Pair(NamedTuple):
    apple: int


class Thief:
    """It claims as its own a slot of another class."""

    __match_args__ = ("zebra",)
    zebra = Base.zebra


@pytest.mark.parametrize("kernel", TWINS)
@pytest.mark.parametrize(
    ("made", "values"),
    [
        (Base, ("z", "a")),
        (Heir, ("z", "a", "m")),
        (MatchResult, (NO_SLOTS, None, 16, None, 32)),
        (InsertResult, (3, None, False, NO_SLOTS)),
        (EvictResult, (1, 2, 3)),
    ],
)
def test_what_is_made_is_what_a_constructor_makes(
    kernel: Any, made: Callable[..., Any], values: tuple[Any, ...]
) -> None:
    one, other = kernel.maker(made)(*values), made(*values)

    assert type(one) is made
    assert one == other
    assert repr(one) == repr(other)


@compiled
@pytest.mark.parametrize("made", [Loose, Pair, Thief, object, int, 7, None, kernels.Victims])
def test_what_has_no_slots_is_refused(made: Any) -> None:
    with pytest.raises((TypeError, AttributeError)):
        kernels.maker(made)


@compiled
def test_every_field_is_given_in_its_place() -> None:
    make = kernels.maker(Base)

    for call in (lambda: make(1), lambda: make(1, 2, 3), lambda: make(1, apple=2)):
        with pytest.raises(TypeError, match="Base"):
            call()


@compiled
def test_nothing_is_kept_alive() -> None:
    value = object()
    made = Base(value, value)
    watched, before = weakref.ref(made), sys.getrefcount(value)
    made = kernels.maker(Base)(made, value)
    assert sys.getrefcount(value) == before + 1
    made.apple = made  # it holds itself
    del made
    gc.collect()

    assert watched() is None
    assert sys.getrefcount(value) == before - 2
