"""Sessions are bound to models: two models never use each other's KV, even in one tree and namespace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from support.caches.cache_under_test import CacheUnderTest, Pages, small_config
from support.caches.raw_calls import Scene, Wire

from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.actors.sessions import bound_models, model_bindings
from raydix.schemas import (
    AcquireRequest,
    ConfigMismatch,
    InvalidRequest,
    LeaseResponse,
    ModelFingerprint,
    OpenSession,
)

BASE = {"model_type": "llama", "rope_theta": 1e4, "rms_norm_eps": 1e-6}
OLD, NEW = ModelFingerprint(fields=BASE, weights="old"), ModelFingerprint(fields=BASE, weights="new")
FURTHER = ModelFingerprint(fields=BASE | {"rope_theta": 5e5, "rms_norm_eps": 1e-5}, weights="new")
BIND_AGAIN = "may have another model by now.*Bind again"


async def publish(client: PrefixCacheClient, *tokens: int, **namespace: str | None) -> None:
    async with client.acquire(tokens, **namespace) as lease:
        await lease.insert(tokens)


async def hit(client: PrefixCacheClient, *tokens: int, **namespace: str | None) -> int:
    async with client.acquire(tokens, **namespace) as lease:
        return lease.prefix_len


# ---------------------------------------------------------------- binding


async def test_the_first_session_sets_the_model_and_only_sessions_with_the_same_join(cache1: CacheUnderTest) -> None:
    first, same, other = (cache1.another_client() for _ in range(3))

    generation = await first.bind_model(OLD)

    assert await same.bind_model(ModelFingerprint(fields=dict(reversed(BASE.items())), weights="old")) == generation
    assert await first.bind_model(OLD) == generation
    with pytest.raises(ConfigMismatch, match=r"the base model is bound to another .* the weights differ.* reset\(\)"):
        await other.bind_model(NEW)
    with pytest.raises(ConfigMismatch) as refused:
        await other.bind_model(FURTHER)
    assert "rms_norm_eps is 1e-05, not 1e-06; rope_theta is 500000.0, not 10000.0" in str(refused.value)
    for way_out in ("another cache", "another lora_id"):
        assert way_out in str(refused.value)
    assert "fingerprint=None" not in str(refused.value), "it would publish KV of a model that is not known"
    with pytest.raises(ConfigMismatch, match="the weights differ"):
        await first.bind_model(NEW)  # its weights have changed, but its namespace was not retired
    assert await hit(first, 1) == 0


async def test_a_model_stays_bound_when_the_session_that_bound_it_ends(cache1: CacheUnderTest) -> None:
    await (first := cache1.another_client()).bind_model(OLD, lora_id="x")
    await first.close()

    with pytest.raises(ConfigMismatch, match=r"lora_id 'x' is bound to another model .*retire\(lora_id='x'\)"):
        await cache1.another_client().bind_model(NEW, lora_id="x")


async def test_two_lora_ids_with_two_models_work_in_one_cache(cache1: CacheUnderTest) -> None:
    worker, other = cache1.another_client(), cache1.another_client()
    numbers = {await worker.bind_model(OLD, lora_id="x"), await other.bind_model(NEW, lora_id="y")}
    await publish(worker, 1, 2, lora_id="x")
    await publish(other, 1, 2, lora_id="y")

    assert len(numbers) == 2
    assert await hit(worker, 1, 2, lora_id="x") == await hit(other, 1, 2, lora_id="y") == 2
    await worker.retire(lora_id="x")
    assert await hit(other, 1, 2, lora_id="y") == 2
    with pytest.raises(ConfigMismatch, match=BIND_AGAIN):
        await hit(worker, 1, 2, lora_id="x")


async def test_stats_have_the_number_of_bound_models_and_the_base(cache1: CacheUnderTest) -> None:
    refused = (await cache1.client.stats()).refusals.get("model_mismatch", 0)
    await cache1.client.bind_model(OLD)
    await cache1.client.bind_model(NEW, lora_id="x")
    with pytest.raises(ConfigMismatch):
        await cache1.client.bind_model(NEW)

    stats = await cache1.client.stats()

    assert (stats.bindings, stats.model_fingerprint) == (2, str(OLD))
    assert stats.refusals["model_mismatch"] == refused + 1
    await cache1.client.reset()
    stats = await cache1.client.stats()
    assert (stats.bindings, stats.model_fingerprint) == (0, "")


WRONG: list[tuple[Any, Any, str]] = [
    ("abc", None, "fingerprint must be a ModelFingerprint, not str"),
    (None, None, "fingerprint must be a ModelFingerprint, not NoneType"),
    (BASE, None, "fingerprint must be a ModelFingerprint, not dict"),
    (OLD.model_copy(update={"fields": {"a": [1]}}), None, r"fingerprint.fields: 'a' must be a str .* not \[1\]"),
    (OLD.model_copy(update={"fields": BASE | {"b": float("nan")}}), None, r"fields: 'b' must be .* not nan"),
    (OLD.model_copy(update={"fields": {1: 2}}), None, "fields: a name must be a str of 1 to 256 characters, not 1"),
    (OLD.model_copy(update={"fields": {f"{n}": n for n in range(1025)}}), None, "fields: at most 1024 fields"),
    (OLD.model_copy(update={"weights": "x" * 257}), None, "fingerprint.weights: .* at most 256"),
    (OLD.model_copy(update={"weights": "\ud800"}), None, "fingerprint.weights: .* valid string.* unicode"),
    (OLD, 7, "lora_id must be a string or None, not int"),
    (OLD, "x" * 4097, "lora_id has 4097 characters"),
]


async def test_a_wrong_fingerprint_is_refused_by_name_and_changes_nothing(scene: Scene) -> None:
    for fingerprint, lora_id, fault in WRONG:
        with pytest.raises(InvalidRequest, match=fault):
            await scene.client.bind_model(fingerprint, lora_id=lora_id)


async def test_a_refused_model_changes_nothing(cache1: CacheUnderTest) -> None:
    await cache1.another_client().bind_model(OLD)
    await publish(cache1.client, 1, 2)
    before, pages = (await cache1.client.stats()).bindings, await cache1.pages()

    for _ in range(2):
        with pytest.raises(ConfigMismatch):
            await cache1.client.bind_model(NEW)

    assert ((await cache1.client.stats()).bindings, await cache1.pages()) == (before, pages)
    await cache1.client.check_invariants()
    assert await hit(cache1.client, 1, 2) == 2  # not bound, so not checked


async def test_a_cache_configured_for_a_base_model_takes_no_other() -> None:
    config = small_config().model_copy(update={"fingerprint": str(OLD)})
    async with LocalPrefixCache(config) as cache:
        with pytest.raises(ConfigMismatch, match=rf"for the base model '{OLD}' .*, not '{NEW}'"):
            await cache.bind_model(NEW)
        assert await cache.bind_model(NEW, lora_id="x") < await cache.bind_model(OLD)
        await cache.reset()
        with pytest.raises(ConfigMismatch, match="is configured for"):
            await cache.bind_model(NEW)


# ---------------------------------------------------------------- generations


async def ended(client: PrefixCacheClient, lora_id: str | None) -> None:
    """Return whether the next generation has begun."""
    await (client.reset() if lora_id is None else client.retire(lora_id=lora_id))


@pytest.mark.parametrize("lora_id", [None, "x"])
@pytest.mark.parametrize("first", [OLD, NEW], ids=["old first", "new first"])
async def test_after_a_retirement_the_first_to_bind_wins_and_no_kv_meets_other_weights(
    cache1: CacheUnderTest, lora_id: str | None, first: ModelFingerprint
) -> None:
    worker, renewed, scheduler = (cache1.another_client() for _ in range(3))
    before = await worker.bind_model(OLD, lora_id=lora_id)
    await publish(worker, 1, 2, lora_id=lora_id)
    running = await worker.acquire([1, 2, 3], lora_id=lora_id)

    await ended(scheduler, lora_id)

    for verb in (worker.acquire, worker.lock):
        with pytest.raises(ConfigMismatch, match=BIND_AGAIN):
            await verb([1, 2], lora_id=lora_id)
    winner, loser = (worker, renewed) if first is OLD else (renewed, worker)
    second = NEW if first is OLD else OLD
    after = await winner.bind_model(first, lora_id=lora_id)
    with pytest.raises(ConfigMismatch, match="the weights differ"):
        await loser.bind_model(second, lora_id=lora_id)
    assert after > before
    assert (await running.insert([1, 2, 3])).retired  # computed by the weights of before, whichever request was first
    assert await hit(winner, 1, 2, 3, lora_id=lora_id) == 0
    await publish(winner, 1, 2, lora_id=lora_id)
    assert await hit(winner, 1, 2, lora_id=lora_id) == 2
    if winner is renewed:
        with pytest.raises(ConfigMismatch, match=BIND_AGAIN):
            await worker.acquire([1, 2], lora_id=lora_id)
    await running.release()


async def test_retiring_by_other_fields_leaves_generations_as_they_are(cache1: CacheUnderTest) -> None:
    worker = cache1.another_client()
    generation = await worker.bind_model(OLD, lora_id="x")
    await publish(worker, 1, 2, lora_id="x", cache_salt="s")
    grant = await (await cache1.client.acquire([1], lora_id="x", cache_salt="s")).grant()

    await cache1.client.retire(lora_id="x", cache_salt="s")
    await cache1.client.retire(cache_salt="s")

    assert await hit(worker, 1, 2, lora_id="x", cache_salt="s") == 0
    assert await worker.bind_model(OLD, lora_id="x") == generation
    async with worker.adopt(grant) as lease:
        assert (await lease.insert([1])).retired


async def test_a_generation_covers_all_namespaces_of_its_lora_id(cache1: CacheUnderTest) -> None:
    worker = cache1.another_client()
    await worker.bind_model(OLD, lora_id="x")
    lease = await worker.acquire([1], lora_id="x", extra_key="image")

    await cache1.client.retire(lora_id="x")

    with pytest.raises(ConfigMismatch, match=BIND_AGAIN):
        await worker.acquire([1], lora_id="x", cache_salt="s")
    assert (await lease.insert([1], release=True)).retired


async def test_a_session_behind_the_base_is_refused_everywhere_and_others_only_where_they_bound(
    cache1: CacheUnderTest,
) -> None:
    both, base, adapter, scheduler = (cache1.another_client() for _ in range(4))
    for client, lora_id in ((both, None), (both, "x"), (base, None), (adapter, "x")):
        await client.bind_model(OLD, lora_id=lora_id)
    assert await hit(base, 1, lora_id="y") == 0  # bound, but to another namespace

    await cache1.client.reset()
    await both.bind_model(OLD, lora_id="x")

    for lora_id in (None, "x", "y"):
        with pytest.raises(ConfigMismatch, match=r"^the base model may .*: bind_model\(fingerprint\)$"):
            await both.acquire([1], lora_id=lora_id)
        with pytest.raises(ConfigMismatch, match=BIND_AGAIN):
            await base.acquire([1], lora_id=lora_id)
        assert await hit(scheduler, 1, lora_id=lora_id) == 0
    assert await hit(adapter, 1) == await hit(adapter, 1, lora_id="y") == 0
    with pytest.raises(ConfigMismatch, match=r"bind_model\(fingerprint, lora_id='x'\)$"):
        await adapter.acquire([1], lora_id="x")
    await both.bind_model(OLD)
    assert await hit(both, 1, lora_id="x") == await hit(both, 1, lora_id="y") == 0


# ---------------------------------------------------------------- labels of the base's weights


async def weights_of(client: PrefixCacheClient) -> tuple[str | None, int]:
    answer = await client.weights()
    assert (await client.stats()).weights == answer.label
    return answer.label, answer.generation


async def test_the_first_bind_of_the_base_sets_the_label_and_reset_forgets_it(cache1: CacheUnderTest) -> None:
    await cache1.client.reset()  # of the tests before
    worker = cache1.another_client()
    await worker.bind_model(NEW, lora_id="x")
    assert await weights_of(worker) == (None, 0)

    generation = await worker.bind_model(OLD)

    assert await weights_of(worker) == ("old", generation)
    await worker.retire(lora_id="x")
    assert await weights_of(worker) == ("old", generation)
    await cache1.client.reset()
    assert await weights_of(worker) == (None, 0)


async def test_new_weights_begin_the_next_generation_of_everything_in_one_step(cache1: CacheUnderTest) -> None:
    worker, adapter, unbound, trainer = (cache1.another_client() for _ in range(4))
    before = await worker.bind_model(OLD)
    await adapter.bind_model(OLD, lora_id="x")
    for lora_id in (None, "x"):
        await publish(worker, 1, 2, lora_id=lora_id)
    running = await unbound.acquire([1, 2, 3])
    grant = await (await unbound.acquire([1, 2], lora_id="x")).grant()

    generation = await trainer.set_weights("new")

    assert generation > before
    assert await weights_of(trainer) == ("new", generation)
    assert [(await trainer.match([1, 2], lora_id=lora_id)).prefix_len for lora_id in (None, "x")] == [0, 0]
    assert ((await trainer.stats()).bindings, (await trainer.stats()).model_fingerprint) == (0, "")
    for client, lora_id in ((worker, None), (worker, "x"), (adapter, "x")):
        with pytest.raises(ConfigMismatch, match=BIND_AGAIN):
            await client.acquire([1, 2], lora_id=lora_id)
    assert (running.prefix_len, (await running.insert([1, 2, 3])).retired) == (2, True)
    await running.release()
    assert await worker.bind_model(NEW) == generation
    with pytest.raises(ConfigMismatch, match="Acquire again"):
        await worker.adopt(grant)
    await unbound.revoke(grant)
    await publish(worker, 1, 2)
    assert await hit(worker, 1, 2) == 2


async def test_a_worker_that_is_behind_cannot_bind_the_base_before_or_after_the_first_to_have_the_weights(
    cache1: CacheUnderTest,
) -> None:
    behind, ahead = cache1.another_client(), cache1.another_client()
    await behind.bind_model(OLD)
    generation = await ahead.set_weights("new")

    with pytest.raises(ConfigMismatch, match=r"the weights 'new' in this cache \(set_weights\), not 'old'"):
        await behind.bind_model(OLD)
    assert await weights_of(ahead) == ("new", generation)
    assert await ahead.bind_model(NEW) == generation
    with pytest.raises(ConfigMismatch, match=r"differ; the weights are 'old', not 'new'\. .* set_weights\(label\)"):
        await behind.bind_model(OLD)
    other = FURTHER.model_copy(update={"weights": "\x1b" * 256})
    with pytest.raises(ConfigMismatch) as refused:
        await behind.bind_model(other)
    assert r"rope_theta is 500000.0, not 10000.0; the weights are '\x1b" in str(refused.value)
    assert len(str(refused.value)) < 1000
    with pytest.raises(ConfigMismatch, match=BIND_AGAIN):
        await behind.acquire([1])
    await behind.bind_model(NEW)
    assert await hit(behind, 1) == 0


@pytest.mark.parametrize("by", ["set_weights", "bind_model"])
async def test_the_current_label_changes_nothing(cache1: CacheUnderTest, by: str) -> None:
    worker, trainer = cache1.another_client(), cache1.another_client()
    await trainer.reset()
    if by == "set_weights":
        await trainer.set_weights("new")
    generation = await worker.bind_model(NEW)
    await publish(worker, 1, 2)
    running = await worker.acquire([1, 2, 3])

    assert await trainer.set_weights("new") == generation

    assert await hit(worker, 1, 2) == 2
    assert not (await running.insert([1, 2, 3])).retired
    await running.release()


async def test_weights_may_have_no_name_until_they_are_replaced(cache1: CacheUnderTest) -> None:
    worker = cache1.another_client()
    await worker.reset()
    nameless = ModelFingerprint(fields=BASE, weights="")
    generation = await worker.bind_model(nameless)

    assert await weights_of(worker) == ("", generation)
    assert await worker.set_weights("new") > generation
    with pytest.raises(ConfigMismatch, match=r"the weights 'new' in this cache .*, not ''"):
        await worker.bind_model(nameless)


WRONG_LABELS: list[tuple[Any, str]] = [
    ("", "label: .* at least 1"),
    ("x" * 257, "label: .* at most 256"),
    ("\ud800", "label: .* valid string"),
    (None, "label: .* valid string"),
    (7, "label: .* valid string"),
]


async def test_a_wrong_label_is_refused_and_changes_nothing(cache1: CacheUnderTest) -> None:
    generation = await cache1.client.set_weights("v1")
    await publish(cache1.client, 1, 2)

    for label, fault in WRONG_LABELS:
        with pytest.raises(InvalidRequest, match=fault):
            await cache1.client.set_weights(label)

    assert await weights_of(cache1.client) == ("v1", generation)
    assert await hit(cache1.client, 1, 2) == 2


async def test_a_cache_configured_for_a_base_model_takes_no_other_weights() -> None:
    config = small_config().model_copy(update={"fingerprint": str(OLD)})
    async with LocalPrefixCache(config) as cache:
        generation = await cache.bind_model(OLD)
        await publish(cache, 1, 2)

        for label in ("new", "old"):
            with pytest.raises(ConfigMismatch, match=r"CacheConfig.fingerprint\), a hash that includes its weights"):
                await cache.set_weights(label)

        assert await weights_of(cache) == ("old", generation)
        assert await hit(cache, 1, 2) == 2


def test_plain_calls_name_the_weights() -> None:
    with LocalPrefixCache(small_config()).sync as cache:
        assert cache.set_weights("v1") == cache.bind_model(ModelFingerprint(fields=BASE, weights="v1"))
        assert cache.weights().label == "v1"


# ---------------------------------------------------------------- earlier leases


async def test_a_worker_with_old_weights_is_refused_a_grant_and_another_is_served(cache1: CacheUnderTest) -> None:
    scheduler, old, new = (cache1.another_client() for _ in range(3))
    await old.bind_model(OLD, lora_id="x")
    await scheduler.retire(lora_id="x")
    grant = await (await scheduler.acquire([1, 2], lora_id="x")).grant()  # before any model is bound
    await new.bind_model(NEW, lora_id="x")
    before = await cache1.pages()

    for _ in range(2):
        with pytest.raises(ConfigMismatch, match=BIND_AGAIN):
            await old.adopt(grant)
    assert await cache1.pages() == before == Pages(free=6, private=2, leases=1)

    async with new.adopt(grant) as lease:
        assert not (await lease.insert([1, 2])).retired
    assert await hit(new, 1, 2, lora_id="x") == 2


async def test_a_lease_of_an_ended_generation_is_good_for_sessions_alone_that_bound_nothing(
    cache1: CacheUnderTest,
) -> None:
    scheduler, worker, unbound = (cache1.another_client() for _ in range(3))
    await worker.bind_model(OLD, lora_id="x")
    await publish(worker, 1, 2, lora_id="x")
    grant = await (await scheduler.acquire([1, 2, 3], lora_id="x")).grant()  # with KV of the old weights

    await scheduler.retire(lora_id="x")
    await worker.bind_model(NEW, lora_id="x")

    with pytest.raises(ConfigMismatch, match=r"was acquired before .*Acquire again"):
        await worker.adopt(grant)
    async with unbound.adopt(grant) as lease:
        assert (lease.prefix_len, (await lease.insert([1, 2, 3])).retired) == (2, True)


async def test_a_waiting_request_is_refused_if_the_model_changes_meanwhile(cache1: CacheUnderTest) -> None:
    holder, worker = cache1.another_client(), cache1.another_client()
    held = await holder.acquire(range(1, 9))
    await worker.bind_model(OLD, lora_id="x")
    refused = (await cache1.client.stats()).refusals.get("model_mismatch", 0)
    (other,) = await cache1.in_line(holder.acquire(range(11, 19)))
    (waiting,) = await cache1.in_line(worker.acquire([1], lora_id="x"))

    await holder.retire(lora_id="x")
    with pytest.raises(ConfigMismatch, match=BIND_AGAIN):
        await worker.acquire([1], lora_id="x")  # immediately, as waiting would be in vain
    assert (await cache1.client.stats()).waiters == 2
    await held.release()
    await (await other).release()

    with pytest.raises(ConfigMismatch, match=BIND_AGAIN):
        await waiting
    assert (await cache1.client.stats()).refusals["model_mismatch"] == refused + 2
    assert await cache1.pages() == Pages(free=8)


async def test_an_acquire_that_is_repeated_gets_the_lease_that_it_got(cache1: CacheUnderTest) -> None:
    worker = cache1.another_client()
    await worker.bind_model(OLD)
    wire = Wire(cache1, worker)
    request = AcquireRequest(lease_id="l", tokens=[1, 2], timeout_s=0.0)
    await wire.execute(request)
    await cache1.client.reset()

    (again,) = await wire.execute(request)
    (anew,) = await wire.execute(replace(request, lease_id="m"))

    assert isinstance(again, LeaseResponse)
    assert isinstance(anew, ConfigMismatch)


# ---------------------------------------------------------------- lost sessions


async def test_a_client_that_lost_its_session_must_bind_again(lost: Callable[[PrefixCacheClient], None]) -> None:
    async with LocalPrefixCache(small_config()) as cache:
        worker, adapter, scheduler = (PrefixCacheClient(cache) for _ in range(3))
        await worker.bind_model(OLD)
        await adapter.bind_model(OLD, lora_id="x")
        await scheduler.open()
        grant = await (await cache.acquire([1])).grant()
        for client in (worker, adapter, scheduler):
            lost(client)

        taking: list[Callable[[], Awaitable[Any]]] = [
            lambda: worker.acquire([1]),
            lambda: worker.acquire([1], lora_id="y"),
            lambda: worker.lock([1]),
            lambda: worker.adopt(grant),
            lambda: adapter.acquire([1], lora_id="x"),
        ]
        for take in taking:
            with pytest.raises(ConfigMismatch, match=BIND_AGAIN):
                await take()
        assert await hit(scheduler, 1) == await hit(adapter, 1) == await hit(adapter, 1, lora_id="y") == 0
        await worker.bind_model(OLD)
        await adapter.bind_model(OLD, lora_id="x")
        assert await hit(worker, 1) == await hit(worker, 1, lora_id="y") == await hit(adapter, 1, lora_id="x") == 0
        await (await worker.adopt(grant)).release()
        for client in (worker, adapter, scheduler):
            await client.close()
        assert not cache._host.service.bindings.sessions


@pytest.fixture
def lost() -> Callable[[PrefixCacheClient], None]:
    """End a client's session in the cache, as after a silence or its owner's death."""

    def lose(client: PrefixCacheClient) -> None:
        reaper = client.session.connector.host.service.reaper  # type: ignore[attr-defined]
        assert reaper.owner_unavailable(client.session.session_id, is_dead=True)

    return lose


async def test_of_very_many_models_a_client_that_lost_its_session_must_bind_each_again(
    lost: Callable[[PrefixCacheClient], None],
) -> None:
    async with LocalPrefixCache(small_config()) as cache:
        worker = PrefixCacheClient(cache)
        for number in range(300):
            await worker.bind_model(OLD, lora_id=f"{number}")
        await worker.bind_model(OLD)
        lost(worker)

        with pytest.raises(ConfigMismatch, match=BIND_AGAIN):
            await worker.acquire([1])
        await worker.bind_model(OLD)
        for lora_id in ("0", "299", "never bound"):
            with pytest.raises(ConfigMismatch, match=BIND_AGAIN):
                await worker.acquire([1], lora_id=lora_id)
        await worker.bind_model(OLD, lora_id="0")
        assert await hit(worker, 1) == await hit(worker, 1, lora_id="0") == 0
        await worker.close()


async def test_a_session_that_is_opened_again_stays_bound(cache1: CacheUnderTest) -> None:
    worker = await cache1.another_client().open()
    await worker.bind_model(OLD, lora_id="x")
    wire = Wire(cache1, worker)

    again = OpenSession(session_id=wire.session["session_id"], owner="test", bound=("x",))
    await wire.call("open_session", again)

    assert await hit(worker, 1, lora_id="x") == 0


# ---------------------------------------------------------------- many bindings


@pytest.fixture
def at_most_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_bindings, "MAX_BINDINGS", 4)
    monkeypatch.setattr(bound_models, "MAX_BINDINGS", 4)


async def test_the_binding_used_least_recently_is_retired_with_its_pages(at_most_four: None) -> None:
    async with LocalPrefixCache(small_config()) as cache:
        worker, other = PrefixCacheClient(cache), PrefixCacheClient(cache)
        await other.bind_model(OLD)
        for lora_id in ("a", "b", "c"):
            await worker.bind_model(OLD, lora_id=lora_id)
            await publish(worker, 1, lora_id=lora_id)
        running = await worker.acquire([1, 2], lora_id="b")
        grant = await (await worker.acquire([1, 2], lora_id="c")).grant()
        await hit(worker, 1, lora_id="a")
        await (await worker.adopt(grant)).release()  # each of these is a use
        running_b = await cache.acquire([1], lora_id="b")  # a lease of an unbound session is not a use

        await worker.bind_model(OLD, lora_id="d")

        assert (await cache.stats()).bindings == 4
        assert [(await cache.match([1], lora_id=each)).prefix_len for each in "abc"] == [1, 0, 1]
        with pytest.raises(ConfigMismatch, match=BIND_AGAIN):
            await worker.acquire([1], lora_id="b")
        assert (await running.insert([1, 2])).retired
        assert await other.bind_model(NEW, lora_id="b") > 0  # another model may have the name
        assert await hit(other, 7) == 0  # the base's binding is never dropped
        for lease in (running, running_b):
            await lease.release()
        for client in (worker, other):
            await client.close()


async def test_new_lora_ids_do_not_grow_the_bindings_or_the_sessions(
    at_most_four: None,
) -> None:
    async with LocalPrefixCache(small_config()) as cache:
        worker = PrefixCacheClient(cache)
        await worker.bind_model(OLD)
        for number in range(50):
            await worker.bind_model(OLD, lora_id=f"{number}")
            await publish(worker, 1, lora_id=f"{number}")

        bindings = cache._host.service.bindings
        (bound,) = bindings.sessions.values()
        stats = await cache.stats()
        assert (len(bindings), len(bound.generations), len(worker.session.bound.generations)) == (4, 5, 5)
        assert stats.tree_slots == 3
        assert await hit(worker, 1) == 0
        for forgotten in ("0", "never bound"):
            with pytest.raises(ConfigMismatch, match=BIND_AGAIN):
                await worker.acquire([1], lora_id=forgotten)
        await worker.close()


async def test_bindings_share_their_fields() -> None:
    async with LocalPrefixCache(small_config()) as cache:
        for number in range(3):
            fingerprint = ModelFingerprint(fields=BASE, weights=f"{number}")
            await cache.bind_model(fingerprint, lora_id=f"{number}")

        kept = cache._host.service.bindings._bindings.values()
        assert len({id(each.fingerprint.fields) for each in kept}) == 1
        assert [each.fingerprint.weights for each in kept] == ["0", "1", "2"]


async def test_a_cancelled_bind_counts_as_one() -> None:
    async with LocalPrefixCache(small_config()) as cache:
        worker = PrefixCacheClient(cache)
        await worker.open()
        worker.session.transport.submit = lambda *_: asyncio.get_running_loop().create_future()  # type: ignore[method-assign]
        binding = asyncio.ensure_future(worker.bind_model(OLD, lora_id="x"))
        await asyncio.sleep(0)
        binding.cancel()
        await asyncio.wait((binding,))

        assert worker.session.bound.generations == {"x": 0}
        await worker.close()
