"""A router's index of blocks from KV events, which refuses wrong events; and the true contents to compare with."""

from __future__ import annotations

from functools import cache as memoised
from typing import Any, NamedTuple

from raydix.actors.service.event_feed import EventFeed
from raydix.cache_core import hash_to_int64, hash_token_ids
from raydix.cache_core.radix.prefix_cache import PrefixCache
from raydix.cache_core.tree.hashing import namespace_seed
from raydix.schemas import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
    KVEventSnapshot,
    PackedEvents,
)
from raydix.schemas.events import BlockGroup

Tokens = tuple[Any, ...]


class Block(NamedTuple):
    """A block that is there."""

    parent: int | None
    namespace: str | None
    token_ids: tuple[int, ...]


class ReplayedIndex:
    """Blocks by hash, from events. Empty at first, or from a snapshot."""

    def __init__(self, snapshot: KVEventSnapshot | None = None) -> None:
        self.seq = 0
        self.blocks: dict[int, Block] = {}  # full KV
        self.others: dict[int, set[int]] = {1: set(), 2: set()}  # the blocks of the other groups
        if snapshot is not None:
            for event in snapshot.events:
                self._apply(event)
            self.seq = snapshot.seq

    @property
    def hashes(self) -> set[int]:
        """Return the blocks."""
        return set(self.blocks)

    def apply(self, batch: KVEventBatch) -> None:
        """Take in a batch that follows what was applied before, without a gap."""
        assert not batch.gap
        assert batch.seq - len(batch.events) == self.seq, f"{batch.seq=} after {self.seq=}"
        for event in batch.events:
            self._apply(event)
        self.seq = batch.seq

    def _apply(self, event: KVEvent) -> None:
        match event:
            case BlockStored():
                self._store(event)
            case BlockRemoved():
                self._remove(event)
            case AllBlocksCleared():
                self.blocks.clear()
                for blocks in self.others.values():
                    blocks.clear()

    def _store(self, event: BlockStored) -> None:
        ids, size, parent = event.token_ids.tolist(), event.block_size, event.parent_block_hash
        assert len(ids) == size * len(event.block_hashes) > 0
        if event.group_idx:
            blocks = self.others[event.group_idx]
            assert blocks.isdisjoint(event.block_hashes), "stored twice"
            blocks.update(event.block_hashes)
            for number, block in enumerate(event.block_hashes):
                there = Block(parent, event.namespace, tuple(ids[number * size : (number + 1) * size]))
                assert self.blocks[block] == there, f"{block} differs from the block of the full KV"
                parent = block
            return
        assert parent is None or self.blocks[parent].namespace == event.namespace
        for number, each in enumerate(event.block_hashes):
            assert each not in self.blocks, f"{each} is stored twice"
            self.blocks[each] = Block(parent, event.namespace, tuple(ids[number * size : (number + 1) * size]))
            parent = each

    def _remove(self, event: BlockRemoved) -> None:
        namespaces = {self.blocks[each].namespace for each in event.block_hashes}
        assert len(namespaces) == 1, f"{namespaces} share an event"
        if event.group_idx:
            assert self.others[event.group_idx].issuperset(event.block_hashes)
            self.others[event.group_idx].difference_update(event.block_hashes)
            return
        for blocks in self.others.values():
            assert blocks.isdisjoint(event.block_hashes), "the full KV goes before window KV or a state"
        for each in event.block_hashes:
            assert all(block.parent != each for block in self.blocks.values()), f"{each} goes before its children"
            del self.blocks[each]


def batch_after(feed: EventFeed, after_seq: int) -> KVEventBatch:
    """Return a reader's next batch of full events; an empty one if there are no later events."""
    batches = feed.batches_after(after_seq).unpack(after_seq)
    batch = batches[0] if batches else KVEventBatch(epoch="e", seq=after_seq, events=())
    assert isinstance(batch, KVEventBatch)
    return batch


def snapshot_of(feed: EventFeed, tree: PrefixCache) -> KVEventSnapshot:
    """Return a snapshot of full events."""
    packed = feed.snapshot(tree.resident_pages())
    assert isinstance(packed, PackedEvents)
    return packed.snapshot()


def resident_blocks(tree: PrefixCache) -> dict[int, Block]:
    """Return the blocks that can be matched in a tree, from the tokens of its nodes."""
    found: dict[int, Block] = {}
    for top in tree.parts.tree.tops.values():
        paths: dict[Any, Tokens] = {top: ()}
        for node in tree.parts.tree.nodes_below(top):
            assert node.key is not None and node.parent is not None
            before = len(paths[node.parent])
            paths[node] = paths[node.parent] + tuple(node.key.token_ids)
            for start in range(before, len(paths[node]), tree.page_size):
                pages = _pages(paths[node][: start + tree.page_size], tree.page_size)
                ids = tuple(each[0] if isinstance(each, tuple) else each for each in pages[-1])
                parent = _chained(pages[:-1], top.namespace.extra_key)
                found[_as_int(_chained(pages, top.namespace.extra_key))] = Block(
                    None if len(pages) == 1 else _as_int(parent), top.namespace.extra_key, ids
                )
    return found


def resident_others(tree: PrefixCache) -> dict[int, set[int]]:
    """Return the blocks with window KV, and those with a state, by group."""
    found: list[set[int]] = []
    digests = {node: [_as_int(digest) for digest in tree.compute_node_hash(node)] for node in tree.parts.tree.nodes()}
    if tree.parts.window is not None:
        found.append({block for node, blocks in digests.items() if not node.swa_tombstone for block in blocks})
    if tree.parts.states is not None:
        holders = [node for node in digests if getattr(node, "mamba_value", None) is not None]
        found.append({digests[node][-1] for node in holders})
    return {1: set(), 2: set()} | dict(enumerate(found, 1))


def groups_of(tree: PrefixCache) -> tuple[BlockGroup, ...]:
    """Return the groups of a tree's events; none if it has full KV alone."""
    window = tree.sliding_window_size
    groups = [BlockGroup("sliding_window", window)] if window is not None else []
    groups += [BlockGroup("mamba")] if tree.parts.states is not None else []
    return (BlockGroup("full_attention"), *groups) if groups else ()


def _pages(tokens: Tokens, page_size: int) -> tuple[Tokens, ...]:
    return tuple(tokens[start : start + page_size] for start in range(0, len(tokens), page_size))


@memoised
def _chained(pages: tuple[Tokens, ...], namespace: str | None) -> str | None:
    """The digest of the last of these pages, from the definition: each chained to the one before, the first seeded."""
    if not pages:
        seed = namespace_seed(namespace)
        return None if seed is None else seed.hex()
    return hash_token_ids(pages[-1], _chained(pages[:-1], namespace))


def _as_int(digest: str | None) -> int:
    assert digest is not None
    return hash_to_int64(digest)
