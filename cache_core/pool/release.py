"""Slots on their way back to a pool, which may refuse some of them: those are not to keep the others from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch

from raydix.cache_core.errors import SlotError
from raydix.cache_core.kernels import Victims
from raydix.cache_core.tree.packed_slots import join_slots

_MOST_NAMED = 8  # of what was refused, in the message


def release_slots(free: Callable[[Any], object], slots: Any, num_at_once: int, what: str = "slots") -> None:
    """Have a pool take back a row of slots: in one call, and only if it refuses them in calls of `num_at_once` each.

    Raises:
        SlotError: it refused some, which the message names; it has the others.
    """
    try:
        free(slots)
    except AssertionError:  # no refusal, but a state that cannot be
        raise
    except Exception:
        release_in_parts(free, num_at_once, what, slots)


def taking_pages(pool: Any, verb: str) -> Callable[[Any], Any] | None:
    """How a pool takes by the first slots of pages what `verb` takes by slots. None if it does not, or if whoever gave
    it a `verb` of its own, a class that inherits say, left that out: it is to come by what is handed back."""
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
    """Whether it has a method that its class does not give it. Its `__dict__`, if asked for, would slow it down."""
    method = getattr(instance, name, None)
    return getattr(method, "__func__", None) is not getattr(type(instance), name, None)


def release_victims(
    rows: Victims,
    free: Callable[[torch.Tensor], object],
    free_pages: Callable[[Any], object] | None,
    page_size: int,
    what: str = "slots",
) -> None:
    """Release the slots of victims: by the first slot of each page, if all nodes pack those and the pool takes them."""
    if free_pages is not None and (starts := join_slots(rows.rows)).size * page_size == rows.num_tokens:
        release_slots(free_pages, starts, 1, what)
    else:
        release_slots(free, rows.slots(page_size), page_size, what)


def release_in_parts(free: Callable[[Any], object], num_at_once: int, what: str, slots: Any) -> None:
    """`release_slots` of slots that were refused in one call."""
    release_each(free, (slots[at : at + num_at_once] for at in range(0, len(slots), num_at_once)), what)


def release_each(free: Callable[[Any], object], parts: Iterable[Any], what: str) -> None:
    """`release_slots` in a call for each part: a slot, or a row of slots, which the first of them names."""
    refused: list[tuple[Any, Exception]] = []
    for part in parts:
        try:
            free(part)
        except AssertionError:
            raise
        except Exception as error:
            refused.append((part, error))
    if refused:
        firsts = _named([part if isinstance(part, int) else int(part[0]) for part, _ in refused])
        raise SlotError(f"the pool refused {what} that were in the tree: {firsts}: {refused[0][1]}") from refused[0][1]


def _named(slots: Sequence[int]) -> str:
    """Slots in a message: the first of them."""
    return ", ".join(map(str, slots[:_MOST_NAMED])) + ", ..." * (len(slots) > _MOST_NAMED)


class KeptRefusal:
    """What a pool refused while something else was done, which is not to fail for it: told by the next eviction.

    A block under it ends at a refusal, which is kept.
    """

    def __init__(self) -> None:
        self._error: SlotError | None = None  # the first since it was told

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if not isinstance(error, SlotError):
            return False
        self._error = self._error or error
        return True

    def moved(self, transfer: Callable[[Any, Any], object], src: torch.Tensor, dst: torch.Tensor) -> bool:
        """Have a pool move window halves from slots to others, in the tree; whether it did. Keep what it refuses."""
        with self:
            try:
                transfer(src, dst)
            except AssertionError:
                raise
            except Exception as error:
                named = _named(dst.tolist())
                raise SlotError(
                    f"the pool refused to move window halves to slots that are in the tree: {named}: {error}"
                ) from error
            return True
        return False

    def tell(self) -> None:
        """Raise what was refused, if anything was, and forget it."""
        error, self._error = self._error, None
        if error is not None:
            raise error
