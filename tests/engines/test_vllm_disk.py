"""A disk tier below the pool: KV that has left the pool comes back from it, also after the node was started again."""

from __future__ import annotations

from collections.abc import Sequence

from support.engines.engine_process import EngineProcess
from support.engines.laboratory import BLOCK, Laboratory, prompt, slot_bytes

NUM_NEW = 8
LENGTH = 600
NUM_CONVERSATIONS, NUM_TURNS, ADDED = 6, 4, 2 * BLOCK
KEPT = 0.8  # of the hit rate, after the restart


def answers_without_a_cache(laboratory: Laboratory, texts: Sequence[list[int]]) -> list[list[int]]:
    engine = laboratory.start_engine(laboratory.save_model("llama"), None, enable_prefix_caching=False)
    answers = [engine.answer(text, NUM_NEW)["tokens"] for text in texts]
    engine.close()
    return answers


def test_the_second_round_loads_from_the_disk(laboratory: Laboratory) -> None:
    """The pool has room for two of the prompts. What leaves it is written first."""
    cache = laboratory.start_cache(
        slot_bytes("llama"), num_tokens=60 * BLOCK, num_slots=400 * BLOCK, admit="all", reserve=0.9
    )
    engine = laboratory.start_engine(laboratory.save_model("llama"), cache)
    texts = [prompt(LENGTH, seed=seed) for seed in range(6)]

    rounds = []
    for _ in range(2):
        answers = []
        for text in texts:
            answers.append(engine.answer(text, NUM_NEW))
            laboratory.wait_until_kept(cache)
        rounds.append(answers)
        engine.forget()

    cached = [[answer["cached"] for answer in answers] for answers in rounds]
    metrics = engine.ask("metrics")
    engine.close()
    print(f"cached tokens: {cached}; look-ups with a load: {metrics['vllm:raydix_tier_loads']:.0f}")
    assert laboratory.stats(cache).tokens_evicted > 0
    assert cached == [[0] * 6, [LENGTH - LENGTH % BLOCK] * 6]
    assert metrics["vllm:raydix_tier_loads"] >= 4
    assert metrics.get("vllm:raydix_tier_loads_late", 0) == metrics.get("vllm:raydix_load_failures", 0) == 0
    expected = answers_without_a_cache(laboratory, texts)
    assert [[answer["tokens"] for answer in answers] for answers in rounds] == [expected, expected]


def hold_turn(
    laboratory: Laboratory, cache: str, engines: Sequence[EngineProcess], texts: Sequence[list[int]], turn: int
) -> tuple[float, list[list[int]]]:
    """Answer all conversations, each on the other engine than in the turn before; return the hit rate and answers."""
    asked = [engines[(number + turn) % 2].submit(text, NUM_NEW) for number, text in enumerate(texts)]
    answers = [future.result(300) for future in asked]
    laboratory.wait_until_kept(cache)
    rate = sum(answer["cached"] for answer in answers) / sum(map(len, texts))
    return rate, [answer["tokens"] for answer in answers]


def test_two_engines_hit_after_the_whole_node_was_started_again(laboratory: Laboratory) -> None:
    """No page has left the pool when the cache is killed."""
    cache = laboratory.start_cache(slot_bytes("llama"), num_tokens=400 * BLOCK, num_slots=400 * BLOCK)
    model = laboratory.save_model("llama")
    engines = [laboratory.start_engine(model, cache) for _ in range(2)]
    talks = [prompt(LENGTH + (NUM_TURNS + 1) * ADDED, seed=seed) for seed in range(NUM_CONVERSATIONS)]
    turns = [[talk[: LENGTH + turn * ADDED] for talk in talks] for turn in range(NUM_TURNS + 1)]

    rates = []
    for turn, texts in enumerate(turns[:-1]):
        rates.append(hold_turn(laboratory, cache, engines, texts, turn)[0])
    assert laboratory.stats(cache).tokens_evicted == 0
    for engine in engines:
        engine.kill()
    laboratory.kill_cache(cache)
    engines = [laboratory.start_engine(model, cache) for _ in range(2)]
    rate, answers = hold_turn(laboratory, cache, engines, turns[-1], NUM_TURNS)

    loads = sum(engine.ask("metrics")["vllm:raydix_tier_loads"] for engine in engines)
    for engine in engines:
        assert "was about to get wrong KV" not in engine.log.read_text()
        engine.close()
    print(f"hit rates {', '.join(f'{each:.3f}' for each in rates)}, {rate:.3f} after the restart; {loads:.0f} loads")
    assert rates[0] == 0 < rates[-1]
    assert rate >= KEPT * rates[-1]
    assert loads == NUM_CONVERSATIONS
    assert answers == answers_without_a_cache(laboratory, turns[-1])


def test_ranks_load_what_the_disks_of_both_hold(laboratory: Laboratory) -> None:
    layers = slot_bytes("llama", ranks=2, num_key_value_heads=2)
    names = [laboratory.start_cache(layers, name=f"kv-disk-tp{rank}", num_slots=100 * BLOCK) for rank in range(2)]
    model = laboratory.save_model("llama", num_key_value_heads=2)
    engine = laboratory.start_engine(model, "kv-disk", tensor_parallel_size=2)
    text, answers = prompt(300), []
    for end in (160, 160, 300, 300):
        answers.append(engine.answer(text[:end], 1))
        for name in names:
            laboratory.wait_until_kept(name)
    for name in names:
        laboratory.client(name).evict(100 * BLOCK)
        assert laboratory.stats(name).tree_slots == 0
    laboratory.client(names[1]).evict(1, tier="disk")  # the part behind the first 160 tokens

    for cached in (160, 288):  # then the pools have all
        engine.forget()
        answer = engine.answer(text, 1)
        for name in names:
            laboratory.wait_until_free(name)
        assert (answer["cached"], answer["tokens"]) == (cached, answers[-1]["tokens"])
    assert engine.ask("metrics")["vllm:raydix_tier_loads"] == 1
