"""Multi-turn conversations over two engines, under pressure in all pools, with preemptions and aborts at random."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

from support.engines.engine_process import EngineProcess
from support.engines.laboratory import BLOCK, Laboratory, prompt, slot_bytes

NUM_CONVERSATIONS = 64
NUM_TURNS = 3
NUM_NEW = 16
NEAR_TIE = 1e-3


def first_difference(one: dict[str, Any], other: dict[str, Any]) -> float | None:
    """The difference of the two tokens' logprobs where answers differ first; None: they are equal."""
    for at, (a, b) in enumerate(zip(one["tokens"], other["tokens"], strict=True)):
        if a != b:
            top = one["top"][at]
            return abs(top[str(a)] - top[str(b)]) if str(b) in top else 1.0
    return None


def talk(engines: list[EngineProcess], seed: int, *, aborts: bool) -> dict[tuple[int, int], dict[str, Any]]:
    """Hold all conversations, each turn on an engine at random; return the answers by conversation and turn.

    The user's words follow from the seed alone, and a turn's prompt from the words before it, not from the answers: so
    every run has the same prompts.
    """
    rng = random.Random(seed)
    words = random.Random(seed)
    shared = prompt(3 * BLOCK, seed=1000)
    texts = {number: shared + prompt(words.randrange(20, 200), seed=number) for number in range(NUM_CONVERSATIONS)}
    answers: dict[tuple[int, int], dict[str, Any]] = {}
    for turn in range(NUM_TURNS):
        order = [*texts]
        rng.shuffle(order)
        asked: list[tuple[int, Future[Any]]] = []
        for number in order:
            engine = rng.choice(engines)
            if aborts and rng.random() < 0.15:
                name = f"gone-{turn}-{number}"
                future = engine.submit(texts[number] + [5] * 40, 64, name=name)
                engine.send("abort_later", name=name, seconds=rng.random() * 0.5)
                asked.append((-1, future))
            asked.append((number, engine.submit(texts[number], NUM_NEW, logprobs=5)))
        for number, future in asked:
            answer = future.result(400)
            if number >= 0:
                answers[number, turn] = answer
        for number in texts:
            texts[number] = texts[number] + prompt(words.randrange(20, 120), seed=100 * turn + number)
    return answers


def count_differences(one: dict[Any, dict[str, Any]], other: dict[Any, dict[str, Any]]) -> tuple[int, float]:
    found = [each for key in one if (each := first_difference(one[key], other[key])) is not None]
    return len(found), max(found, default=0.0)


def test_conversations_over_two_engines(laboratory: Laboratory) -> None:
    model = laboratory.save_model("llama")
    cache = laboratory.start_cache(slot_bytes("llama"), num_tokens=180 * BLOCK)
    pressed = {"num_gpu_blocks_override": 48, "max_num_seqs": 16, "max_model_len": 40 * BLOCK}
    pair = [laboratory.start_engine(model, cache, **pressed) for _ in range(2)]
    shared = talk(pair, 1, aborts=True)
    laboratory.wait_until_free(cache)
    stats = laboratory.stats(cache)
    for engine in pair:
        assert "was about to get wrong KV" not in engine.log.read_text()
        engine.forget()  # vLLM refuses unless all its blocks are free
    metrics = [engine.ask("metrics") for engine in pair]
    preemptions = sum(each["vllm:num_preemptions"] for each in metrics)
    for engine in pair:
        engine.close()
    lone = laboratory.start_engine(model, None, max_num_seqs=16)
    one_by_one = laboratory.start_engine(model, None, max_num_seqs=3)
    expected = talk([lone], 1, aborts=False)
    other = talk([one_by_one], 1, aborts=False)

    noise, _ = count_differences(expected, other)
    number, largest = count_differences(expected, shared)
    print(
        f"{len(shared)} answers, {stats.tokens_reused} tokens reused, {stats.tokens_evicted} evicted, "
        f"{preemptions:.0f} preemptions, {number} answers differ (lone engines: {noise}), at most by {largest:.1e}"
    )
    assert stats.tokens_evicted > 0 and stats.tokens_reused > 0 and preemptions > 0
    assert number <= 2 * noise
    assert largest <= NEAR_TIE
