"""`RadixTrie`: tokens to blocks, shared by sequences, with LRU eviction of leaves from their last block.

    root ── [1, 2, 3] : [10, 11, 12]         page_size 1: a block per token
            ├─ [4] : [13]                    a sequence that uses this node also uses [1, 2, 3]
            └─ [7, 8] : [14, 15]             unused: eviction takes 15, then 14

Rules, checked by `check_invariants`:

1. A node holds whole pages, at least one, with one block per page; the root holds none.
2. A node is in its parent's `children` under its first page; its `parent` and `root` are set.
3. A sequence that uses a node uses its parent. A node counts, for each of its users, the children that this user uses.
4. The eviction queue holds the unused leaves only, and all of them.
5. `num_blocks` counts the blocks in the trie, `num_evictable_blocks` the blocks of unused nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from operator import attrgetter, index
from typing import Any

from raydix.cache_core.errors import InvalidKeyError, LockError, StaleNodeError
from raydix.cache_core.eviction.recency_queue import RecencyQueue
from raydix.cache_core.outline import walk_down
from raydix.cache_core.trie.trie_node import TrieNode, check_structure, place_blocks, plain_list, token_list, walk


class RadixTrie:
    """The prefix cache for paged attention with whole blocks (after the contract of Modular MAX's ``RadixTrie``).

    Tokens may be any hashable values, compared by value. A block may be any value with equality, and holds `page_size`
    tokens. Scalars of NumPy and torch equal Python's. The trie owns an inserted block until `evict_blocks`
    returns it or `on_displaced` is called with it. Neither happens while a sequence uses the node: mark the matched
    node before you rely on its blocks.

    A `TrieNode` that the trie returned stands for the end of one prefix, also after later inserts and splits. Once the
    block at that end is evicted, the node is rejected as stale, even if its first tokens are still in the trie.

    Pickling or deep-copying a trie raises TypeError.

    Time is a logical clock. It ticks at each insert and when a sequence stops using a node, but not at a match. Equal
    operations have equal outcomes.

    Args:
        page_size: tokens per block.
        on_displaced: called once with each block that an insert displaced, after the insert is complete. It must not
            raise: an error would skip the remaining blocks of that insert.

    Raises:
        ValueError: `page_size` is below 1.
    """

    def __init__(self, page_size: int = 1, on_displaced: Callable[[Any], object] | None = None) -> None:
        page_size = index(page_size)
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.page_size = page_size
        self.on_displaced = on_displaced
        self.root = TrieNode(None, [], [], 0)  # the end of the empty prefix: never used, evicted or stale
        self.num_blocks = 0  # the blocks of all nodes
        self.num_evictable_blocks = 0  # the blocks that `evict_blocks` can return now
        self._queue: RecencyQueue[TrieNode] = RecencyQueue(attrgetter("last_access_time"))
        self._clock = 0

    # ---------------------------------------------------------------- match and insert

    @property
    def clock(self) -> int:
        """The current tick, in the unit of `last_access_time`."""
        return self._clock

    def match_prefix(self, tokens: Any, node: TrieNode | None = None) -> tuple[TrieNode, list[Any]]:
        """Return the longest prefix of `tokens` that is in the trie below `node`, floored to whole pages.

        Returns its last node and the blocks from `node` to there, which the trie still owns. On a miss the last node is
        `node` itself, by default the root. A match that ends inside a node splits it. Costs a comparison of the matched
        tokens and a lookup per node.

        Raises:
            InvalidKeyError: `tokens` is empty, or a token cannot be hashed by value. It is a ValueError.
            StaleNodeError: `node` is not, or no longer, in this trie.
        """
        node = self._live(node)
        path = self._follow(node, token_list(tokens))
        return path[-1] if path else node, [block for step in path for block in step.blocks]

    def peek_prefix(self, tokens: Any, node: TrieNode | None = None) -> list[Any]:
        """Return the blocks that `match_prefix` would return, without any effect. Raises the same errors."""
        path, part, num_pages = walk(self._live(node), token_list(tokens), self.page_size)
        return [block for step in path for block in step.blocks] + (part.blocks[:num_pages] if part else [])

    def insert(self, tokens: Any, blocks: Any, node: TrieNode | None = None) -> TrieNode:
        """Insert `blocks` under `tokens`, one block per page, below `node`.

        `tokens` and `blocks` begin at the end of `node`, by default the root; both are copied. Returns the last node of
        the sequence: use it to mark the sequence, and to insert the tokens that are generated next.

        If the trie already has a page, its block stays if a sequence uses that node; otherwise the incoming block
        replaces it. `on_displaced` is called with the other block, in token order: the caller must free it. A block
        that equals the one in the trie is not displaced. The trie owns all other blocks. Costs as much as a match.

        Raises:
            InvalidKeyError: `tokens` is empty or not whole pages, a token cannot be hashed, or `blocks` is not one per
                page. It is a ValueError.
            StaleNodeError: `node` is not, or no longer, in this trie.
        """
        node = self._live(node)
        run, incoming = token_list(tokens), plain_list(blocks)
        if len(run) % self.page_size:
            raise InvalidKeyError(f"tokens must be whole pages of {self.page_size}, not {len(run)} tokens")
        if len(incoming) * self.page_size != len(run):
            raise InvalidKeyError(
                f"blocks must be one per page of {self.page_size}: {len(incoming)} for {len(run)} tokens"
            )
        self._clock += 1
        done = 0  # pages
        displaced: list[Any] = []
        for step in self._follow(node, run):
            node, start, done = step, done, done + len(step.blocks)
            node.last_access_time = self._clock
            displaced += place_blocks(node, incoming[start:done])
        if done < len(incoming):
            node = self._add_leaf(node, run[done * self.page_size :], incoming[done:])
        self._queue_if_unused_leaf(node)
        self._on_displaced_blocks(displaced)
        return node

    def _live(self, node: TrieNode | None) -> TrieNode:
        if node is None:
            return self.root
        if node.root is not self.root:
            raise StaleNodeError(f"{node} is not in this trie: match again")
        return node

    def _follow(self, node: TrieNode, tokens: list[Hashable]) -> list[TrieNode]:
        """Return the nodes below `node` that hold the longest known prefix of `tokens`; split the last one."""
        path, part, num_pages = walk(node, tokens, self.page_size)
        if part is not None:
            path.append(self._split(part, num_pages))
        return path

    def _add_leaf(self, parent: TrieNode, tokens: list[Hashable], blocks: list[Any]) -> TrieNode:
        leaf = TrieNode(parent, tokens, blocks, self._clock)
        parent.children[leaf.first_page(self.page_size)] = leaf
        self._queue.discard(parent)
        self.num_blocks += len(blocks)
        self.num_evictable_blocks += len(blocks)
        return leaf

    def _split(self, node: TrieNode, num_pages: int) -> TrieNode:
        """Move the first pages of a node to a new node above it, with the same users and tick; return the new node.

        `node` still stands for the end of its prefix.
        """
        parent, page, cut = node.parent, self.page_size, num_pages * self.page_size
        assert parent is not None and 0 < num_pages < len(node.blocks), f"cannot split {node} at page {num_pages}"
        above = TrieNode(parent, node.tokens[:cut], node.blocks[:num_pages], node.last_access_time)
        above.users = dict.fromkeys(node.users, 1)
        parent.children[above.first_page(page)] = above
        node.tokens, node.blocks, node.parent = node.tokens[cut:], node.blocks[num_pages:], above
        above.children[node.first_page(page)] = node
        return above

    def _on_displaced_blocks(self, displaced: list[Any]) -> None:
        if self.on_displaced is not None:
            for block in displaced:
                self.on_displaced(block)

    # ---------------------------------------------------------------- use by sequences

    def mark_in_use_by(self, node: TrieNode, seq_id: Hashable) -> None:
        """Mark `node` and its ancestors as in use by a sequence, so that their blocks stay.

        Marking a node again, or the root, has no effect. Climbs to the root or to a node that this sequence already
        uses, in O(nodes climbed).

        Raises:
            StaleNodeError: `node` is not, or no longer, in this trie.
        """
        step: TrieNode | None = self._live(node)
        num_below = 0  # 1 after the first step: the child that the sequence now uses
        while step is not None and step is not self.root:
            in_use = seq_id in step.users
            step.users[seq_id] = step.users.get(seq_id, 0) + num_below
            if in_use:
                return
            if len(step.users) == 1:
                self.num_evictable_blocks -= len(step.blocks)
                self._queue.discard(step)
            num_below = 1
            step = step.parent

    def mark_not_in_use_by(self, node: TrieNode, seq_id: Hashable) -> None:
        """End the use of `node` and its ancestors by a sequence, as the most recent use. O(depth in nodes).

        `node` must be the deepest node that the sequence uses on this path. An ancestor stays in use as long as the
        sequence uses another branch below it. The root is never in use: the call has no effect.

        Raises:
            StaleNodeError: `node` is not, or no longer, in this trie.
            LockError: the sequence does not use `node`, or it uses a node below it.
        """
        step: TrieNode | None = self._live(node)
        if node is self.root:
            return
        if seq_id not in node.users:
            raise LockError(f"{node} is not in use by sequence {seq_id!r}")
        if node.users[seq_id]:
            raise LockError(f"sequence {seq_id!r} uses nodes below {node}: mark the deepest one as not in use")
        self._clock += 1
        num_below = 0  # children that the sequence no longer uses
        releasing = True
        while step is not None and step is not self.root:
            step.last_access_time = self._clock
            if releasing:
                step.users[seq_id] -= num_below
                releasing = not step.users[seq_id]
                if releasing:
                    self._drop_user(step, seq_id)
            num_below = 1
            step = step.parent
        self._queue_if_unused_leaf(node)

    def _drop_user(self, node: TrieNode, seq_id: Hashable) -> None:
        del node.users[seq_id]
        if not node.users:
            self.num_evictable_blocks += len(node.blocks)

    def _queue_if_unused_leaf(self, node: TrieNode) -> None:
        """Queue an unused leaf that has just been used."""
        if not node.users and not node.children:
            self._queue.push(node)

    # ---------------------------------------------------------------- eviction

    def evict_blocks(self, desired_num_evicted: int) -> list[Any]:
        """Remove that many blocks from the trie, or all evictable ones, and return them; the caller then owns them.

        Removes blocks from the end of the unused leaf that was used least recently. A leaf without blocks is removed,
        and its parent becomes a candidate. Blocks of nodes in use stay. O(log n) per leaf, O(1) per block.
        """
        desired_num_evicted, evicted = index(desired_num_evicted), list[Any]()
        while len(evicted) < desired_num_evicted and (leaf := self._queue.pop()) is not None:
            evicted += self._trim(leaf, desired_num_evicted - len(evicted))
        self.num_blocks -= len(evicted)
        self.num_evictable_blocks -= len(evicted)
        return evicted

    def _trim(self, leaf: TrieNode, most: int) -> list[Any]:
        """Remove up to `most` blocks from the end of an unused leaf, which becomes stale; return them."""
        parent, first_page = leaf.parent, leaf.first_page(self.page_size)
        assert parent is not None
        tokens, blocks = leaf.tokens, leaf.blocks
        leaf.parent, leaf.root, leaf.tokens, leaf.blocks = None, None, [], []
        kept = max(len(blocks) - most, 0)
        trimmed = blocks[kept:][::-1]
        if kept:
            del tokens[kept * self.page_size :], blocks[kept:]
            rest = TrieNode(parent, tokens, blocks, leaf.last_access_time)
            parent.children[first_page] = rest
            self._queue.push(rest)
            return trimmed
        del parent.children[first_page]
        if parent is not self.root and not parent.children and not parent.users:
            self._queue.push(parent)
        return trimmed

    # ---------------------------------------------------------------- debugging

    def nodes(self) -> Iterator[TrieNode]:
        """Return every node but the root, parents before children. O(n)."""
        return (node for _, node in walk_down(self.root))

    def pretty_format(self, print_blocks: bool = False) -> list[str]:
        """Return one line per node: two dashes per depth, the tokens, and with `print_blocks` ` : ` and the blocks."""
        return [
            f"{'--' * (depth - 1)}{node.tokens!r}" + (f" : {node.blocks!r}" if print_blocks else "")
            for depth, node in walk_down(self.root)
        ]

    def pretty_print(self, print_blocks: bool = True) -> None:
        """Print `pretty_format`."""
        print("\n".join(self.pretty_format(print_blocks)))

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of the module docstring is broken. O(n)."""
        check_structure(self.root, self.page_size)
        nodes = list(self.nodes())
        for node in nodes:
            below = Counter(seq_id for child in node.children.values() for seq_id in child.users)
            assert below.keys() <= node.users.keys(), f"rule 3 at {node}"
            assert node.users == {seq_id: below[seq_id] for seq_id in node.users}, f"rule 3 at {node}"
        leaves = {node for node in nodes if not node.children and not node.users}
        assert leaves == {node for node in nodes if node in self._queue}, f"rule 4: queued wrongly among {nodes}"
        assert len(self._queue) == len(leaves), f"rule 4: {len(self._queue)} are queued, of {len(leaves)} leaves"
        self._queue.check_invariants()
        num_blocks = sum(len(node.blocks) for node in nodes)
        num_evictable = sum(len(node.blocks) for node in nodes if not node.users)
        assert num_blocks == self.num_blocks, f"rule 5: {num_blocks} blocks, but {self.num_blocks=}"
        assert num_evictable == self.num_evictable_blocks, f"rule 5: {num_evictable}, but {self.num_evictable_blocks=}"
