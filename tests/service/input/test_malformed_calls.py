"""Every argument of every verb takes each of some ninety wrong values: a `CacheError` or an answer, and no change.

No other exception may reach the caller, and a refused call leaves the cache's counts unchanged.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import isawaitable
from typing import Any

import pytest
import ray
import torch
from support.caches.bad_values import BAD_VALUES, negated
from support.caches.raw_calls import counts

from raydix.actors import (
    AttachedPool,
    Lease,
    LocalPrefixCache,
    PrefixCacheClient,
    connect,
    shutdown_cache,
    start_cache,
)
from raydix.actors.client.attached_pool import _NUMBERS
from raydix.actors.client.prefix_cache_client import SyncClient
from raydix.actors.client.sync_lease import SyncLease, SyncPool
from raydix.actors.cluster.placement import beside
from raydix.cache_core import InvalidKeyError, RadixKey
from raydix.schemas import (
    CacheConfig,
    CacheError,
    EvictionConfig,
    InvalidRequest,
    LeaseGrant,
    ModelFingerprint,
    PoolConfig,
    PoolExhausted,
)

CONFIG = CacheConfig(
    page_size=2,
    pool=PoolConfig.uniform(num_slots=64, num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32", device="cpu"),
    eviction=EvictionConfig(high_watermark=1.0),
    events=True,
)
PROMPT = [5, 6, 7, 8]
FINGERPRINT = ModelFingerprint(fields={"model_type": "llama"}, weights="0")


class Scene:
    """A cache with four cached tokens, and a lease that holds them and four private slots."""

    def __init__(self, cache: LocalPrefixCache, lease: Lease, pool: AttachedPool) -> None:
        self.cache = cache
        self.lease = lease
        self.pool = pool
        self.own = lease.slots[4:]  # private
        self.kv = torch.ones(4, 1, 2)
        self.all_kv = torch.ones(2, 4, 1, 2)

    @classmethod
    async def make(cls) -> Scene:
        cache = LocalPrefixCache(CONFIG)
        lease = await cache.acquire(PROMPT, new_tokens=4)
        await lease.insert(PROMPT)
        return cls(cache, lease, await cache.attach_pool())

    async def state(self) -> tuple[Any, ...]:
        """Return the state that no refused call may change: the counts, the lease and the pool's bytes."""
        lease, pool = self.lease, self.pool
        held = (lease._ended, len(lease), lease.published_len, lease.slots.tolist())
        kv = [bytes(each.detach().view(torch.uint8).numpy()) for each in (*pool.k, *pool.v)]
        return (await counts(self.cache), held, kv)


Use = Callable[[Scene, Any], Any]
SECONDS = ("a fraction",)
TEXTS = {"a str", "a Text", "a nul", "an escape", "half a character", "a long str"}
NAMESPACES = ("extra_key", "lora_id", "cache_salt")


def of_client(verb: str, argument: str, *before: Any) -> Use:
    return lambda scene, bad: getattr(scene.cache, verb)(*before, **{argument: bad})


def of_lease(verb: str, argument: str, *before: Any) -> Use:
    return lambda scene, bad: getattr(scene.lease, verb)(*before, **{argument: bad})


def granted(scene: Scene, **fields: Any) -> LeaseGrant:
    lease = scene.lease
    whole = {
        "lease_id": lease.lease_id,
        "granter": scene.cache.session.session_id,
        "epoch": lease.epoch,
        "prefix_len": 0,
    }
    return LeaseGrant.model_construct(**whole | {"published_len": 4, "num_slots": 8, "offer_id": "none"} | fields)


async def first_event(scene: Scene, after_seq: Any, **options: Any) -> None:
    async for _ in scene.cache.events(after_seq, **options):
        return


