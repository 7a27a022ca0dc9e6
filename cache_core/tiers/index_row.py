"""`IndexRow`: a row of a disk tier's index, the page that a record holds."""

from __future__ import annotations

from typing import NamedTuple

from raydix.cache_core.tiers.page_records import KINDS, Kind


class IndexRow(NamedTuple):
    """The page that a record holds.

    Attributes:
        kind: of the record: KV of a page, window KV of a page, or the state at the end of a page.
        record: its number in the file of its kind.
        space: number of the page's space.
        depth: pages from the root to the end of this page: 1 for the first page.
        digest: SHA-256 chain of the page.
        record_sum: of the record.
        parent: digest of the page above; None: it is the first page, or the cache does not know.
        tokens: packed ids of the page; None: the cache does not know, or the row is of another kind than "full".
        planes: bits of the optional planes that the record has.
    """

    kind: Kind
    record: int
    space: int
    depth: int
    digest: bytes
    record_sum: bytes
    parent: bytes | None = None
    tokens: bytes | None = None
    planes: int = 0

    @property
    def place(self) -> RowPlace:
        """Where the row stands in the order of all rows."""
        return RowPlace(self.space, self.depth, KINDS.index(self.kind), self.record)


class RowPlace(NamedTuple):
    """A place in the order of rows: by space, then depth, then kind, then record."""

    space: int
    depth: int
    kind: int
    record: int


FIRST = RowPlace(0, 0, 0, 0)
