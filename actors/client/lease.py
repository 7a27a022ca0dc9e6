"""`Lease`: a client's hold on the slots of one request."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from raydix.actors.client.lease_slots import LeaseSlots
from raydix.actors.transport.error_map import may_have_taken_effect
from raydix.schemas import (
    CacheError,
    CacheUnavailable,
    ExtendResponse,
    InsertResponse,
    InvalidRequest,
    LeaseGrant,
    LeaseResponse,
    TokenIds,
    UnknownLease,
    WindowResponse,
)
from raydix.schemas.shown import shown
from raydix.schemas.tokens import AS_THEY_ARE

if TYPE_CHECKING:
    import torch

    from raydix.actors.client.lease_verbs import CacheVerbs
    from raydix.actors.transport.transport import Outcome, Transport

_NONE = TokenIds(b"", 4)


# A request on a lease, whose answer may come late: tokens that its holder knew to be published, and a number; requests
# of higher ones were made later, and are executed later.
Asked = tuple[int, int]


def not_mine(lease: Any) -> CacheError:
    """What to say of a lease that is not this client's, or of what is none."""
    if isinstance(lease, Lease):
        return UnknownLease(f"lease {lease.lease_id!r} belongs to another client")
    return InvalidRequest(f"a lease is what `await client.acquire(...)` gives, not {type(lease).__name__}")


