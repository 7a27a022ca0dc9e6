"""`DiskSpaces`: which pages of a disk tier may be matched, and which wait for their models, or to be evicted.

A space is a namespace and the models that computed its KV. At most one space of a namespace is current: its pages are
in the tree. All others are dormant: their records have rows, no node, and are evicted first. A dormant space becomes
current when its models are bound to its namespace; of several, the youngest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
    """

    number: int
    namespace: str | None
    models: Models
    arity: int = 0
    builder: TreeBuilder | None = None
    _kinds: list[Numbers] = field(default_factory=list)  # its dormant records by depth, for each of `KINDS`
    _records: list[Numbers] = field(default_factory=list)

    def add_records(self, kinds: Numbers, records: Numbers) -> None:
        """Append dormant records by depth: the place of the kind in `KINDS`, and the number of each."""
        self._kinds.append(kinds)
        self._records.append(records)

    def pop_records(self, num_pages: int) -> dict[Kind, Numbers]:
        """Take out the deepest records, with about so many pages of full KV; all, if there are fewer."""
        taken: dict[Kind, list[Numbers]] = {}
        while num_pages > 0 and self._records:
            kinds, records = self._kinds.pop(), self._records.pop()
            pages = np.flatnonzero(kinds == 0)
            stop = int(pages[-num_pages]) if len(pages) > num_pages else 0
            if stop:
                self._kinds.append(kinds[:stop])
                self._records.append(records[:stop])
            num_pages -= len(pages)
            for place, kind in enumerate(KINDS):
                taken.setdefault(kind, []).append(records[stop:][kinds[stop:] == place])
        return {kind: np.concatenate(parts) for kind, parts in taken.items()}

    def pop_all(self) -> dict[Kind, Numbers]:
        """Take out all dormant records."""
        return self.pop_records(2**62)


