"""The demo's load: what is said in which conversation, and who answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

PAGE_SIZE = 16
VOCABULARY = 4096
MAX_POSITIONS = 32_768  # of the model


@dataclass(frozen=True)
class Workload:
    """How much there is to do. With seed 0 no token is chosen by less than 1e-4; rounding, which depends on what was
    reused, is below 1e-5.
    """

    conversations: int = 28
    turns: int = 4  # of each conversation
    workers: int = 3
    system_prompts: int = 3
    system_prompt_len: int = 1000  # tokens
    message_len: int = 48  # tokens that a user says in a turn
    answer_len: int = 16  # tokens
    pool_tokens: int = 7168
    seed: int = 0

    def __post_init__(self) -> None:
        longest = self.system_prompt_len + self.turns * (self.message_len + self.answer_len)
        if self.pool_tokens % PAGE_SIZE or self.pool_tokens < longest:
            raise ValueError(
                f"pool_tokens must be a multiple of {PAGE_SIZE}, and at least {longest} for one conversation"
            )
        if longest > MAX_POSITIONS:
            raise ValueError(f"a conversation grows to {longest} tokens, but the model takes {MAX_POSITIONS}")
        if self.turns == 1 and all(each.is_first for each in draw_conversations(self)):
            raise ValueError(
                "no prompt shares a prefix with another: each conversation has one turn and a system prompt of its own"
            )

    def is_default(self) -> bool:
        """Whether it is the load for which the demo knows how much sharing must save; any seed will do."""
        return replace(self, seed=0) == Workload()


@dataclass(frozen=True)
class Conversation:
    """What a user will say, and who will answer: drawn beforehand, so that every run is the same."""

    system_prompt: NDArray[np.int64]
    is_first: bool  # of those with this system prompt
    messages: NDArray[np.int64]  # [turns, message_len]
    workers: NDArray[np.int64]  # [turns], which one


def draw_conversations(load: Workload) -> list[Conversation]:
    """The conversations, the same for equal workloads."""
    rng = np.random.default_rng(load.seed)
    system_prompts = rng.integers(0, VOCABULARY, (load.system_prompts, load.system_prompt_len))
    popularity = 1 / np.arange(1, load.system_prompts + 1)  # Zipf's law
    chosen = rng.choice(load.system_prompts, load.conversations, p=popularity / popularity.sum())
    return [
        Conversation(
            system_prompt=system_prompts[which],
            is_first=which not in chosen[:index],
            messages=rng.integers(0, VOCABULARY, (load.turns, load.message_len)),
            workers=rng.integers(0, load.workers, load.turns),
        )
        for index, which in enumerate(chosen)
    ]


def wanted_slots(conversations: Sequence[Conversation], answer_len: int) -> int:
    """Slots that would keep every conversation to its end, with each system prompt once."""
    shared = sum(len(each.system_prompt) for each in conversations if each.is_first)
    return shared + sum(each.messages.size + len(each.messages) * answer_len for each in conversations)
