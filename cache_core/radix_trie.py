"""`RadixTrie`: prefixes of tokens to blocks, shared by sequences, with LRU eviction from the leaves' tails.

    root ── [1, 2, 3] : [10, 11, 12]         page_size 1: a block per token
            ├─ [4] : [13]                    a sequence that uses this one uses [1, 2, 3], too
            └─ [7, 8] : [14, 15]             unused: eviction takes 15, then 14

Rules, checked by `check_invariants`:

1. A node's run is whole pages, never empty, with one block per page; the root's is empty.
2. A node stands in its parent's `children` under its first page, and knows its parent and its root.
3. Who uses a node uses its parent; a node counts, for each user, the children that this user uses.
4. Every unused leaf, and nothing else, stands in the eviction queue.
5. `num_blocks` counts the blocks in the trie, `num_evictable_blocks` those of nodes that nobody uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from operator import attrgetter, index
from typing import Any

from raydix.cache_core.errors import InvalidKeyError, LockError, StaleNodeError
from raydix.cache_core.eviction.recency_queue import RecencyQueue
from raydix.cache_core.trie.trie_node import TrieNode, check_structure, format_trie, place_blocks, walk, walk_down
from raydix.cache_core.trie.trie_tokens import plain_list, token_list


class RadixTrie:
    """The prefix cache for paged attention with whole blocks (after the contract of Modular MAX's ``RadixTrie``).

    Tokens are any hashable values, compared by value; one block, any value with equality, stands for `page_size` of
    them. Scalars of NumPy and torch count as Python's. A block that was inserted is the trie's until `evict_blocks`
    returns it or `on_displaced` is told of it. Only a node that a sequence uses is safe from both, so mark what you
    matched before you rely on its blocks.

    A `TrieNode` that was handed out means the end of one prefix, whatever is inserted or split around it. Once the
    block at that end is evicted the node is refused as stale, even where the front of its run is still in the trie.

    A trie is neither pickled nor copied deeply: TypeError.

    Time is a logical clock that ticks when a sequence lets go and at each insert; a match leaves it alone. Equal
    operations have equal outcomes.

    Args:
        page_size: tokens a block.
        on_displaced: called once with each block that an insert left without a place in the trie; by then the trie
            is whole. It must not raise: the rest of that insert's blocks would not be told.

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
        self.num_blocks = 0  # in the trie
        self.num_evictable_blocks = 0  # of those, the ones that `evict_blocks` can return now
        self._queue: RecencyQueue[TrieNode] = RecencyQueue(attrgetter("last_access_time"))
        self._clock = 0

    # ---------------------------------------------------------------- match and insert

    @property
    def clock(self) -> int:
        """Ticks at each use; what `last_access_time` is in."""
        return self._clock

    def match_prefix(self, tokens: Any, node: TrieNode | None = None) -> tuple[TrieNode, list[Any]]:
        """The longest prefix of `tokens` that is in the trie below `node`, floored to whole pages.

        Returns the node that ends it (`node` itself, by default the root, on a miss) and the blocks from `node` to
        there, which stay the trie's. A match that ends inside a run splits it. Costs a comparison of the match and a
        lookup per node.

        Raises:
            InvalidKeyError: `tokens` is empty or holds what cannot be hashed by value. It is a ValueError.
            StaleNodeError: `node` is not, or no longer, in this trie.
        """
        node = self._live(node)
        path = self._follow(node, token_list(tokens))
        return path[-1] if path else node, [block for step in path for block in step.blocks]

    def peek_prefix(self, tokens: Any, node: TrieNode | None = None) -> list[Any]:
        """The blocks that `match_prefix` would find; nothing changes. Raises as it does."""
        path, part, num_pages = walk(self._live(node), token_list(tokens), self.page_size)
        return [block for step in path for block in step.blocks] + (part.blocks[:num_pages] if part else [])

    def insert(self, tokens: Any, blocks: Any, node: TrieNode | None = None) -> TrieNode:
        """Make `blocks` findable under `tokens`, one block per page, going on from `node`.

        `tokens` and `blocks` are those beyond `node` only, by default all from the root; both are copied. Returns the
        node that ends the sequence: use it to mark the sequence, and to insert what is generated next.

        Where the trie already has a page, its block stays if a sequence uses that node, and the incoming one takes
        its place otherwise. All blocks are the trie's afterwards but those that `on_displaced` is told of, in token
        order: the caller's to free. A block equal to the one that is there is not displaced. Costs what a match does.

        Raises:
            InvalidKeyError: no tokens, tokens that cannot be hashed or are no whole pages, or another number of
                blocks than of pages. It is a ValueError.
            StaleNodeError: `node` is not, or no longer, in this trie.
        """
        node = self._live(node)
        run, incoming = token_list(tokens), plain_list(blocks)
        if len(run) % self.page_size:
            raise InvalidKeyError(f"{len(run)} tokens are no whole pages of {self.page_size}")
        if len(incoming) * self.page_size != len(run):
            raise InvalidKeyError(f"{len(incoming)} blocks for {len(run)} tokens, {self.page_size} tokens a page")
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
        self._tell_displaced(displaced)
        return node

    def _live(self, node: TrieNode | None) -> TrieNode:
        if node is None:
            return self.root
        if node.root is not self.root:
            raise StaleNodeError(f"{node} is not in this trie: match again")
        return node

    def _follow(self, node: TrieNode, tokens: list[Hashable]) -> list[TrieNode]:
        """The nodes below `node` whose runs together are the longest known prefix of `tokens`; splits the last."""
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
        """Give the first pages of a run to a new node above it, with its users and its recency.

        The old node keeps its end, for those who hold it as that.
        """
        parent, page, cut = node.parent, self.page_size, num_pages * self.page_size
        assert parent is not None and 0 < num_pages < len(node.blocks), f"cannot split {node} at page {num_pages}"
        above = TrieNode(parent, node.tokens[:cut], node.blocks[:num_pages], node.last_access_time)
        above.users = dict.fromkeys(node.users, 1)
        parent.children[above.first_page(page)] = above
        node.tokens, node.blocks, node.parent = node.tokens[cut:], node.blocks[num_pages:], above
        above.children[node.first_page(page)] = node
        return above

    def _tell_displaced(self, displaced: list[Any]) -> None:
        if self.on_displaced is not None:
            for block in displaced:
                self.on_displaced(block)

    # ---------------------------------------------------------------- use by sequences

    def mark_in_use_by(self, node: TrieNode, seq_id: Hashable) -> None:
        """Keep `node` and its ancestors, with their blocks, for a sequence. Twice is once; the root needs no mark.

        Climbs to the root, or to a node that this sequence already holds: O(nodes climbed).

        Raises:
            StaleNodeError: `node` is not, or no longer, in this trie.
        """
        step: TrieNode | None = self._live(node)
        num_below = 0  # 1 once the climb comes from a child that the sequence has just taken
        while step is not None and step is not self.root:
            held = seq_id in step.users
            step.users[seq_id] = step.users.get(seq_id, 0) + num_below
            if held:
                return
            if len(step.users) == 1:
                self.num_evictable_blocks -= len(step.blocks)
                self._queue.discard(step)
            num_below = 1
            step = step.parent

    def mark_not_in_use_by(self, node: TrieNode, seq_id: Hashable) -> None:
        """Let go of `node` and its ancestors for a sequence, and stamp them as used now. O(depth in nodes).

        `node` is the deepest that the sequence holds on this path. An ancestor stays held as long as the sequence
        holds another branch below it. The root is never held: letting go of it does nothing.

        Raises:
            StaleNodeError: `node` is not, or no longer, in this trie.
            LockError: the sequence does not hold `node`, or it holds a node below it.
        """
        step: TrieNode | None = self._live(node)
        if node is self.root:
            return
        if seq_id not in node.users:
            raise LockError(f"{node} is not in use by sequence {seq_id!r}")
        if node.users[seq_id]:
            raise LockError(f"sequence {seq_id!r} holds nodes below {node}: let go of those")
        self._clock += 1
        num_below = 0  # children that the sequence has just let go of
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
        """To be called with a node that was stamped just now."""
        if not node.users and not node.children:
            self._queue.push(node)

    # ---------------------------------------------------------------- eviction

    def evict_blocks(self, desired_num_evicted: int) -> list[Any]:
        """Take that many blocks out of the trie, or all that can be, and hand them to the caller.

        Trims the least recently used unused leaf from its tail, block by block; when nothing is left of it, it goes
        and its parent becomes a candidate. Never takes a block of a node in use. O(log n) per leaf, O(1) per block.
        """
        desired_num_evicted, evicted = index(desired_num_evicted), list[Any]()
        while len(evicted) < desired_num_evicted and (leaf := self._queue.pop()) is not None:
            evicted += self._trim(leaf, desired_num_evicted - len(evicted))
        self.num_blocks -= len(evicted)
        self.num_evictable_blocks -= len(evicted)
        return evicted

    def _trim(self, leaf: TrieNode, most: int) -> list[Any]:
        """Take up to `most` blocks off an unused leaf; whoever holds the leaf as the end of its prefix holds a stale
        node from now on."""
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

    # ---------------------------------------------------------------- people, tests

    def nodes(self) -> Iterator[TrieNode]:
        """Every node but the root, parents before children. O(n)."""
        return (node for _, node in walk_down(self.root))

    def pretty_format(self, print_blocks: bool = False) -> list[str]:
        """The trie as one line per node: two dashes per depth, the token list, ` : ` and the blocks if asked."""
        return format_trie(self.root, print_blocks)

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
