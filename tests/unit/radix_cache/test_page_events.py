"""KV events: the events of a tree, the numbers and the history of the feed, and the messages for a router."""

from __future__ import annotations

import asyncio
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.caches.index_pool import IndexPool
from support.reference.event_index import ReplayedIndex, batch_after, groups_of, resident_blocks, snapshot_of

from raydix.actors.service import event_feed
from raydix.actors.service.event_feed import EventFeed
from raydix.cache_core import MambaPool, MambaRadixCache, RadixCache, RadixKey, hash_to_int64, hash_token_ids
from raydix.cache_core.radix.prefix_cache import PrefixCache
from raydix.cache_core.tree import page_hashes
from raydix.schemas import (
    AllBlocksCleared,
    BlockHashes,
    BlockRemoved,
    BlockStored,
    CacheConfig,
    KVEvent,
    PackedEvents,
    PoolConfig,
    frame_namespace,
    unframe_namespace,
)

PAGE = 2


def chain(*pages: list[int]) -> list[int]:
    """The hashes of pages that follow one another in the default namespace."""
    digests: list[str] = []
    for page in pages:
        digests.append(hash_token_ids(page, digests[-1] if digests else None))
    return [hash_to_int64(digest) for digest in digests]


class Told:
    """A tree, its feed, and the events since the last call."""

    def __init__(self, tree: PrefixCache | None = None) -> None:
        self.tree: Any = tree or RadixCache(PAGE, token_to_kv_pool_allocator=IndexPool())
        self.feed = EventFeed("e", self.tree.page_size, "GPU", groups=groups_of(self.tree))
        self.tree.publish_events_to(self.feed)
        self._seq = 0

    def news(self) -> list[KVEvent]:
        batch = batch_after(self.feed, self._seq)
        assert not batch.gap
        self._seq = batch.seq
        return list(batch.events)

    def insert(self, *ids: Any, namespace: str | None = None) -> Any:
        return self.tree.insert(RadixKey(list(ids), namespace)).last_node


@pytest.fixture
def told() -> Told:
    return Told()


def stored(hashes: list[int], parent: int | None, ids: list[int], namespace: str | None = None) -> BlockStored:
    return BlockStored(
        block_hashes=hashes, parent_block_hash=parent, token_ids=ids, block_size=PAGE, medium="GPU", namespace=namespace
    )


def removed(*hashes: int, group: int | None = None) -> BlockRemoved:
    return BlockRemoved(block_hashes=hashes, medium="GPU", group_idx=group)


