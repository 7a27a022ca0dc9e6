"""`Lease`: a client's hold on the slots of one request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from raydix.schemas import (
    ExtendResponse,
    InsertResponse,
    InvalidRequest,
    LeaseGrant,
    LeaseResponse,
    TokenIds,
    UnknownLease,
    WindowResponse,
)
from raydix.schemas.tokens import AS_THEY_ARE

if TYPE_CHECKING:
    import torch

    from raydix.actors.transport import Outcome, Transport
    from raydix.actors.verbs import CacheVerbs

_NONE = TokenIds(b"", 4)


class Lease:
    """Slots for the tokens of one request: the cached prefix's, locked, then private ones to write.

    Made by `acquire` and `lock`, belongs to the client that made it. As a context manager it is released at the end,
    or aborted if the block raises. Only private slots may be written, and only until they are published.

    Attributes:
        client: whose it is.
        lease_id: the id under which the cache knows it.
        epoch: the life of the cache that granted it.
        prefix_len: tokens whose KV was there when it was granted; never changes.
        published_len: tokens in the tree, held by this lease; grows with `insert`.
        state_slot: the lease's own row of the state tensors, which holds a copy of the state after the prefix (zeros
            where there is none); None for kinds without states.
    """

    def __init__(
        self, client: CacheVerbs, response: LeaseResponse, tokens: TokenIds, transport: Transport, run_len: int
    ) -> None:
        self.client = client
        self.transport = transport  # of the session that holds it
        self._run_len = run_len  # slots that each of the starts stands for
        self._tokens = tokens  # all ids that the cache has been sent of this request
        self._dtype: np.dtype[Any] | None = None  # of the array that they are the bytes of, if they are
        self._page_starts = response.page_starts  # as granted
        self._num_slots = response.num_slots
        self._slots: torch.Tensor | None = None
        self._swa_page_starts = response.swa_page_starts
        self._swa_slots: torch.Tensor | None = None
        self.state_slot = response.state_slot
        self._ended = False
        self._knows_loss = False  # whoever holds this was told that it ended with its session
        self._extending = False
        self.lease_id = response.lease_id
        self.epoch = transport.epoch
        self.prefix_len = response.prefix_len
        self.published_len = response.prefix_len
        client.note_granted(self)

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.frombuffer(self._page_starts, "<i4").astype(np.int64)

    @property
    def slots(self) -> torch.Tensor:
        """The slot of each token, int64 on the CPU: [0, published_len) the tree's, the rest private."""
        if self._slots is None:
            self._slots = self._expand(self._starts)
        return self._slots

    @property
    def swa_slots(self) -> torch.Tensor:
        """The window slot of each token, int64 on the CPU, 0 where the lease does not hold its window KV.

        As long as `slots`; for the tensors of sliding-window layers.

        Raises:
            InvalidRequest: the cache has no sliding window.
        """
        if self._num_slots and not self._swa_page_starts:
            raise InvalidRequest("this cache has no sliding window")
        if self._swa_slots is None:
            import torch

            starts = np.frombuffer(self._swa_page_starts, "<i4").astype(np.int64)
            held = np.repeat(starts > 0, self._run_len)[: self._num_slots]
            self._swa_slots = self._expand(starts) * torch.from_numpy(held)
        return self._swa_slots

    def _expand(self, starts: NDArray[np.int64]) -> torch.Tensor:
        import torch

        rows = starts[:, None] + np.arange(self._run_len)
        return torch.from_numpy(rows.reshape(-1)[: self._num_slots])

    def __len__(self) -> int:
        """How many tokens the lease covers."""
        return self._num_slots

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

        A page more than asked is kept, so that what is inserted next can be matched. No effect without a window.

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

    async def grant(self) -> LeaseGrant:
        """Hand the lease over: whoever adopts the grant owns it from then on, in whatever process. This object ends.

        A grant is good once. Until it is adopted the lease ends with this client's session.

        Raises:
            UnknownLease: the lease has ended.
        """
        return await self.client.grant(self)

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

    def __reduce__(self) -> Any:
        raise InvalidRequest(
            "a lease belongs to the client that took it: it cannot be pickled or sent elsewhere; `await lease.grant()` "
            "gives what another client can adopt"
        )

    def __repr__(self) -> str:
        state = "ended" if self._ended else f"prefix_len={self.prefix_len}, published_len={self.published_len}"
        return f"Lease({self.lease_id}, {state}, num_slots={self._num_slots})"

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
        num_tokens, known = len(tokens), self._tokens
        if tokens is known:
            return _NONE
        if num_tokens > self._num_slots:
            raise InvalidRequest(f"cannot insert {num_tokens} tokens: the lease covers {self._num_slots}, extend it")
        if not (tokens.starts_with(known) or known.starts_with(tokens)):
            raise InvalidRequest("the tokens to insert must begin with those that the lease was acquired for")
        return tokens.slice(min(len(known), num_tokens), num_tokens)

    def note_inserted(self, tokens: TokenIds, release: bool, outcome: Outcome) -> None:
        """Pages went to the tree, if that is what came of it, and some may now be the tree's own instead of ours."""
        if not isinstance(outcome, InsertResponse):
            return
        self._ended = self._ended or release
        if tokens is not self._tokens and len(tokens) > len(self._tokens):
            self._tokens, self._dtype = tokens, None
        if outcome.repointed:
            repointed = np.frombuffer(outcome.repointed, "<i4")
            first = self.published_len // self._run_len
            self._starts[first : first + len(repointed)] = repointed
            self._slots = None
        self.published_len += outcome.num_inserted + outcome.num_duplicates
        if outcome.swa_page_starts:
            self.note_window(outcome.swa_page_starts)

    def note_released_window(self, outcome: Outcome) -> None:
        """The window KV was released, if that is what came of it."""
        if isinstance(outcome, WindowResponse):
            self.note_window(outcome.swa_page_starts)

    def note_window(self, swa_page_starts: bytes) -> None:
        """The window KV that the lease holds has changed."""
        self._swa_page_starts = swa_page_starts
        self._swa_slots = None

    @contextmanager
    def extending(self) -> Iterator[tuple[int, int]]:
        """Guard one extend at a time; gives the tokens covered and the pages known before it."""
        if self._extending:
            raise InvalidRequest(f"lease {self.lease_id!r} is being extended already: await one extend first")
        self._extending = True
        try:
            yield self._num_slots, len(self._starts)
        finally:
            self._extending = False

    def note_extended(self, response: ExtendResponse, known_pages: int, num_slots: int) -> None:
        """The lease covers `num_slots` tokens now; its pages may go further, after an extend that was cancelled."""
        added = np.frombuffer(response.page_starts, "<i4").astype(np.int64)
        self._starts = np.concatenate((self._starts[:known_pages], added))
        self._num_slots = num_slots
        self._slots = None
        self.note_window(response.swa_page_starts)
