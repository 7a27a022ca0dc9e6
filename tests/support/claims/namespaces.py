"""The claims about namespaces, and the triples to test them.

They are cut out of one text, so that they read alike wherever their parts are merely put in a row; the same ids are
inserted in each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from support.reference.event_index import ReplayedIndex, batch_after, groups_of
from support.reference.keys import Token, Triple, event_hashes, framed, page_hashes, seed_of

from raydix.actors.service.event_feed import EventFeed
from raydix.cache_core import MambaRadixCache, PrefixCacheManager, RadixCache, RadixKey, TreeNode
from raydix.cache_core.radix.prefix_cache import PrefixCache
from raydix.cache_core.tree.hashing import namespace_seed
from raydix.cache_core.trie_prefix_cache import TriePrefixCache
from raydix.schemas import BlockStored, frame_namespace
from raydix.schemas.namespace import unframe_namespace

Space = tuple[Triple, int]  # a namespace, and the ids of a tuple (0: plain ids)

LETTERS = "\0-:1a\u00e9"
TREES: dict[str, Callable[[int], PrefixCache]] = {
    "full": RadixCache,
    "window": lambda page_size: RadixCache(page_size, sliding_window_size=page_size),
    "mamba": MambaRadixCache,
}


@st.composite
def alike(draw: st.DrawFn) -> list[Triple]:
    """Different triples that are cut out of one text, parts without characters being empty or absent."""
    text = draw(st.text(LETTERS, max_size=6))
    place = st.integers(0, len(text))
    triples: list[Triple] = []
    for _ in range(draw(st.integers(2, 6))):
        one, two = sorted((draw(place), draw(place)))
        cut = [part or draw(st.sampled_from([None, ""])) for part in (text[:one], text[one:two], text[two:])]
        triples.append((cut[0], cut[1], cut[2]))
    return list(dict.fromkeys(triples))


part = st.none() | st.text(LETTERS, max_size=4) | st.text(max_size=3)
any_triples = st.lists(st.tuples(part, part, part), min_size=2, max_size=5, unique=True)
some_triples = st.one_of(alike(), any_triples)


@st.composite
def some_spaces(draw: st.DrawFn) -> list[Space]:
    """The same, with keys of different arity."""
    triples = draw(some_triples)
    return draw(st.lists(st.tuples(st.sampled_from(triples), st.integers(0, 3)), min_size=2, max_size=6, unique=True))


some_ids = st.lists(st.sampled_from([0, 1, 2, 2**32 - 1, 2**32, 2**64 - 1]), min_size=24, max_size=24)
page_sizes = st.sampled_from([1, 2, 4])


def elements(ids: list[int], arity: int) -> list[Token]:
    """The ids as they are, or in tuples."""
    return list(zip(*[iter(ids)] * arity, strict=True)) if arity else list(ids)


def nodes_above(tree: PrefixCache, node: TreeNode) -> list[TreeNode]:
    """A node and its ancestors below the root, tops included."""
    path: list[TreeNode] = []
    while node is not tree.root:
        path.append(node)
        assert node.parent is not None
        node = node.parent
    return path


# ---------------------------------------------------------------- claims


def frames_meet_only_if_triples_are_equal(triples: list[Triple]) -> None:
    frames = [frame_namespace(*triple) for triple in triples]

    assert frames == [framed(triple) for triple in triples]
    assert len(set(frames)) == len(set(triples))
    for triple, frame in zip(triples, frames, strict=True):
        assert namespace_seed(frame) == (seed_of(frame) or None)
        assert frame is None or unframe_namespace(frame) == triple


def spaces_share_nothing(kind: str, spaces: list[Space], ids: list[int], page_size: int) -> None:
    """No node, no slot, no hash, no event."""
    tree = TREES[kind](page_size)
    feed = EventFeed("e", page_size, "CPU", groups=groups_of(tree))
    tree.publish_events_to(feed)
    index = ReplayedIndex()
    told: set[int] = set()
    for number, (triple, arity) in enumerate(spaces, 1):
        tokens = elements(ids, arity)
        slots = torch.arange(len(tokens)) + 100 * number
        tree.insert(RadixKey(tokens, frame_namespace(*triple)), slots, mamba_value=number)
        batch = batch_after(feed, index.seq)
        chain: list[int] = []
        for event in batch.events:
            assert isinstance(event, BlockStored)
            assert (event.namespace, event.lora_name) == (framed(triple), triple[1])
            if not event.group_idx:
                chain += event.block_hashes
        assert chain == event_hashes(tokens, page_size, triple)
        assert told.isdisjoint(chain)
        told.update(chain)
        index.apply(batch)

    nodes: list[TreeNode] = []
    for number, (triple, arity) in enumerate(spaces, 1):
        tokens = elements(ids, arity)
        match = tree.match_prefix(RadixKey(tokens, frame_namespace(*triple)))
        assert match.indices.tolist() == [100 * number + at for at in range(len(tokens) // page_size * page_size)]
        path = nodes_above(tree, match.last_node)
        digests = [digest for node in reversed(path) for digest in tree.compute_node_hash(node)]
        assert digests == page_hashes(tokens, page_size, triple)
        nodes += path
    assert len(nodes) == len(set(nodes))

    tree.check_invariants()
    tree.evict(sum(len(elements(ids, arity)) for _, arity in spaces))
    index.apply(batch_after(feed, index.seq))
    assert not index.blocks


def spaces_share_no_page_of_a_trie(spaces: list[Space], ids: list[int], page_size: int) -> None:
    trie = TriePrefixCache(page_size)
    for number, (triple, arity) in enumerate(spaces, 1):
        key = RadixKey(elements(ids, arity), frame_namespace(*triple))
        assert trie.match_prefix(key).prefix_len == 0
        trie.insert(key, torch.arange(len(key)) + 100 * number)

    for number, (triple, arity) in enumerate(spaces, 1):
        match = trie.match_prefix(RadixKey(elements(ids, arity), frame_namespace(*triple)))
        assert match.indices.tolist() == [100 * number + at for at in range(match.prefix_len)]
        assert match.prefix_len == len(elements(ids, arity)) // page_size * page_size


def spaces_share_no_row(triples: list[Triple], ids: list[int]) -> None:
    rows = PrefixCacheManager(max_capacity=1000)
    for slot, triple in enumerate(triples):
        key = RadixKey(ids, frame_namespace(*triple))
        assert rows.find(key) == (0, -1, 0)
        rows.insert(key, slot, 1)

    for slot, triple in enumerate(triples):
        assert rows.find(RadixKey(ids, frame_namespace(*triple))) == (len(ids), slot, 1)
