"""The cache core: trees, pools, allocators and leases; synchronous, and free of Ray, asyncio and pydantic."""

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
from raydix.cache_core.kernels import use_huge_pages
from raydix.cache_core.leases.kv_cache import KVCache
from raydix.cache_core.leases.leased_cache import LeasedCache
from raydix.cache_core.mamba_radix_cache import MambaRadixCache
from raydix.cache_core.pool.kv_pool import KVPool, PoolLayout
from raydix.cache_core.pool.mamba_pool import MambaPool
from raydix.cache_core.pool.page_allocator import TokenToKVPoolAllocator
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
    "PoolLayout",
    "PrefixCacheManager",
    "RadixCache",
    "RadixKey",
    "RadixTrie",
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
    "use_huge_pages",
]
