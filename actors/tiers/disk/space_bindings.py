"""`SpaceBindings`: which space of a disk tier has the KV of each namespace, for the models that are bound now.

A space is made in the step that plans its first write, and its row is committed before rows that name it. It is deleted
with its last row. No binding of a model deletes one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import time

from raydix.actors.tiers.disk.disk_errors import DiskError, IndexDamaged, index_values
from raydix.actors.tiers.disk.disk_files import DiskFiles
from raydix.actors.tiers.disk.disk_index import Space
from raydix.actors.tiers.disk.disk_store import DiskStore
from raydix.actors.tiers.disk.disk_writer import DiskWriter
from raydix.actors.tiers.job_threads import Ended
from raydix.cache_core import RadixKey
from raydix.cache_core.tiers.disk_spaces import DiskSpace, DiskSpaces, Models
from raydix.cache_core.tiers.index_row import FIRST, IndexRow, RowPlace
from raydix.cache_core.tiers.row_runs import RowRun, RowRuns
from raydix.schemas import frame_namespace

_LOOKED_AT_ONCE = 128  # dormant spaces that one slice compares with the bound models: 0.5 ms
_BUILT_AT_ONCE = 32  # pages that one slice puts into the tree: about 1 ms
_FED_AT_ONCE = 64  # spaces of which one task of the writer reads rows: 0.5 ms of the loop
_ROWS_AT_ONCE = 1024  # rows that one task of the writer reads
_DELETED_AT_ONCE = 512  # spaces without rows that one commit deletes


@dataclass(slots=True, eq=False)
class _Feed:
    """A space of which the rows are being read, up to a place."""

    space: DiskSpace
    runs: RowRuns
    place: RowPlace = FIRST


_Fed = tuple[list[RowRun], list[IndexRow], bool]  # runs, rows that belong to none, and whether there are no more


class SpaceBindings:
    """The current spaces of a disk tier: found and read when their models are bound, or made for a write.

    Args:
        spaces: of the tier.
        models_of: returns the models that compute the KV of a namespace now: the fingerprints of the base and of the
            adapter, and the label of the weights; None: none are bound.
        page_size: tokens of a page.
        files: of the tier.
        on_change: called when there is work for a slice.
        on_error: called with an error of a commit.
    """

    def __init__(
        self,
        spaces: DiskSpaces,
        models_of: Callable[[str | None], Models | None],
        page_size: int,
        files: DiskFiles,
        on_change: Callable[[], object],
        on_error: Callable[[Exception], object],
    ) -> None:
        self._spaces = spaces
        self._models_of = models_of
        self._page = page_size
        self._files = files
        self._on_change = on_change
        self._on_error = on_error
        self._last_number = 0  # of a space
        self._to_look: deque[DiskSpace] = deque()  # dormant spaces of which the models may be bound
        self._to_feed: deque[DiskSpace] = deque()
        self._is_feeding = False
        self._new: list[DiskSpace] = []  # spaces that the index has to get before the next write
        self._built: asyncio.Future[None] | None = None

    # ---------------------------------------------------------------- models

    def has_models(self, namespace: str | None) -> bool:
        """Return whether KV of a namespace is kept: its models are bound."""
        return self._models_of(namespace) is not None

    def bind(self, lora_id: str | None = None) -> None:
        """Look for the spaces of models that have been bound: of the base and of all adapters, or of one `lora_id`."""
        bound = self._models_of(None if lora_id is None else frame_namespace(None, lora_id, None))
        if bound is None:
            return
        found = [bound]
        if lora_id is None:
            base, _, label = bound
            found = [models for models in self._spaces.dormant_models if (models[0], models[2]) == (base, label)]
            self._to_look.clear()
        for models in found:
            self._to_look.extend(self._spaces.dormant(models))
        self._on_change()

    async def read(self) -> None:
        """Read the spaces of the index.

        Raises:
            IndexDamaged: it is damaged.
        """
        await self._files.do_surely(_drop_bad)
        after: int | None = 0
        while after is not None:
            found: list[Space] = await self._files.do_surely(partial(_read_spaces, after=after))
            for space in found:
                models = space.base, space.adapter, space.label
                self._spaces.add(space.number, space.namespace, models, space.arity)
            after = found[-1].number if found else None
        self._last_number = max(self._last_number, await self._files.do_surely(lambda store: store.index.last_space))

    def built(self) -> asyncio.Future[None] | None:
        """Return the future that ends when all pages of the models that are bound can be found.

        None: they can, or there is no disk to read. It is shared: shield it.
        """
        if not self.may_find_more:
            return None
        if self._built is None:
            self._built = asyncio.get_running_loop().create_future()
        return self._built

    def settle(self) -> None:
        """End the future of `built` if it is to end. Of a loop that was closed nothing waits for it."""
        if self._built is not None and not self.may_find_more:
            future, self._built = self._built, None
            if not (future.done() or future.get_loop().is_closed()):
                future.set_result(None)

    @property
    def may_find_more(self) -> bool:
        """Whether pages of the models that are bound may be found later."""
        state = self._files.state
        return state in ("opening", "reading") or (
            state == "ready" and (bool(self._to_look) or self._spaces.is_building)
        )

    # ---------------------------------------------------------------- slices

    def build(self) -> tuple[list[DiskSpace], bool]:
        """Bind some spaces, and put some of their pages into the tree: a slice of the loop.

        Returns:
            The spaces of which all pages are there now, and whether there is more to do.
        """
        for _ in range(min(_LOOKED_AT_ONCE, len(self._to_look))):
            space = self._to_look.popleft()
            if self._spaces.current(space.namespace) is None and self._has_models(space):
                self._begin(space.namespace, space.models)
        built = self._spaces.build(_BUILT_AT_ONCE)
        self.settle()
        return built, bool(self._to_look) or self._spaces.may_build

    def _has_models(self, space: DiskSpace) -> bool:
        """Return whether the models of a space are bound. The index may be damaged: its namespace may be none."""
        try:
            return self._models_of(space.namespace) == space.models
        except ValueError:
            return False

    def _begin(self, namespace: str | None, models: Models) -> bool:
        """Begin to build the dormant space of a namespace; return whether there is one."""
        space = self._spaces.bind(namespace, models)
        if space is None:
            return False
        self._to_feed.append(space)
        if not self._is_feeding:
            self._is_feeding = True
            self._files.run(self._feed())
        return True

    async def _feed(self) -> None:
        """Read the rows of spaces, some spaces at a time, and have their trees built."""
        feeds = deque[_Feed]()
        try:
            while True:
                while self._to_feed and len(feeds) < _FED_AT_ONCE:
                    space = self._to_feed.popleft()
                    feeds.append(_Feed(space, RowRuns(self._page, space.namespace, space.arity)))
                feeds = deque(feed for feed in feeds if feed.space.builder is not None)  # others were retired
                if not feeds:
                    return
                try:
                    found: list[_Fed] = await self._files.do_surely(partial(_read_runs, feeds=feeds))
                except IndexDamaged:  # It is replaced.
                    found = [([], [], True) for _ in feeds]
                for runs, left_out, is_last in found:
                    self._spaces.give(feeds[0].space, runs, left_out, is_last=is_last)
                    if is_last:
                        feeds.popleft()
                self._on_change()
        finally:
            self._is_feeding = False

    # ---------------------------------------------------------------- writes

    def is_ready(self, namespace: str | None) -> bool:
        """Return whether pages of a namespace may be written now: its space is built, or is to be made."""
        space = self._spaces.current(namespace)
        if space is not None:
            return space.builder is None
        models = self._models_of(namespace)
        return models is not None and not self._begin(namespace, models)

    def number_for(self, key: RadixKey) -> int:
        """Return the number of the space to which a key's pages are written, which is made if there is none.

        Call `commit_new` before the writer gets rows that name it.
        """
        namespace = key.extra_key
        space = self._spaces.current(namespace)
        if space is None:
            models = self._models_of(namespace)
            assert models is not None, f"a page of {namespace!r} is written, of which no models are bound"
            self._last_number += 1
            space = self._spaces.add(self._last_number, namespace, models, key.arity)
            self._spaces.begin(space)
            self._new.append(space)
        return space.number

    def commit_new(self, writer: DiskWriter) -> None:
        """Commit new spaces to the index, in one commit before all later ones."""
        if self._new:
            new, self._new = self._new, []
            rows = [_row(space) for space in new]
            writer.submit(lambda store: store.index.add_spaces(rows), partial(self._end_adding, new))

    def _end_adding(self, spaces: Sequence[DiskSpace], done: Ended) -> None:
        if done.error is not None:  # The index refuses all rows of these spaces. The next write makes others.
            self._spaces.end(spaces)
            self._on_error(done.error)

    def delete_emptied(self, writer: DiskWriter) -> bool:
        """Delete spaces that have lost their last row; return whether there may be more."""
        numbers = self._spaces.end_emptied(_DELETED_AT_ONCE)
        if numbers:
            writer.submit(lambda store: store.index.delete_empty(numbers), self._end_deleting)
        return len(numbers) == _DELETED_AT_ONCE

    def _end_deleting(self, done: Ended) -> None:
        if done.error is not None:  # The next start deletes them.
            self._on_error(done.error)

    # ---------------------------------------------------------------- checks

    def check_invariants(self) -> None:
        """Raise AssertionError if a current space is of other models than are bound. O(spaces)."""
        for space in self._spaces.all_current:
            assert space.models == self._models_of(space.namespace), f"{space} is of other models"


def _row(space: DiskSpace) -> Space:
    """Return a new space as the index has it."""
    base, adapter, label = space.models
    return Space(space.number, space.namespace, base or "", adapter, label or "", space.arity, time())


# ---------------------------------------------------------------- tasks of the writer's thread


def _drop_bad(store: DiskStore) -> None:
    """Drop damaged spaces and rows: they would be met again at each start."""
    with index_values("reading the index"):
        store.index.spaces()
        while store.index.drop_bad():
            pass


def _read_spaces(store: DiskStore, *, after: int) -> list[Space]:
    return store.index.spaces(after, _DELETED_AT_ONCE)


def _read_runs(store: DiskStore, *, feeds: Sequence[_Feed]) -> list[_Fed]:
    """Read rows of some spaces in turn, and note their sums; of the last one perhaps not all."""
    found, left = list[_Fed](), _ROWS_AT_ONCE
    for feed in feeds:
        try:
            rows, place = store.index.rows(feed.space.number, feed.place, left)
        except DiskError:
            if found:  # The error is met again.
                break
            raise
        with index_values("reading the index"):
            rows = [row for row in rows if store.holds(row)]
            store.note(rows)
            runs = feed.runs.add(rows)
            if place is None:
                runs += feed.runs.end()
        if place is not None:
            feed.place = place
        left_out, feed.runs.left_out = feed.runs.left_out, []
        found.append((runs, left_out, place is None))
        left -= max(1, len(rows))
        if place is not None or left <= 0:
            break
    return found
