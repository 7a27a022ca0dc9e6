"""Every cache refuses wrong keys and nodes with the same message, before it changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from raydix.cache_core import (
    BasePrefixCache,
    ChunkCache,
    InvalidKeyError,
    KVCache,
    LeasedCache,
    LeaseRangeError,
    LockError,
    MambaRadixCache,
    RadixCache,
    RadixKey,
    RowCache,
    TokenToKVPoolAllocator,
)
from raydix.cache_core.eviction.tenants import Tenant, Tenants
from raydix.cache_core.trie_prefix_cache import TriePrefixCache

TREES: list[Callable[[], BasePrefixCache]] = [RadixCache, lambda: RadixCache(1, 2), MambaRadixCache, TriePrefixCache]
every_tree = pytest.mark.parametrize("make", TREES, ids=["radix", "window", "mamba", "trie"])
every_cache = pytest.mark.parametrize("make", [*TREES, ChunkCache], ids=["radix", "window", "mamba", "trie", "chunk"])

VERBS: list[Callable[[Any, Any], object]] = [
    lambda cache, key: cache.match_prefix(key),
    lambda cache, key: cache.peek_prefix(key),
    lambda cache, key: cache.match_pages(key, 1),
    lambda cache, key: cache.explain(key),
    lambda cache, key: cache.insert(key),
    lambda cache, key: cache.insert(key, torch.arange(2)),
    lambda cache, key: cache.insert(key, torch.arange(2), mamba_value=1),
]


@every_cache
@pytest.mark.parametrize("key", [[1, 2], [], (1, 2), None, 7, "ab", torch.tensor([1, 2])], ids=repr)
def test_what_is_no_key_is_refused(make: Callable[[], BasePrefixCache], key: Any) -> None:
    cache = make()
    cache.insert(RadixKey([1, 2]))
    size = cache.total_size()

    for verb in VERBS:
        with pytest.raises(InvalidKeyError, match=f"^a RadixKey is needed, not {type(key).__name__}$"):
            verb(cache, key)

    assert cache.total_size() == size
    cache.check_invariants()


@every_tree
@pytest.mark.parametrize("node", [None, 7, RadixKey([1])], ids=repr)
def test_what_is_no_node_is_neither_locked_nor_unlocked(make: Callable[[], BasePrefixCache], node: Any) -> None:
    cache = make()
    held = cache.insert(RadixKey([1, 2])).last_node
    receipt = cache.inc_lock_ref(held)

    with pytest.raises(TypeError, match=f"^a node is needed, not {type(node).__name__}$"):
        cache.inc_lock_ref(node)
    for wrong in (None, receipt):
        with pytest.raises((TypeError, LockError), match=r"a node is needed, not|needs the receipt of this very lock"):
            cache.dec_lock_ref(node, wrong)

    assert (cache.num_locks(), cache.protected_size()) == (1, 2)
    cache.dec_lock_ref(held, receipt)
    assert cache.protected_size() == 0
    cache.check_invariants()


def test_full_attention_says_that_it_wants_a_node_back() -> None:
    with pytest.raises(TypeError, match=r"^a node is needed, not NoneType$"):
        RadixCache().dec_lock_ref(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("node", [7, object(), RadixKey([1])], ids=["int", "object", "key"])
@pytest.mark.parametrize(
    "verb",
    [
        lambda cache, node, receipt: cache.insert(RadixKey([1, 2]), torch.arange(2), from_node=node),
        lambda cache, node, receipt: cache.insert_pages(RadixKey([1, 2]), torch.arange(2).numpy(), node),
        lambda cache, node, receipt: cache.release_window(node, receipt),
        lambda cache, node, receipt: cache.compute_node_hash(node),
        lambda cache, node, receipt: cache.attach_state(node, 5),
        lambda cache, node, receipt: cache.attach_state(node, None),
    ],
    ids=["insert", "insert_pages", "release_window", "compute_node_hash", "attach_state", "attach_no_state"],
)
def test_what_is_no_node_is_refused_where_one_is_needed(verb: Any, node: Any) -> None:
    cache = MambaRadixCache(sliding_window_size=2)
    receipt = cache.inc_lock_ref(cache.insert(RadixKey([1, 2])).last_node)

    with pytest.raises(TypeError, match=f"^a node is needed, not {type(node).__name__}$"):
        verb(cache, node, receipt)

    assert cache.total_size() == 2
    cache.check_invariants()


@pytest.mark.parametrize("receipt", [None, 7, (0, 1)], ids=repr)
def test_a_window_is_not_given_up_with_what_is_no_receipt(receipt: Any) -> None:
    cache = RadixCache(1, 2)
    node = cache.insert(RadixKey([1, 2])).last_node
    cache.inc_lock_ref(node)

    with pytest.raises(LockError, match="needs the unused receipt"):
        cache.release_window(node, receipt)

    assert cache.swa_protected_size() == 2


def leases_over(make: Callable[..., BasePrefixCache], *, bigram: bool = False) -> LeasedCache:
    pool = TokenToKVPoolAllocator(8)
    tree = make(token_to_kv_pool_allocator=pool) if make is not ChunkCache else ChunkCache()
    return KVCache(tree, pool, bigram=bigram)


def tenants() -> LeasedCache:
    pool = TokenToKVPoolAllocator(8)
    return KVCache(
        RadixCache(token_to_kv_pool_allocator=pool), pool, tenants=Tenants([Tenant("mine", "mine", floor=2)])
    )


every_lease = pytest.mark.parametrize(
    "make",
    [
        lambda: leases_over(RadixCache),
        lambda: leases_over(RadixCache, bigram=True),
        tenants,
        lambda: leases_over(TriePrefixCache),
        lambda: leases_over(ChunkCache),
        lambda: RowCache(8, 4),
    ],
    ids=["radix", "bigram", "tenants", "trie", "chunk", "slots"],
)


@every_lease
def test_no_lease_is_taken_for_what_is_no_key(make: Callable[[], Any]) -> None:
    cache = make()

    for verb in (cache.acquire, cache.lock):
        with pytest.raises(InvalidKeyError, match="a RadixKey is needed, not list"):
            verb("l", "s", [1, 2])

    assert cache.free_slots == 8
    cache.check_invariants()


@every_lease
def test_no_lease_reuses_less_than_nothing(make: Callable[[], Any]) -> None:
    cache = make()
    cache.acquire("first", "s", RadixKey([1, 2, 3]))
    cache.insert("first", "s", 3, RadixKey([]))
    cache.release("first", "s")
    free = cache.free_slots

    for max_prefix_len in (-1, -(2**70)):
        with pytest.raises(LeaseRangeError, match=f"^max_prefix_len must not be negative: {max_prefix_len}$"):
            cache.acquire("l", "s", RadixKey([1, 2, 3]), 0, max_prefix_len)

    assert (cache.free_slots, len(cache.leases)) == (free, 0)
    cache.check_invariants()
