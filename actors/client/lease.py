"""`Lease`: a client's hold on the slots of one request; and `PendingLease`, the result of a verb that takes one."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, NoReturn, ParamSpec, Self, TypeVar

import numpy as np

from raydix.actors.client.lease_slots import LeaseSlots
from raydix.actors.transport.error_map import may_have_taken_effect
from raydix.actors.transport.validation import (
    checked_count,
    checked_response,
    checked_token_ids,
    checked_tokens,
    make_request,
)
from raydix.schemas import (
    AbortRequest,
    CacheError,
    CacheUnavailable,
    ExtendRequest,
    ExtendResponse,
    GrantRequest,
    InsertRequest,
    InsertResponse,
    InvalidRequest,
    LeaseExpired,
    LeaseGrant,
    LeaseResponse,
    ReleaseRequest,
    ReleaseWindowRequest,
    StaleEpoch,
    TakeBackRequest,
    TokenIds,
    UnknownLease,
    WindowResponse,
    WithdrawRequest,
)
from raydix.schemas.shown import shown
from raydix.schemas.tokens import PACKED_DTYPES

if TYPE_CHECKING:
    import torch

    from raydix.actors.client.prefix_cache_client import PrefixCacheClient
    from raydix.actors.transport.transport import Outcome, Transport

logger = logging.getLogger(__name__)

C = TypeVar("C")
P = ParamSpec("P")

_NONE = TokenIds(b"", 4)
_AWAIT_IT = "await it, or `async with`"


# The mark of a request on a lease: the published tokens that the lease knew of, and the request's number. Requests are
# executed in the order of their numbers; responses may come late.
RequestMark = tuple[int, int]


def make_ownership_error(lease: Any) -> CacheError:
    """Return the error for a lease of another client, or for an object that is no lease."""
    if isinstance(lease, Lease):
        return UnknownLease(f"lease {lease.lease_id!r} belongs to another client")
    given = f"{type(lease).__name__}{f': {_AWAIT_IT}' if isinstance(lease, PendingLease) else ''}"
    return InvalidRequest(f"lease must be a Lease, as `await client.acquire(...)` gives, not {given}")


class Loaded(NamedTuple):
    """Tokens of a lease's prefix that were loaded for it, by tier; `sum(lease.loaded)` is their number.

    Attributes:
        host: from the tier in host memory.
        disk: from the tier on a local disk.
    """

    host: int = 0
    disk: int = 0


class Lease:
    """Slots for the tokens of one request: the cached prefix's, locked, then private ones to write.

    Made by `acquire` and `lock`, belongs to the client that made it. As a context manager it is released at the end,
    or aborted if the block raises. Only private slots may be written, and only until they are published.

    A lease that is garbage-collected while it is open holds its slots until its client closes, as no caller can end it:
    a `ResourceWarning` names it.

    Attributes:
        client: the client that made it.
        transport: of the session that holds it.
        lease_id: the id under which the cache knows it.
        epoch: the life of the cache that granted it.
        prefix_len: tokens that were cached when it was granted; never changes.
        loaded: of these, the tokens that were loaded for this lease, by the tier that they came from.
        published_len: tokens in the tree, held by this lease; grows with `insert`.
        state_slot: the lease's own row of the state tensors, which holds a copy of the state after the prefix (zeros
            where there is none); None for kinds without states.
        offered: the grant of a lease from `lock(offer_s=...)`; None: it was not granted in the same call.
        boundary_slot: the lease's own row for a copy of that at the end of a page, which `insert(boundary_len=...)`
            publishes; None: it has none, or it may be published.
        on_change: called after the lease has published pages or has ended; None: there is nothing to call. For the
            parts of this package.
    """

    # `__del__` runs also after an `__init__` that raised: there is no lease to end then.
    _ended = True

    def __init__(
        self, client: PrefixCacheClient, response: LeaseResponse, tokens: TokenIds, transport: Transport, run_len: int
    ) -> None:
        self.client = client
        self.transport = transport
        self._tokens = tokens  # ids that the client has sent to the cache, for comparisons
        self._known_len = 0  # tokens that the cache knows by `insert_next`
        self._dtype: np.dtype[Any] | None = None  # dtype of the caller's array, if `_tokens` has its bytes
        self._held = LeaseSlots(response.page_starts, response.swa_page_starts, response.num_slots, run_len)
        self.state_slot = response.state_slot
        self.boundary_slot = response.boundary_slot
        self.offered: LeaseGrant | None = None
        self.on_change: Callable[[], None] | None = None
        self._ended = False
        self._has_raised_loss = False  # a caller has seen that the lease ended with its session
        self._extending = False
        self._num_requests = 0
        # Numbers of requests: the latest insert without a response, the latest response that has the pages, and the
        # latest release of the window without a response.
        self._unanswered = self._answered = self._window_unanswered = 0
        self.lease_id = response.lease_id
        self.epoch = transport.epoch
        self.prefix_len = response.prefix_len
        self.loaded = Loaded(response.loaded_len - response.disk_loaded_len, response.disk_loaded_len)
        self.published_len = response.prefix_len

    @property
    def slots(self) -> torch.Tensor:
        """The slot of each token, int64 on the CPU: [0, published_len) the tree's, the others private. A copy.

        Raises:
            CacheUnavailable: the last insert was not answered, so the slots may have changed: insert again.
        """
        self._check_slots_known()
        return self._held.all_slots().clone()

    @property
    def pages(self) -> torch.Tensor:
        """The page of each `page_size` tokens, for block tables: int64 on the CPU, the last one perhaps part-filled.

        `slots[i] == pages[i // page_size] * page_size + i % page_size`, for every kind. A copy.

        Raises:
            CacheUnavailable: as for `slots`.
        """
        self._check_slots_known()
        return self._held.pages(self.client.session.config.page_size)

    @property
    def swa_slots(self) -> torch.Tensor:
        """The window slot of each token, int64 on the CPU, 0 where the lease does not hold its window KV. A copy.

        As long as `slots`; for the tensors of sliding-window layers.

        Raises:
            InvalidRequest: the cache has no sliding window.
            CacheUnavailable: as for `slots`, or the last `release_window` was not answered: release it again.
        """
        self._check_slots_known()
        if not self._held.has_window:
            raise InvalidRequest("this cache has no sliding window")
        if self._window_unanswered > self._held.window_number:
            raise CacheUnavailable(f"a release_window of lease {self.lease_id!r} was not answered: release it again")
        return self._held.window_slots().clone()

    def __len__(self) -> int:
        """Return the number of tokens that the lease covers."""
        return self._held.num_slots

    def __bool__(self) -> bool:
        """Return True, even if the lease covers no tokens: it must be ended like any other."""
        return True

    async def insert(
        self, tokens: Any, *, release: bool = False, publish_state: bool = False, boundary_len: int | None = None
    ) -> InsertResponse:
        """Publish computed tokens: whole pages of `tokens`, which begin with the tokens of `acquire`.

        From then on other requests hit them. If the tree has a page already, the lease's page is freed and `slots`
        names the tree's. `release=True` ends the lease in the same message. `publish_state=True` publishes a copy of
        the lease's state as the state after the last token, which must end a page. If the caller is cancelled, the
        insert still takes effect, and the lease is updated.

        Args:
            boundary_len: publish the state in `boundary_slot`, which the caller has copied there after so many tokens:
                the end of the last whole page. The slot is the cache's then: do not write it again. None: no page has
                ended since the lease began, or it has no such slot.

        Raises:
            InvalidRequest: more tokens than the lease covers, other tokens than it was acquired for, or a
                `boundary_len` that is not the end of the last whole page.
            UnknownLease: the lease has ended.
        """
        self.check_open()
        packed = self._reuse_packed(tokens) or checked_tokens(tokens)
        unsent, mark = self._cut_unsent(packed), self._mark_request()
        request = make_request(
            InsertRequest,
            lease_id=self.lease_id,
            num_tokens=len(packed),
            suffix=unsent,
            release=release,
            publish_state=publish_state,
            known_len=mark[0],
            boundary_len=boundary_len,
        )
        publishes_boundary = boundary_len is not None and not publish_state
        note = partial(self._on_insert, packed, request.release, publishes_boundary, mark)
        return checked_response(InsertResponse, await self.client.session.ask_for_lease(request, note))

    @property
    def known_len(self) -> int:
        """The number of leading tokens of the request with ids that the cache has, as far as this client knows."""
        return max(len(self._tokens), self._known_len)

    async def insert_next(self, num_tokens: int, more: Any = ()) -> InsertResponse:
        """Publish whole pages, like `insert`, but no state, and send only the ids that the cache does not have yet.

        It costs the same whatever the length of the prompt. The caller must keep to the tokens of the request: only the
        cache has the others to compare with. If the caller is cancelled, the insert still takes effect.

        Args:
            num_tokens: publish the whole pages of so many leading tokens.
            more: the ids of the tokens [known_len, num_tokens); empty if that is no range.

        Raises:
            InvalidRequest: the lease covers fewer tokens, or `more` has too few or too many ids.
            UnknownLease: the lease has ended.
        """
        self.check_open()
        suffix = checked_token_ids(more)
        request = make_request(
            InsertRequest,
            lease_id=self.lease_id,
            num_tokens=num_tokens,
            suffix=suffix,
            known_len=self.published_len,
        )
        self._check_next(request.num_tokens, suffix)
        note = partial(self._on_insert, request.num_tokens, False, False, self._mark_request())
        return checked_response(InsertResponse, await self.client.session.ask_for_lease(request, note))

    async def release_window(self, up_to: int) -> None:
        """Free the window KV before token `up_to`, which decoding no longer reads: `swa_slots` is 0 there.

        The lease keeps what later requests need: one page more than the window at the end of its whole pages; of pages
        of one token, two more. It also keeps so much at the end of its published tokens, unless all of it lies before
        that. No effect without a window. If the caller is cancelled, it still takes effect, and the lease is updated.

        Args:
            up_to: the first token that the next token attends to: the number of computed tokens, less the cache's
                window, plus 1.

        Raises:
            InvalidRequest: `up_to` is negative, or larger than the number of tokens that the lease covers.
            UnknownLease: the lease has ended.
        """
        self.check_open()
        request = make_request(ReleaseWindowRequest, lease_id=self.lease_id, up_to=up_to)
        note = partial(self._on_window_release, self._mark_request())
        checked_response(WindowResponse, await self.client.session.ask_for_lease(request, note))

    async def extend(self, num_tokens: int, *, timeout_s: float | None = None) -> torch.Tensor:
        """Allocate slots for `num_tokens` more tokens and return them, int64 on the CPU. Waits as `acquire` does.

        Raises:
            PoolExhausted: no slots came free in time; the lease is as before.
            UnknownLease: the lease has ended.
        """
        self.check_open()
        if type(num_tokens) is not int or num_tokens < 1:
            num_tokens = checked_count(num_tokens)
        session = self.client.session
        with self._guard_extend() as (covered, known_pages, number):
            request = make_request(
                ExtendRequest,
                lease_id=self.lease_id,
                num_slots=covered + num_tokens,
                known_pages=known_pages,
                timeout_s=timeout_s,
            )
            with session.undo_on_failure(WithdrawRequest, lease_id=self.lease_id):
                response = checked_response(ExtendResponse, await session.ask_for_lease(request))
            self._answered = max(self._answered, number)
            starts = response.page_starts, response.swa_page_starts
            self._held.add_runs(number, known_pages, *starts, request.num_slots)
        self._check_slots_known()
        return self._held.last_slots(num_tokens)

    async def confirm_open(self) -> None:
        """Ask the cache whether the lease is open: then the KV read from its slots so far is that of its tokens.

        A process that stands still for longer than `session_ttl_s` loses its leases, and others may write their pages
        before it goes on. So call this after a read of mapped memory that no other verb follows. `release` confirms
        nothing. It changes nothing, waits for no slots, and also works while the cache drains. The cache is asked to
        extend the lease to its own size; an empty lease has nothing to confirm.

        Raises:
            UnknownLease: the lease has ended, so the read KV may be of other tokens.
            LeaseExpired: as UnknownLease, with its session.
            StaleEpoch: as UnknownLease, with the cache's life.
            CacheUnavailable: the cache does not answer: it may have ended.
            InvalidRequest: an `extend` of the lease has not returned yet.
        """
        self.check_open()
        self._check_not_extending()
        if num_slots := self._held.num_slots:
            num_pages = len(self._held.starts)
            request = make_request(
                ExtendRequest, lease_id=self.lease_id, num_slots=num_slots, known_pages=num_pages, timeout_s=0.0
            )
            checked_response(ExtendResponse, await self.client.session.ask_for_lease(request))

    async def grant(self, *, timeout_s: float | None = None) -> LeaseGrant:
        """Offer the lease to another client, which owns it once it has adopted the grant. This object ends.

        A grant is good once. If it is not adopted in time, or `client.revoke(grant)` is called, the lease ends: its
        private slots are freed, published pages stay. Until then it also ends with this client's session. If the caller
        is cancelled, the lease is as before; if the cache does not answer, the lease is given up.

            lease = await scheduler.acquire(tokens)
            grant = await lease.grant(timeout_s=5)  # pickles
            lease = await worker.adopt(grant)  # in another process, within 5 s

        Args:
            timeout_s: how long the grant is good, in seconds by the cache's clock; None:
                `LeaseConfig.grant_timeout_s`.

        Raises:
            UnknownLease: the lease has ended.
            InvalidRequest: `timeout_s` must be a positive, finite number.
        """
        self.check_open()
        session, lease_id = self.client.session, self.lease_id
        offer_id = session.make_offer_id()
        request = make_request(GrantRequest, lease_id=lease_id, offer_id=offer_id, timeout_s=timeout_s)
        self._check_not_extending()
        self._ended = True
        try:
            with session.undo_on_failure(TakeBackRequest, lease_id=lease_id, offer_id=offer_id):
                offered = checked_response(LeaseResponse, await session.ask_for_lease(request))
        except BaseException:
            self._ended = False
            raise
        return self._grant_of(offered.prefix_len, offered.num_slots, offer_id)

    async def preempt(self, tokens: Any, *, publish_state: bool = False, boundary_len: int | None = None) -> None:
        """Publish the whole pages of `tokens` and end the lease, so that other requests get its slots.

        A later `acquire` of the same tokens hits the pages that were not evicted in between.

        Args:
            tokens: all ids with computed KV, as for `insert`; empty if no KV was computed yet.
            publish_state: as for `insert`, and so is `boundary_len`.

        Raises:
            InvalidRequest: as for `insert`; the lease is as before.
            UnknownLease: the lease has ended.
        """
        if len(packed := checked_token_ids(tokens)):
            await self.insert(packed, release=True, publish_state=publish_state, boundary_len=boundary_len)
        else:
            self.check_open()
            await self.release()

    async def release(self) -> None:
        """End the lease: private slots are freed, inserted pages stay. No effect if it has ended."""
        await self._end(ReleaseRequest)

    async def abort(self) -> None:
        """End the lease of a request that failed. Pages that it inserted before stay: their KV was complete."""
        await self._end(AbortRequest)

    async def _end(self, model: type[ReleaseRequest | AbortRequest]) -> None:
        session = self.client.session
        if not session.closed:
            session.check_usable()
        if not self.mark_ended() or session.closed:
            return
        request = model(lease_id=self.lease_id)
        about = {"lease": self.lease_id, "epoch": self.epoch}
        try:
            await session.ask_for_lease(request, partial(session.on_lease_end, request))
        except CacheUnavailable as error:
            logger.info("lease %r ended with its cache, or will soon: %s", self.lease_id, error, extra=about)
        except (StaleEpoch, LeaseExpired) as error:
            logger.info("lease %r ended with its session: %s", self.lease_id, error, extra=about)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        await (self.release() if kind is None else self.abort())

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        if not self._ended and not self.client.session.closed and self.transport.lost is None:
            advice = "end each lease with `async with`, release() or abort()"
            warn(f"{self!r} was never ended: its slots stay held; {advice}", ResourceWarning, source=self)

    def __reduce__(self) -> Any:
        raise InvalidRequest(
            "a lease belongs to the client that took it: it cannot be pickled or sent elsewhere; `await lease.grant()` "
            "gives a grant, which another client can adopt"
        )

    def __repr__(self) -> str:
        state = "ended" if self._ended else f"prefix_len={self.prefix_len}, published_len={self.published_len}"
        return f"Lease({shown(self.lease_id)}, {state}, num_slots={len(self)})"

    # ---------------------------------------------------------------- for the parts of this package

    def check_open(self) -> None:
        """Raise an error unless the lease is open, on its client's event loop.

        Raises:
            InvalidRequest: the client is closed, or belongs to another event loop.
            UnknownLease: the lease has ended.
            CacheError: the session's loss, with which the lease has ended.
        """
        session = self.client.session
        if session.closed or session.loop is not asyncio.get_running_loop():
            session.check_usable()
        if self._ended:
            raise UnknownLease(f"lease {self.lease_id!r} has ended")
        if (lost := self.transport.lost) is not None:
            self._has_raised_loss = True
            raise type(lost)(*lost.args)

    @property
    def ended(self) -> bool:
        """Whether the lease was released, aborted or granted to another client."""
        return self._ended

    @property
    def may_write(self) -> bool:
        """Whether a caller may still write its slots: the lease has not ended, and no verb has raised its loss."""
        return not self._ended and not self._has_raised_loss

    def _check_not_extending(self) -> None:
        if self._extending:
            raise InvalidRequest(f"lease {self.lease_id!r} is being extended: await that first")

    def mark_offered(self, offer_id: str) -> None:
        """Mark the lease as ended here: the cache has offered it in the same step in which it granted it."""
        self._ended = True
        self.offered = self._grant_of(self.prefix_len, len(self), offer_id)

    def _grant_of(self, prefix_len: int, num_slots: int, offer_id: str) -> LeaseGrant:
        """Return the grant of this lease, which the cache has offered."""
        return LeaseGrant(
            lease_id=self.lease_id,
            granter=self.client.session.session_id,
            epoch=self.epoch,
            prefix_len=prefix_len,
            published_len=self.published_len,
            num_slots=num_slots,
            offer_id=offer_id,
        )

    def mark_ended(self) -> bool:
        """Mark the lease as ended. Return False if it had ended already, or was lost with its session."""
        was_open, self._ended = not self._ended and self.transport.lost is None, True
        self._note_change()
        return was_open

    def remember_packed(self, tokens: Any) -> None:
        """Remember that the ids that were sent to the cache were packed from `tokens`."""
        if type(tokens) is np.ndarray and tokens.dtype in PACKED_DTYPES:
            self._dtype = tokens.dtype

    def _reuse_packed(self, tokens: Any) -> TokenIds | None:
        """Return the ids that were sent to the cache if `tokens` are the same ids in the same form; else None."""
        if type(tokens) is np.ndarray and tokens.dtype is self._dtype and tokens.ndim == 1:
            return self._tokens if tokens.tobytes() == self._tokens.data else None
        return None

    def _cut_unsent(self, tokens: TokenIds) -> TokenIds:
        """Return the ids of `tokens` that were not yet sent to the cache.

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

    def _check_next(self, num_tokens: int, more: TokenIds) -> None:
        """Raise InvalidRequest unless `more` follows the known tokens up to `num_tokens`, which the lease covers."""
        if not 0 <= num_tokens <= self._held.num_slots:
            raise InvalidRequest(
                f"num_tokens must be in [0, {self._held.num_slots}], not {num_tokens}: extend the lease"
            )
        if len(more) != max(0, num_tokens - self.known_len):
            raise InvalidRequest(
                f"more must have the ids of tokens [{self.known_len}, {num_tokens}), not {len(more)} ids"
            )

    def _mark_request(self) -> RequestMark:
        """Number a new request, and return its mark."""
        self._num_requests += 1
        return self.published_len, self._num_requests

    def _on_insert(
        self,
        tokens: TokenIds | int,
        release: bool,
        publishes_boundary: bool,
        mark: RequestMark,
        outcome: Outcome,
    ) -> None:
        """Update the lease after an insert: pages went to the tree, and some slots may be the tree's now.

        The response has all slots behind the tokens that were known to be published, so earlier responses may be lost.

        Args:
            tokens: of the insert, or their number.
        """
        known_len, number = mark
        if not isinstance(outcome, InsertResponse):
            if isinstance(outcome, CacheError) and may_have_taken_effect(outcome):
                self._unanswered = max(self._unanswered, number)
                self.boundary_slot = None if publishes_boundary else self.boundary_slot
            return
        self._answered = max(self._answered, number)
        if publishes_boundary and not outcome.retired:
            self.boundary_slot = None
        self._ended = self._ended or release
        if isinstance(tokens, int):
            self._known_len = max(self._known_len, tokens)
        elif tokens is not self._tokens and len(tokens) > len(self._tokens):
            self._tokens, self._dtype = tokens, None
        if outcome.repointed:
            self._held.repoint(known_len, outcome.repointed)
        if outcome.swa_page_starts:
            self._held.set_window(number, outcome.swa_page_starts)
        self.published_len = max(self.published_len, outcome.published_len)
        self._note_change()

    def _note_change(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _on_window_release(self, mark: RequestMark, outcome: Outcome) -> None:
        """Update the lease after a release of its window; any later response also has its window slots."""
        number = mark[1]
        if isinstance(outcome, WindowResponse):
            self._held.set_window(number, outcome.swa_page_starts)
        elif isinstance(outcome, CacheError) and may_have_taken_effect(outcome):
            self._window_unanswered = max(self._window_unanswered, number)

    def _check_slots_known(self) -> None:
        if self._unanswered > self._answered:
            raise CacheUnavailable(f"an insert of lease {self.lease_id!r} was not answered: insert again, or abort it")

    @contextmanager
    def _guard_extend(self) -> Iterator[tuple[int, int, int]]:
        """Allow one extend at a time; yield the tokens covered and the pages known before it, and its number.

        Only published pages count as known: the response to an earlier insert may be lost, so this one must repeat the
        others.
        """
        if self._extending:
            raise InvalidRequest(f"lease {self.lease_id!r} is being extended already: await one extend first")
        self._extending = True
        try:
            published_len, number = self._mark_request()
            yield self._held.num_slots, self._held.count_runs(published_len), number
        finally:
            self._extending = False


class PendingLease(Coroutine[Any, Any, Lease]):
    """The coroutine of a verb that takes a lease, and an asynchronous context manager. Usable once, either way.

        lease = await client.acquire(tokens)
        async with client.acquire(tokens) as lease: ...
        async with await client.acquire(tokens) as lease: ...

    Nothing is sent before it is awaited or entered. If it is cancelled, the cache ends the lease that it granted.
    """

    __slots__ = ("_coroutine", "_lease")

    def __init__(self, coroutine: Coroutine[Any, Any, Lease]) -> None:
        self._coroutine = coroutine

    def __getattr__(self, name: str) -> Any:
        """Return the coroutine's name or frame, which asyncio shows for a task."""
        if name.startswith("cr_") or name in ("__name__", "__qualname__"):
            return getattr(self._coroutine, name)
        raise AttributeError(f"{name!r} is asked of a lease that was not awaited: {_AWAIT_IT}")

    def __enter__(self) -> NoReturn:
        raise TypeError(f"a lease that was not awaited is entered: {_AWAIT_IT}")

    def __exit__(self, *error: object) -> None:
        """Do nothing: it cannot be entered."""

    def __await__(self) -> Generator[Any, Any, Lease]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    async def __aenter__(self) -> Lease:
        self._lease = await self._coroutine
        return self._lease

    async def __aexit__(self, *error: Any) -> None:
        await self._lease.__aexit__(*error)


def make_pending(
    verb: Callable[Concatenate[C, P], Coroutine[Any, Any, Lease]],
) -> Callable[Concatenate[C, P], PendingLease]:
    """Return `verb` with a result that can be awaited or entered."""

    @wraps(verb)
    def call(client: C, /, *args: P.args, **kwargs: P.kwargs) -> PendingLease:
        return PendingLease(verb(client, *args, **kwargs))

    return call
