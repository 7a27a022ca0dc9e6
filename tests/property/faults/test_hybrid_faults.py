"""Proof that random traffic finds faults: each rule between windows and states is broken once, and found."""

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from support.faults.faults import Catalogue, Fault, Patch, around
from support.faults.match_end_rules import judge_of, judged
from support.traffic.hybrid import run_random_hybrid_traffic
from support.traffic.radix import TrafficFailed

from raydix.cache_core import MambaRadixCache, TreeNode
from raydix.cache_core.components.full_kv import FullKV
from raydix.cache_core.components.recurrent_state import RecurrentState
from raydix.cache_core.components.window_kv import WindowKV, WindowReceipt
from raydix.cache_core.kernels import Victims
from raydix.cache_core.radix import lookup
from raydix.cache_core.radix.prefix_cache import PrefixCache
from raydix.cache_core.radix.tree_parts import TreeParts

RUNS = [(0, 1, 3), (3, 1, 7), (4, 4, 2)]  # seed, page size, window

FAULTS = Catalogue()
fault, late_fault = FAULTS.register, FAULTS.register_late


def whole(path: list[TreeNode], end: int) -> list[TreeNode]:
    """The nodes of a walk that it matches to their ends."""
    return [node for node in path if node.end <= end]


def cut(path: list[TreeNode], count: int) -> tuple[list[TreeNode], int]:
    """The first nodes of a walk, and where they end."""
    return path[:count], path[count - 1].end if count else 0


