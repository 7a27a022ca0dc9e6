"""The contract of `retire` and `explain` for every cache. See `test_contract_match`."""

from __future__ import annotations

import uuid

import pytest
from support.caches.cache_kinds import KindUnderTest, only, shares
from support.caches.cache_under_test import CacheUnderTest

from raydix.schemas import InvalidRequest

# ---------------------------------------------------------------- retire


@only(shares)
async def test_a_retired_adapter_is_gone_at_once_and_the_others_stay(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, lora_id="a")
    await cache.publish(1, 2, lora_id="a", cache_salt="s")
    await cache.publish(1, 2, lora_id="b")

    done = await cache.client.retire(lora_id="a")

    assert done.num_namespaces == 2
    assert await cache.matched(1, 2, lora_id="a") == await cache.matched(1, 2, lora_id="a", cache_salt="s") == 0
    assert await cache.matched(1, 2, lora_id="b") == cache.reusable(2)
    assert (await cache.client.retire(lora_id="a")).num_namespaces == 0


@only(shares)
async def test_all_fields_that_are_given_must_match(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, lora_id="a", cache_salt="s")
    await cache.publish(1, 2, lora_id="a", extra_key="e")
    await cache.publish(1, 2)

    assert (await cache.client.retire(lora_id="a", cache_salt="t")).num_namespaces == 0
    assert (await cache.client.retire(lora_id="a", cache_salt="s")).num_namespaces == 1

    assert await cache.matched(1, 2, lora_id="a", cache_salt="s") == 0
    assert await cache.matched(1, 2, lora_id="a", extra_key="e") == cache.reusable(2)
    assert await cache.matched(1, 2) == cache.reusable(2)


@only(shares)
async def test_running_leases_keep_their_slots_and_publish_nothing(cache: CacheUnderTest) -> None:
    running = await cache.client.acquire(cache.tokens(1, 2, 3), lora_id="a")
    await cache.insert(running, 1)
    other = await cache.client.acquire(cache.tokens(1), lora_id="b")
    slots = running.slots.tolist()

    await cache.client.retire(lora_id="a")

    assert running.slots.tolist() == slots
    done = await running.insert(cache.tokens(1, 2, 3))
    assert (done.num_inserted, done.retired) == (0, True)
    assert await cache.matched(1, 2, 3, lora_id="a") == 0
    await cache.insert(other, 1, release=True)
    assert await cache.matched(1, lora_id="b") == cache.reusable(1)
    await running.release()


@only(shares)
async def test_a_retired_namespace_starts_empty(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, lora_id="a")
    await cache.client.retire(lora_id="a")

    await cache.publish(1, 3, lora_id="a")

    assert await cache.matched(1, 3, lora_id="a") == cache.reusable(2)
    assert await cache.matched(1, 2, lora_id="a") <= cache.reusable(2) - 1


@only(shares)
async def test_retired_pages_are_evicted_for_new_ones(cache: CacheUnderTest) -> None:
    await cache.publish(*range(1, 8), lora_id="a")
    await cache.client.retire(lora_id="a")

    lease = await cache.client.acquire(cache.tokens(*range(11, 19)), timeout_s=0)

    await lease.release()


async def test_a_retirement_must_name_a_namespace(cache: CacheUnderTest) -> None:
    with pytest.raises(InvalidRequest, match="reset"):
        await cache.client.retire()
    with pytest.raises(InvalidRequest, match="lora_id"):
        await cache.client.retire(lora_id=7)  # type: ignore[arg-type]


# ---------------------------------------------------------------- explain


@pytest.fixture
def space() -> str:
    """Return a namespace that was never retired, unlike those of other tests on Ray."""
    return uuid.uuid4().hex


def remembers(kind: KindUnderTest) -> bool:
    """Return whether the cache records evictions: tries and rows do not."""
    return kind.shares and kind.config.get("kind") not in ("trie", "slots")


@only(shares)
async def test_an_explanation_agrees_with_a_match(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3)
    for pages in ((1, 2, 3), (1, 2), (1, 2, 9), (9,)):
        tokens = cache.tokens(*pages) + [5] * (cache.page_size - 1)
        probe, found = await cache.client.match(tokens), await cache.client.explain(tokens)

        assert (found.num_tokens, found.prefix_len) == (len(tokens), probe.prefix_len)
        assert found.full_prefix_len == probe.full_prefix_len
        assert str(found).startswith(f"{probe.prefix_len} of {len(tokens)} tokens hit: ")


@only(shares)
async def test_explain_of_a_full_hit_and_of_less_than_a_page(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3)
    whole = cache.tokens(1, 2)[: cache.page_size + cache.kind.lost_tokens]

    found = await cache.client.explain(whole)

    assert (found.prefix_len, found.reason) == (cache.page_size, "complete")
    if cache.page_size > 1:
        tail = await cache.client.explain([*whole, 2])
        assert (tail.prefix_len, tail.reason) == (cache.page_size, "page_alignment")


@only(remembers)
async def test_explain_of_evictions_on_request_and_for_a_shortfall(cache: CacheUnderTest, space: str) -> None:
    assert (await cache.client.explain(cache.tokens(1, 2), extra_key=space)).reason == "never_stored"
    await cache.publish(1, 2, extra_key=space)
    await cache.client.evict(8 * cache.page_size)

    asked = await cache.client.explain(cache.tokens(1, 2), extra_key=space)
    assert (asked.reason, asked.cause) == ("evicted", "request")
    assert asked.seconds_ago is not None and asked.seconds_ago >= 0

    await cache.publish(3, 4, extra_key=space)
    await (await cache.client.acquire(cache.tokens(*range(11, 19)))).release()
    short = await cache.client.explain(cache.tokens(3, 4), extra_key=space)
    assert (short.reason, short.cause) == ("evicted", "shortfall")
    assert "evicted (shortfall)" in str(short)


@only(remembers)
async def test_explain_of_another_namespace_and_of_a_retired_one(cache: CacheUnderTest, space: str) -> None:
    await cache.publish(1, 2, lora_id="a", cache_salt=space)

    elsewhere = await cache.client.explain(cache.tokens(1, 2), extra_key=space)
    assert (elsewhere.prefix_len, elsewhere.reason) == (0, "other_namespace")
    assert (elsewhere.other_extra_key, elsewhere.other_lora_id, elsewhere.other_cache_salt) == (None, "a", space)
    assert elsewhere.other_prefix_len == cache.reusable(2) * cache.page_size

    await cache.client.retire(lora_id="a")
    gone = await cache.client.explain(cache.tokens(1, 2), lora_id="a", cache_salt=space)
    assert (gone.prefix_len, gone.reason) == (0, "retired")


async def test_an_explanation_changes_nothing(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    before = await cache.pages()

    await cache.client.explain(cache.tokens(1, 9))

    assert await cache.pages() == before
    with pytest.raises(InvalidRequest, match="token"):
        await cache.client.explain([])


@only(lambda kind: not kind.shares)
async def test_explain_of_tokens_without_a_shared_prefix(cache: CacheUnderTest) -> None:
    assert (await cache.client.explain(cache.tokens(1))).reason == "not_shared"
