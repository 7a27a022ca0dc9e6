"""The chained hashes of a node's pages, computed when they are asked for."""

from __future__ import annotations

from itertools import chain

from raydix.cache_core.tree.hashing import hash_page, namespace_seed
from raydix.cache_core.tree.tree_node import TreeNode


def chain_hashes(node: TreeNode, page_size: int) -> list[str]:
    """The hex digest of each page of `node`, chained from the root; kept on it and on its ancestors.

    Independent of the order in which nodes are hashed, and unchanged by splits. Costs SHA-256 of the nodes without
    hashes, from the root down.
    """
    chain: list[TreeNode] = []
    while node.data and node.hash_values is None:
        chain.append(node)
        assert node.parent is not None
        node = node.parent
    if not chain:
        return node.hash_values or []
    namespace = chain[0].namespace
    prior = bytes.fromhex(node.hash_values[-1]) if node.hash_values else namespace_seed(namespace.extra_key)
    page = page_size * namespace.unit
    for below in reversed(chain):
        hashes: list[str] = []
        for at in range(0, len(below.data), page):
            prior = hash_page(below.data[at : at + page], namespace.width, namespace.arity, prior)
            hashes.append(prior.hex())
        below.hash_values = hashes
    return chain[0].hash_values or []


def path_hashes(node: TreeNode, page_size: int, first: int, stop: int) -> list[str]:
    """The hex digests of pages [first, stop) on the path to `node`. O(pages), if they are kept."""
    parts: list[list[str]] = []
    while node.data and node.end > first * page_size:
        begin = (node.end - len(node)) // page_size
        parts.append(chain_hashes(node, page_size)[max(0, first - begin) : max(0, stop - begin)])
        assert node.parent is not None
        node = node.parent
    return list(chain.from_iterable(reversed(parts)))
