"""Rows of slots that grow at their end."""

from __future__ import annotations

import numpy as np

from raydix.cache_core.base_prefix_cache import Starts


def append_in_place(row: Starts, room: Starts | None, count: int, more: Starts) -> tuple[Starts, Starts]:
    """The first `count` of a row with `more` behind them, and the room that this is the beginning of.

    That is `room`, which the row must be the beginning of, while it is long enough: it is written over. Else it is new,
    a quarter longer than needed: what grows bit by bit is copied now and then, not each time.
    """
    stop = count + len(more)
    if room is None or len(room) < stop:
        room = np.empty(stop + stop // 4, np.int64)
        room[:count] = row[:count]
    room[count:stop] = more
    return room[:stop], room
