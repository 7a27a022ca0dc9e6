"""`LastDay`: a sum over the last 24 hours."""

import random

from raydix.actors.tiers.disk.last_day import LastDay

HOUR_S = 3600


def test_numbers_of_more_than_a_day_ago_are_forgotten() -> None:
    now = [1000.0]
    day = LastDay(lambda: now[0])
    assert day.total == 0
    day.add(5)
    now[0] += HOUR_S
    day.add(7)

    assert day.total == 12
    now[0] += 22.5 * HOUR_S
    assert day.total == 12
    now[0] += HOUR_S
    assert day.total == 7
    now[0] += HOUR_S
    assert day.total == 0


def test_the_sum_is_right_to_a_quarter_of_an_hour_and_takes_bounded_memory() -> None:
    rng, now = random.Random(3), [0.0]
    day, added = LastDay(lambda: now[0]), list[tuple[float, int]]()
    for _ in range(3000):
        now[0] += rng.expovariate(1 / 300)
        number = rng.randrange(100)
        day.add(number)
        added.append((now[0], number))

        low, high = (sum(num for at, num in added if at > now[0] - age_s) for age_s in (23.75 * HOUR_S, 24 * HOUR_S))
        assert low <= day.total <= high
    assert len(day._steps) <= 96
