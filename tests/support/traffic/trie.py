"""`RadixTrie` and its reference model side by side, and random operations on both."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, NamedTuple

import numpy as np
from support.reference.trie import START, End, Node, Prefix, ReferenceTrie, SeqId

from raydix.cache_core import InvalidKeyError, LockError, RadixTrie, StaleNodeError, TrieNode

SEQUENCES = ("a", "b", 3)


class TrafficFailed(AssertionError):
    """The trie and its model parted, or the trie raised what it should not."""


class Held(NamedTuple):
    """A node of the trie and its place in the model."""

    node: TrieNode
    end: End


class PairedTrie:
    """Each operation is done on both, and all there is to compare is compared after it.

    Blocks are numbers that are never used again, so each is with the trie, displaced or evicted, once.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.displaced: list[int] = []
        self.trie = RadixTrie(page_size, on_displaced=self.displaced.append)
        self.model = ReferenceTrie(page_size)
        self.root = Held(self.trie.root, START)
        self.known: deque[Held] = deque([self.root], maxlen=24)  # nodes that were handed out
        self._in_trie: set[int] = set()
        self._next_block = 10

    def new_blocks(self, count: int) -> list[int]:
        """Return new blocks."""
        first, self._next_block = self._next_block, self._next_block + count
        return list(range(first, self._next_block))

    # ---------------------------------------------------------------- operations

    def match(self, tokens: Prefix, held: Held) -> Held:
        if self._refused(held, lambda: self.trie.match_prefix(list(tokens), held.node)):
            return held
        expected = self.model.match(tokens, held.end)
        node, blocks = self.trie.match_prefix(np.array(tokens), held.node)
        assert blocks == expected.blocks, f"matched {blocks}, not {expected.blocks}"
        return self._remember(node, expected.end)

    def peek(self, tokens: Prefix, held: Held) -> list[int]:
        if self._refused(held, lambda: self.trie.peek_prefix(list(tokens), held.node)):
            return []
        blocks = self.trie.peek_prefix(tokens, held.node)
        assert blocks == self.model.peek(tokens, held.end)
        self.compare()
        return blocks

    def insert(self, tokens: Prefix, blocks: list[int], held: Held) -> Held:
        if self._refused(held, lambda: self.trie.insert(list(tokens), blocks, held.node)):
            return held
        expected = self.model.insert(tokens, blocks, held.end)
        node = self.trie.insert(list(tokens), np.array(blocks), held.node)
        assert self.displaced == expected.displaced, f"displaced {self.displaced}, not {expected.displaced}"
        self._in_trie = self._in_trie.union(blocks).difference(self.displaced)
        self.displaced.clear()
        return self._remember(node, expected.end)

    def mark(self, held: Held, seq_id: SeqId) -> bool:
        """Whether the trie took it."""
        if self._refused(held, lambda: self.trie.mark_in_use_by(held.node, seq_id)):
            return False
        self.model.mark(held.end, seq_id)
        self.trie.mark_in_use_by(held.node, seq_id)
        self.compare()
        return True

    def release(self, held: Held, seq_id: SeqId) -> None:
        if self._refused(held, lambda: self.trie.mark_not_in_use_by(held.node, seq_id)):
            return
        if held.end != START and not self.model.is_deepest(held.end, seq_id):
            refuses(LockError, lambda: self.trie.mark_not_in_use_by(held.node, seq_id))
        else:
            self.model.release(held.end, seq_id)
            self.trie.mark_not_in_use_by(held.node, seq_id)
        self.compare()

    def evict(self, num_blocks: int) -> None:
        expected = self.model.evict(num_blocks)
        blocks = self.trie.evict_blocks(num_blocks)
        assert blocks == expected, f"evicted {blocks}, not {expected}"
        assert self._in_trie.issuperset(blocks)
        self._in_trie.difference_update(blocks)
        self.compare()

    def refuse_bad_inserts(self, tokens: Prefix, held: Held) -> None:
        """Wrong counts and tokens that cannot be hashed; nothing changes."""
        num_pages = len(tokens) // self.page_size
        whole = list(tokens[: num_pages * self.page_size])
        for bad_tokens, num_blocks in [
            ([], 0),
            (whole, num_pages + 1),
            (whole, num_pages - 1),
            ([*whole[:-1], ["no token"]], num_pages),
            (whole + [1] * (self.page_size - 1) if self.page_size > 1 else [], num_pages),
        ]:
            blocks = self.new_blocks(max(num_blocks, 0))
            expected = StaleNodeError if self.model.is_stale(held.end) else InvalidKeyError
            refuses(expected, partial(self.trie.insert, bad_tokens, blocks, held.node))
        self.compare()

    def _refused(self, held: Held, operation: Callable[[], object]) -> bool:
        """A stale node is refused by every operation, and nothing changes."""
        if not self.model.is_stale(held.end):
            return False
        refuses(StaleNodeError, operation)
        self.compare()
        return True

    def _remember(self, node: TrieNode, end: End) -> Held:
        held = Held(node, end)
        self.known.append(held)
        self.compare()
        return held

    # ---------------------------------------------------------------- comparison

    def compare(self) -> None:
        """All that can be seen of the trie, and the meaning of the nodes that were handed out."""
        trie, model = self.trie, self.model
        trie.check_invariants()
        nodes = {Node(prefix_of(node), tuple(node.blocks), frozenset(node.users)) for node in trie.nodes()}
        assert nodes == model.nodes(), f"only one has {nodes ^ model.nodes()}"
        assert trie.num_blocks == len(model.pages)
        assert trie.num_evictable_blocks == model.num_evictable()
        assert not self.displaced, f"displaced by no insert: {self.displaced}"
        assert Counter(block for node in trie.nodes() for block in node.blocks) == Counter(self._in_trie)
        for node, end in self.known:
            assert (node.root is not trie.root) == model.is_stale(end), f"{node} should be the end of {end}"
            assert model.is_stale(end) or prefix_of(node) == end.prefix, f"{node} should be the end of {end}"


