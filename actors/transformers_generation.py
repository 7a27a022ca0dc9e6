"""`Generation`, what a worker answers, and `GreedyDecoding`, how it comes about."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from raydix.actors.call_arguments import positive
from raydix.schemas import InvalidRequest, Message, TokenIds
from raydix.schemas.shown import brief

if TYPE_CHECKING:
    from raydix.actors.transformers_model import Step


class Generation(Message):
    """What a worker made of a prompt."""

    token_ids: tuple[int, ...] = Field(description="generated ones, the end token included")
    prefix_len: int = Field(description="leading tokens of the prompt whose KV came from the cache")
    num_computed: int = Field(description="tokens run through the model: the rest, and all generated but the last")
    time_to_first_token_s: float = Field(description="from the call on, waiting for room included")
    total_s: float = Field(description="from the call to the answer, publishing included")
    logits: torch.Tensor | None = Field(
        default=None,
        description="if asked for: [num_computed, vocabulary], on the CPU, in the model's dtype; row i is what the "
        "model says after token prefix_len + i",
    )


class GreedyDecoding:
    """One request as it is decoded: which tokens are known, and which of them have their KV.

    Attributes:
        num_prompt: tokens of the prompt.
        keep_logits: whether the logits of every computed token are kept.
    """

    def __init__(
        self, tokens: Any, max_new_tokens: int, eos_token_id: int | Collection[int] | None, keep_logits: bool
    ) -> None:
        self._started = time.perf_counter()
        self._tokens = _prompt(tokens)  # then what is generated, and room for more of it
        self.num_prompt = len(self._tokens)
        self.keep_logits = keep_logits
        self._max_len = self.num_prompt + positive(max_new_tokens, "max_new_tokens")
        self._num_known = self.num_prompt
        self._num_computed = self._prefix_len = 0  # leading tokens that have their KV; of those, reused ones
        self._ends = _end_tokens(eos_token_id)
        self._ended = False
        self._first_token_at = 0.0
        self._logits: list[torch.Tensor] = []

    @property
    def prompt(self) -> NDArray[np.int64]:
        """The prompt's ids."""
        return self._tokens[: self.num_prompt]

    @property
    def max_computed(self) -> int:
        """Tokens, from the first, that need a slot at most: all but the last one generated."""
        return self._max_len - 1

    @property
    def computed(self) -> NDArray[np.int64]:
        """The ids, from the first, of the tokens that have their KV."""
        return self._tokens[: self._num_computed]

    def pending(self, stop: int | None = None) -> NDArray[np.int64]:
        """The ids to run next: those known whose KV is missing, or of those the ones before `stop`."""
        return self._tokens[self._num_computed : self._num_known if stop is None else stop]

    @property
    def done(self) -> bool:
        """Whether all is generated."""
        return self._ended or self._num_known == self._max_len

    def reuse(self, prefix_len: int) -> None:
        """The KV of so many leading tokens is there."""
        self._num_computed = self._prefix_len = prefix_len

    def note(self, step: Step, stop: int | None = None) -> None:
        """`pending(stop)` has been run, with this outcome."""
        if step.logits is not None:
            self._logits.append(step.logits)
        if stop is not None and stop < self._num_known:
            self._num_computed = stop
            return
        if self._num_known == self.num_prompt:
            self._first_token_at = time.perf_counter()
        self._num_computed = self._num_known
        if self._num_known == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty_like(self._tokens)))
        self._tokens[self._num_known] = step.next_token
        self._num_known += 1
        self._ended = step.next_token in self._ends

    def result(self) -> Generation:
        """The answer, as of now."""
        return Generation(
            token_ids=tuple(self._tokens[self.num_prompt : self._num_known].tolist()),
            prefix_len=self._prefix_len,
            num_computed=self._num_computed - self._prefix_len,
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
        raise InvalidRequest("tokens: at least one token id is needed")
    if packed.width > 4:
        raise InvalidRequest("tokens: an id of 2**32 or more is in no model's vocabulary")
    return packed.ids.astype(np.int64)


def _end_tokens(given: Any) -> frozenset[int]:
    """What `eos_token_id` names: none, one, or those in a collection, array or tensor."""
    if given is None:
        return frozenset()
    with suppress(TypeError):
        if not isinstance(given, (bool, str, bytes)):
            return frozenset(_ids_in(given))
    raise InvalidRequest(f"eos_token_id must be a token id or a collection of some, not {brief(given)}")


def _ids_in(given: Any) -> list[int]:
    try:
        return [index(given)]
    except TypeError:  # no integer itself
        return [index(each) for each in given]
