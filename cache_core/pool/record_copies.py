"""`RecordCopies`: copies of rows of tensors, such as blocks of an engine or pages of a pool, to records and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.cache_core.pool.copy_slots import widened

PIECE_BYTES = 2**30  # host memory is registered with CUDA in pieces that end at addresses that this divides
_STAGING_BYTES = 64 * 2**20
_MANY_RUNS = 64  # more runs are copied by index, through a temporary tensor
_TEMPORARY_BYTES = 2**20

Ids = NDArray[np.int64]
Runs = list[tuple[int, int, int]]  # first row, first record, number of rows
Cut = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class RecordCopies:
    """Rows of tensors, and the records in which each tensor has a segment. It never changes.

    A row of a tensor has one or more parts, each of which is a segment of one record. Each call copies with few large
    operations, which do not hold the interpreter. Where the records lie on another device than the tensors, records are
    gathered on the tensors' device, and each run of records is one transfer. CUDA refuses a transfer that crosses the
    end of registered memory, so a run is cut there. A call returns when the copy has ended.

    Attributes:
        rows: of each tensor, `[num_rows, parts, *segment]`.
        segments: of each tensor in all records, `[num_records, *segment]`.
        records: `[num_records, bytes]`, contiguous.
        staging: some records on the device of the tensors, `[number, bytes]`; None: the records are on that device.
        staged: the segment of each tensor in them, `[number, *segment]`.
        stream: of the copies, where the tensors lie on a GPU.
    """

    rows: tuple[torch.Tensor, ...]
    segments: tuple[torch.Tensor, ...]
    records: torch.Tensor
    staging: torch.Tensor | None
    staged: tuple[torch.Tensor, ...]
    stream: torch.cuda.Stream | None

    @classmethod
    def between(
        cls,
        tensors: Sequence[tuple[torch.Tensor, Cut]],
        records: torch.Tensor,
        stream: torch.cuda.Stream | None = None,
        staging_bytes: int | None = None,
    ) -> RecordCopies:
        """Return the copies between tensors and records.

        Args:
            tensors: `[num_rows, parts, *segment]` uint8 each, and a function that returns the segment of the tensor in
                records, `[number, *segment]`, as a view of them.
            records: `[num_records, bytes]` uint8, contiguous.
            stream: of the copies, where the tensors lie on a GPU.
            staging_bytes: of the records that are gathered before a transfer, one record at least; None: 64 MiB.
        """
        staging = None
        if tensors and tensors[0][0].device != records.device:
            num_staged = max(1, (staging_bytes or _STAGING_BYTES) // records.shape[1])
            staging = tensors[0][0].new_empty(num_staged, records.shape[1])
        rows, segments, staged = [], [], []
        for tensor, cut in tensors:
            views = widened(tensor, cut(records), *(() if staging is None else (cut(staging),)))
            rows.append(views[0])
            segments.append(views[1])
            staged += views[2:]
        return cls(tuple(rows), tuple(segments), records, staging, tuple(staged), stream)

    def save(self, rows: Ids, records: Ids, after: torch.cuda.Event | None = None) -> None:
        """Copy rows to records.

        Args:
            rows: different ones.
            records: a different one for each part of each row; negative: not copied.
            after: an event behind the work that the GPU must have done before.
        """
        self._copy(rows, records, to_records=True, after=after)

    def load(self, rows: Ids, records: Ids, after: torch.cuda.Event | None = None) -> None:
        """Copy records to rows. The arguments are those of `save`."""
        self._copy(rows, records, to_records=False, after=after)

    def _copy(self, rows: Ids, records: Ids, *, to_records: bool, after: torch.cuda.Event | None) -> None:
        if self.stream is None:
            self._copy_rows(rows, records, to_records=to_records)
            return
        with torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            self._copy_rows(rows, records, to_records=to_records)
        self.stream.synchronize()

    def _copy_rows(self, rows: Ids, records: Ids, *, to_records: bool) -> None:
        if not self.rows:
            return
        step = self.rows[0].shape[1]
        if self.staging is not None:
            kept = np.flatnonzero(records >= 0)
            kept = kept[np.argsort(records[kept], kind="stable")]  # records that follow one another are one transfer
            for start in range(0, len(kept), len(self.staging)):
                of_chunk = kept[start : start + len(self.staging)]
                found, parts = rows[of_chunk // step], of_chunk % step
                self._copy_staged(self.staging, found, parts, records[of_chunk], to_records=to_records)
            return
        for part in range(step):
            of_part = records[part::step]
            is_kept = of_part >= 0
            found, of_part = rows[is_kept], of_part[is_kept]
            if not len(found):
                continue
            runs = find_runs(found, of_part, step)
            for tensor, segments in zip(self.rows, self.segments, strict=True):
                if len(runs) > _MANY_RUNS:
                    _copy_by_index(tensor[:, part], segments, found, of_part, to_records=to_records)
                    continue
                _copy_runs(tensor[:, part], segments, runs, step, to_records=to_records)

    def _copy_staged(self, staging: torch.Tensor, rows: Ids, parts: Ids, records: Ids, *, to_records: bool) -> None:
        """Copy records in ascending order, as many as are staged at most."""
        places = torch.from_numpy(rows).to(staging.device), torch.from_numpy(parts).to(staging.device)
        number = len(records)
        runs = find_runs(np.arange(number), records, 1)
        if to_records:
            for tensor, staged in zip(self.rows, self.staged, strict=True):
                staged[:number].copy_(tensor[places])
        for first, record, length in runs:
            in_records, in_staging = self.records[record : record + length], staging[first : first + length]
            for of_records, of_staging in _in_pieces(in_records, in_staging):
                target, source = (of_records, of_staging) if to_records else (of_staging, of_records)
                target.copy_(source, non_blocking=True)
        if to_records:
            return
        for tensor, staged in zip(self.rows, self.staged, strict=True):
            tensor[places] = staged[:number]


def find_runs(rows: Ids, records: Ids, step: int) -> Runs:
    """Return the runs in which the numbers of rows grow by 1 and those of records by `step`."""
    breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(records) != step)) + 1
    starts = [0, *breaks.tolist()]
    return [
        (int(rows[start]), int(records[start]), end - start)
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)
    ]


def _copy_runs(rows: torch.Tensor, segments: torch.Tensor, runs: Runs, step: int, *, to_records: bool) -> None:
    """Copy runs of rows to records or back, on one device."""
    if rows.device.type == "cpu":
        # torch would share the copy among threads that an engine keeps busy.
        host_rows, host_records = rows.numpy(), segments.numpy()
        for row, record, length in runs:
            some_rows = host_rows[row : row + length]
            some_records = host_records[record : record + (length - 1) * step + 1 : step]
            np.copyto(*((some_records, some_rows) if to_records else (some_rows, some_records)))
        return
    for row, record, length in runs:
        in_rows, in_records = rows[row : row + length], segments[record : record + (length - 1) * step + 1 : step]
        target, source = (in_records, in_rows) if to_records else (in_rows, in_records)
        target.copy_(source)


def _in_pieces(records: torch.Tensor, staging: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield both runs of records in parts, each of which lies in one piece of registered memory."""
    address, num_bytes = records.data_ptr(), records.nbytes
    before = address % PIECE_BYTES
    if before + num_bytes <= PIECE_BYTES:
        yield records, staging
        return
    records, staging = records.view(-1), staging.view(-1)
    for start in range(-before, num_bytes, PIECE_BYTES):
        part = slice(max(0, start), start + PIECE_BYTES)
        yield records[part], staging[part]


def _copy_by_index(tensor: torch.Tensor, segments: torch.Tensor, rows: Ids, records: Ids, *, to_records: bool) -> None:
    """Copy rows to records or back, on one device, through a temporary tensor of bounded size."""
    pair = (tensor, rows, segments, records) if to_records else (segments, records, tensor, rows)
    source, found, target, wanted = pair
    step = max(1, _TEMPORARY_BYTES // (tensor[0].numel() * tensor.itemsize))
    for start in range(0, len(rows), step):
        at, to = found[start : start + step], wanted[start : start + step]
        if tensor.device.type == "cpu":  # numpy copies rows by index at up to twice the speed of torch
            target.numpy()[to] = source.numpy()[at]
        else:
            copied = source.index_select(0, torch.from_numpy(at).to(tensor.device))
            target.index_copy_(0, torch.from_numpy(to).to(tensor.device), copied)
