"""Engines that get new weights: a reset joins the cache's weights or detaches the engine; none reads KV of others.

The seed of a toy engine stands for its weights: the engine counts each token of KV of another seed as wrong.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.engines.toy_caches import ToyCaches
from support.engines.toy_engine import ToyEngine, prompts
from support.more import more
from support.waiting import wait_until

from raydix.actors.engines.weights_state import WeightsState

MakeCaches = Callable[..., ToyCaches]
HASTY: dict[str, Any] = {"reconnect_s": 0.02}


@pytest.fixture
def make_caches() -> Iterator[MakeCaches]:
    """Makes caches. After the test nothing is open in them, and no engine has seen KV of other weights."""
    made: list[ToyCaches] = []

    def make(*args: Any, **options: Any) -> ToyCaches:
        made.append(ToyCaches(*args, **options))
        return made[-1]

    yield make
    for caches in made:
        for engine in caches.engines:
            assert engine.num_wrong == 0
            engine.run_all()
            assert len(engine.free) == len(set(engine.free)) == engine.kv[0][0].shape[0] - 1
        for rank, cache in enumerate(caches.caches):
            wait_until(lambda caches=caches, rank=rank: caches.stats(rank).open_leases == 0)  # type: ignore[misc]
            caches.loop.run(cache.check_invariants())
        caches.close()


def set_weights(caches: ToyCaches, label: str) -> None:
    for cache in caches.caches:
        caches.loop.run(cache.set_weights(label))


def settle(*engines: ToyEngine) -> None:
    """Step until the engines' latest resets are carried out, and the schedulers have the reports."""
    for engine in engines:
        wait_until(lambda engine=engine: engine.step() or engine.is_settled)  # type: ignore[misc]
        engine.step()
        engine.step()


def reset(*engines: ToyEngine, seed: int | None = None) -> None:
    for engine in engines:
        engine.reset(seed)
    settle(*engines)


def share(one: ToyEngine, other: ToyEngine, seed: int = 0) -> bool:
    """Whether the other engine hits what one computes now."""
    (prompt,) = prompts(1, 96, seed=1000 + seed)
    one.run(prompt)
    return other.run(prompt).num_hit == 96


def detached(engine: ToyEngine) -> int:
    return int(engine.counts.take().get("detached_requests", 0))


# -------------------------------------------------------------------- the guide's order


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_engines_share_the_new_weights_after_the_update(make_caches: MakeCaches, num_ranks: int) -> None:
    caches = make_caches(num_ranks)
    one, other = caches.make_engine(**HASTY), caches.make_engine(**HASTY)
    (prompt,) = prompts(1, 96)
    assert share(one, other)
    one.run(prompt)

    for number in range(1, 4):
        one.seed = other.seed = number
        set_weights(caches, f"step-{number}")
        reset(one, other)

        assert [one.run(prompt).num_hit, other.run(prompt).num_hit, one.run(prompt).num_hit] == [0, 96, 96]
    assert detached(one) == detached(other) == 0


def test_an_engine_that_is_reset_late_neither_feeds_nor_reads_the_new_weights(make_caches: MakeCaches) -> None:
    caches = make_caches()
    one, late = caches.make_engine(**HASTY), caches.make_engine(**HASTY)
    (old,), (prompt, new) = prompts(1, 96), prompts(2, 96, seed=1)
    late.run(old)

    set_weights(caches, "b")
    reset(one, seed=1)
    assert [late.run(prompt).num_hit, late.run(old).num_hit] == [0, 0]  # with the old weights
    assert [one.run(prompt).num_hit, one.run(old).num_hit] == [0, 0]
    assert detached(late) == 1  # it learns of the new weights from the first refusal
    one.run(new)
    assert late.run(new).num_hit == 0

    reset(late, seed=1)
    assert [late.run(prompt).num_hit, late.run(new).num_hit] == [96, 96]


def test_the_same_label_again_changes_nothing(make_caches: MakeCaches) -> None:
    caches = make_caches()
    one, other = caches.make_engine(**HASTY), caches.make_engine(**HASTY)
    set_weights(caches, "b")
    reset(one, other, seed=1)
    (prompt,) = prompts(1, 96)
    one.run(prompt)

    set_weights(caches, "b")

    assert other.run(prompt).num_hit == 96


# -------------------------------------------------------------------- detached


