"""Proof that random traffic finds faults: each rule of `RadixTrie` is broken once, and the comparison must see it."""

from typing import Any

import pytest
from support.faults.faults import Catalogue, Fault, Patch, around
from support.traffic.trie import TrafficFailed, run_trie_traffic

from raydix.cache_core import InvalidKeyError, RadixTrie, TrieNode, radix_trie
from raydix.cache_core.eviction.recency_queue import RecencyQueue
from raydix.cache_core.trie import trie_node

RUNS = [(seed, page_size) for seed in range(4) for page_size in (4, 1)]

FAULTS = Catalogue()
fault, late_fault = FAULTS.register, FAULTS.register_late


# ---------------------------------------------------------------- match and insert


@fault
def a_match_ends_at_the_node_above_the_split(patch: Patch) -> None:
    def match(original: Any, trie: RadixTrie, tokens: Any, node: Any = None) -> Any:
        end, blocks = original(trie, tokens, node)
        return (end.parent if blocks and len(end.children) == 1 else end), blocks

    around(patch, RadixTrie, "match_prefix", match)


@fault
def a_match_does_not_split(patch: Patch) -> None:
    def match(trie: RadixTrie, tokens: Any, node: Any = None) -> Any:
        node = trie._live(node)
        path, part, num_pages = trie_node.walk(node, trie_node.token_list(tokens), trie.page_size)
        blocks = [block for step in path for block in step.blocks] + (part.blocks[:num_pages] if part else [])
        return part or (path[-1] if path else node), blocks

    patch.setattr(RadixTrie, "match_prefix", match)


@fault
def a_match_forgets_the_page_before_the_last(patch: Patch) -> None:
    around(patch, trie_node, "common_pages", lambda original, *args: max(original(*args) - 1, 1))


@fault
def a_peek_splits(patch: Patch) -> None:
    patch.setattr(RadixTrie, "peek_prefix", lambda trie, tokens, node=None: trie.match_prefix(tokens, node)[1])


@fault
def a_match_from_a_node_starts_at_the_root(patch: Patch) -> None:
    around(patch, RadixTrie, "match_prefix", lambda original, trie, tokens, node: original(trie, tokens))


@fault
def an_insert_from_a_node_starts_at_the_root(patch: Patch) -> None:
    around(patch, RadixTrie, "insert", lambda original, trie, tokens, blocks, node: original(trie, tokens, blocks))


@fault
def an_insert_returns_the_node_above_the_end(patch: Patch) -> None:
    around(patch, RadixTrie, "insert", lambda original, *args: original(*args).parent)


@fault
def an_unused_leaf_is_appended_to_in_place(patch: Patch) -> None:
    def add_leaf(original: Any, trie: RadixTrie, parent: TrieNode, tokens: Any, blocks: Any) -> Any:
        if parent is trie.root or parent.children or parent.users:
            return original(trie, parent, tokens, blocks)
        parent.tokens += tokens
        parent.blocks += blocks
        parent.last_access_time = trie._clock
        trie.num_blocks += len(blocks)
        trie.num_evictable_blocks += len(blocks)
        return parent

    around(patch, RadixTrie, "_add_leaf", add_leaf)


@fault
def a_split_gives_the_old_node_to_the_front(patch: Patch) -> None:
    def split(original: Any, trie: RadixTrie, node: TrieNode, num_pages: int) -> TrieNode:
        above = original(trie, node, num_pages)
        page = trie.page_size
        below = TrieNode(node, node.tokens, node.blocks, node.last_access_time)
        below.children, below.users = node.children, node.users
        for child in below.children.values():
            child.parent = below
        node.tokens, node.blocks, node.parent = above.tokens, above.blocks, above.parent
        node.children, node.users = {below.first_page(page): below}, above.users
        assert node.parent is not None
        node.parent.children[node.first_page(page)] = node
        trie._queue.discard(node)
        trie._queue_if_unused_leaf(below)
        return node

    around(patch, RadixTrie, "_split", split)


@fault
def a_split_forgets_who_uses_the_front(patch: Patch) -> None:
    def split(original: Any, *args: Any) -> TrieNode:
        above: TrieNode = original(*args)
        above.users = {}
        return above

    around(patch, RadixTrie, "_split", split)


@fault
def a_split_forgets_who_uses_the_tail(patch: Patch) -> None:
    def split(original: Any, trie: RadixTrie, node: TrieNode, num_pages: int) -> TrieNode:
        above: TrieNode = original(trie, node, num_pages)
        above.users = dict.fromkeys(above.users, 0)
        if node.users:
            node.users = {}
            trie.num_evictable_blocks += len(node.blocks)
            trie._queue_if_unused_leaf(node)
        return above

    around(patch, RadixTrie, "_split", split)


