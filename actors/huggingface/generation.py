"""`Generation`, the result of a worker's request, and `GreedyDecoding`, the state of a request."""

from __future__ import annotations

import time
from contextlib import suppress
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from raydix.actors.transport.validation import checked_count
from raydix.schemas import InvalidRequest, TokenIds
from raydix.schemas.message import PydanticMessage
from raydix.schemas.shown import brief


class Step(NamedTuple):
    """The outcome of one forward pass."""

    next_token: int  # the most likely token
    logits: torch.Tensor | None  # [tokens fed, vocabulary], on the CPU; None if not requested


class Generation(PydanticMessage):
    """The tokens that a worker has generated, and their cost."""

    token_ids: tuple[int, ...] = Field(
        description="generated tokens, the end token included; none with max_new_tokens=0"
    )
    prefix_len: int = Field(description="leading tokens of the prompt with KV from the cache")
    loaded_len: int = Field(
        default=0,
        description="of prefix_len, the tokens that the cache loaded for the request from a tier below its pool",
    )
    num_computed: int = Field(
        description="tokens run through the model: the rest of the prompt, and all generated tokens but the last; "
        "repeated runs of a token count each time"
    )
    time_to_first_token_s: float = Field(description="from the call, including the wait for slots")
    total_s: float = Field(description="from the call to the result, including the publication")
    logits: torch.Tensor | None = Field(
        default=None,
        description="with return_logits: [tokens from prefix_len on but the last, vocabulary], on the CPU, in the "
        "model's dtype; row i follows token prefix_len + i",
    )


class GreedyDecoding:
    """A request during decoding: its known tokens, and the number of them that have KV.

    A request that leaves a model's range of lengths begins again, with all known tokens as its prompt.

    Attributes:
        num_prompt: known tokens at the start: the prompt, and the tokens generated before the request began again.
        num_known: prompt tokens and generated tokens.
        num_computed: leading tokens with KV.
        keep_logits: whether to keep the logits of every computed token.
    """

    def __init__(self, tokens: Any, max_new_tokens: int, ends: frozenset[int], keep_logits: bool) -> None:
        self._started = time.perf_counter()
        self._tokens = _prompt(tokens)  # the prompt, then generated tokens and spare capacity
        self.num_prompt = self._num_given = len(self._tokens)
        self.keep_logits = keep_logits
        self._max_returned = checked_count(max_new_tokens, "max_new_tokens", least=0)
        self._max_len = self._stop_len = self.num_prompt + max(1, self._max_returned)
        self.num_known = self.num_prompt
        self.num_computed = 0
        self._num_run = 0  # tokens run, also before the request began again
        self._num_logits = 0  # leading tokens with kept logits, or with none requested
        self._first_prefix_len: int | None = None
        self._first_loaded_len = 0
        self._ends = ends
        self._ended = False
        self._first_token_at = 0.0
        self._logits: list[torch.Tensor] = []

    def begin(self, longest: int | None) -> None:
        """Begin with the known tokens as the prompt, and stop after `longest` computed tokens. None: no limit."""
        self.num_prompt = self.num_known
        self.num_computed = 0
        self._stop_len = self._max_len if longest is None else min(self._max_len, longest + 1)

    @property
    def prompt(self) -> NDArray[np.int64]:
        """The prompt's ids."""
        return self._tokens[: self.num_prompt]

    @property
    def max_computed(self) -> int:
        """Most tokens that need a slot: all but the last generated one."""
        return self._stop_len - 1

    @property
    def computed(self) -> NDArray[np.int64]:
        """The ids of the leading tokens with KV."""
        return self._tokens[: self.num_computed]

    def known(self, stop: int | None = None) -> NDArray[np.int64]:
        """Return the ids of the known tokens, or of the first `stop` tokens."""
        return self._tokens[: self.num_known if stop is None else stop]

    @property
    def done(self) -> bool:
        """Whether all tokens are generated, or as many as the last `begin` allows."""
        return self.complete or self.num_known == self._stop_len

    @property
    def complete(self) -> bool:
        """Whether all tokens are generated."""
        return self._ended or self.num_known == self._max_len

    def reuse(self, prefix_len: int, loaded_len: int = 0) -> None:
        """Count `prefix_len` leading tokens as computed, because their KV was cached, or loaded for the request."""
        self.num_computed = prefix_len
        if self._first_prefix_len is None:
            self._first_prefix_len = self._num_logits = prefix_len
            self._first_loaded_len = loaded_len

    def note(self, step: Step, stop: int | None = None) -> None:
        """Add the outcome of a run of `known(stop)` from the first token without KV."""
        end = self.num_known if stop is None else stop
        self._num_run += end - self.num_computed
        if step.logits is not None and end > self._num_logits:
            self._logits.append(step.logits[self._num_logits - end :])
            self._num_logits = end
        if stop is not None and stop < self.num_known:
            self.num_computed = stop
            return
        if self.num_known == self._num_given:
            self._first_token_at = time.perf_counter()
        self.num_computed = self.num_known
        if self.num_known == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty_like(self._tokens)))
        self._tokens[self.num_known] = step.next_token
        self.num_known += 1
        self._ended = step.next_token in self._ends

    def result(self) -> Generation:
        """Return the result so far."""
        return Generation(
            token_ids=tuple(self._tokens[self._num_given : self.num_known].tolist()[: self._max_returned]),
            prefix_len=self._first_prefix_len or 0,
            loaded_len=self._first_loaded_len,
            num_computed=self._num_run,
            time_to_first_token_s=self._first_token_at - self._started,
            total_s=time.perf_counter() - self._started,
            logits=torch.cat(self._logits) if self._logits else None,
        )


def _prompt(tokens: Any) -> NDArray[np.int64]:
    try:
        packed = TokenIds.pack(tokens)
    except ValueError as error:
        raise InvalidRequest(f"tokens: {error}") from None
    if not len(packed):
        raise InvalidRequest("tokens must have at least one token id")
    if packed.width > 4:
        raise InvalidRequest("tokens must be ids of the model's vocabulary, below 2**32")
    return packed.ids.astype(np.int64)


def end_tokens(given: Any) -> frozenset[int]:
    """Return the ids of an `eos_token_id`: one id, or a collection, array or tensor of ids.

    Raises:
        InvalidRequest: it is something else.
    """
    with suppress(TypeError):
        if not isinstance(given, (bool, str, bytes)):
            return frozenset(_ids_in(given))
    raise InvalidRequest(f"eos_token_id must be a token id or a collection of token ids, not {brief(given)}")


def _ids_in(given: Any) -> list[int]:
    try:
        return [index(given)]
    except TypeError:  # not an integer
        return [index(token) for token in given]
