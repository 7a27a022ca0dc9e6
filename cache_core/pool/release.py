"""Freeing slots of the tree to their pool, and the error if the pool refuses them.

A pool refuses slots only if some owner freed them before, or never allocated them: the pool's bookkeeping is broken. So
the caller first brings its own state into order, then frees. Nothing is retried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from raydix.cache_core.errors import SlotError
from raydix.cache_core.kernels import Victims
from raydix.cache_core.tree.packed_slots import join_slots

_MOST_NAMED = 8  # slots in an error message


class SlotPool(Protocol):
    """The pool that a cache frees evicted slots to."""

    def free(self, indices: torch.Tensor) -> None:
        """Take back slots, int64, whole pages of them, with whatever else hangs on them."""


def call_pool(call: Callable[..., object], *slots: Any, refused: str = "slots that were in the tree") -> None:
    """Call a pool with slots: a tensor, an array or one int each.

    Raises:
        SlotError: the pool raised. The message has `refused`, the last argument's first slots, and the pool's reason.
        AssertionError: the pool found a broken invariant of its own.
    """
    try:
        call(*slots)
    except AssertionError:
        raise
    except Exception as error:
        raise SlotError(f"the pool refused {refused}: {_named(slots[-1])}: {error}") from error


def _named(slots: int | Sequence[int] | torch.Tensor) -> str:
    named = [slots] if isinstance(slots, int) else [int(slot) for slot in slots[: _MOST_NAMED + 1]]
    return ", ".join(map(str, named[:_MOST_NAMED])) + ", ..." * (len(named) > _MOST_NAMED)


def release_victims(
    victims: Victims,
    free: Callable[[torch.Tensor], object],
    free_pages: Callable[[Any], object] | None,
    page_size: int,
    refused: str = "slots that were in the tree",
) -> None:
    """Free the slots of victims in one call: by the first slot of each page, if all nodes pack those and the pool can.

    Raises:
        SlotError: as `call_pool`.
    """
    if free_pages is not None and (starts := join_slots(victims.rows)).size * page_size == victims.num_tokens:
        call_pool(free_pages, starts, refused=refused)
    else:
        call_pool(free, victims.slots(page_size), refused=refused)


def page_variant(pool: Any, verb: str) -> Callable[[Any], Any] | None:
    """Return the pool's variant of `verb` that takes the first slots of pages (`free_pages` for `free`); None without.

    A subclass that overrides only `verb`, or an instance that has its own, gets None, so that the override is called.
    """
    in_pages = f"{verb}_pages"
    found: Callable[[Any], Any] | None = getattr(pool, in_pages, None)
    if found is None or _is_set_on(pool, in_pages):
        return found
    if _is_set_on(pool, verb):
        return None
    for owner in type(pool).__mro__:
        if in_pages in owner.__dict__:
            break
        if verb in owner.__dict__:
            return None
    return found


def _is_set_on(instance: Any, name: str) -> bool:
    """Return whether the instance has its own method. To ask for its `__dict__` would slow the instance down."""
    method = getattr(instance, name, None)
    return getattr(method, "__func__", None) is not getattr(type(instance), name, None)
