"""Random traffic on the tree of a disk tier, with a writer that commits late, fails, and loses what a crash loses.

Each record holds a stamp: its kind, and the place and the generation of its page. After each operation every committed
row of a live space must name the record with the stamp of its page, and so must the tree.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np
from support.traffic.radix import TrafficFailed

from raydix.cache_core import (
    KVCache,
    MambaPool,
    MambaRadixCache,
    OutOfSlotsError,
    RadixCache,
    RadixKey,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from raydix.cache_core.leases.lease_table import TIERS, LeaseRecord
from raydix.cache_core.tiers.disk_spaces import DiskSpace, DiskSpaces, Models
from raydix.cache_core.tiers.index_row import IndexRow
from raydix.cache_core.tiers.page_records import Kind
from raydix.cache_core.tiers.record_keeper import RecordKeeper
from raydix.cache_core.tiers.row_runs import RowRuns
from raydix.cache_core.tree.hashing import hash_page, namespace_seed
from raydix.cache_core.tree.tree_node import nodes_to

Tokens = tuple[int, ...]
Place = tuple[str | None, Tokens]  # namespace, and all tokens up to the end of a page
Stamp = tuple[Kind, Place, int]  # with the number of the space

NAMESPACES = (None, "a")


@dataclass(frozen=True)
class DiskShape:
    """The size and kind of a disk tier."""

    page_size: int = 2
    num_pages: int = 40
    window: int | None = None
    num_states: int = 0


@dataclass
class Commit:
    """What the writer does to the index in one transaction."""

    added: list[IndexRow] = field(default_factory=list)
    removed: list[tuple[Kind, int]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)  # spaces that are deleted
    write: Write | None = None  # the write whose rows are added


@dataclass
class Write:
    """A write in flight: its lease, and the page from which on window KV goes with it."""

    lease: LeaseRecord
    live_from: int


class DiskTraffic:
    """Random operations on the cache of a disk tier, its index, and its records.

    Attributes:
        index: what is on the disk: rows by kind and record.
        live: spaces on the disk: their namespaces and models.
        stamps: what the records hold.
        queue: commits that the writer has not done.
    """

    def __init__(self, seed: int, shape: DiskShape) -> None:
        self.rng, self.shape, self.page = Random(seed), shape, shape.page_size
        self.index: dict[tuple[Kind, int], IndexRow] = {}
        self.live: dict[int, tuple[str | None, Models]] = {}
        self.stamps: dict[tuple[Kind, int], Stamp] = {}
        self.queue: deque[Commit] = deque()
        self.done = Counter[str]()
        self.num_spaces = 0
        self.feeds: dict[DiskSpace, tuple[RowRuns, list[IndexRow]]] = {}  # rows that are not read yet
        self.start()

    # ---------------------------------------------------------------- start, crash

    def start(self) -> None:
        """Make an empty cache, and read the index."""
        shape, page = self.shape, self.page
        slots = shape.num_pages * page
        if shape.window is None:
            self.allocator: TokenToKVPoolAllocator = TokenToKVPoolAllocator(slots, page)
        else:
            self.allocator = SWATokenToKVPoolAllocator(slots, slots // 2 // page * page, page)
        self.keepers: dict[Kind, RecordKeeper] = {"full": RecordKeeper.of_pages(self.allocator)}
        if self.allocator.swa is not None:
            self.keepers["swa"] = RecordKeeper.of_pages(self.allocator.swa)
        states: MambaPool | None = None
        if shape.num_states:
            states = MambaPool(shape.num_states)
            self.keepers["state"] = RecordKeeper.of_states(states)
            tree = MambaRadixCache(page, self.allocator, states, sliding_window_size=shape.window)
        else:
            tree = RadixCache(page, shape.window, self.allocator)  # type: ignore[assignment]
        self.cache = KVCache(tree, self.allocator, states=states)
        self.queue.clear()
        self.feeds.clear()
        self.models: Models = self.rng.choice((("A", None), ("A", None), ("B", None)))
        self.spaces = DiskSpaces(self.cache, self.keepers)
        self.read()

    def read(self) -> None:
        """Note the records of all live spaces."""
        for number, (namespace, models) in sorted(self.live.items()):
            self.spaces.add(number, namespace, models)
        places = sorted(row.place for row in self.index.values())
        for start in range(0, len(places), 5):
            assert not self.cache.free_slots, "no slot is handed out before all rows are read"
            spaces, _, kinds, records = np.array(places[start : start + 5]).T
            assert self.spaces.read(spaces, kinds, records) == []
        self.spaces.end_reading()

    def rows_of(self, number: int) -> list[IndexRow]:
        """The rows of a space by depth, as the index has them."""
        return sorted((row for row in self.index.values() if row.space == number), key=lambda row: row.place)

    def bind(self, namespace: str | None) -> DiskSpace:
        """Bind the models of this life to a namespace. A new space is on the disk before it has rows."""
        space = self.spaces.bind(namespace, self.models)
        if space is None:
            self.num_spaces += 1
            self.live[self.num_spaces] = namespace, self.models
            space = self.spaces.add(self.num_spaces, namespace, self.models)
            self.spaces.begin(space)
            return space
        assert space.number == max(number for number, made in self.live.items() if made == (namespace, self.models))
        self.feeds[space] = RowRuns(self.page, namespace), self.rows_of(space.number)
        self.done["bound again"] += 1
        return space

    def crash(self) -> None:
        """Lose the memory, and the commits that were not done."""
        self.done["crash"] += 1
        rows = [row for row in self.index.values() if row.tokens is not None]
        if rows and self.rng.random() < 0.3:  # SQLite keeps no sums of its own
            row = self.rng.choice(rows)
            tokens = bytes([self.rng.choice((2, 3)), *row.tokens[1:]])
            self.index[row.kind, row.record] = row._replace(tokens=tokens)
            self.done["damaged row"] += tokens != row.tokens
        self.start()

    def build(self) -> None:
        """Bind a namespace, read some rows of its space, and build a slice of its tree."""
        namespace = self.rng.choice(NAMESPACES)
        space = self.spaces.current(namespace) or self.bind(namespace)
        if (feed := self.feeds.get(space)) is not None:
            runs, rows = feed
            number = self.rng.choice((1, 3, 10))
            done, is_last = runs.add(rows[:number]), len(rows) <= number
            del rows[:number]
            if is_last:
                done += runs.end()
                del self.feeds[space]
            self.spaces.give(space, done, runs.left_out, is_last=is_last)
            runs.left_out = []
        builder, before = space.builder, 0 if space.builder is None else space.builder.num_built
        self.spaces.build(self.rng.choice((1, 4, 1000)))
        self.done["built"] += 0 if builder is None else builder.num_built - before

    # ---------------------------------------------------------------- writes

    def space_of(self, namespace: str | None) -> int:
        """The space of a namespace's pages."""
        return (self.spaces.current(namespace) or self.bind(namespace)).number

    def prompt(self) -> Place:
        rng, tokens = self.rng, list[int]()
        for _ in range(rng.randint(1, 5)):
            tokens += [rng.choice((1, 1, 2, 3))] * self.page
        return rng.choice(NAMESPACES), tuple(tokens)

    def write(self) -> None:
        """Copy the pages of a prompt to new records, and let the writer commit their rows."""
        namespace, tokens = self.prompt()
        key, page = RadixKey(list(tokens), namespace), self.page
        usable, full = self.cache.radix.cached_lens(key)
        live_from = len(tokens)
        if self.shape.window is not None:
            live_from = max(0, (len(tokens) - self.shape.window - page) // page * page)
        with_state, pages = self.shape.num_states > 0, self.tree_pages().keys()
        if usable >= len(tokens):
            return
        try:
            lease = self.cache.open_target(key, min(full, live_from), with_state)
        except OutOfSlotsError:
            self.done["no room"] += 1
            assert self.tree_pages().keys() == pages, "a write that finds no room evicts nothing"
            return
        space, first = self.space_of(namespace), lease.num_published_pages
        rows: list[IndexRow] = []
        halves = self.allocator.swa_starts(lease.starts) // page
        chain = self.chain(namespace, tokens)
        for place in range(first, len(tokens) // page):
            rows.append(self.row("full", int(lease.starts[place]) // page, space, namespace, tokens, place, chain))
            if self.shape.window is not None and (place + 1) * page > live_from:
                rows.append(self.row("swa", int(halves[place]), space, namespace, tokens, place, chain))
        if lease.state_slot is not None:
            place = len(tokens) // page - 1
            rows.append(self.row("state", lease.state_slot, space, namespace, tokens, place, chain))
        for row in rows:
            self.stamps[row.kind, row.record] = self.stamp_of(row, tokens)
        for kind, keeper in self.keepers.items():
            keeper.add_rows(np.array([row.record for row in rows if row.kind == kind], np.int64), space)
        self.queue.append(Commit(added=rows, write=Write(lease, live_from)))

    def chain(self, namespace: str | None, tokens: Tokens) -> list[bytes]:
        chain, prior = [], namespace_seed(namespace)
        for at in range(0, len(tokens), self.page):
            prior = hash_page(RadixKey(list(tokens[at : at + self.page])).data, 4, 0, prior)
            chain.append(prior)
        return chain

    def row(
        self,
        kind: Kind,
        record: int,
        space: int,
        namespace: str | None,
        tokens: Tokens,
        place: int,
        chain: list[bytes],
    ) -> IndexRow:
        row = IndexRow(kind, record, space, place + 1, chain[place], bytes(16))
        if kind != "full":
            return row
        ids = RadixKey(list(tokens[place * self.page : (place + 1) * self.page])).data
        return row._replace(parent=chain[place - 1] if place else None, tokens=ids)

    def stamp_of(self, row: IndexRow, tokens: Tokens) -> Stamp:
        namespace, _ = self.live[row.space]
        return row.kind, (namespace, tokens[: row.depth * self.page]), row.space

    # ---------------------------------------------------------------- the writer

    def delete(self) -> None:
        """Let the writer delete the rows of records that the cache has freed."""
        removed = [(kind, number) for kind, keeper in self.keepers.items() for number in keeper.take_leaving().tolist()]
        if removed:
            self.queue.append(Commit(removed=removed))

    def commit(self) -> None:
        """The writer does the oldest commit, or fails."""
        if not self.queue:
            return
        commit = self.queue.popleft()
        if self.rng.random() < 0.15:
            self.fail(commit)
            return
        for number in commit.ended:
            del self.live[number]
        self.spaces.deleted(commit.ended)
        for key in commit.removed:
            self.index.pop(key, None)
        rows = [row for row in commit.added if row.space in self.live]
        for row in rows:
            there = self.index.get((row.kind, row.record))
            assert there is None or there.space not in self.live, f"{there} names a record that is used again: {row}"
            self.index[row.kind, row.record] = row
        for kind, numbers in self.by_kind(commit.removed):
            self.keepers[kind].rows_deleted(numbers)
        self.end_write(commit, is_done=len(rows) == len(commit.added))

    def fail(self, commit: Commit) -> None:
        self.done["failed commit"] += 1
        if commit.ended:  # it is tried again, before anything else
            self.queue.appendleft(commit)
            return
        for kind, numbers in self.by_kind(commit.removed):
            self.keepers[kind].rows_not_deleted(numbers)
        self.end_write(commit, is_done=False)

    def end_write(self, commit: Commit, is_done: bool) -> None:
        if commit.write is None:
            return
        lease, live_from = commit.write.lease, commit.write.live_from
        is_done = is_done and not lease.retired
        self.done["written" if is_done else "not written"] += 1
        if not is_done:
            in_index = [row for row in commit.added if self.index.get((row.kind, row.record)) is row]
            assert len(in_index) in (0, len(commit.added))
            if not in_index:
                for kind, numbers in self.by_kind([(row.kind, row.record) for row in commit.added]):
                    self.keepers[kind].rows_refused(numbers)
        else:
            self.cache.publish_copy(lease, lease.key, live_from, lease.state_slot)
            lease.state_slot = None
        self.cache.end_quietly(lease, is_use=is_done)

    def by_kind(self, records: list[tuple[Kind, int]]) -> list[tuple[Kind, np.ndarray]]:
        return [
            (kind, np.array([number for found, number in records if found == kind], np.int64)) for kind in self.keepers
        ]

    # ---------------------------------------------------------------- other operations

    def look_up(self) -> None:
        """A load reads a prefix: the tree may split a node for it."""
        namespace, tokens = self.prompt()
        lease = self.cache.find_source(RadixKey(list(tokens), namespace), len(tokens))
        for place in range(lease.prefix_len // self.page):
            record = int(lease.starts[place]) // self.page
            stamp = ("full", (namespace, tokens[: (place + 1) * self.page]), self.space_of(namespace))
            assert self.stamps["full", record] == stamp, f"a load would read {self.stamps['full', record]}, not {stamp}"
            self.done["hit"] += 1
        self.cache.end_quietly(lease, is_use=True)

    def evict(self) -> None:
        self.cache.evict(self.rng.randint(1, 6 * self.page))

    def evict_parts(self) -> None:
        """Evict window halves and states alone."""
        if self.shape.window is not None:
            self.cache.evict_window(self.rng.randint(1, 3 * self.page))
        if self.shape.num_states:
            self.cache.evict_states(1)

    def drop_dormant(self) -> None:
        """Let some records of dormant spaces leave."""
        before = self.keepers["full"].num_dormant
        wanted = self.rng.randint(1, 4)
        dropped = self.spaces.drop_dormant(wanted)
        assert dropped <= wanted and before - self.keepers["full"].num_dormant == dropped
        self.done["dropped dormant"] += dropped

    def retire(self) -> None:
        """Retire a namespace, in the tree now, and on the disk when the writer comes to it."""
        namespace = self.rng.choice(NAMESPACES)
        is_meant: Callable[[str | None], bool] = lambda name: name == namespace  # noqa: E731
        self.done["retirement"] += 1
        space = self.spaces.current(namespace)
        self.done["retired while it was built"] += space is not None and space.builder is not None
        if space is not None:
            self.feeds.pop(space, None)
        ended = self.spaces.retire(is_meant)
        self.cache.retire(is_meant)
        if ended:
            self.queue.append(Commit(ended=ended))

    # ---------------------------------------------------------------- checks

    def tree_pages(self) -> dict[Place, dict[Kind, int]]:
        """The records of each page that can be matched."""
        found: dict[Place, dict[Kind, int]] = {}
        page, cache = self.page, self.cache
        for node in cache.radix.parts.tree.nodes():
            tokens: Tokens = sum((tuple(above.key.token_ids) for above in nodes_to(node)), ())  # type: ignore[misc, union-attr]
            namespace, begin = node.namespace.extra_key, node.end - len(node)
            assert node.value is not None
            starts = node.value.numpy()[::page]
            halves = self.allocator.swa_starts(starts) // page
            for place, start in enumerate(starts):
                records: dict[Kind, int] = {"full": int(start) // page}
                if self.shape.window is not None and not node.swa_tombstone:
                    records["swa"] = int(halves[place])
                found[namespace, tokens[: begin + (place + 1) * page]] = records
            if self.shape.num_states and (slot := cache.tree.state_at(node)) is not None:
                found[namespace, tokens]["state"] = slot
            if node.hash_values is not None:
                assert [bytes.fromhex(name) for name in node.hash_values] == self.chain(namespace, tokens)[
                    begin // page :
                ]
        return found

    def check(self) -> None:
        self.cache.check_invariants()
        for kind, keeper in self.keepers.items():
            keeper.check_invariants()
            num_rows = sum(found == kind and row.space in self.live for (found, _), row in self.index.items())
            assert keeper.num_dormant <= num_rows, f"{keeper.num_dormant} records of kind {kind} wait for nothing"
        for (kind, record), row in self.index.items():
            if row.space in self.live:
                stamp = self.stamps[kind, record]
                chain = self.chain(*stamp[1])
                assert (stamp[0], stamp[2]) == (kind, row.space) and chain[-1] == row.digest, f"{row} names {stamp}"
        for (namespace, tokens), records in self.tree_pages().items():
            for kind, record in records.items():
                space = self.space_of(namespace)
                stamp = kind, (namespace, tokens), space
                assert self.stamps[kind, record] == stamp, f"{stamp} is {self.stamps[kind, record]}"
                row = self.index.get((kind, record))
                assert row is not None and row.space == space, f"{stamp} has no row"

    def check_rebuilt(self) -> None:
        """Build all trees, and check that they have the pages that the index has with all pages above."""
        rows = {(row.space, row.kind, row.digest) for row in self.index.values() if self.is_whole(row)}
        while self.feeds or len(self.bound()) < len(NAMESPACES) or any(space.builder for space in self.bound()):
            self.build()
        self.check()
        expected: dict[Place, set[Kind]] = {}
        for (kind, record), row in self.index.items():
            _, place, space = self.stamps[kind, record]
            if self.space_of(place[0]) == space == row.space:
                chain = self.chain(*place)
                if all((space, "full", digest) in rows for digest in chain):
                    expected.setdefault(place, set()).add(kind)
        found = {place: set(records) for place, records in self.tree_pages().items()}
        for keeper in self.keepers.values():
            assert not keeper.num_unread
        assert found == expected

    def bound(self) -> list[DiskSpace]:
        """The current spaces."""
        return [space for name in NAMESPACES if (space := self.spaces.current(name)) is not None]

    def is_whole(self, row: IndexRow) -> bool:
        """Whether a row has the tokens of its page."""
        _, (_, tokens), _ = self.stamps[row.kind, row.record]
        return row.tokens in (None, RadixKey(list(tokens[-self.page :])).data)

    def run(self, num_operations: int) -> Counter[str]:
        """Do so many operations; return how often the rarer things happened.

        Raises:
            TrafficFailed: a check failed.
        """
        operations: dict[Callable[[], None], int] = {
            self.write: 30,
            self.commit: 40,
            self.delete: 12,
            self.look_up: 12,
            self.evict: 8,
            self.evict_parts: 4,
            self.drop_dormant: 3,
            self.build: 24,
            self.retire: 2,
            self.crash: 2,
        }
        choices = self.rng.choices(list(operations), list(operations.values()), k=num_operations)
        for number, operation in enumerate(choices):
            try:
                operation()
                self.check()
                if operation == self.crash and self.rng.random() < 0.5:
                    self.check_rebuilt()
                    self.done["rebuilt"] += 1
            except Exception as error:
                raise TrafficFailed(f"operation {number}, {operation.__name__}: {error}") from error
        while self.queue or any(keeper.num_leaving for keeper in self.keepers.values()):
            self.delete()
            assert self.queue, "a record leaves for ever"
            self.commit()
        self.check()
        assert not self.cache.leases.of_session(TIERS), "a lease of a write is left"
        return self.done
