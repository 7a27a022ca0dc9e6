"""Processes that are killed or stopped under load: right answers, no step that stands still, no slot that is lost."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future
from typing import Any

from support.engines.engine_process import EngineProcess
from support.engines.laboratory import BLOCK, Laboratory, prompt, slot_bytes
from support.waiting import wait_until

NUM_NEW = 6
STALL_S = 3.0  # load_timeout_ms and a second
BUSY = 3.0  # other programs may use the machine: the figures are printed, and held to a multiple


def start_pair(laboratory: Laboratory, **cache: Any) -> tuple[str, EngineProcess, EngineProcess]:
    name = laboratory.start_cache(slot_bytes("llama"), **cache)
    model = laboratory.save_model("llama")
    settings = {"lookup_timeout_ms": 500.0, "load_timeout_ms": 2000.0}
    one, other = (laboratory.start_engine(model, name, settings=settings) for _ in range(2))
    one.answer(prompt(70, seed=99), 2)
    other.answer(prompt(70, seed=98), 2)
    return name, one, other


def expected_answers(laboratory: Laboratory, prompts: list[list[int]]) -> list[list[int]]:
    engine = laboratory.start_engine(laboratory.save_model("llama"), None, enable_prefix_caching=False)
    answers = [engine.answer(each, NUM_NEW)["tokens"] for each in prompts]
    engine.close()
    return answers


def submit_all(engine: EngineProcess, prompts: list[list[int]]) -> list[Future[Any]]:
    return [engine.submit(each, NUM_NEW) for each in prompts]


def wait_until_it_saves(laboratory: Laboratory, cache: str, engine: EngineProcess) -> None:
    """Send requests until one holds private slots, which takes a few polls: a save is short."""
    for round_number in range(200):
        asked = submit_all(engine, [prompt(1000, seed=1000 + 10 * round_number + number) for number in range(4)])
        while not all(each.done() for each in asked):
            if laboratory.stats(cache).private_slots:
                return
    raise AssertionError("no save was seen")


def longest_gap(answer: dict[str, Any]) -> float:
    return max(b - a for a, b in zip(answer["times"], answer["times"][1:], strict=False))


def test_a_killed_engine_holds_nothing_and_the_other_goes_on(laboratory: Laboratory) -> None:
    cache, victim, other = start_pair(laboratory)
    prompts = [prompt(1000, seed=seed) for seed in range(6)]
    wait_until_it_saves(laboratory, cache, victim)

    victim.kill()
    killed = time.monotonic()
    wait_until(lambda: laboratory.stats(cache).open_leases == 0)
    free_after = time.monotonic() - killed
    answers = [other.answer(each, NUM_NEW)["tokens"] for each in prompts]

    print(f"slots free after {free_after:.2f} s")
    assert free_after < 5 * BUSY
    assert laboratory.stats(cache).dead_sessions >= 2
    assert answers == expected_answers(laboratory, prompts)
    laboratory.wait_until_free(cache)


def test_a_stopped_worker_of_a_dead_scheduler_overwrites_nothing(laboratory: Laboratory) -> None:
    cache, victim, other = start_pair(laboratory, num_tokens=150 * BLOCK)
    prompts = [prompt(1000, seed=seed) for seed in range(8)]
    (worker,), (core,) = victim.pids("Worker"), victim.pids("EngineCore")
    wait_until_it_saves(laboratory, cache, victim)
    os.kill(worker, signal.SIGSTOP)
    os.kill(core, signal.SIGKILL)

    computed = [other.answer(each, NUM_NEW)["tokens"] for each in prompts]
    os.kill(worker, signal.SIGCONT)
    wait_until(lambda: laboratory.stats(cache).open_leases == 0)
    other.forget()
    loaded = [other.answer(each, NUM_NEW)["tokens"] for each in prompts]

    assert loaded == computed == expected_answers(laboratory, prompts)
    assert "was about to get wrong KV" not in other.log.read_text()
    laboratory.wait_until_free(cache)


def test_a_killed_cache_costs_hits_alone(laboratory: Laboratory) -> None:
    cache, one, other = start_pair(laboratory)
    prompts = [prompt(600, seed=seed) for seed in range(6)]
    expected = expected_answers(laboratory, prompts)
    for each in prompts:
        one.answer(each, 1)
    running = [engine.submit(prompt(40, seed=7), 400) for engine in (one, other)]
    pid = laboratory.pid_of(cache)
    asked = [*submit_all(other, prompts), *submit_all(one, prompts)]
    os.kill(pid, signal.SIGKILL)
    answers = [each.result(200)["tokens"] for each in asked]

    assert answers == expected + expected
    gaps = [longest_gap(each.result(200)) for each in running]
    wait_until(lambda: laboratory.pid_of(cache) not in (0, pid))
    began = time.monotonic()
    wait_until(lambda: hits_again(one, other, prompts[0]))
    print(
        f"longest gaps {gaps[0]:.2f} and {gaps[1]:.2f} s; hits again {time.monotonic() - began:.1f} s after its answer"
    )
    assert max(gaps) < STALL_S * BUSY
    laboratory.wait_until_free(cache)


def hits_again(one: EngineProcess, other: EngineProcess, tokens: list[int]) -> bool:
    for engine in (one, other):
        engine.forget()
    one.answer(tokens, 1)
    return bool(other.answer(tokens, 1)["cached"] > 0)


def test_a_stopped_cache_stops_no_engine(laboratory: Laboratory) -> None:
    cache, one, other = start_pair(laboratory)
    prompts = [prompt(600, seed=seed) for seed in range(6)]
    expected = expected_answers(laboratory, prompts)
    for each in prompts:
        one.answer(each, 1)
    running = [engine.submit(prompt(40, seed=7), 400) for engine in (one, other)]
    pid = laboratory.pid_of(cache)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    asked = [*submit_all(other, prompts), *submit_all(one, prompts)]
    answers = [each.result(200)["tokens"] for each in asked]
    time.sleep(max(0.0, began + 10 - time.monotonic()))
    os.kill(pid, signal.SIGCONT)

    assert answers == expected + expected
    gaps = [longest_gap(each.result(200)) for each in running]
    print(f"longest gaps {gaps[0]:.2f} and {gaps[1]:.2f} s")
    assert max(gaps) < STALL_S * BUSY
    wait_until(lambda: hits_again(one, other, prompts[0]))
    laboratory.wait_until_free(cache)


def test_a_full_pool_costs_hits_alone(laboratory: Laboratory) -> None:
    cache, one, other = start_pair(laboratory, num_tokens=12 * BLOCK)
    prompts = [prompt(600, seed=seed) for seed in range(4)]
    asked = [*submit_all(one, prompts), *submit_all(other, prompts)]
    answers = [each.result(200)["tokens"] for each in asked]

    assert answers == expected_answers(laboratory, prompts) * 2
    assert sum(engine.ask("metrics").get("vllm:raydix_saves_refused", 0) for engine in (one, other)) > 0
    laboratory.wait_until_free(cache)
