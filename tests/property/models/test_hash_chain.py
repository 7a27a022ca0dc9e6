"""Page hashes: chained from the root, the namespace's own, and the same whatever the tree went through."""

import itertools
from random import Random

import pytest
import torch
from support.checked.radix_cache import make_key
from support.reference.models import Tokens, reference_hashes

from raydix.cache_core import RadixCache, RadixKey, TreeNode, hash_token_ids

TOKENS = tuple(range(1, 25))
WIDE = 2**32


def chained(tokens: Tokens, page_size: int) -> list[str]:
    """`hash_token_ids` page by page."""
    hashes: list[str] = []
    for start in range(0, len(tokens), page_size):
        hashes.append(hash_token_ids(list(tokens[start : start + page_size]), hashes[-1] if hashes else None))
    return hashes


def hashes_of_path(cache: RadixCache, tokens: Tokens, namespace: str | None = None) -> list[str]:
    """The hashes of all pages of a cached key, node by node from the root."""
    node: TreeNode = cache.match_prefix(make_key(tokens, namespace)).last_node
    hashes: list[str] = []
    while node is not cache.root and node.key is not None:
        hashes = cache.compute_node_hash(node) + hashes
        assert node.parent is not None
        node = node.parent
    return hashes


def hashes_after_insert(tokens: Tokens, page_size: int, namespace: str | None = None) -> list[str]:
    cache = RadixCache(page_size)
    cache.insert(make_key(tokens, namespace))
    return hashes_of_path(cache, tokens, namespace)


@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_hashes_of_the_default_namespace_are_those_of_the_pages_in_a_chain(page_size: int) -> None:
    hashes = hashes_after_insert(TOKENS, page_size)

    assert hashes == chained(TOKENS, page_size) == reference_hashes(TOKENS, page_size)


def test_equal_pages_at_different_depths_have_different_hashes() -> None:
    hashes = hashes_after_insert((1, 2) * 4, page_size=2)

    assert len(set(hashes)) == 4


@pytest.mark.parametrize("order", itertools.permutations(range(3)), ids=str)
def test_hashes_do_not_depend_on_the_order_of_hashing(order: tuple[int, ...]) -> None:
    cache = RadixCache(4)
    nodes = [cache.insert(RadixKey(TOKENS[:end])).last_node for end in (8, 12, 24)]

    hashes = {index: cache.compute_node_hash(nodes[index]) for index in order}

    assert hashes[0] + hashes[1] + hashes[2] == chained(TOKENS, 4)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("namespace", [None, "", "a"])
def test_hashes_are_unchanged_by_splits_before_and_after_hashing(namespace: str | None, seed: int) -> None:
    whole = hashes_after_insert(TOKENS, 2, namespace)
    cache, rng = RadixCache(2), Random(seed)
    cache.insert(make_key(TOKENS, namespace))

    for _ in range(6):
        cut = rng.randint(1, len(TOKENS))
        split = cache.match_prefix(make_key(TOKENS[:cut], namespace)).last_node
        if rng.random() < 0.5:
            cache.compute_node_hash(split)

        assert hashes_of_path(cache, TOKENS, namespace) == whole
    cache.check_invariants()


def test_hashes_come_back_with_the_tokens_after_an_eviction() -> None:
    cache = RadixCache(4)
    cache.insert(RadixKey(TOKENS))
    before = hashes_of_path(cache, TOKENS)
    cache.evict(len(TOKENS))

    cache.insert(RadixKey(TOKENS), torch.arange(100, 124))

    assert hashes_of_path(cache, TOKENS) == before


def test_no_two_namespaces_share_a_hash() -> None:
    names = [None, "", "a", "b", "ab", "None", "0", "a\0", "namespace:a"]

    hashes = [page for name in names for page in hashes_after_insert(TOKENS, 4, name)]

    assert len(set(hashes)) == len(names) * 6


def test_the_seed_of_a_namespace_is_no_page_of_another() -> None:
    inner = hashes_after_insert(TOKENS, 4, "a")

    assert not set(inner) & set(chained(TOKENS, 4))


def test_wide_ids_do_not_meet_the_narrow_ids_that_spell_the_same_bytes() -> None:
    spellings: list[Tokens] = [(WIDE + 7,), (7, 1), (7,), (1, 7), (2 * WIDE + 7,)]

    hashes = {hash_token_ids(list(tokens)) for tokens in spellings}

    assert len(hashes) == len(spellings)


def test_a_wide_id_alters_the_hashes_of_its_page_and_of_those_after_it_alone() -> None:
    wide = (*TOKENS[:9], WIDE, *TOKENS[10:])

    hashes, plain = hashes_after_insert(wide, 4), hashes_after_insert(TOKENS, 4)

    assert hashes == chained(wide, 4)
    assert hashes[:2] == plain[:2]
    assert not set(hashes[2:]) & set(plain)


def test_a_wide_neighbour_does_not_change_the_hashes_of_narrow_keys() -> None:
    cache = RadixCache(4)
    cache.insert(RadixKey(TOKENS[:12]))
    cache.insert(RadixKey([*TOKENS[:8], WIDE, 1, 2, 3]))
    cache.insert(RadixKey(TOKENS))

    assert hashes_of_path(cache, TOKENS) == chained(TOKENS, 4)


def test_tuples_are_not_the_ids_they_hold() -> None:
    spellings: list[Tokens] = [((1, 2),), (1, 2), ((1,), (2,)), ((1, 2, 3, 4),), ((1, 2), (3, 4)), (1, 2, 3, 4)]

    hashes = {hash_token_ids(list(tokens)) for tokens in spellings}

    assert len(hashes) == len(spellings)


def test_keys_of_tuples_hash_page_by_page_as_tuples() -> None:
    pairs = tuple(itertools.pairwise(TOKENS))[:20]

    assert hashes_after_insert(pairs, 4) == chained(pairs, 4)
