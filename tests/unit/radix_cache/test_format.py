"""The text form of a tree: one line per node, with all values that decide its use and eviction."""

import pytest

from raydix.cache_core import MambaRadixCache, RadixKey


def test_a_line_tells_what_a_node_holds_and_who_holds_it(capsys: pytest.CaptureFixture[str]) -> None:
    cache = MambaRadixCache(2, sliding_window_size=4)
    cache.insert(RadixKey(range(14)), mamba_value=3)
    cache.insert(RadixKey([0, 1, 2, 3, 9, 9]), mamba_value=4, priority=3)
    held = cache.match_prefix(RadixKey([0, 1, 2, 3, 9, 9])).last_node
    receipt = cache.inc_lock_ref(held)
    cache.evict(0, 2)

    cache.pretty_print()

    assert capsys.readouterr().out.splitlines() == [
        "namespace None",
        "  [0 1 2 3] len=4 slots=[0 1 2 3] locked x1 window x1 hits=1 age=0 priority=3 #4",
        "    [4 5 6 7] len=4 slots=[4 5 6 7] hits=0 age=4 tombstone #2",
        "      [8 9 10 11 12 13] len=6 slots=[8 9 10 11 12 13] hits=0 age=4 state=3 #3",
        "    [9 9] len=2 slots=[9 9] locked x1 window x1 hits=1 age=0 priority=3 state=4 #5",
    ]
    cache.dec_lock_ref(held, receipt)
