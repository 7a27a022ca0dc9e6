"""Namespaces (`extra_key`) never share a node, a hash or an event.

The promise is checked through the verbs, in caches of every kind; then for any characters in the three parts of a
namespace, and keys of any arity. Then each layer is broken once, and a claim must detect it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import strategies as st
from support.caches.cache_kinds import only, pages_of_several, shares
from support.caches.cache_under_test import CacheUnderTest, small_config
from support.claims.hypothesis_claims import refute, uphold
from support.claims.namespaces import (
    TREES,
    frames_meet_only_if_triples_are_equal,
    page_sizes,
    some_ids,
    some_spaces,
    some_triples,
    spaces_share_no_page_of_a_trie,
    spaces_share_no_row,
    spaces_share_nothing,
)
from support.reference.keys import framed

from raydix.actors import LocalPrefixCache
from raydix.cache_core import RadixKey
from raydix.cache_core.tree import page_hashes
from raydix.cache_core.tree.hashing import hash_page, namespace_seed
from raydix.cache_core.tree.radix_tree import RadixTree
from raydix.cache_core.trie_prefix_cache import TriePrefixCache
from raydix.schemas import BlockStored, frame_namespace, namespace
from raydix.schemas.namespace import unframe_namespace

Patch = pytest.MonkeyPatch
FRAME = dict.fromkeys(("extra_key", "lora_id", "cache_salt"))


ALIKE = [  # the same text, cut at other places
    {},
    {"extra_key": ""},
    {"extra_key": "ab"},
    {"lora_id": "ab"},
    {"cache_salt": "ab"},
    {"extra_key": "a", "lora_id": "b"},
    {"lora_id": "a", "cache_salt": "b"},
    {"extra_key": "1:a-1:b"},
]


@only(shares, pages_of_several)
async def test_a_namespace_hits_no_other_ones_pages_and_retiring_one_leaves_the_others(
    cache: CacheUnderTest,
) -> None:
    for spaces in pairwise(ALIKE):  # the pool holds no more at a time
        for space in spaces:
            assert await cache.matched(1, 2, **space) == 0
            await cache.publish(1, 2, **space)
        if first := spaces[0]:
            await cache.client.retire(**first)
            assert await cache.matched(1, 2, **first) == 0
        assert await cache.matched(1, 2, **spaces[1]) == cache.reusable(2)
        await cache.client.reset()


async def test_no_event_is_of_two_namespaces_and_no_hash_is_published_twice() -> None:
    async with LocalPrefixCache(small_config(4).model_copy(update={"events": True})) as cache:
        for space in ALIKE:
            lease = await cache.acquire([1] * 8, **space)
            await lease.insert([1] * 8, release=True)
            await cache.evict(8)
        told: dict[int, str | None] = {}
        async for batch in cache.events(after_seq=0):
            for event in batch.events:
                for block_hash in event.block_hashes if isinstance(event, BlockStored) else ():
                    assert told.setdefault(block_hash, event.namespace) == event.namespace
            break

    assert len(told) == 2 * len(ALIKE)
    assert set(told.values()) == {frame_namespace(**FRAME | space) for space in ALIKE}


def test_a_frame_is_as_defined_and_gives_its_triple_back() -> None:
    uphold(frames_meet_only_if_triples_are_equal, 500, triples=some_triples)


def test_a_text_that_is_not_a_frame_is_refused() -> None:
    def no_other_text_is_a_frame(text: str) -> None:
        try:
            triple = unframe_namespace(text)
        except ValueError:
            return
        assert framed(triple) == text

    uphold(no_other_text_is_a_frame, 500, text=st.text("-0123:a_ +\u0661", max_size=9) | st.text(max_size=5))


@pytest.mark.parametrize("kind", TREES)
def test_no_two_spaces_share_a_node_a_hash_or_an_event(kind: str) -> None:
    uphold(spaces_share_nothing, kind=st.just(kind), spaces=some_spaces(), ids=some_ids, page_size=page_sizes)


def test_no_two_spaces_share_a_page_of_a_trie() -> None:
    uphold(spaces_share_no_page_of_a_trie, spaces=some_spaces(), ids=some_ids, page_size=page_sizes)


def test_no_two_namespaces_share_a_row() -> None:
    uphold(spaces_share_no_row, triples=some_triples, ids=some_ids)


# ---------------------------------------------------------------- planted faults

Fault = Callable[[Patch], None]
FRAMES: list[Fault] = []
SPACES: list[Fault] = []
TRIES: list[Fault] = []


def breaks(*claims: list[Fault]) -> Callable[[Fault], Fault]:
    """Register a fault with the claims that must detect it; its name describes the defect."""

    def register(plant: Fault) -> Fault:
        for faults in claims:
            faults.append(plant)
        return plant

    return register


@breaks(FRAMES, SPACES, TRIES)
def parts_are_framed_without_lengths(patch: Patch) -> None:
    patch.setattr(namespace, "_frame", lambda name, part: "-" if part is None else part)


@breaks(FRAMES, SPACES, TRIES)
def parts_are_joined_by_a_separator(patch: Patch) -> None:
    patch.setattr(namespace, "_frame", lambda name, part: "-" if part is None else f"{part}\0")


@breaks(FRAMES, SPACES, TRIES)
def an_empty_part_is_an_absent_one(patch: Patch) -> None:
    original = namespace._frame
    patch.setattr(namespace, "_frame", lambda name, part: original(name, part or None))


@breaks(FRAMES, SPACES, TRIES)
def the_salt_does_not_count(patch: Patch) -> None:
    original = namespace._frame
    patch.setattr(namespace, "_frame", lambda name, part: "-" if name == "cache_salt" else original(name, part))


@breaks(FRAMES)
def lengths_are_counted_in_bytes(patch: Patch) -> None:
    patch.setattr(namespace, "_frame", lambda name, part: "-" if part is None else f"{len(part.encode())}:{part}")


@breaks(SPACES)
def the_salt_is_left_out_of_the_seed(patch: Patch) -> None:
    def without_salt(extra_key: str | None) -> bytes | None:
        if extra_key is None:
            return None
        return namespace_seed(frame_namespace(*unframe_namespace(extra_key)[:2], None))

    patch.setattr(page_hashes, "namespace_seed", without_salt)


@breaks(SPACES)
def the_default_namespace_is_seeded_as_the_empty_one(patch: Patch) -> None:
    patch.setattr(page_hashes, "namespace_seed", lambda extra_key: namespace_seed(extra_key or "0:0:0:"))


@breaks(SPACES)
def the_arity_is_left_out_of_the_hash(patch: Patch) -> None:
    patch.setattr(page_hashes, "hash_page", lambda ids, width, arity, prior: hash_page(ids, width, 0, prior))


@breaks(SPACES)
def a_tree_ignores_the_arity_at_the_top(patch: Patch) -> None:
    class Tops(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            return super().get(key[0], default)

        def __setitem__(self, key: Any, top: Any) -> None:
            super().__setitem__(key[0], top)

        def __delitem__(self, key: Any) -> None:
            super().__delitem__(key[0])

    original = RadixTree.__init__

    def blind(tree: RadixTree, *args: Any) -> None:
        original(tree, *args)
        tree.tops = Tops()

    patch.setattr(RadixTree, "__init__", blind)


@breaks(SPACES)
def a_tree_ignores_the_namespace_at_the_top(patch: Patch) -> None:
    original = RadixTree.ensure_namespace

    def ensure_namespace(tree: RadixTree, key: RadixKey, now: int) -> Any:
        return original(tree, RadixKey.from_packed(key.data, key.width, None, key.arity), now)

    patch.setattr(RadixTree, "ensure_namespace", ensure_namespace)


@breaks(TRIES)
def a_trie_ignores_the_namespace(patch: Patch) -> None:
    patch.setattr(TriePrefixCache, "_tokens", lambda cache, key, *start: list(key.token_ids))


@pytest.mark.parametrize("plant", FRAMES, ids=lambda plant: plant.__name__)
def test_a_fault_in_frames_is_seen(plant: Fault, monkeypatch: Patch) -> None:
    plant(monkeypatch)

    refute(frames_meet_only_if_triples_are_equal, triples=some_triples)


@pytest.mark.parametrize("plant", SPACES, ids=lambda plant: plant.__name__)
def test_a_fault_in_trees_and_hashes_is_seen(plant: Fault, monkeypatch: Patch) -> None:
    plant(monkeypatch)

    refute(
        spaces_share_nothing,
        kind=st.just("full"),
        spaces=some_spaces(),
        ids=some_ids,
        page_size=page_sizes,
    )


@pytest.mark.parametrize("plant", TRIES, ids=lambda plant: plant.__name__)
def test_a_fault_in_tries_is_seen(plant: Fault, monkeypatch: Patch) -> None:
    plant(monkeypatch)

    refute(spaces_share_no_page_of_a_trie, spaces=some_spaces(), ids=some_ids, page_size=page_sizes)
