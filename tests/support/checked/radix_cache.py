"""`RadixCache` and its reference model side by side: each operation is done on both, and all is compared after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from support.reference.models import ROOT, Found, Handle, Node, Place, ReferenceRadixCache, Tokens

from raydix.cache_core import (
    BasePrefixCache,
    EvictResult,
    InvalidKeyError,
    LockError,
    MatchResult,
    RadixCache,
    RadixKey,
    StaleNodeError,
    TreeNode,
)
from raydix.cache_core.radix.prefix_cache import PrefixCache

NARROW_LIMIT = 2**32

RETIRED = -1  # stands for every generation but the present one
Page = tuple[str | None, Tokens]  # the page of a hash


class Held(NamedTuple):
    """A node of the cache and its place in the model."""

    node: TreeNode
    handle: Handle


class LedgerPool:
    """Slots, each free, lent to the caller, or the tree's. Any other way to change hands is a fault."""

    def __init__(self, num_pages: int, page_size: int, rng: Random) -> None:
        self.page_size = page_size
        self.first = page_size  # page 0 is reserved
        self.num_slots = num_pages * page_size
        self.free_slots = set(range(self.first, self.first + self.num_slots))
        self.lent: set[int] = set()
        self.tree: set[int] = set()
        self.freed: list[int] = []  # by the cache, since the last `take_freed`
        self._rng = rng

    def lend(self, num_slots: int) -> list[int]:
        """Slots for the caller: some as whole pages in order, the rest scattered."""
        assert num_slots <= len(self.free_slots)
        slots: list[int] = []
        if self._rng.random() < 0.7:
            starts = list(range(self.first, self.first + self.num_slots, self.page_size))
            self._rng.shuffle(starts)
            for start in starts:
                page = range(start, start + self.page_size)
                if len(slots) + self.page_size <= num_slots and self.free_slots.issuperset(page):
                    slots += page
        rest = sorted(self.free_slots.difference(slots))
        slots += self._rng.sample(rest, num_slots - len(slots))
        self.free_slots.difference_update(slots)
        self.lent.update(slots)
        return slots

    def take_back(self, slots: list[int]) -> None:
        """The caller returns what was lent to it."""
        self._move(slots, self.lent, self.free_slots, "returned by the caller")

    def adopt(self, slots: list[int]) -> None:
        """Move slots from the caller to the tree."""
        self._move(slots, self.lent, self.tree, "adopted")

    def free(self, indices: torch.Tensor) -> None:
        """The method that the cache calls: each slot must belong to the tree, once."""
        assert indices.dtype == torch.int64 and indices.ndim == 1, f"freed {indices.dtype} of rank {indices.ndim}"
        slots = indices.tolist()
        self._move(slots, self.tree, self.free_slots, "freed by the cache")
        self.freed += slots

    def take_freed(self) -> list[int]:
        """Return the slots that the cache has freed since the last call, sorted."""
        freed, self.freed = sorted(self.freed), []
        return freed

    @staticmethod
    def _move(slots: list[int], source: set[int], target: set[int], how: str) -> None:
        assert len(set(slots)) == len(slots), f"slots {how} twice at once: {slots}"
        assert source.issuperset(slots), f"slots {how} by no right: {sorted(set(slots) - source)}"
        source.difference_update(slots)
        target.update(slots)


class PagedLedgerPool(LedgerPool):
    """A ledger that also takes whole pages, by their first slots, as the service's allocator does."""

    def free_pages(self, starts: object) -> None:
        rows = torch.as_tensor(starts)
        assert rows.dtype == torch.int64 and rows.ndim == 1
        self.free((rows[:, None] + torch.arange(self.page_size)).reshape(-1))


@contextmanager
def refusal(*errors: type[Exception]) -> Iterator[None]:
    """The block must raise one of `errors`."""
    try:
        yield
    except errors:
        return
    names = " or ".join(error.__name__ for error in errors)
    raise AssertionError(f"no {names} was raised")


