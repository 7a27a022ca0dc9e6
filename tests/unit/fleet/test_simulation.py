"""A simulated fleet: queues computed by hand, sums that must hold, and routers that do what their names say."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from raydix.actors.observe.trace import TracedRequest
from raydix.actors.replay.arrivals import Arrivals
from raydix.actors.replay.fleet_simulation import OVERHEAD_S, FleetOutcome, FleetSetup, RouterResult, simulate
from raydix.actors.replay.policies import ROUTERS
from raydix.cache_core import Applied, PageIndex


def traced(time_ms: float, length: int, ids: list[int]) -> TracedRequest:
    return TracedRequest(timestamp=time_ms, input_length=length, output_length=1, hash_ids=ids)


def sessions(seed: int = 0, num_requests: int = 400) -> Arrivals:
    """Conversations of up to 12 turns, each a block longer than the one before."""
    rng, turns, trace = Random(seed), dict[int, int](), []
    for number in range(num_requests):
        session = rng.randrange(40)
        turns[session] = turns.get(session, 0) % 12 + 1
        ids = [1000 * session + block for block in range(turns[session] + 1)]
        trace.append(traced(1000 * number, 512 * turns[session] + rng.randint(1, 512), ids))
    return Arrivals(trace)


def run(arrivals: Arrivals, router: str, seed: int = 0, **options: Any) -> FleetOutcome:
    setup = FleetSetup(router, **{"num_caches": 4, "capacity": 60, **options})
    return simulate(arrivals, setup, seed)


def test_a_queue_is_served_in_order_and_later_prompts_hit_earlier_ones() -> None:
    arrivals = Arrivals([traced(0, 1100, [0, 1, 2]), traced(1000, 1100, [0, 1, 3]), traced(2000, 1536, [0, 5, 6])])
    first, second, third = arrivals.times_s(0)[0]

    outcome = run(arrivals, "round_robin", num_caches=1, capacity=4, prefill_rate=100)

    ends = [first + OVERHEAD_S + 11]
    ends.append(ends[-1] + OVERHEAD_S + (1100 - 1024) / 100)
    ends.append(ends[-1] + OVERHEAD_S + (1536 - 512) / 100)
    assert outcome.hit_tokens.tolist() == [0, 1024, 512]
    assert outcome.first_token_s == pytest.approx(np.subtract(ends, [first, second, third]))
    assert outcome.wait_s == pytest.approx(np.subtract([first, *ends[:2]], [first, second, third]))
    assert (outcome.max_queue, outcome.prefill_rate) == (3, 100)
    assert outcome.busy_s.tolist() == pytest.approx([ends[-1] - first])


def test_the_rate_makes_the_prompts_need_the_load() -> None:
    arrivals = sessions()

    outcome = run(arrivals, "random", load=0.5)

    assert arrivals.tokens / outcome.prefill_rate / outcome.span_s / 4 == pytest.approx(0.5)


@pytest.mark.parametrize("num_routers", [1, 3])
@pytest.mark.parametrize("router", ROUTERS)
def test_sums_hold_for_every_router(router: str, num_routers: int) -> None:
    arrivals = sessions()

    outcome = run(arrivals, router, num_routers=num_routers)

    service = OVERHEAD_S + (outcome.tokens - outcome.hit_tokens) / outcome.prefill_rate
    assert outcome.tokens.sum() == arrivals.tokens
    assert (outcome.wait_s >= 0).all() and (outcome.hit_tokens <= outcome.tokens).all()
    assert outcome.first_token_s == pytest.approx(outcome.wait_s + service)
    assert outcome.busy_s.sum() == pytest.approx(service.sum())
    again = run(arrivals, router, num_routers=num_routers)
    assert again.figures() == outcome.figures()
    assert run(arrivals, router, seed=1, num_routers=num_routers).figures() != outcome.figures()


def test_the_cost_finds_prefixes_and_the_least_loaded_waits_less_than_a_random_one() -> None:
    arrivals = sessions(num_requests=1500)
    by_router = {router: run(arrivals, router, capacity=120).figures() for router in ROUTERS}

    hits = {router: figures["hit_rate_percent"] for router, figures in by_router.items()}
    waits = {router: figures["wait_mean_s"] for router, figures in by_router.items()}
    assert hits["ttft"] > hits["random"] + 20
    assert abs(hits["ttft"] - hits["shared"]) < 10
    assert waits["least"] < waits["random"]


def test_an_index_that_forgets_costs_hits() -> None:
    class Forgets(PageIndex):
        def apply(self, *batch: Any) -> Applied:
            return Applied.DONE  # the routers know promises only

    arrivals, setup = sessions(num_requests=1500), FleetSetup("ttft", num_caches=4, capacity=120)
    right = simulate(arrivals, setup, 0).figures()["hit_rate_percent"]

    assert simulate(arrivals, setup, 0, make_index=Forgets).figures()["hit_rate_percent"] < right - 10


def test_a_large_fleet_finds_prefixes_among_few_candidates() -> None:
    arrivals = sessions(num_requests=1500)

    few, shared = (run(arrivals, router, num_caches=40).figures() for router in ("ttft", "shared"))

    assert few["hit_rate_percent"] > 0.7 * shared["hit_rate_percent"]


def test_results_have_the_median_of_all_seeds() -> None:
    arrivals, result = sessions(), RouterResult("random")
    outcomes = [run(arrivals, "random", seed) for seed in range(3)]
    for outcome in outcomes:
        result.add(outcome)

    rates = [outcome.figures()["hit_rate_percent"] for outcome in outcomes]
    assert [figures["hit_rate_percent"] for figures in result.by_seed] == rates
    assert [figures["seed"] for figures in result.by_seed] == [0, 1, 2]
    assert result.medians()["hit_rate_percent"] == sorted(rates)[1]
    assert result.first_token_s[50] == pytest.approx(np.median(outcomes[0].first_token_s))


def test_progress_reaches_the_number_of_requests() -> None:
    seen: list[int] = []
    simulate(sessions(), FleetSetup("random", num_caches=2, capacity=9), 0, progress=seen.append)

    assert seen == [0, 256, 400]
