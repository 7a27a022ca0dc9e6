"""The moving mean of an engine's prefill rate."""

from __future__ import annotations

import pytest

from raydix.actors.engines.prefill_rate import PrefillRate


def test_steps_with_few_prompt_tokens_do_not_count() -> None:
    rate = PrefillRate()
    for number in range(10):
        rate.begin_step(255, float(number))
    rate.end_step(10.0)

    assert rate.tokens_per_s is None


def test_a_step_ends_when_it_is_reported_or_when_the_next_begins() -> None:
    rate = PrefillRate()
    rate.begin_step(1000, 0.0)
    rate.end_step(2.0)
    rate.end_step(50.0)  # idle
    assert rate.tokens_per_s == 500

    rate.begin_step(600, 60.0)
    rate.begin_step(0, 62.0)
    assert rate.tokens_per_s == pytest.approx((0.8 * 1000 + 600) / (0.8 * 2 + 2))


def test_the_latest_steps_weigh_most() -> None:
    rate = PrefillRate()
    for number in range(60):
        rate.begin_step(256 if number < 30 else 2560, float(number))
    rate.end_step(60.0)

    assert rate.tokens_per_s == pytest.approx(2560, rel=0.01)
