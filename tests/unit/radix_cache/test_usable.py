"""How far a match may go along a path: looked for from its end, as far as when each node is judged from the top."""

from __future__ import annotations

from itertools import count
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.faults.match_end_rules import joint_judge, judge_of, judged

from raydix.cache_core import MambaRadixCache
from raydix.cache_core.components.mamba_tree_node import MambaTreeNode
from raydix.cache_core.components.recurrent_state import RecurrentState
from raydix.cache_core.components.window_kv import WindowKV
from raydix.cache_core.radix.lookup import usable
from raydix.cache_core.tree.tree_node import Namespace

NODES = st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.booleans()), max_size=12)


def path_of(kinds: list[tuple[int, bool, bool]]) -> list[Any]:
    """Nodes below each other: how long each is, whether it is a tombstone, whether it has a state."""
    namespace, ids = Namespace(None, 0, 4, 4), count()
    node = MambaTreeNode(next(ids), None, namespace, b"", b"", 0, 0)
    path = []
    for length, is_tombstone, has_state in kinds:
        node = MambaTreeNode(next(ids), node, namespace, bytes(4 * length), b"", node.end + length, 0)
        node.swa_tombstone, node.mamba_value = is_tombstone, 7 if has_state else None
        path.append(node)
    return path


@st.composite
def walks(draw: st.DrawFn) -> tuple[list[Any], int]:
    """The nodes that a key goes through, and up to where in the last of them."""
    path = path_of(draw(NODES))
    return path, draw(st.integers(path[-1].parent.end + 1, path[-1].end)) if path else 0


@given(walks(), st.integers(1, 20), st.data())
def test_each_component_finds_what_its_judge_does(
    walk: tuple[list[Any], int], window: int, data: st.DataObject
) -> None:
    path, end = walk
    limit = data.draw(st.integers(0, len(path)))
    for component in (WindowKV(window, 1), RecurrentState(None)):
        assert component.usable(path, end, limit) == judged(judge_of)(component, path, end, limit)


@given(walks(), st.integers(1, 20))
def test_a_match_ends_where_all_components_let_it(walk: tuple[list[Any], int], window: int) -> None:
    path, end = walk
    cache = MambaRadixCache(1, sliding_window_size=window)
    found = judged(joint_judge)(cache.parts.components, path, end, len(path))

    nodes, stop = usable(cache.parts, path, end)

    assert nodes == path[:found]
    assert stop == (min(path[found - 1].end, end) if found else 0)
