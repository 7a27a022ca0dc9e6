"""The demo's conversations on two vLLM engines: how many prompt tokens they compute with one cache, and without."""

from __future__ import annotations

import re

import pytest
from support.documents import README
from support.engines.engine_process import EngineProcess
from support.engines.laboratory import BLOCK, Laboratory, slot_bytes

from raydix.actors.demo.workload import VOCABULARY, Conversation, Workload, draw_conversations

LOAD = Workload(workers=2)
MODEL = {"vocab_size": VOCABULARY}


def hold(laboratory: Laboratory, engines: list[EngineProcess], cache: str | None) -> tuple[int, list[list[int]]]:
    """Answer each turn on the engine that the load draws; return the prompt tokens computed, and all answers."""
    drawn = draw_conversations(LOAD)
    texts = [conversation.system_prompt.tolist() for conversation in drawn]
    answers: list[list[int]] = []
    computed = 0

    def answer(number: int, conversation: Conversation, turn: int) -> None:
        nonlocal computed
        texts[number] += conversation.messages[turn].tolist()
        answered = engines[conversation.workers[turn]].answer(texts[number], LOAD.answer_len)
        computed += len(texts[number]) - answered["cached"]
        texts[number] += answered["tokens"]
        answers.append(answered["tokens"])
        if cache is not None:
            laboratory.wait_until_free(cache)  # the next turn may come to the other engine

    for turn in range(LOAD.turns):
        for number, conversation in enumerate(drawn):
            answer(number, conversation, turn)
    return computed, answers


@pytest.mark.figures
def test_two_engines_compute_fewer_prompt_tokens_with_one_cache(laboratory: Laboratory) -> None:
    """The engines' own caches hold all conversations: without Raydix, too, an engine computes no page twice."""
    model = laboratory.save_model("llama", **MODEL)
    cache = laboratory.start_cache(slot_bytes("llama", **MODEL), 1_000 * BLOCK)
    alone, sharing = ([laboratory.start_engine(model, name) for _ in range(2)] for name in (None, cache))

    without, answers = hold(laboratory, alone, None)
    shared, answers_of_sharing = hold(laboratory, sharing, cache)

    prompts = sum(
        LOAD.system_prompt_len + turn * LOAD.answer_len + (turn + 1) * LOAD.message_len for turn in range(LOAD.turns)
    )
    print(
        f"of {LOAD.conversations * prompts:,} prompt tokens, two engines compute {without:,} without, {shared:,} with"
    )
    assert answers_of_sharing == answers
    printed = re.search(
        r"two vLLM engines compute ([\d,]+) .*? with Raydix, ([\d,]+) without", " ".join(README.read_text().split())
    )
    assert printed and [int(count.replace(",", "")) for count in printed.groups()] == [shared, without]
