"""Compiled and interpreted kernels give the same results where C integers and Python integers could differ."""

from __future__ import annotations

import pytest
from support.processes.fresh_process import run_fresh

IDS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**100, -1, -(2**31), -(2**63)]
ROWS = [
    "[{}]",
    "[3, {}, 3]",
    "[({}, 1)]",
    "({}, 1)",
    "np.array([3, {}])",
    "np.array([{}], np.int32)",
    "array('Q', [{}])",
]
COUNTS = [
    "0", "1", "3", "2**31", "2**61", "2**62", "2**63 - 1", "-1", "-2**31", "-2**63", "True", "'1'", "None",
    "np.int64(2)", "np.int64(-2)",
]  # fmt: skip
BEYOND_64_BITS = ["2**63", "2**64", "2**100", "-2**63 - 1", "-2**64", "np.uint64(2**64 - 1)"]
CALLS = [
    "tree().evict({})",
    "tree().match_pages(KEY, {})",
    "tree().match_pages(KEY, None, {})",
    "tree().insert(KEY, None, prev_prefix_len={})",
    "tree().insert(KEY, None, priority={})",
    "tree({}).insert(KEY)",
    "tree().reclaim_retired({})",
    "pool().alloc({})",
    "pool().alloc_pages({})",
    "pool().free(torch.tensor([2, {}]))",
]
KERNEL_CALLS = [
    "int(RadixKey.from_packed(bytes(16), {}).num_tokens)",
    "int(RadixKey.from_packed(bytes(16), 4, None, {}).num_tokens)",
    "walked(tree(), {})",
    "kernels.is_row(torch.arange(4), {})",
    "kernels.pack_slots(torch.arange(4), {}, 0, 4)",
    "kernels.pack_slots(torch.arange(4), 1, {}, 4)",
    "kernels.pack_slots(torch.arange(4), 1, 0, {})",
    "kernels.expand([bytes(8)], {}, 2)",
    "kernels.expand([bytes(8)], 2, {})",
    "sorted(page_index().longest_runs(np.array([7, 8]), {}))",
    "page_index().longest_runs(np.array([7, 8]), 2, {})",
    "page_index().longest_runs(np.array([7, 8]), 1, 0, [2, {}])",
    "page_index().longest_runs(np.array([7, 8]), 1, 0, (), np.array([7, 8]), {})",
    "page_index().holders({})",
    "kernels.PageMemory(2, 4).sum_of(bytes(16), 4, 4, {}, 1, 2)",
    "kernels.PageMemory(2, 4).recall(bytes(16), 4, 4, 0, 1, 2, {}, 16)",
    "kernels.HashMemory({}).num_bytes",
    "noted({})",
    "page_index().apply(1, 'e', {}, bytes(2), np.array([1, 1], np.int32), np.array([8, 9]))",
    "page_index().apply_snapshot(1, 'e', {}, np.array([8, 9]))",
]
SLOTS = [0, 2**31 - 2, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 2, -1, -(2**31), -(2**63)]
PROGRAM = """
import sys
from array import array
from random import Random
import numpy as np
import torch
from raydix.cache_core import PageIndex, RadixCache, RadixKey, TokenToKVPoolAllocator, kernels

KEY = RadixKey([1, 2, 3, 5])

def tree(page_size=1):
    cache = RadixCache(page_size)
    cache.insert(RadixKey([1, 2, 3, 4]))
    return cache

def pool():
    allocator = TokenToKVPoolAllocator(8, 2)
    allocator.alloc(4)
    return allocator

def page_index():
    index = PageIndex()
    for column in range(4):
        index.add_column()
        ends = np.array([8]) if column == 3 else None
        index.apply_snapshot(column, "e", 0, np.array([7, 8][:column]), np.array([8]), ends)
    return index

def looked_up(page):
    index = page_index()
    index.apply(1, "e", 1, b"\\0", np.array([3], np.int32), np.array([page, 5, -page - 1]))
    index.drop_column(2)
    return index.prefix_runs(np.array([page, -page - 1, 7])), index.holders(page), sorted(index.pages(1)[0])

def packed(ids):
    key = RadixKey(ids)
    return key.data, key.width, key.arity, key.token_ids

def walked(cache, num_tokens):
    (top,) = cache.parts.tree.tops.values()
    return [int(number) for number in kernels.walk(top, KEY, 1, num_tokens)[1:]]

def matched(ids):
    cache = tree(2)
    cache.insert(RadixKey([1, 2, *ids, 7]))
    return [cache.match_prefix(RadixKey([1, 2, *ids, last])).prefix_len for last in (7, 8)], cache.total_size()

def two_queues(seed):
    random, pool = Random(seed), TokenToKVPoolAllocator(64, 2)
    cache = RadixCache(2, None, pool, eviction_policy="2q")
    hits = []
    for _ in range(150):
        key = RadixKey([random.choice([1, 2, 2**33]) for _ in range(2 * random.randrange(1, 9))])
        found = cache.match_prefix(key)
        cache.inc_lock_ref(found.last_node)
        new = len(key) - found.prefix_len
        cache.evict(max(0, new - pool.available_size()))
        cache.insert(key, torch.cat([found.indices, pool.alloc(new)]), prev_prefix_len=found.prefix_len)
        cache.dec_lock_ref(found.last_node)
        hits.append(found.prefix_len)
    queues = cache.parts.two_queues
    return hits, queues.num_protected, queues.memory.num_pages

def noted(salt):
    memory, hashes = kernels.HashMemory(50), np.random.default_rng(1).integers(-70, 70, 200)
    known = bytearray(200)
    for part in range(0, 200, 8):
        memory.count(memoryview(hashes[part:part + 8]), salt, memoryview(known)[part:part + 8])
    return bytes(known), memory.num_hashes

def adopted(first, page_size):
    cache = RadixCache(page_size)
    cache.insert(KEY, torch.arange(4) // 2 + first)
    return cache.match_prefix(RadixKey([1, 2, 3, 4])).indices, cache.match_prefix(KEY).indices

for call in sys.stdin.read().splitlines():
    try:
        result = repr(eval(call))
    except OverflowError:  # compiled, of a number beyond 64 bits
        result = "ValueError"
    except Exception as error:
        result = type(error).__name__
    print(call, "->", *result.split())
print(kernels.CORE)
"""


