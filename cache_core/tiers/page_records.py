"""`PageRecords`: the pages of a pool as records of bytes; `PageCopies` copies them to the pool of a tier and back.

The record of a page has the bytes of each full layer, one layer after the other: K, V and index keys. Window halves
have records of their own, with the sliding-window layers, and so have states: the row of a state slot in all layers. An
opaque pool keeps such records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch

from raydix.cache_core.pool.kv_pool import KVPool
from raydix.cache_core.pool.record_copies import Cut, RecordCopies
from raydix.cache_core.pool.record_pool import RecordPool
from raydix.cache_core.tree.packed_slots import Starts

CHUNK_BYTES = 8 * 2**20  # copied by one call; about 2 ms

Kind = Literal["full", "swa", "state"]
KINDS: tuple[Kind, ...] = ("full", "swa", "state")


class _Stack(NamedTuple):
    """Tensors with rows of one size, at equal distances in the pool's memory and in a record: one copy moves all."""

    place: int  # of the first tensor, in bytes of the pool's memory
    offset: int  # of its segment in a record
    row_bytes: int
    number: int = 1
    place_step: int = 0
    offset_step: int = 0

    def with_next(self, place: int, offset: int) -> _Stack | None:
        """Return the stack with one more tensor; None: it lies at another distance."""
        place_step = place - self.place - (self.number - 1) * self.place_step
        offset_step = offset - self.offset - (self.number - 1) * self.offset_step
        if self.number > 1 and (place_step, offset_step) != (self.place_step, self.offset_step):
            return None
        return self._replace(number=self.number + 1, place_step=place_step, offset_step=offset_step)

    def rows(self, storage: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return the rows of the tensors, `[num_rows, 1, number, row_bytes]`, as a view of the pool's memory."""
        shape, first = (num_rows, 1, self.number, self.row_bytes), storage.storage_offset() + self.place
        return storage.as_strided(shape, (self.row_bytes, self.row_bytes, self.place_step or self.row_bytes, 1), first)

    def cut(self, records: torch.Tensor) -> torch.Tensor:
        """Return the segments of the tensors in records, `[number of records, number, row_bytes]`, as a view."""
        shape, first = (len(records), self.number, self.row_bytes), records.storage_offset() + self.offset
        return records.as_strided(shape, (records.stride(0), self.offset_step or self.row_bytes, 1), first)


class PageRecords:
    """The pages, window halves and states of a pool, as records.

    On a GPU, copies run on a stream of their own, and a call returns when its copy has ended. They are not ordered with
    other streams: pages must be written before they are gathered, and unused before they are scattered.

    Args:
        pool: of pages; its layout must not have `max_seq_len`.

    Raises:
        ValueError: the layout has `max_seq_len`.
    """

    def __init__(self, pool: KVPool | RecordPool) -> None:
        if getattr(pool.layout, "max_seq_len", None) is not None:
            raise ValueError("pool must have pages, not sequences: its layout has max_seq_len")
        self.page_size = pool.layout.page_size
        device = pool.storage.device
        self._storage = pool.storage
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._num_rows = dict.fromkeys(KINDS, 0)
        self._stacks: dict[Kind, list[_Stack]] = {kind: [] for kind in KINDS}
        self._num_bytes = dict.fromkeys(KINDS, 0)
        for kind in KINDS:
            for tensor in _tensors(pool, kind):
                self._add(kind, tensor)

    def _add(self, kind: Kind, tensor: torch.Tensor) -> None:
        """Append a contiguous tensor, `[slots, ...]`, to the segments of a kind."""
        num_rows = len(tensor) // self._slots_of(kind)
        row_bytes = tensor[0].numel() * tensor.itemsize * self._slots_of(kind)
        place, offset = tensor.data_ptr() - self._storage.data_ptr(), self._num_bytes[kind]
        self._num_rows[kind], self._num_bytes[kind] = num_rows, offset + row_bytes
        stacks = self._stacks[kind]
        for at, stack in enumerate(stacks):
            longer = stack.with_next(place, offset) if stack.row_bytes == row_bytes else None
            if longer is not None:
                stacks[at] = longer
                return
        stacks.append(_Stack(place, offset, row_bytes))

    def _slots_of(self, kind: Kind) -> int:
        return 1 if kind == "state" else self.page_size

    def num_bytes(self, kind: Kind = "full") -> int:
        """Return the bytes of a record of a kind; 0: the pool has none."""
        return self._num_bytes[kind]

    def gather(self, starts: Starts, out: torch.Tensor, kind: Kind = "full") -> None:
        """Copy pages of the pool to records.

        Args:
            starts: the first slots of pages; window slots for "swa", and state slots for "state".
            out: `[len(starts), num_bytes(kind)]` uint8, on any device.

        Raises:
            ValueError: a start is not the first slot of a page of the pool, or `out` has another shape.
        """
        rows = self._checked(starts, out, kind)
        self.copies(out, kind).save(rows, np.arange(len(rows)))

    def copies(self, records: torch.Tensor, kind: Kind) -> RecordCopies:
        """Return the copies between pages of a kind and records, `[number, num_bytes(kind)]` uint8."""
        number = self._num_rows[kind]
        tensors: list[tuple[torch.Tensor, Cut]] = [
            (stack.rows(self._storage, number), partial(_Stack.cut, stack)) for stack in self._stacks[kind]
        ]
        return RecordCopies.between(tensors, records, self._stream, CHUNK_BYTES)

    def rows(self, starts: Starts, kind: Kind) -> Starts:
        """Return the numbers of the pages that begin with these slots.

        Raises:
            ValueError: a start is not the first slot of a page of the pool.
        """
        starts, size = np.asarray(starts, np.int64), self._slots_of(kind)
        rows, rests = np.divmod(starts, size)
        wrong = (rests != 0) | (rows < 1) | (rows >= self._num_rows[kind])  # the first page is for padding
        if self._num_bytes[kind] and wrong.any():
            last, found = (self._num_rows[kind] - 1) * size, int(starts[wrong][0])
            raise ValueError(f"starts must be first slots of pages of {size}, from {size} to {last}, not {found}")
        return rows

    def _checked(self, starts: Starts, records: torch.Tensor, kind: Kind) -> Starts:
        needed = (len(starts), self._num_bytes[kind])
        if tuple(records.shape) != needed or records.dtype is not torch.uint8:
            raise ValueError(f"records must be {list(needed)} uint8, not {list(records.shape)} {records.dtype}")
        return self.rows(starts, kind)


def _tensors(pool: KVPool | RecordPool, kind: Kind) -> Iterator[torch.Tensor]:
    """Yield the tensors of a kind in the order of their segments, `[slots, ...]` each, without empty ones."""
    tensors = [pool.state_rows()] if kind == "state" else pool.checked_tensors(kind).values()
    yield from (tensor for tensor in tensors if tensor.numel())


class Pairs(NamedTuple):
    """Records of one kind that are copied with the pages of a copy.

    Attributes:
        upper: their first slots in the pool.
        lower: their first slots in the tier below.
        pages: for each, the number of the page of the copy with which it is copied; ascending.
    """

    upper: Starts
    lower: Starts
    pages: Starts


_NONE = Pairs(*(np.empty(0, np.int64),) * 3)


class Chunk(NamedTuple):
    """Pages [start, stop) of a plan, and their bytes."""

    start: int
    stop: int
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """The pages that one copy moves up or down, in order: those that must be there for later ones come first.

    A window half and a state are copied together with a page, so that they are there when the page is confirmed.

    Attributes:
        upper: the first slots of the pages in the pool.
        lower: their first slots in the tier below.
        windows: window halves, by window slots.
        states: by state slots; a number of a page beyond the last one means with the last one. One state may be copied
            to several slots.
    """

    upper: Starts
    lower: Starts
    windows: Pairs = _NONE
    states: Pairs = _NONE

    def __len__(self) -> int:
        return len(self.upper)

    @property
    def extras(self) -> tuple[tuple[Kind, Pairs], ...]:
        """The records that are copied with pages, by kind."""
        return ("swa", self.windows), ("state", self.states)

    def parts(self, start: int, stop: int) -> Iterator[tuple[Kind, Starts, Starts]]:
        """Yield the records to copy for pages [start, stop): the kind, and the slots in the pool and below."""
        yield "full", self.upper[start:stop], self.lower[start:stop]
        for kind, (upper, lower, pages) in self.extras:
            first, last = np.searchsorted(pages, (start, stop)).tolist()
            if stop >= len(self):
                last = len(pages)
            yield kind, upper[first:last], lower[first:last]

    def chunks(self, record_bytes: Mapping[Kind, int], max_bytes: int) -> list[Chunk]:
        """Return the parts in which the plan is copied: as many pages as `max_bytes` have room for, one at least.

        Args:
            record_bytes: of a record of each kind.
        """
        sizes = np.full(max(1, len(self)), record_bytes["full"] if len(self) else 0, np.int64)
        for kind, pairs in self.extras:
            np.add.at(sizes, np.minimum(pairs.pages, len(sizes) - 1), record_bytes[kind])
        ends, chunks, start, before = np.cumsum(sizes), list[Chunk](), 0, 0
        while start < len(ends):
            stop = max(start + 1, int(np.searchsorted(ends, before + max_bytes, "right")))
            end = int(ends[stop - 1])
            chunks.append(Chunk(start, min(stop, len(self)), end - before))
            start, before = stop, end
        return chunks


class PageCopies:
    """Copies pages between a pool and the opaque pool of the tier below, in chunks.

    A call returns when its copy has ended. On a GPU the rules of streams are those of `PageRecords`.

    Args:
        pool: the pool of the upper tier.
        lower: the pool of the lower tier.

    Raises:
        ValueError: the records of the two pools differ in size, or `pool` has no pages.
    """

    def __init__(self, pool: KVPool | RecordPool, lower: RecordPool) -> None:
        self._upper, self._lower = PageRecords(pool), PageRecords(lower)
        wanted, found = (
            {"page_size": records.page_size, **{kind: records.num_bytes(kind) for kind in KINDS}}
            for records in (self._upper, self._lower)
        )
        if found != wanted:
            raise ValueError(f"lower must have records of the pool's sizes in bytes, {wanted}, not {found}")
        self._records: dict[Kind, torch.Tensor] = {"full": lower.pages, "swa": lower.windows, "state": lower.states}
        self._copies = {kind: self._upper.copies(self._records[kind], kind) for kind in KINDS if wanted[kind]}

    def chunks(self, plan: CopyPlan, max_bytes: int = CHUNK_BYTES) -> list[Chunk]:
        """Return the parts in which a plan is copied: as many pages as `max_bytes` have room for, one at least."""
        return plan.chunks({kind: self._upper.num_bytes(kind) for kind in KINDS}, max_bytes)

    def write(self, plan: CopyPlan, start: int, stop: int) -> None:
        """Copy pages [start, stop) of a plan from the pool to the tier below.

        Raises:
            ValueError: the plan has a slot that is not the first one of a page.
        """
        for copies, upper, lower in self._parts(plan, start, stop):
            copies.save(upper, lower)

    def load(self, plan: CopyPlan, start: int, stop: int) -> None:
        """Copy pages [start, stop) of a plan from the tier below to the pool.

        Raises:
            ValueError: the plan has a slot that is not the first one of a page.
        """
        for copies, upper, lower in self._parts(plan, start, stop):
            copies.load(upper, lower)

    def _parts(self, plan: CopyPlan, start: int, stop: int) -> list[tuple[RecordCopies, Starts, Starts]]:
        """Return the copies of each kind, and the numbers of the records in the pool and below."""
        return [
            (self._copies[kind], self._upper.rows(upper, kind), self._lower.rows(lower, kind))
            for kind, upper, lower in plan.parts(start, stop)
            if kind in self._copies and len(upper)
        ]

    def first_difference(self, plan: CopyPlan) -> int | None:
        """Return the first page that differs between the two pools, for checks; None: all are equal. O(bytes)."""
        kinds = ("full", Pairs(plan.upper, plan.lower, np.arange(len(plan)))), *plan.extras
        pages = [page for kind, pairs in kinds for page in self._differing(kind, pairs)]
        return min(min(pages), max(0, len(plan) - 1)) if pages else None

    def _differing(self, kind: Kind, pairs: Pairs) -> Iterator[int]:
        """Yield the page of the first record that differs, if there is one."""
        size = self._upper.num_bytes(kind)
        step = max(1, CHUNK_BYTES // size) if size else len(pairs.pages) + 1
        for first in range(0, len(pairs.pages) if size else 0, step):
            upper, lower, pages = (part[first : first + step] for part in pairs)
            records = self._records[kind]
            found = records.new_empty(len(upper), records.shape[1])
            self._upper.gather(upper, found, kind)
            differs = (found != records[torch.from_numpy(self._lower.rows(lower, kind))]).any(dim=1)
            if differs.any():
                yield int(pages[int(differs.to(torch.uint8).argmax())])
                return