def in_group(event: BlockStored, group: int, kind: str, window: int | None = None) -> BlockStored:
    fields = {"group_idx": group, "kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window}
    return event.model_copy(update=fields)


# ---------------------------------------------------------------- events of a tree


def test_an_insert_tells_of_the_pages_that_are_new(told: Told) -> None:
    one, two, three = chain([1, 2], [3, 4], [5, 6])

    told.insert(1, 2, 3, 4)
    assert told.news() == [stored([one, two], None, [1, 2, 3, 4])]

    told.insert(1, 2, 3, 4, 5, 6)
    assert told.news() == [stored([three], two, [5, 6])]


def test_what_is_there_already_and_what_fills_no_page_is_not_told(told: Told) -> None:
    told.insert(1, 2, 3)
    assert [event.token_ids.tolist() for event in told.news() if isinstance(event, BlockStored)] == [[1, 2]]

    told.insert(1, 2, 9)
    told.insert(1)
    assert told.news() == []


def test_matches_splits_and_locks_tell_nothing(told: Told) -> None:
    told.insert(1, 2, 3, 4, 5, 6)
    told.news()

    node = told.tree.match_prefix(RadixKey([1, 2])).last_node
    told.tree.inc_lock_ref(node)
    told.tree.dec_lock_ref(node)

    assert told.news() == []


def test_a_page_below_a_split_has_the_page_before_it_as_its_parent(told: Told) -> None:
    one, two, _ = chain([1, 2], [3, 4], [5, 6])
    told.insert(1, 2, 3, 4, 5, 6)
    told.news()

    told.insert(1, 2, 3, 4, 7, 8)
    told.insert(1, 2, 9, 9)

    assert told.news() == [
        stored([chain([1, 2], [3, 4], [7, 8])[2]], two, [7, 8]),
        stored([chain([1, 2], [9, 9])[1]], one, [9, 9]),
    ]


def test_an_eviction_tells_of_every_page_children_first(told: Told) -> None:
    one, two, three = chain([1, 2], [3, 4], [5, 6])
    told.insert(1, 2, 3, 4, 5, 6)
    told.tree.match_prefix(RadixKey([1, 2]))  # splits
    told.news()

    told.tree.evict(6)

    assert told.news() == [removed(three, two, one)]


def test_namespaces_share_neither_a_hash_nor_an_event(told: Told) -> None:
    told.insert(1, 2)
    told.insert(1, 2, namespace="a")
    told.insert(1, 2, namespace="b")
    first, second, third = (event.block_hashes[0] for event in told.news() if isinstance(event, BlockStored))

    told.tree.evict(6)

    assert len({first, second, third}) == 3
    assert told.news() == [removed(first), removed(second), removed(third)]


def test_a_reset_clears_everything_in_one_event(told: Told) -> None:
    told.insert(1, 2)
    told.insert(3, 4, namespace="a")
    told.news()

    told.tree.reset()

    assert told.news() == [AllBlocksCleared()]
    assert list(told.tree.resident_pages()) == []


def test_what_was_locked_when_all_was_retired_is_told_of_once(told: Told) -> None:
    node = told.insert(1, 2)
    told.tree.inc_lock_ref(node)
    told.news()

    told.tree.retire_all()
    told.insert(1, 2)
    told.tree.dec_lock_ref(node)
    assert told.tree.reclaim_retired() == 2

    assert told.news() == [AllBlocksCleared(), stored(chain([1, 2]), None, [1, 2])]
    assert resident_blocks(told.tree).keys() == set(chain([1, 2]))


def test_window_kv_is_a_group_of_its_own() -> None:
    told = Told(RadixCache(PAGE, sliding_window_size=2))
    one, two, three = chain([1, 2], [3, 4], [5, 6])
    told.insert(1, 2, 3, 4, 5, 6)
    first, tail = stored([one], None, [1, 2]), stored([two, three], one, [3, 4, 5, 6])  # the tail is a node
    assert told.news() == [
        in_group(first, 0, "full_attention"),
        in_group(first, 1, "sliding_window", 2),
        in_group(tail, 0, "full_attention"),
        in_group(tail, 1, "sliding_window", 2),
    ]

    told.tree.evict(0, 2)
    assert told.news() == [removed(one, group=1)]

    told.tree.insert(RadixKey([1, 2, 3, 4]), torch.arange(10, 14))
    assert told.news() == [in_group(first, 1, "sliding_window", 2)]  # healed

    told.tree.evict(6)
    assert told.news() == [removed(three, two, one, group=1), removed(three, two, one, group=0)]


def test_states_are_a_group_of_their_own() -> None:
    told = Told(MambaRadixCache(PAGE, mamba_pool=MambaPool(4)))
    one, two = chain([1, 2], [3, 4])
    for length in (2, 4):
        told.tree.insert(RadixKey([1, 2, 3, 4][:length]), mamba_value=told.tree.mamba_pool.alloc_track_slot())
    first, second = stored([one], None, [1, 2]), stored([two], one, [3, 4])
    assert told.news() == [
        in_group(first, 0, "full_attention"),
        in_group(first, 1, "mamba"),
        in_group(second, 0, "full_attention"),
        in_group(second, 1, "mamba"),
    ]

    told.tree.evict(0, 1)
    assert told.news() == [removed(one, group=1)]

    told.tree.evict(0, 1)
    assert told.news() == [removed(two, group=1), removed(two, group=0)]
    assert resident_blocks(told.tree).keys() == {one}


def test_of_pairs_the_first_ids_are_told(told: Told) -> None:
    told.tree.insert(RadixKey([1, 2, 3]).bigrams())

    (event,) = told.news()
    assert isinstance(event, BlockStored)
    assert event.token_ids.tolist() == [1, 2]
    assert event.block_hashes.tolist() == [hash_to_int64(hash_token_ids([(1, 2), (2, 3)]))]


def test_wide_ids_are_told_as_they_are_and_change_no_hash_of_others(told: Told) -> None:
    told.insert(1, 2)
    told.insert(2**40, 3)

    narrow, wide = told.news()

    assert narrow == stored(chain([1, 2]), None, [1, 2])
    assert wide == stored(chain([2**40, 3]), None, [2**40, 3])
    assert set(snapshot_of(told.feed, told.tree).events) == {narrow, wide}


def test_without_a_sink_nothing_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_hashes, "hash_page", None)  # to call it would raise
    tree = RadixCache(PAGE)

    tree.insert(RadixKey([1, 2, 3, 4]))
    tree.match_prefix(RadixKey([1, 2]))
    tree.evict(4)
    tree.reset()


