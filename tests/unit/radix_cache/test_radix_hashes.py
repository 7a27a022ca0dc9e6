"""`RadixCache`: pages chained from the root, made when they are asked for."""

from collections.abc import Callable

from support.caches.small_radix import key, row

from raydix.cache_core import RadixCache, hash_token_ids
from raydix.cache_core.tree.hashing import namespace_seed

WIDE = 2**32  # the first id that needs more than 32 bits


def test_the_hashes_of_a_node_are_those_of_its_pages_chained_from_the_root(paged: RadixCache) -> None:
    paged.insert(key(1, 2), row(10, 11))
    leaf = paged.insert(key(1, 2, 3, 4, 5, 6), row(10, 11, 12, 13, 14, 15)).last_node

    first = hash_token_ids([1, 2])
    second = hash_token_ids([3, 4], first)

    assert paged.compute_node_hash(leaf) == [second, hash_token_ids([5, 6], second)]
    assert leaf.parent.hash_values == [first]
    assert paged.compute_node_hash(paged.root) == []


def test_hashes_are_made_when_they_are_asked_for(paged: RadixCache) -> None:
    leaf = paged.insert(key(1, 2), row(10, 11)).last_node
    assert leaf.hash_values is None

    hashes = paged.compute_node_hash(leaf)

    assert leaf.hash_values == hashes
    assert paged.compute_node_hash(leaf) is hashes


def test_the_order_of_hashing_does_not_matter(make_cache: Callable[..., RadixCache]) -> None:
    down, up = make_cache(), make_cache()
    chains = []
    for each in (down, up):
        each.insert(key(1))
        each.insert(key(1, 2))
        nodes = [each.insert(key(1, 2, 3)[:length]).last_node for length in (1, 2, 3)]
        for node in nodes if each is down else nodes[::-1]:
            each.compute_node_hash(node)
        chains.append([node.hash_values for node in nodes])

    assert chains[0] == chains[1]


def test_hashes_are_those_of_an_unsplit_node_after_a_split(make_cache: Callable[..., RadixCache]) -> None:
    hashed_first, split_first = make_cache(), make_cache()
    leaf = hashed_first.insert(key(1, 2, 3)).last_node
    whole = hashed_first.compute_node_hash(leaf)

    later = split_first.insert(key(1, 2, 3)).last_node
    above = split_first.match_prefix(key(1)).last_node

    assert split_first.compute_node_hash(later) == whole[1:]
    assert split_first.compute_node_hash(above) == whole[:1]


def test_hashes_come_back_with_what_was_evicted(cache: RadixCache) -> None:
    before = cache.compute_node_hash(cache.insert(key(1, 2)).last_node)
    cache.evict(2)

    assert cache.compute_node_hash(cache.insert(key(1, 2)).last_node) == before


def test_namespaces_share_no_hash(cache: RadixCache) -> None:
    nodes = [cache.insert(key(1, 2, ns=ns)).last_node for ns in (None, "", "a", "b")]

    hashes = [each for node in nodes for each in cache.compute_node_hash(node)]

    assert len(set(hashes)) == 8


def test_the_seed_of_a_namespace_goes_before_its_first_page(cache: RadixCache) -> None:
    seed = namespace_seed("a")
    assert seed is not None

    first = hash_token_ids([1], seed.hex())

    assert cache.compute_node_hash(cache.insert(key(1, 2, ns="a")).last_node) == [first, hash_token_ids([2], first)]


def test_widening_a_namespace_changes_no_hash(make_cache: Callable[..., RadixCache]) -> None:
    narrow, widened = make_cache(2), make_cache(2)
    before = narrow.compute_node_hash(narrow.insert(key(1, 2, 3, 4)).last_node)

    node = widened.insert(key(1, 2, 3, 4)).last_node
    widened.insert(key(1, 2, WIDE, 4))

    parent, leaf = widened.compute_node_hash(node.parent), widened.compute_node_hash(node)
    assert [*parent, *leaf] == before


def test_a_page_with_a_wide_id_hashes_as_it_does_alone(paged: RadixCache) -> None:
    leaf = paged.insert(key(1, 2, WIDE, 4)).last_node
    first = hash_token_ids([1, 2])

    assert paged.compute_node_hash(leaf) == [first, hash_token_ids([WIDE, 4], first)]


def test_pages_of_tuples_hash_as_tuples(paged: RadixCache) -> None:
    leaf = paged.insert(key((1, 2), (2, 3))).last_node

    assert paged.compute_node_hash(leaf) == [hash_token_ids([(1, 2), (2, 3)])]
