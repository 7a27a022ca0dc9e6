"""The nodes of `raydix start --for ENGINE`: where the pools lie in host memory, and whether they fit there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from raydix.actors.cli.failures import USAGE, CommandError
from raydix.schemas.shown import brief, byte_size, counted

SHORT_ID = 8  # characters of a node's id, as tables show it
_LEFT = 0.1  # share of a node's free memory that pools leave to other programs


def check_no_node_is_named(node: str | None, every_gpu_node: bool) -> None:
    """Raise CommandError if a node is named for a pool on a GPU, which Ray places."""
    if node is not None or every_gpu_node:
        option = "--every-gpu-node" if every_gpu_node else "--node"
        raise CommandError(f"{option} is for pools in host memory", "leave out --set pool.device", USAGE)


def choose_nodes(node: str | None, every_gpu_node: bool, nodes: Mapping[str, bool], here: str) -> list[str]:
    """Return the ids of the nodes of the caches.

    Args:
        node: the first characters of a node's id; None: this node.
        every_gpu_node: all nodes with a GPU.
        nodes: the ids of the cluster's nodes, each with whether it has a GPU.
        here: the id of this node.

    Raises:
        CommandError: there is no such node.
    """
    listed = ", ".join(node_id[:SHORT_ID] for node_id in nodes)
    if every_gpu_node:
        if not (with_gpus := [node_id for node_id, has_gpu in nodes.items() if has_gpu]):
            raise CommandError(f"no node of the cluster has a GPU; nodes: {listed}", "--node ID", USAGE)
        return with_gpus
    if node is None:
        return [here]
    found = [node_id for node_id in nodes if node and node_id.startswith(node)]
    if len(found) != 1:
        number = "no node" if not found else counted(len(found), "node")
        raise CommandError(f"--node: the id of {number} begins with {brief(node)}", f"one of {listed}", USAGE)
    return found


def name_engines(name: str, nodes: Sequence[str], running: Mapping[str, str | None]) -> list[str]:
    """Return the name of the cache of each node: of the one that runs there, or else a free one: NAME-0, NAME-1, ...

    So a second start after a node was replaced starts the missing cache alone.

    Args:
        nodes: ids of nodes.
        running: name of a cache without its rank -> id of its node; None: it is not known.
    """
    there = {node_id: engine for engine, node_id in reversed(list(running.items())) if node_id is not None}
    free = (engine for number in count() if (engine := f"{name}-{number}") not in running)
    return [there.get(node_id) or next(free) for node_id in nodes]


def check_memory(num_pools: int, num_bytes: int, node_id: str, free: int) -> None:
    """Check that pools fit in the free memory of a node, less a tenth for other programs.

    Args:
        num_bytes: bytes of one pool.
        free: bytes.

    Raises:
        CommandError: they do not; the message names their sum, and the free memory.
    """
    needed = num_pools * num_bytes
    if needed > (1 - _LEFT) * free:
        raise CommandError(
            f"{counted(num_pools, 'pool')} of {byte_size(num_bytes)} would need {byte_size(needed)}, and node "
            f"{node_id[:SHORT_ID]} has {byte_size(free)} free, a tenth of which is left to other programs",
            "a smaller --capacity, which is the size of the pool of one rank",
        )
