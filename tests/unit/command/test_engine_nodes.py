"""Pools for an engine lie on this node, on a named one, or on each with a GPU; and only where they fit."""

from __future__ import annotations

import pytest

from raydix.actors.cli.engine_nodes import check_memory, check_no_node_is_named, choose_nodes, name_engines
from raydix.actors.cli.failures import USAGE, CommandError

NODES = {"aaa1": False, "aaa2": True, "bbb1": True}
GIB = 2**30


@pytest.mark.parametrize(
    ("node", "every_gpu_node", "chosen"),
    [(None, False, ["aaa1"]), ("b", False, ["bbb1"]), ("aaa2", False, ["aaa2"]), (None, True, ["aaa2", "bbb1"])],
)
def test_a_cache_is_started_on_this_node_unless_another_is_asked_for(
    node: str | None, every_gpu_node: bool, chosen: list[str]
) -> None:
    assert choose_nodes(node, every_gpu_node, NODES, "aaa1") == chosen


@pytest.mark.parametrize(
    ("node", "nodes", "message"),
    [
        ("c", NODES, r"the id of no node begins with 'c'"),
        ("", NODES, r"the id of no node begins with ''"),
        ("aaa", NODES, r"the id of 2 nodes begins with 'aaa'"),
        (None, {"aaa1": False}, "no node of the cluster has a GPU; nodes: aaa1"),
    ],
)
def test_a_node_that_is_not_there_is_refused(node: str | None, nodes: dict[str, bool], message: str) -> None:
    with pytest.raises(CommandError, match=message) as caught:
        choose_nodes(node, node is None, nodes, "aaa1")

    assert caught.value.exit_code == USAGE


@pytest.mark.parametrize(
    ("running", "names"),
    [
        ({}, ["kv-0", "kv-1"]),
        ({"kv-0": "aaa2", "kv-1": "bbb1"}, ["kv-0", "kv-1"]),
        ({"kv-1": "aaa2"}, ["kv-1", "kv-0"]),  # the node of kv-0 was replaced
        ({"kv-0": "gone", "kv-1": "bbb1"}, ["kv-2", "kv-1"]),
        ({"kv-0": None}, ["kv-1", "kv-2"]),  # it restarts
        ({"kv-0": "bbb1", "kv-3": "bbb1"}, ["kv-1", "kv-0"]),
    ],
)
def test_a_node_keeps_its_cache_and_others_get_free_names(running: dict[str, str | None], names: list[str]) -> None:
    assert name_engines("kv", ["aaa2", "bbb1"], running) == names


def test_pools_that_leave_no_tenth_of_the_memory_are_refused_with_their_sum() -> None:
    check_memory(2, 4 * GIB, "aaa1", 9 * GIB)
    check_memory(0, 4 * GIB, "aaa1", GIB)

    with pytest.raises(CommandError, match=r"2 pools of 4 GiB would need 8 GiB, and node aaa1 has 8.5 GiB free"):
        check_memory(2, 4 * GIB, "aaa1", 8 * GIB + GIB // 2)


@pytest.mark.parametrize(("node", "every"), [("a", False), (None, True)])
def test_no_node_is_named_for_a_pool_on_a_gpu(node: str | None, every: bool) -> None:
    check_no_node_is_named(None, False)

    with pytest.raises(CommandError, match="is for pools in host memory"):
        check_no_node_is_named(node, every)
