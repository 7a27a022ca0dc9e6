"""`TreeBuilder`: puts the pages of one space of a disk tier into the tree again, in slices, after a restart."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from raydix.cache_core.errors import StaleNodeError
from raydix.cache_core.leases.kv_cache import KVCache
from raydix.cache_core.pool.swa_page_allocator import SWATokenToKVPoolAllocator
from raydix.cache_core.tiers.index_row import IndexRow
from raydix.cache_core.tiers.page_records import Kind
from raydix.cache_core.tiers.record_keeper import Numbers, RecordKeeper
from raydix.cache_core.tiers.row_runs import RowRun
from raydix.cache_core.tree.packed_slots import Starts
from raydix.cache_core.tree.radix_key import RadixKey
from raydix.cache_core.tree.tree_node import TreeNode


class TreeBuilder:
    """Puts runs of rows into the tree, from the root down. Their pages can be matched from then on.

    The records must be dormant: then they become the tree's. A run is dropped if the node above it has left the tree
    meanwhile, and so is a page that the tree has already: their records are leaving then.

    The builder does not see retirements: call `cancel` before its namespace is retired.

    Args:
        cache: of the disk tier.
        keepers: of its records, by kind.
        namespace: of the space.
        arity: ids of a tuple in its keys; 0: plain ids.

    Attributes:
        num_built: pages that were put into the tree.
        is_fed: whether all runs have been added; set by the caller.
    """

    def __init__(
        self, cache: KVCache, keepers: Mapping[Kind, RecordKeeper], namespace: str | None, arity: int = 0
    ) -> None:
        self.num_built = 0
        self.is_fed = False
        self._cache = cache
        self._keepers = keepers
        self._namespace = namespace
        self._arity = arity
        self._runs: deque[RowRun] = deque()
        self._is_cancelled = False

    def add(self, runs: Iterable[RowRun]) -> None:
        """Take runs, as `RowRuns` returns them."""
        if not self._is_cancelled:
            self._runs.extend(runs)

    def leave_out(self, rows: Iterable[IndexRow]) -> None:
        """Drop rows that belong to no run."""
        if not self._is_cancelled:
            self._drop(list(rows))

    def build(self, num_pages: int) -> bool:
        """Put about so many pages into the tree; return whether there are more. O(pages), and the path of each run."""
        while num_pages > 0 and self._runs:
            run = self._runs.popleft()
            num_pages -= len(run.pages)
            self._put(run)
        return bool(self._runs)

    def cancel(self) -> None:
        """Give up. The records that are not in the tree stay dormant, and later runs are ignored."""
        self._is_cancelled = True
        self._runs.clear()

    # ---------------------------------------------------------------- runs

    def _put(self, run: RowRun) -> None:
        assert run.above is not None
        above = self._cache.radix.root if run.above.above is None else run.above.node
        pages, halves = _numbers(run.pages), _numbers(run.halves)
        if above is None or not self._are_dormant(run):
            self._drop(run.rows)
            return
        self._claim("full", pages)
        page = self._cache.page_size
        starts = pages * page
        allocator = self._cache.allocator
        if len(halves):
            assert isinstance(allocator, SWATokenToKVPoolAllocator)
            self._claim("swa", halves)
            allocator.give_swa(starts, halves * page)
        try:
            run.node = self._insert(run, above, starts)
        except StaleNodeError:
            allocator.free_pages(starts)  # They are leaving then.
            self._drop([] if run.state is None else [run.state])
            return
        if run.state is not None:
            self._claim("state", _numbers([run.state]))
            self._cache.pools.publish_state(run.state.record, run.node)

    def _insert(self, run: RowRun, above: TreeNode, starts: Starts) -> TreeNode:
        """Insert the pages of a run below a node; return the node at its end.

        Raises:
            StaleNodeError: the node above has left the tree; nothing was inserted.
        """
        cache, key = self._cache, self._key_of(run)
        if above is not cache.radix.root:
            cache.radix.parts.check_live(above)
            key = cache.radix.path_to(above).key + key
        live_from = 0 if run.halves else len(key)
        done = cache.radix.insert_pages(key, starts, above, live_from)
        ours = starts[: len(done.existing)]
        duplicates = ours[ours != done.existing]
        if len(duplicates):
            cache.allocator.free_pages(duplicates)
        self.num_built += len(starts) - len(duplicates)
        node: TreeNode = done.last_node
        self._keep_hashes(run, node)
        return node

    def _key_of(self, run: RowRun) -> RadixKey:
        """Return the tokens of a run."""
        page_ids = self._cache.page_size * max(1, self._arity)
        tokens = [row.tokens for row in run.pages if row.tokens is not None]
        width = max(map(len, tokens)) // page_ids
        if any(len(ids) // page_ids != width for ids in tokens):
            tokens = [self._packed(ids, len(ids) // page_ids).with_width(width).data for ids in tokens]
        return self._packed(b"".join(tokens), width)[:]

    def _packed(self, ids: bytes, width: int) -> RadixKey:
        return RadixKey.from_packed(ids, width, self._namespace, self._arity)

    def _keep_hashes(self, run: RowRun, node: TreeNode) -> None:
        """Give a new node the hashes of its pages, so that they need not be computed again."""
        above = node.parent
        assert above is not None
        is_whole = len(node) == len(run.pages) * self._cache.page_size
        if is_whole and node.hash_values is None and (not above.data or above.hash_values is not None):
            node.hash_values = [row.digest.hex() for row in run.pages]

    # ---------------------------------------------------------------- records

    def _are_dormant(self, run: RowRun) -> bool:
        """Return whether all records of a run are dormant."""
        return all(self._keepers[kind].are_dormant(numbers) for kind, numbers in self._by_kind(run.rows))

    def _claim(self, kind: Kind, numbers: Numbers) -> None:
        assert self._keepers[kind].claim(numbers).all(), "a record is not dormant"

    def _drop(self, rows: Sequence[IndexRow]) -> None:
        for kind, numbers in self._by_kind(rows):
            self._keepers[kind].drop(numbers)

    def _by_kind(self, rows: Sequence[IndexRow]) -> Iterator[tuple[Kind, Numbers]]:
        """Yield the numbers of the records of each kind."""
        for kind in self._keepers:
            yield kind, _numbers([row for row in rows if row.kind == kind])


def _numbers(rows: Sequence[IndexRow]) -> Numbers:
    return np.array([row.record for row in rows], np.int64)
