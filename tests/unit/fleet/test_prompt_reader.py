"""`PromptReader`: the tokens of a request in a thread, in time; each request without them is counted by its cause."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from raydix.actors.serve.prompt_reader import PromptReader
from raydix.actors.serve.tokens import token_ids
from raydix.schemas import InvalidRequest
from raydix.schemas.engine_namespace import CacheNamespace

HERE = __name__
LONG_S = 100.0
may_go_on = threading.Event()


def read_request(request: Any) -> Any:
    """Return, raise or wait, as the request says."""
    match request:
        case "wait":
            may_go_on.wait(LONG_S)
            return [1], None
        case Exception():
            raise request
        case "thread":
            return [threading.get_ident()], None
    return request


class Doubled:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, request: Any) -> Any:
        return [self.factor * token for token in request], CacheNamespace(lora_id="x")


async def made(function: str = "read_request", arguments: Any = None, timeout_s: float = LONG_S) -> PromptReader:
    reader = PromptReader(f"{HERE}:{function}", arguments, timeout_s)
    await reader.load()
    return reader


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this module be imported by its name, as an application's module is."""
    import sys

    may_go_on.clear()
    module = SimpleNamespace(read_request=read_request, Doubled=Doubled)
    monkeypatch.setitem(sys.modules, HERE, module)  # type: ignore[misc]


async def test_the_tokens_are_read_in_another_thread() -> None:
    reader = await made()

    found = await reader.read("thread")

    assert found is not None and found.tokens != [threading.get_ident()]
    assert await reader.read(([1, 2], CacheNamespace(cache_salt="s"))) == (
        [1, 2],
        {"extra_key": None, "lora_id": None, "cache_salt": "s"},
    )
    assert +reader.counts == {}


async def test_an_object_of_a_class_is_made_once() -> None:
    reader = await made("Doubled", {"factor": 2})

    found = await reader.read([1, 2])

    assert found is not None and (found.tokens, found.namespace["lora_id"]) == ([2, 4], "x")


async def test_requests_without_tokens_are_counted_by_cause(caplog: pytest.LogCaptureFixture) -> None:
    reader = await made()

    with caplog.at_level(logging.WARNING):
        for request in (None, ValueError("broken"), TimeoutError("its own"), [1, 2, 3], ([1], ("a", "b"))):
            assert await reader.read(request) is None

    assert reader.counts == {"no tokens": 1, "failed": 4}
    assert caplog.text.count("broken") == 1, "the first failure is logged, and only that one"


async def test_a_late_call_is_counted_and_the_next_request_is_not_held_up() -> None:
    reader = await made(timeout_s=0.01)
    try:
        assert await reader.read("wait") is None
    finally:
        may_go_on.set()

    assert reader.counts == {"late": 1}


async def test_while_all_threads_run_late_calls_nothing_is_queued_and_requests_are_late_at_once() -> None:
    reader = await made(timeout_s=0.01)
    try:
        for _ in range(4):
            assert await reader.read("wait") is None
        reader.timeout_s = LONG_S  # no request waits for it
        for _ in range(100):
            assert await reader.read("any") is None

        assert reader.counts == {"late": 104}
        assert reader._threads._work_queue.qsize() == 0
    finally:
        may_go_on.set()
    while any(not call.done() for call in reader._late):  # noqa: ASYNC110 -- they run in threads
        await asyncio.sleep(0.001)
    assert await reader.read(([1], None)) is not None


async def test_a_call_that_waits_for_a_thread_too_long_is_late_and_never_made() -> None:
    reader = await made(timeout_s=0.01)
    try:
        assert await asyncio.gather(*(reader.read("wait") for _ in range(6))) == [None] * 6
        assert reader.counts == {"late": 6}
        assert len(reader._late) == 4
    finally:
        may_go_on.set()


async def test_a_call_that_was_done_while_the_loop_was_busy_is_in_time() -> None:
    reader = await made(timeout_s=0.01)
    called = threading.Event()

    def block() -> None:
        called.wait(LONG_S)
        asyncio.get_running_loop().call_soon(lambda: None)

    class Signals:
        def __call__(self, request: Any) -> Any:
            called.set()
            return [1], None

    reader._function = Signals()
    asyncio.get_running_loop().call_soon(block)

    assert await reader.read("any") is not None


async def test_until_it_is_loaded_and_if_it_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    reader = PromptReader(f"{HERE}:missing", None, 1)

    assert await reader.read("any") is None
    await reader.load()
    assert await reader.read("any") is None

    assert reader.counts == {"loading": 1, "failed": 1}
    assert "could not be loaded" in caplog.text


@pytest.mark.parametrize("path", ["module", "module:", ":function", "a b:c", 3, None])
def test_a_wrong_path_is_refused(path: Any) -> None:
    with pytest.raises(InvalidRequest, match='must be "module:function"'):
        PromptReader(path, None, 1)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="tokens_of_kwargs must be a dict"):
        PromptReader("module:Class", [1], 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="finite number of seconds"):
        PromptReader("module:function", None, -1)


def call(*args: Any, **kwargs: Any) -> Any:
    return SimpleNamespace(args=list(args), kwargs=kwargs)


@pytest.mark.parametrize(
    "request_",
    [call([1, 2]), call(token_ids=[1, 2]), call({"token_ids": [1, 2]}), call([1, 2], 16), call({}, token_ids=[1, 2])],
)
def test_token_ids_of_a_call(request_: Any) -> None:
    assert token_ids(request_) == ([1, 2], CacheNamespace())


def test_the_namespace_of_a_call() -> None:
    assert token_ids(call([1], lora_id="x", cache_salt="s")) == ([1], CacheNamespace(None, "x", "s"))


@pytest.mark.parametrize("request_", [call(), call("text"), call(prompt="text"), call(object()), call({"text": 1})])
def test_a_call_without_token_ids(request_: Any) -> None:
    assert token_ids(request_) is None
