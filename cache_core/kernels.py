"""The inner loops of the core: compiled if they were built where the package was installed, else in plain Python.

Both give the same; the compiled ones take less time. `RAYDIX_PLAIN=1` in the environment chooses the plain ones.
"""

from __future__ import annotations

import os

from raydix.cache_core.plain_kernels import (
    Children,
    Key,
    Node,
    Row,
    begins_alike,
    compact,
    cut,
    expand,
    gather,
    grow,
    is_row,
    join,
    lock_path,
    pack,
    take_back,
    unlock_path,
    walk,
)

__all__ = [
    "COMPILED",
    "Children",
    "Key",
    "Node",
    "Row",
    "begins_alike",
    "compact",
    "cut",
    "expand",
    "gather",
    "grow",
    "is_row",
    "join",
    "lock_path",
    "pack",
    "take_back",
    "unlock_path",
    "walk",
]

COMPILED = os.environ.get("RAYDIX_PLAIN", "0") in ("", "0")  # whether the compiled ones are in use

if COMPILED:
    try:
        from raydix.cache_core._kernels import (
            Children,
            Key,
            Node,
            Row,
            begins_alike,
            compact,
            cut,
            expand,
            gather,
            grow,
            is_row,
            join,
            lock_path,
            pack,
            take_back,
            unlock_path,
            walk,
        )
    except ImportError:  # there was no compiler where it was installed
        COMPILED = False
