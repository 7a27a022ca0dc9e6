"""OpenTelemetry spans of a client's verbs: one for each request, however many of them share a batch.

from raydix.actors.tracing import trace_verbs
stop = trace_verbs()  # spans go where the process sends its own
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from importlib import import_module
from typing import Any

from raydix.actors.client.lease import Lease
from raydix.actors.client.lease_verbs import CacheVerbs
from raydix.actors.client.pending_lease import pending
from raydix.schemas import InsertResponse, MatchResponse

VERBS = ("match", "lock", "acquire", "insert", "extend", "release", "abort")
_LEASING = ("lock", "acquire")  # their results can be entered, too

Attributes = dict[str, str | int]
Verb = Callable[..., Awaitable[Any]]

_untraced: dict[str, Verb] = {}  # the verbs as they were, while spans are made


def trace_verbs(tracer_provider: Any = None) -> Callable[[], None]:
    """Make a span `raydix.<verb>` of each request of every client of this process, from now on.

    It lasts from the call to its answer, time in the batch and in line included, below the span that the caller is in.
    It tells the lease, its epoch and what was found or published; of a failure, the error. Without it there is no cost.

    Args:
        tracer_provider: of opentelemetry; None: the one that the process has set.

    Returns what ends it. Done again, it takes the place of what was done before.

    Raises:
        ImportError: opentelemetry-api is not installed.
    """
    try:
        trace = import_module("opentelemetry.trace")
    except ImportError as error:
        raise ImportError("spans need OpenTelemetry: pip install opentelemetry-sdk") from error
    stop_tracing()
    tracer = trace.get_tracer("raydix", tracer_provider=tracer_provider)
    for verb in VERBS:
        _untraced[verb] = getattr(CacheVerbs, verb)
        setattr(CacheVerbs, verb, _traced(verb, _untraced[verb], tracer))
    return stop_tracing


def stop_tracing() -> None:
    """Make no more spans; no effect if none are made."""
    while _untraced:
        setattr(CacheVerbs, *_untraced.popitem())


def _traced(name: str, verb: Verb, tracer: Any) -> Verb:
    @wraps(verb)
    async def traced(client: CacheVerbs, *args: Any, **kwargs: Any) -> Any:
        with tracer.start_as_current_span(f"raydix.{name}", attributes=_told_by(args[0] if args else None)) as span:
            answer = await verb(client, *args, **kwargs)
            span.set_attributes(_told_by(answer))
            return answer

    return pending(traced) if name in _LEASING else traced


def _told_by(what: Any) -> Attributes:
    """What is worth telling of an argument or an answer."""
    if isinstance(what, Lease):
        lease: Attributes = {"raydix.lease": what.lease_id, "raydix.epoch": what.epoch}
        return lease | {"raydix.prefix_len": what.prefix_len, "raydix.num_slots": len(what)}
    if isinstance(what, MatchResponse):
        return {"raydix.prefix_len": what.prefix_len}
    if isinstance(what, InsertResponse):
        return {"raydix.num_inserted": what.num_inserted, "raydix.num_duplicates": what.num_duplicates}
    return {}
