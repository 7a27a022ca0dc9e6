"""`Move`: a range of pages that is copied from one tier to another, and the locks at both ends."""

from __future__ import annotations

from dataclasses import dataclass

from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tiers.tier import Lock, Readable, Source, Tier
from raydix.cache_core.tree.packed_slots import Starts
from raydix.cache_core.tree.radix_key import RadixKey
from raydix.cache_core.tree.tree_node import TreeNode


@dataclass(eq=False, slots=True)
class Move:
    """Pages to copy, each named by its first slot at both ends; page i of a source goes to page i of its target.

    A copier copies all of it, front to back; `Loads.complete` or `Writes.complete` ends it.

    Attributes:
        is_load: up, into the lease of a request or of a prefetch; else it is a write, down.
        source_tier, target_tier: where it reads and writes.
        source: locks the pages that are read: for a write, a lease.
        target: has the pages that are written, private.
        key: the tree's key up to the end of the move.
        first: the token where the first page begins.
        source_starts, target_starts: first slots of the pages.
        live_from: the token from which window KV moves, too; the end of the move if none does.
        source_windows, target_windows: first window slots of the pages from there.
        source_state: slot of the state at the end; None: no state moves.
        target_states: slots that it is copied to, the last one for the tree; empty if `source_state` is None.
        spare: a lease with the state slot that the tree gets from a load; None without one.
        is_released: its source was copied to a buffer, and is not locked any more.
        node: the node at the end of the source of a write; None: it is a load.
    """

    is_load: bool
    source_tier: Readable
    target_tier: Tier
    source: Lock
    target: LeaseRecord
    key: RadixKey
    first: int
    source_starts: Starts
    target_starts: Starts
    live_from: int
    source_windows: Starts
    target_windows: Starts
    source_state: int | None = None
    target_states: tuple[int, ...] = ()
    spare: LeaseRecord | None = None
    is_released: bool = False
    node: TreeNode | None = None

    @property
    def stop(self) -> int:
        """The token where its last page ends."""
        return len(self.key)

    @property
    def num_tokens(self) -> int:
        """The tokens of its pages."""
        return self.stop - self.first

    @property
    def num_pages(self) -> int:
        """The pages to copy; a move of a state alone has none."""
        return len(self.source_starts)

    @property
    def is_retired(self) -> bool:
        """Whether its namespace was retired after it began: nothing of it is published."""
        return self.source.retired or self.target.retired

    def moves_page_of(self, key: RadixKey, first: int, stop: int) -> bool:
        """Return whether it moves a page of tokens [first, stop) of a tree's key, and its namespace is not retired."""
        at = max(first, self.first)
        shared = at + self.target_tier.page_size
        return not self.is_retired and at < min(stop, self.stop) and self.key[:shared] == key[:shared]

    @property
    def is_indivisible(self) -> bool:
        """Whether a part of it is of no use: a match needs the window KV or the state at its end."""
        return self.source_state is not None or len(self.source_windows) > 0

    def usable(self, num_pages: int, is_whole: bool | None) -> tuple[int, bool]:
        """Return how many of the leading copied pages are of use, and whether all of the move was copied.

        Args:
            num_pages: the leading pages that were copied.
            is_whole: whether window KV and states were copied, too; None: if all pages were.
        """
        is_whole = (is_whole is not False) and num_pages >= self.num_pages
        return 0 if self.is_indivisible and not is_whole else min(num_pages, self.num_pages), is_whole


def new_move(
    source_tier: Readable,
    target_tier: Tier,
    source: Source,
    target: LeaseRecord,
    key: RadixKey,
    first: int,
    node: TreeNode | None = None,
) -> Move:
    """Return a move from token `first` to the end of a key, which is that of the source or above it.

    Args:
        node: as in `Move`.
    """
    page, stop = target_tier.page_size, len(key)
    live_from = min(max(source.live_from, first), stop)
    pages, live = slice(first // page, stop // page), slice(live_from // page, stop // page)
    windows = source.windows
    halves = target_tier.cache.allocator.swa_starts(target.starts[live]) if len(windows) else windows
    return Move(
        node is None,
        source_tier,
        target_tier,
        source.lock,
        target,
        key,
        first,
        source.starts[pages].copy(),
        target.starts[pages].copy(),
        live_from,
        windows[len(windows) - len(halves) :],
        halves,
        source.state,
        node=node,
    )