@pytest.mark.parametrize("pushes", [False, True])
def test_a_reset_without_a_name_detaches_until_the_next_name(make_caches: MakeCaches, pushes: bool) -> None:
    caches = make_caches()
    one, other = caches.make_engine(**HASTY), caches.make_engine(**HASTY)
    known, unknown = prompts(2, 96)
    other.run(known)

    reset(one, seed=1 if pushes else 0)

    assert [one.run(known).num_hit, one.run(unknown).num_hit, one.run(unknown).num_hit] == [0, 0, 0]
    assert detached(one) == 3
    assert [other.run(unknown).num_hit, other.run(known).num_hit] == [0, 96]
    reset(one)
    assert one.run(known).num_hit == 0
    one.seed = other.seed = 2
    set_weights(caches, "c")
    assert one.run(known).num_hit == 0
    reset(one, other)
    assert share(one, other) and share(other, one, 1)


def test_the_second_reset_after_a_name_detaches(make_caches: MakeCaches) -> None:
    caches = make_caches()
    one, other = caches.make_engine(**HASTY), caches.make_engine(**HASTY)
    set_weights(caches, "b")
    reset(one, other, seed=1)

    reset(one, seed=2)

    assert not share(other, one)
    assert not share(one, other, 1)
    one.seed = other.seed = 3
    set_weights(caches, "c")
    reset(one, other)
    assert share(one, other, 2)


def test_two_resets_before_the_cache_answers_are_two_resets(make_caches: MakeCaches) -> None:
    """The weights may have changed between them, to some that have no name."""
    caches = make_caches()
    one, other = caches.make_engine(**HASTY), caches.make_engine(**HASTY)
    set_weights(caches, "b")
    reset(other, seed=1)
    release = threading.Event()
    caches.loop.call(release.wait, 30)  # the loop of the cache stands still

    one.reset(seed=1)
    one.reset(seed=2)
    release.set()
    settle(one)

    assert not share(other, one)
    assert detached(one) == 1
    one.seed = other.seed = 3
    set_weights(caches, "c")
    reset(one, other)
    assert share(one, other, 1)


def test_a_request_is_counted_once_however_often_the_engine_asks(make_caches: MakeCaches) -> None:
    caches = make_caches()
    engine = caches.make_engine(num_blocks=12, chunk=16)
    reset(engine)

    for each in prompts(4, 96):
        engine.add(each, 10)
    engine.run_all()

    assert detached(engine) == 4


# -------------------------------------------------------------------- labels at the start


def test_an_engine_with_another_label_computes_alone_until_the_label_fits(make_caches: MakeCaches) -> None:
    caches = make_caches()
    one = caches.make_engine(**HASTY)  # its label is ""
    other = caches.make_engine(weights="b", seed=1, **HASTY)
    assert not share(one, other)
    assert not share(other, one, 1)
    assert detached(other) == 2
    assert detached(one) == 0

    set_weights(caches, "b")  # what the other engine has

    wait_until(lambda: all(link.connected for link in [*other.links, *other.worker_links]))
    assert share(other, other, 2)
    reset(one, seed=1)
    assert share(other, one, 3)


def test_engines_of_one_label_share_from_the_start(make_caches: MakeCaches) -> None:
    caches = make_caches()
    one, other = caches.make_engine(weights="b"), caches.make_engine(weights="b")

    assert share(one, other)
    assert caches.loop.run(caches.caches[0].weights()).label == "b"


def test_a_reset_of_an_engine_with_another_label_does_not_join(make_caches: MakeCaches) -> None:
    """It was started again with the checkpoint's weights, and sleeps: its weights are not those of the cache."""
    caches = make_caches()
    one = caches.make_engine(**HASTY)
    set_weights(caches, "b")
    reset(one, seed=1)
    again = caches.make_engine(**HASTY)

    reset(again)

    assert not share(one, again)
    assert not share(again, one, 1)
    one.seed = again.seed = 2
    set_weights(caches, "c")
    reset(one, again)
    assert share(one, again, 2) and share(again, one, 3)


# -------------------------------------------------------------------- open requests


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("num_steps", range(7))
def test_a_reset_while_requests_are_open_gives_none_of_them_old_kv(
    make_caches: MakeCaches, num_steps: int, names: bool
) -> None:
    caches = make_caches()
    one, other = caches.make_engine(chunk=32, **HASTY), caches.make_engine(chunk=32, **HASTY)
    known, unknown = prompts(2, 96)
    one.run(known)
    requests = [engine.add(each, 30) for engine in (one, other) for each in (known, unknown, known + unknown)]
    for _ in range(num_steps):
        one.step()
        other.step()

    one.seed = other.seed = 1
    if names:
        set_weights(caches, "b")
    one.reset()
    other.reset()
    one.run_all()
    other.run_all()

    assert [len(each.output) for each in requests] == [30] * 6
    settle(one, other)
    assert share(one, other) == names


