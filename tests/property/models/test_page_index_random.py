"""Random operations on a `PageIndex` and on a dict of sets: both always hold the same pages."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
from support.faults.faults import around

from raydix.cache_core import Applied, PageIndex
from raydix.cache_core.fleet_index import page_index
from raydix.cache_core.kernels import END

STORED, REMOVED, CLEARED, PENDING, NOT_PENDING, NOTE, END_STORED, END_REMOVED = range(8)
NUM_OPERATIONS = 600
NUM_OPERATIONS_LONG = 30_000


def packed(pages: list[int]) -> Any:
    return np.array(pages, np.int64)


class Column:
    """A column of the model."""

    def __init__(self, has_ends: bool) -> None:
        self.ends: set[int] | None = set() if has_ends else None
        self.epoch: str | None = None
        self.seq = 0
        self.stored: set[int] = set()
        self.pending: set[int] = set()
        self.promised: Counter[int] = Counter()

    def runs(self, chain: list[int], pages: list[int], stride: int) -> tuple[int, int]:
        """Return the stored and the expected length, both in pages."""
        expected = self.stored | self.pending | set(+self.promised)
        stored, held = leading(chain, self.stored), leading(chain, expected)
        if self.ends is None:
            return stored * stride, held * stride
        end = next((at for at in range(len(pages), 0, -1) if pages[at - 1] in self.ends), 0)
        return end, max(end, held * stride) if held > stored else end

    def remove(self, pages: list[int]) -> None:
        self.stored.difference_update(pages)
        if self.ends is not None:
            self.ends.difference_update(pages)

    def store_ends(self, pages: list[int]) -> None:
        self.ends = (self.ends or set()) | set(pages)

    def remove_ends(self, pages: list[int]) -> None:
        self.ends = (self.ends or set()) - set(pages)


def leading(chain: list[int], pages: set[int]) -> int:
    return next((at for at, page in enumerate(chain) if page not in pages), len(chain))


class Traffic:
    """Random calls, each made to an index and to the model. Few pages, so that columns share most of them."""

    def __init__(self, seed: int, num_pages: int) -> None:
        self.random = Random(seed)
        self.index = PageIndex()
        self.model: dict[int, Column] = {}
        rng = np.random.default_rng(seed)
        self.pages: list[int] = rng.integers(-(2**63), 2**63 - 1, num_pages, np.int64).tolist()

    def some_pages(self) -> list[int]:
        start = self.random.randrange(len(self.pages))
        return self.pages[start : start + self.random.randrange(self.random.choice([2, 40]))]

    def step(self) -> None:
        if not self.model or (len(self.model) < 12 and self.random.random() < 0.02):
            has_ends = self.random.random() < 0.4
            column = self.index.add_column(has_ends)
            assert column not in self.model
            self.model[column] = Column(has_ends)
            return
        column = self.random.choice(sorted(self.model))
        weights = {
            self.batch: 10, self.snapshot: 2, self.promise: 3, self.withdraw: 3, self.look_up: 6, self.drop: 0.2
        }  # fmt: skip
        (operation,) = self.random.choices([*weights], [*weights.values()])
        operation(column)

    def batch(self, column: int) -> None:
        model = self.model[column]
        kinds = [self.random.choice([0, 0, 0, 1, 1, 3, 4, 5]) for _ in range(self.random.randrange(6))]
        if model.ends is not None or self.random.random() < 0.01:
            kinds += [self.random.choice([END_STORED, END_STORED, END_REMOVED])] * self.random.randrange(3)
            self.random.shuffle(kinds)
        if self.random.random() < 0.02:
            kinds.append(CLEARED)
        events = [(kind, self.some_pages() if kind not in (CLEARED, NOTE) else []) for kind in kinds]
        # An event of ends without pages has the pages of the event before it.
        sent = [[] if kind == END_STORED and self.random.random() < 0.4 else pages for kind, pages in events]
        for place, (kind, pages) in enumerate(events):
            if kind == END_STORED and not sent[place]:
                pages[:] = sent[place - 1] if place else []
        epoch = self.random.choice(["e"] * 9 + ["f"])
        before = max(0, model.seq + self.random.choice([0] * 8 + [-1, -2, 1]))
        applied = self.index.apply(
            column,
            epoch,
            before + len(events),
            bytes(kinds),
            np.array([len(pages) for pages in sent], np.int32),
            packed([page for pages in sent for page in pages]),
        )
        if before > model.seq or (model.epoch or epoch) != epoch:
            assert applied is Applied.NEEDS_SNAPSHOT
            return
        new = events[model.seq - before :]
        assert (applied is Applied.DONE) == bool(new)
        for kind, pages in new:
            if kind == CLEARED:
                model.stored, model.pending = set(), set()
                model.ends = None if model.ends is None else set()
            self.changed(model, kind)(pages)
        if new:
            model.epoch, model.seq = epoch, before + len(events)

    def changed(self, model: Column, kind: int) -> Any:
        return {
            STORED: model.stored.update,
            REMOVED: model.remove,
            END_STORED: model.store_ends,
            END_REMOVED: model.remove_ends,
            PENDING: model.pending.update,
            NOT_PENDING: model.pending.difference_update,
        }.get(kind, bool)

    def snapshot(self, column: int) -> None:
        model = self.model[column]
        epoch = self.random.choice(["e", "f"])
        seq = max(0, model.seq + self.random.randrange(-2, 5))
        stored, pending = self.some_pages(), self.some_pages()
        ends = None if self.random.random() < 0.5 else self.some_pages()

        packed_ends = None if ends is None else packed(ends)
        taken = self.index.apply_snapshot(column, epoch, seq, packed(stored), packed(pending), packed_ends)

        assert taken == (epoch != model.epoch or seq >= model.seq)
        if taken:
            model.promised = model.promised if epoch == model.epoch else Counter()
            model.epoch, model.seq, model.stored, model.pending = epoch, seq, set(stored), set(pending)
            model.ends = None if ends is None else set(ends)

    def promise(self, column: int) -> None:
        pages = self.some_pages()
        self.index.promise(column, packed(pages))
        self.model[column].promised.update(pages)

    def withdraw(self, column: int) -> None:
        pages = self.some_pages()
        self.index.withdraw(column, packed(pages))
        promised = self.model[column].promised
        promised.subtract(pages)
        self.model[column].promised = +promised

    def drop(self, column: int) -> None:
        self.index.drop_column(column)
        del self.model[column]

    def look_up(self, column: int) -> None:
        stride, pages = self.random.choice([1, 1, 2, 5]), self.some_pages()
        chain = pages[stride - 1 :: stride]
        for model in self.model.values():  # All KV before an end is stored.
            end = (
                0
                if model.ends is None
                else next((at for at in range(len(pages), 0, -1) if pages[at - 1] in model.ends), 0)
            )
            if end // stride > leading(chain, model.stored):
                return
        args = packed(pages), stride
        wanted = {(column, *model.runs(chain, pages, stride)) for column, model in self.model.items()}
        wanted = {run for run in wanted if run[2]}

        assert {run for run in self.index.prefix_runs(packed(chain), *args) if run[2]} == wanted
        best = self.index.longest_runs(packed(chain), 2, self.random.randrange(99), (), *args)
        best = [run for run in best if run[2]]
        assert set(best) <= wanted and len(best) == len(set(best)) == min(2, len(wanted))
        assert [run[2] for run in best] == sorted([run[2] for run in wanted], reverse=True)[:2]
        also = self.random.choices(sorted(self.model), k=self.random.randrange(4))
        more = self.index.longest_runs(packed(chain), 1, self.random.randrange(99), also, *args)
        more = [run for run in more if run[2]]
        assert len(more) == len(set(more)) and set(more) <= wanted
        assert {run[0] for run in more[1:]} == {each[0] for each in wanted if each[0] in also} - {
            more[0][0] if more else -1
        }

    def check(self) -> None:
        self.index.check_invariants()
        total = 0
        for column, model in self.model.items():
            assert self.index.position(column) == (model.epoch, model.seq)
            ends = {page ^ END for page in model.ends or ()}
            assert self.index.pages(column) == (model.stored | ends, model.pending, set(model.promised))
            held = model.stored | model.pending | set(model.promised)
            assert self.index.num_pages(column) == len(held)
            total += len(held | ends)
        assert self.index.num_pages() == total
        assert self.index.has_ends == any(model.ends is not None for model in self.model.values())


def run(seed: int, num_pages: int, num_operations: int) -> None:
    traffic = Traffic(seed, num_pages)
    for number in range(num_operations):
        traffic.step()
        if number % 50 == 0:
            traffic.check()
    traffic.check()


@pytest.mark.parametrize("num_pages", [50, 3000])
@pytest.mark.parametrize("seed", range(4))
def test_the_index_holds_what_the_model_holds(seed: int, num_pages: int) -> None:
    run(seed, num_pages, NUM_OPERATIONS)


@pytest.mark.long
@pytest.mark.parametrize("num_pages", [50, 3000, 100_000])
def test_the_index_holds_what_the_model_holds_for_long(num_pages: int) -> None:
    run(7, num_pages, NUM_OPERATIONS_LONG)


# ---------------------------------------------------------------- planted faults


def skip_nothing(patch: pytest.MonkeyPatch) -> None:
    """The events of a batch that were applied before are applied again."""

    class Table(page_index.PageTable):  # type: ignore[misc]
        def apply(self, holder: Any, kinds: Any, counts: Any, hashes: Any, first: Any) -> Any:
            return super().apply(holder, kinds, counts, hashes, 0)

    patch.setattr(page_index, "PageTable", Table)


def forget_promises_at_a_snapshot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageIndex, "_mark_promises", lambda *_: None)


def take_old_snapshots(patch: pytest.MonkeyPatch) -> None:
    def apply_snapshot(original: Any, self: Any, column: int, epoch: str, seq: int, *pages: Any) -> Any:
        entry = self._columns[column]
        entry.seq = min(entry.seq, seq)
        return original(self, column, epoch, seq, *pages)

    around(patch, PageIndex, "apply_snapshot", apply_snapshot)


def keep_the_pages_of_a_dropped_column(patch: pytest.MonkeyPatch) -> None:
    class Table(page_index.PageTable):  # type: ignore[misc]
        def end_id(self, holder: Any) -> Any:
            pass

    patch.setattr(page_index, "PageTable", Table)


def count_no_promise_twice(patch: pytest.MonkeyPatch) -> None:
    def promise(original: Any, self: Any, column: int, hashes: Any) -> Any:
        promises = self._columns[column].promises
        original(self, column, hashes)
        promises.update(dict.fromkeys(promises, 1))

    around(patch, PageIndex, "promise", promise)


@pytest.mark.parametrize(
    "fault",
    [
        skip_nothing,
        forget_promises_at_a_snapshot,
        take_old_snapshots,
        keep_the_pages_of_a_dropped_column,
        count_no_promise_twice,
    ],
)
def test_a_planted_fault_is_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)

    with pytest.raises(AssertionError):
        for seed in range(4):
            run(seed, 50, NUM_OPERATIONS)
