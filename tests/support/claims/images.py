"""The claims about prompts with images and about keys of pairs, and the prompts to test them.

An image is an id of 64 bits among text ids of 32. The text is chosen to look like it: its halves, in either order, are
the very bytes of the image's id, or its lower half alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from support.reference.event_index import ReplayedIndex, batch_after, groups_of, snapshot_of
from support.reference.keys import Token, event_hashes, page_hashes, pairs

from raydix.actors.service.event_feed import EventFeed
from raydix.cache_core import (
    KVCache,
    MambaRadixCache,
    PrefixCacheManager,
    RadixCache,
    RadixKey,
    TokenToKVPoolAllocator,
    hash_bytes,
)
from raydix.cache_core.radix.prefix_cache import PrefixCache
from raydix.cache_core.trie_prefix_cache import TriePrefixCache

Prompt = list[int]

IMAGES = [hash_bytes(bytes([number])) for number in (0, 1)]
HALVES = [half for image in IMAGES for half in (image % 2**32, image >> 32)]
EDGES = [0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
FORMS: dict[str, Callable[[Prompt], Any]] = {
    "list": list,
    "uint64": lambda ids: np.array(ids, np.uint64),
    "big-endian": lambda ids: np.array(ids, ">u8"),
    "array": lambda ids: array("Q", ids),
    "torch-uint64": lambda ids: torch.from_numpy(np.array(ids, np.uint64)),
    "torch-int64": lambda ids: torch.tensor(ids if max(ids) < 2**63 else np.array(ids, np.uint64)),
}
TREES: dict[str, Callable[[int], PrefixCache]] = {
    "full": RadixCache,
    "window": lambda page_size: RadixCache(page_size, sliding_window_size=2 * page_size),
}

text_ids = st.sampled_from([*HALVES, *EDGES[:3]])
any_ids = text_ids | st.sampled_from([*IMAGES, *EDGES])


@st.composite
def some_prompts(draw: st.DrawFn) -> list[Prompt]:
    """Text first, so that ids are narrow when the first image comes; each continues a part of an earlier one, or
    of the bytes of an earlier one."""
    prompts = [draw(st.lists(text_ids, min_size=4, max_size=12))]
    for _ in range(draw(st.integers(1, 7))):
        known = draw(st.sampled_from(prompts))
        known = draw(st.sampled_from([known, spelled(known), joined(known)]))
        prompts.append(known[: draw(st.integers(0, len(known)))] + draw(st.lists(any_ids, max_size=6)) or [1])
    return prompts


def spelled(prompt: Prompt) -> Prompt:
    """The text of the same bytes: each long id as its two halves."""
    return [half for id_ in prompt for half in ((id_ % 2**32, id_ >> 32) if id_ >> 32 else (id_,))]


def joined(prompt: Prompt) -> Prompt:
    """The long ids of the same bytes: each two ids of text as one."""
    if max(prompt) >> 32:
        return prompt
    return [low + (high << 32) for low, high in zip(prompt[::2], prompt[1::2], strict=False)] or prompt


def num_shared(one: Prompt, other: Prompt) -> int:
    """Leading ids that two prompts share."""
    return next(
        (at for at, both in enumerate(zip(one, other, strict=False)) if both[0] != both[1]), min(len(one), len(other))
    )


# ---------------------------------------------------------------- claims


def prompts_meet_where_their_ids_are_equal(kind: str, prompts: list[Prompt], page_size: int, forms: list[str]) -> None:
    """Check every width of ids; each prompt keeps the hashes of its events."""
    tree = TREES[kind](page_size)
    feed = EventFeed("e", page_size, "CPU", groups=groups_of(tree))
    tree.publish_events_to(feed)
    index, there = ReplayedIndex(), set[int]()
    for number, (prompt, form) in enumerate(zip(prompts, forms, strict=False)):
        for asked in (prompt, spelled(prompt), joined(prompt)):
            shared = max((num_shared(asked, known) for known in prompts[:number]), default=0)
            assert tree.match_prefix(RadixKey(FORMS[form](asked))).prefix_len == shared // page_size * page_size

        tree.insert(RadixKey(FORMS[form](prompt)))

        there.update(event_hashes(prompt, page_size))
        index.apply(batch_after(feed, index.seq))
        assert index.hashes == there
        tree.check_invariants()
        for known in prompts[: number + 1]:
            assert digests_of(tree, known) == page_hashes(known, page_size)
    assert ReplayedIndex(snapshot_of(feed, tree)).blocks == index.blocks


def digests_of(tree: PrefixCache, tokens: list[Any]) -> list[str]:
    """The hashes of all whole pages of a cached key, from the root."""
    node = tree.match_prefix(RadixKey(tokens)).last_node
    digests: list[str] = []
    while node is not tree.root and node.key is not None:
        digests = tree.compute_node_hash(node) + digests
        assert node.parent is not None
        node = node.parent
    return digests


def prompts_meet_in_states_tries_and_rows(prompts: list[Prompt], page_size: int, forms: list[str]) -> None:
    """Check kinds without hashes: a state matches at the end of its own prompt, a page or row up to that point."""
    states, trie, rows = MambaRadixCache(), TriePrefixCache(page_size), PrefixCacheManager()
    for number, (prompt, form) in enumerate(zip(prompts, forms, strict=False)):
        for asked in (prompt, spelled(prompt), joined(prompt)):
            key, known = RadixKey(FORMS[form](asked)), prompts[:number]
            shared = max((num_shared(asked, each) for each in known), default=0)
            whole = max((len(each) for each in known if asked[: len(each)] == each), default=0)
            assert states.match_prefix(key).prefix_len == whole
            assert trie.match_prefix(key).prefix_len == shared // page_size * page_size
            assert rows.find(key).prefix_len == shared

        key = RadixKey(FORMS[form](prompt))
        states.insert(key, mamba_value=number + 1)
        trie.insert(key, torch.arange(len(key)) + 100 * number)
        rows.insert(key, number, 1)


def pairs_lose_one_token_and_what_is_then_no_whole_page(prompts: list[Prompt], page_size: int) -> None:
    """n tokens make n - 1 pairs, and pairs are hashed as pairs; leases go on counting tokens."""
    allocator = TokenToKVPoolAllocator(64 * page_size, page_size)
    tree, feed = RadixCache(page_size, None, allocator), EventFeed("e", page_size, "CPU")
    tree.publish_events_to(feed)
    core = KVCache(tree, allocator, bigram=True)
    index, there = ReplayedIndex(), dict[int, list[int]]()
    for number, prompt in enumerate(prompts):
        key, units = RadixKey(prompt), max(0, len(prompt) - 1)
        shared = max((num_shared(prompt, known) - 1 for known in prompts[:number]), default=0)
        hit = max(0, shared) // page_size * page_size
        assert core.match(key).prefix_len == hit

        lease = core.acquire(str(number), "s", key)
        assert (lease.prefix_len, lease.num_slots, len(lease.starts)) == (
            hit,
            len(prompt),
            -(-len(prompt) // page_size),
        )
        done = core.insert(str(number), "s", len(prompt), key[len(key) :])
        core.check_invariants()
        assert done.num_inserted == units // page_size * page_size - hit
        assert lease.num_published_pages == units // page_size
        core.release(str(number), "s")
        assert core.match(key).prefix_len == units // page_size * page_size

        firsts = [prompt[start : start + page_size] for start in range(0, units - page_size + 1, page_size)]
        there.update(zip(event_hashes(pairs(prompt), page_size), firsts, strict=True))
        index.apply(batch_after(feed, index.seq))
        assert {each: list(block.token_ids) for each, block in index.blocks.items()} == there
        assert there.keys().isdisjoint(event_hashes(prompt, page_size))
        tokens: list[Token] = pairs(prompt)
        assert digests_of(tree, tokens) == page_hashes(tokens, page_size)
