"""`CheckedRowCache`: a cache of rows with its model, and real tensors for the writes of leases and `copy_kv`.

Each position of a row holds a stamp of the namespace and of all tokens up to it, as KV depends on them all; a lease
scribbles over all that it may write before it writes what it computes. So whatever can be found must show the stamps
of the tokens asked for, in every layer of K and V.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.reference.row_cache import ModelLease, NoRow, Record, ReferenceRowCache, Tokens

from raydix.cache_core import LeaseRangeError, OutOfSlotsError, RadixKey, RowCache, UnknownLeaseError

NUM_ROWS, PAGES_PER_ROW, NUM_LAYERS = 4, 5, 2
STRANGER = "stranger"


class CheckedRowCache:
    """Does each operation on both, and compares all there is to compare after it."""

    def __init__(self, page_size: int) -> None:
        self.row_len = PAGES_PER_ROW * page_size
        shape = (NUM_ROWS, self.row_len, NUM_LAYERS)
        self.kv = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        self.num_pressure_calls = 0
        self.cache = RowCache(
            NUM_ROWS * self.row_len, self.row_len, page_size, self.kv, self.row_len + 1, self._on_pressure
        )
        self.model = ReferenceRowCache(NUM_ROWS, self.row_len, page_size)
        self.stamps: dict[Record, int] = {}
        self.refused = self.in_place = self.copied = 0
        self._number = 0

    def _on_pressure(self) -> None:
        self.num_pressure_calls += 1

    # ------------------------------------------------------------ verbs

    def acquire(
        self, session: str, namespace: str | None, tokens: Tokens, new_tokens: int = 0, limit: int | None = None
    ) -> None:
        lease_id = self._new_id()
        covered = len(tokens) + new_tokens
        if covered > self.row_len:
            with pytest.raises(LeaseRangeError):
                self.cache.acquire(lease_id, session, RadixKey(tokens, namespace), new_tokens, limit)
            return self.check()
        expected = self._granted_by_model(lease_id, session, namespace, tokens, limit)
        if expected is None:
            with pytest.raises(OutOfSlotsError) as caught:
                self.cache.acquire(lease_id, session, RadixKey(tokens, namespace), new_tokens, limit)
            assert caught.value.args == (self.row_len, 0, 0, self.cache.num_slots, "slots", None)
            return self.check()
        self.cache.acquire(lease_id, session, RadixKey(tokens, namespace), new_tokens, limit)
        expected.covered = covered
        self._scribble_and_write(lease_id)
        return self.check()

    def lock(self, session: str, namespace: str | None, tokens: Tokens) -> None:
        lease_id = self._new_id()
        if self._granted_by_model(lease_id, session, namespace, tokens, None) is None:
            with pytest.raises(OutOfSlotsError):
                self.cache.lock(lease_id, session, RadixKey(tokens, namespace))
        else:
            self.cache.lock(lease_id, session, RadixKey(tokens, namespace))
        self.check()

    def insert(self, lease_id: str, more: Tokens, num_tokens: int, resend: bool = False) -> None:
        """Publish `num_tokens` of the lease's tokens, `more` behind those it knows; as many as it covers."""
        lease = self.model.leases[lease_id]
        known = len(lease.tokens)
        tokens = (lease.tokens + more)[: min(num_tokens, lease.covered)]
        if len(tokens) > known:
            self._write(lease, tokens)
        suffix = RadixKey(tokens if resend else tokens[min(known, len(tokens)) :], lease.namespace)
        done = self.cache.insert(lease_id, lease.session, len(tokens), suffix)
        found, num_new = self.model.insert(lease_id, tokens)
        assert (done.prefix_len, done.num_inserted, done.num_duplicates) == (found, num_new, 0)
        assert (done.retired, len(done.repointed)) == (lease.retired, 0)
        self.check()

    def extend(self, lease_id: str, num_tokens: int) -> None:
        lease = self.model.leases[lease_id]
        if lease.covered + num_tokens > self.row_len:
            with pytest.raises(LeaseRangeError):
                self.cache.extend(lease_id, lease.session, num_tokens)
        else:
            assert len(self.cache.extend(lease_id, lease.session, num_tokens)) == 0
            lease.covered += num_tokens
            self._scribble_and_write(lease_id)
        self.check()

    def release(self, lease_id: str) -> None:
        session = self.model.leases[lease_id].session
        self.model.release(lease_id)
        assert self.cache.release(lease_id, session)
        assert not self.cache.release(lease_id, session)
        self.check()

    def end_session(self, session: str) -> None:
        mine = [lease_id for lease_id, lease in self.model.leases.items() if lease.session == session]
        for lease_id in mine:
            self.model.release(lease_id)
        assert self.cache.end_session(session) == len(mine)
        self.check()

    def quarantine(self, session: str) -> None:
        """Expire a lease after its process vanished: its row is quarantined, because the process may still write."""
        assert self.cache.quarantine_session(session) == self.model.quarantine(session)
        self.check()

    def free_withheld(self, session: str) -> None:
        assert self.cache.free_withheld(session) == self.model.free_withheld(session)
        self.check()

    def match(self, namespace: str | None, tokens: Tokens) -> None:
        found = self.cache.match(RadixKey(tokens, namespace))
        assert found.prefix_len == found.full_prefix_len == self.model.prefix_len(namespace, tokens)
        self._check_stamps(namespace, tokens, found.indices.tolist())
        self.check()

    def evict(self, num_slots: int) -> None:
        assert self.cache.evict(num_slots) == self.model.evict(num_slots)
        self.check()

    def reset(self) -> None:
        self.cache.reset()
        self.model.reset()
        self.check()

    def retire(self, namespaces: tuple[str | None, ...]) -> None:
        assert self.cache.retire(lambda namespace: namespace in namespaces) == self.model.retire(namespaces)
        self.check()

    def repeat(self, lease_id: str) -> None:
        """A retried acquire or lock changes nothing."""
        session, record = self.model.leases[lease_id].session, self.cache.leases.get
        open_lease = record(lease_id, session)
        assert self.cache.acquire(lease_id, session, RadixKey([1, 2, 3])) is open_lease
        assert self.cache.lock(lease_id, session, RadixKey([1, 2, 3])) is open_lease
        self.check()

    def misuse(self, lease_id: str) -> None:
        """Mistakes of a caller raise and change nothing."""
        lease = self.model.leases[lease_id]
        wrong = RadixKey([9] * max(1, len(lease.tokens)), lease.namespace)
        for num_tokens, suffix in (
            (lease.covered + 1, wrong),
            (len(wrong), wrong),
            (len(lease.tokens) + 2, RadixKey([1], lease.namespace)),
        ):
            with pytest.raises(LeaseRangeError):
                self.cache.insert(lease_id, lease.session, num_tokens, suffix)
        for verb in (self.cache.acquire, self.cache.lock, self.cache.release):
            with pytest.raises(UnknownLeaseError):
                verb(lease_id, STRANGER, *([wrong] if verb != self.cache.release else []))
        with pytest.raises(UnknownLeaseError):
            self.cache.extend("never", lease.session, 1)
        for negative in (lambda: self.cache.extend(lease_id, lease.session, -1),
                         lambda: self.cache.acquire("new", lease.session, wrong, -1)):  # fmt: skip
            with pytest.raises(LeaseRangeError):
                negative()
        self.check()

    # ------------------------------------------------------------ parts

    def _new_id(self) -> str:
        self._number += 1
        return f"l{self._number}"

    def _granted_by_model(
        self, lease_id: str, session: str, namespace: str | None, tokens: Tokens, limit: int | None
    ) -> ModelLease | None:
        occupied = [row.lease_id is None and bool(row.record[1]) for row in self.model.rows]
        prefix = tokens[: self.model.prefix_len(namespace, tokens[:limit])]
        holds = [self.model.shared(row, namespace, prefix) == len(prefix) > 0 for row in self.model.rows]
        try:
            self.model.grant(lease_id, session, namespace, tokens, limit)
        except NoRow:
            self.refused += 1
            return None
        lease = self.model.leases[lease_id]
        in_place = lease.prefix_len > 0 and occupied[lease.row] and holds[lease.row]
        self.in_place += in_place
        self.copied += lease.prefix_len > 0 and not in_place
        return lease

    def _slots(self, lease: ModelLease, first: int, stop: int) -> np.ndarray:
        return np.arange(first, stop) + lease.row * self.row_len

    def _scribble_and_write(self, lease_id: str) -> None:
        lease = self.model.leases[lease_id]
        for cache in self.kv:
            cache[lease.row, lease.published : lease.covered] = -1
        self._write(lease, lease.tokens)

    def _write(self, lease: ModelLease, tokens: Tokens) -> None:
        for at in range(lease.published, min(len(tokens), lease.covered)):
            stamp = self._stamp(lease.namespace, tokens[: at + 1])
            for sign, cache in zip((1, -1), self.kv, strict=True):
                cache[lease.row, at] = sign * (stamp * NUM_LAYERS + torch.arange(NUM_LAYERS))

    def _stamp(self, namespace: str | None, tokens: Tokens) -> int:
        return self.stamps.setdefault((namespace, tokens), len(self.stamps) + 1)

    # ------------------------------------------------------------ checks

    def check(self) -> None:
        cache, model = self.cache, self.model
        cache.check_invariants()
        counts = cache.free_slots, cache.private_slots, cache.total_size(), cache.quarantined_slots
        assert counts == model.sizes()
        assert cache.protected_size() == 0
        assert sum(model.sizes()) == cache.num_slots
        assert {lease.lease_id for lease in cache.leases} == set(model.leases)
        for number, row in enumerate(model.rows):
            known = cache._records.recorded_key(number)
            record = (None, ()) if known is None else (known.extra_key, tuple(known.token_ids))
            assert record == row.record, f"row {number} holds {record}, not {row.record}"
            namespace, tokens = record
            self._check_stamps(namespace, tokens, [number * self.row_len + at for at in range(len(tokens))])
        for lease_id, lease in model.leases.items():
            self._check_lease(lease_id, lease)

    def _check_lease(self, lease_id: str, lease: ModelLease) -> None:
        record = self.cache.leases.get(lease_id, lease.session)
        assert record.starts.tolist() == [lease.row * self.row_len], f"{lease_id} holds another row"
        assert (record.prefix_len, record.num_slots) == (lease.prefix_len, lease.covered), f"at {lease_id}"
        assert tuple(record.key.token_ids) == lease.tokens, f"at {lease_id}"
        whole, private = self._slots(lease, 0, lease.covered), self._slots(lease, lease.published, lease.covered)
        assert self.cache.covers(record, whole)
        assert self.cache.holds_privately(record, private)
        beyond = np.array([whole[0] - 1, whole[-1] + 1]) if lease.covered else self._slots(lease, 0, 1)
        assert not any(self.cache.covers(record, beyond[at : at + 1]) for at in range(len(beyond)))
        for at in range(lease.published):
            assert not self.cache.holds_privately(record, self._slots(lease, at, at + 1)), f"{lease_id} may write {at}"

    def _check_stamps(self, namespace: str | None, tokens: Tokens, slots: list[int]) -> None:
        k, v = (cache.view(-1, NUM_LAYERS)[slots] for cache in self.kv)
        stamps = torch.tensor([self._stamp(namespace, tokens[: at + 1]) for at in range(len(slots))], dtype=torch.int64)
        expected = stamps[:, None] * NUM_LAYERS + torch.arange(NUM_LAYERS)
        assert k.equal(expected), f"slots {slots} hold other K than that of {tokens}"
        assert v.equal(-expected), f"slots {slots} hold other V than that of {tokens}"