def with_parts(patch: Patch, owner: Any, name: str, choose: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
    """Let one function work with other components than its owner has."""

    def with_others(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        holder, field = (self, "_aux") if isinstance(self, FullKV) else (getattr(self, "parts", self), "components")
        components = getattr(holder, field)
        setattr(holder, field, choose(components))
        try:
            return original(self, *args, **kwargs)
        finally:
            setattr(holder, field, components)

    around(patch, owner, name, with_others)


def around_heals(patch: Patch, wrapper: Callable[..., None]) -> None:
    """Replace the healing of a tombstone by `wrapper(heal, parts, node)`."""
    parts_of: dict[WindowKV, TreeParts] = {}

    def init(original: Any, cache: Any, *args: Any, **kwargs: Any) -> None:
        original(cache, *args, **kwargs)
        parts_of[cache.parts.window] = cache.parts

    def heal(original: Any, swa: WindowKV, node: Any, fresh: Any) -> None:
        wrapper(lambda: original(swa, node, fresh), parts_of[swa], node)

    around(patch, MambaRadixCache, "__init__", init)
    around(patch, WindowKV, "heal", heal)


# ---------------------------------------------------------------- matches


@fault
def a_match_is_judged_by_its_window_alone(patch: Patch) -> None:
    with_parts(patch, lookup, "usable", lambda parts: parts[:1])


@fault
def a_match_is_judged_by_its_state_alone(patch: Patch) -> None:
    with_parts(patch, lookup, "usable", lambda parts: parts[1:])


@fault
def a_match_ends_where_either_lets_it(patch: Patch) -> None:
    def usable(parts: TreeParts, path: list[TreeNode], end: int, aux: Any = None) -> tuple[list[TreeNode], int]:
        judges = [judge_of(component) for component in parts.components]
        ends = [0]
        for count, node in enumerate(whole(path, end), 1):
            verdicts = [may_end(node, len(node)) for may_end in judges]
            ends += [count] * any(verdicts)
        return cut(path, ends[-1])

    patch.setattr(lookup, "usable", usable)


@fault
def a_match_ends_at_the_nearer_of_two_ends(patch: Patch) -> None:
    def usable(parts: TreeParts, path: list[TreeNode], end: int, aux: Any = None) -> tuple[list[TreeNode], int]:
        ends = []
        for component in parts.components:
            may_end = judge_of(component)
            fits = [count for count, node in enumerate(whole(path, end), 1) if may_end(node, len(node))]
            ends.append(max(fits, default=0))
        return cut(path, min(ends))

    patch.setattr(lookup, "usable", usable)


@fault
def the_window_is_counted_over_nodes_with_a_state_only(patch: Patch) -> None:
    def usable(parts: TreeParts, path: list[TreeNode], end: int, aux: Any = None) -> tuple[list[TreeNode], int]:
        judges = [judge_of(component) for component in reversed(parts.components)]
        usable = 0
        for count, node in enumerate(whole(path, end), 1):
            usable = count if all(may_end(node, len(node)) for may_end in judges) else usable
        return cut(path, usable)

    patch.setattr(lookup, "usable", usable)


@fault
def the_window_must_be_live_since_the_last_state(patch: Patch) -> None:
    def judge(swa: WindowKV) -> Any:
        live = inf

        def may_end(node: Any, length: int) -> bool:
            nonlocal live
            live = 0 if node.swa_tombstone else live + length
            fits = live >= swa.window
            live = 0 if node.mamba_value is not None else live
            return fits

        return may_end

    patch.setattr(WindowKV, "usable", judged(judge))


@fault
def a_walk_that_ends_within_a_node_is_used_to_its_end(patch: Patch) -> None:
    def usable(
        original: Any, parts: TreeParts, path: list[TreeNode], end: int, aux: Any = None
    ) -> tuple[list[TreeNode], int]:
        node: Any = path[-1] if path else None
        fits = node is not None and node.end > end and node.mamba_value is not None and not node.swa_tombstone
        return (path, end) if fits else original(parts, path, end, aux)

    around(patch, lookup, "usable", usable)


@fault
def a_match_uses_its_window_but_not_its_state(patch: Patch) -> None:
    with_parts(patch, TreeParts, "touch", lambda parts: parts[:1])


@fault
def a_match_uses_its_state_but_not_its_window(patch: Patch) -> None:
    with_parts(patch, TreeParts, "touch", lambda parts: parts[1:])


# ---------------------------------------------------------------- inserts and heals


@fault
def with_a_state_all_that_is_inserted_is_live(patch: Patch) -> None:
    def insert(original: Any, cache: Any, *args: Any, swa_evicted_seqlen: int = 0, **kwargs: Any) -> Any:
        lost = 0 if kwargs.get("mamba_value") is not None else swa_evicted_seqlen
        return original(cache, *args, swa_evicted_seqlen=lost, **kwargs)

    around(patch, MambaRadixCache, "insert", insert)


@fault
def a_state_is_put_where_the_last_window_begins(patch: Patch) -> None:
    def attach(original: Any, cache: Any, node: Any, slot: int | None) -> bool:
        above = node.parent
        first = node.end - len(node)
        fits = slot is not None and above is not None and above.data and above.mamba_value is None and first
        return bool(original(cache, above if fits else node, slot))

    around(patch, MambaRadixCache, "attach_state", attach)


@late_fault
def a_state_brought_to_a_tombstone_is_dropped(patch: Patch) -> None:
    def attach(original: Any, cache: Any, node: Any, slot: int | None) -> bool:
        return bool(original(cache, node, None if node.swa_tombstone else slot))

    around(patch, MambaRadixCache, "attach_state", attach)


@fault
def a_state_is_said_to_exist_only_with_its_window(patch: Patch) -> None:
    def attach(original: Any, cache: Any, node: Any, slot: int | None) -> bool:
        return bool(original(cache, node, slot)) and not node.swa_tombstone

    around(patch, MambaRadixCache, "attach_state", attach)


@fault
def a_heal_gives_the_state_up(patch: Patch) -> None:
    def heal(original: Any, parts: Any, node: Any) -> None:
        parts.states.drop(node)
        original()

    around_heals(patch, heal)


@fault
def a_heal_forgets_the_state(patch: Patch) -> None:
    def heal(original: Any, parts: Any, node: Any) -> None:
        original()
        parts.states._queue.discard(node)
        node.mamba_value = None

    around_heals(patch, heal)


@late_fault
def a_heal_counts_as_a_use_of_the_state(patch: Patch) -> None:
    def heal(original: Any, parts: Any, node: Any) -> None:
        original()
        parts.states.touch(node, parts.clock)

    around_heals(patch, heal)


@fault
def a_tombstone_with_a_state_does_not_heal(patch: Patch) -> None:
    def heal(original: Any, parts: Any, node: Any) -> None:
        if node.mamba_value is None:
            original()

    around_heals(patch, heal)


@fault
def a_tombstone_that_heals_in_part_has_its_state_where_it_was_cut(patch: Patch) -> None:
    def heal(original: Any, parts: Any, node: Any) -> None:
        original()
        above = node.parent
        if above.data and above.swa_tombstone and above.mamba_value is None and not node.own_locks:
            above.mamba_value, node.mamba_value = node.mamba_value, None
            above.mamba_access_time = node.mamba_access_time
            parts.states._queue.discard(node)
            if above.mamba_value is not None:
                parts.states._queue.push(above)

    around_heals(patch, heal)


@fault
def a_split_is_told_to_the_states_alone(patch: Patch) -> None:
    with_parts(patch, TreeParts, "split", lambda parts: parts[1:])


# ---------------------------------------------------------------- locks


@fault
def a_lock_loses_its_receipt(patch: Patch) -> None:
    def lock(cache: MambaRadixCache, node: TreeNode) -> Any:
        if node is not cache.root:
            cache.parts.check_live(node)
            cache.parts.full.lock(node)
        return [component.lock(node) for component in cache.parts.components][-1]

    patch.setattr(MambaRadixCache, "inc_lock_ref", lock)


@fault
def a_lock_holds_its_window_alone(patch: Patch) -> None:
    with_parts(patch, MambaRadixCache, "inc_lock_ref", lambda parts: parts[:1])
    with_parts(patch, MambaRadixCache, "dec_lock_ref", lambda parts: parts[:1])


@fault
def an_unlock_gives_only_its_window_back(patch: Patch) -> None:
    with_parts(patch, MambaRadixCache, "dec_lock_ref", lambda parts: parts[:1])


@fault
def an_unlock_gives_only_its_state_back(patch: Patch) -> None:
    def unlock(original: Any, swa: WindowKV, node: Any, receipt: WindowReceipt) -> None:
        receipt.used = True

    around(patch, WindowKV, "unlock", unlock)


@late_fault
def the_states_of_the_whole_window_are_held(patch: Patch) -> None:
    def pop_victim(original: Any, mamba: RecurrentState) -> Any:
        passed_over = []
        while (node := original(mamba)) is not None and node.swa_lock_ref:
            passed_over.append(node)
        for each in passed_over:
            mamba._queue.push(each)
        return node

    around(patch, RecurrentState, "pop_victim", pop_victim)


@fault
def a_window_given_up_early_gives_its_state_up(patch: Patch) -> None:
    def release(original: Any, cache: Any, node: Any, receipt: WindowReceipt) -> None:
        original(cache, node, receipt)
        if node is not cache.root and not node.swa_lock_ref and node.mamba_value is not None:
            cache.parts.states.protected -= 1
            cache.parts.states._pool.free_track_slot(node.mamba_value)
            node.mamba_value = None

    around(patch, PrefixCache, "release_window", release)


@fault
def a_window_given_up_early_unlocks_its_state(patch: Patch) -> None:
    def release(original: Any, cache: Any, node: Any, receipt: WindowReceipt) -> None:
        if node is not cache.root and node.own_locks == 1 and not receipt.released:
            cache.parts.states.evictable += node.mamba_value is not None
            cache.parts.states.protected -= node.mamba_value is not None
        original(cache, node, receipt)

    around(patch, PrefixCache, "release_window", release)


@fault
def after_a_window_was_given_up_early_its_state_stays_locked(patch: Patch) -> None:
    def unlock(original: Any, mamba: RecurrentState, node: Any, receipt: WindowReceipt) -> None:
        if not receipt.early:  # type: ignore[attr-defined]
            original(mamba, node, receipt)

    def release(original: Any, cache: Any, node: Any, receipt: WindowReceipt) -> None:
        original(cache, node, receipt)
        receipt.early = True  # type: ignore[attr-defined]

    patch.setattr(WindowReceipt, "early", False, raising=False)
    patch.setattr(
        "raydix.cache_core.components.window_kv.WindowReceipt", type("Receipt", (WindowReceipt,), {"early": False})
    )
    around(patch, RecurrentState, "unlock", unlock)
    around(patch, PrefixCache, "release_window", release)


# ---------------------------------------------------------------- eviction


@fault
def a_state_outlives_its_window(patch: Patch) -> None:
    def drop(original: Any, mamba: RecurrentState, node: Any) -> None:
        if not node.swa_tombstone or not (node.children or node.lock_ref):
            original(mamba, node)

    around(patch, RecurrentState, "drop", drop)


@fault
def a_locked_state_goes_with_its_window(patch: Patch) -> None:
    def drop(original: Any, swa: WindowKV, node: Any) -> None:
        original(swa, node)
        if node.own_locks and node.mamba_value is not None:
            swa.cache.parts.states.protected -= 1  # type: ignore[attr-defined]
            swa.cache.parts.states._pool.free_track_slot(node.mamba_value)  # type: ignore[attr-defined]
            node.mamba_value = None

    def init(original: Any, cache: Any, *args: Any, **kwargs: Any) -> None:
        original(cache, *args, **kwargs)
        cache.parts.window.cache = cache

    around(patch, WindowKV, "drop", drop)
    around(patch, MambaRadixCache, "__init__", init)


@fault
def a_window_goes_with_its_state(patch: Patch) -> None:
    def evict(cache: Any, num_tokens: int, wanted: Any) -> Any:
        before = [component.num_freed for component in cache.parts.components]
        victims = Victims()
        cache.parts.full.evict(num_tokens, victims)
        for component, start, want in zip(cache.parts.components, before, wanted, strict=True):
            while component.num_freed < start + want and (node := component.pop_victim()) is not None:
                if not node.children and not node.lock_ref:
                    cache.parts.full.take_out(node, victims)
                    continue
                for each in cache.parts.components:
                    each.drop(node)
        cache._release_victims(victims)
        return victims.num_tokens, *(
            part.num_freed - start for part, start in zip(cache.parts.components, before, strict=True)
        )

    patch.setattr(PrefixCache, "_evict", evict)


@fault
def a_state_that_goes_with_its_window_is_not_counted(patch: Patch) -> None:
    def drop(original: Any, mamba: RecurrentState, node: Any) -> None:
        num_freed = mamba.num_freed
        original(mamba, node)
        if node.swa_tombstone and node.children:
            mamba.num_freed = num_freed

    around(patch, RecurrentState, "drop", drop)


@fault
def a_state_that_goes_with_its_window_counts_twice(patch: Patch) -> None:
    def drop(original: Any, mamba: RecurrentState, node: Any) -> None:
        num_freed = mamba.num_freed
        original(mamba, node)
        if node.swa_tombstone and node.children:
            mamba.num_freed += mamba.num_freed - num_freed

    around(patch, RecurrentState, "drop", drop)


@fault
def a_state_that_went_with_its_window_stays_a_candidate(patch: Patch) -> None:
    def drop(original: Any, mamba: RecurrentState, node: Any) -> None:
        had_one = node.mamba_value is not None
        original(mamba, node)
        if had_one and node.mamba_value is None and node.swa_tombstone and node.children:
            mamba._queue.push(node)

    around(patch, RecurrentState, "drop", drop)


@fault
def states_are_wanted_beyond_those_that_went_with_windows(patch: Patch) -> None:
    def evict(original: Any, cache: Any, num_tokens: int, wanted: Any) -> Any:
        first = original(cache, num_tokens, [wanted[0], 0])
        rest = original(cache, 0, [0, wanted[1]])
        return tuple(map(sum, zip(first, rest, strict=True)))

    around(patch, PrefixCache, "_evict", evict)


@fault
def windows_that_went_with_their_leaves_are_wanted_again(patch: Patch) -> None:
    def evict(original: Any, cache: Any, num_tokens: int, wanted: Any) -> Any:
        first = original(cache, num_tokens, [0, 0])
        rest = original(cache, 0, wanted)
        return tuple(map(sum, zip(first, rest, strict=True)))

    around(patch, PrefixCache, "_evict", evict)


@fault
def states_go_before_windows(patch: Patch) -> None:
    def evict(original: Any, cache: Any, num_tokens: int, wanted: Any) -> Any:
        first = original(cache, num_tokens, [0, wanted[1]])
        rest = original(cache, 0, [max(0, wanted[0] - first[1]), 0])
        return tuple(map(sum, zip(first, rest, strict=True)))

    around(patch, PrefixCache, "_evict", evict)


@fault
def as_many_states_go_as_tokens_were_wanted(patch: Patch) -> None:
    around(patch, PrefixCache, "_evict", lambda original, cache, full, wanted: original(cache, full, wanted[::-1]))


@fault
def with_a_window_no_state_is_evicted_for_itself(patch: Patch) -> None:
    around(patch, PrefixCache, "_evict", lambda original, cache, full, wanted: original(cache, full, [wanted[0], 0]))


@fault
def of_an_unlocked_leaf_only_window_and_state_go(patch: Patch) -> None:
    def evict(original: Any, cache: Any, num_tokens: int, wanted: Any) -> Any:
        before = [component.num_freed for component in cache.parts.components]
        victims = Victims()
        cache.parts.full.evict(num_tokens, victims)
        window, states = cache.parts.window, cache.parts.states
        while window.num_freed < before[0] + wanted[0] and (node := window.pop_victim()) is not None:
            window.drop(node)
            states.drop(node)
        cache._release_victims(victims)
        rest = original(cache, 0, [0, max(0, wanted[1] - states.num_freed + before[1])])
        parts = zip(cache.parts.components, before, strict=True)
        return victims.num_tokens + rest[0], *(part.num_freed - start for part, start in parts)

    around(patch, PrefixCache, "_evict", evict)


@fault
def a_leaf_goes_without_its_state(patch: Patch) -> None:
    with_parts(patch, FullKV, "_remove", lambda parts: parts[:1])


@fault
def a_leaf_goes_without_its_window(patch: Patch) -> None:
    with_parts(patch, FullKV, "_remove", lambda parts: parts[1:])


@fault
def a_reset_gives_no_state_back(patch: Patch) -> None:
    with_parts(patch, MambaRadixCache, "reset", lambda parts: parts[:1])


@fault
def a_reset_forgets_no_window(patch: Patch) -> None:
    with_parts(patch, MambaRadixCache, "reset", lambda parts: parts[1:])


# ---------------------------------------------------------------- the proof


def run_all() -> None:
    for seed, page_size, window in RUNS:
        run_random_hybrid_traffic(seed, page_size, window, num_operations=700)


def test_without_a_fault_the_traffic_passes() -> None:
    run_all()


@pytest.mark.parametrize("plant", FAULTS.cases())
def test_a_planted_fault_is_caught(plant: Fault, monkeypatch: Patch) -> None:
    plant(monkeypatch)

    with pytest.raises(TrafficFailed) as failure:
        run_all()

    assert isinstance(failure.value.__cause__, AssertionError), "a comparison or an invariant has to find it"
