"""`DiskWrites`: which pages are written to a disk tier and when, on the cache's event loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from raydix.actors.tiers.disk.disk_writer import DiskWriter, Records, Write
from raydix.actors.tiers.disk.due_prefixes import DuePrefixes
from raydix.actors.tiers.disk.last_day import LastDay
from raydix.actors.tiers.disk.space_bindings import SpaceBindings
from raydix.actors.tiers.job_threads import Ended
from raydix.cache_core import KVPool, RadixKey, RecordPool
from raydix.cache_core.tiers.index_row import IndexRow
from raydix.cache_core.tiers.move import Move
from raydix.cache_core.tiers.page_records import KINDS, Kind, PageRecords
from raydix.cache_core.tiers.record_keeper import RecordKeeper
from raydix.cache_core.tiers.tier import Tier
from raydix.cache_core.tiers.writes import Writes
from raydix.cache_core.tree.page_hashes import path_hashes

logger = logging.getLogger(__name__)

MOST_PAGES = 256  # of one write: their rows take about 1 ms of the loop
_LOOKED_AT = 16  # due prefixes that one slice looks up: about 1 ms


class Source(NamedTuple):
    """A tier in memory above the disk.

    Attributes:
        tier: the tier.
        pool: returns its tensors; None: they are not ready.
    """

    tier: Tier
    pool: Callable[[], KVPool | RecordPool | None]


@dataclass(slots=True)
class DiskWriteCounts:
    """Counts of prefixes and pages since the start."""

    num_writes: int = 0  # batches that were committed
    num_bytes: int = 0  # bytes of records that were committed, with their padding
    num_failed: int = 0  # batches that failed
    due_dropped: int = 0  # due prefixes that fell out of the queue
    due_gone: int = 0  # due prefixes that had left memory when their turn came
    no_room: int = 0  # due prefixes for which the disk had no free records


@dataclass(slots=True, eq=False)
class _Batch:
    """Moves that are written together.

    Attributes:
        moves: each with the `Writes` that it belongs to.
        numbers: of their records, by kind.
        due: the prefixes of which they are parts.
    """

    moves: list[tuple[Writes, Move]]
    numbers: Mapping[Kind, Sequence[int]]
    due: list[RadixKey]
    num_bytes: int
    reads_pool: bool
    write: Write | None = None


@dataclass(slots=True)
class _Parts:
    """The records of a batch, by kind."""

    starts: dict[Kind, list[np.ndarray]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    rows: dict[Kind, list[IndexRow]] = field(default_factory=lambda: {kind: [] for kind in KINDS})


class DiskWrites:
    """Writes prefixes that are due, the one used last first, from the tier in memory that has most of each.

    Args:
        sources: the tiers in memory, the pool first.
        all_writes: from each of them to the disk.
        keepers: of the disk's records.
        strides: bytes that a record of each kind takes, with its padding.
        last_day: sums the bytes of a day.
        reserve: slots of the last source that are to be on the disk or free; 0: only what is due is written.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        all_writes: Sequence[Writes],
        keepers: Mapping[Kind, RecordKeeper],
        strides: Mapping[Kind, int],
        last_day: LastDay,
        reserve: int,
    ) -> None:
        self.counts = DiskWriteCounts()
        self.last_day = last_day
        self.is_ahead = True  # whether the reserve is free or written, as far as it was looked at
        self._sources = sources
        self._all_writes = all_writes
        self._keepers = keepers
        self._reserve = reserve
        self._page = all_writes[0].lower.cache.page_size
        self._due = DuePrefixes()
        self._has_more = False  # whether due prefixes were not looked at, as a slice has ended
        self._elsewhere: list[RadixKey] = []  # due prefixes that lie in another tier than the batch in the making
        self._blocked: list[RadixKey] = []  # due prefixes of which a part is being written
        self._waiting = DuePrefixes()  # those of which the space is being built
        self._batches: set[_Batch] = set()
        self._after_writes: list[Callable[[], object]] = []
        self._records: dict[Tier, PageRecords] = {}
        self._strides = strides
        self.on_end: Callable[[Exception | None], object] = lambda error: None

    # ---------------------------------------------------------------- prefixes that are due

    @property
    def num_due(self) -> int:
        """Prefixes that wait to be written."""
        return len(self._due) + len(self._blocked) + len(self._waiting)

    @property
    def has_batches(self) -> bool:
        """Whether writes are in flight."""
        return len(self._batches) > 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is due, and no write is in flight."""
        return self.is_ahead and not (self._due or self._blocked or self._waiting or self._batches)

    @property
    def has_more(self) -> bool:
        """Whether prefixes are due, or a part of the reserve is not written."""
        return bool(self.num_due) or not self.is_ahead

    @property
    def may_look_on(self) -> bool:
        """Whether a slice has left due prefixes, or a part of the reserve while no write is in flight.

        The end of a write says more of the reserve. If records will be free soon, the disk is woken when they are.
        """
        return self._has_more or not (self.is_ahead or self._batches or self._awaits_records())

    def ask_again(self) -> None:
        """Look at the whole reserve again: pages of more namespaces are kept now."""
        self._all_writes[-1].restart_round()

    def resume(self, namespaces: Iterable[str | None]) -> None:
        """Look at the due prefixes of namespaces again, of which the spaces are built now."""
        for namespace in namespaces:
            if namespace in self._waiting.namespaces:
                for key in [key for key in self._waiting if key.extra_key == namespace]:
                    self._waiting.take(key)
                    self.offer(key)

    def offer(self, key: RadixKey) -> None:
        """Write a prefix soon: a tree's key of whole pages."""
        self.counts.due_dropped += self._due.offer(key)

    def forget(self, is_meant: Callable[[str | None], bool]) -> None:
        """Forget the prefixes of namespaces that are retired. Writes in flight publish nothing of them."""
        self._due.forget(is_meant)
        self._waiting.forget(is_meant)
        self._blocked = [key for key in self._blocked if not is_meant(key.extra_key)]

    # ---------------------------------------------------------------- writes

    @property
    def window_pages(self) -> int:
        """The pages of which the window KV is written together; 0: there is no window."""
        window = self._all_writes[0].upper.cache.radix.parts.window
        return 0 if window is None else -(-window.tail // self._page) + 1

    def begin(self, writer: DiskWriter, spaces: SpaceBindings) -> None:
        """Begin a write if the writer takes one: a slice of the loop. New spaces of it are committed before it."""
        self._has_more = False
        if not writer.may_write or self._after_writes or self._awaits_records():
            return
        batch = self._next_batch(writer.buffer_bytes, spaces)
        if batch is None:
            return
        self._batches.add(batch)
        self._has_more = bool(self._due)
        records, source = self._records_of(batch, spaces)
        spaces.commit_new(writer)
        batch.write = writer.write(records, partial(self._end_gathering, batch), partial(self._end, batch), source)

    def _awaits_records(self) -> bool:
        """Whether a write would be dropped, or cut, and records of the disk will be free soon."""
        if self._batches and not self._has_room():
            return True
        most = min(MOST_PAGES, self._all_writes[-1].batch_pages) + self.window_pages
        wanted: dict[Kind, int] = {"full": most, "swa": most, "state": 1}
        return any(
            keeper.num_leaving and keeper.num_free < min(wanted[kind], max(1, keeper.num_records // 2))
            for kind, keeper in self._keepers.items()
        )

    def _has_room(self) -> bool:
        """Whether the disk has free records for a prefix."""
        wanted: dict[Kind, int] = {"full": 1, "swa": self.window_pages, "state": 1}
        return all(keeper.num_free >= wanted[kind] for kind, keeper in self._keepers.items())

    def _next_batch(self, buffer_bytes: int, spaces: SpaceBindings) -> _Batch | None:
        """Plan the moves of a batch, all from one tier; None: nothing is to be written, or this slice finds nothing."""
        found: list[tuple[Writes, Move]] = []
        due: list[RadixKey] = []
        num_bytes = num_looked_at = 0
        page_bytes = max(1, self._strides.get("full", 0) + self._strides.get("swa", 0))
        while (key := self._due.hottest()) is not None:
            num_looked_at += 1
            if num_looked_at > _LOOKED_AT:
                self._has_more = True
                break
            num_pages = sum(move.num_pages for _, move in found)
            room = min(MOST_PAGES - num_pages, (buffer_bytes - num_bytes - self._strides.get("state", 0)) // page_bytes)
            if room < 1 or (found and not self._has_room()):
                break
            self._due.take(key)
            if not spaces.is_ready(key.extra_key):
                self.counts.due_dropped += self._waiting.offer(key)
                continue
            planned = self._plan(key, room, found[0][0] if found else None)
            if planned is None:
                continue
            taken = self._bytes_of(planned[1])
            if num_bytes + taken > buffer_bytes:
                planned[0].complete(planned[1], 0, False)
                self.offer(key)
                break
            found.append(planned)
            due.append(key)
            num_bytes += taken
        while self._elsewhere:
            self.offer(self._elsewhere.pop())
        if not found and self._reserve and not self._has_more:
            found, num_bytes = self._coldest(buffer_bytes)
        if not found:
            return None
        numbers = {kind: self._numbers_of(kind, [move for _, move in found]) for kind in self._keepers}
        return _Batch(found, numbers, due, num_bytes, found[0][0].upper is self._sources[0].tier)

    def _plan(self, key: RadixKey, num_pages: int, only: Writes | None = None) -> tuple[Writes, Move] | None:
        """Begin to write a due prefix from the tier that has most of it.

        Args:
            only: of the only tier from which it may be written; None: of any.
        """
        lower = self._all_writes[0].lower.cache
        found = [moves.upper.cache.radix.cached_lens(key) for moves in self._all_writes]
        lengths, known = [usable for usable, _ in found], lower.radix.cached_lens(key)
        stop = max(lengths)
        if known[0] >= min(stop, len(key)):
            self.counts.due_gone += max(known[1], *(full for _, full in found)) < len(key)
            return None
        moves = self._all_writes[lengths.index(stop)]
        if only is not None and moves is not only:
            self._elsewhere.append(key)
            return None
        node, _ = moves.upper.cache.radix.locate(key, stop)
        num_pages = min(num_pages, max(1, lower.free_slots // self._page))
        refused = moves.counts.writes_refused
        others = [other for other in self._all_writes if other is not moves]
        move = moves.prepare_prefix(node, min(num_pages, moves.batch_pages), others)
        if move is not None:
            return moves, move
        if moves.counts.writes_refused > refused:
            self.counts.no_room += 1
        elif any(other.in_flight for other in self._all_writes):
            self._blocked.append(key)
        return None

    def _coldest(self, buffer_bytes: int) -> tuple[list[tuple[Writes, Move]], int]:
        """Begin to write the KV that the last tier in memory would drop next."""
        moves, found, num_bytes = self._all_writes[-1], list[tuple[Writes, Move]](), 0
        plan = moves.prepare(self._reserve)
        self.is_ahead = plan.is_ahead
        for move in plan.moves:
            taken = self._bytes_of(move)
            if num_bytes + taken > buffer_bytes:
                moves.complete(move, 0, False)
                continue
            found.append((moves, move))
            num_bytes += taken
        return found, num_bytes

    def _bytes_of(self, move: Move) -> int:
        """Return the bytes that the records of a move take in a buffer."""
        numbers = move.num_pages, len(move.source_windows), int(move.source_state is not None)
        return sum(number * self._strides.get(kind, 0) for kind, number in zip(KINDS, numbers, strict=True))

    def _numbers_of(self, kind: Kind, moves: Iterable[Move]) -> list[int]:
        """Return the numbers of the records of moves on the disk."""
        if kind == "state":
            return [move.target_states[0] for move in moves if move.target_states]
        starts = [move.target_starts if kind == "full" else move.target_windows for move in moves]
        numbers: list[int] = (np.concatenate(starts) // self._page).tolist()
        return numbers

    def _records_of(self, batch: _Batch, spaces: SpaceBindings) -> tuple[dict[Kind, Records], PageRecords]:
        """Return the records of a batch with their rows, and the pool of their pages. The rows are noted first."""
        parts = _Parts()
        for _, move in batch.moves:
            self._add(parts, move, spaces.number_for(move.key))
        for kind, keeper in self._keepers.items():
            numbers = [(row.record, row.space) for row in parts.rows[kind]]
            keeper.add_rows(*np.array(numbers, np.int64).reshape(-1, 2).T)
        records = {
            kind: Records(np.concatenate(parts.starts[kind]), parts.rows[kind])
            for kind in self._keepers
            if parts.rows[kind]
        }
        return records, self._source_of(batch.moves[0][0].upper)

    def _source_of(self, tier: Tier) -> PageRecords:
        """Return the pool of a tier as records."""
        if tier not in self._records:
            pool = next(source.pool() for source in self._sources if source.tier is tier)
            assert pool is not None, f"tier {tier.name} has pages, and no pool"
            self._records[tier] = PageRecords(pool)
        return self._records[tier]

    def _add(self, parts: _Parts, move: Move, space: int) -> None:
        """Add the records of a move, and their rows."""
        page = self._page
        first, stop = move.first // page, move.stop // page
        live_from = stop - len(move.target_windows)
        above = max(0, min(first, live_from, stop - 1) - 1)  # The parent of the first page is needed, too.
        assert move.node is not None, "a load is not written"
        hashes = path_hashes(move.node, page, above, stop)
        digests = dict(enumerate(map(bytes.fromhex, hashes), start=above))
        key, unit = move.key, move.key.unit * page
        for place, start in enumerate(move.target_starts.tolist(), start=first):
            ids, parent = key.data[place * unit : (place + 1) * unit], digests[place - 1] if place else None
            parts.rows["full"].append(
                IndexRow("full", start // page, space, place + 1, digests[place], b"", parent, ids)
            )
        for place, start in enumerate(move.target_windows.tolist(), start=live_from):
            parts.rows["swa"].append(IndexRow("swa", start // page, space, place + 1, digests[place], b""))
        parts.starts["full"].append(move.source_starts)
        parts.starts["swa"].append(move.source_windows)
        if move.source_state is not None:
            row = IndexRow("state", move.target_states[0], space, stop, digests[stop - 1], b"")
            parts.rows["state"].append(row)
            parts.starts["state"].append(np.array([move.source_state], np.int64))

    # ---------------------------------------------------------------- ends

    def _end_gathering(self, batch: _Batch) -> None:
        """Unlock the pages of a batch: they are in a buffer, or will not be copied."""
        for moves, move in batch.moves:
            moves.release_source(move)
        batch.reads_pool = False
        if not self.locks_pool:
            waiting, self._after_writes = self._after_writes, []
            for resume in waiting:
                resume()

    def _end(self, batch: _Batch, written: Ended) -> None:
        """Publish the pages of the moves of which all rows are committed: some may be of a deleted space."""
        self._batches.discard(batch)
        there: dict[Kind, set[int]] = {kind: set() for kind in self._keepers}
        for row in written.result:
            there[row.kind].add(row.record)
        for kind, numbers in batch.numbers.items():
            refused = [number for number in numbers if number not in there[kind]]
            self._keepers[kind].rows_refused(np.array(refused, np.int64))
        for moves, move in batch.moves:
            is_done = not move.is_retired and all(
                there[kind].issuperset(self._numbers_of(kind, (move,))) for kind in self._keepers
            )
            moves.complete(move, move.num_pages if is_done else 0, is_done)
        is_there = bool(written.result)
        self.counts.num_writes += is_there
        self.counts.num_bytes += batch.num_bytes * is_there
        self.last_day.add(batch.num_bytes * is_there)
        if written.error is not None:
            self.counts.num_failed += 1
            logger.warning("KV could not be written to the disk: %s", written.error)
        else:  # Prefixes that were cancelled, or did not fit, are still due.
            for key, (_, move) in zip(batch.due, batch.moves, strict=False):
                if (move.stop < len(key) or not is_there) and not move.is_retired:
                    self.offer(key)
        blocked, self._blocked = self._blocked, []
        for key in blocked:
            self.offer(key)
        self.on_end(written.error)

    # ---------------------------------------------------------------- requests that lack slots

    @property
    def locks_pool(self) -> bool:
        """Whether pages of the pool are locked, as they are being copied to a buffer."""
        return any(batch.reads_pool for batch in self._batches)

    def cancel(self, writer: DiskWriter) -> bool:
        """Cancel the writes that lock pages of the pool, as a request lacks slots; return True if there are none.

        If False, `after_writes` calls back when the pages are unlocked: behind one chunk.
        """
        for batch in self._batches:
            if batch.reads_pool and batch.write is not None:
                writer.cancel(batch.write)
        return not self.locks_pool

    def after_writes(self, resume: Callable[[], object]) -> None:
        """Call `resume` once, when no page of the pool is locked by a write any more."""
        self._after_writes.append(resume)
