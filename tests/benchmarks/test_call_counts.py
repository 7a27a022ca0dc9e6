"""A request makes no more calls than before: the ceilings are a tenth above the present numbers, a few calls at
most."""

from __future__ import annotations

import pytest
from benchmarks.call_counts import of_core, of_service
from benchmarks.core_workloads import WORKLOADS

from raydix.cache_core.kernels import COMPILED

LOCKS = {"inc_lock_ref": 5.0, "dec_lock_ref": 3.3}
MAX_CORE = {
    ("chat", 1): {"match_prefix": 11.5, "insert": 18.7},
    ("chat", 16): {"match_prefix": 11.5, "insert": 18.7},
    ("short", 1): {"match_prefix": 10.0, "insert": 17.6},
    ("short", 16): {"match_prefix": 10.0, "insert": 17.6},
    ("pressed", 1): {"match_prefix": 10.0, "insert": 17.6, "evict": 15.0},
    ("pressed", 16): {"match_prefix": 10.0, "insert": 17.6, "evict": 15.0},
    ("chains", 1): {"match_prefix": 14.5, "insert": 17.6},
    ("chains", 16): {"match_prefix": 11.5, "insert": 17.6},
}
MAX_SERVICE = {"acquire": 79.0, "insert": 66.0, "release": 41.0}


@pytest.mark.skipif(not COMPILED, reason="the ceilings are those of compiled kernels")
@pytest.mark.parametrize(("name", "page_size"), MAX_CORE)
def test_each_verb_of_the_core_makes_no_more_calls_than_it_did(name: str, page_size: int) -> None:
    counts = of_core(WORKLOADS[name](0.02), page_size)

    print(f"\n{name}, pages of {page_size}:", ", ".join(f"{verb} {calls:.1f}" for verb, calls in counts.items()))
    ceilings = LOCKS | MAX_CORE[name, page_size]
    assert counts.keys() == ceilings.keys()
    assert {verb: calls for verb, calls in counts.items() if calls > ceilings[verb]} == {}


async def test_each_verb_of_the_service_makes_no_more_calls_than_it_did() -> None:
    counts = await of_service(50)

    print("\nin process:", ", ".join(f"{verb} {calls:.1f}" for verb, calls in counts.items()))
    assert counts.keys() == MAX_SERVICE.keys()
    assert {verb: calls for verb, calls in counts.items() if calls > MAX_SERVICE[verb]} == {}
