"""`RecencyQueue.in_order`: the order in which items would be popped."""

from random import Random

import pytest

from raydix.cache_core.eviction.recency_queue import RecencyQueue


@pytest.mark.parametrize("seed", range(5))
def test_items_are_named_in_the_order_in_which_they_would_go(seed: int) -> None:
    rng = Random(seed)
    uses: dict[str, int] = {}
    queue: RecencyQueue[str] = RecencyQueue(uses.__getitem__)
    for number in range(300):
        item = f"item {rng.randrange(40)}"
        if rng.random() < 0.3:
            queue.discard(item)
            continue
        if item not in uses or rng.random() < 0.6:
            uses[item] = number
        queue.push(item)
    queue.check_invariants()

    named = list(queue.in_order())

    assert len(named) == len(queue) > 10
    assert named == [queue.pop() for _ in named]
