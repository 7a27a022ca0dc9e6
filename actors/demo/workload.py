"""The demo's load: the messages of each conversation, and the worker of each turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from raydix.schemas import DiskConfig

PAGE_SIZE = 16
VOCABULARY = 4096
MAX_POSITIONS = 32_768  # the model's limit
LONG_LOAD = 512  # tokens: the figures of loads are of turns that load so many, or more


@dataclass(frozen=True)
class Workload:
    """The size of the load.

    With seed 0 the best token always leads by at least 1e-4. Rounding varies with the reused length by less than 1e-5.
    """

    conversations: int = 28
    turns: int = 4  # messages of the user in each conversation
    workers: int = 3
    system_prompts: int = 3
    system_prompt_len: int = 1000  # tokens
    message_len: int = 48  # tokens of a user's message
    answer_len: int = 16  # tokens
    pool_tokens: int = 7168
    seed: int = 0
    host_tokens: int = 0  # slots of the tier in host memory; 0: there is none
    disk: DiskConfig | None = None  # the tier on a local disk

    def __post_init__(self) -> None:
        longest = self.system_prompt_len + self.turns * (self.message_len + self.answer_len)
        if self.pool_tokens % PAGE_SIZE or self.pool_tokens < longest:
            raise ValueError(
                f"pool_tokens must be a multiple of {PAGE_SIZE}, and at least {longest} for one conversation"
            )
        if self.host_tokens % PAGE_SIZE:
            raise ValueError(f"host_tokens must be a multiple of {PAGE_SIZE}")
        if longest > MAX_POSITIONS:
            raise ValueError(f"a conversation grows to {longest} tokens, but the model takes {MAX_POSITIONS}")
        if self.turns == 1 and all(conversation.is_first for conversation in draw_conversations(self)):
            raise ValueError("no prompt shares a prefix with another: set more turns, or fewer system prompts")

    def is_default(self) -> bool:
        """Whether it is the default load with any seed; the demo checks the savings of that load."""
        return replace(self, seed=0) == Workload()


@dataclass(frozen=True)
class Conversation:
    """A user's messages and the workers that answer, drawn in advance so that every run is the same."""

    system_prompt: NDArray[np.int64]
    is_first: bool  # the first with this system prompt
    messages: NDArray[np.int64]  # [turns, message_len]
    workers: NDArray[np.int64]  # [turns], index of the worker


def draw_conversations(load: Workload) -> list[Conversation]:
    """Return the conversations; equal workloads give equal conversations."""
    import numpy as np  # not for the names and defaults of the command's options

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
    """Return the number of slots that would keep every conversation to its end, each system prompt once."""
    shared = sum(len(conversation.system_prompt) for conversation in conversations if conversation.is_first)
    return shared + sum(
        conversation.messages.size + len(conversation.messages) * answer_len for conversation in conversations
    )