def test_a_reset_by_the_cache_is_followed_by_one_of_each_engine(make_caches: MakeCaches) -> None:
    caches = make_caches()
    one, other = caches.make_engine(**HASTY), caches.make_engine(**HASTY)
    (prompt,) = prompts(1, 96)
    one.run(prompt)

    caches.loop.run(caches.caches[0].reset())
    assert [one.run(prompt).num_hit, other.run(prompt).num_hit] == [0, 0]
    reset(one, other)

    assert share(one, other) and share(other, one, 1)


# -------------------------------------------------------------------- random orders


class Fleet:
    """Two engines and a trainer that keeps to the guide's order: pause, push, name, reset each, resume."""

    def __init__(self, caches: ToyCaches, rng: random.Random) -> None:
        self.caches = caches
        self.rng = rng
        self.engines = [self._start(), self._start()]
        self.paused: set[ToyEngine] = set()
        self.number = 0
        self.known = prompts(4, 120, shared=48, seed=rng.randrange(1000))

    def _start(self) -> ToyEngine:
        return self.caches.make_engine(num_blocks=32, chunk=32, **HASTY)

    def serve(self) -> None:
        engine = self.rng.choice(self.engines)
        if engine in self.paused:
            return
        if self.rng.random() < 0.3:
            engine.add(self.rng.choice(self.known)[: self.rng.randrange(16, 121)], self.rng.randrange(1, 20))
        engine.step()

    def serve_some(self) -> None:
        for _ in range(self.rng.randrange(12)):
            self.serve()

    def sleep(self) -> None:
        """Reset an engine without a push, once or twice."""
        engine = self.rng.choice(self.engines)
        for _ in range(self.rng.choice([1, 1, 2])):
            engine.reset()

    def restart(self) -> None:
        """End an engine as it is; it starts with the weights of the checkpoint."""
        at = self.rng.randrange(2)
        engine = self.engines[at]
        assert engine.num_wrong == 0
        engine.close()
        self.caches.engines.remove(engine)
        self.engines[at] = self._start()

    def update(self) -> None:
        self.paused = set(self.engines)
        if self.rng.random() < 0.3:
            self.sleep()
        self.number += 1
        for engine in self.engines:
            engine.seed = self.number
        if self.rng.random() < 0.3:
            self.sleep()
        set_weights(self.caches, f"step-{self.number}")
        for engine in self.rng.sample(self.engines, 2):
            engine.reset()
            self.paused.discard(engine)
            self.serve_some()


@pytest.mark.parametrize("seed", [0, 1, *more(*range(2, 6))])
def test_random_orders_of_resets_and_updates_give_no_kv_of_other_weights(make_caches: MakeCaches, seed: int) -> None:
    rng = random.Random(seed)
    caches = make_caches(1 + seed % 2, num_tokens=1024)
    fleet = Fleet(caches, rng)
    for _ in range(14):
        rng.choices([fleet.sleep, fleet.update, fleet.restart, fleet.serve_some], [1, 2, 0.5, 4])[0]()
        fleet.serve_some()
        assert [each.num_wrong for each in fleet.engines] == [0, 0]
    for engine in fleet.engines:
        engine.run_all()
    settle(*fleet.engines)
    one, other = fleet.engines
    one.seed = other.seed = 1000
    set_weights(caches, "last")
    reset(one, other)

    assert share(one, other) and share(other, one, 1)


# -------------------------------------------------------------------- planted faults


def test_a_second_reset_that_joins_is_seen(make_caches: MakeCaches, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = make_caches()
    one, other = caches.make_engine(**HASTY), caches.make_engine(**HASTY)
    monkeypatch.setattr(WeightsState, "_is_ahead", lambda *_: True)

    reset(one, seed=1)
    share(other, one)

    assert one.num_wrong > 0
    one.num_wrong = 0


def test_a_scheduler_that_does_not_reset_is_seen(make_caches: MakeCaches, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = make_caches()
    engine = caches.make_engine(chunk=32)
    (prompt,) = prompts(1, 96)
    engine.run(prompt)
    monkeypatch.setattr(WeightsState, "reset", lambda _: None)

    engine.reset(seed=1)
    engine.run(prompt)

    assert engine.num_wrong > 0
    engine.num_wrong = 0
