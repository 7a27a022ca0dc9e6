"""`PromptReader`: asks an application's function for the tokens of a request, in a thread and within a time limit."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from typing import Any, NamedTuple

from raydix.actors.transport.validation import checked_seconds
from raydix.schemas import InvalidRequest
from raydix.schemas.shown import brief

logger = logging.getLogger(__name__)

NO_TOKENS, FAILED, LATE, LOADING = "no tokens", "failed", "late", "loading"  # why a request has no tokens
_NUM_THREADS = 4
_PATH = re.compile(r"[\w.]+:\w+")
_NAMESPACE_PARTS = ("extra_key", "lora_id", "cache_salt")


class RequestPrompt(NamedTuple):
    """The prompt of a request."""

    tokens: Any  # the tokens for `Fleet.route`
    namespace: dict[str, str | None]  # the keyword arguments for `Fleet.route`


class PromptReader:
    """Reads the prompts of requests by `tokens_of(request) -> (tokens, namespace) | None`.

    The namespace is a `CacheNamespace`, another tuple of its three parts, or None. The function runs in a thread. A
    request without a prompt is counted: the function has returned None, has failed, or was late. A call that is late
    runs on in its thread. While all threads run such calls, requests are late immediately, without another call.

    Attributes:
        counts: the number of requests without a prompt, by cause.
        timeout_s: the time limit of a call.
    """

    def __init__(self, path: str, arguments: Mapping[str, Any] | None, timeout_s: float) -> None:
        """Check the arguments; `load` imports the function.

        Args:
            path: "module:function"; or "module:Class": an object of the class is made once, and called.
            arguments: keyword arguments of the class.
            timeout_s: the time limit of a call.

        Raises:
            InvalidRequest: an argument is wrong.
        """
        if not isinstance(path, str) or not _PATH.fullmatch(path):
            raise InvalidRequest(f'tokens_of must be "module:function" or "module:Class", not {brief(path)}')
        if arguments is not None and not isinstance(arguments, Mapping):
            raise InvalidRequest(f"tokens_of_kwargs must be a dict of keyword arguments, not {brief(arguments)}")
        self.counts: Counter[str] = Counter()
        self._path = path
        self._arguments = dict(arguments or {})
        self.timeout_s = checked_seconds(timeout_s)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="raydix-tokens-of")
        self._late: list[Future[Any]] = []  # calls that were late, and may still run
        self._function: Callable[[Any], Any] | None = None
        self._failed_to_load = False

    @property
    def is_loaded(self) -> bool:
        """Whether `load` has ended, with a function or a failure."""
        return self._function is not None or self._failed_to_load

    async def load(self) -> None:
        """Import the function, in a thread. After a failure, which is logged, every request counts as failed."""
        try:
            self._function = await asyncio.wrap_future(self._threads.submit(self._find))
        except Exception:
            self._failed_to_load = True
            logger.exception("tokens_of %r could not be loaded: no request is routed by its prefix", self._path)

    def _find(self) -> Callable[[Any], Any]:
        module, _, name = self._path.partition(":")
        found: Any = getattr(import_module(module), name)
        if inspect.isclass(found):
            found = found(**self._arguments)
        elif self._arguments:
            raise InvalidRequest(f"tokens_of_kwargs must be empty for a function, and {self._path!r} is one")
        if not callable(found):
            raise InvalidRequest(f"tokens_of must name a function, or a class with `__call__`, not {brief(found)}")
        return found  # type: ignore[no-any-return]

    async def read(self, request: Any) -> RequestPrompt | None:
        """Return the prompt of a request; None: it has none in time, which is counted."""
        if self._function is None:
            self.counts[FAILED if self._failed_to_load else LOADING] += 1
            return None
        self._late = [call for call in self._late if not call.done()]
        if len(self._late) == _NUM_THREADS:
            self._note(LATE, f"was not called, as {_NUM_THREADS} earlier calls still run")
            return None
        call = self._threads.submit(self._function, request)
        waited = asyncio.wrap_future(call)
        is_late = True
        try:
            await asyncio.wait([waited], timeout=self.timeout_s)
            is_late = not call.done()  # `waited` may end later, as this loop may be busy.
        finally:
            # A call that runs goes on. A call that still waits for a thread is cancelled, and never made.
            if is_late and not call.cancel():
                self._late.append(call)
            # Once it has ended, its exception is read, so that asyncio does not log it.
            if not waited.cancel():
                waited.exception()
        if is_late:
            self._note(LATE, f"took more than {self.timeout_s:g} s")
            return None
        try:
            return self._prompt_of(call.result())
        except Exception as error:
            self._note(FAILED, f"raised {error!r}")
            return None

    def _prompt_of(self, found: Any) -> RequestPrompt | None:
        if found is None:
            self.counts[NO_TOKENS] += 1
            return None
        tokens, namespace = found
        if namespace is None:
            return RequestPrompt(tokens, {})
        return RequestPrompt(tokens, dict(zip(_NAMESPACE_PARTS, namespace, strict=True)))

    def note_refused(self, error: InvalidRequest) -> None:
        """Count a prompt that the fleet has refused as failed."""
        self._note(FAILED, f"returned no prompt: {error}")

    def _note(self, cause: str, text: str) -> None:
        """Count a request, and log the first of each cause as a warning."""
        level = logging.DEBUG if self.counts[cause] else logging.WARNING
        self.counts[cause] += 1
        logger.log(level, "tokens_of %r %s: the request goes to the least loaded replica", self._path, text)

    def close(self) -> None:
        """End the threads, without waiting for running calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)