@fault
def a_split_renews_the_tail(patch: Patch) -> None:
    def split(original: Any, trie: RadixTrie, node: TrieNode, num_pages: int) -> TrieNode:
        above: TrieNode = original(trie, node, num_pages)
        trie._clock += 1
        node.last_access_time = trie._clock
        trie._queue_if_unused_leaf(node)
        return above

    around(patch, RadixTrie, "_split", split)


# ---------------------------------------------------------------- blocks that have no place


@fault
def blocks_in_use_are_overwritten(patch: Patch) -> None:
    def place(original: Any, node: TrieNode, incoming: list[Any]) -> Any:
        users, node.users = node.users, {}
        displaced = original(node, incoming)
        node.users = users
        return displaced

    around(patch, radix_trie, "place_blocks", place)


@fault
def blocks_that_nobody_uses_are_kept(patch: Patch) -> None:
    def place(original: Any, node: TrieNode, incoming: list[Any]) -> Any:
        users, node.users = node.users, {"somebody": 0}
        displaced = original(node, incoming)
        node.users = users
        return displaced

    around(patch, radix_trie, "place_blocks", place)


@fault
def only_the_first_displaced_block_is_told_of(patch: Patch) -> None:
    around(patch, radix_trie, "place_blocks", lambda original, *args: original(*args)[:1])


@fault
def a_displaced_block_is_told_of_twice(patch: Patch) -> None:
    around(
        patch, RadixTrie, "_on_displaced_blocks", lambda original, trie, blocks: original(trie, blocks + blocks[-1:])
    )


@fault
def a_refused_block_is_dropped_in_silence(patch: Patch) -> None:
    around(patch, radix_trie, "place_blocks", lambda original, node, new: [] if node.users else original(node, new))


@fault
def an_equal_block_is_told_of_as_displaced(patch: Patch) -> None:
    def place(original: Any, node: TrieNode, incoming: list[Any]) -> list[Any]:
        old = list(node.blocks)
        original(node, incoming)
        return list(incoming) if node.users else old

    around(patch, radix_trie, "place_blocks", place)


# ---------------------------------------------------------------- use by sequences


@fault
def a_mark_stops_at_a_node_that_another_sequence_holds(patch: Patch) -> None:
    def mark(original: Any, trie: RadixTrie, node: TrieNode, seq_id: Any) -> None:
        parent = node.parent
        if parent is None or not parent.users or seq_id in node.users or seq_id in parent.users:
            original(trie, node, seq_id)
            return
        users = node.users
        if not users:
            trie.num_evictable_blocks -= len(node.blocks)
            trie._queue.discard(node)
        users[seq_id] = 0

    around(patch, RadixTrie, "mark_in_use_by", mark)


@fault
def a_mark_holds_the_node_alone(patch: Patch) -> None:
    def mark(original: Any, trie: RadixTrie, node: TrieNode, seq_id: Any) -> None:
        trie._live(node)
        if node is not trie.root:
            trie.num_evictable_blocks -= 0 if node.users else len(node.blocks)
            trie._queue.discard(node)
            node.users.setdefault(seq_id, 0)

    around(patch, RadixTrie, "mark_in_use_by", mark)


@fault
def a_second_mark_counts_twice(patch: Patch) -> None:
    def mark(original: Any, trie: RadixTrie, node: TrieNode, seq_id: Any) -> None:
        again = seq_id in node.users
        original(trie, node, seq_id)
        if again:
            node.users[seq_id] += 1

    around(patch, RadixTrie, "mark_in_use_by", mark)


@fault
def a_release_lets_go_of_the_node_alone(patch: Patch) -> None:
    def release(original: Any, trie: RadixTrie, node: TrieNode, seq_id: Any) -> None:
        original(trie, node, seq_id)
        if node is not trie.root and node.parent is not trie.root:
            trie.mark_in_use_by(node.parent, seq_id)  # type: ignore[arg-type]

    around(patch, RadixTrie, "mark_not_in_use_by", release)


@fault
def a_release_lets_go_of_what_another_branch_needs(patch: Patch) -> None:
    def release(original: Any, trie: RadixTrie, node: TrieNode, seq_id: Any) -> None:
        original(trie, node, seq_id)
        step = node.parent
        while step is not None and step is not trie.root:
            if step.users.pop(seq_id, None) is not None and not step.users:
                trie.num_evictable_blocks += len(step.blocks)
            step = step.parent

    around(patch, RadixTrie, "mark_not_in_use_by", release)