def refuses(error: type[Exception], operation: Callable[[], object]) -> None:
    """Assert that an operation raises this."""
    try:
        operation()
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


def prefix_of(node: TrieNode) -> Prefix:
    """The tokens from the root through this node."""
    runs: list[Any] = []
    step: TrieNode | None = node
    while step is not None:
        runs.append(step.tokens)
        step = step.parent
    return tuple(token for run in reversed(runs) for token in run)


# ---------------------------------------------------------------- random operations


def run_trie_traffic(seed: int, page_size: int, num_operations: int) -> PairedTrie:
    """Do random operations on a trie and its model, and compare all there is to compare after each.

    Raises:
        TrafficFailed: with the number and name of the operation; its cause says what differed.
    """
    traffic = TrieTraffic(seed, page_size)
    for number in range(num_operations):
        name = traffic.choose()
        try:
            getattr(traffic, name)()
        except Exception as error:
            where = f"operation {number} ({name}) of {seed=}, {page_size=}"
            raise TrafficFailed(f"{where}: {type(error).__name__}: {error}") from error
    return traffic.pair


class TrieTraffic:
    """A few sequences that match, decode, share, let go, and come back with nodes of long ago."""

    MAX_BLOCKS = 48
    OPERATIONS = (
        ("match", 18),
        ("peek", 6),
        ("insert", 16),
        ("insert_what_was_matched", 12),
        ("decode", 14),
        ("mark", 14),
        ("release", 14),
        ("release_what_is_not_held", 3),
        ("evict", 10),
        ("refuse_bad_inserts", 2),
    )

    def __init__(self, seed: int, page_size: int) -> None:
        self.rng = Random(f"{seed}/{page_size}")
        self.page_size = page_size
        self.pair = PairedTrie(page_size)
        self.pages = self._similar_pages()
        self.keys: deque[Prefix] = deque(maxlen=12)
        self.marks: list[tuple[Held, SeqId]] = []

    def choose(self) -> str:
        """The name of the next operation."""
        names, weights = zip(*self.OPERATIONS, strict=True)
        return self.rng.choices(names, weights)[0]

    def match(self) -> None:
        self.pair.match(*self._from_somewhere(self._key() + self._tokens(self.rng.randrange(self.page_size))))

    def peek(self) -> None:
        self.pair.peek(*self._from_somewhere(self._key()))

    def insert(self) -> None:
        key = self._new_key()
        self._make_room()
        tokens, held = self._from_somewhere(key)
        self.pair.insert(tokens, self.pair.new_blocks(len(tokens) // self.page_size), held)

    def insert_what_was_matched(self) -> None:
        """As a sequence does it: the blocks of the match again, and new ones for the rest."""
        key = self._new_key()
        self._make_room()
        blocks = self.pair.peek(key, self.pair.root)
        blocks = blocks[: self.rng.choice([len(blocks), len(blocks), len(blocks) // 2])]  # someone else was faster
        blocks += self.pair.new_blocks(len(key) // self.page_size - len(blocks))
        self.pair.insert(key, blocks, self.pair.root)

    def decode(self) -> None:
        """Go on from a node, most often one that a sequence holds, and hold the new one."""
        self._make_room()
        held, seq_id = self.rng.choice(self.marks) if self.marks and self.rng.random() < 0.7 else (self._node(), None)
        tokens = self._tokens(self.page_size * self.rng.choice([1, 1, 2]))
        held = self.pair.insert(tokens, self.pair.new_blocks(len(tokens) // self.page_size), held)
        if seq_id is not None:
            self._mark(held, seq_id)

    def mark(self) -> None:
        if len(self.marks) < 6:
            self._mark(self._node(), self.rng.choice(SEQUENCES))

    def release(self) -> None:
        if self.marks:
            self.pair.release(*self.marks[self.rng.randrange(len(self.marks))])
            self.marks = [mark for mark in self.marks if mark[0].end.prefix in self.pair.model.held[mark[1]]]

    def release_what_is_not_held(self) -> None:
        held, seq_id = self._node(), self.rng.choice(SEQUENCES)
        if self.pair.model.is_stale(held.end) or not self.pair.model.is_deepest(held.end, seq_id):
            self.pair.release(held, seq_id)

    def evict(self) -> None:
        self.pair.evict(self.rng.randint(0, 4) if self.rng.random() < 0.95 else 2 * self.MAX_BLOCKS)

    def refuse_bad_inserts(self) -> None:
        self.pair.refuse_bad_inserts(self._key(), self._node())

    # ---------------------------------------------------------------- what the operations are made of

    def _mark(self, held: Held, seq_id: SeqId) -> None:
        if self.pair.mark(held, seq_id) and held.end != START:
            self.marks.append((held, seq_id))

    def _node(self) -> Held:
        """A node that was handed out; a stale one now and then."""
        fresh = [held for held in self.pair.known if not self.pair.model.is_stale(held.end)]
        return self.rng.choice(fresh if fresh and self.rng.random() < 0.9 else [self.pair.root, *self.pair.known])

    def _from_somewhere(self, key: Prefix) -> tuple[Prefix, Held]:
        """The key from the root, or its rest after a node on its path."""
        on_path = [held for held in self.pair.known if 0 < len(held.end.prefix) < len(key)]
        on_path = [held for held in on_path if key[: len(held.end.prefix)] == held.end.prefix]
        if not on_path or self.rng.random() < 0.5:
            return key, self.pair.root
        held = self.rng.choice(on_path)
        return key[len(held.end.prefix) :], held

    def _make_room(self) -> None:
        if self.pair.trie.num_blocks > self.MAX_BLOCKS:
            self.pair.evict(self.rng.randint(1, 12))

    def _new_key(self) -> Prefix:
        key = self._key()
        self.keys.append(key)
        return key

    def _key(self) -> Prefix:
        """Mostly a known key: whole, cut short, or gone on with; at least a page, in whole pages."""
        if not self.keys or self.rng.random() < 0.15:
            return self._tokens(self.page_size * self.rng.randint(1, 6))
        key = self.rng.choice(self.keys)
        if self.rng.random() < 0.3:
            return key
        head = key[: self.rng.randrange(0, len(key), self.page_size)]
        return (head + self._tokens(self.page_size * self.rng.randint(1, 4)))[: 10 * self.page_size]

    def _tokens(self, length: int) -> Prefix:
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += self.rng.choice(self.pages)
        return tuple(tokens[:length])

    def _similar_pages(self) -> list[list[int]]:
        """Three pages: the second and third differ from the first in one token."""
        first = [self.rng.randint(1, 3) for _ in range(self.page_size)]
        pages = [first]
        for token in (4, 5):
            page = list(first)
            page[self.rng.randrange(self.page_size)] = token
            pages.append(page)
        return pages
