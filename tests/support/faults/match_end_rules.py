"""The places where a match may end, checked node by node from the root; components search from the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from raydix.cache_core.components.window_kv import WindowKV

Judge = Callable[[Any, int], bool]  # of a node and how many of its tokens match: whether a match may end there


def window_judge(swa: WindowKV) -> Judge:
    """The tokens since the last hole are at least a window, or all."""
    live = inf

    def may_end(node: Any, length: int) -> bool:
        nonlocal live
        live = 0 if node.swa_tombstone else live + length
        return live >= swa.window

    return may_end


def state_judge(mamba: Any) -> Judge:
    """A whole node has a state at its end."""
    return lambda node, length: length == len(node) and node.mamba_value is not None


def judge_of(component: Any) -> Judge:
    """That of a component of either kind."""
    return window_judge(component) if isinstance(component, WindowKV) else state_judge(component)


def joint_judge(components: Sequence[Any]) -> Judge:
    """All of them let it end there; each sees every node."""
    judges = [judge_of(component) for component in components]
    return lambda node, length: all([judge(node, length) for judge in judges])  # noqa: C419 -- no judge is passed over


def judged(make: Callable[[Any], Judge]) -> Callable[[Any, Sequence[Any], int, int], int]:
    """`usable` of a component, by its judge."""

    def usable(component: Any, path: Sequence[Any], end: int, count: int) -> int:
        may_end, found, start = make(component), 0, 0
        for number, node in enumerate(path[:count], 1):
            stop = min(node.end, end)
            found = number if may_end(node, stop - start) else found
            start = stop
        return found

    return usable