class CheckedRadixCache:
    """A cache, its model, and the ledger of their slots. Raises AssertionError where they part."""

    def __init__(self, page_size: int, num_pages: int, rng: Random, *, paged_pool: bool = False) -> None:
        self.page_size = page_size
        self.told: list[int] = []
        self._make(num_pages, rng, paged_pool)
        if paged_pool:
            self.cache.parts.full.least_spared = page_size
            self.model.least_spared = None if self.cache.parts.components else page_size
        self.cache.parts.full._queue.search_limit = (
            64 if paged_pool else 1
        )  # leaves are few: beyond that they come late
        self._page_of_hash: dict[str, Page] = {}
        self._hash_of_page: dict[Page, str] = {}

    def _make(self, num_pages: int, rng: Random, paged_pool: bool) -> None:
        """Make what is compared, and the pool of both."""
        self.pool = (PagedLedgerPool if paged_pool else LedgerPool)(num_pages, self.page_size, rng)
        self.cache: PrefixCache = RadixCache(self.page_size, None, self.pool, self.told.append)
        self.model = ReferenceRadixCache(self.page_size)

    def _request(self) -> dict[str, int]:
        """Return further arguments of a request, which the model has as well."""
        return {}

    # ---------------------------------------------------------------- lookups

    def match(self, tokens: Tokens, namespace: str | None) -> Held:
        """A match; returns the node where it ends."""
        found = self.cache.match_prefix(make_key(tokens, namespace), **self._request())
        expected = self.model.match(tokens, namespace)
        self._check_found(found, expected)
        return Held(found.last_node, expected.handle)

    def peek(self, tokens: Tokens, namespace: str | None) -> list[int]:
        """A lookup without effects; returns the slots it finds."""
        found = self.cache.peek_prefix(make_key(tokens, namespace))
        expected = self.model.peek(tokens, namespace)
        self._check_found(found, expected)
        return expected.slots

    def _check_found(self, found: MatchResult, expected: Found) -> None:
        indices = found.indices
        agree("kind of indices", (indices.dtype, indices.device.type, indices.ndim), (torch.int64, "cpu", 1))
        agree("indices", indices.tolist(), expected.slots)
        agree("prefix_len", found.prefix_len, len(expected.slots))
        agree("last_node", self.place_of(found.last_node), expected.handle.place)
        spoil(indices)  # a result is the caller's to keep
        self.check()

    # ---------------------------------------------------------------- insert

    def insert(
        self,
        tokens: Tokens,
        namespace: str | None,
        slots: list[int],
        prev_prefix_len: int = 0,
        held: Held | None = None,
    ) -> Held:
        """An insert of slots that are lent or the tree's own; the caller returns what is not adopted."""
        ids = as_argument(tokens)
        value = torch.tensor(slots, dtype=torch.int64)
        node = None if held is None else held.node
        handle = ROOT if held is None else held.handle
        key, request = RadixKey(ids, namespace), self._request()
        result = self.cache.insert(key, value, prev_prefix_len=prev_prefix_len, from_node=node, **request)
        spoil(ids)
        spoil(value)
        duplicates = result.duplicate_indices
        expected = self.model.insert(tokens, namespace, slots, prev_prefix_len, handle)
        agree("prefix_len", result.prefix_len, expected.prefix_len)
        agree("duplicate_indices", duplicates.tolist(), expected.duplicates)
        agree("type of duplicate_indices", duplicates.dtype, torch.int64)
        agree("mamba_exist", result.mamba_exist, False)
        agree("slots freed by an insert", self.pool.take_freed(), [])
        agree("last_node", self.place_of(result.last_node), expected.handle.place)
        self.pool.adopt(expected.adopted)
        self.check()
        self.pool.take_back([slot for slot in slots if slot in self.pool.lent])
        return Held(result.last_node, expected.handle)

    def refuse_short_insert(self, tokens: Tokens, namespace: str | None) -> None:
        """Fewer slots than whole pages of tokens are refused."""
        whole = len(tokens) - len(tokens) % self.page_size
        with refusal(InvalidKeyError):
            self.cache.insert(make_key(tokens, namespace), torch.arange(whole - 1))
        self.check()

    def refuse_insert_from(self, held: Held, tokens: Tokens, namespace: str | None) -> None:
        """A stale node, or one that cannot lie on the key's path, is no place to resume at."""
        error = StaleNodeError if self.model.is_stale(held.handle) else InvalidKeyError
        with refusal(error):
            self.cache.insert(make_key(tokens, namespace), torch.arange(len(tokens)), from_node=held.node)
        self.check()

    # ---------------------------------------------------------------- locks

    def lock(self, held: Held) -> None:
        """One lock on a node, refused if the node is stale."""
        if self.model.is_stale(held.handle):
            with refusal(StaleNodeError):
                self.cache.inc_lock_ref(held.node)
        else:
            base: BasePrefixCache = self.cache
            agree("receipt", base.inc_lock_ref(held.node), None)
            self.model.lock(held.handle)
        self.check()

    def unlock(self, held: Held) -> None:
        """One unlock; refused if the node is gone, or is not locked itself."""
        if self.model.is_gone(held.handle):
            with refusal(StaleNodeError):
                self.cache.dec_lock_ref(held.node)
        elif held.handle != ROOT and not self.model.num_locks(held.handle):
            with refusal(LockError):
                self.cache.dec_lock_ref(held.node)
        else:
            self.cache.dec_lock_ref(held.node, None)
            self.model.unlock(held.handle)
        self.check()

    # ---------------------------------------------------------------- eviction and hashes

    def evict(self, num_tokens: int) -> list[Node]:
        """An eviction; returns what went. Asks for all that is retired at least, as that goes in any order."""
        num_tokens = max(num_tokens, self.model.reclaimable_size())
        was_told = self.cache.on_node_evict is not None
        self.cache.on_node_evict = (
            None if was_told else self.told.append
        )  # evictions without a callback take a shorter path
        result = self.cache.evict(num_tokens)
        victims = self.model.evict(num_tokens)
        agree("result", result, EvictResult(self._count(victims), 0, 0))
        self._check_eviction(victims)
        return victims

    def retire_all(self) -> None:
        """Nothing can be matched any more; nothing is freed."""
        self.cache.retire_all()
        self.model.retire_all()
        self.check()

    def retire(self, namespaces: tuple[str | None, ...]) -> None:
        """Nothing in these namespaces can be matched any more; nothing is freed. An arity is one of its own."""
        there = {key for key in self.cache.parts.tree.tops if key[0] in namespaces}
        agree("namespaces retired", self.cache.retire(lambda extra_key: extra_key in namespaces), len(there))
        agree("namespaces, arities aside", len({extra_key for extra_key, _ in there}), self.model.retire(namespaces))
        self.check()

    def reclaim_retired(self) -> list[Node]:
        """Check that the cache evicts all retired and unlocked nodes, and no others."""
        num_tokens = self.model.reclaimable_size()
        agree("reclaimed", self.cache.reclaim_retired(), num_tokens)
        victims = self.model.evict(num_tokens)
        agree("reclaimed by the model", self._count(victims), num_tokens)
        self._check_eviction(victims)
        return victims

    @staticmethod
    def _count(victims: list[Node]) -> int:
        return sum(len(victim.slots) for victim in victims)

    def _check_eviction(self, victims: list[Node]) -> None:
        slots = [slot for victim in victims for slot in victim.slots]
        agree("what was freed", self.pool.take_freed(), sorted(slots))
        num_told = len(victims) if self.cache.on_node_evict else 0
        agree("nodes told of", (len(self.told), len(set(self.told))), (num_told, num_told))
        self.told.clear()
        self.check()

    def reset(self) -> None:
        """Everything goes back to the pool."""
        self.cache.reset()
        agree("what was freed", self.pool.take_freed(), sorted(self.model.reset()))
        self.told.clear()
        self.check()

    def hash(self, held: Held) -> list[str]:
        """The page hashes of a node: a page has one, always the same, and no other page has it."""
        hashes = self.cache.compute_node_hash(held.node)
        if held.handle == ROOT:
            agree("hashes of the root", hashes, [])
            return hashes
        places = self.model.pages_of_node(held.handle)
        agree("number of hashes", len(hashes), len(places))
        for place, page_hash in zip(places, hashes, strict=True):
            page = (place.namespace, place.prefix)
            agree("page of a hash", page, self._page_of_hash.setdefault(page_hash, page))
            agree("hash of a page", page_hash, self._hash_of_page.setdefault(page, page_hash))
        if held.handle.place.namespace is None and is_narrow(held.handle.place.prefix):
            agree("hashes", hashes, self.model.hashes(held.handle))
        self.check()
        return hashes

    # ---------------------------------------------------------------- what must hold at all times

    def check(self) -> None:
        """Invariants, the whole tree, sizes, and the conservation of slots."""
        cache, model, pool = self.cache, self.model, self.pool
        cache.check_invariants()
        nodes = Counter(self.nodes())
        agree("tree", nodes, Counter(self._tell(node) for node in model.nodes()))
        agree("evictable_size", cache.evictable_size(), model.evictable_size())
        agree("protected_size", cache.protected_size(), model.protected_size())
        agree("total_size", cache.total_size(), model.evictable_size() + model.protected_size())
        in_tree = [slot for node in nodes for slot in node.slots]
        agree("slots in the tree", sorted(in_tree), sorted(pool.tree))
        agree("all slots", len(pool.free_slots) + len(pool.lent) + len(pool.tree), pool.num_slots)
        agree("slots freed unasked", pool.freed, [])

    def nodes(self) -> list[Node]:
        """Return the cache's tree in the terms of the model; the lengths of retired nodes are unknown."""
        prefixes: dict[TreeNode | None, Tokens] = {}
        nodes: list[Node] = []
        for top in self.cache.parts.tops():
            for node in self.cache.parts.tree.nodes_below(top):  # parents before children
                assert node.key is not None and node.value is not None
                prefix = prefixes.get(node.parent, ()) + tuple(node.key)
                prefixes[node] = prefix
                generation = self.model.generation(node.key.extra_key) if top.namespace.live else RETIRED
                place = Place(node.key.extra_key, prefix, generation)
                num_pages = len(node) // self.page_size
                slots = tuple(node.value.tolist())
                nodes.append(Node(place, num_pages, slots, node.lock_ref, node.hit_count, self._extra(node)))
        return nodes

    def _extra(self, node: TreeNode) -> tuple[int | None, ...]:
        """Return the values on a node that the kind of cache adds."""
        return ()

    def _tell(self, node: Node) -> Node:
        return (
            node if self.model.is_current(node.place) else node._replace(place=node.place._replace(generation=RETIRED))
        )

    def place_of(self, node: TreeNode) -> Place:
        """Where a node of the cache ends."""
        if node is self.cache.root:
            return ROOT.place
        assert node.key is not None
        namespace, prefix = node.key.extra_key, tuple(node.key)
        above = node.parent
        while above is not None and above.key is not None:
            prefix = tuple(above.key) + prefix
            above = above.parent
        return Place(namespace, prefix, self.model.generation(namespace))


