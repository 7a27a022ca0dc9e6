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

from typing import TYPE_CHECKING

from raydix.cache_core.base_prefix_cache import BasePrefixCache as BasePrefixCache
from raydix.cache_core.base_prefix_cache import EvictResult as EvictResult
from raydix.cache_core.base_prefix_cache import InsertResult as InsertResult
from raydix.cache_core.base_prefix_cache import MatchResult as MatchResult
from raydix.cache_core.chunk_cache import ChunkCache as ChunkCache
from raydix.cache_core.components.lru_list import LRUList as LRUList
from raydix.cache_core.components.mamba_tree_node import MambaTreeNode as MambaTreeNode
from raydix.cache_core.errors import ContentError as ContentError
from raydix.cache_core.errors import CoreError as CoreError
from raydix.cache_core.errors import ExpiredLeaseError as ExpiredLeaseError
from raydix.cache_core.errors import InvalidKeyError as InvalidKeyError
from raydix.cache_core.errors import LeaseRangeError as LeaseRangeError
from raydix.cache_core.errors import LockError as LockError
from raydix.cache_core.errors import OutOfSlotsError as OutOfSlotsError
from raydix.cache_core.errors import SlotError as SlotError
from raydix.cache_core.errors import StaleNodeError as StaleNodeError
from raydix.cache_core.errors import UnknownLeaseError as UnknownLeaseError
from raydix.cache_core.fleet_index.page_hashes import page_hashes as page_hashes
from raydix.cache_core.fleet_index.page_index import Applied as Applied
from raydix.cache_core.fleet_index.page_index import PageIndex as PageIndex
from raydix.cache_core.leases.kv_cache import KVCache as KVCache
from raydix.cache_core.leases.leased_cache import LeasedCache as LeasedCache
from raydix.cache_core.mamba_radix_cache import MambaRadixCache as MambaRadixCache
from raydix.cache_core.pool.kv_pool import KVPool as KVPool
from raydix.cache_core.pool.mamba_pool import MambaPool as MambaPool
from raydix.cache_core.pool.page_allocator import TokenToKVPoolAllocator as TokenToKVPoolAllocator
from raydix.cache_core.pool.pool_layout import PoolLayout as PoolLayout
from raydix.cache_core.pool.record_pool import RecordLayout as RecordLayout
from raydix.cache_core.pool.record_pool import RecordPool as RecordPool
from raydix.cache_core.pool.swa_page_allocator import SWATokenToKVPoolAllocator as SWATokenToKVPoolAllocator
from raydix.cache_core.radix_cache import RadixCache as RadixCache
from raydix.cache_core.radix_trie import RadixTrie as RadixTrie
from raydix.cache_core.rows.prefix_cache_manager import PrefixCacheManager as PrefixCacheManager
from raydix.cache_core.rows.prefix_cache_manager import SlotAllocator as SlotAllocator
from raydix.cache_core.rows.row_cache import RowCache as RowCache
from raydix.cache_core.tree.hashing import hash_bytes as hash_bytes
from raydix.cache_core.tree.hashing import hash_to_int64 as hash_to_int64
from raydix.cache_core.tree.hashing import hash_token_ids as hash_token_ids
from raydix.cache_core.tree.radix_key import RadixKey as RadixKey
from raydix.cache_core.tree.tree_node import TreeNode as TreeNode
from raydix.cache_core.trie.trie_node import TrieNode as TrieNode

if TYPE_CHECKING:
    __all__: list[str]
else:
    __all__ = sorted(name for name, thing in vars().items() if getattr(thing, "__module__", "").startswith(__name__))