@fault
def a_release_does_not_renew(patch: Patch) -> None:
    def release(original: Any, trie: RadixTrie, node: TrieNode, seq_id: Any) -> None:
        stamps = {node: node.last_access_time for node in trie.nodes()}
        original(trie, node, seq_id)
        for other, stamp in stamps.items():
            other.last_access_time = stamp
            if not other.users and not other.children:
                trie._queue.discard(other)
        for leaf in sorted(trie.nodes(), key=lambda node: node.last_access_time):
            if not leaf.users and not leaf.children:
                trie._queue.push(leaf)

    around(patch, RadixTrie, "mark_not_in_use_by", release)


@fault
def a_release_of_what_is_not_held_passes_in_silence(patch: Patch) -> None:
    def release(original: Any, trie: RadixTrie, node: TrieNode, seq_id: Any) -> None:
        if node.root is not trie.root or node is trie.root or seq_id in node.users:
            original(trie, node, seq_id)

    around(patch, RadixTrie, "mark_not_in_use_by", release)


@fault
def a_refused_release_has_renewed_the_node(patch: Patch) -> None:
    def release(original: Any, trie: RadixTrie, node: TrieNode, seq_id: Any) -> None:
        if node.root is trie.root and node is not trie.root:
            trie._clock += 1
            node.last_access_time = trie._clock
            trie._queue_if_unused_leaf(node)
        original(trie, node, seq_id)

    around(patch, RadixTrie, "mark_not_in_use_by", release)


@fault
def a_release_above_a_node_that_is_held_goes_through(patch: Patch) -> None:
    def release(original: Any, trie: RadixTrie, node: TrieNode, seq_id: Any) -> None:
        if node.root is trie.root and node.users.get(seq_id):
            node.users[seq_id] = 0
        original(trie, node, seq_id)

    around(patch, RadixTrie, "mark_not_in_use_by", release)


# ---------------------------------------------------------------- eviction


def push_last(queue: RecencyQueue[TrieNode], leaf: TrieNode) -> None:
    """`push`, as if the leaf had just been used."""
    queue._recent[leaf] = leaf.last_access_time
    queue._recent.move_to_end(leaf)


@fault
def the_most_recently_used_goes_first(patch: Patch) -> None:
    def pop(queue: RecencyQueue[TrieNode]) -> Any:
        return queue._recent.popitem(last=True)[0] if queue._recent else None

    patch.setattr(RecencyQueue, "pop", pop)
    patch.setattr(RecencyQueue, "push", push_last)


@fault
def a_new_leaf_of_an_old_node_goes_last(patch: Patch) -> None:
    patch.setattr(RecencyQueue, "push", push_last)


@fault
def a_leaf_keeps_its_turn_when_it_is_used_again(patch: Patch) -> None:
    def push(original: Any, queue: RecencyQueue[TrieNode], leaf: TrieNode) -> None:
        if leaf in queue._recent:
            queue._recent[leaf] = leaf.last_access_time
        else:
            original(queue, leaf)

    around(patch, RecencyQueue, "push", push)


@fault
def leaves_in_use_are_evicted(patch: Patch) -> None:
    def evict(original: Any, trie: RadixTrie, count: int) -> list[Any]:
        for leaf in trie.nodes():
            if leaf.users and not leaf.children:
                trie._queue.push(leaf)
                trie.num_evictable_blocks += len(leaf.blocks)
        return original(trie, count)  # type: ignore[no-any-return]

    around(patch, RadixTrie, "evict_blocks", evict)


@fault
def a_parent_never_becomes_a_candidate(patch: Patch) -> None:
    def trim(original: Any, trie: RadixTrie, leaf: TrieNode, most: int) -> Any:
        parent = leaf.parent
        trimmed = original(trie, leaf, most)
        if parent is not None and not parent.children:
            trie._queue.discard(parent)
        return trimmed

    around(patch, RadixTrie, "_trim", trim)


@fault
def an_unused_leaf_never_becomes_a_candidate_again(patch: Patch) -> None:
    patch.setattr(RadixTrie, "_queue_if_unused_leaf", lambda trie, node: None)


@fault
def eviction_takes_blocks_from_the_front_of_a_leaf(patch: Patch) -> None:
    def trim(original: Any, trie: RadixTrie, leaf: TrieNode, most: int) -> Any:
        leaf.blocks.reverse()
        return original(trie, leaf, most)

    around(patch, RadixTrie, "_trim", trim)


@fault
def eviction_takes_whole_leaves(patch: Patch) -> None:
    around(patch, RadixTrie, "_trim", lambda original, trie, leaf, most: original(trie, leaf, len(leaf.blocks)))


