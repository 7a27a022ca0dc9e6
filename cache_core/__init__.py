"""The cache core: prefix caches, the pools of their slots, and leases; synchronous, without Ray, asyncio or pydantic.

The folders, from the ground up; each imports only the folders above it:

    kernels      the inner loops: Python, compiled by Cython where there is a C compiler
    tree         the structure of a radix tree: keys, nodes, packed slots, hashes of pages
    eviction     which node is evicted next: policies, queues, tenants' shares, the history of evictions
    pool         the tensors of KV and states, and the allocators of their pages
    components   what a node holds: KV of all tokens, KV of a window, a recurrent state
    radix        the prefix cache over a tree and its components: match, insert, lock, evict, explain, publish events
    leases       leases over a prefix cache and its pools: `KVCache`
    tiers        a pool below another one: moves of pages between them (`Moves`), pages as records, copies
    rows         caches in which each sequence occupies one row of a tensor (kind "slots")
    trie         the nodes of `RadixTrie`, which takes any hashable tokens (kind "trie")
    ghost        the miss-ratio curve, estimated from a sample of prefixes
    fleet_index  which caches hold a prefix, from their events, for routers: `PageIndex`

How a request runs, inside the core:

    KVCache.acquire            counts the request, and matches the key in the prefix cache
    PrefixCache.match_pages    walks the radix tree; each component limits where the match may end
    PrefixCache.inc_lock_ref   locks the matched path, so that it cannot be evicted
    LeaseAllocator             takes free pages for the unmatched tokens; evicts the shortfall first
    LeaseTable.add             opens the lease: the matched pages, then its private ones
    KVCache.insert             inserts computed pages into the tree; frees the pages that the tree has already
    KVCache.release            unlocks the path and frees the pages that are still private
"""

from raydix.cache_core.base_prefix_cache import BasePrefixCache, EvictResult, InsertResult, MatchResult
from raydix.cache_core.chunk_cache import ChunkCache
from raydix.cache_core.components.lru_list import LRUList
from raydix.cache_core.components.mamba_tree_node import MambaTreeNode
from raydix.cache_core.errors import (
    ContentError,
    CoreError,
    ExpiredLeaseError,
    InvalidKeyError,
    LeaseRangeError,
    LockError,
    OutOfSlotsError,
    SlotError,
    StaleNodeError,
    UnknownLeaseError,
)
from raydix.cache_core.fleet_index.page_hashes import page_hashes
from raydix.cache_core.fleet_index.page_index import Applied, PageIndex
from raydix.cache_core.leases.kv_cache import KVCache
from raydix.cache_core.leases.leased_cache import LeasedCache
from raydix.cache_core.mamba_radix_cache import MambaRadixCache
from raydix.cache_core.pool.kv_pool import KVPool
from raydix.cache_core.pool.mamba_pool import MambaPool
from raydix.cache_core.pool.page_allocator import TokenToKVPoolAllocator
from raydix.cache_core.pool.pool_layout import PoolLayout
from raydix.cache_core.pool.record_pool import RecordLayout, RecordPool
from raydix.cache_core.pool.swa_page_allocator import SWATokenToKVPoolAllocator
from raydix.cache_core.radix_cache import RadixCache
from raydix.cache_core.radix_trie import RadixTrie
from raydix.cache_core.rows.prefix_cache_manager import PrefixCacheManager, SlotAllocator
from raydix.cache_core.rows.row_cache import RowCache
from raydix.cache_core.tree.hashing import hash_bytes, hash_to_int64, hash_token_ids
from raydix.cache_core.tree.radix_key import RadixKey
from raydix.cache_core.tree.tree_node import TreeNode
from raydix.cache_core.trie.trie_node import TrieNode

__all__ = [
    "Applied",
    "BasePrefixCache",
    "ChunkCache",
    "ContentError",
    "CoreError",
    "EvictResult",
    "ExpiredLeaseError",
    "InsertResult",
    "InvalidKeyError",
    "KVCache",
    "KVPool",
    "LRUList",
    "LeaseRangeError",
    "LeasedCache",
    "LockError",
    "MambaPool",
    "MambaRadixCache",
    "MambaTreeNode",
    "MatchResult",
    "OutOfSlotsError",
    "PageIndex",
    "PoolLayout",
    "PrefixCacheManager",
    "RadixCache",
    "RadixKey",
    "RadixTrie",
    "RecordLayout",
    "RecordPool",
    "RowCache",
    "SWATokenToKVPoolAllocator",
    "SlotAllocator",
    "SlotError",
    "StaleNodeError",
    "TokenToKVPoolAllocator",
    "TreeNode",
    "TrieNode",
    "UnknownLeaseError",
    "hash_bytes",
    "hash_to_int64",
    "hash_token_ids",
    "page_hashes",
]