USES: dict[str, Use] = {
    **{f"{verb}(tokens)": of_client(verb, "tokens") for verb in ("match", "lock", "acquire", "explain")},
    **{
        f"{verb}({part})": of_client(verb, part, *([1, 2],) if verb != "retire" else ())
        for verb in ("match", "lock", "acquire", "explain", "retire")
        for part in NAMESPACES
    },
    "lock(priority)": of_client("lock", "priority", [1]),
    **{
        f"acquire({name})": of_client("acquire", name, [1])
        for name in ("new_tokens", "max_prefix_len", "priority", "timeout_s")
    },
    "insert(lease)": lambda scene, bad: scene.cache.insert(bad, PROMPT),
    "insert(tokens)": of_lease("insert", "tokens"),
    "insert(release)": of_lease("insert", "release", PROMPT),
    "insert(publish_state)": of_lease("insert", "publish_state", PROMPT),
    "preempt(lease)": lambda scene, bad: scene.cache.preempt(bad, PROMPT),
    "preempt(tokens)": of_lease("preempt", "tokens"),
    "preempt(publish_state)": of_lease("preempt", "publish_state", PROMPT),
    "grant(timeout_s)": of_lease("grant", "timeout_s"),
    "revoke(grant)": of_client("revoke", "grant"),
    "extend(lease)": lambda scene, bad: scene.cache.extend(bad, 1),
    "extend(num_tokens)": of_lease("extend", "num_tokens"),
    "extend(timeout_s)": of_lease("extend", "timeout_s", 1),
    "release_window(lease)": lambda scene, bad: scene.cache.release_window(bad, 1),
    "release_window(up_to)": of_lease("release_window", "up_to"),
    **{f"{verb}(lease)": of_client(verb, "lease") for verb in ("release", "unlock", "abort", "grant")},
    "adopt(grant)": of_client("adopt", "grant"),
    **{
        f"adopt({field} of the grant)": lambda scene, bad, field=field: scene.cache.adopt(
            granted(scene, **{field: bad})
        )
        for field in ("lease_id", "granter", "epoch", "offer_id")
    },
    **{
        f"revoke({field} of it)": lambda scene, bad, field=field: scene.cache.revoke(granted(scene, **{field: bad}))
        for field in ("lease_id", "granter", "offer_id")
    },
    "bind_model(fingerprint)": of_client("bind_model", "fingerprint"),
    "bind_model(lora_id)": of_client("bind_model", "lora_id", FINGERPRINT),
    **{
        f"bind_model({field} of it)": lambda scene, bad, field=field: scene.cache.bind_model(
            FINGERPRINT.model_copy(update={field: bad})
        )
        for field in ("fields", "weights")
    },
    "bind_model(a field of it)": lambda scene, bad: scene.cache.bind_model(
        FINGERPRINT.model_copy(update={"fields": {"rope_theta": bad}})
    ),
    "set_weights(label)": of_client("set_weights", "label"),
    "evict(num_tokens)": of_client("evict", "num_tokens"),
    **{f"tree({name})": of_client("tree", name) for name in ("max_nodes", "max_depth", "max_width")},
    "attach_pool(mapped)": of_client("attach_pool", "mapped"),
    "events(after_seq)": first_event,
    "events(tier)": lambda scene, bad: first_event(scene, 0, tier=bad),
    "event_snapshot(tier)": of_client("event_snapshot", "tier"),
    "start_recording(request)": lambda scene, bad: scene.cache.start_recording(bad),
    "PrefixCacheClient(cache)": lambda scene, bad: isinstance(bad, str) or PrefixCacheClient(bad).match([1]),
    "PrefixCacheClient(owner)": lambda scene, bad: PrefixCacheClient(scene.cache, owner=bad).match([1]),
    "LocalPrefixCache(config)": lambda scene, bad: LocalPrefixCache(bad),
    "write(layer)": lambda scene, bad: scene.pool.write(bad, scene.own, scene.kv, scene.kv),
    "write(slots)": lambda scene, bad: scene.pool.write(0, bad, scene.kv[:2], scene.kv[:2]),
    "write(k)": lambda scene, bad: scene.pool.write(0, scene.own, bad, scene.kv),
    "write(v)": lambda scene, bad: scene.pool.write(0, scene.own, scene.kv, bad),
    "gather(layer)": lambda scene, bad: scene.pool.gather(bad, scene.own),
    "gather(slots)": lambda scene, bad: scene.pool.gather(0, bad),
    "gather(out)": lambda scene, bad: scene.pool.gather(0, scene.own, bad),
    "gather(out of k)": lambda scene, bad: scene.pool.gather(0, scene.own, (bad, scene.kv)),
    "gather(out of v)": lambda scene, bad: scene.pool.gather(0, scene.own, (scene.kv, bad)),
    "state(layer)": lambda scene, bad: scene.pool.state(bad),
    "write_kv(lease)": lambda scene, bad: scene.pool.write_kv(bad, scene.own, scene.all_kv, scene.all_kv),
    "write_kv(slots)": lambda scene, bad: scene.pool.write_kv(
        scene.lease, bad, scene.all_kv[:, :2], scene.all_kv[:, :2]
    ),
    "write_kv(k)": lambda scene, bad: scene.pool.write_kv(scene.lease, scene.own, bad, scene.all_kv),
    "write_kv(v)": lambda scene, bad: scene.pool.write_kv(scene.lease, scene.own, scene.all_kv, bad),
    "read_kv(lease)": lambda scene, bad: scene.pool.read_kv(bad, scene.own),
    "read_kv(slots)": lambda scene, bad: scene.pool.read_kv(scene.lease, bad),
}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_a_malformed_call_raises_a_typed_error_and_changes_nothing(use: Use) -> None:
    scene = await Scene.make()
    wrong = []
    for name, bad in BAD_VALUES.items():
        before = await scene.state()
        try:
            answer = use(scene, bad)
            if isawaitable(answer):
                answer = await answer
        except CacheError as error:
            if type(error) is CacheError:  # an internal error
                wrong.append(f"{name}: {error}")
            if not isinstance(error, PoolExhausted) and await scene.state() != before:  # refusals are counted
                wrong.append(f"{name}: the cache was changed")
        except Exception as error:
            wrong.append(f"{name}: {error!r}")
        else:
            if isinstance(answer, Lease):
                await answer.abort()
            if scene.lease._ended:
                await scene.cache.check_invariants()
                scene = await Scene.make()
    await scene.cache.check_invariants()
    await scene.cache.close()

    assert wrong == []


