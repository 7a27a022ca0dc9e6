"""The knowledge of simulated routers over time: events, promises and pending tokens, late and on time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from raydix.actors.replay.router_view import Routed, RouterView
from raydix.cache_core import PageIndex

PAGES = [10, 11, 12]


def view(num_routers: int = 1, **options: Any) -> RouterView:
    return RouterView([PageIndex() for _ in range(num_routers)], 3, 3, **{"delay_s": 1.0, "ttl_s": 5.0, **options})


def known(view: RouterView, now_s: float, router: int = 0, pages: Sequence[int] = PAGES) -> dict[int, int]:
    """The pages of a prompt that a router expects, by cache."""
    view.advance(now_s)
    view.index(router).check_invariants()
    runs = view.index(router).prefix_runs(np.array(pages, np.int64))
    return {cache: expected for cache, _, expected in runs}


def routed_to(cache: int, uncached: float, pages: Sequence[int] = PAGES) -> Routed:
    return Routed(0, cache, cache, uncached, np.array(pages, np.int64))


def test_a_promise_holds_until_the_event_arrives() -> None:
    one = view()
    routed = routed_to(1, 700.0)

    assert known(one, 0) == {}
    one.route(0, routed)
    assert (known(one, 0), one.pending(0)) == ({1: 3}, [0, 700, 0])
    one.finish(2, routed, PAGES[:2], [])
    assert (known(one, 2.9), one.pending(0)) == ({1: 3}, [0, 0, 0])
    assert known(one, 3) == {1: 2}  # the cache has stored only two of the pages
    assert known(one, 9) == {1: 2}


def test_a_promise_ends_after_its_time_and_its_tokens_stay_pending() -> None:
    one = view()
    one.route(0, routed_to(1, 700.0))

    assert known(one, 4.9) == {1: 3}
    assert (known(one, 5), one.pending(0)) == ({}, [0, 700, 0])


def test_of_two_promises_one_remains() -> None:
    one = view()
    first = routed_to(1, 700.0)
    one.route(0, first)
    one.route(1, routed_to(1, 0.0, PAGES[:2]))
    one.finish(2, first, [], [])

    assert (known(one, 3), known(one, 6)) == ({1: 2}, {})


def test_without_promises_only_events_count() -> None:
    one = view(ttl_s=0)
    routed = routed_to(2, 9.0)
    one.route(0, routed)
    assert known(one, 0.5) == {}
    one.finish(1, routed, PAGES, [])

    assert (known(one, 1.9), known(one, 2)) == ({}, {2: 3})


def test_other_routers_learn_everything_late() -> None:
    two = view(num_routers=2)
    routed = routed_to(1, 700.0)
    two.route(0, routed)

    assert (known(two, 0.9, 0), known(two, 0.9, 1)) == ({1: 3}, {})
    assert (two.pending(0), two.pending(1)) == ([0, 700, 0], [0, 0, 0])
    assert (known(two, 1, 0), known(two, 1, 1)) == ({1: 3}, {1: 3})
    assert two.pending(0) == two.pending(1) == [0, 700, 0]
    two.finish(2, routed, PAGES, [])
    assert (known(two, 2.5, 1), two.pending(0), two.pending(1)) == ({1: 3}, [0, 0, 0], [0, 700, 0])
    assert (known(two, 3, 1), two.pending(0), two.pending(1)) == ({1: 3}, [0, 0, 0], [0, 0, 0])


def test_promises_that_others_know_end_with_their_time_or_their_event() -> None:
    two = view(num_routers=2)
    two.route(0, routed_to(1, 700.0))
    two.route(0, second := routed_to(2, 0.0))
    two.finish(2, second, PAGES[:1], [])

    assert known(two, 2.9, 0) == known(two, 2.9, 1) == {1: 3, 2: 3}
    assert known(two, 3, 0) == known(two, 3, 1) == {1: 3, 2: 1}
    assert known(two, 5, 0) == known(two, 5, 1) == {2: 1}


def test_a_router_s_own_promise_ends_before_others_learn_of_it() -> None:
    two = view(num_routers=2, delay_s=7.0)
    two.route(0, routed_to(1, 700.0))

    assert (known(two, 0, 0, [*PAGES, 13]), known(two, 0, 0, PAGES[:1]), known(two, 0, 0, [99])) == ({1: 3}, {1: 1}, {})
    assert (known(two, 5, 0), known(two, 8, 0), known(two, 8, 1)) == ({}, {}, {})


def test_stored_pages_of_every_cache_go_as_they_are_removed() -> None:
    two = view(num_routers=2, ttl_s=0)
    for cache in (0, 2):
        two.finish(0, routed_to(cache, 0.0), PAGES, [])
    two.finish(1, routed_to(2, 0.0, [7]), [7], PAGES[1:])

    for router in (0, 1):
        assert known(two, 1, router) == {0: 3, 2: 3}
    for router in (0, 1):
        assert (known(two, 2, router), known(two, 2, router, [7])) == ({0: 3, 2: 1}, {2: 1})