def test_with_a_sink_each_page_is_hashed_once(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    original = page_hashes.hash_page
    monkeypatch.setattr(page_hashes, "hash_page", lambda ids, *rest: hashed.append(ids) or original(ids, *rest))

    told.insert(1, 2, 3, 4)
    told.insert(1, 2, 5, 6)
    told.insert(1, 2, 3, 4, 7, 8)
    told.tree.evict(100)

    assert len(hashed) == 4


def test_a_sink_that_comes_late_begins_with_what_is_there() -> None:
    tree = RadixCache(PAGE)
    tree.insert(RadixKey([1, 2, 3, 4]))

    told = Told(tree)
    index = ReplayedIndex(snapshot_of(told.feed, tree))
    tree.evict(4)

    assert index.hashes == set(chain([1, 2], [3, 4]))
    index.apply(batch_after(told.feed, 0))
    assert index.hashes == set()


# ---------------------------------------------------------------- walks


@pytest.mark.parametrize("seed", range(40))
def test_a_walk_meets_each_page_once_though_its_tree_changes_between_the_parts(told: Told, seed: int) -> None:
    rng = random.Random(seed)

    def some_ids() -> list[int]:
        return [rng.randint(1, 2) for _ in range(PAGE * rng.randint(1, 16))]

    for _ in range(12):
        told.insert(*some_ids(), namespace=rng.choice([None, "-1:a-"]))
    there = told.tree.resident_pages()
    before = {page for run in there for page in run.hashes.tolist()}

    met: list[int] = []
    with told.feed.recording() as events:
        for runs in told.tree.walk_pages():
            for run in runs:
                assert run.parent_hash in (None, *met) or run.parent_hash not in before
                met += run.hashes.tolist()
            match rng.randrange(4):
                case 0:
                    told.insert(*some_ids(), namespace=rng.choice([None, "-1:a-"]))
                case 1:
                    told.tree.match_prefix(RadixKey(some_ids()))
                case 2:
                    told.tree.evict(PAGE)
    named = {page for _, hashes, _, _ in events for page in hashes.tolist()}

    assert sorted(set(met) - named) == sorted(before - named)
    assert len(set(met) - named) == sum(page not in named for page in met), "a page is met twice"
    after = {page for run in told.tree.resident_pages() for page in run.hashes.tolist()}
    assert before - named <= after


def test_a_walk_meets_the_head_of_a_node_that_was_split_and_has_lost_its_tail(told: Told) -> None:
    told.insert(2, 2, 2, 2, 2, 2)
    told.insert(1, 1, 1, 1)
    walk = told.tree.walk_pages()

    met = [run.token_ids.tolist() for run in next(walk)]
    assert met == [[2, 2, 2, 2, 2, 2]]
    node = told.tree.match_prefix(RadixKey([1, 1])).last_node
    told.tree.match_prefix(RadixKey([2, 2, 2, 2, 2, 2]))
    told.tree.evict(PAGE)
    assert node.parent is not None and not node.children

    assert [run.token_ids.tolist() for runs in walk for run in runs] == [[1, 1]]


# ---------------------------------------------------------------- the feed


def test_a_snapshot_holds_everything_parents_first_and_says_where_to_go_on(told: Told) -> None:
    told.insert(1, 2, 3, 4, 5, 6)
    told.insert(1, 2, 3, 4, 7, 8)
    told.insert(1, 2, 9, 9)
    told.insert(1, 2, namespace="a")
    told.tree.match_prefix(RadixKey([1, 2, 3, 4, 5, 6]))
    told.tree.evict(2)

    snapshot = snapshot_of(told.feed, told.tree)

    assert (snapshot.epoch, snapshot.seq) == ("e", told.feed.seq)
    assert ReplayedIndex(snapshot).blocks == resident_blocks(told.tree)


def test_events_are_numbered_from_one_and_a_batch_ends_at_its_last(told: Told) -> None:
    assert (told.feed.seq, batch_after(told.feed, 0).seq) == (0, 0)
    for each in (1, 2, 3):
        told.insert(each, each)

    batch = batch_after(told.feed, 1)

    assert (batch.epoch, batch.seq, len(batch.events), batch.gap) == ("e", 3, 2, False)
    assert batch_after(told.feed, 3).events == ()


def test_a_long_backlog_comes_in_several_batches(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "MAX_BATCH_EVENTS", 2)
    for each in (1, 2, 3, 4, 5):
        told.insert(each, each)

    seqs, batch = [], batch_after(told.feed, 0)
    while batch.events:
        seqs.append((batch.seq, len(batch.events)))
        batch = batch_after(told.feed, batch.seq)

    assert seqs == [(2, 2), (4, 2), (5, 1)]


def test_a_batch_is_bounded_in_bytes_but_never_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "MAX_BATCH_BYTES", 48)  # an event of one page is 16
    told = Told()
    for ids in ([1] * 2, [2] * 2, [3] * 2, [4] * 20, [5] * 2):
        told.insert(*ids)

    assert [len(batch_after(told.feed, seq).events) for seq in range(5)] == [3, 2, 1, 1, 1]