# ---------------------------------------------------------------- tensors of the right shape

Spoil = Callable[[torch.Tensor], torch.Tensor]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some of these kinds warn that they may change
    NO_NUMBERS: dict[str, Spoil] = {
        "complex": lambda kv: kv.to(torch.complex64),
        "conjugate": lambda kv: kv.to(torch.complex64).conj(),
        "sparse": lambda kv: kv.to_sparse(),
        "meta": lambda kv: kv.to("meta"),
        "quantized": lambda kv: torch.quantize_per_tensor(kv, 0.1, 0, torch.quint8),
        "nested": lambda kv: torch.nested.nested_tensor(list(kv)),
        "bits": lambda kv: kv.to(torch.uint8).view(torch.bits8),
    }
    NUMBERS: dict[str, Spoil] = {
        "with a gradient": lambda kv: kv.clone().requires_grad_(),
        "computed with a gradient": lambda kv: kv.clone().requires_grad_() * 1,
        "a parameter": torch.nn.Parameter,
        "a negative view": lambda kv: negated(kv),
        "the other part of a conjugate": lambda kv: torch.complex(kv, -kv).conj().imag,
        "in another order": lambda kv: kv.transpose(-1, -2).contiguous().transpose(-1, -2),
        **{str(dtype): partial(torch.Tensor.to, dtype=dtype) for dtype in sorted(_NUMBERS, key=str)},
    }


NOT_TAKEN = r"K and V must be|must be dense tensors"


@pytest.mark.parametrize("spoil", NO_NUMBERS.values(), ids=NO_NUMBERS)
@pytest.mark.parametrize("which", [0, 1])
async def test_kv_that_is_no_tensor_of_numbers_is_refused_whatever_its_shape(which: int, spoil: Spoil) -> None:
    scene = await Scene.make()
    one, every = [scene.kv, scene.kv], [scene.all_kv, scene.all_kv]
    one[which], every[which] = spoil(one[which]), spoil(every[which])
    before = await scene.state()

    with pytest.raises(InvalidRequest, match=NOT_TAKEN):
        scene.pool.write(0, scene.own, *one)
    with pytest.raises(InvalidRequest, match=NOT_TAKEN):
        await scene.pool.write_kv(scene.lease, scene.own, *every)
    with pytest.raises(InvalidRequest, match=NOT_TAKEN):
        scene.pool.gather(0, scene.own, (one[0], one[1]))

    assert await scene.state() == before


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 1, 3, 2], [3, 1, 0, 2]], ids=str)
@pytest.mark.parametrize("spoil", NUMBERS.values(), ids=NUMBERS)
async def test_kv_of_numbers_is_written_as_values_whatever_it_is_a_view_of(spoil: Spoil, order: list[int]) -> None:
    scene = await Scene.make()
    slots, k = scene.own[torch.tensor(order)], torch.arange(8.0).view(4, 1, 2)
    expected = k.bool().float() if spoil(k).dtype is torch.bool else k

    scene.pool.write(0, slots, spoil(k), spoil(k))

    assert scene.pool.gather(0, slots)[0].equal(expected)
    assert not scene.pool.k[0].requires_grad
    await scene.pool.write_kv(scene.lease, slots, spoil(k.expand(2, 4, 1, 2)), spoil(k.expand(2, 4, 1, 2)))
    assert (await scene.pool.read_kv(scene.lease, slots))[1].equal(expected.expand(2, 4, 1, 2))
    await scene.cache.close()