def agree(what: str, actual: object, expected: object) -> None:
    """Raise AssertionError unless both are equal."""
    if isinstance(actual, Counter) and isinstance(expected, Counter) and actual != expected:
        raise AssertionError(f"{what}: {list(actual - expected)} too many, {list(expected - actual)} missing")
    if actual != expected:
        raise AssertionError(f"{what}: {actual}, where the model says {expected}")


def make_key(tokens: Tokens, namespace: str | None) -> RadixKey:
    """The key of these tokens, handed over in one of the forms that a key takes."""
    return RadixKey(as_argument(tokens), namespace)


def as_argument(tokens: Tokens) -> Any:
    """The tokens in one of the forms that a key takes."""
    if not all(isinstance(token, int) and token < 2**63 for token in tokens):
        return list(tokens)
    forms: list[Callable[[Any], Any]] = [list, np.array, torch.tensor]
    return forms[len(tokens) % 3](tokens) if tokens else []


def spoil(argument: Any) -> None:
    """Change what was handed over or handed out: it was copied, so this must not reach the tree."""
    argument[:] = [7] * len(argument) if isinstance(argument, list) else -1


def is_narrow(tokens: Tokens) -> bool:
    """Whether all tokens are plain ids of 32 bits."""
    return all(isinstance(token, int) and token < NARROW_LIMIT for token in tokens)
