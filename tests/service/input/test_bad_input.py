"""Bad input gets a typed error with advice, and leaves the cache unchanged."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.caches.cache_kinds import NUM_LAYERS
from support.caches.cache_under_test import CacheUnderTest, Pages, small_config
from support.caches.raw_calls import Scene
from support.models.bad_tensors import TENSORS_WITHOUT_A_ROW

from raydix.actors import Lease, LocalPrefixCache, PrefixCacheClient, connect, start_cache
from raydix.actors.client.attached_pool import AttachedPool
from raydix.schemas import (
    CacheConfig,
    CacheUnavailable,
    EvictionConfig,
    InvalidRequest,
    PoolConfig,
    PoolExhausted,
    UnknownLease,
)

# ---------------------------------------------------------------- tokens


class Unreadable:
    """An array that numpy cannot read, like those on a GPU."""

    def __array__(self, *of: Any, **how: Any) -> Any:
        raise TypeError("not without a copy")


BAD_TOKENS: list[tuple[Any, str]] = [
    ([], "at least one token id is needed"),
    (np.array([], np.int64), "at least one token id is needed"),
    ([-1], "integers in"),
    (np.array([3, -1]), "must not be negative: found -1"),
    ([1.5], "fractional"),
    ([2**64], "too large"),
    ([[1, 2]], "batch of one row"),
    ([np.array([1, 2])], "batch of one row"),
    ([torch.tensor([1, 2])], "batch of one row"),
    ([np.array([1, 2]), np.array([3, 4])], "no integer"),
    ([torch.tensor(1.5)], "no integer"),
    ([torch.tensor(1, device="meta")], "no integer"),
    (["1"], "integers in"),
    ([None], "integers in"),
    (np.array([1.0]), "cast them first"),
    (np.array([True]), "cast them first"),
    (np.array([None]), "cast them first"),
    (np.array([[1, 2]]), "one-dimensional"),
    (np.array(1), "one-dimensional"),
    (torch.tensor([1.5]), "cast them first"),
    (torch.tensor([1.5], dtype=torch.bfloat16), "cast them first"),
    (torch.tensor([[1, 2]]), "one-dimensional"),
    (torch.tensor([-2]), "must not be negative: found -2"),
    *((tensor, "a dense tensor of integers that has values") for tensor in TENSORS_WITHOUT_A_ROW),
    (Unreadable(), "cannot be read from Unreadable: not without a copy"),
    ("abc", "must be a list, array or tensor of integers, not str"),
    (b"abc", "must be a list, array or tensor of integers, not bytes"),
    (None, "must be a list, array or tensor of integers, not NoneType"),
    (7, "must be a list, array or tensor of integers, not int"),
    ({1, 2}, "must be a list, array or tensor of integers, not set"),
    (iter([1, 2]), "must be a list, array or tensor of integers"),
]


@pytest.mark.parametrize("verb", ["match", "lock", "acquire", "prefetch", "insert"])
async def test_tokens_that_are_not_a_sequence_of_ids_are_refused(scene: Scene, verb: str) -> None:
    call = getattr(scene.lease if verb == "insert" else scene.client, verb)

    for tokens, advice in BAD_TOKENS:
        with pytest.raises(InvalidRequest, match=f"^tokens: .*{advice}"):
            await call(tokens)


# ---------------------------------------------------------------- other arguments

BAD_NAMESPACES: list[tuple[dict[str, Any], str]] = [
    ({"extra_key": 7}, "extra_key must be a string or None, not int"),
    ({"lora_id": b"x"}, "lora_id must be a string or None, not bytes"),
    ({"cache_salt": ["x"]}, "cache_salt must be a string or None, not list"),
    ({"extra_key": "x" * 4097}, "4097 characters, more than 4096: pass a digest"),
    ({"lora_id": "\ud800"}, "lora_id is not valid Unicode"),
]


@pytest.mark.parametrize("verb", ["match", "lock", "acquire", "prefetch"])
async def test_a_wrong_namespace_is_refused(scene: Scene, verb: str) -> None:
    for namespace, advice in BAD_NAMESPACES:
        with pytest.raises(InvalidRequest, match=advice):
            await getattr(scene.client, verb)([1], **namespace)


NOT_A_NUMBER = float("nan")

BAD_ARGUMENTS: list[tuple[str, dict[str, Any], str]] = [
    ("acquire", {"new_tokens": -1}, "new_tokens: .* greater than or equal to 0"),
    ("acquire", {"new_tokens": True}, "new_tokens: .* valid integer"),
    ("acquire", {"new_tokens": 1.0}, "new_tokens: .* valid integer"),
    ("acquire", {"new_tokens": "2"}, "new_tokens: .* valid integer"),
    ("acquire", {"new_tokens": None}, "new_tokens: .* valid integer"),
    ("acquire", {"max_prefix_len": -1}, "max_prefix_len: .* greater than or equal to 0"),
    ("acquire", {"max_prefix_len": False}, "max_prefix_len: .* valid integer"),
    ("acquire", {"max_prefix_len": 1.5}, "max_prefix_len: .* valid integer"),
    ("acquire", {"timeout_s": -0.1}, "timeout_s: .* greater than or equal to 0"),
    ("acquire", {"timeout_s": NOT_A_NUMBER}, "timeout_s: .* finite number"),
    ("acquire", {"timeout_s": float("inf")}, "timeout_s: .* finite number"),
    ("acquire", {"timeout_s": "soon"}, "timeout_s: .* valid number"),
    ("acquire", {"load": "perhaps"}, "load: .* valid boolean"),
    ("acquire", {"load": None}, "load: .* valid boolean"),
    ("acquire", {"load_timeout_s": -0.1}, "load_timeout_s: .* greater than or equal to 0"),
    ("acquire", {"load_timeout_s": NOT_A_NUMBER}, "load_timeout_s: .* finite number"),
    ("lock", {"load": "perhaps"}, "load: .* valid boolean"),
    ("lock", {"timeout_s": -0.1}, "timeout_s: .* greater than or equal to 0"),
    ("lock", {"timeout_s": "soon"}, "timeout_s: .* valid number"),
    ("lock", {"load_timeout_s": float("inf")}, "load_timeout_s: .* finite number"),
    ("extend", {"num_tokens": 0}, "num_tokens must be a positive integer, not 0"),
    ("extend", {"num_tokens": -1}, "num_tokens must be a positive integer, not -1"),
    ("extend", {"num_tokens": 1.0}, "num_tokens must be a positive integer, not 1.0"),
    ("extend", {"num_tokens": "1"}, "num_tokens must be a positive integer, not '1'"),
    ("extend", {"num_tokens": None}, "num_tokens must be a positive integer, not None"),
    ("extend", {"num_tokens": 1, "timeout_s": -1}, "timeout_s: .* greater than or equal to 0"),
    ("extend", {"num_tokens": 1, "timeout_s": NOT_A_NUMBER}, "timeout_s: .* finite number"),
    ("evict", {"num_tokens": -1}, "num_tokens: .* greater than or equal to 0"),
    ("evict", {"num_tokens": True}, "num_tokens: .* valid integer"),
    ("evict", {"num_tokens": 1.0}, "num_tokens: .* valid integer"),
    ("evict", {"num_tokens": np.float64(1)}, "num_tokens: .* valid integer"),
    ("evict", {"num_tokens": np.int64(-1)}, "num_tokens: .* greater than or equal to 0"),
    ("evict", {"num_tokens": 1, "tier": ""}, "tier: .* at least 1 character"),
    ("evict", {"num_tokens": 1, "tier": None}, "tier: .* valid string"),
    ("evict", {"num_tokens": 1, "tier": "host"}, "tier must be one of 'device', not 'host'"),
    ("extend", {"num_tokens": np.int64(0)}, "num_tokens must be a positive integer"),
]


@pytest.mark.parametrize(("verb", "arguments", "advice"), BAD_ARGUMENTS, ids=lambda value: str(value)[:40])
async def test_an_argument_out_of_its_range_is_refused_by_name(
    scene: Scene, verb: str, arguments: dict[str, Any], advice: str
) -> None:
    client = scene.client
    bound = {
        "acquire": lambda **given: client.acquire([1], **given),
        "lock": lambda **given: client.lock([1], **given),
        "extend": scene.lease.extend,
    }

    with pytest.raises(InvalidRequest, match=advice):
        await bound.get(verb, client.evict)(**arguments)


async def test_extend_refuses_a_bool(cache1: CacheUnderTest) -> None:
    lease = await cache1.client.acquire([1])

    with pytest.raises(InvalidRequest, match="num_tokens must be a positive integer, not True"):
        await lease.extend(True)


@pytest.mark.parametrize("form", [np.int64, np.uint8, torch.tensor], ids=lambda form: form.__name__)
async def test_every_verb_takes_any_kind_of_integer(cache1: CacheUnderTest, form: Callable[[int], Any]) -> None:
    client = cache1.client
    lease = await client.acquire([1, 2], new_tokens=form(1), max_prefix_len=form(1), priority=form(3))
    assert (await lease.extend(form(2))).shape == (2,)
    assert len(lease) == 5 and type(len(lease)) is int
    await lease.release_window(form(2))
    await lease.insert([1, 2], release=True)
    await (await client.lock([1, 2], priority=form(3))).release()

    assert len((await client.tree(max_nodes=form(9), max_depth=form(3), max_width=form(3))).branches) == 2
    assert (await client.evict(form(2))).num_evicted == 2
    await client.check_invariants()


# ---------------------------------------------------------------- inserts

BAD_INSERTS: list[tuple[list[int], str]] = [
    ([5, 6, 7, 8], "cannot insert 4 tokens: the lease covers 3, extend it"),
    ([5, 6, 8], "must begin with those that the lease was acquired for"),
    ([9], "must begin with those that the lease was acquired for"),
    ([2**40, 6], "must begin with those that the lease was acquired for"),
    ([5 + 2**32, 6, 7], "must begin with those that the lease was acquired for"),
]


@pytest.mark.parametrize(("tokens", "advice"), BAD_INSERTS, ids=str)
async def test_an_insert_that_does_not_fit_its_lease_is_refused(scene: Scene, tokens: list[int], advice: str) -> None:
    with pytest.raises(InvalidRequest, match=advice):
        await scene.lease.insert(tokens)
    with pytest.raises(InvalidRequest, match=advice):
        await scene.lease.insert(tokens, release=True)  # does not end the lease either


async def test_generated_tokens_once_published_cannot_be_replaced(cache1: CacheUnderTest) -> None:
    lease = await cache1.client.acquire([1], new_tokens=2)
    await lease.insert([1, 2])

    with pytest.raises(InvalidRequest, match="must begin with those that the lease was acquired for"):
        await lease.insert([1, 3, 4])

    assert await cache1.pages() == Pages(free=5, private=1, protected=2, leases=1)


async def test_of_two_inserts_at_once_with_different_generated_tokens_the_second_is_refused(
    cache1: CacheUnderTest,
) -> None:
    lease = await cache1.client.acquire([1], new_tokens=2)

    done, refused = await asyncio.gather(lease.insert([1, 2]), lease.insert([1, 3, 4]), return_exceptions=True)

    assert done.num_inserted == 2
    assert isinstance(refused, InvalidRequest)
    assert await cache1.pages() == Pages(free=5, private=1, protected=2, leases=1)
    assert await cache1.matched(1, 3) == 1


# ---------------------------------------------------------------- leases of other clients, and ended ones

Use = Callable[[PrefixCacheClient, Lease], Awaitable[Any]]


async def read_kv(client: PrefixCacheClient, lease: Lease) -> Any:
    return await (await client.attach_pool(mapped=False)).read_kv(lease, torch.tensor([1]))


USES: dict[str, Use] = {
    "insert": lambda client, lease: client.insert(lease, [5, 6, 7]),
    "extend": lambda client, lease: client.extend(lease, 1),
    "release": lambda client, lease: client.release(lease),
    "unlock": lambda client, lease: client.unlock(lease),
    "abort": lambda client, lease: client.abort(lease),
    "release_window": lambda client, lease: client.release_window(lease, 1),
    "grant": lambda client, lease: client.grant(lease),
    "read_kv": read_kv,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_another_clients_lease_is_refused(scene: Scene, use: Use) -> None:
    other = scene.cache.another_client()
    await other.open()

    with pytest.raises(UnknownLease, match="belongs to another client"):
        await use(other, scene.lease)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_a_wrong_lease_is_refused(scene: Scene, use: Use) -> None:
    wrong: Any
    for wrong in (None, 7, scene.lease.lease_id, [5, 6, 7], scene.client, use):
        with pytest.raises(InvalidRequest, match=f"`await client.acquire.* gives, not {type(wrong).__name__}"):
            await use(scene.client, wrong)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_the_first_client_cannot_use_a_later_ones_lease(cache1: CacheUnderTest, use: Use) -> None:
    lease = await cache1.another_client().acquire([5, 6, 7])
    await cache1.client.open()

    with pytest.raises(UnknownLease, match="belongs to another client"):
        await use(cache1.client, lease)

    assert await cache1.pages() == Pages(free=5, private=3, leases=1)


@pytest.mark.parametrize("end", ["release", "abort"])
async def test_an_ended_lease_can_neither_insert_nor_extend(cache1: CacheUnderTest, end: str) -> None:
    lease = await cache1.client.acquire([1])
    await getattr(lease, end)()

    with pytest.raises(UnknownLease, match="has ended"):
        await lease.insert([1])
    with pytest.raises(UnknownLease, match="has ended"):
        await lease.extend(1)

    await getattr(lease, end)()
    assert await cache1.pages() == Pages(free=8)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
async def test_a_lease_is_neither_pickled_nor_copied(scene: Scene, copied: Callable[[Lease], Any]) -> None:
    with pytest.raises(InvalidRequest, match="belongs to the client that took it"):
        copied(scene.lease)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
async def test_a_client_is_neither_pickled_nor_copied(scene: Scene, copied: Callable[[Any], Any]) -> None:
    for client in (scene.client, PrefixCacheClient("kv")):
        with pytest.raises(InvalidRequest, match="send the cache's name or handle, and make one there"):
            copied(client)


# ---------------------------------------------------------------- sizes beyond the pool

TOO_LARGE: dict[str, Callable[[Scene], Awaitable[Any]]] = {
    "a prompt": lambda scene: scene.client.acquire([1] * 9),
    "a prompt and its new tokens": lambda scene: scene.client.acquire([1], new_tokens=8),
    "a cached prompt and its new tokens": lambda scene: scene.client.acquire([5, 6], new_tokens=7),
    "a lease that grows": lambda scene: scene.lease.extend(6),
    "a prompt of a request that would wait": lambda scene: scene.client.acquire([1] * 9, timeout_s=60),
}


@pytest.mark.parametrize("asked", TOO_LARGE.values(), ids=TOO_LARGE)
async def test_a_request_larger_than_the_pool_is_refused_immediately(
    scene: Scene, asked: Callable[[Scene], Awaitable[Any]]
) -> None:
    async with asyncio.timeout(25):
        with pytest.raises(PoolExhausted, match="can never fit: shorten the request or enlarge") as caught:
            await asked(scene)

    error = caught.value
    assert (error.needed, error.free, error.evictable, error.can_ever_fit) == (9, 5, 0, False)
    assert (error.held_slots, error.open_leases) == (3, 1)


async def test_a_request_that_does_not_fit_now_names_the_slots_in_use(scene: Scene) -> None:
    with pytest.raises(
        PoolExhausted, match=r"release leases, raise timeout_s, or enlarge PoolConfig\.num_slots"
    ) as caught:
        await scene.client.acquire([1] * 6, timeout_s=0)

    error = caught.value
    assert (error.needed, error.free, error.evictable, error.can_ever_fit) == (6, 5, 0, True)
    assert (error.held_slots, error.open_leases) == (3, 1)


# ---------------------------------------------------------------- clients

VERBS: dict[str, Callable[[PrefixCacheClient, Lease], Awaitable[Any]]] = {
    "match": lambda client, lease: client.match([1]),
    "lock": lambda client, lease: client.lock([1]),
    "acquire": lambda client, lease: client.acquire([1]),
    "prefetch": lambda client, lease: client.prefetch([1]),
    "evict": lambda client, lease: client.evict(1),
    "reset": lambda client, lease: client.reset(),
    "stats": lambda client, lease: client.stats(),
    "check_invariants": lambda client, lease: client.check_invariants(),
    "attach_pool": lambda client, lease: client.attach_pool(),
    "insert": lambda client, lease: lease.insert([5, 6, 7]),
    "extend": lambda client, lease: lease.extend(1),
    "confirm_open": lambda client, lease: lease.confirm_open(),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
async def test_a_client_refuses_to_be_used_from_another_loop(scene: Scene, verb: Use) -> None:
    async def elsewhere() -> None:
        with pytest.raises(InvalidRequest, match="belongs to another event loop: make one client per loop"):
            await verb(scene.client, scene.lease)

    await asyncio.to_thread(asyncio.run, elsewhere())


async def test_a_pool_refuses_to_be_copied_to_and_from_on_another_loop(scene: Scene) -> None:
    pool, slots = await scene.client.attach_pool(), scene.lease.slots[2:]
    k, v = await pool.read_kv(scene.lease, slots)

    async def elsewhere() -> None:
        for copying in (pool.read_kv(scene.lease, slots), pool.write_kv(scene.lease, slots, k, v)):
            with pytest.raises(InvalidRequest, match="belongs to another event loop: make one client per loop"):
                await copying

    await asyncio.to_thread(asyncio.run, elsewhere())


@pytest.mark.parametrize("end", ["release", "abort"])
async def test_a_lease_that_another_loop_tried_to_end_can_still_be_ended(cache1: CacheUnderTest, end: str) -> None:
    lease = await cache1.client.acquire([1])

    async def elsewhere() -> None:
        with pytest.raises(InvalidRequest, match="belongs to another event loop"):
            await getattr(lease, end)()

    await asyncio.to_thread(asyncio.run, elsewhere())
    await getattr(lease, end)()

    assert await cache1.pages() == Pages(free=8)


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
async def test_a_closed_client_says_to_make_a_new_one(cache1: CacheUnderTest, verb: Use) -> None:
    closed = cache1.another_client()
    lease = await closed.acquire([5, 6, 7])
    await closed.close()

    with pytest.raises(InvalidRequest, match="this client was closed: make a new one"):
        await verb(closed, lease)

    assert await cache1.pages() == Pages(free=8)


async def test_a_client_closed_before_its_first_verb_stays_closed(cache1: CacheUnderTest) -> None:
    client = cache1.another_client()
    await client.close()

    with pytest.raises(InvalidRequest, match="make a new one"):
        await client.open()


async def test_a_client_that_is_not_open_does_not_know_its_configuration(cache1: CacheUnderTest) -> None:
    client = cache1.another_client()

    with pytest.raises(InvalidRequest, match=r"await open\(\) first"):
        _ = client.config

    await client.open()
    assert client.config == small_config(1)


@pytest.mark.parametrize("cache", [None, 7, object()], ids=["None", "int", "object"])
async def test_a_client_of_another_object_is_refused_with_the_forms_of_a_cache(cache: Any) -> None:
    with pytest.raises(InvalidRequest, match="cache must be an actor handle, a name or a LocalPrefixCache, not"):
        await PrefixCacheClient(cache).match([1])


# ---------------------------------------------------------------- a closed cache


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
async def test_a_local_cache_that_was_closed_is_unavailable_to_its_other_clients(verb: Use) -> None:
    cache = LocalPrefixCache(small_config())
    client = PrefixCacheClient(cache)
    lease = await client.acquire([5, 6, 7])
    await cache.close()

    with pytest.raises(CacheUnavailable, match="has been shut down"):
        await verb(client, lease)


async def test_a_local_cache_that_was_closed_takes_no_new_clients() -> None:
    cache = LocalPrefixCache(small_config())
    await cache.close()
    await cache.close()

    with pytest.raises(CacheUnavailable, match="has been shut down"):
        await PrefixCacheClient(cache).open()


@pytest.mark.parametrize("end", ["release", "abort"])
async def test_ending_a_lease_after_its_local_cache_was_closed_is_no_error(end: str) -> None:
    cache = LocalPrefixCache(small_config())
    lease = await PrefixCacheClient(cache).acquire([1])
    await cache.close()

    await getattr(lease, end)()


# ---------------------------------------------------------------- the pool


def kv_of(num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(NUM_LAYERS, num_slots, 1, 2), torch.ones(NUM_LAYERS, num_slots, 1, 1)


async def test_only_private_slots_can_be_written(scene: Scene) -> None:
    pool = await scene.client.attach_pool(mapped=False)
    published, private = scene.lease.slots[:2], scene.lease.slots[2:]
    free = (set(range(1, 9)) - set(scene.lease.slots.tolist())).pop()

    await pool.write_kv(scene.lease, private, *kv_of(1))
    for refused in (published, torch.cat((private, published[:1])), torch.tensor([free]), torch.tensor([0])):
        with pytest.raises(InvalidRequest, match="only slots that were not published yet can be written"):
            await pool.write_kv(scene.lease, refused, *kv_of(len(refused)))

    k, v = await pool.read_kv(scene.lease, scene.lease.slots)
    assert (k[0, 2, 0].tolist(), v[1, 2, 0].tolist()) == ([1, 1], [1])
    assert not bool((k[0, :2, 0] == 1).any())  # published slots keep their content, even if it is poison


async def test_only_slots_that_the_lease_covers_can_be_read(scene: Scene) -> None:
    pool = await scene.client.attach_pool(mapped=False)
    free = (set(range(1, 9)) - set(scene.lease.slots.tolist())).pop()

    for refused in ([free], [0], [-1], [9], [2**40], [*scene.lease.slots.tolist(), free]):
        with pytest.raises(InvalidRequest, match="does not cover all of these slots"):
            await pool.read_kv(scene.lease, torch.tensor(refused))


BAD_USES: dict[str, Callable[[AttachedPool, torch.Tensor], Any]] = {
    "write to a list": lambda pool, slots: pool.write(0, slots.tolist(), *one_layer(3)),  # type: ignore[arg-type]
    "write to a grid": lambda pool, slots: pool.write(0, slots[None], *one_layer(1)),
    "write to floats": lambda pool, slots: pool.write(0, slots.float(), *one_layer(3)),
    "write to a far slot": lambda pool, slots: pool.write(0, slots + 5000, *one_layer(3)),
    "write to far slots": lambda pool, slots: pool.write(0, slots.flip(0) + 5000, *one_layer(3)),
    "write too little": lambda pool, slots: pool.write(0, slots, *one_layer(2)),
    "write numpy": lambda pool, slots: pool.write(0, slots, *(each.numpy() for each in one_layer(3))),
    "write to no layer": lambda pool, slots: pool.write(7, slots, *one_layer(3)),
    "write to a layer by name": lambda pool, slots: pool.write("0", slots, *one_layer(3)),  # type: ignore[arg-type]
    "gather a list": lambda pool, slots: pool.gather(0, slots.tolist()),  # type: ignore[arg-type]
    "gather far slots": lambda pool, slots: pool.gather(0, slots + 5000),
    "gather no layer": lambda pool, slots: pool.gather(-1, slots),
    "gather into numpy": lambda pool, slots: pool.gather(0, slots, tuple(each.numpy() for each in one_layer(3))),  # type: ignore[arg-type]
    "gather into too little": lambda pool, slots: pool.gather(0, slots, one_layer(2)),
    "gather into one tensor": lambda pool, slots: pool.gather(0, slots, one_layer(3)[0]),  # type: ignore[arg-type]
    "gather into three": lambda pool, slots: pool.gather(0, slots, (*one_layer(3), slots)),  # type: ignore[arg-type]
    "gather into nothing": lambda pool, slots: pool.gather(0, slots, 7),  # type: ignore[arg-type]
    "gather sparse slots": lambda pool, slots: pool.gather(0, slots.to_sparse()),
    "gather slots without values": lambda pool, slots: pool.gather(0, slots.to("meta")),
    "write sparse": lambda pool, slots: pool.write(0, slots, *(each.to_sparse() for each in one_layer(3))),
    "write tensors without values": lambda pool, slots: pool.write(
        0, slots, *(each.to("meta") for each in one_layer(3))
    ),
    "the state of no layer": lambda pool, slots: pool.state(9),
}


def one_layer(num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = kv_of(num_slots)
    return k[0], v[0]


@pytest.mark.parametrize("use", BAD_USES.values(), ids=list(BAD_USES))
async def test_a_mapped_pool_names_the_fault_of_a_call(
    use: Callable[[AttachedPool, torch.Tensor], Any],
) -> None:
    async with LocalPrefixCache(small_config()) as cache:
        pool, lease = await cache.attach_pool(), await cache.acquire([1, 2, 3])
        before = [k.view(torch.uint8).clone() for k in pool.k]

        with pytest.raises(InvalidRequest, match=r"slots|layer|tensor|out|index"):
            use(pool, lease.slots)

        assert all(map(torch.equal, before, [k.view(torch.uint8) for k in pool.k]))
        pool.write(0, lease.slots.flip(0).int(), *one_layer(3))  # slots may be of any integer dtype
        assert pool.gather(0, lease.slots.int())[0].equal(one_layer(3)[0].to(pool.k[0].dtype))


@pytest.mark.parametrize("page_size", [1, 4])
async def test_slots_outside_the_pool_are_named_with_those_that_there_are(page_size: int) -> None:
    async with LocalPrefixCache(small_config(page_size)) as cache:
        pool = await cache.attach_pool()

        for slots in (torch.arange(60, 60 + 4 * page_size), torch.tensor([60, 4, 63])):
            found = rf"rows of the pool, 0 to {len(pool.k[0]) - 1}, not {slots.min()} to {slots.max()}$"
            with pytest.raises(InvalidRequest, match=found):
                pool.gather(0, slots)
            with pytest.raises(InvalidRequest, match=found):
                pool.write(0, slots, *one_layer(len(slots)))


async def test_copied_values_must_be_tensors(scene: Scene) -> None:
    pool = await scene.client.attach_pool(mapped=False)
    slots, (k, v) = scene.lease.slots[2:], kv_of(1)

    wrong: Any
    for wrong in (slots.tolist(), slots.numpy(), None):
        with pytest.raises(InvalidRequest, match="slots must be a tensor"):
            await pool.write_kv(scene.lease, wrong, k, v)
        with pytest.raises(InvalidRequest, match="slots must be a tensor"):
            await pool.read_kv(scene.lease, wrong)
    for wrong in (v.numpy(), v.tolist(), None):
        with pytest.raises(InvalidRequest, match="K and V must be tensors"):
            await pool.write_kv(scene.lease, slots, k, wrong)


async def test_copied_tensors_have_values_and_are_dense(scene: Scene) -> None:
    pool = await scene.client.attach_pool(mapped=False)
    slots, (k, v) = scene.lease.slots[2:], kv_of(1)

    for spoilt in (lambda tensor: tensor.to_sparse(), lambda tensor: tensor.to("meta")):
        for arguments in ((spoilt(slots), k, v), (slots, spoilt(k), v), (slots, k, spoilt(v))):
            with pytest.raises(InvalidRequest, match="must be dense tensors that have values"):
                await pool.write_kv(scene.lease, *arguments)
        with pytest.raises(InvalidRequest, match="must be dense tensors that have values"):
            await pool.read_kv(scene.lease, spoilt(slots))


async def test_a_row_of_slots_is_one_dimensional(scene: Scene) -> None:
    pool = await scene.client.attach_pool(mapped=False)

    with pytest.raises(InvalidRequest, match="slots must be a 1-D tensor of integers"):
        await pool.read_kv(scene.lease, scene.lease.slots[None])


async def test_slots_are_integers(cache1: CacheUnderTest) -> None:
    lease = await cache1.client.acquire([1])
    pool = await cache1.client.attach_pool(mapped=False)

    with pytest.raises(InvalidRequest, match="slots must be"):
        await pool.write_kv(lease, lease.slots + 0.5, *kv_of(1))


@pytest.mark.parametrize(
    ("k_shape", "v_shape", "wrong"),
    [
        ((NUM_LAYERS, 2, 1, 2), (NUM_LAYERS, 1, 1, 1), "k"),
        ((1, 1, 1, 2), (NUM_LAYERS, 1, 1, 1), "k"),
        ((NUM_LAYERS, 1, 2), (NUM_LAYERS, 1, 1, 1), "k"),
        ((NUM_LAYERS, 1, 1, 2), (NUM_LAYERS, 1, 1, 2), "v"),
    ],
    ids=str,
)
async def test_kv_of_another_shape_is_refused_naming_the_right_one(
    scene: Scene, k_shape: tuple[int, ...], v_shape: tuple[int, ...], wrong: str
) -> None:
    pool = await scene.client.attach_pool(mapped=False)

    right = rf"\({NUM_LAYERS}, 1, 1, {2 if wrong == 'k' else 1}\)"
    with pytest.raises(InvalidRequest, match=f"^{wrong} must be of shape {right}"):
        await pool.write_kv(scene.lease, scene.lease.slots[2:], torch.ones(k_shape), torch.ones(v_shape))


async def test_an_ended_lease_can_be_neither_read_nor_written(cache1: CacheUnderTest) -> None:
    pool = await cache1.client.attach_pool(mapped=False)
    lease = await cache1.client.acquire([1])
    await lease.release()

    with pytest.raises(UnknownLease, match="has ended"):
        await pool.read_kv(lease, lease.slots)
    with pytest.raises(UnknownLease, match="has ended"):
        await pool.write_kv(lease, lease.slots, *kv_of(1))


@pytest.mark.parametrize("verb", ["read_kv", "write_kv"])
async def test_another_sessions_lease_can_be_neither_read_nor_written(scene: Scene, verb: str) -> None:
    pool = await scene.cache.another_client().attach_pool(mapped=False)
    private = scene.lease.slots[2:]

    with pytest.raises(UnknownLease, match="belongs to another"):
        await getattr(pool, verb)(scene.lease, private, *(kv_of(1) if verb == "write_kv" else ()))


async def test_an_unmapped_pool_names_the_calls_that_work(scene: Scene) -> None:
    pool = await scene.client.attach_pool(mapped=False)
    slots = scene.lease.slots[2:]
    plain: list[Callable[[], Any]] = [
        lambda: pool.write(0, slots, torch.ones(1, 1, 2), torch.ones(1, 1, 1)),
        lambda: pool.gather(0, slots),
        lambda: pool.k,
        lambda: pool.v,
    ]

    assert not pool.mapped
    for call in plain:
        with pytest.raises(InvalidRequest, match=r"not mapped: use `await write_kv\(...\)` and `await read_kv\(...\)`"):
            call()


# ---------------------------------------------------------------- configuration and deployment


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: EvictionConfig(high_watermark=0.5, low_watermark=0.8), r"low_watermark \(0.8\) must be below"),
        (lambda: EvictionConfig(high_watermark=0.8, low_watermark=0.8), r"low_watermark \(0.8\) must be below"),
        (lambda: EvictionConfig(high_watermark=1.5), "less than or equal to 1"),
        (lambda: CacheConfig(page_size=16, pool=PoolConfig(num_slots=24)), r"\(24\) must be a multiple of page_size"),
        (lambda: CacheConfig(page_size=0, pool=PoolConfig(num_slots=8)), "greater than or equal to 1"),
        (lambda: PoolConfig(num_slots=0), "greater than 0"),
        (lambda: PoolConfig(num_slots=8, layers=[{}]), "needs num_kv_heads and head_dim of at least 1"),
        (lambda: PoolConfig(num_slots=8, dtype="int3"), "'bfloat16'"),
        (lambda: CacheConfig(kind="radish", pool=PoolConfig(num_slots=8)), "'radix'"),
        (lambda: CacheConfig(pool=PoolConfig(num_slots=8), page_sise=1), "page_sise"),
    ],
    ids=["low>high", "low=high", "high>1", "part of a page", "no page", "no slot", "no shape", "dtype", "kind", "typo"],
)
def test_a_configuration_that_cannot_be_is_refused(make: Callable[[], Any], advice: str) -> None:
    with pytest.raises(ValidationError, match=advice):
        make()


@pytest.mark.parametrize("config", [None, {"pool": {"num_slots": 8}}, PoolConfig(num_slots=8)], ids=type)
def test_a_wrong_configuration_makes_no_cache(config: Any) -> None:
    for start in (LocalPrefixCache, start_cache):
        with pytest.raises(InvalidRequest, match=f"a cache takes a CacheConfig, not {type(config).__name__}"):
            start(config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_pool_on_a_gpu_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(CacheUnavailable, match="no GPU is visible here: use 'auto' or 'cpu'"):
        LocalPrefixCache(CacheConfig(pool=PoolConfig(num_slots=8, device="cuda")))


TOO_LARGE_POOL = PoolConfig.uniform(
    num_slots=1024, num_layers=1000, num_kv_heads=1000, head_dim=1_000_000, dtype="float32", device="cpu"
)
NAMES_BOTH = r"needs [\d,.]+ [KMGTP]iB .*, but [\d,.]+ [KMGTP]iB are free: lower pool.num_slots"


def test_a_local_pool_larger_than_memory_names_the_needed_and_the_free_bytes() -> None:
    with pytest.raises(CacheUnavailable, match=NAMES_BOTH):
        LocalPrefixCache(CacheConfig(pool=TOO_LARGE_POOL))


@pytest.mark.parametrize(
    ("config", "num_bytes"),
    [
        (CacheConfig(pool=PoolConfig(num_slots=1_000_000)), 12_000_000),
        (CacheConfig(pool=PoolConfig(num_slots=1_600_000), page_size=16), 1_200_000),
        (CacheConfig(pool=PoolConfig(num_slots=1_000_000), sliding_window_size=4), 32_000_000),
        (CacheConfig(pool=PoolConfig(num_slots=16, num_state_slots=100_000), kind="mamba"), 4_000_000),
        (CacheConfig(pool=PoolConfig(num_slots=1_600_000), kind="slots", max_seq_len=16), 900_000),
    ],
    ids=lambda value: value.kind if isinstance(value, CacheConfig) else f"{value:,}",
)
async def test_the_index_of_a_pool_without_layers_must_fit_in_memory(
    config: CacheConfig, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(free: int) -> LocalPrefixCache:
        monkeypatch.setattr("raydix.actors.memory.pool_memory.available_memory", lambda: free)
        return LocalPrefixCache(config)

    with pytest.raises(CacheUnavailable, match=NAMES_BOTH):
        make(num_bytes - 1_000)
    async with make(num_bytes + 500_000) as cache:
        assert (await cache.stats()).free_slots == config.pool.num_slots


@pytest.mark.ray
def test_an_actors_pool_larger_than_memory_names_the_needed_and_the_free_bytes(ray_cluster: None) -> None:
    with pytest.raises(CacheUnavailable, match=NAMES_BOTH):
        start_cache(CacheConfig(pool=TOO_LARGE_POOL))


@pytest.mark.ray
def test_an_unknown_name_is_unavailable_and_says_to_start_it(ray_cluster: None) -> None:
    with pytest.raises(
        CacheUnavailable, match="no cache named 'nowhere' runs in namespace 'raydix': start_cache first"
    ):
        connect("nowhere")


@pytest.mark.ray
async def test_a_client_of_an_unknown_name_fails_at_its_first_verb(ray_cluster: None) -> None:
    client = PrefixCacheClient("nowhere")

    for _ in range(2):
        with pytest.raises(CacheUnavailable, match="no cache named 'nowhere' runs"):
            await client.match([1])
    await client.close()


# ---------------------------------------------------------------- different arrays with equal bytes

INT32, UINT32 = np.dtype("<i4"), np.dtype("<u4")
ALIKE: dict[str, tuple[Any, Any]] = {
    "half the number, twice the width": (np.array([1, 0], np.int64), np.array([1], np.int64)),
    "swapped": (np.array([1, 2], ">i4"), np.array([1, 2], "<i4").view(">i4")),
    "unsigned, then negative": (np.array([2**32 - 1, 2], UINT32), np.array([-1, 2], INT32)),
    "in rows": (np.array([1, 2], INT32), np.array([[1, 2]], INT32)),
}


@pytest.mark.parametrize(("acquired", "inserted"), ALIKE.values(), ids=ALIKE)
async def test_other_ids_of_the_same_bytes_are_not_taken_for_those_that_were_acquired(
    cache1: CacheUnderTest, acquired: Any, inserted: Any
) -> None:
    lease = await cache1.client.acquire(acquired)

    if inserted.dtype == np.int64:  # the first of the acquired ids
        assert (await lease.insert(inserted)).num_inserted == 1
    else:
        with pytest.raises(InvalidRequest):
            await lease.insert(inserted)

    await lease.insert(acquired, release=True)
    assert await cache1.matched(*acquired.tolist()) == 2
