"""A generated trace: documents that are asked again, after gaps of all lengths. No policy was made by it.

A document has 8 to 60 pages, and shares none with another. Two thirds of the documents are asked a second time. The gap
between two requests of a document, in requested pages, is log-normal with a sigma of 1.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import exp
from random import Random

from raydix.actors.observe.trace import BLOCK, TracedRequest

NUM_PAGES = 8_000  # of all documents
SIZES = (8, 60)  # pages of a document: least and most
ASKED_AGAIN = 2 / 3  # share of the documents


def documents(median_gap: float, seed: int, further: float = 0.0) -> list[TracedRequest]:
    """Return the requests, in order, a second apart.

    Args:
        median_gap: requested pages between two requests of a document.
        further: how probable a further request is, after the second one and each later one.
    """
    rng, trace = Random(seed), list[TracedRequest]()
    due: list[tuple[float, int, list[int]]] = []  # a heap: the requested pages before a request, its number, its pages
    num_requested = num_new = 0
    while due or num_new < NUM_PAGES:
        if due and (due[0][0] <= num_requested or num_new == NUM_PAGES):
            pages, again = heappop(due)[2], further
        else:
            size = min(rng.randint(*SIZES), NUM_PAGES - num_new)
            pages, again = list(range(num_new, num_new + size)), ASKED_AGAIN
            num_new += size
        trace.append(
            TracedRequest(
                timestamp=1_000.0 * len(trace), input_length=BLOCK * len(pages), output_length=0, hash_ids=pages
            )
        )
        num_requested += len(pages)
        if rng.random() < again:
            gap = median_gap * exp(rng.gauss(0, 1))
            heappush(due, (num_requested + gap, len(trace), pages))
    return trace
