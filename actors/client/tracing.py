"""OpenTelemetry spans of a client's verbs: one for each request, also for requests that share a batch.

from raydix.actors.client.tracing import trace_verbs
stop = trace_verbs()  # spans go to the process's tracer provider
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any

from raydix import schemas
from raydix.actors.client.lease import Lease, make_pending
from raydix.actors.client.prefix_cache_client import PrefixCacheClient
from raydix.schemas import InsertResponse, MatchResponse, Message

_LEASING = ("lock", "acquire")  # `async with` accepts their results

Attributes = dict[str, str | int]
Verb = Callable[..., Awaitable[Any]]

_untraced: dict[tuple[type, str], Verb] = {}  # the original verbs, while spans are made


def trace_verbs(tracer_provider: Any = None) -> Callable[[], None]:
    """Make a span `raydix.<verb>` of each request of every client in this process, from now on.

    The span lasts from the call to its result, with the time in the batch and in the queue. Its parent is the caller's
    span. Its attributes are the lease, its epoch, and the tokens found, loaded or published, or the error. Verbs that
    are not traced cost nothing more.

    Args:
        tracer_provider: of opentelemetry; None takes the process's provider.

    Returns:
        A function that ends the tracing. A second call of `trace_verbs` replaces the first.

    Raises:
        ImportError: opentelemetry-api is not installed.
    """
    try:
        trace = import_module("opentelemetry.trace")
    except ImportError as error:
        raise ImportError("spans need OpenTelemetry: pip install opentelemetry-sdk") from error
    stop_tracing()
    tracer = trace.get_tracer("raydix", tracer_provider=tracer_provider)
    for owner, verb in traced_verbs():
        _untraced[owner, verb] = getattr(owner, verb)
        setattr(owner, verb, _trace(verb, _untraced[owner, verb], tracer))
    return stop_tracing


def traced_verbs() -> list[tuple[type, str]]:
    """Return the methods of leases and clients that get spans, as the classes of their requests say."""
    public = [getattr(schemas, name) for name in schemas.__all__]
    requests = [model for model in public if isinstance(model, type) and issubclass(model, Message)]
    verbs = [request.traced_as for request in requests if request.traced_as is not None]
    return [(Lease if hasattr(Lease, verb) else PrefixCacheClient, verb) for verb in verbs]


def stop_tracing() -> None:
    """Stop making spans, if `trace_verbs` is active."""
    while _untraced:
        (owner, verb), original = _untraced.popitem()
        setattr(owner, verb, original)


def _trace(name: str, verb: Verb, tracer: Any) -> Verb:
    @wraps(verb)
    async def traced(owner: Lease | PrefixCacheClient, *args: Any, **kwargs: Any) -> Any:
        with tracer.start_as_current_span(f"raydix.{name}", attributes=_attributes_of(owner)) as span:
            answer = await verb(owner, *args, **kwargs)
            span.set_attributes(_attributes_of(answer))
            return answer

    arguments = signature(verb)

    @wraps(verb)
    def call(owner: Lease | PrefixCacheClient, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        arguments.bind(owner, *args, **kwargs)  # TypeError for a wrong argument, in the call
        return traced(owner, *args, **kwargs)

    return make_pending(call) if name in _LEASING else call


def _attributes_of(value: Any) -> Attributes:
    """Return the span attributes of a lease or a response."""
    if isinstance(value, Lease):
        lease: Attributes = {"raydix.lease": value.lease_id, "raydix.epoch": value.epoch}
        found: Attributes = {"raydix.prefix_len": value.prefix_len, "raydix.loaded_len": sum(value.loaded)}
        return lease | found | {"raydix.num_slots": len(value)}
    if isinstance(value, MatchResponse):
        below = {"raydix.host_len": value.host_len, "raydix.disk_len": value.disk_len}
        return {"raydix.prefix_len": value.prefix_len, **below}
    if isinstance(value, InsertResponse):
        return {"raydix.num_inserted": value.num_inserted, "raydix.num_duplicates": value.num_duplicates}
    return {}
