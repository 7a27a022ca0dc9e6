"""Images and pairs in keys: ids of 64 bits among narrow ones, in every form, before and after a namespace widens.

Then each rule is broken once, and a claim must see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from support.claims.hypothesis_claims import Claim, refute, uphold
from support.claims.images import (
    EDGES,
    FORMS,
    HALVES,
    IMAGES,
    TREES,
    pairs_lose_one_token_and_what_is_then_no_whole_page,
    prompts_meet_in_states_tries_and_rows,
    prompts_meet_where_their_ids_are_equal,
    some_prompts,
)
from support.reference.keys import image_id, page_hashes, pairs

from raydix.cache_core import InvalidKeyError, RadixKey, hash_bytes, hash_token_ids
from raydix.cache_core.kernels import rekey_children
from raydix.cache_core.leases import kv_cache
from raydix.cache_core.tree import page_events
from raydix.cache_core.tree import page_hashes as hashes_of_nodes
from raydix.cache_core.tree.hashing import hash_page
from raydix.cache_core.tree.radix_tree import RadixTree
from raydix.schemas import TokenIds

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]

page_sizes = st.sampled_from([1, 2, 4])
some_forms = st.lists(st.sampled_from(list(FORMS)), min_size=8, max_size=8)


def test_the_images_need_64_bits_and_one_of_them_all_of_them() -> None:
    assert [hash_bytes(bytes([number])) for number in (0, 1)] == [image_id(b"\0"), image_id(b"\1")] == IMAGES
    assert min(IMAGES) >= 2**32 and max(HALVES) < 2**32
    assert min(IMAGES) < 2**63 <= max([*IMAGES, *EDGES])


@pytest.mark.parametrize("form", FORMS)
def test_an_id_of_64_bits_is_the_same_in_every_form(form: str) -> None:
    ids = [7, *IMAGES, *EDGES]

    assert RadixKey(FORMS[form](ids)) == RadixKey(ids)
    assert TokenIds.pack(FORMS[form](ids)).tolist() == ids


@pytest.mark.parametrize("signed", [np.array, torch.from_numpy], ids=["numpy", "torch"])
def test_an_id_of_the_upper_half_does_not_fit_in_signed_integers(signed: Callable[[Any], Any]) -> None:
    ids = signed(np.array([7, 2**63], np.uint64).view(np.int64))

    with pytest.raises(InvalidKeyError, match="must not be negative"):
        RadixKey(ids)
    with pytest.raises(ValueError, match="must not be negative"):
        TokenIds.pack(ids)


@pytest.mark.parametrize("kind", TREES)
def test_prompts_with_images_meet_where_their_ids_are_equal(kind: str) -> None:
    uphold(
        prompts_meet_where_their_ids_are_equal,
        kind=st.just(kind),
        prompts=some_prompts(),
        page_size=page_sizes,
        forms=some_forms,
    )


@pytest.mark.more
def test_prompts_with_images_meet_in_states_tries_and_rows_as_well() -> None:
    uphold(prompts_meet_in_states_tries_and_rows, prompts=some_prompts(), page_size=page_sizes, forms=some_forms)


@pytest.mark.more
def test_a_cache_of_pairs_loses_one_token_and_what_is_then_no_whole_page() -> None:
    uphold(pairs_lose_one_token_and_what_is_then_no_whole_page, prompts=some_prompts(), page_size=page_sizes)


@pytest.mark.parametrize("page", [[(1, 2)], [(1, 2), (2, 3)], [(IMAGES[0], 1)], [(1, 2, 3)], [(5,)]])
def test_tuples_are_hashed_apart_from_their_ids(page: list[Any]) -> None:
    flat = [id_ for each in page for id_ in each]

    assert [hash_token_ids(page)] == page_hashes(page, len(page))
    assert [hash_token_ids(flat)] == page_hashes(flat, len(flat))
    assert hash_token_ids(page) != hash_token_ids(flat)


@pytest.mark.parametrize("num_tokens", range(10))
def test_n_tokens_make_n_minus_1_pairs(num_tokens: int) -> None:
    tokens = list(range(num_tokens))

    assert RadixKey(tokens).bigrams().token_ids == pairs(tokens)


# ---------------------------------------------------------------- planted faults

FAULTS: list[tuple[Fault, Claim]] = []


def breaks(claim: Claim) -> Callable[[Fault], Fault]:
    """Register a fault with the claim that must see it; its name says what goes wrong."""

    def register(plant: Fault) -> Fault:
        FAULTS.append((plant, claim))
        return plant

    return register


@breaks(prompts_meet_where_their_ids_are_equal)
def widening_forgets_a_childs_key(patch: Patch) -> None:
    original = RadixTree._widen

    def widen(tree: RadixTree, top: Any) -> None:
        first = next(iter(top.children.values()))
        narrow_page = first.data[: tree.page_size * top.namespace.unit]
        original(tree, top)
        wide, first.data = first.data, narrow_page
        rekey_children(top, tree.page_size * top.namespace.unit)
        first.data = wide

    patch.setattr(RadixTree, "_widen", widen)


@breaks(prompts_meet_where_their_ids_are_equal)
def widening_forgets_what_lies_deeper(patch: Patch) -> None:
    def widen(tree: RadixTree, top: Any) -> None:
        for node in tree.nodes_below(top):
            node.data = np.frombuffer(node.data, "<u4").astype("<u8").tobytes()
        top.namespace.width, top.namespace.unit = 8, top.namespace.unit * 2
        rekey_children(top, tree.page_size * top.namespace.unit)

    patch.setattr(RadixTree, "_widen", widen)


@breaks(prompts_meet_where_their_ids_are_equal)
def widening_extends_the_sign(patch: Patch) -> None:
    original = RadixKey.with_width

    def with_width(key: RadixKey, width: int) -> RadixKey:
        if width == key.width or width == 4:
            return original(key, width)
        wide = key.ids.astype("<i4").astype("<i8").tobytes()
        return RadixKey.from_packed(wide, width, key.extra_key, key.arity)

    patch.setattr(RadixKey, "with_width", with_width)


@breaks(prompts_meet_where_their_ids_are_equal)
def upper_halves_are_lost_where_ids_are_narrow(patch: Patch) -> None:
    patch.setattr(RadixKey, "num_narrow", lambda key: len(key))


@breaks(prompts_meet_where_their_ids_are_equal)
def keys_are_compared_as_bytes(patch: Patch) -> None:
    original = RadixTree.find_namespace

    def find_namespace(tree: RadixTree, key: RadixKey) -> Any:
        top = tree.tops.get((key.extra_key, key.arity))
        if top is not None and top.namespace.width == 4 and key.width == 8:
            key = RadixKey.from_packed(key.data, 4, key.extra_key, key.arity)
        return original(tree, key)

    patch.setattr(RadixTree, "find_namespace", find_namespace)


@breaks(prompts_meet_where_their_ids_are_equal)
def a_wide_namespace_hashes_narrow_pages_wide(patch: Patch) -> None:
    def hash_wide(ids: bytes, width: int, arity: int, prior: bytes | None) -> bytes:
        padded = ids if width == 4 else ids + b"\xff" * 8  # no page of these is narrow
        return hash_page(padded, width, arity, prior)

    patch.setattr(hashes_of_nodes, "hash_page", hash_wide)


@breaks(prompts_meet_where_their_ids_are_equal)
def a_long_id_is_hashed_as_its_lower_half(patch: Patch) -> None:
    def hash_low(ids: bytes, width: int, arity: int, prior: bytes | None) -> bytes:
        return hash_page(np.frombuffer(ids, f"<u{width}").astype("<u4").tobytes(), 4, arity, prior)

    patch.setattr(hashes_of_nodes, "hash_page", hash_low)


@breaks(pairs_lose_one_token_and_what_is_then_no_whole_page)
def the_last_token_makes_a_pair_with_itself(patch: Patch) -> None:
    def bigrams(key: RadixKey) -> RadixKey:
        ids = key.ids
        pairs = np.stack((ids, np.append(ids[1:], ids[-1:])), axis=1)
        return RadixKey.from_packed(pairs.tobytes(), key.width, key.extra_key, 2)

    patch.setattr(RadixKey, "bigrams", bigrams)


@breaks(pairs_lose_one_token_and_what_is_then_no_whole_page)
def pairs_do_not_overlap(patch: Patch) -> None:
    def bigrams(key: RadixKey) -> RadixKey:
        return RadixKey(list(zip(*[iter(key.token_ids)] * 2, strict=False)), key.extra_key)

    patch.setattr(RadixKey, "bigrams", bigrams)


@breaks(pairs_lose_one_token_and_what_is_then_no_whole_page)
def a_cache_of_pairs_keeps_plain_tokens(patch: Patch) -> None:
    patch.setattr(kv_cache.KVCache, "_tree_key", lambda core, key: key)


@breaks(pairs_lose_one_token_and_what_is_then_no_whole_page)
def pairs_are_hashed_as_plain_ids(patch: Patch) -> None:
    patch.setattr(hashes_of_nodes, "hash_page", lambda ids, width, arity, prior: hash_page(ids, width, 0, prior))


@breaks(pairs_lose_one_token_and_what_is_then_no_whole_page)
def the_second_ids_of_pairs_are_told(patch: Patch) -> None:
    original = page_events.page_run

    def page_run(node: Any, page_size: int) -> Any:
        return original(node, page_size)._replace(token_ids=node.key.ids[1::2])

    patch.setattr(page_events, "page_run", page_run)


@pytest.mark.parametrize(("plant", "claim"), FAULTS, ids=lambda each: each.__name__)
def test_a_planted_fault_is_seen(plant: Fault, claim: Claim, monkeypatch: Patch) -> None:
    plant(monkeypatch)

    inputs: dict[str, st.SearchStrategy[Any]] = {"prompts": some_prompts(), "page_size": page_sizes}
    if claim is prompts_meet_where_their_ids_are_equal:
        inputs |= {"kind": st.just("full"), "forms": some_forms}
    refute(claim, **inputs)
