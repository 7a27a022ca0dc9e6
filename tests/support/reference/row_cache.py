"""`ReferenceRowCache`: the reference for a cache of rows, with plain lists that are searched from end to end."""

from __future__ import annotations

from dataclasses import dataclass, field

Tokens = tuple[int, ...]
Record = tuple[str | None, Tokens]  # namespace and tokens


class NoRow(Exception):
    """Every row is leased."""


@dataclass
class ModelRow:
    """A row: its lease, its findable prefix, and the times of its record and last use."""

    lease_id: str | None = None
    record: Record = (None, ())
    recorded_at: int = 0
    used_at: int = 0


@dataclass
class ModelLease:
    """A client's view of its lease."""

    session: str
    namespace: str | None
    tokens: Tokens  # those that the cache knows
    row: int
    prefix_len: int
    covered: int
    published: int
    retired: bool = False


@dataclass
class ReferenceRowCache:
    """The rules of `RowCache`, without an index."""

    num_rows: int
    row_len: int
    page_size: int
    rows: list[ModelRow] = field(init=False)
    leases: dict[str, ModelLease] = field(default_factory=dict)
    withheld: dict[str, ModelLease] = field(default_factory=dict)  # leases of vanished sessions; their rows stay leased
    clock: int = 0

    def __post_init__(self) -> None:
        self.rows = [ModelRow() for _ in range(self.num_rows)]

    def prefix_len(self, namespace: str | None, tokens: Tokens) -> int:
        """The longest prefix that any row holds, in whole pages."""
        return max(self.shared(row, namespace, tokens) // self.page_size * self.page_size for row in self.rows)

    @staticmethod
    def shared(row: ModelRow, namespace: str | None, tokens: Tokens) -> int:
        ours, theirs = row.record
        if ours != namespace:
            return 0
        differs = [at for at, (a, b) in enumerate(zip(theirs, tokens, strict=False)) if a != b]
        return differs[0] if differs else min(len(theirs), len(tokens))

    def grant(self, lease_id: str, session: str, namespace: str | None, tokens: Tokens, limit: int | None) -> None:
        """A lease over the prefix alone; `acquire` then covers more."""
        prefix = tokens[: self.prefix_len(namespace, tokens[:limit])]
        holders = [row for row in self.rows if prefix and self.shared(row, namespace, prefix) == len(prefix)]
        released = [row for row in holders if row.lease_id is None]
        if released:
            row = min(released, key=lambda row: (len(row.record[1]), -row.recorded_at))
        else:
            row = self.empty_row()
            if holders:
                max(holders, key=lambda row: row.recorded_at).used_at = self.tick()
        row.record = (None, ())
        self.publish(row, (namespace, prefix))
        row.lease_id = lease_id
        number = next(number for number, each in enumerate(self.rows) if each is row)
        self.leases[lease_id] = ModelLease(session, namespace, tokens, number, len(prefix), len(prefix), len(prefix))

    def empty_row(self) -> ModelRow:
        free = [row for row in self.rows if row.lease_id is None]
        if not free:
            raise NoRow
        empty = [row for row in free if not row.record[1]]
        return empty[0] if empty else min(free, key=lambda row: row.used_at)

    def publish(self, row: ModelRow, record: Record) -> None:
        """Positions [0, n) hold these tokens; more of the same may be recorded already."""
        if record[1]:
            if len(record[1]) > len(row.record[1]):
                row.record = record
            row.recorded_at = row.used_at = self.tick()

    def insert(self, lease_id: str, tokens: Tokens) -> tuple[int, int]:
        """Publish the whole pages of these tokens; returns what could be found before, and how much is new."""
        lease = self.leases[lease_id]
        lease.tokens = max(lease.tokens, tokens, key=len)
        stop = len(tokens) // self.page_size * self.page_size
        if lease.retired or stop <= lease.published:
            return lease.published, 0
        found, before = self.prefix_len(lease.namespace, tokens[:stop]), lease.published
        self.publish(self.rows[lease.row], (lease.namespace, tokens[:stop]))
        lease.published = stop
        return found, stop - before

    def release(self, lease_id: str) -> None:
        self.rows[self.leases.pop(lease_id).row].lease_id = None

    def quarantine(self, session: str) -> int:
        mine = {lease_id: lease for lease_id, lease in self.leases.items() if lease.session == session}
        self.leases = {lease_id: lease for lease_id, lease in self.leases.items() if lease_id not in mine}
        self.withheld |= mine
        return len(mine)

    def free_withheld(self, session: str) -> int:
        mine = [lease_id for lease_id, lease in self.withheld.items() if lease.session == session]
        for lease_id in mine:
            self.rows[self.withheld.pop(lease_id).row].lease_id = None
        return len(mine) * self.row_len

    def evict(self, num_slots: int) -> int:
        evicted = 0
        while evicted < num_slots and (cached := self.cached()):
            min(cached, key=lambda row: row.used_at).record = (None, ())
            evicted += self.row_len
        return evicted

    def cached(self) -> list[ModelRow]:
        return [row for row in self.rows if row.lease_id is None and row.record[1]]

    def reset(self) -> None:
        for row in self.rows:
            row.record = (None, ())
        for lease in self.leases.values():
            lease.retired = True

    def retire(self, namespaces: tuple[str | None, ...]) -> int:
        meant = [row for row in self.rows if row.record[1] and row.record[0] in namespaces]
        num_namespaces = len({row.record[0] for row in meant})
        for row in meant:
            row.record = (None, ())
        for lease in self.leases.values():
            lease.retired |= lease.namespace in namespaces
        return num_namespaces

    def sizes(self) -> tuple[int, int, int, int]:
        """Free, private, cached and quarantined slots."""
        private, cached, withheld = len(self.leases), len(self.cached()), len(self.withheld)
        free = self.num_rows - private - cached - withheld
        return tuple(rows * self.row_len for rows in (free, private, cached, withheld))  # type: ignore[return-value]

    def tick(self) -> int:
        self.clock += 1
        return self.clock
