"""`DiskSpaces`: which pages of a disk tier may be matched, and which wait for their models, or to be evicted.

A space is a namespace and the models that computed its KV. At most one space of a namespace is current: its pages are
in the tree. All others are dormant: their records have rows, no node, and are evicted first. A dormant space becomes
current when its models are bound to its namespace; of several, the youngest. A space ends when it is retired, or with
its last row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

import numpy as np

from raydix.cache_core.leases.kv_cache import KVCache
from raydix.cache_core.tiers.index_row import IndexRow
from raydix.cache_core.tiers.page_records import KINDS, Kind
from raydix.cache_core.tiers.record_keeper import Numbers, RecordKeeper
from raydix.cache_core.tiers.row_runs import RowRun
from raydix.cache_core.tiers.tree_builder import TreeBuilder

Models = tuple[str | None, ...]  # names of the models, such as fingerprints; all must be equal


@dataclass(slots=True, eq=False)
class DiskSpace:
    """One space.

    Attributes:
        number: of the space in the index.
        namespace: `extra_key` of its pages.
        models: that computed its KV.
        arity: ids of a tuple in its keys; 0: plain ids.
        builder: puts its rows into the tree; None: it is dormant, or all of them are there.
        num_rows: committed, or in a write.
    """

    number: int
    namespace: str | None
    models: Models
    arity: int = 0
    builder: TreeBuilder | None = None
    num_rows: int = 0
    _kinds: list[Numbers] = field(default_factory=list)  # its dormant records by depth, for each of `KINDS`
    _records: list[Numbers] = field(default_factory=list)

    def add_records(self, kinds: Numbers, records: Numbers) -> None:
        """Append dormant records by depth: the place of the kind in `KINDS`, and the number of each."""
        self._kinds.append(kinds)
        self._records.append(records)

    def pop_records(self, num_pages: int) -> list[tuple[Numbers, Numbers]]:
        """Take out the deepest records, with about so many pages of full KV; all, if there are fewer.

        Returns:
            Parts of kinds and records, as `add_records` takes them.
        """
        taken: list[tuple[Numbers, Numbers]] = []
        while num_pages > 0 and self._records:
            kinds, records = self._kinds.pop(), self._records.pop()
            pages = np.flatnonzero(kinds == 0)
            stop = int(pages[-num_pages]) if len(pages) > num_pages else 0
            if stop:
                self._kinds.append(kinds[:stop])
                self._records.append(records[:stop])
            num_pages -= len(pages)
            taken.append((kinds[stop:], records[stop:]))
        return taken

    def pop_all(self) -> list[tuple[Numbers, Numbers]]:
        """Take out all dormant records, as `pop_records` does."""
        taken = list(zip(self._kinds, self._records, strict=True))
        self._kinds, self._records = [], []
        return taken


class DiskSpaces:
    """The spaces of a disk tier.

    At the start: `add` each space of the index, `read` all rows, then `end_reading`. From then on records are free.

    Args:
        cache: of the disk tier.
        keepers: of its records, by kind.
    """

    def __init__(self, cache: KVCache, keepers: Mapping[Kind, RecordKeeper]) -> None:
        self._cache = cache
        self._keepers = keepers
        self._spaces: dict[int, DiskSpace] = {}  # the oldest first
        self._of_namespace: dict[str | None, tuple[DiskSpace, ...]] = {}  # the oldest first
        self._current: dict[str | None, DiskSpace] = {}
        self._dormant: dict[int, DiskSpace] = {}  # the oldest first
        self._of_models: dict[Models, dict[int, DiskSpace]] = {}  # models -> their dormant spaces
        self._building: dict[int, DiskSpace] = {}  # spaces with builders
        self._to_build: dict[int, DiskSpace] = {}  # spaces of which the builders were given something
        self._ended: dict[int, DiskSpace] = {}  # spaces of which the deletion is not committed
        self._emptied: dict[int, DiskSpace] = {}  # spaces that had no row left
        for keeper in keepers.values():
            keeper.on_rows = self._count_rows

    def __iter__(self) -> Iterator[DiskSpace]:
        return iter(self._spaces.values())

    def __len__(self) -> int:
        return len(self._spaces)

    def _count_rows(self, spaces: Numbers, sign: int) -> None:
        for number, num_rows in Counter(spaces.tolist()).items():
            if (space := self._spaces.get(number)) is not None:
                space.num_rows += sign * num_rows
                if not space.num_rows:
                    self._emptied[number] = space

    # ---------------------------------------------------------------- the start

    def add(self, number: int, namespace: str | None, models: Models, arity: int = 0) -> DiskSpace:
        """Add a space of the index, which is dormant. The youngest must come last."""
        space = self._spaces[number] = self._dormant[number] = DiskSpace(number, namespace, models, arity)
        self._of_namespace[namespace] = (*self._of_namespace.get(namespace, ()), space)
        self._of_models.setdefault(models, {})[number] = space
        return space

    def read(self, spaces: Numbers, kinds: Numbers, records: Numbers) -> list[tuple[Kind, int]]:
        """Note the records of some rows, by space and depth; return those of which the rows must be deleted.

        These lie beyond the end of their file, or the tier has none of their kind. A space may have been retired; rows
        of other spaces are ignored.

        Args:
            spaces: the numbers of the spaces.
            kinds: of the records, by their places in `KINDS`.
        """
        runs = [(int(spaces[start]), start, stop) for start, stop in _runs(spaces)]
        runs = [run for run in runs if run[0] in self._spaces or run[0] in self._ended]
        is_known, is_good = np.zeros(len(records), np.bool_), np.zeros(len(records), np.bool_)
        for _, start, stop in runs:
            is_known[start:stop] = True
        for place, kind in enumerate(KINDS):
            if kind in self._keepers:
                mine = np.flatnonzero(is_known & (kinds == place))
                is_good[mine] = self._keepers[kind].add_dormant(records[mine], spaces[mine])
        for number, start, stop in runs:
            space = self._spaces.get(number) or self._ended[number]
            good = is_good[start:stop]
            space.add_records(kinds[start:stop][good], records[start:stop][good])
        return [(KINDS[kinds[at]], int(records[at])) for at in np.flatnonzero(is_known & ~is_good)]

    def end_reading(self) -> None:
        """Free all records that no row names."""
        for keeper in self._keepers.values():
            keeper.end_reading()
        self._emptied |= {number: space for number, space in self._spaces.items() if not space.num_rows}

    # ---------------------------------------------------------------- models

    def current(self, namespace: str | None) -> DiskSpace | None:
        """Return the space of which the pages of a namespace can be matched, and to which new ones are written."""
        return self._current.get(namespace)

    @property
    def all_current(self) -> Iterable[DiskSpace]:
        """The current space of each namespace that has one."""
        return self._current.values()

    @property
    def dormant_models(self) -> list[Models]:
        """The models of which there are dormant spaces."""
        return list(self._of_models)

    def dormant(self, models: Models) -> list[DiskSpace]:
        """Return the dormant spaces of these models, the oldest first."""
        return list(self._of_models.get(models, {}).values())

    def bind(self, namespace: str | None, models: Models) -> DiskSpace | None:
        """Make the youngest space of these models the current one of its namespace, which must have none.

        Returns:
            The space, with a builder: read its rows, and give them to `build`. None: there is no such space; add one,
            and call `begin`.
        """
        for space in reversed(self._of_namespace.get(namespace, ())):
            if space.models == models:
                self.begin(space)
                space.builder = TreeBuilder(self._cache, self._keepers, namespace, space.arity)
                self._building[space.number] = space
                return space
        return None

    @property
    def is_building(self) -> bool:
        """Whether pages of current spaces are still to be put into the tree."""
        return bool(self._building)

    def begin(self, space: DiskSpace) -> None:
        """Make a space the current one of its namespace, which must have none. It has no rows, or a builder follows."""
        assert space.namespace not in self._current, f"namespace {space.namespace!r} has a current space"
        self._current[space.namespace] = space
        self._wake_up(space)

    def _wake_up(self, space: DiskSpace) -> None:
        """Take a space out of the dormant ones."""
        if self._dormant.pop(space.number, None) is not None:
            alike = self._of_models[space.models]
            del alike[space.number]
            if not alike:
                del self._of_models[space.models]

    def give(self, space: DiskSpace, runs: Iterable[RowRun], left_out: Iterable[IndexRow], *, is_last: bool) -> None:
        """Give the builder of a space runs of its rows, and rows that belong to none.

        Args:
            is_last: there are no more. From then on `build` may end the builder.
        """
        if space.builder is None:  # the space was retired meanwhile
            return
        space.builder.add(runs)
        space.builder.leave_out(left_out)
        if is_last:
            space.builder.is_fed = True
        self._to_build[space.number] = space

    def build(self, num_pages: int) -> list[DiskSpace]:
        """Put about so many pages of current spaces into the tree; return the spaces of which all are there now.

        `may_build` says whether there is more.
        """
        left, built, rest = num_pages, list[DiskSpace](), list[tuple[Numbers, Numbers]]()
        while self._to_build and left > 0:
            number, space = next(iter(self._to_build.items()))
            if (builder := space.builder) is not None:  # else it was retired
                before = builder.num_built
                if builder.build(left):
                    break
                left -= 1 + builder.num_built - before
                if builder.is_fed:
                    rest += space.pop_all()
                    space.builder = None
                    del self._building[number]
                    built.append(space)
            del self._to_build[number]
        self._drop(rest)  # records that no run has, such as those that another row names
        return built

    @property
    def may_build(self) -> bool:
        """Whether builders have something to put into the tree."""
        return bool(self._to_build)

    # ---------------------------------------------------------------- evictions, retirements

    def drop_dormant(self, num_pages: int) -> int:
        """Let the deepest records of dormant spaces leave, the oldest space first; return the pages of full KV."""
        left, taken = num_pages, list[tuple[Numbers, Numbers]]()
        for space in self._dormant.values() if self._keepers["full"].num_dormant else ():
            if left <= 0:
                break
            parts = space.pop_records(left)
            left -= sum(int(np.count_nonzero(kinds == 0)) for kinds, _ in parts)
            taken += parts
        return self._drop(taken)

    def _drop(self, taken: Sequence[tuple[Numbers, Numbers]]) -> int:
        """Let dormant records leave; others are left alone. Return the pages of full KV."""
        before = self._keepers["full"].num_dormant
        for kind, records in self._by_kind(taken):
            self._keepers[kind].drop(records)
        return before - self._keepers["full"].num_dormant

    def _by_kind(self, taken: Sequence[tuple[Numbers, Numbers]]) -> Iterator[tuple[Kind, Numbers]]:
        """Yield the records of each kind that the tier has."""
        if taken:
            kinds, records = (np.concatenate(parts) for parts in zip(*taken, strict=True))
            for place, kind in enumerate(KINDS):
                if kind in self._keepers and len(mine := records[kinds == place]):
                    yield kind, mine

    def retire(self, is_meant: Callable[[str | None], bool]) -> list[int]:
        """Retire all spaces of namespaces, current and dormant; return the numbers to delete from the index.

        Call it before the cache retires the namespaces. Nothing of the spaces can become current again.
        """
        meant = {number: space for number, space in self._spaces.items() if is_meant(space.namespace)}
        self._ended |= meant
        if len(meant) < len(self._spaces):
            self.end(meant.values())
        else:
            self._end_all()
        return list(meant)

    def _end_all(self) -> None:
        """Do `end` for all spaces, in a third of the time: new weights may come in every training step."""
        for space in self._building.values():
            if space.builder is not None:
                space.builder.cancel()
                space.builder = None
        for spaces in (self._spaces, self._of_namespace, self._current, self._dormant, self._of_models, self._building):
            spaces.clear()

    def end(self, spaces: Iterable[DiskSpace]) -> None:
        """Forget spaces, of which no record may be dormant, or which are being retired."""
        for space in spaces:
            if self._spaces.pop(space.number, None) is None:
                continue
            others = self._of_namespace.pop(space.namespace)
            if len(others) > 1:
                self._of_namespace[space.namespace] = tuple(other for other in others if other is not space)
            if space.builder is not None:
                space.builder.cancel()
                space.builder = None
                del self._building[space.number]
            if self._current.get(space.namespace) is space:
                del self._current[space.namespace]
            else:
                self._wake_up(space)

    def end_emptied(self, most: int) -> list[int]:
        """End spaces that have lost their last row; return the numbers to delete from the index, at most so many."""
        taken = [self._emptied.pop(number) for number in list(islice(self._emptied, most))]
        empty = [space for space in taken if not space.num_rows and space.number in self._spaces]
        self.end(empty)
        return [space.number for space in empty]

    def deleted(self, numbers: Iterable[int]) -> None:
        """Free the dormant records of retired spaces, when their deletion is committed; of others, do nothing."""
        ended = [self._ended.pop(number) for number in numbers if number in self._ended]
        for kind, records in self._by_kind([part for space in ended for part in space.pop_all()]):
            self._keepers[kind].free_dormant(records)

    def lose_all(self) -> None:
        """Retire all spaces, and free their dormant records: a new index has none of them.

        The cache must have retired all namespaces that it has.
        """
        self.retire(lambda namespace: True)
        self.deleted(list(self._ended))


def _runs(values: Numbers) -> Iterator[tuple[int, int]]:
    """Yield the first and the last place, exclusive, of each run of equal values."""
    if len(values):
        starts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
        yield from pairwise(starts)
