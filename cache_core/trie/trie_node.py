"""`TrieNode`: a node of `RadixTrie`; its tokens as plain lists, and the walk along them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NoReturn

import numpy as np
import torch

from raydix.cache_core.errors import InvalidKeyError
from raydix.cache_core.outline import walk_down

Page = tuple[Hashable, ...]  # the tokens of one page

_KEPT_TYPES = {int, str, bytes, tuple}  # the types of most tokens and blocks


class TrieNode:
    """Whole pages of tokens below a parent, with one block per page.

    As long as it is in the trie, a node stands for the end of one prefix: all tokens from the root through its last
    token. So a split gives the first tokens to a new node above. A node that loses its last tokens is replaced by a
    new node, which holds the others. Read the attributes, never write them.
    """

    __slots__ = ("blocks", "children", "last_access_time", "parent", "root", "tokens", "users")

    def __init__(
        self, parent: TrieNode | None, tokens: list[Hashable], blocks: list[Any], last_access_time: int
    ) -> None:
        self.parent = parent  # None for a root, and after eviction
        self.root: TrieNode | None = self if parent is None else parent.root  # None after eviction
        self.tokens = tokens
        self.blocks = blocks
        self.children: dict[Page, TrieNode] = {}  # first page -> child
        self.users: dict[Hashable, int] = {}  # sequence that uses this node -> number of children that it uses
        self.last_access_time = last_access_time  # tick of the trie's own clock

    def first_page(self, page_size: int) -> Page:
        """Return the key of this node in its parent's `children`."""
        return tuple(self.tokens[:page_size])

    def __reduce__(self) -> NoReturn:
        """Raise TypeError: a copy of a node would be a copy of its whole trie, deeper than recursion goes."""
        raise TypeError(f"cannot pickle {type(self).__name__!r} object")

    def __repr__(self) -> str:
        state = "in no trie" if self.root is None else f"users={list(self.users)}, children={len(self.children)}"
        return f"TrieNode({len(self.tokens)} tokens, {len(self.blocks)} blocks, {state})"


def place_blocks(node: TrieNode, incoming: list[Any]) -> list[Any]:
    """Give a node new blocks, unless it is in use; return the blocks that are not, or no longer, in the trie."""
    displaced, kept = (incoming, node.blocks) if node.users else (node.blocks, incoming)
    node.blocks = kept
    return [out for out, stays in zip(displaced, kept, strict=True) if out != stays]


def walk(node: TrieNode, tokens: list[Hashable], page_size: int) -> tuple[list[TrieNode], TrieNode | None, int]:
    """Return the nodes below `node` that `tokens` match wholly, the node they match in part, and its matched pages."""
    path: list[TrieNode] = []
    pos, stop = 0, len(tokens) - len(tokens) % page_size
    while pos < stop and (child := node.children.get(tuple(tokens[pos : pos + page_size]))) is not None:
        end = pos + len(child.tokens)
        if end > stop or tokens[pos:end] != child.tokens:
            return path, child, common_pages(tokens[pos:stop], child.tokens, page_size)
        path.append(child)
        pos, node = end, child
    return path, None, 0


def common_pages(tokens: list[Hashable], others: list[Hashable], page: int) -> int:
    """Return how many leading pages two lists share. Their first pages must be equal. O(shared tokens)."""
    low, high = 1, min(len(tokens), len(others)) // page  # the first `low` pages are equal; at most `high` are
    while low < high:
        middle = (low + high + 1) // 2
        if tokens[low * page : middle * page] == others[low * page : middle * page]:
            low = middle
        else:
            high = middle - 1
    return low


def check_structure(root: TrieNode, page_size: int) -> None:
    """Raise AssertionError if rule 1 or 2 of `radix_trie` is broken. O(n)."""
    assert not (root.tokens or root.blocks or root.users or root.parent) and root.root is root, "rule 1 at the root"
    for _, node in walk_down(root):
        assert node.blocks and len(node.tokens) == len(node.blocks) * page_size, f"rule 1 at {node}"
        assert node.parent is not None and node.root is root, f"rule 2 at {node}"
        assert node.parent.children.get(node.first_page(page_size)) is node, f"rule 2 at {node}"


# ---------------------------------------------------------------- tokens and blocks as lists


def token_list(tokens: Any) -> list[Hashable]:
    """Return a new list of at least one token, each hashable by value. Raises InvalidKeyError if that cannot be."""
    as_list = plain_list(tokens, _token)
    if not as_list:
        raise InvalidKeyError("tokens must hold at least one token, and are empty")
    try:
        hash(tuple(as_list))
    except TypeError as error:
        raise InvalidKeyError(f"tokens must be hashable: {error}") from error
    return as_list


def plain_list(items: Any, plain: Callable[[Any], Any] | None = None) -> list[Any]:
    """Return a new list of the items, with Python's scalars in place of NumPy's and torch's."""
    if hasattr(items, "tolist"):
        values = items.tolist()
        if not isinstance(values, list):
            raise InvalidKeyError(f"tokens and blocks must be 1-D, not the scalar {items!r}")
        return values
    plain = plain or _scalar
    return [item if type(item) in _KEPT_TYPES else plain(item) for item in items]


def _scalar(item: Any) -> Any:
    is_scalar = isinstance(item, np.generic) or (isinstance(item, torch.Tensor) and not item.dim())
    return item.item() if is_scalar else item


def _token(item: Any) -> Any:
    token = _scalar(item)
    if isinstance(token, torch.Tensor):  # hashed by identity
        raise InvalidKeyError(f"a token must be a value, not a tensor of shape {tuple(token.shape)}")
    return token