def calls() -> list[str]:
    """Return all calls to compare."""
    rows = [row.format(each) for row in ROWS for each in IDS]
    return [
        *(f"packed({row})" for row in rows),
        *(f"matched([{each}])" for each in IDS),
        *(f"two_queues({seed})" for seed in range(3)),
        *(f"looked_up({each})" for each in IDS if -(2**63) <= each < 2**63),
        *(f"adopted({each}, {page_size})" for each in SLOTS for page_size in (1, 2)),
        *(call.format(each) for call in CALLS for each in (*COUNTS, *BEYOND_64_BITS, "1.0", "1.5")),
        *(call.format(each) for call in KERNEL_CALLS for each in COUNTS),
    ]


def results(plain: str) -> list[str]:
    """Return the result of each call, then the form of the kernels."""
    done = run_fresh(PROGRAM, stdin="\n".join(calls()), RAYDIX_PLAIN=plain)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_both_forms_give_the_same_results() -> None:
    *compiled, form = results("0")
    *interpreted, other = results("1")
    if form != "compiled":
        pytest.skip("the kernels were not compiled: `make venv` with a C compiler")

    assert other == "interpreted"
    assert len(compiled) == len(calls())
    assert [pair for pair in zip(compiled, interpreted, strict=True) if pair[0] != pair[1]] == []
    assert (
        "packed([18446744073709551615]) -> (b'\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff', 8, 0, [18446744073709551615])"
        in compiled
    )
    assert "packed([18446744073709551616]) -> InvalidKeyError" in compiled