def test_who_falls_behind_what_is_kept_is_told_of_the_gap(told: Told) -> None:
    told.feed._max_events = 2
    for each in (1, 2, 3):
        told.insert(each, each)
        told.news()

    assert [batch_after(told.feed, seq).seq for seq in (1, 2, 3)] == [2, 3, 3]
    batch = batch_after(told.feed, 0)
    assert (batch.gap, batch.seq, batch.events) == (True, 3, ())


def test_what_is_kept_is_bounded_in_bytes(told: Told) -> None:
    for each in (1, 2, 3, 4):
        told.insert(each, each)
        told.news()
        told.feed._max_bytes = 3 * len(told.feed.batches_after(0).batches[0]) if each == 1 else told.feed._max_bytes

    assert batch_after(told.feed, 0).gap
    assert [batch.seq for batch in told.feed.batches_after(1).unpack()] == [2, 3, 4]

    told.insert(*range(100, 1100))  # 8,000 bytes: more than is kept
    assert batch_after(told.feed, 4).gap
    assert not batch_after(told.feed, 5).gap


def test_a_number_that_was_never_given_is_a_gap(told: Told) -> None:
    told.insert(1, 2)

    batch = batch_after(told.feed, 2)

    assert (batch.gap, batch.seq) == (True, 1)


async def test_a_batch_is_packed_once_and_a_reader_gets_what_it_lacks(told: Told) -> None:
    told.insert(1, 2)
    told.insert(3, 4)
    (packed,) = told.feed.batches_after(0).batches
    told.insert(5, 6)

    late = told.feed.batches_after(1)

    assert late.batches == (packed,)
    assert batch_after(told.feed, 1).events == (stored(chain([3, 4]), None, [3, 4]),)
    assert batch_after(told.feed, 2).events == (stored(chain([5, 6]), None, [5, 6]),)


def events_of(packed: PackedEvents) -> list[Any]:
    return [event for batch in packed.unpack() for event in batch.events]


async def test_a_reader_waits_until_something_happens(told: Told) -> None:
    readers = [asyncio.ensure_future(told.feed.next_batch(0, 60)) for _ in range(2)]
    await asyncio.sleep(0)

    told.insert(1, 2)
    told.insert(3, 4)  # in the same step of the loop: in the same batch

    assert [len(events_of(await reader)) for reader in readers] == [2, 2]


