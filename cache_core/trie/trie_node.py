"""`TrieNode`: one edge of a `RadixTrie`; how to walk a trie, and a trie as text."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NoReturn

from raydix.cache_core.trie.trie_tokens import common_pages

Page = tuple[Hashable, ...]  # the tokens of one page


class TrieNode:
    """A run of tokens below its parent, whole pages of them, with one block per page.

    To its holder a node means one thing as long as it is in its trie: the end of the prefix that leads from the root
    through its last token. So a split gives the front of the run to a new node above, and a run that loses its tail
    gives what is left of it to a new node in its place. Read its attributes, never write them.
    """

    __slots__ = ("blocks", "children", "last_access_time", "parent", "root", "tokens", "users")

    def __init__(
        self, parent: TrieNode | None, tokens: list[Hashable], blocks: list[Any], last_access_time: int
    ) -> None:
        self.parent = parent  # None for a root, and once out of the trie
        self.root: TrieNode | None = self if parent is None else parent.root  # None once out of the trie
        self.tokens = tokens
        self.blocks = blocks
        self.children: dict[Page, TrieNode] = {}  # by their first page
        self.users: dict[Hashable, int] = {}  # sequences that hold this node: how many children each holds, too
        self.last_access_time = last_access_time  # ticks of the trie's own clock, not seconds

    def first_page(self, page_size: int) -> Page:
        """What this node stands under in its parent's `children`."""
        return tuple(self.tokens[:page_size])

    def __reduce__(self) -> NoReturn:
        """Refused: a node holds its whole trie, deeper than recursion goes, and is of no use in another one."""
        raise TypeError(f"cannot pickle {type(self).__name__!r} object")

    def __repr__(self) -> str:
        state = "in no trie" if self.root is None else f"users={list(self.users)}, children={len(self.children)}"
        return f"TrieNode({len(self.tokens)} tokens, {len(self.blocks)} blocks, {state})"


def place_blocks(node: TrieNode, incoming: list[Any]) -> list[Any]:
    """Offer a node new blocks; returns those without a place: the incoming ones if it is in use, else its old ones."""
    refused, kept = (incoming, node.blocks) if node.users else (node.blocks, incoming)
    displaced = [out for out, stays in zip(refused, kept, strict=True) if out != stays]
    node.blocks = kept
    return displaced


def walk(node: TrieNode, tokens: list[Hashable], page_size: int) -> tuple[list[TrieNode], TrieNode | None, int]:
    """The nodes below `node` that `tokens` match wholly, the one they match in part, and how many pages of it."""
    path: list[TrieNode] = []
    pos, stop = 0, len(tokens) - len(tokens) % page_size
    while pos < stop and (child := node.children.get(tuple(tokens[pos : pos + page_size]))) is not None:
        end = pos + len(child.tokens)
        if end > stop or tokens[pos:end] != child.tokens:
            return path, child, common_pages(tokens[pos:stop], child.tokens, page_size)
        path.append(child)
        pos, node = end, child
    return path, None, 0


def walk_down(root: TrieNode) -> Iterator[tuple[int, TrieNode]]:
    """Every node below `root` with its depth, from 0: parents before children, siblings in order of arrival."""
    stack = [(0, child) for child in reversed(root.children.values())]
    while stack:
        depth, node = stack.pop()
        yield depth, node
        stack.extend((depth + 1, child) for child in reversed(node.children.values()))


def format_trie(root: TrieNode, print_blocks: bool) -> list[str]:
    """One line per node: two dashes per depth, its token list, and ` : ` and its blocks if asked."""
    return [
        f"{'--' * depth}{node.tokens!r}" + (f" : {node.blocks!r}" if print_blocks else "")
        for depth, node in walk_down(root)
    ]


def check_structure(root: TrieNode, page_size: int) -> None:
    """Raise AssertionError if rule 1 or 2 of `radix_trie` is broken. O(n)."""
    assert not (root.tokens or root.blocks or root.users or root.parent) and root.root is root, "rule 1 at the root"
    for _, node in walk_down(root):
        assert node.blocks and len(node.tokens) == len(node.blocks) * page_size, f"rule 1 at {node}"
        assert node.parent is not None and node.root is root, f"rule 2 at {node}"
        assert node.parent.children.get(node.first_page(page_size)) is node, f"rule 2 at {node}"