async def test_slots_and_tokens_are_read_as_values_whatever_they_are_a_view_of() -> None:
    scene = await Scene.make()
    k = torch.arange(8.0).view(4, 1, 2)

    scene.pool.write(0, negated(scene.own), k, k)
    assert scene.pool.gather(0, negated(scene.own))[0].equal(k)
    assert (await scene.pool.read_kv(scene.lease, negated(scene.own)))[0][0].equal(k)
    assert (await scene.cache.match(negated(torch.tensor(PROMPT)))).prefix_len == 4
    assert RadixKey(negated(torch.tensor(PROMPT))) == RadixKey(PROMPT)
    await scene.cache.close()


def inference(kv: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return kv.clone()


@pytest.mark.parametrize("spoil", [torch.nn.Parameter, negated, inference], ids=lambda each: each.__name__)
async def test_kv_is_gathered_into_tensors_that_can_be_overwritten(spoil: Spoil) -> None:
    scene = await Scene.make()

    with pytest.raises(InvalidRequest, match="out must be a tensor that can be overwritten"):
        scene.pool.gather(0, scene.own, (scene.kv, spoil(scene.kv)))

    await scene.cache.close()


# ---------------------------------------------------------------- the end of a lease, and of a cache


@pytest.mark.parametrize(("release", "ends"), [("no", False), ("yes", True), (0, False), (1, True)], ids=str)
async def test_a_substitute_for_a_bool_means_the_same_to_the_lease_and_to_the_cache(release: Any, ends: bool) -> None:
    scene = await Scene.make()

    await scene.lease.insert(PROMPT, release=release)

    assert (await scene.cache.stats()).open_leases == (not ends)
    assert scene.lease._ended is ends
    await scene.cache.close()


async def test_a_cache_is_closed_within_a_number_of_seconds_alone() -> None:
    scene = await Scene.make()

    for name, bad in BAD_VALUES.items():
        if name not in SECONDS:
            with pytest.raises(InvalidRequest, match="finite number of seconds"):
                await scene.cache.close(drain_s=bad)

    await scene.lease.extend(1)  # the lease is open
    await scene.cache.close()


def test_a_key_of_the_core_takes_ids_alone() -> None:
    for bad in BAD_VALUES.values():
        with suppress(InvalidKeyError):
            RadixKey(bad)
        with suppress(InvalidKeyError):
            RadixKey([1], bad)


# ---------------------------------------------------------------- plain calls

SYNC: dict[str, Callable[[SyncClient, SyncLease, SyncPool, Any], Any]] = {
    "match": lambda client, lease, pool, bad: client.match(bad),
    "acquire": lambda client, lease, pool, bad: client.acquire([1], new_tokens=bad, timeout_s=bad),
    "insert": lambda client, lease, pool, bad: lease.insert(bad),
    "extend": lambda client, lease, pool, bad: lease.extend(bad),
    "release_window": lambda client, lease, pool, bad: lease.release_window(bad),
    "lock": lambda client, lease, pool, bad: client.lock([1], extra_key=bad, priority=bad),
    "adopt": lambda client, lease, pool, bad: client.adopt(bad),
    "evict": lambda client, lease, pool, bad: client.evict(bad),
    "events": lambda client, lease, pool, bad: next(client.events(bad)),
    "event_snapshot": lambda client, lease, pool, bad: client.event_snapshot(tier=bad),
    "attach_pool": lambda client, lease, pool, bad: client.attach_pool(bad),
    "write": lambda client, lease, pool, bad: pool.write(0, bad, bad, bad),
    "gather": lambda client, lease, pool, bad: pool.gather(0, bad),
    "write_kv": lambda client, lease, pool, bad: pool.write_kv(lease, bad, bad, bad),
    "write_kv of a lease": lambda client, lease, pool, bad: pool.write_kv(bad, lease.slots, bad, bad),
    "read_kv": lambda client, lease, pool, bad: pool.read_kv(lease, bad),
}


def test_plain_calls_refuse_the_same_arguments_as_coroutines() -> None:
    wrong = []
    with LocalPrefixCache(CONFIG).sync as client, client.acquire(PROMPT, new_tokens=4) as lease:
        lease.insert(PROMPT)
        pool = client.attach_pool()
        for verb, use in SYNC.items():
            for name, bad in BAD_VALUES.items():
                try:
                    answer = use(client, lease, pool, bad)
                except CacheError:
                    continue
                except Exception as error:
                    wrong.append(f"{verb}, {name}: {error!r}")
                else:
                    if isinstance(answer, SyncLease):
                        answer.abort()
        assert client.stats().open_leases == 1
        client.check_invariants()

    assert wrong == []


# ---------------------------------------------------------------- actors

ON_RAY: dict[str, tuple[Callable[[Any, Any], Any], set[str]]] = {  # with the values that each accepts
    "start_cache(config)": (lambda cache, bad: start_cache(bad), set()),
    "start_cache(name)": (lambda cache, bad: start_cache(CONFIG, name=bad), {"None", "a str", "a Text"}),
    "start_cache(namespace)": (lambda cache, bad: start_cache(CONFIG, name="n", namespace=bad), TEXTS),
    "start_cache(num_gpus)": (lambda cache, bad: start_cache(CONFIG, num_gpus=bad), {"None", "True", "a huge int"}),
    "start_cache(lifetime)": (lambda cache, bad: start_cache(CONFIG, lifetime=bad), {"None"}),
    "start_cache(scheduling_strategy)": (lambda cache, bad: start_cache(CONFIG, scheduling_strategy=bad), {"None"}),
    "start_cache(max_restarts)": (lambda cache, bad: start_cache(CONFIG, max_restarts=bad), {"True", "a negative int"}),
    "start_cache(timeout_s)": (lambda cache, bad: start_cache(CONFIG, timeout_s=bad), {"None", "a fraction"}),
    "connect(name)": (lambda cache, bad: connect(bad), {"a str", "a Text"}),
    "connect(namespace)": (lambda cache, bad: connect("n", namespace=bad), TEXTS),
    "connect(config)": (lambda cache, bad: connect("n", config=bad), {"None"}),
    "connect(timeout_s)": (lambda cache, bad: connect("n", config=CONFIG, timeout_s=bad), {"a fraction"}),
    "shutdown_cache(cache)": (lambda cache, bad: shutdown_cache(bad), set()),
    "shutdown_cache(drain_s)": (lambda cache, bad: shutdown_cache(cache, drain_s=bad), {"a fraction"}),
    "beside(cache)": (lambda cache, bad: beside(bad), {"a str", "a Text"}),
    "beside(timeout_s)": (lambda cache, bad: beside(cache, timeout_s=bad), {"a fraction"}),
    "PrefixCacheClient(cache)": (
        lambda cache, bad: asyncio.run(PrefixCacheClient(bad).match([1])),
        {"a str", "a Text"},
    ),
}


@pytest.mark.ray
@pytest.mark.parametrize(("use", "taken"), ON_RAY.values(), ids=ON_RAY)
def test_functions_that_start_find_and_end_actors_refuse_malformed_arguments_immediately(
    use: Callable[[Any, Any], Any], taken: set[str], running_cache: Callable[[CacheConfig], Any]
) -> None:
    cache = running_cache(CONFIG)
    before = ray.util.list_named_actors(all_namespaces=True)

    for name, bad in BAD_VALUES.items():
        if name not in taken:
            with pytest.raises(InvalidRequest):
                use(cache, bad)

    assert ray.util.list_named_actors(all_namespaces=True) == before
    ray.get(cache.stats.remote())