async def test_a_reader_who_gives_up_does_not_disturb_the_others(told: Told) -> None:
    impatient = await told.feed.next_batch(0, 0)
    cancelled, patient = (asyncio.ensure_future(told.feed.next_batch(0, 60)) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.sleep(0)

    told.insert(1, 2)

    assert impatient.batches == ()
    assert len(events_of(await patient)) == 1


async def test_nobody_waits_at_a_closed_feed(told: Told) -> None:
    waiting = asyncio.ensure_future(told.feed.next_batch(0, 60))
    await asyncio.sleep(0)

    told.feed.close()

    assert (await waiting).batches == ()
    assert (await told.feed.next_batch(0, 60)).batches == ()


# ---------------------------------------------------------------- the messages


def test_events_read_as_those_of_vllm() -> None:
    namespace = frame_namespace(None, "adapter", "salt")
    event = stored([5, -6], None, [1, 2, 3, 4], namespace)

    assert list(event.model_dump().items()) == [
        ("type", "BlockStored"),
        ("block_hashes", [5, -6]),
        ("parent_block_hash", None),
        ("token_ids", [1, 2, 3, 4]),
        ("block_size", 2),
        ("lora_id", None),
        ("medium", "GPU"),
        ("lora_name", "adapter"),
        ("extra_keys", [(namespace,), (namespace,)]),
    ]
    assert (event.lora_name, event.lora_id, event.extra_keys) == ("adapter", None, [(namespace,)] * 2)
    assert list(removed(5).model_dump().items()) == [("type", "BlockRemoved"), ("block_hashes", [5]), ("medium", "GPU")]
    assert AllBlocksCleared().model_dump() == {"type": "AllBlocksCleared"}
    assert stored([5], None, [1, 2]).model_dump()["extra_keys"] is None


def test_the_hash_of_a_page_follows_from_what_its_event_says() -> None:
    told = Told()
    told.insert(1, 2, namespace=frame_namespace("k", None, None))
    (event,) = told.news()

    assert isinstance(event, BlockStored)
    seeded = page_hashes.namespace_seed(event.extra_keys[0][0] if event.extra_keys else None)
    digest = hash_token_ids(event.token_ids.tolist(), seeded.hex() if seeded else None)
    assert event.block_hashes.tolist() == [hash_to_int64(digest)]


def test_block_hashes_read_like_a_tuple() -> None:
    hashes = BlockHashes.pack([2**63 - 1, -(2**63), 0])

    assert list(hashes) == hashes.tolist() == [2**63 - 1, -(2**63), 0]
    assert (len(hashes), hashes[0], hashes[-1], hashes[1:], 0 in hashes) == (3, 2**63 - 1, 0, [-(2**63), 0], True)
    assert hashes == BlockHashes.pack(np.array([2**63 - 1, -(2**63), 0])) == pickle.loads(pickle.dumps(hashes))
    assert len({hashes, BlockHashes.pack(hashes), BlockHashes.pack([])}) == 2
    with pytest.raises(IndexError):
        hashes[3]


@pytest.mark.parametrize("wrong", [[2**63], ["a"], [None], np.array([1.5]), np.array([1], np.uint64), 3])
def test_block_hashes_are_signed_64_bit_integers(wrong: Any) -> None:
    with pytest.raises(ValidationError):
        BlockRemoved(block_hashes=wrong, medium="GPU")


@pytest.mark.parametrize("triple", [("k", None, None), (None, "", "s"), ("-", "1:a", "12:x"), ("a:b", "é", "-")])
def test_a_namespace_can_be_taken_apart_again(triple: tuple[str | None, str | None, str | None]) -> None:
    namespace = frame_namespace(*triple)

    assert namespace is not None
    assert unframe_namespace(namespace) == triple


@pytest.mark.parametrize("wrong", ["", "--", "---", "a", "1:ab-", "2:a--", "01:a--", "1:a---"])
def test_what_no_namespace_is_is_not_taken_apart(wrong: str) -> None:
    with pytest.raises(ValueError):
        unframe_namespace(wrong)


def test_events_are_refused_for_kinds_that_cannot_tell_them() -> None:
    with pytest.raises(ValidationError, match="events is for kinds"):
        CacheConfig(kind="trie", pool=PoolConfig(num_slots=8), events=True)


def test_slots_are_not_part_of_an_event() -> None:
    told = Told()
    told.tree.insert(RadixKey([1, 2]), torch.tensor([40, 41]))

    assert told.news() == [stored(chain([1, 2]), None, [1, 2])]
