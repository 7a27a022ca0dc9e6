"""A request makes no more calls than before: the ceilings are a tenth above the present numbers, a few calls at
most."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.call_counts import of_core, of_service
from benchmarks.core_workloads import WORKLOADS

from raydix.cache_core.kernels import COMPILED

pytestmark = pytest.mark.skipif(not COMPILED, reason="the ceilings are those of compiled kernels")
MAX_CORE = {"match_prefix": 7.6, "inc_lock_ref": 2.2, "insert": 13.4, "dec_lock_ref": 2.2, "evict": 12.0}
MAX_SERVICE = {"acquire": 75.0, "insert": 59.0, "release": 41.0}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", ["chat", "short", "pressed", "chains"])
def test_each_verb_of_the_core_makes_no_more_calls_than_it_did(name: str, page_size: int) -> None:
    counts = of_core(WORKLOADS[name](0.02), page_size)

    print(f"\n{name}, pages of {page_size}:", ", ".join(f"{verb} {calls:.1f}" for verb, calls in counts.items()))
    assert counts.keys() == MAX_CORE.keys() - ({"evict"} if name != "pressed" else set())
    assert {verb: calls for verb, calls in counts.items() if calls > MAX_CORE[verb]} == {}


async def test_each_verb_of_the_service_makes_no_more_calls_than_it_did() -> None:
    counts = await of_service(50)

    print("\nin process:", ", ".join(f"{verb} {calls:.1f}" for verb, calls in counts.items()))
    assert counts.keys() == MAX_SERVICE.keys()
    assert {verb: calls for verb, calls in counts.items() if calls > MAX_SERVICE[verb]} == {}


def test_a_load_from_the_disk_makes_no_more_calls_than_it_did() -> None:
    """On the interpreted core, in a process of its own; the files are those that the loop's thread passes."""
    environ = os.environ | {"RAYDIX_PLAIN": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.call_counts"], env=environ, capture_output=True, check=True, timeout=300
    )
    load = json.loads(done.stdout)

    print(f"\n{load['calls']} calls, {len(load['files'])} files:", *load["files"], sep="\n")
    assert load["calls"] <= 400 and len(load["files"]) < 58
    assert load["look_ups"] == {"disk": 1} and load["slices"] == 0