@fault
def eviction_stops_after_one_leaf(patch: Patch) -> None:
    def evict(original: Any, trie: RadixTrie, count: int) -> list[Any]:
        leaf = trie._queue.pop()
        if leaf is None:
            return []
        trie._queue.push(leaf)
        return original(trie, min(count, len(leaf.blocks)))  # type: ignore[no-any-return]

    around(patch, RadixTrie, "evict_blocks", evict)


@fault
def the_tail_of_a_trimmed_leaf_stays_with_its_node(patch: Patch) -> None:
    def trim(original: Any, trie: RadixTrie, leaf: TrieNode, most: int) -> Any:
        if len(leaf.blocks) <= most:
            return original(trie, leaf, most)
        trimmed = leaf.blocks[-most:][::-1]
        del leaf.blocks[-most:], leaf.tokens[-most * trie.page_size :]
        trie._queue.push(leaf)
        return trimmed

    around(patch, RadixTrie, "_trim", trim)


@fault
def eviction_is_not_counted(patch: Patch) -> None:
    def evict(original: Any, trie: RadixTrie, count: int) -> Any:
        counts = trie.num_blocks, trie.num_evictable_blocks
        evicted = original(trie, count)
        trie.num_blocks, trie.num_evictable_blocks = counts
        return evicted

    around(patch, RadixTrie, "evict_blocks", evict)


# ---------------------------------------------------------------- nodes of long ago, and refusals


@fault
def a_node_that_was_evicted_is_let_in(patch: Patch) -> None:
    patch.setattr(RadixTrie, "_live", lambda trie, node: node or trie.root)


@late_fault
def an_evicted_node_comes_to_life_with_its_tokens(patch: Patch) -> None:
    gone: dict[tuple[Any, ...], TrieNode] = {}

    def trim(original: Any, trie: RadixTrie, leaf: TrieNode, most: int) -> Any:
        prefix, step = [], leaf
        while step.parent is not None:
            prefix.append(tuple(step.tokens))
            step = step.parent
        gone[tuple(prefix)] = leaf
        return original(trie, leaf, most)

    def add_leaf(original: Any, trie: RadixTrie, parent: TrieNode, tokens: Any, blocks: Any) -> Any:
        leaf = original(trie, parent, tokens, blocks)
        prefix, step = [], leaf
        while step.parent is not None:
            prefix.append(tuple(step.tokens))
            step = step.parent
        old = gone.pop(tuple(prefix), None)
        if old is None or old.root is not None:
            return leaf
        old.parent, old.root, old.tokens, old.blocks = leaf.parent, leaf.root, leaf.tokens, leaf.blocks
        old.last_access_time = leaf.last_access_time
        parent.children[old.first_page(trie.page_size)] = old
        return old

    around(patch, RadixTrie, "_trim", trim)
    around(patch, RadixTrie, "_add_leaf", add_leaf)


@fault
def a_wrong_number_of_blocks_is_found_too_late(patch: Patch) -> None:
    def insert(original: Any, trie: RadixTrie, tokens: Any, blocks: Any, node: Any = None) -> Any:
        try:
            return original(trie, tokens, blocks, node)
        except InvalidKeyError:
            trie.match_prefix(tokens[: len(tokens) // 2 or 1], node)  # the nodes that the insert had split
            raise

    around(patch, RadixTrie, "insert", insert)


@fault
def tokens_that_cannot_be_hashed_are_let_in(patch: Patch) -> None:
    def tokens_of(original: Any, tokens: Any) -> list[Any]:
        return list(tokens) or original(tokens)

    around(patch, radix_trie, "token_list", tokens_of)


@fault
def a_remainder_of_a_page_is_cut_off_in_silence(patch: Patch) -> None:
    def insert(original: Any, trie: RadixTrie, tokens: Any, blocks: Any, node: Any = None) -> Any:
        whole = len(tokens) - len(tokens) % trie.page_size
        return original(trie, tokens[:whole], blocks, node)

    around(patch, RadixTrie, "insert", insert)


@pytest.mark.parametrize("plant", FAULTS.cases())
def test_random_traffic_finds(plant: Fault, monkeypatch: Patch) -> None:
    plant(monkeypatch)

    with pytest.raises(TrafficFailed):
        for seed, page_size in RUNS:
            run_trie_traffic(seed, page_size, num_operations=400)


def test_a_trie_without_a_fault_passes_what_the_faults_fail() -> None:
    for seed, page_size in RUNS:
        run_trie_traffic(seed, page_size, num_operations=400)
