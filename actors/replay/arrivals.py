"""Recorded traffic as timed requests of page numbers, for the simulation of a fleet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from raydix.actors.observe.trace import TracedRequest


class Arrival(NamedTuple):
    """A request on the virtual clock."""

    number: int  # place in the order of arrival, from 0
    time_s: float  # seconds since the start of the trace
    tokens: int  # length of the prompt
    pages: list[int]  # the prompt's whole blocks
    hashes: NDArray[np.int64]  # the same numbers, as a `PageIndex` takes pages


class Arrivals:
    """The requests of a trace, several times over if wanted, as often as a simulation is run.

    A page is a block of the trace together with all blocks before it, as a number. The last, partial block of a prompt
    is no page. Copies of the trace share no pages.
    """

    def __init__(self, trace: Sequence[TracedRequest], *, copies: int = 1) -> None:
        """Number the pages of a trace.

        Args:
            trace: the requests, in order; at least one.
            copies: how often the trace is repeated, at the same time and with other pages.
        """
        if not trace or copies < 1:
            raise ValueError(f"a trace of at least 1 request and 1 copy are needed, not {len(trace)} and {copies}")
        self.page_size = trace[0].block_size  # tokens of a page
        self.copies = copies
        self._tokens = [request.input_length for request in trace]
        self._recorded_s = np.array([request.timestamp for request in trace], np.float64) / 1000
        numbers: dict[tuple[int, int], int] = {}  # (page before, id of the block) -> page
        self._pages = [_numbered(request, numbers) for request in trace]
        self._num_pages = len(numbers)

    def __len__(self) -> int:
        """Return the number of requests in all copies."""
        return len(self._tokens) * self.copies

    @property
    def tokens(self) -> int:
        """Return the prompt tokens of all requests."""
        return sum(self._tokens) * self.copies

    @property
    def rounding_s(self) -> float:
        """Return the median time between two different timestamps: the step that the trace's clock was rounded to."""
        gaps = np.diff(np.unique(self._recorded_s))
        return float(np.median(gaps)) if len(gaps) else 1.0

    def times_s(self, seed: int) -> NDArray[np.float64]:
        """Return the times of all requests, ascending in each copy: float64 of shape (copies, requests of the trace).

        Each time is spread at random over the rounding step, and the order of the trace is kept.
        """
        spread = np.random.default_rng(seed).uniform(0, self.rounding_s, (self.copies, len(self._tokens)))
        return np.sort(self._recorded_s + spread, axis=1)

    def each(self, times_s: NDArray[np.float64]) -> Iterator[Arrival]:
        """Yield the requests in the order of their times, `times_s`."""
        flat = times_s.reshape(-1)
        for number, place in enumerate(np.argsort(flat, kind="stable").tolist()):
            copy, request = divmod(place, len(self._tokens))
            hashes = self._pages[request] + copy * self._num_pages
            yield Arrival(number, float(flat[place]), self._tokens[request], hashes.tolist(), hashes)


def _numbered(request: TracedRequest, numbers: dict[tuple[int, int], int]) -> NDArray[np.int64]:
    """Return the pages of a request; new ones get the next numbers."""
    page, pages = -1, list[int]()
    for block in request.hash_ids[: request.input_length // request.block_size]:
        page = numbers.setdefault((page, block), len(numbers))
        pages.append(page)
    return np.array(pages, np.int64)
