"""The inner loops of the core: compiled if they were built where the package was installed, else in plain Python.

Both give the same; the compiled ones take less time. `RAYDIX_PLAIN=1` in the environment chooses the plain ones.
"""

from __future__ import annotations

import os

from raydix.cache_core import plain_kernels

__all__ = ["COMPILED", "compact", "expand", "pack", "take_back", "walk"]

COMPILED = os.environ.get("RAYDIX_PLAIN", "0") in ("", "0")  # whether the compiled ones are in use
pack, walk, expand = plain_kernels.pack, plain_kernels.walk, plain_kernels.expand
compact, take_back = plain_kernels.compact, plain_kernels.take_back

if COMPILED:
    try:
        from raydix.cache_core._kernels import compact, expand, pack, take_back, walk
    except ImportError:  # there was no compiler where it was installed
        COMPILED = False
