"""`TrieNode`: one edge of a `RadixTrie`; and a trie as text."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

Page = tuple[Hashable, ...]  # the tokens of one page


class TrieNode:
    """A run of tokens below its parent, whole pages of them, with one block per page.

    To its holder a node means one thing as long as it is in its trie: the end of the prefix that leads from the root
    through its last token. So a split gives the front of the run to a new node above, and a run that loses its tail
    gives what is left of it to a new node in its place. Read its attributes, never write them.
    """

    __slots__ = ("blocks", "children", "entry", "last_access_time", "parent", "root", "tokens", "users")

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
        self.entry: list[Any] | None = None  # its place in the queue of eviction candidates, see `TrieQueue`

    def first_page(self, page_size: int) -> Page:
        """What this node stands under in its parent's `children`."""
        return tuple(self.tokens[:page_size])

    def __repr__(self) -> str:
        state = "in no trie" if self.root is None else f"users={list(self.users)}, children={len(self.children)}"
        return f"TrieNode({len(self.tokens)} tokens, {len(self.blocks)} blocks, {state})"


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
