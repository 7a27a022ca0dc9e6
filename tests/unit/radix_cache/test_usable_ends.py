"""Where slim events say that a match may end, in a cache with a window: the examples of `UsableEnds`, one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raydix.cache_core import RadixCache, RadixKey, page_hashes
from raydix.cache_core.tree.page_events import Hashes, PageRun

PAGE, STRIDE, WINDOW = 2, 2, 4


class Reader:
    """The ends that a reader of the events has, and the number of pages in the events."""

    def __init__(self) -> None:
        self.ends: set[int] = set()
        self.num_pages = 0

    def stored(self, run: PageRun) -> None:
        self.num_pages += len(run.hashes)

    def stored_as_ends(self, run: PageRun) -> None:
        self.stored(run)
        self.ends.update(run.hashes.tolist())

    def ends_stored(self, hashes: Hashes) -> None:
        assert self.ends.isdisjoint(hashes.tolist())
        self.ends.update(hashes.tolist())
        self.num_pages += len(hashes)

    def ends_removed(self, hashes: Hashes) -> None:
        assert self.ends.issuperset(hashes.tolist())
        self.ends.difference_update(hashes.tolist())

    def removed(self, hashes: Hashes, group: int | None = None) -> None:
        self.ends.difference_update(hashes.tolist())

    def cleared(self) -> None:
        self.ends.clear()


class Told:
    """A cache and a reader of its events."""

    def __init__(self) -> None:
        self.reader = Reader()
        self.cache: Any = RadixCache(PAGE, sliding_window_size=WINDOW)
        self.cache.publish_events_to(self.reader, STRIDE)

    def insert(self, *ids: int, gone: int = 0) -> Any:
        slots = torch.arange(len(ids)) + 100
        return self.cache.insert(RadixKey(list(ids)), slots, swa_evicted_seqlen=gone).last_node

    def ends(self, *ids: int) -> list[int]:
        """Return the ends on the path of a prompt, in tokens."""
        assert set(self.cache.usable_ends().tolist()) == self.reader.ends
        pages = page_hashes(list(ids), PAGE).tolist()
        return [PAGE * place for place, page in enumerate(pages, 1) if page in self.reader.ends]


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_run_from_the_root_has_ends_at_strides_and_at_its_last_page(told: Told) -> None:
    told.insert(*range(10))

    assert told.ends(*range(10)) == [4, 8, 10]
    assert told.reader.num_pages == 3, "the pages at strides are sent once, as pages and as ends"


def test_behind_a_hole_ends_begin_one_window_later(told: Told) -> None:
    told.insert(*range(16), gone=8)
    told.insert(*range(100, 110), gone=8)

    assert told.ends(*range(16)) == [12, 16]
    assert told.ends(*range(100, 110)) == []


def test_a_run_also_ends_before_a_child_without_window_kv(told: Told) -> None:
    told.insert(*range(10))
    told.insert(*range(6), 60, 61, gone=8)

    assert told.ends(*range(10)) == [4, 6, 8, 10]


def test_prompts_that_part_leave_an_end_even_when_one_of_them_is_gone(told: Told) -> None:
    told.insert(*range(10))
    told.insert(*range(6), 60, 61)
    assert told.ends(*range(6), 60, 61) == [4, 6, 8]

    told.cache.match_prefix(RadixKey(range(10)))
    told.cache.evict(2)

    assert told.ends(*range(6), 60, 61) == [4, 6]


def test_a_match_that_splits_a_node_moves_no_end(told: Told) -> None:
    told.insert(*range(10))

    told.cache.match_prefix(RadixKey([*range(6), 60]))

    assert told.ends(*range(10)) == [4, 8, 10]


def test_window_kv_that_goes_takes_the_ends_of_a_window_with_it_and_gives_the_run_above_an_end(told: Told) -> None:
    told.insert(*range(22))
    node = told.cache.match_prefix(RadixKey([*range(10)])).last_node
    told.cache.match_prefix(RadixKey([*range(14)]))
    assert told.ends(*range(22)) == [4, 8, 12, 16, 20, 22]

    window = told.cache.parts.window
    window.drop(next(iter(node.children.values())))  # tokens 10 to 14
    told.cache.parts.events.flush()

    assert told.ends(*range(22)) == [4, 8, 10, 20, 22]


def test_window_kv_that_comes_back_gives_the_ends_back(told: Told) -> None:
    told.insert(*range(16))
    told.cache.evict(0, 10)  # above the tail of one window and one page
    assert told.ends(*range(16)) == [16]

    told.cache.insert(RadixKey(range(16)), torch.arange(16) + 500)

    assert told.ends(*range(16)) == [4, 8, 12, 16]


def test_pages_that_a_request_adds_step_by_step_get_one_end(told: Told) -> None:
    prompt = told.insert(*range(6))
    sent, node = told.reader.num_pages, prompt
    for stop in range(8, 16, 2):
        pages = told.cache.insert_pages(RadixKey(range(stop)), torch.tensor([2 * stop]).numpy(), node)
        node = pages.last_node
    assert told.ends(*range(14)) == [4, 6]

    told.cache.name_end(node, prompt.end)

    assert told.ends(*range(14)) == [4, 6, 8, 12, 14]
    assert told.reader.num_pages - sent == 2 + 2 + 1, "two strides, as pages and as ends, and the last page"
