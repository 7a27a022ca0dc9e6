"""Spans of requests: one for each, below its caller's, though they share a batch."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from support.caches.cache_under_test import small_config
from support.tiers.gated_loads import host_config, publish_on_host

from raydix.actors import LocalPrefixCache
from raydix.actors.client.tracing import stop_tracing, trace_verbs, traced_verbs
from raydix.schemas import PoolExhausted

export = pytest.importorskip(
    "opentelemetry.sdk.trace.export.in_memory_span_exporter",
    reason="needs OpenTelemetry: .venv/bin/pip install opentelemetry-sdk",
)


@pytest.fixture
def spans() -> Iterator[Any]:
    """The finished spans; tracing ends with the test."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporter = export.InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    stop = trace_verbs(provider)
    exporter.tracer = provider.get_tracer("tests")
    yield exporter
    stop()


async def test_each_request_of_a_batch_has_its_span_below_its_caller(spans: Any) -> None:
    async with LocalPrefixCache(small_config()) as cache:

        async def request(number: int) -> str:
            with spans.tracer.start_as_current_span(f"request {number}"):
                lease = await cache.acquire([number, 1, 2])
                await lease.insert([number, 1, 2])
                await lease.release()
                return str(lease.lease_id)

        leases = await asyncio.gather(*map(request, range(3)))

    done = spans.get_finished_spans()
    callers = {span.context.span_id: span.name for span in done if span.parent is None}
    traced = [span for span in done if span.parent is not None]
    for number, lease in enumerate(leases):
        own = [span for span in traced if callers[span.parent.span_id] == f"request {number}"]
        assert [span.name for span in own] == ["raydix.acquire", "raydix.insert", "raydix.release"]
        assert {span.attributes["raydix.lease"] for span in own} == {lease}
        assert own[0].attributes["raydix.loaded_len"] == 0
        assert own[1].attributes["raydix.num_inserted"] == 3


def test_plain_calls_are_traced_as_long_as_the_others(spans: Any) -> None:
    with LocalPrefixCache(small_config()).sync as cache:
        with cache.acquire([1, 2, 3]) as lease:
            lease.insert([1, 2, 3])
        cache.match([1, 2, 3])
        stop_tracing()
        cache.match([1, 2, 3])

    names = [span.name for span in spans.get_finished_spans()]
    assert names == ["raydix.acquire", "raydix.insert", "raydix.release", "raydix.match"]


async def test_the_span_of_a_request_has_its_loaded_tokens(spans: Any) -> None:
    prompt = list(range(16))
    async with LocalPrefixCache(host_config()) as cache:
        await publish_on_host(cache, prompt)
        spans.clear()
        await cache.match(prompt)
        await (await cache.acquire(prompt, load_timeout_s=60)).release()

    found, leased, _ = spans.get_finished_spans()
    assert (found.attributes["raydix.prefix_len"], found.attributes["raydix.host_len"]) == (0, 16)
    assert found.attributes["raydix.disk_len"] == 0
    assert (leased.attributes["raydix.prefix_len"], leased.attributes["raydix.loaded_len"]) == (16, 16)


async def test_a_refused_request_tells_its_error(spans: Any) -> None:
    async with LocalPrefixCache(small_config()) as cache:
        with pytest.raises(PoolExhausted):
            await cache.acquire(range(100_000))

    (span,) = spans.get_finished_spans()
    assert not span.status.is_ok
    assert span.events[0].attributes["exception.type"].endswith("PoolExhausted")


async def test_nothing_is_traced_before_or_after() -> None:
    verbs = traced_verbs()
    before = [getattr(owner, verb) for owner, verb in verbs]

    stop = trace_verbs()
    assert all(getattr(owner, verb) is not old for (owner, verb), old in zip(verbs, before, strict=True))
    trace_verbs()
    stop()

    assert [getattr(owner, verb) for owner, verb in verbs] == before
