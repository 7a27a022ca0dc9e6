"""Small objects lie where they are asked to lie, and their memory is given back as before."""

import json
import sys
from pathlib import Path

import pytest
from support.processes.fresh_process import run_fresh

from raydix.cache_core import kernels
from raydix.cache_core.kernels import plain_kernels

PROGRAM = """
import gc, json
from pathlib import Path
from support.traffic.radix import run_random_traffic
from raydix.cache_core import RadixCache, RadixKey, use_huge_pages

def resident():  # but for the pages of files, which the kernel takes back where memory is short
    return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

def advised():
    mappings = Path("/proc/self/smaps").read_text().split("VmFlags:")
    return any("hg" in flags.split("\\n")[0].split() for flags in mappings[1:])

def cache_of(count):
    cache = RadixCache()
    for number in range(count):
        cache.insert(RadixKey([number, number]))
    return cache

older = cache_of(20_000)
found = {"advised_before": advised(), "asked": [use_huge_pages(), use_huge_pages()]}
before = resident()
newer = cache_of(100_000)
found["advised"], found["taken"] = advised(), resident() - before
found["tokens"] = [newer.match_prefix(RadixKey([7, 7])).prefix_len, older.match_prefix(RadixKey([7, 7])).prefix_len]
newer.reset()
del newer, older
gc.collect()
found["left"] = resident() - before
again = cache_of(100_000)
found["taken_again"] = resident() - before
run_random_traffic(1, 4, num_operations=500)
print(json.dumps(found))
"""


@pytest.mark.skipif(
    not (kernels.COMPILED and sys.platform == "linux"), reason="they are asked for by compiled code, on Linux"
)
def test_small_objects_lie_in_huge_pages_that_are_given_back() -> None:
    done = run_fresh(PROGRAM)

    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert found["asked"] == [True, True]
    assert found["tokens"] == [2, 2]
    assert found["taken"] > 20 * 2**20  # bytes
    assert found["left"] < found["taken"] / 2
    assert found["taken_again"] < 1.3 * found["taken"]
    if "never" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().split("[")[1]:
        assert (found["advised_before"], found["advised"]) == (False, True)


def test_plain_python_asks_for_none() -> None:
    assert plain_kernels.use_huge_pages() is False