class DiskSpaces:
    """The spaces of a disk tier.

    At the start: `add` each space of the index, `read` all of its rows, then `end_reading`. From then on records are
    free.

    Args:
        cache: of the disk tier.
        keepers: of its records, by kind.
    """

    def __init__(self, cache: KVCache, keepers: Mapping[Kind, RecordKeeper]) -> None:
        self._cache = cache
        self._keepers = keepers
        self._spaces: dict[int, DiskSpace] = {}  # the oldest first
        self._by_namespace: dict[str | None, dict[int, DiskSpace]] = {}  # namespace -> its spaces, the oldest first
        self._current: dict[str | None, DiskSpace] = {}
        self._to_build: dict[int, DiskSpace] = {}  # spaces of which the builders were given something
        self._ended: dict[int, DiskSpace] = {}  # spaces of which the deletion is not committed

    def __iter__(self) -> Iterator[DiskSpace]:
        return iter(self._spaces.values())

    def __len__(self) -> int:
        return len(self._spaces)

    # ---------------------------------------------------------------- the start

    def add(self, number: int, namespace: str | None, models: Models, arity: int = 0) -> DiskSpace:
        """Add a space of the index, which is dormant. The youngest must come last."""
        space = self._spaces[number] = DiskSpace(number, namespace, models, arity)
        self._by_namespace.setdefault(namespace, {})[number] = space
        return space

    def read(self, number: int, kinds: Numbers, records: Numbers) -> list[tuple[Kind, int]]:
        """Note the records of some rows of a space, by depth; return those of which the rows must be deleted.

        These lie beyond the end of their file, or the tier has none of their kind. The space may have been retired.

        Args:
            kinds: of the records, by their places in `KINDS`.
        """
        is_good = np.zeros(len(records), np.bool_)
        for place, kind in enumerate(KINDS):
            if kind in self._keepers:
                mine = np.flatnonzero(kinds == place)
                is_good[mine] = self._keepers[kind].add_dormant(records[mine])
        space = self._spaces.get(number) or self._ended[number]
        space.add_records(kinds[is_good], records[is_good])
        return [(KINDS[kinds[at]], int(records[at])) for at in np.flatnonzero(~is_good)]

    def end_reading(self) -> None:
        """Free all records that no row names."""
        for keeper in self._keepers.values():
            keeper.end_reading()

    # ---------------------------------------------------------------- models

    def current(self, namespace: str | None) -> DiskSpace | None:
        """Return the space of which the pages of a namespace can be matched, and to which new ones are written."""
        return self._current.get(namespace)

    def bind(self, namespace: str | None, models: Models) -> DiskSpace | None:
        """Make the youngest space of these models the current one of its namespace, which must have none.

        Returns:
            The space, with a builder: read its rows, and give them to `build`. None: there is no such space; add one,
            and call `begin`.
        """
        assert namespace not in self._current, f"namespace {namespace!r} has a current space"
        for space in reversed(self._by_namespace.get(namespace, {}).values()):
            if space.models == models:
                space.builder = TreeBuilder(self._cache, self._keepers, namespace, space.arity)
                self._current[namespace] = space
                return space
        return None

    @property
    def is_building(self) -> bool:
        """Whether pages of current spaces are still to be put into the tree."""
        return any(space.builder is not None for space in self._current.values())

    def begin(self, space: DiskSpace) -> None:
        """Make a new space the current one of its namespace, which must have none. It has no rows."""
        assert space.namespace not in self._current, f"namespace {space.namespace!r} has a current space"
        self._current[space.namespace] = space

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

    def build(self, num_pages: int) -> bool:
        """Put about so many pages of current spaces into the tree; return whether there are more."""
        left = num_pages
        while self._to_build and left > 0:
            number, space = next(iter(self._to_build.items()))
            if (builder := space.builder) is not None:  # else it was retired
                before = builder.num_built
                if builder.build(left):
                    return True
                left -= 1 + builder.num_built - before
                if builder.is_fed:
                    self._drop(space.pop_all())  # records that no run has, such as those that another row names
                    space.builder = None
            del self._to_build[number]
        return bool(self._to_build)

    # ---------------------------------------------------------------- evictions, retirements

    def drop_dormant(self, num_pages: int) -> int:
        """Let the deepest records of dormant spaces leave, the oldest space first; return the pages of full KV."""
        left = num_pages
        for space in self._spaces.values() if self._keepers["full"].num_dormant else ():
            if left <= 0:
                break
            if space is not self._current.get(space.namespace):
                left -= self._drop(space.pop_records(left))
        return num_pages - left

    def _drop(self, records: Mapping[Kind, Numbers]) -> int:
        """Let dormant records leave; others are left alone. Return the pages of full KV."""
        before = self._keepers["full"].num_dormant
        for kind, numbers in records.items():
            if kind in self._keepers:
                self._keepers[kind].drop(numbers)
        return before - self._keepers["full"].num_dormant

    def retire(self, is_meant: Callable[[str | None], bool]) -> list[int]:
        """Retire all spaces of namespaces, current and dormant; return the numbers to delete from the index.

        Call it before the cache retires the namespaces. Nothing of the spaces can become current again.
        """
        return self._end([space for space in self._spaces.values() if is_meant(space.namespace)])

    def retire_space(self, space: DiskSpace) -> list[int]:
        """Do `retire` for one space."""
        return self._end([space])

    def _end(self, spaces: Sequence[DiskSpace]) -> list[int]:
        for space in spaces:
            self._ended[space.number] = self._spaces.pop(space.number)
            spaces_of = self._by_namespace[space.namespace]
            del spaces_of[space.number]
            if not spaces_of:
                del self._by_namespace[space.namespace]
            if space.builder is not None:
                space.builder.cancel()
                space.builder = None
            if self._current.get(space.namespace) is space:
                del self._current[space.namespace]
        return [space.number for space in spaces]

    def deleted(self, numbers: Iterable[int]) -> None:
        """Free the dormant records of retired spaces, when their deletion is committed; of others, do nothing."""
        for space in [self._ended.pop(number) for number in numbers if number in self._ended]:
            for kind, records in space.pop_all().items():
                if kind in self._keepers:
                    self._keepers[kind].free_dormant(records)

    def lose_all(self) -> None:
        """Retire all spaces, and free their dormant records: a new index has none of them.

        The cache must have retired all namespaces that it has.
        """
        self._end(list(self._spaces.values()))
        self.deleted(list(self._ended))
