"""Freeing slots of the tree to their pool, and the error if the pool raises.

A pool raises only if its accounting is broken: the slots are free already, or were never allocated. So the caller first
updates its own state, then frees. Nothing is retried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from raydix.cache_core.errors import SlotError
from raydix.cache_core.kernels import Victims
from raydix.cache_core.tree.packed_slots import join_slots

_MOST_NAMED = 8  # most slots in an error message


class SlotPool(Protocol):
    """The pool that a cache frees evicted slots to."""

    def free(self, indices: torch.Tensor) -> None:
        """Free slots, int64, in whole pages. The pool also frees their window slots, if it has any."""


def call_pool(call: Callable[..., object], *slots: Any, refused: str = "slots that were in the tree") -> None:
    """Call a pool with slots. Each argument is a tensor, an array or one int.

    Raises:
        SlotError: the pool raised. The message has `refused`, the first slots of the last argument, and the pool's
            error.
        AssertionError: the pool found a broken invariant in itself.
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
    """Free the slots of evicted nodes in one call.

    Passes only the first slot of each page if all nodes store these and the pool has `free_pages`.

    Raises:
        SlotError: as `call_pool`.
    """
    if free_pages is not None and (starts := join_slots(victims.rows)).size * page_size == victims.num_tokens:
        call_pool(free_pages, starts, refused=refused)
    else:
        call_pool(free, victims.slots(page_size), refused=refused)


def page_variant(pool: Any, verb: str) -> Callable[[Any], Any] | None:
    """Return the pool's variant of `verb` that takes the first slots of pages (`free_pages` for `free`), or None.

    A subclass or instance that overrides only `verb` also gets None, so that its override is called.
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
    """Return whether the instance overrides a method. Reading `__dict__` instead would make the instance slower."""
    method = getattr(instance, name, None)
    return getattr(method, "__func__", None) is not getattr(type(instance), name, None)