class Lease:
    """Slots for the tokens of one request: the cached prefix's, locked, then private ones to write.

    Made by `acquire` and `lock`, belongs to the client that made it. As a context manager it is released at the end,
    or aborted if the block raises. Only private slots may be written, and only until they are published.

    A lease that is garbage-collected while it is open goes on holding its slots until its client closes, as it cannot
    be ended any more: a `ResourceWarning` names it.

    Attributes:
        client: whose it is.
        lease_id: the id under which the cache knows it.
        epoch: the life of the cache that granted it.
        prefix_len: tokens whose KV was there when it was granted; never changes.
        published_len: tokens in the tree, held by this lease; grows with `insert`.
        state_slot: the lease's own row of the state tensors, which holds a copy of the state after the prefix (zeros
            where there is none); None for kinds without states.
    """

    _ended = True  # until it is whole

    def __init__(
        self, client: CacheVerbs, response: LeaseResponse, tokens: TokenIds, transport: Transport, run_len: int
    ) -> None:
        self.client = client
        self.transport = transport  # of the session that holds it
        self._tokens = tokens  # all ids that the cache has been sent of this request
        self._dtype: np.dtype[Any] | None = None  # of the array that they are the bytes of, if they are
        self._held = LeaseSlots(response.page_starts, response.swa_page_starts, response.num_slots, run_len)
        self.state_slot = response.state_slot
        self._ended = False
        self._knows_loss = False  # whoever holds this was told that it ended with its session
        self._extending = False
        self._num_asked = 0
        self._unanswered = self._answered = 0  # the latest of its inserts: pages may have become the tree's
        self._window_unanswered = 0  # the latest release of its window
        self.lease_id = response.lease_id
        self.epoch = transport.epoch
        self.prefix_len = response.prefix_len
        self.published_len = response.prefix_len
        client.note_granted(self)

    @property
    def slots(self) -> torch.Tensor:
        """The slot of each token, int64 on the CPU: [0, published_len) the tree's, the rest private. A copy.

        Raises:
            CacheUnavailable: the last insert was not answered, so that some may be others by now: insert again.
        """
        self._check_no_doubt()
        return self._held.all().clone()

    @property
    def pages(self) -> torch.Tensor:
        """The page of each `page_size` tokens, for block tables: int64 on the CPU, the last one perhaps part-filled.

        `slots[i] == pages[i // page_size] * page_size + i % page_size`, for every kind. A copy.

        Raises:
            CacheUnavailable: as for `slots`.
        """
        self._check_no_doubt()
        return self._held.pages(self.client.config.page_size)

    @property
    def swa_slots(self) -> torch.Tensor:
        """The window slot of each token, int64 on the CPU, 0 where the lease does not hold its window KV. A copy.

        As long as `slots`; for the tensors of sliding-window layers.

        Raises:
            InvalidRequest: the cache has no sliding window.
            CacheUnavailable: as for `slots`, or the last `release_window` was not answered: release it again.
        """
        self._check_no_doubt()
        if not self._held.has_window:
            raise InvalidRequest("this cache has no sliding window")
        if self._window_unanswered > self._held.window_told:
            raise CacheUnavailable(f"a release_window of lease {self.lease_id!r} was not answered: release it again")
        return self._held.of_window().clone()

    def __len__(self) -> int:
        """How many tokens the lease covers."""
        return self._held.num_slots

    def __bool__(self) -> bool:
        """True, also of a lease that covers nothing: it is there, and has to be ended like any other."""
        return True

    async def insert(self, tokens: Any, *, release: bool = False, publish_state: bool = False) -> InsertResponse:
        """Publish computed tokens: whole pages of `tokens`, which begin with those the lease was acquired for.

        From then on others hit them. Where the tree has a page already, the lease's own is freed and `slots` names
        the tree's. `release=True` ends the lease in the same message. `publish_state=True` publishes a copy of the
        lease's own state as the one after the last token, which must end a page.

        Raises:
            InvalidRequest: more tokens than the lease covers, or other tokens than it was acquired for.
            UnknownLease: the lease has ended.
        """
        return await self.client.insert(self, tokens, release=release, publish_state=publish_state)

    async def release_window(self, up_to: int) -> None:
        """Free the window KV before token `up_to`, as decoding has left it behind: `swa_slots` is 0 there.

        A page more than asked is kept, so that what is inserted next can be matched; and the last window of what is
        published, unless all of it lies before that page. No effect without a window.

        Raises:
            InvalidRequest: `up_to` is negative, or beyond what the lease covers.
            UnknownLease: the lease has ended.
        """
        await self.client.release_window(self, up_to)

    async def extend(self, num_tokens: int, *, timeout_s: float | None = None) -> torch.Tensor:
        """Cover `num_tokens` more; returns their slots. Waits for room as `acquire` does.

        Raises:
            PoolExhausted: no room came free in time; the lease is as before.
            UnknownLease: the lease has ended.
        """
        return await self.client.extend(self, num_tokens, timeout_s=timeout_s)

    async def grant(self, *, timeout_s: float | None = None) -> LeaseGrant:
        """Offer the lease to another client, which owns it once it has adopted the grant. This object ends.

        A grant is good once. If it is not adopted in time, or `client.revoke(grant)` is called, the lease ends: its
        private slots are freed, published pages stay. Until then it also ends with this client's session. If the caller
        is cancelled, the lease is as before; if the cache does not answer, the lease is given up.

        Args:
            timeout_s: how long the grant is good, in seconds by the cache's clock; None:
                `LeaseConfig.grant_timeout_s`.

        Raises:
            UnknownLease: the lease has ended.
            InvalidRequest: `timeout_s` must be a positive, finite number.
        """
        return await self.client.grant(self, timeout_s=timeout_s)

    async def preempt(self, tokens: Any, *, publish_state: bool = False) -> None:
        """Publish the whole pages of `tokens` and end the lease, so that other requests find room.

        A later `acquire` of the same tokens takes up the pages that were not evicted in between.

        Args:
            tokens: all ids whose KV is computed, as for `insert`; none if no KV was computed yet.
            publish_state: as for `insert`.

        Raises:
            InvalidRequest: as for `insert`; the lease is as before.
            UnknownLease: the lease has ended.
        """
        await self.client.preempt(self, tokens, publish_state=publish_state)

    async def release(self) -> None:
        """End the lease: private slots are freed, what was inserted stays. No effect on one that has ended."""
        await self.client.release(self)

    async def abort(self) -> None:
        """End the lease of a request that failed. What it inserted before stays: it was whole then."""
        await self.client.abort(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await (self.release() if kind is None else self.abort())

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        if not self._ended and not self.client._closed and self.transport.lost is None:
            advice = "end each lease with `async with`, release() or abort()"
            warn(f"{self!r} was never ended: its slots stay held; {advice}", ResourceWarning, source=self)

    def __reduce__(self) -> Any:
        raise InvalidRequest(
            "a lease belongs to the client that took it: it cannot be pickled or sent elsewhere; `await lease.grant()` "
            "gives what another client can adopt"
        )

    def __repr__(self) -> str:
        state = "ended" if self._ended else f"prefix_len={self.prefix_len}, published_len={self.published_len}"
        return f"Lease({shown(self.lease_id)}, {state}, num_slots={len(self)})"

    # ---------------------------------------------------------------- for the client alone

    def check_open(self) -> None:
        """Raise UnknownLease if this handle has ended the lease, or what its session has ended with."""
        if self._ended:
            raise UnknownLease(f"lease {self.lease_id!r} has ended")
        if (lost := self.transport.lost) is not None:
            self._knows_loss = True
            raise type(lost)(*lost.args)

    @property
    def may_write(self) -> bool:
        """Whether somebody may be writing its slots, not knowing better."""
        return not self._ended and not self._knows_loss

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """End this handle, but not the lease; if that fails, the handle is as before."""
        if self._extending:
            raise InvalidRequest(f"lease {self.lease_id!r} is being extended: await that first")
        self._ended = True
        try:
            yield
        except BaseException:
            self._ended = False
            raise

    def end(self) -> bool:
        """Mark the lease as ended; False if it was already, or ended with its session."""
        was_open, self._ended = not self._ended and self.transport.lost is None, True
        return was_open

    def note_packed(self, tokens: Any) -> None:
        """The ids that the cache has been sent were packed from these."""
        if type(tokens) is np.ndarray and tokens.dtype in AS_THEY_ARE:
            self._dtype = tokens.dtype

    def packed(self, tokens: Any) -> TokenIds | None:
        """The ids that the cache has been sent, if these are the same in the same form: a copy and a comparison."""
        if type(tokens) is np.ndarray and tokens.dtype is self._dtype and tokens.ndim == 1:
            return self._tokens if tokens.tobytes() == self._tokens.data else None
        return None

    def unseen(self, tokens: TokenIds) -> TokenIds:
        """The ids that the cache has not been sent.

        Raises:
            InvalidRequest: more tokens than the lease covers, or other tokens than it was acquired for.
        """
        num_tokens, known, covered = len(tokens), self._tokens, self._held.num_slots
        if tokens is known:
            return _NONE
        if num_tokens > covered:
            raise InvalidRequest(f"cannot insert {num_tokens} tokens: the lease covers {covered}, extend it")
        if not (tokens.starts_with(known) or known.starts_with(tokens)):
            raise InvalidRequest("the tokens to insert must begin with those that the lease was acquired for")
        return tokens.slice(min(len(known), num_tokens), num_tokens)

    def ask(self) -> Asked:
        """What is known now that the cache is asked for something on this lease."""
        self._num_asked += 1
        return self.published_len, self._num_asked

    def note_inserted(self, tokens: TokenIds, release: bool, asked: Asked, outcome: Outcome) -> None:
        """Pages went to the tree, if that is what came of it, and some may now be the tree's own instead of ours.

        The answer tells how things are beyond what was known: whatever became of the answers before it.
        """
        known_len, number = asked
        if not isinstance(outcome, InsertResponse):
            if isinstance(outcome, CacheError) and may_have_taken_effect(outcome):
                self._unanswered = max(self._unanswered, number)
            return
        self._answered = max(self._answered, number)
        self._ended = self._ended or release
        if tokens is not self._tokens and len(tokens) > len(self._tokens):
            self._tokens, self._dtype = tokens, None
        if outcome.repointed:
            self._held.repoint(known_len, outcome.repointed)
        if outcome.swa_page_starts:
            self._held.note_window(number, outcome.swa_page_starts)
        self.published_len = max(self.published_len, outcome.published_len)

    def note_released_window(self, asked: Asked, outcome: Outcome) -> None:
        """The window KV was released, if that is what came of it. Any later answer tells whether it was."""
        if isinstance(outcome, WindowResponse):
            self._held.note_window(asked[1], outcome.swa_page_starts)
        elif isinstance(outcome, CacheError) and may_have_taken_effect(outcome):
            self._window_unanswered = max(self._window_unanswered, asked[1])

    def _check_no_doubt(self) -> None:
        if self._unanswered > self._answered:
            raise CacheUnavailable(f"an insert of lease {self.lease_id!r} was not answered: insert again, or abort it")

    @contextmanager
    def extending(self) -> Iterator[tuple[int, int, int]]:
        """Guard one extend at a time; gives the tokens covered and the pages known before it, and its number.

        What is not published is not known: an insert before may be lost yet, and this answer is to tell of it.
        """
        if self._extending:
            raise InvalidRequest(f"lease {self.lease_id!r} is being extended already: await one extend first")
        self._extending = True
        try:
            published_len, number = self.ask()
            yield self._held.num_slots, self._held.runs_of(published_len), number
        finally:
            self._extending = False

    def note_extended(
        self, response: ExtendResponse, known_pages: int, number: int, num_slots: int, num_added: int
    ) -> torch.Tensor:
        """The lease covers `num_slots` tokens now; returns the slots of those that were added."""
        self._answered = max(self._answered, number)
        self._held.grow(number, known_pages, response.page_starts, response.swa_page_starts, num_slots)
        self._check_no_doubt()
        return self._held.last(num_added)
