"""Images, pairs and look-alike namespaces through the service: from the caller's argument to the events, also on Ray.

Eight pages of 16 tokens. An image is one id of 64 bits, repeated for each of its tokens.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
import torch
from support.caches.cache_under_test import Access, CacheUnderTest, small_config
from support.reference.event_index import ReplayedIndex
from support.reference.keys import DEFAULT, Token, Triple, event_hashes, framed, image_id, pairs

from raydix.cache_core import hash_bytes
from raydix.schemas import BlockStored, CacheConfig, InvalidRequest, KVEventSnapshot

PAGE = 16
TEXT = list(range(PAGE))
CAT, DOG = hash_bytes(b"cat"), hash_bytes(b"dog")  # one below 2**63, one above
FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "array": lambda ids: array("Q", ids),
    "uint64": lambda ids: np.array(ids, np.uint64),
    "torch": lambda ids: torch.from_numpy(np.array(ids, np.uint64)),
}
LOOK_ALIKES: list[Triple] = [
    DEFAULT,
    ("", None, None),
    (None, "", None),
    ("a", "b\0", None),
    ("a", "b", "\0"),
    ("a\0b", None, "\0"),
    ("1:a", None, "b"),
    (None, "1:a", "b"),
]


def config(**changes: Any) -> CacheConfig:
    return small_config(PAGE).model_copy(update={"events": True, **changes})


@pytest.fixture
async def cache(request: pytest.FixtureRequest, access: Access) -> AsyncIterator[CacheUnderTest]:
    """An empty cache that publishes events."""
    running_cache = request.getfixturevalue("running_cache") if access == "ray" else None
    under_test = CacheUnderTest.reached(access, config(), running_cache)
    yield under_test
    await under_test.close()


@pytest.fixture
async def paired(request: pytest.FixtureRequest, access: Access) -> AsyncIterator[CacheUnderTest]:
    """The same with keys of pairs."""
    running_cache = request.getfixturevalue("running_cache") if access == "ray" else None
    under_test = CacheUnderTest.reached(access, config(bigram=True), running_cache)
    yield under_test
    await under_test.close()


def verb_arguments(triple: Triple) -> dict[str, str | None]:
    return dict(zip(("extra_key", "lora_id", "cache_salt"), triple, strict=True))


async def publish(cache: CacheUnderTest, tokens: Any, triple: Triple = DEFAULT) -> list[int]:
    """Publish these tokens; return their slots in the tree."""
    lease = await cache.client.acquire(tokens, **verb_arguments(triple))
    await lease.insert(tokens)
    slots: list[int] = lease.slots[: lease.published_len].tolist()
    await lease.release()
    return slots


async def found(cache: CacheUnderTest, tokens: Any, triple: Triple = DEFAULT) -> list[int]:
    """Return the slots of the longest cached prefix; a probe and a lock must report the same length."""
    lease = await cache.client.lock(tokens, **verb_arguments(triple))
    probe = await cache.client.match(tokens, **verb_arguments(triple))
    slots: list[int] = lease.slots.tolist()
    await lease.release()
    assert probe.prefix_len == lease.prefix_len == len(slots)
    return slots


async def replayed(cache: CacheUnderTest, start: KVEventSnapshot) -> ReplayedIndex:
    """Return the index that the events since `start` make of it; a snapshot must be equal."""
    index, now = ReplayedIndex(start), await cache.client.event_snapshot()
    async with asyncio.timeout(60), aclosing(cache.client.events(index.seq)) as events:
        while index.seq < now.seq:
            index.apply(await anext(events))
    assert index.blocks == ReplayedIndex(now).blocks
    return index


# ---------------------------------------------------------------- images


def test_the_two_images_are_as_they_should_be() -> None:
    assert (CAT, DOG) == (image_id(b"cat"), image_id(b"dog"))
    assert 2**32 <= CAT < 2**63 <= DOG


@pytest.mark.parametrize("form", FORMS)
async def test_a_namespace_of_text_takes_an_image_and_both_are_found(cache: CacheUnderTest, form: str) -> None:
    make = FORMS[form]
    text, image = TEXT * 2, [*TEXT, *[CAT] * (PAGE - 2), DOG, 7]
    start = await cache.client.event_snapshot()

    text_slots = await publish(cache, make(text))
    before = (await replayed(cache, start)).blocks
    image_slots = await publish(cache, make(image))

    for look in FORMS.values():
        assert await found(cache, look(text)) == text_slots
        assert await found(cache, look(image)) == image_slots
    assert image_slots[:PAGE] == text_slots[:PAGE]
    assert set(image_slots[PAGE:]).isdisjoint(text_slots)
    after = (await replayed(cache, start)).blocks
    assert before.keys() == set(event_hashes(text, PAGE))
    assert after.items() >= before.items()
    assert after.keys() == set(event_hashes(text, PAGE) + event_hashes(image, PAGE))
    assert list(after[event_hashes(image, PAGE)[1]].token_ids) == image[PAGE:]


async def test_text_of_an_images_bytes_is_not_the_image(cache: CacheUnderTest) -> None:
    low, high = CAT % 2**32, CAT >> 32
    texts = [[low] * PAGE, [high] * PAGE, [low, high] * (PAGE // 2), [high, low] * (PAGE // 2), [low, high] * PAGE]
    for text in texts[:2]:
        assert await found(cache, text) == []
    image_slots = await publish(cache, [CAT] * PAGE)  # the first key of its namespace has wide ids from the beginning

    for text in texts:
        assert await found(cache, text) == []
    slots = [await publish(cache, text) for text in texts[:4]]

    assert await found(cache, [CAT] * PAGE) == image_slots
    assert [await found(cache, text) for text in texts[:4]] == slots
    assert len({*image_slots, *(slot for each in slots for slot in each)}) == 5 * PAGE


async def test_an_image_of_a_texts_bytes_is_not_the_text(cache: CacheUnderTest) -> None:
    low, high = CAT % 2**32, CAT >> 32
    texts = [[low] * PAGE, [low, high] * (PAGE // 2)]
    slots = [await publish(cache, text) for text in texts]

    assert await found(cache, [CAT] * PAGE) == []
    assert await found(cache, [low] * (PAGE - 1) + [CAT]) == []
    await publish(cache, [CAT] * PAGE)

    assert [await found(cache, text) for text in texts] == slots


async def test_an_image_that_is_generated_widens_a_lease_of_text(cache: CacheUnderTest) -> None:
    start = await cache.client.event_snapshot()
    lease = await cache.client.acquire(TEXT, new_tokens=2 * PAGE)
    await lease.insert(TEXT)
    await lease.insert([*TEXT, *[DOG] * PAGE])
    done = await lease.insert([*TEXT, *[DOG] * PAGE, *TEXT])
    slots = lease.slots.tolist()
    await lease.release()

    assert (done.prefix_len, done.num_inserted) == (2 * PAGE, PAGE)
    assert await found(cache, [*TEXT, *[DOG] * PAGE, *TEXT]) == slots
    assert (await replayed(cache, start)).hashes == set(event_hashes([*TEXT, *[DOG] * PAGE, *TEXT], PAGE))


async def test_an_image_in_signed_integers_is_refused_and_nothing_changes(cache: CacheUnderTest) -> None:
    signed = np.array([DOG] * PAGE, np.uint64).view(np.int64)

    for tokens in (signed, torch.from_numpy(signed)):
        with pytest.raises(InvalidRequest, match="must not be negative"):
            await cache.client.acquire(tokens)
        with pytest.raises(InvalidRequest, match="must not be negative"):
            await cache.client.match(tokens)
    lease = await cache.client.acquire(TEXT, new_tokens=PAGE)
    with pytest.raises(InvalidRequest, match="must not be negative"):
        await lease.insert(torch.tensor([*TEXT, *signed.tolist()]))
    await lease.release()

    assert (await cache.client.stats()).tree_slots == 0


async def test_an_image_that_fits_in_signed_integers_may_come_in_them(cache: CacheUnderTest) -> None:
    slots = await publish(cache, torch.tensor([CAT] * PAGE))

    assert await found(cache, np.array([CAT] * PAGE)) == await found(cache, [CAT] * PAGE) == slots


# ---------------------------------------------------------------- namespaces


async def test_namespaces_that_look_alike_share_no_slot_and_no_event(cache: CacheUnderTest) -> None:
    start = await cache.client.event_snapshot()
    slots = []
    for triple in LOOK_ALIKES:
        assert await found(cache, TEXT, triple) == []
        slots.append(await publish(cache, TEXT, triple))

    assert [await found(cache, TEXT, triple) for triple in LOOK_ALIKES] == slots
    assert len({slot for each in slots for slot in each}) == PAGE * len(LOOK_ALIKES)
    told = (await replayed(cache, start)).blocks
    assert {each: block.namespace for each, block in told.items()} == {
        event_hashes(TEXT, PAGE, triple)[0]: framed(triple) for triple in LOOK_ALIKES
    }
    events = (await cache.client.event_snapshot()).events
    assert all(isinstance(event, BlockStored) for event in events)
    assert sorted(event.lora_name or "-" for event in events) == sorted(triple[1] or "-" for triple in LOOK_ALIKES)


async def test_an_image_widens_its_own_namespace_alone(cache: CacheUnderTest) -> None:
    text, image = [DOG % 2**32] * PAGE, [DOG] * PAGE
    slots = {triple: await publish(cache, text, triple) for triple in LOOK_ALIKES[:3]}
    image_slots = await publish(cache, image, LOOK_ALIKES[1])

    for triple in LOOK_ALIKES[:3]:
        assert await found(cache, text, triple) == slots[triple]
        assert await found(cache, image, triple) == (image_slots if triple == LOOK_ALIKES[1] else [])


# ---------------------------------------------------------------- pairs


@pytest.mark.parametrize(
    ("num_tokens", "num_cached"),
    [(1, 0), (PAGE, 0), (PAGE + 1, PAGE), (2 * PAGE, PAGE), (2 * PAGE + 1, 2 * PAGE), (3 * PAGE, 2 * PAGE)],
)
async def test_of_n_tokens_n_minus_1_pairs_are_cached_in_whole_pages(
    paired: CacheUnderTest, num_tokens: int, num_cached: int
) -> None:
    tokens: list[int] = [*TEXT, *[CAT] * PAGE, *TEXT][:num_tokens]
    start = await paired.client.event_snapshot()
    lease = await paired.client.acquire(tokens)
    assert len(lease) == num_tokens
    done = await lease.insert(tokens)
    slots = lease.slots.tolist()
    await lease.release()

    assert (done.num_inserted, lease.published_len) == (num_cached, num_cached)
    assert await found(paired, tokens) == slots[:num_cached]
    assert await found(paired, [*tokens, 9]) == slots[:num_cached]
    index = await replayed(paired, start)
    told = [id_ for block in index.blocks.values() for id_ in block.token_ids]
    assert index.hashes == set(event_hashes(pairs(tokens), PAGE))
    assert told == tokens[:num_cached]


async def test_a_page_of_pairs_ends_with_the_token_after_it(paired: CacheUnderTest) -> None:
    slots = await publish(paired, [*TEXT, 5])

    assert await found(paired, [*TEXT, 5]) == slots
    assert await found(paired, [*TEXT, 6]) == []
    assert await found(paired, [*TEXT, 5 + 2**32]) == []
    assert await found(paired, TEXT) == []


async def test_pairs_and_the_same_tokens_alone_have_different_hashes(
    cache: CacheUnderTest, paired: CacheUnderTest
) -> None:
    tokens: list[int] = [*TEXT, *TEXT, 1]
    for each in (cache, paired):
        await publish(each, tokens)

    told = [ReplayedIndex(await each.client.event_snapshot()).hashes for each in (cache, paired)]
    as_pairs: list[Token] = pairs(tokens)
    assert told == [set(event_hashes(tokens, PAGE)), set(event_hashes(as_pairs, PAGE))]
    assert told[0].isdisjoint(told[1])
